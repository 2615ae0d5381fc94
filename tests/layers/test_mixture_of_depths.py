"""Layers that tokens may pass by, against the plain layer on the other tokens alone."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.core.losses import objective
from compmod_jax.layers.block import Block, Inside
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.layers.mixture_of_depths import DepthRouterConfig, DepthRouters
from compmod_jax.mechanisms.competition import losses
from compmod_jax.models.encoder import EncoderConfig

BATCH, TIME, DIM = 3, 6, 8
INPUTS = jax.device_put(np.random.default_rng(0).normal(size=(BATCH, TIME, DIM)).astype("f"))
CONFIG = EncoderConfig(
  encoder_layers=2, dim=DIM, heads=2, ffn_dim=12, max_length=8, positions="none", dropout=0.0
)
ROUTED = dataclasses.replace(CONFIG, depth_layers=("encoder_1",))
SITE = "depth/scores"


@pytest.mark.parametrize(("causal", "norm"), [(True, "pre"), (False, "post")])
def test_tokens_that_pass_by_stay_as_they_are_and_are_not_read(causal, norm):
  block, plain = (
    Block(CONFIG, norm, "encoder_self", inside=Inside(depth=depth))
    for depth in (DepthRouterConfig(), None)
  )
  params = jax.device_put(drawn(block.init, INPUTS, spread=0.5))
  ctx = Context(mask=AttentionMask(causal=causal))

  @jax.jit
  def call(params):
    def total(params):
      (made, _), sites = run(block.apply, params, INPUTS, ctx=ctx, capture=[SITE])
      return (made**2).sum(), (made, sites[SITE])

    return jax.grad(total, has_aux=True)(params)

  gradients, (made, scores) = jax.device_get(call(params))
  p: Any = dict(params["params"])
  router = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p.pop("depth"))
  x = np.asarray(INPUTS)
  np.testing.assert_allclose(scores, x @ router["kernel"][:, 0] + router["bias"], rtol=1e-4)
  through = [np.flatnonzero(scores[b] > 0) for b in range(BATCH)]
  counts = [len(tokens) for tokens in through]
  # The others are left out, so that those that go through stand side by side, in front of padding.
  alone, valid = np.zeros_like(x), np.arange(TIME) < np.array(counts)[:, None]
  alone[valid] = np.concatenate([x[b, tokens] for b, tokens in enumerate(through)])
  mask = AttentionMask(causal=causal, valid=jax.device_put(valid))
  whole = jax.jit(lambda p, x: plain.apply({"params": p}, x, ctx=Context(mask=mask))[0])(p, alone)
  for b, tokens in enumerate(through):
    expected = x[b].astype(np.float64)
    for row, t in enumerate(tokens):
      expected[t] += (whole[b, row] - x[b, t]) / (1 + np.exp(-scores[b, t]))
    np.testing.assert_allclose(made[b], expected, rtol=1e-4, atol=1e-5)
    others = np.setdiff1d(np.arange(TIME), tokens)
    np.testing.assert_array_equal(made[b, others], x[b, others])
  assert 0 < min(counts) <= max(counts) < TIME
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
  assert gradients["params"]["depth"]["kernel"].any()


def test_a_sequence_all_of_which_passes_by_has_finite_gradients():
  block = Block(CONFIG, "pre", "encoder_self", inside=Inside(depth=DepthRouterConfig()))
  params = jax.device_put(drawn(block.init, INPUTS, spread=0.5))
  params["params"]["depth"]["bias"] = np.float32([-100])

  @jax.jit
  @jax.value_and_grad
  def call(params):
    return ((block.apply(params, INPUTS)[0] - INPUTS) ** 2).sum()

  value, gradients = call(params)
  assert value == 0
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_the_loss_leads_to_the_share_of_every_sequence():
  """Against loops; descent on scores by themselves ends with as many as there are to be."""
  sites = ("encoder/layer_0/depth/scores", "encoder/layer_1/depth/scores")
  real = np.arange(TIME) < np.array([[TIME], [4], [1]])
  random = np.random.default_rng(1)
  scores = {site: random.normal(size=(BATCH, TIME)).astype(np.float32) for site in sites}
  routers = [DepthRouters(sites, DepthRouterConfig(0.5, 0.3))]
  assert losses.objective(routers) == {"depth": 0.3}
  assert losses.captured_sites(routers) == set(sites)
  mask = jax.device_put(real)

  @jax.jit
  @jax.value_and_grad
  def call(scores):
    return objective(losses.terms(routers, scores, lambda _: mask))

  expected, goals = 0.0, [3, 2, 1]
  for site in sites:
    for b, goal in enumerate(goals):
      r = scores[site][b, real[b]].astype(np.float64)
      best = sorted(range(len(r)), key=lambda t: -r[t])[:goal]
      for t, one in enumerate(r):
        expected += np.log1p(np.exp(-one if t in best else one)) / real.sum()
  value, _ = call(scores)
  np.testing.assert_allclose(value, 0.3 * expected, rtol=1e-5)
  for _ in range(60):
    _, slope = call(scores)
    scores = jax.tree.map(lambda s, g: s - 5 * g, scores, slope)
  for site in sites:
    assert ((np.asarray(scores[site]) > 0) & real).sum(axis=1).tolist() == goals


def test_a_model_has_routers_in_the_layers_that_are_named_and_none_without():
  tokens = jax.device_put(np.array([[4, 5, 6, 7], [7, 4, 0, 0]], np.int32))
  shapes = [
    jax.eval_shape(config.encoder(9, 0).init, jax.random.key(0), tokens)["params"]
    for config in (CONFIG, ROUTED)
  ]
  assert "depth" not in shapes[0]["encoder_1"]
  assert "depth" not in shapes[1]["encoder_0"]
  assert shapes[1]["encoder_1"].pop("depth")["kernel"].value.shape == (DIM, 1)
  assert jax.tree.structure(shapes[0]) == jax.tree.structure(shapes[1])
  assert losses.objective(CONFIG.routers()) == {}
  assert losses.captured_sites(ROUTED.routers()) == {"encoder/layer_1/depth/scores"}
  assert ROUTED.plain() == CONFIG


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: DepthRouterConfig(capacity=0.0), ["capacity is 0.0", "over 0"]),
    (lambda: DepthRouterConfig(balance=-1.0), ["balance is -1.0", "at least 0"]),
    (lambda: dataclasses.replace(CONFIG, depth_layers=("decoder",)), ["depth_layers", "decoder"]),
    (lambda: dataclasses.replace(ROUTED, shared_layers=1), ["depth_layers", "whole stacks"]),
  ],
)
def test_options_that_do_not_fit_are_refused(make, words):
  with pytest.raises(UserError) as error:
    make()
  assert all(word in str(error.value) for word in words), error.value
