r"""Error signals: what recoding lowers. Functions of output logits, and their derivatives.

A signal that knows the right token is a function of its negative log-likelihood :math:`n = -\ln
o_y`, in nats, so that its derivative with respect to the logits is :math:`\phi'(n)\,(o - e_y)`:

===========  ==========================  ==========================================================
surprisal    :math:`o_y^{-o_y} - 1`      as published: 0 at :math:`o_y = 1` and at :math:`o_y \to
                                         0`, largest (0.445) at 1/e. Where :math:`o_y < 1/e`,
                                         lowering it LOWERS the right token's probability
argmax       the same                    of the most probable token in place of the right one
nll          :math:`n`                   monotone: the sane control
===========  ==========================  ==========================================================

Source: Ulmer 2019, equations 4.4, 4.5, 4.8 and 4.10.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Supervised = Literal["surprisal", "argmax", "nll"]


class Likelihood(NamedTuple):
  """What a distribution over tokens says of one of them.

  Attributes:
    nll: negative log-likelihood of the token in nats, [batch].
    powers: probabilities before normalisation, at most 1, [batch, vocab].
    total: their sum, [batch, 1].
    token: the token, [batch].
  """

  nll: jax.Array
  powers: jax.Array
  total: jax.Array
  token: jax.Array

  @property
  def error(self) -> Float[Array, "batch vocab"]:
    """Probabilities less 1 at the token: the derivative of `nll` with respect to the logits."""
    return surprise(self.powers, self.total, self.token)


def surprise(
  powers: Float[Array, "batch vocab"], total: Float[Array, "batch 1"], token: Int[Array, " batch"]
) -> Float[Array, "batch vocab"]:
  """o - e_y: probabilities, given before normalisation and with their sums, less 1 at the token."""
  here = jnp.arange(powers.shape[-1])[None] == token[:, None]
  return powers / total - here


def likelihood(logits: Float[Array, "batch vocab"], token: Int[Array, " batch"]) -> Likelihood:
  """Negative log-likelihood of a token, and what its derivative is made of."""
  top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  powers = jnp.exp(logits - top)
  total = jnp.sum(powers, axis=-1, keepdims=True)
  gold = jnp.take_along_axis(logits, token[:, None], axis=-1)
  return Likelihood((top + jnp.log(total) - gold)[:, 0], powers, total, token)


def value(kind: Supervised, nll: Float[Array, " batch"]) -> Float[Array, " batch"]:
  """The signal, from the negative log-likelihood of the token that it looks at."""
  return nll if kind == "nll" else jnp.expm1(jnp.exp(-nll) * nll)


def slope(kind: Supervised, nll: Float[Array, " batch"]) -> Float[Array, " batch"]:
  r"""The signal's derivative with respect to the negative log-likelihood.

  For surprisal :math:`(1 + \ln o_y)\, o_y^{1 - o_y}`, from -0.18 to 1.
  """
  if kind == "nll":
    return jnp.ones_like(nll)
  probability = jnp.exp(-nll)
  return (1 - nll) * jnp.exp(-nll * (1 - probability))


def predictive_entropy(logits: Float[Array, "samples batch vocab"]) -> Float[Array, " batch"]:
  """Entropy in nats of the mean of several distributions (equation 4.8)."""
  mean = jax.nn.logsumexp(jax.nn.log_softmax(logits, axis=-1), axis=0) - jnp.log(len(logits))
  return -jnp.sum(jnp.exp(mean) * mean, axis=-1)


def predictive_entropy_error(
  logits: Float[Array, "samples batch vocab"],
) -> tuple[Float[Array, " batch"], Float[Array, "samples batch vocab"]]:
  r"""Entropy of the mean distribution, and its derivative with respect to all logits.

  .. math:: \frac{\partial \delta}{\partial z_k} = -\frac{1}{K}\, o_k \odot (\ln \bar o - o_k \cdot
     \ln \bar o)

  Every element is raised to a power once: with one distribution its logits stand for the logarithm,
  which differs from them by a constant.

  Source: Ulmer 2019, equation 4.10, where a weight matrix stands before it.
  """
  lower = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  powers = jnp.exp(lower)
  total = jnp.sum(powers, axis=-1, keepdims=True)
  if len(logits) == 1:
    inner = _inner(powers, lower) / total
    return (jnp.log(total) - inner)[0, :, 0], powers * ((inner - lower) / total)
  share = 1 / (total * len(logits))
  # Added one by one: XLA:CPU takes ten times as long to sum over a leading axis.
  mean = sum((p * s for p, s in zip(powers[1:], share[1:], strict=True)), powers[0] * share[0])
  # Where all have come to 0, so has the product with the logarithm.
  log_mean = jnp.log(jnp.maximum(mean, jnp.finfo(jnp.float32).tiny))
  inner = _inner(powers, log_mean[None]) / total
  entropy = -_inner(mean[None], log_mean[None])[0, :, 0]
  return entropy, powers * ((inner - log_mean[None]) * share)


def _inner(
  first: Float[Array, "samples batch vocab"], second: Float[Array, "1 batch vocab"]
) -> Float[Array, "samples batch 1"]:
  """Inner products of distributions; as a product XLA:CPU makes them four times as fast."""
  found = jnp.einsum("kbv,jbv->kb", first, second, precision=jax.lax.Precision.HIGHEST)
  return found[..., None]


def label_loss(
  logit: Float[Array, " batch"], label: Float[Array, " batch"]
) -> Float[Array, " batch"]:
  """Binary cross-entropy in nats of a diagnostic classifier's logit (weak supervision)."""
  return jax.nn.softplus(logit) - label * logit
