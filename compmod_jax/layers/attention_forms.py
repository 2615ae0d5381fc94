"""Self-attention that is not one softmax over keys: from queries, keys, values to heads' outputs.

Everything before and after is as in any attention: projections, positions that act on queries and
keys, the cache, gates of heads and their competition.
"""

import math
from typing import Literal, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import Dropout
from compmod_jax.layers.context import Context, Dense

AttentionForm = Literal["softmax", "geometric", "hyla", "differential"]
"""The softmax over keys, or a form of this file."""

_EPSILON = 1e-6  # added to mean squares of logits
_NORM_EPSILON = 1e-5  # and of heads' outputs


class Keys(NamedTuple):
  """Which keys queries read.

  Attributes:
    allowed: those that every query may read; None: all.
    own: number of every query's own key.
    later: whether keys may be read that come later.
  """

  allowed: Dense | None
  own: Int[Array, " queries"]
  later: bool


class Form(Protocol):
  """A module that reads values."""

  def __call__(
    self,
    inputs: Float[Array, "batch queries embed"],
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys heads head_dim"],
    value: Float[Array, "batch keys heads head_dim"],
    keys: Keys,
    *,
    bias: Float[Array, "#batch #heads #queries #keys"] | None = None,
    dropout: Dropout | None = None,
    ctx: Context = Context(),
  ) -> Float[Array, "batch queries heads head_dim"]:
    """Outputs of heads.

    Args:
      inputs: what attention reads at the queries' positions.
      query: one row a query.
      key: one row a key, in the order of positions.
      value: one row a key.
      keys: which of them are read.
      bias: added to the logits.
      dropout: acts on weights; none for no dropout.
      ctx: the number of the layer, intermediates.
    """
    ...


class GeometricAttention(nn.Module):
  r"""Every key is read with a probability, the nearest first, until one is.

  .. math::
     p_{ij} &= \sigma(\alpha\, q_i \cdot k_j + \beta_{ij} + \gamma) \\
     w_{ij} &= p_{ij} \prod_{k \in S_{ij}} (1 - p_{ik})

  :math:`S_{ij}` are the keys that are nearer to i than j is; of two that are equally near the right
  one counts as nearer. No position reads itself. :math:`\beta_{ij}` is one linear function of what
  attention reads at i for all keys to the left, and another one for those to the right;
  :math:`\alpha`, which is :math:`1 / \sqrt{D_h}` at first, and :math:`\gamma` are numbers of the
  head. Weights add up to less than 1 where no key may have been read. Distances are counted in
  positions of the row.

  Intermediate: `attention` [batch, heads, queries, keys], the weights.

  Attributes:
    heads: number of heads.
    dtype: compute type; probabilities and sums of logarithms are float32.

  Source: Csordas et al. 2022 (The Neural Data Router), section 2.
  """

  heads: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "batch queries embed"],
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys heads head_dim"],
    value: Float[Array, "batch keys heads head_dim"],
    keys: Keys,
    *,
    bias: Float[Array, "#batch #heads #queries #keys"] | None = None,
    dropout: Dropout | None = None,
    ctx: Context = Context(),
  ) -> Float[Array, "batch queries heads head_dim"]:
    """See `Form`."""
    first = nn.initializers.constant(query.shape[-1] ** -0.5)
    scale = self.param("scale", logical(first, "heads"), (self.heads,))
    shift = self.param("shift", logical(nn.initializers.zeros, "heads"), (self.heads,))
    logits = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
    numbers = jnp.arange(key.shape[1])[None]
    left, right = self._directions(inputs)
    to_left = (numbers < keys.own[:, None])[None, None]
    logits = logits * scale[None, :, None, None] + jnp.where(to_left, left, right)
    logits = logits + shift[None, :, None, None]
    logits = logits if bias is None else logits + bias
    read = (numbers != keys.own[:, None])[None, None]
    read = read if keys.allowed is None else read & keys.allowed
    weights = geometric_weights(logits, read, to_left, later=keys.later)
    weights = ctx.intermediates("attention", weights).astype(value.dtype)
    weights = weights if dropout is None else dropout(weights, deterministic=False)
    return jnp.einsum("bhts,bshd->bthd", weights, value)

  def _directions(
    self, inputs: Float[Array, "batch queries embed"]
  ) -> tuple[Float[Array, "batch heads queries 1"], ...]:
    """What is added to the logits of keys to the left, and of those to the right."""
    init = nn.initializers.variance_scaling(
      1.0, "fan_avg", "uniform", in_axis=0, out_axis=2, batch_axis=(1,)
    )
    names, shape = ("heads", "projections"), (self.heads, 2)
    kernel = self.param("kernel", logical(init, "embed", *names), (inputs.shape[-1], *shape))
    bias = self.param("bias", logical(nn.initializers.zeros, *names), shape)
    kernel, inputs = kernel.astype(self.dtype), inputs.astype(self.dtype)
    both = jnp.einsum("btm,mhp->bhtp", inputs, kernel, preferred_element_type=jnp.float32)
    both = both + bias[None, :, None]
    return both[..., :1], both[..., 1:]


