"""Answers from shared words, beside values worked out by hand."""

import math

import numpy as np
import pytest
from scipy import optimize

from compmod_jax.core.errors import UserError
from compmod_jax.data.qa import overlap
from compmod_jax.data.qa.overlap import (
  STOP_WORDS,
  Regression,
  chosen,
  overlap_answers,
  sliding_window,
  window_and_distance,
)
from compmod_jax.data.qa.question import Question


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


def test_of_equal_windows_the_nearest_words_win():
  # Each option has one word of the passage once; sw is log 2 for "dog" and one of the options, as
  # no window of two words has both. Distances from "dog": 5 of 5 places, and 3.
  asked = choice("dog saw no cat or bird", "dog", ("bird", "cat"))
  assert overlap._distances(asked) == pytest.approx([5 / 5, 3 / 5])
  assert sliding_window(asked) == "(1)"
  assert window_and_distance(asked) == "(2)"


def test_words_that_the_passage_or_an_option_lacks_are_as_far_as_can_be():
  # "fish" is not there, "the" is a stop word, "dog" is the question's; "cat" is 2 of 3 places away.
  asked = choice("the dog likes cat", "dog", ("fish", "the", "dog", "cat"))
  assert overlap._distances(asked) == pytest.approx([1, 1, 1, 2 / 3])
  assert overlap._distances(choice("cat", "who", ("cat", "dog"))).tolist() == [1, 1]
  assert overlap._distances(choice("", "who", ("cat", "dog"))).tolist() == [1, 1]


def test_window_and_distance_are_those_of_a_plain_search():
  rng = np.random.default_rng(0)
  words = [*"abcdefgh", "the", "of"]

  def text(most):
    return " ".join(rng.choice(words, size=rng.integers(1, most)))

  for _ in range(300):
    asked = choice(text(30), text(5), (text(4), text(4), text(4)))
    passage, wanted = asked.passage.split(), set(asked.question.split())
    scores, distances = [], []
    for option in (set(text.split()) for text in asked.options):
      both = wanted | option
      windows = [passage[j : j + len(both)] for j in range(len(passage))]
      weight = {word: math.log(1 + 1 / passage.count(word)) for word in passage}
      scores.append(max(sum(weight[w] for w in window if w in both) for window in windows))
      apart = [
        abs(i - j)
        for i, one in enumerate(passage)
        for j, other in enumerate(passage)
        if one in wanted - STOP_WORDS and other in option - wanted - STOP_WORDS
      ]
      distances.append(min(apart) / (len(passage) - 1) if apart else 1.0)
    assert overlap._window_scores(asked) == pytest.approx(scores)
    assert overlap._distances(asked) == pytest.approx(distances)


def test_other_formats_have_no_options_to_slide_over():
  for baseline in (sliding_window, window_and_distance):
    with pytest.raises(UserError, match="format is 'yes_no'"):
      baseline(Question("yes_no", "Is it?", "It is.", answers=("yes",)))


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
  names = {"sliding window", "window and distance", "logistic regression"}
  assert {name for name, _, _ in found} == names
  assert len(found) == 18


def test_what_training_has_none_of_is_answered_by_the_first_candidate():
  assert Regression().fit([]).answer(choice("a b.", "c?", ("a", "b"))) == "(1)"
  with pytest.raises(UserError, match="strength is 0"):
    Regression(0)
