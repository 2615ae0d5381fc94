"""What a user can cause ends a program with a paragraph and a documented status, no traceback."""

import errno
import os
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from programs import ROOT

from compmod_jax.commands import cli, failures
from compmod_jax.core import durable
from compmod_jax.core.errors import UserError

SYSTEM = {
  errno.EACCES: (2, "permission denied"),
  errno.EPERM: (2, "does not permit"),
  errno.EIO: (75, "input/output error"),
  errno.EROFS: (2, "can only be read"),
  errno.ENOSPC: (2, "the disk is full"),
  errno.EDQUOT: (2, "quota"),
  errno.EMFILE: (2, "ulimit -n"),
  errno.ENFILE: (2, "too many files"),
  errno.EAGAIN: (2, "process or thread"),
  errno.ENOENT: (2, "no such file"),
  errno.EISDIR: (2, "is a folder"),
  errno.ENOTDIR: (2, "no folder"),
  errno.ENAMETOOLONG: (2, "too long"),
  errno.ETIMEDOUT: (75, "timed out"),
  errno.ESTALE: (75, "tale"),
}


@pytest.fixture
def ended(monkeypatch, capsys):
  """Runs a program whose main calls a function; (status, what was printed)."""

  def run(act, *arguments):
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as stop:
      cli.run(lambda argv: act())
    return stop.value.code, capsys.readouterr().err

  return run


def thrower(error):
  def act():
    raise error

  return act


@pytest.mark.parametrize("number", SYSTEM, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("file", ["/data/metrics.jsonl", None])
def test_an_error_of_the_system_is_explained_with_its_file(ended, number, file):
  error = OSError(number, os.strerror(number), *([file] if file else []))
  status, shown = ended(thrower(error))
  assert status == SYSTEM[number][0]
  assert any(words in shown.lower() for words in SYSTEM[number][1:])
  assert shown.startswith("error: " + (f"{file}: " if file else ""))
  assert len(shown.splitlines()) == 1
  assert shown.endswith(".\n")


def test_a_full_disk_is_explained_with_the_file_that_was_being_written(ended, tmp_path):
  (tmp_path / ".report.html.new").symlink_to("/dev/full")
  (tmp_path / "report.html").write_text("whole")
  status, shown = ended(lambda: durable.write(tmp_path / "report.html", [b"new"]))
  assert status == 2
  assert shown.startswith(f"error: {tmp_path}/report.html: the disk is full. Free some space")
  assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("report.html", "whole")]


def test_debug_adds_the_traceback_of_any_of_them(ended):
  status, shown = ended(thrower(PermissionError(errno.EACCES, "no", "x")), "--debug")
  assert status == 2
  assert shown.startswith("Traceback")
  assert shown.splitlines()[-1].startswith("error: x: permission denied.")


