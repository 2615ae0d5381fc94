"""Compiled programs on the disk: what is damaged is replaced, and their size is bounded.

JAX's own cache keeps a damaged entry for ever (it warns and compiles anew each time, and where the
damage shows in no checksum, runs it), and bounds its size only in a folder that it has bounded from
the start. Only here: JAX's interface for such caches, which is not public.
"""

from pathlib import Path

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from compmod_jax.core.disk_cache import DiskCache, limit


class CheckedCache(DiskCache, CacheInterface):
  """A folder with a file for every program; without an entry JAX compiles."""

  def __init__(self, folder: str | Path, limit: int):
    super().__init__(folder, limit)
    self._path = Path(folder)  # which JAX reads


def use(folder: Path) -> None:
  """Turns on JAX's persistent compilation cache for programs of any size.

  Raises:
    UserError: as `disk_cache.limit`.
  """
  most = limit()
  jax.config.update("jax_enable_compilation_cache", most > 0)
  if not most:
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  compilation_cache.get_file_cache = lambda path: (CheckedCache(path, most), path)
