r"""The gradient of matrices of groups, in one kernel: :math:`W_g = \sum_{n \in g} x_n^\top y_n`.

Rows are sorted by group, as in `grouped`. A kernel keeps a block of a group's result on the chip
while it walks over blocks of that group's rows, and writes it once: operands and results are all
that goes through memory. What other groups have in a block of rows is masked, as is what lies
beyond the last group. A group without rows gets zeros.

- `on_tpu`: Pallas for TPUs. Blocks of rows that two groups share are visited by both; which block a
  step reads, and for which group, is computed beforehand and prefetched.
- `on_gpu`: Pallas Triton. A program walks over the rows of one group from its first to its last.

Both say how many operations their products have, each row once, however groups end in blocks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from compmod_jax.kernels.routing import triton
from compmod_jax.kernels.routing.blocks import dot

_BLOCK = 512, 512, 1024  # on a TPU: rows, and sides of the result; products outlast their reads
_MEMORY = 64 * 2**20  # of a TPU's vector memory, twice what blocks of float32 take
_SIDE, _CHUNK = 128, 32  # of a program's result on a GPU, and the rows that it reads at once


def _operations(left: jax.Array, right: jax.Array) -> int:
  return 2 * left.size * right.shape[1]


class _Steps(NamedTuple):
  """What a TPU does one after the other, for every block of the result.

  Attributes:
    group: of each step; those behind the last repeat it.
    block: of rows that each step reads.
    count: how many steps there are.
    ends: the row behind each group's last.
    sizes: rows of each group.
  """

  group: jax.Array
  block: jax.Array
  count: jax.Array
  ends: jax.Array
  sizes: jax.Array

  @classmethod
  def of(cls, sizes: jax.Array, blocks: int, block: int) -> "_Steps":
    """Steps for groups of these sizes: their blocks, or one if they have no rows."""
    groups = sizes.shape[0]
    ends = jnp.cumsum(sizes)
    first = (ends - sizes) // block
    used = jnp.where(sizes > 0, (ends - 1) // block - first + 1, 1)
    last = jnp.cumsum(used)
    # No sizes need more: groups share no block but one each with the next.
    number = jnp.minimum(jnp.arange(blocks + groups - 1), last[-1] - 1)
    group = jnp.sum(number[:, None] >= last[None], axis=1)
    place = jnp.minimum(first[group] + number - (last - used)[group], blocks - 1)
    integers = (one.astype(jnp.int32) for one in (group, place, last[-1:], ends, sizes))
    return cls(*integers)


def on_tpu(
  left: Float[Array, "rows inner"],
  right: Float[Array, "rows outer"],
  sizes: Int[Array, " groups"],
  *,
  interpret: bool = False,
  block: tuple[int, int, int] = _BLOCK,
) -> Float[Array, "groups inner outer"]:
  """Sum over each group's rows of their outer products, in float32.

  Args:
    left: rows sorted by group, float32 or bfloat16.
    right: rows in the same order.
    sizes: rows of each group.
    interpret: run without the hardware.
    block: rows of a block, a multiple of 16, and the sides of one of the result, of 128.
  """
  (many, inner), outer, groups = left.shape, right.shape[1], sizes.shape[0]
  rows, high, wide = map(min, block, (many, inner, outer))
  steps = _Steps.of(sizes, pl.cdiv(many, rows), rows)
  grid = pl.cdiv(inner, high), pl.cdiv(outer, wide), steps.group.shape[0]
  spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=len(steps),
    grid=grid,
    in_specs=[
      pl.BlockSpec((rows, high), lambda i, j, step, group, block, *_: (block[step], i)),
      pl.BlockSpec((rows, wide), lambda i, j, step, group, block, *_: (block[step], j)),
    ],
    out_specs=pl.BlockSpec((None, high, wide), lambda i, j, step, group, *_: (group[step], i, j)),
    scratch_shapes=[pltpu.VMEM((high, wide), jnp.float32)],
  )
  return pl.pallas_call(
    _tpu_kernel,
    grid_spec=spec,
    out_shape=jax.ShapeDtypeStruct((groups, inner, outer), left.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_MEMORY
    ),
    interpret=interpret,
    cost_estimate=pl.CostEstimate(
      flops=_operations(left, right),
      transcendentals=0,
      bytes_accessed=grid[1] * left.nbytes
      + grid[0] * right.nbytes
      + groups * inner * outer * left.dtype.itemsize,
    ),
  )(*steps, left, right)


def _tpu_kernel(
  group: jax.Ref,
  block: jax.Ref,
  count: jax.Ref,
  ends: jax.Ref,
  sizes: jax.Ref,
  left: jax.Ref,
  right: jax.Ref,
  out: jax.Ref,
  total: jax.Ref,
) -> None:
  step = pl.program_id(2)
  mine = group[step]
  end, last = ends[mine], count[0] - 1
  begin, first = end - sizes[mine], block[step] * left.shape[0]
  running = step <= last

  @pl.when(running & ((step == 0) | (group[jnp.maximum(step - 1, 0)] != mine)))
  def _() -> None:
    total[...] = jnp.zeros(total.shape, total.dtype)

  def own(ref: jax.Ref) -> jax.Array:
    row = first + lax.broadcasted_iota(jnp.int32, ref.shape, 0)
    values = ref[...].astype(jnp.float32)  # no TPU masks in bfloat16
    return jnp.where((row >= begin) & (row < end), values, 0).astype(ref.dtype)

  whole = (begin <= first) & (first + left.shape[0] <= end)

  @pl.when(running & whole)
  def _() -> None:
    total[...] += dot(left[...], right[...], (0, 0))

  @pl.when(running & jnp.logical_not(whole) & (begin < end))
  def _() -> None:
    total[...] += dot(own(left), own(right), (0, 0))

  @pl.when((step == last) | (running & (group[jnp.minimum(step + 1, last)] != mine)))
  def _() -> None:
    out[...] = total[...].astype(out.dtype)


def on_gpu(
  left: Float[Array, "rows inner"],
  right: Float[Array, "rows outer"],
  sizes: Int[Array, " groups"],
  *,
  interpret: bool = False,
  side: int = _SIDE,
  chunk: int = _CHUNK,
) -> Float[Array, "groups inner outer"]:
  """Sum over each group's rows of their outer products, in float32.

  Args:
    left: rows sorted by group, float32 or bfloat16.
    right: rows in the same order.
    sizes: rows of each group.
    interpret: run without the hardware.
    side: of a program's block of the result at most, a power of 2.
    chunk: rows read at once, a power of 2, 16 at least.
  """
  inner, outer, groups = left.shape[1], right.shape[1], sizes.shape[0]
  high, wide = min(side, triton.padded(inner)), min(side, triton.padded(outer))
  ends = jnp.cumsum(sizes)
  spans = jnp.stack([ends - sizes, ends], axis=1).astype(jnp.int32)
  (made,) = triton.call(
    functools.partial(_gpu_kernel, height=inner, block=(high, wide), chunk=chunk),
    (pl.cdiv(inner, high), pl.cdiv(outer, wide), groups),
    [spans, left, right],
    [jax.ShapeDtypeStruct((groups * inner, outer), left.dtype)],
    interpret,
    warps=8,
    flops=_operations(left, right),
  )
  return made.reshape(groups, inner, outer)


def _gpu_kernel(
  spans: jax.Ref,
  left: jax.Ref,
  right: jax.Ref,
  out: jax.Ref,
  *,
  height: int,
  block: tuple[int, int],
  chunk: int,
) -> None:
  group = pl.program_id(2)
  row, column = (pl.program_id(axis) * block[axis] for axis in range(2))
  begin, end = spans[group, 0], spans[group, 1]

  def add(turn: jax.Array, total: jax.Array) -> jax.Array:
    place = begin + turn * chunk
    one = triton.load(left, (place, row), (chunk, block[0]), rows=end - place)
    two = triton.load(right, (place, column), (chunk, block[1]), rows=end - place)
    return total + dot(one, two, (0, 0))

  total = lax.fori_loop(0, (end - begin + chunk - 1) // chunk, add, jnp.zeros(block, jnp.float32))
  triton.store(out, (group * height + row, column), total, rows=height - row)
