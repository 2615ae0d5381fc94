"""Token ids of texts, kept on the disk: encoded once on a machine."""

import functools
import hashlib
import importlib.metadata
import json
import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compmod_jax.core.disk_cache import DiskCache, cache_folder, limit
from compmod_jax.data import tokenizers
from compmod_jax.data.tokenizers.vocabulary import Tokenizer

_LIMIT = 2 * 10**9  # bytes
_WORTH = 0.05  # seconds
_LIBRARIES = ("sentencepiece", "tokenizers")


def encode(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
  """Ids of texts as `encode_batch` gives them, encoded only where they are not kept yet.

  What takes longer than 0.05 seconds is kept below `cache_folder()`: at most 2e9 bytes, and nothing
  where $COMPMOD_CACHE_GB is 0. Other texts, another tokenizer, other code of tokenizers or another
  version of their libraries are encoded anew.

  Returns:
    The number of ids of every text, int64 [n], and those of all texts in a line, int32.

  Raises:
    UserError: as `disk_cache.limit`.
  """
  texts = list(texts)  # lazily read ones are read once
  small = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
  cache = DiskCache(cache_folder() / "token_ids", min(limit(), _LIMIT))
  key = _key(texts, tokenizer)
  if (found := cache.get(key)) is not None:
    lengths = np.frombuffer(found, "<u4", len(texts))
    ids = np.frombuffer(found, small, offset=lengths.nbytes)
    return lengths.astype(np.int64), ids.astype(np.int32)
  started = time.perf_counter()
  lengths, ids = flatten(tokenizer.encode_batch(texts))
  if time.perf_counter() - started > _WORTH:
    cache.put(key, lengths.astype("<u4").tobytes() + ids.astype(small).tobytes())
  return lengths, ids


def flatten(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
  """The lengths of sequences of ids, int64 [n], and their ids in a line, int32."""
  lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
  ids = (number for sequence in sequences for number in sequence)
  return lengths, np.fromiter(ids, np.int32, int(lengths.sum()))


def _key(texts: Sequence[str], tokenizer: Tokenizer) -> str:
  digest = hashlib.sha256(json.dumps([_versions(), tokenizer.fingerprint, len(texts)]).encode())
  # With their lengths: else "ab", "c" would equal "a", "bc".
  digest.update(np.fromiter(map(len, texts), np.int64, len(texts)).tobytes())
  digest.update("".join(texts).encode("utf-8", "surrogatepass"))
  return digest.hexdigest()


@functools.cache
def _versions() -> list[str]:
  """What else decides the ids: code and libraries of tokenizers."""
  found = [*map(str, sys.version_info[:2]), unicodedata.unidata_version]
  for name in _LIBRARIES:
    try:
      found.append(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
      found.append("")
  files = sorted(Path(tokenizers.__path__[0]).glob("*.py"))
  return [*found, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)]
