"""Competing feed-forward networks: the layer against its equations, identities, sites, dropout."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from compmod_jax.core import intermediates
from compmod_jax.core.config import from_json, to_json
from compmod_jax.core.errors import UserError
from compmod_jax.layers.basic import FeedForward
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig, Rule

BATCH, TIME, DIM, MLP, COUNT = 3, 5, 6, 4, 4


def competition(rule: Rule = "soft", **fields: Any) -> CompetitionConfig:
  return CompetitionConfig(key_dim=3, hidden_dim=5, rule=rule, **fields)


SOFT, TOP_2 = competition(), competition("top_k", keep=2)
INPUTS = np.random.default_rng(0).normal(size=(BATCH, TIME, DIM)).astype(np.float32)


def experts(rule: CompetitionConfig, implementation: Any = "auto", **fields: Any) -> Experts:
  count = fields.pop("count", COUNT)
  config = ExpertsConfig(count, competition=rule, implementation=implementation)
  return Experts(DIM, fields.pop("hidden_dim", MLP), config, **fields)


@functools.cache
def params(count: int = COUNT) -> Any:
  shapes = jax.eval_shape(experts(SOFT, count=count).init, jax.random.key(0), jnp.asarray(INPUTS))
  random = np.random.default_rng(1)
  return jax.tree.map(
    lambda leaf: random.normal(size=leaf.shape).astype(np.float32), nn.unbox(shapes)
  )["params"]


def run(layer: nn.Module, params: Any, **kwargs: Any) -> Any:
  """Output, and gradients of its sine with respect to parameters and inputs."""

  def total(params, inputs):
    made = layer.apply({"params": params}, inputs, **kwargs)
    return jnp.sum(jnp.sin(made)), made

  function = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
  (_, made), gradients = jax.jit(function)(params, INPUTS)
  return jax.device_get((made, gradients))


def assert_close(found: Any, expected: Any, rtol: float = 1e-5) -> None:
  for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, two, rtol=0, atol=rtol * max(1.0, float(np.abs(two).max())))


def assert_equal(found: Any, expected: Any) -> None:
  for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(one, two)


def shares(p: Any, rule: CompetitionConfig) -> np.ndarray:
  """The weights of equation 5.1, in float64."""
  hidden = np.maximum(INPUTS @ p["hidden"]["kernel"] + p["hidden"]["bias"], 0)
  keys = hidden @ p["key"]["kernel"] + p["key"]["bias"]
  scores = np.float64(keys @ p["signatures"].T / np.sqrt(3)) / rule.temperature
  powers = np.exp(scores)
  if rule.rule == "top_k":
    powers[scores < np.sort(scores, axis=-1)[..., -rule.keep, None]] = 0
  if rule.rule == "threshold":
    powers[powers < rule.threshold * powers.sum(axis=-1, keepdims=True)] = 0
  weights = powers / powers.sum(axis=-1, keepdims=True)
  return weights * COUNT if rule.rescale else weights


def outputs(p: Any) -> np.ndarray:
  """What every expert puts out, [batch, time, experts, dim]."""
  hidden = np.einsum("btd,def->btef", INPUTS, p["up"]["kernel"]) + p["up"]["bias"]
  return np.einsum("btef,efd->bted", np.maximum(hidden, 0), p["down"]["kernel"]) + p["down"]["bias"]


# The equations.


@pytest.mark.parametrize(
  "rule",
  [
    SOFT,
    TOP_2,
    competition("threshold", threshold=0.2),
    competition(temperature=0.5, rescale=True),
    competition("top_k", keep=1),
  ],
  ids=["soft", "top_2", "threshold", "rescaled", "top_1"],
)
def test_the_output_is_the_weighted_sum_of_the_experts(rule):
  weights = shares(params()["router"], rule)
  expected = np.sum(weights[..., None] * outputs(params()), axis=2)
  layer = experts(rule)
  found = jax.jit(lambda p: layer.apply({"params": p}, jnp.asarray(INPUTS)))(params())
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@functools.cache
def dense_top_2() -> Any:
  return run(experts(TOP_2, "dense"), params())


@pytest.mark.parametrize("implementation", ["blocked", "batched", "ragged"])
def test_sparse_experts_equal_all_experts_with_the_same_weights_gradients_too(implementation):
  assert_close(run(experts(TOP_2, implementation), params()), dense_top_2())
  gradients = flatten_dict(dense_top_2()[1][0], sep="/")
  assert [path for path, leaf in gradients.items() if not leaf.any()] == []


def test_only_the_chosen_experts_run():
  """What the others hold may be anything."""
  p = jax.tree.map(np.copy, params())
  p["router"]["key"]["bias"] = 100 * (
    p["router"]["signatures"][0] + 0.5 * p["router"]["signatures"][1]
  )
  weights = shares(p["router"], TOP_2)
  idle = np.flatnonzero(weights.max(axis=(0, 1)) == 0)
  assert len(idle) > 0
  layer = experts(TOP_2, "blocked")
  apply = jax.jit(lambda p: layer.apply({"params": p}, jnp.asarray(INPUTS)))
  expected = apply(p)
  p["up"]["kernel"][:, idle] = np.nan
  p["down"]["kernel"][idle] = np.nan
  np.testing.assert_array_equal(apply(p), expected)
  assert np.isfinite(expected).all()


def test_experts_that_are_all_here_get_no_tokens_sent_and_none_waits():
  gather = experts(TOP_2, "blocked")
  exchange = dataclasses.replace(
    gather, config=dataclasses.replace(gather.config, dispatch="exchange")
  )
  assert_equal(run(exchange, params()), run(gather, params()))
  function = functools.partial(intermediates.run, exchange.apply, capture=("router/waiting",))
  sites = jax.jit(function)({"params": params()}, jnp.asarray(INPUTS))[1]
  np.testing.assert_array_equal(sites["router/waiting"], np.zeros((BATCH, TIME)))


def test_a_step_of_decoding_runs_all_experts_and_a_batch_the_chosen_ones():
  def loops(layer: Experts, tokens: int) -> int:
    inputs = jax.ShapeDtypeStruct((1, tokens, DIM), jnp.float32)
    return str(jax.make_jaxpr(layer.apply)({"params": params()}, inputs)).count("while[")

  assert loops(experts(TOP_2), 8) == loops(experts(TOP_2, "dense"), 4096) == 0
  assert loops(experts(TOP_2), 4096) > 0
  assert loops(experts(TOP_2, "blocked"), 8) > 0
  assert loops(experts(SOFT), 4096) == 0


# Identities.


def merged(p: Any) -> Any:
  """The single network whose hidden units are all the experts'."""
  return {
    "up": {
      "kernel": p["up"]["kernel"].reshape(DIM, -1),
      "bias": p["up"]["bias"].reshape(-1),
    },
    "down": {
      "kernel": p["down"]["kernel"].reshape(-1, DIM),
      "bias": p["down"]["bias"].sum(axis=0),
    },
  }


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("rule", [SOFT, competition("top_k", keep=1)], ids=["soft", "top_k"])
def test_one_expert_is_the_plain_network_bit_for_bit(train, rule):
  options: Any = {"deterministic": not train}
  if train:
    options["rngs"] = {"dropout": jax.random.key(3)}
  layer = experts(rule, count=1, dropout=0.5, name="ffn")
  plain = FeedForward(DIM, MLP, dropout=0.5, name="ffn")
  made, (gradients, slope) = run(layer, params(1), **options)
  expected, (peers, peer_slope) = run(plain, merged(params(1)), **options)
  assert_equal((made, slope), (expected, peer_slope))
  assert_equal(merged(gradients), peers)
  assert not any(leaf.any() for leaf in jax.tree.leaves(gradients["router"]))


