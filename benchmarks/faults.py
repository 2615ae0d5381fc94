"""Makes the disk fail under every writer of the programs: what is said, lost, and does it go on?

    python -m benchmarks.faults --json results/robustness/faults.json

A library of a few lines (benchmarks/faults.c, which needs a C compiler) is loaded into the program
and makes writing to paths with a given part fail, with "no space left" or an input/output error. So
all writers fail where they really would, those in C++ of orbax and XLA too. After each fault there
must be one paragraph without a traceback, status 2 (disk full) or 75 (input/output error), and no
file that was complete before may be gone or changed. The same command, now without the fault, must
go on; the run that has gone through all faults must be that which nothing disturbed, bit for bit.
What only saves time, the compile cache, may fail without a word.
"""

import argparse
import dataclasses
import datetime
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import describe, machine
from benchmarks.kills import ROOT, differences, steps_saved
from benchmarks.tiny_runs import KINDS

ERRORS = {"full": errno.ENOSPC, "io": errno.EIO}
STATUS = {"full": 2, "io": 75}


@dataclasses.dataclass(frozen=True)
class Writer:
  """Something that writes.

  Attributes:
    name: what it is called here.
    path: part of the paths it writes.
    after: bytes that it still writes.
    program: the program; training unless given, with `{workdir}` and `{out}` for folders.
    silent: it may fail without a word, as nothing depends on it.
  """

  name: str
  path: str
  after: int = 0
  program: tuple[str, ...] = ()
  silent: bool = False


TRAINING = (
  Writer("tokenizer cache", "cache/tokenizers/"),
  Writer("config.json", "run/.config.json|run/config.tmp|run/config.json"),
  Writer("tokenizers", "run/.tokenizers.new/"),
  Writer("compile cache", "cache/xla", silent=True),
  Writer("metrics.jsonl", "run/metrics.jsonl"),
  Writer("TensorBoard", "run/tensorboard/"),
  Writer("checkpoint: meta.json", "/meta.json"),
  Writer("checkpoint: arrays (orbax)", "/state"),
  Writer("checkpoint: arrays, half way", "/state", after=3000),
  Writer("checkpoint: manifest.json", "/manifest.json|/.manifest.json"),
  Writer("models/best", "/.best.new/"),
  Writer("models/step", "/.step-"),
  Writer("metrics.jsonl, taken back", "run/.metrics.jsonl.new"),
  Writer("pictures", "run/plots/"),
  Writer("results.json", "run/results.json|run/.results.json"),
  Writer("results.csv", "run/results.csv|run/.results.csv"),
  Writer("report.html", "run/report.html|run/.report.html"),
)
MODEL = ("--workdir", "{workdir}", "--quiet")
USING = (
  Writer(
    "evaluate --json", "scores.json", program=("evaluate", *MODEL, "--json", "{out}/scores.json")
  ),
  Writer("average", "/.average.new/", program=("average", "--workdir", "{workdir}", "--last", "2")),
  Writer("predict's output", "lines.out", program=("predict", *MODEL)),
)


@dataclasses.dataclass
class Outcome:
  """What a fault led to; `wrong` lists what must not be."""

  writer: str
  error: str
  struck: bool
  status: int
  message: str
  wrong: list[str]


def compiled(folder: Path) -> Path:
  """The library that makes writing fail."""
  library = folder / "faults.so"
  source = Path(__file__).with_name("faults.c")
  command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
  subprocess.run(command, check=True, capture_output=True)
  return library


def complete(root: Path) -> dict[str, str]:
  """Hashes of what is complete in a workdir: checkpoints, models, the report and its data."""
  found = {}
  files = ("report.html", "results.json", "config.json", "tokenizers")
  for pattern in ("checkpoints/step_*", "models/[!.]*", *files):
    for path in root.glob(pattern):
      for file in (path, *path.rglob("*")):
        if file.is_file():
          found[str(file.relative_to(root))] = hashlib.sha256(file.read_bytes()).hexdigest()
  return found


