"""A Transformer made of PyTorch's own layers, and our parameters under its names."""

import jax
import numpy as np
import pytest

from compmod_jax.layers.embedding import sinusoids

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

DIM, HEADS, FFN, VOCAB, LAYERS = 32, 4, 48, 23, 2


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
