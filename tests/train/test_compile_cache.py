"""Compiled programs on the disk: damaged ones are replaced, and their size is bounded."""

import os
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.monitoring import unregister_event_listener
from programs import compile_cache_restored

from compmod_jax.core import disk_cache
from compmod_jax.core.errors import UserError
from compmod_jax.training.compile_cache import CheckedCache
from compmod_jax.training.run import use_compile_cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The folder of a compile cache that is on; off again afterwards."""
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path))
  with compile_cache_restored():
    use_compile_cache()
    yield tmp_path / "xla"


def _run():
  """Runs a program that only the cache on the disk may have: its result, and whether it has.

  A new function is not in memory; to clear JAX's caches there takes seconds late in all tests.
  """
  events = []

  def listen(event, **_):
    events.append(event)

  jax.monitoring.register_event_listener(listen)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      result = jax.jit(lambda x: jnp.sin(x) * 3 + 1)(np.arange(5, dtype=np.float32))
  finally:
    unregister_event_listener(listen)
  return result.tolist(), "/jax/compilation_cache/cache_hits" in events


def _flip(data):
  return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize(
  "damage", [_flip, lambda data: data[:50], lambda data: b"", lambda data: data[32:]]
)
def test_a_damaged_compiled_program_is_replaced_and_not_used(folder, damage):
  """The last kind of damage is an entry as JAX's own cache writes it, without a checksum."""
  first, _ = _run()
  whole = {path.name: path.read_bytes() for path in folder.iterdir()}
  assert whole
  for path in folder.iterdir():
    path.write_bytes(damage(path.read_bytes()))
  again, _ = _run()
  assert again == first
  cache = CheckedCache(folder, 10**9)
  assert {path.name for path in folder.iterdir()} == whole.keys()
  assert all(cache.get(name.removesuffix("-cache")) for name in whole)


def test_compiled_programs_are_found_again(folder):
  first, _ = _run()
  again, found = _run()
  assert found
  assert again == first


def test_the_cache_stays_below_its_limit_and_keeps_what_was_used_last(tmp_path):
  cache = CheckedCache(tmp_path, 4 * 132)
  for number in range(4):
    cache.put(f"key{number}", bytes([number]) * 100)
    os.utime(tmp_path / f"key{number}-cache", ns=(number, number))
  assert cache.get("key0") == bytes(100)  # it is the one used last now
  cache.put("key4", b"x" * 100)
  cache.put("large", b"x" * 1000)  # larger than all that may be kept
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    "key0-cache", "key2-cache", "key3-cache", "key4-cache"
  ]  # fmt: skip


def test_entries_of_a_cache_without_limit_are_bounded_too(tmp_path):
  """JAX's own cache fails at every write in such a folder."""
  for number in range(3):
    (tmp_path / f"old{number}-cache").write_bytes(b"x" * 500)
  part = tmp_path / "killed.part"
  part.write_bytes(b"x")
  os.utime(part, (time.time() - 1e6,) * 2)
  CheckedCache(tmp_path, 600).put("new", b"y" * 100)
  assert CheckedCache(tmp_path, 600).get("new") == b"y" * 100
  assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 600
  assert not part.exists()


def test_a_cache_that_cannot_be_used_is_no_error(tmp_path):
  (tmp_path / "file").write_text("mine")
  cache = CheckedCache(tmp_path / "file" / "xla", 1000)
  cache.put("key", b"x")
  assert cache.get("key") is None
  assert (tmp_path / "file").read_text() == "mine"


def test_the_size_of_the_cache_can_be_set(monkeypatch):
  assert disk_cache.limit() == 8 * 10**9
  monkeypatch.setenv("COMPMOD_CACHE_GB", "0.5")
  assert disk_cache.limit() == 5 * 10**8
  for wrong in ("much", "-1", "inf", "nan"):
    monkeypatch.setenv("COMPMOD_CACHE_GB", wrong)
    with pytest.raises(UserError, match=f"COMPMOD_CACHE_GB is '{wrong}'; it must be a number of"):
      disk_cache.limit()
