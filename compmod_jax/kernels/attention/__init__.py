"""Flash attention whose heads may compete: no array of all pairs of positions is formed.

- `flash_attention`: queries, keys and values, and a weight for every head and position.
- `paired_attention`: the same from queries, and one product that made keys and values.
- `packed_attention`: the same from one product that made all three.
- `routed_attention`: from a product that made the first layer of the inference network, too, with
  the competition of the heads inside.
- `attention_of_chosen`: without work for queries that a head has no weight for.

Each has a definition (`definition`), a kernel for NVIDIA GPUs (`gpu`) and one for TPUs (`tpu`);
`dispatch` chooses. On CPUs attention runs in `blocks`, outside of these functions: with any bias
and mask, and without weights of heads, unless tokens without one are left out (`chosen`). Steps of
decoding attend to their cache in `cached`, which has a kernel for NVIDIA GPUs.
"""

from compmod_jax.kernels.attention.chosen import attention_of_chosen
from compmod_jax.kernels.attention.dispatch import (
  Projection,
  Tiles,
  flash_attention,
  kernel_for,
  packed_attention,
  paired_attention,
  routed_attention,
)
from compmod_jax.kernels.attention.dropout import ProbabilityDropout
from compmod_jax.kernels.attention.rotation import Rotation
from compmod_jax.kernels.attention.visibility import Visibility

__all__ = [
  "ProbabilityDropout",
  "Projection",
  "Rotation",
  "Tiles",
  "Visibility",
  "attention_of_chosen",
  "flash_attention",
  "kernel_for",
  "packed_attention",
  "paired_attention",
  "routed_attention",
]
