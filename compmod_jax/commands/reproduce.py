"""Trains every row of a published table over several seeds, and sets the table beside the original.

    python -m train.reproduce 5.1 --scale tiny --heads 4 --seeds 3
    python -m train.reproduce 5.1 --scale tiny --show              # only the table of what is done
    python -m train.reproduce generalisation --overview            # runs of all scales, one table

Tables: 5.1 (where heads compete), 5.2 (widths of the router), 5.3 (the weakest head silent), 5.4
(training regimes), meta_routers (a fourth regime), seq2seq (LSTMs beside a Transformer), drophead,
roberta, competition (whether it helps, at equal parameters). Of recoding: recoding (all signals),
recoding-5.1, -5.2, -5.4, -5.5, -5.6, and -decoders (what an ensemble alone costs). Of modulation:
nemot-3.1 (perplexity of other text), -3.4 (a model for each set), -3.7 (with 3.8: one model for all
sets), -3.9 (that model fine-tuned), -3.10 (reading strategies), -scan (SCAN as questions). Of their
relatives: tim (mechanisms in masked language models), copying and digits (recurrent modules), cues
and plastic_lm (plastic connections), neural_interpreters (fuzzy expressions), competing_experts
(digits), few-shot (characters), leopard (sentences), continual (classes one after the other).
generalisation: positions, competition and gates on data that are composed, deeper or longer than
those of training; each data set is a scale, such as table_lookup, copy or scan_length, and quick.
logic_in_context: forms of attention on fuzzy expressions of new combinations of terms.
Scales: tiny (the project's own data), paper (the published data), and between them tatoeba,
public_domain, ptb or small; 5way and 20way of few-shot.

Each run is a cell: a small JSON file under `--results`, with its configuration, seed, revision,
device, date, times and scores. What is there counts as done, wherever it was made, so the same
command continues after a kill, and `--shard i/n` spreads the cells over machines that share a
folder. With every cell done the table goes to DIR/TABLE/SCALE: table.txt, table.tex, report.html
with a picture, and CSV and JSON with all numbers. The table of some rows (--rows), or of fewer
seeds than are there, goes to a folder of its own below that, and runs that are cut (--steps) to
DIR/TABLE/SCALE-N-steps: a part of a table never overwrites files of the whole one.
"""

import dataclasses
import gc
import json
import math
import re
import statistics
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from compmod_jax.commands import cli
from compmod_jax.tables.registry import table
from compmod_jax.tables.runs import Cell, read, write
from compmod_jax.tables.spec import Spec
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.preemption import Preemption

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Args:
  """Trains the rows of a published table and sets it beside the original."""

  table: Annotated[str, tyro.conf.Positional]
  """The table, such as 5.1 or copying; an unknown name is answered with all there are."""
  scale: str = "tiny"
  """Data and model: tiny, paper; tatoeba, public_domain, ptb, small, 5way or 20way, as the table
  has it."""
  heads: int = 4
  """Heads of every attention module, 4 or 8 (table 5.1)."""
  seeds: int = 3
  """Runs of each row: seeds 0, 1, ..."""
  rows: tuple[str, ...] = ()
  """Names of rows; none: all."""
  steps: int = 0
  """Cut every run to this many steps, for a try, in a folder of their own; 0 for the whole runs."""
  shard: str = "0/1"
  """i/n: make only the cells i, i + n, ...; counted from 0."""
  results: Path = Path("results")
  """Where cells are kept and tables are written."""
  workdir: Path = Path("runs/reproduce")
  """Where runs are made; a finished run is not needed any more."""
  show: bool = False
  """Train nothing; make the table from the cells that are there."""
  overview: bool = False
  """Train nothing; show the runs of all scales that are there in one table, and draw them."""


