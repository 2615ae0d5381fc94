"""A long text as parallel streams, cut into stretches of one length, for recurrent models.

The stream of targets t_0 ... t_{n-1} is laid out in `rows` rows of equal length, one after the
other; stretch i of an epoch holds positions i * length to (i + 1) * length of every row, so that a
model that keeps its state from one stretch to the next reads each row as one text.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.data.base import Dataset, TrainIterator
from compmod_jax.data.blocks import token_stream
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.data.pipeline import iterate
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.text_tokenizer import FILE, DocumentData
from compmod_jax.data.tokenizers import Tokenizer

Batch = dict[str, np.ndarray]
_ENDLESS = 1 << 62
_STREAMS = 128  # plain evaluation is slower in 64 and 256, by `benchmarks.streams`
_STRETCHES = 8  # least of a stream
_LOGITS = 512 << 20  # bytes of a stretch, in float32


class Stretches:
  """All stretches of a stream.

  A stretch is `tokens` [rows, length], what is read: the token before each target, `start` before
  the first; `targets`; `counted`, 0 where a row has ended; `fresh` [rows], 1 in an epoch's first
  stretch, where states start anew; `index` [rows], the rows' numbers; and further columns.

  Args:
    targets: ids, [n].
    start: what is read before the first target.
    rows: streams side by side.
    length: positions of a stretch.
    columns: further values for each target, [n] each.

  Raises:
    UserError: a size below 1, or fewer targets than rows.
  """

  def __init__(
    self,
    targets: np.ndarray,
    *,
    start: int,
    rows: int,
    length: int,
    columns: Mapping[str, np.ndarray] | None = None,
  ):
    for name, value in (("rows", rows), ("length", length)):
      check(value >= 1, f"{name} is {value}; it must be at least 1.")
    check(
      len(targets) >= rows,
      f"The text has {len(targets)} tokens, too few for {rows} rows; give more text or fewer rows.",
    )
    self.rows, self.length, self.start = rows, length, start
    self.targets, self.columns = targets, dict(columns or {})
    self.per_row = -(-len(targets) // rows)

  def __len__(self) -> int:
    """Stretches of an epoch."""
    return -(-self.per_row // self.length)

  def __getitem__(self, number: int) -> Batch:
    """One stretch, all rows."""
    check(0 <= number < len(self), f"stretch {number} of {len(self)} was asked for.")
    first = np.arange(self.rows)[:, None] * self.per_row
    within = number * self.length + np.arange(self.length)[None]
    places = first + within
    counted = (within < self.per_row) & (places < len(self.targets))
    places = np.where(counted, places, 0)
    before = np.where(places > 0, self.targets[places - 1], self.start)
    batch = {
      "tokens": np.where(counted, before, self.start).astype(np.int32),
      "targets": np.where(counted, self.targets[places], 0).astype(np.int32),
      "counted": counted.astype(np.int32),
      "fresh": np.full(self.rows, number == 0, np.int32),
      "index": np.arange(self.rows, dtype=np.int32),
    }
    for name, column in self.columns.items():
      batch[name] = np.where(counted, column[places], 0).astype(column.dtype)
    return batch


class _Epochs:
  """Stretch i of an endless sequence of epochs, this process's rows: what grain iterates over."""

  def __init__(self, stretches: Stretches, process: int, processes: int):
    self._stretches = stretches
    share = stretches.rows // processes
    self._mine = slice(process * share, (process + 1) * share)

  def __len__(self) -> int:
    return _ENDLESS

  def __repr__(self) -> str:
    return f"stretches of {len(self._stretches.targets)} tokens"

  def __getitem__(self, index: int) -> Batch:
    whole = self._stretches[int(index) % len(self._stretches)]
    return {name: value[self._mine] for name, value in whole.items()}


def train_stretches(stretches: Stretches, *, process: int = 0, processes: int = 1) -> TrainIterator:
  """An endless iterator over the stretches of every epoch in order.

  Returns:
    A grain `DatasetIterator`; `get_state` gives a JSON-able position, and `set_state` goes back.

  Raises:
    UserError: processes cannot share the rows evenly.
  """
  check(
    stretches.rows % processes == 0,
    f"{stretches.rows} rows cannot be shared evenly by {processes} processes; give a multiple.",
  )
  return iterate(_Epochs(stretches, process, processes), prefetch=4)


def eval_stretches(stretches: Stretches) -> Iterator[Batch]:
  """The stretches of one epoch in order."""
  return (stretches[number] for number in range(len(stretches)))


