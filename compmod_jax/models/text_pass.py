"""One pass of a model over a batch of texts: whole, over prompts, or over the newest positions.

A model writes its computation once; what differs between the three is the context of each stack.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core.intermediates import Intermediates
from compmod_jax.layers.context import AttentionMask, Context, Newest, PositionIds
from compmod_jax.layers.convolution import neighbours
from compmod_jax.layers.kv_cache import ancestor_mask
from compmod_jax.layers.positions import NUMBERED, label
from compmod_jax.layers.stack import Stack
from compmod_jax.mechanisms.modulation import Gates
from compmod_jax.models.text import Text, positions_of

State = dict[str, Any]
"""What decoding keeps: `sets`, the states of stacks by name; `position`, the number of steps done;
`ancestry` [batch, beams, length], the beam that wrote each step of each hypothesis; `prompt`, where
prompts have tokens that steps read; `lengths` [batch, 1] of prompts, `begin`, where their last
segment begins, and `first`, the position of the first step in its text. Leaves start with
[batch, beams or 1]."""


@dataclasses.dataclass(frozen=True)
class TextPass:
  """A pass over texts.

  Attributes:
    real: true where there is a token; of prompts and whole texts.
    segments: number of the segment of every token; see `Text`.
    labels: of positions, in place of their numbers; none for numbers.
    causal: hide later positions.
    state: of decoding, whose `sets` are replaced as stacks run; None: nothing is kept.
    newest: whether the stream holds the newest position of every beam.
    deterministic: no dropout.
    intermediates: activations to read or change.
  """

  real: Bool[Array, "batch time"]
  segments: Int[Array, "#batch time"] | None = None
  labels: Int[Array, "#batch time"] | None = None
  causal: bool = True
  state: State | None = None
  newest: bool = False
  deterministic: bool = True
  intermediates: Intermediates = dataclasses.field(kw_only=True)

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
  ) -> Float[Array, "rows positions embed"]:
    """The stream after blocks `start` to `stop` - 1 of a stack.

    Args:
      stack: which.
      x: the stream.
      before: auxiliary positions that the stack has in front of the text.
      rows: rows of the batch that the stream holds.
      start: number of the first block.
      stop: number behind the last one; all if not given.
      gates: of blocks that have some, by number.
    """
    sets = {} if self.state is None else self.state["sets"]
    ctx = self._newest(stack, before) if self.newest else self._whole(stack, before, rows)
    x, after = stack(x, sets.get(stack.side), start=start, stop=stop, gates=gates, ctx=ctx)
    if after is not None:
      sets[stack.side] = after
    return x

  def _whole(self, stack: Stack, before: int, rows: slice) -> Context:
    """Whole texts, or prompts, which stand at the start of the state."""
    config, real = stack.config, self.real
    valid = jnp.pad(real, ((0, 0), (before, 0)), constant_values=True)
    mask = AttentionMask(
      self.causal,
      valid=valid,
      segments=self.segments,
      prefix=before,
      window=config.sliding_window,
    )
    near = None
    if config.convolution > 1:
      segments = self.segments
      if segments is None:
        segments = jnp.zeros((1, real.shape[1]), jnp.int32)
      near = neighbours(segments[rows] if len(segments) > 1 else segments, config.convolution)
      near = jnp.pad(near, ((0, 0), (before, 0), (0, 0)))  # auxiliary positions stay as they are
    position_ids, ids = None, self.labels
    counted = ids is None and self.segments is None and not before
    if config.positions in NUMBERED and not counted:
      ids = positions_of(self.segments, real.shape[1]) if ids is None else ids
      ids = jnp.pad(ids[rows] if len(ids) > 1 else ids, ((0, 0), (before, 0)))
      position_ids = PositionIds(ids, ids, config.random_positions or real.shape[1])
    return Context(
      mask=mask[rows],
      same_segment=near,
      position_ids=position_ids,
      deterministic=self.deterministic,
      intermediates=self.intermediates.scope(stack.side),
    )

  def _newest(self, stack: Stack, before: int) -> Context:
    """The newest position of every beam, behind the auxiliary positions, prompt and steps."""
    assert self.state is not None
    state, config = self.state, stack.config
    ancestry, position = state["ancestry"], state["position"]
    beams, length = ancestry.shape[1:]
    own = ancestor_mask(ancestry, position)
    seen = jnp.pad(state["prompt"], ((0, 0), (0, 0), (0, 0), (before, 0)), constant_values=True)
    seen = jnp.broadcast_to(seen, (*own.shape[:3], seen.shape[-1]))
    past = jnp.concatenate([seen, own], axis=-1)
    if config.sliding_window:
      past = past & _in_window(state, config.sliding_window, before)
    newest = Newest(start=jnp.int32(seen.shape[-1]) + position * beams, past=past)
    if config.convolution > 1:
      newest = self._with_neighbours(newest, state, config.convolution, before)
    position_ids = None
    if config.positions in NUMBERED:
      prompt = jnp.pad(state["position_ids"][:, 0], ((0, 0), (before, 0)))
      steps = jnp.repeat(jnp.arange(length), beams)[None] + state["first"]
      keys, queries = (
        label(numbers, config.random_positions, config.max_length)
        for numbers in (jnp.concatenate([prompt, steps], axis=1), state["first"] + position)
      )
      most = config.random_positions or state["position_ids"].shape[-1] + length
      position_ids = PositionIds(queries, keys, most)
    return Context(
      newest=newest, position_ids=position_ids, intermediates=self.intermediates.scope(stack.side)
    )

  def _with_neighbours(self, newest: Newest, state: State, width: int, before: int) -> Newest:
    """What stands before the newest position: first steps, which follow the prompt."""
    ancestry, lengths = state["ancestry"], state["lengths"][..., None]
    prompt = before + state["prompt"].shape[-1]
    shape = (*ancestry.shape[:2], width - 1)
    back = state["position"] - jnp.arange(1, width)[None, None]
    step = jnp.maximum(back, 0)
    steps = prompt + step * ancestry.shape[1] + jnp.take(ancestry, step[0, 0], axis=2)
    neighbours = jnp.where(back >= 0, steps, before + jnp.maximum(lengths + back, 0))
    there = (back >= 0) | (lengths + back >= state["begin"][..., None])
    return dataclasses.replace(
      newest, neighbours=neighbours, same_segment=jnp.broadcast_to(there, shape)
    )


def _in_window(state: State, window: int, before: int) -> Bool[Array, "batch 1 1 keys"]:
  """Which keys stand among the newest positions: of the prompt, and of the steps behind it.

  Auxiliary positions do, as whole texts read them everywhere.
  """
  lengths, (_, beams, length) = state["lengths"], state["ancestry"].shape
  prompt = jnp.arange(state["prompt"].shape[-1])[None]
  steps = lengths + jnp.repeat(jnp.arange(length), beams)[None]
  first = lengths + state["position"] - window + 1
  near = jnp.concatenate([prompt >= first, steps >= first], axis=1)
  return jnp.pad(near, ((0, 0), (before, 0)), constant_values=True)[:, None, None]


def initial_state(
  text: Text, pad: int, stacks: Sequence[tuple[Stack, int]], *, beams: int, length: int
) -> State:
  """The state before a prompt.

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
  read, begin, first = real, jnp.zeros_like(lengths), lengths
  if text.segments is not None:  # steps go on in the last one
    last = jnp.take_along_axis(text.segments, jnp.maximum(lengths - 1, 0), axis=1)
    begin = jnp.sum(real & (text.segments != last), axis=1, dtype=jnp.int32)[:, None]
    read = real & ((text.segments == last) | (text.segments == 0))
    first = jnp.sum(read, axis=1, dtype=jnp.int32)[:, None]
  state = {
    "position": jnp.int32(0),
    "ancestry": jnp.zeros((batch, beams, length), jnp.int32),
    "prompt": read[:, None, None, :],
    "lengths": lengths,
    "begin": begin,
    "first": first,
    "sets": {
      stack.side: stack.initial_state(batch, before + time + length * beams, beams=beams)
      for stack, before in stacks
    },
  }
  if any(stack.config.positions in NUMBERED for stack, _ in stacks):
    position_ids = jnp.broadcast_to(positions_of(text.segments, time), (batch, time))
    state["position_ids"] = position_ids[:, None]
  return state


def advanced(state: State, tokens: Int[Array, "batch beams"]) -> State:
  """The state at a new step, in which every beam has written its own newest position."""
  batch, beams = tokens.shape
  mine = jnp.broadcast_to(jnp.arange(beams)[None, :, None], (batch, beams, 1))
  place = (0, 0, state["position"])
  ancestry = jax.lax.dynamic_update_slice(state["ancestry"], mine, place)
  return {**state, "ancestry": ancestry, "sets": dict(state["sets"])}
