"""The program that kills runs sees what a kill must not lead to."""

from pathlib import Path
from typing import Any

from benchmarks import kills


def _attempt(tmp_path: Path, printed: str, saved: int, status: int) -> kills.Attempt:
  attempt = kills.Attempt.__new__(kills.Attempt)
  attempt.workdir, attempt.output = tmp_path / "run", tmp_path / "run.log"
  attempt.output.write_text(printed)
  attempt.saved, attempt.unfinished = saved, set()
  ended: Any = type("Ended", (), {"returncode": status})()
  attempt.process = ended
  return attempt


def test_what_was_lost_is_noticed(tmp_path):
  def complaint(printed, saved=0, status=-9):
    return _attempt(tmp_path, printed, saved, status).complaint()

  went_on = "continuing from the checkpoint of step 12\nstep 18/48  loss 3\n"
  assert complaint("") is None
  assert complaint(went_on, 12) is None
  assert "though step 18 was complete" in (complaint(went_on, 18) or "")
  assert "began again" in (complaint("step 6/48  loss 3\n", 12) or "")
  assert "exit status 2: error: no" in (complaint("error: no\n", 0, 2) or "")


def test_the_stage_of_a_kill_is_known(tmp_path):
  def stage(printed, *made):
    attempt = _attempt(tmp_path, printed, 0, -9)
    for name in made:
      (attempt.workdir / name).mkdir(parents=True)
    return attempt.stage()

  assert stage("devices: 1 x cpu\n") == "starting"
  assert stage("step 6/48\ncompiling the step for\n") == "compiling"
  assert stage("step 6/48  loss 3\n") == "training"
  assert stage("step 6/48  loss 3\nloss on valid 1/4\n") == "evaluating"
  assert stage("step 6/48\n", "models/.best.new") == "writing a model"
  assert stage("step 6/48\n", "checkpoints/tmp_step_00000012") == "writing a checkpoint"


def test_a_run_that_differs_makes_the_verdict_bad():
  assert not kills.Kind(kills=3, runs=2, identical=2).failed
  assert kills.Kind(kills=3, runs=2, identical=1).failed
  assert kills.Kind(kills=3, lost=1).failed
  assert kills.Kind(notes=["two runs without a kill differ"]).failed
