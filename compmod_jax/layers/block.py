"""One layer of the Transformer, an encoder's or a decoder's, whole or step by step."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from compmod_jax.core.intermediates import OFF, Taps
from compmod_jax.core.sharding import logical
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.convolution import Near, ShortConvolution, add_inputs
from compmod_jax.layers.dropout import Dropout
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.layers.feedforward import FeedForward
from compmod_jax.mechanisms.modulation import UNGATED, Gates, attention_bias, modulate
from compmod_jax.models.stack_config import Norm, StackConfig


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
  """One layer: self-attention, attention to an encoder's output if it has that, feed-forward.

  Sites: those of `self`, `cross` and `ffn`, and `output` [batch, time, embed].

  Attributes:
    config: sizes and options.
    norm: whether sub-layers are normalised before or after.
    place: what `config.compete` calls its self-attention.
    cross: whether it attends to an encoder's output.
    causal: whether self-attention hides later positions.
    tied_key_value: whether self-attention's keys are its values, too.
    experts: its competing feed-forward networks, in place of a single one.
    convolution: width of the convolution before self-attention; 1 for none.
  """

  config: StackConfig
  norm: Norm
  place: str
  cross: bool = False
  causal: bool = False
  tied_key_value: bool = False
  experts: ExpertsConfig | None = None
  convolution: int = 1

  def setup(self):
    """Makes the sub-layers and their frames."""
    c = self.config
    dtype = jnp.dtype(c.dtype)
    sizes = {"dropout": c.attention_dropout, "dtype": dtype}
    self.self_attention = Attention(
      c.dim,
      c.heads,
      competition=c.competition_at(self.place),
      tied_key_value=self.tied_key_value,
      **sizes,
    )
    if self.convolution > 1:
      self.mix = ShortConvolution(self.convolution, c.dim, dtype)
    frame = self.norm, c.dropout, dtype, c.norm_epsilon
    self.self_residual = Residual(*frame)
    if self.cross:
      self.cross_attention = Attention(
        c.dim, c.heads, competition=c.competition_at("cross"), cross=True, **sizes
      )
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
    mask: Bool[Array, "#batch 1 #time time"] | None,
    memory: Float[Array, "batch keys embed"] | None = None,
    memory_mask: Bool[Array, "batch 1 1 keys"] | None = None,
    gates: Gates = UNGATED,
    near: Bool[Array, "#batch time before"] | None = None,
    *,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The layer at every position; gates say how much of what it computes passes."""
    read = self.self_residual.before(x)
    update = self.self_attention(
      read if near is None else self.mix(read, near),
      mask=mask,
      bias=attention_bias(gates.logits),
      causal=self.causal,
      deterministic=deterministic,
      taps=taps.scope("self"),
    )
    x = self.self_residual.after(x, modulate(update, gates.attention), deterministic)
    if self.cross:
      update = self.cross_attention(
        self.cross_residual.before(x),
        memory,
        mask=memory_mask,
        deterministic=deterministic,
        taps=taps.scope("cross"),
      )
      x = self.cross_residual.after(x, update, deterministic)
    return self._feed_forward(x, gates, deterministic, taps)

  def empty_cache(self, batch: int, keys: int, memory: jax.Array | None = None) -> dict[str, Any]:
    """What decoding step by step keeps of this layer; see `Attention.empty_cache`."""
    cache: dict[str, Any] = {"self": self.self_attention.empty_cache(batch, keys)}
    if self.convolution > 1:
      cache["mix"] = self.mix.empty_cache(batch, keys)
    return (
      cache if memory is None else {**cache, "cross": self.cross_attention.memory_cache(memory)}
    )

  def prefill(
    self,
    x: Float[Array, "batch time embed"],
    cache: dict[str, Any],
    mask: Bool[Array, "#batch 1 #time time"] | None,
    gates: Gates = UNGATED,
    near: Bool[Array, "#batch time before"] | None = None,
    *,
    taps: Taps = OFF,
  ) -> tuple[Float[Array, "batch time embed"], dict[str, Any]]:
    """The layer at the positions of a prompt, and the cache that holds them."""
    read = self.self_residual.before(x)
    if near is not None:
      cache = {**cache, "mix": add_inputs(cache["mix"], read, 0)}
      read = self.mix(read, near)
    update, own = self.self_attention.prefill(
      read,
      cache["self"],
      mask=mask,
      bias=attention_bias(gates.logits),
      taps=taps.scope("self"),
    )
    x = self.self_residual.after(x, modulate(update, gates.attention), True)
    cache = {**cache, "self": own}
    if gates.logits is not None:
      room = own["key"].shape[-1] - x.shape[1]
      cache["gates"] = jnp.pad(gates.logits, ((0, 0), (0, room), (0, 0)))[:, None]
    return self._feed_forward(x, gates, True, taps), cache

  def step(
    self,
    x: Float[Array, "batch beams embed"],
    cache: dict[str, Any],
    start: Array,
    past: Bool[Array, "batch 1 #beams past"],
    memory_mask: Bool[Array, "batch 1 1 keys"] | None = None,
    gates: Gates = UNGATED,
    near: Near | None = None,
    *,
    taps: Taps = OFF,
  ) -> tuple[Float[Array, "batch beams embed"], dict[str, Any]]:
    """One decoding step: the newest position of every beam, in the cache from place `start` on."""
    cache, bias = dict(cache), None
    if gates.logits is not None:
      place = (jnp.int32(0), jnp.int32(0), start, jnp.int32(0))
      cache["gates"] = jax.lax.dynamic_update_slice(cache["gates"], gates.logits[:, None], place)
      bias = attention_bias(cache["gates"][:, 0])
    read = self.self_residual.before(x)
    if near is not None:
      read, cache["mix"] = self.mix.step(read, cache["mix"], start, near)
    update, cache["self"] = self.self_attention.step_self(
      read, cache["self"], past, start, bias=bias, taps=taps.scope("self")
    )
    x = self.self_residual.after(x, modulate(update, gates.attention), True)
    if memory_mask is not None:
      update = self.cross_attention.step_memory(
        self.cross_residual.before(x), cache["cross"], memory_mask, taps=taps.scope("cross")
      )
      x = self.cross_residual.after(x, update, True)
    return self._feed_forward(x, gates, True, taps), cache

  def _feed_forward(self, x: jax.Array, gates: Gates, deterministic: bool, taps: Taps) -> jax.Array:
    update = self.ffn(
      self.ffn_residual.before(x), deterministic=deterministic, taps=taps.scope("ffn")
    )
    update = modulate(update, gates.ffn)
    return taps("output", self.ffn_residual.after(x, update, deterministic))
