r"""Experts on other devices: tokens are sent to those that hold them, and what they made back.

Every device has its own tokens and its own experts. It sorts its (token, choice) pairs by expert
and sends each expert's rows to where the expert is; there the rows that came lie sorted by expert,
so that one grouped product takes them all; their results go the way back, and each token adds up
its own, weighed by its router.

A device has room for C rows at once, `capacity` times the even share. Of what is sent to it, sorted
by expert and sender, round i takes rows i C to (i + 1) C - 1: the first round is all there is where
routers are even, and further rounds, as many as the fullest device needs, take what did not fit. No
token is ever dropped, whatever the routers do; how many waited is a result.

Rounds after the first cannot be planned for, so that they keep nothing for the backward pass, which
computes them again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from compmod_jax.core import scopes, sharding
from compmod_jax.kernels import grouped
from compmod_jax.mechanisms import dispatch
from compmod_jax.mechanisms.dispatch import ExpertWeights, Plan

Axes = tuple[str, ...]
_AXES = tuple(field.name for field in dataclasses.fields(sharding.MeshConfig))


class Slices(NamedTuple):
  """What devices send each other, in as many slices for each device as it has experts.

  Attributes:
    start: where each slice begins in what is sent.
    sent: its rows.
    place: where it begins at its receiver.
    landing: where each slice that comes begins.
    received: its rows.
    origin: where it began at its sender.
  """

  start: Int[Array, " slices"]
  sent: Int[Array, " slices"]
  place: Int[Array, " slices"]
  landing: Int[Array, " slices"]
  received: Int[Array, " slices"]
  origin: Int[Array, " slices"]

  def back(self) -> "Slices":
    """All that came to where it was sent from."""
    return Slices(*self[3:], *self[:3])


class Round(NamedTuple):
  """What is sent in a round.

  Attributes:
    slices: of every device and expert.
    sizes: rows of each expert here.
  """

  slices: Slices
  sizes: Int[Array, " experts"]


def round_of(
  number: jax.Array | int,
  counts: Int[Array, "devices everywhere"],
  me: jax.Array,
  room: int,
) -> Round:
  """What devices exchange in a round.

  Args:
    number: of the round.
    counts: rows that each device has for each expert anywhere.
    me: this device.
    room: rows that a device takes in a round.
  """
  devices = counts.shape[0]

  def by_receiver(table: jax.Array) -> jax.Array:
    """[receiver, its expert, sender]."""
    return jnp.moveaxis(table.reshape(devices, devices, -1), 0, 2)

  rows = by_receiver(counts)
  flat = rows.reshape(devices, -1)
  begin = (jnp.cumsum(flat, axis=1) - flat).reshape(rows.shape)
  first, last = (jnp.clip((number + i) * room - begin, 0, rows) for i in range(2))
  size = last - first
  place, start = (
    jnp.where(size > 0, table + first, 0)
    for table in (begin - number * room, by_receiver(jnp.cumsum(counts, axis=1) - counts))
  )

  def sent(table: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(table, me, 2, keepdims=False).reshape(-1)

  def received(table: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(table, me, 0, keepdims=False).T.reshape(-1)

  slices = Slices(*map(sent, (start, size, place)), *map(received, (place, size, start)))
  return Round(slices, jnp.sum(lax.dynamic_index_in_dim(size, me, 0, keepdims=False), axis=1))


def rounds_for(counts: Int[Array, "devices everywhere"], room: int) -> Int[Array, ""]:
  """How many rounds the fullest device needs, one at least."""
  total = jnp.sum(counts.reshape(len(counts), len(counts), -1), axis=(0, 2))
  return jnp.maximum(1, jnp.max((total + room - 1) // room))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def exchange(
  rows: Float[Array, "rows width"], slices: Slices, sizes: tuple[int, int], axes: Axes
) -> Float[Array, "room width"]:
  """Slices of rows from where they are to where they belong; zeros where nothing comes.

  On accelerators it is `jax.lax.ragged_all_to_all`. XLA for CPUs has none: there every slice is
  filled up to the longest that is possible, for `jax.lax.all_to_all`. Reverse mode, any order.

  Args:
    rows: of this device.
    slices: which go where.
    sizes: how many rows there are, and how many the result has.
    axes: of the mesh, along which devices exchange.
  """
  ragged = functools.partial(_ragged_exchange, room=sizes[1], axes=axes)
  padded = functools.partial(_padded_exchange, room=sizes[1], axes=axes)
  return lax.platform_dependent(rows, slices, tpu=ragged, cuda=ragged, default=padded)


# What goes one way in a program comes the other way in its derivative.
exchange.defvjp(
  lambda rows, slices, sizes, axes: (exchange(rows, slices, sizes, axes), slices),
  lambda sizes, axes, slices, gradient: (
    exchange(gradient, slices.back(), sizes[::-1], axes),
    None,
  ),
)


def _ragged_exchange(rows: jax.Array, slices: Slices, *, room: int, axes: Axes) -> jax.Array:
  empty = jnp.zeros((room, rows.shape[1]), rows.dtype)
  given = slices.start, slices.sent, slices.place, slices.received
  return lax.ragged_all_to_all(rows, empty, *given, axis_name=axes)


def _padded_exchange(rows: jax.Array, slices: Slices, *, room: int, axes: Axes) -> jax.Array:
  index = jnp.arange(min(rows.shape[0], room))[None]
  picked = rows[jnp.minimum(slices.start[:, None] + index, rows.shape[0] - 1)]
  came = lax.all_to_all(picked, axes, 0, 0, tiled=True)
  inside = index < slices.received[:, None]
  place = jnp.where(inside, slices.landing[:, None] + index, room)
  empty = jnp.zeros((room, rows.shape[1]), rows.dtype)
  return empty.at[place.reshape(-1)].set(came.reshape(-1, rows.shape[1]), mode="drop")


class _Given(NamedTuple):
  """What gradients are taken of, on one device.

  Attributes:
    up: matrices of its experts.
    up_bias: their biases.
    down: the matrices back.
    inputs: of its tokens.
    share: of each token's choices.
  """

  up: Float[Array, "embed experts mlp"]
  up_bias: Float[Array, "experts mlp"]
  down: Float[Array, "experts mlp embed"]
  inputs: Float[Array, "tokens embed"]
  share: Float[Array, "tokens keep"]


class _Fixed(NamedTuple):
  """What routers decided, and dropout.

  Attributes:
    plan: order of this device's pairs.
    counts: rows that each device has for each expert anywhere.
    me: number of this device.
    rounds: how many there are, on every device the same.
    factors: of the pairs' hidden units; none or one array.
  """

  plan: Plan
  counts: Int[Array, "devices everywhere"]
  me: Int[Array, ""]
  rounds: Int[Array, ""]
  factors: tuple[Float[Array, "pairs mlp"], ...]


@dataclasses.dataclass(frozen=True)
class _Static:
  """What a program is made for.

  Attributes:
    activation: the nonlinearity.
    keep: choices of a token.
    room: rows that a device takes in a round.
    implementation: of the grouped products.
    axes: along which devices exchange.
  """

  activation: Callable[[jax.Array], jax.Array]
  keep: int
  room: int
  implementation: grouped.Grouped
  axes: Axes

  def run(self, number: jax.Array | int, given: _Given, fixed: _Fixed) -> jax.Array:
    """What a round adds to this device's tokens."""
    plan, pairs = fixed.plan, fixed.plan.pair.shape[0]
    now = round_of(number, fixed.counts, fixed.me, self.room)
    there = functools.partial(exchange, slices=now.slices, sizes=(pairs, self.room), axes=self.axes)
    multiply = functools.partial(
      grouped.product, sizes=now.sizes, implementation=self.implementation
    )
    row, end = jnp.arange(self.room)[:, None], jnp.cumsum(now.sizes)[None]
    expert = ((row < end) & (row >= end - now.sizes[None])).astype(given.inputs.dtype)
    rows = there(dispatch.spread(given.inputs, plan, self.keep))
    hidden = multiply(rows, given.up, axis=1)
    with jax.named_scope(scopes.SELECTION):
      hidden = hidden + expert @ given.up_bias
    hidden = self.activation(hidden)
    for factor in fixed.factors:
      hidden = hidden * there(factor)
    made = multiply(hidden, given.down)
    back: jax.Array = exchange(made, now.slices.back(), (self.room, pairs), self.axes)
    share: jax.Array = dispatch.spread(given.share.reshape(-1, 1), plan, 1)
    return dispatch.collect(back * share, plan, self.keep)


