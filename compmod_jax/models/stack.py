"""A stack of self-attention layers, whole or step by step, with gates where there are any."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core.intermediates import OFF, Taps
from compmod_jax.layers.block import Layer, run_layer
from compmod_jax.layers.convolution import Near
from compmod_jax.mechanisms.modulation import UNGATED, Gates
from compmod_jax.models.stack_config import Norm, TextStackConfig

StackCache = dict[str, dict[str, Any]]


class Stack(nn.Module):
  """Layers of one side of a model; which of them run is for the caller to say.

  Sites: `layer_<i>/...`; see `Layer` and `Attention`.

  Attributes:
    config: sizes and options.
    side: the stack's name.
    norm: whether sub-layers are normalised before or after.
    tied_key_value: whether keys are values, too.
  """

  config: TextStackConfig
  side: str
  norm: Norm
  tied_key_value: bool = False

  def setup(self):
    """Makes the layers."""
    c = self.config
    ((place, _),) = c.attention(self.side)
    self.layer = [
      Layer(
        c,
        self.norm,
        place,
        tied_key_value=self.tied_key_value,
        experts=c.experts_in(self.side, i),
        convolution=c.convolution,
      )
      for i in range(c.layers(self.side))
    ]

  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    mask: Bool[Array, "#batch 1 #time time"],
    near: Bool[Array, "#batch time before"] | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    gates: Mapping[int, Gates] | None = None,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The stream after layers `start` to `stop` - 1 (the last one, if not given)."""
    for i in range(start, self._stop(stop)):
      x = run_layer(
        self.layer[i],
        *(x, mask, None, None, (gates or {}).get(i, UNGATED), near),
        remat=self.config.remat,
        deterministic=deterministic,
        taps=taps.scope(f"layer_{i}"),
      )
    return x

  def empty_cache(self, batch: int, keys: int) -> StackCache:
    """What decoding step by step keeps of every layer; see `Attention.empty_cache`."""
    return {str(i): layer.empty_cache(batch, keys) for i, layer in enumerate(self.layer)}

  def prefill(
    self,
    x: Float[Array, "batch time embed"],
    cache: StackCache,
    mask: Bool[Array, "#batch 1 #time time"],
    near: Bool[Array, "#batch time before"] | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    gates: Mapping[int, Gates] | None = None,
    taps: Taps = OFF,
  ) -> tuple[Float[Array, "batch time embed"], StackCache]:
    """The same at the positions of a prompt, which are written into the cache."""
    cache = dict(cache)
    for i in range(start, self._stop(stop)):
      inner, gate = taps.scope(f"layer_{i}"), (gates or {}).get(i, UNGATED)
      x, cache[str(i)] = self.layer[i].prefill(x, cache[str(i)], mask, gate, near, taps=inner)
    return x, cache

  def step(
    self,
    x: Float[Array, "batch beams embed"],
    cache: StackCache,
    place: Array,
    past: Bool[Array, "batch 1 #beams keys"],
    near: Near | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    gates: Mapping[int, Gates] | None = None,
    taps: Taps = OFF,
  ) -> tuple[Float[Array, "batch beams embed"], StackCache]:
    """The same at the newest position of every beam, which goes to `place` in the cache."""
    cache = dict(cache)
    for i in range(start, self._stop(stop)):
      inner, gate = taps.scope(f"layer_{i}"), (gates or {}).get(i, UNGATED)
      x, cache[str(i)] = self.layer[i].step(
        x, cache[str(i)], place, past, None, gate, near, taps=inner
      )
    return x, cache

  def _stop(self, stop: int | None) -> int:
    return len(self.layer) if stop is None else stop


def visible(
  real: Bool[Array, "batch time"],
  *,
  causal: bool,
  before: int = 0,
  segments: Int[Array, "batch time"] | None = None,
) -> Bool[Array, "batch 1 #positions positions"]:
  """Where positions of self-attention may look.

  Args:
    real: true where there is a token, padding being at the end.
    causal: hide later positions.
    before: auxiliary positions in front of the text: all see them. Where it is causal they see
      nothing else; where there are segments, only segment 0 besides, as no segment may see
      another one through them.
    segments: number of the segment of every token, which sees its own and segment 0.
  """
  ones = jnp.ones
  batch, time = real.shape
  real = jnp.concatenate([ones((batch, before), bool), real], axis=1)
  mask = real[:, None, None, :]
  if causal:
    length = before + time
    seen = jnp.tril(ones((length, length), bool)).at[:, :before].set(True)
    mask = mask & seen[None, None]
  if segments is not None:
    of_query, of_key = segments[:, :, None], segments[:, None, :]
    same = (of_query == of_key) | (of_key == 0)
    same = jnp.pad(same, ((0, 0), (0, 0), (before, 0)), constant_values=True)
    shared = jnp.pad(segments == 0, ((0, 0), (before, 0)), constant_values=True)
    shared = jnp.broadcast_to(shared[:, None], (len(same), before, before + time))
    mask = mask & jnp.concatenate([shared, same], axis=1)[:, None]
  return mask
