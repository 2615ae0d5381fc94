r"""Learning without back-propagation: updates of a connection from what its two ends know.

With o_j what a connection reads, o_i what its neuron makes, and m_i the modulation that reaches the
neuron, the rules are

.. math::
   \Delta w_{ji} &= \tanh(m_i / 2)\, \eta\, (A o_j o_i + B o_j + C o_i + D)
     && \text{(modulatory neurons)} \\
   \Delta w_{ji} &= \eta\, m_i\, o_j o_i && \text{(diffusion)} \\
   \Delta w_{ji} &= \sigma(m_i / n_{ji})\, \eta_{ji}\, (A o_j o_i + B (o_i - o_j) + C), \quad
     \eta_{ji} = \eta\, e_i / o_i && \text{(ModNet)}

They are pure functions of arrays, for neurons of a user's own; `forage` is the task that they are
compared on.

Source: Soltoggio et al. 2008; Velez and Clune 2017; Daram et al. 2020; Knowles 2022, section 2.3.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core import errors

REACH = 1.5
"""Distance beyond which a point source has no effect, in Velez and Clune 2017."""


ForagingRule = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""From a food's features [bits], outputs [neurons], reward and season to changes of weights."""


class Plasticity(NamedTuple):
  """Factors of the plasticity term: correlation, presynaptic, postsynaptic and constant."""

  correlation: float = 1.0
  presynaptic: float = 0.0
  postsynaptic: float = 0.0
  constant: float = 0.0


HEBBIAN = Plasticity()


def modulatory_update(
  before: Float[Array, "*batch inputs"],
  after: Float[Array, "*batch outputs"],
  modulation: Float[Array, "*batch outputs"],
  *,
  rate: float,
  terms: Plasticity = HEBBIAN,
) -> Float[Array, "*batch inputs outputs"]:
  r"""What modulatory neurons let connections learn.

  .. math:: \Delta w_{ji} = \tanh(m_i / 2)\, \eta\, (A o_j o_i + B o_j + C o_i + D)

  Args:
    before: o_j.
    after: o_i.
    modulation: m_i, the weighted sum of the modulatory neurons' outputs; negative turns learning
      round.
    rate: eta.
    terms: A, B, C and D.

  Source: Soltoggio et al. 2008; Knowles 2022, section 2.3.
  """
  pre, post = before[..., :, None], after[..., None, :]
  change = terms.correlation * pre * post + terms.presynaptic * pre
  change = change + terms.postsynaptic * post + terms.constant
  return jnp.tanh(modulation / 2)[..., None, :] * rate * change


def diffused(
  sources: Float[Array, "*batch sources"],
  neurons: Float[Array, "neurons axes"],
  places: Float[Array, "sources axes"],
  *,
  width: float = 1.0,
  reach: float = REACH,
) -> Float[Array, "*batch neurons"]:
  r"""Modulation that reaches neurons from point sources, between -1 and 1.

  .. math::
     m_i = 2 \sigma\Big(\sum_s o_s\, g(d_{is})\Big) - 1, \qquad
     g(d) = e^{-d^2 / 2 w^2} \text{ within reach, and } 0 \text{ beyond}

  The sigmoid is moved and stretched so that a neuron that no source reaches learns nothing, as the
  original describes it; the thesis prints the plain one, by which such a neuron would learn at half
  the rate whatever happens.

  Args:
    sources: o_s, outputs of the sources.
    neurons: where each neuron stands.
    places: where each source stands.
    width: w, of the Gaussian.
    reach: farthest distance with an effect.

  Source: Velez and Clune 2017; Knowles 2022, section 2.3.
  """
  distance = jnp.linalg.norm(neurons[:, None] - places[None], axis=-1)
  effect = jnp.where(distance <= reach, jnp.exp(-jnp.square(distance / width) / 2), 0)
  return jnp.tanh(sources @ effect.T / 2)


def diffusion_update(
  before: Float[Array, "*batch inputs"],
  after: Float[Array, "*batch outputs"],
  modulation: Float[Array, "*batch outputs"],
  *,
  rate: float,
) -> Float[Array, "*batch inputs outputs"]:
  r"""What diffused modulation lets connections learn, :math:`\eta\, m_i\, o_j o_i`.

  Args:
    before: o_j.
    after: o_i.
    modulation: m_i, as `diffused` makes it.
    rate: eta.

  Source: Velez and Clune 2017; Knowles 2022, section 2.3.
  """
  return rate * before[..., :, None] * (modulation * after)[..., None, :]


def modnet_update(
  before: Float[Array, "*batch inputs"],
  after: Float[Array, "*batch outputs"],
  error: Float[Array, "*batch outputs"],
  modulatory: Float[Array, "outputs outputs"],
  *,
  rate: float,
  scaling: float | Float[Array, "inputs outputs"] = 1.0,
  terms: tuple[float, float, float] = (1.0, 0.0, 0.0),
  least: float = 1e-3,
) -> Float[Array, "*batch inputs outputs"]:
  r"""What ModNet's connections from hidden to output layer learn from the output's error.

  .. math::
     \Delta w_{ji} = \sigma(M_i / n_{ji})\, \eta \frac{e_i}{o_i}
     (A o_j o_i + B (o_i - o_j) + C), \qquad M = W^\dagger e

  Args:
    before: o_j, outputs of the hidden layer.
    after: o_i, outputs of the output layer, between 0 and 1.
    error: e_i, the wanted output minus this one.
    modulatory: W-dagger, from the errors to the modulatory activations of the outputs.
    rate: eta, the initial learning rate.
    scaling: n.
    terms: A, B and C.
    least: outputs below this count as this where they divide.

  Source: Daram et al. 2020; Knowles 2022, section 2.3.
  """
  correlation, difference, constant = terms
  pre, post = before[..., :, None], after[..., None, :]
  own = rate * (error / jnp.maximum(after, least))[..., None, :]
  modulation = (error @ modulatory.T)[..., None, :]
  change = correlation * pre * post + difference * (post - pre) + constant
  return jax.nn.sigmoid(modulation / scaling) * own * change


