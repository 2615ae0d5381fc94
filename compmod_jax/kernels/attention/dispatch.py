"""The public functions, and the choice of how each is computed.

Both halves of a derivative rule run on the same implementation, and each half can be differentiated
again, in reverse mode, as the definition.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from compmod_jax.core import errors
from compmod_jax.core.linear import affine
from compmod_jax.core.sharding import platform_of
from compmod_jax.kernels.attention import definition
from compmod_jax.kernels.attention.distances import DistanceBias
from compmod_jax.kernels.attention.dropout import ProbabilityDropout
from compmod_jax.kernels.attention.layout import Gradients, Layout, Projection
from compmod_jax.kernels.attention.rotation import Rotation
from compmod_jax.kernels.attention.visibility import Visibility
from compmod_jax.kernels.routing import reference as routing_reference
from compmod_jax.kernels.routing import shapes as routing_shapes
from compmod_jax.kernels.routing.blocks import Blocks
from compmod_jax.kernels.routing.dispatch import Implementation, Plan, Readout, make_plan
from compmod_jax.kernels.routing.reference import Choice

WIDEST = 128
"""Columns of a head that kernels take at most."""


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Sizes of blocks; none for what suits the heads."""

  forward: tuple[int, ...] | None = None
  """Queries and keys of a GPU's forward pass, powers of two and at least 16; behind them may stand
  warps of a program and stages of its loads."""
  backward: tuple[int, ...] | None = None
  """Those of its reverse pass."""
  tpu: tuple[int, int] = (512, 16_384)
  """Queries, and keys, of a TPU's blocks; keys whose gradients it sums at once. Multiples of it."""
  routing: Blocks = Blocks()
  """Those of the inference network."""

  def block(self, platform: str, *, reverse: bool = False) -> tuple[int, ...] | None:
    """Sizes of a pass on a platform."""
    return self.tpu if platform == "tpu" else self.backward if reverse else self.forward


def flash_attention(
  query: Float[Array, "batch queries heads head_dim"],
  key: Float[Array, "batch keys key_heads head_dim"],
  value: Float[Array, "batch keys key_heads head_dim"],
  *,
  weights: Float[Array, "batch queries heads"] | None = None,
  output: Projection | None = None,
  distance_bias: DistanceBias | None = None,
  visibility: Visibility = Visibility(),
  dropout: ProbabilityDropout | None = None,
  implementation: Implementation | None = None,
  interpret: Hashable = False,
  tiles: Tiles = Tiles(),
) -> Float[Array, "batch queries ..."]:
  r"""Attention in every head times the head's weight, without an array of all pairs of positions.

  .. math::
     s_{ij} = C_{ij} \sum_k \mathrm{softmax}_{k \in V_j}(q_{ij} \cdot k_{ik} / \sqrt{D})\, v_{ik}

  Returns heads [batch, queries, heads, head_dim], or what `output` makes of them, as
  `packed_attention` does [batch, queries, embed]. The gradient with respect to a weight of 0 is
  given as 0, which is right where a softmax or a selection made it: their own derivative is 0
  there.

  Args:
    query: Q.
    key: K; of heads in groups, one for every `heads / key_heads` of them.
    value: V.
    weights: C, float32; none for 1.
    output: what heads go through; none for heads.
    distance_bias: added to the logits; none for nothing.
    visibility: V_j, the keys that a query may read; a query that may read none gets zeros.
    dropout: which probabilities become 0; none for no dropout.
    implementation: how; `None` for the best way that platform and shapes allow.
    interpret: run a named kernel without its hardware.
    tiles: sizes of blocks.

  Raises:
    UserError: a named implementation cannot do it, heads are no multiple of key heads, or a bias
      has not the distances of these positions.
  """
  heads, key_heads = query.shape[2], key.shape[2]
  if heads % key_heads:
    raise errors.UserError(
      f"flash_attention got {heads} heads of queries and {key_heads} of keys; they must be a"
      " multiple."
    )
  query, key, value = map(jnp.asarray, (query, key, value))
  bias = _checked(distance_bias, Layout.apart(query, key), "flash_attention")
  masks = weights, bias, visibility, dropout
  layout, given = Layout.apart(query, key), (query, key, value)
  return _of_matrices(layout, given, output, *masks, implementation, interpret, tiles)


