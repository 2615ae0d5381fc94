"""Token embeddings."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical


class Embedding(nn.Module):
  """A table of token vectors, normal with standard deviation 1/sqrt(dim), scaled by sqrt(dim).

  Attributes:
    vocab: number of tokens.
    dim: width.
    dtype: compute type.
    stddev: standard deviation of fresh vectors, if another.
    scaled: whether vectors are scaled.
  """

  vocab: int
  dim: int
  dtype: DTypeLike = jnp.float32
  stddev: float | None = None
  scaled: bool = True

  def setup(self):
    """Makes the table."""
    init = nn.initializers.normal(stddev=self.stddev or self.dim**-0.5)
    self.table = self.param("table", logical(init, "vocab", "embed"), (self.vocab, self.dim))

  def __call__(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time embed"]:
    """Vectors of tokens, times sqrt(dim) if they are scaled."""
    vectors = self.table.astype(self.dtype)[tokens]
    return vectors * math.sqrt(self.dim) if self.scaled else vectors

  def logits(self, hidden: Float[Array, "batch time embed"]) -> Float[Array, "batch time vocab"]:
    """Inner products with every token's vector (a tied output layer), float32."""
    table = self.table.astype(self.dtype)

    def product(rows: jax.Array) -> jax.Array:
      return jnp.einsum("nd,vd->nv", rows, table, preferred_element_type=jnp.float32)

    return over_rows(product, hidden)
