"""One layer of the Transformer, an encoder's or a decoder's, whole or step by step."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from compmod_jax.layers.attention import Attention
from compmod_jax.layers.dropout import Dropout
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.layers.feedforward import FeedForward
from compmod_jax.models.stack_config import Place, StackConfig
from compmod_jax.sharding import logical
from compmod_jax.sites import OFF, Taps


class Residual(nn.Module):
  """The frame of every sub-layer: norm, dropout and residual sum, in pre- or post-norm order.

  Attributes:
    norm: `pre` or `post`.
    rate: dropout on the sub-layer's output.
    dtype: compute type.
    epsilon: added to the variance by the norm.
  """

  norm: str
  rate: float
  dtype: DTypeLike = jnp.float32
  epsilon: float = 1e-5

  def setup(self):
    """Makes the norm."""
    self.scale = layer_norm(self.dtype, self.epsilon)
    self.drop = Dropout(self.rate)

  def before(self, x: jax.Array) -> jax.Array:
    """What the sub-layer reads."""
    return self.scale(x) if self.norm == "pre" else x

  def after(self, x: jax.Array, update: jax.Array, deterministic: bool) -> jax.Array:
    """The stream after the sub-layer put out `update`."""
    x = x + self.drop(update, deterministic=deterministic)
    return x if self.norm == "pre" else self.scale(x)


def layer_norm(dtype: DTypeLike, epsilon: float = 1e-5, name: str | None = None) -> nn.LayerNorm:
  """Layer normalisation with float32 statistics."""
  ones, zeros = nn.initializers.ones, nn.initializers.zeros
  return nn.LayerNorm(
    epsilon=epsilon,
    dtype=dtype,
    scale_init=logical(ones, "norm"),
    bias_init=logical(zeros, "norm"),
    name=name,
  )


def run_layer(
  layer: "Layer", *args: Any, remat: bool, deterministic: bool, taps: Taps
) -> jax.Array:
  """Runs a layer; with `remat` its activations are computed again in the backward pass."""
  if not remat:
    return layer(*args, deterministic=deterministic, taps=taps)

  def apart(module: Layer, *args: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    inner = taps.apart()
    out = module(*args, deterministic=deterministic, taps=inner)
    seen.update(inner.seen)
    return out, inner.captured

  seen: set[str] = set()
  out, captured = nn.remat(apart)(layer, *args)
  taps.merge(captured, seen)
  return out


class Layer(nn.Module):
  """One layer: self-attention, attention to the encoder if it is a decoder's, feed-forward.

  Sites: those of `self`, `cross` and `ffn`, and `output` [batch, time, embed].

  Attributes:
    config: sizes and options.
    decoder: whether it attends to an encoder's output.
    experts: its competing feed-forward networks, in place of a single one.
  """

  config: StackConfig
  decoder: bool
  experts: ExpertsConfig | None = None

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
    frame = c.norm, c.dropout, dtype, c.norm_epsilon
    self.self_residual = Residual(*frame)
    if self.decoder:
      self.cross_attention = attention("cross")
      self.cross_residual = Residual(*frame)
    if self.experts is None:
      self.ffn = FeedForward(c.dim, c.ffn_dim, c.activation, c.ffn_dropout, dtype)
    else:
      width = self.experts.width(c.ffn_dim)
      self.ffn = Experts(c.dim, width, self.experts, c.activation, c.ffn_dropout, dtype)
    self.ffn_residual = Residual(*frame)

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
    past: Bool[Array, "batch 1 beams past"],
    memory_mask: Bool[Array, "batch 1 1 keys"],
    *,
    taps: Taps = OFF,
  ) -> tuple[Float[Array, "batch beams embed"], dict[str, Any]]:
    """One decoding step: the newest position of every beam."""
    update, own = self.self_attention.step_self(
      self.self_residual.before(x), cache["self"], past, position, taps=taps.scope("self")
    )
    x = self.self_residual.after(x, update, True)
    update = self.cross_attention.step_memory(
      self.cross_residual.before(x), cache["cross"], memory_mask, taps=taps.scope("cross")
    )
    x = self.cross_residual.after(x, update, True)
    return self._feed_forward(x, True, taps), {"self": own, "cross": cache["cross"]}

  def _feed_forward(self, x: jax.Array, deterministic: bool, taps: Taps) -> jax.Array:
    update = self.ffn(
      self.ffn_residual.before(x), deterministic=deterministic, taps=taps.scope("ffn")
    )
    return taps("output", self.ffn_residual.after(x, update, deterministic))
