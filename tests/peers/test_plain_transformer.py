"""The plain Transformer equals PyTorch's layers on copied random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from torch_transformer import DIM, FFN, HEADS, LAYERS, VOCAB, Peer, to_torch, torch

from compmod_jax.core.losses import cross_entropy
from compmod_jax.data.tokenizers import BOS
from compmod_jax.models.transformer import Transformer, TransformerConfig, shift_right

pytestmark = pytest.mark.peers

SMOOTHING = 0.1


def batch(source_length, target_length, seed):
  """Three pairs of different lengths, padded; no row is empty."""
  random = np.random.default_rng(seed)
  source = random.integers(4, VOCAB, (3, source_length))
  target = random.integers(4, VOCAB, (3, target_length))
  for row in (1, 2):
    source[row, max(1, source_length - 2 * row) :] = 0
    target[row, max(1, target_length - row) :] = 0
  return source, target


@pytest.fixture(scope="module", params=["post", "pre"])
def both(request):
  config = TransformerConfig(
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    dim=DIM,
    heads=HEADS,
    ffn_dim=FFN,
    norm=request.param,
  )
  ours = Transformer(config, VOCAB, VOCAB)
  tokens = jnp.ones((1, 2), jnp.int32)
  params = nn.unbox(jax.jit(ours.init)(jax.random.key(1), tokens, tokens))["params"]
  # Biases and norms start at 0 and 1; move them, so that a swapped one shows.
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(2), len(leaves))
  moved = [p + 0.1 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys, strict=True)]
  params = jax.tree.unflatten(tree, moved)
  peer = Peer(request.param)
  peer.load_state_dict({k: torch.tensor(v) for k, v in to_torch(params).items()})
  return ours, params, peer


LENGTHS = [(1, 1), (5, 7), (12, 4), (17, 19)]


@pytest.mark.parametrize(("source_length", "target_length"), LENGTHS)
def test_logits_equal_pytorch_at_every_real_position(both, source_length, target_length):
  ours, params, peer = both
  source, target = batch(source_length, target_length, seed=source_length)
  shifted = np.asarray(shift_right(jnp.asarray(target), BOS))
  mine = jax.jit(ours.apply)({"params": params}, jnp.asarray(source), jnp.asarray(shifted))
  theirs = peer(torch.tensor(source), torch.tensor(shifted)).detach().numpy()
  real = target != 0
  np.testing.assert_allclose(np.asarray(mine)[real], theirs[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("source_length", "target_length"), LENGTHS[1:])
def test_smoothed_loss_and_every_gradient_equal_pytorch(both, source_length, target_length):
  ours, params, peer = both
  source, target = batch(source_length, target_length, seed=source_length)
  shifted = np.asarray(shift_right(jnp.asarray(target), BOS))

  def mean_loss(params):
    logits = ours.apply({"params": params}, jnp.asarray(source), jnp.asarray(shifted))
    labels = jnp.asarray(target)
    losses = cross_entropy(logits, labels, labels != 0, label_smoothing=SMOOTHING)
    return losses.smoothed / losses.count

  value, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
  criterion = torch.nn.CrossEntropyLoss(ignore_index=0, label_smoothing=SMOOTHING)
  peer.zero_grad()
  logits = peer(torch.tensor(source), torch.tensor(shifted))
  theirs = criterion(logits.flatten(0, 1), torch.tensor(target).flatten())
  theirs.backward()
  assert float(value) == pytest.approx(theirs.item(), rel=1e-5)
  expected = {name: p.grad.numpy() for name, p in peer.named_parameters()}
  found = to_torch(grads)
  assert found.keys() == expected.keys()
  for name, gradient in expected.items():
    np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-5, err_msg=name)
