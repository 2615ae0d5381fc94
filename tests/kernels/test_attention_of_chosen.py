"""Attention that leaves out queries without a weight, beside the definition of all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.kernels.attention import (
  Tiles,
  Visibility,
  attention_of_chosen,
  flash_attention,
)
from compmod_jax.kernels.attention.chosen import chosen_first

BATCH, QUERIES, KEYS, HEADS, DIM = 2, 256, 70, 3, 16
WAYS: dict[str, dict[str, Any]] = {
  "definition": {"implementation": "reference"},
  "blocks": {"in_blocks": True},
  "gpu": {
    "implementation": "gpu",
    "interpret": True,
    "tiles": Tiles(forward=(64, 32), backward=(64, 64)),
  },
  "tpu": {"implementation": "tpu", "interpret": True, "tiles": Tiles(tpu=(64, 128))},
}


def numbers(*shape: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def given(keys: int = KEYS) -> tuple[np.ndarray, ...]:
  """Queries, keys, values and weights: the first head has half of them, the last one none."""
  weights = np.abs(numbers(BATCH, QUERIES, HEADS, seed=4)) + 0.1
  chosen = np.zeros(weights.shape, bool)
  for example in range(BATCH):
    places = np.random.default_rng(example).permutation(QUERIES)
    chosen[example, places[: QUERIES // 2], 0] = True
    chosen[example, places[:100], 1] = True
  rows = ((QUERIES, 1), (keys, 2), (keys, 3))
  return *(numbers(BATCH, time, HEADS, DIM, seed=n) for time, n in rows), weights * chosen


def test_queries_with_a_weight_come_first_in_order():
  weights = np.array([[[0, 2.0], [1.0, 0], [0, 0], [3.0, 4.0]]], np.float32)
  order, counts = chosen_first(jnp.asarray(weights))
  np.testing.assert_array_equal(order[0].T, [[1, 3, 0, 2], [0, 3, 1, 2]])
  np.testing.assert_array_equal(counts, [[2, 2]])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["no key", "keys of each", "keys of all"])
@pytest.mark.parametrize("way", WAYS)
def test_heads_and_gradients_are_those_of_all_queries(way, masked, causal):
  keys = QUERIES if causal else KEYS
  args, slope = given(keys), numbers(BATCH, QUERIES, HEADS, DIM, seed=5)
  lengths = {"no key": None, "keys of each": [[50], [keys]], "keys of all": [[44]]}[masked]
  read = None if lengths is None else jnp.asarray(np.arange(keys) < np.array(lengths))

  def ours(query, key, value, weights):
    return attention_of_chosen(query, key, value, weights, read, causal=causal, **WAYS[way])

  def true(query, key, value, weights):
    seen = Visibility(causal, key_ids=None if read is None else jnp.where(read, 0, -1))
    how = {"visibility": seen, "implementation": "reference"}
    return flash_attention(query, key, value, weights=weights, **how)

  @jax.jit
  def both(*args):
    pulled = [jax.vjp(function, *args) for function in (ours, true)]
    return [(heads, *pull(slope)) for heads, pull in pulled]

  found, expected = jax.device_get(both(*args))
  *mine, of_weights = found
  for one, other in zip(mine, expected, strict=False):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * np.abs(other).max())
  chosen = args[3] > 0
  np.testing.assert_allclose(of_weights[chosen], expected[4][chosen], rtol=1e-4, atol=1e-4)
  assert not of_weights[~chosen].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "definition"])
def test_blocks_of_queries_without_a_weight_are_not_computed(way, causal):
  """They are NaN here, and what is computed of them would be."""
  query, key, value, weights = given(QUERIES if causal else KEYS)
  chosen = weights[..., 0] > 0  # of as many queries as fill blocks
  query, key, value, weights = (one[:, :, :1] for one in (query, key, value, weights))
  query = np.where(chosen[..., None, None], query, np.nan)

  @jax.jit
  def both(*args):
    options = {"causal": causal, **WAYS[way]}
    heads, pull = jax.vjp(lambda *args: attention_of_chosen(*args, **options), *args)
    return heads, pull(heads)

  made = jax.device_get(both(query, key, value, weights))
  assert all(np.isfinite(one).all() for one in jax.tree.leaves(made))
  assert made[0][chosen].any()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "definition"])
def test_keys_behind_all_chosen_queries_are_not_read(way):
  """In causal attention: they are NaN here, and so would be a product with them."""
  query, key, value, weights = given(QUERIES)
  weights = np.where(np.arange(QUERIES)[None, :, None] < QUERIES // 2 - 1, weights, 0)
  key[:, QUERIES // 2 :] = value[:, QUERIES // 2 :] = np.nan
  weights = weights[:, :, :2]

  @jax.jit
  def both(*args):
    options = {"causal": True, **WAYS[way]}
    heads, pull = jax.vjp(lambda *args: attention_of_chosen(*args, **options), *args)
    return heads, pull(jnp.where(weights[..., None] > 0, heads, 0))

  made = jax.device_get(both(query[:, :, :2], key[:, :, :2], value[:, :, :2], weights))
  chosen = weights > 0
  assert np.isfinite(made[0][chosen]).all()
  assert np.isfinite(made[1][0][chosen]).all()
