"""Draws the learning curves of several runs beside each other.

    python -m train.curves --runs joint=runs/joint iterative=runs/iterative --output pictures

Writes loss, perplexity and score by epoch (`learning_curves`), and gradient norm and learning rate
by step (`gradient_curves`), as PNG and SVG; read from each run's metrics.jsonl, at any time.
"""

import dataclasses
from pathlib import Path

from compmod_jax.commands import cli
from compmod_jax.core.errors import check


@dataclasses.dataclass(frozen=True)
class Args:
  """Draws the learning curves of several runs beside each other."""

  runs: tuple[str, ...]
  """Runs as NAME=WORKDIR, or workdirs, which are named like their folders."""
  output: Path = Path("pictures")
  """Folder for the pictures; made if it does not exist."""


def main(argv: list[str]) -> None:
  """Draws and says where."""
  args = cli.options(Args, argv)
  from compmod_jax.analysis import learning_curves
  from compmod_jax.analysis.report import plot
  from compmod_jax.analysis.report.training import read_records

  workdirs = _named(args.runs)
  runs = {name: read_records(workdir / "metrics.jsonl") for name, workdir in workdirs.items()}
  for name, records in runs.items():
    check(
      records,
      f"--runs {name}: {workdirs[name] / 'metrics.jsonl'} holds no records. Give the workdirs of"
      " runs that were trained.",
    )
  figures = {
    "learning_curves": learning_curves.learning_curves(runs),
    "gradient_curves": learning_curves.gradient_curves(runs),
  }
  for name, figure in figures.items():
    for path in plot.save(figure, args.output, name):
      print(path)


def _named(runs: tuple[str, ...]) -> dict[str, Path]:
  check(runs, "--runs is empty; give at least one workdir of a training run.")
  found: dict[str, Path] = {}
  for run in runs:
    name, equals, workdir = run.partition("=")
    path = Path(workdir if equals else run)
    name = name if equals else path.resolve().name
    check(
      name not in found,
      f"--runs names two runs {name!r}; give each a name of its own, as NAME=WORKDIR.",
    )
    found[name] = path
  return found
