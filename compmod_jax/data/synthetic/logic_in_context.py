r"""Fuzzy logic in context: some points with the values of an expression, and a point without one.

An expression is a disjunction of conjunctions, each of all variables or their complements. For
variables from 0 to 1, and l the variable itself or its complement,

.. math:: f(x) = \max_t \min_v l_{tv}(x_v), \qquad l(x) = x \text{ or } 1 - x

These are Zadeh's operations, where the regression of fixed expressions has products. A model sees
no expression: it has to find it from the points of one sequence. The expressions of one part are
made of conjunctions that another part has in other combinations.

Source: Schug et al. 2025, "Attention as a Hypernetwork", fuzzy logic.
"""

import dataclasses
import itertools
import math
import random
import zlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.check import Notes, SplitReport

_MOST_VARIABLES, _MOST_TASKS = 10, 1_000_000


class Sequences(NamedTuple):
  """Sequences of points of one expression each.

  Attributes:
    inputs: variables, and behind them the value, which is 0 at the last point.
    targets: the value at the last point.
    tasks: the expressions, as numbers of conjunctions.
  """

  inputs: Float[np.ndarray, "sequences points variables+1"]
  targets: Float[np.ndarray, " sequences"]
  tasks: Int[np.ndarray, "sequences terms"]


def conjunctions(variables: int) -> Bool[np.ndarray, "conjunctions variables"]:
  """All conjunctions: for every variable, whether it stands there itself or as its complement.

  Conjunction n has the binary digits of n, the highest one first.
  """
  return np.array(list(itertools.product((False, True), repeat=variables)))


def values(
  terms: Bool[np.ndarray, "... terms variables"], points: Float[np.ndarray, "... variables"]
) -> Float[np.ndarray, "..."]:
  """The value of every expression at its point; see the head of this file.

  Args:
    terms: the conjunctions of every expression, as in `conjunctions`.
    points: from 0 to 1, one for each expression.
  """
  points = points[..., None, :]
  return np.where(terms, points, 1 - points).min(axis=-1).max(axis=-1)


