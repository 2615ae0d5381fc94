"""Makes a starter project: a configuration, a few lines of data, and a note of what to run.

    python -m train.init first_project

The folder must be new or empty. Its README.md has the commands that train and use the model.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated

import tyro

from compmod_jax.commands import cli
from compmod_jax.core.errors import check

_STARTER = Path(__file__).parent / "starter"


@dataclasses.dataclass(frozen=True)
class Args:
  """Options of the program."""

  folder: Annotated[Path, tyro.conf.Positional]
  """The folder to make."""


def main(argv: list[str]) -> None:
  """Makes the project and prints what to run next."""
  folder = cli.options(Args, argv).folder
  made = write(folder)
  print(f"{folder} is a starter project: {', '.join(map(str, made))}.")
  print(f"\nNext, as its README.md says:\n\n  cd {folder}")
  print("  compmod train --config translate.py --workdir runs/first")


def write(folder: Path) -> list[Path]:
  """Writes the starter project; returns its files, relative to the folder.

  Raises:
    UserError: the folder is a file, or has files in it.
  """
  check(
    not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
    f"{folder} is there already and not an empty folder. Give the name of a new one, for example"
    " first_project.",
  )
  files = sorted(
    path.relative_to(_STARTER)
    for path in _STARTER.rglob("*")
    if path.suffix in (".md", ".py", ".tsv")
  )
  for file in files:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_STARTER / file, folder / file)
  return files
