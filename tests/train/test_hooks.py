"""Hooks: when the loop calls them, and that their state is that of the checkpoint."""

import dataclasses
import types

import pytest
import tiny_masked
import tiny_model

from compmod_jax.core.errors import UserError
from compmod_jax.training.experiment import Phase
from compmod_jax.training.history import History
from compmod_jax.training.hooks import Hook, KeepModels
from compmod_jax.training.loop import Loop
from compmod_jax.training.optimizer import ParamGroup
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


NAN = float("nan")


@pytest.mark.parametrize(
  ("selection", "scores", "kept"),
  [
    ("best", (10.0, 30.0, 30.0, 20.0), [2, 4]),
    ("last", (10.0, 30.0, 30.0, 20.0), [2, 4, 6, 8]),
    ("best", (NAN, NAN, 10.0, NAN), [2, 6]),
  ],
)
def test_the_best_parameters_are_kept_or_the_last(selection, scores, kept, tmp_path, monkeypatch):
  saved = []
  monkeypatch.setattr(KeepModels, "_save", lambda hook, training, folder, score: saved.append(step))
  run = types.SimpleNamespace(
    workdir=tmp_path,
    experiment=types.SimpleNamespace(model_selection=selection, keep_models=0),
    task=types.SimpleNamespace(metric="bleu"),
  )
  training = types.SimpleNamespace(run=run, history=History())
  for step, score in zip((2, 4, 6, 8), scores, strict=True):
    training.history.step = step
    KeepModels().after_evaluation(training, {}, score)
  assert saved == kept
  assert training.history.best_step == kept[-1]


def test_checkpoints_that_a_score_of_outputs_compares_need_outputs(experiment, tmp_path):
  with pytest.raises(UserError, match=r"evaluate_sentences is 0, .* by bleu, .* at least 1"):
    set_up(dataclasses.replace(experiment, evaluate_sentences=0), tmp_path / "run", command="x")
  assert not (tmp_path / "run" / "config.json").exists()
  masked = tiny_masked.make_experiment(
    tiny_masked.write_text(tmp_path / "text", {"train": 60, "valid": 10, "test": 10})
  )
  set_up(dataclasses.replace(masked, evaluate_sentences=0), tmp_path / "masked", command="x")


def test_the_last_parameters_need_neither_patience_nor_a_plateau(experiment):
  plateau = dataclasses.replace(experiment.optimizer, schedule="plateau")
  for changes in (
    {"patience": 2},
    {"optimizer": plateau},
    {"groups": (ParamGroup("encoder", ("encoder*",), plateau),)},
  ):
    with pytest.raises(UserError, match="go by the best score so far"):
      dataclasses.replace(experiment, model_selection="last", **changes)