@dataclasses.dataclass(frozen=True)
class LogicInContextData:
  """Sequences of points of expressions whose conjunctions are combined anew.

  Of the conjunctions, in the order of their numbers, the last ones are in no task but those of the
  part `ood`, and of the combinations of the others some are in `test` alone; `train` and `valid`
  have the rest. Sequence n of a part depends on the seed, the part and n alone.
  """

  variables: int = 4
  """of an expression"""
  terms: int = 2
  """conjunctions of an expression"""
  points: int = 16
  """of a sequence, the last one without its value"""
  test_share: float = 0.5
  """of the combinations of trained conjunctions, those that are tested"""
  ood_share: float = 0.25
  """of the conjunctions, those that are never trained; 0 for no part `ood`"""
  seed: int = 0
  """draws the tested combinations, the tasks and the points"""

  def __post_init__(self) -> None:
    most = _MOST_VARIABLES
    check(2 <= self.variables <= most, f"variables is {self.variables}; it must be 2 to {most}.")
    check_least(self, points=2)
    check(self.seed >= 0, f"seed is {self.seed}; it must not be negative.")
    check(
      0 < self.test_share < 1,
      f"test_share is {self.test_share}; it must be above 0 and below 1.",
    )
    check(
      0 <= self.ood_share < 1,
      f"ood_share is {self.ood_share}; it must be at least 0 and below 1.",
    )
    count = 2**self.variables
    check(
      1 <= self.terms <= self._trained
      and (self.terms <= count - self._trained or not self._unseen),
      f"terms is {self.terms}; it must be at least 1, and there are {self._trained} conjunctions of"
      f" {self.variables} variables to train on and {self._unseen} besides: lower terms, raise"
      " variables, or change ood_share.",
    )
    check(
      math.comb(self._trained, self.terms) <= _MOST_TASKS,
      f"There are {math.comb(self._trained, self.terms):,} expressions of {self.terms} terms of"
      f" {self.variables} variables; lower terms or variables to have {_MOST_TASKS:,} at most.",
    )
    self._divided()

  @property
  def _unseen(self) -> int:
    """Conjunctions that are never trained."""
    return int(2**self.variables * self.ood_share)

  @property
  def _trained(self) -> int:
    return 2**self.variables - self._unseen

  def _divided(self) -> tuple[np.ndarray, np.ndarray]:
    """Training and test combinations.

    Raises:
      UserError: a part is empty, or a conjunction is tested that is not trained.
    """
    every = list(itertools.combinations(range(self._trained), self.terms))
    random.Random(f"{self.seed} combinations").shuffle(every)
    tested = int(len(every) * self.test_share)
    test, train = (np.array(sorted(part)) for part in (every[:tested], every[tested:]))
    check(
      tested > 0 and len(train) > 0 and len(np.unique(train)) == self._trained,
      f"test_share is {self.test_share}, which leaves {tested} of {len(every)} combinations for the"
      f" test and {len(train)} for training; each part needs one, and training every conjunction:"
      " change test_share, or the seed.",
    )
    return train, test

  def splits(self) -> tuple[str, ...]:
    """Names of the parts."""
    return ("train", "valid", "test", "ood") if self._unseen else ("train", "valid", "test")

  def tasks(self, split: str) -> Int[np.ndarray, "tasks terms"]:
    """The expressions of a part, each as ascending numbers of conjunctions.

    Raises:
      UserError: unknown part.
    """
    check_choice("split", split, self.splits())
    if split == "ood":
      unseen = range(self._trained, 2**self.variables)
      return np.array(list(itertools.combinations(unseen, self.terms)))
    return self._divided()[split == "test"]

  def sequences(self, split: str, first: int, count: int) -> Sequences:
    """Some sequences of a part, which has no end.

    Args:
      split: name of the part.
      first: number of the first one.
      count: how many.

    Raises:
      UserError: unknown part, or a negative number.
    """
    check(min(first, count) >= 0, f"first is {first} and count is {count}; neither is negative.")
    tasks, part = self.tasks(split), zlib.crc32(split.encode())
    points = np.zeros((count, self.points, self.variables), np.float32)
    chosen = np.zeros(count, np.int64)
    for row in range(count):
      draw = np.random.default_rng([self.seed, part, first + row])
      chosen[row] = draw.integers(len(tasks))
      points[row] = draw.random(points.shape[1:], np.float32)
    terms = conjunctions(self.variables)[tasks[chosen]]
    found = values(terms[:, None], points)
    shown = np.where(np.arange(self.points) < self.points - 1, found, 0)
    return Sequences(
      np.concatenate([points, shown[..., None]], axis=-1), found[:, -1], tasks[chosen]
    )

  def reports(self, first: int = 5) -> list[SplitReport]:
    """What is wrong with each part; nothing, if parts are divided as they should be.

    Errors are tested expressions that training has, terms of `test` that it lacks, and terms of
    `ood` that it has.

    Args:
      first: places listed for each kind of finding.
    """
    trained = {tuple(one) for one in self.tasks("train").tolist()}
    terms = {term for one in trained for term in one}
    rules = {
      "expression in train": (("test", "ood"), lambda one: one in trained),
      "term not in train": (("test",), lambda one: not terms.issuperset(one)),
      "term in train": (("ood",), lambda one: not terms.isdisjoint(one)),
    }
    reports = []
    for split in self.splits():
      tasks, notes = [tuple(one) for one in self.tasks(split).tolist()], Notes(first)
      for kind, (splits, wrong) in rules.items():
        if split in splits:
          add = notes.kind(kind, "error")
          for number, one in enumerate(tasks):
            if wrong(one):
              add(f"{split}[{number}]: terms {', '.join(map(str, one))}")
      report = SplitReport(split, len(tasks), "terms", noun="expressions", findings=notes.findings)
      report.mean, report.longest = (float(self.terms),), (self.terms,)
      reports.append(report)
    return reports

  def describe(self) -> str:
    """What it holds, in a few words."""
    return f"fuzzy expressions of {self.terms} terms of {self.variables} variables in context"
