"""One text format for all questions, and its tokens.

    <p> passage <q> question (1) option one (2) option two <sep> (2) </s>

Passage and options are there only where the question has any. Multiple choice is answered with the
label, other questions with text, and one that has no answer with nothing: `<sep> </s>`. Each
`<...>` and `(n)` is one added token.

Source: Knowles 2022, section 3.4, after Khashabi et al. 2020 (UnifiedQA).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.data.qa.question import MAX_OPTIONS, Question
from compmod_jax.layers.reading_strategies import PARTS_OF_SPEECH

PASSAGE, QUESTION, SEPARATOR, END = "<p>", "<q>", "<sep>", "</s>"
LABELS = tuple(f"({number})" for number in range(1, MAX_OPTIONS + 1))
SPECIAL_TOKENS = (PASSAGE, QUESTION, SEPARATOR, END, *LABELS)
"""What a tokenizer needs as tokens of their own."""
MULTIPLE_CHOICE, GENERAL = "<mqa>", "<gqa>"
"""Task tokens, which stand apart from the text."""
UNTAGGED = -1
"""Tag of tokens that are not marked: those of the answer, and its end."""
_SPECIAL = PARTS_OF_SPEECH.index("special")

Kind = Literal["special", "passage", "question", "option", "answer"]
Tag = Callable[[str], tuple[Sequence[int], Sequence[int]]]
"""From text to the ids of its tokens and to as many numbers in `PARTS_OF_SPEECH`."""
_TaggedIds = list[tuple[int, int]]  # id and tag of every token


class Segment(NamedTuple):
  """A piece of the text: one special token, or text of one kind."""

  kind: Kind
  text: str


class TooLong(UserError):
  """Question, options and answer of an example need more tokens than there are places."""


@dataclasses.dataclass(frozen=True)
class Encoded:
  """A question as tokens.

  Attributes:
    ids: int32 [tokens].
    answer_start: position after `<sep>`: where the answer starts, or would.
    options: first position of the options and the one after their last, labels included: from the
      first `(1)` to before `<sep>`. Equal where there are none.
    truncated: whether part of the passage was left out.
    task: the task token.
    tags: number in `PARTS_OF_SPEECH` of every token's word, -1 for the answer and its end, int32
      [tokens]; None where nothing was tagged.
  """

  ids: np.ndarray
  answer_start: int
  options: tuple[int, int]
  truncated: bool
  task: str
  tags: np.ndarray | None = None


def task_token(question: Question) -> str:
  """`<mqa>` for multiple choice, `<gqa>` for all the rest."""
  return MULTIPLE_CHOICE if question.format == "multiple_choice" else GENERAL


def segments(question: Question) -> list[Segment]:
  """The pieces of a question in their order, the answer and `</s>` included.

  Labels, in the answer too, are of kind special. There is no segment for what is empty.

  Raises:
    UserError: the question has more options than there are labels.
  """
  count = len(question.options)
  check(
    count <= MAX_OPTIONS,
    f"options has {count} entries; there are labels for {MAX_OPTIONS}: leave the question out.",
  )
  pieces = []
  if question.passage:
    pieces += [Segment("special", PASSAGE), Segment("passage", question.passage)]
  pieces += [Segment("special", QUESTION), Segment("question", question.question)]
  for label, option in zip(LABELS, question.options, strict=False):
    pieces.append(Segment("special", label))
    if option:
      pieces.append(Segment("option", option))
  pieces.append(Segment("special", SEPARATOR))
  if question.format == "multiple_choice":
    pieces.append(Segment("special", LABELS[question.label - 1]))
  elif question.answer:
    pieces.append(Segment("answer", question.answer))
  return [*pieces, Segment("special", END)]


def encode(
  question: Question,
  tokenize: Callable[[str], list[int]],
  special_ids: Mapping[str, int],
  length: int,
  truncate: Literal["start", "end"] = "start",
  room: int | None = None,
  tag: Tag | None = None,
) -> Encoded:
  """The tokens of a question, at most `length`; what is too long is cut from the passage.

  Args:
    question: what to encode.
    tokenize: from text to ids; never to those of special tokens, whatever the text.
    special_ids: id of every one of `SPECIAL_TOKENS`.
    length: places for tokens.
    truncate: which end of the passage is cut.
    room: for generating: the gold answer is left out, so that nothing depends on its length, and so
      many places after `<sep>` are kept free. None: the answer is there, as in training.
    tag: gives passage, question and every option, each alone, their tags; its ids have to be
      those of `tokenize`. See `tagger.Tagged`. None: no tags.

  Raises:
    TooLong: question, options and answer (or room) do not fit.
    UserError: a special token has no id, text becomes a special token, too many options, or `tag`
      gives other ids than `tokenize`, or not one number for each.
  """
  check_choice("truncate", truncate, ("start", "end"))
  check(room is None or room >= 0, f"room is {room}; it is a number of places, 0 or more, or None.")
  missing = [name for name in SPECIAL_TOKENS if name not in special_ids]
  check(not missing, f"special_ids has no {' '.join(missing)}; add them to the tokenizer.")
  pieces = segments(question)
  separator = pieces.index(Segment("special", SEPARATOR))
  if room is not None:
    pieces = pieces[: separator + 1]
  encoded = [
    _code(piece, tokenize, special_ids, tag if number <= separator else None)
    for number, piece in enumerate(pieces)
  ]
  truncated = _fit(pieces, encoded, length, room or 0, truncate)
  starts = np.cumsum([0, *map(len, encoded)]).tolist()
  first = pieces.index(Segment("special", LABELS[0])) if question.options else separator
  tokens = [token for part in encoded for token in part]
  return Encoded(
    ids=np.array([number for number, _ in tokens], np.int32),
    answer_start=starts[separator + 1],
    options=(starts[first], starts[separator]),
    truncated=truncated,
    task=task_token(question),
    tags=None if tag is None else np.array([part for _, part in tokens], np.int32),
  )


def _fit(
  pieces: list[Segment], encoded: list[_TaggedIds], length: int, room: int, truncate: str
) -> bool:
  """Cuts the passage among `encoded` until all fit; whether that was needed."""
  needed = sum(map(len, encoded)) + room
  over = needed - length
  if over <= 0:
    return False
  kinds = [piece.kind for piece in pieces]
  number = kinds.index("passage") if "passage" in kinds else None
  passage = [] if number is None else encoded[number]
  if number is None or over > len(passage):
    question = pieces[kinds.index("question")].text
    raise TooLong(
      f"length is {length}, but without its passage the question {question[:40]!r} takes"
      f" {needed - len(passage)} tokens, room for the answer included, and only passages are"
      " truncated: set length to that or more, or leave the question out."
    )
  encoded[number] = passage[over:] if truncate == "start" else passage[: len(passage) - over]
  return True


def _code(
  piece: Segment,
  tokenize: Callable[[str], list[int]],
  special_ids: Mapping[str, int],
  tag: Tag | None,
) -> _TaggedIds:
  """Tokens with their tags, which are -1 without `tag`."""
  if piece.kind == "special":
    return [(special_ids[piece.text], UNTAGGED if tag is None else _SPECIAL)]
  ids = list(tokenize(piece.text))
  mistaken = {special_ids[name] for name in SPECIAL_TOKENS}.intersection(ids)
  if mistaken:
    name = next(name for name in SPECIAL_TOKENS if special_ids[name] in mistaken)
    raise UserError(
      f"the {piece.kind} {piece.text[:40]!r} becomes the special token {name}; give a tokenize that"
      " takes all text as plain text."
    )
  if tag is None:
    return [(token, UNTAGGED) for token in ids]
  tagged, parts = tag(piece.text)
  check(
    list(tagged) == ids and len(parts) == len(ids),
    f"tag gives the {piece.kind} {piece.text[:40]!r} {len(tagged)} tokens and {len(parts)} tags,"
    f" not the {len(ids)} tokens of tokenize and as many tags; give both the same tokenizer, and"
    " the same changes of the text before it.",
  )
  return list(zip(ids, parts, strict=True))
