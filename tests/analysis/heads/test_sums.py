"""Sums over batches are those of the activations, one sentence at a time."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_model

from compmod_jax.analysis.heads.findings import findings
from compmod_jax.analysis.heads.sums import Sampling, collect
from compmod_jax.analysis.labels import POSITION, TAG, WORD, labels_of
from compmod_jax.analysis.reading import NOTHING, reader
from compmod_jax.analysis.subject import modules_of
from compmod_jax.core.intermediates import run
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig

SITE = "encoder/layer_0/self"


@pytest.fixture(scope="module")
def labels(subject):
  read = reader(subject.task)
  return {
    stream: labels_of(subject, read, stream, words=("Den,", "Die", "xyzzy"), frequent=4)
    for stream in read.streams
  }


@pytest.fixture(scope="module")
def totals(subject, labels):
  sampling = Sampling(shuffles=3, blocks=4)
  return {t.module.name: t for t in collect(subject, reader(subject.task), labels, sampling)}


@pytest.fixture(scope="module")
def activations(subject):
  """Every module's activations at the tokens that count, and the labels there, batch by batch."""

  @jax.jit
  def forward(batch):
    return run(subject.task.model.forward, subject.params, batch, capture=None)[1]

  return [jax.device_get(forward(subject.place(batch))) for batch in subject.batches]


def read_at(subject, stream, number):
  return reader(subject.task).tokens(stream, subject.batches[number]) != NOTHING


def test_all_modules_are_found_and_told_apart(subject):
  assert [(m.name, m.units, m.dim, m.routed) for m in subject.modules] == [
    (SITE, 4, 4, True),
    ("decoder/layer_0/self", 4, 4, False),
    ("decoder/layer_0/cross", 4, 4, False),
  ]
  hidden = modules_of({"encoder/layer_1/ffn/router/weights": (1, 2, 8)})
  assert [(m.kind, m.unit, m.units, m.dim, m.routed) for m in hidden] == [
    ("experts", "expert", 8, 0, True)
  ]


