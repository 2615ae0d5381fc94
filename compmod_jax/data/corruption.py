"""What is to be predicted of a text, and what stands in its place: masked tokens, or spans.

Source: masks: Devlin et al. 2019, section 3.1, new ones at every step: Liu et al. 2019, section
4.1; spans: Raffel et al. 2020, section 3.1.4.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from compmod_jax.core.errors import UserError, check

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
  """How many tokens are predicted, and what the model sees of them."""

  share: float = 0.15
  """Share of a sequence's ordinary tokens that are predicted."""
  masked: float = 0.8
  """Share of those that are replaced by the mask token."""
  random: float = 0.1
  """Share of those that are replaced by an ordinary token, any with the same probability; the rest
  stay as they are."""

  def __post_init__(self):
    check(0 < self.share <= 1, f"masking.share is {self.share}; it must lie between 0 and 1.")
    for field in ("masked", "random"):
      value = getattr(self, field)
      check(0 <= value <= 1, f"masking.{field} is {value}; it must lie between 0 and 1.")
    check(
      self.masked + self.random <= 1 + 1e-9,
      f"masking.masked + masking.random is {self.masked + self.random:g}; they are shares of the"
      " predicted tokens: let their sum be at most 1.",
    )

  def most(self, length: int) -> int:
    """Most predicted tokens of a sequence of this number of tokens."""
    return min(length, math.floor(self.share * length) + 1)


class Masked(NamedTuple):
  """Sequences with some tokens replaced.

  Attributes:
    tokens: what the model sees.
    positions: numbers of the predicted positions; where `predict` is false, of no importance.
    targets: the tokens that belong there.
    predict: whether this one is really predicted: sequences have different numbers of them.
  """

  tokens: Int[Array, "batch time"]
  positions: Int[Array, "batch predicted"]
  targets: Int[Array, "batch predicted"]
  predict: Bool[Array, "batch predicted"]


def mask_tokens(
  rng: jax.Array,
  tokens: Int[Array, "batch time"],
  index: Int[Array, " batch"],
  ordinary: Bool[np.ndarray, " vocab"],
  *,
  mask: int,
  config: MaskingConfig,
) -> Masked:
  r"""Chooses the tokens to predict and replaces them.

  Of a sequence's n ordinary tokens :math:`\lfloor s n + u \rfloor` are predicted, with u uniform in
  [0, 1): exactly the share s on average. What is drawn for a sequence depends on the key and on its
  number alone, not on the batch that it is in.

  Args:
    rng: a key.
    tokens: sequences, with whatever padding.
    index: number of every sequence.
    ordinary: which tokens may be predicted, and may replace others.
    mask: the mask token.
    config: shares.
  """
  length, vocab = tokens.shape[1], ordinary.shape[0]
  most = config.most(length)
  keys = jax.vmap(lambda number: jax.random.fold_in(rng, number))(index)
  places, kinds, others, extra = (
    jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, stream), (size,)))(keys)
    for stream, size in enumerate((length, most, most, 1))
  )
  candidates = jnp.asarray(ordinary)[tokens]
  count = jnp.floor(config.share * jnp.sum(candidates, axis=1, keepdims=True) + extra)
  _, positions = jax.lax.top_k(jnp.where(candidates, places, -1.0), most)
  predict = jnp.arange(most)[None] < count
  targets = jnp.take_along_axis(tokens, positions, axis=1)
  # The r-th ordinary token, for r uniform.
  rank = jnp.asarray(np.cumsum(ordinary))
  drawn = jnp.searchsorted(rank, jnp.floor(others * rank[-1]), side="right")
  drawn = jnp.minimum(drawn, vocab - 1).astype(tokens.dtype)
  new = jnp.where(kinds < config.masked, mask, targets)
  swapped = (kinds >= config.masked) & (kinds < config.masked + config.random)
  new = jnp.where(predict, jnp.where(swapped, drawn, new), targets)
  rows = jnp.arange(tokens.shape[0])[:, None]
  return Masked(tokens.at[rows, positions].set(new), positions, targets, predict)


