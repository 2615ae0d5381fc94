"""Masked language modelling: which tokens are to be predicted, and what stands in their place.

Source: Devlin et al. 2019, section 3.1; new masks at every step: Liu et al. 2019, section 4.1.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from compmod_jax.core.errors import check


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
  """How many tokens are predicted, and what the model sees of them."""

  share: float = 0.15
  """Share of a sequence's ordinary tokens that are predicted."""
  masked: float = 0.8
  """Share of those that are replaced by the mask token."""
  random: float = 0.1
  """Share of those that are replaced by an ordinary token, any with the same probability; the rest
  stay as they are."""

  def __post_init__(self):
    check(0 < self.share <= 1, f"masking.share is {self.share}; it must lie between 0 and 1.")
    for field in ("masked", "random"):
      value = getattr(self, field)
      check(0 <= value <= 1, f"masking.{field} is {value}; it must lie between 0 and 1.")
    check(
      self.masked + self.random <= 1 + 1e-9,
      f"masking.masked + masking.random is {self.masked + self.random:g}; they are shares of the"
      " predicted tokens: let their sum be at most 1.",
    )

  def most(self, length: int) -> int:
    """Most predicted tokens of a sequence of this number of tokens."""
    return min(length, math.floor(self.share * length) + 1)


class Masked(NamedTuple):
  """Sequences with some tokens replaced.

  Attributes:
    tokens: what the model sees.
    positions: numbers of the predicted positions; where `predict` is false, of no importance.
    targets: the tokens that belong there.
    predict: whether this one is really predicted: sequences have different numbers of them.
  """

  tokens: Int[Array, "batch time"]
  positions: Int[Array, "batch predicted"]
  targets: Int[Array, "batch predicted"]
  predict: Bool[Array, "batch predicted"]


def mask_tokens(
  rng: jax.Array,
  tokens: Int[Array, "batch time"],
  index: Int[Array, " batch"],
  ordinary: Bool[np.ndarray, " vocab"],
  *,
  mask: int,
  config: MaskingConfig,
) -> Masked:
  r"""Chooses the tokens to predict and replaces them.

  Of a sequence's n ordinary tokens :math:`\lfloor s n + u \rfloor` are predicted, with u uniform in
  [0, 1): exactly the share s on average. What is drawn for a sequence depends on the key and on its
  number alone, not on the batch that it is in.

  Args:
    rng: a key.
    tokens: sequences, with whatever padding.
    index: number of every sequence.
    ordinary: which tokens may be predicted, and may replace others.
    mask: the mask token.
    config: shares.
  """
  length, vocab = tokens.shape[1], ordinary.shape[0]
  most = config.most(length)
  keys = jax.vmap(lambda number: jax.random.fold_in(rng, number))(index)
  places, kinds, others, extra = (
    jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, stream), (size,)))(keys)
    for stream, size in enumerate((length, most, most, 1))
  )
  candidates = jnp.asarray(ordinary)[tokens]
  count = jnp.floor(config.share * jnp.sum(candidates, axis=1, keepdims=True) + extra)
  _, positions = jax.lax.top_k(jnp.where(candidates, places, -1.0), most)
  predict = jnp.arange(most)[None] < count
  targets = jnp.take_along_axis(tokens, positions, axis=1)
  # The r-th ordinary token, for r uniform.
  rank = jnp.asarray(np.cumsum(ordinary))
  drawn = jnp.searchsorted(rank, jnp.floor(others * rank[-1]), side="right")
  drawn = jnp.minimum(drawn, vocab - 1).astype(tokens.dtype)
  new = jnp.where(kinds < config.masked, mask, targets)
  swapped = (kinds >= config.masked) & (kinds < config.masked + config.random)
  new = jnp.where(predict, jnp.where(swapped, drawn, new), targets)
  rows = jnp.arange(tokens.shape[0])[:, None]
  return Masked(tokens.at[rows, positions].set(new), positions, targets, predict)
