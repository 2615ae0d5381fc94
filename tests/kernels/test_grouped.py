"""Products of rows with their group's matrix, whatever the sizes of the groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.core import sharding
from compmod_jax.kernels import grouped, grouped_outer

ROWS, INNER, OUTER, GROUPS = 23, 5, 6, 4
STATIC = ("axis", "transposed", "implementation", "block")
product = jax.jit(grouped.product, static_argnames=STATIC)
outer = jax.jit(grouped.outer, static_argnames=("axis", "implementation", "block"))

# Any sizes that fit; the examples are what a router may do at worst.
sizes_of_groups = st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS).map(
  lambda sizes: [min(size, max(0, ROWS - sum(sizes[:i]))) for i, size in enumerate(sizes)]
)
WORST = ([ROWS, 0, 0, 0], [0, 0, 0, ROWS], [0, 0, 0, 0], [5, 0, 18, 0], [6, 6, 6, 5], [1, 2, 3, 4])
few = settings(max_examples=20, deadline=None, derandomize=True)
WAYS = ("blocked", "batched", "ragged")
each_way = pytest.mark.parametrize("implementation", WAYS)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


ROWS_IN, KERNELS, ROWS_OUT = (
  numbers(ROWS, INNER),
  numbers(GROUPS, INNER, OUTER),
  numbers(ROWS, OUTER),
)


def loop(rows: np.ndarray, kernels: np.ndarray, sizes: list[int]) -> np.ndarray:
  made = np.zeros((len(rows), kernels.shape[-1]))
  for n, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
    made[n] = rows[n].astype(np.float64) @ kernels[group]
  return made


def outer_loop(left: np.ndarray, right: np.ndarray, sizes: list[int]) -> np.ndarray:
  made = np.zeros((len(sizes), left.shape[1], right.shape[1]))
  for n, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
    made[group] += np.outer(left[n].astype(np.float64), right[n])
  return made


@each_way
@pytest.mark.parametrize("axis", [0, 1])
@few
@given(sizes=sizes_of_groups)
def test_every_row_meets_the_matrix_of_its_group_and_the_rest_are_zero(implementation, axis, sizes):
  for case in (sizes, *WORST):
    options = {"axis": axis, "implementation": implementation, "block": 4}
    kernels, count = np.moveaxis(KERNELS, 0, axis), jnp.asarray(case, jnp.int32)
    found = product(ROWS_IN, kernels, count, **options)
    np.testing.assert_allclose(found, loop(ROWS_IN, KERNELS, case), atol=1e-5)
    back = product(ROWS_OUT, kernels, count, transposed=True, **options)
    expected = loop(ROWS_OUT, np.swapaxes(KERNELS, 1, 2), case)
    np.testing.assert_allclose(back, expected, atol=1e-5)
    summed = outer(ROWS_IN, ROWS_OUT, count, **options)
    expected = np.moveaxis(outer_loop(ROWS_IN, ROWS_OUT, case), 0, axis)
    np.testing.assert_allclose(summed, expected, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found)[sum(case) :], 0)


@pytest.mark.parametrize("block", [1, 7, ROWS, 100])
def test_the_size_of_blocks_does_not_matter(block):
  for case in WORST:
    found = product(ROWS_IN, KERNELS, jnp.asarray(case, jnp.int32), block=block)
    np.testing.assert_allclose(found, loop(ROWS_IN, KERNELS, case), atol=1e-5)


@pytest.mark.parametrize("implementation", [*WAYS, "mosaic", "triton"])
def test_first_and_second_derivatives_are_those_of_a_product_with_every_matrix(implementation):
  sizes = jnp.asarray([3, 0, 11, 4], jnp.int32)
  member = np.zeros((ROWS, GROUPS), np.float32)
  member[np.arange(18), np.repeat(np.arange(GROUPS), sizes)] = 1

  def ours(rows, kernels):
    moved = jnp.moveaxis(kernels, 0, 1)
    made = grouped.product(rows, moved, sizes, axis=1, implementation=implementation, block=4)
    summed = grouped.outer(rows, made, sizes, axis=1, implementation=implementation, block=4)
    return jnp.sum(jnp.sin(made)) + jnp.sum(jnp.sin(summed))

  def theirs(rows, kernels):
    made = jnp.einsum("nd,ng,gdf->nf", rows, member, kernels)
    summed = jnp.einsum("nd,ng,nf->dgf", rows, member, made)
    return jnp.sum(jnp.sin(made)) + jnp.sum(jnp.sin(summed))

  def slope(function, rows, kernels):
    gradients = jax.grad(function, argnums=(0, 1))(rows, kernels)
    return sum(jnp.sum(jnp.cos(g)) for g in gradients), gradients

  def both(function):
    second, first = jax.grad(functools.partial(slope, function), argnums=(0, 1), has_aux=True)(
      0.3 * ROWS_IN, 0.3 * KERNELS
    )
    return first, second

  found, expected = jax.jit(lambda: both(ours))(), jax.jit(lambda: both(theirs))()
  for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, two, atol=2e-4)


def test_bfloat16_sums_over_blocks_in_float32():
  rows = jnp.ones((1024, 1), jnp.bfloat16)
  found = outer(rows, rows, jnp.asarray([1000], jnp.int32), block=1)
  assert found.dtype == jnp.bfloat16
  assert float(found[0, 0, 0]) == 1000  # in bfloat16, 256 + 1 is 256


# Six blocks of rows: groups that end at the end of one or inside, and some that share one.
MANY, KERNEL_WORST = (
  90,
  ([90, 0, 0, 0], [0, 16, 0, 33], [17, 1, 2, 70], [0, 0, 0, 0], [32, 0, 9, 41]),
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  "kernel",
  [
    functools.partial(grouped_outer.on_tpu, block=(16, 128, 128)),
    functools.partial(grouped_outer.on_gpu, side=16, chunk=16),
  ],
  ids=["tpu", "gpu"],
)
def test_kernels_sum_the_rows_of_each_group_alone_in_blocks_that_groups_share(kernel, dtype):
  left, right = (jnp.asarray(numbers(MANY, width), dtype) for width in (130, 20))
  run = jax.jit(functools.partial(kernel, interpret=True))
  for sizes in KERNEL_WORST:
    # What lies beyond the last group is never read: it may be anything.
    hole = (np.arange(MANY) >= sum(sizes))[:, None]
    made = run(*(jnp.where(hole, jnp.nan, x) for x in (left, right)), jnp.asarray(sizes, jnp.int32))
    assert made.dtype == dtype
    expected = outer_loop(np.asarray(left, np.float32), np.asarray(right, np.float32), sizes)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(
      np.asarray(made, np.float32), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
  ("platform", "ragged", "loops", "kernel"),
  [
    ("tpu", True, False, "tpu_custom_call"),
    ("cuda", False, False, "xla.gpu.triton"),
    ("cpu", False, True, None),
  ],
)
def test_the_platform_that_is_compiled_for_decides(platform, ragged, loops, kernel):
  def total(rows, kernels, sizes):
    made = grouped.product(rows, kernels, sizes)
    return jnp.sum(made) + jnp.sum(grouped.outer(rows, made, sizes))

  arrays = (ROWS_IN, KERNELS, np.zeros(GROUPS, np.int32))
  traced = jax.jit(jax.grad(total, argnums=(0, 1)))
  if platform == "cpu":
    text = traced.lower(*arrays).as_text()
  else:
    with sharding.tracing_for(DEVICES[platform]):
      text = traced.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
  assert ("ragged_dot" in text) == ragged
  assert ("stablehlo.while" in text) == loops
  assert [one for one in ("tpu_custom_call", "xla.gpu.triton") if one in text] == (
    [kernel] if kernel else []
  )
