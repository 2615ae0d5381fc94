"""Sizes and options of the encoder for masked language modelling."""

import dataclasses
from typing import TYPE_CHECKING

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_numbers
from compmod_jax.layers.feedforward import Activation
from compmod_jax.layers.positions import Positions
from compmod_jax.layers.stack_config import Norm, StackConfig
from compmod_jax.models.base import ModelConfig

if TYPE_CHECKING:
  from compmod_jax.models.encoder import Encoder


@dataclasses.dataclass(frozen=True)
class EncoderConfig(StackConfig, ModelConfig):
  """Sizes and options of a bidirectional encoder; the defaults are those of RoBERTa base.

  Source: Liu et al. 2019, table 9; Devlin et al. 2019.
  """

  encoder_layers: int = 12
  """Layers."""
  dim: int = 768
  """Model width, a multiple of `heads`."""
  heads: int = 12
  """Attention heads of every layer."""
  ffn_dim: int = 3072
  """Width of the feed-forward networks' hidden layer."""
  norm: Norm = "post"
  """Normalise before each sub-layer (and after the last layer), or after each residual sum; the
  sum of embeddings is normalised in any case."""
  activation: Activation = "gelu"
  """Nonlinearity of the feed-forward networks."""
  head_activation: Activation | None = None
  """Nonlinearity of the output head; none: that of the feed-forward networks. RoBERTa's is gelu
  whatever the feed-forward networks have."""
  positions: Positions = "learned"
  """Learned or fixed vectors added to embeddings, rotary or relative positions."""
  max_length: int = 512
  """Most positions of a sequence, the start token's included."""
  sinusoids_first: bool = False
  """Learned positions start as sinusoids, in place of at random: a small model then finds out
  sooner which positions are neighbours."""
  dropout: float = 0.1
  """Dropout on embedding sums and sub-layer outputs."""
  attention_dropout: float = 0.1
  """Dropout on attention probabilities."""

  def __post_init__(self):
    check_numbers(self, "model.")
    errors.check(
      self.encoder_layers >= 1,
      f"model.encoder_layers is {self.encoder_layers}; it must be at least 1.",
    )
    super().__post_init__()
    errors.check_choice("model.norm", self.norm, ("pre", "post"))

  def describe(self) -> str:
    """Sizes and competition, in a few words."""
    return (
      f"{self.encoder_layers} layers of width {self.dim} and {self.heads} heads"
      f" ({self.describe_competition()})"
    )

  def sides(self) -> tuple[str, ...]:
    """The encoder."""
    return ("encoder",)

  def layers(self, side: str) -> int:
    """Layers of the encoder."""
    return self.encoder_layers

  def encoder(self, vocab: int, pad: int) -> "Encoder":
    """The module."""
    from compmod_jax.models.encoder import Encoder  # which imports its configuration

    return Encoder(self, vocab, pad)
