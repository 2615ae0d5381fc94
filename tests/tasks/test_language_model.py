"""The recurrent language modelling task: carried states, scores, single texts."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_masked
import tiny_recurrent

import compmod_jax
from compmod_jax.api import RecurrentModel
from compmod_jax.checkpoints.model_folder import save_model_folder
from compmod_jax.core.config import to_json
from compmod_jax.core.errors import UserError
from compmod_jax.data.streams import rows_of_evaluation
from compmod_jax.data.text_tokenizer import FILE
from compmod_jax.data.tokenizers.vocabulary import Words
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.base import (
  Dataset,
  Evaluator,
  Generator,
  Objective,
  StepContext,
  TaskModel,
  lower_is_better,
)
from compmod_jax.tasks.configs import ModelConfig, TaskConfig
from compmod_jax.tasks.language_model import LanguageModelConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  counts = {"train": 60, "valid": 9, "test": 12}
  return tiny_masked.write_text(tmp_path_factory.mktemp("recurrent") / "text", counts)


def build(folder, signal="surprisal", **fields):
  return tiny_recurrent.make_task(folder).build(tiny_recurrent.make_model(signal, **fields))


@pytest.fixture(scope="module")
def task(folder):
  return build(folder, dropout=0.0)


@functools.cache
def parameters(task):
  init = jax.jit(lambda key: jax.tree.map(lambda leaf: 3 * leaf, nn.unbox(task.model.init(key))))
  return init(jax.random.key(0))


@functools.cache
def loss_of(task):
  context = StepContext(jax.random.key(0), jnp.int32(0), False)
  return jax.jit(lambda *given: task.loss(*given, context))


def losses(task, batches, carry):
  """Sum of losses, count, and the carry after some batches."""
  total = count = 0.0
  for batch in batches:
    terms, carry, _ = loss_of(task)(parameters(task), carry, batch)
    total += float(terms["cross_entropy"].sum)
    count += float(terms["cross_entropy"].count)
  return total, count, carry


def test_the_task_has_all_of_the_contract(task):
  assert isinstance(task.dataset, Dataset)
  assert isinstance(task.model, TaskModel)
  assert isinstance(task.objective, Objective)
  assert isinstance(task.generator, Generator)
  assert all(isinstance(one, Evaluator) for one in task.evaluators)
  assert lower_is_better(task.metric)


def test_states_are_carried_from_one_stretch_to_the_next_and_reset_by_an_epoch(task):
  iterator, count = task.dataset.train_batches(seed=0, multiple=1)
  batches = [next(iterator) for _ in range(count + 1)]
  total, tokens, carry = losses(task, batches[:count], task.model.init_carry())
  assert tokens == len(task.dataset.tokens("train"))
  assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(carry))
  # The first stretch of the next epoch does not see what was carried.
  afresh = losses(task, batches[count:], task.model.init_carry())[0]
  np.testing.assert_allclose(losses(task, batches[count:], carry)[0], afresh, rtol=1e-6)
  # The second one does.
  kept = losses(task, batches[:2], task.model.init_carry())[0]
  apart = sum(losses(task, [batch], task.model.init_carry())[0] for batch in batches[:2])
  assert abs(kept - apart) > 1e-3
  assert total > 0


def test_evaluation_scores_every_token_once_and_per_word(task):
  found = task.evaluate(parameters(task), "test").values
  texts = list(task.dataset.config.data.load("test"))
  assert found["tokens"] == len(task.dataset.tokens("test"))
  words = sum(len(text.split()) + 1 for text in texts)
  assert found["tokens"] == words  # one token a word, and one for each end
  np.testing.assert_allclose(found["perplexity"], np.exp(found["loss"]))
  np.testing.assert_allclose(found["word_perplexity"], found["perplexity"], rtol=1e-9)
  assert found["error"] > 0
  assert found["unknown"] == 0
  assert task.evaluate(parameters(task), "test").values == found


def test_unknown_words_are_counted_as_the_corpus_s_own(folder, task):
  """A vocabulary in which `<unk>` stands for a word of the text."""
  words = ["<unk>", "bat", "cow", "dog", "emu", *"01234"]  # lacks "fox"
  files = {FILE: Words(words).to_bytes()}
  other = task.dataset.config.build(task.model.config, files=files)
  texts = " ".join(task.dataset.config.data.load("test")).split()
  share = texts.count("fox") / len(task.dataset.tokens("test"))
  assert share > 0.02
  assert other.dataset.unknown("test") == pytest.approx(100 * share)
  batch = other.generator.scorer.batch(["fox 4", "<unk> 4"])
  assert batch["targets"][0].tolist() == batch["targets"][1].tolist()


def test_a_text_by_itself_is_scored_as_in_a_stream_of_one_row(folder, task):
  one = dataclasses.replace(task.dataset.config, eval_rows=1)
  alone = one.build(task.model.config, files=task.dataset.files())
  text = next(iter(task.dataset.config.data.load("valid")))
  scored = task.generator.scorer(task.model, parameters(task), [text])[0]
  batch = {k: v[:, : len(scored.nll)] if v.ndim > 1 else v for k, v in _first(alone).items()}
  run = jax.jit(functools.partial(alone.model.run, train=False))
  nll = run(parameters(task), alone.model.module.initial_states(1), batch, None).nll
  np.testing.assert_allclose(scored.nll, nll[0], rtol=1e-5)
  assert scored.words[-1] == "</s>"
  assert scored.total == pytest.approx(float(np.sum(scored.nll)))


def test_evaluation_chooses_its_streams_unless_it_is_told(task):
  config = dataclasses.replace(task.dataset.config, length=2, eval_rows=0)
  chosen = config.build(task.model.config, files=task.dataset.files()).dataset
  rows = rows_of_evaluation(len(chosen.tokens("test")), 2, chosen.tokenizer.vocab_size)
  assert rows not in (1, task.dataset.config.eval_rows)
  assert next(chosen.eval_batches("test"))["tokens"].shape == (rows, 2)
  assert len(next(chosen.eval_batches("test", multiple=8))["tokens"]) == -(-rows // 8) * 8
  assert len(next(task.dataset.eval_batches("test"))["tokens"]) == task.dataset.config.eval_rows


def _first(task):
  batches = task.dataset.eval_batches("valid")
  stretch = [next(batches) for _ in range(4)]
  names = ("tokens", "targets", "counted")
  return {name: np.concatenate([b[name] for b in stretch], axis=1) for name in names}


@pytest.mark.parametrize(
  "signal",
  [
    "none",
    "mc_dropout",
    "ensemble",
    pytest.param("entropy", marks=pytest.mark.slow),
    pytest.param("locked_dropout", marks=pytest.mark.slow),
    pytest.param("variational_rnn", marks=pytest.mark.slow),
  ],
)
def test_every_signal_trains_and_scores(folder, signal):
  task = build(folder, signal)
  params = parameters(task)
  iterator, _ = task.dataset.train_batches(seed=0, multiple=1)
  context = StepContext(jax.random.key(1), jnp.int32(0), True)

  @jax.jit
  @jax.value_and_grad
  def loss(params, carry, batch):
    terms, _, _ = task.loss(params, carry, batch, context)
    return sum(term.value() for term in terms.values())

  value, grads = loss(params, task.model.init_carry(), next(iterator))
  assert np.isfinite(value)
  assert np.any(grads["embedding"] != 0)
  assert np.all(grads.get("anchor", 0) == 0)
  assert np.isfinite(task.evaluate(params, "valid").values["perplexity"])


@pytest.mark.parametrize("signal", ["mc_dropout", "locked_dropout", "variational_rnn"])
def test_masks_do_not_depend_on_a_text_s_place_or_its_neighbours(folder, signal):
  recoding = RecodingConfig(signal=signal, samples=2, size=2.0, share=0.5)
  task = build(folder, recoding=recoding)
  params = parameters(task)
  text, other = "bat 0 cow 1 dog", "emu 3 fox 4 bat 2 cow"  # of one bucket
  alone = task.generator.scorer(task.model, params, [text])[0]
  long = " ".join([other] * 4)  # of a longer bucket
  for texts in ([text, other], [other, other, text], [long, text]):
    found = task.generator.scorer(task.model, params, texts)[texts.index(text)]
    np.testing.assert_allclose(found.nll, alone.nll, rtol=1e-5)
    np.testing.assert_allclose(found.error, alone.error, rtol=1e-5)
  # The two sentences of a pair have the same masks: they are scored alike until they differ.
  good, bad = task.generator.scorer(task.model, params, [text, "bat 0 cow 4 dog"])
  np.testing.assert_allclose(good.nll[:3], bad.nll[:3], rtol=1e-5)
  assert good.nll[3] != bad.nll[3]
  # Another seed draws others.
  seeded = dataclasses.replace(task.dataset.config, noise_seed=1).build(task.model.config)
  others = seeded.generator.scorer(seeded.model, params, [text])[0].error
  assert np.max(np.abs(others - alone.error)) > 1e-5
  # The streams of a split have masks of their own.
  batch = {
    name: np.tile(value[:1], (2, 1))
    for name, value in task.generator.scorer.batch([text]).items()
    if value.ndim == 2
  }
  run = jax.jit(functools.partial(task.model.run, train=False))
  out = run(params, task.model.module.initial_states(2), batch, jax.random.key(0))
  assert np.max(np.abs(np.subtract(*out.steps["error"]))) > 1e-5


def test_recoding_can_be_for_training_or_for_use_alone(folder, task):
  params, plain = parameters(task), build(folder, "none", dropout=0.0)
  expected = plain.evaluate(params, "valid").values
  recoding = dataclasses.replace(task.model.config.recoding, when="train")
  config = dataclasses.replace(task.model.config, recoding=recoding)
  found = (
    task.dataset.config.build(config, files=task.dataset.files()).evaluate(params, "valid").values
  )
  assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
  assert task.evaluate(params, "valid").values["perplexity"] != expected["perplexity"]


def test_recoding_of_a_share_of_steps_is_drawn_and_of_given_steps_is_not(folder):
  whole = build(folder, "nll", dropout=0.0)
  params = parameters(whole)
  expected = whole.evaluate(params, "valid").values["perplexity"]
  for fields in ({"share": 0.5}, {"share": 0.5, "limit": "batches"}, {"only": (1, 3)}):
    recoding = RecodingConfig(signal="nll", size=0.5, **fields)
    some = build(folder, recoding=recoding, dropout=0.0)
    first = some.evaluate(params, "valid").values
    assert first == some.evaluate(params, "valid").values
    assert first["perplexity"] != expected


def test_a_loaded_model_scores_texts_and_shows_its_states(folder, task, tmp_path):
  meta = {
    "task": to_json(task.dataset.config, TaskConfig),
    "model": to_json(task.model.config, ModelConfig),
    "step": 1,
  }
  params = jax.tree.map(np.asarray, parameters(task))
  save_model_folder(tmp_path / "model", params=params, files=task.dataset.files(), meta=meta)
  model = compmod_jax.load(tmp_path / "model")
  assert isinstance(model, RecurrentModel)
  scored = model.score(["bat 0 cow 1", ""])
  assert [len(one.nll) for one in scored] == [5, 1]
  assert np.all(scored[0].surprisal > 0)
  assert "layer_1/hidden" in model.sites()
  found = model.capture(["bat 0"], ["layer_0/hidden", "layer_0/hidden_recoded"])
  assert found["layer_0/hidden"].shape == (1, 3, 8)
  assert np.any(found["layer_0/hidden"] != found["layer_0/hidden_recoded"])
  edited = model.edit({"layer_0/hidden": lambda h: 0 * h})
  changed = edited.score(["bat 0 cow 1"])[0].nll
  assert np.any(np.abs(changed - scored[0].nll) > 1e-4)
  with pytest.raises(UserError, match="one string"):
    model.score("bat 0")


def test_what_does_not_fit_together_is_refused(folder, task):
  with pytest.raises(UserError, match="the task needs a recurrent language model"):
    tiny_recurrent.make_task(folder).build(EncoderConfig())
  with pytest.raises(UserError, match=r"phases\.part is 'small'"):
    task.dataset.train_batches(part="small", seed=0, multiple=1)
  with pytest.raises(UserError, match=r"task\.rows is 8; .* multiple of 3"):
    task.dataset.train_batches(seed=0, multiple=3)
  with pytest.raises(UserError, match=r"task\.rows is 0"):
    LanguageModelConfig(rows=0)
  with pytest.raises(UserError, match="does not search"):
    task.decoding(None)
