"""The contract of recurrent cells: from an input and a state to an output and the next state."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, PyTree

from compmod_jax.layers.context import Context


@runtime_checkable
class Cell(Protocol):
  """A Linen module that makes one step of a recurrence; it knows no model and no task."""

  def initial_state(self, batch: int) -> PyTree:
    """The state before the first step: a tree of arrays [batch, ...]."""
    ...

  def __call__(
    self, x: Float[Array, "batch embed"], state: PyTree, ctx: Context = ...
  ) -> tuple[Float[Array, "batch dim"], PyTree]:
    """The output of one step, and the next state, of the shapes of the one before.

    Args:
      x: what is read.
      state: of the step before.
      ctx: dropout, and intermediates to read or change.
    """
    ...
