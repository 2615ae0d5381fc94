"""Worlds in which few kinds of questions are asked."""

import re

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.worlds import FEW_KINDS, WorldsData
from compmod_jax.data.synthetic.worlds.repertoire import ALL, KINDS, Repertoire


@pytest.fixture(scope="module")
def drawn():
  data = WorldsData(train=1_200, valid=1, test=1, shifted=120, asked=4, kinds=FEW_KINDS)
  return [data.drawn(split, i) for split in ("train", "facts") for i in range(data.size(split))]


def test_all_of_them_are_asked_and_no_others(drawn):
  assert {question.info["question_kind"] for question, _ in drawn} == set(FEW_KINDS)


def test_nothing_happens_but_what_they_are_about(drawn):
  events = {event[0] for _, draft in drawn for event in draft.events}
  assert events == {"go", "take", "friend"}


def test_nothing_is_described_by_what_is_not_asked_for(drawn):
  other = re.compile("made of|the thing|the person")
  assert not any(other.search(question.question) for question, _ in drawn)
  assert any("Where is the best friend of the best friend of" in q.question for q, _ in drawn)


def test_kinds_that_describe_nothing_are_told():
  data = WorldsData(kinds=("place", "sentence place"))
  assert data.question("test", 0).info["facts"] == 1
  with pytest.raises(UserError, match=r"needs 3 of their facts in .* none\. Add kinds, so that"):
    data.question("test", 8)


def test_kinds_of_which_too_little_can_happen_are_told():
  kinds = ("colour", "holder", "possession", "sentence holder", "sentence possession")
  data = WorldsData(kinds=kinds, longest=16, test=24, shifted=24)
  with pytest.raises(UserError, match=r"needs 1 of their facts in .* none\. Add kinds, so that"):
    data.load("length").items[:4]


def test_without_a_choice_all_kinds_are_asked():
  all_of_them = Repertoire()
  for format, by_facts in KINDS.items():
    for facts, kinds in by_facts.items():
      assert all_of_them.asked(format, facts) == kinds
  assert WorldsData().question("test", 0) == WorldsData(kinds=ALL).question("test", 0)


def test_the_description_says_how_many_kinds_there_are():
  assert "8 sentences, 3 of 22 kinds:" in WorldsData(kinds=FEW_KINDS).describe()
