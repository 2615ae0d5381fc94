"""Losses that a network of the model expects: the term, whom it teaches, and its score."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.synthetic.scan import ScanData, interpret
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.lstm_lm import LstmConfig
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.translation import Translation, TranslationConfig

COMMANDS = ("jump thrice", "look around left after walk", "run opposite right twice", "turn left")
SITE = "decoder/predicted_error"
MODEL = Seq2SeqLstmConfig(
  dim=6,
  embedding_dim=5,
  attention_dim=4,
  dropout=0.0,
  recoding=RecodingConfig("predicted_error", size=0.5, when="test"),
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Translation:
  folder: Path = tmp_path_factory.mktemp("scan")
  lines = [f"IN: {command} OUT: {' '.join(interpret(command))}" for command in COMMANDS]
  for part in ("train", "test"):
    (folder / f"tasks_{part}_simple.txt").write_text("\n".join(lines) + "\n")
  words = TokenizerConfig(kind="words")
  return TranslationConfig(
    data=ScanData(folder=str(folder), valid=2),
    tokenizer=words,
    target_tokenizer=words,
    batch=BatchConfig(tokens=64, buckets=(16,), prefetch=1),
  ).build(MODEL)


@pytest.fixture(scope="module")
def batch(task) -> Any:
  (found,) = task.dataset.eval_batches("test")
  return jax.device_put(found)


@pytest.fixture(scope="module")
def params(task) -> Any:
  return drawn(task.model.init, spread=0.5)


def expected_and_found(task, params, batch, *, train):
  """Of every target token: the expected loss, and the one that it has."""

  @jax.jit
  def run(params):
    intermediates = OFF.also([SITE])
    rng = jax.random.key(0) if train else None
    logits = task.model.forward(params, batch, intermediates=intermediates, rng=rng)
    return jax.nn.log_softmax(logits), intermediates.captured[SITE]

  rows, expected = (np.asarray(x, np.float64) for x in run(params))
  target = np.asarray(batch["target"])
  losses = -np.take_along_axis(rows, target[..., None], axis=-1)[..., 0]
  return expected[target != 0], losses[target != 0]


def test_the_term_is_the_mean_squared_error_and_teaches_the_predictor_alone(task, params, batch):
  def terms(params):
    context = StepContext(rng=jax.random.key(0), step=jax.numpy.int32(0), train=True)
    found, _, _ = task.objective(task.model, params, None, batch, context)
    return found["error_prediction"].value(), found["cross_entropy"].value()

  value = jax.jit(lambda p: terms(p)[0])(params)
  expected, losses = expected_and_found(task, params, batch, train=True)
  np.testing.assert_allclose(value, np.mean((expected - losses) ** 2), rtol=1e-5)
  assert losses.std() > 0.1

  mine, words = jax.jit(lambda p: (jax.grad(lambda q: terms(q)[0])(p), jax.grad(
    lambda q: terms(q)[1])(p)))(params)  # fmt: skip
  for name, gradients in mine.items():
    reached = [bool(np.any(leaf)) for leaf in jax.tree.leaves(gradients)]
    assert all(reached) if name == "error_predictor" else not any(reached), name
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(words["error_predictor"]))
  assert task.objective.weights(MODEL) == {"cross_entropy": 1.0, "error_prediction": 1.0}


def test_the_score_is_the_share_of_the_variance_of_losses_that_is_explained(task, params, batch):
  scores, *_ = task.evaluate(params, "test", decode=False)
  expected, losses = expected_and_found(task, params, batch, train=False)
  r2 = 1 - np.mean((expected - losses) ** 2) / losses.var()
  np.testing.assert_allclose(scores["error_prediction/expected_loss"], expected.mean(), rtol=1e-5)
  np.testing.assert_allclose(scores["error_prediction/r2"], r2, rtol=1e-4)


def test_states_in_use_go_down_the_expected_loss(task, params, batch):
  """Of the first prediction, for small steps; in training, nothing is recoded."""
  moved, _ = expected_and_found(task, params, batch, train=False)
  plain, _ = expected_and_found(task, params, batch, train=True)
  first = np.cumsum([0, *np.sum(np.asarray(batch["target"]) != 0, axis=1)])[:-1]
  first = first[first < len(plain)]
  assert (moved[first] < plain[first]).all()


def test_language_models_refuse_the_signal_that_they_do_not_have():
  with pytest.raises(UserError, match="predicted_error"):
    LstmConfig(recoding=RecodingConfig("predicted_error"))
