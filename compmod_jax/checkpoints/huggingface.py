"""Masked language models of Hugging Face: RoBERTa's and BERT's checkpoints, in and out.

Their folders hold `config.json` and `model.safetensors` (or several such files and an index). Ours
and theirs have the same token numbers. What differs: positions of theirs may start after unused
rows, and they add a vector for the segment, whose first row goes into the positions where that is
the only segment here. Of BERT's checkpoints with both heads (`BertForPreTraining`), segments and
the second head are kept.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from compmod_jax.checkpoints.huggingface_folder import (
  ACTIVATIONS,
  CONFIG,
  DEFAULTS,
  THEIR_ACTIVATIONS,
  Entry,
  check_shapes,
  norm,
  read_config,
  read_entries,
  read_weights,
  write_folder,
)
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.models.encoder import Encoder, EncoderConfig

Kind = Literal["roberta", "bert"]
_SEGMENTS: dict[Kind, int] = {"roberta": 1, "bert": 2}
_HEAD: dict[Kind, str] = {"roberta": "lm_head", "bert": "cls.predictions"}
_TRANSFORM = {
  "roberta": ("dense", "layer_norm"),
  "bert": ("transform.dense", "transform.LayerNorm"),
}
_DECODER = {kind: f"{head}.decoder.weight" for kind, head in _HEAD.items()}
_NEXT = "cls.seq_relationship.weight"
# What belongs to other heads, or says nothing that the rest does not.
_IGNORED = ("pooler.", "position_ids", "cls.seq_relationship.", "decoder.bias")


class Checkpoint(NamedTuple):
  """A masked language model.

  Attributes:
    config: sizes and options.
    params: parameters of `Encoder`, float32.
    vocab: number of tokens.
    pad: the token that marks padding.
    kind: whose layout it has.
  """

  config: EncoderConfig
  params: dict[str, Any]
  vocab: int
  pad: int
  kind: Kind


def read_checkpoint(folder: str | Path) -> Checkpoint:
  """Reads a RoBERTa or BERT masked language model.

  Raises:
    UserError: a file is missing or damaged, tensors do not fit the configuration, or the model is
      of another kind or has parts that the encoder does not have.
  """
  folder = Path(folder)
  given, tensors = _read_config(folder), _read_weights(folder)
  kind: Kind = given["model_type"]
  pad, config = _pad(given, folder), _config(given, kind, _pad(given, folder))
  if kind == "bert" and _NEXT in tensors:
    segments = len(tensors.get(_types(kind), ()))
    check(segments > 1, f"{folder} has {_NEXT}, but no vectors of two segments; fetch it again.")
    config = dataclasses.replace(config, segments=segments, next_sentence=True)
  params = read_entries(
    folder,
    tensors,
    _entries(config, kind, pad),
    what="a masked language model",
    ignored=lambda name: name == _DECODER[kind] or any(part in name for part in _IGNORED),
  )
  model = Encoder(config, len(params["embedding/table"]), pad)
  check_shapes(folder, params, model.init, jax.ShapeDtypeStruct((1, 1), np.int32))
  table, decoder = params["embedding/table"], tensors.get(_DECODER[kind])
  check(
    decoder is None or np.array_equal(decoder, table),
    f"{folder}: {_DECODER[kind]} differs from the word embeddings; the encoder's output is tied to"
    " them. Convert a checkpoint with tied embeddings.",
  )
  again = tensors.get(f"{_HEAD[kind]}.decoder.bias")
  check(
    again is None or np.array_equal(again, params["head/bias"]),
    f"{folder}: {_HEAD[kind]}.decoder.bias differs from {_HEAD[kind]}.bias, but the output has one"
    " bias. Convert a checkpoint in which they are tied.",
  )
  return Checkpoint(config, unflatten_dict(params, sep="/"), len(table), pad, kind)


def write_checkpoint(
  folder: str | Path, checkpoint: Checkpoint, *, bos: int | None = None, eos: int | None = None
) -> None:
  """Writes a folder that `transformers` opens as the class of these weights.

  Args:
    folder: where; made if it is not there.
    checkpoint: the model; `kind` says in whose layout it is written.
    bos: the start token, for the configuration.
    eos: the end token, for the configuration.

  Raises:
    UserError: the model has what their layout cannot hold, or the folder cannot be written.
  """
  config, kind = checkpoint.config, checkpoint.kind
  config.check_layout(f"Hugging Face's {kind}")
  plain = not config.compete and not config.expert_layers
  check(
    kind == "bert" or not config.segments,
    f"model has segments = {config.segments}, but Hugging Face's {kind} has no segments. Export it"
    " as bert.",
  )
  check(
    config.positions == "learned",
    f"model.positions is {config.positions!r}, but Hugging Face's {kind} has learned ones. Export a"
    " model with positions = learned.",
  )
  check(
    plain and config.norm == "post",
    f"model has norm = {config.norm!r}, compete = {config.compete} and expert_layers ="
    f" {config.expert_layers}; Hugging Face's {kind} is normalised after each layer (norm = post)"
    " and has no competition. Export a model without these.",
  )
  head = config.head_activation or config.activation
  heads: dict[Kind, str] = {"roberta": "gelu", "bert": config.activation}
  fitting = " or ".join(name for name, its in heads.items() if its == head)
  check(
    heads[kind] == head,
    f"model has activation = {config.activation!r} and head_activation ="
    f" {config.head_activation!r}, but the output head of Hugging Face's {kind} always uses"
    f" {heads[kind]!r} then. "
    + (f"Export it as {fitting}." if fitting else "None of theirs fits."),
  )
  entries = _entries(config, kind, checkpoint.pad)
  write_folder(folder, _theirs(checkpoint, bos, eos), checkpoint.params, entries)


def _types(kind: Kind) -> str:
  return f"{kind}.embeddings.token_type_embeddings.weight"


def _skipped(kind: Kind, pad: int) -> int:
  """Rows of the position table before that of the first position."""
  return pad + 1 if kind == "roberta" else 0


def _read_config(folder: Path) -> dict[str, Any]:
  given = read_config(folder, _HEAD, is_decoder=False, position_embedding_type="absolute")
  check_choice(f"hidden_act in {folder / CONFIG}", str(given["hidden_act"]), ACTIVATIONS)
  return given


def _pad(given: Mapping[str, Any], folder: Path) -> int:
  """The token that marks padding; BERT's positions do not depend on it, so it may be null there."""
  pad = given["pad_token_id"]
  if pad is None and given["model_type"] == "bert":
    return DEFAULTS["bert"]["pad_token_id"]
  if not isinstance(pad, int) or isinstance(pad, bool) or pad < 0:
    raise UserError(
      f"{folder / CONFIG} has pad_token_id = {pad!r}; it must be a token's number. Restore it, or"
      " leave it out for the usual one."
    )
  return pad


