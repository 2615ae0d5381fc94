"""Eight virtual CPU devices, strict ranks, checked array shapes; set before JAX is imported."""

import gc
import os
import tempfile

from xla_flags import QUICK

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "")
  + " --xla_force_host_platform_device_count=8"
  # Tests compile far more than they compute.
  + f" --xla_backend_optimization_level=0 {QUICK}"
)

# What tests draw and compile stays out of the user's cache.
_CACHE = tempfile.TemporaryDirectory(prefix="compmod_jax_cache_")
os.environ["COMPMOD_CACHE"] = _CACHE.name

from jaxtyping import install_import_hook

# Shape annotations of the library are checked while its tests run, and only then.
install_import_hook(
  [
    "compmod_jax.kernels.routing",
    "compmod_jax.mechanisms",
    "compmod_jax.layers",
    "compmod_jax.core.losses",
    "compmod_jax.models",
  ],
  "beartype.beartype",
)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects and few cycles: at its defaults Python looks for those again and again
# among all that JAX keeps.
gc.set_threshold(50_000, 50, 100)


def pytest_collection_finish() -> None:
  """Modules and tests stay to the end: nothing that looks for garbage reads them again."""
  gc.collect()
  gc.freeze()


def pytest_sessionfinish() -> None:
  """pytest looks for garbage five times at its end, among all that JAX keeps; once is enough."""
  gc.collect()
  gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Tests of real data are skipped where there is none."""
  if "COMPMOD_DATA" in os.environ:
    return
  for item in items:
    if item.get_closest_marker("real_data"):
      item.add_marker(pytest.mark.skip(reason="COMPMOD_DATA names no folder of data"))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
  """One device, which compiles fastest, and a compile cache that only the module's runs share."""
  from compmod_jax.core import sharding
  from compmod_jax.training import run

  cache = {
    "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
    "jax_persistent_cache_min_compile_time_secs": 0.3,  # smaller programs are compiled again
  }
  before = {name: getattr(jax.config, name) for name in cache}
  with pytest.MonkeyPatch.context() as patch:
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    patch.setattr(sharding, "make_mesh", lambda config: mesh)
    patch.setattr(run, "use_compile_cache", lambda: None)
    # It takes seconds to forget what all tests before have compiled, which others would use.
    patch.setattr(jax, "clear_caches", lambda: None)
    _use_cache(cache)
    yield
    _use_cache(before)


def _use_cache(settings):
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
