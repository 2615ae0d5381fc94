"""The public functions, and the choice of how each is computed."""

import dataclasses
import functools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from compmod_jax.core import errors
from compmod_jax.kernels.attention import definition, gpu
from compmod_jax.kernels.attention.gpu import Plan
from compmod_jax.kernels.attention.visibility import Visibility
from compmod_jax.kernels.routing import reference
from compmod_jax.kernels.routing.blocks import Blocks
from compmod_jax.kernels.routing.dispatch import Implementation, Readout, make_plan
from compmod_jax.kernels.routing.reference import Choice

WIDEST = 128
"""Columns of a head that kernels take at most."""


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Queries and keys of a block, powers of two and at least 16."""

  forward: tuple[int, int] = (128, 64)
  backward: int = 64
  """Of queries and keys alike."""


def flash_attention(
  query: Float[Array, "batch queries heads head_dim"],
  key: Float[Array, "batch keys key_heads head_dim"],
  value: Float[Array, "batch keys key_heads head_dim"],
  *,
  weights: Float[Array, "batch queries heads"] | None = None,
  visibility: Visibility = Visibility(),
  implementation: Implementation | None = None,
  interpret: Hashable = False,
  tiles: Tiles = Tiles(),
) -> Float[Array, "batch queries heads head_dim"]:
  r"""Attention in every head times the head's weight, without an array of all pairs of positions.

  .. math::
     s_{ij} = C_{ij} \sum_k \mathrm{softmax}_{k \in V_j}(q_{ij} \cdot k_{ik} / \sqrt{D})\, v_{ik}

  The gradient with respect to a weight of 0 is given as 0, which is right where a softmax or a
  selection made the weight: their own derivative is 0 there.

  Args:
    query: Q.
    key: K; of heads in groups, one for every `heads / key_heads` of them.
    value: V.
    weights: C, float32; none for 1.
    visibility: V_j, the keys that a query may read; a query that may read none gets zeros.
    implementation: how; `None` for the best way that platform and shapes allow.
    interpret: run a named kernel without its hardware.
    tiles: sizes of blocks.

  Raises:
    UserError: a named implementation cannot do it, or heads are no multiple of key heads.
  """
  (batch, queries, heads, head_dim), (keys, key_heads) = query.shape, key.shape[1:3]
  if heads % key_heads:
    raise errors.UserError(
      f"flash_attention got {heads} heads of queries and {key_heads} of keys; they must be a multiple."
    )
  rows = [one.reshape(one.shape[0] * one.shape[1], -1) for one in (query, key, value)]
  columns = tuple((number, 0, head_dim) for number in range(3))
  plan = Plan(batch, queries, keys, heads, key_heads, head_dim, columns, order=_order(visibility))
  own = None if weights is None else weights.reshape(-1, heads).astype(jnp.float32)
  way = _way(plan, implementation, interpret, rows[0])
  args = (tuple(rows), own, visibility)
  if way is None:
    made = _attention_by_definition(args, plan=plan)
  else:
    made = _flash(way, plan, tiles)(args)
  return made.reshape(query.shape)


def _order(visibility: Visibility) -> Visibility:
  """What is static of it."""
  return dataclasses.replace(visibility, query_ids=None, key_ids=None)


def _way(plan, implementation, interpret, array):
  """The kernels that may run; None for the definition."""

  def refusals() -> dict[str, str | None]:
    refusal = None
    if plan.head_dim > WIDEST:
      refusal = f"heads of {plan.head_dim} are wider than {WIDEST}"
    elif array.dtype not in (jnp.float32, jnp.bfloat16):
      refusal = f"{array.dtype} is neither float32 nor bfloat16"
    elif 0 in (plan.batch, plan.queries, plan.keys):
      refusal = "there are no queries or no keys"
    return {"gpu": refusal, "tpu": "there is no such kernel yet"}

  return make_plan(implementation, interpret, Blocks(), refusals, array)
