"""A stack of blocks with self-attention, and gates where there are any; its configuration."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.layers import block
from compmod_jax.layers.block import Norm, StackConfig, run_block
from compmod_jax.layers.context import Context
from compmod_jax.layers.fast_weights import PLASTICITIES, Plasticity
from compmod_jax.layers.positions import RelativeBias, RelativeBiasConfig
from compmod_jax.layers.shared_layers import RandomDepth, repeated
from compmod_jax.mechanisms.modulation import UNGATED, Gates

State = dict[str, block.State]
"""Number of the layer -> its state."""


@dataclasses.dataclass(frozen=True)
class TextStackConfig(StackConfig):
  """What models over whole texts have besides."""

  convolution: int = 1
  """Width of a causal convolution of each channel by itself before self-attention, so that a key
  tells what stands before it; 1: none."""
  fast_weights: Plasticity = "off"
  """Fast weights beside self-attention, which change at every position: off, at the same rate
  everywhere (hebbian), or as a gate on every unit says (modulated)."""

  def __post_init__(self):
    super().__post_init__()
    errors.check_choice("model.fast_weights", self.fast_weights, PLASTICITIES)
    errors.check(
      self.fast_weights == "off" or not self.mechanism_layers,
      f"model.fast_weights is {self.fast_weights!r} and model.mechanism_layers is"
      f" {self.mechanism_layers}; a mechanism reads its slice of the width alone, and fast weights"
      " read all of it. Leave one of them out.",
    )
    errors.check(
      self.fast_weights == "off" or self.dim % self.heads == 0,
      f"model.fast_weights is {self.fast_weights!r}, and model.heads = {self.heads} does not divide"
      f" model.dim = {self.dim}; fast weights are dim / heads wide in each head, whatever head_dim"
      " is. Choose a number of heads that divides the width, or leave fast_weights out.",
    )
    errors.check(
      self.convolution >= 1,
      f"model.convolution is {self.convolution}; it is a width in positions, 1 for none.",
    )

  def mechanisms_off(self) -> dict[str, Any]:
    """See `StackConfig`; fast weights are a mechanism."""
    return super().mechanisms_off() | {"fast_weights": "off"}

  def describe_competition(self) -> str:
    """What competes where, and fast weights, in a few words."""
    fast = f", fast weights ({self.fast_weights})" if self.fast_weights != "off" else ""
    return super().describe_competition() + fast


class Stack(nn.Module):
  """Blocks of one side of a model; which of them run is for the caller to say.

  Intermediates: `layer_<i>/...`; see `Block` and `Attention`.

  Attributes:
    config: sizes and options.
    side: the stack's name.
    norm: whether sub-layers are normalised before or after.
    tied_key_value: whether keys are values, too.
    bidirectional: whether biases of relative positions know later keys, too.
  """

  config: TextStackConfig
  side: str
  norm: Norm
  tied_key_value: bool = False
  bidirectional: bool = False

  def setup(self):
    """Makes the blocks."""
    c = self.config
    ((kind, _),) = c.attention(self.side)
    make = c.block_class()
    layers = [
      make(
        c,
        self.norm,
        kind,
        tied_key_value=self.tied_key_value,
        inside=c.inside(self.side, i),
        convolution=c.convolution,
        fast_weights=c.fast_weights,
      )
      for i in range(c.own_layers(self.side))
    ]
    self.layer = repeated(layers, c.layers(self.side))
    self.depth = RandomDepth(c.fewest_repeats, c.own_layers(self.side))
    self.bias = None
    if isinstance(c, RelativeBiasConfig) and c.positions == "relative_bias":
      sizes = c.relative_buckets, c.relative_distance
      self.bias = RelativeBias(c.heads, *sizes, self.bidirectional)

  def initial_state(self, batch: int, keys: int, *, beams: int = 1) -> State:
    """The state before the first position; see `Block.initial_state`."""
    layers = enumerate(self.layer)
    return {str(i): layer.initial_state(batch, keys, beams=beams) for i, layer in layers}

  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    state: State | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    gates: Mapping[int, Gates] | None = None,
    ctx: Context = Context(),
  ) -> tuple[Float[Array, "batch time embed"], State | None]:
    """The stream after blocks `start` to `stop` - 1 (the last one, if not given).

    Args:
      x: the stream.
      state: of earlier positions, to which these are added; None: these are all.
      start: number of the first block.
      stop: number behind the last.
      gates: of blocks that have some, by number.
      ctx: masks, where decoding stands, dropout, intermediates.

    Returns:
      The stream, and the next state; None if none was given.
    """
    held = dict(state or {})
    depth = self.depth(len(x), len(self.layer), deterministic=ctx.deterministic)
    ctx = dataclasses.replace(ctx, depth=depth)
    if self.bias is not None:
      bias = self.bias(x.shape[1], ctx.position_ids)
      ctx = dataclasses.replace(ctx, position_bias=bias)
    for i in range(start, len(self.layer) if stop is None else stop):
      gate = (gates or {}).get(i, UNGATED)
      x, after = run_block(self.layer[i], x, held.get(str(i)), gates=gate, ctx=ctx.of_layer(i))
      if after is not None:
        held[str(i)] = after
    return x, held if state is not None else None
