"""Fuzzy logic in context: values by loops, and which expressions each part has."""

import itertools

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.logic_in_context import (
  LogicInContextData,
  conjunctions,
  values,
)

DATA = LogicInContextData()


def value_by_loops(signs: list[list[bool]], point: list[float]) -> float:
  """The greatest over conjunctions of the least over variables."""
  best = -1.0
  for conjunction in signs:
    least = 2.0
    for sign, x in zip(conjunction, point, strict=True):
      least = min(least, x if sign else 1 - x)
    best = max(best, least)
  return best


def test_values_are_those_of_the_definition():
  draw = np.random.default_rng(0)
  terms = draw.random((40, 3, 5)) < 0.5
  points = draw.random((40, 5))
  wanted = [value_by_loops(*one) for one in zip(terms.tolist(), points.tolist(), strict=True)]
  np.testing.assert_allclose(values(terms, points), wanted)


def test_at_zeros_and_ones_a_conjunction_is_true_at_its_own_corner_alone():
  corners = conjunctions(3).astype(float)
  table = values(conjunctions(3)[:, None, None], np.broadcast_to(corners, (8, 8, 3)))
  np.testing.assert_array_equal(table, np.eye(8))


def test_parts_divide_all_combinations_as_they_say():
  parts = {split: {tuple(one) for one in DATA.tasks(split).tolist()} for split in DATA.splits()}
  assert DATA.splits() == ("train", "valid", "test", "ood")
  assert parts["train"] == parts["valid"]
  assert not parts["train"] & parts["test"]
  # Of 16 conjunctions the last four are unseen; half of the pairs of the others are tested.
  assert parts["train"] | parts["test"] == set(itertools.combinations(range(12), 2))
  assert len(parts["train"]) == len(parts["test"]) == 33
  assert parts["ood"] == set(itertools.combinations(range(12, 16), 2))
  assert {number for one in parts["train"] for number in one} == set(range(12))
  other = {tuple(one) for one in LogicInContextData(seed=1).tasks("train").tolist()}
  assert other != parts["train"]
  assert LogicInContextData(ood_share=0).splits() == ("train", "valid", "test")


def test_a_sequence_shows_the_values_of_its_expression_but_for_the_last():
  every = conjunctions(4)
  for split in DATA.splits():
    inputs, targets, tasks = DATA.sequences(split, 5, 20)
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((20, 16, 5), np.float32, np.float32)
    assert {tuple(one) for one in tasks.tolist()} <= {
      tuple(one) for one in DATA.tasks(split).tolist()
    }
    np.testing.assert_array_equal(inputs[:, -1, -1], 0)
    for row, target, task in zip(inputs, targets, tasks, strict=True):
      signs = every[task].tolist()
      found = [value_by_loops(signs, point) for point in row[:, :-1].tolist()]
      np.testing.assert_allclose([*row[:-1, -1], target], found, atol=1e-6)


def test_a_sequence_is_a_function_of_its_part_and_number():
  whole = DATA.sequences("train", 0, 10)
  for found, wanted in zip(DATA.sequences("train", 4, 3), whole, strict=True):
    np.testing.assert_array_equal(found, wanted[4:7])
  points = whole.inputs[..., :-1]
  assert not np.any(points == DATA.sequences("valid", 0, 10).inputs[..., :-1])
  assert len(np.unique(points)) == points.size
  assert not np.any(points == LogicInContextData(seed=1).sequences("train", 0, 10).inputs[..., :-1])
  tasks = DATA.sequences("train", 0, 500).tasks
  assert len(np.unique(tasks, axis=0)) == 33


class Wrong(LogicInContextData):
  """Parts that have what they should not."""

  def tasks(self, split):
    mistakes = {"train": [[0, 1], [1, 2]], "test": [[0, 2], [1, 2], [2, 3]], "ood": [[2, 9]]}
    return np.array(mistakes.get(split, mistakes["train"]))


def test_a_report_counts_expressions_and_lists_those_in_the_wrong_part():
  assert not any(report.failed for report in DATA.reports())
  assert [report.pairs for report in DATA.reports()] == [33, 33, 33, 6]
  found = {report.split: report.findings for report in Wrong().reports(first=1)}
  places = {
    (split, kind): finding.places for split in found for kind, finding in found[split].items()
  }
  assert places == {
    ("test", "expression in train"): ["test[1]: terms 1, 2"],
    ("test", "term not in train"): ["test[2]: terms 2, 3"],
    ("ood", "expression in train"): [],
    ("ood", "term in train"): ["ood[0]: terms 2, 9"],
  }
  assert [report.failed for report in Wrong().reports()] == [False, False, True, True]


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: LogicInContextData(variables=1), "variables is 1; it must be 2 to 10"),
    (lambda: LogicInContextData(points=1), "points is 1"),
    (lambda: LogicInContextData(test_share=0), "test_share is 0; it must be above 0"),
    (lambda: LogicInContextData(ood_share=1.0), "ood_share is 1.0; it must be at least 0"),
    (lambda: LogicInContextData(terms=5), "terms is 5; .* 12 conjunctions .* and 4 besides"),
    (lambda: LogicInContextData(variables=10, terms=3), "lower terms or variables"),
    (lambda: LogicInContextData(test_share=0.95), "test_share is 0.95"),
    (lambda: LogicInContextData(seed=-1), "seed is -1"),
    (lambda: DATA.tasks("dev"), "'dev'"),
    (lambda: DATA.sequences("train", -1, 2), "first is -1"),
  ],
)
def test_mistakes_are_told(make, match):
  with pytest.raises(UserError, match=match):
    make()