def geometric_weights(
  logits: Float[Array, "batch heads queries keys"],
  read: Dense,
  to_left: Dense,
  *,
  later: bool,
) -> Float[Array, "batch heads queries keys"]:
  """Weights of keys by distance, from the logits of their probabilities; see `GeometricAttention`.

  Logarithms of 1 - p are summed over the keys from the first on. The sum over all that are nearer
  than a key is then a difference of two such sums: at the key, and at its mirror image on the other
  side of the query.

  Args:
    logits: of p, float32.
    read: which keys are read; never a query's own.
    to_left: which keys come before the query.
    later: whether others may be read, too; then query i is at key i.
  """
  passed = jnp.where(read, jax.nn.log_sigmoid(-logits), 0)
  sums = jnp.cumsum(passed, axis=-1)
  mirrored = _mirrored(sums) if later else sums[..., -1:]
  nearer = jnp.where(to_left, mirrored - sums, sums - passed - mirrored)
  return jnp.where(read, jnp.exp(jax.nn.log_sigmoid(logits) + nearer), 0)


def _mirrored(sums: Float[Array, "batch heads time time"]) -> Float[Array, "batch heads time time"]:
  """Element (i, j) is element (i, 2 i - j); 0 below the first, and the last behind the last.

  Rows are turned around, and each is shifted by two more than the one above: the elements of all
  rows in a line, cut into rows that are shorter by two. A gather's gradient would be a scatter.
  """
  time = sums.shape[-1]
  last = jnp.broadcast_to(sums[..., -1:], sums.shape)
  line = jnp.concatenate([jnp.zeros_like(sums), sums, last], axis=-1)[..., ::-1]
  line = line.reshape(*sums.shape[:2], 3 * time * time)
  width = 3 * time - 2
  line = line[..., 2 * time - 1 : 2 * time - 1 + time * width]
  return line.reshape(*sums.shape[:3], width)[..., :time]


class HypernetworkAttention(nn.Module):
  r"""Logits of all heads are a code of each pair of query and key, which configures a network.

  .. math::
     a_{hij} &= \frac{s_{hij}}{\sqrt{\frac{1}{H} \sum_g s_{gij}^2 + \epsilon}}, \qquad
       s_{hij} = \frac{q_{hi} \cdot k_{hj}}{\sqrt{D_h}} \\
     y_i &= \sum_j \Big(\sum_h a_{hij} W'_h\Big)
       \mathrm{relu}\Big(\sum_h a_{hij} W_h x_j\Big)

  Logits are divided by their root mean square over heads, not by a softmax over keys; those of keys
  that are not read are 0. :math:`W_h` is a head's value projection and :math:`W'_h` its part of
  :math:`W_O`, so that the output of a head is the second line without :math:`W'_h`. The hidden
  layer is an array [batch, queries, keys, head_dim].

  Intermediate: `head_code` [batch, heads, queries, keys], a.

  Attributes:
    heads: number of heads.
    dtype: compute type; codes are float32.

  Source: Schug et al. 2025 (Attention as a Hypernetwork), HYLA.
  """

  heads: int
  dtype: DTypeLike = jnp.float32

  def __call__(
    self,
    inputs: Float[Array, "batch queries embed"],
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys heads head_dim"],
    value: Float[Array, "batch keys heads head_dim"],
    keys: Keys,
    *,
    bias: Float[Array, "#batch #heads #queries #keys"] | None = None,
    dropout: Dropout | None = None,
    ctx: Context = Context(),
  ) -> Float[Array, "batch queries heads head_dim"]:
    """See `Form`."""
    logits = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
    logits = logits / jnp.sqrt(jnp.float32(query.shape[-1]))
    logits = logits if bias is None else logits + bias
    logits = logits if keys.allowed is None else jnp.where(keys.allowed, logits, 0)
    square = jnp.mean(jnp.square(logits), axis=1, keepdims=True)
    code = ctx.intermediates("head_code", logits * jax.lax.rsqrt(square + _EPSILON))
    code = code.astype(value.dtype)
    code = code if dropout is None else dropout(code, deterministic=False)
    hidden = nn.relu(jnp.einsum("bhts,bshd->btsd", code, value))
    return jnp.einsum("bhts,btsd->bthd", code, hidden)


