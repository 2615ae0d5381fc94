"""Which token and which word a position of a model reads, and what gold says of the word.

A model reads one or more streams of tokens: a translation model the source and, behind a start
token, the target; a masked language model its text. A position of a site reads the token of its
stream that the model is fed there (in a decoder: the one before the token that it is to predict).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from compmod_jax.core.errors import UserError, check
from compmod_jax.data.base import Relations
from compmod_jax.data.tokenizers import PAD, Tokenizer
from compmod_jax.tasks.base import Batch, Task
from compmod_jax.tasks.causal_lm import CausalLM
from compmod_jax.tasks.masked_lm import MaskedLM
from compmod_jax.tasks.translation import Translation

NOTHING = -1
MARK = "punct"  # gold tags belong to words; this one is ours, for tokens without letter or digit


class Reader(Protocol):
  """What an analysis must know of a task's data besides the contract of tasks."""

  streams: tuple[str, ...]

  def stream(self, site: str) -> str:
    """The stream that the positions of a site read."""
    ...

  def key_stream(self, site: str) -> str:
    """The stream that the keys of a site of attention read."""
    ...

  def tokenizer(self, stream: str) -> Tokenizer:
    """From text to the tokens of a stream."""
    ...

  def tokens(self, stream: str, batch: Batch) -> np.ndarray:
    """The text's token at every position, int32 [batch, time]; NOTHING for padding and starts."""
    ...

  def hidden(self, stream: str, batch: Batch) -> np.ndarray:
    """Where something else stands in the token's place, bool [batch, time]."""
    ...

  def tags(self, stream: str, split: str, number: int) -> Sequence[str] | None:
    """Gold parts of speech of an example's words, None where there are none."""
    ...

  def info(self, split: str, number: int) -> Mapping[str, Any]:
    """All gold annotations of an example."""
    ...

  def relations(self, stream: str, split: str, number: int) -> Relations | None:
    """Gold relations of an example's words, None where there are none."""
    ...

  def texts(self, stream: str, split: str) -> Sequence[str]:
    """The raw text of all examples of a split, by number."""
    ...

  def targets(self, batch: Batch) -> tuple[Any, Any]:
    """What the logits are to predict: tokens [batch, time], and which of them count, bool."""
    ...


class TranslationReader:
  """Source and target of sentence pairs; see `Reader`."""

  streams: tuple[str, ...] = ("source", "target")

  def __init__(self, task: Translation):
    self.task = task

  def stream(self, site: str) -> str:
    """The encoder reads the source, everything else the target."""
    return "source" if site.startswith("encoder/") else "target"

  def key_stream(self, site: str) -> str:
    """Attention of the encoder and across reads the source."""
    return "source" if site.startswith("encoder/") or "/cross/" in site else "target"

  def tokenizer(self, stream: str) -> Tokenizer:
    """The tokenizer of that side."""
    return (
      self.task.dataset.source_tokenizer
      if stream == "source"
      else self.task.dataset.target_tokenizer
    )

  def tokens(self, stream: str, batch: Batch) -> np.ndarray:
    """What every position reads; the decoder's first one a start token."""
    ids = np.asarray(batch[stream])
    if stream == "target":
      # Position j reads token j - 1, where there is a token j to predict.
      before = np.pad(ids, ((0, 0), (1, 0)), constant_values=PAD)[:, :-1]
      ids = np.where(ids == PAD, PAD, before)
    return np.where(ids == PAD, NOTHING, ids)

  def hidden(self, stream: str, batch: Batch) -> np.ndarray:
    """Nowhere."""
    return np.zeros(np.shape(batch[stream]), bool)

  def tags(self, stream: str, split: str, number: int) -> Sequence[str] | None:
    """The annotation `pos_source` or `pos_target` of a pair."""
    return self.info(split, number).get(f"pos_{stream}")

  def info(self, split: str, number: int) -> Mapping[str, Any]:
    """`Pairs.info` of a pair."""
    info = self.task.dataset.pairs[split].info
    return {} if info is None else info[number]

  def relations(self, stream: str, split: str, number: int) -> Relations | None:
    """`Pairs.relations` of a pair."""
    known = self.task.dataset.pairs[split].relations
    return None if known is None else known(number)[stream]

  def texts(self, stream: str, split: str) -> Sequence[str]:
    """That side of all pairs."""
    pairs = self.task.dataset.pairs[split]
    return pairs.source if stream == "source" else pairs.target

  def targets(self, batch: Batch) -> tuple[Any, Any]:
    """The target's tokens, end of sentence included."""
    return batch["target"], batch["target"] != PAD


