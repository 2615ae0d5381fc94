"""Scores of a list of outputs against a list of references, and perplexities.

BLEU and chrF are sacreBLEU's; everything works offline.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compmod_jax.core.errors import check
from compmod_jax.metrics.bootstrap import bootstrap_interval, paired_bootstrap
from compmod_jax.metrics.statistics import (
  MetricName,
  Score,
  Statistics,
  loss_statistics,
  sentence_statistics,
)

__all__ = [
  "MetricName",
  "Perplexity",
  "Score",
  "Statistics",
  "bleu",
  "bleu_lowercase",
  "bootstrap_interval",
  "chrf",
  "count_words",
  "exact_match",
  "loss_statistics",
  "paired_bootstrap",
  "perplexity",
  "score",
  "score_outputs",
  "sentence_statistics",
]


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
