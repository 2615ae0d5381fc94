"""The encoder-decoder Transformer, with competition in any of its three kinds of attention."""

import dataclasses
import functools
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.sharding import logical
from compmod_jax.kernels.attention.distances import Bias
from compmod_jax.layers.basic import Dropout, NormKind, layer_norm
from compmod_jax.layers.block import Norm, State, run_block
from compmod_jax.layers.context import AttentionMask, Context, Newest, PositionIds
from compmod_jax.layers.embedding import (
  EmbeddingScale,
  PositionTable,
  Shared,
  encoder_decoder_embeddings,
)
from compmod_jax.layers.kv_cache import ancestor_mask
from compmod_jax.layers.output import OutputLayer
from compmod_jax.layers.positions import (
  ADDED,
  ModelPositions,
  PositionLabels,
  RelativeBias,
  RelativeBiasConfig,
  check_sliding_window,
  label,
)
from compmod_jax.layers.shared_layers import RandomDepth, repeated
from compmod_jax.layers.systematic import SystematicConfig
from compmod_jax.models.base import ModelConfig
from compmod_jax.models.routing_record import record_step, routing_cache

AttentionKind = Literal["encoder_self", "decoder_self", "cross"]
ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
"""Kinds of attention, as `compete` names them."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig(RelativeBiasConfig, SystematicConfig, ModelConfig):
  """Sizes and options of the Transformer; the defaults are the translation recipe's."""

  family = "Transformer"

  encoder_layers: int = 6
  """Layers of the encoder."""
  decoder_layers: int = 6
  """Layers of the decoder."""
  compete: tuple[AttentionKind, ...] = ()
  """Kinds of attention whose heads compete."""
  norm: Norm = "post"
  """Normalise before each sub-layer (and after the last layer), or after each residual sum."""
  positions: ModelPositions = "sinusoidal"
  """How positions are known; see `layers.positions`."""
  share_embeddings: Shared = "decoder"
  """Which embeddings are one: none, decoder input and output (decoder), the inputs of encoder and
  decoder (inputs), or all three."""
  embedding_scale: EmbeddingScale = "tus"
  """How large fresh vectors of tokens are beside those of positions: 1 / sqrt(dim) and multiplied
  by sqrt(dim) (tus), 1 (noscale), or sqrt(2 / dim) beside positions divided by sqrt(dim) (ped); see
  `layers.embedding`."""
  head_dim: int | None = None
  """Width of every head; none: dim / heads."""
  norm_kind: NormKind = "layer"
  """Layer normalisation, or by the root mean square alone (rms)."""
  biases: bool = True
  """Whether projections, feed-forward networks and layer normalisations add learned vectors."""
  scale_logits: bool = True
  """Whether attention logits are divided by the square root of the heads' width."""
  gated_ffn: bool = False
  """Feed-forward networks multiply the nonlinearity of one layer by another layer (Shazeer 2020);
  with gelu that is GEGLU."""
  sliding_window: int = 0
  """Positions that self-attention of the decoder reads at most, the newest ones, its own included
  (Beltagy et al. 2020); 0: all before."""
  target_labels: tuple[int, ...] = ()
  """Numbers of different labels of target words: for each kind of labels, a linear output of so
  many logits beside that of the next word; see `tasks.target_labels`."""

  def __post_init__(self):
    check_numbers(self, "model.")
    check_least(self, "model.", encoder_layers=1, decoder_layers=1)
    super().__post_init__()
    errors.check_choice("model.norm", self.norm, ("pre", "post"))
    errors.check_choice("model.share_embeddings", self.share_embeddings, get_args(Shared))
    errors.check_choice("model.embedding_scale", self.embedding_scale, get_args(EmbeddingScale))
    errors.check_choice("model.norm_kind", self.norm_kind, get_args(NormKind))
    self._check_options()

  def _check_options(self) -> None:
    self.check_relative_bias()
    check_sliding_window(self.sliding_window)
    errors.check(
      all(count >= 2 for count in self.target_labels),
      f"model.target_labels is {self.target_labels}; each number of labels must be at least 2.",
    )
    errors.check(
      not self.expert_layers or (self.biases and not self.gated_ffn),
      f"model.expert_layers is {self.expert_layers}, but experts always have biases and one layer"
      f" before the nonlinearity: model.biases is {self.biases} and model.gated_ffn"
      f" {self.gated_ffn}. Use biases = True and gated_ffn = False, or leave expert_layers empty.",
    )

  def warnings(self) -> list[str]:
    """Also of an output that is too large at first."""
    shared, found = self.share_embeddings, super().warnings()
    if self.embedding_scale == "noscale" and shared in ("decoder", "all"):
      found.append(
        f"the output shares its vectors with an input (model.share_embeddings = {shared}), whose"
        " lengths are about sqrt(dim) at first (model.embedding_scale = noscale), and so are the"
        " first logits; share_embeddings = none or inputs gives it vectors of length 1."
      )
    return found

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
    return Transformer(self, source_vocab, target_vocab, pad)


