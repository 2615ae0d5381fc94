"""Flash attention whose heads have weights, for TPUs.

Queries, keys and values are tiles of 128 columns, each of whole heads of one kind: of one matrix
[batch * time, columns], where one product made them by kind, or of three. Heads that share a tile
are kept apart by zeros in the columns of the others: a matrix unit multiplies 128 columns anyway.
What lies otherwise is brought into such tiles first, which costs copies (`Layout.to_tiles`).

A program takes a tile of heads: several examples where these are short, or else a block of queries
and a block of keys of one. What lies beyond an array has any value and is replaced by zeros.

A number for every head and position, such as a weight, lies in memory as [batch, tiles, heads of a
tile, time], and in a kernel as [time, 128], the same in all columns of a head.

What is added to logits by distance is one line of numbers for every diagonal of blocks of pairs.
In a kernel a block is made of its line, and the gradient of a line of that of its blocks, by
rolling rows against each other.

The output projection may be inside. Where a program has all keys of its examples, heads are then
written nowhere, and the reverse pass forms them again; else they are kept for it.

Source: Dao 2023 (FlashAttention-2) for blocks and the saved logsumexp; Kolios 2023, equation 5.3,
for the weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.kernels.attention import tpu_kernels
from compmod_jax.kernels.attention.definition import FAR
from compmod_jax.kernels.attention.distances import DistanceBias
from compmod_jax.kernels.attention.dropout import ProbabilityDropout
from compmod_jax.kernels.attention.layout import (
  KEY,
  LANES,
  QUERY,
  VALUE,
  Gradients,
  Layout,
  Projection,
)
from compmod_jax.kernels.attention.rotation import Rotation
from compmod_jax.kernels.attention.tpu_operands import (
  ROWS,
  Index,
  Operands,
  Place,
  Reverse,
  Static,
  as_lines,
  block_pair,
  distance_lines,
  lines_shape,
  lines_spec,
  operand_specs,
  operands,
  results_spec,
  to_heads,
  visited,
  whole_spec,
  with_bias,
)
from compmod_jax.kernels.attention.visibility import Visibility
from compmod_jax.kernels.routing.shapes import ROOM


def takes_projection(layout: Layout, embed: int, block: tuple[int, int]) -> bool:
  """Whether the output projection may be inside.

  Args:
    layout: sizes, and where columns begin.
    embed: columns of the projection.
    block: as in `forward`.
  """
  # A matrix, its float32 gradient, and blocks of rows of them and of their sums.
  needed = embed * (layout.heads * layout.head_dim * 8 + 2 * ROWS * 12)
  fits = layout.keys <= block[1] and embed % LANES == 0 and needed <= ROOM
  return layout.in_tiles and fits


def keeps_heads(layout: Layout, block: tuple[int, int]) -> bool:
  """Whether heads are kept for the reverse pass where the projection is inside."""
  return max(layout.queries, layout.keys) > block[0]


def saved_shapes(
  layout: Layout,
  matrix: jax.Array,
  *,
  bias: bool,
  projection: bool,
  block: tuple[int, int],
) -> Any:
  """Shapes of what `forward` leaves for the reverse pass; see there."""
  del bias
  lines = (layout.batch * layout.heads, layout.queries)
  logsumexp = jax.ShapeDtypeStruct(lines, jnp.float32)
  if not projection or not keeps_heads(layout, block):
    return logsumexp
  heads = (layout.batch, layout.queries, layout.heads * layout.head_dim)
  return logsumexp, jax.ShapeDtypeStruct(heads, matrix.dtype)


def matrices_left(matrices: tuple[jax.Array, ...], saved: Any) -> tuple[jax.Array, ...]:
  """The matrices as the forward pass left them: as they were."""
  del saved
  return matrices


def forward(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  visibility: Visibility,
  *,
  layout: Layout,
  block: tuple[int, int],
  interpret: bool | pltpu.InterpretParams,
  save: bool,
  distance_bias: DistanceBias | None = None,
  dropout: ProbabilityDropout | None = None,
  rotation: Rotation | None = None,
  projection: Projection | None = None,
) -> tuple[jax.Array, jax.Array | tuple[jax.Array, jax.Array] | None]:
  """Heads side by side [batch * queries, heads * head_dim] and, to `save`, the logsumexp.

  With a projection its result, in place of the heads [batch * queries, embed]; these are then saved
  beside the logsumexp where `keeps_heads`.

  Args:
    matrices: that hold queries, keys and values [batch * time, columns].
    bias: what is added to the columns of a matrix that holds all three [1, columns], float32.
    weights: of heads [batch * queries, heads], float32.
    visibility: which keys a query may read.
    layout: sizes, and where columns begin.
    block: queries and keys of a block, a multiple of 128; keys of a reverse pass.
    interpret: run without the hardware.
    save: whether a reverse pass follows.
    distance_bias: added to the logits.
    dropout: which probabilities become 0; none for no dropout.
    rotation: of queries and keys, of all examples alike; none for as they are.
    projection: where `takes_projection`.
  """
  matrices, bias, tiled = _to_tiles(matrices, bias, layout)
  static = Static.of(tiled, block[0], visibility, layout)
  spans, given = operands(
    static,
    matrices,
    bias,
    weights,
    visibility,
    numbers=None if distance_bias is None else distance_bias.numbers,
    dropout=dropout,
    rotation=rotation,
    projection=projection,
  )
  rows, columns = given.rows[QUERY], static.tiles * LANES
  flops = 4 * layout.pairs * layout.head_dim
  scratch = [pltpu.VMEM((static.size(QUERY), LANES), jnp.float32)] * (3 if static.several else 0)
  if projection is not None:
    inner, columns = projection[0].shape
    flops += 2 * layout.batch * layout.queries * inner * columns
    size = static.examples, static.size(QUERY), columns
    scratch.append(pltpu.VMEM(size, jnp.float32))
  outputs = [jax.ShapeDtypeStruct((*rows.shape[:2], columns), rows.dtype)]
  outputs += [jax.ShapeDtypeStruct(lines_shape(static), jnp.float32)] * save
  kept = save and projection is not None and keeps_heads(layout, block)
  outputs += [jax.ShapeDtypeStruct((*rows.shape[:2], static.tiles * LANES), rows.dtype)] * kept

  def place(example: Any, query: Any, tile: Any, key: Any, *spans: jax.Ref) -> Place:
    return Place(example, query, tile, visited(static, spans, example, query, key))

  out_specs = [results_spec(static, given.projection, place), lines_spec(static, place)]
  out_specs.append(results_spec(static, None, place))
  heads, *saved = _call(
    functools.partial(tpu_kernels.forward, static=static),
    (layout.batch // static.examples, static.blocks(QUERY), static.tiles, static.blocks(KEY)),
    spans,
    [given],
    [operand_specs(static, given, place)],
    outputs,
    out_specs[: len(outputs)],
    name="_forward",
    scratch=scratch,
    ordered=1 if projection is None else 2,
    flops=flops,
    interpret=interpret,
  )
  made = heads.reshape(-1, heads.shape[2]) if projection else _from_tiles(heads, layout)
  if not save:
    return made, None
  logsumexp = to_heads(saved[0], layout).reshape(-1, layout.queries)
  return made, (logsumexp, saved[1]) if kept else logsumexp


def backward(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  weights: jax.Array | None,
  visibility: Visibility,
  outputs: jax.Array | None,
  logsumexp: jax.Array | tuple[jax.Array, jax.Array],
  slopes: jax.Array,
  *,
  layout: Layout,
  block: tuple[int, int],
  interpret: bool | pltpu.InterpretParams,
  distance_bias: DistanceBias | None = None,
  dropout: ProbabilityDropout | None = None,
  rotation: Rotation | None = None,
  projection: Projection | None = None,
) -> Gradients:
  """See `gpu.backward`; the same formulas.

  One pass over all pairs of blocks forms all gradients: those of keys and values are summed in
  vector memory, of `block[1]` keys at once; where there are more, those of queries are sums of
  several such passes.
  """
  if isinstance(logsumexp, tuple):
    logsumexp, outputs = logsumexp
  lines = logsumexp.reshape(layout.batch, layout.heads, layout.queries)
  run = functools.partial(
    _backward_pass,
    weights=weights,
    outputs=outputs,
    logsumexp=lines,
    slopes=slopes,
    layout=layout,
    side=block[0],
    interpret=interpret,
    dropout=dropout,
    rotation=rotation,
    projection=projection,
  )
  numbers = None if distance_bias is None else distance_bias.numbers
  if layout.in_tiles and layout.keys <= block[1]:
    return run(matrices, bias, numbers, visibility, 0, matrices[0].dtype)

  def arrange(matrices: tuple[jax.Array, ...], bias: jax.Array | None) -> tuple[jax.Array, ...]:
    return layout.to_tiles(matrices if bias is None else (with_bias(matrices[0], bias),))

  (query, *read), back = jax.vjp(arrange, matrices, bias)
  read = [one.reshape(layout.batch, layout.keys, -1) for one in read]
  dtype = query.dtype if layout.keys <= block[1] else jnp.float32

  def of_keys(first: int) -> Gradients:
    part = slice(first, min(first + block[1], layout.keys))
    own = [one[:, part].reshape(-1, one.shape[2]) for one in read]
    # The distances of all queries from these keys.
    near = None if numbers is None else numbers[:, first : part.stop + layout.queries - 1]
    return run((query, *own), None, near, visibility, first, dtype)

  starts = range(0, layout.keys, block[1])
  found = [of_keys(first) for first in starts]
  d_query = functools.reduce(jnp.add, [one.matrices[QUERY] for one in found])
  joined = [
    jnp.concatenate(
      [one.matrices[which].reshape(layout.batch, -1, query.shape[1]) for one in found], axis=1
    ).reshape(layout.batch * layout.keys, -1)
    for which in (KEY, VALUE)
  ]
  gradients, d_bias = back((d_query.astype(query.dtype), *joined))
  made = Gradients(gradients, d_bias, found[0].delta)
  if numbers is None:
    return made
  total = jnp.zeros(numbers.shape, jnp.float32)
  for first, one in zip(starts, found, strict=True):
    assert one.distance_bias is not None
    near = one.distance_bias.numbers
    total = total.at[:, first : first + near.shape[1]].add(near)
  return made._replace(distance_bias=DistanceBias(total))


def _backward_pass(
  matrices: tuple[jax.Array, ...],
  bias: jax.Array | None,
  numbers: Float[Array, "heads distances"] | None,
  visibility: Visibility,
  first_key: int,
  dtype: DTypeLike,
  *,
  weights: jax.Array | None,
  outputs: jax.Array | None,
  logsumexp: jax.Array,
  slopes: jax.Array,
  layout: Layout,
  side: int,
  interpret: bool | pltpu.InterpretParams,
  dropout: ProbabilityDropout | None,
  rotation: Rotation | None,
  projection: Projection | None,
) -> Gradients:
  """Gradients of matrices in tiles, which hold the keys from `first_key` on; `dtype` of queries.

  And of the numbers of distances from these keys.
  """
  tiled = layout if layout.in_tiles else layout.tiled
  if len(matrices) > 1:
    tiled = dataclasses.replace(layout.tiled, keys=matrices[KEY].shape[0] // layout.batch)
  static = Static.of(tiled, side, visibility, layout, first_key)
  spans, given = operands(
    static,
    matrices,
    bias,
    weights,
    visibility,
    numbers=numbers,
    dropout=dropout,
    rotation=rotation,
    projection=projection,
  )
  lines = as_lines(logsumexp, static, -FAR)
  heads = None if outputs is None else _in_tiles(outputs, layout)
  by_row = (layout.batch, layout.queries, -1)
  errors = _in_tiles(slopes, layout) if projection is None else slopes.reshape(by_row)
  reverse = Reverse(heads, errors, lines)

  def place(example: Any, tile: Any, step: Any, *spans: jax.Ref) -> Place:
    query, key = block_pair(static, step)
    return Place(example, query, tile, visited(static, spans, example, query, key))

  programs = layout.batch // static.examples
  made, specs = _gradients(static, given, len(matrices), dtype, place)

  def room(rows: int) -> Any:
    return pltpu.VMEM((static.examples, rows, LANES), jnp.float32)

  # Logits are formed again, which counts nothing.
  flops = 8 * layout.batch * layout.heads * layout.queries * tiled.keys * layout.head_dim
  if projection is not None:
    kernel = projection[0]
    flops += 4 * layout.batch * layout.queries * kernel.size
  heads_spec = None if heads is None else results_spec(static, None, place)
  found = _call(
    functools.partial(tpu_kernels.backward, static=static, matrices=len(matrices)),
    (programs, static.tiles, static.blocks(KEY) * (static.blocks(QUERY) + 2)),
    spans,
    [given, reverse],
    [
      operand_specs(static, given, place),
      Reverse(
        heads_spec,
        results_spec(static, given.projection, place),
        lines_spec(static, place),
      ),
    ],
    made,
    specs,
    name="_backward",
    scratch=[room(static.size(QUERY)), *[room(static.blocks(KEY) * static.size(KEY))] * 2],
    ordered=1 if projection is None else 3,
    flops=flops,
    interpret=interpret,
  )
  first, *rest = found[len(matrices) :]
  of = Gradients(
    tuple(one.reshape(-1, one.shape[2]) for one in found[: len(matrices)]),
    None if bias is None else jnp.sum(rest.pop(0), axis=0),
    to_heads(first, layout).swapaxes(1, 2).reshape(-1, layout.heads),
  )
  if numbers is not None:
    spread = functools.partial(distance_lines, static=static)
    (d_numbers,) = jax.linear_transpose(spread, numbers)(jnp.sum(rest.pop(0), axis=0))
    of = of._replace(distance_bias=DistanceBias(d_numbers))
  if projection is None:
    return of
  d_projection = rest[0].astype(projection[0].dtype), rest[1][0].astype(projection[1].dtype)
  return of._replace(projection=d_projection)


def _gradients(
  static: Static,
  given: Operands[jax.Array],
  matrices: int,
  dtype: DTypeLike,
  place: Callable[..., Place],
) -> tuple[list[jax.ShapeDtypeStruct], list[pl.BlockSpec]]:
  """What the reverse pass writes, and its blocks; see `tpu_kernels.backward`.

  In order the gradients of matrices, that of queries of a type; the sums that weights' gradients
  are made of; and, where there are such, those of the bias, of the numbers of distances and of the
  projection.
  """
  queries, programs = static.blocks(QUERY), static.layout.batch // static.examples
  made, blocks = [], []
  for which, one in enumerate(given.rows[:matrices]):
    made.append(jax.ShapeDtypeStruct(one.shape, dtype if which == QUERY else one.dtype))
    size = (static.examples, static.size(which), LANES)
    blocks.append(pl.BlockSpec(size, _written(static, which if matrices > 1 else None)))
  made.append(jax.ShapeDtypeStruct(lines_shape(static), jnp.float32))
  blocks.append(lines_spec(static, place))
  if given.biases is not None:

    def part(*step: Any) -> Index:
      example, row, column = _written(static, None)(*step)
      return example * queries + row, 0, column

    parts = (programs * queries, 1, given.biases[QUERY].shape[1])
    made.append(jax.ShapeDtypeStruct(parts, jnp.float32))
    blocks.append(pl.BlockSpec((1, 1, LANES), part))
  if given.numbers is not None:
    shape = (programs, *given.numbers.shape)
    made.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    blocks.append(pl.BlockSpec((None, None, *shape[2:]), lambda n, tile, _, *s: (n, tile, 0, 0, 0)))
  if given.projection is not None:
    for one in given.projection:
      made.append(jax.ShapeDtypeStruct(one.shape, jnp.float32))
      blocks.append(whole_spec(one.shape))
  return made, blocks


def _written(static: Static, which: int | None) -> Callable[..., Index]:
  """Where gradients go in a matrix of queries, keys or values; none for one of all three."""
  keys = static.blocks(KEY)
  pairs = static.blocks(QUERY) * keys

  def index(example: Any, tile: Any, step: Any, *_: jax.Ref) -> Index:
    query, _ = block_pair(static, step)
    rows = [query, *(jnp.clip(step - first, 0, keys - 1) for first in (pairs, pairs + keys))]
    columns = [static.column(one) + tile for one in (QUERY, KEY, VALUE)]
    if which is not None:
      return example, rows[which], columns[which]
    turn = (step >= pairs).astype(jnp.int32) + (step >= pairs + keys)
    row, column = (
      jnp.where(turn == 0, one[QUERY], jnp.where(turn == 1, one[KEY], one[VALUE]))
      for one in (rows, columns)
    )
    return example, row, column

  return index


def _to_tiles(
  matrices: tuple[jax.Array, ...], bias: jax.Array | None, layout: Layout
) -> tuple[tuple[jax.Array, ...], jax.Array | None, Layout]:
  """Matrices, bias and layout in tiles; the bias is added where they are copied anyway."""
  if layout.in_tiles:
    return matrices, bias, layout
  shifted = matrices if bias is None else (with_bias(matrices[0], bias),)
  return layout.to_tiles(shifted), None, layout.tiled


def _in_tiles(heads: jax.Array, layout: Layout) -> jax.Array:
  """Heads side by side [batch, queries, columns], filled up where they fill no tiles."""
  if not layout.in_tiles:
    heads = heads.reshape(layout.batch, layout.queries, layout.heads, layout.head_dim)
    heads = layout.fill(heads)
  return heads.reshape(layout.batch, layout.queries, -1)


def _from_tiles(heads: jax.Array, layout: Layout) -> jax.Array:
  """And back [batch * queries, columns]."""
  if not layout.in_tiles:
    apart = heads.reshape(*heads.shape[:2], layout.tiled.heads, layout.tiled.head_dim)
    heads = apart[:, :, : layout.heads, : layout.head_dim]
  return heads.reshape(layout.batch * layout.queries, -1)


def _call(
  kernel: Callable[..., None],
  grid: tuple[int, ...],
  spans: list[jax.Array],
  arrays: list[Any],
  in_specs: list[Any],
  outputs: list[jax.ShapeDtypeStruct],
  out_specs: list[pl.BlockSpec],
  *,
  name: str,
  scratch: list[Any],
  ordered: int,
  flops: int,
  interpret: bool | pltpu.InterpretParams,
) -> Sequence[jax.Array]:
  """Runs a kernel, of lists of references, the last `ordered` axes of whose grid are in order."""

  def run(*refs: Any) -> None:
    first, second = len(spans) + len(arrays), len(spans) + len(arrays) + len(outputs)
    kernel(
      list(refs[: len(spans)]),
      *refs[len(spans) : first],
      list(refs[first:second]),
      list(refs[second:]),
    )

  axes: list[Any] = ["parallel"] * (len(grid) - ordered) + ["arbitrary"] * ordered
  return pl.pallas_call(
    run,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(spans),
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=scratch,
    ),
    out_shape=outputs,
    compiler_params=pltpu.CompilerParams(dimension_semantics=axes, vmem_limit_bytes=ROOM * 3 // 2),
    cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0),
    name=name,
    interpret=interpret,
  )(*spans, *arrays)