@dataclasses.dataclass(frozen=True)
class SpansConfig:
  """How much of a text is cut out, in spans of which length."""

  share: float = 0.15
  """Share of a text's tokens that are cut out, at least one."""
  mean_length: float = 3.0
  """Mean number of tokens of a span."""

  def __post_init__(self):
    check(0 < self.share < 1, f"spans.share is {self.share}; it must lie between 0 and 1.")
    check(
      self.mean_length >= 1,
      f"spans.mean_length is {self.mean_length}; a span has at least one token: give 1 or more.",
    )


def corrupt_spans(
  tokens: Sequence[T], sentinels: Sequence[T], random: np.random.Generator, config: SpansConfig
) -> tuple[list[T], list[T]]:
  r"""Cuts spans out of a text: what is left of it, and what was cut out.

  Of n tokens :math:`m = \lfloor s n + u \rfloor` are cut out, in
  :math:`k = \lfloor m / l + v \rfloor` spans, with u and v uniform in [0, 1): the share s and the
  mean length l on average, except that of a short text one token at least is cut out. All lengths
  of the k spans that add up to m are equally probable, and all places where no two of them touch.
  Span i is replaced by sentinel i; in the target it follows that sentinel, and sentinel k ends the
  target:

  `Thank you <0> me to your party <1> week`, `<0> for inviting <1> last <2>`

  Args:
    tokens: of one text: words, or ids; at least two, none of them a sentinel.
    sentinels: in their order, at least two; there are at most as many spans as all but one.
    random: a generator.
    config: share and mean length.

  Returns:
    Source and target, from which `restore_spans` makes the text again.

  Raises:
    UserError: the text is too short, or there are too few sentinels.

  Source: Raffel et al. 2020, section 3.1.4 and figure 2.
  """
  check(len(tokens) >= 2, f"A text has {len(tokens)} tokens; to cut some out, it needs two.")
  check(len(sentinels) >= 2, f"There are {len(sentinels)} sentinels; one span needs two.")
  cut = min(max(1, math.floor(config.share * len(tokens) + random.random())), len(tokens) - 1)
  left = len(tokens) - cut
  spans = math.floor(cut / config.mean_length + random.random())
  spans = min(max(1, spans), cut, left + 1, len(sentinels) - 1)
  ends = [*(np.sort(random.choice(cut - 1, spans - 1, replace=False)) + 1), cut]
  lengths = np.diff(ends, prepend=0)
  # How many of the tokens that are left stand before each span.
  before = np.diff(np.sort(random.choice(left + 1, spans, replace=False)), prepend=0)
  source, target, place = list[T](), list[T](), 0
  for sentinel, kept, length in zip(sentinels, before.tolist(), lengths.tolist(), strict=False):
    source += [*tokens[place : place + kept], sentinel]
    target += [sentinel, *tokens[place + kept : place + kept + length]]
    place += kept + length
  return [*source, *tokens[place:]], [*target, sentinels[spans]]


def restore_spans(source: Sequence[T], target: Sequence[T], sentinels: Sequence[T]) -> list[T]:
  """The text of which `corrupt_spans` made a source and a target.

  Raises:
    UserError: the target has not the sentinels of the source, in their order.
  """
  known, spans, current = set(sentinels), dict[T, list[T]](), list[T]()
  for token in target:
    if token in known:
      current = spans.setdefault(token, [])
    else:
      current.append(token)
  used = [token for token in source if token in known]
  if list(spans) != [*used, *sentinels[len(used) : len(used) + 1]]:
    raise UserError(
      f"The target has the sentinels {list(spans)}, but the source {used}; they do not belong"
      " together. A target has those of its source, and the next one at its end."
    )
  return [one for token in source for one in (spans[token] if token in known else (token,))]
