"""The tables of the report on heads."""

import itertools
from collections.abc import Callable, Mapping, Sequence

from compmod_jax.analysis.heads.findings import Finding
from compmod_jax.analysis.labels import Labels
from compmod_jax.analysis.report.page import Table

QUANTITIES = ("weight", "norm", "norm_scaled")


def units(found: Sequence[Finding]) -> Table:
  """A row for each unit: mean weight, norms before and after scaling, norm of the signature."""
  rows = []
  for finding in found:
    totals = finding.totals
    for unit in range(finding.module.units):
      means = [
        float(totals.mean(name)[unit]) if name in totals.sums else None for name in QUANTITIES
      ]
      signature = float(totals.signatures[unit]) if len(totals.signatures) else None
      rows.append([finding.module.title, f"{finding.module.unit} {unit}", *means, signature])
  columns = ("module", "unit", "mean weight", "norm before", "norm after", "signature norm")
  caption = "Means over tokens. Norms are Euclidean, of a unit's output before and after weighting."
  return Table("units", columns, rows, caption)


def information(found: Sequence[Finding]) -> Table:
  """A row for each routed module and kind of category."""
  rows = [
    [
      finding.module.title,
      name,
      info.bits,
      info.shuffled.value,
      info.shuffled.low,
      info.shuffled.high,
      info.untrained,
      info.limit,
      info.tokens,
    ]
    for finding in found
    for name, info in finding.information.items()
  ]
  columns = (
    "module", "category", "bits", "shuffled", "2.5 %", "97.5 %", "untrained", "limit", "tokens",
  )  # fmt: skip
  caption = (
    "Mutual information in bits of the unit (weights as probabilities) and the category of the"
    " token. Shuffled: the same categories dealt out at random, mean and central 95 %. Untrained:"
    " the same model with fresh parameters. Limit: what certainty would give."
  )
  return Table("information", columns, rows, caption)


def agreement(found: Sequence[Finding]) -> Table:
  """A row for each routed module: rank correlations of weight and norm."""
  rows = []
  for finding in found:
    if (a := finding.agreement) is not None:
      intervals = (*a.pairs, *a.within, a.untrained_between, a.untrained_pairs)
      rows.append([finding.module.title, a.between, *intervals, a.batches, a.tokens])
  columns = (
    "module", "over units", "over pairs", "low", "high", "within a unit", "low ", "high ",
    "untrained, units", "untrained, pairs", "batches", "tokens",
  )  # fmt: skip
  caption = (
    "Spearman's correlation of log weight and log norm before scaling. Over units: of the means of"
    " a batch, averaged over batches. Over pairs: all (token, unit) pairs of the tokens in the last"
    " column, a random sample where there are more. Within a unit: over tokens, averaged over"
    " units. Intervals: 95 %, from blocks of sentences."
  )
  return Table("weight_and_norm", columns, rows, caption)


def redundancy(found: Sequence[Finding]) -> Table:
  """A row for each pair of units of a module; for the CSV file."""
  rows = []
  for finding in found:
    for one in range(finding.module.units):
      for other in range(one):
        values = [
          float(matrix[one, other]) if matrix.size else None
          for matrix in (finding.similarity, finding.weight_correlation)
        ]
        rows.append([finding.module.name, other, one, *values])
  columns = ("module", "unit", "other unit", "cka", "weight correlation")
  return Table("redundancy", columns, rows, shown=False)


def categories(
  found: Sequence[Finding], labels: Mapping[str, Sequence[Labels]], stream: Callable[[str], str]
) -> Table:
  """A row for each module, category and unit; for the CSV file.

  Args:
    found: of the modules.
    labels: stream -> its labels.
    stream: from a module's site to its stream.
  """
  rows = []
  for finding in found:
    totals, module = finding.totals, finding.module
    for made in labels[stream(module.outputs)]:
      means = {name: totals.by(made.name, name) for name in QUANTITIES if name in totals.sums}
      counts = totals.sums["by"][made.name]["count"]
      places = itertools.product(enumerate(made.categories), range(module.units))
      for (number, category), unit in places:
        values = [float(means[n][number, unit]) if n in means else None for n in QUANTITIES]
        rows.append([module.name, made.name, category, unit, int(counts[number]), *values])
  columns = ("module", "labels", "category", "unit", "tokens", "weight", "norm", "norm after")
  return Table("categories", columns, rows, shown=False)
