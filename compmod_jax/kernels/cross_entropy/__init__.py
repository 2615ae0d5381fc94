"""Cross-entropy of an output layer whose logits are never written.

`label_statistics`: what the loss of every row's label needs of the logits, from what the output
layer reads and its table. `inner_products`: those logits.

It has a definition (`definition`) and a kernel for TPUs (`tpu`); `dispatch` chooses. On GPUs and
CPUs the definition runs, by XLA.
"""

from compmod_jax.kernels.cross_entropy.blocks import Blocks
from compmod_jax.kernels.cross_entropy.definition import inner_products
from compmod_jax.kernels.cross_entropy.dispatch import kernel_for, label_statistics

__all__ = ["Blocks", "inner_products", "kernel_for", "label_statistics"]
