"""The tables of the report on gates."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from compmod_jax.analysis.gates.effects import Answers, Effect, with_ends
from compmod_jax.analysis.gates.maps import Map
from compmod_jax.analysis.gates.reading import ALL, BINS, KIND, LEAST_TEXTS, PART, Cell, Totals
from compmod_jax.analysis.report.page import Sample, Table
from compmod_jax.mechanisms.modulation import CLOSED, OPEN


def groups(cells: Mapping[str, Sequence[Cell]]) -> Table:
  """A row for every gate and category."""
  rows = [
    [site, c.group, c.category, c.tokens, c.mean, c.low, c.high, c.spread, c.closed, c.open]
    for site, found in cells.items()
    for c in found
  ]
  columns = (
    "gate", "group", "category", "tokens", "mean", "low", "high", "spread", "closed", "open",
  )  # fmt: skip
  caption = (
    "Means over tokens and channels with 95 % bootstrap intervals over texts, a dash where fewer"
    f" than {LEAST_TEXTS} texts have such tokens; spread: standard"
    f" deviation over tokens and channels; closed: share of values below {CLOSED}, open: above"
    f" {OPEN}. Separator: <sep>; markers: <p> and <q>."
  )
  return Table("groups", columns, rows, caption)


def places(totals: Mapping[str, Totals]) -> Table:
  """A row for every gate: where it varies."""
  rows = [[site, len(total.means), *spread(total)] for site, total in totals.items()]
  caption = (
    "Standard deviations: of the channels' means, and within a channel over tokens; and how much of"
    " the whole variance the second is: what a gate owes to the text."
  )
  columns = ("gate", "channels", "between channels", "over tokens", "share, %")
  return Table("places", columns, rows, caption)


class Spread(NamedTuple):
  """Where a gate varies.

  Attributes:
    channels: standard deviation of the channels' means.
    tokens: standard deviation over tokens within a channel, root mean square over channels.
    share: per cent of the whole variance that is over tokens.
  """

  channels: float
  tokens: float
  share: float


def spread(total: Totals) -> Spread:
  """Where a gate varies: between channels or over tokens."""
  between, within = float(np.var(total.means)), float(np.mean(total.deviations**2))
  return Spread(between**0.5, within**0.5, 100 * within / max(between + within, 1e-12))


def histogram(cells: Mapping[str, Sequence[Cell]]) -> Table:
  """A row for every gate, category and bin; for the CSV file."""
  rows = [
    [site, cell.group, cell.category, number / BINS, (number + 1) / BINS, float(share)]
    for site, found in cells.items()
    for cell in found
    for number, share in enumerate(cell.bins)
  ]
  return Table("histogram", ("gate", "group", "category", "from", "to", "share"), rows, shown=False)


def channels(totals: Mapping[str, Totals]) -> Table:
  """A row for every channel; for the CSV file."""
  rows = [
    [site, number, float(mean), float(deviation)]
    for site, total in totals.items()
    for number, (mean, deviation) in enumerate(zip(total.means, total.deviations, strict=True))
  ]
  return Table("channels", ("gate", "channel", "mean", "deviation"), rows, shown=False)


def of_map(place: int, one: Map) -> Table:
  """A row for every token and gate of a text; for the CSV file."""
  rows = []
  for number, (word, kind, part) in enumerate(zip(one.words, one.kinds, one.parts, strict=True)):
    for site, gate in one.gates.items():
      of_token = gate[number]
      shares = [float(np.mean(of_token < CLOSED)), float(np.mean(of_token > OPEN))]
      rows.append([number, word, kind, part, site, float(of_token.mean()), *shares])
  columns = ("place", "token", KIND, PART, "gate", "mean", "closed", "open")
  return Table(f"map_{place}", columns, rows, shown=False)


def effects(found: Sequence[Effect], moved: Mapping[str, Mapping[str, float]]) -> Table:
  """A row for every variant and part of the sample."""
  asked = bool(found[0].questions)
  rows = []
  for e in found:
    row: list[Any] = [e.variant, e.part, e.loss, *with_ends(e.loss_change, e.texts), e.loss_p]
    if asked:
      row += [
        e.questions,
        e.score,
        *with_ends(e.score_change, e.questions),
        e.score_p,
        e.changed,
        e.malformed,
      ]
    far = moved[e.variant].values()
    rows.append([*row, *(far if e.part == ALL else [None] * len(far))])
  columns = ["variant", "part", "loss", "change", "low", "high", "p, corrected"]
  if asked:
    columns += [
      "answered", "score", "change ", "low ", "high ", "p, corrected ", "changed, %",
      "malformed, %",
    ]  # fmt: skip
  columns += [f"moved: {site}" for site in moved[found[0].variant]]
  caption = (
    "Changes are against the model as trained, with 95 % paired bootstrap intervals (a dash: fewer"
    f" than {LEAST_TEXTS} texts or questions); p after Holm's"
    " correction for the number of variants. Changed: answers that differ from those as trained."
    " Moved: mean absolute change of a gate over tokens and channels, given the right answers."
  )
  return Table("effects", columns, rows, caption)


def changed(answers: Answers) -> Table:
  """Questions and what every variant answers to them; for the CSV file."""
  rows = []
  for place, question in enumerate(answers.questions):
    options = "".join(f" ({n + 1}) {option}" for n, option in enumerate(question.options))
    outputs = [found[place] or "(nothing)" for found in answers.outputs.values()]
    number, asked = int(answers.numbers[place]), question.question + options
    rows.append([number, asked, question.answer or "(none)", *outputs])
  columns = ("number", "question", "right", *answers.outputs)
  return Table("changed", columns, rows, shown=False)


def samples(answers: Answers) -> list[Sample]:
  """The same for the page: variants that answer alike side by side, what changed marked."""
  found = []
  for number, asked, right, trained, *others in changed(answers).rows:
    alike = {trained: ["as trained"]}
    for name, output in zip(list(answers.outputs)[1:], others, strict=True):
      alike.setdefault(output, []).append(name)
    told = [(", ".join(names), [(text, text != trained)]) for text, names in alike.items()]
    found.append(Sample([("question", asked), ("right", right), *told], f"number {number}"))
  return found
