"""Trains an experiment, evaluates what it kept as best, and writes a report.

    python -m train.main --config configs/nmt_cah.py --workdir runs/nmt_cah

`--config PATH[:VARIANT]` names a file with `get_config(variant)`; `--config.FIELD=VALUE` overrides
any field of it. The same command continues a run that was interrupted. `--describe` shows the model
and trains nothing; `--aot v5e:4x4` says what a step costs on such TPUs, which need not be there.
`--multihost` trains in several processes together (docs/pods.md).
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
from pathlib import Path

from compmod_jax.commands import cli
from compmod_jax.commands.config_option import parse
from compmod_jax.core.config import to_json
from compmod_jax.core.disk_cache import cache_folder
from compmod_jax.training import profiling
from compmod_jax.training.distributed.multihost import Group, Multihost, joined
from compmod_jax.training.experiment import Experiment
from compmod_jax.training.preemption import Preemption


@dataclasses.dataclass(frozen=True)
class Args:
  """Arguments of the training program."""

  config: Experiment
  """The experiment."""
  workdir: Path = Path("runs/default")
  """Folder of the run; made if it does not exist, continued if it does."""
  describe: bool = False
  """Print the model as a diagram, with parameters and FLOPs beside the plain model's, and end."""
  multihost: Multihost = Multihost()
  """Several processes that train together."""
  aot: str = ""
  """A slice of TPUs, such as v5e:4x4 or v5p:2x2x1: compile the training step for it, without TPU or
  data, print memory, FLOPs, collectives and model time, and end."""
  profile: str = ""
  """Steps to write a trace of, FIRST:LAST such as 20:25, for XProf, TensorBoard and Perfetto."""


def main(argv: list[str]) -> None:
  """Trains, evaluates and reports; or describes the model."""
  with Preemption() as preemption:
    args = parse(Args, argv)
    if args.describe:
      show(args.config)
      return
    if args.aot:
      show_cost(args.config, args.aot)
      return
    command = cli.command("main", argv)
    steps = profiling.parse(args.profile)
    with joined(args.multihost, about=describe_start(args)) as group:
      preemption.group = group
      train(args.config, args.workdir, preemption, command=command, group=group, profiled=steps)


def describe_start(args: Args) -> dict[str, str]:
  """What must be the same in all processes that train together."""
  configuration = json.dumps(to_json(args.config)).encode()
  return {
    "configuration": hashlib.sha256(configuration).hexdigest()[:12],
    "workdir": str(args.workdir),
    "jax": importlib.metadata.version("jax"),
  }


def show(experiment: Experiment) -> None:
  """Prints an experiment's model as a diagram; trains nothing and writes no workdir."""
  from compmod_jax.tools import describe

  print(describe.page(experiment, cache_folder() / "tokenizers"))


def show_cost(experiment: Experiment, topology: str) -> None:
  """Prints what an experiment's step costs on a slice of TPUs; trains nothing."""
  from compmod_jax.tools import aot

  print(aot.page(experiment, topology, cache_folder() / "tokenizers"))


def train(
  experiment: Experiment,
  workdir: Path,
  preemption: Preemption,
  *,
  command: str = "",
  group: Group = Group(),
  profiled: range = range(0),
) -> None:
  """Trains an experiment to its end, from wherever its workdir stands, evaluates and reports.

  Args:
    experiment: what to train.
    workdir: folder of the run.
    preemption: ends the process on a signal, after saving.
    command: how the program was started, for the report.
    group: the processes that train together.
    profiled: steps of which a trace is written.

  Raises:
    UserError: any part of the experiment is wrong, or the workdir is in use or belongs to another
      experiment.
  """
  # What follows takes seconds to import; mistakes on the command line are reported before.
  from compmod_jax.training import final_evaluation
  from compmod_jax.training.loop import Loop
  from compmod_jax.training.run import set_up, use_compile_cache
  from compmod_jax.training.workdir import alone
  from compmod_jax.training.writer import Writer

  use_compile_cache()
  with contextlib.ExitStack() as held:
    group.decide("workdir", lambda: held.enter_context(alone(workdir)))
    run = group.first("set up", lambda: set_up(experiment, workdir, command=command))
    written = workdir if group.primary else None
    writer = held.enter_context(Writer(written, total_steps=run.total_steps))
    for note in run.notes:
      writer.say(f"note: {note}")
    traces = workdir / profiling.FOLDER
    profiler = profiling.Profiler(profiled if group.primary else range(0), traces, writer.say)
    loop = Loop(run, writer, preemption, group, profiler)
    loop.train()
    final_evaluation.report_run(run, loop.history, writer, command=command, group=group)
