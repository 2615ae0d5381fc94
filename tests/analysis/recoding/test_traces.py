"""Traces of a small recurrent model: what they measure, and the report."""

import dataclasses
import json

import flax.linen as nn
import jax
import numpy as np
import pytest
import tiny_masked
import tiny_recurrent

from compmod_jax.analysis.recoding.report import make_page
from compmod_jax.analysis.recoding.traces import (
  Member,
  Reading,
  Traces,
  _later,
  _scored,
  differs,
  rises,
)
from compmod_jax.analysis.report import page
from compmod_jax.analysis.subject import Subject
from compmod_jax.checkpoints.model_folder import save_model_folder
from compmod_jax.core.config import to_json
from compmod_jax.core.errors import UserError
from compmod_jax.tasks.configs import ModelConfig, TaskConfig

SENTENCES = ["bat 0 cow 1 dog 2", "emu 3"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
  counts = {"train": 60, "valid": 9, "test": 12}
  folder = tiny_masked.write_text(tmp_path_factory.mktemp("traces") / "text", counts)
  model = tiny_recurrent.make_model("nll", dropout=0.0)
  recoding = dataclasses.replace(model.recoding, size=0.01)
  return tiny_recurrent.make_task(folder).build(dataclasses.replace(model, recoding=recoding))


def parameters(task, seed):
  return jax.tree.map(
    lambda leaf: 3 * leaf, nn.unbox(jax.jit(task.model.init)(jax.random.key(seed)))
  )


def save(folder, task, seed):
  meta = {
    "task": to_json(task.dataset.config, TaskConfig),
    "model": to_json(task.model.config, ModelConfig),
    "step": 1,
  }
  params = jax.tree.map(np.asarray, parameters(task, seed))
  save_model_folder(folder, params=params, files=task.dataset.files(), meta=meta)
  return folder


def test_small_steps_along_the_likelihood_never_raise_their_own_error(task):
  scored = task.generator.scorer(task.model, parameters(task, 0), SENTENCES)
  found = rises(Reading("nll", [scored], True))
  assert found["raised"] == 0
  assert found["after"] < found["before"]
  assert found["tokens"] == sum(len(one.nll) for one in scored)
  # For this signal the error is the loss itself.
  np.testing.assert_allclose(scored[0].error, scored[0].nll, rtol=1e-5)
  np.testing.assert_allclose(scored[0].error_after, scored[0].nll_after, rtol=1e-5)


def test_recoding_one_step_alone_is_followed_through_the_steps_after_it(task):
  params = parameters(task, 0)
  sentence = SENTENCES[1]
  subject = Subject(task, params, "test")
  found = _later([Member("nll", task, params)], [sentence], 2, subject)
  none = _scored(task.recoding(size=0.0), params, [sentence])[0]
  by_hand = {0: [], 1: [], 2: []}
  for step in range(len(none.nll)):
    one = _scored(task.recoding(only=(step,)), params, [sentence])[0]
    np.testing.assert_allclose(one.nll[: step + 1], none.nll[: step + 1], rtol=1e-6)
    for away in by_hand:
      if step + away < len(none.nll):
        after = one.error_after if away == 0 else one.error
        by_hand[away].append(after[step + away] - none.error[step + away])
  for one in found:
    assert one.error.mean == pytest.approx(np.mean(by_hand[one.away]), rel=1e-4, abs=1e-7)
  assert found[0].error.mean < 0


def test_settings_are_compared_token_by_token_over_seeds(task):
  runs = [task.generator.scorer(task.model, parameters(task, seed), SENTENCES) for seed in range(3)]
  same = differs(Reading("a", runs, True), Reading("b", runs, True), 0)
  np.testing.assert_allclose(same, 1.0, atol=1e-6)
  single = differs(Reading("a", runs[:1], True), Reading("b", runs, True), 0)
  assert np.all(np.isnan(single))


def page_of(settings, subject):
  return make_page(settings, subject, settings.measure(subject))


@pytest.mark.slow
def test_the_report_shows_sentences_errors_later_steps_and_training(task, tmp_path):
  # What recodes in training alone is read like a plain model.
  plain = task.recoding(when="train")
  beside = [f"plain={save(tmp_path / f'plain{s}', plain, s)}" for s in (1, 2)]
  beside += [f"recoded={save(tmp_path / f'recoded{s}', task, s)}" for s in (3, 4)]
  records = [
    {"kind": "train", "step": s, "recoding/error": 1.0 / s, "recoding/size/layer_0/hidden": s}
    for s in (1, 2, 3)
  ]
  subject = Subject(task, parameters(task, 0), "test", records=records)
  file = tmp_path / "more.txt"
  file.write_text(f"{SENTENCES[1]}\n\n")
  options = Traces(text=(SENTENCES[0],), file=file, beside=tuple(beside), name="first", reach=2)
  written = page.write(page_of(options, subject), tmp_path / "report")
  names = {path.stem for path in written.pictures}
  assert names >= {"sentence_0", "sentence_1", "error_change", "later_steps"}
  assert names >= {"error_over_training", "step_over_training"}
  data = json.loads(written.json.read_text())
  assert set(data["moved"]) == {"first", "recoded"}
  assert [one["away"] for one in data["later"]["recoded"]] == [0, 1, 2]
  rows = (tmp_path / "report/tokens.csv").read_text().splitlines()
  assert len(rows) == 1 + 5 * (7 + 3)
  assert "never" in " ".join(data["summary"])
  assert "0 of 10 tokens (0.0 %) are unknown words" in data["summary"][0]
  assert data["unknown"]["recoded"] == {"tokens": 10, "unknown": 0}


def test_panels_of_a_sentence_share_its_tokens_and_every_difference_has_a_unit(task):
  subject = Subject(task, parameters(task, 0), "test")
  made = page_of(Traces(text=SENTENCES[:1], name="first", reach=2), subject)
  found = {i.name: i.figure for s in made.sections for i in s.items if isinstance(i, page.Picture)}
  above, below = found["sentence_0"].axes
  assert above.get_xlim() == below.get_xlim()
  assert above.get_shared_x_axes().joined(above, below)
  unit = {"nll": "nats"}.get(task.model.config.recoding.signal, "no unit")
  assert below.get_ylabel() == f"error, {unit}"
  (errors,) = found["error_change"].axes
  assert errors.get_xlabel() == f"error after − error before, {unit}"
  one, two = found["later_steps"].axes
  assert (one.get_ylabel(), two.get_ylabel()) == (f"change, {unit}", "change, bits")
  assert one.get_xlim() == two.get_xlim()


def test_one_short_sentence_has_a_report_that_names_what_is_missing(task):
  subject = Subject(task, parameters(task, 0), "test")
  made = page_of(Traces(text=(SENTENCES[1].split()[0],), name="first", reach=9), subject)
  told = " ".join(made.summary)
  assert "nan" not in told
  assert "One sentence gives no interval" in told or "nothing is known of those" in told


def test_what_cannot_be_read_together_is_refused(task, tmp_path):
  subject = Subject(task, parameters(task, 0), "test")
  with pytest.raises(UserError, match="nothing to read"):
    Traces()
  with pytest.raises(UserError, match="give NAME=WORKDIR"):
    Traces(text=("bat 0",), beside=("x",)).measure(subject)
  plain = task.dataset.config.build(tiny_recurrent.make_model("none"), files=task.dataset.files())
  mixed = Traces(text=("bat 0",), beside=(f"this={save(tmp_path / 'plain', plain, 0)}",))
  with pytest.raises(UserError, match="differ: some recode"):
    mixed.measure(subject)
