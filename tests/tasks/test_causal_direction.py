"""Finding the cause: what is drawn, what is asked of a model, which angles are right, mistakes."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.analysis.meta_transfer import Direction
from compmod_jax.core import losses
from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.meta_transfer import rotation
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.meta_transfer import (
  CausalDirectionConfig,
  DiscretePairs,
  MetaTransferConfig,
  RotatedPairs,
  angle_error,
)
from compmod_jax.training.experiment import load_config, variants

CONTEXT = StepContext(jax.random.key(0), jnp.int32(0), True)
DISCRETE = MetaTransferConfig(DiscretePairs(3, pairs=500), steps=6, episodes=4)


def draw(data, shape=(3, 4, 5)):
  return data.episodes(np.random.default_rng(1), shape)


@pytest.mark.parametrize("data", [DiscretePairs(4), RotatedPairs(angle=0.0)])
def test_the_other_direction_has_the_same_pairs_exchanged(data):
  other = dataclasses.replace(data, direction="b_to_a")
  for one, two in ((data.training(), other.training()), (draw(data), draw(other))):
    np.testing.assert_array_equal(one.x, two.y)
    np.testing.assert_array_equal(one.y, two.x)


def test_an_episode_changes_the_cause_and_keeps_the_effect_given_it():
  data = DiscretePairs(3, pairs=200_000)
  before, after = data.training(), draw(data, (2, 1000, 200))
  tables = []
  for cause, effect in ((before.x, before.y), *zip(after.x, after.y, strict=True)):
    counts = np.zeros((3, 3))
    np.add.at(counts, (cause.ravel(), effect.ravel()), 1)
    tables.append(counts)
  shares = [t.sum(axis=1) / t.sum() for t in tables]
  assert min(np.abs(one - shares[0]).max() for one in shares[1:]) > 0.05
  for table in tables[1:]:
    rows = np.minimum(table.sum(axis=1), tables[0].sum(axis=1))[:, None]
    gap = table / table.sum(axis=1, keepdims=True)
    gap = gap - tables[0] / tables[0].sum(axis=1, keepdims=True)
    assert np.all(np.abs(gap) < 5 * np.sqrt(0.5 / rows))  # five standard errors


@pytest.mark.parametrize("function", ["cubic", "linear"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cause_and_effect_are_standardised_in_training(function, seed):
  found = RotatedPairs(function, angle=0.0, pairs=100_000, seed=seed).training()
  for column in found:
    np.testing.assert_allclose([np.mean(column), np.std(column)], [0, 1], atol=0.05)


def test_what_is_observed_is_turned_by_the_angle():
  plain, turned = RotatedPairs(angle=0.0), RotatedPairs(angle=30.0)
  points = jnp.stack([jnp.asarray(c) for c in plain.training()], axis=-1)
  wanted = rotation(points, jnp.deg2rad(30.0))
  np.testing.assert_allclose(np.stack(turned.training(), axis=-1), wanted, atol=1e-5)
  assert RotatedPairs(seed=1).degrees() != RotatedPairs(seed=2).degrees()


@pytest.mark.parametrize(
  ("direction", "degrees", "a_to_b", "error"),
  [
    ("a_to_b", 20.0, True, 0),
    ("a_to_b", 200.0, True, 0),
    ("a_to_b", 113.0, False, 3),
    ("a_to_b", 20.0, False, -90),
    ("b_to_a", 18.0, False, -2),
    ("b_to_a", -70.0, True, 0),
  ],
)
def test_an_angle_is_right_with_its_direction_or_a_right_angle_further_with_the_other(
  direction, degrees, a_to_b, error
):
  data = RotatedPairs(direction=direction, angle=20.0)
  assert angle_error(data, degrees, a_to_b) == pytest.approx(error)


def test_a_valid_angle_gives_back_the_cause_in_either_place():
  data = RotatedPairs(angle=20.0)
  cause = RotatedPairs(angle=0.0).training().x
  points = jnp.stack([jnp.asarray(c) for c in data.training()], axis=-1)
  for degrees, place in ((20.0, 0), (110.0, 1), (200.0, 0)):
    encoded = np.asarray(rotation(points, -jnp.deg2rad(degrees)))[:, place]
    assert abs(np.corrcoef(encoded, cause)[0, 1]) == pytest.approx(1, abs=1e-5)


def value(task, params, batch):
  terms, _, metrics = task.loss(params, (), batch, CONTEXT)
  return losses.objective(terms), metrics


def test_rows_that_fill_up_a_batch_do_not_count():
  task = DISCRETE.build(CausalDirectionConfig(start_gamma=0.5))
  params = task.model.init(jax.random.key(0))
  whole, filled = (task.dataset.batch(np.random.default_rng(2), 4, rows) for rows in (4, 8))
  assert list(filled["index"]) == [0, 1, 2, 3, -1, -1, -1, -1]
  np.testing.assert_allclose(
    value(task, params, whole)[0], value(task, params, filled)[0], rtol=1e-6
  )


def test_the_same_number_gives_the_same_batch_and_processes_share_it():
  dataset = DISCRETE.build(CausalDirectionConfig()).dataset
  whole, _ = dataset.train_batches(seed=3, multiple=2)
  halves = [dataset.train_batches(seed=3, multiple=2, process=i, processes=2)[0] for i in range(2)]
  for _ in range(2):
    batch, parts = next(whole), [next(half) for half in halves]
    for name, column in batch.items():
      np.testing.assert_array_equal(column, np.concatenate([part[name] for part in parts]))
  other, _ = dataset.train_batches(seed=4, multiple=2)
  assert np.any(next(other)["x"] != next(dataset.train_batches(seed=3, multiple=2)[0])["x"])
  for iterator in (whole, other, *halves):
    getattr(iterator, "close", lambda: None)()


def test_before_a_step_tables_of_both_directions_are_equally_likely_and_leave_gamma_alone():
  config = dataclasses.replace(DISCRETE, steps=1, samples=7)
  task = config.build(CausalDirectionConfig(start_gamma=0.3))
  params = task.model.init(jax.random.key(0))
  batch = next(iter(task.dataset.eval_batches("valid")))
  slope = jax.grad(lambda p: value(task, p, batch)[0])(params)["gamma"]
  assert abs(float(slope)) < 1e-5


@pytest.mark.parametrize("variant", ["", *variants("configs/meta_transfer.py")])
def test_every_variant_of_the_configuration_has_the_direction_of_its_name(variant):
  task = load_config(f"configs/meta_transfer.py:{variant}").task
  wanted = "b_to_a" if variant.endswith("b_to_a") else "a_to_b"
  assert task.data.direction == wanted
  assert isinstance(task.data, RotatedPairs) == variant.startswith("rotation")


MISTAKES = {
  r"task\.data\.values is 1; a variable has at least 2": lambda: DiscretePairs(1),
  r"task\.data\.direction is 'up'; it must be one of: a_to_b, b_to_a": lambda: DiscretePairs(
    direction="up"
  ),
  r"task\.data\.function is 'sine'": lambda: RotatedPairs("sine"),
  r"task\.data\.spread is 0; it must be positive": lambda: RotatedPairs(spread=0),
  r"task\.data\.change is -1; it must not be negative": lambda: RotatedPairs(change=-1),
  r"task\.data\.pairs is 3; models are fitted to at least 100": lambda: RotatedPairs(pairs=3),
  r"task\.data\.seed is -1": lambda: DiscretePairs(seed=-1),
  r"task\.steps is 0; it must be at least 1": lambda: MetaTransferConfig(steps=0),
  r"model\.encoder is 'net'": lambda: CausalDirectionConfig(encoder="net"),
  r"model\.cause_rate is -1; it must not be negative": lambda: CausalDirectionConfig(cause_rate=-1),
  r"model\.pseudocount is 0; it must be positive": lambda: CausalDirectionConfig(pseudocount=0),
  r"model\.centres is 1; it must be from 2 to 1000": lambda: CausalDirectionConfig(centres=1),
  r"model is a EncoderConfig, but the task needs a model of two directions": lambda: DISCRETE.build(
    EncoderConfig()
  ),
  r"model\.encoder is 'rotation', but .* cannot be turned": lambda: DISCRETE.build(
    CausalDirectionConfig("rotation")
  ),
  r"phases\.part is 'small', but episodes": lambda: DISCRETE.build(
    CausalDirectionConfig()
  ).dataset.train_batches(part="small", seed=0, multiple=1),
  r"split is 'tset'.*Did you mean 'test'": lambda: next(
    DISCRETE.build(CausalDirectionConfig()).dataset.eval_batches("tset")
  ),
  r"compares no causal directions": lambda: Direction().measure(types.SimpleNamespace(task=None)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_name_field_value_and_remedy(message):
  with pytest.raises(UserError, match=message):
    MISTAKES[message]()
