r"""How differently two sets of derivations use rules, and how differently they combine them.

An atom is a rule, a compound a connected part of a derivation. A split whose atoms are distributed
alike and whose compounds are not tests whether known rules are combined in new ways; splits of
maximum compound divergence (MCD) are made by this measure.

Source: Keysers et al. 2020, "Measuring Compositional Generalization: A Comprehensive Method on
Realistic Data", section 2.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from compmod_jax.core.errors import UserError, check

if TYPE_CHECKING:
  from scipy import sparse

ATOM_ALPHA, COMPOUND_ALPHA = 0.5, 0.1
LARGEST = 5
"""Rules of a compound at most, unless a call says otherwise. The larger they are, the fewer of them
any two sets share: whole sentences are in one set only."""
_STARTS, _ROUNDS = 10, 50  # from which a split is searched for, and exchanges from each
_DIGITS = 9  # of costs that count, so that the last bit of a power changes no split


class Derivation(NamedTuple):
  """How a sentence is derived: a tree of rules.

  Attributes:
    rule: name of the rule that is applied at the root.
    parts: derivations of what the rule joins, in its order.
  """

  rule: str
  parts: tuple["Derivation", ...] = ()

  def rules(self) -> Iterator[str]:
    """The rules, each before those below it."""
    yield self.rule
    for part in self.parts:
      yield from part.rules()


class Divergences(NamedTuple):
  """Of atoms and of compounds, each from 0 (distributed alike) to 1 (nothing shared)."""

  atom: float
  compound: float


def chernoff_divergence(train: np.ndarray, test: np.ndarray, alpha: float) -> float:
  r"""One less the Chernoff coefficient of two distributions.

  .. math:: D = 1 - \sum_k p_k^\alpha q_k^{1 - \alpha}

  A small alpha asks whether what is tested is trained at all, rather than how often.

  Args:
    train: weights of every kind, not negative, [kinds]; p when divided by their sum.
    test: the same of the other set, q.
    alpha: above 0 and below 1.

  Raises:
    UserError: alpha is out of range, or one side has no weight.

  Source: Keysers et al. 2020, section 2.
  """
  check(0 < alpha < 1, f"alpha is {alpha}; it must be above 0 and below 1.")
  sums = train.sum(), test.sum()
  check(min(sums) > 0, "One of the two sets has no atoms or compounds; give derivations of both.")
  shared = (train / sums[0]) ** alpha * (test / sums[1]) ** (1 - alpha)
  return float(1 - shared.sum())


@dataclasses.dataclass(frozen=True, eq=False)
class Measure:
  """Atoms and compounds of derivations, by which parts of them are compared.

  Attributes:
    atoms: see `atom_counts`.
    compounds: see `compound_weights`.
  """

  atoms: "sparse.csr_array"
  compounds: "sparse.csr_array"

  @classmethod
  def of(cls, derivations: Sequence[Derivation], *, largest: int = LARGEST) -> "Measure":
    """The atoms and compounds of derivations.

    Args:
      derivations: all that there are, of whatever part.
      largest: rules of a compound at most.

    Raises:
      UserError: see `compound_weights`.
    """
    return cls(atom_counts(derivations), compound_weights(derivations, largest=largest))

  def __len__(self) -> int:
    return len(self.atoms.indptr) - 1

  def divergences(self, train: Sequence[int], test: Sequence[int]) -> Divergences:
    """How far a training and a test part differ.

    Args:
      train: numbers of the training derivations; a number may come several times.
      test: of those of the test.

    Raises:
      UserError: a part is empty.
    """
    parts = (np.asarray(part, np.int64) for part in (train, test))
    return self.between(*(np.bincount(part, minlength=len(self)) for part in parts))

  def between(self, train: np.ndarray, test: np.ndarray) -> Divergences:
    """The same of parts that are given as how often each derivation is in them, [derivations]."""
    return Divergences(
      chernoff_divergence(self.atoms.T @ train, self.atoms.T @ test, ATOM_ALPHA),
      chernoff_divergence(self.compounds.T @ train, self.compounds.T @ test, COMPOUND_ALPHA),
    )


def atom_counts(derivations: Sequence[Derivation]) -> "sparse.csr_array":
  """How often every derivation applies every rule, [derivations, rules], rules sorted by name."""
  rules = [tuple(one.rules()) for one in derivations]
  numbers = {rule: i for i, rule in enumerate(sorted(set(itertools.chain(*rules))))}
  columns = np.array([numbers[rule] for one in rules for rule in one], np.int64)
  rows = np.repeat(np.arange(len(rules)), [len(one) for one in rules])
  shape = (len(rules), len(numbers))
  return _matrix((np.ones(len(rows)), (rows, columns)), shape)


def compound_weights(
  derivations: Sequence[Derivation], *, largest: int = LARGEST
) -> "sparse.csr_array":
  r"""The weight of every compound in every derivation, [derivations, compounds].

  .. math:: w(G, x) = \max_{g \in \mathrm{occ}(G, x)}
            \Bigl(1 - \max_{G' : g \prec g' \in \mathrm{occ}(G', x)} P(G' \mid G)\Bigr)

  where P(G' | G) is the share of all occurrences of G, in all derivations, that lie inside one of
  G'. A compound that stands in one larger compound only has no weight: the larger one tells all.

  Args:
    derivations: all that there are; P is measured on them.
    largest: rules of a compound at most, at least 1. Compounds that large have weight 1.

  Raises:
    UserError: `largest` is below 1, or so large that compounds cannot be numbered.

  Source: Keysers et al. 2020, section 2.
  """
  check(largest >= 1, f"largest is {largest}; a compound has at least 1 rule.")
  rows, codes, inner, outer = _occurrences(derivations, largest)
  kinds, kind = np.unique(codes, return_inverse=True)
  count = max(1, len(kinds))
  # An occurrence that lies inside two of one compound counts once. (`np.unique` takes seconds.)
  inside = np.sort(inner * count + kind[outer])
  inner, outer = np.divmod(inside[np.diff(inside, prepend=-1) > 0], count)
  pairs, pair = np.unique(kind[inner] * count + outer, return_inverse=True)
  share = np.bincount(pair) / np.bincount(kind)[pairs // count]
  weights = np.ones(len(rows))
  np.minimum.at(weights, inner, 1 - share[pair])
  cells, cell = np.unique(rows * count + kind, return_inverse=True)
  most = np.zeros(len(cells))
  np.maximum.at(most, cell, weights)
  matrix = _matrix((most, np.divmod(cells, count)), (len(derivations), len(kinds)))
  matrix.eliminate_zeros()
  return matrix


# Occurrences of compounds.

_Shape: TypeAlias = tuple["_Shape", ...]


def _occurrences(
  derivations: Sequence[Derivation], largest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """All occurrences of compounds, and which lie inside which.

  Derivations that differ in the names of rules alone are treated as one.

  Returns:
    Of every occurrence, the number of its derivation and a code of its compound, [occurrences];
    and pairs of occurrences, the second one strictly around the first, [pairs].
  """
  numbers: dict[str, int] = {}
  shapes: dict[_Shape, tuple[list[int], list[list[int]]]] = {}
  for row, derivation in enumerate(derivations):
    rows, labels = shapes.setdefault(_shape(derivation), ([], []))
    rows.append(row)
    labels.append([numbers.setdefault(rule, len(numbers) + 1) for rule in derivation.rules()])
  structures: dict[tuple[tuple[int, int], ...], int] = {}
  found = [[np.zeros(0, np.int64)] for _ in range(4)]
  start = 0
  for shape, (rows, labels) in shapes.items():
    parents = _parents(shape)
    places = _connected(parents, largest)
    names = np.pad(np.array(labels).T, ((0, 1), (0, 0)))  # the last one fills up small compounds
    codes = np.zeros((len(places), len(rows)), np.int64)
    for code, place in zip(codes, places, strict=True):
      above = [(place.index(parents[node][0]), parents[node][1]) for node in place[1:]]
      code += structures.setdefault(tuple(above), len(structures))
      for node in (*place, *[-1] * (largest - len(place))):
        code *= len(numbers) + 1
        code += names[node]
    sets = [frozenset(place) for place in places]
    within = [(i, j) for i, one in enumerate(sets) for j, other in enumerate(sets) if one < other]
    at = start + np.arange(codes.size).reshape(codes.shape)
    start += codes.size
    pairs = np.array(within, np.int64).reshape(-1, 2).T
    new = np.tile(rows, len(places)), codes, at[pairs[0]], at[pairs[1]]
    for all_found, one in zip(found, new, strict=True):
      all_found.append(one.ravel())
  check(
    len(structures) * (len(numbers) + 1) ** largest < 2**63,
    f"largest is {largest}; with {len(numbers)} rules compounds that large cannot be numbered:"
    " choose a smaller one.",
  )
  rows, codes, inner, outer = map(np.concatenate, found)
  return rows, codes, inner, outer


def _shape(derivation: Derivation) -> _Shape:
  return tuple(_shape(part) for part in derivation.parts)


def _parents(shape: _Shape) -> list[tuple[int, int]]:
  """Of every node, in the order of `Derivation.rules`: its parent, and which part of it it is."""
  found = [(-1, 0)]

  def walk(node: int, parts: _Shape) -> None:
    for which, part in enumerate(parts):
      found.append((node, which))
      walk(len(found) - 1, part)

  walk(0, shape)
  return found


def _connected(parents: Sequence[tuple[int, int]], largest: int) -> list[tuple[int, ...]]:
  """All connected sets of at most so many nodes, each in the order of its nodes."""
  below: list[list[int]] = [[] for _ in parents]
  for node, (parent, _) in enumerate(parents):
    if parent >= 0:
      below[parent].append(node)

  def rooted(node: int, room: int) -> list[tuple[int, ...]]:
    sets: list[tuple[int, ...]] = [(node,)]
    for child in below[node]:
      sets += [
        one + more for one in sets if len(one) < room for more in rooted(child, room - len(one))
      ]
    return sets

  return [one for node in range(len(parents)) for one in rooted(node, largest)]


# Splits.


def divergent_split(
  measure: Measure,
  train: int,
  test: int,
  *,
  seed: int | str = 0,
  atom: float = 0.02,
  compound: float = 0.55,
) -> tuple[list[int], list[int]]:
  """A split whose atoms diverge little and whose compounds diverge much.

  Greedy: from two parts that lie apart in a random direction, the derivations whose compounds both
  parts share most are exchanged for unused ones that share least, a few at a time, until both
  bounds are met. The same on every machine.

  Args:
    measure: of what is divided. Derivations that neither part takes are left over; with many of
      them to choose from, parts can differ more.
    train: how many derivations are for training.
    test: how many are for the test.
    seed: draws the beginning, and with it which split is found.
    atom: most divergence of atoms.
    compound: least divergence of compounds.

  Returns:
    Numbers of the training and of the test derivations, ascending.

  Raises:
    UserError: there are too few derivations, or no such split was found.

  Source: the bounds, Keysers et al. 2020.
  """
  count = len(measure)
  check(
    min(train, test) >= 1 and train + test <= count,
    f"train is {train} and test is {test} of {count} derivations; give at least 1 each, and"
    " together at most as many as there are.",
  )
  chance = random.Random(seed)
  for _ in range(_STARTS):
    search = _Search(measure, train, test, chance)
    for number in range(_ROUNDS):
      found = measure.between(*search.parts)
      if found.atom <= atom and found.compound >= compound:
        chosen = [np.flatnonzero(part).tolist() for part in search.parts]
        return chosen[0], chosen[1]
      search.exchange(number, unbalanced=found.atom > atom)
  raise UserError(
    f"No split was found with atoms that diverge by {atom} at most and compounds by {compound} at"
    f" least; the last one tried has {found.atom:.3f} and {found.compound:.3f}. Ask for smaller"
    " parts, or for less."
  )


class _Search:
  """Two parts of derivations, whose members are exchanged for unused ones.

  Attributes:
    parts: the training and the test part, bool [derivations] each.
  """

  def __init__(self, measure: Measure, train: int, test: int, chance: random.Random):
    self._measure = measure
    # Of the rules and compounds of a derivation: long ones count no more than short ones.
    self._rules, self._compounds = map(_rows_to_one, (measure.atoms, measure.compounds))
    count = len(measure)
    self._order = np.array([chance.random() for _ in range(count)]).argsort()
    direction = [chance.choice((-1.0, 1.0)) for _ in measure.compounds.sum(axis=0)]
    ranked = self._ranked((self._compounds @ direction).round(_DIGITS))
    self.parts = np.zeros(count, bool), np.zeros(count, bool)
    self.parts[0][ranked[:train]] = True
    self.parts[1][ranked[count - test :]] = True
    self._balance = 1.0

  def exchange(self, number: int, *, unbalanced: bool) -> None:
    """Exchanges members of both parts for derivations that cost less.

    Args:
      number: of the round; later ones exchange fewer.
      unbalanced: whether atoms diverge too much, and have to count for more.
    """
    self._balance *= 1.1 if unbalanced else 1 / 1.1
    alphas = COMPOUND_ALPHA, 1 - COMPOUND_ALPHA
    for own, other, alpha in zip(self.parts, self.parts[::-1], alphas, strict=True):
      cost = self._costs(own, other, alpha)
      ranked = self._ranked(cost)
      count = max(1, int(0.1 * 0.98**number * own.sum()))
      inside, outside = ranked[own[ranked]][::-1][:count], ranked[~(own | other)[ranked]][:count]
      inside = inside[: len(outside)]
      better = cost[outside] < cost[inside]
      own[inside[better]] = False
      own[outside[better]] = True

  def _costs(self, own: np.ndarray, other: np.ndarray, alpha: float) -> np.ndarray:
    """What having each derivation costs a part: how much of its compounds the other part has, and
    how much more of its rules this part has already than the other."""
    mine, theirs = (self._measure.compounds.T @ part for part in (own, other))
    shared = ((mine + 1) / mine.sum()) ** (alpha - 1) * (theirs / theirs.sum()) ** (1 - alpha)
    had, wanted = (self._measure.atoms.T @ part + 1 for part in (own, other))
    more = np.sqrt((had / had.sum()) / (wanted / wanted.sum()))
    return (self._compounds @ shared + self._balance * (self._rules @ more)).round(_DIGITS)

  def _ranked(self, costs: np.ndarray) -> np.ndarray:
    """Numbers of the derivations, cheapest first, equal ones in an order that the seed draws."""
    return self._order[np.argsort(costs[self._order], kind="stable")]


def _rows_to_one(matrix: "sparse.csr_array") -> "sparse.csr_array":
  """The matrix with rows that sum to 1, where they have a sum."""
  sums = np.repeat(matrix.sum(axis=1), np.diff(matrix.indptr))
  return _matrix((matrix.data / sums, matrix.indices, matrix.indptr), matrix.shape)


def _matrix(entries: tuple[object, ...], shape: tuple[int, int] | None) -> "sparse.csr_array":
  from scipy import sparse  # takes long to import, and all commands import what makes SCAN's splits

  return sparse.csr_array(entries, shape)
