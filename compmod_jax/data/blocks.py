"""Documents as one stream of token ids, cut into blocks of one length."""

import functools
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core import durable
from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.data import pipeline
from compmod_jax.data.base import Batch, Dataset, TrainIterator
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Column, Examples
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.data.sources.documents import Documents
from compmod_jax.data.subsets import subset_numbers
from compmod_jax.data.text_tokenizer import FILE, DocumentData
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

  def begin(self, number: int) -> int:
    """Where in the stream the text of a block begins; raises an IndexError if there is none."""
    return int(self._numbers[number]) * self._stride

  def _one(self, number: int) -> np.ndarray:
    begin = self.begin(number)
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


@runtime_checkable
class BlocksConfig(Protocol):
  """What the configuration of a task on blocks of text says of them."""

  @property
  def data(self) -> DocumentData:
    """Where documents come from."""
    ...

  @property
  def length(self) -> int:
    """Tokens of a block."""
    ...

  @property
  def batch_tokens(self) -> int:
    """Tokens of a global batch."""
    ...

  @property
  def tokenizer_documents(self) -> int:
    """Documents that the tokenizer is trained on, at most."""
    ...

  @property
  def small_share(self) -> float:
    """Share of the training blocks in the small part."""
    ...


def check_blocks(task: BlocksConfig) -> None:
  """Raises a `UserError` for a value of a task's configuration that cannot be."""
  check_least(task, "task.", length=2, tokenizer_documents=1)
  check(
    task.batch_tokens >= task.length and task.batch_tokens % task.length == 0,
    f"task.batch_tokens is {task.batch_tokens}; it must be a multiple of task.length ="
    f" {task.length}.",
  )
  check(
    0 < task.small_share < 1,
    f"task.small_share is {task.small_share}; it must lie between 0 and 1.",
  )


C = TypeVar("C", bound=BlocksConfig, covariant=True)


class TextBlocks(Dataset[C]):
  """Blocks of running text: the start token, and a stretch of documents with their ends.

  Batches hold `tokens` [rows, length] and `index`.

  Attributes:
    config: the task's configuration.
    tokenizer: from text to tokens.
    start: the token that every block begins with.
    cache: folder in which tokenised text is kept.
  """

  def __init__(self, config: C, tokenizer: Tokenizer, start: int, cache: Path | None = None):
    self.config, self.tokenizer, self.start, self.cache = config, tokenizer, start, cache
    self._loaded = dict[tuple[str, int], Examples]()

  def blocks(self, split: str, stride: int | None = None) -> Examples:
    """Blocks of which a new one begins every `stride` tokens; end to end if not given.

    Raises:
      UserError: an unknown split, or one without text.
    """
    stride = self.config.length - 1 if stride is None else stride
    if (split, stride) not in self._loaded:
      check_choice("split", split, self.config.data.splits())
      stream = token_stream(self.config.data.load(split), self.tokenizer, self.cache)
      check(
        len(stream) > 0,
        f"The split {split!r} has no text. Check task.data with `python -m train.check_data`.",
      )
      found = block_examples(
        stream, self.config.length, start=self.start, pad=self.tokenizer.pad, stride=stride
      )
      self._loaded[split, stride] = found
    return self._loaded[split, stride]

  def examples(self, split: str) -> Examples:
    """Blocks end to end; see `blocks`."""
    return self.blocks(split)

  def documents(self, split: str) -> np.ndarray:
    """The number, from 0, of the document in which each block's text begins, int [blocks]."""
    column = self.blocks(split).columns["tokens"]
    assert isinstance(column, Blocks)
    numbers, stream = column.numbers()
    ends = np.flatnonzero(stream == self.tokenizer.eos)
    return np.searchsorted(ends, numbers * (self.config.length - 1))

  def unknown(self, split: str) -> float:
    """Per cent of a split's tokens, ends included, that are unknown words."""
    blocks, found = self.blocks(split), 0
    for block in blocks.columns["tokens"]:
      found += int(np.sum(block[1:] == self.tokenizer.unk))
    return 100 * found / int(blocks.tokens["tokens"] - len(blocks))

  def check(self) -> None:
    """Loads every split that will be scored, and that of training.

    Raises:
      UserError: one is missing, damaged or empty.
    """
    for split in self.splits():
      self.blocks(split)

  def notes(self) -> list[str]:
    """How much training text there is."""
    blocks = self.blocks("train")
    return [f"{blocks.tokens['tokens'] - len(blocks):,} training tokens in {len(blocks):,} blocks"]

  def fingerprints(self) -> Fingerprints:
    """Of the training text."""
    blocks = self.blocks("train")
    column, tokens = blocks.columns["tokens"], blocks.tokens["tokens"] - len(blocks)
    assert isinstance(column, Column)
    return {"text": fingerprint(tokens, "tokens", column.numbers())}

  def files(self) -> dict[str, bytes]:
    """The tokenizer, serialised."""
    return {FILE: self.tokenizer.to_bytes()}

  @functools.cached_property
  def batch(self) -> BatchConfig:
    """The pipeline's configuration: one shape."""
    return BatchConfig(tokens=self.config.batch_tokens, buckets=(self.config.length,))

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """An endless iterator over batches of blocks, and how many make an epoch."""
    examples = self.blocks("train")
    if part != "all":
      share = self.config.small_share
      examples = examples.select(subset_numbers(part, len(examples), small_share=share, seed=seed))
    iterator = pipeline.train_batches(
      examples, self.batch, seed=seed, multiple=multiple, process=process, processes=processes
    )
    return iterator, pipeline.batches_per_epoch(examples, self.batch, multiple)

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches in which every block of a split is once."""
    return pipeline.eval_batches(self.blocks(split), self.batch, multiple=multiple)

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    return {"tokens": jnp.full((1, 2), self.tokenizer.unk, jnp.int32), "index": jnp.arange(1)}

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    blocks = self.config.batch_tokens // self.config.length
    return f"batches of {blocks} blocks of {self.config.length} tokens"
