r"""Which of two variables is the cause: the model that adapts faster to a changed cause.

Two models of the same pairs (a, b), :math:`P(a) P(b \mid a)` and :math:`P(b) P(a \mid b)`, fit the
training distribution equally well. Where :math:`P(A)` changes and :math:`A` is the cause, the first
has only :math:`P(a)` to learn again; the second has to learn everything again, and its online
likelihood on a few samples is lower. The regret of an episode of such samples is

.. math:: R = -\ln(\sigma(\gamma) L_{A \to B} + (1 - \sigma(\gamma)) L_{B \to A})

where :math:`\gamma` is the belief that A causes B and :math:`L` the product of the probabilities
that a model gave to each sample before it took a step of gradient ascent on it. Models are tables
of logits for variables of a few values, and Gaussians whose mean is a sum of radial basis functions
for real numbers. All functions are differentiable to any order, in the data, too, so that an
encoder of the variables can be learned by the same regret.

Source: Bengio et al. 2020, sections 2 to 4; Kolios 2023, section 4.10, equations 4.22 to 4.26
(4.23 lacks the logarithm around the sum).
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

P = TypeVar("P", bound=PyTree)

# Regret.


@jax.custom_jvp
def log_cosh(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  r"""The logarithm of the hyperbolic cosine, for arguments of any size.

  .. math:: \ln\cosh x = |x| + \ln\frac{1 + e^{-2|x|}}{2}

  Its derivative is given as tanh; that of the formula is wrong at 0. Reverse mode, any order.
  Forward mode, too.
  """
  size = jnp.abs(x)
  return size + jnp.log1p(jnp.exp(-2 * size)) - jnp.log(jnp.asarray(2.0, size.dtype))


@log_cosh.defjvp
def _log_cosh_jvp(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  return log_cosh(primals[0]), jnp.tanh(primals[0]) * tangents[0]


def regret(
  gamma: Float[Array, "..."],
  log_a_to_b: Float[Array, "*batch"],
  log_b_to_a: Float[Array, "*batch"],
) -> Float[Array, "*batch"]:
  r"""The negative log likelihood of an episode under a mixture of both directions.

  .. math::
     R = -\ln(\sigma(\gamma) L_{A \to B} + (1 - \sigma(\gamma)) L_{B \to A})
       = \ln\cosh\frac{\gamma}{2} - \ln\cosh\frac{\gamma + \Delta}{2}
         - \frac{\ln L_{A \to B} + \ln L_{B \to A}}{2}

  with :math:`\Delta = \ln L_{A \to B} - \ln L_{B \to A}`. The second form is computed: exchanging
  the likelihoods and the sign of gamma changes no bit of it, and exactly the sign of its slope.

  Args:
    gamma: logit of the belief that A causes B.
    log_a_to_b: online log likelihood of the model A to B, in nats.
    log_b_to_a: that of the model B to A.

  Source: Bengio et al. 2020, equation 3.
  """
  ratio = log_a_to_b - log_b_to_a
  mean = 0.5 * (log_a_to_b + log_b_to_a)
  return log_cosh(0.5 * gamma) - log_cosh(0.5 * (gamma + ratio)) - mean


def regret_slope(
  gamma: Float[Array, "..."],
  log_a_to_b: Float[Array, "*batch"],
  log_b_to_a: Float[Array, "*batch"],
) -> Float[Array, "*batch"]:
  r"""The derivative of the regret with respect to gamma, in closed form.

  .. math::
     \frac{dR}{d\gamma} = \sigma(\gamma) - \sigma(\gamma + \ln L_{A \to B} - \ln L_{B \to A})

  Arguments as in `regret`.

  Source: Bengio et al. 2020, proposition 2.
  """
  ratio = log_a_to_b - log_b_to_a
  return 0.5 * (jnp.tanh(0.5 * gamma) - jnp.tanh(0.5 * (gamma + ratio)))


# Adaptation.


def online_log_likelihood(
  log_probability: Callable[[P, PyTree], Float[Array, " samples"]],
  params: P,
  samples: PyTree,
  rate: float | P,
) -> Float[Array, "time samples"]:
  r"""Log probability of every sample under a model that has adapted to those of earlier steps.

  .. math::
     \ell_{ti} = \ln P(x_{ti}; \theta_t), \qquad
     \theta_{t+1} = \theta_t + \alpha \nabla \frac{1}{m} \sum_{i=1}^{m} \ell_{ti}

  Their sum is the online log likelihood. Derivatives go through the steps, to any order.

  Args:
    log_probability: from parameters and the samples of one step to the log probability of each.
    params: theta_0.
    samples: a tree of arrays [time, samples, ...].
    rate: alpha, or a tree like the parameters with one of its own for each; 0 adapts nothing.

  Source: Bengio et al. 2020, section 3; Kolios 2023, equation 4.24.
  """
  rates = jax.tree.map(lambda _: rate, params) if isinstance(rate, int | float) else rate

  def mean(params: P, step: PyTree) -> tuple[jax.Array, jax.Array]:
    values = log_probability(params, step)
    return jnp.mean(values), values

  def adapt(params: P, step: PyTree) -> tuple[P, jax.Array]:
    slope, values = jax.grad(mean, has_aux=True)(params, step)
    return jax.tree.map(lambda p, s, r: p + r * s, params, slope, rates), values

  return jax.lax.scan(adapt, params, samples)[1]


# Two variables of a few values.


class Tables(NamedTuple):
  """A model of two discrete variables in one direction.

  Attributes:
    cause: logits of the cause's values.
    effect: logits of the effect's values, a row for each value of the cause.
  """

  cause: Float[Array, "*batch causes"]
  effect: Float[Array, "*batch causes effects"]


def fit_tables(counts: Float[Array, "causes effects"], pseudocount: float = 0.0) -> Tables:
  r"""The tables of the highest likelihood, in closed form; of the other direction with `counts.T`.

  .. math::
     P(a) = \frac{\sum_b n_{ab}}{\sum_{ab} n_{ab}}, \qquad
     P(b \mid a) = \frac{n_{ab}}{\sum_b n_{ab}}

  Args:
    counts: how often each pair was seen.
    pseudocount: is added to each. With 0, what was not seen has the probability 0, which no step
      changes.
  """
  counts = counts + pseudocount
  return Tables(jnp.log(jnp.sum(counts, axis=1)), jnp.log(counts))


def table_log_probability(
  tables: Tables, samples: tuple[Int[Array, " samples"], Int[Array, " samples"]]
) -> Float[Array, " samples"]:
  """Log probability of every pair (cause, effect) in nats."""
  cause, effect = samples
  first = jax.nn.log_softmax(tables.cause)[cause]
  second = jax.nn.log_softmax(tables.effect[cause], axis=-1)  # of the rows in use alone
  return first + jnp.take_along_axis(second, effect[:, None], axis=1)[:, 0]


# Two real variables.


class Gaussians(NamedTuple):
  """A model of two real variables in one direction, as it was fitted.

  Attributes:
    mean: of the cause.
    scale: standard deviation of the cause.
    weights: the effect's mean at each centre of `basis`.
    noise: standard deviation of the effect around its mean.
  """

  mean: Float[Array, ""]
  scale: Float[Array, ""]
  weights: Float[Array, " centres"]
  noise: Float[Array, ""]


class Adaptation(NamedTuple):
  """What adapts in `Gaussians`, in units in which a step of one size fits all; 0 at first.

  Attributes:
    mean: shift of the cause's mean, in its standard deviations.
    log_scale: change of the logarithm of its standard deviation.
    weights: shift of the effect's mean at each centre, in standard deviations of its noise.
    log_noise: change of the logarithm of the noise's standard deviation.
  """

  mean: Float[Array, ""]
  log_scale: Float[Array, ""]
  weights: Float[Array, " centres"]
  log_noise: Float[Array, ""]

  @classmethod
  def none(cls, centres: int) -> "Adaptation":
    """No change."""
    zero = jnp.zeros(())
    return cls(zero, zero, jnp.zeros(centres), zero)


def basis(standardised: Float[Array, "*batch"], centres: int) -> Float[Array, "*batch {centres}"]:
  r"""Radial basis functions that sum to 1: how near each of the centres is.

  .. math:: \phi_k(z) \propto \exp\left(-\frac{(z - c_k)^2}{2 h^2}\right)

  with centres evenly from -3 to 3, and h the distance of two neighbours.

  Args:
    standardised: numbers with mean 0 and standard deviation 1.
    centres: how many, >= 2.
  """
  at = jnp.linspace(-3.0, 3.0, centres)
  width = 6.0 / (centres - 1)
  place = at.reshape((1,) * standardised.ndim + (centres,))
  return jax.nn.softmax(-0.5 * jnp.square((standardised[..., None] - place) / width), axis=-1)


def fit_gaussians(
  cause: Float[Array, " samples"],
  effect: Float[Array, " samples"],
  centres: int,
  ridge: float = 1e-4,
) -> Gaussians:
  r"""The Gaussian of the cause, and that of the effect given it, by least squares.

  .. math::
     w = (\Phi^\top \Phi / n + \lambda I)^{-1} \Phi^\top y / n

  Args:
    cause: of every sample.
    effect: of every sample.
    centres: of the basis functions.
    ridge: lambda, which keeps the weights of centres without samples finite.
  """
  mean, scale = jnp.mean(cause), jnp.std(cause)
  features = basis((cause - mean) / scale, centres)
  middle = jnp.mean(effect)
  moments = features.T @ features / len(cause) + ridge * jnp.eye(centres)
  # Shrinks towards the effect's mean rather than towards 0.
  weights = middle + jnp.linalg.solve(moments, features.T @ (effect - middle) / len(cause))
  return Gaussians(mean, scale, weights, jnp.std(effect - features @ weights))


def gaussian_log_probability(
  fit: Gaussians,
  change: Adaptation,
  samples: tuple[Float[Array, " samples"], Float[Array, " samples"]],
) -> Float[Array, " samples"]:
  r"""Log density of every pair (cause, effect) in nats.

  .. math::
     \ln \mathcal{N}(c; \mu + s\,\delta_\mu, s e^{\delta_s})
     + \ln \mathcal{N}(e; \phi(c) \cdot (w + \tau \delta_w), \tau e^{\delta_\tau})

  Args:
    fit: mean mu and deviation s of the cause, weights w and deviation tau of the noise.
    change: the deltas.
    samples: causes and effects.
  """
  cause, effect = samples
  standardised = (cause - fit.mean) / fit.scale
  features = basis(standardised, len(fit.weights))
  residual = (effect - features @ fit.weights) / fit.noise - features @ change.weights
  first = _log_normal(standardised - change.mean, change.log_scale) - jnp.log(fit.scale)
  return first + _log_normal(residual, change.log_noise) - jnp.log(fit.noise)


def _log_normal(x: jax.Array, log_scale: jax.Array) -> jax.Array:
  return -0.5 * jnp.square(x * jnp.exp(-log_scale)) - log_scale - 0.5 * jnp.log(2 * jnp.pi)


def rotation(points: Float[Array, "*batch 2"], angle: Float[Array, ""]) -> Float[Array, "*batch 2"]:
  r"""Points turned by an angle in radians.

  .. math:: R(\theta) = \begin{pmatrix} \cos\theta & -\sin\theta \\ \sin\theta & \cos\theta
     \end{pmatrix}

  Source: Kolios 2023, equation 4.25.
  """
  x, y = points[..., 0], points[..., 1]
  cosine, sine = jnp.cos(angle), jnp.sin(angle)
  return jnp.stack([cosine * x - sine * y, sine * x + cosine * y], axis=-1)
