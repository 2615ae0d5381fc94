r"""Statistics of logits, and their derivative, for TPUs: no logits are written.

A program takes a block of rows and a block of the vocabulary, and forms their logits
[words, rows], rows on lanes, so that a number for every row fills registers and memory.

- Forward: of a block of rows, the largest logit and the sums are kept while blocks of the
  vocabulary pass by (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
- Backward: logits are formed again. With logsumexp :math:`z_n` and the gradients
  :math:`a_n, b_n, c_n` with respect to it, to the label's logit and to the sum of the logits,

  .. math:: \frac{\partial L}{\partial l_{vn}} = a_n e^{l_{vn} - z_n} + b_n [v = y_n] + c_n

  is multiplied at once with the table and with the rows. A block of the table's gradient is summed
  while blocks of rows pass by; those of all rows are summed in vector memory, or those of as many
  as it holds: then there are several such passes, whose gradients of the table are added.

What lies beyond an array has any value and is replaced by zeros.

Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models".
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from compmod_jax.core.losses import LabelStatistics
from compmod_jax.kernels.cross_entropy.blocks import Blocks
from compmod_jax.kernels.routing.blocks import dot
from compmod_jax.kernels.routing.shapes import ROOM

_MEMORY = ROOM * 3 // 2  # of vector memory: blocks, and the logits of one
_SUBLANES, _LANES = 8, 128  # of a register


def forward(
  hidden: Float[Array, "rows dim"],
  table: Float[Array, "vocab dim"],
  labels: Int[Array, " rows"],
  bias: Float[Array, " vocab"] | None,
  *,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> LabelStatistics:
  """See `definition.label_statistics`.

  Args:
    hidden: rows, float32 or bfloat16.
    table: a vector for every word, in the same type.
    labels: the right words.
    bias: of every word, float32, or none.
    blocks: sizes of blocks.
    interpret: run without the hardware.
  """
  (many, dim), words = hidden.shape, table.shape[0]
  blocks = blocks.within(many, words)
  grid = pl.cdiv(many, blocks.rows), pl.cdiv(words, blocks.words)
  line = pl.BlockSpec((1, blocks.rows), lambda i, j: (0, i))
  count = len(LabelStatistics._fields)
  biases = _biases(bias)
  made = pl.pallas_call(
    functools.partial(_forward, words=words if words % blocks.words else None),
    grid=grid,
    in_specs=[
      line,
      pl.BlockSpec((blocks.rows, dim), lambda i, j: (i, 0)),
      pl.BlockSpec((blocks.words, dim), lambda i, j: (j, 0)),
      *[pl.BlockSpec((_SUBLANES, blocks.words), lambda i, j: (0, j)) for _ in biases],
    ],
    out_specs=[line] * count,
    out_shape=[jax.ShapeDtypeStruct((1, many), jnp.float32)] * count,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_MEMORY
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * many * words * dim,
      transcendentals=many * words,
      bytes_accessed=hidden.nbytes + grid[0] * table.nbytes + 4 * (1 + count) * many,
    ),
    interpret=interpret,
    name="label_statistics",
  )(labels[None], hidden, table, *biases)
  return LabelStatistics(*(one[0] for one in made))


def _forward(
  labels: jax.Ref,
  hidden: jax.Ref,
  table: jax.Ref,
  *refs: jax.Ref,
  words: int | None,
) -> None:
  *bias, top, normaliser, gold, total = refs
  turn = pl.program_id(1)

  @pl.when(turn == 0)
  def _() -> None:
    top[...] = jnp.full(top.shape, -jnp.inf, top.dtype)
    for sums in (normaliser, gold, total):
      sums[...] = jnp.zeros(sums.shape, sums.dtype)

  logits = _plus(dot(table[...], hidden[...], (1, 1)), bias)
  word = turn * table.shape[0] + lax.broadcasted_iota(jnp.int32, logits.shape, 0)
  bounded = summed = logits
  if words is not None:
    bounded, summed = (jnp.where(word < words, logits, fill) for fill in (-jnp.inf, 0.0))
  before = top[...]
  now = jnp.maximum(before, jnp.max(bounded, axis=0, keepdims=True))
  powers = jnp.sum(jnp.exp(bounded - now), axis=0, keepdims=True)
  normaliser[...] = normaliser[...] * jnp.exp(before - now) + powers
  top[...] = now
  own = jnp.where(word == labels[...], summed, 0.0)
  gold[...] += jnp.sum(own, axis=0, keepdims=True)
  total[...] += jnp.sum(summed, axis=0, keepdims=True)

  @pl.when(turn == pl.num_programs(1) - 1)
  def _() -> None:
    normaliser[...] = top[...] + jnp.log(normaliser[...])


def backward(
  hidden: Float[Array, "rows dim"],
  table: Float[Array, "vocab dim"],
  labels: Int[Array, " rows"],
  bias: Float[Array, " vocab"] | None,
  normaliser: Float[Array, " rows"],
  slopes: LabelStatistics,
  *,
  blocks: Blocks,
  interpret: bool | pltpu.InterpretParams,
) -> tuple[Float[Array, "rows dim"], Float[Array, "vocab dim"], Float[Array, " vocab"] | None]:
  """Gradients of the rows, of the table and of the bias, summed in float32, in their type.

  Args:
    hidden: as in `forward`.
    table: as in `forward`.
    labels: as in `forward`.
    bias: as in `forward`.
    normaliser: what `forward` returned.
    slopes: gradients with respect to the statistics; that of `top` is not read.
    blocks: as in `forward`.
    interpret: run without the hardware.
  """
  (many, dim), words = hidden.shape, table.shape[0]
  blocks = blocks.within(many, words)
  last = pl.cdiv(many, blocks.rows) - 1
  parts = pl.cdiv(last + 1, blocks.held(dim, hidden.dtype))
  held = pl.cdiv(last + 1, parts)
  grid = parts, pl.cdiv(words, blocks.words), held

  def row(part: jax.Array, turn: jax.Array, step: jax.Array) -> jax.Array:
    return jnp.minimum(part * held + step, last)

  def written(part: jax.Array, turn: jax.Array, step: jax.Array) -> jax.Array:
    return row(part, turn, jnp.where(turn == grid[1] - 1, step, 0))

  line = pl.BlockSpec((1, blocks.rows), lambda *place: (0, row(*place)))
  lines = [one[None] for one in (labels, normaliser, *slopes[1:])]
  biases = _biases(bias)
  d_hidden, d_table, *d_bias = pl.pallas_call(
    functools.partial(
      _backward,
      rows=many if many < parts * held * blocks.rows else None,
      words=words if words % blocks.words else None,
    ),
    grid=grid,
    in_specs=[
      *[line] * len(lines),
      pl.BlockSpec((blocks.rows, dim), lambda *place: (row(*place), 0)),
      pl.BlockSpec((blocks.words, dim), lambda part, turn, step: (turn, 0)),
      *[
        pl.BlockSpec((_SUBLANES, blocks.words), lambda part, turn, step: (0, turn)) for _ in biases
      ],
    ],
    out_specs=[
      pl.BlockSpec((blocks.rows, dim), lambda *place: (written(*place), 0)),
      pl.BlockSpec((None, blocks.words, dim), lambda part, turn, step: (part, turn, 0)),
      *[
        pl.BlockSpec((None, _SUBLANES, blocks.words), lambda part, turn, step: (part, 0, turn))
        for _ in biases
      ],
    ],
    out_shape=[
      jax.ShapeDtypeStruct(hidden.shape, hidden.dtype),
      jax.ShapeDtypeStruct((parts, *table.shape), table.dtype if parts == 1 else jnp.float32),
      *[jax.ShapeDtypeStruct((parts, *one.shape), one.dtype) for one in biases],
    ],
    scratch_shapes=[
      pltpu.VMEM((held, blocks.rows, dim), jnp.float32),
      pltpu.VMEM((blocks.words, dim), jnp.float32),
      *[pltpu.VMEM((blocks.words, _LANES), jnp.float32) for _ in biases],
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_MEMORY
    ),
    cost_estimate=pl.CostEstimate(
      flops=4 * many * words * dim,  # logits are formed again, which counts nothing
      transcendentals=many * words,
      bytes_accessed=hidden.nbytes * (1 + grid[1])
      + parts * table.size * (table.dtype.itemsize + 4)
      + 4 * len(lines) * grid[1] * many,
    ),
    interpret=interpret,
    name="label_statistics_backward",
  )(*lines, hidden, table, *biases)
  of_table = jnp.sum(d_table, axis=0).astype(table.dtype) if parts > 1 else d_table[0]
  return d_hidden, of_table, jnp.sum(d_bias[0][:, 0], axis=0) if d_bias else None


def _backward(
  labels: jax.Ref,
  normaliser: jax.Ref,
  d_normaliser: jax.Ref,
  d_gold: jax.Ref,
  d_total: jax.Ref,
  hidden: jax.Ref,
  table: jax.Ref,
  *refs: jax.Ref,
  rows: int | None,
  words: int | None,
) -> None:
  # Where there is a bias: it, its gradient, and the sums of that.
  if len(refs) == 7:
    *bias, d_hidden, d_table, d_bias, of_rows, of_words, of_bias = refs
  else:
    bias, d_bias, of_bias = [], None, None
    d_hidden, d_table, of_rows, of_words = refs
  part, turn, step = (pl.program_id(axis) for axis in range(3))
  first = (part * pl.num_programs(2) + step) * hidden.shape[0]
  tile = table.shape[0], hidden.shape[0]
  word = turn * tile[0] + lax.broadcasted_iota(jnp.int32, tile, 0)

  def line(ref: jax.Ref, fill: float = 0.0) -> jax.Array:
    if rows is None:
      return ref[...]
    index = first + lax.broadcasted_iota(jnp.int32, ref.shape, 1)
    return jnp.where(index < rows, ref[...], fill)

  vectors = _inside(hidden, first, rows)
  matrix = _inside(table, turn * tile[0], words)
  logits = _plus(dot(matrix, vectors, (1, 1)), bias)
  own = jnp.where(word == labels[...], line(d_gold), 0.0)
  errors = line(d_normaliser) * jnp.exp(logits - line(normaliser, jnp.inf)) + own + line(d_total)
  if words is not None:
    errors = jnp.where(word < words, errors, 0.0)

  @pl.when(step == 0)
  def _() -> None:
    for sums in (of_words, of_bias):
      if sums is not None:
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

  @pl.when(turn == 0)
  def _() -> None:
    of_rows[step] = jnp.zeros(d_hidden.shape, of_rows.dtype)

  if of_bias is not None:
    of_bias[...] += jnp.sum(errors, axis=1, keepdims=True)
  errors = errors.astype(hidden.dtype)
  of_words[...] += dot(errors, vectors)
  of_rows[step] += dot(errors, matrix, (0, 0))

  @pl.when(step == pl.num_programs(2) - 1)
  def _() -> None:
    d_table[...] = of_words[...].astype(d_table.dtype)
    if d_bias is not None and of_bias is not None:
      d_bias[...] = of_bias[...].T[:_SUBLANES]

  # Behind the last block of rows, there is none to write.
  @pl.when((turn == pl.num_programs(1) - 1) & (True if rows is None else first < rows))
  def _() -> None:
    d_hidden[...] = of_rows[step].astype(d_hidden.dtype)


def _biases(bias: jax.Array | None) -> list[jax.Array]:
  """The bias as kernels take it: words on lanes, a copy for every sublane of a register."""
  return [] if bias is None else [jnp.broadcast_to(bias[None], (_SUBLANES, len(bias)))]


def _plus(logits: jax.Array, bias: list[jax.Ref]) -> jax.Array:
  """Logits [words, rows] and the bias of their words, if there is one."""
  return logits + bias[0][...].T[:, :1] if bias else logits


def _inside(ref: jax.Ref, first: jax.Array, count: int | None) -> jax.Array:
  """Rows of a block that begins with row `first`; zeros from row `count` on, where there is one."""
  if count is None:
    return ref[...]
  index = first + lax.broadcasted_iota(jnp.int32, ref.shape, 0)
  values = ref[...].astype(jnp.float32)  # no TPU masks in bfloat16
  return jnp.where(index < count, values, 0.0).astype(ref.dtype)
