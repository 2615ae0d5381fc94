"""Load balance and z-loss: their values, their gradients, what they count, how parts add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.core import losses
from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.competition import losses as router_losses
from compmod_jax.mechanisms.competition.losses import Routers
from compmod_jax.mechanisms.competition.router import CompetitionConfig

UNITS = 4
SITES = ("encoder/layer_0/ffn/router/weights", "decoder/layer_0/ffn/router/weights")
BOTH = CompetitionConfig(balance=0.01, z=0.001, temperature=0.7)
TOP_2 = CompetitionConfig(rule="top_k", keep=2, balance=0.5)


load = jax.jit(router_losses.load, static_argnums=2)
balance = jax.jit(router_losses.balance)
EVERYWHERE = np.ones((4, 3), bool)


def random_scores(seed: int = 0) -> dict[str, np.ndarray]:
  random = np.random.default_rng(seed)
  return {
    site.replace("weights", "scores"): random.normal(size=(4, 3, UNITS)).astype(np.float32)
    for site in SITES
  }


def real_rows(site: str) -> np.ndarray:
  lengths = [3, 1, 2, 3] if site.startswith("encoder") else [1, 1, 3, 0]
  return np.arange(3) < np.array(lengths)[:, None]


def terms(config: CompetitionConfig, scores: dict, rows=real_rows) -> dict[str, losses.Term]:
  scores = jax.tree.map(jnp.asarray, scores)
  routers = [Routers("expert", SITES, config)]
  return router_losses.terms(routers, scores, lambda site: jnp.asarray(rows(site)))


def softmax(scores: np.ndarray) -> np.ndarray:
  powers = np.exp(np.float64(scores) - scores.max(axis=-1, keepdims=True))
  return powers / powers.sum(axis=-1, keepdims=True)


def expected_balance(scores: dict, config: CompetitionConfig, slots: int) -> float:
  total = 0.0
  for site in SITES:
    real = scores[site.replace("weights", "scores")][real_rows(site)]
    best = np.argsort(-real, axis=-1)[:, :slots]
    share = np.bincount(best.ravel(), minlength=UNITS) / best.size
    total += UNITS * np.sum(share * softmax(real / config.temperature).mean(axis=0))
  return total


@pytest.mark.parametrize(("config", "slots"), [(BOTH, 1), (TOP_2, 2)])
def test_the_balance_is_units_times_load_times_mean_weight_over_real_tokens(config, slots):
  scores = random_scores()
  found = jax.jit(lambda s: terms(config, s)["expert_balance"])(scores)
  expected = expected_balance(scores, config, slots)
  np.testing.assert_allclose(found.value(), expected, rtol=1e-5)
  assert found.weight == config.balance


def test_the_z_loss_is_the_mean_squared_log_normaliser_of_the_raw_scores():
  scores = random_scores()
  expected = 0.0
  for site in SITES:
    real = np.float64(scores[site.replace("weights", "scores")][real_rows(site)])
    expected += np.mean(np.log(np.exp(real).sum(axis=-1)) ** 2)
  found = jax.jit(lambda s: terms(BOTH, s)["expert_z"])(scores)
  np.testing.assert_allclose(found.value(), expected, rtol=1e-5)
  assert found.weight == 0.001


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_an_even_load_gives_one_and_a_collapsed_router_the_number_of_units(seed):
  config, random = CompetitionConfig(), np.random.default_rng(seed)
  # Every token has a favourite of its own, each unit the same number of them.
  even = 5 * np.eye(UNITS, dtype=np.float32)[random.permutation(np.arange(12) % UNITS)]
  collapsed = np.broadcast_to(50 * np.eye(UNITS, dtype=np.float32)[1], (12, UNITS))
  for scores, value in ((even, 1.0), (collapsed, UNITS)):
    total = load(scores.reshape(4, 3, UNITS), EVERYWHERE, config)
    found = balance(total[None], np.float32([12]))
    np.testing.assert_allclose(found, value, rtol=1e-5)


def test_lowering_the_balance_lowers_the_scores_of_the_unit_with_the_largest_load():
  scores = random_scores()[SITES[0].replace("weights", "scores")] + [0, 0, 3, 0]

  @jax.jit
  @jax.grad
  def slope(scores):
    total = router_losses.load(scores, jnp.asarray(EVERYWHERE), CompetitionConfig())
    return router_losses.balance(total[None], jnp.float32([12]))

  found = np.asarray(slope(np.float32(scores))).sum(axis=(0, 1))
  assert (np.bincount(scores.argmax(axis=-1).ravel(), minlength=UNITS)).argmax() == 2
  assert found.argmax() == 2
  assert found[2] > 0
  np.testing.assert_allclose(found.sum(), 0, atol=1e-6)  # no gradient passes through the load


@pytest.mark.parametrize("config", [BOTH, TOP_2])
def test_parts_add_up_to_the_whole_before_the_nonlinearity(config):
  scores = random_scores()

  def part(pick):
    return terms(
      config, {k: v[pick] for k, v in scores.items()}, lambda site: real_rows(site)[pick]
    )

  @jax.jit
  def values():
    whole, one, two = part(slice(None)), part(slice(0, 1)), part(slice(1, None))
    added = {name: jax.tree.map(jnp.add, one[name], two[name]) for name in whole}
    means = {name: (one[name].value() + two[name].value()) / 2 for name in whole}
    return {n: (whole[n].value(), added[n].value(), means[n]) for n in whole}

  for value, added, mean_of_means in values().values():
    np.testing.assert_allclose(added, value, rtol=1e-5)
    assert abs(float(mean_of_means) - float(value)) > 1e-3


def test_padding_has_neither_value_nor_gradient():
  scores = random_scores()
  other = {
    k: np.where(real_rows(k)[..., None], v, 9 * np.sign(v)).astype(np.float32)
    for k, v in scores.items()
  }

  @jax.jit
  @jax.value_and_grad
  def run(scores):
    return losses.objective(terms(BOTH, scores))

  (one, slope), (two, _) = run(scores), run(other)
  np.testing.assert_array_equal(one, two)
  for site, gradient in slope.items():
    np.testing.assert_array_equal(np.asarray(gradient)[~real_rows(site)], 0)
    assert np.asarray(gradient)[real_rows(site)].any()


def test_a_batch_without_tokens_gives_zero_and_finite_gradients():
  def run(scores):
    return losses.objective(terms(BOTH, scores, lambda site: np.zeros((4, 3), bool)))

  value, slope = jax.jit(jax.value_and_grad(run))(random_scores())
  assert value == 0
  for leaf in jax.tree.leaves(slope):
    np.testing.assert_array_equal(leaf, 0)


def test_terms_are_active_exactly_when_their_coefficient_is_positive():
  def group(**coefficients):
    return [Routers("head", SITES, CompetitionConfig(**coefficients))]

  assert router_losses.objective(group()) == {}
  assert router_losses.terms(group(), {}, real_rows) == {}
  assert router_losses.captured_sites(group()) == frozenset()
  assert router_losses.objective(group(z=0.1)) == {"head_z": 0.1}
  assert list(router_losses.objective(group(balance=0.2, z=0.1))) == ["head_balance", "head_z"]
  assert list(terms(CompetitionConfig(balance=0.2), random_scores())) == ["expert_balance"]
  assert router_losses.captured_sites(group(balance=0.2)) == set(random_scores())
  assert router_losses.objective([Routers("expert", (), BOTH)]) == {}


def test_the_log_gets_the_value_of_a_term_that_is_no_mean():
  @jax.jit
  def run():
    term = terms(BOTH, random_scores())["expert_balance"]
    return term.logged(), term.value()

  (total, count), value = run()
  assert (float(total), float(count)) == (float(value), 1)
  mean = losses.Term(jnp.float32(6), jnp.float32(4))
  assert mean.logged() == (6, 4)


@pytest.mark.parametrize("field", ["balance", "z"])
def test_a_negative_coefficient_is_an_error(field):
  with pytest.raises(UserError, match=rf"competition\.{field} is -1\.0; it must be at least 0"):
    CompetitionConfig(**{field: -1.0})
