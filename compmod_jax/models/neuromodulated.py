r"""Classifiers that learn class after class: one whose features are gated by a second network, and
two of as many parameters without a gate.

The prediction network's last hidden layer :math:`h` is multiplied with the output of a
neuromodulatory network of the same input, and a linear layer reads the product:

.. math:: z = W \bigl(\sigma(g_{\theta_{NM}}(x)) \odot h_{\theta_P}(x)\bigr)

The gate switches units off for an input, in the forward pass and, as a factor of the gradient, in
learning.

Source: Beaulieu et al. 2020, section 3; Kolios 2023, section 4.8.11.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.models.base import ModelConfig
from compmod_jax.models.conv_net import convolve

Kind = Literal["anml", "oml", "plain"]

_EPSILON = 1e-5  # of the normalisation
_MOST = 4096  # filters that are tried


class Sizes(NamedTuple):
  """Layers of a network.

  Attributes:
    prediction: filters of the convolutions whose parameters are the prediction network's.
    other: filters of those of the neuromodulatory network, or of the representation.
    features: width of the last hidden layer.
    count: parameters, without the last layer.
  """

  prediction: tuple[int, ...]
  other: tuple[int, ...]
  features: int
  count: int


@dataclasses.dataclass(frozen=True)
class NeuromodulatedConfig(ModelConfig):
  """Convolutions in steps of two with a gate on the last hidden layer, or without one."""

  kind: Kind = "anml"
  """anml: a prediction network with gates; oml: a representation, and two prediction layers; plain:
  convolutions and one layer. All have the same number of features and about as many parameters:
  oml and plain get wider convolutions, all but the last, for what they lack."""
  blocks: int = 3
  """Convolutions of a network, each of which halves height and width."""
  filters: int = 32
  """Filters of the prediction network's convolutions (anml); of the last one of plain."""
  modulator_filters: int = 16
  """Filters of the neuromodulatory network's convolutions (anml); of the last one of oml."""

  family = "Neuromodulated network"

  def __post_init__(self):
    check_numbers(self, "model.")
    errors.check_choice("model.kind", self.kind, ("anml", "oml", "plain"))
    check_least(self, "model.", blocks=2, filters=1, modulator_filters=1)

  def describe(self) -> str:
    """Kind and sizes, in a few words."""
    what = {
      "anml": f"gates of {self.modulator_filters} filters on a network of {self.filters}",
      "oml": "a representation and two prediction layers",
      "plain": "convolutions and a layer",
    }[self.kind]
    return f"{what}, {self.blocks} convolutions each"

  def sizes(self, shape: tuple[int, ...]) -> Sizes:
    """The layers for pictures [height, width, channels].

    The gated network has so many parameters, and the others get the width of all convolutions but
    the last that comes nearest to that.
    """
    height, width, channels = shape
    for _ in range(self.blocks):
      height, width = math.ceil(height / 2), math.ceil(width / 2)
    places = height * width
    features, narrow = places * self.filters, places * self.modulator_filters
    dense = narrow * features + features
    prediction = (self.filters,) * self.blocks
    modulator = (self.modulator_filters,) * self.blocks
    wanted = _convolutions(channels, prediction) + _convolutions(channels, modulator) + dense
    if self.kind == "anml":
      return Sizes(prediction, modulator, features, wanted)
    last, more = (self.modulator_filters, dense) if self.kind == "oml" else (self.filters, 0)

    def widened(wide: int) -> tuple[tuple[int, ...], int]:
      filters = (wide,) * (self.blocks - 1) + (last,)
      return filters, _convolutions(channels, filters) + more

    filters, count = min(map(widened, range(1, _MOST)), key=lambda one: abs(one[1] - wanted))
    if self.kind == "oml":
      return Sizes((), filters, features, count)
    return Sizes(filters, (), features, count)

  def classifier(self, shape: tuple[int, ...], outputs: int) -> "NeuromodulatedNet":
    """The module for pictures [height, width, channels]; with no outputs, without a last layer.

    Raises:
      UserError: they have another number of axes, or are too small.
    """
    errors.check(
      len(shape) == 3,
      f"model is a NeuromodulatedConfig, but an example has the shape {shape}; it must be [height,"
      " width, channels]. Set another model, or give pictures.",
    )
    errors.check(
      min(shape[:2]) > 2**self.blocks,
      f"model.blocks is {self.blocks}, but pictures of {shape[0]} x {shape[1]} have one place left"
      " after as many halvings, and nothing to normalise over. Take fewer blocks.",
    )
    return NeuromodulatedNet(self, shape, outputs)

  def continual_learner(self, shape: tuple[int, ...], outputs: int) -> "NeuromodulatedNet":
    """See `ModelConfig`: its classifier."""
    return self.classifier(shape, outputs)


def _convolutions(channels: int, filters: tuple[int, ...]) -> int:
  """Parameters of convolutions with a scale and a bias each."""
  before = (channels, *filters[:-1])
  return sum(9 * i * o + 2 * o for i, o in zip(before, filters, strict=True))


