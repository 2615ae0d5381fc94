"""Recurrent independent mechanisms equal a loop over PyTorch modules, forward and backward."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.peer_rims import TorchRims
from compmod_jax.mechanisms.rims import RimConfig

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

BATCH, TIME, EMBED = 3, 6, 7
TINY = RimConfig(modules=4, active=2, dim=5, input_key_dim=6, heads=2, head_dim=3, dropout=0.0)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_steps_a_sequence_and_every_gradient_equal_pytorch(kind):
  cell = dataclasses.replace(TINY, kind=kind).build(EMBED)
  x = jax.random.normal(jax.random.key(0), (BATCH, TIME, EMBED))
  start = jax.tree.map(
    lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape), cell.initial_state(BATCH)
  )
  params = nn.unbox(cell.init(jax.random.key(2), x[:, 0], start))["params"]

  def loss(params, x, start):
    y, state = cell.apply({"params": params}, x, start, method="unroll")
    weights = 1 / (1 + jnp.arange(TIME))
    return jnp.sum(jnp.sin(y) * weights[None, :, None]) + jnp.sum(state.h**2), y

  value = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
  (mine, y), (of_params, of_x, of_start) = value(params, x, start)

  peer = TorchRims(cell.config, params)
  theirs_x, h = (torch.tensor(np.array(a)).requires_grad_() for a in (x, start.h))
  c = None if start.c is None else torch.tensor(np.array(start.c)).requires_grad_()
  state, theirs, outputs = (h, c), 0.0, []
  for time in range(TIME):
    out, state = peer(theirs_x[:, time], state)
    outputs.append(out)
    theirs = theirs + torch.sin(out).sum() / (1 + time)
  theirs = theirs + (state[0] ** 2).sum()
  theirs.backward()

  np.testing.assert_allclose(y, torch.stack(outputs, 1).detach(), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(mine, theirs.detach(), rtol=1e-5)
  pairs = {name: (of_params[name], peer.weights[name].grad) for name in params}
  pairs |= {"x": (of_x, theirs_x.grad), "first h": (of_start.h, h.grad)}
  if c is not None:
    pairs["first c"] = (of_start.c, c.grad)
  for name, (found, expected) in pairs.items():
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5, err_msg=name)
