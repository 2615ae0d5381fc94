"""Competitive attention equals an implementation of its equations in PyTorch.

Written from Kolios 2023, section 5.3.2, head by head, with PyTorch's own top-k and softmax, in
double precision.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.transformer import ATTENTION_KINDS

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

DIM, HEADS, TIME, KEYS = 24, 4, 7, 9
HEAD = DIM // HEADS
SIZES = {"key_dim": 6, "hidden_dim": 10}
RULES = {
  "soft": CompetitionConfig(**SIZES),
  "soft, rescaled": CompetitionConfig(**SIZES, rescale=True),
  "soft, unscaled scores, temperature": CompetitionConfig(**SIZES, scale=False, temperature=2.5),
  "all but the worst": CompetitionConfig(**SIZES, rule="top_k"),
  "the two best": CompetitionConfig(**SIZES, rule="top_k", keep=2),
  "threshold": CompetitionConfig(**SIZES, rule="threshold", threshold=0.25),
  "losers put out their value": CompetitionConfig(
    **SIZES, rule="top_k", keep=2, inactive="value", rescale=True
  ),
}


def weights_of(config, scores):
  """C and the surviving heads, from the scores [batch, time, heads]."""
  scores = scores / config.temperature
  alive = torch.ones_like(scores, dtype=torch.bool)
  if config.rule == "top_k":
    best = torch.topk(scores, config.keep or HEADS - 1, dim=-1).indices
    alive = torch.zeros_like(alive).scatter(-1, best, True)
  if config.rule == "threshold":
    alive = torch.softmax(scores, -1) >= config.threshold
    alive = alive | (scores == scores.max(-1, keepdim=True).values)
  return torch.softmax(scores.masked_fill(~alive, -math.inf), -1), alive


def peer(config, w, inputs, memory, visible):
  """Attention with competing heads; `w` holds our parameters as PyTorch tensors, by path."""

  def project(name, rows):
    projected = torch.einsum("btd,dhpk->pbthk", rows, w[f"{name}/kernel"])
    return projected + w[f"{name}/bias"].transpose(0, 1)[:, None, None]

  if memory is inputs:
    query, key, value = project("query_key_value", inputs)
  else:
    (query,), (key, value) = project("query", inputs), project("key_value", memory)
  hidden = torch.relu(inputs @ w["router/hidden/kernel"] + w["router/hidden/bias"])
  keys = hidden @ w["router/key/kernel"] + w["router/key/bias"]
  scores = keys @ w["router/signatures"].T
  if config.scale:
    scores = scores / math.sqrt(config.key_dim)
  weights, alive = weights_of(config, scores)
  if config.rescale:
    weights = weights * HEADS
  heads = []
  for i in range(HEADS):
    logits = query[:, :, i] @ key[:, :, i].transpose(1, 2) / math.sqrt(HEAD)
    attention = torch.softmax(logits.masked_fill(~visible, -math.inf), -1)
    out = weights[..., i : i + 1] * (attention @ value[:, :, i])
    if config.inactive == "value":
      out = torch.where(alive[..., i : i + 1], out, value[:, :, i])
    heads.append(out)
  w_o = w["output/kernel"].reshape(DIM, DIM)
  return torch.cat(heads, -1) @ w_o + w["output/bias"]


def assert_close(found, expected, what):
  """Equal to 1e-5 of the largest entry: sums over tokens round in another order."""
  largest = max(1.0, np.abs(expected).max())
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * largest, err_msg=what)


CASES = [
  (rule, kind)
  for rule in RULES
  for kind in ATTENTION_KINDS
  if not (kind == "cross" and RULES[rule].inactive == "value")
]


@pytest.mark.parametrize(("rule", "kind"), CASES)
def test_outputs_and_gradients_equal_the_equations_in_pytorch(rule, kind):
  config, cross, causal = RULES[rule], kind == "cross", kind == "decoder_self"
  module = Attention(DIM, HEADS, competition=config, cross=cross)
  keys = jax.random.split(jax.random.key(len(rule)), 4)
  inputs = jax.random.normal(keys[0], (2, TIME, DIM))
  memory = jax.random.normal(keys[1], (2, KEYS, DIM)) if cross else None
  visible = np.ones((2, TIME, KEYS if cross else TIME), bool)
  visible[1, :, 4:] = False
  mask = jnp.asarray(visible)[:, None, :1]
  visible = np.tril(visible) if causal else visible
  ctx = Context(mask=AttentionMask(causal, explicit=mask), memory_mask=mask)
  params = nn.unbox(module.init(keys[2], inputs, None, memory, ctx=ctx))["params"]
  flat, tree = jax.tree.flatten(params)
  drawn = jax.random.split(keys[3], len(flat))
  params = jax.tree.unflatten(
    tree, [p + 0.3 * jax.random.normal(k, p.shape) for p, k in zip(flat, drawn, strict=True)]
  )

  # Linear in the output: a sine of outputs that are far from zero would amplify their rounding.
  cotangent = np.random.default_rng(0).normal(size=inputs.shape)

  def loss(params, inputs):
    out, _ = module.apply({"params": params}, inputs, None, memory, ctx=ctx)
    return jnp.sum(jnp.asarray(cotangent, jnp.float32) * out), out

  grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (_, mine), (grads, input_grads) = grad(params, inputs)

  w = {
    path: torch.tensor(np.asarray(value, np.float64), requires_grad=True)
    for path, value in flatten_dict(params, sep="/").items()
  }
  x = torch.tensor(np.asarray(inputs, np.float64), requires_grad=True)
  read = torch.tensor(np.asarray(memory, np.float64)) if cross else x
  theirs = peer(config, w, x, read, torch.tensor(visible))
  (torch.tensor(cotangent.astype(np.float32)) * theirs).sum().backward()

  assert_close(mine, theirs.detach().numpy(), "output")
  assert_close(input_grads, x.grad.numpy(), "gradient of the input")
  for path, gradient in flatten_dict(grads, sep="/").items():
    assert_close(gradient, w[path].grad.numpy(), f"gradient of {path}")


def test_the_cases_reach_every_rule_and_some_heads_really_lose():
  random = torch.tensor(np.random.default_rng(0).normal(size=(2, TIME, HEADS)))
  for rule in ("all but the worst", "the two best", "threshold"):
    weights, alive = weights_of(RULES[rule], random)
    assert (~alive).any()
    assert (weights[~alive] == 0).all()