class NeuromodulatedNet(nn.Module):
  """A network of one of the three kinds.

  Parameters are in `modulator` (anml) or `representation` (oml), and in `prediction`, whose last
  layer is `prediction/head`. The last layer has no bias: a class is a row.

  Sites: `gate` [batch, features] (anml) or `representation` [batch, dim] (oml); `hidden`
  [batch, features], before the gate; `features` [batch, features], behind it; `logits`.

  Attributes:
    config: kind and sizes.
    shape: of a picture.
    outputs: classes; 0 for none, the result is then the features.
  """

  config: NeuromodulatedConfig
  shape: tuple[int, ...]
  outputs: int = 0

  def setup(self) -> None:
    """The networks."""
    kind, sizes = self.config.kind, self.config.sizes(self.shape)
    if kind == "anml":
      self.modulator = Network(sizes.other, sizes.features)
    elif kind == "oml":
      self.representation = Network(sizes.other)
    hidden = sizes.features if kind == "oml" else 0
    self.prediction = Prediction(sizes.prediction, hidden, sizes.features, self.outputs)

  def __call__(
    self,
    inputs: Float[Array, "batch height width channels"],
    *,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch outputs"]:
    """Logits, or features where there is no last layer."""
    context = self.context(inputs)
    if context.shape[-1]:
      name = "gate" if self.config.kind == "anml" else "representation"
      context = intermediates(name, context)
    features = self.features(inputs, context, intermediates)
    if not self.outputs:
      return features
    return intermediates("logits", self.prediction.classify(features))

  def context(
    self, inputs: Float[Array, "batch height width channels"]
  ) -> Float[Array, "batch context"]:
    """What is not the prediction network's: gates, representations, or nothing (no columns)."""
    if self.config.kind == "anml":
      return nn.sigmoid(self.modulator(inputs))
    if self.config.kind == "oml":
      return self.representation(inputs)
    return jnp.zeros((len(inputs), 0))

  def features(
    self,
    inputs: Float[Array, "batch height width channels"],
    context: Float[Array, "batch context"],
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch features"]:
    """What the last layer reads, given what `context` gave."""
    read = context if self.config.kind == "oml" else inputs
    hidden = intermediates("hidden", self.prediction.hidden(read))
    gated = hidden * context if self.config.kind == "anml" else hidden
    return intermediates("features", gated)


class Prediction(nn.Module):
  """The network whose parameters adapt in the inner loop of meta-learning.

  Attributes:
    filters: of its convolutions; none if it reads a representation.
    dense: units of a layer on a representation; 0 for none.
    features: width of what the last layer reads.
    outputs: classes; 0 for no last layer.
  """

  filters: tuple[int, ...]
  dense: int
  features: int
  outputs: int

  def setup(self) -> None:
    """Convolutions or a layer, and the last layer."""
    if self.filters:
      self.convolutions = Network(self.filters)
    if self.dense:
      self.layer = nn.Dense(self.dense, kernel_init=nn.initializers.he_normal())
    if self.outputs:
      self.head = Head(self.outputs, self.features)

  def hidden(self, x: Float[Array, "batch *shape"]) -> Float[Array, "batch features"]:
    """The last hidden layer."""
    x = self.convolutions(x) if self.filters else x
    return nn.relu(self.layer(x)) if self.dense else x

  def classify(self, features: Float[Array, "batch features"]) -> Float[Array, "batch outputs"]:
    """Logits."""
    return self.head(features)


class Head(nn.Module):
  """The last layer; attributes as those of `Prediction`."""

  outputs: int
  features: int

  @nn.compact
  def __call__(self, x: Float[Array, "batch features"]) -> Float[Array, "batch outputs"]:
    """Logits: the products of what is read with the row of every class."""
    rows = self.param("kernel", lambda rng: fresh_rows(rng, self.outputs, self.features))
    return x @ rows.T


def fresh_rows(
  rng: jax.Array, outputs: int, features: int, gain: jax.Array | float = 1.0
) -> Float[Array, "outputs features"]:
  r"""Rows of the last layer as they begin, and as they are drawn anew for a new class.

  .. math:: W_{ij} \sim \mathcal{N}\bigl(0, \tfrac{2 g^2}{n}\bigr)

  Args:
    rng: key.
    outputs: classes.
    features: n.
    gain: g.

  Source: He et al. 2015, section 2.2, which Beaulieu et al. 2020 draw rows from.
  """
  return gain * math.sqrt(2 / features) * jax.random.normal(rng, (outputs, features))


class Network(nn.Module):
  """Convolutions in steps of two, normalised over the places of each picture, with ReLU.

  Nothing is shared between the pictures of a batch, so that learning from one at a time and using a
  batch are the same computation.

  Attributes:
    filters: of the convolutions.
    outputs: units of a linear layer behind them; 0 for none.
  """

  filters: tuple[int, ...]
  outputs: int = 0

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch height width channels"]
  ) -> Float[Array, "batch outputs"]:
    """All values of the last convolution, or the linear layer's of them."""
    for i, filters in enumerate(self.filters):
      x = Block(filters, name=f"block_{i}")(x)
    x = x.reshape(len(x), -1)
    return nn.Dense(self.outputs, name="out")(x) if self.outputs else x


class Block(nn.Module):
  r"""A convolution that halves height and width, normalised.

  .. math:: x \leftarrow \mathrm{ReLU}\Bigl(
            \gamma \frac{w * x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta\Bigr)

  Mean and variance are those of a channel over the places of one picture.

  Attributes:
    filters: of the convolution.
  """

  filters: int

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch height width channels"]
  ) -> Float[Array, "batch high wide filters"]:
    """Half as high and wide."""
    shape = (3, 3, x.shape[-1], self.filters)
    kernel = self.param("kernel", nn.initializers.he_normal(), shape)
    scale = self.param("scale", nn.initializers.ones, (self.filters,))
    bias = self.param("bias", nn.initializers.zeros, (self.filters,))
    x = convolve(x, kernel, 2)  # a bias of its own would be taken off again by the mean
    mean = jnp.mean(x, axis=(1, 2), keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=(1, 2), keepdims=True)
    factor = jax.lax.rsqrt(variance + _EPSILON) * scale.reshape(1, 1, 1, -1)
    return nn.relu((x - mean) * factor + bias.reshape(1, 1, 1, -1))
