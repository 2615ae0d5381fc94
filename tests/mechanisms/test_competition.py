"""Competition: selection rules, their gradients, and the router that scores heads."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.competition import router as competition
from compmod_jax.mechanisms.competition.router import (
  CompetitionConfig,
  Router,
  Selection,
  rank,
  routing_parameter,
  scale_heads,
  score,
)

OPTIONS = ("rule", "keep", "threshold", "temperature")
select = jax.jit(competition.select, static_argnames=OPTIONS)

RULES = [
  {"rule": "soft"},
  {"rule": "top_k", "keep": 2},
  {"rule": "threshold", "threshold": 0.2},
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["rule"])


def softmax(scores: np.ndarray) -> np.ndarray:
  scores = np.asarray(scores, np.float64)
  powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
  return powers / powers.sum(axis=-1, keepdims=True)


def numbers(*shape: int, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def random_scores(*shape: int) -> np.ndarray:
  return 2 * np.asarray(numbers(*shape))


# Selection rules in closed form.


def test_soft_weights_are_the_softmax_over_heads():
  scores = random_scores(2, 3, 4)
  found = select(scores)
  np.testing.assert_allclose(found.weights, softmax(scores), rtol=1e-6)
  assert found.active.all()


def test_top_k_is_the_softmax_over_the_k_best_heads():
  found = select(np.float32([[3.0, 1.0, 2.0, 0.0]]), rule="top_k", keep=2)
  first, third = softmax(np.array([3.0, 2.0]))
  np.testing.assert_allclose(found.weights, [[first, 0, third, 0]], rtol=1e-6)
  np.testing.assert_array_equal(found.active, [[True, False, True, False]])


def test_top_k_leaves_out_the_least_compatible_head_if_no_number_is_given():
  found = select(np.float32([[3.0, -1.0, 2.0, 0.0]]), rule="top_k")
  np.testing.assert_array_equal(found.active, [[True, False, True, True]])


def test_top_k_of_all_heads_is_soft():
  scores = random_scores(5, 4)
  everyone = select(scores, rule="top_k", keep=4)
  np.testing.assert_array_equal(everyone.weights, select(scores).weights)


@pytest.mark.parametrize(
  ("scores", "active"),
  [
    ([1.0, 1.0, 1.0, 1.0], [True, True, False, False]),
    ([0.0, 2.0, 2.0, 2.0], [False, True, True, False]),
    ([0.0, 1.0, 0.0, 0.0], [True, True, False, False]),
    ([-jnp.inf, -jnp.inf, -jnp.inf, 0.0], [True, False, False, True]),
  ],
)
def test_ties_go_to_the_lower_head(scores, active):
  found = select(jnp.float32(scores), rule="top_k", keep=2)
  np.testing.assert_array_equal(found.active, active)


def test_ranks_are_distinct_and_count_the_heads_that_are_better():
  np.testing.assert_array_equal(rank(jnp.array([1.0, 3.0, 1.0, 5.0])), [2, 1, 3, 0])


def test_threshold_silences_heads_under_it_and_renormalises_the_rest():
  scores = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
  found = select(scores, rule="threshold", threshold=0.2)
  np.testing.assert_array_equal(found.active, [True, True, False, False])
  np.testing.assert_allclose(found.weights, [0.625, 0.375, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("best", [0, 2])
def test_the_best_head_survives_any_threshold(best):
  scores = np.float32(np.eye(4)[best]) / 10
  found = select(scores, rule="threshold", threshold=0.99)
  np.testing.assert_array_equal(found.weights, np.eye(4)[best])


def test_of_equal_heads_under_the_threshold_the_first_survives():
  found = select(np.zeros(4, np.float32), rule="threshold", threshold=0.5)
  np.testing.assert_array_equal(found.active, [True, False, False, False])


@each_rule
def test_temperature_divides_the_scores(rule):
  scores = random_scores(6, 4)
  hot, scaled = select(scores, temperature=2.0, **rule), select(scores / 2, **rule)
  np.testing.assert_array_equal(hot.weights, scaled.weights)
  np.testing.assert_array_equal(hot.active, scaled.active)


@each_rule
def test_weights_are_float32_and_finite_for_bfloat16_and_for_huge_scores(rule):
  scores = jnp.array([[1e4, -1e4, 0.0, 9e3], [3e38, -3e38, 3e38, 0.0]], jnp.bfloat16)
  weights = np.asarray(select(scores, **rule).weights)
  assert weights.dtype == jnp.float32
  np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)


# Properties.

score_rows = hnp.arrays(
  np.float32, (3, 4), elements=st.floats(-8, 8, width=32).map(lambda x: round(x, 1))
)
few = settings(max_examples=30, deadline=None, derandomize=True)


@few
@given(scores=score_rows)
def test_weights_sum_to_one_over_the_active_heads_and_the_rest_get_zero(scores):
  for rule in RULES:
    weights, active = map(np.asarray, select(scores, **rule))
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    assert (weights[~active] == 0).all()
    assert (weights >= 0).all()


@few
@given(scores=score_rows)
def test_exactly_k_heads_are_active_and_none_left_out_is_better(scores):
  active = np.asarray(select(scores, **RULES[1]).active)
  assert (active.sum(axis=-1) == 2).all()
  for row, kept in zip(scores, active, strict=True):
    assert row[kept].min() >= row[~kept].max()


@few
@given(scores=score_rows)
def test_threshold_keeps_exactly_the_best_head_and_those_over_the_threshold(scores):
  weights, active = softmax(scores), np.asarray(select(scores, **RULES[2]).active)
  clear = np.abs(weights - 0.2) > 1e-6
  best = np.arange(4) == scores.argmax(axis=-1)[:, None]
  np.testing.assert_array_equal(active[clear], ((weights >= 0.2) | best)[clear])


@few
@given(scores=score_rows, shift=st.sampled_from([-4.0, 0.5, 16.0]))
def test_what_all_heads_share_does_not_matter(scores, shift):
  whole = np.round(8 * scores)  # exact sums, so that no tie is broken by rounding
  for rule in RULES:
    found, moved = select(whole, **rule), select(whole + np.float32(shift), **rule)
    np.testing.assert_allclose(moved.weights, found.weights, atol=1e-6)
    np.testing.assert_array_equal(moved.active, found.active)


# Rows and heads that may not take part.


@each_rule
def test_a_masked_row_gives_zeros_and_zero_gradients(rule):
  mask = np.array([[True] * 4, [False] * 4])

  def total(scores):
    return jnp.sum(select(scores, mask=mask, **rule).weights * np.arange(4.0)[None])

  scores = np.log(np.float32([[0.5, 0.05, 0.4, 0.05]] * 2))
  found, gradient = jax.device_get((select(scores, mask=mask, **rule), jax.grad(total)(scores)))
  np.testing.assert_array_equal(found.weights[1], 0)
  assert not found.active[1].any()
  np.testing.assert_array_equal(gradient[1], 0)
  assert np.isfinite(gradient).all()
  assert (gradient[0] != 0).any()


@each_rule
def test_masked_heads_take_no_part(rule):
  scores, mask = np.float32([5.0, 1.0, 0.9, 0.0]), np.array([False, True, True, True])
  found = jax.device_get(select(scores, mask=mask, **rule))
  alone = jax.device_get(select(scores[1:], **rule))
  np.testing.assert_array_equal(found.weights[0], 0)
  np.testing.assert_allclose(found.weights[1:], alone.weights, rtol=1e-6)
  np.testing.assert_array_equal(found.active[1:], alone.active)


# Gradients.


def weight_jacobian(scores: np.ndarray, rule: dict) -> np.ndarray:
  return np.asarray(jax.jit(jax.jacobian(lambda s: select(s, **rule).weights))(scores))


@each_rule
def test_gradients_reach_the_surviving_scores_only(rule):
  scores = np.log(np.float32([0.5, 0.05, 0.4, 0.05]))
  active = np.asarray(select(scores, **rule).active)
  jacobian = weight_jacobian(scores, rule)
  np.testing.assert_array_equal(jacobian[:, ~active], 0)
  np.testing.assert_array_equal(jacobian[~active], 0)
  assert (jacobian[active][:, active] != 0).all()


@each_rule
def test_gradients_are_those_of_a_softmax_over_the_survivors(rule):
  scores = np.log(np.float32([0.5, 0.05, 0.4, 0.05]))
  weights, active = jax.device_get(select(scores, **rule))
  kept = weights[active]
  jacobian = weight_jacobian(scores, rule)
  expected = np.diag(kept) - np.outer(kept, kept)
  np.testing.assert_allclose(jacobian[active][:, active], expected, atol=1e-6)


@pytest.mark.parametrize("rule", [{"rule": "top_k", "keep": 1}, {"rule": "threshold"}])
def test_a_lone_survivor_has_weight_one_and_its_router_no_gradient(rule):
  config = CompetitionConfig(key_dim=3, hidden_dim=5, **rule)
  if rule["rule"] == "threshold":
    config = dataclasses.replace(config, threshold=0.999)
  router, inputs, heads = Router(4, config), numbers(2, 3, 6), numbers(2, 3, 4, 2)
  params = nn.unbox(jax.jit(router.init)(jax.random.key(0), inputs))

  def total(params):
    selection = router.apply(params, inputs)
    return jnp.sum(scale_heads(heads, selection) ** 2), selection

  gradients, selection = jax.device_get(jax.jit(jax.grad(total, has_aux=True))(params))
  np.testing.assert_array_equal(selection.weights.max(axis=-1), 1)
  np.testing.assert_array_equal(selection.active.sum(axis=-1), 1)
  for gradient in jax.tree.leaves(gradients):
    np.testing.assert_array_equal(gradient, 0)


# Scaling heads.


def test_heads_are_multiplied_by_their_weights():
  heads = numbers(2, 3, 4, 5)
  selection = select(random_scores(2, 3, 4))
  expected = np.asarray(heads) * np.asarray(selection.weights)[..., None]
  np.testing.assert_allclose(scale_heads(heads, selection), expected, rtol=1e-6)
  rescaled = scale_heads(heads, selection, rescale=True)
  np.testing.assert_allclose(rescaled, 4 * expected, rtol=1e-6)


def test_uniform_weights_with_rescale_change_nothing():
  heads = numbers(2, 3, 4, 5)
  np.testing.assert_array_equal(
    scale_heads(heads, select(np.zeros((2, 3, 4), np.float32)), rescale=True), heads
  )


@pytest.mark.parametrize("rescale", [False, True])
def test_inactive_heads_put_out_zeros_or_their_own_value_unweighted(rescale):
  heads, values = numbers(1, 2, 4, 3), numbers(1, 2, 4, 3, seed=1)
  selection = select(random_scores(1, 2, 4), rule="top_k", keep=3)
  lost = ~np.asarray(selection.active)
  zeros = np.asarray(scale_heads(heads, selection, rescale=rescale))
  filled = np.asarray(scale_heads(heads, selection, rescale=rescale, values=values))
  np.testing.assert_array_equal(zeros[lost], 0)
  np.testing.assert_array_equal(filled[lost], np.asarray(values)[lost])
  np.testing.assert_array_equal(filled[~lost], zeros[~lost])


def test_scaling_keeps_the_type_of_the_heads():
  heads = jnp.ones((1, 2, 4, 3), jnp.bfloat16)
  assert scale_heads(heads, select(random_scores(1, 2, 4))).dtype == jnp.bfloat16


# Scores and the router.


@pytest.mark.parametrize("scale", [True, False])
def test_a_score_is_the_inner_product_of_signature_and_key(scale):
  keys, signatures = numbers(2, 3, 9), numbers(4, 9, seed=1)
  expected = np.asarray(keys, np.float64) @ np.asarray(signatures, np.float64).T
  expected = expected / 3 if scale else expected
  np.testing.assert_allclose(score(keys, signatures, scale=scale), expected, atol=1e-5)


def test_scores_of_bfloat16_keys_are_computed_in_float32():
  keys, signatures = jnp.asarray(numbers(2, 3, 9), jnp.bfloat16), numbers(4, 9, seed=1)
  found = score(keys, signatures)
  assert found.dtype == jnp.float32
  np.testing.assert_array_equal(found, score(jnp.float32(keys), signatures))


def test_a_router_is_inference_network_then_signatures():
  config = CompetitionConfig(key_dim=3, hidden_dim=5, temperature=0.7)
  router, inputs = Router(4, config), numbers(2, 3, 6)
  params = nn.unbox(jax.jit(router.init)(jax.random.key(0), inputs))["params"]
  p = jax.tree.map(lambda leaf: np.asarray(leaf) + np.float32(0.1), params)
  hidden = np.maximum(np.asarray(inputs) @ p["hidden"]["kernel"] + p["hidden"]["bias"], 0)
  keys = hidden @ p["key"]["kernel"] + p["key"]["bias"]
  expected = softmax(keys @ p["signatures"].T / np.sqrt(3) / 0.7)
  found = jax.jit(router.apply)({"params": p}, inputs)
  np.testing.assert_allclose(found.weights, expected, rtol=1e-5)


def test_a_module_of_four_heads_adds_68856_parameters():
  router = Router(4, CompetitionConfig())
  inputs = jax.ShapeDtypeStruct((1, 2, 512), jnp.float32)
  params = jax.eval_shape(router.init, jax.random.key(0), inputs)
  assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 68_856


def test_routers_start_xavier_uniform_with_gain_sqrt_two_and_signatures_xavier_normal():
  config = CompetitionConfig(key_dim=60, hidden_dim=80)
  init = jax.jit(Router(40, config).init)
  params = nn.unbox(init(jax.random.key(0), numbers(1, 1, 70)))["params"]
  for name, fans in (("hidden", 70 + 80), ("key", 80 + 60)):
    kernel, bound = np.asarray(params[name]["kernel"]), np.sqrt(2) * np.sqrt(6 / fans)
    assert 0.98 * bound < np.abs(kernel).max() <= bound
    np.testing.assert_array_equal(params[name]["bias"], 0)
  deviation = np.asarray(params["signatures"]).std()
  np.testing.assert_allclose(deviation, np.sqrt(2 / (40 + 60)), rtol=0.05)


def test_the_inference_network_drops_units_in_training_only():
  config = CompetitionConfig(key_dim=3, hidden_dim=64, dropout=0.5)
  router, inputs = Router(4, config), numbers(1, 2, 6)
  params = jax.jit(router.init)(jax.random.key(0), inputs)

  @jax.jit
  def weights(seed):
    rngs = {"dropout": jax.random.key(seed)}
    return router.apply(params, inputs, deterministic=False, rngs=rngs).weights

  assert not np.array_equal(weights(1), weights(2))
  np.testing.assert_array_equal(weights(1), weights(1))
  jax.eval_shape(router.apply, params, inputs)  # without dropout it needs no key


def test_routing_parameters_are_those_of_routers_and_nothing_else():
  assert routing_parameter("encoder_0/self_attention/router/signatures")
  assert routing_parameter("encoder_0/self_attention/router/hidden/kernel")
  assert not routing_parameter("encoder_0/self_attention/output/kernel")
  assert not routing_parameter("encoder_0/my_router_like/kernel")


def test_a_selection_is_a_pair_of_weights_and_active_heads():
  weights, active = select(np.zeros((1, 2), np.float32))
  assert isinstance(select(np.zeros((1, 2), np.float32)), Selection)
  assert weights.shape == active.shape == (1, 2)


# Configuration.


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"key_dim": 0}, ["key_dim", "0", "at least 1"]),
    ({"hidden_dim": -3}, ["hidden_dim", "-3", "at least 1"]),
    ({"rule": "threshold", "threshold": 1.0}, ["threshold", "1.0", "below 1"]),
    ({"temperature": 0.0}, ["temperature", "0.0", "positive"]),
    ({"dropout": 1.0}, ["dropout", "1.0", "below 1"]),
    ({"keep": 2}, ["keep", "2", "soft", "top_k"]),
    ({"threshold": 0.1}, ["threshold", "0.1", "soft"]),
    ({"skip": True}, ["competition.skip is set", "'soft'", "top_k or threshold"]),
    ({"skip": True, "rule": "top_k", "inactive": "value"}, ["skip is set", "inactive 'value'"]),
  ],
)
def test_a_bad_configuration_names_field_value_and_rule(fields, words):
  with pytest.raises(UserError) as error:
    CompetitionConfig(**fields)
  assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("keep", [0, 5])
def test_keep_must_lie_between_one_and_the_number_of_heads(keep):
  with pytest.raises(UserError, match=rf"keep is {keep}; with 4 heads .* between 1 and 4"):
    CompetitionConfig(rule="top_k", keep=keep).kept(4)


def test_kept_heads_by_rule():
  assert CompetitionConfig().kept(4) == 4
  assert CompetitionConfig(rule="top_k").kept(4) == 3
  assert CompetitionConfig(rule="top_k").kept(1) == 1
  assert CompetitionConfig(rule="top_k", keep=2).kept(4) == 2
