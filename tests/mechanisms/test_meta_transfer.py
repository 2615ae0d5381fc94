"""The meta-transfer objective: closed forms, finite differences in double precision, symmetry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from compmod_jax.mechanisms.meta_transfer import (
  Adaptation,
  Tables,
  basis,
  fit_gaussians,
  fit_tables,
  gaussian_log_probability,
  online_log_likelihood,
  regret,
  regret_slope,
  rotation,
  table_log_probability,
)

DRAW = np.random.default_rng(5)
GAMMAS = np.array([-7.0, -0.4, 0.0, 0.0, 2.5, 30.0])
FORTH = np.array([-3.0, -2.0, -1.5, -4.0, -0.2, -1.0])
BACK = np.array([-2.0, -2.5, -1.5, -1.0, -3.0, -9.0])
CENTRES = 6


regrets, regret_slopes = jax.jit(regret), jax.jit(regret_slope)
derivatives = jax.jit(jax.vmap(jax.grad(regret)))
functions, turned = jax.jit(basis, static_argnums=1), jax.jit(rotation)


@pytest.fixture(autouse=True)
def double():
  with jax.enable_x64(True):
    yield


def softmax(x):
  return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def difference(function, at, step=1e-5):
  return (function(at + step) - function(at - step)) / (2 * step)


def test_the_regret_is_the_negative_log_of_the_mixture():
  belief = 1 / (1 + np.exp(-GAMMAS))
  wanted = -np.log(belief * np.exp(FORTH) + (1 - belief) * np.exp(BACK))
  np.testing.assert_allclose(regrets(GAMMAS, FORTH, BACK), wanted, rtol=1e-13)


def test_the_slope_of_the_regret_is_that_of_its_derivative_and_of_differences():
  slope = np.asarray(regret_slopes(GAMMAS, FORTH, BACK))
  np.testing.assert_allclose(derivatives(GAMMAS, FORTH, BACK), slope, atol=1e-15)
  measured = difference(lambda g: np.asarray(regrets(g, FORTH, BACK)), GAMMAS)
  np.testing.assert_allclose(measured, slope, atol=1e-9)

  def belief(x):
    return 1 / (1 + np.exp(-x))

  np.testing.assert_allclose(slope, belief(GAMMAS) - belief(GAMMAS + FORTH - BACK), atol=1e-15)


def test_the_curvature_of_the_regret_is_right_where_both_directions_are_equally_likely():
  """There, a derivative taken through the absolute value would be 0."""
  found = jax.jit(jax.grad(jax.grad(regret)))(0.0, -4.0, -1.0)
  back = 1 / (1 + np.exp(3.0))  # sigmoid(-3)
  np.testing.assert_allclose(found, 0.25 - back * (1 - back), rtol=1e-12)
  third = jax.jit(jax.grad(jax.grad(jax.grad(regret))))
  assert float(third(0.0, 0.0, 0.0)) == 0.0


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_hopeless_likelihoods_leave_the_regret_and_its_slope_finite(size):
  value, slope = jax.jit(jax.value_and_grad(regret))(*map(np.float32, (0.3, -size, -3 * size)))
  np.testing.assert_allclose(value, size - np.log(1 / (1 + np.exp(-0.3))), rtol=1e-6)
  np.testing.assert_allclose(slope, 1 / (1 + np.exp(-0.3)) - 1, rtol=1e-6)


def test_equal_likelihoods_do_not_move_the_belief():
  assert np.all(np.asarray(regret_slopes(GAMMAS, FORTH, FORTH)) == 0)


def test_a_positive_mean_of_the_log_ratio_does_not_make_the_belief_certain():
  """It does so where the mean of the inverse ratio is below 1."""
  ratios, milder = np.array([2.0, 2.0, 2.0, 2.0, -3.0]), np.array([2.0, 2.0, 2.0, 2.0, -1.0])

  def slope(gamma, ratios):
    return np.mean(regret_slopes(np.full(5, gamma), ratios, np.zeros(5)))

  assert np.mean(ratios) > 0
  assert np.mean(np.exp(-ratios)) > 1
  assert slope(0.0, ratios) < 0 < slope(8.0, ratios)
  assert np.mean(np.exp(-milder)) < 1
  assert max(slope(gamma, milder) for gamma in (0.0, 3.0, 8.0, 20.0)) < 0


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_exchanging_the_directions_changes_the_sign_of_the_slope_and_no_bit_more(kind):
  gamma, forth, back = (DRAW.normal(size=500, scale=9).astype(kind) for _ in range(3))
  for function, sign in ((regrets, 1), (regret_slopes, -1), (derivatives, -1)):
    one, other = function(gamma, forth, back), function(-gamma, back, forth)
    np.testing.assert_array_equal(np.asarray(one), sign * np.asarray(other))


def test_fitted_tables_are_the_frequencies_and_no_slope_is_left():
  counts = DRAW.integers(1, 20, size=(3, 4)).astype(np.float64)
  fit = jax.jit(fit_tables)
  tables, other = fit(counts), fit(counts.T)
  joint, turned = (softmax(made.cause)[:, None] * softmax(made.effect) for made in (tables, other))
  np.testing.assert_allclose(joint, counts / counts.sum(), rtol=1e-12)
  np.testing.assert_allclose(turned, joint.T, rtol=1e-12)
  pair = tuple(jnp.asarray(place.ravel()) for place in np.indices(counts.shape))

  def likelihood(tables):
    return jnp.sum(counts.ravel() * table_log_probability(tables, pair))

  for slope in jax.jit(jax.grad(likelihood))(tables):
    np.testing.assert_allclose(slope, 0, atol=1e-12)


def test_a_changed_cause_leaves_the_mechanism_of_the_right_direction_alone_and_no_other():
  """Bengio et al. 2020, proposition 1: the expected gradient of P(B | A) is 0."""
  first, changed = DRAW.dirichlet(np.ones(3)), DRAW.dirichlet(np.ones(3))
  mechanism = DRAW.dirichlet(np.ones(4), size=3)
  causes, effects = (place.ravel() for place in np.indices(mechanism.shape))
  now = (changed[:, None] * mechanism).ravel()

  @jax.jit
  def slope(before, pair):
    tables = fit_tables(before)
    return jax.grad(lambda t: jnp.sum(now * table_log_probability(t, pair)))(tables)

  before = first[:, None] * mechanism
  right = slope(before, (causes, effects))
  wrong = slope(before.T, (effects, causes))
  np.testing.assert_allclose(right.effect, 0, atol=1e-15)
  assert np.abs(right.cause).max() > 0.01
  assert np.abs(wrong.cause).max() > 0.01
  assert np.abs(wrong.effect).max() > 0.01


def test_online_likelihoods_are_those_of_a_loop_by_hand():
  cause, effect, rates = DRAW.normal(size=3), DRAW.normal(size=(3, 2)), (0.7, 0.2)
  samples = np.array([[0, 2], [1, 1], [2, 2], [0, 1]]), np.array([[1, 0], [1, 0], [0, 0], [1, 1]])
  online = jax.jit(functools.partial(online_log_likelihood, table_log_probability))
  found = online(Tables(cause, effect), samples, Tables(*rates))
  wanted = []
  for a, b in zip(*samples, strict=True):
    first, second = softmax(cause), np.array([softmax(row) for row in effect])
    wanted.append([np.log(first[i] * second[i, j]) for i, j in zip(a, b, strict=True)])
    up, across = np.zeros_like(cause), np.zeros_like(effect)
    for i, j in zip(a, b, strict=True):
      up += (np.arange(3) == i) - first
      across[i] += (np.arange(2) == j) - second[i]
    cause, effect = cause + rates[0] * up / 2, effect + rates[1] * across / 2
  np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_without_a_rate_nothing_adapts():
  tables = Tables(np.array([0.2, -0.1]), np.array([[0.3, 0.0], [0.0, 1.0]]))
  samples = np.array([[0], [0], [1]]), np.array([[1], [1], [0]])
  online = jax.jit(functools.partial(online_log_likelihood, table_log_probability, rate=0.0))
  found = np.asarray(online(tables, samples))
  assert found[0] == found[1] != found[2]


def curved(draw, size):
  cause = draw.normal(size=size)
  return cause, np.sin(cause) + 0.3 * draw.normal(size=size)


def test_fitted_gaussians_have_the_moments_and_least_squares_of_their_samples():
  cause, effect = curved(DRAW, 400)
  fit = jax.jit(functools.partial(fit_gaussians, centres=CENTRES, ridge=0.0))(cause, effect)
  np.testing.assert_allclose([fit.mean, fit.scale], [np.mean(cause), np.std(cause)], rtol=1e-12)
  fit = jax.device_get(fit)
  features = np.asarray(functions((cause - fit.mean) / fit.scale, CENTRES))
  weights = np.linalg.lstsq(features, effect, rcond=None)[0]
  np.testing.assert_allclose(fit.weights, weights, rtol=1e-7)
  np.testing.assert_allclose(fit.noise, np.std(effect - features @ weights), rtol=1e-9)


def test_the_density_of_a_pair_is_the_product_of_two_normal_ones_that_have_moved():
  cause, effect = curved(DRAW, 200)
  fit = jax.jit(functools.partial(fit_gaussians, centres=CENTRES))(cause, effect)
  change = Adaptation(0.3, -0.2, DRAW.normal(size=CENTRES), 0.4)
  found = jax.jit(gaussian_log_probability)(fit, change, (cause[:5], effect[:5]))
  middle, deviation, noise = (float(x) for x in (fit.mean, fit.scale, fit.noise))
  first = stats.norm(middle + 0.3 * deviation, deviation * np.exp(-0.2)).logpdf(cause[:5])
  features = np.asarray(functions((cause[:5] - middle) / deviation, CENTRES))
  # The deviation of the noise scales what is left over, moved weights included.
  mean = features @ (np.asarray(fit.weights) + noise * change.weights)
  second = stats.norm(mean, noise * np.exp(0.4)).logpdf(effect[:5])
  np.testing.assert_allclose(found, first + second, rtol=1e-10)


def test_the_basis_sums_to_one_and_keeps_its_order():
  features = np.asarray(functions(np.linspace(-9, 9, 50), 7))
  np.testing.assert_allclose(features.sum(axis=-1), 1, rtol=1e-12)
  assert np.all(np.diff(features.argmax(axis=-1)) >= 0)


def test_turning_back_gives_the_same_points():
  points = DRAW.normal(size=(5, 2))
  np.testing.assert_allclose(turned(np.array([[1.0, 0.0]]), np.pi / 2), [[0, 1]], atol=1e-15)
  np.testing.assert_allclose(turned(turned(points, 0.7), -0.7), points, rtol=1e-12)


def whole_regret(angle, gamma, training, episodes):
  """Through the encoder, both fits and all steps of adaptation."""

  def online(i, j):
    points, seen = rotation(training, -angle), rotation(episodes, -angle)
    log_probability = functools.partial(
      gaussian_log_probability, fit_gaussians(points[:, i], points[:, j], CENTRES)
    )
    start, rate = Adaptation.none(CENTRES), 0.1
    samples = seen[..., i], seen[..., j]
    return jnp.sum(online_log_likelihood(log_probability, start, samples, rate))

  return regret(gamma, online(0, 1), online(1, 0))


def test_derivatives_with_respect_to_the_angle_and_the_belief_agree_with_differences():
  training = np.stack(curved(np.random.default_rng(0), 80), axis=-1)
  episodes = np.stack(curved(np.random.default_rng(1), (4, 3)), axis=-1) + np.array([0.5, 0])
  value = functools.partial(
    whole_regret, training=jnp.asarray(training), episodes=jnp.asarray(episodes)
  )

  def slope(angle, gamma):
    made, slopes = jax.value_and_grad(value, argnums=(0, 1))(angle, gamma)
    return slopes[0], (made, *slopes)

  every = jax.jit(jax.grad(slope, has_aux=True))
  angle, gamma = 0.4, -0.3
  curvature, (_, *slopes) = every(angle, gamma)
  found = [*slopes, curvature]
  assert min(abs(float(x)) for x in found) > 1e-3  # or little would be compared
  measured = [
    difference(lambda x: np.asarray(every(x, gamma)[1][0]), angle),
    difference(lambda x: np.asarray(every(angle, x)[1][0]), gamma),
    difference(lambda x: np.asarray(every(x, gamma)[1][1]), angle),
  ]
  np.testing.assert_allclose(found, measured, rtol=1e-5)
