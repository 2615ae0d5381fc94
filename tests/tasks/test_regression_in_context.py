"""Fuzzy logic in context as a task: batches, loss and scores beside the data and the formula."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.logic_in_context import LogicInContextData, conjunctions, values
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.logic_in_context import LogicInContextConfig
from compmod_jax.trained import as_numpy

DATA = LogicInContextData(variables=3, points=6)
SMALL = LogicInContextConfig(DATA, rows=8, eval_sequences=30, eval_rows=12)
MODEL = DecoderConfig(
  decoder_layers=1, dim=8, heads=2, ffn_dim=12, positions="none", max_length=6, dropout=0.0,
  compete=("decoder_self",),
)  # fmt: skip


@pytest.fixture(scope="module")
def task():
  return SMALL.build(MODEL)


@pytest.fixture(scope="module")
def params(task):
  return nn.unbox(jax.jit(task.model.init)(jax.random.key(0)))


def training(task, seed, count=2, **how):
  batches, epoch = task.dataset.train_batches(seed=seed, multiple=2, **how)
  assert epoch == 100
  return [next(batches) for _ in range(count)]


def test_a_part_is_scored_on_its_first_sequences_each_once(task):
  for split in ("valid", "test", "ood"):
    wanted = DATA.sequences(split, 0, 30)
    batches = list(task.dataset.eval_batches(split))
    assert [len(batch["index"]) for batch in batches] == [12, 12, 12]
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    np.testing.assert_array_equal(whole["index"], [*range(30), *[-1] * 6])
    np.testing.assert_array_equal(whole["inputs"][:30], wanted.inputs)
    np.testing.assert_array_equal(whole["targets"][:30], wanted.targets)
    assert not np.any(whole["inputs"][30:])
  assert len(next(task.dataset.eval_batches("valid", multiple=8))["index"]) == 16


def test_training_batches_show_expressions_of_the_training_part(task):
  known = conjunctions(3)[DATA.tasks("train")]
  for batch in training(task, 0, 4):
    points, shown = batch["inputs"][..., :-1], batch["inputs"][..., -1]
    asked = np.concatenate([shown[:, :-1], batch["targets"][:, None]], axis=1)
    every = values(known[:, None, None], np.broadcast_to(points, (len(known), *points.shape)))
    assert np.all(np.any(np.all(np.abs(every - asked) < 1e-6, axis=-1), axis=0))
    assert not np.any(shown[:, -1])


def test_a_batch_is_a_function_of_seed_and_number(task):
  one, again, other = training(task, 1), training(task, 1), training(task, 2)
  for batch, same, different in zip(one, again, other, strict=True):
    np.testing.assert_array_equal(batch["inputs"], same["inputs"])
    assert not np.any(batch["inputs"][..., :-1] == different["inputs"][..., :-1])
  assert not np.any(one[0]["inputs"][..., :-1] == one[1]["inputs"][..., :-1])
  parts = [training(task, 1, 1, process=process, processes=2)[0]["inputs"] for process in (0, 1)]
  np.testing.assert_array_equal(np.concatenate(parts), one[0]["inputs"])
  with pytest.raises(UserError, match=r"phases\.part is 'small'"):
    task.dataset.train_batches(part="small", seed=0, multiple=1)


def test_scores_are_those_of_the_formula_whatever_the_batches_are(task, params):
  inputs, targets, _ = DATA.sequences("ood", 0, 30)
  module = jax.jit(task.model.module.apply, static_argnames="causal")
  made = as_numpy(module({"params": params}, jnp.asarray(inputs), causal=False))[:, 0]
  error = np.square(made - targets).mean()
  for rows in (12, 30):
    found = dataclasses.replace(SMALL, eval_rows=rows).build(MODEL).evaluate(params, "ood").values
    assert found["r2"] == pytest.approx(1 - error / targets.var(), rel=1e-4)
    assert found["context/squared_error"] == pytest.approx(error, rel=1e-5)
    assert found["sentences"] == 30


def test_the_loss_is_the_mean_squared_error_of_rows_that_are_no_filler(task, params):
  batch = {name: jnp.asarray(x) for name, x in training(task, 0, 1)[0].items()}
  batch["index"] = batch["index"].at[5:].set(-1)
  context = StepContext(jax.random.key(0), jnp.int32(0), True)
  loss = jax.jit(lambda params, batch: (task.loss(params, (), batch, context), predict(batch)))

  def predict(batch):
    return task.model.forward(params, batch)

  (terms, _, metrics), made = loss(params, batch)
  errors = np.square(np.asarray(made)[:5, 0, 0] - np.asarray(batch["targets"])[:5])
  assert float(terms["squared_error"].value()) == pytest.approx(errors.mean(), rel=1e-5)
  weights, rows = metrics["router/decoder/layer_0/self/weight"]
  assert float(rows) == 5 * 6
  assert float(weights.sum() / rows) == pytest.approx(1, abs=1e-5)


def test_the_form_of_the_batches_is_that_of_the_example(task):
  batch, example = training(task, 0, 1)[0], task.dataset.example()
  assert {name: x.shape[1:] for name, x in batch.items()} == {
    name: x.shape[1:] for name, x in example.items()
  }
  assert SMALL.batch_tokens == 8 * 6


def test_expressions_of_parts_are_counted():
  notes = SMALL.build(MODEL).dataset.notes()
  assert notes == ["expressions: 8 in train, 8 in valid, 7 in test, 1 in ood"]
  assert len(list(itertools.combinations(range(6), 2))) == 8 + 7


def test_the_fingerprint_is_that_of_the_data():
  def of(**fields):
    data = dataclasses.replace(DATA, **fields)
    return dataclasses.replace(SMALL, data=data).build(MODEL).dataset.fingerprints()

  assert of() == of()
  assert of() != of(seed=1)


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: SMALL.build(EncoderConfig()), "model is a EncoderConfig"),
    (
      lambda: SMALL.build(dataclasses.replace(MODEL, max_length=5)),
      r"task\.data\.points is 6 but model\.max_length is 5",
    ),
    (lambda: dataclasses.replace(SMALL, rows=0), r"task\.rows is 0"),
    (lambda: dataclasses.replace(SMALL, eval_sequences=1), r"task\.eval_sequences is 1"),
  ],
)
def test_what_does_not_fit_is_refused(make, match):
  with pytest.raises(UserError, match=match):
    make()
