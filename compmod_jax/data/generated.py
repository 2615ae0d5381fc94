"""Texts that the project makes itself, kept on the disk: drawn once on a machine."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from compmod_jax.core.disk_cache import DiskCache, cache_folder, limit

_LIMIT = 10**9  # bytes
_WORTH = 0.05  # seconds

Texts = list[tuple[str, str]]


def kept(description: str, code: Iterable[Path], draw: Callable[[], Texts]) -> Texts:
  """What `draw` returns, drawn only where it is not kept yet.

  What takes longer than 0.05 seconds is kept below `cache_folder()`: at most 1e9 bytes, and nothing
  where $COMPMOD_CACHE_GB is 0.

  Args:
    description: what decides the texts, beside the code.
    code: files of the programs that draw: others, and other versions of Python, draw anew.
    draw: makes them.

  Raises:
    UserError: as `disk_cache.limit`.
  """
  digest = hashlib.sha256(f"{sys.version_info[:2]} {description}".encode())
  for path in sorted(code):
    digest.update(hashlib.sha256(path.read_bytes()).digest())
  cache = DiskCache(cache_folder() / "generated", min(limit(), _LIMIT))
  if (found := cache.get(digest.hexdigest())) is not None:
    return [(source, target) for source, target in json.loads(found)]
  started = time.perf_counter()
  texts = draw()
  if time.perf_counter() - started > _WORTH:
    cache.put(digest.hexdigest(), json.dumps(texts, ensure_ascii=False).encode())
  return texts
