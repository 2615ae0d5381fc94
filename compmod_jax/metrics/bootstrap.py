"""How sure scores are: resampled test sets."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compmod_jax.core.errors import check
from compmod_jax.metrics.statistics import Statistics

_CELLS = 1 << 22  # numbers drawn at once while resampling: bounds its memory


@dataclass(frozen=True)
class Interval:
  """A value between two bounds that hold it with probability `level`."""

  value: float
  low: float
  high: float
  level: float


@dataclass(frozen=True)
class Comparison:
  """How much better the second of two systems is on the same sentences."""

  difference: Interval
  """Score of the second less score of the first."""
  p: float
  """Two-sided: how often a difference this large comes by chance if there is none."""


def bootstrap_interval(
  statistics: Statistics, *, seed: int = 0, samples: int = 1000, level: float = 0.95
) -> Interval:
  """Percentile bootstrap over sentences: the range of scores of resampled test sets.

  Args:
    statistics: of the test set.
    seed: the same seed gives the same interval.
    samples: resampled test sets.
    level: probability that the interval is to hold, in (0, 1).

  Returns:
    The score of the test set itself and the interval, in points.

  Raises:
    UserError: samples below 1 or level outside (0, 1).

  Source: Koehn 2004.
  """
  drawn = _resample([statistics], seed, samples, level)[0]
  return _interval(statistics.score().value, drawn, level)


def ratio_interval(
  numerators: np.ndarray,
  denominators: np.ndarray,
  *,
  seed: int = 0,
  samples: int = 1000,
  level: float = 0.95,
) -> Interval:
  """The same of a ratio of two sums over sentences, such as a relative error.

  Args:
    numerators: of every sentence, [n].
    denominators: of every sentence, [n].
    seed: as in `bootstrap_interval`, like `samples` and `level`.

  Returns:
    The ratio of the sums and its interval; NaN where all denominators are 0.
  """
  rows = np.stack([numerators, denominators], axis=1).astype(np.float64)
  statistics = Statistics("loss", "ratio of sums", rows)
  return bootstrap_interval(statistics, seed=seed, samples=samples, level=level)


def paired_bootstrap(
  first: Statistics,
  second: Statistics,
  *,
  seed: int = 0,
  samples: int = 1000,
  level: float = 0.95,
) -> Comparison:
  """Compares two systems on the same sentences, resampled together.

  Args:
    first: statistics of the baseline.
    second: statistics of the other system: same metric, same references in the same order.
    seed: as in `bootstrap_interval`, like `samples` and `level`.

  Returns:
    Difference second - first with its interval, and p: the share of resampled differences, shifted
    to mean zero, at least as large as the one observed (one added above and below the line). NaN
    where a test set has no score, such as one without a token.

  Raises:
    UserError: different metrics or numbers of sentences; otherwise as `bootstrap_interval`.

  Source: Koehn 2004; the p value after Riezler and Maxwell 2005, as in sacreBLEU.
  """
  check(
    (first.metric, first.signature) == (second.metric, second.signature),
    f"the statistics are of {first.metric} [{first.signature}] and {second.metric} "
    f"[{second.signature}]; compare two systems by one metric.",
  )
  check(
    len(first.rows) == len(second.rows),
    f"the statistics have {len(first.rows)} and {len(second.rows)} sentences; a paired comparison "
    "needs the same test set.",
  )
  drawn_first, drawn_second = _resample([first, second], seed, samples, level)
  drawn = drawn_second - drawn_first
  observed = second.score().value - first.score().value
  as_large = np.abs(drawn - drawn.mean()) >= abs(observed) - 1e-12
  p = np.nan if np.isnan(drawn).any() else (as_large.sum() + 1) / (samples + 1)
  return Comparison(_interval(observed, drawn, level), float(p))


def _resample(
  systems: Sequence[Statistics], seed: int, samples: int, level: float
) -> list[np.ndarray]:
  """Scores of `samples` resampled test sets, the same ones for every system."""
  check(samples >= 1, f"samples is {samples}; it must be at least 1.")
  check(0 < level < 1, f"level is {level}; it must lie between 0 and 1, for example 0.95.")
  if systems[0].metric == "loss":
    # Sentences without a token add nothing, drawn or not; a test set of them alone has no loss.
    counted = np.any([statistics.rows.any(axis=1) for statistics in systems], axis=0)
    if counted.any():
      systems = [statistics.part(np.flatnonzero(counted)) for statistics in systems]
  rng = np.random.default_rng(seed)
  sentences = len(systems[0].rows)
  sums: list[list[np.ndarray]] = [[] for _ in systems]
  for start in range(0, samples, at_once := max(1, _CELLS // sentences)):
    size = min(at_once, samples - start)
    drawn = rng.integers(sentences, size=(size, sentences))
    # How often each sentence was drawn: then a resampled corpus is one row of a matrix product.
    drawn += np.arange(size)[:, None] * sentences
    counts = np.bincount(drawn.ravel(), minlength=size * sentences).reshape(size, sentences)
    for found, statistics in zip(sums, systems, strict=True):
      found.append(counts.astype(np.float64) @ statistics.rows)
  return [
    statistics.values(np.concatenate(found))
    for found, statistics in zip(sums, systems, strict=True)
  ]


def _interval(value: float, drawn: np.ndarray, level: float) -> Interval:
  low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
  return Interval(value, float(low), float(high), level)
