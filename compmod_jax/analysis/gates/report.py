"""The report on gates: a short summary, figures and tables."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from compmod_jax.analysis.gates import figures
from compmod_jax.analysis.gates.effects import Answers, Effect, with_ends
from compmod_jax.analysis.gates.maps import Map
from compmod_jax.analysis.gates.measure import Gates, Measured
from compmod_jax.analysis.gates.reading import (
  ALL,
  BINS,
  KIND,
  LEAST_TEXTS,
  PART,
  TASK,
  Cell,
  Totals,
  spread,
)
from compmod_jax.analysis.report.page import Page, Sample, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.mechanisms.modulation import CLOSED, OPEN
from compmod_jax.metrics.bootstrap import Comparison
from compmod_jax.models.nemot import GATE

_LEAST = 30  # tokens of a category that the summary names


def make_page(settings: Gates, subject: Subject, found: Measured) -> Page:
  """What the gates show."""
  cells = {site: total.cells(seed=subject.seed) for site, total in found.totals.items()}
  trained = found.effects[0]
  texts = "questions" if found.asks else "windows of text"
  tiles = [
    (texts, f"{trained.texts:,}", f"of the split {subject.split}"),
    ("mean gate", f"{cells[GATE][0].mean:.3f}", f"{cells[GATE][0].tokens:,} tokens"),
    (
      "loss",
      f"{trained.loss:.4f}",
      "nats per token of answers" if found.asks else "nats per token",
    ),
  ]
  if trained.questions:
    tiles.append(("score", f"{trained.score:.2f}", f"{trained.questions:,} answered"))
  return Page(
    title=f"The gate on {subject.split}",
    description=f"{subject.task.describe()} A gate is counted at every token from which one is"
    " predicted: the end of an answer is left out. Scores: mean over questions of accuracy, F1 or"
    " ROUGE-L, by their format.",
    summary=list(summary(cells, found.totals, found.effects)),
    sections=list(_sections(subject, found, cells)),
    tiles=tiles,
    data=_data(settings, subject, found, cells),
  )


def _sections(
  subject: Subject, found: Measured, cells: Mapping[str, Sequence[Cell]]
) -> Iterator[Section]:
  drawn = [*figures.maps(found.maps, found.totals)]
  nothing = () if drawn else ("No text was asked for.",)
  values = [_map_table(number, one) for number, one in enumerate(found.maps)]
  yield Section("Token by token", [*drawn, *values], nothing)
  yield Section(
    "By kind of token, part of speech and task", [*figures.groups(cells), _groups_table(cells)]
  )
  yield Section(
    "Values and channels",
    [
      *figures.histograms(cells),
      figures.channels(found.totals),
      _places_table(found.totals),
      _histogram_table(cells),
      _channels_table(found.totals),
    ],
  )
  yield Section(
    "With other tokens or gates",
    [*figures.effects(found.effects), _effects_table(found.effects, found.moved)],
    (
      "Task token swapped: the neuromodulatory set reads the other task's token, everything else is"
      " as trained. Token and output set: questions run through the other task's output set as"
      " well. Frozen: every channel of every gate is its mean over the tokens of the sample."
      " Removed: every gate is 1, so that later layers also get larger numbers than they were"
      " trained with; freezing shows what they owe to the gate's dependence on the text.",
    ),
  )
  if found.changed is not None:
    items = [*_samples(found.changed), _changed_table(found.changed)]
    text = "Those first whose answers most changes change; numbers are those of the split."
    none = "No answer changed."
    yield Section("Answers that changed", items, (text if found.changed.questions else none,))
  training = [*figures.over_training(subject.records)]
  if training:
    yield Section("Over training", training)


def summary(
  cells: Mapping[str, Sequence[Cell]],
  totals: Mapping[str, Totals],
  effects: Sequence[Effect] = (),
) -> Iterator[str]:
  """Every gate's mean and extremes, and the effect of every change on the whole sample."""
  for site, found in cells.items():
    whole, share = found[0], spread(totals[site]).share
    yield (
      f"{site}: mean {whole.mean:.3f}, standard deviation {whole.spread:.3f};"
      f" {100 * whole.closed:.1f} % of values are below {CLOSED} and {100 * whole.open:.1f} % above"
      f" {OPEN}; {share:.1f} % of the variance is over tokens within a channel."
    )
    for group in (KIND, PART, TASK):
      some = [c for c in found if c.group == group and c.tokens >= _LEAST]
      some.sort(key=lambda c: c.mean)
      if len(some) > 1:
        least, most = map(_category, (some[0], some[-1]))
        yield f"{site}, by {group}: most open at {most}, least at {least}."
  for e in effects:
    if e.part == ALL and e.loss_change is not None:
      changes = [f"loss {_change(e.loss_change, 4, 'nats per token', e.loss_p, e.texts)}"]
      if e.score_change is not None:
        changes += [
          f"score {_change(e.score_change, 2, 'points', e.score_p, e.questions)}",
          f"{e.changed:.0f} % of {e.questions:,} answers change",
        ]
      yield f"{e.variant}: {', '.join(changes)}."


