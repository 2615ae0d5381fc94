"""The report on traces: figures, tables and a summary."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compmod_jax.analysis.recoding.traces import (
  Later,
  Reading,
  Traced,
  Traces,
  differs,
  rises,
  unknown_tokens,
)
from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.metrics.significance import Mean, mean_interval

ALPHA = 0.05
_AWAY = {"error": "error signal", "surprisal": "surprisal"}


def make_page(settings: Traces, subject: Subject, found: Traced) -> Page:
  """What the traces show."""
  sentences, readings, later = found
  moved = {reading.name: rises(reading) for reading in readings if reading.recodes}
  summary = [_mean_surprisal(reading) for reading in readings]
  summary += [_theorem_1(name, found) for name, found in moved.items()]
  summary += [_theorem_2(name, found) for name, found in later.items()]
  counts = {reading.name: unknown_tokens(reading) for reading in readings}
  unknown = {name: {"tokens": n, "unknown": some} for name, (some, n) in counts.items()}
  sections = [Section("Word by word", list(_sentence_pictures(settings, sentences, readings)))]
  if moved:
    errors = Picture(
      "error_change",
      _histogram(readings),
      "Left of 0: recoding lowered the error of its own step, as theorem 1 promises for small"
      " steps. All tokens of all sentences and runs.",
    )
    sections.append(Section("The error before and after recoding", [errors, _error_table(moved)]))
  if later:
    away = Picture(
      "later_steps",
      _later_picture(later, _units(readings)),
      "One step alone is recoded; what changes at that step (0, measured from the recoded top"
      " state) and at those after it. Bars: 95 % intervals over sentences.",
    )
    sections.append(Section("One step alone", [away, _later_table(later)]))
  training = list(_training(subject.records, readings[0].unit))
  if training:
    sections.append(Section("Over training", training))
  sections.append(Section("All tokens", [_tokens(readings)]))
  return Page(
    "How sentences are read",
    f"{subject.task.describe()} {len(sentences):,} sentences; surprisal in bits; runs:"
    f" {', '.join(f'{r.name} ({len(r.scored)})' for r in readings)}.",
    summary,
    sections,
    {"sentences": list(sentences), "moved": moved, "later": _plain(later), "unknown": unknown},
    tiles=[
      ("sentences", f"{len(sentences):,}", ""),
      ("runs", f"{sum(len(r.scored) for r in readings)}", f"of {len(readings)} settings"),
    ],
  )


def _units(readings: Sequence[Reading]) -> str:
  """The units of the error signals of all runs that recode."""
  return " or ".join(dict.fromkeys(one.unit for one in readings if one.recodes))


def _plain(later: Mapping[str, Sequence[Later]]) -> dict[str, Any]:
  return {
    name: [
      {"away": one.away, "error": one.error._asdict(), "surprisal": one.surprisal._asdict()}
      for one in found
    ]
    for name, found in later.items()
  }


# Sentences on what was found.


def _mean_surprisal(reading: Reading) -> str:
  by_run = [
    float(np.mean(np.concatenate([one.surprisal for one in run]))) for run in reading.scored
  ]
  mean = mean_interval(by_run)
  reach = _plus_minus(mean, 2)
  unknown, tokens = unknown_tokens(reading)
  return (
    f"{reading.name}: {mean.mean:.2f}{reach} bits a token; {unknown:,} of {tokens:,} tokens"
    f" ({100 * unknown / tokens:.1f} %) are unknown words."
  )


def _theorem_1(name: str, found: Mapping[str, float]) -> str:
  how = "never" if found["raised"] == 0 else f"at {100 * found['raised']:.1f} % of tokens"
  return (
    f"{name}: recoding raises the error of its own step {how} ({found['tokens']:,} tokens; mean"
    f" {found['before']:.4f} before, {found['after']:.4f} after)."
  )


def _theorem_2(name: str, found: Sequence[Later]) -> str:
  after = [one for one in found if one.away]
  if not after:
    return (
      f"{name}: no sentence has a step behind a recoded one, so that nothing is known of those."
    )
  parts = [f"{one.error.mean:+.4f}{_plus_minus(one.error, 4)} after {one.away}" for one in after]
  few = "" if np.isfinite(after[0].error.half) else " One sentence gives no interval."
  listed = ", ".join(parts[:3])
  return f"{name}: recoding one step changes the error of later steps by {listed} steps.{few}"


def _plus_minus(mean: Mean, digits: int) -> str:
  """Half of an interval, where there is one: a single value has none."""
  return f" ± {mean.half:.{digits}f}" if np.isfinite(mean.half) else ""


# Pictures.


def _sentence_pictures(
  settings: Traces, sentences: Sequence[str], readings: Sequence[Reading]
) -> Iterator[Picture]:
  for number in range(min(settings.shown, len(sentences))):
    yield Picture(
      f"sentence_{number}",
      _sentence(number, sentences[number], readings),
      "Surprisal of every token; bands: 95 % intervals over seeds. Small marks between two tokens:"
      " the same token's surprisal from the recoded state. Stars: differs from the first setting"
      f" (two-tailed t-test over seeds, p < {ALPHA}).",
    )


def _sentence(number: int, text: str, readings: Sequence[Reading]) -> Figure:
  words = readings[0].scored[0][number].words
  recoding = [reading for reading in readings if reading.recodes]
  figure = style.canvas(style.WIDTH, 2.9 + (1.9 if recoding else 0))
  grid = figure.add_gridspec(2 if recoding else 1, 1, height_ratios=[3, 2][: 1 + bool(recoding)])
  axes = figure.add_subplot(grid[0])
  places = np.arange(len(words))
  for place, reading in enumerate(readings):
    colour = style.PALETTE[place % len(style.PALETTE)]
    values = reading.values(number, "nll")
    _band(axes, places, values, colour)
    style.line(axes, places, values.mean(axis=0), reading.name, place)
    if reading.recodes:
      after = reading.values(number, "nll_after").mean(axis=0)
      axes.plot(places + 0.5, after, linestyle="", marker=".", markersize=4, color=colour)
    if place:
      _stars(axes, places, values, differs(readings[0], reading, number), colour)
  style.label(axes, text if len(text) < 90 else f"{text[:87]}...", "", "surprisal, bits")
  axes.set_xticks(places, words, parse_math=False)
  if recoding:
    below = figure.add_subplot(grid[1], sharex=axes)  # a token is at the same place in both
    for place, reading in enumerate(readings):
      if reading.recodes:
        for field, name in (("error", "before"), ("error_after", "after")):
          values = reading.values(number, field).mean(axis=0)
          style.line(below, places, values, f"{reading.name}, {name}", place + (name == "after"))
    style.label(below, "error signal", "", f"error, {_units(readings)}")
    axes.tick_params(labelbottom=False)
    style.name_lines(below)
    axes = (axes, below)[-1]
  for label in axes.get_xticklabels():
    label.set_rotation(45)
    label.set_horizontalalignment("right")
  style.name_lines(figure.axes[0])
  return figure


def _band(axes: Axes, places: np.ndarray, values: np.ndarray, colour: str) -> None:
  if len(values) < 2:
    return
  means = [mean_interval(column.tolist()) for column in values.T]
  low = [m.mean - m.half for m in means]
  high = [m.mean + m.half for m in means]
  axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)


def _stars(axes: Axes, places: np.ndarray, values: np.ndarray, p: np.ndarray, colour: str) -> None:
  where = np.flatnonzero(p < ALPHA)
  top = values.mean(axis=0)
  axes.plot(places[where], top[where] + 0.4, linestyle="", marker="*", markersize=6, color=colour)


def _histogram(readings: Sequence[Reading]) -> Figure:
  some = [reading for reading in readings if reading.recodes]
  figure = style.canvas(style.WIDTH, 2.4)
  for number, reading in enumerate(some):
    axes = figure.add_subplot(1, len(some), number + 1)
    change = np.concatenate([o.error_after - o.error for run in reading.scored for o in run])
    reach = float(np.quantile(np.abs(change), 0.99)) or 1.0
    axes.hist(np.clip(change, -reach, reach), bins=60, color=style.PALETTE[number], linewidth=0)
    axes.axvline(0, color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    across = f"error after − error before, {reading.unit}"
    style.label(axes, reading.name, across, "tokens" if not number else "")
  style.finish(figure, "What recoding does to the error of its own step")
  return figure


def _later_picture(later: Mapping[str, Sequence[Later]], unit: str) -> Figure:
  figure = style.canvas(style.WIDTH, 2.6)
  first: Axes | None = None
  for number, (field, what) in enumerate(_AWAY.items()):
    axes = first = figure.add_subplot(1, 2, number + 1, sharex=first)
    for place, (name, found) in enumerate(later.items()):
      colour = style.PALETTE[place % len(style.PALETTE)]
      means = [getattr(one, field) for one in found]
      aways = np.array([one.away for one in found]) + 0.08 * place
      axes.errorbar(
        aways, [m.mean for m in means], yerr=[m.half for m in means], color=colour, capsize=2,
        marker="o", markersize=4, linewidth=1.2, label=name,
      )  # fmt: skip
    axes.axhline(0, color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    change = f"change, {unit if field == 'error' else 'bits'}"
    style.label(axes, what, "steps after the recoded one", change)
    if len(later) > 1 and not number:
      axes.legend(frameon=False, fontsize=style.SMALL)
  style.finish(figure, "Recoding one step alone")
  return figure


def _training(records: Sequence[Mapping[str, Any]], unit: str) -> Iterator[Picture]:
  lines = [record for record in records if record.get("kind") == "train"]
  names = sorted({name for record in lines for name in record if name.startswith("recoding/")})
  for heading, up, some in (
    ("Error signal over training", f"error, {unit}", [n for n in names if n == "recoding/error"]),
    (
      "Step sizes over training",
      "size of the step",
      [n for n in names if n.startswith("recoding/size/")],
    ),
  ):
    if not some:
      continue
    figure = style.canvas(style.WIDTH, 2.6)
    axes = figure.add_subplot(1, 1, 1)
    for place, name in enumerate(some):
      seen = [(r["step"], r[name]) for r in lines if r.get(name) is not None]
      steps, values = (np.asarray(x) for x in zip(*seen, strict=True))
      style.line(axes, steps, values, name.removeprefix("recoding/size/"), place)
    style.label(axes, "", "training step", up)
    style.name_lines(axes)
    style.finish(figure, heading)
    yield Picture(
      heading.split()[0].lower() + "_over_training", figure, "Means of the log's lines."
    )


# Tables.


def _error_table(moved: Mapping[str, Mapping[str, float]]) -> Table:
  rows = [
    [name, found["tokens"], found["before"], found["after"], 100 * found["raised"]]
    for name, found in moved.items()
  ]
  return Table("error", ("setting", "tokens", "before", "after", "raised, %"), rows)


def _later_table(later: Mapping[str, Sequence[Later]]) -> Table:
  rows = [
    [name, one.away, one.error.mean, one.error.half, one.surprisal.mean, one.surprisal.half]
    for name, found in later.items()
    for one in found
  ]
  columns = ("setting", "steps after", "error", "±", "surprisal", "± ")
  return Table("later", columns, rows, "Changes with half their 95 % intervals over sentences.")


def _tokens(readings: Sequence[Reading]) -> Table:
  """Every token of every run; for the CSV file."""
  rows = []
  for reading in readings:
    for run, sentences in enumerate(reading.scored):
      for number, one in enumerate(sentences):
        for place, (word, bits) in enumerate(zip(one.words, one.surprisal, strict=True)):
          errors = [
            float(values[place]) if len(values) else None for values in (one.error, one.error_after)
          ]
          rows.append([reading.name, run, number, place, word.strip(), float(bits), *errors])
  columns = ("setting", "run", "sentence", "place", "token", "surprisal", "error", "error after")
  return Table("tokens", columns, rows, shown=False)
