"""The gates at every token of single texts."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from compmod_jax.analysis.gates.edits import Runner, answers
from compmod_jax.analysis.gates.effects import questions_of
from compmod_jax.analysis.gates.reading import KIND, PART, categories, read_batch
from compmod_jax.core import errors
from compmod_jax.data.qa.batches import eval_batches
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.tokenized import tokenize_questions
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.metrics import qa
from compmod_jax.tasks.base import Batch
from compmod_jax.tasks.question_answering import Answering

_ANSWER = "answer"


class Map(NamedTuple):
  """The gates at every token of a text.

  Attributes:
    number: of the text.
    title: what it is called.
    words: its tokens, as people read them.
    kinds: kind of each.
    parts: part of speech of each.
    gates: site -> float32 [tokens, width].
    remark: answers, where the text is a question.
  """

  number: int
  title: str
  words: list[str]
  kinds: list[str]
  parts: list[str]
  gates: dict[str, np.ndarray]
  remark: str = ""


def maps_of_split(runner: Runner, count: int, *, answered: bool) -> list[Map]:
  """The first examples of the subject's split, questions with their right answers.

  Args:
    runner: runs the model.
    count: how many.
    answered: say what the model answers, where they are questions.
  """
  if not count:
    return []
  subject, remarks = dataclasses.replace(runner.subject, chosen=range(count)), dict[int, str]()
  numbers = subject.numbers
  if answered and len(numbers):
    questions = questions_of(runner.task, subject.split, numbers)
    outputs = answers(subject, questions, runner.trained, "first questions")
    for number, question, output in zip(numbers.tolist(), questions, outputs, strict=True):
      remarks[number] = f"Right: {_quoted(question.answer)}; the model answers {_quoted(output)}."
  titles = {number: f"{subject.split}, example {number}" for number in numbers.tolist()}
  return _maps(runner, subject.batches, titles, remarks)


def maps_of_questions(runner: Runner, questions: Sequence[Question]) -> list[Map]:
  """Questions, each with what the model answers in place of a right answer.

  Raises:
    UserError: one does not fit the model without its passage.
  """
  task, subject = runner.task, runner.subject
  assert isinstance(task, Answering)
  outputs = answers(subject, questions, runner.trained, "typed questions")
  answered = [_answered(*pair) for pair in zip(questions, outputs, strict=True)]
  tokenized = tokenize_questions(
    [[question for question, _ in answered]], task.dataset.question_tokenizer
  )
  errors.check(
    not tokenized.too_long,
    f"--text has questions of more than {task.dataset.config.length} tokens without their passage;"
    " shorten them.",
  )
  multiple = subject.sharing.multiple
  batches = eval_batches(
    tokenized,
    rows=task.generator.rows,
    edges=task.generator.edges,
    pad=task.dataset.tokenizer.pad,
    multiple=multiple,
  )
  titles = {number: question.question for number, question in enumerate(questions)}
  remarks = {n: f"The model answers {_quoted(output)}." for n, output in enumerate(outputs)}
  unanswered = {number for number, (_, usable) in enumerate(answered) if not usable}
  return _maps(runner, batches, titles, remarks, unanswered)


def maps_of_texts(runner: Runner, texts: Sequence[str]) -> list[Map]:
  """Running text, each behind an end token.

  Raises:
    UserError: one is too long.
  """
  tokenizer, most, found = runner.task.dataset.tokenizer, runner.config.max_length, list[Map]()
  rows = runner.subject.sharing.multiple
  for number, text in enumerate(texts):
    ids = [tokenizer.eos, *tokenizer.encode(text), tokenizer.eos]
    errors.check(
      len(ids) - 1 <= most,
      f"--text has {len(ids) - 1} tokens with its start, but the model has positions for {most}:"
      f" {text[:40]!r}. Shorten it.",
    )
    index = np.where(np.arange(rows) == 0, number, -1).astype(np.int32)
    batch = {"tokens": np.array([ids] * rows, np.int32), "index": index}
    found += _maps(runner, [batch], {number: text}, {})
  return found


def _quoted(answer: str) -> str:
  return f"“{answer}”" if answer else "nothing"


def _answered(question: Question, output: str) -> tuple[Question, bool]:
  """The question with this answer for a right one; else as it was, and false."""
  if qa.is_malformed(question, output) or not output:
    return question, False
  if question.format == "multiple_choice":
    return dataclasses.replace(question, label=int(output.strip().strip("()"))), True
  return dataclasses.replace(question, answers=(output.strip(),)), True


def _maps(
  runner: Runner,
  batches: Iterable[Batch],
  titles: Mapping[int, str],
  remarks: Mapping[int, str],
  unanswered: Iterable[int] = (),
) -> list[Map]:
  """The texts of batches in the order of their numbers; some without what stands for an answer."""
  kinds, parts = (categories(runner.task)[group] for group in (KIND, PART))
  found = []
  for batch in batches:
    read = read_batch(runner.task, batch, windows=True)
    _, gates = runner(batch, runner.trained)
    for row in np.flatnonzero(batch["index"] >= 0).tolist():
      number, shown = int(batch["index"][row]), read.counted[row]
      own = read.groups[KIND][row]
      if number in set(unanswered):
        shown = shown & (own != kinds.index(_ANSWER))
      found.append(
        Map(
          number,
          titles[number],
          readable(
            runner.task.dataset.tokenizer, np.asarray(batch["tokens"])[row, :-1][shown].tolist()
          ),
          [kinds[kind] for kind in own[shown].tolist()],
          [parts[part] for part in read.groups[PART][row][shown].tolist()],
          {site: np.asarray(gate[row], np.float32)[shown] for site, gate in gates.items()},
          remarks.get(number, ""),
        )
      )
  return sorted(found, key=lambda one: one.number)


def readable(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
  """Every token without blanks around it, and with a dash before what goes on with a word."""
  found, before = [], " "
  for number in ids:
    piece = tokenizer.text_of(number)
    within = tokenizer.kind != "words" and before[-1:].isalnum() and piece[:1].isalnum()
    found.append(f"-{piece}" if within else piece.strip() or "␣")
    before = piece
  return found
