"""Results on the disk that can be had again: damaged ones are dropped, their size is bounded."""

import contextlib
import hashlib
import os
import time
from pathlib import Path

from compmod_jax.core import durable
from compmod_jax.core.errors import UserError

FOLDER = "COMPMOD_CACHE"
SIZE = "COMPMOD_CACHE_GB"
DEFAULT_SIZE = 8.0
_SUFFIX = "-cache"
_DIGEST = hashlib.sha256().digest_size
_DAY = 86_400


class DiskCache:
  """A folder with a file for every key: the sha256 of the entry, then the entry.

  Several processes may use it at once. Nothing that goes wrong with a file is an error: there is no
  entry then.

  Args:
    folder: where the files are; made by the first of them.
    limit: most bytes of all files; those that were not used for longest go.
  """

  def __init__(self, folder: str | Path, limit: int):
    self._folder = Path(folder)
    self._limit = limit

  def get(self, key: str) -> bytes | None:
    """The entry; None if there is none, or a damaged one, which is removed."""
    path = self._folder / f"{key}{_SUFFIX}"
    try:
      data = path.read_bytes()
      entry = data[_DIGEST:]
      if hashlib.sha256(entry).digest() != data[:_DIGEST]:
        path.unlink(missing_ok=True)
        return None
      with contextlib.suppress(OSError):  # a folder that is only read
        os.utime(path)
      return entry
    except OSError:
      return None

  def put(self, key: str, value: bytes) -> None:
    """Keeps an entry and removes what is beyond the limit."""
    if _DIGEST + len(value) > self._limit:
      return
    try:
      digest = hashlib.sha256(value).digest()
      durable.write(self._folder / f"{key}{_SUFFIX}", [digest, value], shared=True)
      self._evict()
    except OSError:
      return

  def _evict(self) -> None:
    entries = []
    for path in self._folder.iterdir():
      with contextlib.suppress(FileNotFoundError):  # another process removed it
        status = path.stat()
        if path.suffix == ".part" and status.st_mtime < time.time() - _DAY:  # left by a kill
          path.unlink()
        elif path.name.endswith(_SUFFIX):
          entries.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
      if total <= self._limit:
        return
      path.unlink(missing_ok=True)
      total -= size


def cache_folder() -> Path:
  """Where compiled programs, tokenizers and generated texts are: $COMPMOD_CACHE or ~/.cache."""
  return Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "compmod_jax")


def limit() -> int:
  """Most bytes of compiled programs: $COMPMOD_CACHE_GB, in units of 1e9 bytes, or 8e9.

  Raises:
    UserError: the variable holds no such number.
  """
  text = os.environ.get(SIZE) or str(DEFAULT_SIZE)
  try:
    size = float(text)
    if 0 <= size < float("inf"):
      return int(size * 1e9)
  except ValueError:
    pass
  raise UserError(
    f"{SIZE} is {text!r}; it must be a number of gigabytes from 0 (no compiled program is kept),"
    f" for example {DEFAULT_SIZE:g}."
  )
