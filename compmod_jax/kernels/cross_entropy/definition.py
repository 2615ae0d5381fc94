"""The definition in plain array operations: all logits, and what is needed of them."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core.losses import LabelStatistics


def inner_products(
  hidden: Float[Array, "rows dim"],
  table: Float[Array, "vocab dim"],
  bias: Float[Array, " vocab"] | None = None,
) -> Float[Array, "rows vocab"]:
  """Inner products of rows with all vectors, and the bias, in float32."""
  made = jnp.einsum("nd,vd->nv", hidden, table, preferred_element_type=jnp.float32)
  return made if bias is None else made + bias[None]


def label_statistics(
  hidden: Float[Array, "rows dim"],
  table: Float[Array, "vocab dim"],
  labels: Int[Array, " rows"],
  bias: Float[Array, " vocab"] | None = None,
) -> LabelStatistics:
  """See `dispatch.label_statistics`."""
  return LabelStatistics.of(inner_products(hidden, table, bias), labels)