def paired_attention(
  query: Float[Array, "batch queries heads head_dim"],
  key_value: Float[Array, "batch keys heads 2 head_dim"],
  *,
  weights: Float[Array, "batch queries heads"] | None = None,
  distance_bias: DistanceBias | None = None,
  visibility: Visibility = Visibility(),
  dropout: ProbabilityDropout | None = None,
  implementation: Implementation | None = None,
  interpret: Hashable = False,
  tiles: Tiles = Tiles(),
) -> Float[Array, "batch queries heads head_dim"]:
  """The same where one product made keys and values, which nobody takes apart.

  Args:
    query: Q.
    key_value: key and value of every head, side by side.
    weights: as in `flash_attention`, and so the others.
    distance_bias: added to the logits.
    visibility: which keys a query may read.
    dropout: which probabilities become 0.
    implementation: how.
    interpret: run a named kernel without its hardware.
    tiles: sizes of blocks.

  Raises:
    UserError: a named implementation cannot do it, or a bias has not the distances of these
      positions.
  """
  query, key_value = map(jnp.asarray, (query, key_value))
  layout = Layout.paired(query, key_value)
  bias = _checked(distance_bias, layout, "paired_attention")
  masks = weights, bias, visibility, dropout
  return _of_matrices(layout, (query, key_value), None, *masks, implementation, interpret, tiles)


def _of_matrices(
  layout: Layout,
  arrays: tuple[Float[Array, "batch time ..."], ...],
  output: Projection | None,
  weights: Float[Array, "batch queries heads"] | None,
  distance_bias: DistanceBias | None,
  visibility: Visibility,
  dropout: ProbabilityDropout | None,
  implementation: Implementation | None,
  interpret: Hashable,
  tiles: Tiles,
) -> Float[Array, "batch queries ..."]:
  """Scaled heads of arrays, queries first, which become matrices; or what they go through."""
  rows = tuple(one.reshape(one.shape[0] * one.shape[1], -1) for one in arrays)
  own = None if weights is None else weights.reshape(-1, layout.heads).astype(jnp.float32)
  plan = _plan(layout, implementation, interpret, tiles, rows[0])
  run = _rule(_Attention(layout), plan, tiles)
  output = _rounded(output, rows[0])
  inside = _inside(output, layout, plan, tiles)
  made = run(rows, None, own, inside, distance_bias, visibility, dropout, None)
  if output is None:
    return made.reshape(arrays[0].shape)
  made = made if inside else affine(made, *output)
  return made.reshape(*arrays[0].shape[:2], -1)


