"""Compares two trained models on the same sentences.

    python -m train.compare runs/plain runs/competition --split test

Paired bootstrap on loss, BLEU and chrF, by source length and by what gold annotations tell (depth,
for example), and the sentences that changed most, with the routing differences where both models
route. Writes one HTML report, its pictures (PNG, SVG), tables (CSV) and numbers (JSON) into
`--output`, by default `analysis/compare` in the second workdir.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from compmod_jax.analysis.compare import Compare, compare, make_page
from compmod_jax.commands import cli
from compmod_jax.commands.options import Code, ModelArgs, Opened, open_model
from compmod_jax.core import errors
from compmod_jax.training.progress import Progress


@dataclasses.dataclass(frozen=True)
class Args(Compare):
  """Compares two trained models on the same sentences."""

  workdirs: tyro.conf.Positional[tuple[Path, ...]] = ()
  """Workdirs of two training runs, or two model folders."""
  split: str = "test"
  """Name of the split."""
  model: str | None = None
  """Which of the workdirs' models: best (the default), average or step-NUMBER."""
  method: Literal["beam", "greedy", "sample"] | None = None
  """How both decode; by default each as in its training."""
  beams: int | None = None
  """Hypotheses that beam search follows."""
  output: Path | None = None
  """Folder for the report."""
  code: Code = ()
  """Python file of your own whose classes the models' configurations name; it is run first. May be
  given several times."""
  quiet: bool = False
  """Show no progress."""


def main(argv: list[str]) -> None:
  """Compares, writes the report and prints what it shows."""
  args = cli.options(Args, argv)
  errors.check(
    len(args.workdirs) == 2,
    f"{len(args.workdirs)} workdirs are given; two are compared: python -m train.compare WORKDIR"
    " WORKDIR --split test.",
  )
  command = cli.command("compare", argv)
  progress = Progress(0, quiet=args.quiet)
  try:
    _compare(args, command, progress)
  finally:
    progress.close()


def _compare(args: Args, command: str, progress: Progress) -> None:
  from compmod_jax.analysis.report import page
  from compmod_jax.analysis.subject import Subject
  from compmod_jax.training.provenance import provenance

  def status(text: str, done: int | None = None, total: int | None = None) -> None:
    progress.status(text, done, total)

  opened: list[Opened] = [
    open_model(
      ModelArgs(workdir, model=args.model, method=args.method, beams=args.beams, code=args.code)
    )
    for workdir in args.workdirs
  ]
  first, second = (
    Subject(
      one.model.task,
      one.params,
      args.split,
      seed=args.seed,
      sharing=one.sharing,
      status=status,
    )
    for one in opened
  )
  names = (str(opened[0].model.folder), str(opened[1].model.folder))
  found = make_page(args, first, second, names, compare(first, second, names, args))
  folder = args.output or args.workdirs[1] / "analysis" / "compare"
  written = page.write(found, folder, command=command, provenance=provenance())
  print("\n".join(f"- {sentence}" for sentence in found.summary))
  print(f"\nreport: {written.html}")
