"""Sizes and options of the encoder-decoder Transformer."""

import dataclasses
from typing import TYPE_CHECKING, Literal, get_args

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_numbers
from compmod_jax.layers.positions import Positions
from compmod_jax.layers.stack_config import Norm, StackConfig
from compmod_jax.models.base import ModelConfig

if TYPE_CHECKING:
  from compmod_jax.models.transformer import Transformer

Place = Literal["encoder_self", "decoder_self", "cross"]
PLACES: tuple[Place, ...] = get_args(Place)
"""Kinds of attention, as `compete` names them."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig(StackConfig, ModelConfig):
  """Sizes and options of the Transformer; the defaults are the translation recipe's."""

  family = "Transformer"

  encoder_layers: int = 6
  """Layers of the encoder."""
  decoder_layers: int = 6
  """Layers of the decoder."""
  compete: tuple[Place, ...] = ()
  """Kinds of attention whose heads compete."""
  norm: Norm = "post"
  """Normalise before each sub-layer (and after the last layer), or after each residual sum."""
  positions: Positions = "sinusoidal"
  """Fixed or learned vectors added to embeddings, rotary or relative positions."""
  share_embeddings: Literal["none", "decoder", "all"] = "decoder"
  """Which embeddings are one: decoder input and output, or those and the encoder's."""

  def __post_init__(self):
    check_numbers(self, "model.")
    for field in ("encoder_layers", "decoder_layers"):
      value = getattr(self, field)
      errors.check(value >= 1, f"model.{field} is {value}; it must be at least 1.")
    super().__post_init__()
    errors.check_choice("model.norm", self.norm, ("pre", "post"))
    errors.check_choice("model.share_embeddings", self.share_embeddings, ("none", "decoder", "all"))

  def describe(self) -> str:
    """Sizes and competition, in a few words."""
    return (
      f"{self.encoder_layers} + {self.decoder_layers} layers of width {self.dim} and"
      f" {self.heads} heads ({self.describe_competition()})"
    )

  def sides(self) -> tuple[str, ...]:
    """The encoder and the decoder."""
    return ("encoder", "decoder")

  def layers(self, side: str) -> int:
    """Layers of the encoder or the decoder."""
    return self.encoder_layers if side == "encoder" else self.decoder_layers

  def attention(self, side: str) -> tuple[tuple[str, str], ...]:
    """Self-attention, and in the decoder attention to the encoder, too."""
    return (*super().attention(side), *((("cross", "cross"),) if side == "decoder" else ()))

  def seq2seq(self, source_vocab: int, target_vocab: int, pad: int) -> "Transformer":
    """The module."""
    from compmod_jax.models.transformer import Transformer  # which imports its configuration

    return Transformer(self, source_vocab, target_vocab, pad)
