"""The choice of how something is computed.

Both halves of a derivative rule run on the same implementation; the backward half can be
differentiated again, in reverse mode, as the reference.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
from jax import lax

from compmod_jax.core import errors
from compmod_jax.core.sharding import platform_of
from compmod_jax.kernels.routing import reference
from compmod_jax.kernels.routing.blocks import Blocks
from compmod_jax.kernels.routing.reference import Choice

Implementation = Literal["reference", "tpu", "gpu"]
_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}


@dataclasses.dataclass(frozen=True)
class Plan:
  """What may run: the kernels of the platforms in `kernels`, and, unless `exact`, the reference."""

  kernels: tuple[str, ...]
  exact: bool
  interpret: Any
  blocks: Blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def apply(name: str, static: tuple[tuple[str, Any], ...], plan: Plan, args: Any) -> Any:
  """Runs a function of the reference's name; its derivative is that of the reference.

  Reverse mode, any order.
  """
  return run(name, dict(static), plan, *args)


def _apply_forward(name: str, static: Any, plan: Plan, args: Any) -> Any:
  return apply(name, static, plan, args), args


def _apply_backward(name: str, static: Any, plan: Plan, args: Any, gradient: Any) -> Any:
  function = functools.partial(getattr(reference, name), **dict(static))
  return (jax.vjp(function, *args)[1](gradient),)


apply.defvjp(_apply_forward, _apply_backward)


def run(name: str, static: Mapping[str, Any], plan: Plan, *args: Any) -> Any:
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


def make_plan(
  implementation: Implementation | None,
  interpret: Any,
  blocks: Blocks,
  refusals: Mapping[str, str | None],
  array: jax.Array,
) -> Plan | None:
  """Which kernels may run; nothing if only the reference can.

  Args:
    implementation: a named one, or the best.
    interpret: whether it need not be for the platform that the program is traced for.
    blocks: sizes of blocks.
    refusals: why each kernel cannot do it.
    array: an argument, whose mesh may say what the program is for.

  Raises:
    UserError: the named one cannot do it.
  """
  platform = {"cuda": "gpu"}.get(name := platform_of(array), name)
  if implementation is None:
    kernels = tuple(one for one, refusal in refusals.items() if refusal is None)
    # Kernels of others are not even traced where a program is for CPUs.
    return Plan(kernels, False, False, blocks) if kernels and platform in refusals else None
  errors.check_choice("implementation", implementation, get_args(Implementation))
  if implementation == "reference":
    return None
  refusal = refusals[implementation]
  if refusal is None and not interpret and platform != implementation:
    refusal = f"the program is for a {platform}, and interpret is off"
  errors.check(
    refusal is None,
    f"implementation is {implementation!r}, which cannot run here: {refusal}. Leave it out for the"
    " best way that can, or set it to 'reference'.",
  )
  return Plan((implementation,), True, interpret, blocks)


def complete(choice: Choice, units: int) -> Choice:
  """The choice with `keep` filled in and checked."""
  errors.check_choice("choice.rule", choice.rule, get_args(reference.Rule))
  keep = choice.kept(units)
  errors.check(
    choice.rule != "top_k" or 1 <= keep <= units,
    f"choice.keep is {keep}; with {units} units it must lie between 1 and {units}.",
  )
  return dataclasses.replace(choice, keep=keep)
