"""The bidirectional encoder for masked language modelling, with competition in any layer."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import ACTIVATIONS, Activation, Dropout, layer_norm
from compmod_jax.layers.block import Norm, run_block
from compmod_jax.layers.context import AttentionMask, Context, PositionIds
from compmod_jax.layers.embedding import Embedding, PositionTable
from compmod_jax.layers.positions import PositionLabels, Positions
from compmod_jax.layers.shared_layers import RandomDepth, repeated
from compmod_jax.layers.systematic import SystematicConfig
from compmod_jax.mechanisms.saliency import SaliencyNetwork, key_bias
from compmod_jax.models.base import ModelConfig

_STDDEV = 0.02  # of fresh embeddings (Devlin et al. 2019)


@dataclasses.dataclass(frozen=True)
class EncoderConfig(SystematicConfig, ModelConfig):
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
  """How positions are known; see `layers.positions`."""
  max_length: int = 512
  """Most positions of a sequence, the start token's included."""
  segments: int = 0
  """Learned vectors of segments, added to the embeddings; 0: none. BERT has 2."""
  next_sentence: bool = False
  """A second output: whether the second segment follows the first in its text (Devlin et al. 2019,
  section 3.1)."""
  saliency_dim: int = 0
  """Width of a network of its own whose scores of tokens are added to the attention logits of all
  layers (text saliency); 0: none."""
  sinusoids_first: bool = False
  """Learned positions start as sinusoids, in place of at random: a small model then finds out
  sooner which positions are neighbours."""
  dropout: float = 0.1
  """Dropout on embedding sums and sub-layer outputs."""
  attention_dropout: float = 0.1
  """Dropout on attention probabilities."""

  def __post_init__(self):
    check_numbers(self, "model.")
    check_least(self, "model.", encoder_layers=1)
    super().__post_init__()
    errors.check_choice("model.norm", self.norm, ("pre", "post"))
    errors.check(
      self.segments != 1 and self.segments >= 0,
      f"model.segments is {self.segments}; it must be 0 for none, or at least 2: a vector that all"
      " tokens have says nothing.",
    )
    errors.check(
      not self.next_sentence or self.segments > 1,
      f"model.next_sentence is set but model.segments is {self.segments}; which tokens are of the"
      " first segment must be known. Set model.segments to 2.",
    )
    errors.check(
      self.saliency_dim >= 0,
      f"model.saliency_dim is {self.saliency_dim}; it is a width, or 0 for no saliency network.",
    )

  def mechanisms_off(self) -> dict[str, Any]:
    """See `StackConfig`; a saliency network is a mechanism."""
    return super().mechanisms_off() | {"saliency_dim": 0}

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
    return Encoder(self, vocab, pad)


