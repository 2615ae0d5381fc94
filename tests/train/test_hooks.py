"""Hooks: when the loop calls them, and that their state is that of the checkpoint."""

import dataclasses

import pytest
import tiny_model

from compmod_jax.training.experiment import Phase
from compmod_jax.training.hooks import Hook
from compmod_jax.training.loop import Loop
from compmod_jax.training.preemption import Preemption
from compmod_jax.training.run import set_up
from compmod_jax.training.writer import Writer

pytestmark = pytest.mark.usefixtures("one_device")


class Counts(Hook):
  """Counts its calls."""

  name = "counts"

  def __init__(self):
    self.steps = self.evaluations = 0
    self.read: list[int] = []

  def after_step(self, training):
    self.steps += 1

  def after_read(self, training, read):
    self.read.append(read.number)

  def after_evaluation(self, training, values, score):
    assert values[training.run.task.metric] == score
    assert training.history.best is not None  # it comes after the hooks of every run
    self.evaluations += 1

  def state(self):
    return {"steps": self.steps, "evaluations": self.evaluations}

  def restore(self, state):
    self.steps, self.evaluations = state["steps"], state["evaluations"]


class StopsAt(Hook):
  """Ends training after a step."""

  def __init__(self, step: int):
    self.step = step

  def after_step(self, training):
    if training.history.step == self.step:
      training.history.stopped = "enough"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
  made = tiny_model.make_experiment(
    tiny_model.write_data(tmp_path_factory.mktemp("hooks") / "data")
  )
  return dataclasses.replace(
    made, phases=(Phase(steps=3),), evaluate_every=2, evaluate_sentences=2, watch_sentences=0
  )


def train(experiment, workdir, *hooks):
  made = set_up(experiment, workdir, command="x")
  with Writer(workdir, total_steps=made.total_steps, quiet=True) as writer, Preemption() as held:
    loop = Loop(made, writer, held, hooks=hooks)
    loop.train()
  return loop


def test_a_hook_is_called_at_steps_and_evaluations_and_goes_on_from_its_checkpoint(
  experiment, tmp_path
):
  first = Counts()
  train(experiment, tmp_path / "run", first)
  assert (first.steps, first.evaluations) == (3, 2)  # at steps 2 and 3, the last
  assert sorted(set(first.read)) == [1, 2, 3]
  later = Counts()
  longer = dataclasses.replace(experiment, phases=(Phase(steps=4),))
  train(longer, tmp_path / "run", later)
  assert (later.steps, later.evaluations) == (4, 3)
  assert sorted(set(later.read)) == [4]


def test_a_hook_can_end_training(experiment, tmp_path):
  loop = train(experiment, tmp_path / "run", StopsAt(1))
  assert (loop.history.step, loop.history.stopped) == (1, "enough")
  assert loop.history.evaluated == 1  # what is there at the end is scored
