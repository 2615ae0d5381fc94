"""Output layers: from hidden states to the logits of every token, or to the loss without them."""

from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from compmod_jax.core import sharding
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import over_rows
from compmod_jax.core.losses import LabelStatistics
from compmod_jax.core.sharding import logical
from compmod_jax.kernels.cross_entropy import inner_products, kernel_for, label_statistics

OutputKind = Literal["fused", "plain"]
"""How losses are computed: logits and loss in one kernel where there is one, which never writes the
logits to memory (fused), or from all logits (plain)."""


class OutputLayer(NamedTuple):
  """Logits before they are formed: inner products of hidden states with every token's vector.

  Attributes:
    hidden: what the layer reads.
    table: the vectors.
    bias: of every token, which is added.
  """

  hidden: Float[Array, "batch time embed"]
  table: Float[Array, "vocab embed"]
  bias: Float[Array, " vocab"] | None = None

  def logits(self) -> Float[Array, "batch time vocab"]:
    """The logits, float32."""
    return over_rows(lambda rows: inner_products(rows, self.table, self.bias), self.hidden)

  def label_statistics(
    self,
    labels: Int[Array, "batch time"],
    kind: OutputKind = "fused",
    intermediates: Intermediates = OFF,
  ) -> LabelStatistics:
    """What the loss of every label needs of the logits, which a kernel forms where it can.

    On a mesh every device has its rows and gets all vectors, of which it may keep some columns
    (`mesh.fsdp`); where words are divided over devices (`mesh.tensor`), the logits are formed.

    Args:
      labels: the right tokens.
      kind: whether a kernel may.
      intermediates: the logits, the site `logits`, are formed where they are read or changed.
    """
    batch, time, dim = self.hidden.shape
    all_words = sharding.parts_of(labels, "vocab") == 1
    same = self.hidden.dtype == self.table.dtype
    if (
      kind == "plain"
      or intermediates.wants("logits")
      or not (all_words and same and kernel_for(labels, batch * time, dim, self.hidden.dtype))
    ):
      return LabelStatistics.of(intermediates("logits", self.logits()), labels)

    def part(
      table: jax.Array, bias: jax.Array | None, hidden: jax.Array, labels: jax.Array
    ) -> LabelStatistics:
      found = label_statistics(hidden.reshape(-1, dim), table, labels.reshape(-1), bias)
      return LabelStatistics(*(one.reshape(labels.shape) for one in found))

    rows = ("batch", "time")
    return sharding.on_parts(
      part,
      [self.table, self.bias, self.hidden, labels],
      [(None, None), None if self.bias is None else (None,), (*rows, None), rows],
      result=rows,
    )


class OutputHead(nn.Module):
  """An output layer with weights of its own, and a bias.

  Attributes:
    vocab: number of tokens.
    dim: width of the hidden states.
    dtype: compute type.
  """

  vocab: int
  dim: int
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes the weights."""
    init = logical(nn.initializers.xavier_uniform(), "embed", "vocab")
    self.kernel = self.param("kernel", init, (self.dim, self.vocab))
    self.bias = self.param("bias", nn.initializers.zeros, (self.vocab,))

  def __call__(self, hidden: Float[Array, "batch time embed"]) -> OutputLayer:
    """The layer on hidden states, before the logits are formed."""
    return OutputLayer(
      hidden.astype(self.dtype), self.kernel.astype(self.dtype).T, jnp.asarray(self.bias)
    )
