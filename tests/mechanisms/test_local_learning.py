"""Rules of learning without back-propagation: single connections, and a forager of two seasons."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.local_learning import (
  Foraging,
  Plasticity,
  diffused,
  diffusion_update,
  forage,
  modnet_update,
  modulatory_update,
  modulatory_weights_update,
)

PRE = jnp.asarray([[0.5, -1.0, 0.0], [2.0, 0.25, -0.5]])
POST = jnp.asarray([[0.3, -0.8], [0.9, 0.1]])


def connections():
  return ((n, j, i) for n in range(2) for j in range(3) for i in range(2))


def test_modulatory_neurons_scale_and_turn_the_plasticity_term():
  modulation = jnp.asarray([[1.0, -2.0], [0.0, 0.5]])
  terms = Plasticity(0.7, -0.2, 0.4, 0.1)
  found = modulatory_update(PRE, POST, modulation, rate=0.3, terms=terms)
  for n, j, i in connections():
    term = 0.7 * PRE[n, j] * POST[n, i] - 0.2 * PRE[n, j] + 0.4 * POST[n, i] + 0.1
    wanted = np.tanh(modulation[n, i] / 2) * 0.3 * term
    np.testing.assert_allclose(found[n, j, i], wanted, rtol=1e-5, atol=1e-8)
  assert not np.any(found[1, :, 0]), "a neuron without modulation learned"


def test_diffusion_reaches_no_farther_than_it_does():
  neurons = jnp.asarray([[0.0, 0.0], [1.0, 0.0], [1.6, 0.0], [3.5, 0.0]])
  places = jnp.asarray([[0.0, 0.0], [3.0, 0.0]])
  found = diffused(jnp.asarray([0.8, -2.0]), neurons, places)
  first = 0.8 * np.exp([-0.0, -0.5])
  second = -2.0 * np.exp([-(1.4**2) / 2, -(0.5**2) / 2])
  wanted = 2 / (1 + np.exp(-np.concatenate([first, second]))) - 1
  np.testing.assert_allclose(found, wanted, rtol=1e-5)
  assert float(diffused(jnp.asarray([5.0, 0.0]), neurons, places)[3]) == 0


def test_diffusion_learns_by_modulation_and_correlation():
  modulation = jnp.asarray([[0.5, 0.0], [-1.0, 0.2]])
  found = diffusion_update(PRE, POST, modulation, rate=0.1)
  for n, j, i in connections():
    wanted = 0.1 * modulation[n, i] * PRE[n, j] * POST[n, i]
    np.testing.assert_allclose(found[n, j, i], wanted, rtol=1e-5, atol=1e-9)


def test_modnet_learns_from_the_errors_of_its_outputs():
  after, error = jnp.asarray([[0.3, 0.8], [0.9, 0.5]]), jnp.asarray([[0.7, -0.8], [0.1, 0.0]])
  weights = jnp.asarray([[1.0, -0.5], [0.25, 2.0]])
  found = modnet_update(PRE, after, error, weights, rate=0.2, scaling=1.5, terms=(0.9, -0.3, 0.05))
  for n, j, i in connections():
    modulation = sum(weights[i, k] * error[n, k] for k in range(2))
    own = 0.2 * error[n, i] / after[n, i]
    term = 0.9 * PRE[n, j] * after[n, i] - 0.3 * (after[n, i] - PRE[n, j]) + 0.05
    wanted = own * term / (1 + np.exp(-modulation / 1.5))
    np.testing.assert_allclose(found[n, j, i], wanted, rtol=1e-5, atol=1e-8)
  moved = modulatory_weights_update(after, error, rate=0.2, scale=3.0, least=0.01)
  np.testing.assert_allclose(moved[0], 0.6 * after[0] / error[0], rtol=1e-5)
  np.testing.assert_allclose(moved[1, 1], 0.6 * 0.5 / 0.01, rtol=1e-5)


NEAR = 6  # neurons of a season
PLACES = jnp.asarray([[-3.0, 0.0], [3.0, 0.0]])
DECIDE = jnp.kron(jnp.eye(2), jnp.ones((1, NEAR)))
AWAY = 0.5 * jax.random.normal(jax.random.key(1), (2 * NEAR, 2))
NEURONS = jnp.repeat(PLACES, NEAR, axis=0) + AWAY


def by_diffusion(features, outputs, reward, season):
  sources = 4 * reward * jax.nn.one_hot(season, 2)
  modulation = diffused(sources, NEURONS, PLACES)
  return diffusion_update(features, outputs, modulation, rate=0.1)


def by_modulatory_neurons(features, outputs, reward, season):
  return modulatory_update(features, outputs, 8 * reward * DECIDE[season], rate=0.1)


def by_one_modulation(features, outputs, reward, season):
  del season
  modulation = jnp.full(2 * NEAR, jnp.tanh(2 * reward))
  return diffusion_update(features, outputs, modulation, rate=0.1)


@pytest.fixture(scope="module")
def foraged():
  """Means and standard errors of what is retained, over 40 foragers that learn by each rule."""
  keys = jax.random.split(jax.random.key(0), 40)
  rules = (by_diffusion, by_modulatory_neurons, by_one_modulation)
  found = {}
  for rule in rules:
    right = jax.jit(jax.vmap(lambda key, rule=rule: forage(key, rule, DECIDE).right))(keys)
    retained = np.mean(right[:, 1:, :, 0], axis=(1, 2))
    found[rule] = retained.mean(), retained.std(ddof=1) / np.sqrt(len(keys)), right
  return found


@pytest.mark.parametrize("rule", [by_diffusion, by_modulatory_neurons])
def test_a_forager_whose_modulation_has_a_place_remembers_the_other_season(foraged, rule):
  mean, error, right = foraged[rule]
  assert np.mean(right[:, 0, 0, 0]) < 0.65, "it knew before it ate"
  assert np.mean(right[:, 0, :, -1]) > 0.85, "it did not learn"
  assert mean - 3 * error > 0.8
  other, spread, _ = foraged[by_one_modulation]
  assert mean - other > 3 * np.hypot(error, spread)


def test_one_modulation_for_all_neurons_forgets(foraged):
  mean, error, right = foraged[by_one_modulation]
  assert np.mean(right[:, 0, 0, -1]) > 0.85
  assert mean + 3 * error < 0.8


@pytest.mark.parametrize(
  ("options", "words"),
  [({"days": 0}, "foraging.days is 0"), ({"curiosity": 1.5}, "foraging.curiosity is 1.5")],
)
def test_what_cannot_be_is_refused(options, words):
  with pytest.raises(UserError, match=words):
    Foraging(**options)
