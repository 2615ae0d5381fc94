"""The folder of a run, and the configuration that it belongs to.

It holds `config.json` (the resolved experiment and its provenance), `metrics.jsonl`, `tokenizers/`,
`checkpoints/` (to continue), `models/` (to use: `best`, and the last evaluated ones), the report.
"""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compmod_jax import errors
from compmod_jax.serialise import from_json, to_json
from train.experiment import Experiment
from train.provenance import provenance

CONFIG = "config.json"
# What may change between the runs of a workdir: where and how often, but not what is computed.
MAY_CHANGE = (
  "mesh",
  "log_every",
  "watch_sentences",
  "checkpoint_every",
  "keep_last",
  "keep_models",
  "time_limit_minutes",
)


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


def compare(workdir: Path, experiment: Experiment) -> list[str]:
  """Notes on what differs from the workdir's configuration and may.

  Raises:
    UserError: the workdir belongs to another configuration; the message lists what differs.
  """
  if not (workdir / CONFIG).exists():
    return []
  # Through the class, so that fields that were added since then have their defaults.
  theirs, mine = to_json(saved_experiment(workdir)), to_json(experiment)
  wrong, notes = [], []
  for name in mine:
    lines = differences(theirs[name], mine[name], name)
    (notes if name in MAY_CHANGE else wrong).extend(lines)
  errors.check(
    not wrong,
    f"{workdir} belongs to another configuration: {'; '.join(wrong[:12])}. Continue it with its"
    " own configuration, or choose another --workdir.",
  )
  return [f"the workdir was made with another setting: {line}" for line in notes]


def claim(workdir: Path, experiment: Experiment, *, command: str, multiple: int = 1) -> None:
  """Writes `config.json`.

  Args:
    workdir: where.
    experiment: the configuration that the workdir belongs to from now on.
    command: how it was started.
    multiple: of which the rows of its training batches are multiples.

  Raises:
    UserError: it cannot be written.
  """
  path = workdir / CONFIG
  record = {
    "experiment": to_json(experiment),
    "command": command,
    "batch_multiple": multiple,
    "provenance": provenance(),
  }
  try:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)
  except OSError as error:
    raise errors.UserError(
      f"--workdir {workdir} cannot be written: {error.strerror}. Choose another folder."
    ) from error


def read_config(workdir: Path) -> dict[str, Any]:
  """What `config.json` of a workdir holds.

  Raises:
    UserError: it is missing or not readable.
  """
  path = workdir / CONFIG
  try:
    return json.loads(path.read_text())
  except OSError as error:
    raise errors.UserError(
      f"{path} cannot be read: {error.strerror}. Give the --workdir of a training run."
    ) from error
  except json.JSONDecodeError as error:
    raise errors.UserError(f"{path} is damaged: {error}.") from error


def saved_experiment(workdir: Path) -> Experiment:
  """The experiment of a workdir."""
  return from_json(Experiment, read_config(workdir)["experiment"])


def differences(old: Any, new: Any, path: str = "") -> list[str]:
  """Where two nested configurations differ, a line each: `model.heads: 4 there, 8 here`."""
  if isinstance(old, dict) and isinstance(new, dict):
    keys = [*old, *(key for key in new if key not in old)]
    return [
      line
      for key in keys
      for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    ]
  if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
    pairs = enumerate(zip(old, new, strict=True))
    return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}.{i}")]
  return [] if old == new else [f"{path}: {old!r} there, {new!r} here"]
