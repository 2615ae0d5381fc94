"""Running text in blocks of one length: read, kept, and batched."""

import functools
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from compmod_jax.core import errors
from compmod_jax.data import pipeline
from compmod_jax.data.blocks import block_examples, token_stream
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Column, Examples
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.data.subsets import part_numbers
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.tasks.block_settings import BlockSettings
from compmod_jax.tasks.text_tokenizer import DocumentData


class BlocksConfig(BlockSettings, Protocol):
  """What blocks need to know of a task's configuration."""

  @property
  def data(self) -> DocumentData:
    """Where documents come from."""
    ...


class TextBlocks:
  """The blocks of every split of a task's data: the start token, and a stretch of documents.

  Attributes:
    config: the task's configuration.
    tokenizer: from text to tokens.
    start: the token that every block begins with.
    cache: folder in which tokenised text is kept.
  """

  def __init__(
    self, config: BlocksConfig, tokenizer: Tokenizer, start: int, cache: Path | None = None
  ):
    self.config, self.tokenizer, self.start, self.cache = config, tokenizer, start, cache
    self._loaded = dict[tuple[str, int], Examples]()

  def __getitem__(self, split: str) -> Examples:
    return self.windows(split, self.config.length - 1)

  def windows(self, split: str, stride: int) -> Examples:
    """Blocks of which a new one begins every `stride` tokens; see `Blocks`.

    Raises:
      UserError: an unknown split, or one without text.
    """
    if (split, stride) not in self._loaded:
      errors.check_choice("split", split, self.config.data.splits())
      stream = token_stream(self.config.data.load(split), self.tokenizer, self.cache)
      errors.check(
        len(stream) > 0,
        f"The split {split!r} has no text. Check task.data with `python -m train.check_data`.",
      )
      found = block_examples(
        stream, self.config.length, start=self.start, pad=self.tokenizer.pad, stride=stride
      )
      self._loaded[split, stride] = found
    return self._loaded[split, stride]

  def unknown(self, split: str) -> float:
    """Per cent of a split's tokens, ends included, that are unknown words."""
    blocks, found = self[split], 0
    for block in blocks.columns["tokens"]:
      found += int(np.sum(block[1:] == self.tokenizer.unk))
    return 100 * found / int(blocks.tokens["tokens"] - len(blocks))

  def fingerprints(self) -> Fingerprints:
    """Of the training text."""
    blocks = self["train"]
    column, tokens = blocks.columns["tokens"], blocks.tokens["tokens"] - len(blocks)
    assert isinstance(column, Column)
    return {"text": fingerprint(tokens, "tokens", column.numbers())}

  @functools.cached_property
  def batch(self) -> BatchConfig:
    """The pipeline's configuration: one shape."""
    return BatchConfig(tokens=self.config.batch_tokens, buckets=(self.config.length,))

  def train_batches(
    self, part: str, seed: int, multiple: int, process: int, processes: int
  ) -> tuple[Any, int]:
    """An endless iterator over batches of blocks, and how many make an epoch."""
    examples = self["train"]
    if part != "all":
      share = self.config.small_share
      examples = examples.select(part_numbers(part, len(examples), small_share=share, seed=seed))
    iterator = pipeline.train_batches(
      examples, self.batch, seed=seed, multiple=multiple, process=process, processes=processes
    )
    return iterator, pipeline.batches_per_epoch(examples, self.batch, multiple)
