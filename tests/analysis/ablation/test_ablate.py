"""Ablations change what they say, and nothing else; effects and their intervals are right."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from compmod_jax.analysis.ablation.measure import (
  Ablate,
  Effect,
  chosen_units,
  keeping,
  mean_outputs,
)
from compmod_jax.analysis.ablation.report import heat_maps, make_page
from compmod_jax.analysis.reading import reader
from compmod_jax.analysis.report import page
from compmod_jax.analysis.scoring import decoded, sentence_losses
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run, zero_units
from compmod_jax.metrics.bootstrap import Comparison, Interval

SELF, CROSS = "encoder/layer_0/self", "decoder/layer_0/cross"


@pytest.fixture(scope="module")
def zeros(subject):
  return {module.scaled: np.zeros((module.units, module.dim)) for module in subject.modules}


@pytest.fixture(scope="module")
def losses(subject):
  return sentence_losses(subject, reader(subject.task))


def test_losses_of_sentences_add_up_to_the_loss_of_the_split(subject, losses):
  nats, counts = losses(subject.params, {})
  assert len(nats) == len(subject.numbers) == 12
  whole = dataclasses.replace(subject, sentences=0)
  nats, counts = sentence_losses(whole, reader(subject.task))(subject.params, {})
  expected = subject.task.evaluate(subject.params, "test", sharing=subject.sharing, decode=False)
  assert nats.sum() / counts.sum() == pytest.approx(expected.values["loss"], rel=1e-5)
  pairs, encode = subject.task.dataset.pairs["test"], subject.task.dataset.target_tokenizer.encode
  assert counts.tolist() == [len(encode(text)) + 1 for text in pairs.target]


def test_replacing_nothing_changes_no_more_than_rounding(subject, losses, zeros):
  plain, _ = losses(subject.params, {})
  kept, _ = losses(subject.params, keeping(subject.modules, zeros, ()))
  np.testing.assert_allclose(plain, kept, rtol=1e-6)


def test_a_unit_without_its_output_is_as_if_it_were_zero(subject, losses, zeros):
  edited = subject.task.edited({f"{CROSS}/heads_scaled": zero_units(2, axis=-2)})
  expected, _ = sentence_losses(dataclasses.replace(subject, task=edited), reader(edited))(
    subject.params, {}
  )
  found, _ = losses(subject.params, keeping(subject.modules, zeros, [(CROSS, 2)]))
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  plain, _ = losses(subject.params, {})
  assert np.abs(found - plain).max() > 1e-3


def test_all_ablations_share_one_compilation(subject, losses, zeros, monkeypatch):
  compiled = []
  kind = type(subject.task.model)
  forward = kind.forward

  def counted(*args, **kwargs):
    compiled.append(1)
    return forward(*args, **kwargs)

  monkeypatch.setattr(kind, "forward", counted)
  fresh = sentence_losses(subject, reader(subject.task))
  for unit in range(4):
    fresh(subject.params, keeping(subject.modules, zeros, [(SELF, unit)]))
  assert len(compiled) == len({batch["source"].shape for batch in subject.batches})


def test_decoding_without_a_unit_is_decoding_of_the_edited_model(subject, zeros):
  read, numbers = reader(subject.task), subject.numbers[:6]
  edited = subject.task.edited({f"{SELF}/heads_scaled": zero_units(0, 1, 2, axis=-2)})
  expected, _ = decoded(dataclasses.replace(subject, task=edited), read, numbers)
  whole, references = decoded(subject, read, numbers, edits=keeping(subject.modules, zeros, ()))
  compiled = subject.task.model._compiled
  known = {key: program._cache_size() for key, program in compiled.items()}
  without = [(SELF, 0), (SELF, 1), (SELF, 2)]
  found, _ = decoded(subject, read, numbers, edits=keeping(subject.modules, zeros, without))
  assert found == expected != whole
  again = {key: program._cache_size() for key, program in compiled.items()}
  assert again == known, "nothing compiled again"
  assert references == [subject.task.dataset.pairs["test"].target[i] for i in numbers]


def test_the_mean_is_over_real_tokens(subject):
  found = mean_outputs(subject, subject.modules)

  @jax.jit
  def forward(batch):
    return run(subject.task.model.forward, subject.params, batch, capture=list(found))[1]

  for site, mean in found.items():
    side = "source" if site.startswith("encoder/") else "target"
    values = [
      np.asarray(forward(subject.place(batch))[site])[batch[side] > 0] for batch in subject.batches
    ]
    np.testing.assert_allclose(mean, np.concatenate(values).mean(0), rtol=1e-4, atol=1e-5)


def test_units_are_all_alone_or_those_named_alone_and_together(subject):
  every = chosen_units((), subject.modules)
  assert [name for name, _ in every[:5]] == [*(f"{SELF}:{i}" for i in range(4)), every[4][0]]
  assert len(every) == 12
  named = chosen_units((f"{CROSS}:3", SELF, f"{SELF}:1"), subject.modules)
  assert [len(units) for _, units in named] == [1] * 5 + [5]
  assert named[-1][1] == ((CROSS, 3), *((SELF, i) for i in range(4)))
  with pytest.raises(UserError, match=r"encoder/layer_0/slef.*Did you mean 'encoder/layer_0/self'"):
    chosen_units(("encoder/layer_0/slef:1",), subject.modules)
  with pytest.raises(UserError, match="has the units 0 to 3"):
    chosen_units((f"{SELF}:4",), subject.modules)
  with pytest.raises(UserError, match="--replace is 'median'"):
    Ablate(replace="median")


@pytest.fixture(scope="module")
def written(subject, tmp_path_factory):
  settings = Ablate(units=(SELF,), replace="mean", decode=4, samples=200)
  found = make_page(settings, subject, settings.measure(subject))
  return found, page.write(found, tmp_path_factory.mktemp("ablate"))


def test_the_report_tells_every_effect(subject, losses, written):
  found, files = written
  data = json.loads(files.json.read_text(), parse_constant=pytest.fail)
  assert [effect["name"] for effect in data["effects"]] == [
    *(f"{SELF}:{i}" for i in range(4)),
    "all of these together",
  ]
  nats, counts = losses(subject.params, {})
  assert data["loss"] == pytest.approx(nats.sum() / counts.sum())
  for effect in data["effects"]:
    loss = effect["loss"]
    assert loss["low"] <= loss["value"] <= loss["high"]
    assert loss["p"] <= loss["p_corrected"] <= 1
    assert effect["score"]["value"] == pytest.approx(effect["score"]["value"])
  assert (data["decoded"], data["examples"]) == (4, 12)
  assert {path.stem for path in files.pictures} == {
    "loss_map", "loss_intervals", "score_map", "score_intervals",
  }  # fmt: skip
  assert any("together" in sentence for sentence in found.summary)


def test_the_map_has_an_effect_where_it_was_measured_and_nothing_elsewhere(subject):
  def effect(place, unit, value, p):
    found = Comparison(Interval(value, value - 1, value + 1, 0.95), p)
    return Effect(f"{place}:{unit}", "", ((place, unit),), found, None, loss_p=p)

  effects = [effect(SELF, 1, 0.5, 0.01), effect(CROSS, 2, -0.25, 0.2)]
  found = heat_maps(effects, subject.modules, "loss")
  assert list(found) == ["encoder/self", "decoder/cross"]
  np.testing.assert_array_equal(found["encoder/self"].values, [[np.nan, 0.5, np.nan, np.nan]])
  assert found["encoder/self"].marked.tolist() == [[False, True, False, False]]
  np.testing.assert_array_equal(found["decoder/cross"].values, [[np.nan, np.nan, -0.25, np.nan]])
  assert not found["decoder/cross"].marked.any()
