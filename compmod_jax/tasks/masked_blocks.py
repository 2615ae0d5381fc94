"""Blocks of running text for masked language modelling: read, batched, masked, and shown."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compmod_jax import errors
from compmod_jax.data import pipeline
from compmod_jax.data.blocks import block_examples, token_stream
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples
from compmod_jax.data.parts import part_numbers
from compmod_jax.data.tokenizer import Tokenizer
from compmod_jax.data.vocabulary import MASK
from compmod_jax.mechanisms.masking import Masked, mask_tokens
from compmod_jax.tasks.base import Batch
from compmod_jax.tasks.masked_lm_config import MaskedLMConfig


class MaskedBlocks:
  """The blocks of every split of a task's data.

  Attributes:
    config: the task's configuration.
    tokenizer: from text to tokens.
    ordinary: tokens that may be predicted, bool [vocab]: all but controls.
  """

  def __init__(self, config: MaskedLMConfig, tokenizer: Tokenizer, cache: Path | None = None):
    mask = tokenizer.mask
    if mask is None:
      raise errors.UserError("The tokenizer has no token <mask>; masked models need one.")
    self.config, self.tokenizer, self.cache = config, tokenizer, cache
    self.ordinary = np.ones(tokenizer.vocab_size, bool)
    self.ordinary[list(tokenizer.controls)] = False
    self._mask, self._loaded = mask, dict[str, Examples]()
    self._fixed = jax.jit(
      lambda tokens, index: self.mask(jax.random.key(config.mask_seed), tokens, index)
    )

  def __getitem__(self, split: str) -> Examples:
    if split not in self._loaded:
      errors.check_choice("split", split, self.config.data.splits())
      stream = token_stream(self.config.data.load(split), self.tokenizer, self.cache)
      errors.check(
        len(stream) > 0,
        f"The split {split!r} has no text. Check task.data with `python -m train.check_data`.",
      )
      self._loaded[split] = block_examples(stream, self.tokenizer, self.config.length)
    return self._loaded[split]

  @functools.cached_property
  def batch(self) -> BatchConfig:
    """The pipeline's configuration: one shape."""
    return BatchConfig(tokens=self.config.batch_tokens, buckets=(self.config.length,))

  def mask(self, rng: jax.Array, tokens: jax.Array, index: jax.Array) -> Masked:
    """Masks of the blocks with these numbers; see `mask_tokens`."""
    return mask_tokens(
      rng, tokens, index, self.ordinary, mask=self._mask, config=self.config.masking
    )

  def train_batches(
    self, part: str, seed: int, multiple: int, process: int, processes: int
  ) -> tuple[Any, int]:
    """An endless iterator over batches that are not masked yet, and how many make an epoch."""
    examples = self["train"]
    if part != "all":
      share = self.config.small_share
      examples = examples.select(part_numbers(part, len(examples), small_share=share, seed=seed))
    iterator = pipeline.train_batches(
      examples, self.batch, seed=seed, multiple=multiple, process=process, processes=processes
    )
    return iterator, pipeline.batches_per_epoch(examples, self.batch, multiple)

  def eval_batches(self, split: str, multiple: int) -> Iterator[pipeline.Batch]:
    """Batches in which every block of a split is once, with the masks of every evaluation."""
    for batch in pipeline.eval_batches(self[split], self.batch, multiple=multiple):
      masked = jax.device_get(self._fixed(batch["tokens"], batch["index"]))
      yield {**masked._asdict(), "index": batch["index"]}

  def unigram_entropy(self, split: str) -> float:
    """Entropy of the frequencies of a split's ordinary tokens, in nats per token."""
    counts = np.zeros(self.tokenizer.vocab_size)
    for block in self[split].columns["tokens"]:
      counts += np.bincount(block, minlength=len(counts))
    shares = counts[self.ordinary & (counts > 0)]
    shares = shares / shares.sum()
    return float(-(shares * np.log(shares)).sum())

  def filled(self, batch: Batch, best: np.ndarray, count: int) -> dict[int, tuple[str, str, str]]:
    """Number -> input, output and reference text of the blocks below `count` in a batch.

    Args:
      batch: of `eval_batches`.
      best: predicted tokens, [rows, predicted].
      count: numbers from here on are left out.
    """
    found = {}
    for row in np.flatnonzero((batch["index"] >= 0) & (batch["index"] < count)).tolist():
      real = batch["predict"][row]
      where, tokens = batch["positions"][row][real], np.asarray(batch["tokens"][row])
      output, reference = tokens.copy(), tokens.copy()
      output[where], reference[where] = best[row][real], batch["targets"][row][real]
      found[int(batch["index"][row])] = tuple(map(self._text, (tokens, output, reference)))
    return found

  def _text(self, ids: np.ndarray) -> str:
    """Text of a block, its documents parted by bars."""
    ids = ids[ids != self.tokenizer.pad]
    parts = np.split(ids, np.flatnonzero(ids == self.tokenizer.eos) + 1)
    text = " | ".join(self.tokenizer.decode(part.tolist()) for part in parts if len(part))
    return text.replace(self.tokenizer.mask_text, f" {MASK} ").replace("  ", " ").strip()