class _TextReader:
  """Blocks of running text, of which no gold is known; see `Reader`."""

  streams: tuple[str, ...] = ("text",)

  def __init__(self, task: MaskedLM | CausalLM):
    self.task = task

  def stream(self, site: str) -> str:
    """There is one text."""
    return "text"

  def key_stream(self, site: str) -> str:
    """There is one text."""
    return "text"

  def tokenizer(self, stream: str) -> Tokenizer:
    """The tokenizer."""
    return self.task.dataset.tokenizer

  def tags(self, stream: str, split: str, number: int) -> None:
    """Running text has no gold."""
    return None

  def info(self, split: str, number: int) -> Mapping[str, Any]:
    """Running text has no annotations."""
    return {}

  def relations(self, stream: str, split: str, number: int) -> None:
    """Running text has no gold."""
    return None

  def blocks(self, split: str) -> Sequence[np.ndarray]:
    """The tokens of all blocks, by number."""
    raise NotImplementedError

  def texts(self, stream: str, split: str) -> Sequence[str]:
    """The blocks, documents parted by a line break."""
    tokenizer = self.task.dataset.tokenizer
    texts = []
    for block in self.blocks(split):
      parts = np.split(block, np.flatnonzero(block == tokenizer.eos) + 1)
      texts.append("\n".join(tokenizer.decode(part.tolist()) for part in parts if len(part)))
    return texts


class MaskedReader(_TextReader):
  """Blocks of running text, some of whose tokens are masked; see `Reader`."""

  task: MaskedLM

  def tokens(self, stream: str, batch: Batch) -> np.ndarray:
    """The text as it was before it was masked, without the start token."""
    labels, counted = (np.asarray(value) for value in self.targets(batch))
    ids = np.where(counted, labels, np.asarray(batch["tokens"]))
    pad, start = self.task.dataset.tokenizer.pad, np.arange(ids.shape[1]) < 1
    away = (ids == pad) | start[None] | (np.asarray(batch["index"]) < 0)[:, None]
    return np.where(away, NOTHING, ids)

  def hidden(self, stream: str, batch: Batch) -> np.ndarray:
    """Tokens that are to be predicted."""
    return np.asarray(self.targets(batch)[1])

  def blocks(self, split: str) -> Sequence[np.ndarray]:
    """The tokens of all blocks before any is masked."""
    return self.task.dataset.blocks(split).columns["tokens"]

  def targets(self, batch: Batch) -> tuple[Any, Any]:
    """The tokens that were masked, replaced or kept to be predicted."""
    tokens, places = jnp.asarray(batch["tokens"]), jnp.asarray(batch["positions"])
    rows = jnp.arange(len(tokens))[:, None]
    real = jnp.asarray(batch["predict"])
    # Places that fill up a row may name any position, so that only sums keep them out.
    wanted = jnp.where(real, jnp.asarray(batch["targets"]), 0)
    labels = jnp.zeros_like(tokens).at[rows, places].add(wanted)
    return labels, jnp.zeros_like(tokens).at[rows, places].add(real.astype(tokens.dtype)) > 0


class CausalReader(_TextReader):
  """Blocks of running text, whose tokens are predicted from those before them; see `Reader`."""

  task: CausalLM

  def tokens(self, stream: str, batch: Batch) -> np.ndarray:
    """What every position reads; the last token of a block is predicted only."""
    ids = np.asarray(batch["tokens"])[:, :-1]
    start = np.arange(ids.shape[1]) < 1
    pad = ids == self.task.dataset.tokenizer.pad
    away = pad | start[None] | (np.asarray(batch["index"]) < 0)[:, None]
    return np.where(away, NOTHING, ids)

  def hidden(self, stream: str, batch: Batch) -> np.ndarray:
    """Nowhere."""
    return np.zeros(np.shape(self.tokens(stream, batch)), bool)

  def blocks(self, split: str) -> Sequence[np.ndarray]:
    """The tokens of all windows of evaluation."""
    dataset = self.task.dataset
    return dataset.blocks(split, dataset.stride).columns["tokens"]

  def targets(self, batch: Batch) -> tuple[Any, Any]:
    """Every token after the first, those that a window before had left out."""
    return jnp.asarray(batch["tokens"])[:, 1:], jnp.asarray(batch["counted"])


