"""Rows in half precision times a matrix in full precision."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES

from compmod_jax.core import sharding
from compmod_jax.kernels import float32_affine as module
from compmod_jax.kernels import float32_affine_gpu
from compmod_jax.kernels.float32_affine import (
  affine_of_parts,
  float32_affine,
  parts_of,
  split_affine,
)

WAYS = {
  "XLA": affine_of_parts,
  "kernel": functools.partial(float32_affine_gpu.affine_of_parts, interpret=True),
}


def case(rows: int, inner: int, outer: int) -> tuple[jax.Array, jax.Array]:
  keys = jax.random.split(jax.random.key(rows))
  left, kernel = (
    jax.random.normal(keys[0], (rows, inner)),
    jax.random.normal(keys[1], (inner, outer)),
  )
  return left.astype(jnp.bfloat16), kernel


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
  ("rows", "inner", "outer"), [(64, 128, 16), (70, 300, 8), (3, 20, 150), (128, 64, 256)]
)
def test_it_is_as_near_to_double_precision_as_float32_is(way, rows, inner, outer):
  """Where blocks are filled, and where not; a kernel in half precision is 500 times as far."""
  left, kernel = case(rows, inner, outer)
  bias = jax.random.normal(jax.random.key(9), (outer,))
  exact = np.asarray(left, np.float64) @ np.asarray(kernel, np.float64) + np.asarray(bias)

  def far(found):
    return np.abs(np.asarray(found, np.float64) - exact).max()

  program = jax.jit(lambda left, kernel, bias: WAYS[way](left, parts_of(kernel), bias))
  found = program(left, kernel, bias)
  assert found.dtype == jnp.float32
  assert far(found) < 2e-5
  rounded = kernel.astype(jnp.bfloat16).astype(np.float32)
  assert far(left.astype(np.float32) @ rounded + bias[None]) > 5e-3


@pytest.mark.parametrize(("platform", "split"), [(None, False), ("tpu", False), ("cuda", True)])
def test_a_kernel_is_split_where_that_saves_products(platform, split):
  left, kernel = case(4, 9, 2)
  rows = left.reshape(2, 2, 9)
  with sharding.tracing_for(DEVICES[platform]) if platform else contextlib.nullcontext():
    traced = jax.jit(float32_affine).trace(rows, kernel, jnp.ones(2))
    text = traced.lower(lowering_platforms=(platform or "cpu",)).as_text()
  assert ("Precision.HIGHEST" in str(traced.jaxpr)) == (not split)
  assert ('name = "_multiply"' in text) == split


def test_every_device_has_its_rows(monkeypatch):
  """As if these devices were GPUs."""
  monkeypatch.setattr(module, "platform_of", lambda array: "cuda")
  left, kernel = case(8, 24, 6)
  rows, program = left.reshape(4, 2, 24), jax.jit(float32_affine)
  alone = program(rows, kernel, jnp.ones(6))
  mesh = sharding.make_mesh(sharding.MeshConfig(data=4, tensor=2), jax.devices())
  with jax.set_mesh(mesh):
    placed = jax.device_put(rows, sharding.batch_sharding(mesh))
    found = program(placed, kernel, jnp.ones(6))
    made = str(jax.make_jaxpr(float32_affine)(placed, kernel, jnp.ones(6)))
  assert "shard_map" in made
  assert "bf16[2,24]" in made
  np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6)


def test_gradients_are_in_the_type_of_the_rows():
  rows, kernel = case(6, 9, 2)

  def total(function):
    return lambda *args: jnp.sum(jnp.sin(function(*args)))

  def plain(rows, kernel, bias):
    return rows @ kernel + bias[None]

  bias = jnp.array([0.5, -1.0])
  found = jax.grad(total(split_affine), (0, 1, 2))(rows, kernel, bias)
  assert [one.dtype for one in found] == [jnp.bfloat16, jnp.float32, jnp.float32]
  expected = jax.grad(total(plain), (0, 1, 2))(rows.astype(jnp.float32), kernel, bias)
  chex.assert_trees_all_close(jax.tree.map(jnp.float32, found), expected, rtol=2e-2, atol=1e-2)
