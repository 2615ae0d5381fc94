"""The encoder-decoder Transformer, with competition in any of its three kinds of attention."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Taps
from compmod_jax.layers.block import Layer, layer_norm, run_layer
from compmod_jax.layers.cached_attention import ancestor_mask
from compmod_jax.layers.dropout import Dropout
from compmod_jax.layers.embedding import Embedding, PositionTable
from compmod_jax.models.transformer_config import PLACES, TransformerConfig

__all__ = ["PLACES", "Transformer", "TransformerConfig"]


class Transformer(nn.Module):
  """Encoder-decoder Transformer (Vaswani et al. 2017) with competitive heads and experts.

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
    self.encoder = [
      Layer(c, c.norm, "encoder_self", experts=c.experts_in("encoder", i))
      for i in range(c.encoder_layers)
    ]
    self.decoder = [
      Layer(c, c.norm, "decoder_self", cross=True, causal=True, experts=c.experts_in("decoder", i))
      for i in range(c.decoder_layers)
    ]
    if c.norm == "pre":
      self.encoder_norm, self.decoder_norm = (layer_norm(dtype, c.norm_epsilon) for _ in range(2))
    self.drop = Dropout(c.dropout)

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
    taps, remat = taps.scope("encoder"), self.config.remat
    mask = self._visible(source)
    x = self.encoder_embedding(source) + self.encoder_positions(0, source.shape[1])
    x = self.drop(x, deterministic=deterministic)
    for i, layer in enumerate(self.encoder):
      scope = taps.scope(f"layer_{i}")
      x = run_layer(layer, x, mask, remat=remat, deterministic=deterministic, taps=scope)
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
    inner, memory_mask, remat = taps.scope("decoder"), self._visible(source), self.config.remat
    x = self.decoder_embedding(target) + self.decoder_positions(0, target.shape[1])
    x = self.drop(x, deterministic=deterministic)
    for i, layer in enumerate(self.decoder):
      scope = inner.scope(f"layer_{i}")
      # Padding follows the tokens, so the causal mask hides it from every real position.
      given = x, None, memory, memory_mask
      x = run_layer(layer, *given, remat=remat, deterministic=deterministic, taps=scope)
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
      routing: also keep every routed module's weights of every step, [batch, beams, length, units].
      taps: sites of the encoder to read or change.
    """
    errors.check(
      length <= self.config.max_length,
      f"length is {length} but model.max_length is {self.config.max_length}; every step needs a"
      " position. Decode fewer steps or raise model.max_length.",
    )
    memory = self.encode(source, taps=taps)
    batch = source.shape[0]
    return {
      "position": jnp.int32(0),
      "ancestry": jnp.zeros((batch, beams, length), jnp.int32),
      "memory_mask": self._visible(source),
      "layers": [layer.empty_cache(batch, length * beams, memory) for layer in self.decoder],
      "routing": {
        site: jnp.zeros((batch, beams, length, self.config.units(site)))
        for site in (self.decoder_routing_sites() if routing else ())
      },
    }

  def step(
    self, cache: dict[str, Any], tokens: Int[Array, "batch beams"], *, taps: Taps = OFF
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""
    position, routing = cache["position"], cache["routing"]
    record = taps.also(routing) if routing else taps
    inner = record.scope("decoder")
    batch, beams = tokens.shape
    mine = jnp.broadcast_to(jnp.arange(beams)[None, :, None], (batch, beams, 1))
    ancestry = jax.lax.dynamic_update_slice(cache["ancestry"], mine, (0, 0, position))
    past = ancestor_mask(ancestry, position)
    x = self.decoder_embedding(tokens) + self.decoder_positions(position, 1)
    layers = []
    for i, layer in enumerate(self.decoder):
      scope = inner.scope(f"layer_{i}")
      own, memory_mask = cache["layers"][i], cache["memory_mask"]
      x, own = layer.step(x, own, position * beams, past, memory_mask, taps=scope)
      layers.append(own)
    logits = self._logits(x, record)
    if routing:
      taps.merge({k: v for k, v in record.captured.items() if taps.wants(k)}, record.seen)
      routing = {
        site: jax.lax.dynamic_update_slice(
          kept, record.captured[site][:, :, None], (0, 0, position, 0)
        )
        for site, kept in routing.items()
      }
    changed = {
      "position": position + 1,
      "ancestry": ancestry,
      "layers": layers,
      "routing": routing,
    }
    return logits, cache | changed

  def routing_sites(self) -> tuple[str, ...]:
    """Names of the weights [batch, time, units] of every router, of heads and of experts."""
    return self.config.routing_sites()

  def decoder_routing_sites(self) -> tuple[str, ...]:
    """The part of `routing_sites` that belongs to the decoder."""
    return self.config.routing_sites("decoder")

  def _visible(self, tokens: jax.Array) -> jax.Array:
    return (tokens != self.pad)[:, None, None, :]

  def _logits(self, x: jax.Array, taps: Taps) -> jax.Array:
    x = self.decoder_norm(x) if self.config.norm == "pre" else x
    return taps("logits", self.output_embedding.logits(x))


def shift_right(target: Int[Array, "batch time"], start: int) -> Int[Array, "batch time"]:
  """What the decoder reads: the start token, then every target token but the last."""
  return jnp.pad(target, ((0, 0), (1, 0)), constant_values=start)[:, :-1]
