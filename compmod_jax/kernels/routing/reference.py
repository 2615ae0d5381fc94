r"""The definition of what the kernels of this folder compute, in plain array operations.

.. math::
   s_j = \mathrm{relu}(z_j) M + c, \quad
   C_{ij} = \mathrm{softmax}_{i \in S_j}(s_{ij} / \tau)

z_j is the inference network's first layer before its relu, S_j are the units that the rule keeps at
position j. A score of minus infinity takes no part in the competition; a position where nothing is
left has weights of 0.

`softmax` and `route` are the definition: automatic differentiation of them gives the gradients. The
functions `*_backward` say the same gradients in closed form, from what the forward pass kept; they
are what runs where there is no kernel.

Source: Kolios 2023, section 5.3.2, equation 5.3, Table 5.3 and section 5.4.
"""

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from compmod_jax.core import errors
from compmod_jax.core.linear import exactly

Rule = Literal["soft", "top_k", "threshold"]

# Finite, so that a row with nothing left stays free of NaN; far below any score of a float32 model.
MASKED = -1e30


class Selection(NamedTuple):
  """Outcome of a competition.

  Attributes:
    weights: float32, sum to 1 over the active units, 0 elsewhere.
    active: which units stayed.
  """

  weights: Float[Array, "*rows units"]
  active: Bool[Array, "*rows units"]


@dataclasses.dataclass(frozen=True)
class Choice:
  """Which units stay, see `select`."""

  rule: Rule = "soft"
  keep: int | None = None
  threshold: float = 0.0
  temperature: float = 1.0

  def kept(self, units: int) -> int:
    """Units that stay under `top_k`: all but one if `keep` is not given.

    Raises:
      UserError: there is no such rule, or not as many units.
    """
    keep = max(1, units - 1) if self.keep is None else self.keep
    if self.rule not in get_args(Rule):
      raise errors.UserError(
        f"choice.rule is {errors.short(self.rule)}; it must be one of: {', '.join(get_args(Rule))}."
      )
    if self.rule == "top_k" and not 1 <= keep <= units:
      raise errors.UserError(
        f"choice.keep is {keep}; with {units} units it must lie between 1 and {units}."
      )
    return keep


def rank(scores: Float[Array, "*rows units"]) -> Float[Array, "*rows units"]:
  """Number of units that beat each unit; ties go to the lower index, so ranks are distinct.

  Counting needs no sort. No unit is compared with itself: a compiler may compute the two sides of a
  comparison apart, and round them differently.
  """
  shape = (*scores.shape, scores.shape[-1])
  mine, other = (lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2 + side) for side in (0, 1))
  score, rival = scores[..., :, None], scores[..., None, :]
  beats = jnp.where(other < mine, rival >= score, (rival > score) & (other > mine))
  return jnp.sum(beats, axis=-1).astype(jnp.float32)


def _softmax(scores: jax.Array, active: jax.Array) -> jax.Array:
  """Softmax over the active units; a row without any gives zeros, and zero gradients."""
  scores = jnp.where(active, scores, MASKED)
  exponent = scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  numerator = jnp.where(active, jnp.exp(exponent), 0.0)
  total = jnp.sum(numerator, axis=-1, keepdims=True)
  return numerator / jnp.where(total > 0, total, 1.0)


def select(
  scores: Float[Array, "*rows units"],
  *,
  rule: Rule = "soft",
  keep: int | None = None,
  threshold: float = 0.0,
  temperature: float = 1.0,
  mask: Bool[Array, "#*rows units"] | None = None,
) -> Selection:
  r"""Weights of the units of every position.

  .. math:: C_{ij} = \mathrm{softmax}_{i \in S_j}(s_{ij} / \tau)

  with S_j all units (`soft`), the `keep` best ones, ties to the lower index (`top_k`), or those
  whose softmax weight is at least `threshold`, the best one always among them (`threshold`).
  Gradients reach the surviving scores only.

  Args:
    scores: compatibilities, dimensionless.
    rule: which units stay.
    keep: units that stay under `top_k`; all but one if not given.
    threshold: smallest weight that stays under `threshold`.
    temperature: divides the scores.
    mask: units that may take part; a row without any gives zeros.

  Source: Kolios 2023, equation 5.3, Table 5.3 and section 5.4.
  """
  scores = scores.astype(jnp.float32) / temperature
  allowed = jnp.ones(scores.shape, bool)
  if scores.shape[-1] == 1 and mask is None:
    # A constant, so that the compiler leaves the scaling by it out.
    return Selection(jnp.ones_like(scores), allowed)
  if mask is not None:
    allowed = jnp.broadcast_to(mask, scores.shape)
  active = allowed
  if rule != "soft":
    order = rank(jnp.where(allowed, scores, MASKED))
    if rule == "top_k":
      active = allowed & (order < Choice(rule, keep).kept(scores.shape[-1]))
    else:
      active = allowed & ((_softmax(scores, allowed) >= threshold) | (order < 1))
  return Selection(_softmax(scores, active), active)


def softmax(scores: jax.Array, *, choice: Choice) -> jax.Array:
  """Weights [tokens, units], float32, from scores [tokens, units]."""
  return select(scores, mask=scores != -jnp.inf, **vars(choice)).weights


def route(rows: jax.Array, readout: jax.Array, bias: jax.Array, *, choice: Choice) -> jax.Array:
  """Weights [tokens, units], float32, from the inference network's first layer before its relu.

  Args:
    rows: [tokens, hidden].
    readout: M [hidden, units], of the type of `rows`.
    bias: c [units], float32.
    choice: which units stay.
  """
  hidden = jnp.maximum(rows, 0).astype(readout.dtype)
  return softmax(_product(hidden, readout) + bias[None], choice=choice)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
  """A product of the router, which decides who wins: float32 operands are not rounded for it."""
  precision = exactly(left.dtype)
  return jnp.matmul(left, right, precision=precision, preferred_element_type=jnp.float32)


def slopes(weights: jax.Array, gradient: jax.Array, temperature: float, axis: int) -> jax.Array:
  """Gradient with respect to scores, from weights and the gradient with respect to them."""
  mean = jnp.sum(weights * gradient, axis=axis, keepdims=True)
  return weights * (gradient - mean) / temperature


def softmax_backward(weights: jax.Array, gradient: jax.Array, *, choice: Choice) -> jax.Array:
  """Gradient of `softmax` with respect to scores, float32."""
  return slopes(weights, gradient, choice.temperature, axis=-1)


def route_backward(
  rows: jax.Array, readout: jax.Array, weights: jax.Array, gradient: jax.Array, *, choice: Choice
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of `route` with respect to rows, readout and bias.

  Args:
    rows: as in `route`.
    readout: as in `route`.
    weights: what `route` returned.
    gradient: with respect to it.
    choice: as in `route`.
  """
  hidden = jnp.maximum(rows, 0)
  slope = softmax_backward(weights, gradient, choice=choice)
  exact = slope.astype(hidden.dtype)
  below = jnp.where(hidden > 0, _product(exact, readout.T), 0).astype(hidden.dtype)
  return below, _product(hidden.T, exact).astype(readout.dtype), jnp.sum(slope, axis=0)
