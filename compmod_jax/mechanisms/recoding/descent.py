r"""Recoding: activations corrected by gradient steps on an error signal, in training and in use.

.. math:: h' = h - \alpha \nabla_h \delta(h)

The signal is summed over the batch before the gradient is taken, so that every example has its own
gradient, whatever the batch size. Nothing here knows a model: `recode` takes any function from a
tree of activations to an error for each example.

Source: Ulmer 2019, equation 4.1.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from compmod_jax.core.errors import check

Activations = TypeVar("Activations")
"""Any tree of arrays [batch, ...]."""
Signal = Callable[[Activations], Float[Array, " batch"]]
StepSize: TypeAlias = PyTree
"""A number, one for each example [batch], or a tree of those like the activations."""


class Recoded(NamedTuple):
  """Activations after recoding.

  Attributes:
    activations: the corrected ones, like those given.
    error: the signal before, [batch].
    gradients: of the signal at the activations given, summed over the batch, like them.
  """

  activations: PyTree
  error: jax.Array
  gradients: PyTree


def recode(
  signal: Signal[Activations],
  activations: Activations,
  step_size: StepSize,
  *,
  steps: int = 1,
  through: bool = False,
) -> Recoded:
  """Lowers an error signal by gradient steps on activations.

  Args:
    signal: from activations to an error for each example.
    activations: any tree of arrays [batch, ...].
    step_size: alpha; see `StepSize`. The gradient of a training loss reaches it.
    steps: gradient steps, each at the activations that the one before gave.
    through: the gradient of a training loss also passes through the recoding gradient (second
      order); else that counts as constant.

  Raises:
    UserError: `steps` is below 1.
  """
  check(steps >= 1, f"steps is {steps}; recoding takes at least 1.")
  first: tuple[jax.Array, Activations] | None = None
  for _ in range(steps):
    error, gradients = _error_and_gradients(signal, activations)
    if not through:
      gradients = lax.stop_gradient(gradients)
    first = first or (error, gradients)
    activations = descend(activations, gradients, step_size)
  assert first is not None
  return Recoded(activations, *first)


def _error_and_gradients(
  signal: Signal[Activations], activations: Activations
) -> tuple[jax.Array, Activations]:
  def total(activations: Activations) -> tuple[jax.Array, jax.Array]:
    error = signal(activations)
    return jnp.sum(error), error

  (_, error), gradients = jax.value_and_grad(total, has_aux=True)(activations)
  return error, gradients


def descend(activations: Activations, gradients: Activations, step_size: StepSize) -> Activations:
  """Activations less step sizes times gradients; step sizes as in `recode`."""
  sizes = _like(step_size, activations)
  return jax.tree.map(
    lambda value, gradient, size: value - _spread(size, value) * gradient,
    activations,
    gradients,
    sizes,
  )


def descend_safely(
  signal: Signal[Activations],
  activations: Activations,
  gradients: Activations,
  step_size: StepSize,
  *,
  halvings: int = 20,
) -> tuple[Activations, Float[Array, " batch"]]:
  r"""Gradient steps that never raise the error: each example's step is halved until it does not.

  With a step of :math:`1/L`, L the Lipschitz constant of the signal's gradient, the first try does
  (Ulmer 2019, theorem 1); an estimate of L promises nothing, so the error is measured. An example
  whose error still rises after all halvings keeps its activations.

  Args:
    signal: as in `recode`.
    activations: before the step.
    gradients: of the signal there.
    step_size: of the first try.
    halvings: most halvings.

  Returns:
    The activations, and the share of `step_size` that was taken, [batch].
  """
  start, slopes, sizes = lax.stop_gradient((activations, gradients, _like(step_size, activations)))
  before = signal(start)

  def rises(share: jax.Array) -> jax.Array:
    tried = jax.tree.map(lambda size: size * share, sizes)
    # Not a number is no descent either.
    return ~(signal(descend(start, slopes, tried)) <= before)

  def halve(
    state: tuple[int | jax.Array, jax.Array, jax.Array],
  ) -> tuple[int | jax.Array, jax.Array, jax.Array]:
    number, share, rising = state
    share = jnp.where(rising, share / 2, share)
    return number + 1, share, rises(share)

  whole = jnp.ones_like(before)
  state = (0, whole, rises(whole))
  _, share, rising = lax.while_loop(
    lambda state: (state[0] < halvings) & jnp.any(state[2]), halve, state
  )
  share = lax.stop_gradient(jnp.where(rising, 0.0, share))
  sizes = jax.tree.map(lambda size: size * share, _like(step_size, activations))
  return descend(activations, gradients, sizes), share


def smoothness(
  signal: Signal[Activations],
  activations: Activations,
  gradients: Activations,
  *,
  reach: float = 1e-2,
) -> Float[Array, " batch"]:
  r"""An estimate of the Lipschitz constant of the signal's gradient, along the gradient.

  .. math:: L \approx \frac{\|\nabla\delta(h - \epsilon g) - g\|}{\epsilon \|g\|}

  Args:
    signal: as in `recode`.
    activations: where.
    gradients: g, the gradient there.
    reach: epsilon times the gradient's norm, relative to that of the activations.

  Returns:
    L for each example, [batch]; 0 where the gradient is 0.
  """
  size = reach * _norm(activations) / jnp.maximum(_norm(gradients), 1e-30)
  _, there = _error_and_gradients(signal, descend(activations, gradients, size))
  change = _norm(jax.tree.map(jnp.subtract, there, gradients))
  return jnp.where(_norm(gradients) > 0, change / jnp.maximum(size * _norm(gradients), 1e-30), 0.0)


def _norm(tree: PyTree) -> Float[Array, " batch"]:
  """Euclidean norm of each example's activations."""
  squares = [
    jnp.sum(jnp.square(leaf).reshape(leaf.shape[0], -1), axis=1) for leaf in jax.tree.leaves(tree)
  ]
  return jnp.sqrt(sum(squares[1:], squares[0]))


def _like(step_size: StepSize, activations: PyTree) -> PyTree:
  """A step size for every leaf."""
  one = jax.tree.structure(step_size).num_leaves == 1 and not _is_tree(step_size)
  return jax.tree.map(lambda _: step_size, activations) if one else step_size


def _is_tree(value: PyTree) -> bool:
  return jax.tree.structure(value) != jax.tree.structure(0.0)


def _spread(size: ArrayLike, value: jax.Array) -> jax.Array:
  """A step size with the dimensions of an activation."""
  size = jnp.asarray(size)
  return size.reshape(size.shape + (1,) * (value.ndim - size.ndim)) if size.ndim else size
