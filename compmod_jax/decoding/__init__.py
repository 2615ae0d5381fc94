"""Decoding: beam search, greedy search and sampling over any `step(cache, tokens)`.

Nothing here knows a model. A model offers `step(cache, tokens) -> (logits, cache)`; its cache is a
pytree that this package reorders as hypotheses come and go (`compmod_jax.decoding.types`).
"""

from compmod_jax.decoding.beam import beam_search
from compmod_jax.decoding.config import DecodeConfig, decode, override
from compmod_jax.decoding.types import Decoded, Record, Step
from compmod_jax.decoding.walk import greedy, sample

__all__ = [
  "DecodeConfig",
  "Decoded",
  "Record",
  "Step",
  "beam_search",
  "decode",
  "greedy",
  "override",
  "sample",
]
