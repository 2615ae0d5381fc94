"""Fuzzy expressions: what they are, that a seed gives the same ones, and how models are scored."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.models.neural_interpreter import InterpreterConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.fuzzy_logic import (
  And,
  FuzzyExpressions,
  FuzzyLogicConfig,
  Not,
  either,
  values,
  written,
)
from compmod_jax.training.experiment import load_config

SMALL = FuzzyLogicConfig(FuzzyExpressions(3, 4), rows=8, eval_points=50, eval_rows=20)
MODEL = InterpreterConfig(dim=8, functions=2, iterations=1, heads=2, ffn_dim=6, code_dim=4)


@pytest.fixture(scope="module")
def task():
  return SMALL.build(MODEL)


@pytest.fixture(scope="module")
def params(task):
  return nn.unbox(jax.jit(task.model.init)(jax.random.key(0)))


@pytest.fixture(scope="module")
def forward(task):
  return jax.jit(task.model.forward)


def test_operations_are_products_and_complements():
  x, y = 0.3, 0.6
  points = np.array([[x, y]])
  assert values(And(0, 1), points)[0] == pytest.approx(x * y)
  assert values(Not(0), points)[0] == pytest.approx(1 - x)
  assert values(either(0, 1), points)[0] == pytest.approx(x + y - x * y)


def test_an_expression_is_written_as_it_is_computed():
  expression = And(either(Not(0), 2), Not(And(1, 1)))
  assert written(expression) == "((~a | c) & ~(b & b))"


def test_at_zeros_and_ones_an_expression_is_the_boolean_one_that_is_written():
  corners = np.array(list(itertools.product([0.0, 1.0], repeat=3)))
  for one in FuzzyExpressions(3, 20).expressions():
    text = written(one).replace("~", " not ").replace("&", "and").replace("|", "or")
    truth = [bool(eval(text, dict(zip("abc", map(bool, row), strict=True)))) for row in corners]
    np.testing.assert_array_equal(values(one, corners), truth)


def test_values_are_from_zero_to_one_and_every_variable_matters():
  points = np.random.default_rng(0).random((500, 5))
  for one in FuzzyExpressions().expressions():
    found = values(one, points)
    assert 0 <= found.min() < found.max() <= 1
    assert {letter for letter in written(one) if letter.isalpha()} == set("abcde")


def test_a_seed_gives_the_same_expressions_and_those_after_the_first_are_others():
  every = FuzzyExpressions(count=30).expressions()
  assert FuzzyExpressions(count=20).expressions() == every[:20]
  assert FuzzyExpressions(count=10, first=20).expressions() == every[20:]
  points = np.random.default_rng(1).random((100, 5))
  found = np.array([values(one, points) for one in every])
  apart = np.abs(found[:, None] - found[None]).max(axis=-1)
  assert apart[~np.eye(30, dtype=bool)].min() > 1e-3
  assert FuzzyExpressions(count=30, seed=1).expressions() != every
  with pytest.raises(UserError, match=r"only [0-9]+ different ones were found"):
    FuzzyExpressions(2, 500, more_literals=0).expressions()


def test_a_batch_is_a_function_of_seed_and_number(task):
  def first(seed, **how):
    batches, epoch = task.dataset.train_batches(seed=seed, multiple=2, **how)
    assert epoch == 100
    return [next(batches) for _ in range(2)]

  one, again, other = first(1), first(1), first(2)
  for batch, same, different in zip(one, again, other, strict=True):
    np.testing.assert_array_equal(batch["inputs"], same["inputs"])
    assert not np.any(batch["inputs"] == different["inputs"])
    np.testing.assert_allclose(batch["targets"], task.dataset.targets(batch["inputs"]), rtol=1e-5)
  assert not np.any(one[0]["inputs"] == one[1]["inputs"])
  parts = [first(1, process=process, processes=2)[0]["inputs"] for process in (0, 1)]
  np.testing.assert_array_equal(np.concatenate(parts), one[0]["inputs"])
  with pytest.raises(UserError, match=r"phases\.part is 'large'"):
    task.dataset.train_batches(part="large", seed=0, multiple=1)


def test_scores_are_those_of_the_formula_whatever_the_batches_are(task, params, forward):
  points = task.dataset.points("valid")
  made = np.asarray(forward(params, {"inputs": points, "index": np.arange(50)}))[..., 0]
  wanted = task.dataset.targets(points)
  mean = wanted.mean(axis=0)
  r2 = 1 - ((made - wanted) ** 2).sum(axis=0) / ((wanted - mean) ** 2).sum(axis=0)
  for rows in (20, 50):
    config = dataclasses.replace(SMALL, eval_rows=rows)
    found = config.build(MODEL).evaluate(params, "valid").values
    np.testing.assert_allclose([found[f"fuzzy/r2_{one:02d}"] for one in range(4)], r2, rtol=1e-4)
    assert found["fuzzy/r2"] == pytest.approx(r2.mean(), rel=1e-4)
    assert found["fuzzy/r2_min"] == pytest.approx(r2.min(), rel=1e-4)


def test_the_loss_is_the_share_of_variance_that_is_not_explained(task, params, forward):
  batch = {name: jnp.asarray(x) for name, x in next(task.dataset.eval_batches("valid")).items()}
  batch["index"] = batch["index"].at[5:].set(-1)  # filler
  context = StepContext(jax.random.key(0), jnp.int32(0), True)
  loss = jax.jit(lambda params, batch: task.loss(params, (), batch, context))
  terms, _, metrics = loss(params, batch)
  made = np.asarray(forward(params, batch))[:5, :, 0]
  errors = ((made - np.asarray(batch["targets"])[:5]) ** 2).mean(axis=0)
  wanted = (errors / task.dataset.variances).mean()
  total, count = metrics["unexplained"]
  assert float(total / count) == pytest.approx(wanted, rel=1e-4)
  assert terms["unexplained"].sum == total
  weights, rows = metrics["router/script_0/iteration_0/functions/weight"]
  assert float(rows) == 5 * (3 + 4)
  assert float(weights.sum() / rows) == pytest.approx(1, abs=1e-3)


def test_a_model_that_reads_no_sets_is_refused():
  with pytest.raises(UserError, match="model is a ConvNetConfig"):
    SMALL.build(ConvNetConfig())


def test_one_vector_for_all_expressions_is_refused():
  with pytest.raises(UserError, match=r"model\.cls is 'one', but each expression"):
    SMALL.build(InterpreterConfig(cls="one"))


def test_the_variants_train_what_they_say():
  base = load_config("configs/neural_interpreter.py")
  patterns = {"cls": "cls", "types": "cls+routing", "everything": "all"}
  for variant, trained in patterns.items():
    other = load_config(f"configs/neural_interpreter.py:{variant}")
    assert other.phases[0].trainable == trained
    assert other.model.train_signatures == (variant != "cls")
    assert other.task.data == dataclasses.replace(base.task.data, count=10, first=20)