def packed_attention(
  packed: Float[Array, "batch time parts columns"],
  bias: Float[Array, "parts columns"] | None = None,
  *,
  heads: int | None = None,
  weights: Float[Array, "batch time heads"] | None = None,
  output: Projection | None = None,
  rotation: Rotation | None = None,
  distance_bias: DistanceBias | None = None,
  visibility: Visibility = Visibility(),
  dropout: ProbabilityDropout | None = None,
  implementation: Implementation | None = None,
  interpret: Hashable = False,
  tiles: Tiles = Tiles(),
) -> Float[Array, "batch time ..."]:
  """The same from one product that made queries, keys and values, which nobody takes apart.

  Returns heads [batch, time, heads, head_dim], or what `output` makes of them [batch, time, embed].

  Args:
    packed: query, key and value of every head, side by side. Of a single part, by kind: those of
      `heads` heads, first all queries, then all keys, then all values.
    bias: what is still to be added to them.
    heads: how many; none for as many as parts.
    weights: as in `flash_attention`, and so the others.
    output: what heads go through, inside the kernel where it can; W_O is rounded to their type.
    rotation: of queries and keys, inside the kernel where it can; none for as they are.
    distance_bias: added to the logits.
    visibility: which keys a query may read.
    dropout: which probabilities become 0.
    implementation: how.
    interpret: run a named kernel without its hardware.
    tiles: sizes of blocks.

  Raises:
    UserError: a named implementation cannot do it, there are parts of several heads, or a bias has
      not the distances of these positions.
  """
  batch, time, parts, width = packed.shape
  heads = parts if heads is None else heads
  if parts not in (1, heads):
    raise errors.UserError(
      f"packed_attention got {parts} parts for {heads} heads; they must be {heads}, or 1."
    )
  layout = Layout.packed(batch, time, heads, parts * width // (3 * heads), parts == 1)
  rows = packed.reshape(batch * time, -1)
  own = None if weights is None else weights.reshape(-1, heads).astype(jnp.float32)
  plan = _plan(layout, implementation, interpret, tiles, rows)
  run = _rule(_Attention(layout), plan, tiles)
  shift = None if bias is None else bias.reshape(1, -1).astype(jnp.float32)
  if rotation is not None and not _turns(rotation, plan):
    rows = rows if shift is None else _shifted(rows, shift)
    rows = rotation.turn_packed(rows.reshape(packed.shape)).reshape(rows.shape)
    shift = rotation = None
  output = _rounded(output, rows)
  inside = _inside(output, layout, plan, tiles)
  distance_bias = _checked(distance_bias, layout, "packed_attention")
  made = run((rows,), shift, own, inside, distance_bias, visibility, dropout, rotation)
  if output is None:
    return made.reshape(batch, time, heads, -1)
  return (made if inside else affine(made, *output)).reshape(batch, time, -1)


def routed_attention(
  packed: Float[Array, "batch time columns"],
  bias: Float[Array, " columns"],
  readout: Readout,
  *,
  heads: int,
  head_dim: int,
  by_kind: bool = False,
  choice: Choice = Choice(),
  factor: Float[Array, "#batch #time #heads"] | float = 1.0,
  output: Projection | None = None,
  distance_bias: DistanceBias | None = None,
  visibility: Visibility = Visibility(),
  dropout: ProbabilityDropout | None = None,
  implementation: Implementation | None = None,
  interpret: Hashable = False,
  tiles: Tiles = Tiles(),
) -> tuple[Float[Array, "batch time features"], Float[Array, "batch time heads"]]:
  r"""Attention of heads that compete, from the one product that made all that it needs.

  Args:
    packed: queries, keys and values of the first head, of the second, and so on, `head_dim` columns
      each; behind them the first layer of the inference network before its relu.
    bias: what is still to be added to all of them.
    readout: from there to scores.
    heads: how many.
    head_dim: columns of each.
    by_kind: whether all queries come first, then all keys, then all values.
    choice: which heads stay.
    factor: what heads are multiplied by besides their weights.
    output: as in `packed_attention`.
    distance_bias: added to the logits.
    visibility: the keys that a query may read.
    dropout: which probabilities become 0.
    implementation: how; `None` for the best way that platform and shapes allow.
    interpret: run a named kernel without its hardware.
    tiles: sizes of blocks.

  Returns:
    Heads side by side, each times its weight and the factor, or what `output` makes of them; and
    the weights, float32.

  Raises:
    UserError: a named implementation cannot do it, the columns do not fit, or a bias has not the
      distances of these positions.
  """
  (batch, time, columns), hidden = packed.shape, readout.kernel.shape[0]
  if columns != 3 * heads * head_dim + hidden:
    raise errors.UserError(
      f"routed_attention got {columns} columns for {heads} heads of {head_dim} and {hidden} hidden"
      f" units; they must be {3 * heads * head_dim + hidden}."
    )
  layout = Layout.packed(batch, time, heads, head_dim, by_kind)
  choice = dataclasses.replace(choice, keep=choice.kept(heads))
  rows = packed.reshape(-1, columns)
  plan = _plan(layout, implementation, interpret, tiles, rows, hidden)
  run = _rule(_Routed(layout, choice), plan, tiles)
  factor = jnp.broadcast_to(jnp.asarray(factor, jnp.float32), (batch, time, heads))
  kernel = readout.kernel.astype(packed.dtype)
  shift = bias.reshape(1, -1).astype(jnp.float32)
  output = _rounded(output, rows)
  inside = _inside(output, layout, plan, tiles)
  args = (rows, shift, kernel, readout.bias, factor.reshape(-1, heads), inside)
  distance_bias = _checked(distance_bias, layout, "routed_attention")
  made, weights = run(*args, distance_bias, visibility, dropout, None)
  if output is not None and inside is None:
    made = affine(made, *output)
  return made.reshape(batch, time, -1), weights.reshape(batch, time, heads)


def _checked(bias: DistanceBias | None, layout: Layout, function: str) -> DistanceBias | None:
  """A bias in float32.

  Raises:
    UserError: it is not one of these heads and positions.
  """
  if bias is None:
    return None
  found, wanted = bias.numbers.shape, (layout.heads, layout.queries + layout.keys - 1)
  if found != wanted:
    raise errors.UserError(
      f"{function} got distance_bias.numbers {found} for {layout.heads} heads, {layout.queries}"
      f" queries and {layout.keys} keys; with a number a head and distance it is {wanted}."
    )
  return DistanceBias(bias.numbers.astype(jnp.float32))


def kernel_for(array: jax.Array, head_dim: int, dtype: DTypeLike) -> str | None:
  """Platform whose kernel attention runs in, as it is traced; none where it runs in none.

  On a TPU, columns of one product had better lie by kind (`packed_attention`).

  Args:
    array: whose mesh may say what the program is for.
    head_dim: columns of a head.
    dtype: of queries, keys and values.
  """
  layout = Layout.packed(1, 1, 1, head_dim)
  refusals = functools.partial(_refusals, layout, dtype)
  plan = _usable(make_plan(None, False, Blocks(), refusals, array), array)
  return None if plan is None else plan.kernels[0]


def _plan(
  layout: Layout,
  implementation: Implementation | None,
  interpret: Hashable,
  tiles: Tiles,
  rows: jax.Array,
  hidden: int = 0,
) -> Plan | None:
  """The kernels that may run; None for the definition."""
  refusals = functools.partial(_refusals, layout, rows.dtype, hidden, tiles.routing)
  return _usable(make_plan(implementation, interpret, tiles.routing, refusals, rows), rows)


def _rounded(output: Projection | None, rows: jax.Array) -> Projection | None:
  """The projection in the type of the rows, but for its bias."""
  return None if output is None else (output[0].astype(rows.dtype), output[1])


def _inside(
  output: Projection | None, layout: Layout, plan: Plan | None, tiles: Tiles
) -> Projection | None:
  """The projection, where the kernel that may run takes it in."""
  if output is None or plan is None or plan.kernels[0] != "tpu":
    return None
  attention, _ = _kernels("tpu")
  return output if attention.takes_projection(layout, output[0].shape[1], tiles.tpu) else None


def _turns(rotation: Rotation, plan: Plan | None) -> bool:
  """Whether the kernel that may run takes the rotation in: that of all examples alike."""
  return plan is not None and plan.kernels[0] == "tpu" and len(rotation.cos) == 1


def _usable(plan: Plan | None, array: jax.Array) -> Plan | None:
  """The plan with one kernel: the named one, or that of the platform that is traced for."""
  platform = {"cuda": "gpu"}.get(name := platform_of(array), name)
  if plan is None or plan.exact:
    return plan
  return dataclasses.replace(plan, kernels=(platform,)) if platform in plan.kernels else None


def _refusals(
  layout: Layout,
  dtype: DTypeLike,
  hidden: int = 0,
  blocks: Blocks = Blocks(),
) -> dict[str, str | None]:
  """What each kernel cannot do, in words; None where it can."""
  refusal, found = None, dict[str, str | None]()
  if 0 in (layout.batch, layout.queries, layout.keys):
    refusal = "there are no queries or no keys"
  elif layout.head_dim > WIDEST:
    refusal = f"heads of {layout.head_dim} are wider than {WIDEST}"
  elif jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
    refusal = f"{jnp.dtype(dtype)} is neither float32 nor bfloat16"
  elif hidden:
    rows = (layout.batch * layout.queries, hidden)
    found = routing_shapes.route(rows, (hidden, layout.heads), dtype, blocks)
  return found or dict.fromkeys(("gpu", "tpu"), refusal)


# The derivative rules.


@functools.cache
def _kernels(platform: str) -> tuple[ModuleType, ModuleType]:
  """Those of attention and of routing; their compiler is imported when first needed."""
  folder = "compmod_jax.kernels"
  attention, routing = (
    importlib.import_module(f"{folder}.{name}.{platform}") for name in ("attention", "routing")
  )
  return attention, routing


class _Run(NamedTuple):
  """How kernels run: whose, with which blocks, and whether without the hardware."""

  platform: str
  tiles: Tiles
  interpret: Any


class _Attention(NamedTuple):
  """Heads [batch * queries, heads * head_dim] of matrices, bias and weights, under masks.

  Or what a projection makes of them; that and a distance bias come before the masks, and a rotation
  behind them.
  """

  layout: Layout

  def define(self, *args: PyTree) -> jax.Array:
    """The definition."""
    matrices, bias, weights, projection, distance_bias, *masks, rotation = args
    layout = self.layout
    if bias is not None:
      matrices = (_shifted(matrices[0], bias),)
    if weights is not None:
      weights = weights.reshape(layout.batch, layout.queries, layout.heads)
    query, key, value = layout.split(matrices)
    if rotation is not None:
      query, key = map(rotation.turn, (query, key))
    heads = definition.attention(query, key, value, weights, distance_bias, *masks)
    heads = heads.reshape(layout.batch * layout.queries, -1)
    return heads if projection is None else affine(heads, *projection)

  def forward(self, args: PyTree, run: _Run, *, save: bool) -> tuple[jax.Array, jax.Array | None]:
    """The heads, and the logsumexp of every row."""
    args, options = self._given(args, run, reverse=False)
    return _kernels(run.platform)[0].forward(*args, **options, save=save)

  def backward(self, args: PyTree, results: PyTree, slope: jax.Array, run: _Run) -> PyTree:
    """Gradients of matrices, bias, weights, projection and distance bias."""
    found, weights = self.reverse(args, results, slope, run), args[2]
    d_weights = None if weights is None else _over(found.delta, weights)
    return found.matrices, found.bias, d_weights, found.projection, found.distance_bias

  def reverse(self, args: PyTree, results: PyTree, slope: jax.Array, run: _Run) -> Gradients:
    """What the kernel returns."""
    args, options = self._given(args, run, reverse=True)
    return _kernels(run.platform)[0].backward(*args, *results, slope, **options)

  def _given(self, args: PyTree, run: _Run, *, reverse: bool) -> tuple[PyTree, dict[str, Any]]:
    """What a kernel takes by place and by name."""
    *args, projection, distance_bias, visibility, dropout, rotation = args
    block = run.tiles.block(run.platform, reverse=reverse)
    options = {"layout": self.layout, "block": block, "interpret": run.interpret}
    # A kernel that cannot take one does not know the word.
    more = {"projection": projection, "dropout": dropout, "distance_bias": distance_bias}
    more |= {"rotation": rotation}
    options |= {name: one for name, one in more.items() if one is not None}
    return (*args, visibility), options

  def kept(self, args: PyTree, made: jax.Array) -> jax.Array | None:
    """What of the results the reverse pass reads."""
    return made if args[3] is None else None

  def saved(self, args: PyTree, run: _Run) -> PyTree:
    """Shapes of what a kernel leaves for the reverse pass."""
    (matrix, *_), bias, _, projection, *_ = args
    given = {"bias": bias is not None, "projection": projection is not None}
    block = run.tiles.block(run.platform)
    return _kernels(run.platform)[0].saved_shapes(self.layout, matrix, **given, block=block)


class _Routed(NamedTuple):
  """Heads and weights of a packed matrix, bias, readout and factors, under masks.

  A projection and a distance bias come before the masks.
  """

  layout: Layout
  choice: Choice

  @property
  def column(self) -> int:
    """Where the inference network's first layer begins."""
    return 3 * self.layout.heads * self.layout.head_dim

  def define(self, *args: PyTree) -> tuple[jax.Array, jax.Array]:
    """The definition."""
    packed, shift, kernel, bias, factor, *rest = args
    packed = _shifted(packed, shift)
    hidden = packed[:, self.column :]
    weights = routing_reference.route(hidden, kernel, bias, choice=self.choice)
    heads = _Attention(self.layout).define((packed,), None, weights * factor, *rest)
    return heads, weights

  def forward(
    self, args: PyTree, run: _Run, *, save: bool
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
    """Heads and weights, and the logsumexp of every row."""
    packed, shift, kernel, bias, factor, *rest = args
    routing = _kernels(run.platform)[1]
    weights = routing.route_columns(packed, shift, kernel, bias, **self._routing(run))
    args = ((packed,), shift, weights * factor, *rest)
    heads, saved = _Attention(self.layout).forward(args, run, save=save)
    return (heads, weights), saved

  def backward(self, args: PyTree, results: PyTree, slope: PyTree, run: _Run) -> PyTree:
    """Gradients of all but the masks; the matrix's last columns are written in place."""
    packed, shift, kernel, _, factor, *rest = args
    ((heads, weights), saved), (d_heads, d_weights) = results, slope
    attention, routing = _kernels(run.platform)
    args = ((packed,), shift, weights * factor, *rest)
    (packed,) = attention.matrices_left((packed,), saved)
    found = _Attention(self.layout).reverse(args, (heads, saved), d_heads, run)
    (gradient,), of_bias, delta = found.matrices, found.bias, found.delta
    assert of_bias is not None
    given = (packed, shift, kernel, weights, _over(delta, weights) + d_weights, gradient)
    d_packed, d_hidden, d_kernel, d_bias = routing.route_columns_backward(
      *given, **self._routing(run)
    )
    d_shift = jnp.concatenate([of_bias[:, : self.column], d_hidden[None]], axis=1)
    own = d_packed, d_shift, d_kernel, d_bias, _over(delta, factor)
    return *own, found.projection, found.distance_bias

  def kept(self, args: PyTree, made: PyTree) -> PyTree:
    """What of the results the reverse pass reads."""
    return (made[0] if args[5] is None else None), made[1]

  def saved(self, args: PyTree, run: _Run) -> PyTree:
    """See there."""
    packed, shift, _, _, _, *rest = args
    return _Attention(self.layout).saved(((packed,), shift, None, *rest), run)

  def _routing(self, run: _Run) -> dict[str, Any]:
    options = {"blocks": run.tiles.routing, "interpret": run.interpret}
    return {"column": self.column, "choice": self.choice, **options}


def _shifted(rows: jax.Array, bias: jax.Array) -> jax.Array:
  """Rows and a bias, in the type of the rows."""
  return (rows.astype(jnp.float32) + bias).astype(rows.dtype)


def _over(delta: jax.Array, weights: jax.Array) -> jax.Array:
  """What is multiplied with weights to give the delta; 0 where they are."""
  some = jnp.abs(weights) > jnp.finfo(jnp.float32).tiny
  return jnp.where(some, delta / jnp.where(some, weights, 1), 0)


def _rule(function: _Attention | _Routed, plan: Plan | None, tiles: Tiles) -> Callable[..., PyTree]:
  """A function of its arguments, whose derivative is in kernels, too.

  The last three arguments, visibility, dropout and rotation, have none. Reverse mode, any order.
  """
  if plan is None:
    return function.define
  how = _Run(plan.kernels[0], tiles, plan.interpret)

  def gradients(*args_and_slope: PyTree) -> PyTree:
    """Those of the definition."""
    *args, visibility, dropout, rotation, slope = args_and_slope
    fixed = visibility, dropout, rotation
    return jax.vjp(lambda *some: function.define(*some, *fixed), *args)[1](slope)

  def choose(
    kernel: Callable[..., PyTree], default: Callable[..., PyTree]
  ) -> Callable[..., PyTree]:
    if plan.exact:
      return kernel
    name = {"gpu": "cuda"}.get(how.platform, how.platform)
    return lambda *args: lax.platform_dependent(*args, default=default, **{name: kernel})

  value = choose(lambda *args: function.forward(args, how, save=False)[0], function.define)

  def defined(*args: PyTree) -> PyTree:
    nothing = function.saved(args, how)
    return function.define(*args), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)

  saving = standing_for(
    choose(lambda *args: function.forward(args, how, save=True), defined), defined
  )
  reverse = standing_for(
    choose(
      lambda args, results, slope: function.backward(args, results, slope, how),
      lambda args, results, slope: gradients(*args, slope),
    ),
    lambda args, results, slope: gradients(*args, slope),
  )

  def forward(*args: PyTree) -> tuple[PyTree, PyTree]:
    made, saved = saving(*args)
    return made, (args, (function.kept(args, made), saved))

  def backward(kept: PyTree, slope: PyTree) -> PyTree:
    return *reverse(*kept, slope), None, None, None

  run = jax.custom_vjp(value)
  run.defvjp(forward, backward)
  return run


def standing_for(
  program: Callable[..., PyTree], definition: Callable[..., PyTree]
) -> Callable[..., PyTree]:
  """A program with the derivative of what it computes the value of. Reverse mode, any order."""
  run = jax.custom_vjp(program)
  run.defvjp(
    lambda *args: (run(*args), args), lambda args, slope: jax.vjp(definition, *args)[1](slope)
  )
  return run
