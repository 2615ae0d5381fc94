"""Heads that always stay beside heads that are chosen (MoH), against loops over single tokens."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import Context
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.losses import Routers, terms
from compmod_jax.mechanisms.competition.router import CompetitionConfig

BATCH, TIME, HEADS, WIDTH, SHARED, KEEP = 2, 5, 6, 3, 2, 2
DIM = HEADS * WIDTH
INPUTS = jax.device_put(np.random.default_rng(0).normal(size=(BATCH, TIME, DIM)).astype("f"))
CONFIG = CompetitionConfig(
  key_dim=4,
  hidden_dim=5,
  rule="top_k",
  keep=KEEP,
  shared_heads=SHARED,
  temperature=0.7,
  balance=0.1,
)


def softmax(scores: np.ndarray) -> np.ndarray:
  powers = np.exp(scores - scores.max())
  return powers / powers.sum()


def weights_of(p: Any, x: np.ndarray) -> tuple[np.ndarray, list[int]]:
  """Weights of all heads for one token, and which of the others were chosen."""
  hidden = np.maximum(x @ p["hidden"]["kernel"] + p["hidden"]["bias"], 0)
  key = hidden @ p["key"]["kernel"] + p["key"]["bias"]
  scores = [float(a @ key) / 2 / CONFIG.temperature for a in p["signatures"]]
  share = softmax(np.array([a @ key / 2 for a in p["groups"]]))
  weights = np.zeros(HEADS)
  weights[:SHARED] = share[0] * softmax(np.array(scores[:SHARED]))
  best = sorted(range(SHARED, HEADS), key=lambda i: -scores[i])[:KEEP]
  weights[best] = share[1] * softmax(np.array([scores[i] for i in best]))
  return weights, best


def test_every_token_has_the_shared_heads_and_its_best_of_the_others():
  module = Attention(DIM, HEADS, competition=CONFIG)
  params = jax.device_put(drawn(module.init, INPUTS, spread=0.5))
  wanted = ("heads", "router/weights", "router/scores")

  @jax.jit
  def call(params):
    def total(params):
      (made, _), sites = run(module.apply, params, INPUTS, ctx=Context(), capture=wanted)
      return (made**2).sum(), (made, sites)

    return jax.value_and_grad(total, has_aux=True)(params)

  (_, (made, sites)), gradients = call(params)
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
  chosen = []
  for b, t in np.ndindex(BATCH, TIME):
    weights, best = weights_of(p["router"], np.asarray(INPUTS[b, t], np.float64))
    chosen.append(best)
    np.testing.assert_allclose(sites["router/weights"][b, t], weights, atol=1e-6)
    expected = p["output"]["bias"] + sum(
      weights[i] * (np.asarray(sites["heads"][b, t, i]) @ p["output"]["kernel"][i])
      for i in range(HEADS)
    )
    np.testing.assert_allclose(made[b, t], expected, rtol=1e-4, atol=1e-4)
  assert len({tuple(sorted(best)) for best in chosen}) > 1
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
  assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients["params"]["router"]))

  # The balance counts the heads that are chosen, and their softmax weight among themselves.
  site = "layer_0/self/router/weights"
  real = jax.device_put(np.arange(TIME) < np.array([[TIME], [2]]))
  scores = sites["router/scores"]
  given = {site.replace("weights", "scores"): scores}
  found = jax.jit(lambda g: terms([Routers("head", (site,), CONFIG)], g, lambda _: real))(given)
  load, mean = np.zeros(HEADS - SHARED), np.zeros(HEADS - SHARED)
  for (b, t), best in zip(np.ndindex(BATCH, TIME), chosen, strict=True):
    if real[b, t]:
      load[np.array(best) - SHARED] += 1 / (KEEP * real.sum())
      mean += softmax(np.asarray(scores[b, t, SHARED:]) / CONFIG.temperature) / real.sum()
  value = (HEADS - SHARED) * float(load @ mean)
  np.testing.assert_allclose(found["head_balance"].value(), value, rtol=1e-5)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: CompetitionConfig(shared_heads=-1), ["shared_heads is -1", "at least 0"]),
    (lambda: CONFIG.kept(SHARED), ["shared_heads is 2", "below 2"]),
    (lambda: dataclasses.replace(CONFIG, keep=5).kept(HEADS), ["keep is 5", "4 heads besides"]),
    (lambda: ExpertsConfig(competition=CONFIG), ["shared_heads is 2", "heads alone"]),
  ],
)
def test_numbers_of_heads_that_do_not_fit_are_refused(make, words):
  with pytest.raises(UserError) as error:
    make()
  assert all(word in str(error.value) for word in words), error.value