def _category(cell: Cell) -> str:
  """A category with its mean, and the interval or why there is none."""
  interval = _interval(cell.low, cell.high, 3) or f"; {cell.texts} texts: no interval"
  return f"{cell.category} ({cell.mean:.3f}{interval})"


def _change(change: Comparison, digits: int, unit: str, p: float, count: int) -> str:
  """A change with its interval and p value, or neither where it is of too few examples."""
  value, low, high = with_ends(change, count)
  text = f"{value:+.{digits}f}{_interval(low, high, digits, '+')} {unit}"
  text += f" (p = {p:.2g})" if count >= LEAST_TEXTS else f" ({count} examples: no interval)"
  return text.replace("-", "−")


def _interval(low: float, high: float, digits: int, sign: str = "") -> str:
  """The interval behind a value; nothing where there is none."""
  return f" [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]" if math.isfinite(low) else ""


def _data(
  settings: Gates, subject: Subject, found: Measured, cells: Mapping[str, Sequence[Cell]]
) -> dict[str, Any]:
  return {
    "split": subject.split,
    "settings": dataclasses.asdict(settings),
    "gates": {
      site: [{**cell._asdict(), "bins": cell.bins.tolist()} for cell in some]
      for site, some in cells.items()
    },
    "spread": {site: spread(total)._asdict() for site, total in found.totals.items()},
    "effects": [_plain(effect) for effect in found.effects],
    "moved": found.moved,
    "maps": [{"title": one.title, "remark": one.remark} for one in found.maps],
  }


def _plain(effect: Effect) -> dict[str, Any]:
  """An effect as JSON holds it."""
  found = effect._asdict()
  for name in ("loss_change", "score_change"):
    change = found[name]
    found[name] = None if change is None else {**vars(change.difference), "p": change.p}
  return found


def _groups_table(cells: Mapping[str, Sequence[Cell]]) -> Table:
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


def _places_table(totals: Mapping[str, Totals]) -> Table:
  """A row for every gate: where it varies."""
  rows = [[site, len(total.means), *spread(total)] for site, total in totals.items()]
  caption = (
    "Standard deviations: of the channels' means, and within a channel over tokens; and how much of"
    " the whole variance the second is: what a gate owes to the text."
  )
  columns = ("gate", "channels", "between channels", "over tokens", "share, %")
  return Table("places", columns, rows, caption)


def _histogram_table(cells: Mapping[str, Sequence[Cell]]) -> Table:
  """A row for every gate, category and bin; for the CSV file."""
  rows = [
    [site, cell.group, cell.category, number / BINS, (number + 1) / BINS, float(share)]
    for site, found in cells.items()
    for cell in found
    for number, share in enumerate(cell.bins)
  ]
  return Table("histogram", ("gate", "group", "category", "from", "to", "share"), rows, shown=False)


def _channels_table(totals: Mapping[str, Totals]) -> Table:
  """A row for every channel; for the CSV file."""
  rows = [
    [site, number, float(mean), float(deviation)]
    for site, total in totals.items()
    for number, (mean, deviation) in enumerate(zip(total.means, total.deviations, strict=True))
  ]
  return Table("channels", ("gate", "channel", "mean", "deviation"), rows, shown=False)


def _map_table(text: int, one: Map) -> Table:
  """A row for every token and gate of a text; for the CSV file."""
  rows = []
  for number, (word, kind, part) in enumerate(zip(one.words, one.kinds, one.parts, strict=True)):
    for site, gate in one.gates.items():
      of_token = gate[number]
      shares = [float(np.mean(of_token < CLOSED)), float(np.mean(of_token > OPEN))]
      rows.append([number, word, kind, part, site, float(of_token.mean()), *shares])
  columns = ("place", "token", KIND, PART, "gate", "mean", "closed", "open")
  return Table(f"map_{text}", columns, rows, shown=False)


def _effects_table(found: Sequence[Effect], moved: Mapping[str, Mapping[str, float]]) -> Table:
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


def _changed_table(answers: Answers) -> Table:
  """Questions and what every variant answers to them; for the CSV file."""
  rows = []
  for row, question in enumerate(answers.questions):
    options = "".join(f" ({n + 1}) {option}" for n, option in enumerate(question.options))
    outputs = [found[row] or "(nothing)" for found in answers.outputs.values()]
    number, asked = int(answers.numbers[row]), question.question + options
    rows.append([number, asked, question.answer or "(none)", *outputs])
  columns = ("number", "question", "right", *answers.outputs)
  return Table("changed", columns, rows, shown=False)


def _samples(answers: Answers) -> list[Sample]:
  """The same for the page: variants that answer alike side by side, what changed marked."""
  found = []
  for number, asked, right, trained, *others in _changed_table(answers).rows:
    alike = {trained: ["as trained"]}
    for name, output in zip(list(answers.outputs)[1:], others, strict=True):
      alike.setdefault(output, []).append(name)
    given = [(", ".join(names), [(text, text != trained)]) for text, names in alike.items()]
    found.append(Sample([("question", asked), ("right", right), *given], f"number {number}"))
  return found
