"""Evaluating a saved model gives the numbers that its training gave."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_model

import compmod_jax
from compmod_jax.analysis.report.results import table
from compmod_jax.checkpoints.model_folder import load_model_folder
from compmod_jax.commands import evaluate
from compmod_jax.core import sharding
from compmod_jax.core.errors import UserError
from compmod_jax.decoding import DecodeConfig
from compmod_jax.tasks.base import Evaluation, silent
from compmod_jax.training import final_evaluation, run
from compmod_jax.training.workdir import saved_experiment


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
  return tiny_model.make_workdir(tmp_path_factory.mktemp("evaluate") / "run")


@pytest.fixture
def program(workdir, monkeypatch, capsys, tmp_path):
  """Runs the program and returns what it printed and the splits of its JSON file."""
  monkeypatch.setattr(run, "use_compile_cache", lambda: None)

  def call(*options: str) -> tuple[str, dict]:
    path = tmp_path / "new" / "result.json"
    evaluate.main(["--workdir", str(workdir), "--quiet", "--json", str(path), *options])
    return capsys.readouterr().out, json.loads(path.read_text())

  return call


def test_the_numbers_are_those_of_training_to_the_last_bit(workdir, program):
  experiment = saved_experiment(workdir)
  mesh = sharding.make_mesh(experiment.mesh)
  files = compmod_jax.load(workdir).task.dataset.files()
  config = dataclasses.replace(experiment.task, decode=DecodeConfig("greedy", max_extra=2))
  task = config.build(experiment.model, files=files)
  params = final_evaluation.load_parameters(workdir / "models" / "best", task, mesh)
  trained = final_evaluation.evaluate_splits(
    task, params, task.dataset.final_splits(), sharing=run.sharing_of(mesh), status=silent
  )
  printed, record = program("--lowercase", "--method", "greedy", "--max_ratio", "1.5")
  assert [row["split"] for row in record["splits"]] == ["valid", "test"]
  for row in record["splits"]:
    for name, value in trained[row["split"]].values.items():
      assert row[name] == value, (row["split"], name)
    assert row["sentences_per_second"] > 0
    trained[row["split"]].values["sentences_per_second"] = row["sentences_per_second"]
  rows = [final_evaluation.split_result(split, result) for split, result in trained.items()]
  assert table({"name": "", "splits": rows}) in printed
  assert trained["valid"].values["dropped"] == 1
  # Lower-cased outputs can only agree better.
  assert all(row["bleu_lowercase"] >= row["bleu"] for row in record["splits"])
  assert "case:lc" in printed
  assert record["step"] == 30
  assert record["provenance"]["packages"]["jax"]


def test_one_split_another_model_and_another_way_to_decode_can_be_chosen(program, monkeypatch):
  seen = []

  def evaluate_splits(task, params, splits, **_):
    seen.append((task.generator.decode, params, splits))
    return {split: Evaluation({"bleu": 12.5}, [], [], []) for split in splits}

  monkeypatch.setattr(final_evaluation, "evaluate_splits", evaluate_splits)
  printed, record = program("--split", "test", "--beams", "7", "--model", "step-00000010")
  ((decode, params, splits),) = seen
  assert decode == DecodeConfig(beams=7, max_ratio=1.0, max_extra=2)
  assert splits == ("test",)
  there = load_model_folder(Path(record["model"]))[0]
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, params), there)
  assert "step 10" in printed.splitlines()[0]
  assert "7 beams" in printed.splitlines()[0]
  assert "12.50" in printed
  assert [record["step"], record["decode"]["beams"]] == [10, 7]


def test_a_model_is_scored_on_other_data_of_the_same_kind(program, tmp_path):
  folder = tmp_path / "others"
  tiny_model.write_data(folder)
  for side in ("de", "en"):
    lines = (folder / f"test.{side}").read_text().splitlines()
    (folder / f"test.{side}").write_text("\n".join(lines[:2]) + "\n")
  _, record = program("--split", "test", "--data_fields", f"folder={folder}")
  (found,) = record["splits"]
  _, record = program("--split", "test")
  (trained,) = record["splits"]
  assert (found["sentences"], trained["sentences"]) == (2, 9)
  assert found["loss"] != trained["loss"]
  with pytest.raises(UserError, match=r"--data_fields is 'foldr'.*Did you mean 'folder'"):
    program("--data_fields", "foldr=x")


def test_an_unknown_split_is_answered_with_the_nearest(program):
  with pytest.raises(UserError, match=r"--split is 'tset'.*Did you mean 'test'"):
    program("--splits", "valid", "tset")


def test_a_json_file_that_cannot_be_written_is_a_user_error(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="--json"):
    evaluate.write_json(tmp_path / "file" / "result.json", {})
