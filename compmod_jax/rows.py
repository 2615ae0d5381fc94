"""Matrix products over the positions of a batch."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float


def over_rows(
  product: Callable[[jax.Array], jax.Array], inputs: Float[Array, "batch time inner"]
) -> Float[Array, "batch time outer"]:
  """Applies a function of rows [batch * time, inner] to every position.

  A product of two matrices keeps its operands where they are in both directions, on every backend;
  XLA:CPU writes transposed copies of activations and weights for the gradients of a product with
  more than two axes, which costs a tenth of a training step.
  """
  rows = product(inputs.reshape(-1, inputs.shape[-1]))
  return rows.reshape(*inputs.shape[:-1], rows.shape[-1])
