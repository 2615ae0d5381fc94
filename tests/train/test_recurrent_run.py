"""Recurrent language models through the programs: train, continue, evaluate, report."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_masked
import tiny_recurrent
from programs import assert_same_bits, computed, metrics_of, state_of, steps_saved, train

import compmod_jax
from compmod_jax.commands import analyse, check_data, evaluate, minimal_pairs
from compmod_jax.core.errors import UserError
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.training.experiment import Phase, load_config

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
  root = tmp_path_factory.mktemp("recurrent_run")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("COMPMOD_CACHE", str(root / "cache"))
    counts = {"train": 40, "valid": 6, "test": 6}
    yield tiny_recurrent.make_experiment(tiny_masked.write_text(root / "text", counts))


@pytest.fixture(scope="module")
def workdir(one_device, experiment, tmp_path_factory) -> Path:
  place = tmp_path_factory.mktemp("run") / "whole"
  train(experiment, place)
  return place


def test_the_log_has_losses_errors_and_an_evaluation_after_every_epoch(workdir):
  lines = metrics_of(workdir, "train")
  assert {"loss", "recoding/error", "learning_rate"} <= set(lines[-1])
  epochs = [line["epoch"] for line in metrics_of(workdir, "eval")]
  np.testing.assert_allclose(epochs, [1, 2, 3])


def test_the_rate_is_divided_by_four_after_an_epoch_that_is_not_the_best(workdir):
  perplexities = [line["perplexity"] for line in metrics_of(workdir, "eval")]
  steps = [line["step"] for line in metrics_of(workdir, "eval")]
  rate, best, expected = 20.0, np.inf, {}
  for step, found in zip(steps, perplexities, strict=True):
    expected[step] = rate
    rate, best = (rate, found) if found < best else (rate / 4, best)
  for line in metrics_of(workdir, "train"):
    epoch_end = min(step for step in steps if step >= line["step"])
    assert line["learning_rate"] == pytest.approx(expected[epoch_end])


def test_small_gains_divide_the_rate_where_they_count_as_none(experiment, tmp_path):
  optimizer = dataclasses.replace(experiment.optimizer, plateau_improvement=0.9)
  train(dataclasses.replace(experiment, optimizer=optimizer), tmp_path / "run", report=False)
  rates = {line["learning_rate"] for line in metrics_of(tmp_path / "run", "train")}
  assert sorted(rates) == pytest.approx([5.0, 20.0])  # the first epoch is the best


def test_an_interrupted_run_goes_on_to_the_same_bits_states_included(experiment, workdir, tmp_path):
  again = tmp_path / "again"
  shutil.copytree(workdir, again)
  first = steps_saved(again)[0]
  for folder in (again / "checkpoints").glob("step_*"):
    if int(folder.name[5:13]) > first:
      shutil.rmtree(folder)
  train(experiment, again, report=False)
  assert_same_bits(state_of(again), state_of(workdir))
  for kind in ("train", "eval"):
    assert computed(again, kind) == computed(workdir, kind)


def test_evaluating_the_saved_model_gives_the_report_s_numbers(workdir, tmp_path, capsys):
  results = json.loads((workdir / "results.json").read_text())
  path = tmp_path / "scores.json"
  evaluate.main(["--workdir", str(workdir), "--quiet", "--json", str(path)])
  record = json.loads(path.read_text())
  assert [row["split"] for row in record["splits"]] == ["valid", "test"]
  for reported, row in zip(results["splits"], record["splits"], strict=True):
    for name in ("tokens", "loss", "perplexity", "word_perplexity"):
      assert row[name] == reported[name], name
  assert "BLEU" not in capsys.readouterr().out
  assert results["plain_parameters"] == results["parameters"]


def test_the_saved_model_scores_texts(workdir):
  found = compmod_jax.load(workdir).score(["bat 0 dog 2"])[0]
  assert len(found.nll) == 5
  assert len(found.error_after) == 5


def test_the_data_check_looks_at_documents(workdir, tmp_path, capsys):
  config = tmp_path / "config.py"
  config.write_text(
    "from pathlib import Path\nimport tiny_recurrent\n"
    "def get_config(variant):\n"
    f"  return tiny_recurrent.make_experiment(Path({str(_text(workdir))!r}))\n"
  )
  assert check_data.main(["--config", str(config)]) == 0
  assert "documents" in capsys.readouterr().out


def _text(workdir: Path) -> str:
  return json.loads((workdir / "config.json").read_text())["experiment"]["task"]["data"]["folder"]


def test_recoding_can_be_changed_for_use(workdir, tmp_path, capsys):
  def perplexity(*options):
    path = tmp_path / "scores.json"
    arguments = ["--workdir", str(workdir), "--quiet", "--split", "test", "--json", str(path)]
    evaluate.main([*arguments, *options])
    capsys.readouterr()
    return json.loads(path.read_text())["splits"][0]["perplexity"]

  whole = perplexity()
  assert perplexity("--recoding", "size=0.0") == pytest.approx(
    perplexity("--recoding", "signal=none"), rel=1e-6
  )
  assert perplexity("--recoding", "signal=nll", "size=0.1") != whole
  with pytest.raises(UserError, match="Did you mean"):
    perplexity("--recoding", "signl=nll")
  with pytest.raises(UserError, match="steps: none there"):
    perplexity("--recoding", "step=learned")


@pytest.mark.slow
def test_a_classifier_of_the_grammar_s_numbers_recodes(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  base = load_config("configs/lm_recoding.py")
  data = GrammarDocuments(GrammarData(train=120, valid=20, test=20, shifted=20))
  small = dataclasses.replace(
    base,
    task=dataclasses.replace(base.task, data=data, rows=8),
    model=tiny_recurrent.make_model("none"),
    phases=(Phase(steps=4),),
  )
  train(small, tmp_path / "plain")
  options = ["--workdir", str(tmp_path / "plain"), "--split", "attractor", "--quiet"]
  analyse.main(["probe", *options, "--training", "60", "--output", str(tmp_path / "probe")])
  found = json.loads((tmp_path / "probe/result.json").read_text())
  assert len(found["classifier"]["weight"]) == 8
  rows = {row["tokens"]: row for row in found["accuracy"]}
  assert {"all", "token 0", "0 attractors", "3 attractors, last token"} <= set(rows)
  assert 0 <= rows["all"]["accuracy"] <= 1
  recoding = RecodingConfig(
    signal="weak_supervision", size=0.5, classifier=str(tmp_path / "probe/result.json")
  )
  model = dataclasses.replace(small.model, recoding=recoding)
  train(dataclasses.replace(small, model=model), tmp_path / "weak", report=False)
  (tmp_path / "probe/result.json").unlink()  # the model has a copy of its own
  evaluate.main(["--workdir", str(tmp_path / "weak"), "--quiet", "--split", "test"])
  pairs = ["--workdir", str(tmp_path / "weak"), "--quiet", "--format", "grammar"]
  minimal_pairs.main([*pairs, "--json", str(tmp_path / "pairs.json")])
  assert len(json.loads((tmp_path / "pairs.json").read_text())["pairs"]) == 20
  printed = capsys.readouterr().out
  assert "3 attractors" in printed
  assert "95 % interval  unknown" in printed
  found = json.loads((tmp_path / "pairs.json").read_text())
  unknown, tokens = (sum(pair[name] for pair in found["pairs"]) for name in ("unknown", "tokens"))
  assert 0 < unknown < tokens  # 120 sentences do not have all words of the grammar
  np.testing.assert_allclose(found["groups"][-1]["unknown"], 100 * unknown / tokens)
