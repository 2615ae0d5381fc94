"""Sizes and options of the encoder-decoder Transformer."""

import dataclasses
from typing import Literal

from compmod_jax import errors
from compmod_jax.layers.embedding import Positions
from compmod_jax.models.stack_config import PLACES, Place, Side, StackConfig

__all__ = ["PLACES", "Place", "Side", "TransformerConfig"]


@dataclasses.dataclass(frozen=True)
class TransformerConfig(StackConfig):
  """Sizes and options of the Transformer; the defaults are the translation recipe's."""

  decoder_layers: int = 6
  """Layers of the decoder."""
  positions: Positions = "sinusoidal"
  """Fixed or learned positions."""
  share_embeddings: Literal["none", "decoder", "all"] = "decoder"
  """Which embeddings are one: decoder input and output, or those and the encoder's."""

  def __post_init__(self):
    super().__post_init__()
    errors.check(
      self.decoder_layers >= 1,
      f"model.decoder_layers is {self.decoder_layers}; it must be at least 1.",
    )
    errors.check_choice("model.positions", self.positions, ("sinusoidal", "learned"))
    errors.check(
      self.positions == "learned" or self.dim % 2 == 0,
      f"model.dim is {self.dim}; sinusoidal positions need an even width. Use an even width or"
      " positions = learned.",
    )
    errors.check_choice("model.share_embeddings", self.share_embeddings, ("none", "decoder", "all"))

  def sides(self) -> tuple[Side, ...]:
    """The stacks that the model has."""
    return ("encoder", "decoder")

  def layers(self, side: Side) -> int:
    """Layers of the encoder or the decoder."""
    return self.encoder_layers if side == "encoder" else self.decoder_layers
