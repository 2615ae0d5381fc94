"""Positions of which attention knows: rotations of queries and keys, or relative ones.

Those that are vectors added to embeddings stand beside the embedding. All of them can be given
labels of a longer range in place of the numbers of positions.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.sharding import logical
from compmod_jax.kernels.attention.distances import DistanceBias, shifted
from compmod_jax.kernels.attention.rotation import Rotation
from compmod_jax.layers.context import PositionIds

Positions = Literal["sinusoidal", "learned", "rotary", "relative", "alibi", "none"]
"""Vectors added to embeddings, fixed or learned; or what acts on queries, keys and logits of
self-attention: rotations (Su et al. 2021), relative positions (Dai et al. 2019), or a penalty that
grows with the distance (Press et al. 2022); or none at all (Kazemnejad et al. 2023)."""
ModelPositions = Literal[Positions, "relative_bias"]
"""Those, and what a model makes once for all its layers: learned numbers that are added to the
logits of attention (Raffel et al. 2020)."""
ADDED = ("sinusoidal", "learned")
IN_ATTENTION = ("rotary", "relative", "alibi")
NUMBERED = (*IN_ATTENTION, "relative_bias")
"""Those for which a pass has to know where queries and keys stand."""
_STDDEV = 0.05  # of fresh biases; T5's is 1 / sqrt(dim), 0.044 in its small and 0.031 in its large


def rotate(
  x: Float[Array, "batch time heads head_dim"], position_ids: Int[Array, "#batch #time"]
) -> Float[Array, "batch time heads head_dim"]:
  r"""Rotary positions: every pair of dimensions is turned by an angle that grows with the place.

  .. math:: (x_i, x_{i+D/2}) \mapsto (x_i \cos\theta - x_{i+D/2} \sin\theta,\;
     x_i \sin\theta + x_{i+D/2} \cos\theta), \quad \theta = t\, 10000^{-2i/D}

  The product of a query and a key then depends on the difference of their positions alone.

  Args:
    x: queries or keys; head_dim is even.
    position_ids: t, where each stands in its text.

  Source: Su et al. 2021, equation 34; dimensions are paired across halves.
  """
  return Rotation.of(position_ids, x.shape[-1]).turn(x)


class RelativePositions(nn.Module):
  r"""Relative positions in the logits of attention, as in Transformer-XL.

  .. math:: s_{ts} = \frac{(q_t + u) \cdot k_s + (q_t + v) \cdot W_R r_{t-s}}{\sqrt{D_h}}

  with fixed sinusoids :math:`r_d` of the distance and learned :math:`u`, :math:`v` in each head.

  Attributes:
    dim: model width, even.
    heads: number of heads.
    dtype: compute type.

  Source: Dai et al. 2019, section 3.3.
  """

  dim: int
  heads: int
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes W_R, u and v."""
    shape, names = (self.heads, self.dim // self.heads), ("heads", "head_dim")
    init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", in_axis=0, out_axis=(1, 2))
    self.kernel = self.param("kernel", logical(init, "embed", *names), (self.dim, *shape))
    zeros = logical(nn.initializers.zeros, *names)
    self.content = self.param("content", zeros, shape)
    self.distance = self.param("distance", zeros, shape)

  def __call__(
    self,
    query: Float[Array, "batch time heads head_dim"],
    position_ids: PositionIds | None = None,
    *,
    causal: bool = False,
  ) -> tuple[Float[Array, "batch time heads head_dim"], Float[Array, "batch heads time keys"]]:
    """The queries q + u, and what is added to the logits for the distances, float32.

    Args:
      query: q.
      position_ids: where queries and keys stand; none: both at 0, 1, and so on, for which nothing
        is gathered.
      causal: no later key is read, so that without `position_ids` any number may stand there.
    """
    most = query.shape[1] if position_ids is None else position_ids.length
    least = 0 if causal and position_ids is None else 1 - most
    distances = np.arange(least, most)[:, None]
    rates = 10000.0 ** (-np.arange(0, self.dim, 2) / self.dim)
    sinusoids = np.concatenate([np.sin(distances * rates), np.cos(distances * rates)], axis=1)
    kernel = self.kernel.astype(self.dtype)
    table = jnp.einsum("nm,mhd->nhd", jnp.asarray(sinusoids, self.dtype), kernel)
    moved = query + self.distance.astype(query.dtype)[None, None]
    if position_ids is None:
      table = table[::-1]
    every = jnp.einsum("bthd,nhd->bhtn", moved, table, preferred_element_type=jnp.float32)
    scale = jnp.sqrt(jnp.float32(query.shape[-1]))
    moved = query + self.content.astype(query.dtype)[None, None]
    if position_ids is None:
      return moved, shifted(every) / scale
    index = position_ids.queries[:, :, None] - position_ids.keys[:, None, :] + (most - 1)
    index = jnp.broadcast_to(index[:, None], (*every.shape[:3], index.shape[-1]))
    return moved, jnp.take_along_axis(every, index, axis=-1) / scale


def distance_penalties(heads: int) -> Float[Array, " heads"]:
  r"""Attention with linear biases: what logits are less by for every position between, float32.

  .. math:: s_{tsh} = q_t \cdot k_s - 2^{-8h/H} |t - s|, \quad h = 1, \dots, H

  Heads differ in how far they look. Where keys may come later the penalty is the same on both
  sides. The formula is used for every H; the original program has other slopes where H is no power
  of 2.

  Args:
    heads: H.

  Source: Press et al. 2022, section 3.
  """
  return jnp.asarray(2.0 ** (-8 * np.arange(1, heads + 1) / heads), jnp.float32)


def alibi_bias(
  heads: int, time: int, position_ids: PositionIds | None = None
) -> Float[Array, "#batch heads queries keys"] | DistanceBias:
  """What is added to the logits for `distance_penalties`, float32.

  Args:
    heads: how many.
    time: number of positions.
    position_ids: where queries and keys stand; none: both at 0, 1, and so on, for which there is
      one number a distance, and not one a pair.
  """
  penalties = distance_penalties(heads)
  if position_ids is None:
    distance = jnp.abs(jnp.arange(time - 1, -time, -1)).astype(jnp.float32)[None]
    return DistanceBias(-penalties[:, None] * distance)
  distance = jnp.abs(position_ids.queries[:, :, None] - position_ids.keys[:, None, :])
  return -penalties[None, :, None, None] * distance[:, None].astype(jnp.float32)


def distance_buckets(
  distance: Int[Array, "..."], *, buckets: int, most: int, bidirectional: bool
) -> Int[Array, "..."]:
  r"""Number of the bucket of every distance, from 0.

  Of the B buckets for keys that come first (half of all if `bidirectional`, all otherwise), the
  first half has one distance each; the rest grow as the logarithm does, up to the last one, which
  has all distances from M on:

  .. math:: b(d) = \begin{cases} d & d < B/2 \\
     \min(B/2 + \lfloor \frac{\log(2d/B)}{\log(2M/B)} B/2 \rfloor, B - 1) & \text{otherwise}
     \end{cases}

  Keys that come later are B + b(|d|), or, if not `bidirectional`, in the bucket of distance 0.

  Args:
    distance: position of the query minus that of the key.
    buckets: of both directions.
    most: M.
    bidirectional: whether keys may come later.

  Source: Raffel et al. 2020, section 2.1, and their code.
  """
  one_way = buckets // 2 if bidirectional else buckets
  exact = one_way // 2
  offset = jnp.where(distance < 0, one_way, 0) if bidirectional else 0
  distance = jnp.abs(distance) if bidirectional else jnp.maximum(distance, 0)
  ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(most / exact)
  far = exact + (ratio * (one_way - exact)).astype(jnp.int32)
  return offset + jnp.where(distance < exact, distance, jnp.minimum(far, one_way - 1))


@dataclasses.dataclass(frozen=True)
class RelativeBiasConfig:
  """Fields of the models that may have `relative_bias`."""

  relative_buckets: int = 32
  """Positions relative_bias: buckets of distances between queries and keys."""
  relative_distance: int = 128
  """Positions relative_bias: from this distance on, all are in the last bucket."""

  position_kinds: ClassVar[tuple[str, ...]] = get_args(ModelPositions)

  def check_relative_bias(self) -> None:
    """Raises a `UserError` if there is no such number of buckets, or a bucket is empty."""
    buckets = self.relative_buckets
    errors.check(
      buckets >= 4 and buckets % 2 == 0,
      f"model.relative_buckets is {buckets}; both directions need an even number, at least 4.",
    )
    errors.check(
      self.relative_distance > buckets // 2,
      f"model.relative_distance is {self.relative_distance}; it must be more than half of"
      f" model.relative_buckets = {buckets}: each shorter distance has a bucket in the decoder.",
    )


def check_sliding_window(positions: int) -> None:
  """Refuses a negative number of positions.

  Raises:
    UserError: the number is negative.
  """
  errors.check(
    positions >= 0,
    f"model.sliding_window is {positions}; it must be a number of positions that are read, or 0 for"
    " all.",
  )


class RelativeBias(nn.Module):
  r"""Learned numbers for buckets of distances, added to the logits of attention in each head.

  .. math:: s_{ts} = q_t \cdot k_s + w_{b(t-s), h}

  Attributes:
    heads: number of heads.
    buckets: number of buckets.
    most: distance from which on all are in the last bucket.
    bidirectional: whether keys may come later than queries; see `distance_buckets`.

  Source: Raffel et al. 2020, section 2.1.
  """

  heads: int
  buckets: int
  most: int
  bidirectional: bool

  @nn.compact
  def __call__(
    self, time: int, position_ids: PositionIds | None = None
  ) -> Float[Array, "#batch heads queries keys"] | DistanceBias:
    """What is added to the logits, float32.

    Args:
      time: number of positions.
      position_ids: where queries and keys stand; none: both at 0, 1, and so on, for which one
        number a distance is gathered, and not one a pair.
    """
    init = logical(nn.initializers.normal(stddev=_STDDEV), "position", "heads")
    table = self.param("table", init, (self.buckets, self.heads))
    way = {"buckets": self.buckets, "most": self.most, "bidirectional": self.bidirectional}
    if position_ids is None:
      return DistanceBias(table[distance_buckets(jnp.arange(time - 1, -time, -1), **way)].T)
    distance = position_ids.queries[:, :, None] - position_ids.keys[:, None, :]
    return jnp.moveaxis(table[distance_buckets(distance, **way)], -1, 1)


def label(position_ids: Int[Array, "..."], labels: int, most: int) -> Int[Array, "..."]:
  r"""Fixed labels of positions, evenly spread over a longer range.

  .. math:: l(t) = \lfloor t R / M \rfloor

  They do not depend on the length of the sequence.

  Args:
    position_ids: t, below M.
    labels: R, at least M; 0: positions are their own labels.
    most: M, most positions of a sequence.
  """
  if not labels:
    return position_ids
  return jnp.asarray(np.arange(most) * labels // most, jnp.int32)[position_ids]


def random_labels(
  key: jax.Array, real: Bool[Array, "batch time"], labels: int
) -> Int[Array, "batch time"]:
  """Of every sequence as many labels as it has tokens, drawn without replacement and sorted.

  Args:
    key: of what is drawn.
    real: true where there is a token; padding follows, and has the last label.
    labels: they are drawn from 0 to `labels` - 1.

  Source: Ruoss et al. 2023.
  """
  batch, time = real.shape
  # The places of the largest of random numbers, from the largest on, are in random order.
  _, order = jax.lax.top_k(jax.random.bits(key, (batch, labels)), time)
  tokens = jnp.arange(time)[None] < jnp.sum(real, axis=1, keepdims=True)
  return jnp.minimum(jnp.sort(jnp.where(tokens, order, labels), axis=1), labels - 1)


class PositionLabels(nn.Module):
  """Labels by which a model knows positions, in place of their numbers.

  Attributes:
    labels: size of the range from which they are.
    most: most positions of a sequence.
  """

  labels: int
  most: int

  def __call__(
    self,
    real: Bool[Array, "batch time"],
    position_ids: Int[Array, "#batch time"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Int[Array, "#batch time"]:
    """Labels of whole sequences: in training random ones, else those of `label`.

    Args:
      real: true where there is a token; padding follows.
      position_ids: of the positions, where they do not count from 0; those of a row in which
        several texts are packed have labels of one draw.
      deterministic: nothing is random; else draws from the key `dropout`.
    """
    numbers = jnp.arange(real.shape[1])[None] if position_ids is None else position_ids
    if deterministic:
      return label(numbers, self.labels, self.most)
    drawn = random_labels(self.make_rng("dropout"), real, self.labels)
    return jnp.take_along_axis(drawn, jnp.broadcast_to(numbers, real.shape), axis=1)


def check_positions(
  positions: str, dim: int, heads: int, kinds: Sequence[str] = get_args(Positions)
) -> None:
  """Raises a `UserError` for positions that do not exist or do not suit the widths.

  Args:
    positions: as `model.positions` has them.
    dim: model width.
    heads: number of heads.
    kinds: those that the model can have.
  """
  errors.check_choice("model.positions", positions, kinds)
  errors.check(
    positions not in ("sinusoidal", "rotary", "relative") or dim % 2 == 0,
    f"model.dim is {dim}; {positions} positions need an even width. Use an even width or"
    " positions = learned.",
  )
  errors.check(
    positions != "rotary" or dim // heads % 2 == 0,
    f"model.dim is {dim} and model.heads {heads}, so that heads are {dim // heads} wide; rotary"
    " positions need an even width of heads. Choose other sizes.",
  )
