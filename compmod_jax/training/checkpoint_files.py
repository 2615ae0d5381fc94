"""What a checkpoint is on the disk, and whether it is whole: names, records, hashes."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from compmod_jax.core import durable
from compmod_jax.core.errors import UserError
from compmod_jax.core.untrusted import parse_json

SCHEMA_VERSION = 1
# version -> function from a meta.json of that version to the next version's.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

NAME = re.compile(r"step_(\d{8,})(?:_(\d+))?")
MANIFEST = "manifest.json"
_MAX_LISTED = 10


def order(path: Path) -> tuple[int, int]:
  """(step, how many times the step had been written before) of a checkpoint's name."""
  match = NAME.fullmatch(path.name)
  assert match is not None
  return int(match[1]), int(match[2] or 0)


def free_name(directory: Path, step: int) -> str:
  """A step written again gets a name of its own: what is there stays until the new one is whole."""
  base = name = f"step_{step:08d}"
  again = 0
  while (directory / name).exists():
    again += 1
    name = f"{base}_{again}"
  return name


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
  """The leaves of a pytree by path, such as "opt_state/0/count"; containers of any kind."""
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
  if len(leaves) != len(flat):
    raise ValueError("two leaves of the state have the same path once joined with '/'")
  for path, leaf in leaves.items():
    if not hasattr(leaf, "dtype") or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
      raise TypeError(f"state leaf {path!r} is {leaf!r}; a checkpoint holds plain arrays")
  return leaves


def layout(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """[shape, dtype] of every leaf, as JSON can hold it."""
  return {path: [list(leaf.shape), np.dtype(leaf.dtype).name] for path, leaf in leaves.items()}


def compare(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
  """Raises a `UserError` that lists how the layout in a checkpoint differs from the wanted one."""

  def show(leaf):
    return f"{leaf[1]}{leaf[0]}"

  differences = []
  for name in [*wanted, *(name for name in saved if name not in wanted)]:
    if name not in saved:
      differences.append(f"{name} missing from the checkpoint ({show(wanted[name])} wanted)")
    elif name not in wanted:
      differences.append(f"{name} unexpected ({show(saved[name])} in the checkpoint)")
    elif saved[name] != wanted[name]:
      differences.append(f"{name} is {show(saved[name])}, wanted {show(wanted[name])}")
  if differences:
    more = len(differences) - _MAX_LISTED
    raise UserError(
      f"checkpoint {path} does not fit this configuration; {len(differences)} of its arrays "
      f"differ: {'; '.join(differences[:_MAX_LISTED])}"
      + (f"; and {more} more" if more > 0 else "")
      + ". Run with the configuration that wrote it, or choose another workdir."
    )


def newest_first(directory: Path) -> list[Path]:
  """The checkpoints of a directory, damaged ones included."""
  if not directory.is_dir():
    return []
  found = [path for path in directory.iterdir() if NAME.fullmatch(path.name)]
  return sorted(found, key=order, reverse=True)


def newest_record(directory: Path) -> dict[str, Any] | None:
  """meta.json of the newest checkpoint whose meta.json is whole, whatever its arrays are."""
  for path in newest_first(directory):
    try:
      digest = parse_json((path / MANIFEST).read_text())["sha256"]["meta.json"]
      if hashlib.sha256((path / "meta.json").read_bytes()).hexdigest() == digest:
        return read_record(path)
    except UserError:  # a newer version wrote it
      raise
    except (OSError, ValueError, KeyError, TypeError):
      continue
  return None


def read_record(path: Path) -> dict[str, Any]:
  """meta.json of a whole checkpoint, brought to the present schema; `UserError` if it is newer."""
  record = json.loads((path / "meta.json").read_text())
  if record["schema"] > SCHEMA_VERSION:
    raise UserError(
      f"checkpoint {path} has schema version {record['schema']}, and this program reads versions "
      f"up to {SCHEMA_VERSION}. Continue with the version that wrote it, or a newer one."
    )
  while record["schema"] < SCHEMA_VERSION:
    record = MIGRATIONS[record["schema"]](record)
  return record


def _files(path: Path) -> dict[str, Path]:
  found = (file for file in path.rglob("*") if file.is_file())
  return {file.relative_to(path).as_posix(): file for file in sorted(found)}


def write_manifest(path: Path) -> None:
  """Hashes every file of a checkpoint and brings all of it to the disk."""
  digests = {}
  for name, file in _files(path).items():
    with open(file, "rb") as opened:
      digests[name] = hashlib.file_digest(opened, "sha256").hexdigest()
      os.fsync(opened.fileno())  # a machine that is about to vanish has no other chance
  with open(path / MANIFEST, "x") as file:
    json.dump({"sha256": digests}, file, indent=1)
    file.flush()
    os.fsync(file.fileno())
  for directory in [path, *(sub for sub in path.rglob("*") if sub.is_dir())]:
    durable.sync(directory)


def damage(path: Path) -> str | None:
  """What is wrong with a checkpoint, or None."""
  try:
    digests = parse_json((path / MANIFEST).read_text())["sha256"]
    files = _files(path)
    files.pop(MANIFEST)
    for name in sorted(digests.keys() | files.keys()):
      if name not in files:
        return f"{name} is missing"
      if name not in digests:
        return f"{name} does not belong there"
      with open(files[name], "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digests[name]:
          return f"{name} was changed or cut short"
    if "meta.json" not in digests:
      return "manifest.json lists no meta.json"
  except FileNotFoundError as error:
    return f"{Path(error.filename).name} is missing"
  except OSError as error:
    return f"it cannot be read: {error.strerror}"
  except (ValueError, KeyError, TypeError, AttributeError):
    return "manifest.json is no manifest"
  return None
