"""Sigmoid weights of experts, biases of their choice, shared experts: against loops over tokens."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.core.losses import objective
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.mechanisms.competition import losses
from compmod_jax.mechanisms.competition.router import CompetitionConfig, Router

BATCH, TIME, DIM, MLP, COUNT, KEEP = 2, 6, 5, 3, 4, 2
INPUTS = jax.device_put(np.random.default_rng(0).normal(size=(BATCH, TIME, DIM)).astype("f"))
BASE = CompetitionConfig(key_dim=3, hidden_dim=4, rule="top_k", keep=KEEP, temperature=0.8)
CHOICES = {
  "sigmoid": dataclasses.replace(BASE, weighting="sigmoid"),
  "normalised, biases": dataclasses.replace(
    BASE, weighting="normalised_sigmoid", bias_balance=0.01, balance=0.1
  ),
  "softmax, biases": dataclasses.replace(BASE, bias_balance=0.01),
}


def softmax(scores: np.ndarray) -> np.ndarray:
  powers = np.exp(scores - scores.max())
  return powers / powers.sum()


def weights_of(p: Any, x: np.ndarray, config: CompetitionConfig) -> tuple[np.ndarray, np.ndarray]:
  """Weights of all experts for one token, and what they are compared by but for their biases."""
  hidden = np.maximum(x @ p["hidden"]["kernel"] + p["hidden"]["bias"], 0)
  key = hidden @ p["key"]["kernel"] + p["key"]["bias"]
  scores = p["signatures"] @ key / np.sqrt(3) / config.temperature
  before = softmax(scores) if config.weighting == "softmax" else 1 / (1 + np.exp(-scores))
  order = before + p.get("bias", 0)
  best = sorted(range(COUNT), key=lambda i: -order[i])[:KEEP]
  weights = np.zeros(COUNT)
  weights[best] = softmax(scores[best]) if config.weighting == "softmax" else before[best]
  return weights / weights.sum() if config.weighting != "sigmoid" else weights, before


def network(x: np.ndarray, up: Any, down: Any, i: Any = ...) -> np.ndarray:
  """What a network makes of one token, or one expert of several."""
  hidden = np.maximum(x @ up["kernel"][:, i] + up["bias"][i], 0)
  return hidden @ down["kernel"][i] + down["bias"][i]


@pytest.mark.parametrize("config", CHOICES.values(), ids=CHOICES)
def test_tokens_run_through_the_experts_that_they_choose_and_the_shared_ones(config):
  layer = Experts(DIM, MLP, ExpertsConfig(COUNT, competition=config, shared=2))
  params = jax.device_put(drawn(layer.init, INPUTS, spread=0.7))
  site = "router/weights"
  routers = [losses.Routers("expert", (site,), config)]
  wanted = {site, *losses.captured_sites(routers)}
  real = jax.device_put(np.arange(TIME) < np.array([[TIME], [3]]))

  @jax.jit
  def call(params):
    def total(params):
      made, sites = run(layer.apply, params, INPUTS, capture=wanted)
      return (made**2).sum(), (made, sites[site])

    def extra(params):
      terms = losses.terms(
        routers, run(layer.apply, params, INPUTS, capture=wanted)[1], lambda _: real
      )
      return objective(terms), {name: term.value() for name, term in terms.items()}

    return jax.grad(total, has_aux=True)(params), jax.grad(extra, has_aux=True)(params)

  (gradients, (made, found)), (of_losses, terms) = jax.device_get(call(params))
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
  load, mean = np.zeros(COUNT), np.zeros(COUNT)
  for b, t in np.ndindex(BATCH, TIME):
    x = np.asarray(INPUTS[b, t], np.float64)
    weights, before = weights_of(p["router"], x, config)
    np.testing.assert_allclose(found[b, t], weights, atol=1e-6)
    expected = network(x, p["shared"]["up"], p["shared"]["down"])
    for i in np.flatnonzero(weights):
      expected = expected + weights[i] * network(x, p["up"], p["down"], i)
    np.testing.assert_allclose(made[b, t], expected, rtol=1e-4, atol=1e-4)
    load += real[b, t] * (weights > 0)
    mean += real[b, t] * before / before.sum() / real.sum()
  assert p["shared"]["up"]["kernel"].shape == (DIM, 2 * MLP)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradients, of_losses)))

  mine, others = (tree["params"]["router"].pop("bias", None) for tree in (of_losses, gradients))
  if not config.bias_balance:
    assert mine is others is None
    assert terms == {}
    return
  # Of the biases the sign of the excess alone, and of them nothing else.
  excess = np.sign(load - load.mean())
  assert len(set(excess)) > 1
  np.testing.assert_allclose(mine, config.bias_balance * excess, rtol=1e-5)
  assert not others.any()
  np.testing.assert_allclose(terms["expert_bias"], excess @ p["router"]["bias"], rtol=1e-5)
  if config.balance:
    value = COUNT * (load / load.sum()) @ mean
    np.testing.assert_allclose(terms["expert_balance"], value, rtol=1e-5)
  else:
    assert not any(leaf.any() for leaf in jax.tree.leaves(of_losses))


def test_biases_even_out_the_load():
  """Descent at rate 1, as published: from all tokens at two experts to as many at each."""
  config = dataclasses.replace(BASE, weighting="sigmoid", bias_balance=0.01)
  router = Router(COUNT, config)
  params = jax.device_put(drawn(router.init, INPUTS))
  params["params"]["bias"] = np.float32([0, 0, 1, 1])
  routers = [losses.Routers("expert", ("ffn/router/weights",), config)]

  @jax.jit
  def step(params):
    def extra(params):
      sites = run(router.apply, params, INPUTS, capture=None)[1]
      real = jax.numpy.ones((BATCH, TIME), bool)
      captured = {f"ffn/router/{name}": value for name, value in sites.items()}
      return objective(losses.terms(routers, captured, lambda _: real)), sites["weights"]

    slope, weights = jax.grad(extra, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - g, params, slope), (weights > 0).sum(axis=(0, 1))

  loads = []
  for _ in range(150):
    params, load = step(params)
    loads.append(np.asarray(load))
  assert loads[0].max() == BATCH * TIME
  assert np.mean([load.max() for load in loads[-20:]]) < 1.5 * BATCH * TIME * KEEP / COUNT


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: ExpertsConfig(shared=-1), ["experts.shared is -1", "at least 0"]),
    (
      lambda: ExpertsConfig(3, matched=True, shared=1).width(30),
      ["experts.count = 3 + experts.shared = 1", "30"],
    ),
    (
      lambda: CompetitionConfig(rule="threshold", weighting="sigmoid"),
      ["'sigmoid'", "'threshold'", "softmax"],
    ),
    (
      functools.partial(dataclasses.replace, CHOICES["sigmoid"], shared_heads=1),
      ["'sigmoid'", "shared_heads 1"],
    ),
    (lambda: CompetitionConfig(bias_balance=0.1), ["bias_balance is 0.1", "'soft'", "top_k"]),
    (lambda: CompetitionConfig(bias_balance=-0.1), ["bias_balance is -0.1", "at least 0"]),
  ],
)
def test_options_that_do_not_fit_are_refused(make, words):
  with pytest.raises(UserError) as error:
    make()
  assert all(word in str(error.value) for word in words), error.value
