"""The report that compares two models."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from compmod_jax.analysis.compare.measure import Changed, Compare, Compared, Group, Scores
from compmod_jax.analysis.compare.routes import Matching
from compmod_jax.analysis.reading import Reader, reader
from compmod_jax.analysis.report import panels
from compmod_jax.analysis.report.page import Page, Picture, Sample, Section, Table, differences
from compmod_jax.analysis.subject import Subject

_MEASURES = {"loss": "loss", "bleu": "BLEU", "chrf": "chrF", "exact_match": "exact match"}
_ROUTES = 3  # modules that are listed for a sentence
_LEVEL = 0.05


def make_page(
  settings: Compare, first: Subject, second: Subject, names: tuple[str, str], found: Compared
) -> Page:
  """What the comparison shows.

  Args:
    settings: how the models were compared.
    first: model A.
    second: model B.
    names: what the page calls them.
    found: of `compare`.
  """
  whole, tiles = found.groups[0], []
  for measure, scores in whole.values.items():
    digits = _digits(measure)
    remark = f"{scores.first:.{digits}f} → {scores.second:.{digits}f}"
    value = scores.comparison.difference.value
    tiles.append((f"{_MEASURES[measure]}, B less A", _signed(value, digits), remark))
  same = "" if found.per == "token" else " Their tokens differ, so that losses are per word."
  return Page(
    title=f"Two models on {first.split}",
    description=f"A: {names[0]} ({first.task.describe()}) B: {names[1]} ({second.task.describe()})"
    f" Differences are B less A on the same {len(whole.numbers):,} examples.{same}",
    summary=list(_summary(found, first.task.metric)),
    sections=list(_sections(first, reader(first.task), found)),
    tiles=tiles,
    data={"split": first.split, "A": names[0], "B": names[1], **_data(settings, found)},
  )


def _data(settings: Compare, found: Compared) -> dict[str, Any]:
  return {
    "settings": dataclasses.asdict(settings),
    "examples": len(found.groups[0].numbers),
    "decoded": found.decoded,
    "signatures": found.signatures,
    "groups": [_record(group) for group in found.groups],
    "changed": [
      {
        "number": one.number,
        "A": one.before,
        "B": one.after,
        "values": one.values,
        "routing": {
          d.module.name: {"distance": d.distance, "word": d.word, "most": d.most}
          for d in one.routing
        },
      }
      for one in found.changed
    ],
    "routing": {
      m.module.name: {
        "units": m.units.tolist(),
        "correlation": m.correlation.tolist(),
        "distance": m.distance,
      }
      for m in found.matchings
    },
  }


def _record(group: Group) -> dict[str, Any]:
  return {
    "kind": group.kind,
    "name": group.name,
    "examples": len(group.numbers),
    "values": {
      measure: {
        "A": scores.first,
        "B": scores.second,
        **vars(scores.comparison.difference),
        "p": scores.comparison.p,
        "examples": scores.examples,
      }
      for measure, scores in group.values.items()
    },
  }


def _sections(first: Subject, read: Reader, found: Compared) -> Iterator[Section]:
  caption = (
    "Lines: 95 % paired bootstrap intervals over sentences, not corrected for the number of groups."
    " The dashed line: no difference. Groups of few examples are left out."
  )
  drawn = _pictures(found, first.task.metric)
  pictures = [Picture(f"{measure}_by_group", figure, caption) for measure, figure in drawn]
  yield Section("Where they differ", [*pictures, _groups(found)])
  if found.matchings:
    yield Section(
      "Routing",
      [_matchings(found.matchings)],
      [
        "Heads have no names that two models share. Those of B are matched with those of A, one to"
        " one in each module, by the correlation of their weights over all tokens. The distance is"
        " the share of a token's weight that goes elsewhere, after matching, in the mean."
      ],
    )
  elif found.per == "word":
    yield Section("Routing", [], ["The models read different tokens: routing is not compared."])
  what = "sentence chrF" if found.decoded else "loss"
  samples = [_sample(first, read, one, found) for one in found.changed]
  text = f"By {what}, largest change first. Words that only one of the outputs has are marked."
  yield Section("Sentences that changed most", samples, [text])


def _pictures(found: Compared, metric: str) -> Iterator[tuple[str, Any]]:
  for measure in _drawn(found, metric):
    charts = {}
    for kind in dict.fromkeys(group.kind for group in found.groups):
      groups = [g for g in found.groups if g.kind == kind and measure in g.values]
      if not groups or (kind == "all" and len(found.groups) > 1):
        continue
      differences = [group.values[measure].comparison.difference for group in groups]
      series = panels.Series(
        "B less A",
        [d.value for d in differences],
        [d.low for d in differences],
        [d.high for d in differences],
      )
      rows = [f"{group.name} ({group.values[measure].examples:,})" for group in groups]
      charts[kind] = (rows, [series])
    if charts:
      unit = f"nats per {found.per}" if measure == "loss" else "points"
      title = f"Difference in {_MEASURES[measure]}, B less A (number of examples in brackets)"
      yield measure, panels.forest(title, charts, across=f"B less A, {unit}")


def _groups(found: Compared) -> Table:
  measures = list(found.groups[0].values)
  columns = ["group", "value", "examples"]
  for measure in measures:
    name = _MEASURES[measure]
    columns += [f"{name} A", f"{name} B", f"{name} B−A", "low", "high", "p"]
  rows = []
  for group in found.groups:
    row: list[Any] = [group.kind, group.name, len(group.numbers)]
    for measure in measures:
      if measure not in group.values:
        row += [None] * 6
        continue
      scores = group.values[measure]
      d = scores.comparison.difference
      row += [scores.first, scores.second, d.value, d.low, d.high, scores.comparison.p]
    rows.append(row)
  signatures = "; ".join(f"{_MEASURES[m]} {text}" for m, text in found.signatures.items())
  caption = f"Loss: nats per {found.per}."
  if found.decoded:
    caption += f" Scores: 0 to 100, of {found.decoded:,} sentences decoded. {signatures}."
  return Table("groups", columns, rows, caption)


def _matchings(matchings: Sequence[Matching]) -> Table:
  rows = [
    [
      m.module.title,
      ", ".join(f"{unit}–{partner}" for unit, partner in enumerate(m.units.tolist())),
      ", ".join(f"{value:.2f}" for value in m.correlation.tolist()),
      m.distance,
    ]
    for m in matchings
  ]
  columns = ("module", "A–B", "correlation of weights", "distance")
  return Table("routing", columns, rows, order="distance")


def _sample(first: Subject, read: Reader, one: Changed, found: Compared) -> Sample:
  texts = [read.texts(stream, first.split)[one.number] for stream in read.streams]
  entries: list[Any] = list(zip(read.streams, texts, strict=True))
  if one.before is not None and one.after is not None:
    left, right = differences(one.before, one.after)
    entries[-1] = ("reference", texts[-1])
    entries += [("A", left), ("B", right)]
  usual = {m.module.name: m.distance for m in found.matchings}
  routing = [
    f"{d.module.title}: {d.distance:.2f} (on average {usual[d.module.name]:.2f}), most at"
    f" “{d.word}” ({d.most:.2f})"
    for d in one.routing[:_ROUTES]
  ]
  if routing:
    entries.append(("routing", "; ".join(routing)))
  values = [
    f"{_MEASURES[name]} {a:.{digits}f} → {b:.{digits}f}"
    for name, (a, b) in one.values.items()
    for digits in (3 if name == "loss" else 1,)
  ]
  return Sample(entries, f"{first.split} {one.number} · {' · '.join(values)}")


def _drawn(found: Compared, metric: str) -> list[str]:
  """The measures of figures and summary: the task's own, chrF beside BLEU, the loss."""
  wanted = {"loss", metric, *(("chrf",) if metric == "bleu" else ())}
  return [measure for measure in _MEASURES if measure in wanted & set(found.groups[0].values)]


