"""Labels of target words: aligned with them, predicted from the decoder, and no trace if off."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF
from compmod_jax.core.losses import objective as weighted_sum
from compmod_jax.data.base import DataError
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.synthetic.scan import PROGRESS, ScanData, interpret, progress
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.target_labels import label_counts
from compmod_jax.tasks.translation import Translation, TranslationConfig
from compmod_jax.tools import shapes

COMMANDS = ("jump thrice", "look around left after walk", "run opposite right twice", "turn left")
COUNTS = tuple(PROGRESS.values())
SIZES: dict[str, Any] = {"dim": 8, "heads": 2, "ffn_dim": 8, "encoder_layers": 1, "dropout": 0.0}
MODEL = TransformerConfig(**SIZES, decoder_layers=1, max_length=16, target_labels=COUNTS)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TranslationConfig:
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
    label_smoothing=0.0,
    label_weight=0.5,
  )


@pytest.fixture(scope="module")
def task(config) -> Translation:
  return config.build(MODEL)


@pytest.fixture(scope="module")
def batch(task) -> Any:
  (found,) = task.dataset.eval_batches("test")
  return jax.device_put(found)


@pytest.fixture(scope="module")
def params(task) -> Any:
  return jax.device_put(drawn(task.model.init, spread=0.3))


def context() -> StepContext:
  return StepContext(jax.random.key(0), jax.device_put(np.float32(0)), train=False)


def test_every_target_word_has_the_label_of_its_action(batch):
  for row, number in enumerate(batch["index"].tolist()):
    for name, labels in progress(COMMANDS[number]).items():
      column = np.asarray(batch[f"labels/{name}"][row])
      assert column[: len(labels)].tolist() == [1 + label for label in labels]
      assert not column[len(labels) :].any()
      assert batch["target"][row, len(labels)] != 0  # the end of the sentence, without label


def test_the_loss_is_the_mean_cross_entropy_of_every_kind_of_labels(task, params, batch):
  @jax.jit
  def run(params: Any, batch: Any) -> Any:
    intermediates = OFF.also(["target_labels"])
    given = context()._replace(intermediates=intermediates)
    terms, _, metrics = task.loss(params, (), batch, given)
    return terms, metrics, intermediates.captured["target_labels"]

  terms, metrics, captured = run(params, batch)
  logits = np.asarray(captured, np.float64)
  total, start = float(terms["cross_entropy"].value()), 0
  for name, count in PROGRESS.items():
    mine, labels = logits[..., start : start + count], np.asarray(batch[f"labels/{name}"])
    start += count
    log = mine - np.log(np.exp(mine).sum(-1, keepdims=True))
    places = np.argwhere(labels > 0)
    each = [-log[row, time, labels[row, time] - 1] for row, time in places]
    right = [mine[row, time].argmax() == labels[row, time] - 1 for row, time in places]
    np.testing.assert_allclose(terms[f"labels/{name}"].value(), np.mean(each), rtol=1e-5)
    np.testing.assert_allclose(metrics[f"labels/{name}_accuracy"][0], np.sum(right))
    total += 0.5 * np.mean(each)
  np.testing.assert_allclose(weighted_sum(terms), total, rtol=1e-5)
  assert task.objective.weights(MODEL) == {
    "cross_entropy": 1.0,
    **{f"labels/{name}": 0.5 for name in PROGRESS},
  }
  measured = dict(task.evaluate(params, "test", decode=False).values)
  for name in PROGRESS:
    correct, count = metrics[f"labels/{name}_accuracy"]
    np.testing.assert_allclose(measured[f"labels/{name}_accuracy"], correct / count, rtol=1e-6)


def test_labels_teach_the_decoder_and_the_encoder_but_no_output_of_words(config, batch):
  model = dataclasses.replace(MODEL, share_embeddings="none")
  task = config.build(model)
  params = drawn(task.model.init, spread=0.3)

  def of_labels(params: Any) -> jax.Array:
    terms, _, _ = task.loss(params, (), batch, context())
    return weighted_sum({name: term for name, term in terms.items() if "labels" in name})

  slopes = jax.jit(jax.grad(of_labels))(params)
  for name in ("decoder_0", "encoder_0", "label_head", "decoder_embedding"):
    assert any(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(slopes[name])), name
  assert not np.any(slopes["output_embedding"]["table"])


def test_without_labels_the_program_and_the_batches_are_those_of_the_plain_task(
  config, task, params, batch
):
  off = dataclasses.replace(config, label_weight=0.0).build(
    dataclasses.replace(MODEL, target_labels=())
  )
  plain = {name: leaf for name, leaf in params.items() if name != "label_head"}
  assert jax.tree.structure(drawn(off.model.init)) == jax.tree.structure(plain)
  (found,) = off.dataset.eval_batches("test")
  assert set(found) == {"source", "target", "index"}
  for name, column in found.items():
    np.testing.assert_array_equal(column, batch[name])
  assert "label" not in off.model.jit(type(off.model).forward).lower(plain, found).as_text()
  logits = off.model.jit(_logits)(plain, batch)
  np.testing.assert_array_equal(logits, task.model.jit(_logits)(params, batch))


def _logits(model: Any, params: Any, batch: Any) -> jax.Array:
  return model.forward(params, batch)


def test_what_does_not_fit_is_refused(config):
  plain = dataclasses.replace(MODEL, target_labels=())
  with pytest.raises(UserError, match=r"model\.target_labels is \(\).*\(2, 3, 8\)"):
    config.build(plain)
  with pytest.raises(UserError, match="TextData has no labels"):
    label_counts(TextData(), MODEL)
  with pytest.raises(UserError, match="ScanData has no labels"):
    label_counts(ScanData(scratchpad=True), MODEL)
  with pytest.raises(UserError, match=r"label_weight is -1"):
    dataclasses.replace(config, label_weight=-1.0)
  with pytest.raises(UserError, match=r"target_labels is \(1,\)"):
    dataclasses.replace(MODEL, target_labels=(1,))
  pieces = dataclasses.replace(config, target_tokenizer=TokenizerConfig(kind="bpe", vocab_size=24))
  with pytest.raises(DataError, match="labels 'argument'"):
    pieces.build(MODEL).dataset.examples("test")


def test_shapes_of_training_batches_are_those_of_the_batches(task):
  iterator, _ = task.dataset.train_batches(seed=0, multiple=1)
  assert shapes.largest_batch(task, 1).keys() | {"index"} == dict(next(iterator)).keys()
