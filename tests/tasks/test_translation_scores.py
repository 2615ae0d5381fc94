"""Scores of translations: which groups of a split's sentences are scored, and of how many."""

import types
from typing import Any

import numpy as np

from compmod_jax.data.base import Metric, Pairs
from compmod_jax.decoding import DecodeConfig
from compmod_jax.tasks.base import Scoring
from compmod_jax.tasks.translation import TranslationScores
from compmod_jax.tasks.translator import Hypothesis

INFO = [{"category": "passive"}, {"category": "passive"}, {"category": "dative"}]


class Shouting:
  """Translates a sentence of lower-case letters into one of capitals."""

  decode = DecodeConfig(method="greedy")

  def __call__(self, model, params, sources, **_):
    return [[Hypothesis(text.upper(), 0.0, np.zeros(1), {})] for text in sources]


def scored(metric: Metric, info=None, decode: bool | int = True) -> dict[str, Any]:
  pairs = Pairs(["a", "b", "c c"], ["A", "X", "C C"], where=str, info=info, metric=metric)
  task = types.SimpleNamespace(
    dataset=types.SimpleNamespace(pairs={"test": pairs}), model=None, generator=Shouting()
  )
  scoring: Any = Scoring(task, None, "test", decode=decode)  # type: ignore[arg-type,type-var]
  return dict(TranslationScores(metric)(scoring))


def test_annotated_pairs_are_scored_by_annotation_and_by_length():
  found = scored("exact_match", INFO)
  assert {name: value for name, value in found.items() if "/" in name} == {
    "exact_match/category/passive": 50.0,
    "exact_match/category/dative": 100.0,
    "exact_match/target_words/1": 50.0,
    "exact_match/target_words/2": 100.0,
  }
  assert found["exact_match"] == 200 / 3
  assert "exact_match/category/passive" in scored("bleu", INFO)


def test_pairs_without_annotations_are_scored_by_length_where_exact_match_counts():
  assert [name for name in scored("exact_match") if "/" in name] == [
    "exact_match/target_words/1",
    "exact_match/target_words/2",
  ]
  assert not any("/" in name for name in scored("bleu"))


def test_of_some_sentences_the_groups_are_those_of_the_whole_split():
  found = scored("exact_match", INFO, decode=2)
  assert found["decoded"] == 2
  assert [name for name in found if "/" in name] == ["exact_match/category/passive"]
  assert scored("exact_match", INFO, decode=False) == {}
