"""The definition in plain array operations: all logits, and what is needed of them."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core.losses import LabelStatistics


def inner_products(
  hidden: Float[Array, "rows dim"], table: Float[Array, "vocab dim"]
) -> Float[Array, "rows vocab"]:
  """Inner products of rows with all vectors, in float32."""
  return jnp.einsum("nd,vd->nv", hidden, table, preferred_element_type=jnp.float32)


def label_statistics(
  hidden: Float[Array, "rows dim"], table: Float[Array, "vocab dim"], labels: Int[Array, " rows"]
) -> LabelStatistics:
  """See `dispatch.label_statistics`."""
  return LabelStatistics.of(inner_products(hidden, table), labels)