@pytest.mark.parametrize(
  ("module", "stream"), [(SITE, "source"), ("decoder/layer_0/cross", "target")]
)
def test_means_are_over_real_tokens_alone(subject, totals, activations, module, stream):
  weights, norms, scaled, outputs = [], [], [], []
  for number, captured in enumerate(activations):
    at = read_at(subject, stream, number)
    outputs.append(captured[f"{module}/heads"][at])
    norms.append(np.linalg.norm(outputs[-1], axis=-1))
    if module == SITE:
      weights.append(captured[f"{module}/router/weights"][at])
      scaled.append(np.linalg.norm(captured[f"{module}/heads_scaled"][at], axis=-1))
  found = totals[module]
  expected = np.concatenate(norms)
  assert found.sums["count"] == len(expected)
  np.testing.assert_allclose(found.mean("norm"), expected.mean(0), rtol=1e-5)
  if module == SITE:
    mean = np.concatenate(weights).mean(0)
    np.testing.assert_allclose(found.mean("weight"), mean, rtol=1e-5)
    np.testing.assert_allclose(found.mean("norm_scaled"), np.concatenate(scaled).mean(0), rtol=1e-5)
    second = np.concatenate(weights).T @ np.concatenate(weights)
    np.testing.assert_allclose(found.sums["weight_second"], second, rtol=1e-5)
  else:
    assert "weight" not in found.sums
  flat = np.concatenate(outputs).reshape(len(expected), -1)
  np.testing.assert_allclose(found.sums["outputs_second"], flat.T @ flat, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", [POSITION, WORD, TAG])
def test_means_by_category_are_those_of_its_tokens(subject, labels, totals, activations, kind):
  made = next(one for one in labels["source"] if one.name == kind)
  ids = np.concatenate([part[part != NOTHING] for part in made.ids])
  weights = np.concatenate(
    [
      captured[f"{SITE}/router/weights"][part != NOTHING]
      for captured, part in zip(activations, made.ids, strict=True)
    ]
  )
  found = totals[SITE]
  assert len(ids) > 20
  for number in range(len(made.categories)):
    mine = weights[ids == number]
    assert found.sums["by"][kind]["count"][number] == len(mine)
    if len(mine):
      np.testing.assert_allclose(found.by(kind, "weight")[number], mine.mean(0), rtol=1e-5)
    else:
      assert np.isnan(found.by(kind, "weight")[number]).all()


def test_shuffles_keep_how_often_categories_occur_and_deal_them_anew(labels, totals):
  made = next(one for one in labels["source"] if one.name == TAG)
  dealt = made.shuffled(3, seed=0)
  for number in range(3):
    for part, ids in zip(dealt, made.ids, strict=True):
      np.testing.assert_array_equal(part[..., number] == NOTHING, ids == NOTHING)
    flat = np.concatenate([part[..., number].ravel() for part in dealt])
    whole = np.concatenate([ids.ravel() for ids in made.ids])
    np.testing.assert_array_equal(np.sort(flat), np.sort(whole))
    assert (flat != whole).mean() > 0.02
  again = made.shuffled(3, seed=0)
  assert all((one == two).all() for one, two in zip(dealt, again, strict=True))
  tables = totals[SITE].sums["by"][TAG]["weight"]
  assert tables.shape == (4, len(made.categories), 4)
  np.testing.assert_allclose(tables.sum(axis=(1, 2)), tables[0].sum(), rtol=1e-5)
  assert (np.abs(tables[1:] - tables[0]).max(axis=(1, 2)) > 1e-3).all()


def test_the_words_that_are_named_come_first_and_case_does_not_count(labels):
  words = next(one for one in labels["source"] if one.name == WORD).categories
  assert words[:2] == ("den", "die")
  assert len(words) == 6
  assert "xyzzy" not in words


def test_pairs_of_weight_and_norm_are_those_of_the_tokens(subject, totals, activations):
  values, blocks = totals[SITE].sampled
  expected = []
  for number, captured in enumerate(activations):
    at = read_at(subject, "source", number)
    norm = np.linalg.norm(captured[f"{SITE}/heads"], axis=-1)
    expected.append(np.stack([captured[f"{SITE}/router/weights"], norm], axis=2)[at])
  weights, norms = np.moveaxis(np.concatenate(expected), 1, 0)
  np.testing.assert_allclose(values[:, 1], norms, rtol=1e-5)
  # Two programs round a score of 50 apart by 4e-6 and more, and its exponential by that share.
  found, true = np.log(values[:, 0]), np.log(weights)
  np.testing.assert_allclose(found, true, rtol=1e-6, atol=1e-5)
  assert set(blocks.tolist()) <= set(range(4))
  assert len(totals[SITE].between) == len(subject.batches)
  assert len(totals["decoder/layer_0/self"].sampled[0]) == 0


def test_a_cap_on_the_tokens_kept_is_kept(subject, labels):
  few = Sampling(shuffles=0, tokens=40)
  modules = [m for m in subject.modules if m.routed]
  (found,) = collect(subject, reader(subject.task), labels, few, modules=modules)
  assert 10 <= len(found.sampled[0]) <= 80


def test_chosen_examples_are_each_read_once_in_batches_of_the_tasks_shapes(subject):
  shapes = {b["source"].shape for b in subject.task.dataset.eval_batches("test")}
  for count in (1, 7, 19):
    some = dataclasses.replace(subject, sentences=count)
    numbers = np.concatenate([batch["index"] for batch in some.batches])
    assert len(some.numbers) == count == len(set(numbers[numbers >= 0].tolist()))
    assert {batch["source"].shape for batch in some.batches} <= shapes
    sources, encode = (
      subject.task.dataset.pairs["test"].source,
      subject.task.dataset.source_tokenizer.encode,
    )
    for batch in some.batches:
      for row, number in enumerate(batch["index"].tolist()):
        ids = batch["source"][row][batch["source"][row] > 0].tolist()
        assert ids[:-1] == (encode(sources[number]) if number >= 0 else [])


@pytest.mark.slow
def test_experts_are_measured_like_heads(subject):
  competition = CompetitionConfig(rule="top_k", keep=2)
  config = dataclasses.replace(
    subject.task.model.config,
    compete=(),
    expert_layers=("encoder",),
    experts=ExpertsConfig(count=3, competition=competition),
  )
  task = subject.task.dataset.config.build(config, files=subject.task.dataset.files())
  params = jax.device_put(tiny_model.random_parameters(task, 2))
  some = dataclasses.replace(subject, task=task, params=params, sentences=4)
  (module,) = [m for m in some.modules if m.routed]
  assert (module.name, module.unit, module.units) == ("encoder/layer_0/ffn", "expert", 3)
  read = reader(task)
  labels = {stream: labels_of(some, read, stream) for stream in read.streams}
  (totals,) = collect(some, read, labels, Sampling(shuffles=1), modules=[module])
  (finding,) = findings([totals])
  norms, weights = [], []
  for batch in some.batches:
    sites = [module.outputs, module.weights]
    captured = run(task.model.forward, params, jax.device_put(batch), capture=sites)[1]
    at = batch["source"] > 0
    norms.append(np.linalg.norm(captured[module.outputs][at], axis=-1))
    weights.append(np.asarray(captured[module.weights][at]))
  np.testing.assert_allclose(totals.mean("norm"), np.concatenate(norms).mean(0), rtol=1e-5)
  np.testing.assert_allclose(totals.mean("weight"), np.concatenate(weights).mean(0), rtol=1e-5)
  assert ((np.concatenate(weights) > 0).sum(axis=-1) == 2).all()
  assert finding.similarity.shape == (3, 3)
  assert finding.agreement.tokens == len(np.concatenate(norms))
