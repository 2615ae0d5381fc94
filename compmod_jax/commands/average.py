"""Averages the parameters of a run's last evaluated models.

    python -m train.average --workdir runs/nmt_cah --last 5

The mean goes to `models/average` in the workdir, to be used by `--model average` of
`train.predict` and `train.evaluate`. Training keeps `keep_models` evaluated models.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compmod_jax.commands import cli


@dataclasses.dataclass(frozen=True)
class Args:
  """Averages the parameters of a run's last evaluated models."""

  workdir: Path
  """Workdir of a training run."""
  last: int = 5
  """How many evaluated models are averaged, the newest ones."""


def main(argv: list[str]) -> None:
  """Averages and saves."""
  args = cli.options(Args, argv)
  from compmod_jax.checkpoints.model_folder import save_model_folder

  folders = _newest(args.workdir / "models", args.last)
  params, files, meta = average(folders)
  place = args.workdir / "models" / "average"
  save_model_folder(place, params=params, files=files, meta=meta)
  print(f"{place} is the mean of {', '.join(folder.name for folder in folders)}")


def _newest(models: Path, last: int) -> list[Path]:
  from compmod_jax.core.errors import check

  check(last >= 1, f"--last is {last}; it must be at least 1.")
  folders = sorted(models.glob("step-*"))
  check(
    len(folders) >= last,
    f"--last is {last}, but {models} holds {len(folders)} evaluated models. Give a smaller number,"
    f" or train with --config.keep_models={last} so that enough are kept.",
  )
  return folders[-last:]


def average(folders: list[Path]) -> tuple[Any, dict[str, bytes], dict[str, Any]]:
  """The mean of several models' parameters, with what else they have in common.

  Sums are in float64 and the mean in float32, so that the order does not matter.

  Returns:
    (params, files, meta) as `save_model_folder` takes them; `meta` lists the averaged steps.

  Raises:
    UserError: a model is damaged, or they differ in configuration, tokenizers or shapes.
  """
  import jax
  import numpy as np

  from compmod_jax.checkpoints.model_folder import load_model_folder

  total, files, first = load_model_folder(folders[0])
  shapes = jax.tree.map(np.shape, total)
  total = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), total)
  metas = [first]
  for folder in folders[1:]:
    params, its_files, meta = load_model_folder(folder)
    _check_same(folders[0], folder, "configuration", _kind(first), _kind(meta))
    _check_same(folders[0], folder, "tokenizers", files, its_files)
    _check_same(folders[0], folder, "parameters", shapes, jax.tree.map(np.shape, params))
    total = jax.tree.map(np.add, total, params)
    metas.append(meta)
  mean = jax.tree.map(lambda leaf: np.asarray(leaf / len(folders), np.float32), total)
  steps = [meta.get("step") for meta in metas]
  return mean, files, {**metas[-1], "score": None, "averaged_steps": steps}


def _kind(meta: Mapping[str, Any]) -> tuple[Any, Any]:
  return meta.get("task"), meta.get("model")


def _check_same(first: Path, other: Path, what: str, one: object, two: object) -> None:
  from compmod_jax.core.errors import check

  check(
    one == two,
    f"{first} and {other} have different {what}; only models of one run can be averaged. Move those"
    " of another run away.",
  )
