"""Three ways to run a stack of layers: on whole texts, on a prompt, and on the newest position.

A model writes its computation once, as a function of the way; each way keeps masks and cache.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core.intermediates import Taps
from compmod_jax.layers.cached_attention import ancestor_mask
from compmod_jax.layers.convolution import Near, neighbours
from compmod_jax.mechanisms.modulation import Gates
from compmod_jax.models.stack import Stack, visible
from compmod_jax.models.text import Text

Cache = dict[str, Any]


@runtime_checkable
class Run(Protocol):
  """Runs layers `start` to `stop` - 1 of a stack on a stream.

  `before` says how many auxiliary positions the stack has in front of the text, and `rows` which
  rows of the batch the stream holds.
  """

  def __call__(
    self,
    stack: Stack,
    x: Float[Array, "rows positions embed"],
    *,
    before: int = 0,
    rows: slice = slice(None),
    start: int = 0,
    stop: int | None = None,
    gates: Mapping[int, Gates] | None = None,
    taps: Taps,
  ) -> Float[Array, "rows positions embed"]:
    """The stream after these layers."""
    ...


@dataclasses.dataclass(frozen=True)
class Whole:
  """Whole texts.

  Attributes:
    real: true where there is a token.
    causal: hide later positions.
    segments: number of the segment of every token; see `Text`.
    deterministic: no dropout.
    masks: number of auxiliary positions -> mask, once it was needed.
  """

  real: Bool[Array, "batch time"]
  causal: bool
  segments: Int[Array, "batch time"] | None
  deterministic: bool
  masks: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

  def __call__(
    self, stack: Stack, x: jax.Array, *, before: int = 0, rows: slice = slice(None), **options: Any
  ) -> jax.Array:
    """The stream after the layers."""
    if before not in self.masks:
      self.masks[before] = visible(
        self.real, causal=self.causal, before=before, segments=self.segments
      )
    near = _neighbours(stack, self.real, self.segments, before, rows)
    return stack(x, self.masks[before][rows], near, deterministic=self.deterministic, **options)


@dataclasses.dataclass(frozen=True)
class Prompt:
  """Prompts, in decoder mode; their keys and values go into the cache.

  Attributes:
    real: true where there is a token.
    segments: number of the segment of every token; what is decoded belongs to the last.
    cache: of `empty_cache`; its sets are replaced as they run.
  """

  real: Bool[Array, "batch time"]
  segments: Int[Array, "batch time"] | None
  cache: Cache

  def __call__(
    self, stack: Stack, x: jax.Array, *, before: int = 0, rows: slice = slice(None), **options: Any
  ) -> jax.Array:
    """The stream after the layers."""
    sets, segments = self.cache["sets"], self.segments
    mask = visible(self.real, causal=True, before=before, segments=segments)
    near = _neighbours(stack, self.real, segments, before, rows)
    x, sets[stack.side] = stack.prefill(x, sets[stack.side], mask, near, **options)
    return x


@dataclasses.dataclass(frozen=True)
class Newest:
  """The newest position of every beam.

  Attributes:
    cache: of prompt and steps so far, with the ancestry of this step; its sets are replaced.
  """

  cache: Cache

  def __call__(
    self, stack: Stack, x: jax.Array, *, before: int = 0, rows: slice = slice(None), **options: Any
  ) -> jax.Array:
    """The stream after the layers."""
    cache, beams = self.cache, x.shape[1]
    seen = jnp.pad(cache["prompt"], ((0, 0), (0, 0), (0, 0), (before, 0)), constant_values=True)
    own = ancestor_mask(cache["ancestry"], cache["position"])
    seen = jnp.broadcast_to(seen, (*own.shape[:3], seen.shape[-1]))
    place = jnp.int32(seen.shape[-1]) + cache["position"] * beams
    sets, past = cache["sets"], jnp.concatenate([seen, own], axis=-1)
    near = self._near(stack.config.convolution, before + cache["prompt"].shape[-1], before)
    x, sets[stack.side] = stack.step(x, sets[stack.side], place, past, near, **options)
    return x

  def _near(self, width: int, prompt: int, before: int) -> Near | None:
    """What stands before the newest position: first steps, which follow `prompt` places."""
    if width == 1:
      return None
    ancestry, lengths = self.cache["ancestry"], self.cache["lengths"][..., None]
    shape = (*ancestry.shape[:2], width - 1)
    back = self.cache["position"] - jnp.arange(1, width)[None, None]
    step = jnp.maximum(back, 0)
    steps = prompt + step * ancestry.shape[1] + jnp.take(ancestry, step[0, 0], axis=2)
    places = jnp.where(back >= 0, steps, before + jnp.maximum(lengths + back, 0))
    there = (back >= 0) | (lengths + back >= self.cache["begin"][..., None])
    return Near(places, jnp.broadcast_to(there, shape))


def _neighbours(
  stack: Stack,
  real: Bool[Array, "batch time"],
  segments: Int[Array, "batch time"] | None,
  before: int,
  rows: slice,
) -> Bool[Array, "some positions neighbours"] | None:
  """Which positions the convolutions of a stack mix; auxiliary ones stay as they are."""
  width = stack.config.convolution
  if width == 1:
    return None
  if segments is None:
    segments = jnp.zeros((1, real.shape[1]), jnp.int32)
  near = neighbours(segments[rows] if len(segments) > 1 else segments, width)
  return jnp.pad(near, ((0, 0), (before, 0), (0, 0)))


def empty_cache(
  text: Text, pad: int, stacks: Sequence[tuple[Stack, int]], *, beams: int, length: int
) -> Cache:
  """The cache before a prompt: leaves [batch, beams or 1, ...] and a position.

  Args:
    text: the prompts.
    pad: the token that marks padding.
    stacks: every stack that runs, and how many auxiliary positions it has in front of the text.
    beams: hypotheses an example.
    length: most steps after the prompt.
  """
  real = text.tokens != pad
  batch, time = real.shape
  lengths = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
  begin = jnp.zeros_like(lengths)
  if text.segments is not None:
    last = jnp.take_along_axis(text.segments, jnp.maximum(lengths - 1, 0), axis=1)
    begin = jnp.sum(real & (text.segments != last), axis=1, dtype=jnp.int32)[:, None]
  return {
    "position": jnp.int32(0),
    "ancestry": jnp.zeros((batch, beams, length), jnp.int32),
    "prompt": real[:, None, None, :],
    "lengths": lengths,
    "begin": begin,
    "sets": {
      stack.side: stack.empty_cache(batch, before + time + length * beams)
      for stack, before in stacks
    },
  }


def advance(cache: Cache, tokens: Int[Array, "batch beams"]) -> Cache:
  """The cache at a new step, in which every beam has written its own newest position."""
  batch, beams = tokens.shape
  mine = jnp.broadcast_to(jnp.arange(beams)[None, :, None], (batch, beams, 1))
  place = (0, 0, cache["position"])
  ancestry = jax.lax.dynamic_update_slice(cache["ancestry"], mine, place)
  return {**cache, "ancestry": ancestry, "sets": dict(cache["sets"])}
