"""Which token and which word a position of a model reads, and what gold says of the word.

A model reads one or more streams of tokens: a translation model the source and, behind a start
token, the target; a masked language model its text. A position of a site reads the token of its
stream that the model is fed there (in a decoder: the one before the token that it is to predict).
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from compmod_jax.core.errors import UserError, check
from compmod_jax.data.base import Relations
from compmod_jax.data.blocks import Blocks
from compmod_jax.data.qa.unified import segments
from compmod_jax.data.tokenizers import PAD, Tokenizer
from compmod_jax.tasks.base import Batch, Task
from compmod_jax.tasks.causal_lm import CausalLM
from compmod_jax.tasks.masked_lm import MaskedLM
from compmod_jax.tasks.question_answering import Answering
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


class _OneStream:
  """One text, without tags and annotations; see `Reader`."""

  streams: tuple[str, ...] = ("text",)
  task: MaskedLM | CausalLM | Answering

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
    """There are none."""
    return None

  def info(self, split: str, number: int) -> Mapping[str, Any]:
    """There is none."""
    return {}


class _TextReader(_OneStream):
  """Blocks of running text; see `Reader`."""

  task: MaskedLM | CausalLM

  def __init__(self, task: MaskedLM | CausalLM):
    self.task = task
    self._gold = dict[str, _BlockGold | None]()
    self._known = dict[tuple[str, int], Relations | None]()

  def relations(self, stream: str, split: str, number: int) -> Relations | None:
    """Those of the block's documents whose words are both in it."""
    if (split, number) not in self._known:
      gold = self._gold_of(split)
      self._known[split, number] = None if gold is None else list(gold.of_block(number))
    return self._known[split, number]

  def _gold_of(self, split: str) -> "_BlockGold | None":
    if split not in self._gold:
      dataset, blocks = self.task.dataset, self.blocks(split)
      documents = dataset.config.data.load(split)
      known, self._gold[split] = documents.relations, None
      if known is not None and isinstance(blocks, Blocks):
        self._gold[split] = _BlockGold(dataset.tokenizer, blocks, list(documents), known)
    return self._gold[split]

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


class QuestionReader(_OneStream):
  """Questions with their passages and gold answers; see `Reader`."""

  task: Answering

  def __init__(self, task: Answering):
    self.task = task
    self._known = dict[str, dict[int, Relations | None]]()

  def tokens(self, stream: str, batch: Batch) -> np.ndarray:
    """What every position reads; the last token of a text is predicted only."""
    ids = np.asarray(batch["tokens"])[:, :-1]
    away = (ids == self.task.dataset.tokenizer.pad) | (np.asarray(batch["index"]) < 0)[:, None]
    return np.where(away, NOTHING, ids)

  def hidden(self, stream: str, batch: Batch) -> np.ndarray:
    """Nowhere."""
    return np.zeros(np.shape(self.tokens(stream, batch)), bool)

  def relations(self, stream: str, split: str, number: int) -> Relations | None:
    """Those of a passage that was not cut; None where its set has no gold."""
    if split not in self._known:
      self._known[split] = dict(self._relations(split))
    return self._known[split][number]

  def _relations(self, split: str) -> Iterator[tuple[int, Relations | None]]:
    """Number and relations of every question that a model can read."""
    dataset, tokenizer = self.task.dataset, self.task.dataset.tokenizer
    sets = [data.load(name) for data, name in dataset.config.data.sets(split)]
    starts = list(itertools.accumulate(map(len, sets), initial=0))
    tokenized, end = dataset.tokenized(split), self.task.model.question
    for row, (number, source) in enumerate(zip(tokenized.index, tokenized.source, strict=True)):
      questions, own = sets[source], int(number) - starts[source]
      if questions.relations is None:
        yield int(number), None
        continue
      ids = np.asarray(tokenized.tokens[row])
      passage = read_sentence(tokenizer, ids[: int(np.argmax(ids == end))].tolist())
      same = _same_starts(questions.items[own].passage.split(), passage.words)
      known = questions.relations(own)
      kept = [one for one in known if one[1] in same and one[2] in same]
      yield int(number), [(name, same[dependent], same[head]) for name, dependent, head in kept]

  def texts(self, stream: str, split: str) -> Sequence[str]:
    """Passage, question, options and answer of every question of every set."""
    return [
      " ".join(piece.text for piece in segments(question))
      for questions in self.task.dataset.questions(split)
      for question in questions
    ]

  def targets(self, batch: Batch) -> tuple[Any, Any]:
    """The tokens of answers, their ends included; in multiple choice the label alone."""
    return jnp.asarray(batch["tokens"])[:, 1:], self.task.model.counted(batch)[0]


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
  if isinstance(task, Answering):
    return QuestionReader(task)
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
    ids: token numbers; NOTHING and what stands for no text (`without_text`) are of no word, and
      end the one before them.
  """
  none = without_text(tokenizer) | {NOTHING}
  pieces = [_piece(tokenizer, int(number)) for number in ids]
  words: list[str] = []
  word: list[int] = []
  waiting: list[int] = []
  inside = False
  for number, piece in zip(ids, pieces, strict=True):
    first = NOTHING
    inside = inside and int(number) not in none
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


@functools.lru_cache(maxsize=16)
def without_text(tokenizer: Tokenizer) -> frozenset[int]:
  """Tokens that stand for no text: all controls but unknown words, and special tokens."""
  special = set(tokenizer.special_tokens)
  marks = {n for n in range(tokenizer.vocab_size) if special and tokenizer.piece(n) in special}
  return frozenset(tokenizer.controls | marks) - {tokenizer.unk}


def _piece(tokenizer: Tokenizer, number: int) -> str:
  """The token's text, a blank before it where it begins a word; nothing for what is no text."""
  if number == tokenizer.unk:
    text = "<unk>"
  elif number == NOTHING or number in without_text(tokenizer):
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


