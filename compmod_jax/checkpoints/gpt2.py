"""GPT-2's checkpoints of Hugging Face, in and out: as a decoder, or as NeMoT's vanilla set.

Ours and theirs have the same token numbers. Their dense layers hold weights as [inputs, outputs],
as ours do; query, key and value are one matrix in both.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from compmod_jax.checkpoints.huggingface_folder import (
  ACTIVATIONS,
  CONFIG,
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
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.text import Text

KIND = "gpt2"
_PREFIX = "transformer."
# Masks that older checkpoints store, and the output layer, which is the embeddings.
_IGNORED = re.compile(r"\.attn\.(masked_)?bias$|^lm_head\.weight$")


class Gpt2(NamedTuple):
  """A GPT-2 model.

  Attributes:
    config: sizes and options.
    params: parameters of `DecoderLM`, float32.
    vocab: number of tokens.
  """

  config: DecoderConfig
  params: dict[str, Any]
  vocab: int


def read_gpt2(folder: str | Path) -> Gpt2:
  """Reads a GPT-2 language model.

  Raises:
    UserError: a file is missing or damaged, tensors do not fit the sizes of the configuration, or
      the model is of another kind or has parts that the decoder does not have.
  """
  folder = Path(folder)
  given = read_config(
    folder,
    (KIND,),
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    add_cross_attention=False,
  )
  tensors = {name.removeprefix(_PREFIX): value for name, value in read_weights(folder).items()}
  config = _config(given, folder)
  params = read_entries(
    folder,
    tensors,
    _entries(config),
    what="GPT-2",
    ignored=lambda name: bool(_IGNORED.search(name)),
  )
  head, table = tensors.get("lm_head.weight"), params["embedding/table"]
  text = Text(jnp.zeros((1, 1), jnp.int32))
  check_shapes(folder, params, config.decoder(len(table), 0).init, text)
  check(
    head is None or np.array_equal(head, table),
    f"{folder}: lm_head.weight differs from the word embeddings; GPT-2's output is tied to them.",
  )
  return Gpt2(config, unflatten_dict(params, sep="/"), len(table))


def with_tokens(model: Gpt2, vocab: int) -> Gpt2:
  r"""The model with further tokens, whose vectors are the mean of all others.

  Their logits are the mean logit, so that the output changes by very little, whatever it is:

  .. math:: e^{\bar z} \le \frac1V \sum_{j=1}^{V} e^{z_j}

  Args:
    model: with V tokens.
    vocab: tokens in all; those after the V-th have at most (vocab - V) / vocab of the probability.

  Raises:
    UserError: the model has more tokens already.

  Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models".
  """
  check(
    vocab >= model.vocab,
    f"The tokenizer has {vocab} tokens, but the GPT-2 checkpoint {model.vocab}; use its tokenizer.",
  )
  table = model.params["embedding"]["table"]
  mean = np.mean(table, axis=0, keepdims=True, dtype=np.float64).astype(table.dtype)
  table = np.concatenate([table, np.repeat(mean, vocab - model.vocab, axis=0)])
  return Gpt2(model.config, {**model.params, "embedding": {"table": table}}, vocab)


def write_gpt2(folder: str | Path, model: Gpt2, *, eos: int | None = None) -> None:
  """Writes a folder that `transformers` opens as `GPT2LMHeadModel`.

  Raises:
    UserError: the model has what their layout cannot hold, or the folder cannot be written.
  """
  config = model.config
  config.check_layout("GPT-2")
  plain = not config.compete and not config.expert_layers and config.convolution == 1
  plain = plain and config.head_dim in (None, config.dim // config.heads)
  check(
    plain and config.tied and config.positions == "learned" and not config.scale_embeddings,
    f"model has compete = {config.compete}, expert_layers = {config.expert_layers}, convolution ="
    f" {config.convolution}, head_dim = {config.head_dim}, tied = {config.tied}, positions ="
    f" {config.positions!r} and scale_embeddings = {config.scale_embeddings}; GPT-2 has no"
    " competition and no convolution, heads of width dim / heads, a tied output, learned positions"
    " and embeddings that are not scaled. Export a model like that.",
  )
  entries = (
    entry._replace(names=tuple(_PREFIX + name for name in entry.names))
    for entry in _entries(config)
  )
  write_folder(folder, _theirs(model, eos), model.params, entries)


def as_vanilla_set(model: Gpt2, config: NemotConfig, params: Mapping[str, Any]) -> dict[str, Any]:
  """NeMoT's parameters with GPT-2 as its vanilla set; further tokens keep their fresh vectors.

  The vanilla set's own head starts as GPT-2's embeddings, without a bias.

  Args:
    model: what `read_gpt2` read.
    config: of NeMoT; see `vanilla_sizes`.
    params: fresh parameters of `Nemot`, for at least as many tokens.

  Raises:
    UserError: the vanilla set has another shape than the model.
  """
  _check_fields(config, vanilla_sizes(model.config))
  ours: dict[str, Any] = flatten_dict(dict(params), sep="/")
  theirs: dict[str, Any] = flatten_dict(model.params, sep="/")
  vocab = len(ours["embedding/table"])
  check(
    vocab >= model.vocab,
    f"The tokenizer has {vocab} tokens, but the GPT-2 checkpoint {model.vocab}; use its tokenizer.",
  )
  table = theirs.pop("embedding/table")
  found = dict(ours)
  found["embedding/table"] = jnp.asarray(ours["embedding/table"]).at[: model.vocab].set(table)
  if "vanilla_head/kernel" in ours:
    found["vanilla_head/kernel"] = jnp.asarray(found["embedding/table"]).T
    found["vanilla_head/bias"] = jnp.zeros_like(ours["vanilla_head/bias"])
  for path, value in theirs.items():
    path = re.sub(r"^decoder/", "vanilla/", path).replace("output_norm/", "vanilla_norm/")
    found[path] = jnp.asarray(value)
  return unflatten_dict(found, sep="/")


def check_decoder(config: DecoderConfig, model: Gpt2) -> None:
  """Raises a `UserError` where a decoder computes another function of GPT-2's parameters."""
  names = ("activation", "scale_embeddings", "norm_epsilon")
  _check_fields(config, {name: getattr(model.config, name) for name in names})