def test_even_weights_times_their_number_are_the_plain_network_of_the_same_total_width():
  layer, plain = experts(competition(rescale=True)), FeedForward(DIM, COUNT * MLP)
  even = intermediates.Intermediates(edits={"router/scores": jnp.zeros_like})
  made, (gradients, slope) = run(layer, params(), intermediates=even)
  expected, (peers, peer_slope) = run(plain, merged(params()))
  assert_close((made, slope), (expected, peer_slope), rtol=1e-6)
  for name in ("kernel", "bias"):
    assert_close(merged(gradients)["up"][name], peers["up"][name], rtol=1e-6)
  assert_close(merged(gradients)["down"]["kernel"], peers["down"]["kernel"], rtol=1e-6)
  for bias in gradients["down"]["bias"]:  # every expert's own bias has the single one's gradient
    assert_close(bias, peers["down"]["bias"], rtol=1e-6)


def test_matched_experts_have_the_single_networks_weights_a_router_and_more_output_biases():
  def count(layer: nn.Module) -> int:
    inputs = jax.ShapeDtypeStruct((1, 1, 512), jnp.float32)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), inputs)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))

  config = ExpertsConfig(8, matched=True)
  assert config.width(1024) == 128
  assert ExpertsConfig(8).width(1024) == 1024
  more = count(Experts(512, config.width(1024), config)) - count(FeedForward(512, 1024))
  assert more == 7 * 512 + (512 * 128 + 128 + 128 * 24 + 24 + 8 * 24)


