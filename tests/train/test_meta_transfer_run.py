"""Finding the cause through the training program: both ways round, resumed, analysed."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from programs import assert_same_bits, metrics_of, state_of, train

import compmod_jax
from compmod_jax.analysis.meta_transfer import Direction, make_page
from compmod_jax.analysis.report import page
from compmod_jax.analysis.report.training import read_records
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.tasks.meta_transfer import DiscretePairs, MetaTransferConfig, RotatedPairs
from compmod_jax.training.experiment import Phase, load_config
from compmod_jax.training.workdir import saved_experiment

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, one_device):
  """Workdirs of a tiny run in each direction."""
  base, folders = load_config("configs/meta_transfer.py"), {}
  for direction in ("a_to_b", "b_to_a"):
    folders[direction] = folder = tmp_path_factory.mktemp(direction)
    experiment = dataclasses.replace(
      base,
      task=MetaTransferConfig(
        DiscretePairs(3, direction, pairs=1000), steps=10, episodes=8, evaluation_episodes=100
      ),
      model=dataclasses.replace(base.model, cause_rate=0.5, effect_rate=0.5),
      phases=(Phase(steps=60),),
      evaluate_every=30,
      checkpoint_every=20,
      keep_last=10,
    )
    train(experiment, folder / "run")
  return {direction: folder / "run" for direction, folder in folders.items()}


def test_the_direction_is_found_either_way_round(runs):
  for direction, folder in runs.items():
    model = compmod_jax.load(folder)
    assert (model.belief > 0.9) == (direction == "a_to_b")
    assert (model.belief < 0.1) == (direction == "b_to_a")
    assert model.degrees is None
    splits = json.loads((folder / "results.json").read_text())["splits"]
    assert all(split["parts"]["transfer/right"] == 1 for split in splits)


def test_exchanging_the_columns_changes_the_sign_of_gamma_and_no_bit_more(runs):
  forth, back = (
    [line["direction/gamma"] for line in metrics_of(folder, "train")] for folder in runs.values()
  )
  assert len(forth) == 12
  assert forth == [-gamma for gamma in back]
  forth, back = (compmod_jax.load(folder).params["gamma"] for folder in runs.values())
  assert float(forth) == -float(back) != 0


def test_resuming_gives_the_same_bits(runs, tmp_path):
  whole, again = runs["a_to_b"], tmp_path / "again"
  shutil.copytree(whole, again)
  for path in (again / "checkpoints").glob("step_*"):
    if int(path.name[5:13]) > 20:
      shutil.rmtree(path)
  train(saved_experiment(whole), again, report=False)
  assert_same_bits(state_of(again), state_of(whole))


def test_the_report_shows_that_the_cause_s_model_adapts_faster(runs, tmp_path):
  for direction, folder in runs.items():
    model = compmod_jax.load(folder)
    subject = Subject(
      model.task, model.params, "test", records=read_records(folder / "metrics.jsonl")
    )
    options = Direction()
    written = page.write(
      make_page(options, subject, options.measure(subject)), tmp_path / direction
    )
    data = json.loads(written.json.read_text())
    assert {picture.stem for picture in written.pictures} == {"adaptation", "training"}
    rows, sign = data["adaptation"], 1 if direction == "a_to_b" else -1
    assert len(rows) == 10
    # Nothing has adapted at first; over all steps, the model with the true direction is ahead.
    assert abs(rows[0]["difference"]) < 1e-5
    assert sign * data["log_ratio"]["mean"] > data["log_ratio"]["half"]
    total = sum(row["difference"] for row in rows)
    assert total == pytest.approx(data["log_ratio"]["mean"], rel=1e-5)
    assert len(data["training"]["direction/gamma"][0]) == 12


def test_a_loaded_model_adapts_to_samples_of_one_s_own(runs):
  model = compmod_jax.load(runs["a_to_b"])
  x = np.array([[[0], [0], [0]]], np.int32)
  forth, back = model.adapt(x, x)[:, 0, :, 0]
  np.testing.assert_allclose(forth[0], back[0], rtol=1e-5)
  assert np.all(np.diff(forth) > 0)  # the same pair again is more probable
  assert np.all(np.diff(back) > 0)
  with pytest.raises(UserError, match=r"x has the shape \(3,\)"):
    model.adapt(x[0, :, 0], x[0, :, 0])
  for values in (np.array([[[0], [-1]]]), np.array([[[0], [99]]]), np.array([[[0.0], [1.0]]])):
    with pytest.raises(UserError, match="give whole numbers from 0 to"):
      model.adapt(values, values)
  with pytest.raises(UserError, match="reads numbers and no texts"):
    model.capture(["a"])


def test_the_angle_of_an_encoder_is_found_with_the_direction(tmp_path):
  base = load_config("configs/meta_transfer.py:rotation_linear")
  experiment = dataclasses.replace(
    base,
    task=MetaTransferConfig(
      RotatedPairs("linear", angle=25.0, pairs=3000, noise=0.7),
      steps=20,
      samples=10,
      episodes=8,
      evaluation_episodes=8,
    ),
    model=dataclasses.replace(base.model, centres=6),
    phases=(Phase(steps=150),),
    evaluate_every=150,
  )
  train(experiment, tmp_path / "run", report=False)
  scores = metrics_of(tmp_path / "run", "eval")[-1]
  assert abs(scores["transfer/angle_error"]) < 6  # 0 is as far as 45 degrees from a wrong one
  assert scores["transfer/belief"] > 0.9
