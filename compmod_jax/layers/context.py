"""What layers are given besides activations and states."""

import dataclasses

import jax
from jaxtyping import Array, Bool, Int

from compmod_jax.core.intermediates import OFF, Taps
from compmod_jax.layers.attention_mask import AttentionMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
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
    places: where queries and keys stand, for positions that are not added to
      embeddings.
    deterministic: no dropout.
    intermediates: activations to read or change.
  """

  mask: AttentionMask = AttentionMask()
  memory_mask: Bool[Array, "batch 1 1 keys"] | None = None
  same_segment: Bool[Array, "#batch time before"] | None = None
  newest: Newest | None = None
  places: Places | None = None
  deterministic: bool = True
  intermediates: Taps = OFF

  def scope(self, name: str) -> "Context":
    """The same context inside the submodule `name`."""
    return dataclasses.replace(self, intermediates=self.intermediates.scope(name))

  @property
  def start(self) -> jax.Array | int:
    """Where in the state the first position of this pass goes."""
    return 0 if self.newest is None else self.newest.start
