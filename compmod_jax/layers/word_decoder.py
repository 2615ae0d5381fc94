"""The output layer of a language model, or of several that vote: losses and probabilities."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.losses import token_nll


def logits_of(
  hidden: Float[Array, "time batch dim"],
  table: Float[Array, "vocab dim"],
  bias: Float[Array, " vocab"],
) -> Float[Array, "time batch vocab"]:
  """W h + b at every position."""
  rows = hidden.reshape(-1, hidden.shape[-1]) @ table.T
  return rows.reshape(*hidden.shape[:2], -1) + bias[None, None]


def _each(hidden: jax.Array, tables: jax.Array, biases: jax.Array, batch: int) -> list[jax.Array]:
  """Logits of every decoder on every copy of the hidden state."""
  copies = hidden.reshape(hidden.shape[0], -1, batch, hidden.shape[-1])
  return [
    logits_of(copies[:, copy], table, bias)
    for table, bias in zip(tables, biases, strict=True)
    for copy in range(copies.shape[1])
  ]


def losses(
  hidden: Float[Array, "time rows dim"],
  tables: Float[Array, "members vocab dim"],
  biases: Float[Array, "members vocab"],
  targets: Int[Array, "time batch"],
  *,
  separately: bool = False,
) -> Float[Array, "time batch"]:
  """Negative log-likelihood in nats of every target.

  Args:
    hidden: what the decoders read; copies of an example stand `batch` rows apart.
    tables: the decoders' weights.
    biases: their biases.
    targets: the right tokens.
    separately: the mean of the decoders' own losses (in training), in place of the loss of the mean
      of all probabilities.
  """
  found = _each(hidden, tables, biases, targets.shape[1])
  each = jnp.stack([token_nll(logits, targets) for logits in found])
  if len(found) == 1:
    return each[0]
  if separately:
    return jnp.mean(each, axis=0)
  return jnp.log(len(found)) - jax.nn.logsumexp(-each, axis=0)


def log_probabilities(
  hidden: Float[Array, "time rows dim"],
  tables: Float[Array, "members vocab dim"],
  biases: Float[Array, "members vocab"],
  batch: int,
) -> Float[Array, "time batch vocab"]:
  """Logarithm of the mean of all distributions."""
  found = [jax.nn.log_softmax(logits) for logits in _each(hidden, tables, biases, batch)]
  if len(found) == 1:
    return found[0]
  return jax.nn.logsumexp(jnp.stack(found), axis=0) - jnp.log(len(found))


@jax.custom_vjp
def known_losses(
  hidden: Float[Array, "time batch dim"],
  table: Float[Array, "vocab dim"],
  bias: Float[Array, " vocab"],
  nll: Float[Array, "time batch"],
  surprise: Float[Array, "time batch vocab"],
  vector: Float[Array, "time batch dim"],
) -> Float[Array, "time batch"]:
  r"""Losses that are known already, with the derivative that they have.

  What recoding computes at every step is what the loss's derivative needs too: the surprise
  :math:`o - e_y` and :math:`W^T (o - e_y)`. So the backward pass has one product left, for W.

  Args:
    hidden: what the decoder read.
    table: W.
    bias: of the decoder.
    nll: negative log-likelihoods, which are returned.
    surprise: their derivatives with respect to the logits.
    vector: their derivatives with respect to `hidden`.
  """
  return nll


def _known_forward(hidden, table, bias, nll, surprise, vector):
  return nll, (hidden, surprise, vector)


def _known_backward(kept, cotangent):
  hidden, surprise, vector = kept
  errors = (cotangent[..., None] * surprise).reshape(-1, surprise.shape[-1])
  table = errors.T @ hidden.reshape(-1, hidden.shape[-1])
  return cotangent[..., None] * vector, table, jnp.sum(errors, axis=0), None, None, None


known_losses.defvjp(_known_forward, _known_backward)
