"""The report on heads and experts: a short summary, figures and tables, largest effects first."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from compmod_jax.analysis.heads import figures, over_training
from compmod_jax.analysis.heads.findings import Finding, record
from compmod_jax.analysis.heads.measure import Heads, Measured
from compmod_jax.analysis.labels import POSITION, TAG, WORD, Labels
from compmod_jax.analysis.reading import reader, word_key
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject


def make_page(settings: Heads, subject: Subject, found: Measured) -> Page:
  """What was found of heads and experts."""
  labels, findings = found
  stream = reader(subject.task).stream
  routed = sum(finding.module.routed for finding in findings)
  count = len(subject.numbers)
  return Page(
    title=f"Heads and experts on {subject.split}",
    description=f"{subject.task.describe()} Read: {count:,} examples of the split"
    f" {subject.split!r}; a decoder reads its references, and its position's word is the one read"
    " there, before the one that it predicts. Start tokens and padding are left out.",
    summary=[*summary(findings), *_words_not_found(settings.words, labels)],
    sections=list(_sections(subject, stream, found)),
    tiles=[
      ("examples", f"{count:,}", f"of the split {subject.split}"),
      ("modules", f"{len(findings)}", f"{routed} of them routed"),
    ],
    data={
      "split": subject.split,
      "examples": count,
      "settings": dataclasses.asdict(settings),
      "labels": {
        stream: {one.name: list(one.categories) for one in made} for stream, made in labels.items()
      },
      "streams": {one.module.name: stream(one.module.outputs) for one in findings},
      "modules": {finding.module.name: record(finding) for finding in findings},
    },
  )


def summary(found: Sequence[Finding]) -> Iterator[str]:
  """The extremes of every measure; the tables have the rest."""
  routed = [finding for finding in found if finding.module.routed]
  if routed:
    ranges = [(float(np.ptp(f.totals.mean("weight"))), f) for f in routed]
    _, most = max(ranges, key=lambda pair: pair[0])
    weights = most.totals.mean("weight")
    yield (
      f"Mean weights are least even in {most.module.title}: {weights.min():.2f} to"
      f" {weights.max():.2f} (equal shares: {1 / most.module.units:.2f})."
    )
  else:
    yield "No module of this model has a router: nothing competes."
  for name in (TAG, WORD, POSITION):
    infos = [(f.information[name], f) for f in routed if name in f.information]
    if infos:
      info, most = max(infos, key=lambda pair: pair[0].bits)
      beyond = [one for one, _ in infos if math.isfinite(one.most) and one.bits > one.most]
      learned = [one for one in beyond if not one.bits <= one.untrained]
      share = f", {100 * info.bits / info.limit:.0f} % of the limit" if info.limit > 0 else ""
      yield (
        f"Specialisation by {name}: more information than any shuffle in {len(beyond)} of"
        f" {len(infos)} modules, and than the untrained model in {len(learned)}; most in"
        f" {most.module.title}: {info.bits:.3f} bits{share} (shuffled {info.shuffled.value:.4f})."
      )
  pairs = [
    (f.agreement.pairs, f)
    for f in routed
    if f.agreement is not None and math.isfinite(f.agreement.pairs.value)
  ]
  if pairs:
    negative, positive = sum(p.high < 0 for p, _ in pairs), sum(p.low > 0 for p, _ in pairs)
    estimate, most = max(pairs, key=lambda pair: abs(pair[0].value))
    yield (
      "Do norms cancel weights? Spearman's correlation of weight and norm before scaling is"
      f" negative beyond chance in {negative} of {len(pairs)} modules and positive in {positive};"
      f" largest in {most.module.title}: {estimate.value:+.2f}."
    )
  ratios = [
    (float(norms.max() / max(norms.min(), 1e-12)), f)
    for f in found
    if f.module.dim
    for norms in (f.totals.mean("norm"),)
  ]
  if ratios:
    ratio, most = max(ratios, key=lambda pair: pair[0])
    yield (
      "Norms: the unit with the longest output exceeds the one with the shortest by a factor of"
      f" {np.median([ratio for ratio, _ in ratios]):.2f} in the median module, at most"
      f" {ratio:.2f} ({most.module.title})."
    )
  alike = [(float(v), f) for f in found for v in _below_diagonal(f.similarity) if np.isfinite(v)]
  if alike:
    value, most = max(alike, key=lambda pair: pair[0])
    median = np.median([value for value, _ in alike])
    yield (
      f"Redundancy: two units of a module have a linear CKA of {median:.2f} in the median, at most"
      f" {value:.2f} ({most.module.title})."
    )


def _below_diagonal(matrix: np.ndarray) -> np.ndarray:
  return matrix[np.tril_indices(len(matrix), -1)]


def _words_not_found(words: Sequence[str], labels: Mapping[str, Sequence[Labels]]) -> list[str]:
  seen = {c for made in labels.values() for one in made if one.name == WORD for c in one.categories}
  missing = [word for word in words if word_key(word) not in seen]
  return [f"Not among the words read: {', '.join(missing)}."] if missing else []


def _sections(
  subject: Subject, stream: Callable[[str], str], measured: Measured
) -> Iterator[Section]:
  labels, found = measured
  yield Section("By position", [*figures.positions(found)])
  worded = [*figures.categories(found, labels, stream, WORD)]
  yield Section("By word", worded, () if worded else ("No words were asked for.",))
  tagged = [*figures.categories(found, labels, stream, TAG)]
  no_gold = () if tagged else ("The data have no gold parts of speech.",)
  everything = _categories_table(found, labels, stream)
  yield Section("By part of speech", [*tagged, everything], no_gold)
  if any(finding.module.routed for finding in found):
    yield Section("Specialisation", [*figures.information(found), _information_table(found)])
    yield Section("Weights against norms", [*figures.agreement(found), _agreement_table(found)])
  yield Section("Redundancy", [*figures.redundancy(found), _redundancy_table(found)])
  yield Section("Units", [*figures.signatures(found), _units_table(found)])
  drawn = [
    Picture(f"training_{name}", figure, caption)
    for name, caption, figure in over_training.pictures(subject.records)
  ]
  text = "There is no log beside the model."
  if subject.records:
    text = "The log has no norms of signatures and no weights by position."
  yield Section("Over training", drawn, () if drawn else (text,))


_QUANTITIES = ("weight", "norm", "norm_scaled")


def _units_table(found: Sequence[Finding]) -> Table:
  """A row for each unit: mean weight, norms before and after scaling, norm of the signature."""
  rows = []
  for finding in found:
    totals = finding.totals
    for unit in range(finding.module.units):
      means = [
        float(totals.mean(name)[unit]) if name in totals.sums else None for name in _QUANTITIES
      ]
      signature = float(totals.signatures[unit]) if len(totals.signatures) else None
      rows.append([finding.module.title, f"{finding.module.unit} {unit}", *means, signature])
  columns = ("module", "unit", "mean weight", "norm before", "norm after", "signature norm")
  caption = "Means over tokens. Norms are Euclidean, of a unit's output before and after weighting."
  return Table("units", columns, rows, caption)


def _information_table(found: Sequence[Finding]) -> Table:
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
  return Table("information", columns, rows, caption, order="bits")


def _agreement_table(found: Sequence[Finding]) -> Table:
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
  return Table("weight_and_norm", columns, rows, caption, order="over pairs")


def _redundancy_table(found: Sequence[Finding]) -> Table:
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


def _categories_table(
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
      means = {name: totals.by(made.name, name) for name in _QUANTITIES if name in totals.sums}
      counts = totals.sums["by"][made.name]["count"]
      pairs = itertools.product(enumerate(made.categories), range(module.units))
      for (number, category), unit in pairs:
        values = [float(means[n][number, unit]) if n in means else None for n in _QUANTITIES]
        rows.append([module.name, made.name, category, unit, int(counts[number]), *values])
  columns = ("module", "labels", "category", "unit", "tokens", "weight", "norm", "norm after")
  return Table("categories", columns, rows, shown=False)
