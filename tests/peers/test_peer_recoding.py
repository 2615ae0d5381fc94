"""The LSTM language model equals PyTorch's, and recoding equals one written with its autograd."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.lstm_lm import LstmConfig, LstmLM

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

BATCH, TIME, VOCAB, DIM, EMBED, LAYERS, SAMPLES = 3, 6, 17, 8, 7, 2, 4
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (BATCH, TIME))
TARGETS = np.random.default_rng(2).integers(0, VOCAB, (BATCH, TIME))


def ours(**recoding):
  config = LstmConfig(
    layers=LAYERS,
    dim=DIM,
    embedding_dim=EMBED,
    dropout=0.0,
    recoding=RecodingConfig(samples=SAMPLES, **recoding),
  )
  model = LstmLM(config, VOCAB)
  states = model.initial_states(BATCH)
  tokens, targets = jnp.asarray(TOKENS), jnp.asarray(TARGETS)
  variables = nn.unbox(model.init(jax.random.key(0), tokens, targets, states))
  params = jax.tree.map(lambda leaf: 2 * leaf, variables["params"])

  def loss(params):
    out = model.apply({"params": params}, tokens, targets, states)
    return jnp.mean(out.nll), out

  (_, out), grads = jax.value_and_grad(loss, has_aux=True)(params)
  return params, out, grads


def tensors(params):
  return {name: torch.tensor(np.array(value)).requires_grad_() for name, value in params.items()}


def compare(out, nll, states, grads, weights):
  np.testing.assert_allclose(out.nll, nll.detach(), rtol=1e-5, atol=1e-5)
  for ours, (h, c) in zip(out.states, states, strict=True):
    np.testing.assert_allclose(ours.h, h.detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.c, c.detach(), rtol=1e-5, atol=1e-5)
  nll.mean().backward()
  for name, gradient in grads.items():
    there = weights[name].grad
    expected = np.zeros_like(gradient) if there is None else there.numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_plain_model_equals_pytorch_lstm_forward_and_backward():
  params, out, grads = ours()
  w = tensors(params)
  lstm = torch.nn.LSTM(EMBED, DIM, LAYERS, batch_first=True)
  with torch.no_grad():
    for layer in range(LAYERS):
      getattr(lstm, f"weight_ih_l{layer}").copy_(w[f"input_{layer}"].T)
      getattr(lstm, f"weight_hh_l{layer}").copy_(w[f"recurrent_{layer}"].T)
      getattr(lstm, f"bias_ih_l{layer}").copy_(w[f"bias_{layer}"])
      getattr(lstm, f"bias_hh_l{layer}").zero_()
  hidden, (h, c) = lstm(w["embedding"][TOKENS])
  logits = hidden @ w["decoder"][0].T + w["decoder_bias"][0]
  nll = torch.nn.functional.cross_entropy(
    logits.reshape(-1, VOCAB), torch.tensor(TARGETS.reshape(-1)), reduction="none"
  ).reshape(BATCH, TIME)
  np.testing.assert_allclose(out.nll, nll.detach(), rtol=1e-5, atol=1e-5)
  nll.mean().backward()
  for layer in range(LAYERS):
    np.testing.assert_allclose(out.states[layer].h, h[layer].detach(), atol=1e-5)
    np.testing.assert_allclose(out.states[layer].c, c[layer].detach(), atol=1e-5)
    for ours_name, theirs in (("input", "weight_ih"), ("recurrent", "weight_hh")):
      expected = getattr(lstm, f"{theirs}_l{layer}").grad.T
      np.testing.assert_allclose(grads[f"{ours_name}_{layer}"], expected, atol=1e-5)
    np.testing.assert_allclose(
      grads[f"bias_{layer}"], getattr(lstm, f"bias_ih_l{layer}").grad, atol=1e-5
    )
  for name in ("embedding", "decoder", "decoder_bias"):
    np.testing.assert_allclose(grads[name], w[name].grad, atol=1e-5)


def recoded(w, signal, size, through):
  """Losses and last states of an LSTM that is recoded at every step."""
  zeros = torch.zeros(BATCH, DIM)
  states = [(zeros, zeros) for _ in range(LAYERS)]
  losses = []
  for t in range(TIME):
    x, after = w["embedding"][TOKENS[:, t]], []
    for layer, (h, c) in enumerate(states):
      a = x @ w[f"input_{layer}"] + h @ w[f"recurrent_{layer}"] + w[f"bias_{layer}"]
      i, f, g, o = a.chunk(4, dim=-1)
      c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
      x = torch.sigmoid(o) * torch.tanh(c)
      after.append((x, c))
    target = torch.tensor(TARGETS[:, t])

    def probabilities(top):
      logits = torch.einsum("bd,mvd->mbv", top, w["decoder"]) + w["decoder_bias"][:, None]
      return torch.softmax(logits, -1)

    p = probabilities(x)
    if signal in ("surprisal", "argmax", "nll"):
      token = p[0].argmax(-1) if signal == "argmax" else target
      o = p[0].gather(-1, token[:, None])[:, 0]
      delta = -torch.log(o) if signal == "nll" else o**-o - 1
    else:
      mean = p.mean(0)
      delta = -(mean * torch.log(mean)).sum(-1)
    flat = [part for pair in after for part in pair]
    grads = torch.autograd.grad(delta.sum(), flat, create_graph=through, retain_graph=True)
    grads = grads if through else [g.detach() for g in grads]
    moved = [part - size * g for part, g in zip(flat, grads, strict=True)]
    states = list(zip(moved[::2], moved[1::2], strict=True))
    if signal in ("entropy", "ensemble"):
      each = probabilities(moved[-2]).gather(-1, target[None, :, None].expand(len(p), -1, 1))
      losses.append(-torch.log(each[..., 0].mean(0)))
    else:
      losses.append(-torch.log(p[0].gather(-1, target[:, None])[:, 0]))
  return torch.stack(losses, dim=1), states


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("signal", ["surprisal", "argmax", "nll", "entropy", "ensemble"])
def test_recoding_equals_pytorch_autograd_step_by_step(signal, through):
  size = 0.8
  params, out, grads = ours(signal=signal, size=size, through=through)
  w = tensors(params)
  nll, states = recoded(w, signal, size, through)
  compare(out, nll, states, grads, w)
