"""How long training takes from the start of its process to the end of its first step.

    python -m benchmarks.startup [--quick] [--check] [--json FILE]

`python -m train.main --config configs/nmt_cah.py`, the job of `make run`, in new folders. The
first run fills the caches of compiled programs, tokenizers and sentences, and of bytecode, which
Python keeps unless it is forbidden to; those after it are timed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import common

ROUNDS = 20
ROOT = Path(__file__).parents[1]
OPTIONS = ("--config", "configs/nmt_cah.py", "--config.phases.0.steps=1", "--config.log_every=1")
"""One step, so that its line is printed as soon as it is done, not while the next one runs."""


def first_step(cache: Path) -> None:
  """Starts training in a new folder, and ends it once it has printed its first step."""
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "train.main", *OPTIONS, "--workdir", folder + "/run"]
    given = os.environ | {
      "COMPMOD_CACHE": str(cache),
      "JAX_PLATFORMS": "cpu",
      "PYTHONPYCACHEPREFIX": str(cache / "bytecode"),
      "PYTHONDONTWRITEBYTECODE": "",
    }
    with subprocess.Popen(
      command, cwd=ROOT, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as program:
      assert program.stdout is not None
      said = []
      for line in program.stdout:
        said.append(line)
        if line.startswith("step 1/"):
          program.send_signal(signal.SIGKILL)
          return
    sys.exit(f"Training ended with {program.returncode} before its first step:\n{''.join(said)}")


def main() -> None:
  options = common.options(__doc__, devices=("cpu",)).parse_args()
  report = common.start("Start of training", options)
  rounds = 1 if options.quick else ROUNDS
  with tempfile.TemporaryDirectory() as cache:
    began = time.perf_counter()
    first_step(Path(cache))
    report.note(f"with empty caches: {time.perf_counter() - began:.1f} s")
    run = {"caches filled": lambda: first_step(Path(cache))}
    seconds = report.measure("first step", run, rounds, amount=1, unit="starts", warm_up=1)
  report.claim("seconds to the first step", seconds["caches filled"], np.ones(rounds), at_most=4.0)
  report.finish()


if __name__ == "__main__":
  main()