class DifferentialAttention(nn.Module):
  r"""The difference of two softmaxes over keys, in which what both give to a key cancels.

  .. math::
     w &= \mathrm{softmax}\Big(\frac{q_1 k_1^T}{\sqrt{D}}\Big)
       - \lambda\, \mathrm{softmax}\Big(\frac{q_2 k_2^T}{\sqrt{D}}\Big), \qquad D = D_h / 2 \\
     \lambda &= \exp(a_1 \cdot b_1) - \exp(a_2 \cdot b_2) + \lambda_0, \qquad
       \lambda_0 = 0.8 - 0.6 \exp(-0.3\, l) \\
     y &= (1 - \lambda_0)\, \mathrm{RMSNorm}(w V)

  Queries and keys of a head are cut in halves, which makes the two. All heads have one
  :math:`\lambda`, with learned vectors a and b of width D, and one scale of the norm. l is the
  number of the layer, from 0.

  Intermediate: `attention` [batch, heads, queries, keys], w, which may be negative.

  Attributes:
    heads: number of heads.
    dtype: compute type; probabilities and norm are float32.

  Source: Ye et al. 2024 (Differential Transformer), section 2.
  """

  heads: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "batch queries embed"],
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys heads head_dim"],
    value: Float[Array, "batch keys heads head_dim"],
    keys: Keys,
    *,
    bias: Float[Array, "#batch #heads #queries #keys"] | None = None,
    dropout: Dropout | None = None,
    ctx: Context = Context(),
  ) -> Float[Array, "batch queries heads head_dim"]:
    """See `Form`."""
    width = query.shape[-1] // 2
    init = logical(nn.initializers.normal(0.1), "projections", "projections", "head_dim")
    vectors = self.param("lambda", init, (2, 2, width))  # of both softmaxes, a and b
    first, second = jnp.exp(jnp.sum(vectors[:, 0] * vectors[:, 1], axis=-1))
    start = 0.8 - 0.6 * math.exp(-0.3 * ctx.layer)
    one, other = (
      self._probabilities(query[..., half], key[..., half], keys, bias)
      for half in (slice(None, width), slice(width, None))
    )
    weights = ctx.intermediates("attention", one - (first - second + start) * other)
    weights = weights.astype(value.dtype)
    weights = weights if dropout is None else dropout(weights, deterministic=False)
    heads = jnp.einsum("bhts,bshd->bthd", weights, value, preferred_element_type=jnp.float32)
    ones = logical(nn.initializers.ones, "head_dim")
    norm = nn.RMSNorm(epsilon=_NORM_EPSILON, dtype=self.dtype, scale_init=ones, name="norm")
    return (1 - start) * norm(heads)

  def _probabilities(
    self, query: jax.Array, key: jax.Array, keys: Keys, bias: jax.Array | None
  ) -> Float[Array, "batch heads queries keys"]:
    """A softmax over keys, float32."""
    logits = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
    logits = logits / jnp.sqrt(jnp.float32(query.shape[-1]))
    logits = logits if bias is None else logits + bias
    if keys.allowed is not None:
      logits = jnp.where(keys.allowed, logits, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(logits, axis=-1)


FORMS: dict[
  str,
  type[GeometricAttention] | type[HypernetworkAttention] | type[DifferentialAttention],
] = {
  "geometric": GeometricAttention,
  "hyla": HypernetworkAttention,
  "differential": DifferentialAttention,
}
"""From `AttentionForm` to the module, but for the softmax."""
