"""The configuration of language modelling by decoders."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compmod_jax.core import errors
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.tokenizers import Tokenizer, TokenizerConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot_config import NemotConfig
from compmod_jax.tasks.block_settings import check_blocks
from compmod_jax.tasks.text_tokenizer import DocumentData, text_tokenizer

if TYPE_CHECKING:
  from compmod_jax.tasks.causal_lm import CausalLM


@dataclasses.dataclass(frozen=True)
class CausalLMConfig:
  """A language modelling task for decoders: text, tokenizer, and blocks of documents."""

  data: DocumentData = GrammarDocuments()
  """Where documents come from; each ends with an end token."""
  tokenizer: TokenizerConfig = TokenizerConfig()
  """The tokenizer."""
  tokenizer_documents: int = 200_000
  """The tokenizer is trained on the first so many training documents, at most."""
  length: int = 128
  """Tokens of a block: the start token, and a stretch of documents with an end token after each."""
  batch_tokens: int = 4096
  """Tokens of a global batch, a multiple of `length`."""
  joined: bool = False
  """Tokens see the documents before their own in a block; else every document is apart."""
  stride: int = 0
  """Evaluation: windows start every so many tokens, and only the last ones of a window count
  (all of the first); 0: a block's length, so that every token is read once."""
  small_share: float = 0.07
  """Share of the training blocks in the small part, for phases that train on a part."""

  def __post_init__(self):
    check_blocks(self)
    errors.check(
      0 <= self.stride < self.length,
      f"task.stride is {self.stride}; give 1 to {self.length - 1} tokens (task.length - 1), or 0"
      " for the whole length.",
    )

  def build(
    self,
    model: Any,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "CausalLM":
    """The task with its tokenizer: the one in `files`, else trained on the training split.

    Args:
      model: the model's configuration.
      files: what `CausalLM.files` returned.
      cache: folder in which the tokenizer and tokenised text are kept.

    Raises:
      UserError: the model is none for this task, data are missing, or `files` lacks the tokenizer.
    """
    if not isinstance(model, NemotConfig | DecoderConfig):
      raise errors.UserError(
        f"The task is language modelling by a decoder but model is a {type(model).__name__}; it"
        " needs a NemotConfig or a DecoderConfig."
      )
    # What uses this configuration imports it.
    from compmod_jax.tasks.causal_lm import CausalLM

    return CausalLM(self, model, self.make_tokenizer(files, cache), cache)

  def make_tokenizer(
    self, files: Mapping[str, bytes] | None = None, cache: Path | None = None
  ) -> Tokenizer:
    """The tokenizer in `files`, else one that is trained on the training split."""
    return text_tokenizer(self.data, self.tokenizer, self.tokenizer_documents, files, cache)