def reader(task: Task) -> Reader:
  """How to read this task's data.

  Raises:
    UserError: a kind of task that has no reader.
  """
  if isinstance(task, Translation):
    return TranslationReader(task)
  if isinstance(task, MaskedLM):
    return MaskedReader(task)
  if isinstance(task, CausalLM):
    return CausalReader(task)
  raise UserError(
    f"The task is a {type(task).__name__}, whose tokens no analysis can read yet; add a reader for"
    " it to compmod_jax/analysis/reading.py."
  )


class Sentence(NamedTuple):
  """What the positions of one sequence read.

  Attributes:
    words: the words in order, with the punctuation that is written together with them.
    word: number of the word that each position's token belongs to, NOTHING if to none.
    key: what each position's token counts as, lower case: its word without outer punctuation, or
      the token itself if it is punctuation; empty where there is no word.
    mark: whether each position's token has neither letter nor digit.
  """

  words: list[str]
  word: list[int]
  key: list[str]
  mark: list[bool]


def read_sentence(tokenizer: Tokenizer, ids: Sequence[int]) -> Sentence:
  """The words of a sequence of tokens.

  A token belongs to the word that holds its first character other than a blank; one that is only
  the blank before a word belongs to that word.

  Args:
    tokenizer: whose tokens these are.
    ids: token numbers; NOTHING, start and end of sentence are none of any word.
  """
  pieces = [_piece(tokenizer, int(number)) for number in ids]
  words: list[str] = []
  word: list[int] = []
  waiting: list[int] = []
  inside = False
  for piece in pieces:
    first = NOTHING
    for character in piece:
      if character.isspace():
        inside = False
        continue
      if not inside:
        words.append("")
        inside = True
      words[-1] += character
      first = len(words) - 1 if first == NOTHING else first
    word.append(first)
    if first == NOTHING and piece:
      waiting.append(len(word) - 1)
    elif first != NOTHING:
      for place in waiting:
        word[place] = first
      waiting.clear()
  texts = [piece.strip() for piece in pieces]
  mark = [bool(text) and not any(map(str.isalnum, text)) for text in texts]
  key = [
    "" if number == NOTHING else text if is_mark else word_key(words[number])
    for number, text, is_mark in zip(word, texts, mark, strict=True)
  ]
  return Sentence(words, word, key, mark)


def word_key(word: str) -> str:
  """What a word counts as: lower case, without punctuation around it; punctuation stays itself."""
  return re.sub(r"^\W+|\W+$", "", word.lower()) or word.lower()


def _piece(tokenizer: Tokenizer, number: int) -> str:
  """The token's text, a blank before it where it begins a word; nothing for what is no text."""
  if number == tokenizer.unk:
    text = "<unk>"
  elif number == NOTHING or number in tokenizer.controls:
    return ""
  else:
    text = tokenizer.text_of(number)
  return f" {text}" if tokenizer.kind == "words" else text


def tags_of(sentence: Sentence, tags: Sequence[str], where: str) -> list[str]:
  """The gold tag of every position: its word's, MARK for punctuation, empty where there is no word.

  Args:
    sentence: what the positions read.
    tags: of the words, in order.
    where: what an error calls the sentence.

  Raises:
    UserError: there is not one tag for each word.
  """
  check(
    len(tags) == len(sentence.words),
    f"{where} has {len(tags)} gold tags for the {len(sentence.words)} words"
    f" {' '.join(sentence.words)!r}; tags must be one for each word between blanks. Mend the data.",
  )
  return [
    "" if number == NOTHING else MARK if mark else tags[number]
    for number, mark in zip(sentence.word, sentence.mark, strict=True)
  ]
