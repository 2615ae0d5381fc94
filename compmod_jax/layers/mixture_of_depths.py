r"""Layers that tokens may pass by, each as its own activation says.

.. math::
   r_t = w \cdot x_t + b, \qquad
   x'_t = \begin{cases}
     x_t + \sigma(r_t)\, (F(X)_t - x_t) & r_t > 0 \\
     x_t & \text{else}
   \end{cases}

F is the layer, residual sums included, and X are the tokens that go through it: attention does not
read the others (a short convolution and fast weights do). A loss teaches the router how many those
are, the binary cross-entropy of r with the `capacity` largest of every sequence:

.. math:: L = \frac{1}{T} \sum_t \ln(1 + e^{-y_t r_t}), \qquad y_t = \pm 1

In the paper the largest ones go through the layer in training, which later tokens decide, too, and
this loss makes tokens decide by themselves, with r > 0, where text is generated. Here they do so in
both, and decoding computes what training did; the share of tokens is near the capacity, not equal
to it. The paper multiplies by r in place of its sigmoid. All tokens are computed here, and what is
made of those that pass by is left out.

Source: Raposo et al. 2024 (Mixture-of-Depths), equation 1 and section 3.5.
"""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from compmod_jax.core import errors
from compmod_jax.core.linear import exactly
from compmod_jax.core.losses import Term
from compmod_jax.core.sharding import logical
from compmod_jax.layers.context import Context
from compmod_jax.mechanisms.competition.losses import Rows, summed_means
from compmod_jax.mechanisms.competition.router import rank


@dataclasses.dataclass(frozen=True)
class DepthRouterConfig:
  """How many tokens go through layers that tokens may pass by (Raposo et al. 2024)."""

  capacity: float = 0.125
  """Share of a sequence's tokens, to which the loss leads."""
  balance: float = 0.01
  """Coefficient of that loss; 0 for none, and then nothing keeps the share."""

  def __post_init__(self):
    errors.check(
      0 < self.capacity <= 1,
      f"depth_router.capacity is {self.capacity}; it is a share of the tokens, over 0 and at most"
      " 1.",
    )
    errors.check(
      self.balance >= 0,
      f"depth_router.balance is {self.balance}; it must be at least 0 (no loss).",
    )


class DepthRouter(nn.Module):
  """Which tokens go through a layer, and how much of it they take.

  Intermediates: `depth/scores` and `depth/weights` [batch, time], r, and its sigmoid where it is
  positive, else 0. Both are float32.
  """

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch time embed"], ctx: Context
  ) -> Float[Array, "batch time"]:
    """The weights; 0 for tokens that pass by."""
    init = logical(nn.initializers.lecun_normal(), "embed", "units")
    kernel = self.param("kernel", init, (x.shape[-1], 1))
    bias = self.param("bias", logical(nn.initializers.zeros, "units"), (1,))
    product = jnp.matmul(x.astype(jnp.float32), kernel, precision=exactly(jnp.float32))
    inside = ctx.intermediates.scope("depth")
    scores = inside("scores", product[..., 0] + bias[None])
    return inside("weights", jnp.where(scores > 0, nn.sigmoid(scores), 0))


def among(
  through: Bool[Array, "batch time"], held: Bool[Array, "batch 1 keys"] | None, ctx: Context
) -> tuple[Context, Bool[Array, "batch 1 keys"] | None]:
  """A context in which no query reads keys of tokens that pass by.

  Args:
    through: the tokens that do not.
    held: the same of all keys in the state, to which these are added; None without a state.
    ctx: of the layer.

  Returns:
    The context, and what the state holds next.
  """
  if held is not None:
    zero = jnp.int32(0)
    place = (zero, zero, jnp.asarray(ctx.start, jnp.int32))
    held = jax.lax.dynamic_update_slice(held, through[:, None], place)
    if ctx.newest is not None:
      newest = dataclasses.replace(ctx.newest, past=ctx.newest.past & held[:, None])
      return dataclasses.replace(ctx, newest=newest), held
  valid = through if ctx.mask.valid is None else through & ctx.mask.valid
  return dataclasses.replace(ctx, mask=dataclasses.replace(ctx.mask, valid=valid)), held


@dataclasses.dataclass(frozen=True)
class DepthRouters:
  """The routers of a model's layers that tokens may pass by, and their loss.

  Attributes:
    sites: of the routers' scores.
    config: how many tokens go through.
  """

  sites: tuple[str, ...]
  config: DepthRouterConfig

  def weights(self) -> dict[str, float]:
    """See `RouterLosses`."""
    return {"depth": self.config.balance} if self.sites and self.config.balance else {}

  def captured_sites(self) -> frozenset[str]:
    """See `RouterLosses`."""
    return frozenset(self.sites if self.weights() else ())

  def terms(self, captured: Mapping[str, jax.Array], rows: Rows) -> dict[str, Term]:
    """See `RouterLosses`."""
    if not self.weights():
      return {}
    seen = [(captured[site], rows(site)) for site in self.sites]
    total = jnp.stack([share_loss(*each, self.config.capacity) for each in seen])
    count = jnp.stack([jnp.sum(real) for _, real in seen]).astype(jnp.float32)
    return {"depth": Term(total, count, self.config.balance, summed_means)}


def share_loss(
  scores: Float[Array, "batch time"], rows: Bool[Array, "batch time"], capacity: float
) -> Float[Array, ""]:
  """The loss of one router, summed over real tokens.

  Args:
    scores: r.
    rows: true for real tokens.
    capacity: share of a sequence's real tokens that are to be positive, rounded up.
  """
  order = rank(jnp.where(rows, jax.lax.stop_gradient(scores), -jnp.inf))
  most = capacity * jnp.sum(rows, axis=-1, keepdims=True)
  losses = nn.softplus(jnp.where(order < most, -scores, scores))
  return jnp.sum(jnp.where(rows, losses, 0))