class Encoder(nn.Module):
  r"""RoBERTa's and BERT's encoder with competitive heads and experts (Liu et al. 2019).

  Embeddings of tokens and of learned positions are added and normalised; the layers follow; an
  output head transforms every position and compares it with the embeddings of all tokens.

  With `next_sentence`, a second head reads the first position alone:

  .. math:: \mathrm{next} = V \tanh(U h_0 + c) + d

  Sites: `encoder/layer_<i>/...` (see `Layer` and `Attention`), `encoder/output`, `logits`,
  `saliency` [batch, time], where tokens have scores, and `next_sentence` [batch, 1, 2]: logits of a
  second segment that follows the first, and of one that does not.

  Attributes:
    config: sizes and options.
    vocab: number of tokens.
    pad: the token that marks padding, which no other position looks at.
  """

  config: EncoderConfig
  vocab: int
  pad: int = 0

  def setup(self):
    """Makes embeddings, layers and output head."""
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    self.embedding = Embedding(self.vocab, c.dim, dtype, stddev=_STDDEV, scaled=False)
    length = c.random_positions or c.max_length
    self.positions = PositionTable(
      c.positions, length, c.dim, dtype, from_sinusoids=c.sinusoids_first
    )
    self.labels = PositionLabels(c.random_positions, c.max_length)
    if c.segments:
      init = logical(nn.initializers.normal(stddev=_STDDEV), "position", "embed")
      self.segment_table = self.param("segment_table", init, (c.segments, c.dim))
    if c.saliency_dim:
      self.saliency_network = SaliencyNetwork(self.vocab, c.saliency_dim, self.pad)
    self.embedding_norm = layer_norm(dtype, c.norm_epsilon)
    make = c.block_class()
    layers = [
      make(c, c.norm, "encoder_self", inside=c.inside("encoder", i))
      for i in range(c.own_layers("encoder"))
    ]
    self.encoder = repeated(layers, c.encoder_layers)
    self.depth = RandomDepth(c.fewest_repeats, c.shared_layers)
    if c.norm == "pre":
      self.output_norm = layer_norm(dtype, c.norm_epsilon)
    self.drop = Dropout(c.dropout)
    self.head = Head(c, self.vocab, dtype)
    if c.next_sentence:
      init = logical(nn.initializers.xavier_uniform(), "embed", "mlp")
      self.pooler = nn.Dense(c.dim, dtype=dtype, kernel_init=init)
      init = logical(nn.initializers.xavier_uniform(), "mlp", "units")
      self.next_head = nn.Dense(2, kernel_init=init)  # float32, as all logits are

  def __call__(
    self,
    tokens: Int[Array, "batch time"],
    *,
    positions: Int[Array, "batch predicted"] | None = None,
    segments: Int[Array, "batch time"] | None = None,
    saliency: Float[Array, "batch time"] | None = None,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch predicted vocab"]:
    """Logits of the tokens that belong at positions.

    Args:
      tokens: padded at the end.
      positions: numbers of the positions that are predicted; all, in their order, if not given.
      segments: number of every token's segment, where the model has vectors of them; all 0 if not
        given.
      saliency: scores of tokens, such as reading times, added to those of the model's own network
        if it has one; none if not given.
      deterministic: no dropout.
      intermediates: sites to read or change.
    """
    hidden = self.encode(
      tokens,
      segments=segments,
      saliency=saliency,
      deterministic=deterministic,
      intermediates=intermediates,
    )
    if self.config.next_sentence:
      pooled = nn.tanh(self.pooler(hidden[:, :1]))
      intermediates("next_sentence", self.next_head(pooled.astype(jnp.float32)))
    if positions is not None:
      hidden = jnp.take_along_axis(hidden, positions[..., None], axis=1)
    return intermediates("logits", self.head(hidden, self.embedding))

  def encode(
    self,
    tokens: Int[Array, "batch time"],
    *,
    segments: Int[Array, "batch time"] | None = None,
    saliency: Float[Array, "batch time"] | None = None,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The last layer's output; arguments as of `__call__`."""
    c, length = self.config, tokens.shape[1]
    errors.check(
      length <= c.max_length,
      f"A sequence has {length} tokens, but the model has positions for {c.max_length}; shorten it"
      " or raise model.max_length.",
    )
    if c.saliency_dim:
      own = self.saliency_network(tokens)
      saliency = own if saliency is None else own + saliency
    bias = None if saliency is None else key_bias(intermediates("saliency", saliency))
    real, labels, position_ids = tokens != self.pad, None, None
    if c.random_positions:
      labels = self.labels(real, deterministic=deterministic)
      position_ids = PositionIds(labels, labels, c.random_positions)
    ctx = Context(
      mask=AttentionMask(valid=real),
      position_ids=position_ids,
      position_bias=bias,
      depth=self.depth(len(tokens), c.encoder_layers, deterministic=deterministic),
      deterministic=deterministic,
      intermediates=intermediates.scope("encoder"),
    )
    x = self.positions.add(self.embedding(tokens), labels)
    if c.segments:
      of_tokens = jnp.zeros_like(tokens) if segments is None else segments
      x = x + self.segment_table[of_tokens].astype(x.dtype)
    x = self.embedding_norm(x)
    x = self.drop(x, deterministic=deterministic)
    for i, block in enumerate(self.encoder):
      x, _ = run_block(block, x, ctx=ctx.of_layer(i))
    return ctx.intermediates("output", self.output_norm(x) if c.norm == "pre" else x)

  def routing_sites(self) -> tuple[str, ...]:
    """Names of the weights [batch, time, units] of every router, of heads and of experts."""
    return self.config.routing_sites()


class Head(nn.Module):
  r"""The output head, tied to the embeddings E.

  .. math:: \mathrm{logits} = E\, \mathrm{LN}(\phi(W h + c)) + b

  Attributes:
    config: sizes and options.
    vocab: number of tokens.
    dtype: compute type.
  """

  config: EncoderConfig
  vocab: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, hidden: Float[Array, "batch time embed"], embedding: Embedding
  ) -> Float[Array, "batch time vocab"]:
    """Logits at every position, float32."""
    c, init = self.config, nn.initializers.xavier_uniform()
    transform = nn.Dense(
      c.dim, dtype=self.dtype, kernel_init=logical(init, "embed", "mlp"), name="transform"
    )
    hidden = ACTIVATIONS[c.head_activation or c.activation](over_rows(transform, hidden))
    norm = layer_norm(self.dtype, c.norm_epsilon, name="norm")
    bias = self.param("bias", logical(nn.initializers.zeros, "vocab"), (self.vocab,))
    return embedding.logits(norm(hidden)) + bias[None, None]