def main(argv: list[str]) -> int:
  """Makes the missing cells, then the table; 1 if a run failed."""
  with Preemption() as preemption:
    args = cli.options(Args, argv)
    if args.overview:
      report_all(args, cli.command("reproduce", argv))
      return 0
    spec, cells = grid(args)
    first, step = _shard(args.shard)
    missing = [cell for cell in cells[first::step] if read(cell) is None]
    command = cli.command("reproduce", argv)
    if missing and not args.show:
      print(expectations(spec, cells))
    failed = [] if args.show else make(missing, args, preemption, command)
    report(args, spec, cells, command)
  for cell, error in failed:
    print(f"failed: {cell.row}, seed {cell.seed}: {error}")
  return 1 if failed else 0


def grid(args: Args) -> tuple[Spec, list[Cell]]:
  """The table and its cells, all rows of the first seed before the second seed.

  Raises:
    UserError: an unknown table, scale or row.
  """
  from compmod_jax.core import errors

  errors.check(args.seeds >= 1, f"--seeds is {args.seeds}; it must be at least 1.")
  errors.check(args.steps >= 0, f"--steps is {args.steps}; it must not be negative.")
  spec = table(args.table, args.scale, args.heads)
  for row in args.rows:
    errors.check_choice("--rows", row, spec.rows)
  names = [row for row in spec.rows if row in args.rows or not args.rows]
  cells = []
  for seed in range(args.seeds):
    for name in names:
      row, file = spec.rows[name], folder(args) / f"{_run(name, seed)}.json"
      experiment = row.of_seed(seed)
      if row.starts_from:
        start = str(_workdir(args, row.starts_from, seed))
        experiment = dataclasses.replace(experiment, start=start)
      if args.steps:
        experiment = _cut(experiment, args.steps)
      cells.append(Cell(name, seed, experiment, file, row.in_use))
  return spec, cells


def _run(row: str, seed: int) -> str:
  """What the file of a cell and the workdir of its run are called."""
  return f"{_slug(row)}-seed{seed}"


def _workdir(args: Args, row: str, seed: int) -> Path:
  return args.workdir / folder(args).relative_to(args.results) / _run(row, seed)


def _slug(name: str) -> str:
  """The name of a row as a part of a file's name."""
  return re.sub(r"[^a-z0-9+.-]+", "-", name.lower())


def folder(args: Args) -> Path:
  """Where the cells are, and the files of the whole table."""
  heads = f"-heads{args.heads}" if args.table == "5.1" else ""
  steps = f"-{args.steps}-steps" if args.steps else ""
  return args.results / f"{args.table}{heads}" / f"{args.scale}{steps}"


def place(args: Args, spec: Spec) -> Path:
  """Where the files of the table go: a part of the rows, or of the seeds that are there, goes to a
  folder of its own, so that the files of the whole table stay."""
  part = []
  rows = [_slug(name) for name in spec.rows if name in args.rows or not args.rows]
  if len(rows) < len(spec.rows):
    named = "_".join(rows)
    part.append(named if len(named) <= 80 else f"{len(rows)}-rows-{zlib.crc32(named.encode()):08x}")
  seeds = (re.search(r"-seed(\d+)$", file.stem) for file in folder(args).glob("*-seed*.json"))
  if any(seed and int(seed[1]) >= args.seeds for seed in seeds):
    part.append(f"{args.seeds}-seeds")
  return folder(args) / f"part-{'-'.join(part)}" if part else folder(args)


def _cut(experiment: Experiment, steps: int) -> Experiment:
  phases = (Phase(steps=steps),)
  return dataclasses.replace(experiment, phases=phases, evaluate_every=steps, evaluate_sentences=20)


def _shard(text: str) -> tuple[int, int]:
  from compmod_jax.core import errors

  match = re.fullmatch(r"(\d+)/(\d+)", text)
  first, step = (int(match[1]), int(match[2])) if match else (0, 0)
  errors.check(
    first < step,
    f"--shard is {text!r}; give i/n with i from 0 to n - 1, for example 0/4 on the first of four"
    " machines.",
  )
  return first, step


