"""Operations in matrix products, counted from the program as it was written."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import PartitionSpec

from compmod_jax.core import scopes
from compmod_jax.core.sharding import MeshConfig, make_mesh
from compmod_jax.kernels import grouped
from compmod_jax.mechanisms import dispatch
from compmod_jax.mechanisms.dispatch import ExpertWeights
from compmod_jax.tools import matmul_flops

N, K, M = 6, 5, 7


def counted(function, *shapes, platform="tpu", model=False):
  given = [s if hasattr(s, "dtype") else jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  return matmul_flops.count(jax.jit(function).trace(*given).jaxpr, platform, model=model)


def test_a_product_of_matrices_has_two_operations_for_each_pair_of_numbers():
  assert counted(jnp.matmul, (N, K), (K, M)) == 2 * N * K * M
  assert counted(lambda a, b: jnp.tanh(a @ b) + 1, (N, K), (K, M)) == 2 * N * K * M
  assert counted(lambda a, b: jnp.einsum("btf,bsf->bts", a, b), (3, N, K), (3, M, K)) == (
    2 * 3 * N * K * M
  )


def test_a_gradient_has_a_product_for_each_operand():
  def loss(a, b):
    return jnp.sum(jnp.tanh(a @ b))

  assert counted(jax.grad(loss, argnums=(0, 1)), (N, K), (K, M)) == 3 * 2 * N * K * M


def test_what_is_recomputed_counts_again():
  def loss(a, b):
    return jnp.sum(jnp.tanh(jnp.tanh(a @ b) @ b.T))

  stored = counted(jax.grad(loss), (N, K), (K, M))
  again = counted(jax.grad(jax.checkpoint(loss)), (N, K), (K, M))
  assert again - stored == 2 * 2 * N * K * M


def test_a_loop_counts_as_often_as_it_runs():
  def loss(a, b):
    return jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(h @ b), None), a, None, length=9)[0])

  assert counted(loss, (N, K), (K, K)) == 9 * 2 * N * K * K
  assert counted(jax.grad(loss), (N, K), (K, K)) == 2 * 9 * 2 * N * K * K


def test_every_device_of_a_mesh_counts():
  mesh = make_mesh(MeshConfig(data=4, fsdp=1, tensor=2))
  spec = PartitionSpec("data")
  mapped = jax.shard_map(
    jnp.matmul, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
  )
  # The rows are split over data; what lies whole along tensor is done twice.
  assert counted(mapped, (8 * N, K), (K, M)) == 2 * 2 * 8 * N * K * M


def test_of_branches_for_platforms_the_one_that_will_run_counts():
  def product(a, b):
    return jax.lax.platform_dependent(a, b, tpu=lambda a, b: a @ b, default=lambda a, b: a @ b @ b)

  assert counted(product, (N, K), (K, K)) == 2 * N * K * K
  assert counted(product, (N, K), (K, K), platform="cpu") == 2 * 2 * N * K * K


def test_rows_of_groups_cost_one_matrix_each():
  sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
  given = ((256, K), (4, K, M), sizes)
  assert counted(grouped.product, *given) == 2 * 256 * K * M

  def outer(left, right, sizes):
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    return jax.lax.ragged_dot_general(left, right, sizes, numbers)

  assert counted(outer, (256, K), (256, M), sizes) == 2 * 256 * K * M


def test_a_kernel_whose_grid_depends_on_data_counts_what_it_says_or_once():
  sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
  told = functools.partial(gmm, tiling=(128, 128, 128))
  assert counted(told, (256, 128), (4, 128, 256), sizes) == 2 * 256 * 128 * 256

  def square(ref, out):
    out[...] = ref[...] @ ref[...]

  def silent(x, n):
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return pl.pallas_call(square, grid=(3, n), out_shape=shape)(x)

  number = jax.ShapeDtypeStruct((), jnp.int32)
  assert counted(silent, (8, 8), number) == 3 * 2 * 8**3


def test_a_loop_that_runs_only_if_needed_counts_nothing():
  def repeat(x, n, scope):
    with jax.named_scope(scope):
      return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1]

  for scope, times in (("other", 1), (scopes.IF_NEEDED, 0)):
    run = functools.partial(repeat, scope=scope)
    assert counted(run, (K, K), jax.ShapeDtypeStruct((), jnp.int32)) == times * 2 * K**3


def test_experts_count_what_each_row_needs_and_neither_filling_nor_selection():
  batch, time, embed, experts, mlp, keep = 4, 24, 16, 8, 32, 2

  def total(weights, inputs, shares):
    active = shares > 0
    made = dispatch.sparse(inputs, shares, active, weights, jax.nn.relu, keep=keep)
    return jnp.sum(jnp.sin(made))

  shapes = (embed, experts, mlp), (experts, mlp), (experts, mlp, embed), (experts, embed)
  given = [
    ExpertWeights._make(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
    jax.ShapeDtypeStruct((batch, time, embed), jnp.float32),
    jax.ShapeDtypeStruct((batch, time, experts), jnp.float32),
  ]
  trained = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(*given).jaxpr
  rows = batch * time
  networks, biases = 2 * (2 * rows * keep * embed * mlp), 2 * rows * experts * embed
  assert matmul_flops.count(trained, model=True) == 3 * (networks + biases)
  # Biases of hidden units, and their gradient, by products with zeros and ones.
  selected = 2 * (2 * rows * keep * experts * mlp)
  assert matmul_flops.count(trained) == 3 * (networks + biases) + selected