def modulatory_weights_update(
  after: Float[Array, "*batch outputs"],
  error: Float[Array, "*batch outputs"],
  *,
  rate: float,
  scale: float = 1.0,
  least: float = 1e-3,
) -> Float[Array, "*batch outputs"]:
  r"""What ModNet's modulatory weights learn, :math:`\eta\, (o_i / e_i)` times a scale.

  Args:
    after: o_i, outputs of the output layer.
    error: e_i.
    rate: the initial learning rate.
    scale: factor of the whole.
    least: errors nearer to 0 than this count as this, with their sign.

  Source: Daram et al. 2020; Knowles 2022, section 2.3.
  """
  away = jnp.where(error < 0, -1.0, 1.0) * jnp.maximum(jnp.abs(error), least)
  return rate * scale * after / away


@dataclasses.dataclass(frozen=True)
class Foraging:
  """Foods that are good to eat in one season and bad in the other, day by day, for some years.

  Each day every food is met once, in random order. What is eaten is rewarded with 1 or punished
  with -1; what is left alone tells nothing. Which foods are good is drawn anew for every season,
  and stays so over the years: what was learned in a summer is wanted again after the winter.
  """

  foods: int = 8
  """Kinds of food."""
  bits: int = 24
  """Features of a food, of -1 or 1 each, drawn at random."""
  days: int = 15
  """Days of a season."""
  years: int = 3
  """Years, of a summer and a winter each."""
  curiosity: float = 0.2
  """Probability of eating what would be left alone."""

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name != "curiosity":
        errors.check(value >= 1, f"foraging.{field.name} is {value}; it must be at least 1.")
    errors.check(
      0 <= self.curiosity <= 1,
      f"foraging.curiosity is {self.curiosity}; it is a probability, from 0 to 1.",
    )


class Foraged(NamedTuple):
  """How a forager fared.

  Attributes:
    right: share of foods on which it decided rightly, [years, seasons, days].
    weights: at the end, [bits, neurons].
  """

  right: jax.Array
  weights: jax.Array

  @property
  def retained(self) -> jax.Array:
    """Share of right decisions on the first day of every season but the first year's."""
    return jnp.mean(self.right[1:, :, 0])


def forage(
  key: jax.Array,
  rule: ForagingRule,
  neurons: Float[Array, "seasons neurons"],
  task: Foraging = Foraging(),
) -> Foraged:
  r"""Lets a forager learn, and says how often it decided rightly.

  Its neurons compute :math:`o_i = \tanh(\sum_j w_{ji} x_j)` from a food's features; in every season
  some of them decide: it eats where the sum of those is positive, and now and then out of
  curiosity. Eating drives the outputs of all neurons to 1; then all their connections learn, by
  the rule.

  Args:
    key: of foods, seasons, order and initial weights.
    rule: from features, outputs, reward and season to changes of the weights [bits, neurons].
    neurons: 1 for those that decide in a season, 0 for the others.
    task: foods and days.
  """
  seasons = neurons.shape[0]
  kinds, labels, initial, order = jax.random.split(key, 4)
  foods = jnp.where(jax.random.bernoulli(kinds, shape=(task.foods, task.bits)), 1.0, -1.0)
  good = jnp.where(jax.random.bernoulli(labels, shape=(seasons, task.foods)), 1.0, -1.0)
  weights = 0.1 * jax.random.normal(initial, (task.bits, neurons.shape[1]))

  def meal(
    weights: jax.Array, met: tuple[Int[Array, ""], Int[Array, ""], Bool[Array, ""]]
  ) -> tuple[jax.Array, jax.Array]:
    food, season, curious = met
    outputs = jnp.tanh(foods[food] @ weights)
    wants = jnp.sum(outputs * neurons[season]) > 0
    eats = wants | curious
    reward = jnp.where(eats, good[season, food], 0.0)
    change = rule(foods[food], jnp.where(eats, 1.0, outputs), reward, season)
    return weights + change, wants == (good[season, food] > 0)

  def day(weights: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    key, season = at
    order, mood = jax.random.split(key)
    met = jax.random.permutation(order, task.foods)
    curious = jax.random.bernoulli(mood, task.curiosity, (task.foods,))
    weights, right = lax.scan(meal, weights, (met, jnp.full(task.foods, season), curious))
    return weights, jnp.mean(right)

  shape = (task.years, seasons, task.days)
  season = jnp.broadcast_to(jnp.arange(seasons)[None, :, None], shape).reshape(-1)
  weights, right = lax.scan(day, weights, (jax.random.split(order, len(season)), season))
  return Foraged(right.reshape(shape), weights)