def _check_fields(config: NemotConfig | DecoderConfig, wanted: Mapping[str, Any]) -> None:
  for field, value in wanted.items():
    found = getattr(config, field)
    check(
      found == value,
      f"model.{field} is {found!r}, but the GPT-2 checkpoint has {value!r}; set it to that.",
    )


def vanilla_sizes(config: DecoderConfig) -> dict[str, Any]:
  """Fields of `NemotConfig` that make its vanilla set the same as a decoder."""
  return {
    "vanilla_layers": config.decoder_layers,
    "dim": config.dim,
    "heads": config.heads,
    "ffn_dim": config.ffn_dim,
    "activation": config.activation,
    "positions": config.positions,
    "scale_embeddings": config.scale_embeddings,
    "max_length": config.max_length,
    "norm_epsilon": config.norm_epsilon,
    "vanilla_norm": True,
    "convolution": config.convolution,
  }


def _config(given: Mapping[str, Any], folder: Path) -> DecoderConfig:
  activation = str(given["activation_function"])
  check_choice(f"activation_function in {folder / CONFIG}", activation, ACTIVATIONS)
  try:
    return DecoderConfig(
      decoder_layers=given["n_layer"],
      dim=given["n_embd"],
      heads=given["n_head"],
      ffn_dim=given["n_inner"] or 4 * given["n_embd"],
      activation=ACTIVATIONS[activation],  # pyright: ignore[reportArgumentType]
      max_length=given["n_positions"],
      norm_epsilon=given["layer_norm_epsilon"],
      dropout=given["resid_pdrop"],
      attention_dropout=given["attn_pdrop"],
    )
  except (KeyError, TypeError) as error:
    raise UserError(f"{CONFIG}: a size is missing or no number ({error}); restore it.") from error


def _entries(config: DecoderConfig) -> Iterator[Entry]:
  """All parameters of a model."""
  yield Entry("embedding/table", ("wte.weight",))
  yield Entry("positions/table", ("wpe.weight",))
  for i in range(config.decoder_layers):
    yield from _layer(f"decoder/layer_{i}", f"h.{i}", config)
  yield from norm("output_norm", "ln_f")


def _layer(ours: str, theirs: str, config: DecoderConfig) -> Iterator[Entry]:
  heads, size, dim = config.heads, config.dim // config.heads, config.dim
  attention = f"{ours}/self_attention"

  def split(value: np.ndarray) -> np.ndarray:  # [..., three * dim] -> [..., heads, three, size]
    return np.moveaxis(value.reshape(*value.shape[:-1], 3, heads, size), -3, -2)

  def join(value: np.ndarray) -> tuple[np.ndarray]:
    return (np.moveaxis(value, -2, -3).reshape(*value.shape[:-3], 3 * dim),)

  for part in ("weight", "bias"):
    path = "kernel" if part == "weight" else "bias"
    yield Entry(
      f"{attention}/query_key_value/{path}", (f"{theirs}.attn.c_attn.{part}",), split, join
    )
    for name, their in (("up", "c_fc"), ("down", "c_proj")):
      yield Entry(f"{ours}/ffn/{name}/{path}", (f"{theirs}.mlp.{their}.{part}",))
  yield Entry(
    f"{attention}/output/kernel",
    (f"{theirs}.attn.c_proj.weight",),
    lambda weight: weight.reshape(heads, size, dim),
    lambda kernel: (kernel.reshape(dim, dim),),
  )
  yield Entry(f"{attention}/output/bias", (f"{theirs}.attn.c_proj.bias",))
  yield from norm(f"{ours}/self_residual/scale", f"{theirs}.ln_1")
  yield from norm(f"{ours}/ffn_residual/scale", f"{theirs}.ln_2")


def _theirs(model: Gpt2, eos: int | None) -> dict[str, Any]:
  """Their configuration."""
  config = model.config
  return {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": KIND,
    "vocab_size": model.vocab,
    "n_positions": config.max_length,
    "n_embd": config.dim,
    "n_layer": config.decoder_layers,
    "n_head": config.heads,
    "n_inner": config.ffn_dim,
    "activation_function": THEIR_ACTIVATIONS[config.activation],
    "resid_pdrop": config.dropout,
    "embd_pdrop": config.dropout,
    "attn_pdrop": config.attention_dropout,
    "layer_norm_epsilon": config.norm_epsilon,
    "tie_word_embeddings": True,
    **({} if eos is None else {"bos_token_id": eos, "eos_token_id": eos}),
  }
