"""One layer of the Transformer: self-attention, attention to a memory, feed-forward network."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core.sharding import logical
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import Context
from compmod_jax.layers.convolution import ShortConvolution
from compmod_jax.layers.dropout import Dropout
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.layers.feedforward import FeedForward
from compmod_jax.layers.stack_config import Norm, StackConfig
from compmod_jax.mechanisms.modulation import UNGATED, Gates, attention_bias, modulate

State = dict[str, Any]
"""What decoding keeps of a block, by sub-layer: leaves [batch, 1, ...], which beams share."""


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
    """The stream after the sub-layer's update."""
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


class Block(nn.Module):
  """One layer: self-attention, attention to an encoder's output if it has that, feed-forward.

  Intermediates: those of `self`, `cross` and `ffn`, and `output` [batch, time, embed].

  Attributes:
    config: sizes and options.
    norm: whether sub-layers are normalised before or after.
    kind: what `config.compete` calls its self-attention.
    cross: whether it attends to an encoder's output.
    tied_key_value: whether self-attention's keys are its values, too.
    experts: its competing feed-forward networks, in place of a single one.
    convolution: width of the convolution before self-attention; 1 for none.
  """

  config: StackConfig
  norm: Norm
  kind: str
  cross: bool = False
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
      competition=c.competition_at(self.kind),
      tied_key_value=self.tied_key_value,
      positions=c.positions,
      gated=self.kind in c.gated_heads,
      **sizes,
    )
    if self.convolution > 1:
      self.mix = ShortConvolution(self.convolution, c.dim, dtype)
    frame = self.norm, c.dropout, dtype, c.norm_epsilon
    self.self_residual = Residual(*frame)
    if self.cross:
      self.cross_attention = Attention(
        c.dim,
        c.heads,
        competition=c.competition_at("cross"),
        cross=True,
        gated="cross" in c.gated_heads,
        **sizes,
      )
      self.cross_residual = Residual(*frame)
    if self.experts is None:
      self.ffn = FeedForward(c.dim, c.ffn_dim, c.activation, c.ffn_dropout, dtype)
    else:
      width = self.experts.width(c.ffn_dim)
      self.ffn = Experts(c.dim, width, self.experts, c.activation, c.ffn_dropout, dtype)
    self.ffn_residual = Residual(*frame)

  def initial_state(
    self, batch: int, keys: int, memory: Float[Array, "batch memory embed"] | None = None
  ) -> State:
    """The state before the first position.

    Args:
      batch: examples.
      keys: room for positions; see `Attention.initial_state`.
      memory: an encoder's output, for a block with cross attention.
    """
    state: State = {"self": self.self_attention.initial_state(batch, keys)}
    if self.convolution > 1:
      state["mix"] = self.mix.initial_state(batch, keys)
    if memory is not None:
      state["cross"] = self.cross_attention.memory_state(memory)
    return state

  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    state: State | None = None,
    memory: Float[Array, "batch memory embed"] | None = None,
    gates: Gates = UNGATED,
    *,
    ctx: Context = Context(),
  ) -> tuple[Float[Array, "batch time embed"], State | None]:
    """The block at every position, or at the newest one of every beam.

    Args:
      x: the stream.
      state: of earlier positions, to which these are added; None: these are all.
      memory: an encoder's output, where the state does not hold it.
      gates: how much of what is computed passes.
      ctx: masks, where decoding stands, dropout, intermediates.

    Returns:
      The stream after the block, and the next state; None if none was given.
    """
    held = dict(state or {})
    read = self.self_residual.before(x)
    if self.convolution > 1:
      read, held["mix"] = self.mix(read, held.get("mix"), ctx)
    bias, held["gates"] = self._gate_bias(gates.logits, state, ctx)
    update, held["self"] = self.self_attention(
      read, held.get("self"), bias=bias, ctx=ctx.scope("self")
    )
    x = self.self_residual.after(x, modulate(update, gates.attention), ctx.deterministic)
    if self.cross:
      update, held["cross"] = self.cross_attention(
        self.cross_residual.before(x), held.get("cross"), memory, ctx=ctx.scope("cross")
      )
      x = self.cross_residual.after(x, update, ctx.deterministic)
    update = self.ffn(
      self.ffn_residual.before(x),
      deterministic=ctx.deterministic,
      taps=ctx.intermediates.scope("ffn"),
    )
    update = modulate(update, gates.ffn)
    x = ctx.intermediates("output", self.ffn_residual.after(x, update, ctx.deterministic))
    if state is None:
      return x, None
    return x, {name: value for name, value in held.items() if value is not None}

  def _gate_bias(
    self, logits: Float[Array, "batch time heads"] | None, state: State | None, ctx: Context
  ) -> tuple[jax.Array | None, jax.Array | None]:
    """What gates add to attention logits, and those of all keys so far for the state."""
    if logits is None or state is None:
      return attention_bias(logits), None
    keys = state["self"]["key"].shape[-1]
    held = state.get("gates", jnp.zeros((len(logits), 1, keys, logits.shape[-1]), logits.dtype))
    zero = jnp.int32(0)
    held = jax.lax.dynamic_update_slice(
      held, logits[:, None], (zero, zero, jnp.asarray(ctx.start, jnp.int32), zero)
    )
    return attention_bias(logits if ctx.newest is None else held[:, 0]), held


def run_block(
  block: Block,
  x: Float[Array, "batch time embed"],
  state: State | None = None,
  memory: Float[Array, "batch memory embed"] | None = None,
  gates: Gates = UNGATED,
  *,
  ctx: Context,
) -> tuple[Float[Array, "batch time embed"], State | None]:
  """Runs a block; with `config.remat` the backward pass computes its activations again."""
  if not block.config.remat or state is not None:
    return block(x, state, memory, gates, ctx=ctx)

  def apart(
    module: Block, x: jax.Array, memory: jax.Array | None, gates: Gates
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    inner = ctx.intermediates.apart()
    out, _ = module(x, None, memory, gates, ctx=dataclasses.replace(ctx, intermediates=inner))
    seen.update(inner.seen)
    return out, inner.captured

  seen: set[str] = set()
  out, captured = nn.remat(apart)(block, x, memory, gates)
  ctx.intermediates.merge(captured, seen)
  return out, None
