"""All runs of a table, whatever their scale and length: rows are models, columns are data."""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compmod_jax.analysis.report.page import Page, Picture, Section
from compmod_jax.analysis.report.page import Table as PageTable
from compmod_jax.core.errors import UserError, check
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Spec

NUMBERS = ("scale", "epochs", "steps", "row", "seed", "column", "value", "minutes", "parameters")


class Run(NamedTuple):
  """A run that is there.

  Attributes:
    scale: its data: the name of its folder, without a number of steps.
    row: its model.
    epochs: of training; 0 where it was as long as its number of steps.
    steps: of training; 0 where it was as long as its number of epochs.
    seed: of the run.
    scores: column -> value.
    minutes: of training.
    parameters: of the model.
  """

  scale: str
  row: str
  epochs: int
  steps: int
  seed: int
  scores: Mapping[str, float]
  minutes: float
  parameters: int

  @property
  def length(self) -> tuple[int, int]:
    """By which runs of a row are compared; whole ones in epochs are longer than trials in steps."""
    return self.epochs, self.steps


class Found(NamedTuple):
  """What is below a table's folder.

  Attributes:
    runs: by scale and row in the table's order, then length and seed.
    specs: scale -> its table.
    left_out: files with the name of a run that another program wrote.
  """

  runs: Sequence[Run]
  specs: Mapping[str, Spec]
  left_out: Sequence[Path]


class Part(NamedTuple):
  """Scales with the same columns, and the rows that any of them has.

  Attributes:
    columns: of each scale.
    scales: with at least one run.
    rows: in the order of the table.
    runs: (row, scale) -> its longest runs, by seed.
  """

  columns: Sequence[Column]
  scales: Sequence[str]
  rows: Sequence[str]
  runs: Mapping[tuple[str, str], Sequence[Run]]

  def values(self, row: str, scale: str, column: Column) -> list[float]:
    """Those of all seeds that have one."""
    found = self.runs.get((row, scale), ())
    return [run.scores[column.name] for run in found if column.name in run.scores]

  def heading(self, scale: str, column: Column) -> str:
    """Of a column of the overview."""
    return scale if len(self.columns) == 1 else f"{scale}: {column.name}"


def collect(folder: Path, spec: Callable[[str], Spec]) -> Found:
  """All runs below a table's folder.

  Args:
    folder: with a folder for each scale, as `train.reproduce` writes them.
    spec: the table of a scale.

  Raises:
    UserError: there is no run, a file is damaged, or of a row that the table does not have.
  """
  runs, left_out = list[Run](), list[Path]()
  specs = dict[str, Spec]()
  for file in sorted(folder.glob("*/*-seed*.json")):
    try:
      record = json.loads(file.read_text())
      if "table" not in record:
        left_out.append(file)
        continue
      scale = re.sub(r"-\d+-steps$", "", file.parent.name)
      table = specs.setdefault(scale, spec(record["scale"]))
      run = Run(
        scale,
        record["row"],
        sum(phase["epochs"] for phase in record["experiment"]["phases"]),
        sum(phase["steps"] for phase in record["experiment"]["phases"]),
        record["seed"],
        dict(_scores(table, record["scores"])),
        record["train_seconds"] / 60,
        record["parameters"],
      )
    except (ValueError, KeyError, TypeError) as error:
      raise UserError(
        f"{file} is not the result of a run ({error!r}). Restore it or delete it."
      ) from error
    check(
      run.row in table.rows,
      f"{file} is of the row {run.row!r}, which the table of {scale} does not have (any more). Move"
      " the file elsewhere.",
    )
    runs.append(run)
  check(
    bool(runs),
    f"{folder} has no runs; train some without --overview, or give their folder by --results.",
  )
  scales, rows = list(specs), {scale: list(one.rows) for scale, one in specs.items()}

  def place(run: Run) -> tuple[int, int, tuple[int, int], int]:
    return scales.index(run.scale), rows[run.scale].index(run.row), run.length, run.seed

  return Found(sorted(runs, key=place), specs, left_out)


