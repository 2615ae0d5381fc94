"""Compiled programs on the disk: what is damaged is replaced, and their size is bounded.

JAX's own cache keeps a damaged entry for ever (it warns and compiles anew each time, and where the
damage shows in no checksum, runs it), and bounds its size only in a folder that it has bounded from
the start. Only here: JAX's interface for such caches, which is not public.
"""

import contextlib
import hashlib
import os
import time
from pathlib import Path

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from compmod_jax.core import durable
from compmod_jax.core.errors import UserError

SIZE = "COMPMOD_CACHE_GB"
DEFAULT_SIZE = 8.0
_SUFFIX = "-cache"
_DIGEST = hashlib.sha256().digest_size
_DAY = 86_400


class CheckedCache(CacheInterface):
  """A folder with a file for every program: the sha256 of the entry, then the entry.

  Several processes may use it at once. Nothing that goes wrong with a file is an error: without an
  entry JAX compiles.

  Args:
    folder: where the files are; made by the first of them.
    limit: most bytes of all files; those that were not used for longest go.
  """

  def __init__(self, folder: str | Path, limit: int):
    self._path = Path(folder)
    self._limit = limit

  def get(self, key: str) -> bytes | None:
    """The entry; None if there is none, or a damaged one, which is removed."""
    path = self._path / f"{key}{_SUFFIX}"
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
      durable.write(self._path / f"{key}{_SUFFIX}", [digest, value], shared=True)
      self._evict()
    except OSError:
      return

  def _evict(self) -> None:
    entries = []
    for path in self._path.iterdir():
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


def use(folder: Path) -> None:
  """Turns on JAX's persistent compilation cache for programs of any size.

  Raises:
    UserError: as `limit`.
  """
  most = limit()
  jax.config.update("jax_enable_compilation_cache", most > 0)
  if not most:
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  compilation_cache.get_file_cache = lambda path: (CheckedCache(path, most), path)
