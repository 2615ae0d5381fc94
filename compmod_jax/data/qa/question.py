"""What every source of questions hands over."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from compmod_jax.core.errors import check, check_choice, short
from compmod_jax.data.base import Relations

Format = Literal["multiple_choice", "yes_no", "extractive", "abstractive"]
FORMATS: tuple[Format, ...] = get_args(Format)
MAX_OPTIONS = 8
"""Most options of a question that a model can be asked: there are labels for this number."""


@dataclasses.dataclass(frozen=True)
class Question:
  """A question with its gold answers.

  Attributes:
    format: multiple_choice: the answer is the number of an option; yes_no: "yes" or "no";
      extractive: words of the passage, or nothing where the question has no answer; abstractive:
      any words.
    question: its text.
    passage: what it is about; empty where there is none.
    options: what there is to choose from, in multiple choice alone.
    answers: right answers as text, the first one for training; several count as equally right in
      scoring. None of them: an extractive question that has no answer. Empty in multiple choice.
    label: number of the right option, from 1, in multiple choice; else 0.
    info: gold annotations, such as the number of facts that the answer needs.

  Raises:
    UserError: fields that do not belong to the format, or do not agree.
  """

  format: Format
  question: str
  passage: str = ""
  options: tuple[str, ...] = ()
  answers: tuple[str, ...] = ()
  label: int = 0
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    check_choice("format", self.format, FORMATS)
    check(bool(self.question.strip()), "question is empty; every example asks something.")
    if self.format == "multiple_choice":
      count = len(self.options)
      check(count >= 2, f"options has {count} entries; multiple choice needs at least 2.")
      check(not self.answers, "answers must be empty in multiple choice; label says what is right.")
      check(
        1 <= self.label <= count,
        f"label is {self.label}; it is the number of one of the {count} options, from 1.",
      )
      return
    check(not self.options, f"options belongs to multiple choice; format is {self.format!r}.")
    check(self.label == 0, f"label belongs to multiple choice; format is {self.format!r}.")
    if self.format == "yes_no":
      check(
        len(self.answers) == 1 and self.answers[0] in ("yes", "no"),
        f"answers is {short(list(self.answers))}; a yes/no question has one, 'yes' or 'no'.",
      )
    if self.format == "abstractive":
      check(bool(self.answers), "answers is empty; an abstractive question needs at least one.")

  @property
  def answer(self) -> str:
    """What the model should write: `(2)` for option 2, else the first answer or nothing."""
    if self.format == "multiple_choice":
      return f"({self.label})"
    return self.answers[0] if self.answers else ""


@dataclasses.dataclass(frozen=True)
class Questions:
  """The questions of a split.

  Attributes:
    items: questions, indexed by number.
    where: number -> where it stands, such as `dev.jsonl:17`.
    notes: sentences on what was left out while reading.
    relations: number -> which words of its passage depend on which; None where that is not known.
  """

  items: Sequence[Question]
  where: Callable[[int], str]
  notes: tuple[str, ...] = ()
  relations: Callable[[int], Relations] | None = None

  def __len__(self) -> int:
    return len(self.items)
