r"""Expert networks that share their tokens out by weight, all at once or only those chosen.

.. math:: o_j = \sum_i C_{ij} F_i(h_j), \qquad F_i(h) = \phi(h W_i + b_i) V_i + c_i

Dense, that is one wide network, whose hidden units are scaled by their expert's weight:
:math:`o = (C \circ \phi(h W + b)) V + C c` with W and V the experts' matrices side by side. Sparse,
every token goes to its `keep` best experts alone: (token, expert) pairs are sorted by expert, so
that each expert's rows lie together, whatever their number. No token is ever dropped.

Source: Kolios 2023, equation 5.2.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from compmod_jax.core import scopes, sharding
from compmod_jax.core.linear import over_rows
from compmod_jax.kernels import grouped

Implementation = Literal["auto", "dense", "blocked", "batched", "ragged"]


class ExpertWeights(NamedTuple):
  """Parameters of all experts, laid out so that side by side they are one wide network's.

  Attributes:
    up: W, from the model's width to each expert's hidden layer.
    up_bias: b.
    down: V, back.
    down_bias: c.
  """

  up: Float[Array, "embed experts mlp"]
  up_bias: Float[Array, "experts mlp"]
  down: Float[Array, "experts mlp embed"]
  down_bias: Float[Array, "experts embed"]


class Plan(NamedTuple):
  """Where the (token, choice) pairs stand once they are sorted by expert.

  Attributes:
    pair: number of the pair, token * keep + choice, in each sorted row.
    row: the sorted row of each pair.
    sizes: rows of each expert; the rest of the rows, if any, belong to experts elsewhere.
    expert: one-hot expert of each sorted row, zeros where it is elsewhere.
  """

  pair: Int[Array, " pairs"]
  row: Int[Array, " pairs"]
  sizes: Int[Array, " experts"]
  expert: Float[Array, "pairs experts"]


def side_by_side(
  inputs: Float[Array, "batch time embed"],
  weights: ExpertWeights,
  activation: Callable[[jax.Array], jax.Array],
) -> Float[Array, "batch time wide"]:
  """Hidden units of all experts, before scaling: those of one wide network."""
  wide = weights.up.reshape(weights.up.shape[0], -1)
  bias = weights.up_bias.reshape(1, -1)
  return activation(over_rows(lambda rows: rows @ wide + bias, inputs))


def dense(
  hidden: Float[Array, "batch time wide"],
  shares: Float[Array, "batch time experts"],
  weights: ExpertWeights,
) -> Float[Array, "batch time embed"]:
  """The experts' weighted sum from the hidden units of all.

  Args:
    hidden: what `side_by_side` returns.
    shares: weight C of every expert at every position.
    weights: the experts' parameters.
  """
  experts, _, embed = weights.down.shape
  shares = shares.astype(hidden.dtype)
  split = hidden.reshape(*shares.shape, -1)
  scaled = (split * shares[..., None]).reshape(hidden.shape)
  tall = weights.down.reshape(-1, embed)
  if experts == 1:  # a product with one row, written so that its gradient is a plain sum
    biases = shares * weights.down_bias[None]
  else:
    biases = over_rows(lambda rows: rows @ weights.down_bias, shares)
  return over_rows(lambda rows: rows @ tall, scaled) + biases


def outputs(
  hidden: Float[Array, "batch time wide"], weights: ExpertWeights
) -> Float[Array, "batch time experts embed"]:
  """The output of every expert alone, from the hidden units of all; for analyses."""
  experts, width, _ = weights.down.shape
  split = hidden.reshape(*hidden.shape[:2], experts, width)
  return jnp.einsum("btef,efd->bted", split, weights.down) + weights.down_bias[None, None]


def worthwhile(tokens: int, experts: int, keep: int) -> bool:
  """Whether running the chosen experts alone is less work than running all.

  Sorted rows are filled up to whole blocks, half a block an expert on average, and moving them
  costs something too: a few tokens, as in a step of decoding, go through all experts.
  """
  return tokens * keep + experts * grouped.BLOCK <= 0.8 * tokens * experts


def sparse(
  inputs: Float[Array, "batch time embed"],
  shares: Float[Array, "batch time experts"],
  active: Bool[Array, "batch time experts"],
  weights: ExpertWeights,
  activation: Callable[[jax.Array], jax.Array],
  *,
  keep: int,
  factors: Float[Array, "batch time keep mlp"] | None = None,
  implementation: grouped.Grouped = "auto",
) -> Float[Array, "batch time embed"]:
  """The weighted sum of the chosen experts of every position; the others do not run.

  Equals `dense` with the weights of all but the chosen experts set to 0. On a mesh every device
  sorts tokens for its own experts, those of all devices that hold other experts, and the devices'
  sums are added: no expert drops a token, however many want it.

  Args:
    inputs: what the experts read.
    shares: weight C of every expert at every position, 0 where it is not chosen.
    active: which experts are chosen.
    weights: the experts' parameters.
    activation: the nonlinearity.
    keep: how many are chosen at every position.
    factors: what the chosen experts' hidden units are multiplied with (dropout).
    implementation: of the grouped products.
  """
  names: list[tuple[str | None, ...]] = [("tokens", "time", None)] * 3
  rows = [inputs, shares, active]
  if factors is not None:
    rows.insert(0, factors)
    names.insert(0, ("tokens", "time", None, None))
  run = functools.partial(
    sparse_part, activation=activation, keep=keep, implementation=implementation
  )
  return sharding.on_parts(run, [weights, *rows], [LOGICAL, *names])


# The matrices' other axes are gathered where they are split.
LOGICAL: PyTree = ExpertWeights._make(
  [(None, "experts", None), ("experts", None), ("experts", None, None), ("experts", None)]
)


def sparse_part(
  weights: ExpertWeights,
  *arrays: jax.Array,
  activation: Callable[[jax.Array], jax.Array],
  keep: int,
  implementation: grouped.Grouped,
) -> jax.Array:
  """`sparse` by one device; where it holds some experts only, added over those devices."""
  *factors, inputs, shares, active = (x.reshape(-1, *x.shape[2:]) for x in arrays)
  here, experts = weights.up.shape[1], shares.shape[-1]
  axis = sharding.RULES["experts"] if here < experts else None
  first = lax.axis_index(axis) * here if axis else 0
  chosen = lax.top_k(active.astype(jnp.float32), keep)[1]
  plan = sort_by_expert((chosen - first) % experts, here)
  expert = plan.expert.astype(inputs.dtype)
  shares = lax.dynamic_slice_in_dim(shares, first, here, 1).astype(inputs.dtype)
  weighed: jax.Array = spread(shares, plan, keep)
  share = jnp.sum(expert * weighed, axis=1, keepdims=True)
  multiply = functools.partial(grouped.product, sizes=plan.sizes, implementation=implementation)
  hidden = multiply(spread(inputs, plan, keep), weights.up, axis=1)
  with jax.named_scope(scopes.SELECTION):
    hidden = hidden + expert @ weights.up_bias
  hidden = activation(hidden)
  for factor in factors:
    hidden = hidden * _pick(factor.reshape(-1, factor.shape[-1]), plan.pair)
  made: jax.Array = collect(multiply(hidden * share, weights.down), plan, keep)
  made = made + shares @ weights.down_bias
  made = lax.psum(made, axis) if axis else made
  return made.reshape(*arrays[-1].shape[:2], -1)


def sort_by_expert(chosen: Int[Array, "rows keep"], experts: int) -> Plan:
  """Sorts (row, choice) pairs by expert, pairs of one expert in their order.

  Args:
    chosen: expert of each pair; those from `experts` on are elsewhere and come last.
    experts: how many there are here.
  """
  flat = chosen.reshape(-1)
  pair = jnp.argsort(flat, stable=True)
  row = jnp.argsort(pair)
  expert = (flat[pair][:, None] == jnp.arange(experts)[None]).astype(jnp.float32)
  return Plan(pair, row, jnp.sum(expert, axis=0).astype(jnp.int32), expert)


def _pick(rows: jax.Array, places: jax.Array) -> jax.Array:
  return rows.at[places].get(mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(rows: jax.Array, plan: Plan, keep: int) -> jax.Array:
  """A token's row at each of its sorted places, [pairs, width]. Reverse mode, any order."""
  return _pick(rows, plan.pair // keep)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(rows: jax.Array, plan: Plan, keep: int) -> jax.Array:
  """The sum of a token's sorted rows, [tokens, width]. Reverse mode, any order."""
  return jnp.sum(_pick(rows, plan.row).reshape(-1, keep, rows.shape[-1]), axis=1)


# Each is the other's transpose: a derivative reads rows, where XLA's own would add to them.
spread.defvjp(
  lambda rows, plan, keep: (spread(rows, plan, keep), plan),
  lambda keep, plan, gradient: (collect(gradient, plan, keep), None),
)
collect.defvjp(
  lambda rows, plan, keep: (collect(rows, plan, keep), plan),
  lambda keep, plan, gradient: (spread(gradient, plan, keep), None),
)
