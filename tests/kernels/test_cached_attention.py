"""Attention to a cache in a kernel, against NumPy in double precision.

The kernel runs in Pallas' interpreter with blocks so small that keys need several; what of the
cache is not written yet is NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.core import sharding
from compmod_jax.core.intermediates import OFF
from compmod_jax.kernels.attention.cached import attend_to_cache, attend_to_cache_on_gpu
from compmod_jax.kernels.attention.definition import FAR
from compmod_jax.layers import kv_cache
from compmod_jax.layers.kv_cache import as_cache, attend_cached

in_kernel = functools.partial(attend_to_cache_on_gpu, interpret=True, block=16)


def numbers(*shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn(batch, queries, heads, width, keys, filled, seed=0):
  """Queries, and a cache whose last keys are not written."""
  key = numbers(batch, heads, width, keys, seed=seed + 1)
  value = numbers(batch, heads, keys, width, seed=seed + 2)
  key[..., filled:], value[:, :, filled:] = np.nan, np.nan
  return numbers(batch, queries, heads, width, seed=seed), key, value


def expected(query, key, value, bias, filled):
  query, key, value, bias = (np.asarray(one, np.float64) for one in (query, key, value, bias))
  bias = np.broadcast_to(bias, (len(query), query.shape[2], query.shape[1], key.shape[-1]))
  made = np.zeros(query.shape)
  for b, q, h in np.ndindex(query.shape[:3]):
    logits = query[b, q, h] @ key[b, h, :, :filled] / np.sqrt(query.shape[-1])
    logits = logits + bias[b, h, q, :filled]
    weights = np.exp(logits - logits.max())
    made[b, q, h] = weights / weights.sum() @ value[b, h, :filled]
  return made


@settings(max_examples=30, deadline=None)
@given(
  sizes=st.tuples(*(st.integers(1, most) for most in (2, 5, 3))),
  width=st.sampled_from([4, 16, 24]),
  keys=st.integers(1, 70),
  part=st.floats(0, 1),
  shared=st.tuples(st.booleans(), st.booleans(), st.booleans()),
  parts=st.sampled_from([None, 1, 3]),
)
def test_heads_are_those_of_the_written_keys(sizes, width, keys, part, shared, parts):
  filled = max(1, round(part * keys))
  batch, queries, heads = sizes
  given_ = drawn(batch, queries, heads, width, keys, filled)
  outer = (1 if one else size for one, size in zip(shared, (batch, heads, queries), strict=True))
  bias = numbers(*outer, keys, seed=5)
  bias[np.random.default_rng(6).random(bias.shape) < 0.3] = FAR
  want = expected(*given_, bias, filled)
  for way in (attend_to_cache, functools.partial(in_kernel, parts=parts)):
    np.testing.assert_allclose(jax.jit(way)(*given_, bias, filled), want, rtol=2e-5, atol=2e-5)


def test_a_bfloat16_cache_gives_bfloat16_heads():
  query, key, value = (jnp.bfloat16(one) for one in drawn(2, 3, 2, 16, 40, 33))
  bias = np.zeros((1, 1, 1, 40), np.float32)
  found = jax.jit(in_kernel)(query, key, value, bias, 33)
  assert found.dtype == jnp.bfloat16
  want = expected(*(np.float32(one) for one in (query, key, value)), bias, 33)
  np.testing.assert_allclose(np.float32(found), want, atol=2e-2)


def test_gradients_are_those_of_the_definition():
  query, key, value = drawn(2, 3, 2, 8, 20, 20)
  bias = numbers(2, 2, 3, 20, seed=4)

  def gradients(way):
    def total(*args):
      return jnp.sum(jnp.sin(way(*args, 17)))

    return jax.jit(jax.grad(total, (0, 1, 2, 3)))(query, key, value, bias)

  for mine, theirs in zip(gradients(in_kernel), gradients(attend_to_cache), strict=True):
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_masks_and_biases_reach_the_kernel_on_one_device_and_on_several(biased, monkeypatch):
  batch, beams, heads, width, keys, filled = 4, 3, 2, 16, 40, 27
  key, value = (jnp.asarray(numbers(batch, keys, heads, width, seed=seed)) for seed in (1, 2))
  query, cache = jnp.asarray(numbers(batch, beams, heads, width, seed=0)), as_cache(key, value)
  mask = np.random.default_rng(3).random((batch, 1, beams, keys)) < 0.6
  mask[..., 0], mask[..., filled:] = True, False
  bias = jnp.asarray(numbers(1, heads, 1, keys, seed=4)) if biased else None

  def attend(query, cache):
    return attend_cached(query, cache, jnp.asarray(mask), bias=bias, filled=jnp.int32(filled))

  want = jax.jit(attend)(query, cache)
  monkeypatch.setattr(kv_cache, "kernel_for", lambda *_: "gpu")
  monkeypatch.setattr(kv_cache, "attend_to_cache_on_gpu", in_kernel)
  np.testing.assert_allclose(jax.jit(attend)(query, cache), want, atol=2e-6)
  mesh = sharding.make_mesh(sharding.MeshConfig(data=2, tensor=2), jax.devices()[:4])
  with jax.set_mesh(mesh):
    given_ = jax.device_put((query, cache), sharding.replicated(mesh))
    np.testing.assert_allclose(jax.jit(attend)(*given_), want, atol=2e-6)


@pytest.mark.parametrize("beams", [1, 4])
def test_a_program_for_a_gpu_attends_in_the_kernel_and_others_do_not(beams):
  shapes = [(2, beams, 3, 16), (2, 1, 3, 16, 64), (2, 1, 3, 64, 16)]
  query, key, value = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
  mask = jax.ShapeDtypeStruct((2, 1, beams, 64), jnp.bool_)

  def attend(query, key, value, mask, filled):
    cache = {"key": key, "value": value}
    return attend_cached(query, cache, mask, filled=filled, intermediates=OFF)

  def text(device):
    with sharding.tracing_for(DEVICES[device]):
      return str(jax.make_jaxpr(attend)(query, key, value, mask, jnp.int32(7)))

  assert "pallas_call" in text("cuda")
  assert "pallas_call" not in text("tpu")
  assert "pallas_call" not in str(jax.make_jaxpr(attend)(query, key, value, mask, jnp.int32(7)))
