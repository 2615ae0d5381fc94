"""Data sets as plain parallel text, for other toolkits."""

import os
import re
from pathlib import Path
from typing import Protocol

from compmod_jax.core.errors import UserError, check
from compmod_jax.data.base import HasSplits


class Parallel(HasSplits, Protocol):
  """A data configuration of sentence pairs in two languages."""

  @property
  def source_language(self) -> str:
    """Of the sources, such as `de`."""
    ...

  @property
  def target_language(self) -> str:
    """Of the translations."""
    ...


def export(data: Parallel, folder: Path) -> dict[str, int]:
  """Writes every split as `SPLIT.LANGUAGE`, one sentence a line, in UTF-8.

  Line breaks within a sentence become spaces, so that the two sides stay aligned.

  Args:
    data: a data configuration.
    folder: made if it is not there. Files there are never changed.

  Returns:
    Pairs written, by split.

  Raises:
    UserError: the two languages have one name, a file of another content is there, or the folder
      cannot be written.
  """
  check(
    data.source_language != data.target_language,
    f"source_language and target_language are both {data.source_language!r}; they name the files of"
    " the two sides. Name them differently.",
  )
  counts = {}
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for split in data.splits():
      pairs = data.load(split)
      counts[split] = len(pairs)
      sides = ((data.source_language, pairs.source), (data.target_language, pairs.target))
      for language, texts in sides:
        lines = (re.sub(r"[\r\n]+", " ", text) + "\n" for text in texts)
        _write_new(folder / f"{split}.{language}", "".join(lines).encode())
  except OSError as error:
    raise UserError(
      f"Nothing more can be written to {folder} ({error.strerror}); name another folder, or make"
      " room in it."
    ) from error
  return counts


def _write_new(path: Path, content: bytes) -> None:
  if path.exists():
    check(
      path.read_bytes() == content,
      f"{path} exists and holds something else; export into an empty folder.",
    )
    return
  part = path.with_name(path.name + ".part")
  part.write_bytes(content)
  os.replace(part, path)
