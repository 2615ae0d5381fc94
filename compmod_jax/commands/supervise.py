"""Starts training again where it crashes, and ends a step that does not end.

    python -m train.supervise --restarts 3 -- --config configs/nmt_cah.py --workdir runs/nmt_cah

What follows `--` are the options of `python -m train.main`. It is started again after a crash, such
as a kill for want of memory or a driver that fails, and after input/output errors (status 75); not
after a mistake (status 2), a signal, or the end. After `--restarts` starts in a row without a new
checkpoint it is given up, with the status of the last one. SIGTERM and Ctrl-C are passed on, so
that training saves and ends. The watchdog: where nothing is printed, logged or saved for
`--stall_minutes`, or for `--compile_minutes` before the first step and while a program is compiled,
the stacks of all threads are printed and the process is killed, which counts as a crash. For one
process: of several that train together (`--multihost`) the scheduler starts all again.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from compmod_jax.commands import cli, failures, interrupt
from compmod_jax.core.errors import UserError, check

_POLL = 0.25  # seconds between two looks at the process
_DUMP = 3.0  # seconds for the stacks
# Ends that starting again would repeat, or that were asked for; killed by these means a crash.
_FINAL = {0, failures.MISTAKE, failures.INTERRUPTED, 128 + signal.SIGTERM}


# How training is started, which people copy behind the `--`.
_STARTS = (
  ["python", "-m", "train.main"],
  ["python", "-m", "compmod_jax", "train"],
  ["compmod", "train"],
)


@dataclasses.dataclass(frozen=True)
class Args:
  """Options of the supervisor."""

  restarts: int = 3
  """Starts in a row without a new checkpoint after which training is given up; 0 for no restart."""
  wait_seconds: float = 5.0
  """Seconds before the first restart in a row; twice as long before each further one."""
  stall_minutes: float = 15.0
  """Minutes without a line of the log, a checkpoint or a printed line until training is killed; 0
  for never. Must be longer than log_every steps take."""
  compile_minutes: float = 60.0
  """The same before the first step, and while a program is compiled."""


class Supervised:
  """One training process, watched.

  Args:
    command: what to run.
    workdir: of the run, whose files tell whether it goes on.
    args: the limits.
  """

  def __init__(self, command: list[str], workdir: Path, args: Args):
    self.workdir, self.args = workdir, args
    # Its lines pass through here: each is a sign of life, and the last tells what it does.
    self.process = subprocess.Popen(
      command,
      stderr=subprocess.PIPE,
      env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    self.moved = time.monotonic()
    self.started = self.compiling = False
    self._seen = self._marks()
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self) -> None:
    assert self.process.stderr is not None
    while text := os.read(self.process.stderr.fileno(), 65536):
      self.moved = time.monotonic()
      if line := text.strip().rpartition(b"\n")[2]:
        self.compiling = b"compiling" in line
      with contextlib.suppress(OSError):  # nobody reads any more; the training goes on
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()

  def _marks(self) -> tuple[int, ...]:
    """What grows or changes while a run goes on."""
    found = []
    for path in (self.workdir / "metrics.jsonl", self.workdir / "checkpoints"):
      with contextlib.suppress(OSError):
        found.append(path.stat().st_mtime_ns)
    return tuple(found)

  def stalled(self) -> bool:
    """Whether there was no sign of life for longer than the limit."""
    if (marks := self._marks()) != self._seen:
      self._seen, self.moved, self.started = marks, time.monotonic(), True
    slow = self.compiling or not self.started
    minutes = self.args.compile_minutes if slow else self.args.stall_minutes
    return minutes > 0 and time.monotonic() - self.moved > 60 * minutes

  def kill(self) -> None:
    """Has the stacks of all threads printed, and kills."""
    self.process.send_signal(signal.SIGABRT)  # faulthandler prints them and lets it die
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(_DUMP)
    self.process.kill()

  def wait(self) -> int:
    """Waits for the end; its status, 128 + the signal's number where one killed it."""
    while self.process.poll() is None:
      if self.stalled():
        say(f"nothing has moved for {(time.monotonic() - self.moved) / 60:.1f} minutes; ending it")
        self.kill()
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(_POLL)
    self._reader.join(timeout=_DUMP)
    if not self._reader.is_alive() and self.process.stderr is not None:
      self.process.stderr.close()  # else a grandchild still holds the other end
    status = self.process.returncode
    return status if status >= 0 else 128 - status


def main(argv: list[str]) -> int:
  """Starts and watches training until it ends or is given up; returns the last exit status."""
  mine, theirs = _split(argv)
  args = cli.options(Args, mine)
  check(args.restarts >= 0, f"--restarts is {args.restarts}; it must be at least 0, for never.")
  for field in ("wait_seconds", "stall_minutes", "compile_minutes"):
    value = getattr(args, field)
    check(0 <= value < 1e6, f"--{field} is {value}; it must be at least 0 and below a million.")
  check(
    bool(theirs),
    "Nothing follows --; give the options of training after it, for example: python -m"
    " train.supervise -- --config configs/nmt_cah.py --workdir runs/nmt_cah",
  )
  command = [sys.executable, "-m", "compmod_jax", "train", *theirs]
  return supervise(command, _workdir(theirs), args)


def supervise(command: list[str], workdir: Path, args: Args) -> int:
  """Starts a command again after crashes, within the bound; its last exit status."""
  stopped = threading.Event()
  current: list[Supervised] = []

  def stop(number: int, _: object) -> None:
    stopped.set()
    for one in current:
      one.process.send_signal(number)

  interrupt.release()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
  failed, saved = 0, _saved(workdir)
  while True:
    one = Supervised(command, workdir, args)
    current[:] = [one]
    if stopped.is_set():  # between two processes
      one.process.send_signal(signal.SIGTERM)
    status = one.wait()
    if status in _FINAL or stopped.is_set():
      return status
    now = _saved(workdir)
    failed, saved = (1 if now != saved else failed + 1), now
    if failed > args.restarts:
      say(f"ended with status {status}, {failed} times in a row without a checkpoint; giving up")
      return status
    pause = min(600.0, args.wait_seconds * 2 ** (failed - 1))
    say(f"ended with status {status}; restart {failed} of {args.restarts} in {pause:g} seconds")
    if stopped.wait(pause):
      return 128 + signal.SIGTERM


def say(text: str) -> None:
  """A line of the supervisor's own."""
  print(f"supervisor: {text}", file=sys.stderr, flush=True)


def _saved(workdir: Path) -> frozenset[str]:
  """Complete checkpoints: what shows that a start made progress."""
  return frozenset(path.name for path in workdir.glob("checkpoints/step_*"))


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
  """The supervisor's options and those of training, in front of which its whole start may stand."""
  place = argv.index("--") if "--" in argv else len(argv)
  theirs = argv[place + 1 :]
  for words in _STARTS:
    if theirs[: len(words)] and [Path(theirs[0]).name, *theirs[1 : len(words)]] == words:
      return argv[:place], theirs[len(words) :]
  return argv[:place], theirs


def _workdir(options: list[str]) -> Path:
  """The workdir that training is given."""
  for place, option in enumerate(options):
    name, equals, value = option.partition("=")
    if name == "--workdir":
      if not equals and place + 1 == len(options):
        raise UserError("--workdir has no value; give the folder of the run.")
      return Path(value if equals else options[place + 1])
  return Path("runs/default")
