"""Routing of competing units: softmax and selection, alone or fused with what stands beside it.

- `routing_softmax`: scores to weights.
- `routing_weights`: activations, or the inference network's first layer, to weights.

Each has a definition (`reference`), a kernel for TPUs (`tpu`) and one for NVIDIA GPUs (`gpu`);
`dispatch` chooses. On CPU the definition is as fast as a layer without routing.
"""

from compmod_jax.kernels.routing.blocks import Blocks
from compmod_jax.kernels.routing.dispatch import (
  Implementation,
  Readout,
  fold_signatures,
  routing_softmax,
  routing_weights,
)
from compmod_jax.kernels.routing.reference import MASKED, Choice, Rule, Selection, rank, select

__all__ = [
  "MASKED",
  "Blocks",
  "Choice",
  "Implementation",
  "Readout",
  "Rule",
  "Selection",
  "fold_signatures",
  "rank",
  "routing_softmax",
  "routing_weights",
  "select",
]
