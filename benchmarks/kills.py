"""Kills training at random moments and continues it: is anything lost, is the result the same?

    python -m benchmarks.kills --kills 50 --json results/robustness/kills.json

Each of the four kinds of run of benchmarks/tiny_runs.py is first trained twice without a kill; the
two must agree, or the comparison would show nothing. Then runs are started, killed by SIGKILL at a
moment drawn uniformly from the time that training takes (of every fifth kill: the whole run), and
started again by the same command, until each ends by itself. A kill counts as lost if the command
does not go on after it, or goes on before the last complete checkpoint. A run that ends must be as
those without a kill, bit for bit: parameters, optimizer, average and position in the data; models;
lines of the log; results.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.common import describe, machine
from benchmarks.tiny_runs import KINDS, STEPS
from compmod_jax.training.checkpoint import Checkpointer

ROOT = Path(__file__).parents[1]
STAGES = (
  "starting",
  "compiling",
  "training",
  "evaluating",
  "writing a checkpoint",
  "writing a model",
  "final scores and report",
)
# What differs between any two runs: times, and which programs were compiled anew.
_TIMES = re.compile(r"_per_second$|seconds$|^compil|^mfu$")
_PATIENCE = 600.0  # seconds after which a run counts as one that does not end


@dataclasses.dataclass
class Kind:
  """What became of the runs of one kind.

  Attributes:
    kills: processes killed.
    stages: stage of a run -> kills in it.
    lost: kills after which the run did not go on, or not from its last checkpoint.
    runs: runs that ended by themselves after one or more kills.
    identical: those of them that ended with the same bits as the run without a kill.
    seconds: what a run without a kill takes, with a filled compile cache.
    trained: after how many of them its training is over.
    notes: what went wrong.
  """

  kills: int = 0
  stages: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(STAGES, 0))
  lost: int = 0
  runs: int = 0
  identical: int = 0
  seconds: float = 0.0
  trained: float = 0.0
  notes: list[str] = dataclasses.field(default_factory=list)

  @property
  def failed(self) -> bool:
    """Whether there is anything that must not be."""
    return bool(self.lost or self.identical < self.runs or self.notes)


class Attempt:
  """A training process, its output in a file, killed when left."""

  def __init__(self, kind: str, workdir: Path, cache: Path):
    self.workdir, self.output = workdir, workdir.with_suffix(".log")
    self.unfinished = _unfinished(workdir)
    self.saved = max(steps_saved(workdir), default=0)
    # Without XLA's optimisations it compiles in half the time; what is claimed here does not
    # depend on them.
    own = {"COMPMOD_CACHE": str(cache), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = ["--config", f"benchmarks/tiny_runs.py:{kind}", "--workdir", str(workdir)]
    with open(self.output, "wb") as output:
      self.process = subprocess.Popen(
        [sys.executable, "-m", "train.main", *command],
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **own},
      )

  def __enter__(self) -> "Attempt":
    return self

  def __exit__(self, *_: object) -> None:
    self.process.kill()
    self.process.wait()

  def killed(self, after: float) -> bool:
    """Waits so many seconds and kills; False where the process ended before."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(after)
    self.process.kill()
    return self.process.wait() == -signal.SIGKILL

  @property
  def lines(self) -> list[str]:
    """What it printed."""
    return self.output.read_text(errors="replace").splitlines()

  def stage(self) -> str:
    """Where the process was when it was killed."""
    new = _unfinished(self.workdir) - self.unfinished
    if any(name.startswith("tmp_step_") for name, _ in new):
      return "writing a checkpoint"
    if new:
      return "writing a model"
    last = self.lines[-1] if self.lines else ""
    if last.startswith("compiling"):
      return "compiling"
    if not re.search(r"^step \d+/|^\w+ at step |^loss on|^continuing|^phase", "\n".join(self.lines),
                     re.MULTILINE):  # fmt: skip
      return "starting"
    if max(steps_saved(self.workdir), default=0) == STEPS:
      return "final scores and report"
    return "training" if last.startswith(("step ", "phase", "continuing")) else "evaluating"

  def complaint(self) -> str | None:
    """What is wrong with how this process went on from the one before it, or None."""
    found = re.search(
      r"^continuing from the checkpoint of step (\d+)$", "\n".join(self.lines), re.M
    )
    if found and int(found[1]) < self.saved:
      return f"went on from step {found[1]} though step {self.saved} was complete"
    if self.saved and not found and any(line.startswith("step ") for line in self.lines):
      return f"began again though step {self.saved} was complete"
    status = self.process.returncode
    if status not in (0, -signal.SIGKILL):
      return f"exit status {status}: {' / '.join(self.lines[-3:])[:600]}"
    return None


