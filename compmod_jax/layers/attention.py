"""Multi-head attention whose heads may compete for every query position."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core.intermediates import OFF, Taps
from compmod_jax.core.sharding import platform_of
from compmod_jax.layers.attention_mask import AttentionMask
from compmod_jax.layers.context import Context
from compmod_jax.layers.dropout import Dropout
from compmod_jax.layers.head_projections import IntoHeads, OutOfHeads
from compmod_jax.layers.kv_cache import (
  KVCache,
  add_to_cache,
  as_cache,
  attend_cached,
  empty_cache,
)
from compmod_jax.layers.positions import Positions, RelativePositions, rotate
from compmod_jax.mechanisms.competition.router import CompetitionConfig, Router, scale_heads
from compmod_jax.mechanisms.head_gate import HeadGate, gate_heads


def attend(
  query: Float[Array, "batch time heads head_dim"],
  key: Float[Array, "batch keys heads head_dim"],
  value: Float[Array, "batch keys heads head_dim"],
  mask: AttentionMask = AttentionMask(),
  *,
  bias: Float[Array, "#batch #heads #time #keys"] | None = None,
  dropout: Callable[[jax.Array], jax.Array] | None = None,
  intermediates: Taps = OFF,
) -> Float[Array, "batch time heads head_dim"]:
  r"""Attention, :math:`\mathrm{softmax}(Q K^T / \sqrt{D_h}) V`, in each head.

  The intermediate `attention` [batch, heads, time, keys] holds the probabilities; when it is asked
  for, or when probabilities are dropped, they are formed explicitly, else the fused operation runs.

  Args:
    query: one row a query position.
    key: one row a key position.
    value: one row a key position.
    mask: which keys a query may read.
    bias: added to the logits.
    dropout: applied to the probabilities.
    intermediates: activations to read or change.
  """
  explicit = dropout is not None or intermediates.wants("attention")
  if not explicit and mask.only_causal:
    return jax.nn.dot_product_attention(query, key, value, bias, is_causal=True)
  allowed = mask.dense(query.shape[1], key.shape[1])
  if not explicit:
    return jax.nn.dot_product_attention(query, key, value, bias, allowed)
  scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
  scores = scores / jnp.sqrt(jnp.float32(query.shape[-1]))
  scores = scores if bias is None else scores + bias
  if allowed is not None:
    scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
  probabilities = intermediates("attention", jax.nn.softmax(scores, axis=-1)).astype(value.dtype)
  if dropout is not None:
    probabilities = dropout(probabilities)
  return jnp.einsum("bhts,bshd->bthd", probabilities, value)


class Attention(nn.Module):
  """Multi-head attention; with `competition`, its heads compete for every query position.

  Intermediates: `attention` [batch, heads, time, keys]; `heads` and `heads_scaled`
  [batch, time, heads, head_dim] before and after the competition (equal without one); with a
  competition also `router/scores` and `router/weights` [batch, time, heads]; with gates
  `head_gates` [batch, time, heads], which `heads` includes.

  Attributes:
    dim: model width, a multiple of `heads`.
    heads: number of heads.
    competition: how heads compete; `None` for plain attention.
    cross: queries come from one sequence, keys and values from another.
    tied_key_value: keys are values, too, in self-attention.
    positions: `rotary` and `relative` act on queries and keys of self-attention.
    gated: every head's output has a sigmoid gate.
    dropout: rate on attention probabilities.
    dtype: compute type.
  """

  dim: int
  heads: int
  competition: CompetitionConfig | None = None
  cross: bool = False
  tied_key_value: bool = False
  positions: Positions = "learned"
  gated: bool = False
  dropout: float = 0.0
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes the projections and the router."""
    if self.cross:
      self.query = IntoHeads(1, self.heads, self._head_dim, dtype=self.dtype)
      self.key_value = IntoHeads(2, self.heads, self._head_dim, dtype=self.dtype)
    else:
      projections = 2 if self.tied_key_value else 3
      self.query_key_value = IntoHeads(projections, self.heads, self._head_dim, dtype=self.dtype)
      if self.positions == "relative":
        self.relative = RelativePositions(self.dim, self.heads, dtype=self.dtype)
    self.drop = Dropout(self.dropout)
    if self.gated:
      self.head_gate = HeadGate(self.heads, dtype=self.dtype)
    if self.competition is not None:
      self.router = Router(self.heads, self.competition, dtype=self.dtype)
    self.output = OutOfHeads(self.dim, dtype=self.dtype)

  @property
  def _head_dim(self) -> int:
    return self.dim // self.heads

  def initial_state(self, batch: int, keys: int) -> KVCache:
    """An empty key/value cache of self-attention: a prompt's keys, and `beams` for every step.

    What a beam wrote stays where it is when beams change places; `ancestor_mask` says which of it
    belongs to whom.
    """
    return empty_cache(batch, keys, self.heads, self._head_dim, self.dtype)

  def memory_state(self, memory: Float[Array, "batch keys embed"]) -> KVCache:
    """Keys and values of a memory for cross attention, computed once for all steps."""
    return as_cache(*self.key_value(memory))

  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    state: KVCache | None = None,
    memory: Float[Array, "batch keys embed"] | None = None,
    *,
    bias: Float[Array, "#batch #heads #time #keys"] | None = None,
    ctx: Context = Context(),
  ) -> tuple[Float[Array, "batch time embed"], KVCache | None]:
    """Attends from `inputs` to themselves and what the state holds, or to a memory (cross).

    Args:
      inputs: queries' activations; also keys' and values' in self-attention. Where the newest
        position is decoded, the beams of an example are its positions.
      state: keys and values: of self-attention those of earlier positions, to which these are
        added; of cross attention those of the memory.
      memory: keys' and values' activations in cross attention, where there is no state.
      bias: added to the logits.
      ctx: masks, where decoding stands, dropout, intermediates.

    Returns:
      The outputs, and the next state; None if none was given.
    """
    beside = self._beside(inputs, ctx.intermediates)
    if self.cross:
      (query, *hidden), own = self.query(inputs, beside), None
      heads = self._attend_memory(query, state, memory, bias, ctx)
    else:
      query, key, own, *hidden = self._project(inputs, beside)
      heads, state = self._attend_self(query, key, own, state, bias, ctx)
    if self.gated:
      heads = gate_heads(heads, ctx.intermediates("head_gates", self.head_gate(inputs)))
    return self._compete(inputs, heads, own, *hidden, ctx=ctx), state

  def _attend_memory(
    self,
    query: jax.Array,
    state: KVCache | None,
    memory: jax.Array | None,
    bias: jax.Array | None,
    ctx: Context,
  ) -> jax.Array:
    """Heads of cross attention."""
    if state is not None:
      return attend_cached(query, state, ctx.memory_mask, intermediates=ctx.intermediates)
    assert memory is not None, "cross attention reads a memory, or a state that holds it"
    key, value = self.key_value(memory)
    return self._attend(query, key, value, AttentionMask(explicit=ctx.memory_mask), bias, ctx)

  def _attend_self(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    state: KVCache | None,
    bias: jax.Array | None,
    ctx: Context,
  ) -> tuple[jax.Array, KVCache | None]:
    """Heads of self-attention, and the state with these keys and values."""
    places = ctx.places
    if self.positions == "rotary" and places is not None:
      query = rotate(query, places.queries)
      key = rotate(key, places.queries)
    if self.positions == "relative" and places is not None:
      query, relative = self.relative(query, places)
      bias = relative if bias is None else bias + relative
    if state is not None:
      state = add_to_cache(state, as_cache(key, value), jnp.asarray(ctx.start, jnp.int32))
    newest = ctx.newest
    if state is None or newest is None:  # whole sequences, or a prompt, before which nothing stands
      return self._attend(query, key, value, ctx.mask, bias, ctx), state
    heads = attend_cached(
      query,
      state,
      newest.past,
      bias=bias,
      filled=newest.start + query.shape[1],
      intermediates=ctx.intermediates,
    )
    return heads, state

  def _attend(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    bias: jax.Array | None,
    ctx: Context,
  ) -> jax.Array:
    drop = None
    if self.dropout > 0 and not ctx.deterministic:
      drop = functools.partial(self.drop, deterministic=False)
    return attend(query, key, value, mask, bias=bias, dropout=drop, intermediates=ctx.intermediates)

  def _project(self, inputs: jax.Array, beside: Any = None) -> tuple[jax.Array, ...]:
    """Query, key and value of self-attention, and what is made beside them."""
    query, key, *others = self.query_key_value(inputs, beside)
    return (query, key, key, *others) if self.tied_key_value else (query, key, *others)

  def _beside(self, inputs: jax.Array, intermediates: Taps) -> tuple[jax.Array, jax.Array] | None:
    """The router's first layer, if one product makes it and queries, keys and values.

    Such a product has one type, and in float32 the precision of all the model's products, which is
    that of float32 on a CPU alone.
    """
    config = self.competition
    if config is None or not self._fused(intermediates):
      return None
    exact = jnp.dtype(self.dtype) == jnp.float32 and platform_of(inputs) == "cpu"
    return self.router.first(inputs.shape[-1]) if exact or config.dtype == "model" else None

  def _fused(self, intermediates: Taps) -> bool:
    """Whether nothing is formed between heads and output projection."""
    config = self.competition
    if config is None or self.heads == 1 or config.routing == "plain":
      return False
    return config.inactive == "null" and not intermediates.wants("heads_scaled")

  def _compete(
    self,
    inputs: jax.Array,
    heads: jax.Array,
    value: jax.Array | None,
    hidden: jax.Array | None = None,
    *,
    ctx: Context,
  ) -> jax.Array:
    """Scales the heads' outputs by the competition's weights and projects them.

    `hidden` is what the router's first layer makes, where that is known already.
    """
    intermediates, deterministic = ctx.intermediates, ctx.deterministic
    fused = self._fused(intermediates)
    heads, config = intermediates("heads", heads), self.competition
    if config is None:
      return self.output(intermediates("heads_scaled", heads))
    router = intermediates.scope("router")
    if fused:
      hidden = self.router.hidden_of(inputs) if hidden is None else hidden
      weights = self.router.weights_of(hidden, deterministic=deterministic, taps=router)
      return self.output(heads, weights * self.heads if config.rescale else weights)
    selection = self.router(inputs, deterministic=deterministic, taps=router)
    fill = value if config.inactive == "value" else None
    heads = scale_heads(heads, selection, rescale=config.rescale, values=fill)
    return self.output(intermediates("heads_scaled", heads))
