"""The three training regimes of a model whose parts compete (Kolios 2023, section 5.4, Table 5.4).

Each is a tuple of phases of the one training loop. The routing parameters are the inference
networks and the signatures, nothing else; what a phase freezes does not move by a bit.
"""

import warnings
from collections.abc import Callable
from typing import Any

from compmod_jax.training.experiment import Phase


def joint(epochs: float = 15) -> tuple[Phase, ...]:
  """Everything at once, on all training data."""
  return (Phase("joint", epochs=epochs),)


def sequential(epochs: float = 15, routing_epochs: float | None = None) -> tuple[Phase, ...]:
  """All but the routers on the large part of the data, then only these on the small part.

  Args:
    epochs: of the first phase, in which routers keep their initial values.
    routing_epochs: of the second; a third of `epochs` if not given.
  """
  return (
    Phase("rest", part="large", trainable="rest", epochs=epochs),
    Phase(
      "routing",
      part="small",
      trainable="routing",
      epochs=epochs / 3 if routing_epochs is None else routing_epochs,
    ),
  )


def iterative(epochs: int = 15) -> tuple[Phase, ...]:
  """One epoch of `sequential`'s first phase and one of its second by turns, `epochs` of each."""
  rest, routing = sequential(1, 1)
  return (rest, routing) * epochs


REGIMES: dict[str, Callable[[int], tuple[Phase, ...]]] = {
  "joint": joint,
  "sequential": sequential,
  "iterative": iterative,
}


def __getattr__(name: str) -> Any:
  if name == "WAYS":  # as configurations of version 0.1 have it
    warnings.warn(
      f"{__name__}.WAYS is called REGIMES now; the old name goes with version 0.3.",
      DeprecationWarning,
      stacklevel=2,
    )
    return REGIMES
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
