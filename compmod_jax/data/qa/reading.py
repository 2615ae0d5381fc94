"""From fields to questions: what cannot be used is left out, and counted."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.question import MAX_OPTIONS, Format, Question, Questions
from compmod_jax.data.qa.records import Row

NO_ANSWER = "no answer is given"
NO_OPTION = "no option is marked as right"
MANY_OPTIONS = f"it has over {MAX_OPTIONS} options, and there are no labels for more"


class Reading:
  """What a reader is given and what it leaves out.

  Attributes:
    split: train, valid or test; only formats that hold all splits in one file look at it.
    left_out: reason -> places of the questions that cannot be used.
    elsewhere: how many questions of the files a cut gives to other splits.
  """

  def __init__(self, split: str = "train"):
    self.split = split
    self.left_out: dict[str, list[str]] = {}
    self.elsewhere = 0
    self._last = ("", "")

  def leave_out(self, place: str, reason: str) -> None:
    """Counts a question that cannot be used."""
    self.left_out.setdefault(reason, []).append(place)

  def notes(self) -> tuple[str, ...]:
    """A sentence for each reason: how many questions were left out, and where the first stands."""
    return tuple(
      f"{len(places)} {'question was' if len(places) == 1 else 'questions were'} left out:"
      f" {reason} (first: {places[0]})."
      for reason, places in self.left_out.items()
    )

  def choice(
    self,
    row: Row,
    question: str,
    options: Sequence[str],
    label: int | None,
    passage: str = "",
    info: dict[str, Any] | None = None,
    at: str = "",
  ) -> Iterator[tuple[str, Question]]:
    """(place, question); nothing if `label`, from 1, is no option or there are too many options."""
    if label is None or not 1 <= label <= len(options):
      self.leave_out(row.place + at, NO_OPTION)
    elif len(options) > MAX_OPTIONS:
      self.leave_out(row.place + at, MANY_OPTIONS)
    else:
      squeezed = tuple(map(squeeze, options))
      yield from self.question(
        row, "multiple_choice", question, passage, info, at, options=squeezed, label=label
      )

  def written(
    self,
    row: Row,
    format: Format,
    question: str,
    answers: Iterable[str],
    passage: str = "",
    info: dict[str, Any] | None = None,
    at: str = "",
    may_be_none: bool = False,
  ) -> Iterator[tuple[str, Question]]:
    """(place, question), or nothing if there is no answer though `may_be_none` is not set.

    Blank answers do not count; equal ones count once.
    """
    known = tuple(dict.fromkeys(answer for answer in map(squeeze, answers) if answer))
    if not known and not may_be_none:
      self.leave_out(row.place + at, NO_ANSWER)
    else:
      yield from self.question(row, format, question, passage, info, at, answers=known)

  def question(
    self,
    row: Row,
    format: Format,
    question: str,
    passage: str,
    info: dict[str, Any] | None,
    at: str,
    *,
    options: tuple[str, ...] = (),
    answers: tuple[str, ...] = (),
    label: int = 0,
  ) -> Iterator[tuple[str, Question]]:
    """(place, question), or nothing if its text is blank; runs of white space are one space.

    Raises:
      DataError: the fields do not make a question.
    """
    place, text = row.place + at, squeeze(question)
    if not text:
      self.leave_out(place, "the question is empty")
      return
    try:
      yield (
        place,
        Question(format, text, self._squeezed(passage), options, answers, label, info or {}),
      )
    except UserError as error:
      raise DataError(f"{place}: {error} Mend the file.") from error

  def _squeezed(self, passage: str) -> str:
    # Questions on a passage come one after the other, and share its text in memory.
    if passage != self._last[0]:
      self._last = (passage, squeeze(passage))
    return self._last[1]


def collect(what: str, placed: Iterable[tuple[str, Question]], reading: Reading) -> Questions:
  """The questions of a split, and as notes what was left out.

  Args:
    what: a name for the message, such as `train of boolq`.
    placed: (where it stands, question).
    reading: what the reader of `placed` was given.

  Raises:
    DataError: there is none.
  """
  places: list[str] = []
  items: list[Question] = []
  for place, question in placed:
    places.append(place)
    items.append(question)
  notes = reading.notes()
  if not items:
    reasons = list(notes)
    if reading.elsewhere:
      reasons.append(
        "The split is cut from these files by a hash of each passage, and all"
        f" {reading.elsewhere:,} questions that can be used fall into other splits: give it files"
        " of its own, or raise held_out."
      )
    else:
      reasons.append("Choose other files." if reasons else "The files hold none: choose others.")
    raise DataError(f"{what} has no question that can be used. {' '.join(reasons)}")
  return Questions(items, places.__getitem__, notes)


def squeeze(text: str) -> str:
  """The text with every run of white space, line breaks included, as one space."""
  return " ".join(text.split())


def letter_number(letter: str) -> int | None:
  """1 for A, 2 for B, ...; None for what is no capital letter."""
  letter = letter.strip()
  return ord(letter) - ord("A") + 1 if len(letter) == 1 and "A" <= letter <= "Z" else None
