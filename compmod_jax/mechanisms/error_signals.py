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
    error: probabilities less 1 at the token, [batch, vocab]: the derivative of `nll` with respect
      to the logits.
  """

  nll: jax.Array
  error: jax.Array


def likelihood(logits: Float[Array, "batch vocab"], token: Int[Array, " batch"]) -> Likelihood:
  """Negative log-likelihood of a token, and its derivative."""
  top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  powers = jnp.exp(logits - top)
  total = jnp.sum(powers, axis=-1, keepdims=True)
  here = jnp.arange(logits.shape[-1])[None] == token[:, None]
  gold = jnp.sum(jnp.where(here, logits, 0), axis=-1)
  nll = (top + jnp.log(total))[:, 0] - gold
  return Likelihood(nll, powers / total - here)


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


def mean_log_probabilities(
  logits: Float[Array, "samples batch vocab"],
) -> tuple[Float[Array, "samples batch vocab"], Float[Array, "batch vocab"]]:
  """Log-probabilities of every distribution, and of their mean."""
  each = jax.nn.log_softmax(logits, axis=-1)
  if len(logits) == 1:
    return each, each[0]
  return each, jax.nn.logsumexp(each, axis=0) - jnp.log(len(logits))


def predictive_entropy(logits: Float[Array, "samples batch vocab"]) -> Float[Array, " batch"]:
  """Entropy in nats of the mean of several distributions (equation 4.8)."""
  _, mean = mean_log_probabilities(logits)
  return -jnp.sum(jnp.exp(mean) * mean, axis=-1)


def predictive_entropy_error(
  logits: Float[Array, "samples batch vocab"],
) -> tuple[Float[Array, " batch"], Float[Array, "samples batch vocab"]]:
  r"""Entropy of the mean distribution, and its derivative with respect to all logits.

  .. math:: \frac{\partial \delta}{\partial z_k} = -\frac{1}{K}\, o_k \odot (\ln \bar o - o_k \cdot
     \ln \bar o)

  Source: Ulmer 2019, equation 4.10, where a weight matrix stands before it.
  """
  each, mean = mean_log_probabilities(logits)
  entropy = -jnp.sum(jnp.exp(mean) * mean, axis=-1)
  probabilities = jnp.exp(each)
  inner = jnp.sum(probabilities * mean[None], axis=-1, keepdims=True)
  return entropy, probabilities * (inner - mean[None]) / len(logits)


def label_loss(
  logit: Float[Array, " batch"], label: Float[Array, " batch"]
) -> Float[Array, " batch"]:
  """Binary cross-entropy in nats of a diagnostic classifier's logit (weak supervision)."""
  return jax.nn.softplus(logit) - label * logit
