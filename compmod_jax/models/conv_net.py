"""A small convolutional network for pictures, as few-shot learning compares its methods on.

Its convolution has derivative rules of its own, which are right to any order in reverse mode:
differentiating through the steps of an inner loop needs them, and XLA's programs for CPUs spend
tens of times the forward pass's time on the gradient with respect to a filter that its own rule
asks for, and more where every task of a batch has filters of its own.
"""

import dataclasses
import functools
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.models.base import ModelConfig

_EPSILON = 1e-5  # of the normalisation


@dataclasses.dataclass(frozen=True)
class ConvNetConfig(ModelConfig):
  """Blocks of a 3 x 3 convolution, normalisation, ReLU and halving; a linear head.

  Source: Vinyals et al. 2016, section 4.1.1; Finn et al. 2017, section 5.2.
  """

  blocks: int = 4
  """Blocks, each of which halves height and width."""
  filters: int = 64
  """Filters of every block."""
  halve: Literal["pool", "stride"] = "pool"
  """How a block halves: the largest of 2 x 2 values, and all values of the last block are features;
  or the convolution takes steps of two, with a quarter of the operations, and features are means
  over places, as Finn et al. have it for Omniglot."""

  family = "Convolutional network"

  def __post_init__(self):
    check_numbers(self, "model.")
    check_least(self, "model.", blocks=1, filters=1)
    errors.check_choice("model.halve", self.halve, ("pool", "stride"))

  def describe(self) -> str:
    """Sizes, in a few words."""
    return f"{self.blocks} convolutions of {self.filters} filters"

  def classifier(self, shape: tuple[int, ...], outputs: int) -> "ConvNet":
    """The module for pictures [height, width, channels]; with no outputs, without a head.

    Raises:
      UserError: they have another number of axes, or are too small.
    """
    errors.check(
      len(shape) == 3,
      f"model is a ConvNetConfig, but an example has the shape {shape}; it must be [height, width,"
      " channels]. Set another model, or give pictures.",
    )
    side = min(shape[:2])
    errors.check(
      self.halve == "stride" or side >= 2**self.blocks,
      f"model.blocks is {self.blocks}, but pictures of {shape[0]} x {shape[1]} can be halved"
      f" {max(side, 1).bit_length() - 1} times. Take fewer blocks.",
    )
    return ConvNet(self, outputs)


class ConvNet(nn.Module):
  r"""Convolutions, each normalised by the statistics of the batch that it is given.

  .. math:: x \leftarrow \max_{2 \times 2} \mathrm{ReLU}\Bigl(
            \gamma \frac{w * x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta\Bigr)

  Mean and variance are those of the batch, in training and in use (transductive: a query's
  prediction depends on the other queries of its episode); nothing is averaged over batches.

  Sites: `block_<i>` [batch, height, width, filters], `features` [batch, dim] and `logits`.

  Attributes:
    config: sizes.
    outputs: classes; 0 for none, the result is then the features.
  """

  config: ConvNetConfig
  outputs: int = 0

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "batch height width channels"],
    *,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch outputs"]:
    """Logits, or features where there is no head."""
    c, x = self.config, inputs
    for i in range(c.blocks):
      x = intermediates(f"block_{i}", ConvBlock(c.filters, c.halve, name=f"block_{i}")(x))
    x = x.reshape(len(x), -1) if c.halve == "pool" else jnp.mean(x, axis=(1, 2))
    x = intermediates("features", x)
    if not self.outputs:
      return x
    head = nn.Dense(self.outputs, kernel_init=nn.initializers.normal(0.01), name="head")
    return intermediates("logits", head(x))


class ConvBlock(nn.Module):
  """A block of `ConvNet`; attributes as fields of `ConvNetConfig`."""

  filters: int
  halve: Literal["pool", "stride"]

  @nn.compact
  def __call__(self, x: Float[Array, "batch height width channels"]) -> jax.Array:
    """Half as high and wide, [batch, height, width, filters]."""
    # A bias would be taken off again by the mean.
    kernel = self.param(
      "kernel", nn.initializers.glorot_uniform(), (3, 3, x.shape[-1], self.filters)
    )
    scale = self.param("scale", nn.initializers.ones, (self.filters,))
    bias = self.param("bias", nn.initializers.zeros, (self.filters,))
    stride = 2 if self.halve == "stride" else 1
    known = moments(x, kernel, stride) if 9 * x.shape[-1] < self.filters else None
    x = convolve(x, kernel, stride)
    if known is None:
      mean = jnp.mean(x, axis=(0, 1, 2), keepdims=True)
      variance = jnp.mean(jnp.square(x - mean), axis=(0, 1, 2), keepdims=True)
    else:
      mean, variance = (one.reshape(1, 1, 1, -1) for one in known)
    factor = jax.lax.rsqrt(variance + _EPSILON) * scale.reshape(1, 1, 1, -1)
    if self.halve == "pool":
      # The largest first: the rest then has a quarter of the values. A negative scale turns the
      # order round.
      sign = jnp.where(scale < 0, -1.0, 1.0).astype(x.dtype).reshape(1, 1, 1, -1)
      x = largest(x * sign) * sign
    return nn.relu((x - mean) * factor + bias.reshape(1, 1, 1, -1))