def test_every_expert_starts_like_a_single_network():
  config = ExpertsConfig(3)
  layer = Experts(40, 60, config)
  made = nn.unbox(jax.jit(layer.init)(jax.random.key(0), jnp.ones((1, 1, 40))))["params"]
  bound = np.sqrt(6 / 100)
  for kernel in (np.asarray(made["up"]["kernel"]), np.asarray(made["down"]["kernel"])):
    assert 0.99 * bound < np.abs(kernel).max() <= bound
    np.testing.assert_allclose(kernel.std(), bound / np.sqrt(3), rtol=0.03)


# Sites.


@functools.cache
def captured(rule: CompetitionConfig, names: tuple[str, ...] | None) -> Any:
  layer = experts(rule, "blocked" if rule.rule == "top_k" else "auto")

  def apply(p):
    return intermediates.run(layer.apply, {"params": p}, jnp.asarray(INPUTS), capture=names)

  return jax.device_get(jax.jit(apply)(params()))


@pytest.mark.parametrize("rule", [SOFT, TOP_2], ids=["soft", "top_2"])
def test_sites_show_every_expert_before_and_after_weighing(rule):
  made, found = captured(rule, None)
  assert set(found) >= {
    "router/scores",
    "router/weights",
    "hidden",
    "experts",
    "experts_scaled",
  }
  weights, every = shares(params()["router"], rule), outputs(params())
  np.testing.assert_allclose(found["router/weights"], weights, atol=1e-5)
  np.testing.assert_allclose(found["experts"], every, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(found["experts_scaled"], weights[..., None] * every, atol=1e-4)
  np.testing.assert_allclose(found["experts_scaled"].sum(axis=2), made, rtol=1e-5, atol=1e-5)
  assert found["hidden"].shape == (BATCH, TIME, COUNT, MLP)
  assert_close(made, captured(rule, ("router/weights",))[0])


def test_reading_the_weights_leaves_the_chosen_experts_running_alone():
  def program(**kwargs):
    function = functools.partial(intermediates.run, experts(TOP_2, "blocked").apply, **kwargs)
    return str(jax.make_jaxpr(function)({"params": params()}, jnp.asarray(INPUTS)))

  assert "while[" in program(capture=("router/weights", "router/scores"))
  assert "while[" not in program(capture=("experts",))


@pytest.mark.parametrize("site", ["experts", "experts_scaled", "hidden", "router/weights"])
def test_an_expert_can_be_silenced_at_each_of_its_sites(site):
  layer = experts(TOP_2, "blocked")
  axis = -1 if site == "router/weights" else -2
  edits = {site: intermediates.zero_units(2, axis=axis)}

  def apply(p):
    return intermediates.run(layer.apply, {"params": p}, jnp.asarray(INPUTS), edits=edits)[0]

  weights, every = shares(params()["router"], TOP_2), outputs(params()).copy()
  every[:, :, 2] = params()["down"]["bias"][2] if site == "hidden" else 0
  expected = np.sum(weights[..., None] * every, axis=2)
  np.testing.assert_allclose(jax.jit(apply)(params()), expected, rtol=2e-5, atol=2e-5)


def test_weights_that_an_edit_gives_to_experts_that_lost_count():
  layer = experts(TOP_2, "blocked")
  edits = {"router/weights": lambda weights: jnp.full_like(weights, 0.25)}

  def apply(p):
    return intermediates.run(layer.apply, {"params": p}, jnp.asarray(INPUTS), edits=edits)[0]

  expected = outputs(params()).mean(axis=2)
  np.testing.assert_allclose(jax.jit(apply)(params()), expected, rtol=2e-5, atol=2e-5)


# Training and types.


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_hidden_units_are_dropped_in_training_and_scaled_up_in_the_mean(implementation):
  layer = experts(TOP_2, implementation, dropout=0.5)
  quiet = layer.clone(dropout=0.0)

  @jax.jit
  def drawn(params, inputs, seeds):
    def one(seed):
      rngs = {"dropout": jax.random.key(seed)}
      return layer.apply({"params": params}, inputs, deterministic=False, rngs=rngs)

    return jax.lax.map(one, seeds), quiet.apply({"params": params}, inputs)

  many, expected = map(np.asarray, drawn(params(), INPUTS, np.arange(1000)))
  assert not np.array_equal(many[0], many[1])
  error = many.std(axis=0) / np.sqrt(len(many))
  assert (np.abs(many.mean(axis=0) - expected) < 5 * error + 1e-5).all()


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_bfloat16_is_near_float32_and_weights_stay_float32(implementation):
  layer = experts(TOP_2, implementation, dtype=jnp.bfloat16)

  def apply(p):
    names = ("router/weights", "router/scores")
    return intermediates.run(layer.apply, {"params": p}, jnp.asarray(INPUTS), capture=names)

  made, found = jax.jit(apply)(params())
  assert made.dtype == jnp.bfloat16
  assert {value.dtype for value in found.values()} == {jnp.dtype("float32")}
  expected = dense_top_2()[0]
  chosen = np.asarray(found["router/weights"]) > 0
  same = (chosen == (shares(params()["router"], TOP_2) > 0)).all(axis=-1)
  assert same.mean() > 0.8
  close = np.abs(np.float32(made) - expected)[same].max()
  assert close < 0.05 * np.abs(expected).max()


# Configuration.


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"count": 0}, ["experts.count is 0", "at least 1"]),
    (
      {"count": 4, "competition": competition("top_k", keep=5)},
      ["keep is 5", "4 experts", "between 1 and 4"],
    ),
    (
      {"competition": competition("top_k")},
      ["experts.competition.keep is not given", "'top_k'", "1 or 2, the usual values"],
    ),
    ({"competition": competition(inactive="value")}, ["inactive is 'value'", "null"]),
    ({"competition": competition(rule="top_k", keep=1, skip=True)}, ["skip is set", "heads alone"]),
    ({"implementation": "blocked"}, ["'blocked'", "'soft'", "top_k"]),
    ({"implementation": "ragged", "competition": competition("threshold")}, ["'threshold'"]),
    ({"dispatch": "exchange"}, ["experts.dispatch is 'exchange'", "'soft'", "top_k"]),
    (
      {
        "dispatch": "exchange",
        "implementation": "dense",
        "competition": competition("top_k", keep=1),
      },
      ["experts.dispatch is 'exchange'", "'dense'", "all tokens"],
    ),
    ({"capacity": 0.5}, ["experts.capacity is 0.5", "at least 1", "1.25 to 2"]),
  ],
)
def test_a_bad_configuration_names_field_value_and_rule(fields, words):
  with pytest.raises(UserError) as error:
    ExpertsConfig(**fields)
  assert all(word in str(error.value) for word in words), error.value


def test_matched_experts_must_divide_the_width():
  with pytest.raises(UserError, match=r"experts\.count = 3 does not divide ffn_dim = 1024"):
    ExpertsConfig(3, matched=True).width(1024)


def test_a_configuration_survives_json():
  config = ExpertsConfig(4, True, competition("top_k", keep=2, balance=0.01), "ragged")
  assert from_json(ExpertsConfig, to_json(config)) == config


@pytest.mark.parametrize("saved", [{"count": 4}, {}], ids=["four", "by default"])
def test_what_was_saved_without_a_number_of_experts_that_stay_opens_with_all_but_one(saved):
  rule = to_json(competition("top_k")) | {"keep": None}
  del rule["dtype"]  # which is newer
  config = from_json(ExpertsConfig, {**saved, "competition": rule})
  assert config.competition.keep == config.count - 1 == saved.get("count", 8) - 1
  assert config.competition == competition("top_k", keep=config.count - 1)
