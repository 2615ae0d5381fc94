"""Text to token ids and back."""

from compmod_jax.data.tokenizers.build import (
  cached_tokenizer,
  pair_tokenizers,
  tokenizer_from_bytes,
  train_tokenizer,
)
from compmod_jax.data.tokenizers.vocabulary import (
  BOS,
  EOS,
  PAD,
  UNK,
  SentencePiece,
  Tokenizer,
  TokenizerConfig,
  Words,
)

__all__ = [
  "BOS",
  "EOS",
  "PAD",
  "UNK",
  "SentencePiece",
  "Tokenizer",
  "TokenizerConfig",
  "Words",
  "cached_tokenizer",
  "pair_tokenizers",
  "tokenizer_from_bytes",
  "train_tokenizer",
]
