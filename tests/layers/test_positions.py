"""Rotary and relative positions, penalties on distances and labels against their definitions."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.kernels.attention.distances import DistanceBias
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import AttentionMask, Context, PositionIds
from compmod_jax.layers.positions import (
  PositionLabels,
  RelativePositions,
  alibi_bias,
  check_positions,
  label,
  random_labels,
  rotate,
)

BATCH, TIME, HEADS, WIDTH = 2, 5, 3, 8


def draw(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_rotation_multiplies_pairs_as_complex_numbers():
  x, ids = draw(BATCH, TIME, HEADS, WIDTH), np.array([[0, 1, 2, 7, 9], [3, 3, 0, 1, 30]])
  found = np.asarray(rotate(jnp.asarray(x), jnp.asarray(ids)))
  half = WIDTH // 2
  pairs = x[..., :half] + 1j * x[..., half:].astype(np.float64)
  angles = ids[..., None] * 10000.0 ** (-2 * np.arange(half) / WIDTH)
  expected = pairs * np.exp(1j * angles)[:, :, None]
  np.testing.assert_allclose(found[..., :half], expected.real, atol=2e-5)
  np.testing.assert_allclose(found[..., half:], expected.imag, atol=2e-5)


def test_products_of_rotated_queries_and_keys_depend_on_differences_of_places_alone():
  query, key = (jnp.asarray(draw(1, TIME, HEADS, WIDTH, seed=seed)) for seed in (1, 2))
  ids = jnp.arange(TIME)[None]

  def products(shift: int) -> jax.Array:
    return jnp.einsum("bthd,bshd->bhts", rotate(query, ids + shift), rotate(key, ids + shift))

  np.testing.assert_allclose(products(0), products(11), atol=1e-4)
  assert np.abs(products(0) - jnp.einsum("bthd,bshd->bhts", query, key)).max() > 0.1


def test_relative_positions_are_those_of_the_equation():
  dim = HEADS * WIDTH
  module = RelativePositions(dim, HEADS)
  query, key = draw(BATCH, TIME, HEADS, WIDTH), draw(BATCH, TIME, HEADS, WIDTH, seed=1)
  of_queries, of_keys = np.array([[0, 1, 2, 3, 4], [4, 2, 0, 1, 3]]), np.arange(TIME)[None]
  ids = PositionIds(jnp.asarray(of_queries), jnp.asarray(of_keys), TIME)
  shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), jnp.asarray(query), ids))
  params = {name: draw(*leaf.shape, seed=3) for name, leaf in shapes["params"].items()}
  moved, logits = module.apply({"params": params}, jnp.asarray(query), ids)
  found = np.einsum("bthd,bshd->bhts", moved, key) / np.sqrt(WIDTH) + np.asarray(logits)

  rates = 10000.0 ** (-np.arange(0, dim, 2) / dim)
  for b, h, t, s in np.ndindex(BATCH, HEADS, TIME, TIME):
    distance = of_queries[b, t] - of_keys[0, s]
    sinusoid = np.concatenate([np.sin(distance * rates), np.cos(distance * rates)])
    of_distance = sinusoid @ params["kernel"][:, h]
    content = (query[b, t, h] + params["content"][h]) @ key[b, s, h]
    expected = content + (query[b, t, h] + params["distance"][h]) @ of_distance
    np.testing.assert_allclose(found[b, h, t, s], expected / np.sqrt(WIDTH), atol=2e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("time", [1, 2, TIME])
def test_relative_positions_of_one_after_the_other_need_no_numbers(time, causal):
  module = RelativePositions(HEADS * WIDTH, HEADS)
  query, key = (jnp.asarray(draw(BATCH, time, HEADS, WIDTH, seed=seed)) for seed in (0, 1))
  params, ids = jax.device_put(drawn(module.init, query)), jnp.arange(time)[None]
  read = np.tril(np.ones((1, 1, time, time), bool)) if causal else True

  def logits(params, query, position_ids):
    moved, distances = module.apply(params, query, position_ids, causal=causal)
    found = jnp.einsum("bthd,bshd->bhts", moved, key) + distances
    return jnp.where(read, found, 0)

  (found, pull), (expected, their_pull) = (
    jax.vjp(lambda params, query, given=given: logits(params, query, given), params, query)
    for given in (None, PositionIds(ids, ids, time))
  )
  chex.assert_trees_all_close(found, expected, atol=1e-6)
  errors = jnp.asarray(draw(*found.shape, seed=2))
  chex.assert_trees_all_close(pull(errors), their_pull(errors), atol=1e-5)


@pytest.mark.parametrize("heads", [8, 3])
def test_the_penalty_of_a_head_is_its_slope_times_the_distance(heads):
  of_queries, of_keys = np.array([[0, 1, 2, 9], [4, 2, 0, 1]]), np.arange(TIME)[None]
  ids = PositionIds(jnp.asarray(of_queries), jnp.asarray(of_keys), 10)
  found = np.asarray(alibi_bias(heads, TIME, ids))
  assert found.shape == (2, heads, 4, TIME)
  for b, h, t, s in np.ndindex(found.shape):
    expected = -(2.0 ** (-8 * (h + 1) / heads)) * abs(int(of_queries[b, t]) - int(of_keys[0, s]))
    np.testing.assert_allclose(found[b, h, t, s], expected, rtol=1e-6)


def test_penalties_are_one_number_a_distance_where_positions_count_from_0():
  found, ids = alibi_bias(HEADS, TIME), jnp.arange(TIME)[None]
  assert isinstance(found, DistanceBias)
  assert found.numbers.shape == (HEADS, 2 * TIME - 1)
  every = alibi_bias(HEADS, TIME, PositionIds(ids, ids, TIME))
  np.testing.assert_array_equal(found.dense(), every)


def test_attention_adds_the_penalty_to_the_logits():
  module = Attention(HEADS * WIDTH, HEADS, positions="alibi")
  plain = Attention(HEADS * WIDTH, HEADS)
  x, ids = jnp.asarray(draw(BATCH, TIME, HEADS * WIDTH)), jnp.arange(TIME)[None]
  params = jax.device_put(drawn(module.init, x))
  found, _ = module.apply(params, x, ctx=Context())
  bias = alibi_bias(HEADS, TIME, PositionIds(ids, ids, TIME))
  expected, _ = plain.apply(params, x, bias=bias, ctx=Context())
  np.testing.assert_array_equal(found, expected)


def test_random_labels_are_a_sorted_subset_for_every_sequence():
  lengths, labels = np.array([6, 1, 4, 6]), 9
  real = jnp.asarray(np.arange(6)[None] < lengths[:, None])
  draws = jax.jit(jax.vmap(lambda key: random_labels(key, real, labels)))
  found = np.asarray(draws(jax.random.split(jax.random.key(0), 500)))
  for row, length in enumerate(lengths):
    mine = found[:, row, :length]
    assert (np.diff(mine, axis=1) > 0).all()
    # Of 9 labels each is drawn equally often; its standard deviation is below 0.5 / sqrt(500).
    shares = np.bincount(mine.reshape(-1), minlength=labels) / len(found)
    np.testing.assert_allclose(shares, length / labels, atol=0.09)
  assert (found.min(), found.max()) == (0, labels - 1)
  assert (found[:, 1, 1:] == labels - 1).all()  # padding


def test_labels_are_random_in_training_and_evenly_spread_elsewhere():
  module = PositionLabels(labels=10, most=4)
  real = jnp.ones((2, 3), bool)
  np.testing.assert_array_equal(module.apply({}, real), [[0, 2, 5]])
  given = jnp.asarray([[0, 1, 0], [0, 0, 1]])
  np.testing.assert_array_equal(module.apply({}, real, given), [[0, 2, 0], [0, 0, 2]])

  def labels(seed: int, numbers: jax.Array | None = None) -> np.ndarray:
    rngs = {"dropout": jax.random.key(seed)}
    return np.asarray(module.apply({}, real, numbers, deterministic=False, rngs=rngs))

  assert not np.array_equal(labels(0), labels(1))
  np.testing.assert_array_equal(labels(0, given), np.take_along_axis(labels(0), given, axis=1))
  np.testing.assert_array_equal(label(jnp.arange(3), 0, 4), [0, 1, 2])


@pytest.mark.parametrize("positions", ["rotary", "relative", "alibi"])
def test_attention_does_not_change_when_all_places_move(positions):
  module = Attention(HEADS * WIDTH, HEADS, positions=positions)
  x = jnp.asarray(draw(BATCH, TIME, HEADS * WIDTH))

  def at(shift: int) -> Context:
    ids = jnp.arange(TIME)[None] + shift
    return Context(mask=AttentionMask(causal=True), position_ids=PositionIds(ids, ids, TIME))

  params = nn.unbox(module.init(jax.random.key(0), x, ctx=at(0)))
  (here, _), (there, _) = (module.apply(params, x, ctx=at(shift)) for shift in (0, 13))
  np.testing.assert_allclose(here, there, atol=1e-5)
  turned, _ = module.apply(params, x[:, ::-1], ctx=at(0))
  assert np.abs(turned[:, ::-1] - here).max() > 1e-2


@pytest.mark.parametrize("positions", ["rotary", "relative", "alibi"])
def test_positions_that_are_not_given_count_from_zero(positions):
  module = Attention(HEADS * WIDTH, HEADS, positions=positions)
  x, ids = jnp.asarray(draw(BATCH, TIME, HEADS * WIDTH)), jnp.arange(TIME)[None]
  params = nn.unbox(module.init(jax.random.key(0), x))
  given, _ = module.apply(params, x, ctx=Context(position_ids=PositionIds(ids, ids, TIME)))
  found, _ = module.apply(params, x)
  np.testing.assert_array_equal(found, given)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    (("relativ", 8, 2), "model.positions"),
    (("rotary", 12, 4), "heads are 3 wide"),
    (("relative", 9, 3), "need an even width"),
  ],
)
def test_positions_that_do_not_fit_are_refused(fields, words):
  with pytest.raises(UserError, match=words):
    check_positions(*fields)
