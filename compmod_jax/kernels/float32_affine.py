r"""Products with a float32 matrix as float32 has them, of rows in bfloat16.

The matrix units of NVIDIA GPUs take no float32 operands. There rows meet the matrix's three
bfloat16 parts, whose sum it is:

.. math:: x W = x W_1 + x W_2 + x W_3, \qquad W_i = \mathrm{bf16}(W - \textstyle\sum_{j < i} W_j)

A kernel (`float32_affine_gpu`) adds up all of them, and a bias, in the same registers. As one
product of XLA with three times as many columns they are written, read and added, which moves three
times as many bytes where the matrix is narrow.
"""

import importlib

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from compmod_jax.core import sharding
from compmod_jax.core.linear import narrow_product, over_rows
from compmod_jax.core.sharding import platform_of

PARTS = 3


def float32_affine(
  inputs: Float[Array, "batch time inner"],
  kernel: Float[Array, "inner outer"],
  bias: Float[Array, " outer"],
) -> Float[Array, "batch time outer"]:
  """inputs @ kernel + bias as float32 has it, for a kernel with many more rows than columns.

  Products of its gradient are bfloat16 where it is made of parts, as those of other layers of such
  a model are. Elsewhere than on GPUs parts do not pay: TPUs would write more than they save, and
  CPUs take half as long again.
  """
  if inputs.dtype != jnp.bfloat16 or platform_of(inputs) not in ("cuda", "gpu"):
    return over_rows(
      lambda rows: narrow_product(rows.astype(jnp.float32), kernel) + bias[None], inputs
    )
  # A device has its own examples and times.
  return sharding.on_parts(
    lambda kernel, bias, inputs: over_rows(lambda rows: split_affine(rows, kernel, bias), inputs),
    [kernel, bias, inputs],
    [(None, None), (None,), ("batch", "time", None)],
  )


@jax.custom_vjp
def split_affine(
  rows: Float[Array, "rows inner"],
  kernel: Float[Array, "inner outer"],
  bias: Float[Array, " outer"],
) -> Float[Array, "rows outer"]:
  """rows @ kernel + bias by the kernel's parts. Reverse mode, any order."""
  # Its compiler is imported when first needed.
  on_gpu = importlib.import_module("compmod_jax.kernels.float32_affine_gpu").affine_of_parts
  args = rows, parts_of(kernel), bias
  return lax.platform_dependent(*args, default=affine_of_parts, cuda=on_gpu)


def parts_of(kernel: Float[Array, "inner outer"]) -> Float[Array, "inner three_outers"]:
  """Three matrices in bfloat16, side by side, whose sum is the kernel, the largest first."""
  parts, left = list[jax.Array](), kernel
  for _ in range(PARTS):
    # XLA may leave out a cast there and back, but not this.
    parts.append(lax.reduce_precision(left, exponent_bits=8, mantissa_bits=7))
    left = left - parts[-1]
  return jnp.concatenate(parts, axis=1).astype(jnp.bfloat16)


def affine_of_parts(
  rows: Float[Array, "rows inner"],
  parts: Float[Array, "inner three_outers"],
  bias: Float[Array, " outer"],
) -> Float[Array, "rows outer"]:
  """The sum of the products with all parts, and a bias, by XLA."""
  made = jnp.matmul(rows, parts, preferred_element_type=jnp.float32)
  first, second, third = jnp.split(made, PARTS, axis=1)
  return third + second + first + bias[None]


def _forward(
  rows: jax.Array, kernel: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return split_affine(rows, kernel, bias), (rows, kernel)


def _backward(
  kept: tuple[jax.Array, jax.Array], errors: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  rows, kernel = kept
  d_bias, errors = jnp.sum(errors, axis=0), errors.astype(rows.dtype)
  d_kernel = jnp.matmul(rows.T, errors, preferred_element_type=jnp.float32)
  return errors @ kernel.T.astype(rows.dtype), d_kernel.astype(kernel.dtype), d_bias


split_affine.defvjp(_forward, _backward)
