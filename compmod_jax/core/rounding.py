"""Programs whose products with weights have operands in bfloat16, and sums in float32.

A search, or the gradients of a training step, are rewritten as a program: their jaxpr is evaluated
with other products. So it holds for every model; parameters, residual stream, normalisations,
caches and logits stay as they are. XLA takes the rounding of weights out of a loop over steps: they
are rounded once.

On CPUs that multiply bfloat16 (AVX-512 BF16, AMX) XLA's products of many rows with a matrix run
half again as fast or more, as long as their result is float32. Those that sum over rows, the
gradients of weights, gain nothing there and stay exact. One row alone waits for memory, and XLA:CPU
multiplies it in a plain loop; as one of four it goes through XLA's library, which reads half as
many bytes.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

R = TypeVar("R")
Products = Literal["model", "bfloat16"]
"""How products with weights are made: as the model says, or of operands rounded to bfloat16."""

_ROWS = 4  # fewest of a product on CPU
_RECOMPUTED = ("checkpoint", "remat2")  # names of one operation


def rounded(function: Callable[..., R]) -> Callable[..., R]:
  """The function, whose products of two float32 matrices have operands rounded to bfloat16.

  A product that asks for a precision keeps it, and so do those of stacked matrices, as attention
  has them, and those that sum over the rows of both, as gradients of weights do.
  """

  def run(*args: Any) -> R:
    program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    results = _evaluate(program, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), results)

  return run


def _rewritten(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
  return jax.make_jaxpr(functools.partial(_evaluate, program))(*program.in_avals)


def _evaluate(program: core.ClosedJaxpr, *args: Any) -> list[Any]:
  """Runs a program, and programs inside of it, with other products."""
  values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
  values |= zip(program.jaxpr.invars, args, strict=True)

  def read(atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]

  for equation in program.jaxpr.eqns:
    given = [read(atom) for atom in equation.invars]
    primitive, options = equation.primitive, equation.params
    if primitive is lax.dot_general_p and _is_rounded(given, options):
      made = [_product(given[0], given[1], options["dimension_numbers"])]
    else:
      inner = {key: _inside(value, primitive.name) for key, value in options.items()}
      with equation.ctx.manager:
        made = primitive.bind(*given, **primitive.get_bind_params(inner))
      made = made if primitive.multiple_results else [made]
    values |= zip(equation.outvars, made, strict=True)
  return [read(atom) for atom in program.jaxpr.outvars]


def _inside(value: Any, name: str) -> Any:
  """A parameter of an operation with this name, with the programs in it rewritten."""
  if isinstance(value, core.ClosedJaxpr):
    return _rewritten(value)
  if isinstance(value, core.Jaxpr) and name in _RECOMPUTED:
    program = _rewritten(core.ClosedJaxpr(value, ()))
    return value if program.consts else program.jaxpr
  if isinstance(value, tuple):
    items = [_inside(item, name) for item in value]
    changed = any(new is not old for new, old in zip(items, value, strict=True))
    return tuple(items) if changed else value  # named tuples have nothing inside
  return value


def _is_rounded(given: list[Any], options: dict[str, Any]) -> bool:
  matrices = all(jnp.ndim(one) == 2 and one.dtype == jnp.float32 for one in given)
  over_rows = options["dimension_numbers"][0] == ((0,), (0,))
  default = options["precision"] in (None, (lax.Precision.DEFAULT,) * 2)
  return matrices and default and not over_rows


def _product(left: jax.Array, right: jax.Array, numbers: Any) -> jax.Array:
  inner = numbers[0][0][0]
  rows, spare = left.shape[1 - inner], 0
  if jax.default_backend() == "cpu":
    spare = max(0, _ROWS - rows)
  padding = [(0, spare if axis != inner else 0) for axis in range(2)]
  left, right = jnp.pad(left, padding).astype(jnp.bfloat16), right.astype(jnp.bfloat16)
  made = lax.dot_general(left, right, numbers, preferred_element_type=jnp.float32)
  return made[:rows]
