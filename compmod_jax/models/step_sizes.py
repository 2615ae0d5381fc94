"""The parameters of step sizes of recoding that are learned or predicted."""

from typing import Any

import flax.linen as nn
import numpy as np

from compmod_jax.core.sharding import logical
from compmod_jax.mechanisms.recoding.config import RecodingConfig

_UNITS = (300, 100, 1)  # of the layers that predict a step size


def step_size_parameters(
  recoding: RecodingConfig, layers: int, dim: int
) -> dict[str, tuple[Any, tuple[int, ...]]]:
  """Name -> initialiser and shape, as `layers.recoding_signals` reads them.

  All start so that steps have the size `recoding.size`.

  Args:
    recoding: what is learned.
    layers: how many have states that are recoded.
    dim: width of hidden and cell states.

  Source: Ulmer 2019, section 4.3.
  """
  if not recoding.active or recoding.step not in ("learned", "predicted"):
    return {}
  start = float(np.log(np.expm1(recoding.size)))
  if recoding.step == "learned":
    given = logical(nn.initializers.constant(start), "layers", "kinds")
    return {"steps": (given, (layers, 2))}
  found = {}
  for layer in range(layers):
    for kind in "hc":
      width = dim
      for number, units in enumerate(_UNITS):
        name = f"step_{layer}_{kind}_{number}"
        last = number == len(_UNITS) - 1
        kernel = nn.initializers.zeros if last else nn.initializers.he_uniform()
        bias = nn.initializers.constant(start if last else 0.0)
        found[name] = logical(kernel, "embed", "units"), (width, units)
        found[f"{name}_bias"] = logical(bias, "units"), (units,)
        width = units
  return found
