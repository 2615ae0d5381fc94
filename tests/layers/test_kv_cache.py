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


def draw(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


QUERY = draw(BATCH, BEAMS, HEADS, DIM)
KEY, VALUE = draw(BATCH, KEYS, HEADS, DIM, seed=1), draw(BATCH, KEYS, HEADS, DIM, seed=2)
LAST = np.array([[2, 6], [0, 3], [5, 5]])
MASK = jnp.asarray(np.arange(KEYS) <= LAST[:, None, :, None])


def attended(query, key, value, mask=MASK, **options):
  return attend_cached(query, as_cache(key, value), mask, **options)


def library(query, key, value, mask=MASK):
  return jax.nn.dot_product_attention(query, key, value, mask=mask)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_it_equals_the_library_s_attention(dtype, tolerance):
  given = [x.astype(jnp.dtype(dtype)) for x in (QUERY, KEY, VALUE)]
  found, expected = (np.asarray(jax.jit(f)(*given)) for f in (attended, library))
  assert found.dtype == dtype
  chex.assert_trees_all_close(found.astype(np.float32), expected.astype(np.float32), atol=tolerance)


def test_gradients_equal_those_of_the_library_s_attention():
  def gradients(function):
    total = lambda *args: jnp.sum(jnp.sin(function(*args)))  # noqa: E731
    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(QUERY, KEY, VALUE)

  found, expected = gradients(attended), gradients(library)
  chex.assert_trees_all_close(found, expected, atol=1e-6)


def test_a_cache_filled_piece_by_piece_holds_what_one_made_at_once_holds():
  @jax.jit
  def filled(key, value):
    cache = empty_cache(BATCH, KEYS, HEADS, DIM)
    for start, end in ((0, 2), (2, 3), (3, KEYS)):
      new = as_cache(key[:, start:end], value[:, start:end])
      cache = add_to_cache(cache, new, jnp.int32(start))
    return cache

  chex.assert_trees_all_equal(filled(KEY, VALUE), jax.jit(as_cache)(KEY, VALUE))


def test_both_ways_to_multiply_agree_in_value_and_gradient():
  left, right = draw(BATCH, HEADS, BEAMS, DIM), draw(BATCH, HEADS, DIM, KEYS)

  def total(product):
    value = lambda a, b: jnp.sum(jnp.sin(product(a, b)))  # noqa: E731
    return jax.jit(jax.value_and_grad(value, (0, 1)))(left, right)

  chex.assert_trees_all_close(total(as_sum), total(as_product), rtol=1e-5, atol=1e-5)


def test_probabilities_are_a_site_that_can_be_read_and_changed():
  @jax.jit
  def read_and_changed(*given):
    read = Intermediates(capture=frozenset({"attention"}))
    attended(*given, intermediates=read)
    silent = Intermediates(edits={"attention": jnp.zeros_like})
    return read.captured["attention"], attended(*given, intermediates=silent)

  found, silenced = jax.device_get(read_and_changed(QUERY, KEY, VALUE))
  assert found.shape == (BATCH, HEADS, BEAMS, KEYS)
  np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)
  assert not np.where(np.asarray(MASK), 0, found).any()
  assert not silenced.any()


@pytest.mark.parametrize("batch", [2, 20])
def test_one_beam_attends_as_jax_does(batch):
  random = np.random.default_rng(3)
  query, key, value = (
    random.normal(size=(batch, time, 2, 4)).astype(np.float32) for time in (1, 9, 9)
  )
  mask = random.random((batch, 1, 1, 9)) < 0.7
  mask[..., 0] = True
  found = jax.jit(attended)(query, key, value, mask, filled=np.int32(9))
  expected = jax.jit(library)(query, key, value, mask)
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