def _unfinished(workdir: Path) -> set[tuple[str, int]]:
  """Checkpoints and models whose writing has begun and is not complete."""
  found = set()
  for path in (*workdir.glob("checkpoints/tmp_step_*"), *workdir.glob("models/.*")):
    with contextlib.suppress(FileNotFoundError):
      found.add((path.name, path.stat().st_ctime_ns))
  return found


def steps_saved(workdir: Path) -> list[int]:
  """Steps of the complete checkpoints."""
  return [int(path.name[5:13]) for path in workdir.glob("checkpoints/step_*")]


def contents(workdir: Path) -> dict[str, Any]:
  """All that a run leaves and that must not depend on interruptions, by name."""
  newest = max(workdir.glob("checkpoints/step_*"), key=lambda path: path.name)
  record = json.loads((newest / "meta.json").read_text())
  abstract = {
    path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in record["leaves"].items()
  }
  restored = Checkpointer(workdir / "checkpoints").restore(abstract)
  assert restored is not None
  state, meta, step = restored
  found: dict[str, Any] = {f"state/{k}": np.asarray(v).tobytes() for k, v in state.items()}
  history = {k: v for k, v in meta["history"].items() if k not in ("seconds", "log")}
  found |= {"step": step, "iterators": meta["iterators"], "history": history}
  for path in sorted(workdir.glob("models/*/params.safetensors")):
    found[str(path.relative_to(workdir))] = path.read_bytes()
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  for kind in ("train", "eval", "heads", "final"):
    found[f"log/{kind}"] = [
      {k: v for k, v in line.items() if not _TIMES.search(k)}
      for line in lines
      if line["kind"] == kind
    ]
  results = json.loads((workdir / "results.json").read_text())
  kept = ("parameters", "best", "splits", "samples", "head_weights")
  return found | {f"results/{name}": results.get(name) for name in kept}


_one_reader = threading.Lock()


def differences(one: Path, two: Path) -> list[str]:
  """Names of what two ended runs do not have in common."""
  with _one_reader:
    first, second = contents(one), contents(two)
  return sorted(k for k in first.keys() | second.keys() if first.get(k) != second.get(k))


def whole(kind: str, workdir: Path, cache: Path) -> tuple[float, float]:
  """Trains without a kill; seconds until training was over, and until the end."""
  began, trained = time.monotonic(), 0.0
  with Attempt(kind, workdir, cache) as attempt:
    while attempt.process.poll() is None and time.monotonic() - began < _PATIENCE:
      if not trained and STEPS in steps_saved(workdir):
        trained = time.monotonic() - began
      time.sleep(0.02)
    if attempt.killed(0) or attempt.process.returncode:
      raise RuntimeError(f"{kind} does not train:\n" + "\n".join(attempt.lines[-20:]))
  return trained, time.monotonic() - began


def prepare(kind: str, count: Kind, folder: Path) -> None:
  """Makes the reference and the control."""
  (folder / kind).mkdir()
  reference, control = folder / kind / "reference", folder / kind / "control"
  whole(kind, reference, folder / "cache")
  count.trained, count.seconds = whole(kind, control, folder / "cache")
  if different := differences(reference, control):
    count.notes.append(f"two runs without a kill differ: {different[:8]}")


def torment(
  kind: str, count: Kind, wanted: int, folder: Path, rng: random.Random, over: Callable[[], bool]
) -> None:
  """Starts one run, kills it until it ends, and compares it with the reference."""
  workdir = folder / kind / f"run{count.runs}"
  if not ends(kind, count, wanted, workdir, folder / "cache", rng, over):
    return
  count.runs += 1
  different = differences(folder / kind / "reference", workdir)
  count.identical += not different
  if different:
    count.notes.append(f"{workdir.name} differs from the reference: {different[:8]}")


