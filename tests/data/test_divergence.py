"""Divergence of atoms and compounds: against its definition by brute force, and splits by it."""

import itertools
import random

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.divergence import (
  Derivation,
  Measure,
  atom_counts,
  chernoff_divergence,
  compound_weights,
  divergent_split,
)


def drawn(chance: random.Random, depth: int) -> Derivation:
  """A tree of a few rules, which may stand inside themselves."""
  parts = chance.randint(0, 2) if depth else 0
  return Derivation(chance.choice("abc"), tuple(drawn(chance, depth - 1) for _ in range(parts)))


def occurrences(tree: Derivation, largest: int) -> list[tuple[frozenset, tuple]]:
  """All connected sets of nodes (each named by the path to it), and what they are."""
  nodes = {}

  def walk(path, derivation):
    nodes[path] = derivation.rule
    for which, part in enumerate(derivation.parts):
      walk((*path, which), part)

  walk((), tree)
  found = []
  for size in range(1, largest + 1):
    for chosen in itertools.combinations(nodes, size):
      top = min(chosen, key=len)
      if all(path == top or path[:-1] in chosen for path in chosen):
        found.append(
          (frozenset(chosen), tuple(sorted((path[len(top) :], nodes[path]) for path in chosen)))
        )
  return found


def weights_by_definition(trees: list[Derivation], largest: int) -> list[dict]:
  """Compound -> weight, of every derivation; compounds without weight are left out."""
  found = [occurrences(tree, largest) for tree in trees]
  kinds = {kind for one in found for _, kind in one}
  total = {kind: sum(kind == other for one in found for _, other in one) for kind in kinds}
  around = {}  # (inner, outer) -> occurrences of inner that lie inside one of outer
  for one in found:
    for nodes, kind in one:
      for outer in {other for more, other in one if nodes < more}:
        around[kind, outer] = around.get((kind, outer), 0) + 1
  result = []
  for one in found:
    weights = {}
    for nodes, kind in one:
      shares = [around[kind, other] / total[kind] for more, other in one if nodes < more]
      weights[kind] = max(weights.get(kind, 0), 1 - max(shares, default=0))
    result.append({kind: weight for kind, weight in weights.items() if weight > 1e-12})
  return result


@pytest.mark.parametrize("largest", [1, 2, 4])
def test_weights_are_those_of_the_definition(largest):
  chance = random.Random(largest)
  trees = [drawn(chance, 3) for _ in range(40)]
  wanted = weights_by_definition(trees, largest)
  found = compound_weights(trees, largest=largest).toarray()
  found[found < 1e-12] = 0
  columns = {kind for one in wanted for kind in one}
  table = np.array([[one.get(kind, 0) for kind in columns] for one in wanted])
  # Columns have no names: they are compared in sorted order.
  known, made = (sorted(map(tuple, t.T.round(9).tolist())) for t in (table, found))
  assert [one for one in made if any(one)] == known


def test_atoms_are_counted():
  trees = [Derivation("b", (Derivation("a"), Derivation("a"))), Derivation("c")]
  np.testing.assert_array_equal(atom_counts(trees).toarray(), [[2, 1, 0], [0, 0, 1]])


def test_the_chernoff_divergence_is_that_of_the_formula():
  train, test = np.array([2.0, 6.0, 0.0]), np.array([1.0, 0.0, 3.0])
  assert chernoff_divergence(train, test, 0.1) == pytest.approx(1 - 0.25**0.1 * 0.25**0.9)
  assert chernoff_divergence(train, 3 * train, 0.5) == pytest.approx(0)
  half = chernoff_divergence(np.array([1.0, 3.0]), np.array([3.0, 1.0]), 0.5)
  assert half == pytest.approx(1 - 2 * (3 / 16) ** 0.5)
  for arguments in ((train, test, 0.0), (train, test, 1.0), (train, 0 * test, 0.5)):
    with pytest.raises(UserError):
      chernoff_divergence(*arguments)


def pairs_of_rules(count: int) -> list[Derivation]:
  return [
    Derivation(f"top {i}", (Derivation(f"left {j}"), Derivation(f"right {k}")))
    for i, j, k in itertools.product(range(count), repeat=3)
  ]


def test_a_part_diverges_from_itself_by_nothing_and_from_another_by_compounds_alone():
  trees = pairs_of_rules(2)
  measure = Measure.of(trees)
  assert measure.divergences(range(8), range(8)) == pytest.approx((0, 0))
  even = [i for i, tree in enumerate(trees) if sum(int(rule[-1]) for rule in tree.rules()) % 2 == 0]
  odd = sorted(set(range(8)) - set(even))
  # Each atom is in half of both; every pair of two as well; whole trees are in one alone.
  atom, compound = measure.divergences(even, odd)
  assert atom == pytest.approx(0)
  assert compound > 0.1
  assert measure.divergences([0, 0, 7], [7]).compound < 1


def test_a_split_meets_both_bounds_and_follows_its_seed():
  measure = Measure.of(pairs_of_rules(6), largest=2)
  train, test = divergent_split(measure, 100, 30, seed=1, atom=0.05, compound=0.4)
  assert (len(train), len(test), set(train) & set(test)) == (100, 30, set())
  found = measure.divergences(train, test)
  assert found.atom <= 0.05
  assert found.compound >= 0.4
  assert divergent_split(measure, 100, 30, seed=1, atom=0.05, compound=0.4) == (train, test)
  assert divergent_split(measure, 100, 30, seed=2, atom=0.05, compound=0.4) != (train, test)


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: compound_weights([], largest=0), "largest is 0"),
    (lambda: Measure.of(pairs_of_rules(1)).divergences([0], []), "One of the two sets has no"),
    (
      lambda: compound_weights([Derivation(str(i)) for i in range(99)], largest=10),
      "largest is 10; with 99 rules",
    ),
    (lambda: divergent_split(Measure.of(pairs_of_rules(2)), 8, 1), "train is 8 and test is 1 of 8"),
    (
      lambda: divergent_split(Measure.of(pairs_of_rules(2)), 4, 4, atom=0.0, compound=0.9),
      "No split was found with atoms that diverge by 0.0 at most and compounds by 0.9",
    ),
  ],
)
def test_what_cannot_be_made_is_refused(make, match):
  with pytest.raises(UserError, match=match):
    make()


def test_nothing_has_no_compounds():
  assert compound_weights([]).shape == (0, 0)
