"""Training steps equal PyTorch's: optimizers on given gradients, and whole steps of a model."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch_transformer import DIM, FFN, HEADS, LAYERS, VOCAB, Peer, to_torch, torch

from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.tokenizers import BOS
from compmod_jax.models.transformer import TransformerConfig, shift_right
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from compmod_jax.training.step import init_state, make_step, trainable_mask

pytestmark = pytest.mark.peers

STEPS = 6
FAST = {"learning_rate": 0.05, "warmup_steps": 3}
OPTIMIZERS = {
  "adam": OptimizerConfig(name="adam", **FAST),
  "adamw": OptimizerConfig(weight_decay=0.1, **FAST),
  "adamw, clipped": OptimizerConfig(weight_decay=0.1, clip=0.5, **FAST),
  "sgd with momentum": OptimizerConfig(name="sgd", momentum=0.9, **FAST),
}


def peer_optimizer(config, named):
  """PyTorch's, with decay on matrices alone."""
  decay = [p for _, p in named if p.ndim > 1]
  rest = [p for _, p in named if p.ndim <= 1]
  if config.name == "sgd":
    return torch.optim.SGD(decay + rest, lr=1.0, momentum=config.momentum)
  groups = [
    {"params": decay, "weight_decay": config.weight_decay},
    {"params": rest, "weight_decay": 0.0},
  ]
  return torch.optim.AdamW(groups, lr=1.0, betas=(config.b1, config.b2), eps=config.eps)


def peer_update(config, optimizer, parameters, rate):
  for group in optimizer.param_groups:
    group["lr"] = float(rate)
  if config.clip:
    torch.nn.utils.clip_grad_norm_(parameters, config.clip)
  optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_parameters_as_pytorchs_does(name):
  config = OPTIMIZERS[name]
  random = np.random.default_rng(0)
  start = {"w": random.normal(size=(5, 7)), "b": random.normal(size=7)}
  params = {k: jnp.asarray(v, jnp.float32) for k, v in start.items()}
  theirs = {k: torch.nn.Parameter(torch.tensor(np.asarray(v))) for k, v in params.items()}
  rate = learning_rate(config, 100)
  mine = make_optimizer(config, 100)
  state = mine.init(params)
  peer = peer_optimizer(config, list(theirs.items()))
  for step in range(STEPS):
    grads = {k: random.normal(size=v.shape).astype(np.float32) for k, v in start.items()}
    updates, state = mine.update(jax.tree.map(jnp.asarray, grads), state, params)
    params = jax.tree.map(jnp.add, params, updates)
    for k, parameter in theirs.items():
      parameter.grad = torch.tensor(grads[k])
    peer_update(config, peer, list(theirs.values()), rate(step))
  for k, parameter in theirs.items():
    # Torch adds 1e-6 to the norm that it clips by.
    np.testing.assert_allclose(params[k], parameter.detach().numpy(), rtol=2e-6, atol=2e-6)
    assert np.abs(np.asarray(params[k]) - start[k]).max() > 0.1


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_losses_and_gradient_norms_of_training_equal_pytorchs(norm):
  model = TransformerConfig(
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    dim=DIM,
    heads=HEADS,
    ffn_dim=FFN,
    norm=norm,
    dropout=0.0,
  )
  vocabulary = types.SimpleNamespace(vocab_size=VOCAB)
  config = TranslationConfig(batch=BatchConfig(buckets=(9,)), label_smoothing=0.1)
  task = config.build_with(model, None, vocabulary, vocabulary)
  params = nn.unbox(jax.jit(task.model.init)(jax.random.key(0)))
  peer = Peer(norm)
  peer.load_state_dict({k: torch.tensor(v) for k, v in to_torch(params).items()})

  options = OptimizerConfig(weight_decay=0.1, clip=1.0, learning_rate=3e-3, warmup_steps=3)
  optimizer, rate = make_optimizer(options, 100), learning_rate(options, 100)
  step = make_step(
    task, optimizer, rate, micro_batches=1, ema=0.0, mask=trainable_mask(params, "all")
  )
  step, state = jax.jit(step), init_state(params, (), optimizer, 0.0)
  peers = peer_optimizer(options, list(peer.named_parameters()))
  criterion = torch.nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
  random = np.random.default_rng(1)
  first = last = 0.0
  for number in range(STEPS):
    source, target = (random.integers(4, VOCAB, (4, 9)).astype(np.int32) for _ in range(2))
    source[1, 5:] = target[1, 6:] = target[2, 3:] = 0
    state, found = step(state, {"source": source, "target": target}, jax.random.key(0))
    shifted = torch.tensor(np.asarray(shift_right(jnp.asarray(target), BOS)), dtype=torch.long)
    logits = peer(torch.tensor(source, dtype=torch.long), shifted)
    loss = criterion(logits.flatten(0, 1), torch.tensor(target, dtype=torch.long).flatten())
    peers.zero_grad()
    loss.backward()
    norms = torch.sqrt(sum((p.grad**2).sum() for p in peer.parameters()))
    assert float(found["objective"]) == pytest.approx(loss.item(), rel=1e-5)
    assert float(found["gradient_norm"]) == pytest.approx(norms.item(), rel=1e-4)
    assert float(found["learning_rate"]) == pytest.approx(float(rate(number)))
    peer_update(options, peers, list(peer.parameters()), rate(number))
    first, last = first or loss.item(), loss.item()
  assert abs(last - first) > 0.05
