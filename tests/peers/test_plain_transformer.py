"""The plain Transformer equals PyTorch's layers on copied random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from compmod_jax.layers.embedding import sinusoids
from compmod_jax.losses import cross_entropy
from compmod_jax.models.transformer import Transformer, TransformerConfig
from compmod_jax.tasks.translation import shift_right

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

DIM, HEADS, FFN, VOCAB, LAYERS, SMOOTHING = 32, 4, 48, 23, 2, 0.1


class Peer(torch.nn.Module):
  """Encoder and decoder made of PyTorch's own layers, embeddings as in the recipe."""

  def __init__(self, norm: str):
    super().__init__()
    options = {
      "dropout": 0.0,
      "activation": "relu",
      "batch_first": True,
      "norm_first": norm == "pre",
    }
    encoder = torch.nn.TransformerEncoderLayer(DIM, HEADS, FFN, **options)
    decoder = torch.nn.TransformerDecoderLayer(DIM, HEADS, FFN, **options)
    ends = [torch.nn.LayerNorm(DIM) if norm == "pre" else None for _ in range(2)]
    self.source = torch.nn.Embedding(VOCAB, DIM)
    self.target = torch.nn.Embedding(VOCAB, DIM)
    self.encoder = torch.nn.TransformerEncoder(
      encoder, LAYERS, norm=ends[0], enable_nested_tensor=False
    )
    self.decoder = torch.nn.TransformerDecoder(decoder, LAYERS, norm=ends[1])

  def forward(self, source, target):
    def embed(table, tokens):
      places = torch.tensor(sinusoids(tokens.shape[1], DIM))
      return table(tokens) * DIM**0.5 + places

    time = target.shape[1]
    causal = torch.triu(torch.ones(time, time, dtype=torch.bool), 1)
    padding = source == 0
    memory = self.encoder(embed(self.source, source), src_key_padding_mask=padding)
    hidden = self.decoder(
      embed(self.target, target), memory, tgt_mask=causal, memory_key_padding_mask=padding
    )
    return hidden @ self.target.weight.T


def split(into_heads):
  """Weights [D, D] and biases [D] of each projection, from a module that makes several at once."""
  kernel, bias = into_heads["kernel"], into_heads["bias"]
  axis = 1
  parts = zip(np.moveaxis(kernel, axis + 1, 0), np.moveaxis(bias, axis, 0), strict=True)
  return [(w.reshape(DIM, DIM), b.reshape(DIM)) for w, b in parts]


def attention(ours, name):
  if "query_key_value" in ours:
    parts = split(ours["query_key_value"])
  else:
    parts = split(ours["query"]) + split(ours["key_value"])
  return {
    f"{name}.in_proj_weight": np.concatenate([w.T for w, _ in parts]),
    f"{name}.in_proj_bias": np.concatenate([b for _, b in parts]),
    f"{name}.out_proj.weight": ours["output"]["kernel"].reshape(DIM, DIM).T,
    f"{name}.out_proj.bias": ours["output"]["bias"],
  }


def norm(ours, name):
  return {f"{name}.weight": ours["scale"], f"{name}.bias": ours["bias"]}


def to_torch(params):
  """Our parameters (or their gradients) under PyTorch's names."""
  params = jax.tree.map(np.asarray, params)
  found = {
    "source.weight": params["encoder_embedding"]["table"],
    "target.weight": params["decoder_embedding"]["table"],
  }
  for side in ("encoder", "decoder"):
    for i in range(LAYERS):
      ours, name = params[f"{side}_{i}"], f"{side}.layers.{i}"
      found |= attention(ours["self_attention"], f"{name}.self_attn")
      found |= norm(ours["self_residual"]["scale"], f"{name}.norm1")
      last = "norm2"
      if side == "decoder":
        found |= attention(ours["cross_attention"], f"{name}.multihead_attn")
        found |= norm(ours["cross_residual"]["scale"], f"{name}.norm2")
        last = "norm3"
      found |= norm(ours["ffn_residual"]["scale"], f"{name}.{last}")
      for theirs, mine in (("linear1", "up"), ("linear2", "down")):
        found[f"{name}.{theirs}.weight"] = ours["ffn"][mine]["kernel"].T
        found[f"{name}.{theirs}.bias"] = ours["ffn"][mine]["bias"]
    if f"{side}_norm" in params:
      found |= norm(params[f"{side}_norm"], f"{side}.norm")
  return found


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
  shifted = np.asarray(shift_right(jnp.asarray(target)))
  mine = jax.jit(ours.apply)({"params": params}, jnp.asarray(source), jnp.asarray(shifted))
  theirs = peer(torch.tensor(source), torch.tensor(shifted)).detach().numpy()
  real = target != 0
  np.testing.assert_allclose(np.asarray(mine)[real], theirs[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("source_length", "target_length"), LENGTHS[1:])
def test_smoothed_loss_and_every_gradient_equal_pytorch(both, source_length, target_length):
  ours, params, peer = both
  source, target = batch(source_length, target_length, seed=source_length)
  shifted = np.asarray(shift_right(jnp.asarray(target)))

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
