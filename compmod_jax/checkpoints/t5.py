"""T5's checkpoints of Hugging Face, in and out: the first version's layout, and version 1.1's.

Ours and theirs have the same token numbers. Their embeddings are ours times sqrt(dim), by which
`Embedding` scales what it reads. The decoder begins with their padding token, 0.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from compmod_jax.checkpoints.huggingface_folder import (
  ACTIVATIONS,
  CONFIG,
  THEIR_ACTIVATIONS,
  Entry,
  check_shapes,
  read_config,
  read_entries,
  read_weights,
  write_folder,
)
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.models.t5 import t5
from compmod_jax.models.transformer import TransformerConfig

KIND = "t5"
_GATED = "gated-"
_HEAD, _SHARED = "lm_head.weight", "shared.weight"
# Copies of the embeddings, and a table that no layer reads.
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


class T5(NamedTuple):
  """A T5 model.

  Attributes:
    config: sizes and options.
    params: parameters of `Transformer`, float32.
    vocab: number of tokens, of source and target.
    pad: the token that marks padding, with which the decoder begins.
  """

  config: TransformerConfig
  params: dict[str, Any]
  vocab: int
  pad: int = 0


def read_t5(folder: str | Path) -> T5:
  """Reads a T5 model of either version.

  Raises:
    UserError: a file is missing or damaged, tensors do not fit the sizes of the configuration, or
      the model is of another kind or has parts that the Transformer does not have.
  """
  folder = Path(folder)
  given, tensors = read_config(folder, (KIND,)), read_weights(folder)
  # The first version scales the decoder's output before it meets the embeddings. Newer versions of
  # their library say so in a field of its own, older ones by whether embeddings are tied.
  scaled = given.get("scale_decoder_outputs", given["tie_word_embeddings"])
  # Where several are one tensor, a folder may hold it under any of their names.
  names = [name for name in (_SHARED, *_COPIES, _HEAD) if name in tensors]
  if names:
    tensors.setdefault(_SHARED, tensors[names[0]])
  check(_SHARED in tensors, f"{folder} has no tensor {_SHARED}; it is no checkpoint of T5.")
  for name in _COPIES:
    check(
      name not in tensors or np.array_equal(tensors[name], tensors[_SHARED]),
      f"{folder}: {name} differs from {_SHARED}; encoder and decoder of T5 read one table.",
    )
  head = tensors.setdefault(_HEAD, tensors[_SHARED])
  tied = bool(scaled) and np.array_equal(head, tensors[_SHARED])
  config = _config(given, tied, folder)
  params = read_entries(
    folder,
    tensors,
    _entries(config, scaled=bool(scaled)),
    what="T5",
    ignored=lambda name: name in (*_COPIES, _UNREAD) or (tied and name == _HEAD),
  )
  pad, start = given["pad_token_id"], given.get("decoder_start_token_id")
  check(
    isinstance(pad, int) and start in (None, pad),
    f"{folder / CONFIG} has pad_token_id = {pad} and decoder_start_token_id = {start}; only models"
    " whose decoder begins with a padding token can be imported.",
  )
  tokens = jax.ShapeDtypeStruct((1, 1), np.int32)
  check_shapes(folder, params, config.seq2seq(len(head), len(head), pad).init, tokens, tokens)
  return T5(config, unflatten_dict(params, sep="/"), len(head), pad)


def write_t5(folder: str | Path, model: T5, *, eos: int = 1) -> None:
  """Writes a folder that `transformers` opens as `T5ForConditionalGeneration`.

  Args:
    folder: where; made if it is not there.
    model: the model; its output is scaled, as in the first version, if it is tied.
    eos: the end token, for the configuration.

  Raises:
    UserError: the model has what their layout cannot hold, or the folder cannot be written.
  """
  c, wanted = model.config, t5()
  c.check_layout("T5")
  plain = not c.compete and not c.expert_layers and not c.gated_heads
  check(
    plain and c.share_embeddings in ("all", "inputs"),
    f"model has compete = {c.compete}, expert_layers = {c.expert_layers}, gated_heads ="
    f" {c.gated_heads} and share_embeddings = {c.share_embeddings!r}; T5 has no competition, and"
    " one table for both inputs (all, inputs). Export a model like that.",
  )
  for field in ("norm", "norm_kind", "biases", "scale_logits", "positions", "embedding_scale"):
    value, its = getattr(c, field), getattr(wanted, field)
    check(
      value == its,
      f"model.{field} is {value!r}, but T5's is {its!r}; export a model that has all of T5's"
      " options, as those of compmod_jax.models.t5 have.",
    )
  check(
    not c.gated_ffn or c.activation != "gelu",
    "model.gated_ffn is set and model.activation is 'gelu'; Hugging Face reads a gated gelu as the"
    " approximation by tanh. Train with activation = gelu_tanh to export.",
  )
  tied = c.share_embeddings == "all"
  write_folder(folder, _theirs(model, tied, eos), model.params, _entries(c, scaled=tied))


def _config(given: Mapping[str, Any], tied: bool, folder: Path) -> TransformerConfig:
  forward = str(given["feed_forward_proj"])
  gated, name = forward.startswith(_GATED), forward.removeprefix(_GATED)
  check_choice(f"feed_forward_proj in {folder / CONFIG}", name, ACTIVATIONS)
  try:
    layers = given["num_layers"]
    return t5(
      encoder_layers=layers,
      decoder_layers=given.get("num_decoder_layers") or layers,
      dim=given["d_model"],
      heads=given["num_heads"],
      head_dim=given["d_kv"],
      ffn_dim=given["d_ff"],
      # Theirs is the approximation wherever it is gated.
      activation="gelu_tanh" if forward == "gated-gelu" else ACTIVATIONS[name],
      gated_ffn=gated,
      share_embeddings="all" if tied else "inputs",
      relative_buckets=given["relative_attention_num_buckets"],
      relative_distance=given["relative_attention_max_distance"],
      norm_epsilon=given["layer_norm_epsilon"],
      **dict.fromkeys(("dropout", "attention_dropout", "ffn_dropout"), given["dropout_rate"]),
    )
  except (KeyError, TypeError) as error:
    raise UserError(f"{CONFIG}: a size is missing or no number ({error}); restore it.") from error


def _entries(config: TransformerConfig, *, scaled: bool) -> Iterator[Entry]:
  """All parameters of a model.

  Args:
    config: sizes and options.
    scaled: whether their output is divided by sqrt(dim).
  """
  root = math.sqrt(config.dim)

  def times(factor: float, path: str, name: str) -> Entry:
    return Entry(path, (name,), lambda x: x * np.float32(factor), lambda x: (x / factor,))

  yield times(1 / root, "decoder_embedding/table", _SHARED)
  if config.share_embeddings == "inputs":
    yield times(1 / root if scaled else 1.0, "output_embedding/table", _HEAD)
  for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
    first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield Entry(f"{side}_bias/table", (first,))
    yield Entry(f"{side}_norm/scale", (f"{side}.final_layer_norm.weight",))
    for i in range(layers):
      yield from _layer(f"{side}_{i}", f"{side}.block.{i}.layer", side == "decoder", config)


def _layer(ours: str, theirs: str, cross: bool, config: TransformerConfig) -> Iterator[Entry]:
  attention = f"{theirs}.0.SelfAttention"
  yield _into_heads(f"{ours}/self_attention/query_key_value", attention, "qkv", config)
  yield _out_of_heads(f"{ours}/self_attention", attention, config)
  yield Entry(f"{ours}/self_residual/scale/scale", (f"{theirs}.0.layer_norm.weight",))
  if cross:
    attention = f"{theirs}.1.EncDecAttention"
    yield _into_heads(f"{ours}/cross_attention/query", attention, "q", config)
    yield _into_heads(f"{ours}/cross_attention/key_value", attention, "kv", config)
    yield _out_of_heads(f"{ours}/cross_attention", attention, config)
    yield Entry(f"{ours}/cross_residual/scale/scale", (f"{theirs}.1.layer_norm.weight",))
  last = f"{theirs}.{2 if cross else 1}"
  dense = f"{last}.DenseReluDense"
  names = {"gate": "wi_0", "up": "wi_1"} if config.gated_ffn else {"up": "wi"}
  for name, its in {**names, "down": "wo"}.items():
    yield Entry(
      f"{ours}/ffn/{name}/kernel", (f"{dense}.{its}.weight",), np.transpose, lambda x: (x.T,)
    )
  yield Entry(f"{ours}/ffn_residual/scale/scale", (f"{last}.layer_norm.weight",))


def _into_heads(ours: str, theirs: str, letters: str, config: TransformerConfig) -> Entry:
  """Projections side by side: [dim, heads, projections, head_dim]."""
  shape, dim = (config.dim, config.heads, -1), config.dim

  def split(*parts: np.ndarray) -> np.ndarray:
    return np.stack([part.T.reshape(shape) for part in parts], axis=2)

  def join(kernel: np.ndarray) -> list[np.ndarray]:
    return [kernel[:, :, i].reshape(dim, -1).T for i in range(kernel.shape[2])]

  names = tuple(f"{theirs}.{letter}.weight" for letter in letters)
  return Entry(f"{ours}/kernel", names, split, join)


def _out_of_heads(ours: str, theirs: str, config: TransformerConfig) -> Entry:
  shape, dim = (config.heads, -1, config.dim), config.dim
  return Entry(
    f"{ours}/output/kernel",
    (f"{theirs}.o.weight",),
    lambda weight: weight.T.reshape(shape),
    lambda kernel: (kernel.reshape(-1, dim).T,),
  )


def _theirs(model: T5, tied: bool, eos: int) -> dict[str, Any]:
  """Their configuration."""
  c = model.config
  return {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": KIND,
    "vocab_size": model.vocab,
    "d_model": c.dim,
    "d_kv": c.head_dim or c.dim // c.heads,
    "d_ff": c.ffn_dim,
    "num_layers": c.encoder_layers,
    "num_decoder_layers": c.decoder_layers,
    "num_heads": c.heads,
    "relative_attention_num_buckets": c.relative_buckets,
    "relative_attention_max_distance": c.relative_distance,
    "dropout_rate": c.dropout,
    "layer_norm_epsilon": c.norm_epsilon,
    "feed_forward_proj": "gated-gelu"
    if c.gated_ffn and c.activation == "gelu_tanh"
    else (_GATED if c.gated_ffn else "") + THEIR_ACTIVATIONS[c.activation],
    "tie_word_embeddings": tied,
    "pad_token_id": model.pad,
    "decoder_start_token_id": model.pad,
    "eos_token_id": eos,
  }
