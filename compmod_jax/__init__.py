"""Networks whose parts compete for their input, in JAX and Flax.

    import compmod_jax

    model = compmod_jax.load("runs/nmt_cah")
    model.translate(["Der Hund schläft."])

`load` opens what `python -m train.main` trained; see `compmod_jax.api`. Everything else is imported
from its module, such as `compmod_jax.mechanisms.competition.router`.
"""

from typing import TYPE_CHECKING, Any

from compmod_jax import _renamed

if TYPE_CHECKING:
  from compmod_jax.api import load
  from compmod_jax.core.errors import UserError
  from compmod_jax.core.intermediates import zero_units
  from compmod_jax.trained import TrainedModel

_HOMES = {
  "TrainedModel": "trained",
  "UserError": "core.errors",
  "load": "api",
  "zero_units": "core.intermediates",
}

_renamed.install()

__all__ = ["TrainedModel", "UserError", "load", "zero_units"]


def __getattr__(name: str) -> Any:
  # JAX takes a second to import: whoever wants one module should not wait for all of them.
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  import importlib

  return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