def _summary(found: Compared, metric: str) -> Iterator[str]:
  """Every measure of the whole sample, the groups that gain least and most, and routing."""
  whole = found.groups[0]
  for measure in _drawn(found, metric):
    scores, digits = whole.values[measure], _digits(measure)
    title = _MEASURES[measure][0].upper() + _MEASURES[measure][1:]
    p = scores.comparison.p
    verdict = "beyond chance" if p < _LEVEL else "no difference beyond chance"
    test = f"p = {p:.4f}: {verdict}" if math.isfinite(p) else "which no test can judge"
    yield (
      f"{title} on {scores.examples:,} examples: A {scores.first:.{digits}f},"
      f" B {scores.second:.{digits}f}; B less A {_change(scores, digits)}, {test}."
    )
  measure = metric if metric in whole.values else "loss"
  parts = [group for group in found.groups[1:] if measure in group.values]
  if len(parts) > 1:
    least, most = (
      pick(parts, key=lambda g: g.values[measure].comparison.difference.value)
      for pick in (min, max)
    )
    ends = [
      f"{_change(group.values[measure], _digits(measure))} ({group.kind} {group.name})"
      for group in (least, most)
    ]
    yield f"By group, {_MEASURES[measure]} changes by {ends[0]} to {ends[1]}."
  if found.matchings:
    m = max(found.matchings, key=lambda m: m.distance)
    yield (
      f"Routing differs most in {m.module.title}: after matching heads, {100 * m.distance:.1f} % of"
      " a token's weight goes elsewhere on average."
    )


def _change(scores: Scores, digits: int) -> str:
  """B less A with its interval."""
  d = scores.comparison.difference
  return f"{_signed(d.value, digits)} [{_signed(d.low, digits)}, {_signed(d.high, digits)}]"


def _digits(measure: str) -> int:
  return 4 if measure == "loss" else 2


def _signed(value: float, digits: int) -> str:
  return f"{value:+.{digits}f}".replace("-", "−")