def _config(given: Mapping[str, Any], kind: Kind, pad: int) -> EncoderConfig:
  skipped, activation = _skipped(kind, pad), ACTIVATIONS[given["hidden_act"]]
  try:
    return EncoderConfig(
      encoder_layers=given["num_hidden_layers"],
      dim=given["hidden_size"],
      heads=given["num_attention_heads"],
      ffn_dim=given["intermediate_size"],
      activation=activation,  # pyright: ignore[reportArgumentType]
      head_activation="gelu" if kind == "roberta" and activation != "gelu" else None,
      max_length=given["max_position_embeddings"] - skipped,
      norm_epsilon=given["layer_norm_eps"],
      dropout=given["hidden_dropout_prob"],
      attention_dropout=given["attention_probs_dropout_prob"],
    )
  except (KeyError, TypeError) as error:
    raise UserError(f"{CONFIG}: a size is missing or no number ({error}); restore it.") from error


def _read_weights(folder: Path) -> dict[str, np.ndarray]:
  # Older checkpoints call a norm's parameters gamma and beta.
  return {
    re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)): value
    for name, value in read_weights(folder).items()
  }


def _entries(config: EncoderConfig, kind: Kind, pad: int) -> Iterator[Entry]:
  """All parameters of a model."""
  embeddings, skipped = f"{kind}.embeddings", _skipped(kind, pad)
  types, dim = _SEGMENTS[kind], config.dim
  yield Entry("embedding/table", (f"{embeddings}.word_embeddings.weight",))
  positions = f"{embeddings}.position_embeddings.weight"
  if config.segments:
    yield Entry("positions/table", (positions,))
    yield Entry("segment_table", (_types(kind),))
  else:
    yield Entry(
      "positions/table",
      (positions, _types(kind)),
      lambda positions, segments: positions[skipped:] + segments[:1],
      lambda table: (
        np.concatenate([np.zeros((skipped, dim), np.float32), table]),
        np.zeros((types, dim), np.float32),
      ),
    )
  yield from norm("embedding_norm", f"{embeddings}.LayerNorm")
  for i in range(config.encoder_layers):
    yield from _layer(f"encoder_{i}", f"{kind}.encoder.layer.{i}", config)
  head = _HEAD[kind]
  yield from _dense("head/transform", f"{head}.{_TRANSFORM[kind][0]}")
  yield from norm("head/norm", f"{head}.{_TRANSFORM[kind][1]}")
  yield Entry("head/bias", (f"{head}.bias",))
  if config.next_sentence:
    yield from _dense("pooler", f"{kind}.pooler.dense")
    yield from _dense("next_head", "cls.seq_relationship")


