"""A grid of runs against its plain row: means over seeds, intervals, corrected tests, power."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from compmod_jax.core.errors import check
from compmod_jax.metrics.factorial import Factorial, analyse
from compmod_jax.metrics.significance import (
  Mean,
  Paired,
  detectable,
  holm,
  mean_interval,
  paired_test,
)

ALPHA = 0.05

# Row -> seed -> column -> value.
Values = Mapping[str, Mapping[int, Mapping[str, float]]]


@dataclasses.dataclass(frozen=True)
class Column:
  """A quantity that a table compares.

  Attributes:
    name: heading, unique in its table.
    split: whose score it is.
    value: which score of the split, as evaluations name it.
    digits: decimals shown.
    lower: whether less is better.
    unit: of the score, for pictures; that of other scores of its name where it is empty.
  """

  name: str
  split: str
  value: str
  digits: int = 2
  lower: bool = False
  unit: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
  """One row in one column.

  Attributes:
    runs: mean over seeds with its 95 % interval.
    paired: against the reference of its row, over the seeds that both have; None without one.
    p: the test's p-value, corrected for the number of rows (Holm).
    detectable: smallest difference that these seeds would show in four of five repetitions, at the
      level corrected for the number of rows (Bonferroni).
    published: the figure to compare with, if there is one.
  """

  runs: Mean
  paired: Paired | None = None
  p: float = math.nan
  detectable: float = math.inf
  published: float | None = None

  @property
  def significant(self) -> bool:
    """Whether it differs from the reference row after correction."""
    return self.p <= ALPHA


@dataclasses.dataclass(frozen=True)
class Table:
  """A table that was measured.

  Attributes:
    title: what it shows, and where it was published.
    references: row -> the row that it is tested against; rows that are no key are not tested.
    columns: in order.
    rows: name -> column name -> entry, in order; a row lacks what none of its runs has.
    settings: name -> the whole configuration of its runs, as field -> value; none if not given.
    effects: column name -> main effects and interactions, where rows are all settings of several
      factors; then they are what is tested.
  """

  title: str
  references: Mapping[str, str]
  columns: tuple[Column, ...]
  rows: Mapping[str, Mapping[str, Entry]]
  settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
  effects: Mapping[str, Factorial] = dataclasses.field(default_factory=dict)


def summarise(
  title: str,
  values: Values,
  columns: Sequence[Column],
  *,
  reference: str | Mapping[str, str],
  published: Mapping[str, Mapping[str, float]],
  settings: Mapping[str, Mapping[str, Any]] | None = None,
  factors: Mapping[str, Collection[str]] | None = None,
) -> Table:
  """The table of a grid of runs.

  Args:
    title: of the table.
    values: row -> seed -> column name -> value; rows in the order of the table.
    columns: what is compared.
    reference: the row that all others are tested against, or row -> the row that it is tested
      against. What has no runs is no test.
    published: row -> column name -> published figure.
    settings: row -> field -> value, the whole configuration of its runs.
    factors: name -> the rows in which it is on, if rows are all settings of several factors. A
      column in which not every row has the same seeds has no effects.

  Raises:
    UserError: there is no run at all.
  """
  check(any(values.values()), f"{title}: no run is finished, so there is no table yet.")
  rows: dict[str, dict[str, Entry]] = {row: {} for row in values if values[row]}
  references = references_of(reference, values)
  for column in columns:
    for row, entry in _column(values, column.name, references).items():
      figure = published.get(row, {}).get(column.name)
      rows[row][column.name] = dataclasses.replace(entry, published=figure)
  effects = _effects(values, columns, published, factors) if factors else {}
  return Table(title, references, tuple(columns), rows, settings or {}, effects)


def references_of(reference: str | Mapping[str, str], rows: Iterable[str]) -> dict[str, str]:
  """Row -> the row that it is tested against, of those that are tested.

  Args:
    reference: of all rows, or of each that is tested.
    rows: of the table.
  """
  if isinstance(reference, str):
    return {row: reference for row in rows if row != reference}
  return {row: reference[row] for row in rows if row in reference}


def _effects(
  values: Values,
  columns: Sequence[Column],
  published: Mapping[str, Mapping[str, float]],
  factors: Mapping[str, Collection[str]],
) -> dict[str, Factorial]:
  """Effects in every column that is complete."""
  settings = {row: frozenset(f for f, rows in factors.items() if row in rows) for row in values}
  seeds = {frozenset(by_seed) for by_seed in values.values()}
  if len(set(settings.values())) < 2 ** len(factors) or len(seeds) > 1:
    return {}
  found = {}
  for column in columns:
    if not all(column.name in scores for runs in values.values() for scores in runs.values()):
      continue
    by_setting = {
      settings[row]: {seed: scores[column.name] for seed, scores in runs.items()}
      for row, runs in values.items()
    }
    figures = {
      settings[row]: published[row][column.name]
      for row in values
      if column.name in published.get(row, {})
    }
    found[column.name] = analyse(by_setting, tuple(factors), figures)
  return found


def _column(values: Values, name: str, references: Mapping[str, str]) -> dict[str, Entry]:
  by_row = {
    row: {seed: found[name] for seed, found in sorted(seeds.items()) if name in found}
    for row, seeds in values.items()
  }
  by_row = {row: seeds for row, seeds in by_row.items() if seeds}
  paired = {}
  for row, seeds in by_row.items():
    plain = by_row.get(references.get(row, ""), {})
    common = [seed for seed in seeds if seed in plain]
    if common:
      paired[row] = paired_test([seeds[s] for s in common], [plain[s] for s in common])
  corrected = dict(zip(paired, holm([test.p for test in paired.values()]), strict=True))
  return {
    row: Entry(
      runs=mean_interval(list(seeds.values())),
      paired=paired.get(row),
      p=corrected.get(row, math.nan),
      detectable=_detectable(paired[row], len(paired)) if row in paired else math.inf,
    )
    for row, seeds in by_row.items()
  }


def _detectable(test: Paired, tests: int) -> float:
  return detectable(test.deviation, test.difference.runs, alpha=ALPHA / tests)


def planned(values: Values, column: str, *, seeds: int, tests: int) -> float:
  """Smallest difference between two rows that a number of seeds will show, before they have run.

  In four of five repetitions, at the level corrected for the number of tests (Bonferroni). What
  seeds do to a row is taken from the runs that are there, pooled over rows; two rows are taken to
  be independent, as runs of one seed mostly are.

  Args:
    values: what is there of the table.
    column: name of the quantity.
    seeds: of every row, when all have run.
    tests: rows that are to be tested.

  Returns:
    In the column's unit; infinity if no row has two runs yet.
  """
  squares, freedom = 0.0, 0
  for runs in values.values():
    found = [scores[column] for scores in runs.values() if column in scores]
    mean = sum(found) / max(1, len(found))
    squares += sum((value - mean) ** 2 for value in found)
    freedom += max(0, len(found) - 1)
  if not freedom:
    return math.inf
  return detectable(math.sqrt(2 * squares / freedom), seeds, alpha=ALPHA / max(1, tests))
