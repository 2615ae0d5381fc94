"""The same command continues a run, whatever ended it, as if nothing had happened."""

import contextlib
import functools
import random
import time

import numpy as np
import pytest
from programs import (
  STEPS,
  Place,
  Program,
  assert_as_uninterrupted,
  assert_same_bits,
  checkpoint_folders,
  computed,
  metrics_of,
  state_of,
  steps_saved,
)

pytestmark = pytest.mark.programs


def test_resuming_after_a_kill_gives_the_same_parameters(place, tmp_path):
  rng = random.Random(0)
  workdir, wanted = tmp_path / "run", rng.randrange(2, 6)
  with Program(place, workdir) as program:
    program.kill_when(lambda: len(checkpoint_folders(workdir)) >= wanted)
  left = steps_saved(workdir)
  assert 0 < left[-1] < STEPS
  with Program(place, workdir) as program:
    shown = program.finish(0)
  assert f"continuing from the checkpoint of step {left[-1]}\n" in shown
  assert_as_uninterrupted(workdir, place.reference)
  assert computed(workdir, "final") == computed(place.reference, "final")


def _writes(workdir):
  """Checkpoints that are being written, and those whose writing was cut short."""
  found = set()
  for path in (workdir / "checkpoints").glob("tmp_step_*/state*"):
    with contextlib.suppress(FileNotFoundError):  # it is complete by now
      found.add((path.parent.name, path.parent.stat().st_ctime_ns))
  return found


def _is_over(moment):
  return time.monotonic() > moment


def _in_a_write(workdir, least, before):
  return len(steps_saved(workdir)) >= least and _writes(workdir) - before


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kills_at_random_moments_change_nothing(tmp_path):
  """At any moment of the whole program, and five or more inside the write of a checkpoint."""
  place = Place(tmp_path / "place", optimised=True)
  place.root.mkdir()
  place.make()
  rng = random.Random(20)
  kills = in_writes = runs = 0
  while kills < 20 or in_writes < 5:
    workdir, ended = tmp_path / f"run{runs}", False
    while not ended:
      before = _writes(workdir)
      with Program(place, workdir) as program:
        moment = program.began + rng.uniform(0.5, 9)
        least = len(steps_saved(workdir)) + rng.randrange(4)
        if kills >= 20 and in_writes >= 5:
          now = bool
        elif kills % 3:
          now = functools.partial(_is_over, moment)
        else:
          now = functools.partial(_in_a_write, workdir, least, before)
        ended = not program.kill_when(now)
      kills += not ended
      in_writes += not ended and bool(_writes(workdir) - before)
    assert_as_uninterrupted(workdir, place.reference)
    assert computed(workdir, "final") == computed(place.reference, "final")
    runs += 1
  print(f"{kills} kills, {in_writes} of them while a checkpoint was written, in {runs} runs")


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(place, tmp_path):
  workdir = place.stopped_at(56, tmp_path / "run")
  newest = checkpoint_folders(workdir)[-1]
  victim = max(newest.rglob("d/*"), key=lambda path: path.stat().st_size)
  content = bytearray(victim.read_bytes())
  content[len(content) // 2] ^= 1
  victim.write_bytes(content)
  with Program(place, workdir) as program:
    shown = program.trained()
  assert f"checkpoint {newest} is damaged (" in shown
  assert victim.name in shown
  assert "continuing from the checkpoint of step 48\n" in shown
  assert_as_uninterrupted(workdir, place.reference)


def test_what_computes_nothing_may_change_and_is_told(place, tmp_path):
  workdir = place.stopped_at(48, tmp_path / "run")
  changes = {"log_every": 10, "keep_last": 2, "keep_models": 1, "checkpoint_every": 3}
  options = [f"--config.{name}={value}" for name, value in changes.items()]
  with Program(place, workdir, *options, "--config.mesh.data=1") as program:
    shown = program.trained()
  for name, value in changes.items():
    assert f"{name}: " in shown
    assert f" there, {value} here" in shown
  assert "mesh.data: -1 there, 1 here" in shown
  assert_same_bits(state_of(workdir), state_of(place.reference))
  assert steps_saved(workdir) == [57, 60]
  models = sorted(path.name for path in (workdir / "models").iterdir())
  assert models == ["best", f"step-{STEPS:08d}"]


def _losses(workdir):
  return np.array([line["loss"] for line in metrics_of(workdir, "train")])


@pytest.mark.slow
def test_a_checkpoint_opens_on_another_number_of_devices(place, tmp_path):
  """From one device to eight and back; 12 rows of a batch do not even share out among eight."""
  eight = place.stopped_at(20, tmp_path / "eight")
  mesh = ("--config.mesh.fsdp=4", "--config.mesh.data=2")
  with Program(place, eight, *mesh, devices=8) as program:
    program.kill_when(lambda: steps_saved(eight)[-1] == 32)
  assert "devices: 8 x cpu (2 data x 4 fsdp)\n" in program.text
  assert {25, 30} <= {line["step"] for line in metrics_of(eight, "train")}
  one = place.stopped_at(32, tmp_path / "one", eight)
  with Program(place, one) as program:
    program.trained()
  expected, found = _losses(place.reference), _losses(one)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert not np.array_equal(found, expected)  # so the devices did matter


def _routing(path):
  return "/router/" in path


_MOMENTS = ("opt_state/1/mu/", "opt_state/1/nu/")


def _moved(old, new):
  """Paths of the arrays that changed, but for scalars, which count."""
  return {path for path in old if old[path].ndim and old[path].tobytes() != new[path].tobytes()}


def test_a_phase_moves_its_parameters_and_no_others(two_phases):
  start, middle, late, end = (state_of(two_phases, step) for step in (8, 24, 32, 60))
  every = {path for path in start if path.startswith(("params/", *_MOMENTS))}
  averages = {path for path in start if path.startswith("ema/")}
  assert _moved(start, middle) == {path for path in every | averages if not _routing(path)}
  # The average of what stands still goes on approaching it.
  assert _moved(late, end) == {path for path in every if _routing(path)} | averages


def test_a_run_is_continued_inside_its_second_phase(place, two_phases, tmp_path):
  workdir = place.stopped_at(48, tmp_path / "run", two_phases)
  with Program(place, workdir, variant="two") as program:
    program.trained()
  assert_as_uninterrupted(workdir, two_phases)
