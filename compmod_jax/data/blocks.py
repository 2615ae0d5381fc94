"""Documents as one stream of token ids, cut into blocks of one length."""

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from compmod_jax.core import durable
from compmod_jax.core.errors import UserError, check
from compmod_jax.data.examples import Column, Examples
from compmod_jax.data.sources.documents import Documents
from compmod_jax.data.tokenizers.vocabulary import Tokenizer

_CHUNK = 1024
_PIECE = 1 << 24
_VERSION = "compmod_jax tokens 3"


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

  def numbers(self) -> tuple[np.ndarray, ...]:
    """The blocks' numbers and the stream that they are cut from."""
    return self._numbers, self._stream

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
    return np.concatenate([np.zeros(0, dtype), *chunks])
  key = "\n".join([_VERSION, documents.fingerprint, tokenizer.fingerprint])
  path = Path(cache) / f"{hashlib.sha256(key.encode()).hexdigest()}.tokens"
  stream = _cached(path, dtype)
  if stream is None:
    try:
      durable.write(path, _with_digest(chunks), shared=True)
      stream = _cached(path, dtype)
    except OSError as error:
      raise UserError(
        f"The tokens cannot be cached in {path.parent} ({error.strerror}); free space there, or"
        " name another folder."
      ) from error
    check(stream is not None, f"{path} was damaged as soon as it was written; check the disk.")
  assert stream is not None
  return stream


def _chunks(documents: Documents, tokenizer: Tokenizer, dtype: type) -> Iterator[np.ndarray]:
  texts = iter(documents)
  while some := list(itertools.islice(texts, _CHUNK)):
    ids = (number for found in tokenizer.encode_batch(some) for number in (*found, tokenizer.eos))
    yield np.fromiter(ids, dtype)


def _with_digest(chunks: Iterator[np.ndarray]) -> Iterator[bytes]:
  digest = hashlib.sha256()
  for chunk in chunks:
    digest.update(chunk.data)
    yield chunk.tobytes()
  yield digest.digest()


def _cached(path: Path, dtype: type) -> np.ndarray | None:
  """The tokens in a file, whose last bytes are their sha256; None if it is missing or damaged."""
  size = path.stat().st_size - hashlib.sha256().digest_size if path.is_file() else -1
  if size < 0 or size % np.dtype(dtype).itemsize:
    return None
  held = np.memmap(path, np.uint8, mode="r")
  digest = hashlib.sha256()
  for start in range(0, size, _PIECE):
    digest.update(held[start : min(start + _PIECE, size)].data)
  return held[:size].view(dtype) if digest.digest() == held[size:].tobytes() else None
