"""Competing experts through the training program: pre-training, competition, resumed, analysed."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from programs import assert_same_bits, metrics_of, state_of, train

import compmod_jax
from compmod_jax.analysis.image_experts import CHAINS, ImageExpertsReport, make_page
from compmod_jax.analysis.report import page
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.data.transformed_digits import TRANSFORMATIONS
from compmod_jax.training.experiment import load_config
from compmod_jax.training.workdir import saved_experiment

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_device):
  """Workdir of the debug variant on bars of different width."""
  folder = tmp_path_factory.mktemp("experts")
  draw = np.random.default_rng(0)
  for name, count in (("train", 160), ("test", 40)):
    images = np.zeros((count, 12, 12), np.uint8)
    for image in images:
      row, column = draw.integers(2, 5, size=2)
      image[row : row + 6, column : column + 2 + draw.integers(3)] = 255
    np.savez(folder / f"{name}.npz", images=images, labels=np.arange(count) % 10)
  experiment = load_config("configs/competing_experts.py:debug")
  data = dataclasses.replace(experiment.task.data, folder=str(folder))
  groups = (
    dataclasses.replace(
      group,
      optimizer=dataclasses.replace(
        group.optimizer, learning_rate=20 * group.optimizer.learning_rate
      ),
    )
    for group in experiment.groups
  )
  experiment = dataclasses.replace(
    experiment,
    groups=tuple(groups),
    task=dataclasses.replace(experiment.task, data=data),
    log_every=5,
    checkpoint_every=20,
    keep_last=10,
  )
  train(experiment, folder / "run")
  return folder / "run"


def test_the_discriminator_stands_still_while_experts_learn_the_identity(run):
  start, middle, end = (state_of(run, step) for step in (20, 40, 60))
  losses = [line["loss/identity"] for line in metrics_of(run, "train")][:4]
  assert losses[3] < 0.7 * losses[0]

  def of(state, group):
    return {path: leaf for path, leaf in state.items() if path.startswith(f"params/{group}")}

  for group in ("experts", "discriminator"):
    assert of(middle, group)
    assert any(np.any(of(end, group)[path] != leaf) for path, leaf in of(middle, group).items())
  # Fresh biases are 0, and 20 steps of pre-training have not moved them.
  biases = [leaf for path, leaf in of(start, "discriminator").items() if "bias" in path]
  assert biases
  assert not any(np.any(leaf) for leaf in biases)
  assert any(np.any(leaf) for path, leaf in of(end, "discriminator").items() if "bias" in path)


def test_groups_have_learning_rates_of_their_own(run):
  experiment = saved_experiment(run)
  rates = {group.name: group.optimizer.learning_rate for group in experiment.groups}
  line = metrics_of(run, "train")[-1]
  for name, rate in rates.items():
    assert line[f"learning_rate/{name}"] == pytest.approx(rate)
  assert rates["discriminator"] != rates["experts"]


def test_resuming_gives_the_same_bits(run, tmp_path):
  again = tmp_path / "again"
  shutil.copytree(run, again)
  for path in (again / "checkpoints").glob("step_*"):
    if int(path.name[5:13]) > 20:
      shutil.rmtree(path)
  train(saved_experiment(run), again, report=False)
  assert_same_bits(state_of(again), state_of(run))


def test_the_report_shows_who_takes_what_and_chains(run, tmp_path):
  model = compmod_jax.load(run)
  subject = Subject(model.task, model.params, "test")
  options = ImageExpertsReport(image=1, chained=5)
  written = page.write(make_page(options, subject, options.measure(subject)), tmp_path)
  data = json.loads(written.json.read_text())
  assert {picture.stem for picture in written.pictures} == {"assignment", "outputs", "chains"}
  assert data["transformations"] == list(TRANSFORMATIONS)
  counts = np.array(data["counts"])
  assert counts.shape == (10, 3)
  np.testing.assert_array_equal(counts.sum(axis=1), 20)  # half of the test images
  scores = model.task.evaluate(model.params, "test").values
  assert data["specialised"] == scores["experts/specialised"]
  assert np.mean(data["restored"]) == pytest.approx(scores["experts/restored_loss"], rel=1e-5)
  assert [tuple(chain["names"]) for chain in data["chains"]] == list(CHAINS)
  with pytest.raises(UserError, match="--image is 20, but test has 20 images"):
    ImageExpertsReport(image=20).measure(subject)


def test_a_chain_is_the_second_transformation_s_expert_and_then_the_first_s(run):
  model = compmod_jax.load(run)
  subject = Subject(model.task, model.params, "test")
  found = ImageExpertsReport(chained=4).measure(subject)
  likely = dict(zip(TRANSFORMATIONS, found.counts.argmax(axis=1), strict=True))
  for chain in found.chains:
    first, second = chain.names
    assert chain.experts == (likely[second], likely[first])
    once, _ = model.transform(chain.images[1:2])
    np.testing.assert_allclose(once[likely[second], 0], chain.images[2], rtol=1e-4, atol=1e-5)
    twice, _ = model.transform(chain.images[2:3])
    np.testing.assert_allclose(twice[likely[first], 0], chain.images[3], rtol=1e-4, atol=1e-5)


def test_a_loaded_model_refuses_images_of_another_size(run):
  model = compmod_jax.load(run)
  with pytest.raises(UserError, match=r"images has the shape \(1, 5, 5\); it must be"):
    model.transform(np.zeros((1, 5, 5)))
  with pytest.raises(UserError, match="reads images and no texts"):
    model.capture(["a"])
