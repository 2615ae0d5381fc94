"""The encoder-decoder Transformer, with competition in any of its three kinds of attention."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from compmod_jax import errors
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.embedding import Embedding, Positions, PositionTable
from compmod_jax.layers.feedforward import ACTIVATIONS, Activation, FeedForward
from compmod_jax.mechanisms.competition import CompetitionConfig
from compmod_jax.sharding import logical
from compmod_jax.sites import OFF, Taps

Place = Literal["encoder_self", "decoder_self", "cross"]
PLACES: tuple[Place, ...] = ("encoder_self", "decoder_self", "cross")


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
  compete: tuple[Place, ...] = ()
  """Kinds of attention whose heads compete: encoder_self, decoder_self, cross."""
  competition: CompetitionConfig = CompetitionConfig()
  """How heads compete where they do."""
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

  def competition_at(self, place: Place) -> CompetitionConfig | None:
    """How heads compete at a place, `None` where they do not."""
    return self.competition if place in self.compete else None

  def plain(self) -> "TransformerConfig":
    """The same model without any competition."""
    return dataclasses.replace(self, compete=())


class Residual(nn.Module):
  """The frame of every sub-layer: norm, dropout and residual sum, in pre- or post-norm order.

  Attributes:
    norm: `pre` or `post`.
    rate: dropout on the sub-layer's output.
    dtype: compute type.
  """

  norm: str
  rate: float
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes the norm."""
    self.scale = layer_norm(self.dtype)
    self.drop = nn.Dropout(self.rate)

  def before(self, x: jax.Array) -> jax.Array:
    """What the sub-layer reads."""
    return self.scale(x) if self.norm == "pre" else x

  def after(self, x: jax.Array, update: jax.Array, deterministic: bool) -> jax.Array:
    """The stream after the sub-layer put out `update`."""
    x = x + self.drop(update, deterministic=deterministic)
    return x if self.norm == "pre" else self.scale(x)


def layer_norm(dtype: DTypeLike) -> nn.LayerNorm:
  """Layer normalisation with float32 statistics."""
  ones, zeros = nn.initializers.ones, nn.initializers.zeros
  return nn.LayerNorm(
    epsilon=1e-5,
    dtype=dtype,
    scale_init=logical(ones, "norm"),
    bias_init=logical(zeros, "norm"),
  )


class Layer(nn.Module):
  """One layer: self-attention, attention to the encoder if it is a decoder's, feed-forward.

  Sites: those of `self`, `cross` and `ffn`, and `output` [batch, time, embed].

  Attributes:
    config: sizes and options.
    decoder: whether it attends to an encoder's output.
  """

  config: TransformerConfig
  decoder: bool

  def setup(self):
    """Makes the sub-layers and their frames."""
    c = self.config
    dtype = jnp.dtype(c.dtype)

    def attention(place: Place) -> Attention:
      return Attention(
        c.dim,
        c.heads,
        competition=c.competition_at(place),
        cross=place == "cross",
        dropout=c.attention_dropout,
        dtype=dtype,
      )

    self.self_attention = attention("decoder_self" if self.decoder else "encoder_self")
    self.self_residual = Residual(c.norm, c.dropout, dtype)
    if self.decoder:
      self.cross_attention = attention("cross")
      self.cross_residual = Residual(c.norm, c.dropout, dtype)
    self.ffn = FeedForward(c.dim, c.ffn_dim, c.activation, c.ffn_dropout, dtype)
    self.ffn_residual = Residual(c.norm, c.dropout, dtype)

  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    mask: Bool[Array, "batch 1 1 time"] | None,
    memory: Float[Array, "batch keys embed"] | None = None,
    memory_mask: Bool[Array, "batch 1 1 keys"] | None = None,
    *,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The layer at every position; a decoder's self-attention is causal."""
    update = self.self_attention(
      self.self_residual.before(x),
      mask=mask,
      causal=self.decoder,
      deterministic=deterministic,
      taps=taps.scope("self"),
    )
    x = self.self_residual.after(x, update, deterministic)
    if self.decoder:
      update = self.cross_attention(
        self.cross_residual.before(x),
        memory,
        mask=memory_mask,
        deterministic=deterministic,
        taps=taps.scope("cross"),
      )
      x = self.cross_residual.after(x, update, deterministic)
    return self._feed_forward(x, deterministic, taps)

  def empty_cache(self, memory: jax.Array, beams: int, length: int) -> dict[str, Any]:
    """What decoding step by step keeps of this layer."""
    return {
      "self": self.self_attention.empty_cache(memory.shape[0], beams, length),
      "cross": self.cross_attention.memory_cache(memory),
    }

  def step(
    self,
    x: Float[Array, "batch beams embed"],
    cache: dict[str, Any],
    position: Array,
    memory_mask: Bool[Array, "batch 1 1 keys"],
    taps: Taps = OFF,
  ) -> tuple[Float[Array, "batch beams embed"], dict[str, Any]]:
    """One decoding step: the newest position of every beam."""
    update, own = self.self_attention.step_self(
      self.self_residual.before(x), cache["self"], position, taps=taps.scope("self")
    )
    x = self.self_residual.after(x, update, True)
    update = self.cross_attention.step_memory(
      self.cross_residual.before(x), cache["cross"], mask=memory_mask, taps=taps.scope("cross")
    )
    x = self.cross_residual.after(x, update, True)
    return self._feed_forward(x, True, taps), {"self": own, "cross": cache["cross"]}

  def _feed_forward(self, x: jax.Array, deterministic: bool, taps: Taps) -> jax.Array:
    update = self.ffn(
      self.ffn_residual.before(x), deterministic=deterministic, taps=taps.scope("ffn")
    )
    return taps("output", self.ffn_residual.after(x, update, deterministic))