def _scores(
  table: Spec, scores: Mapping[str, Mapping[str, float | None]]
) -> Iterator[tuple[str, float]]:
  for column in table.columns:
    value = scores.get(column.split, {}).get(column.value)
    if value is not None:
      yield column.name, value


def parts(found: Found) -> list[Part]:
  """Scales with the same columns together; of a row's runs the longest."""
  by_columns: dict[tuple[Column, ...], list[str]] = {}
  for scale, table in found.specs.items():
    by_columns.setdefault(table.columns, []).append(scale)
  made = []
  for columns, scales in by_columns.items():
    by_model: dict[tuple[str, str], list[Run]] = {}
    for run in found.runs:
      if run.scale in scales:
        by_model.setdefault((run.row, run.scale), []).append(run)
    longest = {
      model: [run for run in own if run.length == max(each.length for each in own)]
      for model, own in by_model.items()
    }
    order = dict.fromkeys(row for scale in scales for row in found.specs[scale].rows)
    rows = [row for row in order if any((row, scale) in longest for scale in scales)]
    made.append(Part(columns, scales, rows, longest))
  return made


def lines(part: Part) -> list[list[str]]:
  """The heading, then a line a row: values of all seeds by scale and column, then minutes."""
  places = [(scale, column) for scale in part.scales for column in part.columns]
  found = [["row", *(part.heading(*place) for place in places), "minutes"]]
  for row in part.rows:
    shown = [
      ", ".join(f"{value:.{column.digits}f}" for value in part.values(row, scale, column))
      for scale, column in places
    ]
    minutes = [run.minutes for scale in part.scales for run in part.runs.get((row, scale), ())]
    ends = dict.fromkeys(f"{end:.0f}" for end in (min(minutes), max(minutes)))
    found.append([row, *shown, " to ".join(ends)])
  return found


def page(title: str, found: Found) -> Page:
  """The runs as a report: a table and pictures of every part, and all numbers."""
  sections = []
  for number, part in enumerate(parts(found), 1):
    head, *body = lines(part)
    table = PageTable(f"overview_{number}", head, body)
    sections.append(Section(", ".join(part.scales), [*_pictures(title, number, part), table]))
  numbers = [
    [one.scale, one.epochs, one.steps, one.row, one.seed, name, value, one.minutes, one.parameters]
    for one in found.runs
    for name, value in one.scores.items()
  ]
  sections.append(Section("All numbers", [PageTable("numbers", NUMBERS, numbers)]))
  hours = sum(run.minutes for run in found.runs) / 60
  description = f"{len(found.runs)} runs on {len(found.specs)} data sets, {hours:.1f} hours"
  data = {"runs": [run._asdict() for run in found.runs]}
  return Page(title, f"{description} of training.", [], sections, data)


def _pictures(title: str, number: int, part: Part) -> Iterator[Picture]:
  """One for every kind of score."""
  from compmod_jax.analysis.report import panels

  for kind in dict.fromkeys(column.value for column in part.columns):
    columns = [column for column in part.columns if column.value == kind]
    places = [(scale, column) for scale in part.scales for column in columns]
    values = [[part.values(row, *place) for place in places] for row in part.rows]
    means = [[statistics.fmean(of_place or [np.nan]) for of_place in row] for row in values]
    heat = panels.Heat(np.array(means), part.rows, [part.heading(*place) for place in places])
    figure = panels.heat_maps(
      title,
      {kind.replace("/", " ").replace("_", " "): heat},
      across="",
      down="",
      unit="mean over seeds",
      numbers=True,
      most=1,
      slanted=True,
    )
    name = f"overview_{number}_{kind.replace('/', '_')}"
    yield Picture(name, figure, "Means over seeds of each row's longest runs.")
