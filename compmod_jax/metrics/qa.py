"""Scores of answers to questions: accuracy, exact match and F1 of SQuAD, ROUGE-L.

Scores and shares are percentages, 0 to 100, higher is better; single questions have 0 to 1.
"""

import collections
import functools
import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from compmod_jax.core import extras
from compmod_jax.core.errors import check
from compmod_jax.data.qa.question import FORMATS, Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
  """An answer as SQuAD's scorer compares it.

  Lower case, without ASCII punctuation, then without the words a, an and the; runs of white space
  are one space.
  """
  words = re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
  return " ".join(words.split())


def exact_match(output: str, answers: Sequence[str]) -> float:
  """1 if the output equals one of the answers, both normalised, else 0.

  Answers of which normalising leaves nothing do not count; where there is no other, or none at all,
  the right output is one that is empty too. As in SQuAD 2.0.
  """
  found = normalise(output)
  return float(any(found == answer for answer in _golds(answers)))


def f1(output: str, answers: Sequence[str]) -> float:
  r"""Overlap of words with the answer that fits best, 0 to 1.

  .. math:: F_1 = \frac{2 c}{n + m}

  with n words in the output, m in the answer and c in both, each as often as it is in both; words
  are those of the normalised text. 1 if both are empty, 0 if one is; no answers: as in
  `exact_match`.

  Source: Rajpurkar et al. 2016, 2018.
  """
  return max(_overlap(normalise(output).split(), answer.split()) for answer in _golds(answers))


def rouge_l(output: str, answers: Sequence[str], stemmer: bool = False) -> float:
  """F measure of the longest common subsequence with the answer that fits best, 0 to 1.

  Args:
    output: what a model wrote.
    answers: at least one.
    stemmer: whether endings are taken off first (Porter), so that `cats` matches `cat`; without it
      words match as they are. Published scores differ in it: say which one is reported.

  Raises:
    UserError: there are no answers.

  Words are runs of a-z and 0-9 in the lower-cased text: those of other alphabets do not count.

  Source: Lin 2004, eq. 2-4; computed by the package rouge-score.
  """
  check(len(answers) > 0, "answers is empty; ROUGE-L needs at least one.")
  scorer = _rouge_scorer(stemmer)
  return max(scorer.score(answer, output)["rougeL"].fmeasure for answer in answers)


def is_malformed(question: Question, output: str) -> bool:
  """Whether an output is no answer of the kind that a question asks for.

  Multiple choice: anything but the label of one of its options, such as `(2)`. Yes/no: anything but
  `yes` or `no`. White space at the ends does not count, case does. Text is never malformed.
  """
  if question.format == "multiple_choice":
    return output.strip() not in {f"({n})" for n in range(1, len(question.options) + 1)}
  return question.format == "yes_no" and output.strip() not in ("yes", "no")


def question_scores(
  questions: Sequence[Question], outputs: Sequence[str], stemmer: bool = False
) -> np.ndarray:
  """The main score of every question, by its format.

  Args:
    questions: with their gold answers.
    outputs: what a model wrote, one for each question; empty where it wrote nothing.
    stemmer: as in `rouge_l`.

  Returns:
    float64 [questions], 0 to 1: for multiple choice and yes/no, whether the answer is right; for
    extractive, F1; for abstractive, ROUGE-L.

  Raises:
    UserError: unequal numbers, or no questions.
  """
  _check(questions, outputs)
  pairs = zip(questions, outputs, strict=True)
  return np.array([_main_score(question, output, stemmer) for question, output in pairs])


def score(
  questions: Sequence[Question], outputs: Sequence[str], stemmer: bool = False
) -> dict[str, float]:
  """Scores for each format among the questions; arguments and errors as in `question_scores`.

  Returns:
    For each format that is there, its name and

    - `_questions`: how many there are.
    - multiple_choice, yes_no: `_accuracy`; `_malformed`, the share of outputs that are no answer of
      the kind (`is_malformed`), which count as wrong.
    - extractive: `_f1` and `_exact_match`, means over questions as in SQuAD; `_empty`, the share of
      empty outputs; of questions that have an answer `_has_answer_questions`, `_has_answer_f1` and
      `_has_answer_exact_match`; of the others `_no_answer_questions` and `_no_answer_accuracy`, the
      share of empty outputs, which is their F1 and exact match alike.
    - abstractive: `_rouge_l`.
  """
  values = question_scores(questions, outputs, stemmer)
  scores: dict[str, float] = {}
  for format in FORMATS:
    numbers = [n for n, question in enumerate(questions) if question.format == format]
    if not numbers:
      continue
    found = {"questions": float(len(numbers))}
    part = [(questions[n], outputs[n]) for n in numbers]
    if format == "extractive":
      found |= _extractive(part, values[numbers])
    elif format == "abstractive":
      found["rouge_l"] = _percent(values[numbers])
    else:
      found["accuracy"] = _percent(values[numbers])
      found["malformed"] = _percent([is_malformed(*pair) for pair in part])
    scores |= {f"{format}_{name}": value for name, value in found.items()}
  return scores


def _extractive(pairs: Sequence[tuple[Question, str]], values: np.ndarray) -> dict[str, float]:
  exact = np.array([exact_match(output, question.answers) for question, output in pairs])
  empty = [not normalise(output) for _, output in pairs]
  has = np.array([bool(question.answers) for question, _ in pairs])
  found = {
    "f1": _percent(values),
    "exact_match": _percent(exact),
    "empty": _percent(empty),
    "has_answer_questions": float(has.sum()),
    "no_answer_questions": float((~has).sum()),
  }
  if has.any():
    found["has_answer_f1"] = _percent(values[has])
    found["has_answer_exact_match"] = _percent(exact[has])
  if not has.all():
    found["no_answer_accuracy"] = _percent(exact[~has])
  return found


def _main_score(question: Question, output: str, stemmer: bool) -> float:
  if question.format == "extractive":
    return f1(output, question.answers)
  if question.format == "abstractive":
    return rouge_l(output, question.answers, stemmer)
  return float(output.strip() == question.answer)


def _check(questions: Sequence[Question], outputs: Sequence[str]) -> None:
  check(
    len(questions) == len(outputs),
    f"there are {len(outputs)} outputs for {len(questions)} questions; a score needs one for each,"
    " an empty one where nothing was written.",
  )
  check(len(questions) > 0, "there are 0 questions; a score needs at least one.")


def _golds(answers: Sequence[str]) -> list[str]:
  return [answer for answer in map(normalise, answers) if answer] or [""]


def _overlap(output: list[str], answer: list[str]) -> float:
  if not output or not answer:
    return float(output == answer)
  common = (collections.Counter(output) & collections.Counter(answer)).total()
  return 2 * common / (len(output) + len(answer))


def _percent(values: Sequence[float] | np.ndarray) -> float:
  return 100 * float(np.mean(values))


@functools.cache
def _rouge_scorer(stemmer: bool) -> Any:
  # Here, as importing it takes seconds, which only abstractive questions are worth.
  with extras.needed():
    from rouge_score import rouge_scorer, tokenizers

  return rouge_scorer.RougeScorer(["rougeL"], tokenizer=tokenizers.DefaultTokenizer(stemmer))
