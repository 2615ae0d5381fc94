"""The report on heads says what was planted, and that nothing is there where nothing is."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.analysis.heads.findings import findings, record
from compmod_jax.analysis.heads.measure import Heads
from compmod_jax.analysis.heads.report import make_page, summary
from compmod_jax.analysis.heads.specialisation import mutual_information
from compmod_jax.analysis.heads.sums import Sampling, collect
from compmod_jax.analysis.labels import POSITION, Labels, labels_of
from compmod_jax.analysis.reading import reader
from compmod_jax.analysis.report import page
from compmod_jax.core.errors import UserError

SITE = "encoder/layer_0/self"


def measured(subject, weights, *, outputs=None):
  """Finding and summary where an edit decides the weights (and what heads put out)."""
  edits = {f"{SITE}/router/weights": weights}
  if outputs is not None:
    edits[f"{SITE}/heads"] = outputs
  edited = dataclasses.replace(subject, task=subject.task.edited(edits))
  read = reader(edited.task)
  labels = {stream: labels_of(edited, read, stream) for stream in read.streams}
  modules = [module for module in edited.modules if module.routed]
  found = findings(collect(edited, read, labels, Sampling(), modules=modules))
  return found[0], " ".join(summary(found))


def by_position(value):
  """Head 3 has all weight at the first position of every sentence, head 0 elsewhere."""
  first = (jnp.arange(value.shape[1]) == 0)[None, :, None]
  return jnp.broadcast_to(jnp.where(first, jnp.eye(4)[3], jnp.eye(4)[0]), value.shape)


@pytest.fixture(scope="module")
def planted(subject):
  return measured(subject, by_position)


def test_a_planted_specialisation_is_measured_exactly(planted):
  found, text = planted
  info = found.information[POSITION]
  counts = found.totals.sums["by"][POSITION]["count"]
  share = counts[0] / counts.sum()
  # Position tells the head with certainty, so all of the head's entropy is told.
  expected = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
  assert info.bits == pytest.approx(expected, rel=1e-5) == info.limit
  assert info.most < info.bits / 3
  assert info.shuffled.low <= info.shuffled.value <= info.shuffled.high <= info.most
  assert "Specialisation by position: more information than any shuffle in 1 of 1 modules" in text
  assert "100 % of the limit" in text
  np.testing.assert_allclose(found.totals.by(POSITION, "weight")[0], np.eye(4)[3])


def test_norms_that_cancel_weights_are_seen(subject):
  table = jax.random.dirichlet(jax.random.key(0), jnp.ones(4), (1, 128))

  def weights(value):
    return jnp.broadcast_to(table[:, : value.shape[1]], value.shape)

  def outputs(value):
    return jnp.broadcast_to(1 / table[:, : value.shape[1], :, None], value.shape)

  found, text = measured(subject, weights, outputs=outputs)
  assert found.agreement.pairs.value == pytest.approx(-1)
  assert found.agreement.within.value == pytest.approx(-1)
  assert found.agreement.tokens == found.totals.sums["count"]
  assert "negative beyond chance in 1 of 1 modules and positive in 0" in text
  assert "encoder self, layer 0: -1.00" in text
  norms, means = found.deciles["2"]
  assert (np.diff(norms) > 0).all()
  assert (np.diff(means) < 0).all()
  # Scaled outputs are all equally long.
  np.testing.assert_allclose(found.totals.mean("norm_scaled"), 2, rtol=1e-5)


def test_even_weights_specialise_in_nothing_and_the_report_says_so(subject):
  found, text = measured(subject, lambda value: jnp.full(value.shape, 0.25))
  for info in found.information.values():
    assert info.bits == pytest.approx(0, abs=1e-6)
  for kind in ("part of speech", "word", "position"):
    assert f"Specialisation by {kind}: more information than any shuffle in 0 of 1 modules" in text
  assert "least even in encoder self, layer 0: 0.25 to 0.25 (equal shares: 0.25)" in text
  assert np.isnan(found.agreement.pairs.value)
  assert np.isnan(found.weight_correlation).all()
  assert "Spearman" not in text


def test_noise_is_within_the_shuffled_control_about_as_often_as_it_should_be():
  random = np.random.default_rng(0)
  beyond = 0
  for trial in range(400):
    ids = random.integers(0, 4, size=(6, 10)).astype(np.int16)
    weights = random.dirichlet(np.ones(3), size=60)
    labels = Labels("word", tuple("abcd"), [ids])
    (dealt,) = labels.shuffled(19, seed=trial)
    every = np.concatenate([ids[..., None], dealt], axis=-1).reshape(60, 20)
    tables = [np.eye(4)[column].T @ weights for column in every.T]
    bits = mutual_information(np.stack(tables))
    beyond += bits[0] > bits[1:].max()
  # One in twenty: the true labels are one of twenty equally good deals.
  assert 0.025 <= beyond / 400 <= 0.08


def test_words_that_do_not_occur_are_listed_and_bad_options_refused(subject):
  settings = Heads(words=("qwertz",), shuffles=1, untrained=False)
  made = make_page(settings, subject, settings.measure(subject))
  assert made.summary[-1] == "Not among the words read: qwertz."
  with pytest.raises(UserError, match="--shuffles is 0"):
    Heads(shuffles=0)


@pytest.fixture(scope="module")
def written(subject, tmp_path_factory):
  settings = Heads(words=("die",), frequent=3, shuffles=4)
  made = make_page(settings, subject, settings.measure(subject))
  return page.write(made, tmp_path_factory.mktemp("heads"), command="python -m train.analyse")


def test_the_report_holds_all_that_was_asked_for(written):
  names = {path.stem for path in written.pictures}
  assert names == {
    "weight_by_position", "norm_by_position", "norm_scaled_by_position", "weight_by_word",
    "norm_by_word", "norm_scaled_by_word", "weight_by_part_of_speech", "norm_by_part_of_speech",
    "norm_scaled_by_part_of_speech", "information", "weight_and_norm", "weight_by_norm",
    "similarity", "weight_correlation", "signatures",
  }  # fmt: skip
  assert {path.name for path in written.tables} == {
    "categories.csv", "information.csv", "weight_and_norm.csv", "redundancy.csv", "units.csv",
  }  # fmt: skip
  text = written.html.read_text()
  assert text.count("<svg") == len(names)
  assert "There is no log beside the model." in text
  assert "://" not in text


def test_numbers_and_tables_tell_the_same(written):
  data = json.loads(written.json.read_text(), parse_constant=pytest.fail)
  module = data["modules"][SITE]
  with next(path for path in written.tables if path.name == "units.csv").open() as file:
    rows = [row for row in csv.DictReader(file) if row["module"] == "encoder self, layer 0"]
  assert [float(row["mean weight"]) for row in rows] == module["mean"]["weight"]
  assert sum(module["mean"]["weight"]) == pytest.approx(1, abs=1e-5)
  assert [float(row["signature norm"]) for row in rows] == module["signature_norm"]
  assert module["information"]["part of speech"]["untrained"] > 0
  assert data["modules"]["decoder/layer_0/self"]["information"] == {}
  assert data["summary"]
  assert data["labels"]["source"]["word"][0] == "die"


def test_signatures_are_those_of_the_parameters(subject, written):
  signatures = subject.params["encoder_0"]["self_attention"]["router"]["signatures"]
  data = json.loads(written.json.read_text())
  norms = np.linalg.norm(np.asarray(signatures), axis=-1)
  np.testing.assert_allclose(data["modules"][SITE]["signature_norm"], norms, rtol=1e-5)


def test_a_plain_model_has_norms_and_similarities_alone(subject, planted):
  read = reader(subject.task)
  labels = {stream: labels_of(subject, read, stream) for stream in read.streams}
  plain = [module for module in subject.modules if not module.routed]
  found = findings(collect(subject, read, labels, Sampling(shuffles=1), modules=plain))
  assert next(summary(found)).startswith("No module of this model has a router")
  assert all(record(finding)["agreement"] is None for finding in found)
  assert all(finding.similarity.shape == (4, 4) for finding in found)
