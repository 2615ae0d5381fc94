"""Uninterrupted runs, made once for all tests and processes of the session."""

import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from programs import Place, Program

from compmod_jax.core import sharding
from compmod_jax.training import run


@pytest.fixture(scope="session")
def place(tmp_path_factory):
  """Data, configuration, compile cache and the finished reference run."""
  root = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:  # the workers' folders lie in one that they share
    root = root.parent
  made = Place(root / "programs")
  made.root.mkdir(exist_ok=True)
  made.once("reference", made.make)
  return made


@pytest.fixture(scope="session")
def two_phases(place):
  """A finished run of two phases: all but the routers' parameters train, then those alone."""
  workdir = place.root / "phases"

  def make():
    with Program(place, workdir, variant="two") as program:
      program.trained()

  place.once("phases", make)
  return workdir


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
  """One device, which compiles fastest, and a compile cache that only the module's runs share."""
  cache = {
    "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
    "jax_persistent_cache_min_compile_time_secs": 0.3,  # smaller programs are compiled again
  }
  before = {name: getattr(jax.config, name) for name in cache}
  with pytest.MonkeyPatch.context() as patch:
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    patch.setattr(sharding, "make_mesh", lambda config: mesh)
    patch.setattr(run, "use_compile_cache", lambda: None)
    _use_cache(cache)
    yield
    _use_cache(before)


def _use_cache(settings):
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
