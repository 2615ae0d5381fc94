"""Baselines find the tricks that work, and give chance where none does."""

import random

import pytest

from compmod_jax.data.qa.baselines import chance, is_right, names_in, scores
from compmod_jax.data.qa.question import Question

PLACES = [f"place{i}" for i in range(10)]
KINDS = dict.fromkeys(PLACES, "place")


def found(train, test, kinds=None):
  return {(s.baseline, s.format): s for s in scores(train, test, kinds)}


def choice(options, label, passage="", question="Which?"):
  return Question("multiple_choice", question, passage, options=tuple(options), label=label)


def spans(count, where, seed=0):
  """Stories of five places, of which the one at a place of the order of mention is right."""
  draw = random.Random(seed)
  made = []
  for _ in range(count):
    told = draw.sample(PLACES, 5)
    passage = " ".join(f"Then it was {place}." for place in told)
    answer = told[where] if where is not None else draw.choice(told)
    made.append(Question("extractive", "Where is it?", passage, answers=(answer,)))
  return made


def test_chance_is_what_guessing_gives():
  questions = [
    choice("ab", 1),
    choice("abcd", 2),
    Question("yes_no", "Is it?", answers=("yes",)),
    Question("extractive", "Where?", "Here or there.", answers=()),
    Question("extractive", "Who?", "Here or there.", answers=()),
    Question("extractive", "What?", "Here or there.", answers=("Here",)),
    Question("abstractive", "How?", answers=("so", "thus")),
  ]
  expected = {"multiple_choice": 0.375, "yes_no": 0.5, "extractive": 2 / 3, "abstractive": 1.0}
  assert chance(questions) == pytest.approx(expected)
  assert chance([]) == {}


def test_any_of_several_answers_is_right():
  question = Question("abstractive", "Who?", answers=("a and b", "b and a"))
  assert is_right(question, "b and a")
  assert not is_right(question, "a")
  assert is_right(Question("extractive", "Who?", "x"), "")
  assert is_right(choice("ab", 2), "(2)")


def test_a_preferred_label_is_found_by_the_majority():
  draw = random.Random(0)
  made = [choice(draw.sample(PLACES, 3), 2) for _ in range(200)]
  assert found(made[:100], made[100:])["majority", "multiple_choice"].score == 1


def test_an_option_that_is_always_right_is_found_by_the_question_alone():
  draw = random.Random(0)
  made = []
  for _ in range(200):
    options = ["gold", *draw.sample(PLACES, 2)]
    draw.shuffle(options)
    made.append(choice(options, options.index("gold") + 1))
  score = found(made[:100], made[100:])
  assert score["question only", "multiple_choice"].score == 1
  assert score["majority", "multiple_choice"].score < 0.6


def test_wording_that_gives_answers_away_is_found_whatever_the_names():
  made = [
    Question("yes_no", f"{'Is' if right else 'Was'} {name} there?", answers=(answer,))
    for right, answer in ((True, "yes"), (False, "no"))
    for name in ("Anna", "Ben", "Tom", "Leo", "Ida")
  ]
  fresh = [
    Question("yes_no", "Is Eva there?", answers=("yes",)),
    Question("yes_no", "Was Eva there?", answers=("no",)),
  ]
  names = dict.fromkeys(("Anna", "Ben", "Tom", "Leo", "Ida", "Eva"), "person")
  assert found(made, fresh, names)["majority", "yes_no"].score == 1


def test_answers_in_the_last_sentence_are_found_even_if_new():
  train, test = spans(300, -1), spans(300, -1, seed=1)
  score = found(train, test, KINDS)
  assert score["last sentence", "extractive"].score == 1
  assert score["latest", "extractive"].score == 1
  assert score["question only", "extractive"].score < 0.25


def test_answers_at_a_fixed_rank_are_found_by_order_alone():
  score = found(spans(300, 1), spans(300, 1, seed=1), KINDS)
  assert score["latest", "extractive"].score == 1
  assert score["last sentence", "extractive"].score < 0.25


def test_no_baseline_finds_what_is_drawn_at_random():
  score = found(spans(2_000, None), spans(2_000, None, seed=1), KINDS)
  for one in score.values():
    assert one.score < 0.2 + 4 * one.error, one


@pytest.mark.parametrize(("baseline", "often"), [("latest", False), ("most frequent", True)])
def test_options_are_ranked_by_their_place_and_number_in_the_passage(baseline, often):
  draw = random.Random(0)
  made = []
  for _ in range(200):
    options = draw.sample(PLACES, 3)
    told = [*options, options[0], options[1]] if often else options[::-1]
    told += [options[0], options[2]] if often else []
    passage = " ".join(f"It was {place}." for place in told)
    shuffled = draw.sample(options, 3)
    made.append(choice(shuffled, shuffled.index(options[0]) + 1, passage))
  score = found(made[:100], made[100:], KINDS)
  assert score[baseline, "multiple_choice"].score == 1


def test_names_are_words_that_are_never_small():
  text = "Then Anna met Tom. She met him then."
  names = names_in([Question("abstractive", "Who met Tom?", text, answers=("she",))])
  assert names == {"Anna": "name", "Tom": "name", "Who": "name", "She": "name"}


def test_formats_without_test_questions_have_no_score():
  assert {format for _, format in found(spans(5, 0), spans(5, 0))} == {"extractive"}


def test_formats_without_training_questions_are_answered_with_nothing():
  test = [Question("abstractive", "Why?", answers=("so",)), choice("ab", 1)]
  score = found(spans(5, 0), test)
  assert score["majority", "abstractive"].score == 0
  assert score["majority", "multiple_choice"].score == 1
