"""What `benchmarks.recoding` measures: the model, a stretch of text, and the work they take."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.lstm_lm import LstmConfig, LstmLM

SIZE, CLIP, RATE = 5.0, 0.25, 20.0
SAMPLES = (1, 4, 8)


@dataclasses.dataclass(frozen=True)
class Case:
  """Sizes of the model and of a stretch."""

  rows: int = 64
  time: int = 35
  dim: int = 650
  vocab: int = 10_000
  layers: int = 2

  @property
  def tokens(self) -> int:
    """Tokens of a call."""
    return self.rows * self.time

  def products(self) -> list[tuple[int, int, int]]:
    """Sizes of the largest products forward: of a cell at one time, of inputs, and into words."""
    return [
      (self.rows, self.dim, 4 * self.dim),
      (self.tokens, self.dim, 4 * self.dim),
      (self.tokens, self.dim, self.vocab),
    ]

  def text(self) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and targets, [rows, time] each."""
    random = np.random.default_rng(0)
    shape = (self.rows, self.time)
    return random.integers(self.vocab, size=shape), random.integers(self.vocab, size=shape)

  def model(self, **recoding: Any) -> LstmLM:
    """The model with this recoding."""
    config = LstmConfig(
      layers=self.layers,
      dim=self.dim,
      embedding_dim=self.dim,
      dropout=0.0,
      recoding=RecodingConfig(**{"size": SIZE, **recoding}),
    )
    return LstmLM(config, self.vocab)

  def params(self) -> Any:
    """Parameters that all variants have in common."""
    model = self.model()
    tokens = jnp.zeros((1, 1), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens, tokens, model.initial_states(1))
    return nn.unbox(variables)["params"]

  def floors(self) -> dict[str, float]:
    """Operations with recoding over those without, from the sizes of all products."""
    cells = 2 * 4 * self.dim * 2 * self.dim * self.layers
    logits = 2 * self.dim * self.vocab
    back = 2 * 4 * self.dim * self.dim * (self.layers - 1)
    plain = cells + logits
    found = {
      "evaluation": (plain + logits + back) / plain,
      "evaluation, top layer": (plain + logits) / plain,
      "training": (3 * plain + back) / (3 * plain),
      "training through": (3 * plain + 3 * logits + 3 * back) / (3 * plain),
    }
    for k in SAMPLES:
      # The recoded state makes the prediction, by a product more.
      found[f"entropy of {k}"] = (cells + back + (2 * k + 1) * logits) / plain
    return found
