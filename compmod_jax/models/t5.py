"""T5 (Raffel et al. 2020): the Transformer with T5's options.

Both kinds normalise before each sub-layer by the root mean square, have no biases, add learned
numbers for distances to attention logits, the same in all layers, and do not divide the logits.
Everything else of `TransformerConfig` can be set besides: heads compete as in any Transformer.
"""

from typing import Any

from compmod_jax.models.transformer import TransformerConfig


def t5(**fields: Any) -> TransformerConfig:
  """T5 as published first: ReLU, one table of embeddings for inputs and output.

  The output is T5's scaled one: our table times sqrt(dim) is theirs, so that inputs are as theirs
  and logits are inner products with theirs divided by sqrt(dim).

  Args:
    **fields: of `TransformerConfig`; the defaults here are the sizes of T5 small.

  Source: Raffel et al. 2020, sections 2.1 and 3.1.2.
  """
  given = {
    "dim": 512,
    "heads": 8,
    "ffn_dim": 2048,
    "norm": "pre",
    "norm_kind": "rms",
    "norm_epsilon": 1e-6,
    "biases": False,
    "scale_logits": False,
    "positions": "relative_bias",
    "share_embeddings": "all",
    "max_length": 512,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "ffn_dropout": 0.1,
  }
  return TransformerConfig(**{**given, **fields})


def t5_v1_1(**fields: Any) -> TransformerConfig:
  """T5 of version 1.1: GEGLU, and an output of its own that is not scaled.

  Args:
    **fields: of `TransformerConfig`; the defaults here are the sizes of the small one.

  Source: Shazeer 2020; the notes on version 1.1 in T5's repository.
  """
  given = {
    "encoder_layers": 8,
    "decoder_layers": 8,
    "heads": 6,
    "head_dim": 64,
    "ffn_dim": 1024,
    "activation": "gelu_tanh",
    "gated_ffn": True,
    "share_embeddings": "inputs",
  }
  return t5(**{**given, **fields})
