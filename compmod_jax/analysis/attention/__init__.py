"""Attention on single texts: where every head looks, and the router's weight of each head."""

from compmod_jax.analysis.attention.figures import attention_pictures
from compmod_jax.analysis.attention.measure import Weights, attention_modules, read_attention
from compmod_jax.analysis.attention.report import Attention, make_page

__all__ = [
  "Attention",
  "Weights",
  "attention_modules",
  "attention_pictures",
  "make_page",
  "read_attention",
]
