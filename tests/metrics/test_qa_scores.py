"""Scores of answers: SQuAD's exact match and F1, ROUGE-L, accuracy and malformed answers."""

import re
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.question import Question
from compmod_jax.metrics.qa import (
  exact_match,
  f1,
  is_malformed,
  normalise,
  question_scores,
  rouge_l,
  score,
)


def official(output, golds):
  """(exact match, F1) by the published definition of SQuAD 2.0, written letter by letter."""

  def words(text):
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()

  golds = [gold for gold in golds if words(gold)] or [""]
  best_exact, best = 0, 0.0
  for gold in golds:
    a, b = words(gold), words(output)
    best_exact = max(best_exact, int(a == b))
    if not a or not b:
      best = max(best, float(a == b))
      continue
    rest, common = list(a), 0
    for word in b:
      if word in rest:
        rest.remove(word)
        common += 1
    if common:
      precision, recall = common / len(b), common / len(a)
      best = max(best, 2 * precision * recall / (precision + recall))
  return best_exact, best


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("The  Dog's\tbone.", "dogs bone"),
    ("a an the", ""),
    ("An apple-a-day", "appleaday"),
    ("theatre", "theatre"),
    ("U.S.A.", "usa"),
    ("$5,000", "5000"),
    ("“the” Café", "“ ” café"),
    ("the-end", "theend"),
  ],
)
def test_answers_are_normalised_as_squad_does(text, expected):
  assert normalise(text) == expected


@pytest.mark.parametrize(
  ("output", "golds", "exact", "overlap"),
  [
    ("the Dog!", ["dog"], 1, 1),
    ("big dog", ["the big red dog"], 0, 2 * 2 / (2 + 3)),
    ("dog dog", ["dog"], 0, 2 / 3),
    ("red", ["the dog", "a red dog"], 0, 2 / 3),
    ("cat", ["dog"], 0, 0),
    ("", ["dog"], 0, 0),
    ("", [], 1, 1),
    ("dog", [], 0, 0),
    ("the", [], 1, 1),
    ("...", ["the"], 1, 1),
    ("dog", ["the", "dog"], 1, 1),
    ("", ["the", "dog"], 0, 0),
  ],
)
def test_exact_match_and_f1_of_fixed_cases(output, golds, exact, overlap):
  assert exact_match(output, golds) == exact
  assert f1(output, golds) == pytest.approx(overlap, abs=1e-12)
  assert official(output, golds) == (exact, pytest.approx(overlap, abs=1e-12))


wording = st.lists(
  st.sampled_from(["the", "a", "dog", "Dog", "red,", "big", ".", "an"]), max_size=5
).map(" ".join)


