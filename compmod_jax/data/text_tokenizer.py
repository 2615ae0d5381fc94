"""The tokenizer of a task on running text: the one that was saved with a model, or a new one."""

import itertools
from collections.abc import Mapping
from pathlib import Path

from compmod_jax.core.errors import check
from compmod_jax.data.sources.documents import (
  Documents,
  GrammarDocuments,
  GrammarTopics,
  TextDocuments,
  TfdsDocuments,
)
from compmod_jax.data.tokenizers import (
  Tokenizer,
  TokenizerConfig,
  cached_tokenizer,
  tokenizer_from_bytes,
)
from compmod_jax.data.zero_shot import WithUnseen

UNKNOWN = " Unknown: per cent of the tokens, ends included, that are unknown words."
DocumentData = GrammarDocuments | GrammarTopics | TextDocuments | TfdsDocuments | WithUnseen
FILE = "text.tokenizer"


def text_tokenizer(
  data: DocumentData,
  config: TokenizerConfig,
  documents: int,
  files: Mapping[str, bytes] | None,
  cache: Path | None,
) -> Tokenizer:
  """The tokenizer in `files`, else one that is trained on the first training documents.

  Args:
    data: where documents come from.
    config: how it is trained.
    documents: on this number of documents at most.
    files: what a task's `files` returned.
    cache: folder in which trained tokenizers are kept.

  Raises:
    UserError: `files` lacks it, or it cannot be trained.
  """
  if files is not None:
    check(FILE in files, f"{FILE} is missing among the saved files; restore the folder.")
    return tokenizer_from_bytes(files[FILE], config)
  return cached_tokenizer(itertools.islice(data.load("train"), documents), config, cache)


def count_words(documents: Documents, tokenizer: Tokenizer) -> int:
  """Words between blanks, and one for the end of every document, as perplexity per word counts."""
  return sum(len(tokenizer.normalise(text).split()) + 1 for text in documents)
