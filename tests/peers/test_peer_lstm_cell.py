"""The LSTM cell equals PyTorch's, forward and backward, on copied random weights."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compmod_jax
from compmod_jax.layers.lstm import State

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

BATCH, TIME, EMBED, DIM = 3, 4, 5, 7
X = jax.random.normal(jax.random.key(0), (BATCH, TIME, EMBED))


def test_steps_and_every_gradient_equal_pytorch():
  cell = compmod_jax.LSTMCell(EMBED, DIM)
  start = State(*jax.random.normal(jax.random.key(1), (2, BATCH, DIM)))
  params = nn.unbox(cell.init(jax.random.key(2), X[:, 0], start))["params"]

  def loss(params, x, state):
    total = jnp.float32(0)
    for t in range(TIME):
      y, state = cell.apply({"params": params}, x[:, t], state)
      total += jnp.sum(jnp.sin(y)) / (t + 1)
    return total + jnp.sum(state.c**2), state

  value = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
  (mine, state), (of_params, of_x, of_start) = jax.jit(value)(params, X, start)

  peer = torch.nn.LSTMCell(EMBED, DIM)
  with torch.no_grad():
    peer.weight_ih.copy_(torch.tensor(np.array(params["input"]).T))
    peer.weight_hh.copy_(torch.tensor(np.array(params["recurrent"]).T))
    peer.bias_ih.copy_(torch.tensor(np.array(params["bias"])))
    peer.bias_hh.zero_()
  x, *begin = (torch.tensor(np.array(value)).requires_grad_() for value in (X, *start))
  theirs, after = 0.0, tuple(begin)
  for t in range(TIME):
    after = peer(x[:, t], after)
    theirs = theirs + torch.sin(after[0]).sum() / (t + 1)
  theirs = theirs + (after[1] ** 2).sum()
  theirs.backward()

  pairs = {
    "loss": (mine, theirs.detach()),
    "h": (state.h, after[0].detach()),
    "c": (state.c, after[1].detach()),
    "input": (of_params["input"], peer.weight_ih.grad.T),
    "recurrent": (of_params["recurrent"], peer.weight_hh.grad.T),
    "bias": (of_params["bias"], peer.bias_ih.grad),
    "x": (of_x, x.grad),
    "first h": (of_start.h, begin[0].grad),
    "first c": (of_start.c, begin[1].grad),
  }
  for name, (found, expected) in pairs.items():
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)