@settings(deadline=None, max_examples=60)
@given(output=wording, golds=st.lists(wording, max_size=3))
def test_scores_agree_with_the_published_definition(output, golds):
  exact, overlap = official(output, golds)
  assert exact_match(output, golds) == exact
  assert f1(output, golds) == pytest.approx(overlap, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(output=wording, golds=st.lists(wording, min_size=1, max_size=3))
def test_a_gold_answer_is_right_and_more_gold_answers_never_hurt(output, golds):
  if any(normalise(gold) for gold in golds):
    gold = next(gold for gold in golds if normalise(gold))
    assert f1(gold, golds) == exact_match(gold, golds) == 1
    assert f1(output, [gold]) <= f1(output, golds) + 1e-12
  assert exact_match(output, golds) <= f1(output, golds) <= 1


def longest_common(a, b):
  table = np.zeros((len(a) + 1, len(b) + 1), int)
  for i, x in enumerate(a):
    for j, y in enumerate(b):
      table[i + 1, j + 1] = table[i, j] + 1 if x == y else max(table[i, j + 1], table[i + 1, j])
  return int(table[-1, -1])


@settings(deadline=None, max_examples=60)
@given(output=wording, golds=st.lists(wording, min_size=1, max_size=2))
def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence(output, golds):
  def words(text):
    return re.findall("[a-z0-9]+", text.lower())

  best = 0.0
  for gold in golds:
    common, total = longest_common(words(output), words(gold)), len(words(output) + words(gold))
    best = max(best, 2 * common / total if total else 0.0)
  assert rouge_l(output, golds) == pytest.approx(best, abs=1e-12)


def test_rouge_l_counts_words_in_order_and_takes_the_best_answer():
  # 3 words in common and in order, of 4 and 5: precision 3/4, recall 3/5.
  assert rouge_l("the cat sat down", ["the black cat has sat"]) == pytest.approx(2 / 3)
  assert rouge_l("sat cat", ["cat sat"]) == pytest.approx(0.5)
  assert rouge_l("he ran", ["she sat", "he ran."]) == 1
  assert rouge_l("", ["he ran"]) == 0
  with pytest.raises(UserError, match="answers is empty"):
    rouge_l("he ran", [])


def test_the_stemmer_is_a_choice():
  assert rouge_l("flying cats", ["fly cat"]) == 0
  assert rouge_l("jumping cats", ["jumps cat"], stemmer=True) == 1


CHOICE = Question("multiple_choice", "q", options=("a", "b", "c"), label=2)
YES = Question("yes_no", "q", answers=("yes",))
SPAN = Question("extractive", "q", "p", answers=("red dog", "dog"))
NOTHING = Question("extractive", "q", "p")
FREE = Question("abstractive", "q", "p", answers=("he ran",))


@pytest.mark.parametrize(
  ("question", "output", "malformed", "right"),
  [
    (CHOICE, "(2)", False, 1),
    (CHOICE, " (2)\n", False, 1),
    (CHOICE, "(1)", False, 0),
    (CHOICE, "(4)", True, 0),
    (CHOICE, "(0)", True, 0),
    (CHOICE, "2", True, 0),
    (CHOICE, "(2) b", True, 0),
    (CHOICE, "b", True, 0),
    (CHOICE, "", True, 0),
    (YES, "yes", False, 1),
    (YES, "no", False, 0),
    (YES, "Yes", True, 0),
    (YES, "yes yes", True, 0),
    (YES, "", True, 0),
    (SPAN, "", False, 0),
    (FREE, "", False, 0),
  ],
)
def test_a_missing_or_malformed_answer_is_wrong(question, output, malformed, right):
  assert is_malformed(question, output) == malformed
  assert question_scores([question], [output]).tolist() == [right]


def test_scores_of_mixed_questions_are_by_format():
  questions = [CHOICE, SPAN, YES, NOTHING, CHOICE, FREE, NOTHING, SPAN, CHOICE]
  outputs = ["(2)", "a big dog", "maybe", "", "(3)", "he sat", "dog", "", "dunno"]
  found = score(questions, outputs)
  assert found == pytest.approx(
    {
      "multiple_choice_questions": 3,
      "multiple_choice_accuracy": 100 / 3,
      "multiple_choice_malformed": 100 / 3,
      "yes_no_questions": 1,
      "yes_no_accuracy": 0,
      "yes_no_malformed": 100,
      "extractive_questions": 4,
      "extractive_f1": 100 * (2 / 3 + 1 + 0 + 0) / 4,
      "extractive_exact_match": 25,
      "extractive_empty": 50,
      "extractive_has_answer_questions": 2,
      "extractive_has_answer_f1": 100 / 3,
      "extractive_has_answer_exact_match": 0,
      "extractive_no_answer_questions": 2,
      "extractive_no_answer_accuracy": 50,
      "abstractive_questions": 1,
      "abstractive_rouge_l": 50,
    }
  )
  assert all(isinstance(value, float) for value in found.values())


def test_gold_answers_score_full_marks():
  questions = [CHOICE, YES, SPAN, NOTHING, FREE]
  outputs = [question.answer for question in questions]
  assert question_scores(questions, outputs).tolist() == [1] * 5
  found = score(questions, outputs)
  assert found["multiple_choice_malformed"] == found["yes_no_malformed"] == 0
  assert found["extractive_f1"] == found["abstractive_rouge_l"] == 100


def test_formats_and_kinds_that_are_not_there_have_no_scores():
  assert set(score([SPAN], ["dog"])) == {
    "extractive_questions",
    "extractive_f1",
    "extractive_exact_match",
    "extractive_empty",
    "extractive_has_answer_questions",
    "extractive_has_answer_f1",
    "extractive_has_answer_exact_match",
    "extractive_no_answer_questions",
  }


def test_numbers_that_do_not_fit_are_named():
  with pytest.raises(UserError, match="1 outputs for 2 questions"):
    score([SPAN, SPAN], ["dog"])
  with pytest.raises(UserError, match="0 questions"):
    score([], [])
