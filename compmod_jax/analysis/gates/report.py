"""The report on gates: sentences and sections."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compmod_jax.analysis.gates import figures as pictures
from compmod_jax.analysis.gates import map_figures as map_pictures
from compmod_jax.analysis.gates import tables
from compmod_jax.analysis.gates.effects import Effect
from compmod_jax.analysis.gates.reading import ALL, KIND, LEAST_TEXTS, PART, TASK, Cell, Totals
from compmod_jax.analysis.report.page import Page, Section
from compmod_jax.mechanisms.modulation import CLOSED, OPEN
from compmod_jax.metrics.bootstrap import Comparison
from compmod_jax.models.nemot_config import GATE

if TYPE_CHECKING:
  from compmod_jax.analysis.gates.measure import Found, Gates
  from compmod_jax.analysis.subject import Subject

_LEAST = 30  # a category of fewer tokens is not told of in a sentence


def make_page(settings: "Gates", subject: "Subject", found: "Found") -> Page:
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
    summary=[*_about_gates(cells, found.totals), *_about_effects(found.effects)],
    sections=list(_sections(subject, found, cells)),
    tiles=tiles,
    data=_data(settings, subject, found, cells),
  )


def _sections(
  subject: "Subject", found: "Found", cells: Mapping[str, Sequence[Cell]]
) -> Iterator[Section]:
  drawn = [*map_pictures.maps(found.maps, found.totals)]
  nothing = () if drawn else ("No text was asked for.",)
  values = [tables.of_map(place, one) for place, one in enumerate(found.maps)]
  yield Section("Token by token", [*drawn, *values], nothing)
  yield Section(
    "By kind of token, part of speech and task", [*pictures.groups(cells), tables.groups(cells)]
  )
  yield Section(
    "Values and channels",
    [
      *pictures.histograms(cells),
      pictures.channels(found.totals),
      tables.places(found.totals),
      tables.histogram(cells),
      tables.channels(found.totals),
    ],
  )
  yield Section(
    "With other tokens or gates",
    [*pictures.effects(found.effects), tables.effects(found.effects, found.moved)],
    (
      "Task token swapped: the neuromodulatory set reads the other task's token, everything else is"
      " as trained. Token and output set: questions run through the other task's output set as"
      " well. Frozen: every channel of every gate is its mean over the tokens of the sample."
      " Removed: every gate is 1, so that later layers also get larger numbers than they were"
      " trained with; what they owe to the gate's dependence on the text, freezing tells.",
    ),
  )
  if found.changed is not None:
    items = [*tables.samples(found.changed), tables.changed(found.changed)]
    text = "Those first whose answers most changes change; numbers are those of the split."
    none = "No answer changed."
    yield Section("Answers that changed", items, (text if found.changed.questions else none,))
  training = [*pictures.over_training(subject.records)]
  if training:
    yield Section("Over training", training)


def _about_gates(
  cells: Mapping[str, Sequence[Cell]], totals: Mapping[str, Totals]
) -> Iterator[str]:
  for site, found in cells.items():
    whole, share = found[0], tables.spread(totals[site]).share
    yield (
      f"{site}: mean {whole.mean:.3f}, standard deviation {whole.spread:.3f};"
      f" {100 * whole.closed:.1f} % of values are below {CLOSED} and {100 * whole.open:.1f} % above"
      f" {OPEN}. {share:.1f} % of the variance is over the tokens within a channel; the rest lies"
      " between channels and is the same at every token."
    )
    for group in (KIND, PART, TASK):
      some = sorted(
        (c for c in found if c.group == group and c.tokens >= _LEAST), key=lambda c: c.mean
      )
      if len(some) > 1:
        yield f"{site}, by {group}: most open at {_cell(some[-1])}, least at {_cell(some[0])}."


def _cell(cell: Cell) -> str:
  reach = f" [{cell.low:.3f}, {cell.high:.3f}]"
  if not math.isfinite(cell.low):
    reach = f"; {_too_few(cell.texts, 'text')}"
  return f"{cell.category} ({cell.mean:.3f}{reach})"


def _too_few(count: int, what: str) -> str:
  return f"{count} {what}{'' if count == 1 else 's'}, too few for an interval"


def _about_effects(effects: Sequence[Effect]) -> Iterator[str]:
  for e in effects:
    if e.part != ALL or e.loss_change is None:
      continue
    loss = _told(e.loss_change, 4, "nats per token", e.loss_p, e.texts, "text")
    told = f"{e.variant}: loss {loss}"
    if e.score_change is not None:
      told += (
        f", score {_told(e.score_change, 2, 'points', e.score_p, e.questions, 'question')};"
        f" {e.changed:.0f} % of {e.questions:,} answers change"
      )
    yield f"{told}."


def _told(found: Comparison, digits: int, unit: str, p: float, count: int, what: str) -> str:
  """A change with interval and p value, or that there are too few texts or questions for them."""
  d = found.difference
  if count < LEAST_TEXTS:
    text = f"{d.value:+.{digits}f} {unit} ({_too_few(count, what)})"
  else:
    reach = f"[{d.low:+.{digits}f}, {d.high:+.{digits}f}]"
    text = f"{d.value:+.{digits}f} {reach} {unit} (p = {p:.2g})"
  return text.replace("-", "−")


def _data(
  settings: "Gates", subject: "Subject", found: "Found", cells: Mapping[str, Sequence[Cell]]
) -> dict[str, Any]:
  return {
    "split": subject.split,
    "settings": dataclasses.asdict(settings),
    "gates": {
      site: [{**cell._asdict(), "bins": cell.bins.tolist()} for cell in some]
      for site, some in cells.items()
    },
    "spread": {site: tables.spread(total)._asdict() for site, total in found.totals.items()},
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
