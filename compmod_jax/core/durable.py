"""Files that appear whole or not at all, and are there after a power failure."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, chunks: Iterable[bytes], *, shared: bool = False) -> None:
  """Replaces a file by one with this content: killed at any time, it leaves the old or the new one.

  Args:
    path: of the file; its folder is made if needed.
    chunks: the content.
    shared: several processes may write the file at once, as in a cache.

  Raises:
    OSError: it cannot be written; what was there is untouched.
  """
  make_folder(path.parent)
  temporary = path.with_name(f".{path.name}.new")
  if shared:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name[:16], suffix=".part")
    os.close(handle)
    temporary = Path(name)
  try:
    with open(temporary, "wb") as file:
      for chunk in chunks:
        file.write(chunk)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException as error:
    temporary.unlink(missing_ok=True)
    if isinstance(error, OSError) and error.filename is None:
      error.filename = str(path)  # a failing write names no file
    raise
  sync(path.parent)


def make_folder(folder: Path) -> None:
  """Makes a folder and those it lies in; their names are on the disk when this returns."""
  made = [path for path in (folder, *folder.parents) if not path.exists()]
  folder.mkdir(parents=True, exist_ok=True)
  for path in made:
    sync(path.parent)


def sync(folder: Path) -> None:
  """Brings the names in a folder to the disk."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
