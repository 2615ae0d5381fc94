"""Attention over cached keys and values equals attention over a sequence."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.intermediates import Intermediates
from compmod_jax.layers.kv_cache import (
  add_to_cache,
  as_cache,
  as_product,
  as_sum,
  attend_cached,
  empty_cache,
)

BATCH, BEAMS, HEADS, KEYS, DIM = 3, 2, 4, 7, 5


def draw(*shape, seed=0, dtype=jnp.float32):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


QUERY = draw(BATCH, BEAMS, HEADS, DIM)
KEY, VALUE = draw(BATCH, KEYS, HEADS, DIM, seed=1), draw(BATCH, KEYS, HEADS, DIM, seed=2)
MASK = jnp.arange(KEYS)[None, None, None] <= jnp.array([[2, 6], [0, 3], [5, 5]])[:, None, :, None]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_it_equals_the_library_s_attention(dtype, tolerance):
  query, key, value = (x.astype(dtype) for x in (QUERY, KEY, VALUE))
  found = attend_cached(query, as_cache(key, value), MASK)
  expected = jax.nn.dot_product_attention(query, key, value, mask=MASK)
  assert found.dtype == dtype
  chex.assert_trees_all_close(
    found.astype(jnp.float32), expected.astype(jnp.float32), atol=tolerance
  )


def test_gradients_equal_those_of_the_library_s_attention():
  def ours(query, key, value):
    return jnp.sum(jnp.sin(attend_cached(query, as_cache(key, value), MASK)))

  def library(query, key, value):
    return jnp.sum(jnp.sin(jax.nn.dot_product_attention(query, key, value, mask=MASK)))

  found, expected = (jax.grad(f, argnums=(0, 1, 2))(QUERY, KEY, VALUE) for f in (ours, library))
  chex.assert_trees_all_close(found, expected, atol=1e-6)


def test_a_cache_filled_piece_by_piece_holds_what_one_made_at_once_holds():
  cache = empty_cache(BATCH, KEYS, HEADS, DIM)
  for start, end in ((0, 2), (2, 3), (3, KEYS)):
    cache = add_to_cache(cache, as_cache(KEY[:, start:end], VALUE[:, start:end]), jnp.int32(start))
  chex.assert_trees_all_equal(cache, as_cache(KEY, VALUE))


def test_both_ways_to_multiply_agree_in_value_and_gradient():
  left, right = draw(BATCH, HEADS, BEAMS, DIM), draw(BATCH, HEADS, DIM, KEYS)

  def total(product):
    return jax.value_and_grad(lambda a, b: jnp.sum(jnp.sin(product(a, b))), (0, 1))(left, right)

  chex.assert_trees_all_close(total(as_sum), total(as_product), rtol=1e-5, atol=1e-5)


def test_probabilities_are_a_site_that_can_be_read_and_changed():
  intermediates = Intermediates(capture=frozenset({"attention"}))
  attend_cached(QUERY, as_cache(KEY, VALUE), MASK, intermediates=intermediates)
  found = intermediates.captured["attention"]
  assert found.shape == (BATCH, HEADS, BEAMS, KEYS)
  np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)
  assert not jnp.any(jnp.where(MASK, 0, found))
  silent = Intermediates(edits={"attention": jnp.zeros_like})
  assert not attend_cached(QUERY, as_cache(KEY, VALUE), MASK, intermediates=silent).any()


@pytest.mark.parametrize("batch", [2, 20])
def test_one_beam_attends_as_jax_does(batch):
  random = np.random.default_rng(3)
  query, key, value = (
    jnp.asarray(random.normal(size=(batch, time, 2, 4)), jnp.float32) for time in (1, 9, 9)
  )
  mask = jnp.asarray(random.random((batch, 1, 1, 9)) < 0.7).at[..., 0].set(True)
  found = attend_cached(query, as_cache(key, value), mask, filled=jnp.int32(9))
  expected = jax.nn.dot_product_attention(query, key, value, mask=mask)
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
