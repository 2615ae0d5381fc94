"""The runs of a table: small JSON files, one for each that is finished."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compmod_jax.core import durable, errors
from compmod_jax.core.config import from_json, to_json
from compmod_jax.training.experiment import Experiment
from compmod_jax.training.identity import MAY_CHANGE
from compmod_jax.training.workdir import differences


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of a table.

  Attributes:
    row: name of the row.
    seed: of the run.
    experiment: the whole configuration.
    file: where its result is kept.
    in_use: see `Row`.
  """

  row: str
  seed: int
  experiment: Experiment
  file: Path
  in_use: Mapping[str, object] = dataclasses.field(default_factory=dict)


def fingerprint(experiment: Experiment) -> dict[str, Any]:
  """What decides a run's result: its configuration but for where and how often it is logged."""
  return {k: v for k, v in to_json(experiment).items() if k not in (*MAY_CHANGE, "name")}


def read(cell: Cell) -> dict[str, Any] | None:
  """The result of a cell, None if it is not done.

  Raises:
    UserError: the file is damaged, or belongs to another configuration.
  """
  if not cell.file.exists():
    return None
  try:
    record = json.loads(cell.file.read_text())
    # Through the class, so that fields that were added since then have their defaults.
    theirs = fingerprint(from_json(Experiment, record["experiment"]))
  except (ValueError, KeyError, TypeError) as error:
    raise errors.UserError(
      f"{cell.file} is not the result of a run ({error}). Restore it or delete it."
    ) from error
  found = _that_count(differences(theirs, fingerprint(cell.experiment)), cell.experiment)
  found += differences({"in_use": record.get("in_use", {})}, {"in_use": dict(cell.in_use)})
  errors.check(
    not found,
    f"{cell.file} was made with another configuration: {'; '.join(found[:6])}. Choose another"
    " --results, or delete the file to make it again.",
  )
  return record


def _that_count(found: list[str], experiment: Experiment) -> list[str]:
  """Differences without those that change no score but by other random numbers.

  They are how far batches are padded, and, where the last parameters are scored, how often and on
  how much a run was evaluated before.
  """
  of_no_matter = ["task.batch.own_lengths"]
  if experiment.model_selection == "last":
    of_no_matter += ["evaluate_every", "evaluate_sentences"]
  return [one for one in found if one.split(":")[0] not in of_no_matter]


def write(cell: Cell, record: dict[str, Any]) -> None:
  """Writes the result of a cell; the file appears whole or not at all."""
  durable.write(cell.file, [(json.dumps(record, indent=1) + "\n").encode()], shared=True)
