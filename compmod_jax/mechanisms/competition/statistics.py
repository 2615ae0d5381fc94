"""Router statistics: shares of assignments, weights by position; sums that add over batches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

Sums = dict[str, tuple[jax.Array, jax.Array]]

# The chance that a router whose units are equal is found to have a dead one.
CHANCE = 1e-6
# A unit is faint while its mean weight is below this part of an equal share.
FAINT = 0.1


def unit_kind(site: str) -> str:
  """What competes at a site, or in a module: heads, experts, mechanisms, or functions."""
  kinds = {"ffn": "expert", "mechanisms": "mechanism", "functions": "function"}
  return next((kind for part in site.split("/") if (kind := kinds.get(part))), "head")


def router_statistics(
  name: str,
  weights: Float[Array, "batch time units"],
  signatures: Float[Array, "units key"],
  rows: Bool[Array, "batch time"],
) -> Sums:
  """Statistics of one router over real tokens, as sums and counts; no gradient passes.

  Args:
    name: what the router is called.
    weights: of every unit at every position.
    signatures: a vector a unit.
    rows: true for real tokens.

  Returns:
    `router/<name>/weight`: mean weight of every unit; `.../wins`: assignment share, of tokens in
    which each unit's weight is the largest; `.../entropy`: of a token's weights, in nats;
    `.../signature_norm`: Euclidean norm of every unit's signature.
  """
  weights, signatures = jax.lax.stop_gradient((weights, signatures))
  count = jnp.sum(rows).astype(jnp.float32)
  assigned = jax.nn.one_hot(jnp.argmax(weights, axis=-1), weights.shape[-1])
  entropy = jnp.sum(jax.scipy.special.entr(weights), axis=-1, keepdims=True)
  weight, wins, total_entropy = (
    jnp.sum(jnp.where(rows[..., None], values, 0), axis=(0, 1))
    for values in (weights, assigned, entropy)
  )
  norms = jnp.sqrt(jnp.sum(jnp.square(signatures), axis=-1))
  return {
    f"router/{name}/weight": (weight, count),
    f"router/{name}/wins": (wins, count),
    f"router/{name}/entropy": (total_entropy[0], count),
    f"router/{name}/signature_norm": (norms, jnp.float32(1)),
  }


def waiting_statistics(
  name: str, waiting: Float[Array, "batch time"], rows: Bool[Array, "batch time"]
) -> Sums:
  """How many rows did not fit where they were sent, as a sum and a count; no gradient passes.

  Args:
    name: what the router is called.
    waiting: share of every position's choices that waited for another round.
    rows: true for real tokens.

  Returns:
    `router/<name>/waiting`: share of all choices.
  """
  waited = jnp.sum(jnp.where(rows, jax.lax.stop_gradient(waiting), 0))
  return {f"router/{name}/waiting": (waited, jnp.sum(rows).astype(jnp.float32))}


def least_tokens(units: int, chance: float = CHANCE) -> int:
  r"""Tokens among which every unit of an even router wins one, but for this chance.

  The least n with

  .. math:: H (1 - 1 / H)^n \le \mathrm{chance}

  for H units that win each token with probability 1 / H: 53 for 4 heads and 153 for 10.
  """
  if units < 2:
    return 1
  return math.ceil(math.log(chance / units) / math.log1p(-1 / units))


def since_last_assignment(
  before: Float[np.ndarray, "2 units"] | None,
  assigned: Float[np.ndarray, " units"],
  weight: Float[np.ndarray, " units"],
  tokens: float,
) -> Float[np.ndarray, "2 units"]:
  """Tokens since one was last assigned to each unit, and the sum of its weights over them.

  A unit that is assigned any of the new tokens starts again at 0.

  Args:
    before: what was counted so far; None for nothing.
    assigned: new tokens that were assigned to each unit, the one with the largest weight.
    weight: sums of each unit's weights over them.
    tokens: how many there are.
  """
  added = np.stack([np.full(len(assigned), float(tokens)), weight])
  return np.where(assigned > 0, 0.0, added if before is None else before + added)


def dead_units(since: Float[np.ndarray, "2 units"]) -> list[int]:
  """Units that won none of enough tokens and had next to no weight at them.

  Enough are `least_tokens`. A unit that never has the largest weight may still have a good share of
  it at every token: it is not dead. Dead is one whose mean weight is below `FAINT` of an equal
  share as well.

  Args:
    since: of `since_last_assignment`.
  """
  tokens, weight = since
  units = len(tokens)
  return np.flatnonzero(
    (tokens >= least_tokens(units)) & (weight * units < FAINT * tokens)
  ).tolist()


def weights_by_position(
  weights: Float[Array, "batch time units"], rows: Bool[Array, "batch time"], positions: int
) -> Sums:
  """Sums and counts of weights over all real tokens, and over those of each of the first positions.

  Args:
    weights: of every unit at every position.
    rows: true for real tokens.
    positions: how many positions to tell apart.

  Returns:
    `mean`: ([units], []), and `by_position`: ([positions, units], [positions]).
  """
  weights = jnp.where(rows[..., None], weights, 0)
  room = ((0, max(0, positions - rows.shape[1])), (0, 0))
  by_position = jnp.pad(jnp.sum(weights, axis=0), room)[:positions]
  counts = jnp.pad(jnp.sum(rows, axis=0), room[0])[:positions]
  return {
    "mean": (jnp.sum(weights, axis=(0, 1)), jnp.sum(rows)),
    "by_position": (by_position, counts),
  }
