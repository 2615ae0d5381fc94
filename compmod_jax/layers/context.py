"""What layers are given besides activations and states: above all attention masks."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.kernels.attention.distances import Bias
from compmod_jax.kernels.attention.visibility import HIDDEN, SHARED, Visibility

Dense = Bool[Array, "#batch #heads #queries #keys"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
  """Which keys a query may read: those that every field allows.

  A kernel can see from the fields which blocks of keys nobody reads; `dense` forms the mask for
  those that cannot. `a & b` allows what both allow, `a | b` what one of them does.

  Attributes:
    causal: a query reads no later position.
    valid: true where a key is a token, not padding.
    segments: number of the segment of every position behind the prefix, ascending; a query reads
      its own segment and segment 0.
    prefix: positions in front of the text that all queries read. Their own queries read no text
      where the mask is causal, and segment 0 alone where there are segments, so that no segment
      reads another one through them.
    window: where the mask is causal, a query reads its own position and those right before it, so
      many in all, and the prefix; 0: all before.
    explicit: any other rule, formed in full.
    others: masks that have to allow it, too.
    alternatives: masks one of which has to allow it.
  """

  causal: bool = dataclasses.field(default=False, metadata={"static": True})
  valid: Bool[Array, "batch keys"] | None = None
  segments: Int[Array, "#batch time"] | None = None
  prefix: int = dataclasses.field(default=0, metadata={"static": True})
  window: int = dataclasses.field(default=0, metadata={"static": True})
  explicit: Dense | None = None
  others: tuple["AttentionMask", ...] = ()
  alternatives: tuple["AttentionMask", ...] = ()

  @property
  def only_causal(self) -> bool:
    """Whether nothing counts but the order of positions."""
    composed = self.prefix or self.window or self.others or self.alternatives
    return self.causal and not composed and not jax.tree.leaves(self)

  def visibility(self) -> Visibility | None:
    """The mask as kernels know it; None if they know no such mask.

    That is order and numbers of segments, and which keys are tokens.
    """
    valid, explicit = self.valid, self.explicit
    if explicit is not None and valid is None and explicit.shape[1:3] == (1, 1):
      valid, explicit = explicit[:, 0, 0], None
    if explicit is not None or self.others or self.alternatives:
      return None
    if self.segments is None:
      numbers = None
      read = None if valid is None else jnp.where(valid, SHARED, HIDDEN)
    else:
      numbers = jnp.pad(self.segments, ((0, 0), (self.prefix, 0)), constant_values=SHARED)
      read = numbers if valid is None else jnp.where(valid, numbers, HIDDEN)
    window = self.window if self.causal and self.window else None
    return Visibility(self.causal, self.prefix, window, query_ids=numbers, key_ids=read)

  def __and__(self, other: "AttentionMask") -> "AttentionMask":
    """What both allow."""
    return dataclasses.replace(self, others=(*self.others, other))

  def __or__(self, other: "AttentionMask") -> "AttentionMask":
    """What one of the two allows."""
    return AttentionMask(alternatives=(self, other))

  def __getitem__(self, rows: slice) -> "AttentionMask":
    """The mask of these rows of the batch."""
    return jax.tree.map(lambda leaf: leaf[rows] if len(leaf) > 1 else leaf, self)

  def dense(self, queries: int, keys: int) -> Dense | None:
    """The mask in full; None where every query reads every key.

    Args:
      queries: number of query positions.
      keys: number of key positions, the prefix included.
    """
    parts = [mask.dense(queries, keys) for mask in self.others]
    if self.valid is not None:
      parts.append(self.valid[:, None, None, :])
    if self.causal:
      seen = jnp.tril(jnp.ones((queries, keys), bool))
      seen = jnp.triu(seen, 1 - self.window) if self.window else seen
      parts.append(seen.at[:, : self.prefix].set(True)[None, None])
    if self.segments is not None:
      parts.append(_same_segment(self.segments, self.prefix))
    if self.explicit is not None:
      parts.append(self.explicit)
    if self.alternatives:
      either = [mask.dense(queries, keys) for mask in self.alternatives]
      if not any(mask is None for mask in either):
        parts.append(functools.reduce(operator.or_, either))
    parts = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, parts) if parts else None


def _same_segment(segments: Int[Array, "#batch time"], prefix: int) -> Dense:
  """Where queries read keys of their segment, of segment 0, or of the prefix."""
  same = (segments[:, :, None] == segments[:, None, :]) | (segments == 0)[:, None, :]
  same = jnp.pad(same, ((0, 0), (0, 0), (prefix, 0)), constant_values=True)
  if not prefix:
    return same[:, None]
  shared = jnp.pad(segments == 0, ((0, 0), (prefix, 0)), constant_values=True)
  shared = jnp.broadcast_to(shared[:, None], (len(same), prefix, same.shape[-1]))
  return jnp.concatenate([shared, same], axis=1)[:, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionIds:
  """Where queries and keys of self-attention stand in their texts, for positions that are not
  added to embeddings.

  Attributes:
    queries: of every query position.
    keys: of every key; those in the state, where newest positions are decoded.
    length: all of them are below this number.
  """

  queries: Int[Array, "#batch queries"]
  keys: Int[Array, "#batch keys"]
  length: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Newest:
  """The newest position of every beam, which is decoded while the state holds those before.

  Attributes:
    start: where in the state what is made of the first beam goes, a scalar.
    past: which keys of the state each beam reads, itself included.
    neighbours: where in the state the positions before it are, the nearest first.
    same_segment: whether those are there, and of the same segment.
  """

  start: Array
  past: Bool[Array, "batch 1 #beams keys"]
  neighbours: Int[Array, "batch beams before"] | None = None
  same_segment: Bool[Array, "batch beams before"] | None = None


@dataclasses.dataclass(frozen=True)
class Context:
  """What the layers of one pass are given besides activations and states.

  Attributes:
    mask: which keys self-attention reads, where whole sequences are computed.
    memory_mask: true where an encoder's output is a token, for cross attention.
    same_segment: which of the positions before each, the nearest first, a convolution mixes in;
      None: all.
    newest: where decoding stands; None: whole sequences, at the start of the state if there is one.
    position_ids: where queries and keys stand, for positions that are not added to embeddings;
      None: one behind the other, from 0.
    position_bias: added to the logits of self-attention in all layers.
    layer: number of the layer.
    depth: how many layers every sequence goes through; None: all.
    deterministic: no dropout.
    intermediates: activations to read or change.
  """

  mask: AttentionMask = AttentionMask()
  memory_mask: Bool[Array, "batch 1 1 keys"] | None = None
  same_segment: Bool[Array, "#batch time before"] | None = None
  newest: Newest | None = None
  position_ids: PositionIds | None = None
  position_bias: Bias | None = None
  layer: int = 0
  depth: Int[Array, " batch"] | None = None
  deterministic: bool = True
  intermediates: Intermediates = OFF

  def scope(self, name: str) -> "Context":
    """The same context inside the submodule `name`."""
    return dataclasses.replace(self, intermediates=self.intermediates.scope(name))

  def of_layer(self, number: int) -> "Context":
    """The same context inside a layer, `layer_<number>`."""
    return dataclasses.replace(self.scope(f"layer_{number}"), layer=number)

  @property
  def start(self) -> jax.Array | int:
    """Where in the state the first position of this pass goes."""
    return 0 if self.newest is None else self.newest.start
