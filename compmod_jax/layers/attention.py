"""Multi-head attention whose heads may compete for every query position."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from compmod_jax.core.intermediates import OFF, Taps
from compmod_jax.core.sharding import platform_of
from compmod_jax.layers.cached_attention import (
  Cache,
  add_to_cache,
  as_cache,
  attend_cached,
  empty_cache,
)
from compmod_jax.layers.dropout import Dropout
from compmod_jax.layers.head_projections import IntoHeads, OutOfHeads
from compmod_jax.mechanisms.competition.router import CompetitionConfig, Router, scale_heads


def attend(
  query: Float[Array, "batch time heads head_dim"],
  key: Float[Array, "batch keys heads head_dim"],
  value: Float[Array, "batch keys heads head_dim"],
  mask: Bool[Array, "#batch #heads #time #keys"] | None,
  *,
  bias: Float[Array, "#batch #heads #time #keys"] | None = None,
  causal: bool = False,
  dropout: Callable[[jax.Array], jax.Array] | None = None,
  taps: Taps = OFF,
) -> Float[Array, "batch time heads head_dim"]:
  r"""Attention, :math:`\mathrm{softmax}(Q K^T / \sqrt{D_h}) V`, each head by itself.

  The site `attention` [batch, heads, time, keys] holds the probabilities; when it is asked for, or
  when probabilities are dropped, they are formed explicitly, else the fused operation runs.

  Args:
    query: one row a query position.
    key: one row a key position.
    value: one row a key position.
    mask: true where a query may look.
    bias: added to the logits.
    causal: also hide later positions.
    dropout: applied to the probabilities.
    taps: sites to read or change.
  """
  if dropout is None and not taps.wants("attention"):
    return jax.nn.dot_product_attention(query, key, value, bias, mask, is_causal=causal)
  scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
  scores = scores / jnp.sqrt(jnp.float32(query.shape[-1]))
  scores = scores if bias is None else scores + bias
  if causal:
    visible = jnp.tril(jnp.ones((1, 1, query.shape[1], key.shape[1]), bool))
    mask = visible if mask is None else mask & visible
  if mask is not None:
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
  probabilities = taps("attention", jax.nn.softmax(scores, axis=-1)).astype(value.dtype)
  if dropout is not None:
    probabilities = dropout(probabilities)
  return jnp.einsum("bhts,bshd->bthd", probabilities, value)


class Attention(nn.Module):
  """Multi-head attention; with `competition`, its heads compete for every query position.

  Sites: `attention` [batch, heads, time, keys]; `heads` and `heads_scaled`
  [batch, time, heads, head_dim] before and after the competition (equal without one); with a
  competition also `router/scores` and `router/weights` [batch, time, heads].

  Attributes:
    dim: model width, a multiple of `heads`.
    heads: number of heads.
    competition: how heads compete; `None` for plain attention.
    cross: queries come from one sequence, keys and values from another.
    tied_key_value: keys are values, too, in self-attention.
    dropout: rate on attention probabilities.
    dtype: compute type.
  """

  dim: int
  heads: int
  competition: CompetitionConfig | None = None
  cross: bool = False
  tied_key_value: bool = False
  dropout: float = 0.0
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes the projections and the router."""
    head_dim = self.dim // self.heads
    if self.cross:
      self.query = IntoHeads(1, self.heads, head_dim, dtype=self.dtype)
      self.key_value = IntoHeads(2, self.heads, head_dim, dtype=self.dtype)
    else:
      projections = 2 if self.tied_key_value else 3
      self.query_key_value = IntoHeads(projections, self.heads, head_dim, dtype=self.dtype)
    self.drop = Dropout(self.dropout)
    if self.competition is not None:
      self.router = Router(self.heads, self.competition, dtype=self.dtype)
    self.output = OutOfHeads(self.dim, dtype=self.dtype)

  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    memory: Float[Array, "batch keys embed"] | None = None,
    *,
    mask: Bool[Array, "#batch #heads #time #keys"] | None = None,
    bias: Float[Array, "#batch #heads #time #keys"] | None = None,
    causal: bool = False,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch time embed"]:
    """Attends from `inputs` to `memory` (cross) or to themselves.

    Args:
      inputs: queries' activations; also keys' and values' in self-attention.
      memory: keys' and values' activations in cross attention.
      mask: true where a query may look.
      bias: added to the logits.
      causal: hide later positions.
      deterministic: no dropout.
      taps: sites to read or change.
    """
    beside = self._beside(inputs, taps)
    if memory is not None:
      (query, *hidden), (key, value) = self.query(inputs, beside), self.key_value(memory)
    else:
      query, key, value, *hidden = self._project(inputs, beside)
    drop = None
    if self.dropout > 0 and not deterministic:
      drop = functools.partial(self.drop, deterministic=False)
    heads = attend(query, key, value, mask, bias=bias, causal=causal, dropout=drop, taps=taps)
    own = None if self.cross else value
    return self._compete(inputs, heads, own, *hidden, deterministic=deterministic, taps=taps)

  def _project(self, inputs: jax.Array, beside: Any = None) -> tuple[jax.Array, ...]:
    """Query, key and value of self-attention, and what is made beside them."""
    query, key, *others = self.query_key_value(inputs, beside)
    return (query, key, key, *others) if self.tied_key_value else (query, key, *others)

  def _beside(self, inputs: jax.Array, taps: Taps) -> tuple[jax.Array, jax.Array] | None:
    """The router's first layer, if one product makes it and queries, keys and values.

    Such a product has one type, and in float32 the precision of all the model's products, which is
    that of float32 on a CPU alone.
    """
    config = self.competition
    if config is None or not self._fused(taps):
      return None
    exact = jnp.dtype(self.dtype) == jnp.float32 and platform_of(inputs) == "cpu"
    return self.router.first(inputs.shape[-1]) if exact or config.dtype == "model" else None

  def _fused(self, taps: Taps) -> bool:
    """Whether nothing is formed between heads and output projection."""
    config = self.competition
    if config is None or self.heads == 1 or config.routing == "plain":
      return False
    return config.inactive == "null" and not taps.wants("heads_scaled")

  def memory_cache(self, memory: Float[Array, "batch keys embed"]) -> Cache:
    """Keys and values of a memory, computed once for all steps."""
    return as_cache(*self.key_value(memory))

  def empty_cache(self, batch: int, keys: int) -> Cache:
    """Room for `keys` positions: those of a prompt, and `beams` for every step that follows.

    What a beam wrote stays where it is when beams change places; `ancestor_mask` says which of it
    belongs to whom.
    """
    return empty_cache(batch, keys, self.heads, self.dim // self.heads, self.dtype)

  def prefill(
    self,
    inputs: Float[Array, "batch time embed"],
    cache: Cache,
    *,
    mask: Bool[Array, "#batch #heads #time #keys"] | None,
    bias: Float[Array, "#batch #heads #time #keys"] | None = None,
    taps: Taps = OFF,
  ) -> tuple[Float[Array, "batch time embed"], Cache]:
    """Self-attention of a prompt, whose keys and values are the first in the cache."""
    query, key, value, *hidden = self._project(inputs, self._beside(inputs, taps))
    cache = add_to_cache(cache, as_cache(key, value), jnp.int32(0))
    heads = attend(query, key, value, mask, bias=bias, taps=taps)
    return self._compete(inputs, heads, value, *hidden, taps=taps), cache

  def step_memory(
    self,
    inputs: Float[Array, "batch beams embed"],
    cache: Cache,
    mask: Bool[Array, "batch 1 #beams keys"],
    *,
    taps: Taps = OFF,
  ) -> Float[Array, "batch beams embed"]:
    """One decoding step of cross attention: the beams of an example are its query positions."""
    query, *hidden = self.query(inputs, self._beside(inputs, taps))
    heads = attend_cached(query, cache, mask, taps=taps)
    return self._compete(inputs, heads, None, *hidden, taps=taps)

  def step_self(
    self,
    inputs: Float[Array, "batch beams embed"],
    cache: Cache,
    mask: Bool[Array, "batch 1 #beams keys"],
    start: Array,
    *,
    bias: Float[Array, "batch heads 1 keys"] | None = None,
    taps: Taps = OFF,
  ) -> tuple[Float[Array, "batch beams embed"], Cache]:
    """One decoding step of self-attention: adds the newest position to the cache and reads it.

    Args:
      inputs: activations of the newest position of every beam.
      cache: keys and values of the positions so far.
      mask: which of them each beam descends from; see `ancestor_mask`.
      start: where in the cache those of the first beam go, a scalar.
      bias: added to the logits.
      taps: sites to read or change.
    """
    query, key, value, *hidden = self._project(inputs, self._beside(inputs, taps))
    cache = add_to_cache(cache, as_cache(key, value), start)
    filled = start + inputs.shape[1]
    heads = attend_cached(query, cache, mask, bias=bias, filled=filled, taps=taps)
    return self._compete(inputs, heads, value, *hidden, taps=taps), cache

  def _compete(
    self,
    inputs: jax.Array,
    heads: jax.Array,
    value: jax.Array | None,
    hidden: jax.Array | None = None,
    *,
    deterministic: bool = True,
    taps: Taps,
  ) -> jax.Array:
    """Scales the heads' outputs by the competition's weights and projects them.

    `hidden` is what the router's first layer makes, where that is known already.
    """
    fused = self._fused(taps)
    heads, router, config = taps("heads", heads), taps.scope("router"), self.competition
    if config is None:
      return self.output(taps("heads_scaled", heads))
    if fused:
      hidden = self.router.hidden_of(inputs) if hidden is None else hidden
      weights = self.router.weights_of(hidden, deterministic=deterministic, taps=router)
      return self.output(heads, weights * self.heads if config.rescale else weights)
    selection = self.router(inputs, deterministic=deterministic, taps=router)
    fill = value if config.inactive == "value" else None
    heads = scale_heads(heads, selection, rescale=config.rescale, values=fill)
    return self.output(taps("heads_scaled", heads))
