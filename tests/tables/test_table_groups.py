"""Scores of groups beside a table's: means over seeds, lines by number, and marks by category."""

import numpy as np
import pytest

from compmod_jax.tables import groups
from compmod_jax.tables.grid import Column

COLUMNS = (
  Column("exact test", "test", "exact_match"),
  Column("exact longer", "longer", "exact_match"),
)


def record(row, shift):
  scores = {"exact_match": 50.0 + shift, "exact_match/length/10": 90.0, "bleu/length/10": 1.0}
  scores |= {"exact_match/length/9": 100.0, "exact_match/length/17-24": 80.0 + shift}
  scores |= {"exact_match/kind/passive": 70.0 + shift, "exact_match/kind/active": None}
  longer = {"exact_match/length/17-24": 10.0 + shift, "exact_match/length/25-32": 0.0}
  return {"row": row, "scores": {"test": scores, "longer": longer, "other": scores}}


def found():
  return groups.collect(COLUMNS, [record("plain", 0), record("plain", 2), record("relative", 4)])


def test_groups_of_a_columns_score_are_means_over_seeds():
  by = {(one.column.split, one.key): one for one in found()}
  assert set(by) == {("test", "length"), ("longer", "length"), ("test", "kind")}
  lengths = by["test", "length"]
  assert lengths.groups == ["9", "10", "17-24"]
  assert lengths.rows["plain"]["17-24"].mean == 81
  # Two seeds, 2 apart: t(0.975, 1) = 12.706 times the standard error 1.
  assert lengths.rows["plain"]["17-24"].half == pytest.approx(12.706, abs=1e-3)
  assert lengths.rows["relative"]["17-24"][0::2] == (84, 1)
  assert by["test", "kind"].groups == ["passive"]


def test_lengths_of_parts_that_follow_each_other_are_one_line():
  section = groups.section(found())
  pictures = {item.name: item.figure for item in section.items[:-1]}
  assert list(pictures) == ["by_length", "by_kind"]
  (axes,) = pictures["by_length"].axes
  assert axes.get_title(loc="left") == "exact test, exact longer"
  plain, relative = axes.get_lines()
  np.testing.assert_array_equal(plain.get_xdata(), [9, 10, 20.5, 20.5, 28.5])
  np.testing.assert_array_equal(plain.get_ydata(), [100, 90, 81, 11, 0])
  np.testing.assert_array_equal(relative.get_ydata(), [100, 90, 84, 14, 0])
  table = section.items[-1]
  assert table.columns == groups.NUMBERS
  assert len(table.rows) == 2 * (3 + 2 + 1)
  assert ["relative", "exact test", "kind", "passive", 1, 74.0] in [line[:6] for line in table.rows]


def test_parts_whose_lengths_overlap_have_panels_of_their_own():
  swapped = groups.collect(COLUMNS[::-1], [record("plain", 0)])
  assert len(groups.section(swapped).items[0].figure.axes) == 2