def expectations(spec: Spec, cells: list[Cell]) -> str:
  """What the seeds will be able to show, from the spread of the runs that are there already."""
  from compmod_jax.tables.grid import planned, references_of

  values = _values(spec, cells)
  seeds = len({cell.seed for cell in cells})
  tests = len(references_of(spec.reference, values))
  found = {
    column: planned(values, column.name, seeds=seeds, tests=tests) for column in spec.columns
  }
  known = [
    f"{column.name} {least:.{column.digits}f}"
    for column, least in found.items()
    if math.isfinite(least)
  ]
  if not known:
    return (
      f"What {seeds} seeds of {len(values)} rows will be able to show is known once a row has two"
      " runs."
    )
  return (
    f"Given the spread of the runs so far, {seeds} seeds of {len(values)} rows will show a true"
    f" difference in four of five repetitions if it is at least: {', '.join(known)}."
  )


def make(
  missing: list[Cell], args: Args, preemption: Preemption, command: str
) -> list[tuple[Cell, str]]:
  """Trains the cells one after the other; returns those that failed and why."""
  from compmod_jax.core import errors

  failed: list[tuple[Cell, str]] = []
  seconds: list[float] = []
  for number, cell in enumerate(missing):
    left = statistics.median(seconds) * (len(missing) - number) if seconds else 0.0
    about = f", about {left / 60:.0f} min left" if seconds else ""
    print(
      f"\n== run {number + 1} of {len(missing)}: {cell.row}, seed {cell.seed}{about}", flush=True
    )
    began = time.monotonic()
    try:
      _make(cell, args, preemption, command)
    except errors.UserError as error:
      failed.append((cell, str(error)))
    seconds.append(time.monotonic() - began)
  return failed


def _make(cell: Cell, args: Args, preemption: Preemption, command: str) -> None:
  import jax

  from compmod_jax.analysis.report.results import flattened
  from compmod_jax.commands.train import train
  from compmod_jax.training.provenance import provenance

  workdir = _workdir(args, cell.row, cell.seed)
  train(cell.experiment, workdir, preemption, command=command)
  jax.clear_caches()
  gc.collect()  # the run's arrays
  results = json.loads((workdir / "results.json").read_text())

  def by_split(rows: list[Any]) -> dict[str, dict[str, Any]]:
    return {row["split"]: {k: v for k, v in flattened(row).items() if k != "split"} for row in rows}

  scores = by_split(results["splits"])
  for split, seconds in results["evaluate_seconds"].items():
    if "tokens" in scores[split]:
      scores[split]["tokens_per_second"] = scores[split]["tokens"] / seconds
  more = {}
  if cell.in_use:
    more = {"in_use": dict(cell.in_use), "scores_as_trained": scores}
    scores = by_split(_in_use(cell, workdir, list(scores)))
  record = {
    "schema": SCHEMA,
    "table": args.table,
    "scale": args.scale,
    "row": cell.row,
    "seed": cell.seed,
    "scores": scores,
    "best": results["best"],
    "parameters": results["parameters"],
    "train_seconds": results["train_seconds"],
    "provenance": provenance(),
    "experiment": results["configuration"],
    **more,
  }
  write(cell, record)


def _in_use(cell: Cell, workdir: Path, splits: list[str]) -> list[Any]:
  """Scores of a trained model, some of whose fields have other values than in training."""
  from compmod_jax.commands import evaluate

  file = workdir / "in_use.json"
  fields = [f"{name}={json.dumps(value)}" for name, value in cell.in_use.items()]
  evaluate.main(
    ["--workdir", str(workdir), "--splits", *splits, "--model_fields", *fields, "--json", str(file)]
  )
  return json.loads(file.read_text())["splits"]


def report_all(args: Args, command: str) -> None:
  """Prints what all scales have, and writes it to DIR/TABLE: report.html, pictures and CSV."""
  from compmod_jax.analysis.report import page
  from compmod_jax.tables import overview
  from compmod_jax.tables import report as tables

  def spec(scale: str) -> Spec:
    return table(args.table, scale, args.heads)

  where = folder(args).parent
  found = overview.collect(where, spec)
  for part in overview.parts(found):
    print("\n" + "\n".join(tables.aligned(overview.lines(part))))
  if found.left_out:
    print(
      f"\n{len(found.left_out)} files of other programs are left out, {found.left_out[0]} first."
    )
  title = f"All runs of the table {args.table}"
  written = page.write(overview.page(title, found), where, command=command)
  print(f"\nreport: {written.html}")


