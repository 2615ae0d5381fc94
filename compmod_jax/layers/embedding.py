"""Embeddings: vectors of tokens, and of the positions that are added to them."""

import functools
import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from compmod_jax.core.errors import UserError
from compmod_jax.core.sharding import logical
from compmod_jax.layers.output import OutputLayer
from compmod_jax.layers.positions import ADDED, ModelPositions

Shared = Literal["none", "decoder", "inputs", "all"]
"""Which embeddings of an encoder-decoder are one: none, the decoder's input and output, the inputs
of both, or all three."""

EmbeddingScale = Literal["tus", "noscale", "ped"]
"""How large fresh vectors of tokens are beside those of positions (Csordas et al. 2021): of
standard deviation 1 / sqrt(dim), times sqrt(dim) (token embedding upscaling, as in Vaswani et al.
2017); of 1; or of sqrt(2 / dim), to which positions divided by sqrt(dim) are added (position
embedding downscaling)."""

_STDDEV = 0.02  # of a fresh table of learned positions


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
    return self.output(hidden).logits()

  def output(self, hidden: Float[Array, "batch time embed"]) -> OutputLayer:
    """The same, before the logits are formed."""
    return OutputLayer(hidden, self.table.astype(self.dtype))


def encoder_decoder_embeddings(
  shared: Shared,
  source_vocab: int,
  target_vocab: int,
  dim: int,
  dtype: DTypeLike = jnp.float32,
  scale: EmbeddingScale = "tus",
) -> tuple[Embedding, Embedding, Embedding]:
  """Embeddings of the decoder's input, the encoder's input and the decoder's output, in this order.

  Vectors of an output that is no input have standard deviation 1 / sqrt(dim) at first.

  Raises:
    UserError: both inputs are to be one, but the vocabularies differ in size.
  """
  if shared in ("inputs", "all") and source_vocab != target_vocab:
    raise UserError(
      f"model.share_embeddings is {shared!r} but the vocabularies have {source_vocab} and"
      f" {target_vocab} tokens; one table needs one joint vocabulary. Use a joint tokenizer or"
      " share_embeddings = decoder."
    )
  stddev = {"tus": None, "noscale": 1.0, "ped": math.sqrt(2 / dim)}[scale]
  inputs = functools.partial(Embedding, dim=dim, dtype=dtype, stddev=stddev, scaled=scale == "tus")
  own = inputs(target_vocab)
  source = own if shared in ("inputs", "all") else inputs(source_vocab)
  output = own if shared in ("decoder", "all") else Embedding(target_vocab, dim, dtype)
  return own, source, output


def sinusoids(length: int, dim: int) -> Float[np.ndarray, "length dim"]:
  r"""Fixed positions: sines in the first half of the width, cosines in the second.

  .. math:: p_{t,i} = \sin(t\, 10000^{-i/(D/2-1)}), \quad p_{t,i+D/2} = \cos(\cdot)

  Args:
    length: number of positions, from 0.
    dim: width, even.

  Source: Vaswani et al. 2017, section 3.5, in the order that fairseq uses.
  """
  half = dim // 2
  rates = np.exp(np.arange(half) * -(math.log(10000.0) / max(half - 1, 1)))
  angles = np.arange(length)[:, None] * rates[None, :]
  return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _sinusoids_as_large(
  key: jax.Array, shape: tuple[int, int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Sinusoids whose root mean square is that of a fresh learned table."""
  return jnp.asarray(_STDDEV * math.sqrt(2) * sinusoids(*shape), dtype)


class PositionTable(nn.Module):
  """Positions added to embeddings: sinusoids, or a learned table; others add nothing here.

  Attributes:
    kind: which.
    length: most positions.
    dim: width.
    dtype: compute type.
    from_sinusoids: a learned table starts as sinusoids, in place of at random, as large.
    scale: what vectors are multiplied with.
  """

  kind: ModelPositions
  length: int
  dim: int
  dtype: DTypeLike = jnp.float32
  from_sinusoids: bool = False
  scale: float = 1.0

  @nn.compact
  def add(
    self,
    x: Float[Array, "batch time embed"],
    position_ids: Int[Array, "#batch #time"] | None = None,
  ) -> Float[Array, "batch time embed"]:
    """Embeddings and the vectors of their positions, which count from 0 if they are not given."""
    if self.kind not in ADDED:
      return x
    if self.kind == "sinusoidal":
      table = jnp.asarray(sinusoids(self.length, self.dim))
    else:
      init = nn.initializers.normal(stddev=_STDDEV)
      init = logical(_sinusoids_as_large if self.from_sinusoids else init, "position", "embed")
      table = self.param("table", init, (self.length, self.dim))
    if position_ids is None:
      rows = jax.lax.slice_in_dim(table, 0, x.shape[1])[None]
    else:
      rows = table[position_ids]
    rows = rows if self.scale == 1 else rows * self.scale
    return x + rows.astype(self.dtype)
