"""Decoding: beam search, greedy search and sampling over any `step(cache, tokens)`.

Nothing here knows a model. A model offers `step(cache, tokens) -> (logits, cache)`; its cache is a
pytree that this package reorders as hypotheses come and go (`compmod_jax.decoding.types`).
"""

from compmod_jax.decoding.beam import beam_search
from compmod_jax.decoding.config import (
  DecodeConfig,
  decode,
  for_generation,
  override,
  with_products,
)
from compmod_jax.decoding.sampling import greedy, restricted, sample
from compmod_jax.decoding.stop import stop_table, stopping
from compmod_jax.decoding.types import Decoded, Record, Step

__all__ = [
  "DecodeConfig",
  "Decoded",
  "Record",
  "Step",
  "beam_search",
  "decode",
  "for_generation",
  "greedy",
  "override",
  "restricted",
  "sample",
  "stop_table",
  "stopping",
  "with_products",
]
