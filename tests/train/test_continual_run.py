"""Classes one after the other through the training program: meta-trained, resumed, analysed."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from programs import assert_same_bits, metrics_of, state_of, train

import compmod_jax
from compmod_jax.analysis.continual import Forgetting, make_page
from compmod_jax.analysis.report import page
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.data.sources.classes import ClassFolder
from compmod_jax.training.experiment import Phase, load_config
from compmod_jax.training.workdir import saved_experiment

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_device):
  """Workdir of the debug variant on noisy patterns in files."""
  folder, draw = tmp_path_factory.mktemp("continual"), np.random.default_rng(0)
  for split, classes in (("train", 8), ("valid", 8), ("test", 14)):
    for name in range(classes):
      place = folder / "data" / split / f"{split}_{name:02d}"
      place.mkdir(parents=True)
      pattern = draw.random((9, 9, 1)) < 0.4
      for number in range(20):
        image = pattern ^ (draw.random(pattern.shape) < 0.08)
        np.save(place / f"{number}.npy", (255 * image).astype(np.uint8))
  experiment = load_config("configs/continual_anml.py:debug")
  task = dataclasses.replace(experiment.task, data=ClassFolder(str(folder / "data")))
  experiment = dataclasses.replace(
    experiment,
    task=task,
    model=dataclasses.replace(experiment.model, blocks=2),
    optimizer=dataclasses.replace(experiment.optimizer, learning_rate=1e-2, warmup_steps=0),
    phases=(Phase(steps=40),),
    evaluate_every=20,
    keep_last=5,
  )
  train(experiment, folder / "run")
  return folder / "run"


@pytest.fixture(scope="module")
def model(run):
  """The trained model, whose compiled programs the tests share."""
  return compmod_jax.load(run)


def test_meta_training_lowers_the_loss(run):
  losses = [line["loss"] for line in metrics_of(run, "train")]
  assert losses[-1] < losses[0]


def test_the_result_has_every_protocol_s_curve_and_setting(run):
  results = json.loads((run / "results.json").read_text())
  test = next(row for row in results["splits"] if row["split"] == "test")
  task = saved_experiment(run).task
  for name in task.use.protocols:
    assert {f"{name}/accuracy_{n}" for n in (3, 6, 12)} <= set(test["parts"])
    assert test["parts"][f"{name}/rate"] in task.use.rates
  assert test["accuracy"] == test["parts"]["last_layer/accuracy_12"]


def test_resuming_gives_the_same_bits(run, tmp_path):
  again = tmp_path / "again"
  shutil.copytree(run, again)
  for path in (again / "checkpoints").glob("step_*"):
    if int(path.name[5:13]) > 20:
      shutil.rmtree(path)
  train(saved_experiment(run), again, report=False)
  assert_same_bits(state_of(again), state_of(run))


def test_the_report_has_curves_gates_and_neighbours(model, tmp_path):
  subject = Subject(model.task, model.params, "test")
  options = Forgetting(pictures=2)
  written = page.write(make_page(options, subject, options.measure(subject)), tmp_path)
  data = json.loads(written.json.read_text())
  stems = {picture.stem for picture in written.pictures}
  assert stems == {"accuracy", "matrix", "gates", "activations"}
  scores = model.task.evaluate(model.params, "test").values
  for name, one in data["protocols"].items():
    assert one["accuracy"][-1] == pytest.approx(scores[f"{name}/accuracy_12"])
  activity = data["activity"]
  assert 0 < activity["behind"] <= activity["before"] < 1
  assert sum(activity["gates"]) == pytest.approx(1)
  assert set(data["nearest"]) == {"hidden", "gate", "features"}


def test_neighbours_and_activity_are_their_definition(model):
  task = model.task
  found = Forgetting(protocols=("last_layer",), active=0.2).measure(
    Subject(task, model.params, "test")
  )
  sequence = task.dataset.sequence("test", 12)
  images = sequence.examples.inputs
  shown, asked = (
    model.capture(images[part.ravel()], ["hidden", "gate"])
    for part in (sequence.shown, sequence.asked)
  )
  known, wanted = np.repeat(np.arange(12), 15), np.repeat(np.arange(12), 5)
  distance = ((asked["gate"][:, None] - shown["gate"][None]) ** 2).sum(-1)
  right = np.mean(known[distance.argmin(axis=1)] == wanted)
  assert found.nearest["gate"] == pytest.approx(right)
  top = 0.2 * asked["hidden"].max(axis=1, keepdims=True)
  assert found.activity.before == pytest.approx(np.mean(asked["hidden"] > top))
  behind = asked["hidden"] * asked["gate"] > top
  assert found.activity.behind == pytest.approx(np.mean(behind))
  assert found.activity.used_behind == pytest.approx(np.mean(behind.any(axis=0)))


def test_a_loaded_model_learns_classes_and_tells_them_apart(model):
  pictures = model.task.dataset.classes("test")
  labels = np.repeat(np.arange(3), 10)
  places = np.concatenate([np.arange(20 * c, 20 * c + 10) for c in range(3)])
  learner = model.learn(pictures.inputs[places], labels, rate=0.1)
  found = model.probabilities(learner, pictures.inputs[places])
  assert found.shape == (30, 3)
  np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
  assert np.mean(found.argmax(axis=1) == labels) > 0.4
  # A fresh network does not know what the trained one does.
  fresh, trained = (
    model.learn(pictures.inputs[places], labels, rate=0.01, protocol=protocol).params
    for protocol in ("scratch", "fine_tuned")
  )
  pairs = zip(*map(jax.tree.leaves, (fresh, trained)), strict=True)
  assert not all(np.array_equal(one, other) for one, other in pairs)
  with pytest.raises(UserError, match="inputs has the shape"):
    model.learn(pictures.inputs[places], labels[:-1], rate=0.1)
  with pytest.raises(UserError, match="protocol is 'ewc', which learns class by class"):
    model.learn(pictures.inputs[places], labels, rate=0.1, protocol="ewc")


def test_another_task_s_run_is_refused(run):
  with pytest.raises(UserError, match="--protocols is 'other'"):
    Forgetting(protocols=("other",))
  with pytest.raises(UserError, match="--classes is 1"):
    Forgetting(classes=1)
