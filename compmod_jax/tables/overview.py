"""All runs of a table, whatever their scale and length: rows are models, columns are data."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compmod_jax.analysis.report.page import Page, Picture, Section
from compmod_jax.analysis.report.page import Table as PageTable
from compmod_jax.core.errors import UserError, check
from compmod_jax.tables.spec import Spec

NUMBERS = ("scale", "steps", "row", "seed", "column", "value", "minutes", "parameters")


class Run(NamedTuple):
  """A run that is there.

  Attributes:
    scale: its data.
    row: its model.
    steps: of training.
    seed: of the run.
    scores: column -> value.
    minutes: of training.
    parameters: of the model.
  """

  scale: str
  row: str
  steps: int
  seed: int
  scores: Mapping[str, float]
  minutes: float
  parameters: int


class Part(NamedTuple):
  """Scales with the same columns, and the rows that any of them has.

  Attributes:
    columns: of each scale.
    scales: with at least one run.
    rows: in the order of the table.
    runs: (row, scale) -> its longest runs, by seed.
  """

  columns: Sequence[str]
  scales: Sequence[str]
  rows: Sequence[str]
  runs: Mapping[tuple[str, str], Sequence[Run]]

  def mean(self, row: str, scale: str, column: str) -> float:
    """Over seeds; NaN where there is no run."""
    found = [run.scores[column] for run in self.runs.get((row, scale), ()) if column in run.scores]
    return statistics.fmean(found) if found else float("nan")


def collect(folder: Path, spec: Callable[[str], Spec]) -> list[Run]:
  """All runs below a table's folder, by scale and row in the table's order, then steps and seed.

  Args:
    folder: with a folder for each scale, as `train.reproduce` writes them.
    spec: the table of a scale.

  Raises:
    UserError: there is no run, or a file is not one.
  """
  runs = [_run(file, spec) for file in sorted(folder.glob("*/*-seed*.json"))]
  check(
    bool(runs),
    f"{folder} has no runs; train some without --overview, or give their folder by --results.",
  )
  scales = list(dict.fromkeys(run.scale for run in runs))

  def place(run: Run) -> tuple[int, int, int, int]:
    rows = list(spec(run.scale).rows)
    return scales.index(run.scale), rows.index(run.row), run.steps, run.seed

  return sorted(runs, key=place)


def _run(file: Path, spec: Callable[[str], Spec]) -> Run:
  try:
    record = json.loads(file.read_text())
    scale, row, scores = record["scale"], record["row"], record["scores"]
    steps = sum(phase["steps"] for phase in record["experiment"]["phases"])
    sizes = record["seed"], record["train_seconds"] / 60, record["parameters"]
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"{file} is not the result of a run ({error!r}). Restore it or delete it."
    ) from error
  table = spec(scale)
  check(
    row in table.rows,
    f"{file} is of the row {row!r}, which the table of {scale} does not have (any more). Move the"
    " file elsewhere.",
  )
  held = {
    column.name: scores[column.split][column.value]
    for column in table.columns
    if scores.get(column.split, {}).get(column.value) is not None
  }
  seed, minutes, parameters = sizes
  return Run(scale, row, steps, seed, held, minutes, parameters)


def parts(runs: Iterable[Run], spec: Callable[[str], Spec]) -> list[Part]:
  """Scales with the same columns together; of a row's runs those with the most steps."""
  by_columns: dict[tuple[str, ...], list[Run]] = {}
  for run in runs:
    by_columns.setdefault(tuple(column.name for column in spec(run.scale).columns), []).append(run)
  found = []
  for columns, together in by_columns.items():
    by_model: dict[tuple[str, str], list[Run]] = {}
    for run in together:
      by_model.setdefault((run.row, run.scale), []).append(run)
    longest = {
      model: [run for run in own if run.steps == max(each.steps for each in own)]
      for model, own in by_model.items()
    }
    scales = list(dict.fromkeys(run.scale for run in together))
    order = list(dict.fromkeys(row for scale in scales for row in spec(scale).rows))
    rows = sorted({run.row for run in together}, key=order.index)
    found.append(Part(columns, scales, rows, longest))
  return found


def lines(part: Part) -> list[list[str]]:
  """The heading, then a line a row: values of all seeds by scale and column, then minutes."""
  places = [(scale, column) for scale in part.scales for column in part.columns]
  found = [["row", *(_named(part, scale, column) for scale, column in places), "minutes"]]
  for row in part.rows:
    shown = [_values(part.runs.get((row, scale), ()), column) for scale, column in places]
    minutes = [run.minutes for scale in part.scales for run in part.runs.get((row, scale), ())]
    ends = dict.fromkeys(f"{end:.0f}" for end in (min(minutes), max(minutes)))
    found.append([row, *shown, " to ".join(ends)])
  return found


def _values(runs: Sequence[Run], column: str) -> str:
  return ", ".join(f"{run.scores[column]:.1f}" for run in runs if column in run.scores)


def _named(part: Part, scale: str, column: str) -> str:
  return scale if len(part.columns) == 1 else f"{scale}: {column}"


def page(title: str, runs: Sequence[Run], spec: Callable[[str], Spec]) -> Page:
  """The runs as a report: a picture and a table of every part, and all numbers."""
  from compmod_jax.analysis.report import panels

  sections = []
  for number, part in enumerate(parts(runs, spec), 1):
    head, *body = lines(part)
    places = [(scale, column) for scale in part.scales for column in part.columns]
    values = np.array([[part.mean(row, *place) for place in places] for row in part.rows])
    heat = panels.Heat(values, part.rows, [_named(part, *place) for place in places])
    heading = part.columns[0] if len(part.columns) == 1 else "scores by data and part"
    figure = panels.heat_maps(
      title,
      {heading: heat},
      across="",
      down="",
      unit="mean over seeds",
      numbers=True,
      most=1,
      slanted=True,
    )
    picture = Picture(f"overview_{number}", figure, "Means over seeds of each row's longest runs.")
    table = PageTable(f"overview_{number}", head, body)
    sections.append(Section(", ".join(part.scales), [picture, table]))
  numbers = [
    [run.scale, run.steps, run.row, run.seed, column, value, run.minutes, run.parameters]
    for run in runs
    for column, value in run.scores.items()
  ]
  sections.append(Section("All numbers", [PageTable("numbers", NUMBERS, numbers)]))
  hours = sum(run.minutes for run in runs) / 60
  description = (
    f"{len(runs)} runs on {len({run.scale for run in runs})} data sets, {hours:.1f} hours"
  )
  data: dict[str, Any] = {"runs": [run._asdict() for run in runs]}
  return Page(title, f"{description} of training.", [], sections, data)
