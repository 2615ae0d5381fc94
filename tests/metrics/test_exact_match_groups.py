"""Exact match by group: against counts by hand, and which annotations make groups."""

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.metrics.groups import exact_match_by_group, group

INFO = [
  {"kind": "a", "depth": 2, "tags": ["x"], "text": "one", "same": 1},
  {"kind": "b", "depth": 17, "tags": ["y"], "text": "two", "same": 1},
  {"kind": "a", "depth": 24, "tags": [], "text": "three", "same": 1},
  {"kind": "c", "depth": 25, "tags": [], "text": "four", "same": 1},
]


def test_every_value_of_an_annotation_has_the_share_of_its_own_sentences():
  found = exact_match_by_group(["x y", "x", "z", "w"], ["x y", "x x", "z", "z"], INFO)
  values = {name: value for name, value in found.items() if name.split("/")[1] != "text"}
  assert values == {
    "exact_match/kind/a": 100.0,
    "exact_match/kind/b": 0.0,
    "exact_match/kind/c": 0.0,
    "exact_match/depth/2": 100.0,
    "exact_match/depth/17-24": 50.0,
    "exact_match/depth/25-32": 0.0,
    "exact_match/target_words/1": 50.0,
    "exact_match/target_words/2": 50.0,
  }
  assert list(values)[3:6] == [f"exact_match/depth/{name}" for name in ("2", "17-24", "25-32")]


def test_the_first_sentences_of_a_split_have_groups_of_the_whole():
  found = exact_match_by_group(["x", "y"], ["x", "x"], INFO)
  assert found["exact_match/kind/a"] == 100
  assert found["exact_match/kind/b"] == 0
  assert "exact_match/kind/c" not in found
  assert not any("target_words" in name for name in found)  # all have one word


def test_annotations_with_too_many_values_or_missing_ones_make_no_groups():
  many = [{"sentence": f"s{i}", "kind": "ab"[i % 2]} for i in range(100)]
  found = exact_match_by_group(["x"] * 100, ["x"] * 100, many)
  assert set(found) == {"exact_match/kind/a", "exact_match/kind/b"}
  few = [{"sentence": f"s{i}", "kind": "ab"[i % 2], "words": i} for i in range(12)]
  found = exact_match_by_group(["x"] * 12, ["x"] * 12, few)
  assert {name.split("/")[1] for name in found} == {"kind", "words"}
  missing = [{"kind": "a"}, {}, {"kind": "b"}]
  assert exact_match_by_group(["x"] * 3, ["x"] * 3, missing) == {}
  assert exact_match_by_group(["x"], ["x"]) == {}


def test_intervals_follow_each_other_without_gaps():
  names = list(dict.fromkeys(group(n) for n in range(300)))
  assert names[:17] == [str(n) for n in range(17)]
  ends = [tuple(map(int, name.split("-"))) for name in names[17:]]
  assert [low for low, _ in ends[1:]] == [high + 1 for _, high in ends[:-1]]
  assert [high for _, high in ends] == [24, 32, 48, 64, 96, 128, 192, 256, 384]
  for number in range(17, 300):
    low, high = map(int, group(number).split("-"))
    assert low <= number <= high


def test_unequal_numbers_are_refused():
  with pytest.raises(UserError, match="2 hypotheses for 1 references"):
    exact_match_by_group(["x", "y"], ["x"])
