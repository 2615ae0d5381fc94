"""What metrics sum over sentences.

A corpus score is a function of sums of per-sentence statistics (n-gram matches, lengths, ...), so
a resampled corpus costs one more sum: `sentence_statistics` is computed once, and `bootstrap`
resamples its rows.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from compmod_jax.core import extras
from compmod_jax.core.errors import check, check_choice

MetricName = Literal["bleu", "bleu_lowercase", "chrf", "exact_match", "loss"]

_NAMES: dict[str, str] = {
  "bleu": "BLEU",
  "bleu_lowercase": "BLEU (lower case)",
  "chrf": "chrF2",
  "exact_match": "exact match",
  "loss": "loss",
}


@dataclass(frozen=True)
class Score:
  """A corpus score and the settings that it stands for."""

  name: str
  """How tables call it."""
  value: float
  """Between 0 and 100, higher is better; of a loss, nats per token, lower is better."""
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
  """float64 [sentences, statistics], an order of their own for each metric; whole numbers but for
  a loss."""

  def score(self) -> Score:
    """The corpus score; for BLEU and chrF exactly sacreBLEU's."""
    value = float(self.values(self.rows.sum(axis=0, keepdims=True))[0])
    return Score(_NAMES[self.metric], value, self.signature)

  def part(self, numbers: np.ndarray) -> "Statistics":
    """Those of the sentences with these numbers, in this order."""
    return dataclasses.replace(self, rows=self.rows[numbers])

  def values(self, sums: np.ndarray) -> np.ndarray:
    """Scores [n] of n corpora whose statistics add up to `sums` [n, statistics].

    `values(rows)` are the scores of single sentences, which mean little for BLEU.
    """
    if self.metric in ("exact_match", "loss"):
      factor = 100.0 if self.metric == "exact_match" else 1.0
      return factor * sums[:, 0] / np.where(sums[:, 1], sums[:, 1], np.nan)
    scorer = _scorer(self.metric)
    rows = np.rint(sums).astype(np.int64).tolist()
    return np.array([scorer._aggregate_and_compute([row]).score for row in rows])


def sentence_statistics(
  metric: MetricName, hypotheses: Sequence[str], references: Sequence[str]
) -> Statistics:
  """What `metric` sums over sentences, one row each; arguments and errors as in `text.bleu`."""
  check_choice("metric", metric, [name for name in _NAMES if name != "loss"])
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


def loss_statistics(
  nats: Sequence[float] | np.ndarray, counts: Sequence[float] | np.ndarray
) -> Statistics:
  """What a mean loss sums over sentences: nats, and the tokens (or words) that they are for.

  Args:
    nats: negative log likelihood of every sentence.
    counts: over how many tokens, as many numbers.

  Raises:
    UserError: unequal numbers, or nothing is counted.
  """
  check(
    len(nats) == len(counts) and sum(counts) > 0,
    f"there are {len(nats)} losses for {len(counts)} counts of {sum(counts):g} tokens; a mean loss"
    " needs one count for each loss and at least one token.",
  )
  return Statistics("loss", "nats per token", np.stack([nats, counts], axis=1).astype(np.float64))


@functools.cache
def _scorer(metric: MetricName) -> Any:
  with extras.needed():  # here, as opening and using a model needs no scores
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

  if metric == "chrf":
    return CHRF()
  # `force` only silences a warning about tokenised text, which a library has no place to print.
  return BLEU(lowercase=metric == "bleu_lowercase", force=True)