def rows_of_evaluation(tokens: int, length: int, types: int) -> int:
  """Streams that evaluation reads side by side where nobody said how many.

  More streams make larger products, up to 128; but every stream starts without what stands before
  it, so that a short text has fewer. Logits of a stretch are to fit into memory.

  Args:
    tokens: of the text.
    length: tokens of a stretch.
    types: of tokens, for each of which there is a logit.
  """
  return max(1, min(_STREAMS, tokens // (_STRETCHES * length), _LOGITS // (4 * types * length)))


@runtime_checkable
class StreamsConfig(Protocol):
  """What the configuration of a task on streams of text says of them."""

  @property
  def data(self) -> DocumentData:
    """Where documents come from."""
    ...

  @property
  def rows(self) -> int:
    """Streams that training reads side by side."""
    ...

  @property
  def length(self) -> int:
    """Tokens of a stretch."""
    ...

  @property
  def eval_rows(self) -> int:
    """Streams that evaluation reads side by side; 0 for those of `rows_of_evaluation`."""
    ...


C = TypeVar("C", bound=StreamsConfig, covariant=True)


class TextStreams(Dataset[C]):
  """The text of every split as streams, an end token after each document; see `Stretches`.

  Attributes:
    config: the task's configuration.
    tokenizer: from text to tokens.
    cache: folder in which tokenised text is kept.
    labelled: whether batches hold the label of every token's document.
    more_files: what is kept with the parameters besides the tokenizer.
  """

  def __init__(
    self,
    config: C,
    tokenizer: Tokenizer,
    cache: Path | None = None,
    *,
    labelled: bool = False,
    more_files: Mapping[str, bytes] | None = None,
  ):
    self.config, self.tokenizer, self.cache, self.labelled = config, tokenizer, cache, labelled
    self.more_files = dict(more_files or {})
    self._loaded: dict[str, np.ndarray] = {}

  def tokens(self, split: str) -> np.ndarray:
    """Token numbers of a split, [tokens].

    Raises:
      UserError: an unknown split, or one without text.
    """
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
    return 100 * float(np.mean(self.tokens(split) == self.tokenizer.unk))

  def documents(self, split: str) -> int:
    """How many documents a split has."""
    return int(np.sum(self.tokens(split) == self.tokenizer.eos))

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
    start, length, stream = self.tokenizer.eos, self.config.length, self.tokens(split)
    columns = {}
    if self.labelled:
      # A label holds from the start of its document to its end.
      number = np.cumsum(stream == start) - (stream == start)
      columns["label"] = np.asarray(self.labels(split), np.float32)[number]
    return Stretches(stream, start=start, rows=rows, length=length, columns=columns)

  def check(self) -> None:
    """Loads every split that will be scored, and that of training.

    Raises:
      UserError: one is missing, damaged or empty.
    """
    for split in self.splits():
      self.tokens(split)

  def notes(self) -> list[str]:
    """How much training text there is, and how many types of tokens."""
    tokens = len(self.tokens("train"))
    return [f"{tokens:,} training tokens, {self.tokenizer.vocab_size:,} types"]

  def fingerprints(self) -> Fingerprints:
    """Of the training text, and of its documents' labels where batches hold them."""
    stream = self.tokens("train")
    found = {"text": fingerprint(len(stream), "tokens", [stream])}
    if self.labelled:
      labels = np.asarray(self.labels("train"), np.int64)
      found["labels"] = fingerprint(len(labels), "documents", [labels])
    return found

  def files(self) -> dict[str, bytes]:
    """The tokenizer, serialised, and `more_files`."""
    return {FILE: self.tokenizer.to_bytes(), **self.more_files}

  def train_batches(
    self, *, part: str = "all", seed: int = 0, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """An endless iterator over stretches in order, and how many make an epoch; no seed matters.

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

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """The stretches of a split in order, as they are scored."""
    tokens, length = len(self.tokens(split)), self.config.length
    rows = self.config.eval_rows or rows_of_evaluation(tokens, length, self.tokenizer.vocab_size)
    rows = -(-rows // multiple) * multiple
    return eval_stretches(self.stretches(split, min(rows, tokens)))

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    one = jnp.full((1, 2), self.tokenizer.eos, jnp.int32)
    return {"tokens": one, "targets": one, "index": jnp.arange(1), "label": jnp.zeros((1, 2))}

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    return f"batches of {self.config.rows} streams, {self.config.length} tokens of each"
