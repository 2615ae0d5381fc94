"""A trained model as a folder: parameters, tokenizers and configuration, readable without orbax.

    params.safetensors    one tensor a parameter, named by its path joined with "/"
    model.json            schema version, meta, and the sha256 of every other file
    ...                   whatever else the model needs, such as "tokenizer.source.model"

Nothing in a folder is executed or unpickled. A folder is replaced as a whole: the new one is
written beside the old one, and only two renames separate them. Should the process be killed between
the two, the old folder lies under its other name, where `load_model_folder` finds it.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import DTypeLike

from compmod_jax.core import durable
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.core.types import Params
from compmod_jax.core.untrusted import MIB, is_plain_name, memory, parse_json, read_bounded

SCHEMA_VERSION = 1
PARAMS = "params.safetensors"
MODEL = "model.json"

_DESCRIPTION = 64 * MIB  # most bytes of model.json
_HEADER = 100 * MIB  # of tensors, as in the package safetensors
_NESTED = 64  # most levels of nested parameters
_REPEATS = 1000  # times that a layer may be repeated, at most
_POSITIONS = 1 << 24  # numbers of a table of fixed positions, which is in no file

# Spelled out because safetensors.numpy reads no bfloat16.
_DTYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U64": np.uint64,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}


def save_model_folder(
  folder: Path, *, params: Mapping[str, Any], files: Mapping[str, bytes], meta: Mapping[str, Any]
) -> None:
  """Writes a model folder, replacing an older one of that name as a whole.

  Killed at any moment, it leaves either the old folder or the new one for `load_model_folder`.

  Args:
    folder: where the model goes; parents are created.
    params: nested dictionaries of arrays of any shape; empty dictionaries are not kept.
    files: further files, by plain file name.
    meta: anything that JSON can hold, such as the model's configuration.

  Raises:
    UserError: the disk is full or the place cannot be written; an older folder is untouched.
    ValueError: a parameter name holds "/", or a file name is reserved or no plain name.
  """
  folder = Path(folder)
  for name in files:
    if name in ("", PARAMS, MODEL) or name != Path(name).name or name.startswith("."):
      raise ValueError(f"{name!r} cannot be the name of a file in a model folder")
  contents = {PARAMS: safetensors.numpy.save(_flatten(params)), **files}
  record = {
    "schema": SCHEMA_VERSION,
    "meta": meta,
    "meta_sha256": _meta_hash(meta),
    "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
  }
  contents[MODEL] = (json.dumps(record, indent=2) + "\n").encode()
  try:
    _replace(folder, contents)
  except OSError as error:
    shutil.rmtree(_new(folder), ignore_errors=True)
    needed = sum(map(len, contents.values())) / 1e6
    raise UserError(
      f"model folder {folder}: cannot be written ({error.strerror or error}). It needs "
      f"{needed:.1f} MB beside any older one: free some space, or choose a place that can be "
      "written, and run the same command again. An older model there is untouched."
    ) from error


def find_model(folder: Path, model: str | None = None) -> Path:
  """The model folder that `folder` is or that it holds, as the workdir of a training run.

  Args:
    folder: a model folder, or a folder with model folders in its `models`.
    model: which of those; None for `best`.

  Raises:
    UserError: there is none, none of that name, or `model` is given for a model folder.
  """
  if (folder / MODEL).is_file() or _previous(folder).is_dir():
    check(
      model is None,
      f"model is {model!r}, but {folder} is itself a model's folder. Leave model out, or give the"
      " workdir that holds several.",
    )
    return folder
  models = folder / "models"
  found = {path.name for path in models.iterdir()} if models.is_dir() else set()
  # A model that is just being replaced has only its other name for a moment.
  names = {name.removesuffix(".previous").lstrip(".") for name in found if ".new" not in name}
  if not names:
    check(folder.is_dir(), f"There is no folder {folder}. Give the workdir of a training run.")
    raise UserError(
      f"{folder} holds no trained model: it is neither a model folder with {MODEL}, nor the workdir"
      " of a training run that has been evaluated at least once. Give one of those."
    )
  check_choice("model", model or "best", names)
  return models / (model or "best")


def load_model_folder(folder: Path) -> tuple[dict[str, Any], dict[str, bytes], dict[str, Any]]:
  """Reads and verifies what `save_model_folder` wrote.

  Returns:
    (params, files, meta): params as nested dictionaries of numpy arrays in their stored dtypes.

  Raises:
    UserError: the folder or one of its files is missing or damaged, or a newer version of this
      program wrote it; the message names the file.
  """
  folder = Path(folder)
  while True:
    before = _identity(folder)
    try:
      return _load(folder if folder.exists() else _previous(folder), folder)
    except UserError:
      # A training run may have put a better model in place while this one was being read.
      if _identity(folder) == before:
        raise


def _load(place: Path, folder: Path) -> tuple[dict[str, Any], dict[str, bytes], dict[str, Any]]:
  if not place.is_dir():
    raise UserError(
      f"model folder {folder}: there is none. Train a model into this place first, or name "
      f"the folder that holds {MODEL}."
    )
  record = _read_record(place / MODEL)
  contents = {}
  for name, digest in record["sha256"].items():
    contents[name] = _read(place / name)
    if hashlib.sha256(contents[name]).hexdigest() != digest:
      raise _damaged(place / name, "its contents do not match the checksum taken when written")
  try:
    params = _unflatten(read_tensors(contents.pop(PARAMS)))
  except ValueError as error:
    raise _damaged(place / PARAMS, f"its tensors cannot be read: {error}") from error
  return params, contents, record["meta"]


def check_sizes(place: Path, params: Params, model: object) -> None:
  """Compares the sizes of a configuration with the parameters beside it, before anything is made.

  A description may name a width of 1e9 or 1e9 layers: making such a model takes hours, or more
  memory than there is, before its parameters are seen to be others.

  Args:
    place: the model folder, for messages.
    params: of `load_model_folder`.
    model: the model's configuration as JSON has it; what is no such thing is left to others.

  Raises:
    UserError: a size is larger than the parameters allow.
  """
  if not isinstance(model, Mapping):
    return
  sizes = {name: value for name, value in model.items() if isinstance(value, int | float)}
  leaves = [leaf.size for leaf in _flatten(params).values()]
  numbers = sum(leaves)
  often = _REPEATS if sizes.get("shared_layers") else 1
  for name, value in sizes.items():
    layers = name == "layers" or name.endswith("_layers")
    width = name.endswith("dim") or name in ("heads", "convolution")
    most, what = (len(leaves) * often, "tensors") if layers else (numbers, "numbers")
    check(
      not (layers or width) or value <= most,
      f"{place / MODEL} says model.{name} = {value}, but {PARAMS} beside it has {most:,} {what};"
      " they do not belong together. Restore the folder as it was saved.",
    )
  length = max(("max_length", "random_positions"), key=lambda name: sizes.get(name, 0))
  table = sizes.get(length, 0) * sizes.get("dim", 1)
  check(
    table <= max(numbers, _POSITIONS),
    f"{place / MODEL} says model.{length} = {sizes.get(length)} and model.dim ="
    f" {sizes.get('dim')}; positions of these sizes are {table:,} numbers, and at most"
    f" {max(numbers, _POSITIONS):,} are made for a model of this size. Restore the folder as it was"
    " saved.",
  )


class _Tensor(NamedTuple):
  name: str
  dtype: DTypeLike
  shape: tuple[int, ...]
  start: int
  stop: int


def read_tensors(data: bytes) -> dict[str, np.ndarray]:
  """The tensors of a safetensors file, in their stored dtypes; each is a copy.

  What the header says is compared with the data before anything is allocated.

  Raises:
    ValueError: the data are damaged, or of a dtype that is not known here.
  """
  first = 8 + int.from_bytes(data[:8], "little")
  if len(data) < 8 or not 8 < first <= min(len(data), _HEADER):
    raise ValueError(f"the header has {first - 8:,} bytes, but the file {len(data):,}")
  header, found, place = parse_json(data[8:first], size=_HEADER), {}, 0
  for tensor in sorted(_tensors(header), key=lambda one: (one.start, one.stop)):
    if tensor.start != place:
      raise ValueError(f"tensor {tensor.name!r} begins at byte {tensor.start:,}, not {place:,}")
    place = tensor.stop
    if first + place > len(data):
      raise ValueError(
        f"tensor {tensor.name!r} ends at byte {first + place:,} of {len(data):,}: the file is cut"
      )
    flat = np.frombuffer(data, tensor.dtype, math.prod(tensor.shape), first + tensor.start)
    found[tensor.name] = flat.reshape(tensor.shape).copy()
  if first + place != len(data):
    raise ValueError(f"the tensors end at byte {first + place:,} of {len(data):,}")
  return found


def _tensors(header: object) -> Iterator[_Tensor]:
  """What the header of a safetensors file says of every tensor.

  Raises:
    ValueError: it is none, or a size does not fit the others.
  """
  if not isinstance(header, dict):
    raise ValueError("the header is no object")
  for name, fields in header.items():
    if name == "__metadata__":
      continue
    try:
      dtype, shape = fields["dtype"], tuple(fields["shape"])
      start, stop = fields["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
      raise ValueError(f"the header says too little of tensor {name!r}") from error
    if not isinstance(dtype, str) or dtype not in _DTYPES:
      raise ValueError(f"tensor {name!r} is of the type {dtype!r}, which is not known here")
    sizes = (*shape, start, stop)
    if len(shape) > 32 or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
      raise ValueError(f"tensor {name!r} has the shape {str(list(shape))[:80]} and lies at {start}")
    needed = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if stop - start != needed:
      raise ValueError(
        f"tensor {name!r} has {stop - start:,} bytes, but its shape needs {needed:,}"
      )
    yield _Tensor(name, _DTYPES[dtype], shape, start, stop)


def _read_record(path: Path) -> dict[str, Any]:
  try:
    record = parse_json(_read(path, _DESCRIPTION))
    schema, meta, digests = int(record["schema"]), record["meta"], dict(record["sha256"])
  except UserError:
    raise
  except (ValueError, KeyError, TypeError, OverflowError) as error:
    raise _damaged(path, f"it is no model description ({error})") from error
  if schema > SCHEMA_VERSION:
    raise UserError(
      f"{path}: has schema version {schema}, and this program reads versions up to "
      f"{SCHEMA_VERSION}. Install the version of compmod_jax that wrote it, or a newer one."
    )
  if record.get("meta_sha256") != _meta_hash(meta) or PARAMS not in digests:
    raise _damaged(path, "its contents do not match the checksum taken when written")
  for name in digests:
    if not is_plain_name(name):  # a path here could read files outside of the folder
      raise _damaged(path, f"it names {name!r}, which is no file of the folder")
  return record


def _read(path: Path, limit: int | None = None) -> bytes:
  try:
    return read_bounded(path, memory() if limit is None else limit)
  except FileNotFoundError as error:
    raise _damaged(path, "it is missing") from error
  except OSError as error:
    raise _damaged(path, f"it cannot be read ({error.strerror})") from error
  except ValueError as error:
    raise _damaged(path, f"it {error}") from error


def _damaged(path: Path, reason: str) -> UserError:
  return UserError(
    f"{path}: {reason}, so the model cannot be used. Copy the folder again from where it came, "
    "or train again: the same command writes a new one."
  )


def _replace(folder: Path, contents: Mapping[str, bytes]) -> None:
  new, previous = _new(folder), _previous(folder)
  durable.make_folder(folder.parent)
  if previous.exists():  # a process was killed between the renames below, or just after them
    if folder.exists():
      shutil.rmtree(previous)
    else:
      previous.rename(folder)
  if new.exists():
    shutil.rmtree(new)
  new.mkdir()
  for name, data in contents.items():
    with open(new / name, "xb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
  durable.sync(new)
  if folder.exists():
    folder.rename(previous)
  try:
    new.rename(folder)
  except OSError:
    if previous.exists():
      previous.rename(folder)
    raise
  durable.sync(folder.parent)
  shutil.rmtree(previous, ignore_errors=True)


def _new(folder: Path) -> Path:
  return folder.parent / f".{folder.name}.new"


def _previous(folder: Path) -> Path:
  return folder.parent / f".{folder.name}.previous"


def _identity(folder: Path) -> tuple[int, int] | None:
  """What tells one folder from another that took its name; None where there is none."""
  try:
    status = folder.stat()
  except FileNotFoundError:
    return None
  return status.st_ino, status.st_ctime_ns


def _meta_hash(meta: object) -> str:
  # Through JSON and back, so that tuples, which JSON turns into lists, hash alike on both sides.
  return hashlib.sha256(json.dumps(json.loads(json.dumps(meta))).encode()).hexdigest()


def _flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
  flat = {}
  for key, value in params.items():
    if "/" in key:
      raise ValueError(f"parameter name {key!r} holds '/', which separates the parts of a path")
    if isinstance(value, Mapping):
      flat |= _flatten(value, f"{prefix}{key}/")
    else:
      # safetensors takes a dense row-major buffer as it lies in memory; `order="C"` keeps ndim 0.
      flat[prefix + key] = np.array(value, order="C", copy=None)
  return flat


def _unflatten(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
  params: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, name = path.split("/")
    if len(parents) > _NESTED:
      raise ValueError(f"parameter {path[:40]!r}... is nested {len(parents)} levels deep")
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
      if not isinstance(node, dict):
        raise ValueError(f"parameter {path!r} lies inside of another parameter")
    if name in node:
      raise ValueError(f"parameter {path!r} holds other parameters")
    node[name] = value
  return params
