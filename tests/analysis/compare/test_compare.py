"""Two models are compared on the same sentences; heads by what they do, not by their numbers."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from compmod_jax.analysis.compare import measure, routes
from compmod_jax.analysis.compare.groups import subsets_of
from compmod_jax.analysis.compare.measure import (
  Compare,
  Measured,
  check_same_data,
  compare,
)
from compmod_jax.analysis.compare.report import make_page
from compmod_jax.analysis.reading import TranslationReader, reader
from compmod_jax.analysis.report import page
from compmod_jax.analysis.scoring import sentence_losses
from compmod_jax.core.errors import UserError
from compmod_jax.data.base import Splits
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.metrics.statistics import loss_statistics

SITE = "encoder/layer_0/self"
ORDER = [2, 0, 3, 1]
SETTINGS = Compare(sentences=0, decode=0, samples=200, shown=5)


@pytest.fixture(scope="module")
def renamed(subject):
  """The same model with its competing heads in another order."""
  axes = {("query_key_value", "kernel"): 1, ("query_key_value", "bias"): 0, ("output", "kernel"): 0}
  params = jax.tree.map(lambda leaf: leaf, subject.params)
  attention = params["encoder_0"]["self_attention"]
  for (module, leaf), axis in axes.items():
    attention[module][leaf] = np.take(attention[module][leaf], ORDER, axis)
  attention["router"]["signatures"] = attention["router"]["signatures"][np.array(ORDER)]
  return dataclasses.replace(subject, params=params)


def page_of(first, second, settings):
  names = ("one", "two")
  return make_page(settings, first, second, names, compare(first, second, names, settings))


def result(first, second, tmp_path, settings=SETTINGS):
  found = page_of(first, second, settings)
  return found, json.loads(page.write(found, tmp_path).json.read_text())


def test_a_model_does_not_differ_from_itself(subject, tmp_path):
  found, data = result(subject, subject, tmp_path)
  compared = [group for group in data["groups"] if group["values"]]
  assert len(compared) > 1
  for group in compared:
    loss = group["values"]["loss"]
    assert (loss["value"], loss["low"], loss["high"], loss["p"]) == (0, 0, 0, 1)
  assert data["changed"] == []
  assert data["routing"][SITE]["distance"] == 0
  assert "no difference beyond chance" in found.summary[0]


def test_heads_are_matched_whatever_their_order(subject, renamed):
  (module,) = routes.shared_modules(subject, renamed)
  (matching,) = routes.match(subject, renamed, [module])
  # Head ORDER[j] of the first model is head j of the second.
  assert matching.units.tolist() == np.argsort(ORDER).tolist()
  np.testing.assert_allclose(matching.correlation, 1, atol=1e-4)
  assert matching.distance < 1e-5
  told = routes.differences(renamed, subject, reader(subject.task), [
    matching._replace(units=np.asarray(ORDER))
  ])  # fmt: skip
  assert set(told) == set(subject.numbers.tolist())
  assert all(differences[0].most < 1e-5 for differences in told.values())


def test_routes_are_read_in_batches_that_both_models_have_positions_for(subject):
  """The first model has some of 128 positions, though no sentence has more than 96 tokens."""
  data, model = subject.task.dataset, subject.task.model.config
  config = dataclasses.replace(data.config, batch=BatchConfig(tokens=512, buckets=(96,)))
  task = config.build_with(
    dataclasses.replace(model, max_length=96),
    Splits(data.config.data),
    data.source_tokenizer,
    data.target_tokenizer,
  )
  shorter = dataclasses.replace(subject, task=task, chosen=subject.numbers)
  for pair in ((subject, shorter), (shorter, subject)):
    batches = routes.shared_batches(*pair)
    assert {batch["source"].shape[1] for batch in batches} == {96}
    index = np.concatenate([batch["index"] for batch in batches])
    assert sorted(index[index >= 0].tolist()) == subject.numbers.tolist()
  same = dataclasses.replace(subject)
  assert routes.shared_batches(subject, same) is subject.batches


@pytest.fixture(scope="module")
def compared(subject, other, tmp_path_factory):
  settings = dataclasses.replace(SETTINGS, decode=18)
  folder = tmp_path_factory.mktemp("compare")
  found = page_of(subject, other, settings)
  return found, page.write(found, folder)


def test_losses_and_groups_are_those_of_their_sentences(subject, other, compared):
  data = json.loads(compared[1].json.read_text(), parse_constant=pytest.fail)
  whole, *groups = data["groups"]
  assert (whole["kind"], whole["examples"], data["decoded"]) == ("all", 20, 18)
  assert whole["values"]["bleu"]["examples"] == 18
  every = dataclasses.replace(subject, sentences=0)
  numbers = every.numbers
  chosen = np.isin(numbers, [c["number"] for c in data["changed"]])
  one, counts = sentence_losses(every, reader(subject.task))(subject.params, {})
  two, _ = sentence_losses(every, reader(subject.task))(other.params, {})
  by_number = {c["number"]: c["values"]["loss"] for c in data["changed"]}
  for number, a, b, count in zip(
    numbers[chosen], one[chosen], two[chosen], counts[chosen], strict=True
  ):
    assert by_number[number] == pytest.approx([a / count, b / count], rel=1e-5)
  kinds = {group["kind"] for group in groups}
  assert {"source words", "depth", "number", "kind"} <= kinds
  assert "pos_source" not in kinds
  for kind in kinds:
    assert sum(group["examples"] for group in groups if group["kind"] == kind) == 20
  # Too few examples are no ground for an interval.
  assert all(("loss" in group["values"]) == (group["examples"] >= 10) for group in groups)


def test_sentences_that_changed_are_shown_with_their_routing(subject, compared):
  found, files = compared
  data = json.loads(files.json.read_text())
  changes = [abs(c["values"]["chrf"][1] - c["values"]["chrf"][0]) for c in data["changed"]]
  assert changes == sorted(changes, reverse=True)
  assert len(changes) <= 5
  text = files.html.read_text()
  for changed in data["changed"]:
    difference = changed["routing"][SITE]
    assert 0 < difference["distance"] < 1
    assert 0 < difference["most"] <= 1
    source = subject.task.dataset.pairs["test"].source[changed["number"]]
    assert source in text
    assert difference["word"] in source.split()
  assert {"groups.csv", "routing.csv"} == {path.name for path in files.tables}
  assert {"bleu_by_group", "chrf_by_group", "loss_by_group"} == {p.stem for p in files.pictures}
  assert any(sentence.startswith("Routing differs most in") for sentence in found.summary)


def test_examples_without_a_token_are_in_no_loss_and_have_not_changed():
  nats, counts = np.arange(1.0, 13.0), np.array([0, 1, 0, 2] * 3)
  nats[counts == 0] = 0
  one, other = (loss_statistics(nats * factor, counts) for factor in (1, 1.5))
  numbers = np.arange(12)
  found = measure._group("all", "", numbers, {"loss": Measured(numbers, one, other)}, SETTINGS)
  scores = found.values["loss"]
  assert (scores.examples, scores.first) == (6, pytest.approx(nats.sum() / counts.sum()))
  assert scores.comparison.difference.low > 0
  empty = numbers[counts == 0]
  part = measure._group("kind", "", empty, {"loss": Measured(numbers, one, other)}, SETTINGS)
  assert part.values == {}
  changed = measure._changed({"loss": Measured(numbers, one, other)}, {}, 5)
  # Changes are half of nats by token: 2/1, 4/2, 6/1, 8/2, 10/1 and 12/2.
  assert [c.number for c in changed] == [9, 5, 11, 7, 1]


def test_parts_by_length_hold_every_sentence_once(subject):
  every = dataclasses.replace(subject, sentences=0)
  parts = [p for p in subsets_of(every, reader(subject.task)) if p[0] == "source words"]
  assert 2 <= len(parts) <= 5
  together = np.concatenate([numbers for _, _, numbers in parts])
  assert sorted(together.tolist()) == every.numbers.tolist()
  sources = subject.task.dataset.pairs["test"].source
  for _, name, numbers in parts:
    edges = [int(edge) for edge in name.split(" to ")]
    low, high = edges[0], edges[-1]
    assert len(edges) == 1 or low < high
    assert all(low <= len(sources[i].split()) <= high for i in numbers)


def test_models_of_other_data_are_refused(subject):
  task = subject.task
  elsewhere = task.dataset.config.build_with(
    task.model.config,
    Splits(GrammarData(seed=1, train=60, valid=6, test=20)),
    task.dataset.source_tokenizer,
    task.dataset.target_tokenizer,
  )
  names = ("runs/a", "runs/b")
  stranger = dataclasses.replace(subject, task=elsewhere)
  with pytest.raises(UserError, match=r"Example 0 .* in runs/a and .* same data"):
    compare(subject, stranger, names, SETTINGS)
  nowhere = dataclasses.replace(subject, split="tset")
  read = TranslationReader(task)
  with pytest.raises(UserError, match="--split is 'tset', but runs/a has only train, valid"):
    check_same_data(nowhere, nowhere, read, read, names)
  with pytest.raises(UserError, match="--samples is 5"):
    Compare(samples=5)


def test_models_that_predict_other_numbers_of_tokens_are_refused(subject, monkeypatch):
  counts = iter([np.full(12, 3.0), np.full(12, 4.0)])
  monkeypatch.setattr(measure, "sentence_losses", lambda *_: lambda *_: (np.ones(12), next(counts)))
  read = reader(subject.task)
  with pytest.raises(UserError, match="different tokens: 12 of 12 examples"):
    measure._losses(subject, subject, read, read, True)
