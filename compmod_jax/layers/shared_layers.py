"""Layers that are repeated: a Universal Transformer without halting (Dehghani et al. 2019)."""

from collections.abc import Sequence
from typing import TypeVar

import flax.linen as nn
import jax
from jaxtyping import Array, Int

T = TypeVar("T")


def repeated(layers: Sequence[T], count: int) -> list[T]:
  """These layers in turn, up to `count` of them.

  Args:
    layers: those that have parameters.
    count: how many a sequence goes through.
  """
  return [layers[i % len(layers)] for i in range(count)]


class RandomDepth(nn.Module):
  """How many layers every sequence goes through in training: as many repetitions as are drawn.

  Attributes:
    fewest: repetitions; 0: nothing is drawn.
    group: layers of a repetition.

  Source: Csordas et al. 2022, whose program draws a number for the whole batch.
  """

  fewest: int
  group: int

  def __call__(
    self, batch: int, layers: int, *, deterministic: bool
  ) -> Int[Array, " batch"] | None:
    """Numbers of layers, each of `fewest` to all repetitions as likely; None for all layers.

    Args:
      batch: sequences.
      layers: of the stack.
      deterministic: nothing is drawn; else draws from the key `dropout`.
    """
    if deterministic or not self.fewest:
      return None
    most, key = layers // self.group, self.make_rng("dropout")
    return self.group * jax.random.randint(key, (batch,), self.fewest, most + 1)