class _BlockGold:
  """Gold relations between the words of blocks, from those of the documents in them.

  Args:
    tokenizer: whose tokens the blocks hold.
    blocks: stretches of a stream of documents, each with its end token.
    texts: of the documents.
    known: number of a document -> its relations.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    blocks: Blocks,
    texts: Sequence[str],
    known: Callable[[int], Relations],
  ):
    self._tokenizer, self._blocks, self._texts, self._known = tokenizer, blocks, texts, known
    _, self._stream = blocks.numbers()
    self._ends = np.flatnonzero(self._stream == tokenizer.eos)

  def of_block(self, number: int) -> Iterator[tuple[str, int, int]]:
    """Relations of a block, by the numbers of the words that `read_sentence` finds in it."""
    begin, tokens = self._blocks.begin(number), self._blocks[number][1:]
    block = read_sentence(self._tokenizer, tokens.tolist()).word
    first, last = np.searchsorted(self._ends, (begin, begin + len(tokens) - 1)).tolist()
    for document in range(first, last + 1):
      start = int(self._ends[document - 1]) + 1 if document else 0
      read = read_sentence(self._tokenizer, self._stream[start : self._ends[document]].tolist())
      here: dict[int, int] = {}  # word of the document -> word of the block
      for place, word in enumerate(read.word, start - begin):
        if word != NOTHING and 0 <= place < len(block):
          here.setdefault(word, block[place])
      own = _same_starts(self._texts[document].split(), read.words)
      for name, dependent, head in self._known(document):
        ends = own.get(dependent, NOTHING), own.get(head, NOTHING)
        if ends[0] in here and ends[1] in here:
          yield name, here[ends[0]], here[ends[1]]


def _same_starts(given: Sequence[str], found: Sequence[str]) -> dict[int, int]:
  """Number of a word -> that of the one that starts at the same letter; none if texts differ.

  A tokenizer may part words that gold has as one, as BERT's does with punctuation; and unknown
  words have other letters, but they are as many.
  """
  if len(given) == len(found):
    return {number: number for number in range(len(given))}
  places = [list(itertools.accumulate(map(len, words), initial=0)) for words in (given, found)]
  if places[0][-1] != places[1][-1]:
    return {}
  starts = {place: number for number, place in enumerate(places[1][:-1])}
  return {n: starts[place] for n, place in enumerate(places[0][:-1]) if place in starts}
