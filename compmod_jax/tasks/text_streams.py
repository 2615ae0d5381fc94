"""The text of every split as streams, read side by side by a recurrent model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.data.blocks import token_stream
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.streams import Stretches, eval_stretches, train_stretches
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.tasks.base import Batch
from compmod_jax.tasks.language_model_config import LanguageModelConfig


class TextStreams:
  """Token numbers of every split, an end token after each document.

  Attributes:
    config: the task's configuration.
    tokenizer: from text to tokens.
    cache: folder in which tokenised text is kept.
    labelled: whether batches hold the label of every token's document.
  """

  def __init__(
    self,
    config: LanguageModelConfig,
    tokenizer: Tokenizer,
    cache: Path | None = None,
    *,
    labelled: bool = False,
  ):
    self.config, self.tokenizer, self.cache, self.labelled = config, tokenizer, cache, labelled
    self._loaded: dict[str, np.ndarray] = {}

  def __getitem__(self, split: str) -> np.ndarray:
    if split not in self._loaded:
      check_choice("split", split, self.config.data.splits())
      stream = token_stream(self.config.data.load(split), self.tokenizer, self.cache)
      check(
        len(stream) > 0,
        f"The split {split!r} has no text. Check task.data with `python -m train.check_data`.",
      )
      self._loaded[split] = stream
    return self._loaded[split]

  def unknown(self, split: str) -> float:
    """Per cent of a split's tokens, ends included, that are unknown words."""
    return 100 * float(np.mean(self[split] == self.tokenizer.unk))

  def documents(self, split: str) -> int:
    """How many documents a split has."""
    return int(np.sum(self[split] == self.tokenizer.eos))

  def labels(self, split: str) -> list[int]:
    """The label of every document, 0 or 1.

    Raises:
      UserError: the data have none.
    """
    data = self.config.data
    if not isinstance(data, GrammarDocuments):
      raise UserError(
        f"The data ({data.describe()}) have no labels of documents; the project's grammar does, the"
        " number of the subject."
      )
    return data.labels(split)

  def stretches(self, split: str, rows: int) -> Stretches:
    """A split as streams side by side."""
    start, length, stream = self.tokenizer.eos, self.config.length, self[split]
    columns = {}
    if self.labelled:
      # A label holds from the start of its document to its end.
      number = np.cumsum(stream == start) - (stream == start)
      columns["label"] = np.asarray(self.labels(split), np.float32)[number]
    return Stretches(stream, start=start, rows=rows, length=length, columns=columns)

  def fingerprints(self) -> Fingerprints:
    """Of the training text, and of its documents' labels where batches hold them."""
    stream = self["train"]
    found = {"text": fingerprint(len(stream), "tokens", [stream])}
    if self.labelled:
      labels = np.asarray(self.labels("train"), np.int64)
      found["labels"] = fingerprint(len(labels), "documents", [labels])
    return found

  def train_batches(
    self, part: str, multiple: int, process: int, processes: int
  ) -> tuple[Any, int]:
    """An endless iterator over stretches in order, and how many make an epoch.

    Raises:
      UserError: a part of the data, which has no order, or rows that devices cannot share.
    """
    check(
      part == "all",
      f"phases.part is {part!r}; a language model with recurrent state reads all of its text in"
      " order. Use part = all.",
    )
    rows = self.config.rows
    check(
      rows % multiple == 0,
      f"task.rows is {rows}; devices and micro-batches need a multiple of {multiple}.",
    )
    stretches = self.stretches("train", rows)
    iterator = train_stretches(stretches, process=process, processes=processes)
    return iterator, len(stretches)

  def eval_batches(self, split: str, multiple: int) -> Iterator[Batch]:
    """The stretches of a split in order, as they are scored."""
    rows = -(-self.config.eval_rows // multiple) * multiple
    return eval_stretches(self.stretches(split, min(rows, len(self[split]))))
