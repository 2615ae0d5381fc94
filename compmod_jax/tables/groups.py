"""Scores of parts of a table's splits, by length and by category: pictures and a table of them."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from compmod_jax.analysis.report import panels
from compmod_jax.analysis.report.page import Picture, Section
from compmod_jax.analysis.report.page import Table as PageTable
from compmod_jax.analysis.report.results import unit
from compmod_jax.metrics.significance import Mean, mean_interval
from compmod_jax.tables.grid import Column

_NOTHING = Mean(math.nan, math.nan, 0)
NUMBERS = ("row", "column", "by", "group", "runs", "mean", "low", "high")


class Grouped(NamedTuple):
  """A column's score of every group of sentences.

  Attributes:
    column: whose score it is.
    key: what divides sentences, such as `length`.
    rows: row -> group -> mean over seeds with its 95 % interval.
  """

  column: Column
  key: str
  rows: Mapping[str, Mapping[str, Mean]]

  @property
  def groups(self) -> list[str]:
    """All of them: numbers ascending, others in the order of the runs."""
    found = list(dict.fromkeys(group for of_row in self.rows.values() for group in of_row))
    places = [_number(group) for group in found]
    return found if None in places else sorted(found, key=lambda group: _number(group) or 0.0)


def collect(columns: Sequence[Column], records: Iterable[Mapping[str, Any]]) -> list[Grouped]:
  """Means over seeds of the scores `VALUE/KEY/GROUP` that a table's runs have beside `VALUE`.

  Args:
    columns: of the table.
    records: of the runs, with `row` and `scores` (split -> name -> value).
  """
  records = list(records)
  found: list[Grouped] = []
  for column in columns:
    start = f"{column.value}/"
    keys: dict[str, dict[str, dict[str, list[float]]]] = {}
    for record in records:
      for name, value in record["scores"].get(column.split, {}).items():
        key, divided, group = name.removeprefix(start).partition("/")
        if name.startswith(start) and divided and value is not None:
          of_row = keys.setdefault(key, {}).setdefault(record["row"], {})
          of_row.setdefault(group, []).append(float(value))
    for key, rows in keys.items():
      means = {
        row: {group: mean_interval(values) for group, values in of_row.items()}
        for row, of_row in rows.items()
      }
      found.append(Grouped(column, key, means))
  return found


def section(found: Sequence[Grouped]) -> Section:
  """A picture for every key, lines where groups are numbers and else marks, and all numbers."""
  items: list[Picture | PageTable] = []
  for key in dict.fromkeys(one.key for one in found):
    own = [one for one in found if one.key == key]
    numeric = all(_number(group) is not None for one in own for group in one.groups)
    figure = (_lines if numeric else _marks)(key, own)
    items.append(Picture(f"by_{key}", figure, "Means over seeds."))
  lines = [
    [row, one.column.name, one.key, group, m.runs, m.mean, m.mean - m.half, m.mean + m.half]
    for one in found
    for row, of_row in one.rows.items()
    for group, m in of_row.items()
  ]
  return Section("By length and category", [*items, PageTable("groups", NUMBERS, lines)])


def _lines(key: str, found: Sequence[Grouped]) -> Figure:
  """A panel for every column, or one for all where each begins at numbers where the last ends."""
  ends = [[_number(group) or 0.0 for group in one.groups] for one in found]
  joined = all(one[-1] <= after[0] for one, after in itertools.pairwise(ends))
  rows = dict.fromkeys(row for one in found for row in one.rows)
  curves: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
  for together in [found] if joined else [[one] for one in found]:
    drawn = curves.setdefault(", ".join(one.column.name for one in together), {})
    places = [(one, group) for one in together for group in one.groups]
    for row in rows:
      means = [one.rows.get(row, {}).get(group, _NOTHING).mean for one, group in places]
      drawn[row] = np.array([_number(group) for _, group in places]), np.array(means)
  words = key.replace("_", " ")
  return panels.lines(f"By {words}", curves, across=words, up=_unit(found))


def _marks(key: str, found: Sequence[Grouped]) -> Figure:
  drawn = {}
  for one in found:
    groups = one.groups
    series = []
    for row, of_row in one.rows.items():
      means = [of_row.get(group, _NOTHING) for group in groups]
      low, high = ([m.mean + sign * m.half for m in means] for sign in (-1, 1))
      series.append(panels.Series(row, [m.mean for m in means], low, high))
    drawn[one.column.name] = (groups, series)
  return panels.forest(f"By {key.replace('_', ' ')}", drawn, across=_unit(found), reference=None)


def _unit(found: Sequence[Grouped]) -> str:
  column = found[0].column
  return f"{column.value.replace('_', ' ')}, {column.unit or unit(column.value)}"


def _number(group: str) -> float | None:
  """The place of a group of numbers, the middle of an interval such as `17-24`; None for texts."""
  parts = group.split("-")
  if not all(part.isdecimal() for part in parts):
    return None
  return statistics.mean(map(int, parts))
