"""The recipe's Transformer in PyTorch, as fast as eager and compiled PyTorch let us write it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compmod_jax.layers.embedding import sinusoids
from compmod_jax.models.transformer import TransformerConfig

PAD = 0


class Attention(nn.Module):
  """One product for the projections of one input, and PyTorch's fused attention."""

  def __init__(self, dim: int, heads: int, cross: bool):
    super().__init__()
    self.heads, self.cross = heads, cross
    self.query = nn.Linear(dim, dim if cross else 3 * dim)
    self.key_value = nn.Linear(dim, 2 * dim) if cross else None
    self.output = nn.Linear(dim, dim)

  def forward(self, x: Tensor, memory: Tensor | None, mask: Tensor | None, causal: bool) -> Tensor:
    if self.key_value is None:
      query, key, value = self._split(self.query(x), 3)
    else:
      (query,), (key, value) = self._split(self.query(x), 1), self._split(self.key_value(memory), 2)
    heads = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return self.output(heads.transpose(1, 2).flatten(2))

  def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
    batch, time, width = x.shape
    x = x.view(batch, time, parts, self.heads, width // parts // self.heads)
    return x.permute(2, 0, 3, 1, 4).unbind(0)


class Layer(nn.Module):
  """An encoder's or a decoder's layer, in pre- or post-norm order."""

  def __init__(self, c: TransformerConfig, decoder: bool):
    super().__init__()
    self.pre, self.decoder, self.rate = c.norm == "pre", decoder, c.dropout
    self.self_attention = Attention(c.dim, c.heads, cross=False)
    self.self_norm = nn.LayerNorm(c.dim)
    if decoder:
      self.cross_attention = Attention(c.dim, c.heads, cross=True)
      self.cross_norm = nn.LayerNorm(c.dim)
    self.up, self.down = nn.Linear(c.dim, c.ffn_dim), nn.Linear(c.ffn_dim, c.dim)
    self.ffn_norm = nn.LayerNorm(c.dim)

  def forward(
    self, x: Tensor, mask: Tensor | None, memory: Tensor | None, memory_mask: Tensor | None
  ) -> Tensor:
    def self_attention(y: Tensor) -> Tensor:
      return self.self_attention(y, None, mask, self.decoder)

    x = self._residual(x, self.self_norm, self_attention)
    if self.decoder:

      def cross_attention(y: Tensor) -> Tensor:
        return self.cross_attention(y, memory, memory_mask, False)

      x = self._residual(x, self.cross_norm, cross_attention)
    return self._residual(x, self.ffn_norm, lambda y: self.down(F.relu(self.up(y))))

  def _residual(self, x: Tensor, norm: nn.LayerNorm, inner: Callable[[Tensor], Tensor]) -> Tensor:
    update = F.dropout(inner(norm(x) if self.pre else x), self.rate, self.training)
    return x + update if self.pre else norm(x + update)


class Transformer(nn.Module):
  """Encoder and decoder; the output layer is the decoder's embedding table."""

  def __init__(self, c: TransformerConfig, source_vocab: int, target_vocab: int):
    super().__init__()
    self.config = c
    self.source = nn.Embedding(source_vocab, c.dim)
    self.target = nn.Embedding(target_vocab, c.dim)
    for table in (self.source, self.target):
      nn.init.normal_(table.weight, std=c.dim**-0.5)
    self.register_buffer("positions", torch.from_numpy(sinusoids(c.max_length, c.dim)))
    self.encoder = nn.ModuleList(Layer(c, False) for _ in range(c.encoder_layers))
    self.decoder = nn.ModuleList(Layer(c, True) for _ in range(c.decoder_layers))
    if c.norm == "pre":
      self.encoder_norm, self.decoder_norm = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)

  def forward(self, source: Tensor, target: Tensor) -> Tensor:
    """Logits [batch, time, vocab] of the token after each of `target` (shifted right)."""
    mask = (source != PAD)[:, None, None, :]
    x = self._embed(self.source, source)
    for layer in self.encoder:
      x = layer(x, mask, None, None)
    memory = self.encoder_norm(x) if self.config.norm == "pre" else x
    x = self._embed(self.target, target)
    for layer in self.decoder:
      x = layer(x, None, memory, mask)
    x = self.decoder_norm(x) if self.config.norm == "pre" else x
    return F.linear(x, self.target.weight)

  def _embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
    x = table(tokens) * math.sqrt(self.config.dim) + self.positions[: tokens.shape[1]]
    return F.dropout(x, self.config.dropout, self.training)


def copy_params(model: Transformer, params: Any) -> None:
  """Gives the model our parameters."""

  def put(target: Tensor, value: Any) -> None:
    with torch.no_grad():
      target.copy_(torch.from_numpy(np.array(value)))

  def linear(target: nn.Linear, p: Any) -> None:
    kernel, bias = np.asarray(p["kernel"]), np.asarray(p["bias"])
    if bias.ndim == 3:  # [heads, projections, head_dim]
      kernel, bias = np.swapaxes(kernel, 1, 2), np.swapaxes(bias, 0, 1)
    put(target.weight, kernel.reshape(target.in_features, target.out_features).T)
    put(target.bias, bias.reshape(-1))

  def norm(target: nn.LayerNorm, p: Any) -> None:
    put(target.weight, p["scale"])
    put(target.bias, p["bias"])

  put(model.source.weight, params["encoder_embedding"]["table"])
  put(model.target.weight, params["decoder_embedding"]["table"])
  for side, layers in (("encoder", model.encoder), ("decoder", model.decoder)):
    for i, layer in enumerate(layers):
      p = params[f"{side}_{i}"]
      linear(layer.self_attention.query, p["self_attention"]["query_key_value"])
      linear(layer.self_attention.output, p["self_attention"]["output"])
      norm(layer.self_norm, p["self_residual"]["scale"])
      if side == "decoder":
        linear(layer.cross_attention.query, p["cross_attention"]["query"])
        linear(layer.cross_attention.key_value, p["cross_attention"]["key_value"])
        linear(layer.cross_attention.output, p["cross_attention"]["output"])
        norm(layer.cross_norm, p["cross_residual"]["scale"])
      linear(layer.up, p["ffn"]["up"])
      linear(layer.down, p["ffn"]["down"])
      norm(layer.ffn_norm, p["ffn_residual"]["scale"])
  if model.config.norm == "pre":
    norm(model.encoder_norm, params["encoder_norm"])
    norm(model.decoder_norm, params["decoder_norm"])