Run = Callable[[jax.Array | int, Any, _Fixed], Any]
"""What a round makes of what gradients are taken of."""


def _backward(run: Run) -> Run:
  """What a round adds to the gradient, from what it was given and the gradient of its result."""

  def backward(number: jax.Array | int, both: tuple[Any, Any], fixed: _Fixed) -> Any:
    given, gradient = both
    return jax.vjp(lambda given: run(number, given, fixed), given)[1](gradient)[0]

  return backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rest(run: Run, first: PyTree, given: PyTree, fixed: _Fixed) -> PyTree:
  """`first` and what the rounds after the first one add to it. Reverse mode, any order."""

  def turn(held: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
    number, total = held
    return number + 1, jax.tree.map(jnp.add, total, run(number, given, fixed))

  with jax.named_scope(scopes.IF_NEEDED):
    begin = (jnp.int32(1), first)
    return lax.while_loop(lambda held: held[0] < fixed.rounds, turn, begin)[1]


def _rest_backward(
  run: Run, kept: tuple[PyTree, _Fixed], gradient: PyTree
) -> tuple[PyTree, PyTree, None]:
  given, fixed = kept
  zeros = jax.tree.map(jnp.zeros_like, given)
  return gradient, _rest(_backward(run), zeros, (given, gradient), fixed), None


_rest.defvjp(
  lambda run, first, given, fixed: (_rest(run, first, given, fixed), (given, fixed)),
  _rest_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rounds(run: Run, given: _Given, fixed: _Fixed) -> jax.Array:
  """What all rounds add to this device's tokens. Reverse mode, any order."""
  return _rest(run, run(0, given, fixed), given, fixed)


def _all_rounds_forward(run: Run, given: _Given, fixed: _Fixed) -> tuple[jax.Array, PyTree]:
  first, pull = jax.vjp(lambda given: run(0, given, fixed), given)
  return _rest(run, first, given, fixed), (pull, given, fixed)


def _all_rounds_backward(run: Run, kept: PyTree, gradient: jax.Array) -> tuple[_Given, None]:
  pull, given, fixed = kept
  # Sums of matrices' gradients begin with those of the first round, not with zeros.
  return _rest(_backward(run), pull(gradient)[0], (given, gradient), fixed), None


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)


def sparse(
  inputs: Float[Array, "batch time embed"],
  shares: Float[Array, "batch time experts"],
  active: Bool[Array, "batch time experts"],
  weights: ExpertWeights,
  activation: Callable[[jax.Array], jax.Array],
  *,
  keep: int,
  capacity: float,
  factors: Float[Array, "batch time keep mlp"] | None = None,
  implementation: grouped.Grouped = "auto",
) -> tuple[Float[Array, "batch time embed"], Float[Array, "batch time"]]:
  """`dispatch.sparse` for experts on several devices, each of which sees its own rows alone.

  Where rows cannot be shared out evenly over all devices it is `dispatch.sparse`.

  Args:
    inputs: what the experts read.
    shares: weight C of every expert at every position, 0 where it is not chosen.
    active: which experts are chosen.
    weights: the experts' parameters.
    activation: the nonlinearity.
    keep: how many are chosen at every position.
    capacity: rows that a device takes at once, in multiples of the even share.
    factors: what the chosen experts' hidden units are multiplied with (dropout).
    implementation: of the grouped products.

  Returns:
    The weighted sum of the chosen experts of every position, and the share of its choices that
    waited for a second round.
  """
  words = ("batch", "expert_time")
  parts = [sharding.parts_of(active, word) for word in words]
  if any(size % count for size, count in zip(active.shape[:2], parts, strict=True)):
    options = {"keep": keep, "factors": factors, "implementation": implementation}
    made = dispatch.sparse(inputs, shares, active, weights, activation, **options)
    return made, jnp.zeros(active.shape[:2])
  names: list[tuple[str | None, ...]] = [(*words, None)] * 3
  rows = [inputs, shares, active]
  if factors is not None:
    rows.insert(0, factors)
    names.insert(0, (*words, None, None))
  run = functools.partial(
    _part, activation=activation, keep=keep, capacity=capacity, implementation=implementation
  )
  places = dispatch.LOGICAL._replace(down_bias=(None, None))
  return sharding.on_parts(run, [weights, *rows], [places, *names], result=words)


def _part(
  weights: ExpertWeights,
  *arrays: jax.Array,
  activation: Callable[[jax.Array], jax.Array],
  keep: int,
  capacity: float,
  implementation: grouped.Grouped,
) -> tuple[jax.Array, jax.Array]:
  """`sparse` by one device."""
  *factors, inputs, shares, active = (x.reshape(-1, *x.shape[2:]) for x in arrays)
  shape, experts = arrays[-1].shape[:2], shares.shape[-1]
  if weights.up.shape[1] == experts:
    options = {"activation": activation, "keep": keep, "implementation": implementation}
    return dispatch.sparse_part(weights, *arrays, **options), jnp.zeros(shape)
  axes = sharding.RULES["experts"]
  assert isinstance(axes, tuple)
  chosen = lax.top_k(active.astype(jnp.float32), keep)[1]
  plan = dispatch.sort_by_expert(chosen, experts)
  counts, me = lax.all_gather(plan.sizes, axes), lax.axis_index(axes)
  pairs = plan.pair.shape[0]
  room = min(math.ceil(capacity * pairs), len(counts) * pairs)
  # All groups of devices run as many rounds, so that none waits for another in the middle of one.
  rounds = lax.pmax(rounds_for(counts, room), _AXES)
  sorted_factors = tuple(x.reshape(-1, x.shape[-1])[plan.pair] for x in factors)
  shares = shares.astype(inputs.dtype)
  mine = chosen[..., None] == jnp.arange(experts)[None, None]
  share = jnp.sum(jnp.where(mine, shares[:, None], 0), axis=-1)
  made: jax.Array = _all_rounds(
    _Static(activation, keep, room, implementation, axes).run,
    _Given(weights.up, weights.up_bias, weights.down, inputs, share),
    _Fixed(plan, counts, me, rounds, sorted_factors),
  )
  made = made + shares @ weights.down_bias
  # The rows of an expert that go first are its first ones.
  fitting = jnp.cumsum(plan.sizes) - plan.sizes + round_of(0, counts, me, room).slices.sent
  waiting = jnp.arange(pairs) >= jnp.sum(plan.expert * fitting[None], axis=1)
  waited: jax.Array = dispatch.collect(waiting[:, None].astype(jnp.float32), plan, keep)
  return made.reshape(*shape, -1), waited.reshape(shape) / keep
