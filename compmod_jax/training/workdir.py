"""The folder of a run, and its `config.json`.

It holds `config.json` (the resolved experiment, earlier ones, fingerprints of the training data,
provenance; see `compmod_jax.training.identity`), `metrics.jsonl`, `tokenizers/`, `checkpoints/` (to
continue), `models/` (to use: `best`, and the last evaluated ones), the report.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compmod_jax.core import durable, errors
from compmod_jax.core.config import from_json
from compmod_jax.core.untrusted import parse_json, read_bounded
from compmod_jax.training.experiment import Experiment

CONFIG = "config.json"
_CHECKSUM = "sha256"
_LARGEST = 256 << 20  # bytes of config.json


def make_folder(workdir: Path) -> None:
  """Makes a workdir that can be written.

  Raises:
    UserError: it cannot.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=workdir):
      pass
  except OSError as error:
    raise errors.UserError(
      f"--workdir {workdir} cannot be written: {error.strerror}. Choose another folder."
    ) from error


@contextlib.contextmanager
def alone(workdir: Path) -> Iterator[None]:
  """Keeps other training programs of this machine out of a workdir; the kernel ends it with us.

  Raises:
    UserError: another program trains there, or the folder cannot be written.
  """
  make_folder(workdir)
  # The folder itself is locked, so that no file of ours lies in it.
  folder = os.open(workdir, os.O_RDONLY)
  try:
    try:
      fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise errors.UserError(
        f"--workdir {workdir} is in use: another program trains there, and two would overwrite each"
        " other's files. Wait for it, stop it, or choose another folder."
      ) from error
    yield
  finally:
    os.close(folder)


def write_config(workdir: Path, config: Mapping[str, Any]) -> None:
  """Writes `config.json` with a checksum; it is there whole, or what was there before.

  Raises:
    UserError: it cannot be written.
  """
  content = {name: value for name, value in config.items() if name != _CHECKSUM}
  text = json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=2) + "\n"
  try:
    durable.write(workdir / CONFIG, [text.encode()])
  except OSError as error:
    raise errors.UserError(
      f"--workdir {workdir} cannot be written: {error.strerror}. Choose another folder."
    ) from error


def read_config(workdir: Path) -> dict[str, Any]:
  """What `config.json` of a workdir holds; earlier versions wrote it without a checksum.

  Raises:
    UserError: it is missing, not readable or damaged.
  """
  path = workdir / CONFIG
  try:
    config = parse_json(read_bounded(path, _LARGEST).decode())
  except OSError as error:
    raise errors.UserError(
      f"{path} cannot be read: {error.strerror}. Give the --workdir of a training run."
    ) from error
  except ValueError as error:
    raise _damaged(path, str(error)) from error
  if not isinstance(config, dict) or "experiment" not in config:
    raise _damaged(path, "it holds no experiment")
  checksum = config.pop(_CHECKSUM, None)
  if checksum is not None and checksum != _checksum(config):
    raise _damaged(path, "its content does not match the checksum taken when it was written")
  return config


def _checksum(config: Mapping[str, Any]) -> str:
  # Through JSON and back, so that tuples, which JSON turns into lists, are hashed as lists.
  text = json.dumps(json.loads(json.dumps(config)), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _damaged(path: Path, reason: str) -> errors.UserError:
  return errors.UserError(
    f"{path} is damaged: {reason}. The training program restores it from the workdir's checkpoints;"
    " where there are none, copy it from a backup or choose another --workdir."
  )


def saved_experiment(workdir: Path) -> Experiment:
  """The experiment of a workdir."""
  return from_json(Experiment, read_config(workdir)["experiment"])


def changes(old: object, new: object, path: str = "") -> Iterator[tuple[str, Any, Any]]:
  """Where two nested configurations differ: (path such as `model.heads`, old, new)."""
  if isinstance(old, dict) and isinstance(new, dict):
    for key in (*old, *(key for key in new if key not in old)):
      yield from changes(old.get(key), new.get(key), f"{path}.{key}" if path else key)
  elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
      yield from changes(a, b, f"{path}.{i}")
  elif old != new:
    yield path, old, new


def differences(old: object, new: object) -> list[str]:
  """Where two nested configurations differ, a line each: `model.heads: 4 there, 8 here`."""
  return [f"{path}: {a!r} there, {b!r} here" for path, a, b in changes(old, new)]
