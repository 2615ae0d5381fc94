"""Parameters at random, which no compiled initialiser makes; biases and scales are random too."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np


def drawn(init: Callable[..., Any], *args: Any, seed: int = 0, spread: float = 1.0) -> Any:
  """Normal numbers of the shapes that `init(key, *args)` makes, in NumPy."""
  shapes = nn.unbox(jax.eval_shape(init, jax.random.key(0), *args))
  random = np.random.default_rng(seed)
  return jax.tree.map(lambda s: random.normal(0, spread, s.shape).astype(s.dtype), shapes)
