"""Answers from shared words, beside values worked out by hand."""

import math

import numpy as np
import pytest
from scipy import optimize

from compmod_jax.data.qa import overlap
from compmod_jax.data.qa.example import Question
from compmod_jax.data.qa.overlap import Regression, chosen, overlap_answers, sliding_window
from compmod_jax.errors import UserError


def choice(passage, question, options, label=1):
  return Question("multiple_choice", question, passage, options=options, label=label)


def test_the_window_with_the_rarest_shared_words_wins():
  # "Who runs?" with "dog": the dog runs, side by side; with "cat": three words apart, so that no
  # window of three words has both.
  asked = choice("The cat sat and slept. The dog runs.", "Who runs?", ("the cat", "the dog"))
  assert sliding_window(asked) == "(2)"


def test_words_count_by_the_inverse_of_their_number_in_the_passage():
  # Windows of two words: "red" twice in the passage weighs log(3/2), "box" once log 2.
  asked = choice("red ball. red cube. blue box.", "is", ("red", "box"))
  assert math.log1p(1 / 2) < math.log1p(1)
  assert sliding_window(asked) == "(2)"
  assert sliding_window(choice("red red box", "is", ("red", "box"))) == "(1)"  # 2 log 3/2 > log 2


def test_equal_windows_go_to_the_first_option():
  assert sliding_window(choice("a b c", "x", ("b", "c"))) == "(1)"
  assert sliding_window(choice("", "x", ("b", "c"))) == "(1)"


def test_other_formats_have_no_options_to_slide_over():
  with pytest.raises(UserError, match="format is 'yes_no'"):
    sliding_window(Question("yes_no", "Is it?", "It is.", answers=("yes",)))


def test_the_regression_is_the_minimum_of_its_closed_form(monkeypatch):
  """One feature x, of 1 for the first option and 0 for the second: p = sigma(w)."""
  monkeypatch.setattr(overlap, "features", lambda question, found: [{"x": 1.0}, {}])
  questions = [choice("a", "b", ("c", "d"), label) for label in (1, 1, 1, 2)]
  for strength in (0.5, 2.0):
    fitted = Regression(strength).fit(questions)
    # The slope is 4 sigma(w) - 3 + strength w.
    root = optimize.brentq(lambda w, s=strength: 4 / (1 + np.exp(-w)) - 3 + s * w, -9, 9)
    assert fitted._weights == pytest.approx([root], abs=1e-4)
    assert fitted.answer(questions[0]) == "(1)"


def test_shared_words_are_learnt_and_the_penalty_is_chosen_on_validation():
  def story(number):
    right = ("hall", "park", "shop")[number % 3]
    others = [place for place in ("hall", "park", "shop") if place != right]
    passage = f"Ida went to the {others[0]}. Tom went to the {right}."
    label = 1 + number % 2
    options = (right, others[1]) if label == 1 else (others[1], right)
    return choice(passage, "Where is Tom?", options, label)

  questions = [story(i) for i in range(24)]
  fitted = chosen(questions[:12], questions[12:18])
  assert fitted.strength in overlap.STRENGTHS
  assert [fitted.answer(q) for q in questions[18:]] == [q.answer for q in questions[18:]]
  found = list(overlap_answers(questions[:12], questions[12:18], questions[18:]))
  assert {name for name, _, _ in found} == {"sliding window", "logistic regression"}
  assert len(found) == 12


def test_what_training_has_none_of_is_answered_by_the_first_candidate():
  assert Regression().fit([]).answer(choice("a b.", "c?", ("a", "b"))) == "(1)"
  with pytest.raises(UserError, match="strength is 0"):
    Regression(0)
