"""The public functions and their derivative rules."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from compmod_jax.core import errors
from compmod_jax.core.linear import exactly
from compmod_jax.kernels.routing import reference, shapes
from compmod_jax.kernels.routing.blocks import Blocks
from compmod_jax.kernels.routing.plan import Implementation, Plan, apply, complete, make_plan, run
from compmod_jax.kernels.routing.reference import Choice, First


class Readout(NamedTuple):
  """From hidden activations of the inference network to scores.

  Attributes:
    kernel: M, float32.
    bias: c, float32.
  """

  kernel: Float[Array, "hidden units"]
  bias: Float[Array, " units"]

  def scores(self, inputs: Float[Array, "*rows hidden"]) -> Float[Array, "*rows units"]:
    r"""Scores :math:`\mathrm{relu}(x) M + c`, float32, where they are wanted by themselves.

    Args:
      inputs: hidden activations before their relu; M is rounded to their type.
    """
    kernel = self.kernel.astype(inputs.dtype)
    made = jnp.matmul(
      jnp.maximum(inputs, 0),
      kernel,
      precision=exactly(kernel.dtype),
      preferred_element_type=jnp.float32,
    )
    return made + jnp.expand_dims(self.bias, range(made.ndim - 1))


def fold_signatures(
  kernel: Float[Array, "hidden key"],
  bias: Float[Array, " key"],
  signatures: Float[Array, "units key"],
  *,
  scale: bool = True,
  mask: Bool[Array, " units"] | None = None,
) -> Readout:
  r"""The last layer of the inference network multiplied with the signatures beforehand.

  .. math:: M = W_2 A^\top / \sqrt{D_a}, \qquad c = A b_2 / \sqrt{D_a}

  so that keys [tokens, key] are never formed.

  Args:
    kernel: W_2.
    bias: b_2.
    signatures: A.
    scale: divide by the square root of the key width.
    mask: units that take part anywhere; the others get scores of minus infinity.
  """
  kernel, bias, signatures = (x.astype(jnp.float32) for x in (kernel, bias, signatures))
  factor = 1 / jnp.sqrt(jnp.float32(kernel.shape[1])) if scale else 1.0
  exactly = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
  shift = exactly(signatures, bias) * factor
  shift = shift if mask is None else jnp.where(mask, shift, -jnp.inf)
  return Readout(exactly(kernel, signatures.T) * factor, shift)


def routing_softmax(
  scores: Float[Array, "*rows units"],
  *,
  choice: Choice = Choice(),
  mask: Bool[Array, "#*rows units"] | None = None,
  implementation: Implementation | None = None,
  interpret: Any = False,
  blocks: Blocks = Blocks(),
) -> Float[Array, "*rows units"]:
  r"""Weights of competing units, :math:`C_{ij} = \mathrm{softmax}_{i \in S_j}(s_{ij} / \tau)`.

  Args:
    scores: compatibilities; one of minus infinity takes no part.
    choice: which units stay.
    mask: units that may take part.
    implementation: how; `None` for the best way that platform and shapes allow.
    interpret: run a named kernel without its hardware: true, or `pltpu.InterpretParams()`.
    blocks: sizes of blocks.

  Returns:
    float32 weights that sum to 1 over the units that stay; 0 where nothing is left.

  Raises:
    UserError: a named implementation cannot do it.
  """
  units = scores.shape[-1]
  if mask is not None:
    scores = jnp.where(mask, scores, -jnp.inf)
  rows = jnp.reshape(scores, (-1, units)).astype(jnp.float32)
  choice = complete(choice, units)
  refusals = shapes.softmax(*rows.shape)
  plan = make_plan(implementation, interpret, blocks, refusals, rows)
  weights: Any = (
    reference.softmax(rows, choice=choice) if plan is None else _softmax(choice, plan, rows)
  )
  return weights.reshape(scores.shape)


def routing_weights(
  inputs: Float[Array, "*rows inner"],
  readout: Readout,
  *,
  first: First | None = None,
  choice: Choice = Choice(),
  implementation: Implementation | None = None,
  interpret: Any = False,
  blocks: Blocks = Blocks(),
) -> Float[Array, "*rows units"]:
  r"""Weights of competing units straight from activations: nothing between is written.

  .. math:: C_j = \mathrm{select}(\mathrm{relu}(x_j W_1 + b_1) M + c)

  Args:
    inputs: activations x or, without `first`, :math:`x W_1 + b_1` that another product made.
    readout: see `fold_signatures`; M is rounded to the type of `inputs`.
    first: W_1 [embed, hidden] and b_1 [hidden].
    choice: which units stay.
    implementation: how; `None` for the best way that platform and shapes allow.
    interpret: run a named kernel without its hardware: true, or `pltpu.InterpretParams()`.
    blocks: sizes of blocks.

  Returns:
    float32 weights, as `routing_softmax` gives them.

  Raises:
    UserError: a named implementation cannot do it.
  """
  rows = inputs.reshape(-1, inputs.shape[-1])
  matrix, units = readout.kernel.astype(inputs.dtype), readout.kernel.shape[1]
  choice = complete(choice, units)
  if first is not None:
    first = first[0].astype(inputs.dtype), first[1]
  refusals = shapes.route(rows.shape, matrix.shape, first is not None, rows.dtype, blocks)
  plan = make_plan(implementation, interpret, blocks, refusals, rows)
  weights: Any
  if plan is None:
    weights, _ = reference.route(rows, first, matrix, readout.bias, choice=choice)
  else:
    weights = _route(choice, plan, rows, first, matrix, readout.bias)
  return weights.reshape(*inputs.shape[:-1], units)


def scaled_projection(
  weights: Float[Array, "*rows heads"],
  heads: Float[Array, "*rows features"],
  kernel: Float[Array, "features embed"],
  *,
  implementation: Implementation | None = None,
  interpret: Any = False,
  blocks: Blocks = Blocks(),
) -> Float[Array, "*rows embed"]:
  r"""Head outputs times their weights, through the output projection, in one pass.

  .. math:: y_j = \sum_i C_{ij}\, \tilde o_{ij} W_{O,i}

  Args:
    weights: C, float32.
    heads: outputs of all heads side by side.
    kernel: W_O; rounded to the type of `heads`.
    implementation: how; `None` for the best way that platform and shapes allow.
    interpret: run a named kernel without its hardware: true, or `pltpu.InterpretParams()`.
    blocks: sizes of blocks.

  Raises:
    UserError: a named implementation cannot do it, or the features are no multiple of the heads.
  """
  (features, embed), units = kernel.shape, weights.shape[-1]
  errors.check(
    features % units == 0,
    f"scaled_projection got {features} features for {units} heads; they must be a multiple.",
  )
  scale, rows = weights.reshape(-1, units), heads.reshape(-1, features)
  refusals = shapes.project(scale.shape, kernel.shape, rows.dtype, blocks)
  plan = make_plan(implementation, interpret, blocks, refusals, rows)
  project = reference.project if plan is None else functools.partial(_project, plan)
  out = project(scale.astype(jnp.float32), rows, kernel.astype(rows.dtype))
  return out.reshape(*heads.shape[:-1], embed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _softmax(choice: Choice, plan: Plan, scores: jax.Array) -> jax.Array:
  """Weights of scores. Reverse mode, any order."""
  return run("softmax", {"choice": choice}, plan, scores)


def _softmax_forward(choice: Choice, plan: Plan, scores: jax.Array) -> Any:
  weights = _softmax(choice, plan, scores)
  return weights, weights


def _softmax_backward(choice: Choice, plan: Plan, weights: jax.Array, gradient: jax.Array) -> Any:
  return (apply("softmax_backward", (("choice", choice),), plan, (weights, gradient)),)


_softmax.defvjp(_softmax_forward, _softmax_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _route(
  choice: Choice,
  plan: Plan,
  rows: jax.Array,
  first: First | None,
  matrix: jax.Array,
  bias: jax.Array,
) -> jax.Array:
  """Weights of rows. Reverse mode, any order."""
  static = {"choice": choice, "keep_hidden": False}
  return run("route", static, plan, rows, first, matrix, bias)[0]


def _route_forward(choice: Choice, plan: Plan, *args: Any) -> Any:
  static = (("choice", choice), ("keep_hidden", True))
  made: Any = apply("route", static, plan, args)
  weights, hidden = made
  rows, first, matrix, _ = args
  return weights, (rows, hidden, first, matrix, weights)


def _route_backward(choice: Choice, plan: Plan, kept: Any, gradient: jax.Array) -> Any:
  return apply("route_backward", (("choice", choice),), plan, (*kept, gradient))


_route.defvjp(_route_forward, _route_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(plan: Plan, weights: jax.Array, heads: jax.Array, kernel: jax.Array) -> jax.Array:
  """Scaled heads, projected. Reverse mode, any order."""
  return run("project", {}, plan, weights, heads, kernel)


def _project_forward(plan: Plan, *args: Any) -> Any:
  return _project(plan, *args), args


def _project_backward(plan: Plan, args: Any, gradient: jax.Array) -> Any:
  return apply("project_backward", (), plan, (*args, gradient))


_project.defvjp(_project_forward, _project_backward)
