"""`--profile`: a trace has the steps that were asked for, all of them and no other."""

import dataclasses
import gzip
import json
from collections import Counter

import jax
import pytest
import tiny_masked
from programs import train

from compmod_jax.commands import train as main
from compmod_jax.core.errors import UserError
from compmod_jax.training import profiling
from compmod_jax.training.experiment import Phase
from compmod_jax.training.profiling import Profiler

FIRST, LAST = 3, 5
STEPS = [*range(FIRST, LAST + 1)]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
  folder = tiny_masked.write_text(
    tmp_path_factory.mktemp("profiling") / "text", {"train": 60, "valid": 9, "test": 9}
  )
  given = tiny_masked.make_experiment(folder)
  return dataclasses.replace(given, phases=(Phase(steps=6),), evaluate_every=6, watch_sentences=0)


class Traced:
  """A run of which some steps were traced, and what was said of it."""

  def __init__(self, experiment, root, *, steps):
    self.workdir, self.said = root / "run", []
    profiler = Profiler(steps, self.workdir / "profile", self.said.append)
    train(experiment, self.workdir, report=False, profiler=profiler)

  def files(self, pattern):
    return sorted((self.workdir / "profile").glob(f"plugins/profile/*/{pattern}"))

  def events(self):
    (path,) = self.files("perfetto_trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.fixture(scope="module")
def traced(experiment, one_device, tmp_path_factory):
  root = tmp_path_factory.mktemp("traced")
  return Traced(experiment, root, steps=profiling.parse(f"{FIRST}:{LAST}"))


def test_a_trace_for_perfetto_has_each_step_once_under_its_number(traced):
  steps = [event["args"]["step_num"] for event in traced.events() if event.get("name") == "train"]
  assert sorted(map(int, steps)) == STEPS


def test_a_trace_has_what_the_devices_did_in_these_steps_and_in_no_other(traced):
  ran = Counter(
    event["args"]["hlo_op"]
    for event in traced.events()
    if event.get("args", {}).get("hlo_module") == "jit_step"
  )
  assert len(ran) > 20
  # What a loop holds runs more often.
  assert min(ran.values()) == len(STEPS)
  assert Counter(ran.values()).most_common(1)[0][0] == len(STEPS)


def test_a_trace_for_xprof_has_the_same_steps(traced):
  (path,) = traced.files("*.xplane.pb")
  planes = jax.profiler.ProfileData.from_file(str(path)).planes
  events = (event for plane in planes for line in plane.lines for event in line.events)
  steps = [dict(event.stats)["step_num"] for event in events if event.name == "train"]
  assert sorted(steps) == STEPS


def test_it_is_told_where_the_trace_is_and_what_opens_it(traced):
  (said,) = traced.said
  (path,) = traced.files("perfetto_trace.json.gz")
  assert said.startswith(f"trace of steps {FIRST} to {LAST}: {path.parent}. ")
  assert f"xprof --logdir {traced.workdir / 'profile'}" in said
  assert "ui.perfetto.dev" in said


def test_a_run_that_goes_on_behind_these_steps_writes_no_trace(traced, experiment, one_device):
  before = traced.files("*")
  again = Traced(experiment, traced.workdir.parent, steps=range(2, 4))
  assert again.said == ["no trace: steps 2 to 3 were made before; the run goes on at 7"]
  assert again.files("*") == before


def test_where_training_ends_early_the_trace_has_the_steps_until_then(tmp_path):
  said = []
  with Profiler(range(2, 9), tmp_path, said.append) as profiler:
    for number in (1, 2, 3):
      with profiler.step(number, lambda: None):
        jax.block_until_ready(jax.numpy.ones(3) + number)
  assert said[0].startswith("trace of steps 2 to 3: ")


def test_steps_behind_the_last_are_a_mistake():
  with pytest.raises(UserError, match=r"--profile is 5:7, but the run has 6 steps"):
    Profiler(range(5, 8)).check(0, 6)
  Profiler(range(5, 7)).check(0, 6)


@pytest.mark.parametrize("text", ["20", "20-25", "a:b", "3:2", "0:4", "-1:4", "3:", "3:4:5"])
def test_what_names_no_steps_is_a_mistake_that_is_told_before_anything_is_made(text, tmp_path):
  with pytest.raises(UserError, match=r"--profile is .* must be FIRST:LAST"):
    main.main(
      ["--config", "configs/nmt_cah.py", "--workdir", str(tmp_path / "w"), "--profile", text]
    )
  assert not (tmp_path / "w").exists()


def test_steps_are_counted_from_one_and_both_ends_are_among_them():
  assert [*profiling.parse("20:22")] == [20, 21, 22]
  assert [*profiling.parse("1:1")] == [1]
  assert not profiling.parse("")
