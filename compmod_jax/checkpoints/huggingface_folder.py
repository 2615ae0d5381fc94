"""Hugging Face's model folders: configuration, tensors, and which of theirs are which of ours."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from compmod_jax.checkpoints.model_folder import read_tensors
from compmod_jax.core import durable
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.core.untrusted import MIB, is_plain_name, memory, parse_json, read_bounded

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MOST = 256 * MIB
"""Most bytes of a file of theirs but for tensors; the largest are indices and tokenizers."""
ACTIVATIONS = {
  "gelu": "gelu",
  "gelu_new": "gelu_tanh",
  "gelu_pytorch_tanh": "gelu_tanh",
  "relu": "relu",
}
"""Their names of nonlinearities -> ours."""
THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Ours -> theirs."""


_MASKED: dict[str, Any] = {
  "num_hidden_layers": 12,
  "hidden_size": 768,
  "num_attention_heads": 12,
  "intermediate_size": 3072,
  "hidden_act": "gelu",
  "max_position_embeddings": 512,
  "layer_norm_eps": 1e-12,
  "hidden_dropout_prob": 0.1,
  "attention_probs_dropout_prob": 0.1,
  "is_decoder": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
  "roberta": {**_MASKED, "pad_token_id": 1},
  "bert": {**_MASKED, "pad_token_id": 0},
  "gpt2": {
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
  },
  "t5": {
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
  },
}
"""`model_type` -> what a field means that their `config.json` leaves out, of all fields read here.

Source: the configuration classes of `transformers`, with which tests/peers compares it.
"""
REMOVED_DEFAULTS: dict[str, dict[str, Any]] = {
  kind: {"position_embedding_type": "absolute"} for kind in ("roberta", "bert")
}
"""The same of fields that `transformers` 4 had, and newer versions have no more."""


class Entry(NamedTuple):
  """One of our parameters and the tensors of theirs that it is made of.

  Attributes:
    path: of ours, joined with "/".
    names: of theirs.
    read: from theirs to ours.
    write: from ours to theirs.
  """

  path: str
  names: tuple[str, ...]
  read: Callable[..., np.ndarray] = lambda value: value
  write: Callable[[np.ndarray], Sequence[np.ndarray]] = lambda value: (value,)


def norm(ours: str, theirs: str) -> Iterator[Entry]:
  """The two parameters of a layer normalisation."""
  yield Entry(f"{ours}/scale", (f"{theirs}.weight",))
  yield Entry(f"{ours}/bias", (f"{theirs}.bias",))


def check_shapes(
  folder: Path, params: Mapping[str, np.ndarray], init: Callable[..., Any], *inputs: object
) -> None:
  """Compares parameters with those that the configuration's model has, without making any.

  Args:
    folder: theirs.
    params: path -> tensor.
    init: of the module.
    inputs: of its call, or their shapes.

  Raises:
    UserError: a tensor has another shape than the sizes in the configuration ask for.
  """
  made: dict[str, Any] = nn.unbox(jax.eval_shape(init, jax.random.key(0), *inputs))["params"]
  shapes: dict[str, Any] = jax.tree.map(lambda leaf: leaf.shape, flatten_dict(made, sep="/"))
  for path, shape in shapes.items():
    check(
      params[path].shape == shape,
      f"{folder}: tensors do not fit the sizes in {CONFIG}: {path} has the shape"
      f" {list(params[path].shape)}, and these sizes ask for {list(shape)}. Fetch the folder"
      " again.",
    )


def read_config(folder: Path, kinds: Iterable[str], **fixed: object) -> dict[str, Any]:
  """Their configuration; fields that it leaves out are as in `DEFAULTS`.

  Args:
    folder: theirs.
    kinds: values of `model_type` that can be imported.
    **fixed: fields and the only value that can be imported.

  Raises:
    UserError: it is missing or damaged, or says what cannot be imported.
  """
  path = folder / CONFIG
  given = read_object(
    path, f"There is no {CONFIG} in {folder}. Give a Hugging Face model's folder."
  )
  kind = str(given.get("model_type"))
  check_choice(f"model_type in {path}", kind, kinds)
  given = DEFAULTS[kind] | REMOVED_DEFAULTS.get(kind, {}) | given
  for field, value in fixed.items():
    check(
      given[field] == value,
      f"{path} has {field} = {given[field]!r}; only {value!r} can be imported.",
    )
  return given


