"""Networks whose parts compete for their input, in JAX and Flax.

    import compmod_jax

    model = compmod_jax.load("runs/nmt_cah")
    model.translate(["Der Hund schläft."])

`load` opens what `python -m train.main` trained; see `compmod_jax.api`. Everything else is imported
from its module, such as `compmod_jax.mechanisms.competition`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from compmod_jax.api import load
  from compmod_jax.errors import UserError
  from compmod_jax.sites import zero_units
  from compmod_jax.trained import TrainedModel

_HOMES = {
  "TrainedModel": "trained",
  "UserError": "errors",
  "load": "api",
  "zero_units": "sites",
}

__all__ = ["TrainedModel", "UserError", "load", "zero_units"]


def __getattr__(name: str) -> Any:
  # JAX takes a second to import: whoever wants one module should not wait for all of them.
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  import importlib

  return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
