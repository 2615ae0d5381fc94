"""A signal in any phase leaves the last completed step, and the same command goes on from there."""

import signal
import time

import pytest
from programs import (
  EVALUATE_EVERY,
  STEPS,
  Program,
  assert_as_uninterrupted,
  computed,
  record_of,
  steps_saved,
)


def _stopped(program, number=signal.SIGTERM):
  """Sends the signal; returns what the program printed and the step that it says was saved."""
  shown = program.stop(number)
  last = shown.splitlines()[-1]
  head, tail = f"{number.name}: checkpoint of step ", " saved; run the same command to continue"
  assert last.startswith(head)
  assert last.endswith(tail)
  assert "Traceback" not in shown
  return shown, int(last.removeprefix(head).removesuffix(tail))


@pytest.mark.slow
def test_a_run_stopped_in_every_phase_ends_as_one_that_was_not(place, tmp_path):
  workdir = tmp_path / "run"

  # Compilation: nothing is in this cache, so it takes seconds.
  with Program(place, workdir, COMPMOD_CACHE=str(tmp_path / "cache")) as program:
    program.wait_for("^compiling the step")
    time.sleep(1.0)
    shown, step = _stopped(program)
  assert "step 5/" not in shown
  assert step == 0
  assert steps_saved(workdir) == [0]

  # Training, by Ctrl-C.
  with Program(place, workdir) as program:
    program.wait_for("^step 5/")
    _, step = _stopped(program, signal.SIGINT)
  assert step >= 5
  assert steps_saved(workdir)[-1] == step == record_of(workdir)["step"]

  # Evaluation: the loss, then decoding. The evaluation is not in the checkpoint and is made again.
  for line in ("loss on", "translating"):
    evaluated = True
    while evaluated:  # on a busy machine one may end before the signal is there; there are three
      with Program(place, workdir) as program:
        program.wait_for(f"^{line} valid")
        shown, step = _stopped(program)
      evaluated = "valid at step" in shown
    assert step % EVALUATE_EVERY == 0
    assert steps_saved(workdir)[-1] == step
    assert record_of(workdir)["meta"]["history"]["evaluated"] < step

  # The end: training is over and its result is safe.
  with Program(place, workdir) as program:
    program.wait_for("^translating test")
    shown, step = _stopped(program)
  assert step == STEPS
  assert not (workdir / "report.html").exists()
  assert_as_uninterrupted(workdir, place.reference)

  with Program(place, workdir) as program:
    program.finish(0)
  assert (workdir / "report.html").exists()
  assert computed(workdir, "final") == computed(place.reference, "final")


@pytest.mark.programs
def test_a_signal_before_there_is_anything_to_save_ends_the_run_at_once(place, tmp_path):
  with Program(place, tmp_path / "run", COMPMOD_CACHE=str(tmp_path / "cache")) as program:
    deadline = time.monotonic() + 60
    while not (tmp_path / "run").exists():  # the configuration is being checked by now
      assert time.monotonic() < deadline
      time.sleep(0.001)
    shown = program.stop()
  assert "nothing was saved, as no step was completed yet" in shown
  assert steps_saved(tmp_path / "run") == []
