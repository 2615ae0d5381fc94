"""Logistic classifiers, and accuracies with their intervals."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from compmod_jax.analysis.minimal_pairs import Judged, accuracies, judge, wilson
from compmod_jax.analysis.recoding import probes
from compmod_jax.analysis.recoding.probes import Probe, ProbeNumber, fit
from compmod_jax.data.minimal_pairs import MinimalPair
from compmod_jax.tasks.scorer import Scored

RANDOM = np.random.default_rng(0)


def test_the_classifier_is_where_the_penalised_loss_has_no_slope():
  states = RANDOM.standard_normal((200, 4))
  labels = (states @ [1.0, -2.0, 0.0, 0.5] + 0.7 + RANDOM.standard_normal(200) > 0).astype(int)
  found = fit(states, labels, penalty=0.01)
  p = 1 / (1 + np.exp(-found.logits(states)))
  slope = states.T @ (p - labels) / 200 + 0.01 * found.weight
  np.testing.assert_allclose(slope, 0, atol=1e-6)
  assert abs(np.mean(p - labels)) < 1e-5
  assert np.mean((found.logits(states) > 0) == (labels > 0)) > 0.75


def test_a_larger_penalty_gives_a_smaller_classifier():
  states = RANDOM.standard_normal((100, 3))
  labels = (states[:, 0] > 0).astype(int)
  small, large = (np.abs(fit(states, labels, penalty).weight).max() for penalty in (1.0, 1e-3))
  assert small < large


def test_labels_that_states_do_not_tell_are_not_told_on_new_states():
  states, labels = RANDOM.standard_normal((2000, 5)), RANDOM.integers(2, size=2000)
  found = fit(states[:1000], labels[:1000], penalty=1e-3)
  right = (found.logits(states[1000:]) > 0) == (labels[1000:] > 0)
  assert abs(np.mean(right) - 0.5) < 0.06


def test_the_classifier_is_trained_on_other_sentences_than_it_is_tested_on(monkeypatch):
  """A model that only hands over hidden states that tell the sentence."""
  data = SimpleNamespace(load=lambda split: [str(n) for n in range(30)])

  def batch(texts):
    rows = np.array([int(text) for text in texts])
    return {"counted": np.ones((len(rows), 2), bool), "tokens": np.stack([rows, rows], axis=1)}

  class Model:
    model = SimpleNamespace(config=SimpleNamespace(layers=1))
    generator = SimpleNamespace(scorer=SimpleNamespace(batch=batch))
    dataset = SimpleNamespace(
      config=SimpleNamespace(data=data),
      labels=lambda split: np.arange(30) % 2,
      tokenizer=SimpleNamespace(vocab_size=30),
    )

  trained = []
  monkeypatch.setattr(probes, "LanguageModel", Model)
  monkeypatch.setattr(
    probes, "_captured", lambda task, params, batch, site: jax.nn.one_hot(batch["tokens"], 30)
  )
  monkeypatch.setattr(
    probes, "fit", lambda states, *_: trained.append(states) or Probe(np.zeros(30), 0.0)
  )
  subject: Any = SimpleNamespace(
    task=Model(), params={}, split="train", sentences=12, seed=0, status=lambda *_: None
  )
  found = ProbeNumber(training=1000).measure(subject)
  assert len(np.unique(found.test.sentence)) == 12
  assert found.training == 18
  assert not set(trained[0].argmax(-1)) & set(found.test.sentence)
  subject.split = "test"
  assert ProbeNumber(training=1000).measure(subject).training == 30


def test_the_interval_of_a_proportion_is_wilson_s():
  # Newcombe 1998, table I: 81 of 263, and 0 of 20.
  np.testing.assert_allclose(wilson(81 / 263, 263), (0.2553, 0.3662), atol=1e-4)
  np.testing.assert_allclose(wilson(0.0, 20), (0.0, 0.1611), atol=1e-4)


def scored(nll, unknown=0):
  empty = np.zeros(0, np.float32)
  words = ["w"] * len(nll)
  return Scored(np.arange(len(nll)), words, np.asarray(nll), empty, empty, empty, unknown)


def pair(group, whole=True):
  return MinimalPair("good", "bad", group, "f:1", whole)


def test_beginnings_are_compared_without_their_ends():
  good, bad = scored([1.0, 9.0]), scored([2.0, 0.5])
  assert judge(pair("a", whole=False), good, bad).difference == pytest.approx(1.0)
  assert judge(pair("a"), good, bad).difference == pytest.approx(-7.5)
  assert judge(pair("a"), good, bad).right == 0
  assert judge(pair("a"), good, good).right == 0.5
  assert judge(pair("a", whole=False), good, bad).tokens == 2
  assert judge(pair("a"), good, bad).tokens == 4


def test_accuracy_is_given_with_and_without_pairs_that_hold_unknown_words():
  judged = [
    Judged(pair("a"), 1.0, 0, 6), Judged(pair("a"), -1.0, 2, 4), Judged(pair("b"), 2.0, 0, 10)
  ]  # fmt: skip
  first, second, whole = accuracies(judged)
  assert (first.group, first.pairs, first.accuracy) == ("a", 2, 0.5)
  assert (first.known, first.known_accuracy) == (1, 1.0)
  assert (second.group, second.accuracy) == ("b", 1.0)
  assert [one.unknown for one in (first, second, whole)] == [20, 0, 10]
  assert (whole.group, whole.pairs) == ("all", 3)
  assert whole.accuracy == pytest.approx(2 / 3)
  assert [one.group for one in accuracies(judged[:2])] == ["all"]
