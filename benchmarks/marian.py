"""Our Transformer as Hugging Face's Marian, and random weights with peaked distributions."""

from typing import Any

import jax
import numpy as np
import torch
from transformers import MarianConfig, MarianMTModel

from compmod_jax.data.tokenizers import BOS, EOS, PAD
from compmod_jax.layers.embedding import sinusoids
from compmod_jax.models.transformer import TransformerConfig


def peaked(params: Any, config: TransformerConfig, *, spread: float, stop: float) -> Any:
  """Parameters whose output distributions are peaked and end sentences.

  Args:
    params: random parameters of a post-norm model whose output table is the decoder's embedding.
    config: the model's sizes.
    spread: standard deviation of the logits; about 1 in a fresh model.
    stop: what the end token's logit gets on top.
  """
  last = f"decoder_{config.decoder_layers - 1}"
  end = np.asarray(params["decoder_embedding"]["table"])[EOS]
  params = jax.tree.map(np.array, params)
  norm = params[last]["ffn_residual"]["scale"]
  norm["scale"] = norm["scale"] * np.float32(spread)
  norm["bias"] = norm["bias"] + np.float32(stop) * end / (end @ end)
  return params


def to_marian(params: Any, c: TransformerConfig, source_vocab: int, target_vocab: int) -> Any:
  """A `MarianMTModel` with our parameters; post-norm, sinusoidal, output tied to the decoder."""
  params = jax.tree.map(np.asarray, params)
  config = MarianConfig(
    vocab_size=source_vocab,
    decoder_vocab_size=target_vocab,
    share_encoder_decoder_embeddings=False,
    max_position_embeddings=c.max_length,
    encoder_layers=c.encoder_layers,
    decoder_layers=c.decoder_layers,
    encoder_attention_heads=c.heads,
    decoder_attention_heads=c.heads,
    encoder_ffn_dim=c.ffn_dim,
    decoder_ffn_dim=c.ffn_dim,
    d_model=c.dim,
    activation_function=c.activation,
    scale_embedding=True,
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    pad_token_id=PAD,
    bos_token_id=BOS,
    eos_token_id=EOS,
    decoder_start_token_id=BOS,
    forced_eos_token_id=None,
  )
  model = MarianMTModel(config).eval()
  state = _state(params, c)
  missing, unexpected = model.load_state_dict(
    {name: torch.tensor(np.array(value)) for name, value in state.items()}, strict=False
  )
  # Tied or constant entries: the output layer is the decoder's table, its bias zero.
  rest = [name for name in missing if name not in ("final_logits_bias", "lm_head.weight")]
  if rest or unexpected:
    raise RuntimeError(f"weights that do not match: missing {rest}, unexpected {unexpected}")
  return model


def _state(params: Any, c: TransformerConfig) -> dict[str, np.ndarray]:
  """Our parameters under Marian's names."""
  found: dict[str, np.ndarray] = {}
  for side, layers in (("encoder", c.encoder_layers), ("decoder", c.decoder_layers)):
    at = f"model.{side}"
    found[f"{at}.embed_tokens.weight"] = params[f"{side}_embedding"]["table"]
    found[f"{at}.embed_positions.weight"] = sinusoids(c.max_length, c.dim)
    for i in range(layers):
      ours, name = params[f"{side}_{i}"], f"{at}.layers.{i}"
      found |= _attention(ours["self_attention"], f"{name}.self_attn")
      found |= _norm(ours["self_residual"], f"{name}.self_attn_layer_norm")
      if side == "decoder":
        found |= _attention(ours["cross_attention"], f"{name}.encoder_attn")
        found |= _norm(ours["cross_residual"], f"{name}.encoder_attn_layer_norm")
      for mine, theirs in (("up", "fc1"), ("down", "fc2")):
        found[f"{name}.{theirs}.weight"] = ours["ffn"][mine]["kernel"].T
        found[f"{name}.{theirs}.bias"] = ours["ffn"][mine]["bias"]
      found |= _norm(ours["ffn_residual"], f"{name}.final_layer_norm")
  return found


def _norm(residual: Any, name: str) -> dict[str, np.ndarray]:
  return {
    f"{name}.weight": residual["scale"]["scale"],
    f"{name}.bias": residual["scale"]["bias"],
  }


def _attention(ours: Any, name: str) -> dict[str, np.ndarray]:
  output = ours["output"]["kernel"]
  found = {
    f"{name}.out_proj.weight": output.reshape(-1, output.shape[-1]).T,
    f"{name}.out_proj.bias": ours["output"]["bias"],
  }
  into = (("query_key_value", "qkv"), ("query", "q"), ("key_value", "kv"))
  for mine, letters in into:
    if mine not in ours:
      continue
    kernel, bias = ours[mine]["kernel"], ours[mine]["bias"]  # [embed, heads, projections, head_dim]
    for i, letter in enumerate(letters):
      found[f"{name}.{letter}_proj.weight"] = kernel[:, :, i].reshape(kernel.shape[0], -1).T
      found[f"{name}.{letter}_proj.bias"] = bias[:, i].reshape(-1)
  return found