def _layer(ours: str, theirs: str, config: EncoderConfig) -> Iterator[Entry]:
  heads, size, dim = config.heads, config.dim // config.heads, config.dim
  three, attention = f"{ours}/self_attention/query_key_value", f"{theirs}.attention"
  names = [f"{attention}.self.{part}" for part in ("query", "key", "value")]
  yield Entry(
    f"{three}/kernel",
    tuple(f"{name}.weight" for name in names),
    lambda *parts: np.stack([part.T.reshape(dim, heads, size) for part in parts], axis=2),
    lambda kernel: [kernel[:, :, i].reshape(dim, dim).T for i in range(3)],
  )
  yield Entry(
    f"{three}/bias",
    tuple(f"{name}.bias" for name in names),
    lambda *parts: np.stack([part.reshape(heads, size) for part in parts], axis=1),
    lambda bias: [bias[:, i].reshape(dim) for i in range(3)],
  )
  yield Entry(
    f"{ours}/self_attention/output/kernel",
    (f"{attention}.output.dense.weight",),
    lambda weight: weight.T.reshape(heads, size, dim),
    lambda kernel: (kernel.reshape(dim, dim).T,),
  )
  yield Entry(f"{ours}/self_attention/output/bias", (f"{attention}.output.dense.bias",))
  yield from norm(f"{ours}/self_residual/scale", f"{attention}.output.LayerNorm")
  yield from _dense(f"{ours}/ffn/up", f"{theirs}.intermediate.dense")
  yield from _dense(f"{ours}/ffn/down", f"{theirs}.output.dense")
  yield from norm(f"{ours}/ffn_residual/scale", f"{theirs}.output.LayerNorm")


def _dense(ours: str, theirs: str) -> Iterator[Entry]:
  yield Entry(f"{ours}/kernel", (f"{theirs}.weight",), np.transpose, lambda kernel: (kernel.T,))
  yield Entry(f"{ours}/bias", (f"{theirs}.bias",))


def _theirs(checkpoint: Checkpoint, bos: int | None, eos: int | None) -> dict[str, Any]:
  """Their configuration."""
  config, kind, pad = checkpoint.config, checkpoint.kind, checkpoint.pad
  bert = "BertForPreTraining" if config.next_sentence else "BertForMaskedLM"
  names = {"roberta": "RobertaForMaskedLM", "bert": bert}
  return {
    "architectures": [names[kind]],
    "model_type": kind,
    "vocab_size": checkpoint.vocab,
    "hidden_size": config.dim,
    "num_hidden_layers": config.encoder_layers,
    "num_attention_heads": config.heads,
    "intermediate_size": config.ffn_dim,
    "hidden_act": THEIR_ACTIVATIONS[config.activation],
    "hidden_dropout_prob": config.dropout,
    "attention_probs_dropout_prob": config.attention_dropout,
    "max_position_embeddings": config.max_length + _skipped(kind, pad),
    "type_vocab_size": config.segments or _SEGMENTS[kind],
    "layer_norm_eps": config.norm_epsilon,
    "tie_word_embeddings": True,
    "pad_token_id": pad,
    **{
      f"{name}_token_id": value for name, value in (("bos", bos), ("eos", eos)) if value is not None
    },
  }
