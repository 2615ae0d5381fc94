"""The supervisor starts again after crashes, within a bound, and ends what does not end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import ROOT

from compmod_jax.commands import supervise
from compmod_jax.core.errors import UserError

# Acts out what the letters of `ends` ask for, one for each start.
CHILD = """
import os, pathlib, signal, sys, time
folder, ends = pathlib.Path(sys.argv[1]), sys.argv[2]
number = len(list(folder.glob("start-*")))
(folder / f"start-{number}").touch()
print(f"start {number}", file=sys.stderr, flush=True)
end = ends[min(number, len(ends) - 1)]
if end in "sS":  # a new checkpoint, then a crash
  (folder / f"checkpoints/step_{number:08d}").mkdir(parents=True)
if end in "hc":  # the first step is over
  (folder / "metrics.jsonl").write_text(str(number))
  time.sleep(0.4)
if end == "h":
  print("a step that does not end", file=sys.stderr, flush=True)
  time.sleep(60)
if end == "c":
  print("compiling the step for batches of 2 x 2", file=sys.stderr, flush=True)
  time.sleep(1.5)
if end == "b":
  time.sleep(1.5)
if end == "w":
  def stop(number, frame):
    print("saved", file=sys.stderr, flush=True)
    os._exit(128 + number)
  signal.signal(signal.SIGTERM, stop)
  (folder / "ready").touch()
  time.sleep(60)
if end in "kS":
  os.kill(os.getpid(), signal.SIGKILL)
sys.exit({"x": 1, "s": 1, "m": 2, "p": 75}.get(end, 0))
"""
FAST = supervise.Args(restarts=2, wait_seconds=0.01, stall_minutes=0.01, compile_minutes=1)


@pytest.fixture
def supervised(tmp_path, capfd):
  """Supervises a child that ends as the letters say; (status, starts, what was printed)."""
  before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

  def run(ends, args=FAST):
    command = [sys.executable, "-c", CHILD, str(tmp_path), ends]
    status = supervise.supervise(command, tmp_path, args)
    return status, len(list(tmp_path.glob("start-*"))), capfd.readouterr().err

  yield run
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize(
  ("ends", "status", "starts"),
  [
    ("e", 0, 1),  # the end
    ("m", 2, 1),  # a mistake
    ("xe", 0, 2),  # a crash, then the end
    ("ke", 0, 2),  # killed, as for want of memory
    ("pe", 0, 2),  # an input/output error
    ("x", 1, 3),  # crashes for ever: two restarts
    ("k", 137, 3),
    ("sSsSx", 1, 6),  # counted anew after every checkpoint
    ("xm", 2, 2),
  ],
)
def test_a_crash_starts_again_within_the_bound_and_a_mistake_does_not(
  supervised, ends, status, starts
):
  assert supervised(ends)[:2] == (status, starts)


def test_no_restart_is_made_where_none_is_wanted(supervised):
  args = supervise.Args(restarts=0, wait_seconds=0)
  assert supervised("xe", args)[:2] == (1, 1)


def test_a_step_that_does_not_end_is_killed_with_the_stacks_and_started_again(supervised):
  status, starts, shown = supervised("he")
  assert (status, starts) == (0, 2)
  assert "nothing has moved for" in shown
  assert "Current thread" in shown
  assert 'File "<string>", line' in shown
  assert "ended with status 134; restart 1 of 2" in shown


def test_compiling_is_no_stall_below_its_own_limit(supervised):
  assert supervised("c")[:2] == (0, 1)
  args = supervise.Args(restarts=0, wait_seconds=0, stall_minutes=0, compile_minutes=0.005)
  assert supervised("c", args)[0] == 134


def test_before_the_first_step_the_longer_limit_holds(supervised):
  assert supervised("b")[:2] == (0, 1)


def test_sigterm_is_passed_on_and_nothing_is_started_again(tmp_path):
  code = (
    "import sys; from pathlib import Path; from compmod_jax.commands import supervise\n"
    "sys.exit(supervise.supervise(sys.argv[2:], Path(sys.argv[1]), supervise.Args()))"
  )
  child = [sys.executable, "-c", CHILD, str(tmp_path), "w"]
  command = [sys.executable, "-c", code, str(tmp_path), *child]
  with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
    end = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < end:
      time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    shown = process.communicate(timeout=30)[1]
  assert process.returncode == 143
  assert "saved" in shown
  assert len(list(tmp_path.glob("start-*"))) == 1


def test_the_options_of_training_follow_two_dashes(tmp_path, monkeypatch):
  found = {}

  def note(command, workdir, args):
    found.update(command=command, workdir=workdir, args=args)
    return 0

  monkeypatch.setattr(supervise, "supervise", note)
  given = ["--config", "c.py", f"--workdir={tmp_path}"]
  assert supervise.main(["--restarts", "7", "--", *given]) == 0
  assert found["command"][1:] == ["-m", "compmod_jax", "train", *given]
  assert found["workdir"] == tmp_path
  assert found["args"].restarts == 7
  for start in ("python -m train.main", "/bin/compmod train", "python -m compmod_jax train"):
    assert supervise.main(["--", *start.split(), *given[:2]]) == 0
    assert found["command"][1:] == ["-m", "compmod_jax", "train", *given[:2]]
  assert found["workdir"] == Path("runs/default")
  for wrong, word in (([], "Nothing follows"), (["--restarts=-1", "--", "x"], "restarts is -1")):
    with pytest.raises(UserError, match=word):
      supervise.main(wrong)