class Place:
  """A folder with a workdir, a cache and the library.

  Args:
    root: an empty folder.
    kind: which of the tiny runs.
  """

  def __init__(self, root: Path, kind: str):
    self.root, self.kind, self.library = root, kind, compiled(root)
    self.workdir, self.cache = root / "run", root / "cache"

  def run(
    self, writer: Writer | None, error: str = "", workdir: Path | None = None
  ) -> tuple[int, str, bool]:
    """Runs the writer's program, or training where there is none: status, errors, was it struck."""
    workdir, log = workdir or self.workdir, self.root / "struck"
    log.unlink(missing_ok=True)
    own = {"COMPMOD_CACHE": str(self.cache), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    if writer is not None and error:
      own |= {"LD_PRELOAD": str(self.library), "FAULT_PATH": writer.path, "FAULT_LOG": str(log)}
      own |= {"FAULT_ERRNO": str(ERRORS[error]), "FAULT_AFTER": str(writer.after)}
    command = ["train.main", "--config", f"benchmarks/tiny_runs.py:{self.kind}", "--workdir",
               str(workdir)]  # fmt: skip
    if writer is not None and writer.program:
      given = [part.format(workdir=workdir, out=self.root) for part in writer.program]
      command = [f"train.{given[0]}", *given[1:]]
    with open(self.root / "lines.out", "wb") as out:
      done = subprocess.run(
        [sys.executable, "-m", *command],
        input=b"It is good.\n" * 3,
        stdout=out,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **own},
        timeout=900,
        check=False,
      )
    return done.returncode, done.stderr.decode(errors="replace"), log.exists()

  def strike(self, writer: Writer, error: str) -> Outcome:
    """Lets a writer fail and looks at what comes of it."""
    before = complete(self.workdir)
    newest = max(steps_saved(self.workdir), default=0)
    status, shown, struck = self.run(writer, error)
    lines = [line for line in shown.splitlines() if line.strip()]
    message = lines[-1] if lines else ""
    wrong = []
    if not struck:
      wrong.append("nothing was written there, so that nothing failed")
    if not (writer.silent and status == 0):
      if status != STATUS[error]:
        wrong.append(f"exit status {status}, not {STATUS[error]}")
      if not message.startswith("error: "):
        wrong.append(f"the last line is no message: {message[:200]}")
    if "Traceback" in shown:
      wrong.append("a traceback: " + " / ".join(lines[-4:])[:300])
    if max(steps_saved(self.workdir), default=0) < newest:
      wrong.append(f"the checkpoint of step {newest} is gone")
    after = complete(self.workdir)
    fixed = [name for name in before if not name.startswith(("checkpoints/", "models/"))]
    lost = [name for name in fixed if name not in after]
    best = [name for name in before if name.startswith("models/best/") and name not in after]
    if lost or best:
      wrong.append(f"lost: {', '.join(lost + best)}")
    return Outcome(writer.name, error, struck, status, message[:400], wrong)


def suffer(place: Place, errors: Sequence[str], say: Any) -> tuple[list[Outcome], list[str]]:
  """All faults, one after the other; outcomes, and how the run that had them differs."""
  found: list[Outcome] = []
  reference = place.root / "reference"
  status, shown, _ = place.run(None, workdir=reference)
  if status:
    raise RuntimeError(f"training fails without a fault:\n{shown}")
  for error in errors:
    if error != errors[0]:
      shutil.rmtree(place.workdir)
    for writer in TRAINING:
      if "cache" in writer.path:
        shutil.rmtree(place.cache / writer.path.split("/")[1], ignore_errors=True)
      kept = place.root / "kept"
      if place.workdir.exists():
        shutil.copytree(place.workdir, kept)
      found.append(place.strike(writer, error))
      say(found[-1])
      if found[-1].status == 0:  # it went on to its end; those that follow need a run that has not
        shutil.rmtree(place.workdir)
        if kept.exists():
          kept.rename(place.workdir)
      shutil.rmtree(kept, ignore_errors=True)
    status, shown, _ = place.run(None)
    different = differences(reference, place.workdir) if status == 0 else [shown[-400:]]
    if different:
      return found, different
    for writer in USING:
      found.append(place.strike(writer, error))
      say(found[-1])
      if (status := place.run(writer)[0]) != 0:
        found[-1].wrong.append(f"without the fault it ends with status {status}")
  return found, []


def main(argv: Sequence[str] | None = None) -> int:
  """Injects the faults, prints a line of each, writes the JSON file; 1 if anything is wrong."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--kind", choices=list(KINDS), default="masked")
  parser.add_argument("--errors", nargs="+", choices=list(ERRORS), default=list(ERRORS))
  parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes here")
  options = parser.parse_args(argv)
  print(f"faults on {describe(machine('cpu'))}", flush=True)
  began = time.monotonic()

  def say(one: Outcome) -> None:
    verdict = "; ".join(one.wrong) or "ok"
    passed = time.monotonic() - began
    print(f"[{passed:5.0f} s] {one.error:5} {one.writer:30} {one.status:4}  {verdict}", flush=True)

  with tempfile.TemporaryDirectory() as folder:
    found, different = suffer(Place(Path(folder), options.kind), options.errors, say)
  print(f"differences from the undisturbed run: {different or 'none'}")
  if options.json is not None:
    record = {
      "title": "writing fails under every writer",
      "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
      "machine": machine("cpu"),
      "options": {"kind": options.kind, "errors": options.errors},
      "seconds": round(time.monotonic() - began, 1),
      "struck": sum(one.struck for one in found),
      "wrong": sum(bool(one.wrong) for one in found),
      "differences": different,
      "outcomes": [dataclasses.asdict(one) for one in found],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n")
  return int(bool(different) or any(one.wrong for one in found))


if __name__ == "__main__":
  sys.exit(main())
