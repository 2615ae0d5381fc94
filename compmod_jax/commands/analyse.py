"""Looks into a trained model: what its units do, and what it loses without them.

    python -m train.analyse heads --workdir runs/nmt_cah --split test --words but if we can
    python -m train.analyse ablate --workdir runs/nmt_cah --split test --replace mean
    python -m train.analyse roles --workdir runs/nmt_cah --split test
    python -m train.analyse attention --workdir runs/nmt_cah --text "Der Hund schläft."
    python -m train.analyse traces --workdir runs/lm --text "The dog that the cats see sleeps ."
    python -m train.analyse gates --workdir runs/nemot_qa --text "Anna is here. | Where is Anna?"

Each analysis writes one HTML report, its figures (PNG, SVG), tables (CSV) and numbers (JSON) into
`--output`, by default `<workdir>/analysis/<name>`. `python -m train.analyse NAME --help` lists its
options.

To add an analysis: a folder in compmod_jax/analysis with a frozen dataclass of options, whose
docstring is the help and whose `measure(subject)` returns what it finds, and `make_page`, which
makes a `Page` of that; and a line in ANALYSES.
"""

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import tyro

from compmod_jax.analysis import (
  ablation,
  attention,
  codes,
  composition,
  continual,
  gates,
  heads,
  image_experts,
  interpreter,
  meta_transfer,
  modules,
  plasticity,
  recoding,
  roles,
)
from compmod_jax.analysis.report.page import Page
from compmod_jax.analysis.subject import Subject
from compmod_jax.commands import cli
from compmod_jax.commands.options import ModelArgs, open_model
from compmod_jax.core import errors
from compmod_jax.training.progress import Progress


class Analysis(NamedTuple):
  """An analysis: how it is measured and how it is reported.

  Attributes:
    options: a frozen dataclass whose `measure` goes from a `Subject` to what is found there.
    make_page: from options, subject and what was found to the page.
  """

  options: type
  make_page: Callable[..., Page]

  @property
  def about(self) -> str:
    """What it does, from the docstring of its options."""
    return " ".join((self.options.__doc__ or "").split())


ANALYSES = {
  "heads": Analysis(heads.Heads, heads.make_page),
  "ablate": Analysis(ablation.Ablate, ablation.make_page),
  "traces": Analysis(recoding.Traces, recoding.report.make_page),
  "probe": Analysis(recoding.ProbeNumber, recoding.probes.make_page),
  "gates": Analysis(gates.Gates, gates.make_page),
  "codes": Analysis(codes.Codes, codes.make_page),
  "composition": Analysis(composition.Composition, composition.make_page),
  "attention": Analysis(attention.Attention, attention.make_page),
  "modules": Analysis(modules.Modules, modules.make_page),
  "plasticity": Analysis(plasticity.Plasticity, plasticity.make_page),
  "roles": Analysis(roles.Roles, roles.make_page),
  "functions": Analysis(interpreter.Functions, interpreter.make_page),
  "direction": Analysis(meta_transfer.Direction, meta_transfer.make_page),
  "image-experts": Analysis(image_experts.ImageExpertsReport, image_experts.make_page),
  "continual": Analysis(continual.Forgetting, continual.make_page),
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

  of_splits: ClassVar[bool] = True  # an analysis that reads no data says otherwise

  def measure(self, subject: Subject) -> Any:
    """What the analysis finds; its own options say what."""
    raise NotImplementedError


def main(argv: list[str]) -> None:
  """Runs one analysis."""
  name = argv[0] if argv else ""
  if name in ("-h", "--help"):
    print(cli.as_started(_help()))
    return
  errors.check(
    name and not name.startswith("-"),
    f"The name of an analysis is missing ({', '.join(sorted(ANALYSES))}): {_START} heads --workdir"
    " runs/nmt_cah.",
  )
  errors.check_choice("The analysis", name, ANALYSES)
  analysis = ANALYSES[name]
  program = f"{_START} {name}", textwrap.fill(analysis.about, cli.WIDTH)
  args = cli.options(_arguments(analysis.options), argv[1:], program=program)
  errors.check(args.sentences >= 0, f"--sentences is {args.sentences}; it must be at least 0.")
  command = cli.command("analyse", argv)
  output = args.output or args.workdir / "analysis" / name
  _analyse(analysis, args, output, command)


def _help() -> str:
  """Usage, what the program does, and a line on every analysis."""
  rows = [(name, analysis.about) for name, analysis in ANALYSES.items()]
  return (
    f"usage: {_START} {{{','.join(ANALYSES)}}} --workdir PATH [OPTION ...]\n\n"
    f"{(__doc__ or '').strip()}\n\nAnalyses:\n\n{cli.table(rows, 12)}\n\n{cli.DEBUG}"
  )


def _arguments(options: type) -> type[Args]:
  """The options of an analysis and those of every analysis, as one dataclass."""
  made = dataclasses.make_dataclass(
    f"{options.__name__}Args", [], bases=(options, Args), frozen=True
  )
  made.__doc__ = options.__doc__
  return made


def _analyse(analysis: Analysis, args: Args, output: Path, command: str) -> None:
  from compmod_jax.analysis.report import page
  from compmod_jax.analysis.report.training import read_records
  from compmod_jax.training.provenance import provenance

  opened = open_model(args)
  task = opened.model.task
  splits = args.splits if args.of_splits else args.splits[:1]
  for split in splits if args.of_splits else ():
    known = task.dataset.splits()
    errors.check(
      split in known or args.splits != Args.splits,
      f"The data have no split 'test', which analyses read by default; give --split with one of"
      f" {', '.join(known)}.",
    )
    errors.check_choice("--split", split, known)
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
      found = analysis.make_page(args, subject, args.measure(subject))
      folder = output if len(splits) == 1 else output / split
      written = page.write(found, folder, command=command, provenance=provenance())
      print("\n".join(f"- {sentence}" for sentence in found.summary))
      print(f"\nreport: {written.html}")
  finally:
    progress.close()