class Transformer(nn.Module):
  """Encoder-decoder Transformer (Vaswani et al. 2017) with competitive attention heads.

  Sites: `encoder/layer_<i>/...`, `decoder/layer_<i>/...` (see `Layer` and `Attention`),
  `encoder/output` and `logits`.

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
    errors.check(
      c.share_embeddings != "all" or self.source_vocab == self.target_vocab,
      f"model.share_embeddings is 'all' but the vocabularies have {self.source_vocab} and"
      f" {self.target_vocab} tokens; one table needs one joint vocabulary. Use a joint tokenizer"
      " or share_embeddings = decoder.",
    )
    self.decoder_embedding = Embedding(self.target_vocab, c.dim, dtype)
    if c.share_embeddings == "all":
      self.encoder_embedding = self.decoder_embedding
    else:
      self.encoder_embedding = Embedding(self.source_vocab, c.dim, dtype)
    if c.share_embeddings == "none":
      self.output_embedding = Embedding(self.target_vocab, c.dim, dtype)
    else:
      self.output_embedding = self.decoder_embedding
    self.encoder_positions = PositionTable(c.positions, c.max_length, c.dim, dtype)
    self.decoder_positions = PositionTable(c.positions, c.max_length, c.dim, dtype)
    self.encoder = [Layer(c, decoder=False) for _ in range(c.encoder_layers)]
    self.decoder = [Layer(c, decoder=True) for _ in range(c.decoder_layers)]
    if c.norm == "pre":
      self.encoder_norm, self.decoder_norm = layer_norm(dtype), layer_norm(dtype)
    self.drop = nn.Dropout(c.dropout)

  def __call__(
    self,
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch target_time vocab"]:
    """Logits of the token that follows each target position.

    Args:
      source: source tokens, padded.
      target: target tokens shifted right (the first is the start token), padded.
      deterministic: no dropout.
      taps: sites to read or change.
    """
    memory = self.encode(source, deterministic=deterministic, taps=taps)
    return self.decode(memory, source, target, deterministic=deterministic, taps=taps)

  def encode(
    self,
    source: Int[Array, "batch source_time"],
    *,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch source_time embed"]:
    """The encoder's output."""
    taps = taps.scope("encoder")
    mask = self._visible(source)
    x = self.encoder_embedding(source) + self.encoder_positions(0, source.shape[1])
    x = self.drop(x, deterministic=deterministic)
    for i, layer in enumerate(self.encoder):
      x = self._layer(layer, x, mask, deterministic=deterministic, taps=taps.scope(f"layer_{i}"))
    x = self.encoder_norm(x) if self.config.norm == "pre" else x
    return taps("output", x)

  def decode(
    self,
    memory: Float[Array, "batch source_time embed"],
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch target_time vocab"]:
    """Logits from the encoder's output; `source` tells which of it is padding."""
    inner, memory_mask = taps.scope("decoder"), self._visible(source)
    x = self.decoder_embedding(target) + self.decoder_positions(0, target.shape[1])
    x = self.drop(x, deterministic=deterministic)
    for i, layer in enumerate(self.decoder):
      scope = inner.scope(f"layer_{i}")
      # Padding follows the tokens, so the causal mask hides it from every real position.
      x = self._layer(layer, x, None, memory, memory_mask, deterministic=deterministic, taps=scope)
    return self._logits(x, taps)

  def prefill(
    self,
    source: Int[Array, "batch source_time"],
    *,
    beams: int,
    length: int,
    routing: bool = False,
    taps: Taps = OFF,
  ) -> dict[str, Any]:
    """The cache with which decoding starts: leaves [batch, beams or 1, ...] and a position.

    Args:
      source: source tokens, padded.
      beams: hypotheses an example.
      length: most steps.
      routing: also keep every routed module's weights of every step, [batch, beams, length, heads].
      taps: sites of the encoder to read or change.
    """
    memory = self.encode(source, taps=taps)
    batch = source.shape[0]
    shape = (batch, beams, length, self.config.heads)
    return {
      "position": jnp.int32(0),
      "memory_mask": self._visible(source),
      "layers": [layer.empty_cache(memory, beams, length) for layer in self.decoder],
      "routing": {s: jnp.zeros(shape) for s in self.decoder_routing_sites()} if routing else {},
    }

  def step(
    self, cache: dict[str, Any], tokens: Int[Array, "batch beams"], *, taps: Taps = OFF
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""
    position, routing = cache["position"], cache["routing"]
    record = taps.also(routing) if routing else taps
    inner = record.scope("decoder")
    x = self.decoder_embedding(tokens) + self.decoder_positions(position, 1)
    layers = []
    for i, layer in enumerate(self.decoder):
      x, new = layer.step(
        x, cache["layers"][i], position, cache["memory_mask"], taps=inner.scope(f"layer_{i}")
      )
      layers.append(new)
    logits = self._logits(x, record)
    if routing:
      taps.merge({k: v for k, v in record.captured.items() if taps.wants(k)}, record.seen)
      routing = {
        site: jax.lax.dynamic_update_slice(
          kept, record.captured[site][:, :, None], (0, 0, position, 0)
        )
        for site, kept in routing.items()
      }
    new = {"position": position + 1, "layers": layers, "routing": routing}
    return logits, {**new, "memory_mask": cache["memory_mask"]}

  def routing_sites(self) -> tuple[str, ...]:
    """Names of the weights [batch, time, heads] of every module whose heads compete."""
    c = self.config
    encoder = tuple(
      f"encoder/layer_{i}/self/router/weights"
      for i in range(c.encoder_layers)
      if "encoder_self" in c.compete
    )
    return encoder + self.decoder_routing_sites()

  def decoder_routing_sites(self) -> tuple[str, ...]:
    """The part of `routing_sites` that belongs to the decoder."""
    kinds = (("decoder_self", "self"), ("cross", "cross"))
    return tuple(
      f"decoder/layer_{i}/{name}/router/weights"
      for i in range(self.config.decoder_layers)
      for place, name in kinds
      if place in self.config.compete
    )

  def _visible(self, tokens: jax.Array) -> jax.Array:
    return (tokens != self.pad)[:, None, None, :]

  def _logits(self, x: jax.Array, taps: Taps) -> jax.Array:
    x = self.decoder_norm(x) if self.config.norm == "pre" else x
    return taps("logits", self.output_embedding.logits(x))

  def _layer(self, layer: Layer, *args: Any, deterministic: bool, taps: Taps) -> jax.Array:
    """Runs a layer, rematerialised if the configuration says so."""
    if not self.config.remat:
      return layer(*args, deterministic=deterministic, taps=taps)

    def apart(module: Layer, *args: Any) -> tuple[jax.Array, dict[str, jax.Array], list[str]]:
      inner = taps.apart()
      out = module(*args, deterministic=deterministic, taps=inner)
      seen.update(inner.seen)
      return out, inner.captured

    seen: set[str] = set()
    out, captured = nn.remat(apart, prevent_cse=False)(layer, *args)
    taps.merge(captured, seen)
    return out