def moments(
  x: Float[Array, "batch height width channels"],
  kernel: Float[Array, "3 3 channels filters"],
  stride: int = 1,
) -> tuple[Float[Array, " filters"], Float[Array, " filters"]]:
  r"""Mean and variance of what `convolve` gives, from those of the patches that it reads.

  .. math:: \mu = W^\top \bar p, \quad \sigma^2_f = w_f^\top \mathrm{Cov}(p)\, w_f

  Where pictures have few channels, patches are far smaller than what filters make of them, and
  nothing has to be read again, nor to be differentiated there.
  """
  padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  high, wide = ((size - 1) // stride * stride + 1 for size in x.shape[1:3])
  patches = jnp.concatenate(
    [padded[:, i : i + high : stride, j : j + wide : stride] for i in range(3) for j in range(3)],
    axis=-1,
  )
  patches = patches.reshape(-1, patches.shape[-1])
  mean = jnp.mean(patches, axis=0)
  centred = patches - mean[None]
  weights = kernel.reshape(-1, kernel.shape[-1])
  product = functools.partial(jnp.matmul, precision="highest")
  covariance = product(centred.T, centred) / len(patches)
  return product(mean, weights), jnp.sum(weights * product(covariance, weights), axis=0)


def largest(
  x: Float[Array, "batch height width channels"],
) -> Float[Array, "batch half_height half_width channels"]:
  """The largest of every 2 x 2 values; a last odd row or column is left out.

  Of equal ones the first has all of the gradient, as PyTorch has it; JAX's maximum would divide it
  among them, which takes longer.
  """
  batch, height, width, channels = x.shape
  x = x[:, : height // 2 * 2, : width // 2 * 2].reshape(batch, height // 2, 2, -1, channels)
  x = _larger(x[:, :, 0], x[:, :, 1]).reshape(batch, height // 2, width // 2, 2, channels)
  return _larger(x[..., 0, :], x[..., 1, :])


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.where(a >= b, a, b)


# The three of them are each other's derivatives.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
  """Convolution with a border of one zero. Reverse mode, any order.

  Args:
    x: [batch, height, width, channels].
    kernel: [3, 3, channels, filters].
    stride: step over height and width.

  Returns:
    [batch, ceil(height / stride), ceil(width / stride), filters].
  """
  return jax.lax.conv_general_dilated(
    x, kernel, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _spread(y: jax.Array, kernel: jax.Array, stride: int, size: tuple[int, int]) -> jax.Array:
  """`convolve` transposed: the gradient with respect to an input of this height and width.

  Reverse mode, any order.
  """
  borders = [
    (1, whole - (part - 1) * stride) for whole, part in zip(size, y.shape[1:3], strict=True)
  ]
  return jax.lax.conv_general_dilated(
    y,
    kernel[::-1, ::-1].swapaxes(2, 3),
    (1, 1),
    borders,
    lhs_dilation=(stride, stride),
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _correlate(x: jax.Array, y: jax.Array, stride: int) -> jax.Array:
  """The gradient with respect to the kernel where the output's is y: three products of matrices.

  They are one for every column of the kernel, x moved sideways by y moved up and down; or one for
  every row, patches of a row of x by y, where these copy less: x has fewer channels than y, or
  steps of two leave values out. Reverse mode, any order.
  """
  (high, wide, filters), channels = y.shape[1:], x.shape[-1]
  span = (wide - 1) * stride + 1
  if stride == 1 and channels >= filters:
    beside = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))
    above = jnp.pad(y, ((0, 0), (1, 1), (0, 0), (0, 0)))
    moved = jnp.concatenate([above[:, i : i + high] for i in (2, 1, 0)], axis=-1)
    columns = [_summed_product(beside[:, :, j : j + span], moved) for j in range(3)]
    return jnp.stack(columns).reshape(3, channels, 3, filters).transpose(2, 0, 1, 3)
  padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  patches = jnp.concatenate([padded[:, :, j : j + span : stride] for j in range(3)], axis=-1)
  tall = (high - 1) * stride + 1
  rows = [_summed_product(patches[:, i : i + tall : stride], y) for i in range(3)]
  return jnp.stack(rows).reshape(3, 3, channels, filters)


def _summed_product(
  a: Float[Array, "batch height width m"], b: Float[Array, "batch height width n"]
) -> Float[Array, "m n"]:
  """The sum over places of products of features."""
  return jax.lax.dot_general(
    a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), (((0,), (0,)), ((), ()))
  )


convolve.defvjp(
  lambda x, kernel, stride: (convolve(x, kernel, stride), (x, kernel)),
  lambda stride, held, slope: (
    _spread(slope, held[1], stride, held[0].shape[1:3]),
    _correlate(held[0], slope, stride),
  ),
)
_spread.defvjp(
  lambda y, kernel, stride, size: (_spread(y, kernel, stride, size), (y, kernel)),
  lambda stride, size, held, slope: (
    convolve(slope, held[1], stride),
    _correlate(slope, held[0], stride),
  ),
)
_correlate.defvjp(
  lambda x, y, stride: (_correlate(x, y, stride), (x, y)),
  lambda stride, held, slope: (
    _spread(held[1], slope, stride, held[0].shape[1:3]),
    convolve(held[0], slope, stride),
  ),
)
