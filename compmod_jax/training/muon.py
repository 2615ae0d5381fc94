r"""Muon: steps of hidden matrices are orthogonal, all others are Adam's.

.. math::
   m \leftarrow b_1 m + (1 - b_1) g, \qquad
   \Delta W = 0.2 \sqrt{\max(n, k)}\; \mathrm{orth}(b_1 m + (1 - b_1) g)

for a matrix of n by k, where orth sets all singular values to about 1 by Newton-Schulz iterations.
The factor gives the step the size of an Adam step, so that one learning rate serves both.

Source: Jordan et al. 2024 (Muon); Liu et al. 2025, section 2.2 (the factor).
"""

import math
from typing import Any, Literal

import jax
import optax
from jax.tree_util import KeyPath
from optax.contrib import MuonDimensionNumbers, scale_by_muon

Preconditioning = Literal["frobenius", "aol"]

_SIZE = 0.2  # root mean square of Adam's steps
# Depthwise kernels, and layers onto the vocabulary, which are tables like embeddings.
_OTHERS = ("mix", "head", "vanilla_head")


def matrices(params: optax.Params) -> dict[str, MuonDimensionNumbers]:
  """Name of every hidden matrix -> its axes of inputs and outputs; others lie along a batch."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    *_, module, last = ("", *_name(path).split("/"))
    axes = _axes(module, leaf.ndim) if last == "kernel" and module not in _OTHERS else None
    if axes is not None:
      found[_name(path)] = MuonDimensionNumbers(*axes)
  return found


def _name(path: KeyPath) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _axes(module: str, axes: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
  """Axes of inputs and outputs of a kernel with this number of axes."""
  if axes == 3 and module in ("up", "down"):  # of experts: [embed, experts, mlp] and back
    return ((0,), (2,)) if module == "up" else ((1,), (2,))
  # [inner, outer]; [heads, head_dim, embed]; [embed, heads, projections, head_dim]
  return {2: ((0,), (1,)), 3: ((0, 1), (2,)), 4: ((0,), (1, 3))}.get(axes)


def orthogonal(
  adam: optax.GradientTransformation,
  b1: float,
  *,
  steps: int = 5,
  preconditioning: Preconditioning = "frobenius",
) -> optax.GradientTransformationExtraArgs:
  """Adam with orthogonal steps for hidden matrices; the state is Adam's own.

  Args:
    adam: `optax.scale_by_adam`, or what has a state with its fields.
    b1: decay of its first moment.
    steps: Newton-Schulz iterations.
    preconditioning: what comes before them; `frobenius` divides a matrix by its norm, `aol` each of
      its rows by the root of the sum of its absolute products with all (Prach and Lampert 2022).
  """
  inner = optax.with_extra_args_support(adam)

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra: object,
  ) -> tuple[optax.Updates, optax.OptState]:
    found, after = inner.update(updates, state, params, **extra)
    numbers = matrices(updates)
    mean = optax.tree_utils.tree_get(after, "mu")
    ahead = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mean, updates)
    named = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(ahead)}
    chosen = {name: named[name] for name in numbers}
    # Without a memory of its own, it only orthogonalises.
    iteration: Any = scale_by_muon(
      beta=0.0,
      nesterov=False,
      ns_steps=steps,
      preconditioning=preconditioning,
      weight_dimension_numbers=numbers,
    )
    made, _ = iteration.update(chosen, iteration.init(chosen))

    def pick(path: KeyPath, step: jax.Array) -> jax.Array:
      name = _name(path)
      return _size(step.shape, numbers[name]) * made[name] if name in numbers else step

    return jax.tree_util.tree_map_with_path(pick, found), after

  return optax.GradientTransformationExtraArgs(adam.init, update)


def _size(shape: tuple[int, ...], numbers: MuonDimensionNumbers) -> float:
  inputs, outputs = (
    math.prod(shape[axis] for axis in ((axes,) if isinstance(axes, int) else axes))
    for axes in (numbers.reduction_axis, numbers.output_axis)
  )
  return _SIZE * math.sqrt(max(inputs, outputs))
