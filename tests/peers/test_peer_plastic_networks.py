"""Plastic LSTMs, modulated nonlinearities, fast weights and saliency equal PyTorch's operations on
copied weights, forward and backward."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.layers.attention import Attention
from compmod_jax.layers.basic import FeedForward
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.layers.fast_weights import FastWeights
from compmod_jax.mechanisms.plasticity import RULES, PlasticConfig
from compmod_jax.mechanisms.saliency import SaliencyNetwork, key_bias

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

BATCH, TIME, DIM, HEADS = 2, 7, 8, 2
X = np.random.default_rng(0).normal(size=(BATCH, TIME, DIM)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(BATCH, TIME, DIM)).astype(np.float32)


def drawn(module, *args, scale=0.6, **kwargs):
  """Random parameters."""
  args = jax.tree.map(jnp.asarray, args)
  shapes = nn.unbox(
    jax.eval_shape(lambda key: module.init(key, *args, **kwargs), jax.random.key(0))
  )
  random = np.random.default_rng(2)
  return jax.tree.map(
    lambda s: jnp.asarray(random.normal(0, scale, s.shape), s.dtype), shapes["params"]
  )


def as_torch(params):
  """The same parameters as PyTorch tensors that take gradients."""
  return jax.tree.map(lambda leaf: torch.tensor(np.array(leaf)).requires_grad_(), params)


def agree(ours, params, theirs, x=X):
  """Outputs, gradients by parameters, and gradients by inputs are the same.

  Args:
    ours: from parameters and inputs to outputs.
    params: of ours.
    theirs: the same in PyTorch, from tensors.
    x: inputs.
  """
  given = jnp.asarray(x)
  shape = jax.eval_shape(ours, params, given).shape
  weights = WEIGHTS if len(shape) == 3 else WEIGHTS[..., 0]

  def loss(params, x):
    out = ours(params, x)
    return jnp.sum(jnp.sin(out) * weights), out

  floating = np.issubdtype(np.asarray(x).dtype, np.floating)
  value = jax.jit(jax.value_and_grad(loss, argnums=(0, 1) if floating else (0,), has_aux=True))
  (_, out), gradients = value(params, given)
  copied, given = as_torch(params), torch.tensor(x)
  if floating:
    given.requires_grad_()
  found = theirs(copied, given)
  (torch.sin(found) * torch.tensor(weights)).sum().backward()
  np.testing.assert_allclose(out, found.detach(), rtol=1e-5, atol=1e-5)
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(gradients[0]), jax.tree.leaves(copied), strict=True
  )
  for (path, mine), its in pairs:
    expected = np.zeros(mine.shape) if its.grad is None else its.grad
    np.testing.assert_allclose(mine, expected, rtol=2e-4, atol=2e-5, err_msg=str(path))
  if floating:
    np.testing.assert_allclose(gradients[1], given.grad, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rule", RULES)
def test_a_plastic_lstm_is_a_loop_over_products(rule):
  cell = PlasticConfig("lstm", DIM, rule).build(DIM)
  state = cell.initial_state(BATCH)
  params = drawn(cell, X[:, 0], state, scale=1.0)
  params["recurrent"]["rate"] = jnp.float32(0.7)

  def ours(params, x):
    return cell.apply({"params": params}, x, state, method="unroll")[0]

  def theirs(p, x):
    r, h, c = p["recurrent"], torch.zeros(BATCH, DIM), torch.zeros(BATCH, DIM)
    hebbian = eligible = torch.zeros(BATCH, DIM, DIM)
    outputs = []
    for t in range(TIME):
      made = x[:, t] @ p["input"] + p["bias"]
      i, f, o = torch.sigmoid(made[:, : 3 * DIM] + h @ p["gates"]).chunk(3, dim=-1)
      weights = r["weights"] + r["alpha"] * hebbian
      g = torch.tanh(made[:, 3 * DIM :] + torch.bmm(h[:, None], weights)[:, 0])
      c = f * c + i * g
      new = o * torch.tanh(c)
      product = h[:, :, None] * g[:, None]
      if rule == "hebbian":
        change = r["rate"] * product
      else:
        m = torch.tanh(new @ r["modulator"] + r["modulator_bias"]) * r["per_unit"]
        change = m[:, None] * (product if rule == "simple" else eligible)
      eligible = (1 - r["rate"]) * eligible + r["rate"] * product
      hebbian, h = torch.clamp(hebbian + change, -1, 1), new
      outputs.append(h)
    return torch.stack(outputs, dim=1)

  agree(ours, params, theirs)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_modulated_feed_forward_network_is_linear_layers_with_a_modulated_nonlinearity(
  activation,
):
  module = FeedForward(DIM, 12, activation, signal_dim=3)
  function = getattr(torch.nn.functional, activation)

  def dense(p, x):
    return torch.nn.functional.linear(x, p["kernel"].T, p["bias"])

  def theirs(p, x):
    own = p["modulated"]
    z = dense(own["signal"], torch.tanh(dense(own["hidden"], x)))
    up = dense(p["up"], x)
    inner = up[..., None] * own["scale"] + own["offset"]  # [..., mlp, signal]
    return dense(p["down"], function(torch.einsum("btmk,btk->btm", inner, z)))

  agree(lambda params, x: module.apply({"params": params}, x), drawn(module, X), theirs)


@pytest.mark.parametrize("plasticity", ["hebbian", "modulated"])
def test_fast_weights_are_a_loop_over_outer_products(plasticity):
  module, ctx = FastWeights(DIM, HEADS, plasticity), Context(mask=AttentionMask(causal=True))

  def unit(rows):
    return rows / torch.sqrt((rows**2).sum(dim=-1, keepdim=True) + 1e-6)

  def theirs(p, x):
    into, out = p["into_heads"], p["out_of_heads"]
    three = torch.einsum("bte,ehpd->bthpd", x, into["kernel"]) + into["bias"]
    query, key, value = unit(three[..., 0, :]), unit(three[..., 1, :]), three[..., 2, :]
    m = torch.nn.functional.softplus(p["rate"])[:, None]
    if plasticity == "modulated":
      gate = torch.sigmoid(torch.nn.functional.linear(x, p["gate"]["kernel"].T, p["gate"]["bias"]))
      m = m * gate.reshape(value.shape)
    value = value * m
    weights, read = torch.zeros(BATCH, HEADS, DIM // HEADS, DIM // HEADS), []
    for t in range(TIME):
      decay = torch.sigmoid(p["decay"])[None, :, None, None]
      weights = decay * weights + key[:, t, :, :, None] * value[:, t, :, None]
      read.append(torch.einsum("bhd,bhde->bhe", query[:, t], weights))
    return torch.einsum("bthd,hde->bte", torch.stack(read, dim=1), out["kernel"]) + out["bias"]

  def ours(params, x):
    return module.apply({"params": params}, x, ctx=ctx)[0]

  agree(ours, drawn(module, X, ctx=ctx), theirs)


def test_attention_with_scores_of_keys_is_pytorch_s_with_a_mask_of_these_numbers():
  module = Attention(DIM, HEADS)
  scores = np.random.default_rng(3).normal(size=(BATCH, TIME)).astype(np.float32)
  scores[1, 2] = -1e9

  def ours(params, x):
    return module.apply({"params": params}, x, bias=key_bias(jnp.asarray(scores)))[0]

  def theirs(p, x):
    three = torch.einsum("bte,ehpd->pbhtd", x, p["query_key_value"]["kernel"])
    three = three + p["query_key_value"]["bias"].permute(1, 0, 2)[:, None, :, None]
    mask = torch.tensor(scores)[:, None, None]
    made = torch.nn.functional.scaled_dot_product_attention(*three, attn_mask=mask)
    return torch.einsum("bhtd,hde->bte", made, p["output"]["kernel"]) + p["output"]["bias"]

  agree(ours, drawn(module, X), theirs)


def test_the_saliency_network_is_a_convolution_over_vectors_of_tokens():
  module = SaliencyNetwork(11, 5, pad=0)
  tokens = np.random.default_rng(4).integers(1, 11, size=(BATCH, TIME))
  tokens[1, 5:] = 0

  def theirs(p, tokens):
    vectors = torch.nn.functional.embedding(tokens, p["table"]) * (tokens != 0)[..., None]
    kernel = p["hidden"]["kernel"].reshape(3, 5, 5).permute(2, 1, 0)
    hidden = torch.nn.functional.conv1d(vectors.mT, kernel, p["hidden"]["bias"], padding=1)
    return (torch.tanh(hidden).mT @ p["score"]["kernel"] + p["score"]["bias"])[..., 0]

  agree(
    lambda params, x: module.apply({"params": params}, x), drawn(module, tokens), theirs, tokens
  )
