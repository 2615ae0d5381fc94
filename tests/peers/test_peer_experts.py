"""Competing feed-forward networks equal an implementation of their equations in PyTorch.

Written from Kolios 2023, section 5.3.1, expert by expert, with PyTorch's own top-k and softmax.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from compmod_jax.core.intermediates import run
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.mechanisms.competition import losses
from compmod_jax.mechanisms.competition.losses import Routers
from compmod_jax.mechanisms.competition.router import CompetitionConfig

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

DIM, MLP, EXPERTS, BATCH, TIME = 12, 10, 6, 3, 7
SIZES = {"key_dim": 5, "hidden_dim": 9}
CASES = {
  "soft": (CompetitionConfig(**SIZES), "auto", "relu"),
  "soft, warm, rescaled": (
    CompetitionConfig(**SIZES, temperature=2.0, rescale=True),
    "auto",
    "gelu",
  ),
  "threshold": (CompetitionConfig(**SIZES, rule="threshold", threshold=0.15), "auto", "relu"),
  "two of six, all run": (CompetitionConfig(**SIZES, rule="top_k", keep=2), "dense", "gelu"),
  "two of six, blocks": (CompetitionConfig(**SIZES, rule="top_k", keep=2), "blocked", "gelu"),
  "two of six, ragged": (CompetitionConfig(**SIZES, rule="top_k", keep=2), "ragged", "relu"),
  "five of six": (CompetitionConfig(**SIZES, rule="top_k", keep=5), "blocked", "relu"),
}


def peer_scores(w: Any, x: Any) -> Any:
  hidden = torch.relu(x @ w["router/hidden/kernel"] + w["router/hidden/bias"])
  keys = hidden @ w["router/key/kernel"] + w["router/key/bias"]
  return keys @ w["router/signatures"].T / math.sqrt(SIZES["key_dim"])


def peer(config: CompetitionConfig, w: Any, x: Any, activation: str) -> Any:
  """The sum over experts; `w` holds our parameters as PyTorch tensors, by path."""
  scores = peer_scores(w, x) / config.temperature
  alive = torch.ones_like(scores, dtype=torch.bool)
  if config.rule == "top_k":
    best = torch.topk(scores, config.keep or EXPERTS - 1, dim=-1).indices
    alive = torch.zeros_like(alive).scatter(-1, best, True)
  if config.rule == "threshold":
    alive = torch.softmax(scores, -1) >= config.threshold
    alive = alive | (scores == scores.max(-1, keepdim=True).values)
  weights = torch.softmax(scores.masked_fill(~alive, -math.inf), -1)
  weights = weights * EXPERTS if config.rescale else weights
  phi = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}[activation]
  total = torch.zeros_like(x)
  for i in range(EXPERTS):
    hidden = phi(x @ w["up/kernel"][:, i] + w["up/bias"][i])
    total = total + weights[..., i : i + 1] * (hidden @ w["down/kernel"][i] + w["down/bias"][i])
  return total


def peer_losses(config: CompetitionConfig, scores: Any, real: Any) -> Any:
  """Load balance and z-loss over real tokens, token by token."""
  slots, weights, squares, count = torch.zeros(EXPERTS), torch.zeros(EXPERTS), 0.0, 0
  keep = config.keep if config.rule == "top_k" else 1
  for row, counts in zip(scores.reshape(-1, EXPERTS), real.reshape(-1), strict=True):
    if counts:
      slots[torch.topk(row, keep).indices] += 1
      weights = weights + torch.softmax(row / config.temperature, -1)
      squares, count = squares + torch.logsumexp(row, -1) ** 2, count + 1
  balance = EXPERTS * torch.sum(slots / slots.sum() * weights / count)
  return balance, squares / count


def assert_close(found: Any, expected: Any, what: str) -> None:
  """Equal to 1e-5 of the largest entry: sums over tokens round in another order."""
  largest = max(1.0, np.abs(expected).max())
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * largest, err_msg=what)


def drawn(layer: Experts, seed: int) -> tuple[Any, jax.Array]:
  inputs = jax.random.normal(jax.random.key(seed), (BATCH, TIME, DIM))
  shapes = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), inputs))["params"]
  random = np.random.default_rng(seed)
  draw = lambda s: jnp.asarray(0.5 * random.normal(size=s.shape), jnp.float32)  # noqa: E731
  return jax.tree.map(draw, shapes), inputs


def tensors(params: Any) -> dict[str, Any]:
  flat = flatten_dict(params, sep="/")
  return {path: torch.tensor(np.asarray(v), requires_grad=True) for path, v in flat.items()}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_the_equations_in_pytorch(case):
  config, implementation, activation = CASES[case]
  experts = ExpertsConfig(EXPERTS, competition=config, implementation=implementation)
  layer = Experts(DIM, MLP, experts, activation)
  params, inputs = drawn(layer, len(case))

  def loss(params, inputs):
    out = layer.apply({"params": params}, inputs)
    return jnp.sum(jnp.sin(out)), out

  gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (_, mine), (grads, slope) = gradient(params, inputs)
  w, x = tensors(params), torch.tensor(np.asarray(inputs), requires_grad=True)
  theirs = peer(config, w, x, activation)
  torch.sin(theirs).sum().backward()
  assert_close(mine, theirs.detach().numpy(), "output")
  assert_close(slope, x.grad.numpy(), "gradient of the input")
  for path, found in flatten_dict(grads, sep="/").items():
    assert_close(found, w[path].grad.numpy(), f"gradient of {path}")


@pytest.mark.parametrize("rule", ["soft", "top_k"])
def test_losses_of_routers_and_their_gradients_equal_pytorch(rule):
  keep = {"keep": 2} if rule == "top_k" else {}
  config = CompetitionConfig(**SIZES, rule=rule, **keep, temperature=0.8, balance=0.7, z=0.3)
  layer = Experts(DIM, MLP, ExpertsConfig(EXPERTS, competition=config))
  params, inputs = drawn(layer, 3)
  real = np.arange(TIME)[None] < np.array([7, 2, 5])[:, None]
  routers = [Routers("expert", ("router/weights",), config)]
  wanted = losses.captured_sites(routers)

  def loss(params):
    captured = run(layer.apply, {"params": params}, inputs, capture=wanted)[1]
    found = losses.terms(routers, captured, lambda site: jnp.asarray(real))
    values = found["expert_balance"].value(), found["expert_z"].value()
    return 0.7 * values[0] + 0.3 * values[1], values

  (_, mine), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  w = tensors(params)
  theirs = peer_losses(config, peer_scores(w, torch.tensor(np.asarray(inputs))), real)
  (0.7 * theirs[0] + 0.3 * theirs[1]).backward()
  for one, two in zip(mine, theirs, strict=True):
    assert_close(one, two.detach().numpy(), "value")
  for path, found in flatten_dict(grads, sep="/").items():
    expected = w[path].grad
    assert_close(found, np.zeros_like(found) if expected is None else expected.numpy(), path)
