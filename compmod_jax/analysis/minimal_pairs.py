"""How often a language model finds the right sentence of a minimal pair the likelier one."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from compmod_jax.data.minimal_pairs import MinimalPair
from compmod_jax.tasks.scorer import Scored


@dataclasses.dataclass(frozen=True)
class Accuracy:
  """Of a group of pairs.

  Attributes:
    group: name.
    pairs: how many.
    accuracy: share in which the right sentence is likelier.
    low: of its 95 % interval (Wilson 1927), like the next.
    high: see `low`.
    known: pairs without a word that the model does not know.
    known_accuracy: their accuracy; NaN if there are none.
    difference: mean of how much likelier the right one is, in nats.
    unknown: per cent of all tokens that are unknown words.
  """

  group: str
  pairs: int
  accuracy: float
  low: float
  high: float
  known: int
  known_accuracy: float
  difference: float
  unknown: float


@dataclasses.dataclass(frozen=True)
class Judged:
  """A pair and how the model scores it.

  Attributes:
    pair: the pair.
    difference: log-probability of the right sentence less that of the wrong one, in nats.
    unknown: tokens of either that are unknown words.
    tokens: of both, without the ends of beginnings.
  """

  pair: MinimalPair
  difference: float
  unknown: int
  tokens: int

  @property
  def right(self) -> float:
    """1 if the right sentence is likelier, 0 if the wrong one is, 0.5 if they are equal."""
    return 0.5 * (1 + float(np.sign(self.difference)))


def judge(pair: MinimalPair, good: Scored, bad: Scored) -> Judged:
  """Compares the two sentences of a pair; beginnings are scored without their ends."""
  first, second = (s.nll if pair.whole else s.nll[:-1] for s in (good, bad))
  totals = [float(np.sum(nll, dtype=np.float64)) for nll in (first, second)]
  tokens = len(first) + len(second)
  return Judged(pair, totals[1] - totals[0], good.unknown + bad.unknown, tokens)


def accuracies(judged: Sequence[Judged]) -> list[Accuracy]:
  """Accuracy of every group in the order of first appearance, then that of `all`."""
  groups: dict[str, list[Judged]] = {}
  for one in judged:
    groups.setdefault(one.pair.group, []).append(one)
  named = [*groups.items(), ("all", list(judged))] if len(groups) != 1 else [("all", list(judged))]
  return [_accuracy(name, some) for name, some in named]


def _accuracy(group: str, judged: Sequence[Judged]) -> Accuracy:
  known = [one.right for one in judged if not one.unknown]
  share = float(np.mean([one.right for one in judged]))
  low, high = wilson(share, len(judged))
  return Accuracy(
    group,
    len(judged),
    share,
    low,
    high,
    len(known),
    float(np.mean(known)) if known else math.nan,
    float(np.mean([one.difference for one in judged])),
    100 * sum(one.unknown for one in judged) / max(sum(one.tokens for one in judged), 1),
  )


def wilson(share: float, count: int, z: float = 1.959964) -> tuple[float, float]:
  """The interval of a proportion.

  Source: Wilson 1927.
  """
  centre = (share + z * z / (2 * count)) / (1 + z * z / count)
  reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
  return max(centre - reach, 0.0), min(centre + reach, 1.0)  # they differ by rounding alone
