"""Masked language models through the programs: train, continue, evaluate, report, fill in."""

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_masked
from programs import assert_same_bits, computed, metrics_of, state_of, steps_saved, train

import compmod_jax
from compmod_jax.commands import average, baselines, check_data, evaluate, predict
from compmod_jax.core.errors import UserError
from compmod_jax.training.experiment import load_config

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
  root = tmp_path_factory.mktemp("masked_run")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("COMPMOD_CACHE", str(root / "cache"))
    counts = {"train": 40, "valid": 6, "test": 6}
    yield tiny_masked.make_experiment(tiny_masked.write_text(root / "text", counts))


@pytest.fixture(scope="module")
def workdir(one_device, experiment, tmp_path_factory) -> Path:
  place = tmp_path_factory.mktemp("run") / "whole"
  train(experiment, place)
  return place


def test_the_log_has_losses_routers_and_evaluations(workdir):
  lines = metrics_of(workdir, "train")
  assert [line["step"] for line in lines] == list(range(2, 13, 2))
  for line in lines:
    assert {"loss", "perplexity", "accuracy", "tokens_per_second"} <= line.keys()
    assert "router/encoder/layer_0/self/entropy" in line
  evaluated = metrics_of(workdir, "eval")
  assert [line["step"] for line in evaluated] == [4, 8, 12]
  for line in evaluated:
    assert line["perplexity"] == pytest.approx(np.exp(line["loss"]))
    assert line["unigram"] == evaluated[0]["unigram"]
    assert line["tokens"] == evaluated[0]["tokens"]


def test_the_best_model_is_the_one_with_the_lowest_loss(workdir):
  losses = {line["step"]: line["loss"] for line in metrics_of(workdir, "eval")}
  best = compmod_jax.load(workdir).meta
  assert best["metric"] == "loss"
  assert best["step"] == min(losses, key=losses.get)
  assert best["score"] == min(losses.values())


def test_an_interrupted_run_goes_on_to_the_same_bits(experiment, workdir, tmp_path):
  again = tmp_path / "again"
  shutil.copytree(workdir, again)
  for folder in (again / "checkpoints").glob("step_*"):
    if int(folder.name[5:13]) > 4:
      shutil.rmtree(folder)
  assert steps_saved(again) == [4]
  train(experiment, again, report=False)
  assert_same_bits(state_of(again), state_of(workdir))
  for kind in ("train", "eval"):
    assert computed(again, kind) == computed(workdir, kind)


def test_evaluating_the_saved_model_gives_the_report_s_numbers(workdir, tmp_path, capsys):
  results = json.loads((workdir / "results.json").read_text())
  path = tmp_path / "scores.json"
  evaluate.main(["--workdir", str(workdir), "--quiet", "--json", str(path)])
  printed = capsys.readouterr().out
  record = json.loads(path.read_text())
  assert record["decode"] is None
  assert [row["split"] for row in record["splits"]] == ["valid", "test"]
  for reported, row in zip(results["splits"], record["splits"], strict=True):
    for name in ("tokens", "loss", "unigram", "perplexity", "accuracy"):
      assert row[name] == reported[name], name
    assert f"{row['loss']:.4f}" in printed
    assert f"{row['unigram']:.4f}" in printed
  assert "BLEU" not in printed
  with pytest.raises(UserError, match=r"--beams: the model in .* does not search"):
    evaluate.main(["--workdir", str(workdir), "--quiet", "--beams", "3"])


def test_the_report_has_samples_units_and_no_column_without_numbers(workdir):
  text = (workdir / "report.html").read_text()
  results = json.loads((workdir / "results.json").read_text())
  assert "nats per predicted token" in text
  assert "unigram" in text
  assert "BLEU" not in text
  assert results["best"]["metric"] == "loss"
  assert results["plain_parameters"] < results["parameters"]
  assert results["head_weights"].keys() == {"encoder/layer_0/self"}
  assert results["samples"]
  assert "<mask>" in "".join(sample["source"] for sample in results["samples"])


@pytest.fixture
def fill(workdir, monkeypatch, capsys):
  """Runs the prediction program on lines and returns its output lines and what it said."""

  def call(lines, *options):
    data = "".join(f"{line}\n" for line in lines).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    predict.main(["--workdir", str(workdir), "--quiet", *options])
    out, err = capsys.readouterr()
    return out.split("\n")[:-1], err

  return call


def test_every_line_has_one_line_with_its_masks_filled_and_their_candidates(fill, workdir):
  lines = ["bat <mask> cow 1", "", "dog 2", "<mask> 3 <mask> 4", "cow 1 " * 12 + "<mask>"]
  out, err = fill(lines, "--top", "2", "--chunk", "2")
  assert len(out) == len(lines)
  assert out[1:3] == ["", "dog 2"]
  expected = compmod_jax.load(workdir).fill(lines, top=2)
  for line, filled in zip(out[:4], expected[:4], strict=True):
    text, *places = line.split("\t")
    assert text == filled.text
    assert places == [
      ", ".join(f"{c.token} {c.probability:.4f}" for c in candidates)
      for candidates in filled.candidates
    ]
  assert "line 5 has more than 16 tokens" in err
  assert fill(lines[:4], "--top", "0")[0] == [filled.text for filled in expected[:4]]
  with pytest.raises(UserError, match="--nbest and --scores are of translations"):
    fill(lines, "--scores")


def test_the_data_check_looks_at_documents_and_baselines_are_for_translation(
  tmp_path, experiment, capsys
):
  config = tmp_path / "config.py"
  folder = experiment.task.data.folder
  config.write_text(
    "from pathlib import Path\nimport tiny_masked\n\n"
    f"def get_config(variant):\n  return tiny_masked.make_experiment(Path({folder!r}))\n"
  )
  assert load_config(str(config)) == experiment
  with pytest.raises(UserError, match=r"is a MaskedLMConfig.*Give the --config of a translation"):
    baselines.main(["--config", str(config)])
  assert check_data.main(["--config", str(config)]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split()[:2] == ["split", "documents"]
  assert [line.split()[:2] for line in lines[1:4]] == [
    ["train", "40"],
    ["valid", "6"],
    ["test", "6"],
  ]
  with pytest.raises(UserError, match="--export is for parallel text"):
    check_data.main(["--config", str(config), "--export", str(tmp_path / "out")])


def test_models_are_averaged_like_any(workdir, capsys):
  average.main(["--workdir", str(workdir), "--last", "1"])
  assert compmod_jax.load(workdir, model="average").meta["averaged_steps"] == [12]
