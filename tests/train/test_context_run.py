"""Fuzzy logic in context through the programs: a tiny run, its report, and the model in use."""

import json
from typing import Any

import numpy as np
import pytest
from programs import metrics_of, train

import compmod_jax
from compmod_jax.commands import check_data
from compmod_jax.core.errors import UserError
from compmod_jax.training.experiment import load_config

pytestmark = pytest.mark.usefixtures("one_device")
CONFIG = "configs/logic_in_context.py:debug"


@pytest.fixture(scope="module")
def learned(tmp_path_factory, one_device):
  """Workdir of the tiny variant."""
  folder = tmp_path_factory.mktemp("context") / "run"
  train(load_config(CONFIG), folder)
  return folder


def test_values_are_learned_from_context(learned):
  errors = [line["squared_error"] for line in metrics_of(learned, "train")]
  assert errors[-1] < errors[0] / 5
  first, last = (line["r2"] for line in metrics_of(learned, "eval"))
  assert last > max(first, 0.1)


def test_the_report_has_the_score_of_every_part(learned):
  results = json.loads((learned / "results.json").read_text())
  found = {row["split"]: row["r2"] for row in results["splits"]}
  assert found["valid"] == pytest.approx(results["best"]["value"])
  assert found.keys() == {"valid", "test"}
  assert "R2 on valid" in (learned / "report.html").read_text()
  assert [line["sites"].keys() for line in metrics_of(learned, "heads")][-1] == {
    "decoder/layer_0/self", "decoder/layer_1/self",
  }  # fmt: skip


def test_a_loaded_model_predicts_the_last_values_of_one_s_own_sequences(learned):
  model: Any = compmod_jax.load(learned)
  inputs, targets, _ = model.task.dataset.sequences("test")
  left = np.square(model.predict(inputs) - targets).mean() / targets.var()
  found = model.task.evaluate(model.params, "test").values
  assert 1 - left == pytest.approx(found["r2"], abs=1e-4)
  with pytest.raises(UserError, match=r"inputs has the shape \(8, 3\); .* \[sequences, 8, 3\]"):
    model.predict(inputs[0])


def test_its_data_are_checked(capsys):
  assert check_data.main(["--config", "configs/logic_in_context.py"]) == 0
  rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[:5]]
  assert rows == [
    ["split", "expressions"], ["train", "33"], ["valid", "33"], ["test", "33"], ["ood", "6"]
  ]  # fmt: skip
  with pytest.raises(UserError, match="--export is for parallel text"):
    check_data.main(["--config", "configs/logic_in_context.py", "--export", "nowhere"])