def read_object(path: Path, missing: str) -> dict[str, Any]:
  """The object in a JSON file of theirs.

  Args:
    path: of the file.
    missing: what to say where there is none.

  Raises:
    UserError: it is missing or damaged, too large, nested too deep, or holds something else.
  """
  try:
    found = parse_json(read_bounded(path, MOST))
  except FileNotFoundError as error:
    raise UserError(missing) from error
  except (OSError, ValueError) as error:
    raise UserError(f"{path} cannot be read: {error}. Fetch it again.") from error
  check(isinstance(found, dict), f"{path} holds no object but {str(found)[:40]}; fetch it again.")
  return found


def read_weights(folder: Path) -> dict[str, np.ndarray]:
  """All tensors of a folder, float32.

  Raises:
    UserError: a file is missing or damaged, or the index names one that is not in the folder.
  """
  names = [WEIGHTS]
  if (folder / INDEX).is_file():
    names = _files_of_index(folder)
  found: dict[str, np.ndarray] = {}
  for name in names:
    try:
      found |= read_tensors(read_bounded(folder / name, memory()))
    except FileNotFoundError as error:
      raise UserError(
        f"There is no {name} in {folder}. Only safetensors can be read, nothing that is unpickled:"
        " save the model again with safe_serialization=True."
      ) from error
    except OSError as error:
      raise UserError(f"{folder / name} cannot be read: {error.strerror}.") from error
    except ValueError as error:
      raise UserError(f"{folder / name} is damaged ({error}); fetch it again.") from error
  return {name: value.astype(np.float32) for name, value in found.items()}


def _files_of_index(folder: Path) -> list[str]:
  """The files that the index of a folder names."""
  path = folder / INDEX
  files = read_object(path, f"There is no {path}.").get("weight_map")
  if not isinstance(files, dict) or not files:
    raise UserError(f"{path} has no weight_map, which says where tensors are; fetch it again.")
  for tensor, name in files.items():
    check(
      is_plain_name(name),
      f"{path} says that {tensor} is in {name!r}, which is no name of a file in that folder;"
      " nothing else is read. Fetch the folder again from a place that you trust.",
    )
  return sorted(set(files.values()))


def read_entries(
  folder: Path,
  tensors: Mapping[str, np.ndarray],
  entries: Iterable[Entry],
  *,
  what: str,
  ignored: Callable[[str], bool],
) -> dict[str, np.ndarray]:
  """Path -> our parameter.

  Args:
    folder: theirs, for messages.
    tensors: of theirs.
    entries: all parameters of ours.
    what: theirs should be a checkpoint of this.
    ignored: whether a tensor of theirs says nothing that we keep.

  Raises:
    UserError: tensors are missing or do not fit the configuration, or some have no place.
  """
  params, taken = {}, set[str]()
  for entry in entries:
    missing = [name for name in entry.names if name not in tensors]
    check(
      not missing,
      f"{folder} has no tensor {', '.join(missing)}; it is no checkpoint of {what}, or one of"
      " another layout.",
    )
    parts = [tensors[name] for name in entry.names]
    try:
      params[entry.path] = entry.read(*parts)
    except (ValueError, IndexError, TypeError) as error:
      shapes = ", ".join(str(list(part.shape)) for part in parts)
      raise UserError(
        f"{folder}: {', '.join(entry.names)} have the shapes {shapes}, which do not fit the sizes"
        f" in {CONFIG} ({error}). Fetch the folder again."
      ) from error
    taken.update(entry.names)
  left = sorted(name for name in set(tensors) - taken if not ignored(name))
  check(not left, f"{folder} has tensors that the model has no place for: {', '.join(left[:5])}.")
  return params


def write_folder(
  folder: str | Path, config: Mapping[str, Any], params: PyTree, entries: Iterable[Entry]
) -> None:
  """Writes a folder that `transformers` opens.

  Raises:
    UserError: the model has parameters without a place in their layout, or the folder cannot be
      written.
  """
  flat, tensors = flatten_dict(params, sep="/"), dict[str, np.ndarray]()
  entries = list(entries)
  left = sorted(set(flat) - {entry.path for entry in entries})
  check(
    not left,
    f"{', '.join(left[:5])} and the like have no place in their layout: {len(left)} parameters of a"
    " mechanism that theirs does not have. Export a model without it.",
  )
  for entry in entries:
    parts = entry.write(np.asarray(flat[entry.path], np.float32))
    tensors |= dict(zip(entry.names, map(np.ascontiguousarray, parts), strict=True))
  folder = Path(folder)
  try:
    durable.write(folder / CONFIG, [(json.dumps(config, indent=2) + "\n").encode()])
    weights = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    durable.write(folder / WEIGHTS, [weights])
  except OSError as error:
    raise UserError(f"{folder} cannot be written: {error.strerror}. Choose another.") from error
