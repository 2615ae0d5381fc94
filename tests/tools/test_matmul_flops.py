"""Operations in matrix products, counted from the program as it was written."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from compmod_jax.core.sharding import MeshConfig, make_mesh
from compmod_jax.kernels import grouped
from compmod_jax.tools import matmul_flops

N, K, M = 6, 5, 7


def counted(function, *shapes, platform="tpu"):
  given = [s if hasattr(s, "dtype") else jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  return matmul_flops.count(jax.jit(function).trace(*given).jaxpr, platform)


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
