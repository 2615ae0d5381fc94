"""Codes and functions of words: classifiers against closed forms, and the report on a model."""

import dataclasses

import jax
import numpy as np
import pytest

from compmod_jax.analysis import codes
from compmod_jax.analysis.report.page import Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.training.experiment import load_config, translation_task

SMALL = {"encoder_layers": 2, "decoder_layers": 1, "dim": 16, "heads": 4, "ffn_dim": 16}


def subject_of(**changes):
  experiment = load_config("scan:addprim_jump")
  scan = translation_task(experiment)
  model = TransformerConfig(norm="pre", dropout=0.0, max_length=64, **{**SMALL, **changes})
  batch = dataclasses.replace(scan.batch, tokens=1024, bucket_count=1)
  task = dataclasses.replace(scan, batch=batch).build(model)
  params = jax.jit(task.model.init)(jax.random.key(0))
  return Subject(task, params, "test", sentences=60)


@pytest.fixture(scope="module")
def subject():
  return subject_of(compete=("encoder_self",))


@pytest.fixture(scope="module")
def found(subject):
  return codes.Codes(training=80).measure(subject)


def test_a_classifier_finds_labels_that_are_linear_and_no_more():
  chance = np.random.default_rng(0)
  x = chance.normal(size=(600, 3))
  labels = np.where(x @ [2, -1, 0.5] > 0.3, "yes", "no")
  train, test = codes.classify(x[:400], labels[:400], [x[:400], x[400:]], 1e-5)
  assert np.mean(train == labels[:400]) > 0.99
  assert np.mean(test == labels[400:]) > 0.96
  either = np.where(x[:, 0] * x[:, 1] > 0, "yes", "no")  # of no line
  assert np.mean(codes.classify(x[:400], either[:400], [x[400:]], 1e-5)[0] == either[400:]) < 0.65


def test_a_classifier_is_at_the_minimum_of_its_loss():
  chance = np.random.default_rng(1)
  x, y = chance.normal(size=(50, 1)), np.repeat(["a", "b"], 25)
  # Constant features tell nothing: the answer is the commonest label.
  assert set(codes.classify(np.ones((50, 2)), np.array(["a"] * 30 + ["b"] * 20), [x], 1e-3)[0]) == {
    "a"
  }
  # Of two classes that mirror each other the border is the mirror.
  mirrored = np.concatenate([x[:25] - 2, 2 - x[:25]])
  answers = codes.classify(mirrored, y, [np.array([[-0.01], [0.01]])], 1e-3)
  assert answers[0].tolist() == ["a", "b"]


def test_every_annotation_is_read_from_every_module_and_the_stream(subject, found):
  assert [one.annotation for one in found] == ["rule_source", "times_source", "order_source"]
  for one in found:
    modules = ["encoder/layer_0/self", "encoder/layer_1/self"]
    assert list(one.readings) == [*modules, codes.ALL, codes.STREAM]
    tokens = {reading.test.count for reading in one.readings.values()}
    assert len(tokens) == 1
    shares = list(one.controls.values())
    for reading in (*one.readings.values(), one.by_word):
      shares += [reading.train, reading.test]
    for share in shares:
      assert 0 <= share.low <= share.share <= share.high <= 1 + 1e-9
  # Jump is trained by itself: any other use of it is new.
  rules = found[0].by_word
  assert rules.new.count > 0
  assert rules.new.share == 0


def test_codes_are_the_weights_of_routers_at_the_tokens(subject):
  reads = codes.reader(subject.task)
  one = dataclasses.replace(subject, sentences=3)
  site = "encoder/layer_1/self/router/weights"
  tokens = codes.read_tokens(one, reads, "source", {"m": site}, ["order_source"])
  pairs = subject.task.dataset.pairs["test"]
  words = [word for number in one.numbers for word in pairs.source[number].split()]
  assert sorted(tokens.word.tolist()) == sorted(words)
  assert tokens.features["m"].shape == (len(words), 4)
  np.testing.assert_allclose(tokens.features["m"].sum(axis=1), 1, atol=1e-5)


def test_gates_and_codes_of_pairs_are_codes_beside_those_of_routers():
  kinds = ("encoder_self",)
  model = {"compete": kinds, "gated_heads": kinds, "attention_form": "hyla", "encoder_layers": 1}
  subject = subject_of(**model)
  reads = codes.reader(subject.task)
  module = "encoder/layer_0/self"
  sites = codes.code_sites(subject, reads, "source")
  assert set(sites) == {module, f"{module}/head_gates", f"{module}/head_code"}
  assert codes.layer_sites(subject, reads, "source") == ["encoder/layer_0/output"]
  one = dataclasses.replace(subject, sentences=3)
  found = codes.read_tokens(one, reads, "source", sites, ["order_source"]).features
  np.testing.assert_allclose(found[f"{module}/head_gates"], 0.5)  # as before training
  assert found[f"{module}/head_code"].shape == found[module].shape == (len(found[module]), 4)
  assert found[codes.ALL].shape[1] == 12


def test_codes_of_pairs_are_means_over_the_keys_that_are_read_whatever_the_padding():
  code = np.random.default_rng(0).normal(size=(2, 4, 5, 5)) * np.tri(5)
  padded = np.pad(code, ((0, 0), (0, 0), (0, 0), (0, 3)))
  short, long = (np.asarray(codes.mean_over_keys(jax.numpy.asarray(one))) for one in (code, padded))
  np.testing.assert_array_equal(short, long)
  np.testing.assert_allclose(short[1, 2], code[1, :, 2, :3].mean(-1), rtol=1e-5)


def test_nothing_is_trained_on_sentences_that_are_asked_about(grammar_task):
  test = Subject(grammar_task, {}, "test", sentences=12)
  assert len(test.of_training(1000).numbers) == 60
  train = Subject(grammar_task, {}, "train", sentences=25)
  assert np.array_equal(train.of_training(20).numbers, np.unique(train.of_training(20).numbers))
  assert len(train.of_training(20).numbers) == 20
  rest = train.of_training(1000).numbers
  assert sorted([*rest, *train.numbers]) == list(range(60))
  with pytest.raises(UserError, match="all of its 60 sentences are read"):
    dataclasses.replace(train, sentences=0).of_training(20)


def test_the_page_tells_each_annotation(subject, found):
  page = codes.make_page(codes.Codes(training=90_000), subject, found)
  assert "trained on 80 training sentences" in page.description  # as many as there were
  assert len(page.sections) == len(page.summary) == 3
  table = page.sections[0].items[1]
  assert isinstance(table, Table)
  assert table.rows[-1][0] == "word alone"
  assert page.data["annotations"][0]["readings"][codes.ALL]["test"]["count"] > 0


def test_what_cannot_be_read_is_named(subject):
  with pytest.raises(UserError, match="at which nothing competes or has gates"):
    codes.Codes(training=20).measure(subject_of())
  with pytest.raises(UserError, match="--annotations"):
    codes.Codes(annotations=("colour_source",)).measure(subject)
