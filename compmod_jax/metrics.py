"""Scores of a list of outputs against a list of references, and how sure they are.

A corpus score is a function of sums of per-sentence statistics (n-gram matches, lengths, ...), so
a resampled corpus costs one more sum: `sentence_statistics` is computed once, `bootstrap_interval`
and `paired_bootstrap` resample its rows. BLEU and chrF are sacreBLEU's; everything works offline.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from compmod_jax.errors import check, check_choice

MetricName = Literal["bleu", "bleu_lowercase", "chrf", "exact_match"]

_NAMES: dict[str, str] = {
  "bleu": "BLEU",
  "bleu_lowercase": "BLEU (lower case)",
  "chrf": "chrF2",
  "exact_match": "exact match",
}
_CELLS = 1 << 22  # numbers drawn at once while resampling: bounds its memory


@dataclass(frozen=True)
class Score:
  """A corpus score and the settings that it stands for."""

  name: str
  """How tables call it."""
  value: float
  """Between 0 and 100, higher is better."""
  signature: str
  """sacreBLEU's signature, or the equivalent."""

  def __str__(self) -> str:
    return f"{self.name} {self.value:.2f} [{self.signature}]"


@dataclass(frozen=True)
class Statistics:
  """What a metric sums over sentences."""

  metric: MetricName
  signature: str
  rows: np.ndarray
  """float64 [sentences, statistics], whole numbers; an order of their own for each metric."""

  def score(self) -> Score:
    """The corpus score; for BLEU and chrF exactly sacreBLEU's."""
    value = _value(self.metric, self.rows.sum(axis=0))
    return Score(_NAMES[self.metric], value, self.signature)


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


@dataclass(frozen=True)
class Perplexity:
  """exp of the mean negative log likelihood; dimensionless."""

  per_token: float
  """Over the tokenizer's pieces, end tokens included as far as they were counted."""
  per_word: float
  """Over whitespace words: comparable between tokenizers."""


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
  """Corpus BLEU on detokenised text (13a tokenisation, case kept, exponential smoothing).

  Args:
    hypotheses: outputs, plain text, one a sentence; empty ones count as empty.
    references: as many references, raw text.

  Returns:
    0 to 100, with sacreBLEU's signature.

  Raises:
    UserError: unequal numbers of sentences, or none.

  Source: Papineni et al. 2002; Post 2018 (sacreBLEU).
  """
  return score("bleu", hypotheses, references)


def bleu_lowercase(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
  """`bleu` after lower-casing both sides, to stand beside published lower-cased figures only."""
  return score("bleu_lowercase", hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
  """Corpus chrF2 (character 6-grams, recall counted twice); arguments and errors as in `bleu`.

  Source: Popović 2015.
  """
  return score("chrf", hypotheses, references)


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
  """Percentage of outputs equal to their reference, runs of whitespace counting as one space.

  Arguments and errors as in `bleu`.
  """
  return score("exact_match", hypotheses, references)


def score(metric: MetricName, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
  """The corpus score `metric`; arguments and errors as in `bleu`."""
  return sentence_statistics(metric, hypotheses, references).score()


def perplexity(nats: float, tokens: int, words: int) -> Perplexity:
  r"""Perplexities of a corpus from its sums.

  .. math:: \mathrm{ppl} = \exp(-\tfrac{1}{n} \sum \log p), \quad n \text{ tokens or words}

  Args:
    nats: summed negative log likelihood of all predicted tokens, without smoothing.
    tokens: predicted tokens (end tokens included if their likelihood is).
    words: whitespace words of the references (`count_words`).

  Returns:
    Both; infinite where the mean is too large for a float.

  Raises:
    UserError: a count below 1.
  """
  for field, count in (("tokens", tokens), ("words", words)):
    check(count >= 1, f"{field} is {count}; a perplexity needs at least one.")

  def per(count: int) -> float:
    try:
      return math.exp(nats / count)
    except OverflowError:
      return math.inf

  return Perplexity(per(tokens), per(words))


def count_words(sentences: Sequence[str]) -> int:
  """Whitespace words in all of `sentences`."""
  return sum(len(sentence.split()) for sentence in sentences)


def sentence_statistics(
  metric: MetricName, hypotheses: Sequence[str], references: Sequence[str]
) -> Statistics:
  """What `metric` sums over sentences, one row each; arguments and errors as in `bleu`."""
  check_choice("metric", metric, _NAMES)
  check(
    len(hypotheses) == len(references),
    f"there are {len(hypotheses)} hypotheses for {len(references)} references; a score needs one "
    "hypothesis for each reference, empty lines included.",
  )
  check(len(references) > 0, "there are 0 references; a score needs at least one sentence.")
  if metric == "exact_match":
    pairs = zip(hypotheses, references, strict=True)
    rows = [[float(h.split() == r.split()), 1.0] for h, r in pairs]
    return Statistics(metric, "nrefs:1|case:mixed|whitespace:normalised", np.array(rows))
  scorer = _scorer(metric)
  rows = scorer._extract_corpus_statistics(hypotheses, [references])
  return Statistics(metric, str(scorer.get_signature()), np.array(rows, np.float64))


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
    to mean zero, at least as large as the one observed (one added above and below the line).

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
  p = (as_large.sum() + 1) / (samples + 1)
  return Comparison(_interval(observed, drawn, level), float(p))


def score_outputs(outputs: list[str], references: list[str]) -> dict[str, Any]:
  """BLEU with a 95 % bootstrap interval and its signature, chrF and exact match, 0 to 100."""
  statistics = sentence_statistics("bleu", outputs, references)
  interval = bootstrap_interval(statistics)
  characters = chrf(outputs, references)
  return {
    "bleu": interval.value,
    "bleu_low": interval.low,
    "bleu_high": interval.high,
    "chrf": characters.value,
    "exact_match": exact_match(outputs, references).value,
    "signature": statistics.signature,
    "chrf_signature": characters.signature,
  }


def _resample(
  systems: Sequence[Statistics], seed: int, samples: int, level: float
) -> list[np.ndarray]:
  """Scores of `samples` resampled test sets, the same ones for every system."""
  check(samples >= 1, f"samples is {samples}; it must be at least 1.")
  check(0 < level < 1, f"level is {level}; it must lie between 0 and 1, for example 0.95.")
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
    np.array([_value(statistics.metric, row) for row in np.concatenate(found)])
    for found, statistics in zip(sums, systems, strict=True)
  ]


def _interval(value: float, drawn: np.ndarray, level: float) -> Interval:
  low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
  return Interval(value, float(low), float(high), level)


def _value(metric: MetricName, sums: np.ndarray) -> float:
  """The score of a corpus whose statistics add up to `sums`."""
  if metric == "exact_match":
    return float(100.0 * sums[0] / sums[1])
  whole = [round(number) for number in sums.tolist()]
  return float(_scorer(metric)._aggregate_and_compute([whole]).score)


@functools.cache
def _scorer(metric: MetricName) -> Any:
  # `force` only silences a warning about tokenised text, which a library has no place to print.
  if metric == "chrf":
    return CHRF()
  return BLEU(lowercase=metric == "bleu_lowercase", force=True)