def ends(
  kind: str,
  count: Kind,
  wanted: int,
  workdir: Path,
  cache: Path,
  rng: random.Random,
  over: Callable[[], bool],
) -> bool:
  """Starts a run again after each kill until it ends by itself; False where it cannot."""
  while True:
    patience = _PATIENCE
    # Once a run is trained only its report is left, where one kill tells as much as many.
    if count.kills < wanted and not over() and STEPS not in steps_saved(workdir):
      patience = rng.uniform(0.2, count.seconds if rng.random() < 0.2 else count.trained)
    with Attempt(kind, workdir, cache) as attempt:
      killed = attempt.killed(patience)
      if complaint := attempt.complaint():
        count.lost += 1
        count.notes.append(f"{workdir.name}: {complaint}")
        return False
      if not killed:
        return True
      if patience == _PATIENCE:
        count.notes.append(f"{workdir.name} did not end in {_PATIENCE:g} seconds")
        return False
      count.kills += 1
      count.stages[attempt.stage()] += 1


def table(kinds: dict[str, Kind]) -> str:
  """A line of each kind."""
  heads = ("kind", "kills", "lost", "runs", "identical", "s/run", *STAGES)
  rows: list[tuple[str, ...]] = [heads]
  for name, k in kinds.items():
    figures = (k.kills, k.lost, k.runs, k.identical, f"{k.seconds:.0f}")
    rows.append((name, *map(str, figures), *(str(k.stages[stage]) for stage in STAGES)))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = ["  ".join(v.rjust(w) for v, w in zip(row, widths, strict=True)) for row in rows]
  notes = [f"{name}: {note}" for name, k in kinds.items() for note in k.notes]
  return "\n".join([*lines, *notes])


def as_json(kinds: dict[str, Kind], options: dict[str, Any], seconds: float) -> dict[str, Any]:
  """What is kept: figures of every kind, and their sums."""
  return {
    "title": "training killed at random moments and continued",
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "machine": machine("cpu"),
    "options": options,
    "seconds": round(seconds, 1),
    "sums": {
      name: sum(getattr(kind, name) for kind in kinds.values())
      for name in ("kills", "lost", "runs", "identical")
    },
    "stages": {name: sum(kind.stages[name] for kind in kinds.values()) for name in STAGES},
    "kinds": {name: dataclasses.asdict(kind) for name, kind in kinds.items()},
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Kills, prints the table, writes the JSON file; 1 if anything was lost or differs."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--kills", type=int, default=50, help="kills of each kind of run")
  parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
  parser.add_argument("--minutes", type=float, default=0, help="begin no kill after this; 0: never")
  parser.add_argument("--jobs", type=int, default=2, help="kinds of run at the same time")
  parser.add_argument("--seed", type=int, default=0, help="of the moments")
  parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
  options = parser.parse_args(argv)
  print(f"killing on {describe(machine('cpu'))}", flush=True)
  began = time.monotonic()

  def over() -> bool:
    return bool(options.minutes) and time.monotonic() - began > 60 * options.minutes

  kinds = {name: Kind() for name in options.kinds}
  with (
    tempfile.TemporaryDirectory() as folder,
    concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
  ):
    place, randoms = Path(folder), {name: random.Random(f"{options.seed} {name}") for name in kinds}
    busy = {pool.submit(prepare, name, kind, place): name for name, kind in kinds.items()}
    while busy:
      done, _ = concurrent.futures.wait(busy, timeout=20, return_when="FIRST_COMPLETED")
      for job in done:
        busy.pop(job)
        job.result()
      # Those with the fewest kills come first, so that an early end finds all kinds alike.
      for name, kind in sorted(kinds.items(), key=lambda item: item[1].kills):
        free = len(busy) < options.jobs and name not in busy.values()
        if free and kind.kills < options.kills and not kind.failed and not over():
          busy[pool.submit(torment, name, kind, options.kills, place, randoms[name], over)] = name
      passed, killed = time.monotonic() - began, sum(kind.kills for kind in kinds.values())
      total = options.kills * len(kinds)
      eta = f", about {passed / killed * (total - killed) / 60:.0f} min left" if killed else ""
      print(f"[{passed:5.0f} s] {killed} of {total} kills{eta}", file=sys.stderr, flush=True)
  print(table(kinds))
  if options.json is not None:
    kept = {name: getattr(options, name) for name in ("kills", "minutes", "jobs", "seed")}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
      json.dumps(as_json(kinds, kept, time.monotonic() - began), indent=2) + "\n"
    )
  return int(any(kind.failed for kind in kinds.values()))


if __name__ == "__main__":
  sys.exit(main())
