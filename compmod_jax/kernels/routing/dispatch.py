"""The public functions, the choice of how each is computed, and their derivative rules.

Both halves of a derivative rule run on the same implementation; the backward half can be
differentiated again, in reverse mode, as the reference.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from compmod_jax.core import errors
from compmod_jax.core.linear import exactly
from compmod_jax.core.sharding import platform_of
from compmod_jax.kernels.routing import reference, shapes
from compmod_jax.kernels.routing.blocks import Blocks
from compmod_jax.kernels.routing.reference import Choice

Implementation = Literal["reference", "tpu", "gpu"]
_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
_Static = tuple[tuple[str, Choice], ...]
"""Keyword arguments of a function of the reference, which compiled programs hold as constants."""


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
  interpret: Hashable = False,
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
  choice = dataclasses.replace(choice, keep=choice.kept(units))
  refusals = functools.partial(shapes.softmax, *rows.shape)
  plan = make_plan(implementation, interpret, blocks, refusals, rows)
  weights: jax.Array = (
    reference.softmax(rows, choice=choice) if plan is None else _softmax(choice, plan, rows)
  )
  return weights.reshape(scores.shape)


def routing_weights(
  inputs: Float[Array, "*rows hidden"],
  readout: Readout,
  *,
  choice: Choice = Choice(),
  implementation: Implementation | None = None,
  interpret: Hashable = False,
  blocks: Blocks = Blocks(),
) -> Float[Array, "*rows units"]:
  r"""Weights of competing units from hidden activations: nothing between is written.

  .. math:: C_j = \mathrm{select}(\mathrm{relu}(z_j) M + c)

  Args:
    inputs: z, the inference network's first layer before its relu.
    readout: see `fold_signatures`; M is rounded to the type of `inputs`.
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
  choice = dataclasses.replace(choice, keep=choice.kept(units))
  refusals = functools.partial(shapes.route, rows.shape, matrix.shape, rows.dtype, blocks)
  plan = make_plan(implementation, interpret, blocks, refusals, rows)
  weights: jax.Array
  if plan is None:
    weights = reference.route(rows, matrix, readout.bias, choice=choice)
  else:
    weights = _route(choice, plan, rows, matrix, readout.bias)
  return weights.reshape(*inputs.shape[:-1], units)


# The choice of how something is computed.


@dataclasses.dataclass(frozen=True)
class Plan:
  """What may run: the kernels of the platforms in `kernels`, and, unless `exact`, the reference."""

  kernels: tuple[str, ...]
  exact: bool
  interpret: Hashable
  blocks: Blocks


def make_plan(
  implementation: Implementation | None,
  interpret: Hashable,
  blocks: Blocks,
  refusals: Callable[[], Mapping[str, str | None]],
  array: jax.Array,
) -> Plan | None:
  """Which kernels may run; nothing if only the reference can.

  Args:
    implementation: a named one, or the best.
    interpret: whether it need not be for the platform that the program is traced for.
    blocks: sizes of blocks.
    refusals: says why each kernel cannot do it; asked where one might run.
    array: an argument, whose mesh may say what the program is for.

  Raises:
    UserError: the named one cannot do it.
  """
  platform = {"cuda": "gpu"}.get(name := platform_of(array), name)
  if implementation is None:
    if platform not in _PLATFORMS:  # kernels are not even traced where a program is for CPUs
      return None
    kernels = tuple(one for one, refusal in refusals().items() if refusal is None)
    return Plan(kernels, False, False, blocks) if kernels else None
  errors.check_choice("implementation", implementation, get_args(Implementation))
  if implementation == "reference":
    return None
  refusal = refusals()[implementation]
  if refusal is None and not interpret and platform != implementation:
    refusal = f"the program is for a {platform}, and interpret is off"
  errors.check(
    refusal is None,
    f"implementation is {implementation!r}, which cannot run here: {refusal}. Leave it out for the"
    " best way that can, or set it to 'reference'.",
  )
  return Plan((implementation,), True, interpret, blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _apply(name: str, static: _Static, plan: Plan, args: tuple[jax.Array, ...]) -> PyTree:
  """Runs a function of the reference's name; its derivative is that of the reference.

  Reverse mode, any order.
  """
  return _run(name, dict(static), plan, *args)


def _apply_forward(
  name: str, static: _Static, plan: Plan, args: tuple[jax.Array, ...]
) -> tuple[PyTree, tuple[jax.Array, ...]]:
  return _apply(name, static, plan, args), args


def _apply_backward(
  name: str, static: _Static, plan: Plan, args: tuple[jax.Array, ...], gradient: PyTree
) -> tuple[tuple[jax.Array, ...]]:
  function = functools.partial(getattr(reference, name), **dict(static))
  return (jax.vjp(function, *args)[1](gradient),)


_apply.defvjp(_apply_forward, _apply_backward)


def _run(name: str, static: Mapping[str, Choice], plan: Plan, *args: jax.Array) -> PyTree:
  """Runs the planned kernel, or that of the platform which the program is lowered for."""
  options = {**static, "blocks": plan.blocks, "interpret": plan.interpret}
  kernels = {
    _PLATFORMS[platform]: functools.partial(_kernel(platform, name), **options)
    for platform in plan.kernels
  }
  if plan.exact:
    (kernel,) = kernels.values()
    return kernel(*args)
  default = functools.partial(getattr(reference, name), **static)
  return lax.platform_dependent(*args, **kernels, default=default)


@functools.cache
def _kernel(platform: str, name: str) -> Callable[..., Any]:
  """A kernel, traced once for each shape; its compiler is imported when first needed."""
  module = importlib.import_module(f"compmod_jax.kernels.routing.{platform}")
  function = getattr(module, name)
  parameters = inspect.signature(function).parameters.values()
  static = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
  return jax.jit(function, static_argnames=static)


# The derivative rules.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _softmax(choice: Choice, plan: Plan, scores: jax.Array) -> jax.Array:
  """Weights of scores. Reverse mode, any order."""
  return _run("softmax", {"choice": choice}, plan, scores)


def _softmax_forward(choice: Choice, plan: Plan, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
  weights: jax.Array = _softmax(choice, plan, scores)
  return weights, weights


def _softmax_backward(
  choice: Choice, plan: Plan, weights: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
  return (_apply("softmax_backward", (("choice", choice),), plan, (weights, gradient)),)


_softmax.defvjp(_softmax_forward, _softmax_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _route(
  choice: Choice, plan: Plan, rows: jax.Array, matrix: jax.Array, bias: jax.Array
) -> jax.Array:
  """Weights of rows. Reverse mode, any order."""
  return _run("route", {"choice": choice}, plan, rows, matrix, bias)


def _route_forward(
  choice: Choice, plan: Plan, rows: jax.Array, matrix: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
  weights: jax.Array = _route(choice, plan, rows, matrix, bias)
  return weights, (rows, matrix, weights)


def _route_backward(
  choice: Choice, plan: Plan, kept: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  return _apply("route_backward", (("choice", choice),), plan, (*kept, gradient))


_route.defvjp(_route_forward, _route_backward)
