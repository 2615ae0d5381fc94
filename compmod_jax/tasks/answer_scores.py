"""Scores of answers to questions of several sets, and questions as lines of text."""

from collections.abc import Sequence

import numpy as np

from compmod_jax.data.qa.question import Question
from compmod_jax.metrics import qa

LABELLED = ("multiple_choice", "yes_no")
"""Formats whose answers are labels, right or wrong."""


def scores(
  questions: Sequence[Question], sets: Sequence[str], outputs: Sequence[str]
) -> dict[str, float]:
  """Scores of answers: over all, by set where there are several, and by format and facts.

  Returns:
    `score`, `malformed`; what `qa_scores.score` gives, over all questions and for each set as
    `SET/...`; and where questions tell how many facts they need, `exact_match/FORMAT/FACTS`. All 0
    to 100.
  """
  found, means = qa.score(questions, outputs), list[float]()
  names = list(dict.fromkeys(sets))
  for name in names:
    mine = [i for i, one in enumerate(sets) if one == name]
    its, made = [questions[i] for i in mine], [outputs[i] for i in mine]
    means.append(100 * float(np.mean(qa.question_scores(its, made))))
    if len(names) > 1:
      own = {"score": means[-1], **qa.score(its, made)}
      found |= {f"{name}/{key}": value for key, value in own.items()}
  found["score"] = float(np.mean(means))
  labelled = [(q, o) for q, o in zip(questions, outputs, strict=True) if q.format in LABELLED]
  if labelled:
    found["malformed"] = 100 * float(np.mean([qa.is_malformed(q, o) for q, o in labelled]))
  return found | by_facts(questions, outputs)


def by_facts(questions: Sequence[Question], outputs: Sequence[str]) -> dict[str, float]:
  """Exact match by format and number of facts, 0 to 100, where questions tell that number."""
  cells: dict[str, list[float]] = {}
  for question, output in zip(questions, outputs, strict=True):
    if "facts" in question.info:
      right = (
        float(output == question.answer)
        if question.format in LABELLED
        else qa.exact_match(output, question.answers)
      )
      cells.setdefault(f"exact_match/{question.format}/{question.info['facts']}", []).append(right)
  return {name: 100 * float(np.mean(values)) for name, values in sorted(cells.items())}


def source_text(question: Question) -> str:
  """A question as one line of text, for reports."""
  options = [f"({n}) {option}" for n, option in enumerate(question.options, 1)]
  return " ".join([part for part in (question.passage, question.question) if part] + options)
