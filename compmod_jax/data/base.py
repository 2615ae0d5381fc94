"""What every data source hands over: sentence pairs and where each one stands."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from compmod_jax.core.errors import UserError, check, check_choice

Metric = Literal["bleu", "exact_match"]


class DataError(UserError):
  """The content of a data file is wrong: it is damaged, empty, misaligned or not text."""


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Source sentences and their translations, as raw text.

  Args:
    source: one sentence each, untokenised; may be decoded lazily. Indexed by number and by slice.
    target: the translations, as many as there are sources.
    where: the number of a pair -> where it stands, such as `train.de:17` (lines count from 1) or
      `grammar:train[17]`.
    info: gold annotations of every pair, or None where the source has none.
    metric: what translations of these pairs are scored with.

  Raises:
    UserError: the sides, or the annotations, differ in number.
  """

  source: Sequence[str]
  target: Sequence[str]
  where: Callable[[int], str]
  info: Sequence[Mapping[str, Any]] | None = None
  metric: Metric = "bleu"

  def __post_init__(self) -> None:
    check(
      len(self.source) == len(self.target),
      f"There are {len(self.source)} source and {len(self.target)} target sentences; every source"
      " sentence needs exactly one translation.",
    )
    check(
      self.info is None or len(self.info) == len(self.source),
      f"There are {len(self.source)} sentence pairs but {len(self.info or ())} annotations; give"
      " one for each pair or none at all.",
    )

  def __len__(self) -> int:
    return len(self.source)

  def select(self, numbers: Sequence[int]) -> "Pairs":
    """The pairs with these numbers, in this order; `where` still tells their original places."""
    numbers = [int(number) for number in numbers]
    return Pairs(
      source=[self.source[number] for number in numbers],
      target=[self.target[number] for number in numbers],
      where=lambda i: self.where(numbers[i]),
      info=None if self.info is None else [self.info[number] for number in numbers],
      metric=self.metric,
    )


class HasSplits(Protocol):
  """A data configuration."""

  def splits(self) -> tuple[str, ...]:
    """Names of the splits, `train` among them."""
    ...

  def load(self, split: str) -> Pairs:
    """The pairs of a split."""
    ...


class Splits:
  """The splits of a data configuration, each loaded once."""

  def __init__(self, config: HasSplits):
    self.config = config
    self._loaded: dict[str, Pairs] = {}

  def __getitem__(self, split: str) -> Pairs:
    if split not in self._loaded:
      check_choice("split", split, self.config.splits())
      self._loaded[split] = self.config.load(split)
    return self._loaded[split]
