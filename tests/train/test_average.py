"""The mean of a run's last evaluated models."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_model

import compmod_jax
from compmod_jax.checkpoints.model_folder import load_model_folder, save_model_folder
from compmod_jax.commands import average
from compmod_jax.core.errors import UserError


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
  return tiny_model.make_workdir(tmp_path_factory.mktemp("average") / "run")


@pytest.fixture
def workdir(original, tmp_path) -> Path:
  """A workdir that a test may change."""
  return shutil.copytree(original, tmp_path / "run")


def test_the_average_is_the_mean_of_the_newest_models_and_opens_like_any(workdir, capsys):
  average.main(["--workdir", str(workdir), "--last", "2"])
  assert "step-00000020, step-00000030" in capsys.readouterr().out
  model = compmod_jax.load(workdir, model="average")
  assert model.meta["averaged_steps"] == [20, 30]
  one, two = (load_model_folder(workdir / "models" / f"step-000000{n}")[0] for n in (20, 30))

  def check(mean, x, y):
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, (x.astype(np.float64) + y) / 2, rtol=1e-7)

  jax.tree.map(check, model.params, one, two)
  assert sorted(path.name for path in (workdir / "models").glob("step-*")) == [
    f"step-{step:08d}" for step in tiny_model.STEPS
  ]


def test_the_average_of_one_model_is_that_model(workdir):
  average.main(["--workdir", str(workdir), "--last", "1"])
  models = (load_model_folder(workdir / "models" / name)[0] for name in ("average", "best"))
  jax.tree.map(np.testing.assert_array_equal, *models)


@pytest.mark.parametrize(
  ("last", "message"), [("4", r"holds 3 evaluated models.*keep_models=4"), ("0", "--last is 0")]
)
def test_too_many_or_no_models_are_a_user_error(workdir, last, message):
  with pytest.raises(UserError, match=message):
    average.main(["--workdir", str(workdir), "--last", last])


def test_a_folder_without_models_is_a_user_error(tmp_path):
  with pytest.raises(UserError, match="holds 0 evaluated models"):
    average.main(["--workdir", str(tmp_path), "--last", "2"])


def _change_tokenizer(params, files, meta):
  files["source.tokenizer"] += b" "


def _change_model(params, files, meta):
  meta["model"] = {**meta["model"], "dropout": 0.5}


def _change_shape(params, files, meta):
  params["decoder_norm"]["scale"] = np.zeros(3, np.float32)


@pytest.mark.parametrize(
  ("change", "what"),
  [
    (_change_tokenizer, "tokenizers"),
    (_change_model, "configuration"),
    (_change_shape, "parameters"),
  ],
)
def test_models_that_differ_in_more_than_values_are_not_averaged(workdir, change, what):
  folder = workdir / "models" / "step-00000020"
  params, files, meta = load_model_folder(folder)
  change(params, files, meta)
  save_model_folder(folder, params=params, files=files, meta=json.loads(json.dumps(meta)))
  with pytest.raises(UserError, match=f"have different {what}"):
    average.main(["--workdir", str(workdir), "--last", "3"])
  assert not (workdir / "models" / "average").exists()
