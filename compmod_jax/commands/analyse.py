"""Looks into a trained model: what its parts do, and what it loses without them.

    python -m train.analyse heads --workdir runs/nmt_cah --split test --words but if we can
    python -m train.analyse ablate --workdir runs/nmt_cah --split test --replace mean
    python -m train.analyse attention --workdir runs/nmt_cah --text "Der Hund schläft."
    python -m train.analyse traces --workdir runs/lm --text "The dog that the cats see sleeps ."
    python -m train.analyse gates --workdir runs/nemot_qa --text "Anna is here. | Where is Anna?"

Each analysis writes one HTML report, its pictures (PNG, SVG), tables (CSV) and numbers (JSON) into
`--output`, by default `<workdir>/analysis/<name>`. `python -m train.analyse NAME --help` lists its
options.

To add an analysis: a file in compmod_jax/analysis with a frozen dataclass of options, whose
docstring is the help and whose `run(subject)` returns a `Page`; and its line in ANALYSES.
"""

import dataclasses
import shlex
import textwrap
from pathlib import Path
from typing import Annotated, Any

import tyro

from compmod_jax.analysis.ablation.measure import Ablate
from compmod_jax.analysis.attention import Attention
from compmod_jax.analysis.gates.measure import Gates
from compmod_jax.analysis.heads.measure import Heads
from compmod_jax.analysis.recoding.probes import ProbeNumber
from compmod_jax.analysis.recoding.traces import Traces
from compmod_jax.commands import cli
from compmod_jax.commands.options import ModelArgs, open_model
from compmod_jax.core import errors
from compmod_jax.training.progress import Progress

# Name on the command line -> a dataclass of options whose `run` goes from a Subject to a Page.
ANALYSES: dict[str, Any] = {
  "heads": Heads,
  "ablate": Ablate,
  "traces": Traces,
  "probe": ProbeNumber,
  "gates": Gates,
  "attention": Attention,
}


_START = "python -m train.analyse"


@dataclasses.dataclass(frozen=True)
class Args(ModelArgs):
  """Options of every analysis."""

  splits: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--split"])] = ("test",)
  """Names of splits; each has a report of its own."""
  sentences: int = 2000
  """Examples of a split that are read, drawn at random; 0: all."""
  seed: int = 0
  """Seed of everything that is drawn."""
  output: Path | None = None
  """Folder for the report; with several splits, it gets a folder for each."""
  quiet: bool = False
  """Show no progress."""


def main(argv: list[str]) -> None:
  """Runs one analysis."""
  name = argv[0] if argv else ""
  if name in ("-h", "--help"):
    print(cli.as_started(_help()))
    return
  errors.check_choice("The first word after train.analyse", name, ANALYSES)
  analysis = ANALYSES[name]
  about = textwrap.fill(" ".join(analysis.__doc__.split()), cli.WIDTH)
  program = f"{_START} {name}", about
  args = cli.options(_arguments(analysis), argv[1:], program=program)
  errors.check(args.sentences >= 0, f"--sentences is {args.sentences}; it must be at least 0.")
  command = f"{_START} {shlex.join(argv)}"
  output = args.output or args.workdir / "analysis" / name
  _analyse(args, output, command)


def _help() -> str:
  """Usage, what the program does, and a line on every analysis."""
  rows = [(name, " ".join(analysis.__doc__.split())) for name, analysis in ANALYSES.items()]
  return (
    f"usage: {_START} {{{','.join(ANALYSES)}}} --workdir PATH [OPTION ...]\n\n"
    f"{(__doc__ or '').strip()}\n\nAnalyses:\n\n{cli.table(rows, 12)}\n\n{cli.DEBUG}"
  )


def _arguments(analysis: Any) -> Any:
  """The options of an analysis and those of every analysis, as one dataclass."""
  made = dataclasses.make_dataclass(
    f"{analysis.__name__}Args", [], bases=(analysis, Args), frozen=True
  )
  made.__doc__ = analysis.__doc__
  return made


def _analyse(args: Any, output: Path, command: str) -> None:
  from compmod_jax.analysis.report import page
  from compmod_jax.analysis.report.training import read_records
  from compmod_jax.analysis.subject import Subject
  from compmod_jax.training.provenance import provenance

  opened = open_model(args)
  task = opened.model.task
  of_splits = getattr(args, "of_splits", True)
  splits = args.splits if of_splits else args.splits[:1]
  for split in splits if of_splits else ():
    errors.check_choice("--splits", split, task.dataset.splits())
  records = read_records(args.workdir / "metrics.jsonl")
  progress = Progress(0, quiet=args.quiet)

  def status(text: str, done: int | None = None, total: int | None = None) -> None:
    progress.status(text, done, total)

  try:
    for split in splits:
      subject = Subject(
        task,
        opened.params,
        split,
        sentences=args.sentences,
        seed=args.seed,
        sharing=opened.sharing,
        records=records,
        status=status,
      )
      found = args.run(subject)
      folder = output if len(splits) == 1 else output / split
      written = page.write(found, folder, command=command, provenance=provenance())
      print("\n".join(f"- {sentence}" for sentence in found.summary))
      print(f"\nreport: {written.html}")
  finally:
    progress.close()
