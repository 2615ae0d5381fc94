"""The output layer of a language model, or of several that vote: losses and probabilities."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core.losses import token_nll
from compmod_jax.mechanisms.recoding.signals import surprise


def logits_of(
  hidden: Float[Array, "time batch dim"],
  table: Float[Array, "vocab dim"],
  bias: Float[Array, " vocab"],
) -> Float[Array, "time batch vocab"]:
  """W h + b at every position."""
  rows = hidden.reshape(-1, hidden.shape[-1]) @ table.T
  return rows.reshape(*hidden.shape[:2], -1) + bias[None, None]


def _each(
  hidden: jax.Array, tables: jax.Array, biases: jax.Array, batch: int
) -> Iterator[tuple[jax.Array, jax.Array, jax.Array]]:
  """Every decoder with every copy of the hidden state: what it reads, its weights, its biases."""
  copies = hidden.reshape(hidden.shape[0], -1, batch, hidden.shape[-1])
  for table, bias in zip(tables, biases, strict=True):
    for copy in range(copies.shape[1]):
      yield copies[:, copy], table, bias


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
  every = _each(hidden, tables, biases, targets.shape[1])
  each = jnp.stack([token_nll(logits_of(*decoder), targets) for decoder in every])
  if len(each) == 1:
    return each[0]
  if separately:
    return jnp.mean(each, axis=0)
  return jnp.log(len(each)) - jax.nn.logsumexp(-each, axis=0)


def with_own_gradients(
  tables: Float[Array, "members vocab dim"], biases: Float[Array, "members vocab"]
) -> tuple[jax.Array, jax.Array]:
  """The same decoders; the mean of their losses gives each the gradient of its own loss."""
  count = len(tables)

  def own(value: jax.Array) -> jax.Array:
    # The value itself, without rounding: its gradient alone is multiplied.
    return value + (count - 1) * (value - jax.lax.stop_gradient(value))

  return own(tables), own(biases)


def log_probabilities(
  hidden: Float[Array, "time rows dim"],
  tables: Float[Array, "members vocab dim"],
  biases: Float[Array, "members vocab"],
  batch: int,
) -> Float[Array, "time batch vocab"]:
  """Logarithm of the mean of all distributions."""
  every = _each(hidden, tables, biases, batch)
  found = [jax.nn.log_softmax(logits_of(*decoder)) for decoder in every]
  if len(found) == 1:
    return found[0]
  return jax.nn.logsumexp(jnp.stack(found), axis=0) - jnp.log(len(found))


@jax.custom_vjp
def known_losses(
  hidden: Float[Array, "time batch dim"],
  table: Float[Array, "vocab dim"],
  bias: Float[Array, " vocab"],
  targets: Int[Array, "time batch"],
  nll: Float[Array, "time batch"],
  powers: Float[Array, "time batch vocab"],
  total: Float[Array, "time batch 1"],
  vector: Float[Array, "time batch dim"],
) -> Float[Array, "time batch"]:
  r"""Losses that are known already, with the derivative that they have.

  What recoding computes at every step is what the loss's derivative needs too: probabilities and
  :math:`W^T (o - e_y)`. So the backward pass has one product left, for W.

  Reverse mode, any order. Higher ones are formed from `hidden`, `table` and `bias`, so that what is
  known may come from behind a `stop_gradient`.

  Args:
    hidden: what the decoder read.
    table: W.
    bias: of the decoder.
    targets: the right tokens.
    nll: negative log-likelihoods, which are returned.
    powers: probabilities before normalisation.
    total: their sums.
    vector: derivatives of the losses with respect to `hidden`.
  """
  return nll


def _known_forward(hidden, table, bias, targets, nll, powers, total, vector):
  losses = known_losses(hidden, table, bias, targets, nll, powers, total, vector)
  return losses, (hidden, table, bias, targets, powers, total, vector)


def _known_backward(kept, cotangent):
  return *_known_gradients(*kept, cotangent), None, None, None, None, None


@jax.custom_vjp
def _known_gradients(hidden, table, bias, targets, powers, total, vector, cotangent):
  """The derivatives of `known_losses`, from what is known. Reverse mode, any order."""
  flat = powers.reshape(-1, powers.shape[-1])
  errors = surprise(flat, total.reshape(-1, 1), targets.reshape(-1)) * cotangent.reshape(-1, 1)
  found = errors.T @ hidden.reshape(-1, hidden.shape[-1])
  return cotangent[..., None] * vector, found, jnp.sum(errors, axis=0)


def _known_gradients_forward(hidden, table, bias, targets, powers, total, vector, cotangent):
  found = _known_gradients(hidden, table, bias, targets, powers, total, vector, cotangent)
  return found, (hidden, table, bias, targets, cotangent)


def _known_gradients_backward(kept, second):
  hidden, table, bias, targets, cotangent = kept

  def gradients(hidden, table, bias, cotangent):
    def losses(hidden, table, bias):
      return token_nll(logits_of(hidden, table, bias), targets).astype(cotangent.dtype)

    return jax.vjp(losses, hidden, table, bias)[1](cotangent)

  *found, last = jax.vjp(gradients, hidden, table, bias, cotangent)[1](second)
  return *found, None, None, None, None, last


_known_gradients.defvjp(_known_gradients_forward, _known_gradients_backward)
known_losses.defvjp(_known_forward, _known_backward)
