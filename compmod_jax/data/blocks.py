"""Documents as one stream of token ids, cut into blocks of one length."""

import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from compmod_jax.data.documents import Documents
from compmod_jax.data.examples import Column, Examples
from compmod_jax.data.vocabulary import Tokenizer
from compmod_jax.errors import UserError, check

_CHUNK = 1024
_VERSION = "compmod_jax tokens 2"


class Blocks(Column):
  """A stream of tokens in blocks: each is the start token and the next `length - 1` of the stream.

  Every token of the stream is in exactly one block, unless a new one begins every `stride` tokens;
  the last block may be shorter. The stream may lie in a file: nothing but the blocks that are asked
  for is read.
  """

  def __init__(self, stream: np.ndarray, length: int, start: int, stride: int | None = None):
    check(length >= 2, f"length is {length}; a start token and one more need at least 2.")
    self._stream, self._inside, self._start = stream, length - 1, start
    self._stride = self._inside if stride is None else stride
    check(
      1 <= self._stride <= self._inside,
      f"stride is {stride}; give 1 to {self._inside} tokens, so that no token is left out.",
    )
    more = -(-max(len(stream) - self._inside, 0) // self._stride)
    self._numbers = np.arange(1 + more if len(stream) else 0)
    self._measure()

  def _measure(self) -> None:
    rest = len(self._stream) - self._numbers * self._stride
    self.lengths = np.minimum(rest, self._inside) + 1

  def take(self, numbers: np.ndarray) -> "Blocks":
    """The blocks with these numbers, in this order."""
    some = Blocks(self._stream, self._inside + 1, self._start, self._stride)
    some._numbers = self._numbers[numbers]
    some._measure()
    return some

  def _one(self, number: int) -> np.ndarray:
    begin = int(self._numbers[number]) * self._stride  # raises IndexError
    inside = self._stream[begin : begin + self._inside]
    return np.concatenate([[self._start], inside]).astype(np.int32)


def block_examples(
  stream: np.ndarray, length: int, *, start: int, pad: int, stride: int | None = None
) -> Examples:
  """The blocks of a stream, as the pipeline takes them: one column, `tokens`.

  Args:
    stream: of `token_stream`.
    length: tokens of a block.
    start: the token that every block begins with.
    pad: id that fills up the last one.
    stride: tokens after which a new block begins; all of a block, if not given.
  """
  blocks = Blocks(stream, length, start, stride)
  index = np.arange(len(blocks), dtype=np.int32)
  return Examples(columns={"tokens": blocks}, index=index, pad=pad)


def token_stream(documents: Documents, tokenizer: Tokenizer, cache: Path | None) -> np.ndarray:
  """Ids of all documents in their order, the end token after each: int32 or uint16 [tokens].

  With a cache they are written to a file once, and from then on read from there as they are needed.

  Args:
    documents: what is read.
    tokenizer: from text to ids.
    cache: folder of such files; none to keep the stream in memory.

  Raises:
    UserError: there is no text, or the cache cannot be written.
  """
  dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
  chunks = _chunks(documents, tokenizer, dtype)
  if cache is None:
    stream = np.concatenate([np.zeros(0, dtype), *chunks])
  else:
    key = "\n".join([_VERSION, documents.fingerprint, tokenizer.fingerprint])
    path = Path(cache) / f"{hashlib.sha256(key.encode()).hexdigest()}.tokens"
    if not path.is_file():
      _write(path, chunks)
    stream = np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
  return stream


def _chunks(documents: Documents, tokenizer: Tokenizer, dtype: type) -> Iterator[np.ndarray]:
  texts = iter(documents)
  while some := list(itertools.islice(texts, _CHUNK)):
    ids = (number for found in tokenizer.encode_batch(some) for number in (*found, tokenizer.eos))
    yield np.fromiter(ids, dtype)


def _write(path: Path, chunks: Iterator[np.ndarray]) -> None:
  """Writes chunks to a file that appears whole or not at all."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".part")
    try:
      with os.fdopen(handle, "wb") as file:
        for chunk in chunks:
          file.write(chunk.tobytes())
        file.flush()
        os.fsync(file.fileno())
      os.replace(name, path)
    except BaseException:
      Path(name).unlink(missing_ok=True)
      raise
  except OSError as error:
    raise UserError(
      f"The tokens cannot be cached in {path.parent} ({error.strerror}); free space there, or name"
      " another folder."
    ) from error
