"""Sizes and options of the encoder-decoder Transformer."""

import dataclasses
from typing import Literal

from compmod_jax import errors
from compmod_jax.layers.embedding import Positions
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.layers.feedforward import ACTIVATIONS, Activation
from compmod_jax.mechanisms.competition import CompetitionConfig
from compmod_jax.mechanisms.drophead import DropHeadConfig

Place = Literal["encoder_self", "decoder_self", "cross"]
PLACES: tuple[Place, ...] = ("encoder_self", "decoder_self", "cross")
Side = Literal["encoder", "decoder"]


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Sizes and options of the Transformer; the defaults are the translation recipe's."""

  encoder_layers: int = 6
  """Layers of the encoder."""
  decoder_layers: int = 6
  """Layers of the decoder."""
  dim: int = 512
  """Model width, a multiple of `heads`."""
  heads: int = 4
  """Attention heads of every module."""
  ffn_dim: int = 1024
  """Width of the feed-forward networks' hidden layer."""
  norm: Literal["pre", "post"] = "post"
  """Normalise before each sub-layer (and after the last layer), or after each residual sum."""
  activation: Activation = "relu"
  """Nonlinearity of the feed-forward networks."""
  positions: Positions = "sinusoidal"
  """Fixed or learned positions."""
  max_length: int = 1024
  """Most positions of a sequence."""
  share_embeddings: Literal["none", "decoder", "all"] = "decoder"
  """Which embeddings are one: decoder input and output, or those and the encoder's."""
  dropout: float = 0.3
  """Dropout on embedding sums and sub-layer outputs."""
  attention_dropout: float = 0.0
  """Dropout on attention probabilities."""
  ffn_dropout: float = 0.0
  """Dropout inside the feed-forward networks."""
  drophead: DropHeadConfig = DropHeadConfig()
  """Dropping of whole heads in training."""
  compete: tuple[Place, ...] = ()
  """Kinds of attention whose heads compete: encoder_self, decoder_self, cross."""
  competition: CompetitionConfig = CompetitionConfig()
  """How heads compete where they do."""
  expert_layers: tuple[str, ...] = ()
  """Layers with competing feed-forward networks: encoder, decoder, or one by one (encoder_2)."""
  experts: ExpertsConfig = ExpertsConfig()
  """The experts where there are any."""
  dtype: Literal["float32", "bfloat16"] = "float32"
  """Compute type; parameters, softmax, norms, losses and router scores stay float32."""
  remat: bool = False
  """Recompute each layer's activations in the backward pass instead of storing them."""

  def __post_init__(self):
    for field in ("encoder_layers", "decoder_layers", "dim", "heads", "ffn_dim", "max_length"):
      value = getattr(self, field)
      errors.check(value >= 1, f"model.{field} is {value}; it must be at least 1.")
    errors.check(
      self.dim % self.heads == 0,
      f"model.heads is {self.heads}, which does not divide model.dim = {self.dim}; each head is"
      " dim / heads wide. Choose a number of heads that divides the width.",
    )
    errors.check(
      self.positions == "learned" or self.dim % 2 == 0,
      f"model.dim is {self.dim}; sinusoidal positions need an even width. Use an even width or"
      " positions = learned.",
    )
    errors.check_choice("model.norm", self.norm, ("pre", "post"))
    errors.check_choice("model.activation", self.activation, ACTIVATIONS)
    errors.check_choice("model.positions", self.positions, ("sinusoidal", "learned"))
    errors.check_choice("model.share_embeddings", self.share_embeddings, ("none", "decoder", "all"))
    errors.check_choice("model.dtype", self.dtype, ("float32", "bfloat16"))
    for place in self.compete:
      errors.check_choice("model.compete", place, PLACES)
    for field in ("dropout", "attention_dropout", "ffn_dropout"):
      rate = getattr(self, field)
      errors.check(0 <= rate < 1, f"model.{field} is {rate}; it must be at least 0 and below 1.")
    if self.compete:
      self.competition.kept(self.heads)
      errors.check(
        self.competition.inactive == "null" or "cross" not in self.compete,
        "model.competition.inactive is 'value' but model.compete includes 'cross'; a query position"
        " of encoder-decoder attention has no value vector of its own. Use inactive = null there.",
      )

    for name in self.expert_layers:
      one_by_one = [f"{s}_{i}" for s in ("encoder", "decoder") for i in range(self.layers(s))]
      errors.check_choice("model.expert_layers", name, ["encoder", "decoder", *one_by_one])
    if self.expert_layers:
      self.experts.width(self.ffn_dim)

  def layers(self, side: Side) -> int:
    """Layers of the encoder or the decoder."""
    return self.encoder_layers if side == "encoder" else self.decoder_layers

  def experts_in(self, side: Side, layer: int) -> ExpertsConfig | None:
    """The experts of a layer, `None` where it has a single feed-forward network."""
    return self.experts if {side, f"{side}_{layer}"} & set(self.expert_layers) else None

  def competition_at(self, place: Place) -> CompetitionConfig | None:
    """How heads compete at a place, `None` where they do not."""
    return self.competition if place in self.compete else None

  def warnings(self) -> list[str]:
    """What is allowed here but hardly meant, a sentence each; empty if nothing is."""
    experts = self.experts.count, "experts.count", "experts.", self.experts.competition
    kinds = (
      (self.compete, "heads", self.heads, "model.heads", "", self.competition),
      (self.expert_layers, "experts", *experts),
    )
    return [
      f"one of {count} {kind} stays at each position ({prefix}competition.rule ="
      f" {competition.rule}), so its weight is always 1 and the routers learn nothing;"
      f" let at least 2 stay ({prefix}competition.keep, {field}) if they should."
      for used, kind, count, field, prefix, competition in kinds
      if used and competition.kept(count) == 1
    ]

  def plain(self) -> "TransformerConfig":
    """The same model without any competition."""
    return dataclasses.replace(self, compete=(), expert_layers=())
