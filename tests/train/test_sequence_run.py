"""Tasks on sequences through the programs: train, continue, evaluate, look inside."""

import dataclasses
import json

import flax.linen as nn
import jax
import numpy as np
import pytest
import tiny_masked
import tiny_recurrent
from programs import metrics_of, train

import compmod_jax
from compmod_jax.commands import analyse, evaluate
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import zero_units
from compmod_jax.data.sequences import CopyingData, DigitsData
from compmod_jax.mechanisms.rims import RimConfig
from compmod_jax.models.lstm_lm import LstmConfig
from compmod_jax.models.recurrent import LstmCellConfig, RecurrentConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.sequence import SequenceConfig
from compmod_jax.training.experiment import Phase, load_config

pytestmark = pytest.mark.usefixtures("one_device")

CELL = RimConfig(modules=3, active=2, dim=4, head_dim=2, input_key_dim=3)
DATA = CopyingData(symbols=2, length=1, blanks=1, test_blanks=(1, 3), train=64, valid=8, test=8)


@pytest.fixture(scope="module")
def workdir(one_device, tmp_path_factory):
  base = load_config("configs/rim_copying.py:debug")
  experiment = dataclasses.replace(
    base,
    task=SequenceConfig(DATA, rows=16, eval_rows=8),
    model=RecurrentConfig(cell=CELL, embedding_dim=4),
    optimizer=dataclasses.replace(base.optimizer, learning_rate=0.03),
    phases=(Phase(steps=60),),
    evaluate_every=30,
    log_every=10,
  )
  place = tmp_path_factory.mktemp("sequences") / "run"
  train(experiment, place)
  return place


@pytest.fixture(scope="module")
def model(workdir):
  return compmod_jax.load(workdir)


def test_training_lowers_the_loss_and_logs_the_share_of_every_module(workdir):
  lines = metrics_of(workdir, "train")
  assert lines[-1]["loss"] < 0.5 * np.log(4)  # of two symbols, where there are four tokens
  weights = [lines[-1][f"router/cell/weight_{module}"] for module in range(CELL.modules)]
  assert sum(weights) == pytest.approx(1, abs=1e-3)


def test_every_test_split_is_scored(workdir, tmp_path):
  file = tmp_path / "scores.json"
  evaluate.main(["--workdir", str(workdir), "--json", str(file), "--quiet"])
  rows = {row["split"]: row for row in json.loads(file.read_text())["splits"]}
  assert rows.keys() == {"valid", "blanks_1", "blanks_3"}
  for row in rows.values():
    assert row["sentences"] == row["tokens"] == 8  # one answer each
    assert row["exact_match"] == pytest.approx(100 * row["accuracy"])


def test_a_batch_with_filler_rows_scores_as_its_sequences_alone(model):
  whole = model.task.evaluate(model.params, "blanks_1").values
  config = dataclasses.replace(model.task.dataset.config, eval_rows=3)
  task = config.build(model.model.config)
  parts = task.evaluate(model.params, "blanks_1").values
  assert parts == pytest.approx(whole)


def test_a_trained_model_shows_what_its_modules_do_and_can_lose_one(model):
  batch = next(iter(model.task.dataset.eval_batches("blanks_3")))
  rows = [{name: column[row] for name, column in batch.items()} for row in range(2)]
  found = model.capture(rows, ["cell/active"])
  assert found["cell/active"].shape == (2, 6, 3)
  np.testing.assert_array_equal(found["cell/active"].sum(-1), CELL.active)
  assert found.valid("cell/active").all()
  without = model.edit({"cell/active": zero_units(0)})
  assert not without.capture(rows, ["cell/active"])["cell/active"][..., 0].any()


def test_the_report_on_modules_counts_what_the_model_does(model, workdir, tmp_path):
  options = ["--workdir", str(workdir), "--split", "blanks_3", "--output", str(tmp_path / "out")]
  analyse.main(["modules", *options, "--shown", "1", "--quiet"])
  found = json.loads((tmp_path / "out" / "result.json").read_text())
  found = found.get("data", found)
  batch = next(iter(model.task.dataset.eval_batches("blanks_3")))
  rows = [{name: column[row] for name, column in batch.items()} for row in range(8)]
  seen = model.capture(rows, ["cell/active", "cell/null"])
  np.testing.assert_allclose(found["active"], seen["cell/active"].mean(0), atol=1e-6)
  np.testing.assert_allclose(found["null"], seen["cell/null"].mean(0), atol=1e-5)
  np.testing.assert_allclose(np.sum(found["communication"], axis=1), 1, atol=1e-5)
  blank = seen["cell/active"][batch["tokens"] == 0].mean(0)
  np.testing.assert_allclose(found["by_read"]["zero"], blank, atol=1e-6)
  assert (tmp_path / "out" / "plots" / "over_time.svg").is_file()


def test_models_of_other_kinds_are_refused_and_an_lstm_language_model_is_not():
  config = SequenceConfig(DATA)
  with pytest.raises(UserError, match="needs a recurrent language model"):
    config.build(TransformerConfig())
  task = config.build(LstmConfig(layers=1, dim=4, embedding_dim=4))
  params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), nn.unbox(task.shapes))
  assert task.evaluate(params, "valid").values["tokens"] == 8
  with pytest.raises(UserError, match="which reads tokens"):
    SequenceConfig(DigitsData()).build(LstmConfig())
  with pytest.raises(UserError, match=r"task\.rows is 0"):
    SequenceConfig(rows=0)


@pytest.mark.parametrize("cell", [CELL, LstmCellConfig(5)])
def test_any_cell_makes_a_language_model_that_continues_texts(cell, tmp_path):
  counts = {"train": 40, "valid": 6, "test": 6}
  base = tiny_recurrent.make_experiment(tiny_masked.write_text(tmp_path / "text", counts))
  experiment = dataclasses.replace(
    base, model=RecurrentConfig(cell=cell, embedding_dim=4), phases=(Phase(steps=4),)
  )
  train(experiment, tmp_path / "run", report=isinstance(cell, RimConfig))
  model = compmod_jax.load(tmp_path / "run")
  (scored,) = model.score(["a b a"])
  assert scored.log_probability < 0
  (found,) = model.generate(["a b"], length=3)
  assert found
  logged = "router/cell/weight_0" in metrics_of(tmp_path / "run", "train")[-1]
  assert logged == isinstance(cell, RimConfig)
