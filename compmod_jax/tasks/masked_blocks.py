"""Blocks of running text for masked language modelling: read, batched, masked, and shown."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from compmod_jax.core import errors
from compmod_jax.data import pipeline
from compmod_jax.data.corruption import Masked, mask_tokens
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.data.tokenizers.vocabulary import MASK
from compmod_jax.tasks.base import Batch
from compmod_jax.tasks.masked_lm_config import MaskedLMConfig
from compmod_jax.tasks.text_blocks import TextBlocks


class MaskedBlocks(TextBlocks):
  """Blocks of which some tokens are masked.

  Attributes:
    config: the task's configuration.
    ordinary: tokens that may be predicted, bool [vocab]: all but controls.
  """

  config: MaskedLMConfig

  def __init__(self, config: MaskedLMConfig, tokenizer: Tokenizer, cache: Path | None = None):
    mask = tokenizer.mask
    if mask is None:
      raise errors.UserError("The tokenizer has no token <mask>; masked models need one.")
    super().__init__(config, tokenizer, tokenizer.bos, cache)
    self.ordinary = np.ones(tokenizer.vocab_size, bool)
    self.ordinary[list(tokenizer.controls)] = False
    self._mask = mask
    self._fixed = jax.jit(
      lambda tokens, index: self.mask(jax.random.key(config.mask_seed), tokens, index)
    )

  def mask(self, rng: jax.Array, tokens: jax.Array, index: jax.Array) -> Masked:
    """Masks of the blocks with these numbers; see `mask_tokens`."""
    return mask_tokens(
      rng, tokens, index, self.ordinary, mask=self._mask, config=self.config.masking
    )

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