class Transformer(nn.Module):
  """Encoder-decoder Transformer (Vaswani et al. 2017) with competitive heads and experts.

  Sites: `encoder/layer_<i>/...`, `decoder/layer_<i>/...` (see `Block` and `Attention`),
  `encoder/output`, `logits`, and where target words have labels `target_labels` [batch, time,
  labels], the logits of those of the next word.

  Attributes:
    config: sizes and options.
    source_vocab: number of source tokens.
    target_vocab: number of target tokens.
    pad: the token that marks padding.
  """

  config: TransformerConfig
  source_vocab: int
  target_vocab: int
  pad: int = 0

  def setup(self):
    """Makes embeddings and layers."""
    c = self.config
    dtype = jnp.dtype(c.dtype)
    self.decoder_embedding, self.encoder_embedding, self.output_embedding = (
      encoder_decoder_embeddings(
        c.share_embeddings, self.source_vocab, self.target_vocab, c.dim, dtype, c.embedding_scale
      )
    )
    length, scale = c.random_positions or c.max_length, 1.0
    if c.embedding_scale == "ped":
      scale = c.dim**-0.5
    self.encoder_positions, self.decoder_positions = (
      PositionTable(c.positions, length, c.dim, dtype, scale=scale) for _ in range(2)
    )
    self.labels = PositionLabels(c.random_positions, c.max_length)
    make = c.block_class()
    encoder = [
      make(c, c.norm, "encoder_self", inside=c.inside("encoder", i))
      for i in range(c.own_layers("encoder"))
    ]
    decoder = [
      make(c, c.norm, "decoder_self", cross=True, inside=c.inside("decoder", i))
      for i in range(c.own_layers("decoder"))
    ]
    self.encoder = repeated(encoder, c.encoder_layers)
    self.decoder = repeated(decoder, c.decoder_layers)
    self.depth = RandomDepth(c.fewest_repeats, c.shared_layers)
    if c.positions == "relative_bias":
      self.encoder_bias, self.decoder_bias = (
        RelativeBias(c.heads, c.relative_buckets, c.relative_distance, bidirectional)
        for bidirectional in (True, False)
      )
    if c.norm == "pre":
      self.encoder_norm, self.decoder_norm = (
        layer_norm(dtype, c.norm_epsilon, kind=c.norm_kind, biases=c.biases) for _ in range(2)
      )
    if c.target_labels:
      init = logical(nn.initializers.xavier_uniform(), "embed", "units")
      self.label_head = nn.Dense(sum(c.target_labels), kernel_init=init)  # float32, as all logits
    self.drop = Dropout(c.dropout)

  def __call__(
    self,
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch target_time vocab"]:
    """Logits of the token that follows each target position.

    Args:
      source: source tokens, padded.
      target: target tokens shifted right (the first is the start token), padded.
      deterministic: no dropout.
      intermediates: sites to read or change.
    """
    options = {"deterministic": deterministic, "intermediates": intermediates}
    return intermediates("logits", self.output_layer(source, target, **options).logits())

  def output_layer(
    self,
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> OutputLayer:
    """What `__call__` makes the logits of, given the same."""
    memory = self.encode(source, deterministic=deterministic, intermediates=intermediates)
    self._check_length("A target", target)
    labels, position_ids = self._labels(target, deterministic)
    ctx = Context(
      # Hides padding, too, as that follows the tokens.
      mask=AttentionMask(causal=True, window=self.config.sliding_window),
      memory_mask=(source != self.pad)[:, None, None, :],
      position_ids=position_ids,
      position_bias=self._position_bias("decoder", target.shape[1], position_ids),
      depth=self.depth(len(target), len(self.decoder), deterministic=deterministic),
      deterministic=deterministic,
      intermediates=intermediates,
    )
    x = self.decoder_positions.add(self.decoder_embedding(target), labels)
    return self._decode(self.drop(x, deterministic=deterministic), None, memory, ctx)[0]

  def encode(
    self,
    source: Int[Array, "batch source_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch source_time embed"]:
    """The encoder's output."""
    self._check_length("A source", source)
    labels, position_ids = self._labels(source, deterministic)
    ctx = Context(
      mask=AttentionMask(valid=source != self.pad),
      position_ids=position_ids,
      position_bias=self._position_bias("encoder", source.shape[1], position_ids),
      depth=self.depth(len(source), len(self.encoder), deterministic=deterministic),
      deterministic=deterministic,
      intermediates=intermediates.scope("encoder"),
    )
    x = self.encoder_positions.add(self.encoder_embedding(source), labels)
    x = self.drop(x, deterministic=deterministic)
    for i, block in enumerate(self.encoder):
      x, _ = run_block(block, x, ctx=ctx.of_layer(i))
    x = self.encoder_norm(x) if self.config.norm == "pre" else x
    return ctx.intermediates("output", x)

  def _check_length(self, what: str, tokens: Int[Array, "batch time"]) -> None:
    """Refuses what has more positions than a table of them, or labels; others have no end."""
    c, length = self.config, tokens.shape[1]
    errors.check(
      length <= c.max_length or not (c.random_positions or c.positions in ADDED),
      f"{what} has {length} tokens, but the model has positions for {c.max_length}; shorten it or"
      " raise model.max_length.",
    )

  def _decode(
    self,
    x: Float[Array, "batch time embed"],
    states: list[State] | None,
    memory: Float[Array, "batch source_time embed"] | None,
    ctx: Context,
  ) -> tuple[OutputLayer, list[State]]:
    """The output of every position, or of the newest one of every beam, and the next states.

    Args:
      x: embeddings of target tokens.
      states: of the layers, from earlier positions; None: these positions are all.
      memory: the encoder's output, where the states do not hold it.
      ctx: masks, where decoding stands, dropout, intermediates.
    """
    inner, after = ctx.scope("decoder"), []
    for i, block in enumerate(self.decoder):
      state = None if states is None else states[i]
      x, state = run_block(block, x, state, memory, ctx=inner.of_layer(i))
      if state is not None:
        after.append(state)
    x = self.decoder_norm(x) if self.config.norm == "pre" else x
    if self.config.target_labels:
      ctx.intermediates("target_labels", self.label_head(x.astype(jnp.float32)))
    return self.output_embedding.output(x), after

  def prefill(
    self,
    source: Int[Array, "batch source_time"],
    *,
    beams: int,
    length: int,
    routing: bool = False,
    intermediates: Intermediates = OFF,
  ) -> dict[str, Any]:
    """The cache with which decoding starts: leaves [batch, beams or 1, ...] and a position.

    Args:
      source: source tokens, padded.
      beams: hypotheses an example.
      length: most steps.
      routing: also keep every routed module's weights of every step, [batch, beams, length, units].
      intermediates: sites of the encoder to read or change.
    """
    errors.check(
      length <= self.config.max_length,
      f"length is {length} but model.max_length is {self.config.max_length}; every step needs a"
      " position. Decode fewer steps or raise model.max_length.",
    )
    memory = self.encode(source, intermediates=intermediates)
    batch = source.shape[0]
    return {
      "position": jnp.int32(0),
      "ancestry": jnp.zeros((batch, beams, length), jnp.int32),
      "memory_mask": (source != self.pad)[:, None, None, :],
      "layers": [block.initial_state(batch, length * beams, memory) for block in self.decoder],
      "routing": routing_cache(self.config, (batch, beams, length)) if routing else {},
    }

  def step(
    self,
    cache: dict[str, Any],
    tokens: Int[Array, "batch beams"],
    *,
    intermediates: Intermediates = OFF,
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""
    return record_step(functools.partial(self._step, cache, tokens), cache, intermediates)

  def _step(
    self, cache: dict[str, Any], tokens: Int[Array, "batch beams"], intermediates: Intermediates
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    position, (batch, beams) = cache["position"], tokens.shape
    mine = jnp.broadcast_to(jnp.arange(beams)[None, :, None], (batch, beams, 1))
    ancestry = jax.lax.dynamic_update_slice(cache["ancestry"], mine, (0, 0, position))
    c, length = self.config, ancestry.shape[2]
    place, keys = (
      label(numbers, c.random_positions, c.max_length)
      for numbers in (jnp.reshape(position, (1, 1)), jnp.repeat(jnp.arange(length), beams)[None])
    )
    position_ids = PositionIds(place, keys, c.random_positions or length)
    ctx = Context(
      memory_mask=cache["memory_mask"],
      newest=Newest(
        start=position * beams, past=ancestor_mask(ancestry, position, c.sliding_window)
      ),
      position_ids=position_ids,
      position_bias=self._position_bias("decoder", length, position_ids),
      intermediates=intermediates,
    )
    x = self.decoder_positions.add(self.decoder_embedding(tokens), place)
    output, layers = self._decode(x, cache["layers"], None, ctx)
    logits = intermediates("logits", output.logits())
    changed = {"position": position + 1, "ancestry": ancestry, "layers": layers}
    return logits, cache | changed

  def routing_sites(self) -> tuple[str, ...]:
    """Names of the weights [batch, time, units] of every router, of heads and of experts."""
    return self.config.routing_sites()

  def _labels(
    self, tokens: Int[Array, "batch time"], deterministic: bool
  ) -> tuple[Int[Array, "#batch time"] | None, PositionIds | None]:
    """Labels of positions in place of their numbers, for embeddings and for attention; or none."""
    most = self.config.random_positions
    if not most:
      return None, None
    # The start token may be that of padding.
    real = (tokens != self.pad) | (jnp.arange(tokens.shape[1]) == 0)[None]
    labels = self.labels(real, deterministic=deterministic)
    return labels, PositionIds(labels, labels, most)

  def _position_bias(self, side: str, length: int, position_ids: PositionIds | None) -> Bias | None:
    """What all layers of the encoder or the decoder add to the logits of self-attention."""
    if self.config.positions != "relative_bias":
      return None
    make = self.encoder_bias if side == "encoder" else self.decoder_bias
    return make(length, position_ids)


def shift_right(target: Int[Array, "batch time"], start: int) -> Int[Array, "batch time"]:
  """What the decoder reads: the start token, then every target token but the last."""
  return jnp.pad(target, ((0, 0), (1, 0)), constant_values=start)[:, :-1]
