"""From the sums of a pass over a split to statistics of each module."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from compmod_jax.analysis.heads.specialisation import (
  Estimate,
  correlation,
  entropy,
  estimate_from_blocks,
  linear_cka,
  mutual_information,
  spearman,
)
from compmod_jax.analysis.heads.sums import Totals
from compmod_jax.analysis.subject import Module

_BINS = 10


class Information(NamedTuple):
  """Mutual information of unit and category, in bits.

  Attributes:
    bits: as measured.
    shuffled: mean over shuffled categories, and the bounds of their central 95 %.
    most: the most of any shuffle.
    untrained: of the same model before training; NaN if not measured.
    limit: what it would be if the category determined the unit, or the unit the category, with
      certainty.
    tokens: that have a category.
  """

  bits: float
  shuffled: Estimate
  most: float
  untrained: float
  limit: float
  tokens: int


class Agreement(NamedTuple):
  """Spearman's correlation of log weight and log norm before scaling.

  Logarithms leave ranks as they are, so that none is taken.

  Attributes:
    between: over units, of the means of a batch; the mean over batches.
    batches: how many.
    pairs: over all (token, unit) pairs.
    within: over tokens, within each unit; the mean over units.
    tokens: how many.
    untrained_between: `between` before training, like the next; NaN if not measured.
    untrained_pairs: `pairs` before training.
  """

  between: float
  batches: int
  pairs: Estimate
  within: Estimate
  tokens: int
  untrained_between: float
  untrained_pairs: float


class Finding(NamedTuple):
  """Statistics of one module.

  Attributes:
    module: which.
    totals: its sums.
    information: name of the labels -> how much categories tell of units; empty without a router.
    agreement: of weights and norms; None without a router.
    similarity: linear CKA of the units' outputs [units, units]; empty where they are not shown.
    weight_correlation: Pearson's correlation of the units' weights over tokens [units, units].
    deciles: unit -> (mean norm, mean weight) of the tokens in each tenth of its norms.
  """

  module: Module
  totals: Totals
  information: dict[str, Information]
  agreement: Agreement | None
  similarity: np.ndarray
  weight_correlation: np.ndarray
  deciles: dict[str, tuple[np.ndarray, np.ndarray]]


def findings(totals: Sequence[Totals], before: Sequence[Totals] = ()) -> list[Finding]:
  """Statistics of every module.

  Args:
    totals: sums of the model.
    before: those of the same model untrained, for routed modules.
  """
  fresh = {found.module.name: found for found in before}
  return [_finding(found, fresh.get(found.module.name)) for found in totals]


def _finding(totals: Totals, before: Totals | None) -> Finding:
  module, sums = totals.module, totals.sums
  empty = np.zeros((0, 0))
  similarity, weights = empty, empty
  if module.dim:
    second, total = sums["outputs_second"], sums["outputs"]
    similarity = linear_cka(second, total, float(sums["count"]), module.units)
  if module.routed:
    weights = correlation(sums["weight_second"], sums["weight"], float(sums["count"]))
  measured = module.routed and module.dim > 0
  return Finding(
    module,
    totals,
    _information(totals, before) if module.routed else {},
    _agreement(totals, before) if measured else None,
    similarity,
    weights,
    _deciles(totals) if measured else {},
  )


def _information(totals: Totals, before: Totals | None) -> dict[str, Information]:
  found = {}
  for name, sums in totals.sums["by"].items():
    table = sums["weight"]
    bits = mutual_information(table)
    shuffled = bits[1:]
    spread = Estimate(math.nan, math.nan, math.nan)
    if len(shuffled):
      low, high = np.quantile(shuffled, [0.025, 0.975])
      spread = Estimate(float(shuffled.mean()), float(low), float(high))
    untrained = math.nan
    if before is not None:
      untrained = float(mutual_information(before.sums["by"][name]["weight"][0]))
    limit = min(entropy(table[0].sum(axis=0)), entropy(table[0].sum(axis=1)))
    most = float(shuffled.max(initial=0.0)) if len(shuffled) else math.nan
    tokens = round(float(sums["count"].sum()))
    found[name] = Information(float(bits[0]), spread, most, untrained, limit, tokens)
  return found


def _agreement(totals: Totals, before: Totals | None) -> Agreement:
  values, blocks = totals.sampled
  parts = [values[blocks == block] for block in np.unique(blocks)]

  def estimate(statistic) -> Estimate:
    return estimate_from_blocks(statistic(values), [statistic(part) for part in parts])

  untrained = (math.nan, math.nan)
  if before is not None:
    untrained = (_mean(before.between), _pairs(before.sampled[0]))
  return Agreement(
    _mean(totals.between),
    len(totals.between),
    estimate(_pairs),
    estimate(_within),
    len(values),
    *untrained,
  )


def _mean(values: np.ndarray) -> float:
  values = values[np.isfinite(values)]
  return float(values.mean()) if len(values) else math.nan


def _pairs(values: np.ndarray) -> float:
  return spearman(values[:, 0], values[:, 1]) if len(values) else math.nan


def _within(values: np.ndarray) -> float:
  units = range(values.shape[2]) if len(values) else ()
  return _mean(np.array([spearman(values[:, 0, unit], values[:, 1, unit]) for unit in units]))


def _deciles(totals: Totals) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  values, _ = totals.sampled
  found = {}
  for unit in range(totals.module.units if len(values) >= _BINS else 0):
    order = np.argsort(values[:, 1, unit], kind="stable")
    tenths = np.array_split(order, _BINS)
    norms = np.array([values[tenth, 1, unit].mean() for tenth in tenths])
    found[str(unit)] = (norms, np.array([values[tenth, 0, unit].mean() for tenth in tenths]))
  return found


def record(finding: Finding) -> dict[str, Any]:
  """The numbers of a module as plain values."""
  totals, module = finding.totals, finding.module
  names = [name for name in ("weight", "norm", "norm_scaled") if name in totals.sums]
  by = {
    labels: {name: totals.by(labels, name).tolist() for name in names}
    | {"tokens": found["count"].tolist()}
    for labels, found in totals.sums["by"].items()
  }
  return {
    "kind": module.kind,
    "units": module.units,
    "routed": module.routed,
    "tokens": float(totals.sums["count"]),
    "mean": {name: totals.mean(name).tolist() for name in names},
    "signature_norm": totals.signatures.tolist(),
    "by": by,
    "information": {
      name: {**found._asdict(), "shuffled": found.shuffled._asdict()}
      for name, found in finding.information.items()
    },
    "agreement": None
    if finding.agreement is None
    else {
      **finding.agreement._asdict(),
      "pairs": finding.agreement.pairs._asdict(),
      "within": finding.agreement.within._asdict(),
    },
    "similarity": finding.similarity.tolist(),
    "weight_correlation": finding.weight_correlation.tolist(),
  }