# The table.


def report(args: Args, spec: Spec, cells: list[Cell], command: str) -> None:
  """Prints the table of the cells that are done; writes it once all are."""
  from compmod_jax.analysis.report import page
  from compmod_jax.tables import groups
  from compmod_jax.tables import report as tables
  from compmod_jax.tables.grid import summarise

  done = {cell.file: record for cell in cells if (record := read(cell)) is not None}
  values = _values(spec, cells)
  left = len(cells) - len(done)
  if left:
    print(f"\n{left} of {len(cells)} runs are not done yet.")
  if not done:
    return
  found = summarise(
    f"{spec.title}; here: {spec.data}",
    values,
    spec.columns,
    reference=spec.reference,
    published={name: row.published for name, row in spec.rows.items()},
    settings={record["row"]: _settings(record["experiment"]) for record in done.values()},
    factors=spec.factors,
  )
  print("\n" + tables.text(found))
  if left:
    return
  where = place(args, spec)
  where.mkdir(parents=True, exist_ok=True)
  page.write_text(where / "table.txt", tables.text(found) + "\n")
  page.write_text(where / "table.tex", tables.latex(found))
  records = list(done.values())
  description = _description(spec, records)
  grouped = groups.collect(spec.columns, records)
  shown = tables.page(
    found,
    description=description,
    data={"cells": [r["row"] for r in records]},
    more=[groups.section(grouped)] if grouped else [],
  )
  written = page.write(
    shown,
    where,
    command=command,
    provenance={"runs": [_where(record) for record in records]},
  )
  if where != folder(args):
    print(f"\nThis is a part of the table: the files of the whole one in {folder(args)} stay.")
  print(f"\nreport: {written.html}")


def _settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
  """What a run was made with, as field -> value, but for its seed and where it was logged."""
  from compmod_jax.training.identity import MAY_CHANGE

  left_out = {*MAY_CHANGE, "name", "seed"}
  return dict(_flat({k: v for k, v in experiment.items() if k not in left_out}))


def _flat(values: object, path: str = "") -> Iterator[tuple[str, Any]]:
  if isinstance(values, Mapping) and values:
    for key, value in values.items():
      yield from _flat(value, f"{path}.{key}" if path else key)
  elif isinstance(values, list) and any(isinstance(value, Mapping) for value in values):
    for number, value in enumerate(values):
      yield from _flat(value, f"{path}.{number}")
  else:
    yield path, json.dumps(values) if isinstance(values, list | dict) else values


def _values(spec: Spec, cells: list[Cell]) -> dict[str, dict[int, Mapping[str, float]]]:
  """Row -> seed -> column -> score, of the cells that are done."""
  values: dict[str, dict[int, Mapping[str, float]]] = {cell.row: {} for cell in cells}
  for cell in cells:
    record = read(cell)
    if record is not None:
      values[cell.row][cell.seed] = dict(_scores(spec, record["scores"]))
  return values


def _scores(spec: Spec, scores: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
  for column in spec.columns:
    value = scores.get(column.split, {}).get(column.value)
    if value is not None:
      yield column.name, float(value)


def _description(spec: Spec, records: list[dict[str, Any]]) -> str:
  minutes = [record["train_seconds"] / 60 for record in records]
  return (
    f"{len(records)} runs, {spec.data}; {statistics.median(minutes):.1f} minutes of"
    f" training each ({min(minutes):.1f} to {max(minutes):.1f})."
  )


def _where(record: dict[str, Any]) -> str:
  """One line on a run: which, when, on what, from which code."""
  source = record["provenance"]
  revision = (source.get("git") or {}).get("revision") or "unknown revision"
  device = (source.get("devices") or {}).get("kind") or "unknown device"
  host = (source.get("host") or {}).get("cpu") or ""
  return (
    f"{record['row']}, seed {record['seed']}: {source['date']}, {device} {host},"
    f" {record['train_seconds']:.0f} s, {revision[:10]}"
  )
