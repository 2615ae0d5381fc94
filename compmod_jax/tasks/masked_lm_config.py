"""The configuration of masked language modelling."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compmod_jax.core import errors
from compmod_jax.data.corruption import MaskingConfig
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.tokenizers import Tokenizer, TokenizerConfig
from compmod_jax.data.tokenizers.vocabulary import MASK
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.nemot_config import NemotConfig
from compmod_jax.tasks.block_settings import check_blocks
from compmod_jax.tasks.text_tokenizer import DocumentData, text_tokenizer

if TYPE_CHECKING:
  from compmod_jax.tasks.masked_lm import MaskedLM


@dataclasses.dataclass(frozen=True)
class MaskedLMConfig:
  """A masked language modelling task: text, tokenizer, blocks and masks."""

  data: DocumentData = GrammarDocuments()
  """Where documents come from."""
  tokenizer: TokenizerConfig = TokenizerConfig()
  """The tokenizer; the token <mask> is added to its special tokens."""
  tokenizer_documents: int = 200_000
  """The tokenizer is trained on the first so many training documents, at most."""
  length: int = 128
  """Tokens of a block: the start token, and a stretch of documents with an end token after each."""
  batch_tokens: int = 4096
  """Tokens of a global batch, a multiple of `length`."""
  masking: MaskingConfig = MaskingConfig()
  """Which tokens are predicted; drawn anew whenever a block is trained on."""
  mask_seed: int = 0
  """Of the masks of evaluation, which are always the same."""
  small_share: float = 0.07
  """Share of the training blocks in the small part, for phases that train on a part."""

  def __post_init__(self):
    check_blocks(self)
    errors.check(self.mask_seed >= 0, f"task.mask_seed is {self.mask_seed}; it cannot be negative.")

  def build(
    self,
    model: Any,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "MaskedLM":
    """The task with its tokenizer: the one in `files`, else trained on the training split.

    Args:
      model: the model's configuration.
      files: what `MaskedLM.files` returned.
      cache: folder in which the tokenizer and tokenised text are kept.

    Raises:
      UserError: the model is none for this task, data are missing, or `files` lacks the tokenizer.
    """
    if not isinstance(model, EncoderConfig | NemotConfig):
      raise errors.UserError(
        f"The task is masked language modelling but model is a {type(model).__name__}; it needs an"
        " EncoderConfig or a NemotConfig."
      )
    # What uses this configuration imports it.
    from compmod_jax.tasks.masked_blocks import MaskedBlocks
    from compmod_jax.tasks.masked_lm import MaskedLM

    return MaskedLM(self, model, MaskedBlocks(self, self.make_tokenizer(files, cache), cache))

  @property
  def tokenizer_with_mask(self) -> TokenizerConfig:
    """How the tokenizer is trained: with the token <mask>."""
    tokens = self.tokenizer.special_tokens
    if MASK in tokens:
      return self.tokenizer
    return dataclasses.replace(self.tokenizer, special_tokens=(MASK, *tokens))

  def make_tokenizer(
    self, files: Mapping[str, bytes] | None = None, cache: Path | None = None
  ) -> Tokenizer:
    """The tokenizer in `files`, else one that is trained on the training split."""
    documents = self.tokenizer_documents
    return text_tokenizer(self.data, self.tokenizer_with_mask, documents, files, cache)
