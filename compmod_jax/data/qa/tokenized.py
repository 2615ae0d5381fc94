"""Questions as token numbers, ready to be batched."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from compmod_jax.core.errors import check
from compmod_jax.data.examples import Ragged
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.tagger import Tagged
from compmod_jax.data.qa.unified import (
  END,
  QUESTION,
  SPECIAL_TOKENS,
  Encoded,
  TooLong,
  encode,
  segments,
)
from compmod_jax.data.tokenizers.vocabulary import Tokenizer

TRAINED_TOKENS = tuple(name for name in SPECIAL_TOKENS if name != END)
"""What a tokenizer must have besides its end token, which closes every answer."""


def without_special(text: str) -> str:
  """The text with every special token in it broken by a space, as in `( 1)`: it is a word there."""
  for name in TRAINED_TOKENS:
    if name in text:
      text = text.replace(name, f"{name[0]} {name[1:]}")
  return text


def texts_of(questions: Iterable[Question]) -> Iterable[str]:
  """All text of questions, each passage once in a row: what a tokenizer is trained on."""
  passage = ""
  for question in questions:
    if question.passage and question.passage != passage:
      passage = question.passage
      yield without_special(passage)
    for text in (question.question, *question.options, *question.answers):
      if text:
        yield without_special(text)


class QuestionTokenizer:
  """Turns questions into tokens; see `unified.encode`.

  Attributes:
    tokenizer: from text to tokens.
    special_ids: id of every special token; that of `</s>` is the tokenizer's end token.
    length: most tokens of an example, or of a prompt with its answer.
    truncate: which end of a passage is cut where it does not fit.

  Args:
    tagged: also tag every token with its word's part of speech.

  Raises:
    UserError: the tokenizer lacks a special token.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    length: int,
    truncate: Literal["start", "end"],
    *,
    tagged: bool = False,
  ):
    self.tokenizer, self.length = tokenizer, length
    self.truncate: Literal["start", "end"] = truncate
    self._tagged = Tagged(tokenizer) if tagged else None
    self._known = dict[str, list[int]]()
    numbers = {tokenizer.piece(number): number for number in range(tokenizer.vocab_size)}
    missing = [name for name in TRAINED_TOKENS if name not in numbers]
    check(
      not missing,
      f"The tokenizer has no {' '.join(missing)}; questions need them as special tokens. Set"
      " task.tokenizer.special_tokens to compmod_jax.data.qa.tokenized.TRAINED_TOKENS.",
    )
    self.special_ids = {name: numbers[name] for name in TRAINED_TOKENS} | {END: tokenizer.eos}

  def __call__(self, question: Question, room: int | None = None) -> Encoded:
    """A question as tokens; with `room`, as a prompt that leaves positions for an answer.

    Raises:
      TooLong: it does not fit without its passage.
    """
    tagged = self._tagged
    tag = None if tagged is None else (lambda text: tagged(without_special(text)))
    return encode(
      question,
      self._tokenize,
      self.special_ids,
      self.length,
      self.truncate,
      room=room,
      tag=tag,
    )

  def many(
    self, questions: Sequence[Question], room: int | None = None
  ) -> Iterator[Encoded | None]:
    """The same for many questions, much faster; None for one that does not fit."""
    for first in range(0, len(questions), _CHUNK):
      some = questions[first : first + _CHUNK]
      texts = sorted({piece.text for question in some for piece in segments(question)})
      ids = self.tokenizer.encode_batch(map(without_special, texts))
      self._known = dict(zip(texts, ids, strict=True))
      for question in some:
        try:
          yield self(question, room)
        except TooLong:
          yield None
    self._known = {}

  def _tokenize(self, text: str) -> list[int]:
    known = self._known.get(text)
    return self.tokenizer.encode(without_special(text)) if known is None else known


