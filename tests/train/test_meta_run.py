"""A masked language model that learns to adapt, through the training program."""

import dataclasses
import json
import shutil

import pytest
import tiny_masked
from programs import assert_same_bits, computed, metrics_of, state_of, train

from compmod_jax.data.episodes import EpisodeConfig
from compmod_jax.tasks.objectives import MetaConfig

pytestmark = pytest.mark.usefixtures("one_device")
META = MetaConfig(EpisodeConfig(support=1, query=1, batch=8), parameters=("encoder_0", "head"))


def test_a_run_adapts_logs_evaluates_and_goes_on_to_the_same_bits(tmp_path, monkeypatch):
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  folder = tiny_masked.write_text(tmp_path / "text", {"train": 60, "valid": 12, "test": 12})
  experiment = dataclasses.replace(
    tiny_masked.make_experiment(folder),
    model=tiny_masked.make_model(compete=()),
    task=tiny_masked.make_task(folder, length=6, batch_tokens=48, meta=META),
    micro_batches=2,
  )
  whole, again = tmp_path / "whole", tmp_path / "again"
  train(experiment, whole)
  lines = metrics_of(whole, "train")
  assert all({"loss", "support/cross_entropy_0"} <= line.keys() for line in lines)
  for line in metrics_of(whole, "eval"):
    assert line["query/adapted_loss"] == line["query/1_loss"]
    assert {"query/0_loss", "loss", "perplexity"} <= line.keys()
  assert "adapted" in (whole / "report.html").read_text()
  for split in json.loads((whole / "results.json").read_text())["splits"]:
    assert {"query/0_loss", "query/1_loss", "query/adapted_loss"} <= split["parts"].keys()
  shutil.copytree(whole, again)
  for path in (again / "checkpoints").glob("step_*"):
    if int(path.name[5:13]) > 4:
      shutil.rmtree(path)
  train(experiment, again, report=False)
  assert_same_bits(state_of(again), state_of(whole))
  for kind in ("train", "eval"):
    assert computed(again, kind) == computed(whole, kind)
