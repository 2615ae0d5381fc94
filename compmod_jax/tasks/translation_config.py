"""The configuration of translation."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compmod_jax.core import errors
from compmod_jax.data.base import Splits
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.sources.tfds import TfdsData
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.scan import ScanData
from compmod_jax.data.tokenizers import (
  TokenizerConfig,
  pair_tokenizers,
  tokenizer_from_bytes,
)
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer_config import TransformerConfig

if TYPE_CHECKING:
  from compmod_jax.tasks.translation import Translation

SOURCE_FILE, TARGET_FILE = "source.tokenizer", "target.tokenizer"


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
  """A translation task: data, tokenizers, batches, loss and decoding."""

  data: GrammarData | ScanData | TextData | TfdsData = GrammarData()
  """Where sentence pairs come from."""
  tokenizer: TokenizerConfig = TokenizerConfig()
  """The joint tokenizer, or the source side's where `target_tokenizer` is given."""
  target_tokenizer: TokenizerConfig | None = None
  """The target side's tokenizer; none for a joint one."""
  batch: BatchConfig = BatchConfig()
  """Token budget and padded lengths."""
  label_smoothing: float = 0.1
  """Share of probability spread evenly over the vocabulary."""
  decode: DecodeConfig = DecodeConfig()
  """How outputs are searched for."""
  small_share: float = 0.07
  """Share of the training examples in the small part, for phases that train on a part."""

  def __post_init__(self):
    errors.check(
      0 <= self.label_smoothing < 1,
      f"task.label_smoothing is {self.label_smoothing}; it must be at least 0 and below 1.",
    )
    errors.check(
      0 < self.small_share < 1,
      f"task.small_share is {self.small_share}; it must lie between 0 and 1.",
    )

  def build(
    self,
    model: Any,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "Translation":
    """The task with its tokenizers: those in `files`, else trained on the training split.

    Args:
      model: the model's configuration.
      files: what `Translation.files` returned.
      cache: folder in which trained tokenizers are kept.

    Raises:
      UserError: the model is none for this task, data are missing, or `files` lacks a tokenizer.
    """
    if not isinstance(model, TransformerConfig):
      raise errors.UserError(
        f"The task is translation but model is a {type(model).__name__}; it needs a"
        " TransformerConfig."
      )
    splits = Splits(self.data)
    if files is None:
      train = splits["train"]
      source, target = pair_tokenizers(
        train.source, train.target, self.tokenizer, self.target_tokenizer, cache
      )
    else:
      for name in (SOURCE_FILE, TARGET_FILE):
        errors.check(name in files, f"{name} is missing among the saved files; restore the folder.")
      source = tokenizer_from_bytes(files[SOURCE_FILE], self.tokenizer)
      target = tokenizer_from_bytes(files[TARGET_FILE], self.target_tokenizer or self.tokenizer)
    # What uses this configuration imports it.
    from compmod_jax.tasks.translation import Translation

    return Translation(self, model, splits, source, target)
