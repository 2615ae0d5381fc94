"""What a run leaves behind, when it ends early, and what it does about numbers that are not."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import (
  CHECKPOINT_EVERY,
  EVALUATE_EVERY,
  LOG_EVERY,
  STEPS,
  Program,
  assert_same_bits,
  metrics_of,
  record_of,
  state_of,
  steps_saved,
)

from compmod_jax.checkpoints.model_folder import load_model_folder
from compmod_jax.core.losses import Term
from compmod_jax.training import nonfinite
from compmod_jax.training.experiment import load_config
from compmod_jax.training.step import init_state
from compmod_jax.training.workdir import saved_experiment

EVALUATIONS = list(range(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY))


@pytest.fixture(scope="session")
def shown(place):
  """What the reference run printed, to a pipe."""
  return (place.root / "reference.log").read_text()


@pytest.mark.programs
def test_every_line_of_the_log_is_json_and_has_its_numbers(place):
  train = metrics_of(place.reference, "train")
  assert [line["step"] for line in train] == list(range(LOG_EVERY, STEPS + 1, LOG_EVERY))
  router = "router/encoder/layer_0/self/"
  for line in train:
    assert {
      *("epoch", "loss", "perplexity", "loss/cross_entropy", "accuracy", "tokens_per_second"),
      *("steps_per_second", "gradient_norm", "learning_rate", "input_seconds", "skipped"),
      *("compilations", "compile_seconds", "compile_cache_hits"),
      *(router + name for name in ("entropy", "weight_0", "weight_1", "wins_0", "wins_1")),
    } <= line.keys()
    assert line["perplexity"] == pytest.approx(np.exp(line["loss"]))
    assert line[router + "weight_0"] + line[router + "weight_1"] == pytest.approx(1, abs=1e-5)
    assert line["skipped"] == 0
    assert line["tokens_per_second"] > 0
  evaluated = metrics_of(place.reference, "eval")
  assert [(line["step"], line["split"]) for line in evaluated] == [
    (s, "valid") for s in EVALUATIONS
  ]
  for line in evaluated:
    assert {"loss", "perplexity", "word_perplexity", "bleu", "signature", "chrf"} <= line.keys()
  final = metrics_of(place.reference, "final")
  assert [line["split"] for line in final] == ["valid", "test"]


def test_training_lowers_the_loss_and_the_learning_rate_follows_its_schedule(place):
  train = metrics_of(place.reference, "train")
  assert train[-1]["loss"] < 0.8 * train[0]["loss"]
  rates = [line["learning_rate"] for line in train]
  assert rates[:2] == pytest.approx([0.005, 0.01])
  assert rates[1:] == sorted(rates[1:], reverse=True)
  assert rates[-1] == pytest.approx(0, abs=1e-5)


def test_nothing_is_compiled_after_the_first_evaluation(place):
  counts = {line["step"]: line["compilations"] for line in metrics_of(place.reference, "train")}
  assert counts[STEPS] == counts[EVALUATE_EVERY + LOG_EVERY] > 0


def test_the_pace_leaves_evaluations_out(place):
  """The time that steps took cannot be more than that between the first line and the last."""
  train = metrics_of(place.reference, "train")
  steps = sum(LOG_EVERY / line["steps_per_second"] for line in train)
  seconds = record_of(place.reference)["meta"]["history"]["seconds"]
  assert steps < 0.7 * seconds


def test_progress_elsewhere_than_on_a_terminal_is_plain_lines_with_an_estimate(shown):
  assert "\x1b" not in shown
  assert "compiling the step for batches of 12 x 8\n" in shown
  assert f"step {LOG_EVERY}/{STEPS}  loss " in shown
  last = next(line for line in shown.splitlines() if line.startswith(f"step {STEPS}/{STEPS}"))
  assert last.endswith("eta 00:00")
  assert all(word in last for word in ("loss", "ppl", "tok/s", "gnorm", "lr"))
  assert "translating valid 400/400  eta 00:00\n" in shown
  assert f"valid at step {EVALUATE_EVERY}:" in shown


def test_the_end_is_a_table_samples_and_a_report(place, shown):
  assert shown.count("\nsource ") == shown.count("\nreference ") == shown.count("\noutput ") == 5
  assert "split  sentences" in shown
  html = (place.reference / "report.html").read_text()
  assert "<html" in html
  assert "http://" not in html.replace("http://www.w3.org", "")
  results = json.loads((place.reference / "results.json").read_text())
  final = {line["split"]: line for line in metrics_of(place.reference, "final")}
  for split in results["splits"]:
    line = final[split["split"]]
    assert (split["loss"], split["bleu"]) == (line["loss"], line["bleu"])
    assert split["decoded"] == split["sentences"]
  assert results["ended"] == {
    "reason": "all_steps",
    "step": STEPS,
    "total_steps": STEPS,
    "text": f"all {STEPS} steps were done",
  }
  best, evaluations = results["best"], metrics_of(place.reference, "eval")
  (chosen,) = [line for line in evaluations if line["step"] == best["step"]]
  assert best["evaluations"] == len(evaluations)
  assert (best["sentences"], best["search"]) == (chosen["decoded"], chosen["search"])
  assert best["of"] == final["valid"]["sentences"]
  assert (place.reference / "results.csv").stat().st_size > 100
  assert list((place.reference / "plots").iterdir())


def test_the_workdir_says_what_was_run_and_where_it_came_from(place, monkeypatch):
  experiment = load_config(str(place.config))
  assert saved_experiment(place.reference) == experiment
  record = json.loads((place.reference / "config.json").read_text())
  assert record["command"].startswith("python -m train.main --config ")
  assert record["provenance"]["packages"]["jax"] == jax.__version__


def test_the_best_model_is_that_of_the_best_evaluation(place):
  scores = {line["step"]: line["bleu"] for line in metrics_of(place.reference, "eval")}
  best = max(scores, key=lambda step: scores[step])
  params, files, meta = load_model_folder(place.reference / "models" / "best")
  assert (meta["step"], meta["score"], meta["metric"]) == (best, scores[best], "bleu")
  assert set(files) == {"source.tokenizer", "target.tokenizer"}
  state = state_of(place.reference, best)
  flat = {
    "ema/" + jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  assert_same_bits(flat, {name: leaf for name, leaf in state.items() if name.startswith("ema/")})
  final = {line["split"]: line for line in metrics_of(place.reference, "final")}
  assert final["valid"]["bleu"] == scores[best]


def test_checkpoints_are_written_at_their_steps_and_at_evaluations(place):
  expected = {*range(CHECKPOINT_EVERY, STEPS + 1, CHECKPOINT_EVERY), *EVALUATIONS}
  assert steps_saved(place.reference) == sorted(expected)
  models = sorted(path.name for path in (place.reference / "models").iterdir())
  assert models == ["best", *(f"step-{step:08d}" for step in EVALUATIONS[-2:])]


@pytest.mark.programs
def test_running_a_finished_run_again_trains_nothing_and_tells_the_same_numbers(place, tmp_path):
  workdir = place.stopped_at(STEPS, tmp_path / "again")
  with Program(place, workdir) as program:
    shown = program.finish(0)
  assert f"continuing from the checkpoint of step {STEPS}\n" in shown
  assert "compiling" not in shown
  assert f"valid at step {EVALUATE_EVERY}" not in shown
  assert metrics_of(workdir) == metrics_of(place.reference)
  one, two = (json.loads((w / "results.json").read_text()) for w in (workdir, place.reference))
  for key in ("best", "splits", "samples", "head_weights", "parameters"):
    assert one[key] == two[key], key
  assert steps_saved(workdir) == steps_saved(place.reference)


@pytest.mark.slow
def test_training_stops_early_when_evaluations_get_no_better(place, tmp_path):
  options = ("patience=1", "evaluate_every=2", "evaluate_sentences=30", "checkpoint_every=0")
  options = tuple(f"--config.{option}" for option in options)
  with Program(place, tmp_path / "run", *options) as program:
    shown = program.finish(0)
  scores = [line["bleu"] for line in metrics_of(tmp_path / "run", "eval")]
  assert len(scores) >= 2
  assert all(b > a for a, b in itertools.pairwise(scores[:-1]))
  assert scores[-1] <= scores[-2]
  step = 2 * len(scores)
  assert step < STEPS
  assert "stopping: no better bleu in 1 evaluations\n" in shown
  assert record_of(tmp_path / "run")["step"] == step
  assert (tmp_path / "run" / "report.html").exists()
  with Program(place, tmp_path / "run", *options) as program:
    assert "compiling" not in program.trained()


@pytest.mark.slow
def test_a_time_limit_ends_training_and_a_longer_one_continues_it(place, tmp_path):
  with Program(place, tmp_path / "run", "--config.time_limit_minutes=0.0001") as program:
    shown = program.trained()
  assert "stopping: the time limit was reached (0.0001 minutes)\n" in shown
  assert steps_saved(tmp_path / "run") == [1]
  assert [line["step"] for line in metrics_of(tmp_path / "run", "eval")] == [1]
  with Program(place, tmp_path / "run", "--config.time_limit_minutes=60") as program:
    found = program.wait_for("another setting: (.*)")
    assert found[1] == "time_limit_minutes: 0.0001 there, 60.0 here"
    program.wait_for(f"^valid at step {EVALUATE_EVERY}:")
  train = metrics_of(tmp_path / "run", "train")
  reference = metrics_of(place.reference, "train")
  assert train[3]["loss"] == reference[3]["loss"]


@pytest.mark.slow
def test_a_run_whose_numbers_explode_stops_and_says_where(place, tmp_path):
  options = ("--config.optimizer.learning_rate=1e9", "--config.max_nonfinite=3")
  with Program(place, tmp_path / "run", *options) as program:
    shown = program.finish(2)
  message = shown[shown.index("error:") :]
  assert message.count("\n") == 1
  assert "Training stopped at step 4: " in message
  assert "in 3 steps in a row (max_nonfinite)" in message
  assert "The first activation that is not finite is the site encoder/" in message
  assert str(tmp_path / "run" / "nonfinite") in message
  for step in (2, 3, 4):
    assert f"step {step}: loss nan" in shown
    with np.load(tmp_path / "run" / "nonfinite" / f"step-{step:08d}.npz") as batch:
      assert batch["source"].shape == batch["target"].shape == (12, 8)
      assert batch["index"].min() >= 0
  state = state_of(tmp_path / "run")
  assert state["skipped"] == state["bad_run"] == state["step"] - 1
  moved = {path: leaf for path, leaf in state.items() if path.startswith("params/")}
  assert all(np.isfinite(leaf).all() for leaf in moved.values())


class Regression:
  """A task of one parameter whose loss is `root(w) * x`: not finite where the batch is not."""

  def loss(self, params, carry, batch, context):
    del context
    value = jnp.sum(jnp.sqrt(params["w"]) * batch["x"])
    return {"loss": Term(value, jnp.float32(1))}, carry, {}

  @property
  def model(self):
    return self

  dataset = model

  def flat(self, batch):
    return batch

  def forward(self, params, batch, intermediates):
    return intermediates("product", params["w"] * batch["x"])


@pytest.mark.parametrize(
  ("w", "x", "where"),
  [
    (np.nan, 1.0, "Parameter w is not finite."),
    (4.0, np.inf, "The first activation that is not finite is the site product."),
    (0.0, 1.0, "The gradient of parameter w is not finite (1 parameters in all)."),
    (4.0, 1.0, "With dropout off, everything is finite on this batch."),
  ],
)
def test_the_first_number_that_is_not_finite_is_found(w, x, where):
  state = init_state({"w": jnp.float32(w)}, (), optax.identity(), 0.0)
  batch = {"x": jnp.full(2, x, jnp.float32)}
  assert nonfinite.locate(Regression(), state, batch, 0) == where
