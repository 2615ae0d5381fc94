"""Floating-point operations of the matrix products of a program, as it was written.

This is what utilisation is measured by (Chowdhery et al. 2022, appendix B): what XLA adds or saves,
and work on single elements, counts nothing. Loops count as often as they run, but for those of a
kernel that says itself how many operations its products have; those whose turns depend on data,
of a kernel's grid, too, count once, and not at all where they are in `scopes.IF_NEEDED`. With
`model` only what the model needs counts: no product in `scopes.SELECTION`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.lax import DotDimensionNumbers

from compmod_jax.core import scopes


def count(jaxpr: Jaxpr | ClosedJaxpr, platform: str = "tpu", *, model: bool = False) -> float:
  """Operations of all devices together; a product of matrices [n, k] and [k, m] has 2 n k m.

  Args:
    jaxpr: of a traced function, such as `jax.jit(f).trace(x).jaxpr`.
    platform: whose branches count where a program has one for each.
    model: leave out products that only select rows.
  """
  return float(sum(_operations(one, platform, model) for one in _open(jaxpr).eqns))


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
  return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _operations(equation: JaxprEqn, platform: str, model: bool) -> float:
  name, params = equation.primitive.name, equation.params
  scope = str(equation.source_info.name_stack)
  if (model and scopes.SELECTION in scope) or (name == "while" and scopes.IF_NEEDED in scope):
    return 0.0
  if name == "dot_general":
    return _product(equation, params["dimension_numbers"])
  if name == "ragged_dot_general":
    numbers = params["ragged_dot_dimension_numbers"]
    whole = _product(equation, numbers.dot_dimension_numbers)
    # Where the groups lie along what is summed, each group has a result of its own.
    contracted = numbers.dot_dimension_numbers[0][0]
    grouped = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    return whole / _array(equation.invars[2]).shape[-1] if grouped else whole
  if name == "conv_general_dilated":
    kernel, numbers = _array(equation.invars[1]), params["dimension_numbers"]
    taken = kernel.size // kernel.shape[numbers.rhs_spec[0]]
    return 2 * _array(equation.outvars[0]).size * taken
  estimate = params.get("cost_estimate") if name == "pallas_call" else None
  if estimate is not None:  # of a kernel whose loops end where its data say
    return float(estimate.flops)
  inner = [count(one, platform, model=model) for one in _programs(params)]
  if name == "cond":
    return _branch(inner, params.get("branches_platforms"), platform)
  return _times(name, params) * sum(inner)


def _product(equation: JaxprEqn, numbers: DotDimensionNumbers) -> float:
  (contracted, _), _ = numbers
  left = _array(equation.invars[0]).shape
  return 2 * _array(equation.outvars[0]).size * math.prod(left[axis] for axis in contracted)


def _array(variable: Var | Literal) -> Any:
  """What is known of the array that a variable holds; JAX's type of it has no shape."""
  return variable.aval


def _branch(
  inner: list[float], platforms: Sequence[Sequence[str] | None] | None, platform: str
) -> float:
  """The branch of a platform, the last one of any other; of ordinary branches the largest."""
  if not platforms:
    return max(inner, default=0.0)
  named = [number for number, names in enumerate(platforms) if names and platform in names]
  return inner[named[0] if named else -1]


def _times(name: str, params: Mapping[str, Any]) -> int:
  """How often an equation runs what it holds, on all devices."""
  if name == "scan":
    return params["length"]
  if name == "shard_map":
    # Called otherwise in other versions of JAX.
    axes = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    return math.prod(params["mesh"].shape[axis] for axis in axes)
  if name == "pallas_call":
    return math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
  return 1


def _programs(params: Mapping[str, Any]) -> Iterator[Jaxpr | ClosedJaxpr]:
  for value in params.values():
    for one in value if isinstance(value, tuple | list) else (value,):
      if isinstance(one, Jaxpr | ClosedJaxpr):
        yield one