@dataclasses.dataclass(frozen=True)
class TokenizedQuestions:
  """Questions of one or more sets as tokens; row n of every column is one of them.

  Attributes:
    tokens: ids of every question and its answer; of prompts, up to before `<sep>`.
    answer: where the answers start, int32 [n, turns]; 0 where there are fewer.
    answered: tokens of all its answers together, their ends included, int32 [n].
    options: first position of the options and the one after their last, int32 [n, 2].
    tags: number of the part of speech of every token, -1 for none; absent if there are no tags.
    task: name of the task, str [n].
    source: number of the set, int32 [n].
    index: number of the question among all that were to be tokenized, int32 [n].
    truncated: of how many the passage was cut.
    too_long: numbers of questions that were left out, as they do not fit without a passage.
  """

  tokens: Ragged
  answer: np.ndarray
  answered: np.ndarray
  options: np.ndarray
  task: np.ndarray
  source: np.ndarray
  index: np.ndarray
  truncated: int
  too_long: tuple[int, ...]
  tags: Ragged | None = None

  def __len__(self) -> int:
    return len(self.answer)

  def select(self, numbers: np.ndarray) -> "TokenizedQuestions":
    """The questions with these numbers, in this order."""
    return dataclasses.replace(
      self,
      tokens=self.tokens.take(numbers),
      tags=self.tags and self.tags.take(numbers),
      **{name: getattr(self, name)[numbers] for name in COLUMNS},
    )

  def columns(self) -> Mapping[str, np.ndarray]:
    """What a batch has of each question besides its tokens."""
    return {"answer": self.answer, "options": self.options}


_CHUNK = 4096
COLUMNS = ("answer", "answered", "options", "task", "source", "index")


def tokenize_questions(
  sets: Sequence[Sequence[Question]],
  tokenizer: QuestionTokenizer,
  room: int | None = None,
  turns: int = 1,
) -> TokenizedQuestions:
  """The questions of all sets as tokens, one set after the other.

  Args:
    sets: the questions of every set.
    tokenizer: from a question to tokens.
    room: for generating: the rows are prompts, and this many places are kept for the answer. Their
      last token, `<sep>`, is left out: decoding starts with it.
    turns: most questions of a row, which has its passage once. Questions that stand one after
      another, of one task and on one passage, share a row as long as they fit.
  """
  found, source, index, too_long = list[_Row](), list[int](), list[int](), list[int]()
  number, query = 0, tokenizer.special_ids[QUESTION]
  for place, questions in enumerate(sets):
    row = None
    for encoded in tokenizer.many(questions, room):
      if encoded is None:
        too_long.append(number)
      elif row is None or not row.take(encoded, query, turns, tokenizer.length):
        row = _Row(encoded)
        found.append(row)
        source.append(place)
        index.append(number)
      number += 1

  def sequences(values: Iterable[Any]) -> Ragged:
    return Ragged([value if room is None else value[:-1] for value in values])

  tags = [row.tags() for row in found if row.first.tags is not None]
  answer = np.zeros((len(found), turns), np.int32)
  for starts, row in zip(answer, found, strict=True):
    starts[: len(row.starts)] = row.starts
  return TokenizedQuestions(
    tokens=sequences(row.ids() for row in found),
    tags=sequences(tags) if tags else None,
    answer=answer,
    answered=np.array([row.answered for row in found], np.int32),
    options=np.array([row.first.options for row in found], np.int32).reshape(-1, 2),
    task=np.array([row.first.task.strip("<>") for row in found], str),
    source=np.array(source, np.int32),
    index=np.array(index, np.int32),
    truncated=sum(row.first.truncated for row in found),
    too_long=tuple(too_long),
  )


class _Row:
  """A question as tokens, and others on its passage, each from `<q>` on, after it."""

  def __init__(self, first: Encoded):
    self.first = first
    self.starts = [first.answer_start]
    self.answered = len(first.ids) - first.answer_start
    self._length = len(first.ids)
    self._more = list[tuple[Encoded, int]]()

  def take(self, other: Encoded, query: int, turns: int, length: int) -> bool:
    """Adds another question if it may stand here; whether it does."""
    if len(self.starts) == turns or other.task != self.first.task:
      return False
    start = int(np.argmax(other.ids == query))
    same = start > 0 and np.array_equal(other.ids[: start + 1], self.first.ids[: start + 1])
    if not same or self._length + len(other.ids) - start > length:
      return False
    self.starts.append(self._length + other.answer_start - start)
    self.answered += len(other.ids) - other.answer_start
    self._length += len(other.ids) - start
    self._more.append((other, start))
    return True

  def ids(self) -> np.ndarray:
    """The tokens of all questions."""
    return np.concatenate([self.first.ids, *(other.ids[start:] for other, start in self._more)])

  def tags(self) -> np.ndarray:
    """The tags of all questions."""
    parts = [self.first.tags, *(o.tags[start:] for o, start in self._more if o.tags is not None)]
    return np.concatenate([part for part in parts if part is not None])
