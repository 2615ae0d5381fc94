"""Sizes of the blocks of a TPU's kernels, and what they need of its vector memory."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from compmod_jax.kernels.routing.shapes import ROOM


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How much each program takes."""

  rows: int = 1024
  """Rows, a multiple of 128."""
  words: int = 512
  """Rows of the table, a multiple of 16."""

  def within(self, rows: int, words: int) -> "Blocks":
    """The same, or the whole of an array that is smaller."""
    return Blocks(min(self.rows, rows), min(self.words, words))

  def held(self, dim: int, dtype: DTypeLike) -> int:
    """Blocks of rows whose gradients a backward pass sums in vector memory; 0 if none fits."""
    size = jnp.dtype(dtype).itemsize
    # Two each of rows, of their gradients, of the table and of its gradient, and the latter's sum.
    moving = dim * (4 * size * self.rows + (2 * size + 12) * self.words)
    return max(0, ROOM - moving) // (4 * self.rows * dim)


def refusal(dim: int, dtype: DTypeLike, blocks: Blocks) -> str | None:
  """Why no block fits into vector memory; None if one does."""
  if blocks.held(dim, dtype):
    return None
  return f"blocks of {dim} columns need more than {ROOM / 2**20:.0f} MiB of vector memory"
