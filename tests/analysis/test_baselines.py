"""The baselines that need no training, on sentences whose answers are plain."""

import itertools
import time

import numpy as np
import pytest

from compmod_jax.analysis.baselines import learn_dictionary, nearest_training_sentence, word_by_word
from compmod_jax.core.errors import UserError


def test_every_word_is_replaced_and_the_order_and_punctuation_stay():
  dictionary = {"der": "the", "Hund": "dog", "sieht": "sees", "doch": "", "zum": "to the"}
  outputs = word_by_word(dictionary, ["Der Hund sieht doch Anna, der Hund!", "", "zum  Hund"])
  assert outputs == ["The dog sees Anna, the dog!", "", "to the dog"]


def test_the_nearest_training_sentence_answers():
  sources = ["the dog sees a cat .", "a cat sleeps .", "the cat sees a dog ."]
  targets = ["A", "B", "C"]
  asked = ["the cat sees a bird .", "the dog sees a bird .", "does a cat sleeps ?", *sources]
  assert nearest_training_sentence(sources, targets, asked) == ["C", "A", "B", *targets]


def test_rare_words_decide_over_frequent_ones():
  sources = ["the old house of the king"] * 20 + ["a zebra"]
  targets = ["house"] * 20 + ["zebra"]
  assert nearest_training_sentence(sources, targets, ["the zebra of"]) == ["zebra"]


def test_ties_and_strangers_go_to_the_lower_index():
  sources, targets = ["x y", "a b c", "a b c", "a b c"], ["0", "1", "2", "3"]
  assert nearest_training_sentence(sources, targets, ["a b c", "q", ""]) == ["1", "0", "0"]
  assert nearest_training_sentence(sources, targets, []) == []


def test_similarity_is_the_cosine_of_tf_idf_weights():
  rng = np.random.default_rng(0)
  lines = [" ".join(rng.choice(list("abcdefgh"), size=rng.integers(2, 9))) for _ in range(340)]
  train, asked = lines[:40], lines[40:]  # more sources than are compared at once

  def grams(sentence):
    words = sentence.split()
    return words + [f"{a} {b}" for a, b in itertools.pairwise(words)]

  bags = [grams(sentence) for sentence in train]
  seen = sorted({gram for bag in bags for gram in bag})
  weight = np.array([np.log(41 / (1 + sum(g in bag for bag in bags))) + 1 for g in seen])

  def vector(sentence):
    counts = np.array([grams(sentence).count(g) for g in seen], float)
    value = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * weight
    return value / max(np.linalg.norm(value), 1e-9)

  similarity = np.stack([vector(s) for s in asked]) @ np.stack([vector(s) for s in train]).T
  expected = similarity.round(5).argmax(1)
  found = nearest_training_sentence(train, [str(i) for i in range(40)], asked)
  assert [int(i) for i in found] == expected.tolist()


def test_a_dictionary_is_learnt_from_sentence_pairs():
  rng = np.random.default_rng(1)
  source = [f"w{i}" for i in range(60)]
  truth = {word: f"m{i}" for i, word in enumerate(source)}
  sources, targets = [], []
  for _ in range(1500):
    words = rng.choice(source, size=rng.integers(3, 9))
    # Order is lost, and a word without a counterpart is in every target.
    targets.append(" ".join(rng.permutation([truth[word] for word in words])) + " indeed .")
    sources.append(" ".join(words) + " .")
  learnt = learn_dictionary(sources, targets)
  assert learnt == truth
  assert learn_dictionary(sources, targets, most_pairs=2).keys() < truth.keys()
  assert word_by_word(learnt, ["w3 w1."]) == ["m3 m1."]


def test_empty_sides_are_no_obstacle():
  assert learn_dictionary(["", "a"], ["b", ""]) == {}
  assert learn_dictionary(["", "a", "a"], ["b", "", "c"]) == {"a": "c"}
  assert nearest_training_sentence(["", ""], ["x", "y"], ["a"]) == ["x"]


def test_a_thousand_sources_against_many_sentences_take_seconds():
  rng = np.random.default_rng(2)
  words = np.array([f"w{i}" for i in range(3000)])
  ranks = np.minimum(rng.zipf(1.3, size=(21_000, 9)), 3000) - 1
  lines = [" ".join(row) for row in words[ranks]]
  start = time.perf_counter()
  found = nearest_training_sentence(lines[:20_000], lines[:20_000], lines[20_000:])
  assert time.perf_counter() - start < 10  # 1.2 s for 60,000 real sentences on two cores
  assert len(found) == 1000


@pytest.mark.parametrize("baseline", [learn_dictionary, nearest_training_sentence])
def test_training_sides_that_do_not_match_are_an_error(baseline):
  more = ([],) if baseline is nearest_training_sentence else ()
  with pytest.raises(UserError, match="2 training sources for 1 targets"):
    baseline(["a", "b"], ["a"], *more)
  with pytest.raises(UserError, match="0 training pairs"):
    baseline([], [], *more)


def test_settings_out_of_range_are_named():
  with pytest.raises(UserError, match="order"):
    nearest_training_sentence(["a"], ["a"], ["a"], order=0)
  with pytest.raises(UserError, match="rounds"):
    learn_dictionary(["a"], ["a"], rounds=0)
