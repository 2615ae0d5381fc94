"""What `benchmarks.transformer` measures: a model, its parameters and a batch."""

import dataclasses
import math
import types
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.tokenizers import EOS, PAD
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import Translation, TranslationConfig


@dataclasses.dataclass(frozen=True)
class Case:
  """A model and the shape of its batches."""

  name: str
  model: TransformerConfig
  rows: int
  length: int
  source_vocab: int = 8848
  target_vocab: int = 6632

  def task(self, **changes: Any) -> Translation:
    """The translation task without data, some options of its model changed."""
    sizes: Any = (self.source_vocab, self.target_vocab)
    sides: Any = [types.SimpleNamespace(vocab_size=size) for size in sizes]
    nothing: Any = None
    config = TranslationConfig(batch=BatchConfig(buckets=(64,)))
    return config.build_with(dataclasses.replace(self.model, **changes), nothing, *sides)

  def params(self, **changes: Any) -> Any:
    """Random parameters of the task's model, of the usual size; saves compiling `init`."""
    random = np.random.default_rng(0)
    shapes = nn.unbox(jax.eval_shape(self.task(**changes).model.init, jax.random.key(0)))

    def draw(path: Any, leaf: Any) -> np.ndarray:
      kind = path[-1].key
      if kind in ("scale", "bias"):
        return np.full(leaf.shape, float(kind == "scale"), np.float32)
      if kind == "table":
        width = leaf.shape[-1]
      else:
        inputs = 2 if leaf.ndim == 3 else 1  # axes; out of heads [heads, head_dim, embed]
        width = math.prod(leaf.shape[:inputs])
      return random.standard_normal(leaf.shape, np.float32) * width**-0.5

    return jax.tree_util.tree_map_with_path(draw, shapes)

  def products(self) -> list[tuple[int, int, int]]:
    """Sizes of a step's largest products forward: into heads, feed-forward, and into words."""
    rows, dim = self.rows * self.length, self.model.dim
    return [
      (rows, dim, 3 * dim),
      (rows, dim, self.model.ffn_dim),
      (rows, self.model.ffn_dim, dim),
      (rows, dim, self.target_vocab),
    ]

  def batch(self) -> dict[str, np.ndarray]:
    """Random pairs, each between 60 and 100 % of the padded length, as in a length bucket."""
    random = np.random.default_rng(0)

    def side(vocab: int) -> np.ndarray:
      tokens = random.integers(4, vocab, (self.rows, self.length)).astype(np.int32)
      lengths = random.integers(int(0.6 * self.length), self.length + 1, self.rows)
      tokens[np.arange(self.length)[None] >= lengths[:, None]] = PAD
      tokens[np.arange(self.rows), lengths - 1] = EOS
      return tokens

    return {"source": side(self.source_vocab), "target": side(self.target_vocab)}
