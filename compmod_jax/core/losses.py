"""Loss terms: additive sums and counts, so that devices and micro-batches add up exactly."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree


def ratio(total: ArrayLike, count: ArrayLike) -> jax.Array:
  """Sum over count; 0 where nothing was counted."""
  return jnp.divide(total, jnp.maximum(count, 1))


class Term(flax.struct.PyTreeNode):
  """One term of the objective, `weight * finish(sum, count)`.

  `sum` and `count` are added over devices and micro-batches first, so that k micro-batches give
  exactly the gradient of one big batch. A term that is not a mean over tokens (a load balance, an
  anchor) puts its additive statistics into `sum` and what it does with them into `finish`.

  Attributes:
    sum: additive statistics, any pytree.
    count: what they are counted over; no gradient passes through it.
    weight: factor in the objective.
    finish: from the two totals to a scalar.
  """

  sum: PyTree
  count: PyTree
  weight: float = flax.struct.field(pytree_node=False, default=1.0)
  finish: Callable[[PyTree, PyTree], jax.Array] = flax.struct.field(
    pytree_node=False, default=ratio
  )

  def value(self) -> jax.Array:
    """The term without its weight."""
    return self.finish(self.sum, jax.lax.stop_gradient(self.count))

  def logged(self) -> tuple[jax.Array, jax.Array]:
    """Sum and count of what the log averages: tokens, or else the values of single steps."""
    if self.finish is ratio:
      return self.sum, self.count
    return self.value(), jnp.float32(1)


def objective(terms: Mapping[str, Term]) -> jax.Array:
  """The scalar that training lowers: the weighted sum of all terms."""
  return sum((term.weight * term.value() for term in terms.values()), start=jnp.float32(0))


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
  """Token losses of a batch, each summed over the counted tokens.

  Attributes:
    smoothed: label-smoothed cross-entropy in nats, what training lowers.
    nll: negative log-likelihood in nats, what perplexity is made of.
    correct: tokens whose most probable prediction is right.
    count: counted tokens.
  """

  smoothed: jax.Array
  nll: jax.Array
  correct: jax.Array
  count: jax.Array


class LabelStatistics(NamedTuple):
  """What the loss of a label needs of the logits at its position, float32.

  Attributes:
    top: the largest logit; no gradient passes through it.
    normaliser: logarithm of the sum of the logits' exponentials.
    gold: the label's logit.
    total: sum of the logits.
  """

  top: Float[Array, "*batch"]
  normaliser: Float[Array, "*batch"]
  gold: Float[Array, "*batch"]
  total: Float[Array, "*batch"]

  @classmethod
  def of(
    cls, logits: Float[Array, "*batch vocab"], labels: Int[Array, "*batch"]
  ) -> "LabelStatistics":
    """Of logits that are there."""
    logits = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    normaliser = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
    places = jnp.arange(logits.shape[-1]).reshape((1,) * labels.ndim + (-1,))
    gold = jnp.sum(jnp.where(places == labels[..., None], logits, 0), axis=-1)
    return cls(top, normaliser, gold, jnp.sum(logits, axis=-1))

  @property
  def nll(self) -> Float[Array, "*batch"]:
    """Negative log-likelihood of every label in nats."""
    return self.normaliser - self.gold


def token_nll(
  logits: Float[Array, "*batch vocab"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
  """Negative log-likelihood of every label in nats."""
  return LabelStatistics.of(logits, labels).nll


def cross_entropy(
  logits: Float[Array, "batch time vocab"],
  labels: Int[Array, "batch time"],
  mask: Bool[Array, "batch time"],
  *,
  label_smoothing: float = 0.0,
) -> CrossEntropy:
  r"""Label-smoothed cross-entropy, summed.

  .. math:: -(1-\epsilon) \ln p_y - \frac{\epsilon}{V} \sum_v \ln p_v

  Args:
    logits: unnormalised log-probabilities.
    labels: the right tokens.
    mask: tokens that count.
    label_smoothing: epsilon.

  Source: Szegedy et al. 2016, section 7.
  """
  found = LabelStatistics.of(logits, labels)
  return cross_entropy_of(found, logits.shape[-1], mask, label_smoothing=label_smoothing)


def cross_entropy_of(
  found: LabelStatistics,
  vocab: int,
  mask: Bool[Array, "*batch"],
  *,
  label_smoothing: float = 0.0,
) -> CrossEntropy:
  """The same, where only statistics of the logits are known.

  Args:
    found: the statistics at every position.
    vocab: number of logits.
    mask: tokens that count.
    label_smoothing: epsilon.
  """
  nll = smoothed = found.nll
  if label_smoothing > 0:
    uniform = found.normaliser - found.total / vocab
    smoothed = (1 - label_smoothing) * nll + label_smoothing * uniform
  correct = (found.gold >= found.top).astype(jnp.float32)
  return CrossEntropy(
    smoothed=jnp.sum(smoothed, where=mask),
    nll=jnp.sum(nll, where=mask),
    correct=jnp.sum(correct, where=mask),
    count=jnp.sum(mask).astype(jnp.float32),
  )