def test_a_defect_of_the_program_keeps_its_traceback(monkeypatch):
  monkeypatch.setattr(sys, "argv", ["program"])
  with pytest.raises(ZeroDivisionError):
    cli.run(lambda argv: 1 // 0)
  with pytest.raises(ModuleNotFoundError):
    cli.run(lambda argv: __import__("compmod_jax.nothing"))


def test_host_memory_that_is_full_is_explained(ended):
  status, shown = ended(lambda: np.zeros(10**13))
  assert status == 2
  assert "Unable to allocate 72.8 TiB" in shown
  assert "memory of this machine is full" in shown
  assert shown.count("\n") == 1


def test_device_memory_that_is_full_names_micro_batches_remat_and_the_batch(ended):
  status, shown = ended(lambda: jnp.zeros((10**12,)))
  assert status == 2
  for word in ("4000000000000 bytes", "micro_batches", "model.remat", "task.batch.tokens", "fsdp"):
    assert word in shown
  assert shown.count("\n") == 1
  text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.52GiB."
  error = type("JaxRuntimeError", (RuntimeError,), {})(text)
  assert "full when 3.52GiB more were wanted" in (failures.explain(error) or "")


def test_a_missing_package_is_named_with_how_to_install_it(ended):
  status, shown = ended(lambda: __import__("tensorflow_nonsense.sub"))
  assert status == 2
  assert "'tensorflow_nonsense' is not installed" in shown
  assert "pip install tensorflow_nonsense" in shown


def test_an_input_output_error_below_a_message_of_ours_has_the_status_of_the_machine():
  error = UserError("The checkpoint cannot be written.")
  error.__cause__ = ValueError("UNKNOWN: writing [os_error_code='5' x='y']")
  assert failures.status(error) == failures.MACHINE
  error.__cause__ = OSError(errno.ENOSPC, "full")
  assert failures.status(error) == failures.MISTAKE


def _end(code, *, when=b"ready", pause=0.0, times=1, options=()):
  """Sends Ctrl-C to a program once it has said that it is ready; (status, seconds, errors)."""
  command = [sys.executable, "-c", code, *options]
  # Programs that are started in the background of a shell ignore Ctrl-C, and so would this one.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  finally:
    signal.signal(signal.SIGINT, before)
  with process:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert when in line
    time.sleep(pause)
    began = time.monotonic()
    for number in range(times):
      time.sleep(number)  # two that come before the first is taken are one
      process.send_signal(signal.SIGINT)
    try:
      shown = process.communicate(timeout=40)[1].decode()
    finally:
      process.kill()
  return process.returncode, time.monotonic() - began, shown


RUN = (
  "from compmod_jax.commands import cli\nimport time, sys\n"
  "def main(argv):\n  print('ready', flush=True)\n"
)


# Longer than a test waits: what ends sooner did not end for want of patience.
PATIENT = "from compmod_jax.commands import interrupt; interrupt.PATIENCE = 30.0"
C_CODE = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**9)"


@pytest.mark.programs
@pytest.mark.parametrize(
  ("body", "least"),
  [
    ("time.sleep(30)", 0),
    ("try: time.sleep(30)\n  except BaseException: raise ValueError('numpy failed')", 0),
    (C_CODE, 4),  # as while XLA compiles: no handler runs
    ("while True:\n    try: time.sleep(30)\n    except BaseException: pass", 4),
  ],
)
def test_ctrl_c_ends_a_program_whatever_it_does(body, least):
  status, seconds, shown = _end(f"{RUN}  {body}\ncli.run(main)", pause=0.3)
  assert status == 130
  assert shown.strip().startswith("error: stopped by Ctrl-C")
  assert "Traceback" not in shown
  assert least <= seconds < least + 20


def test_a_second_ctrl_c_ends_it_at_once():
  status, seconds, shown = _end(f"{PATIENT}\n{RUN}  {C_CODE}\ncli.run(main)", times=2)
  assert status == 130
  assert seconds < 25
  assert "Traceback" not in shown


def test_ctrl_c_takes_back_the_file_being_written(tmp_path):
  body = (
    "from compmod_jax.core import durable; from pathlib import Path\n"
    f"  durable.write(Path({str(tmp_path / 'scores.json')!r}),"
    " (b'x' for _ in iter(lambda: time.sleep(0.01), 1)))"
  )
  (tmp_path / "scores.json").write_text("whole")
  assert _end(f"{RUN}  {body}\ncli.run(main)", pause=0.3)[0] == 130
  assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("scores.json", "whole")]


def test_ctrl_c_and_mistakes_while_modules_are_imported_are_explained(tmp_path):
  for name, code in (
    ("slow", "print('ready', flush=True); import time; time.sleep(60)"),
    ("missing", "import tensorflow_nonsense"),
    ("broken", "1 // 0"),
  ):
    (tmp_path / f"{name}.py").write_text(code + "\n")
  code = "import sys; sys.argv[0] = '-m'; sys.path.insert(0, {!r}); import train; import {}"
  status, seconds, shown = _end(f"{PATIENT}; {code.format(str(tmp_path), 'slow')}")
  assert (status, "stopped by Ctrl-C" in shown, "Traceback" in shown) == (130, True, False)
  assert seconds < 25
  for name, wanted, word in (("missing", 2, "is not installed"), ("broken", 1, "Traceback")):
    done = subprocess.run(
      [sys.executable, "-c", code.format(str(tmp_path), name)],
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=False,
    )
    assert (done.returncode, word in done.stderr) == (wanted, True)
