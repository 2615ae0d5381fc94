"""Experts that turn a picture into one of the same size, and the discriminator they compete under.

Experts are small convolutional networks with parameters [experts, ...], computed side by side.
Convolutions are products of matrices over patches: with filters of its own for every expert, XLA's
programs for CPUs take many times as long for a convolution.
"""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.models.base import ModelConfig

_OUTSIDE = 0.1  # slope of an expert's output below 0 and above 1
_SLOPE = 0.2  # of leaky ReLU below 0
_ACTIVATIONS = {
  "leaky_relu": functools.partial(nn.leaky_relu, negative_slope=_SLOPE),
  "elu": nn.elu,
}


@dataclasses.dataclass(frozen=True)
class CompetingExpertsConfig(ModelConfig):
  """Sizes of experts and discriminator."""

  family = "Competing experts"

  experts: int = 10
  """Experts."""
  layers: int = 3
  """3 x 3 convolutions of an expert; a pixel depends on those so far from it, at most."""
  filters: int = 16
  """Filters of every layer of an expert but the last."""
  activation: str = "leaky_relu"
  """Between the convolutions of an expert: "leaky_relu" (slope 0.2 below 0) or "elu"."""
  discriminator_layers: int = 3
  """3 x 3 convolutions of the discriminator, each of which halves height and width."""
  discriminator_filters: int = 16
  """Filters of its first layer; every other one has twice as many as the layer before."""

  def __post_init__(self):
    check_numbers(self, "model.")
    errors.check_choice("model.activation", self.activation, _ACTIVATIONS)
    check_least(
      self,
      "model.",
      experts=1,
      layers=1,
      filters=1,
      discriminator_layers=1,
      discriminator_filters=1,
    )
    errors.check(
      self.experts <= 2**16 and self.discriminator_layers <= 16,
      f"model.experts is {self.experts} and model.discriminator_layers"
      f" {self.discriminator_layers}; they must be at most {2**16} and 16.",
    )

  def describe(self) -> str:
    """Sizes, in a few words."""
    return (
      f"{self.experts} experts with {self.layers} convolutions of {self.filters} filters, and a"
      f" discriminator with {self.discriminator_layers}"
    )

  def image_experts(self) -> "CompetingExperts":
    """See `ModelConfig`."""
    return CompetingExperts(self)


class CompetingExperts(nn.Module):
  """All experts and the discriminator; pictures are [height, width], between 0 and 1.

  Parameters are in `experts`, whose leaves are [experts, ...], and in `discriminator`.
  """

  config: CompetingExpertsConfig

  def setup(self) -> None:
    """The experts and the discriminator."""
    c = self.config
    stacked = nn.vmap(
      Expert,
      in_axes=None,  # pyright: ignore[reportArgumentType]  # all see the same images
      variable_axes={"params": 0},
      split_rngs={"params": True},
      axis_size=c.experts,
    )
    self.experts = stacked(c.layers, c.filters, c.activation)
    self.discriminator = PictureScore(c.discriminator_layers, c.discriminator_filters)

  def __call__(
    self, images: Float[Array, "batch height width"]
  ) -> tuple[Float[Array, "experts batch height width"], Float[Array, "experts batch"]]:
    """What every expert makes of every picture, and the logits of the discriminator."""
    outputs = self.transform(images)
    scores = self.score(outputs.reshape(-1, *outputs.shape[2:]))
    return outputs, scores.reshape(outputs.shape[:2])

  def transform(
    self, images: Float[Array, "batch height width"]
  ) -> Float[Array, "experts batch height width"]:
    """What every expert makes of every picture."""
    return self.experts(images)

  def score(self, images: Float[Array, "batch height width"]) -> Float[Array, " batch"]:
    """Logit that a picture is an untransformed one."""
    return self.discriminator(images)


class Expert(nn.Module):
  """Convolutions with a nonlinearity between them.

  Attributes:
    layers: convolutions.
    filters: of all but the last.
    activation: the nonlinearity, as in `CompetingExpertsConfig`.
  """

  layers: int
  filters: int
  activation: str

  @nn.compact
  def __call__(self, images: Float[Array, "batch height width"]) -> jax.Array:
    """Pictures of the same size, [batch, height, width]."""
    x = images[None]
    for layer in range(self.layers):
      last = layer + 1 == self.layers
      x = PatchConv(1 if last else self.filters, name=f"layer_{layer}")(x)
      x = leaky_clip(x) if last else _ACTIVATIONS[self.activation](x)
    return x[0]


def leaky_clip(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """As it is between 0 and 1, and outside with a tenth of the slope.

  A sigmoid in its place can saturate: an expert that makes all inverted pictures black stays so.
  """
  inside = jnp.clip(x, 0, 1)
  return inside + _OUTSIDE * (x - inside)


class PictureScore(nn.Module):
  """Convolutions that halve height and width, and a linear layer over all that is left.

  Attributes:
    layers: convolutions.
    filters: of the first; every other one has twice as many as the layer before.
  """

  layers: int
  filters: int

  @nn.compact
  def __call__(self, images: Float[Array, "batch height width"]) -> Float[Array, " batch"]:
    """Logits."""
    x = images[None]
    for layer in range(self.layers):
      x = PatchConv(self.filters * 2**layer, stride=2, name=f"layer_{layer}")(x)
      x = _ACTIVATIONS["leaky_relu"](x)
    return nn.Dense(1, name="head")(jnp.swapaxes(x, 0, 1).reshape(len(images), -1))[:, 0]


class PatchConv(nn.Module):
  """A 3 x 3 convolution with a border of one zero, as a product of matrices.

  Channels come first, so that the last axis of the product, all places of all pictures, is long.

  Attributes:
    filters: of the result.
    stride: step over height and width.
  """

  filters: int
  stride: int = 1

  @nn.compact
  def __call__(self, x: Float[Array, "channels batch height width"]) -> jax.Array:
    """[filters, batch, ceil(height / stride), ceil(width / stride)]."""
    columns = patches(x, self.stride)
    kernel = self.param("kernel", nn.initializers.he_normal(), (len(columns), self.filters))
    bias = self.param("bias", nn.initializers.zeros, (self.filters,))
    made = kernel.T @ columns.reshape(len(columns), -1) + bias[:, None]
    return made.reshape(self.filters, *columns.shape[1:])


def patches(
  x: Float[Array, "channels batch height width"], stride: int = 1
) -> Float[Array, "columns batch high wide"]:
  """The 3 x 3 values around every place, zeros outside; columns are places times channels."""
  high, wide = (math.ceil(side / stride) for side in x.shape[2:])
  padded = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
  shifted = [
    padded[..., i : i + (high - 1) * stride + 1 : stride, j : j + (wide - 1) * stride + 1 : stride]
    for i in range(3)
    for j in range(3)
  ]
  return jnp.concatenate(shifted)
