"""The public function, the choice of how it is computed, and its derivative rule.

Both halves of the rule run on the same implementation; the backward half can be differentiated
again, in reverse mode, as the definition.
"""

import functools
import importlib
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from compmod_jax.core.errors import UserError
from compmod_jax.core.losses import LabelStatistics
from compmod_jax.kernels.cross_entropy import definition
from compmod_jax.kernels.cross_entropy.blocks import Blocks, refusal
from compmod_jax.kernels.routing import Blocks as RoutingBlocks
from compmod_jax.kernels.routing.dispatch import Plan, make_plan

Implementation = Literal["reference", "tpu"]


def label_statistics(
  hidden: Float[Array, "rows dim"],
  table: Float[Array, "vocab dim"],
  labels: Int[Array, " rows"],
  bias: Float[Array, " vocab"] | None = None,
  *,
  implementation: Implementation | None = None,
  interpret: Hashable = False,
  blocks: Blocks = Blocks(),
) -> LabelStatistics:
  r"""What the loss of every row's label needs of the logits :math:`l_{nv} = h_n \cdot e_v + b_v`.

  Logits are float32; with a kernel they are never written to memory, nor are their gradients.

  Args:
    hidden: h, what the output layer reads.
    table: e, a vector for every word, in the same type.
    labels: the right words.
    bias: b, float32; none for zeros.
    implementation: how; `None` for the best way that platform and shapes allow.
    interpret: run a named kernel without its hardware: true, or `pltpu.InterpretParams()`.
    blocks: sizes of blocks.

  Raises:
    UserError: a named implementation cannot do it, or the widths differ.

  Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models".
  """
  kinds = [f"{one.shape[1]} columns in {one.dtype}" for one in (hidden, table)]
  if kinds[0] != kinds[1]:
    raise UserError(
      f"label_statistics got rows of {kinds[0]} and a table of {kinds[1]}; they must be equal."
    )
  plan = _plan(hidden, hidden.shape, hidden.dtype, implementation, interpret, blocks)
  if plan is None:
    return definition.label_statistics(hidden, table, labels, bias)
  return _statistics(_Run(plan.exact, plan.interpret, blocks), hidden, table, labels, bias)


def kernel_for(array: jax.Array, rows: int, dim: int, dtype: DTypeLike) -> str | None:
  """Platform whose kernel `label_statistics` runs in, as it is traced; none where it runs in none.

  Args:
    array: whose mesh may say what the program is for.
    rows: how many there are.
    dim: their columns.
    dtype: their type.
  """
  plan = _plan(array, (rows, dim), dtype, None, False, Blocks())
  return None if plan is None else plan.kernels[0]


def _plan(
  array: jax.Array,
  shape: tuple[int, ...],
  dtype: DTypeLike,
  implementation: Implementation | None,
  interpret: Hashable,
  blocks: Blocks,
) -> Plan | None:
  """The kernel that may run; None for the definition."""

  def refusals() -> dict[str, str | None]:
    rows, dim = shape
    if rows == 0:
      found = "there are no rows"
    elif jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
      found = f"{jnp.dtype(dtype)} is neither float32 nor bfloat16"
    else:
      found = refusal(dim, dtype, blocks)
    return {"tpu": found, "gpu": "it has no kernel for GPUs"}

  return make_plan(implementation, interpret, RoutingBlocks(), refusals, array)


# The derivative rule.


class _Run(NamedTuple):
  """How the kernel runs: whether on any platform, whether interpreted, and its blocks."""

  exact: bool
  interpret: Hashable
  blocks: Blocks

  def choose(self, name: str, default: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """The kernel of this name, or the default where a program is lowered for another platform."""

    def kernel(*args: PyTree) -> PyTree:
      function = getattr(_kernels(), name)
      return function(*args, blocks=self.blocks, interpret=self.interpret)

    return (
      kernel(*args) if self.exact else lax.platform_dependent(*args, tpu=kernel, default=default)
    )


@functools.cache
def _kernels() -> ModuleType:
  """Their compiler is imported when first needed."""
  return importlib.import_module("compmod_jax.kernels.cross_entropy.tpu")


_Gradients = tuple[jax.Array, jax.Array, jax.Array | None]
"""Of rows, table and bias."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
  how: _Run, hidden: jax.Array, table: jax.Array, labels: jax.Array, bias: jax.Array | None
) -> LabelStatistics:
  """See `label_statistics`. Reverse mode, any order."""
  return how.choose("forward", definition.label_statistics, hidden, table, labels, bias)


_Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]


def _statistics_forward(
  how: _Run, hidden: jax.Array, table: jax.Array, labels: jax.Array, bias: jax.Array | None
) -> tuple[LabelStatistics, _Kept]:
  found: LabelStatistics = _statistics(how, hidden, table, labels, bias)
  return found, (hidden, table, labels, bias, found.normaliser)


def _statistics_backward(
  how: _Run, kept: _Kept, slopes: LabelStatistics
) -> tuple[jax.Array, jax.Array, None, jax.Array | None]:
  gradients: _Gradients = _gradients(how, *kept, slopes)
  d_hidden, d_table, d_bias = gradients
  return d_hidden, d_table, None, d_bias


_statistics.defvjp(_statistics_forward, _statistics_backward)


def _defined(
  hidden: jax.Array,
  table: jax.Array,
  labels: jax.Array,
  bias: jax.Array | None,
  slopes: LabelStatistics,
) -> _Gradients:
  """The definition's gradients."""

  def statistics(hidden: jax.Array, table: jax.Array, bias: jax.Array | None) -> LabelStatistics:
    return definition.label_statistics(hidden, table, labels, bias)

  return jax.vjp(statistics, hidden, table, bias)[1](slopes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
  how: _Run,
  hidden: jax.Array,
  table: jax.Array,
  labels: jax.Array,
  bias: jax.Array | None,
  normaliser: jax.Array,
  slopes: LabelStatistics,
) -> _Gradients:
  """The derivatives of `_statistics`. Reverse mode, any order.

  Args:
    how: the kernel runs.
    hidden: as there.
    table: as there.
    labels: as there.
    bias: as there.
    normaliser: as the statistics have it; a function of the others, by itself without a derivative.
    slopes: gradients with respect to the statistics.
  """

  def default(*args: PyTree) -> _Gradients:
    hidden, table, labels, bias, _, slopes = args
    return _defined(hidden, table, labels, bias, slopes)

  return how.choose("backward", default, hidden, table, labels, bias, normaliser, slopes)


def _gradients_forward(how: _Run, *args: PyTree) -> tuple[_Gradients, tuple[PyTree, ...]]:
  hidden, table, labels, bias, _, slopes = args
  return _gradients(how, *args), (hidden, table, labels, bias, slopes)


def _gradients_backward(how: _Run, kept: PyTree, second: PyTree) -> tuple[PyTree, ...]:
  hidden, table, labels, bias, slopes = kept

  def gradients(
    hidden: jax.Array, table: jax.Array, bias: jax.Array | None, slopes: LabelStatistics
  ) -> PyTree:
    return _defined(hidden, table, labels, bias, slopes)

  d_hidden, d_table, d_bias, d_slopes = jax.vjp(gradients, hidden, table, bias, slopes)[1](second)
  return d_hidden, d_table, None, d_bias, None, d_slopes


_gradients.defvjp(_gradients_forward, _gradients_backward)
