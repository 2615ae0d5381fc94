"""No trick answers the questions: not wording, the last sentence, nor order and number of words."""

import dataclasses

import pytest

from compmod_jax.data.qa.baselines import scores
from compmod_jax.data.synthetic.worlds import CLASSES, FEW_KINDS, WorldsData

POINTS = 0.05  # that a baseline may have above chance
# Where less happens, what comes up most often is somewhat likelier to be asked for.
MENTIONS = {"all": 0.05, "few": 0.1}
BLIND = ("majority", "question only", "last sentence")


@pytest.fixture(scope="module", params=["all", "few"])
def kinds(request):
  return request.param


@pytest.fixture(scope="module")
def found(kinds):
  """Enough other questions for a standard error below 1.2 points; the draw is always the same.

  Most are training questions that the tables are not filled from, with the names of test questions:
  they have the distribution of those, for each of which ten are drawn.
  """
  data = WorldsData(train=20_000, test=1_200, kinds=FEW_KINDS if kinds == "few" else ())
  # What order and number tell of few kinds is near its bound, within one draw's error.
  count = 14_400 if kinds == "few" else 7_200
  other = dataclasses.replace(data, train=data.train + count - data.test, invented=0.0)
  test = [*data.load("test").items[:], *other.load("train").items[data.train :]]
  assert len(test) == count
  made = scores(data.load("train").items[:], test, CLASSES)
  return {(score.baseline, score.format): score for score in made}


@pytest.mark.parametrize("format", ["multiple_choice", "yes_no", "extractive", "abstractive"])
def test_baselines_that_do_not_read_the_story_are_near_chance(found, format):
  for baseline in BLIND:
    score = found[baseline, format]
    assert score.error < 0.012
    assert score.score <= score.chance + POINTS, score


@pytest.mark.parametrize("format", ["multiple_choice", "yes_no", "extractive"])
@pytest.mark.parametrize("baseline", ["latest", "most frequent"])
def test_order_and_number_of_mentions_do_not_tell_the_answer(found, kinds, baseline, format):
  score = found[baseline, format]
  assert score.score <= score.chance + MENTIONS[kinds], score


@pytest.mark.parametrize("baseline", ["latest", "most frequent"])
def test_combined_answers_are_rarely_guessed_from_the_words_of_the_story(found, baseline):
  """Chance is one fixed answer; these pick from a few words each, and right ones are rare still."""
  assert found[baseline, "abstractive"].score < 0.2
