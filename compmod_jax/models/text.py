"""Inputs and outputs of language models over whole texts."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from compmod_jax.core import errors
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.layers.embedding import Embedding, PositionTable
from compmod_jax.layers.output import OutputLayer

Blocks = Sequence[tuple[str, int]]
"""(task, rows) of a batch in its order: every row belongs to one task."""


class Text(NamedTuple):
  """A batch of texts.

  Attributes:
    tokens: padded at the end.
    auxiliary: ids of the auxiliary tokens, which say mode and task; none for models without.
    segments: number of the part of every token, ascending, where a row has several that do not see
      each other, as packed documents; part 0 is one that all others see and go on from, each as if
      it came next, as several questions do on one passage. Positions count accordingly. A sliding
      window counts places of the row, which are positions of a text unless several go on from
      part 0.
    options: true at positions of answer options.
    tags: number of the part of speech of every token, -1 for none.
  """

  tokens: Int[Array, "batch time"]
  auxiliary: Int[Array, "batch auxiliary"] | None = None
  segments: Int[Array, "batch time"] | None = None
  options: Bool[Array, "batch time"] | None = None
  tags: Int[Array, "batch time"] | None = None


class TextOutput(NamedTuple):
  """The output of a model at every position.

  Attributes:
    logits: of the token that follows (decoder mode) or belongs there (encoder mode).
    vanilla: the same from the vanilla set's own head, where it was asked for.
  """

  logits: Float[Array, "batch time vocab"]
  vanilla: Float[Array, "batch time vocab"] | None = None


class OutputLayers(NamedTuple):
  """The same before logits are formed.

  Attributes:
    output: what the logits are made of.
    vanilla: the same of the vanilla set's own head, where it was asked for.
  """

  output: OutputLayer
  vanilla: OutputLayer | None = None

  def formed(self, intermediates: Intermediates) -> TextOutput:
    """The logits, of which those that are no vanilla set's are the site `logits`."""
    logits = intermediates("logits", self.output.logits())
    return TextOutput(logits, None if self.vanilla is None else self.vanilla.logits())


def check_text(text: Text, blocks: Blocks, *, longest: int, steps: int = 0) -> None:
  """Raises a `UserError` if blocks do not make up the batch, or a text is too long.

  Args:
    text: the batch.
    blocks: its tasks.
    longest: most positions.
    steps: tokens that are going to follow.
  """
  batch, time = text.tokens.shape
  total = sum(count for _, count in blocks)
  errors.check(
    total == batch,
    f"The blocks {list(blocks)} have {total} rows, but the batch has {batch}; every row belongs to"
    " one task.",
  )
  errors.check(
    time + steps <= longest,
    f"A text has {time + steps} tokens, but the model has positions for {longest}; shorten it or"
    " raise model.max_length.",
  )


def embed(
  text: Text,
  embedding: Embedding,
  positions: PositionTable,
  labels: Int[Array, "#batch time"] | None = None,
) -> Float[Array, "batch time embed"]:
  """Token vectors, and those of their positions where positions are added.

  Args:
    text: the batch.
    embedding: of tokens.
    positions: to add.
    labels: of positions, in place of their numbers.

  Source: Knowles 2022, equation 3.1.
  """
  position_ids = labels
  if labels is None and text.segments is not None:
    position_ids = positions_of(text.segments, text.tokens.shape[1])
  return positions.add(embedding(text.tokens), position_ids)


def positions_of(segments: Int[Array, "batch time"] | None, time: int) -> Int[Array, "#batch time"]:
  """The position of every token within its segment, which goes on from the end of segment 0.

  Args:
    segments: as in `Text`; None for texts of one segment.
    time: tokens of a row.
  """
  if segments is None:
    return jnp.arange(time)[None]
  numbers = jnp.broadcast_to(jnp.arange(time)[None], segments.shape)
  first = jnp.concatenate(
    [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
  )
  within = numbers - jax.lax.cummax(jnp.where(first, numbers, 0), axis=1)
  common = jnp.sum(segments == 0, axis=1, keepdims=True)
  return jnp.where(segments == 0, within, common + within)


def joined(
  source: Shaped[Array, "batch source_time"],
  target: Shaped[Array, "batch target_time"],
  lengths: Int[Array, " batch"],
  most: int,
) -> Shaped[Array, "batch time"]:
  """The first elements of each source, and right behind them the target.

  Args:
    source: elements of the sources.
    target: those of the targets.
    lengths: how many elements of each source count.
    most: time is the sum of both, but at most this. What is left of the sources' places stands at
      the end, and holds zeros.
  """
  first, last = source.shape[1], target.shape[1]
  behind = jnp.arange(first + last)[None, :most] - lengths[:, None]
  of_source = jnp.pad(source, ((0, 0), (0, last)))[:, :most]
  of_target = jnp.take_along_axis(target, jnp.clip(behind, 0, last - 1), axis=1)
  of_target = jnp.where(behind < last, of_target, jnp.zeros_like(of_target))
  return jnp.where(behind < 0, of_source, of_target)
