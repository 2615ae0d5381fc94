"""Batches of a search: what their rows have to do with results, and products in bfloat16."""

import dataclasses
import functools
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.tokenizers import BOS, EOS, PAD
from compmod_jax.decoding import DecodeConfig, beam_search, greedy, loops
from compmod_jax.models.base import ModelConfig, Seq2Seq
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.base import TaskModel
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.tasks.translator import Translator

VOCAB = 40
MODEL = TransformerConfig(
  encoder_layers=1, decoder_layers=1, dim=16, heads=2, ffn_dim=16, max_length=32
)
BEAM = DecodeConfig(beams=3, n_best=2)
GREEDY = DecodeConfig(method="greedy")


class Numbers:
  """A tokenizer of texts that are numbers of tokens."""

  vocab_size = VOCAB
  never_produced = (PAD, BOS)

  def encode_batch(self, texts):
    return [[int(word) for word in text.split()] for text in texts]

  def decode(self, ids):
    return " ".join(map(str, ids))


def sources(count=14):
  random = np.random.default_rng(0)
  lengths = random.integers(1, 8, count)
  return [" ".join(map(str, random.integers(4, VOCAB, n))) for n in lengths]


MODELS = {
  "absolute": MODEL,
  "relative": dataclasses.replace(MODEL, positions="relative"),
  "relative bias": dataclasses.replace(MODEL, positions="relative_bias"),
  "geometric": dataclasses.replace(MODEL, positions="none", attention_form="geometric"),
  "LSTM": Seq2SeqLstmConfig(dim=16, embedding_dim=16, attention_dim=16, max_length=32),
}


@functools.cache
def trained(model: ModelConfig = MODEL) -> tuple[TaskModel[Seq2Seq], dict]:
  """A model whose translations end after few or many tokens."""
  numbers: Any = Numbers()
  nothing: Any = None
  config = TranslationConfig(batch=BatchConfig(buckets=(8,)))
  task = config.build_with(model, nothing, numbers, numbers)
  params = nn.unbox(jax.jit(task.model.init)(jax.random.key(0)))
  params = jax.tree.map(lambda leaf: 1.5 * leaf, params)
  return task.model, params


@functools.cache
def translator(rows: int) -> Translator:
  numbers = Numbers()
  batch = BatchConfig(tokens=8 * rows, buckets=(8,))
  data: Any = types.SimpleNamespace(source_tokenizer=numbers, target_tokenizer=numbers, batch=batch)
  return Translator(data, BEAM)


def translations(texts, rows, config, model=MODEL):
  return translator(rows)(*trained(model), texts, config)


@functools.cache
def one_by_one(config):
  return [translations([text], 1, config)[0] for text in sources()]


def test_sentences_whose_references_are_alike_in_length_share_a_batch_and_outputs_stay():
  texts = [text for text in sources() for _ in range(2)][:14]
  expected = np.random.default_rng(1).permutation(14) + 1
  references = [" ".join(["4"] * int(n)) for n in expected]
  batches = []

  def seen(batch):
    batches.append([int(i) for i in batch["index"] if i >= 0])
    return {}

  found = translator(4)(*trained(), texts, GREEDY, references=references, edits=seen)
  assert [sorted(expected[batch]) for batch in batches] == [
    [11, 12, 13, 14],
    [7, 8, 9, 10],
    [3, 4, 5, 6],
    [1, 2],
  ]
  plain = translator(4)(*trained(), texts, GREEDY)
  assert [rows[0].text for rows in found] == [rows[0].text for rows in plain]


@pytest.mark.parametrize("config", [BEAM, GREEDY], ids=["beam", "greedy"])
@pytest.mark.parametrize("order", [1, -1])
def test_translations_are_those_of_one_sentence_at_a_time_whatever_the_batch(config, order):
  texts = sources()
  found = translations(texts[::order], 16, config)[::order]
  lengths = {len(best[0].tokens) for best in found}
  assert len(lengths) > 3  # so that some are done long before the others
  for together, alone in zip(found, one_by_one(config), strict=True):
    assert [one.text for one in together] == [one.text for one in alone]
    np.testing.assert_allclose(
      [one.score for one in together], [one.score for one in alone], rtol=1e-4
    )


def test_a_search_that_narrows_runs_fewer_rows():
  seen = []

  def step(cache, tokens):
    seen.append(tokens.shape)
    logits = jnp.zeros((*tokens.shape, VOCAB)).at[..., 5].set(1.0)
    return logits, cache

  def run(limit):
    return beam_search(
      step, {}, batch=32, beams=2, max_length=6, limit=limit, bos=BOS, eos=EOS, narrow=True
    )

  found = jax.jit(run)(np.arange(32) % 7)
  assert {shape[0] for shape in seen} == {32, 16, 4}
  np.testing.assert_array_equal(found.lengths[:, 0], np.arange(32) % 7)


@pytest.mark.parametrize(
  ("model", "config"),
  [(MODELS["relative bias"], BEAM), *((model, GREEDY) for model in MODELS.values())],
  ids=["beam", *MODELS],
)
def test_translations_are_the_same_where_the_cache_grows_with_them(model, config, monkeypatch):
  config = dataclasses.replace(config, max_ratio=0.0, max_extra=32)
  expected = translations(sources(), 16, config, model)
  monkeypatch.setattr(loops, "_SHORT", 10)
  assert loops.lengths_of_growth(32) == (16, 32)
  # A configuration of its own: what was compiled before is not used.
  found = translations(sources(), 16, dataclasses.replace(config, max_ratio=0.01), model)
  assert 32 in {len(best[0].tokens) for best in found}
  for one, other in zip(expected, found, strict=True):
    assert [each.text for each in one] == [each.text for each in other]
    np.testing.assert_allclose(
      [each.score for each in one], [each.score for each in other], rtol=1e-5
    )


def test_steps_of_short_outputs_have_short_caches():
  seen = []

  def step(cache, tokens):
    seen.append(cache.shape[2])
    logits = jnp.zeros((*tokens.shape, VOCAB)).at[..., 5].set(1.0)
    return logits, cache

  def run(limit):
    growth = loops.Growth((25, 50, 100), lambda cache, length: room(length))
    return greedy(
      step, room(25), batch=2, max_length=100, limit=limit, bos=BOS, eos=EOS, growth=growth
    )

  def room(length):
    return jnp.zeros((2, 1, length))

  with jax.disable_jit():
    run(jnp.array([10, 4]))
    assert set(seen) == {25}
    seen.clear()
    run(jnp.array([26, 30]))
  assert (seen.count(25), seen.count(50), seen.count(100)) == (25, 5, 0)


def test_caches_grow_by_halves_of_the_longest_output():
  assert loops.lengths_of_growth(3000) == (375, 750, 1500, 3000)
  assert loops.lengths_of_growth(510) == (510,)
  assert loops.lengths_of_growth(511) == (256, 511)


def test_few_sentences_make_a_small_batch():
  shapes = [batch["source"].shape for batch in translator(64)._batches(["5 6", "7", "8 9"], 1)]
  assert shapes == [(4, 8)]


def test_translations_with_products_in_bfloat16_have_nearly_the_same_scores():
  texts, config = sources(), dataclasses.replace(GREEDY, products="bfloat16")
  found, plain = translations(texts, 16, config), translations(texts, 16, GREEDY)
  scores = np.array([[one[0].score for one in part] for part in (found, plain)])
  assert np.abs(scores[0] - scores[1]).max() > 1e-5
  np.testing.assert_allclose(*scores, rtol=0.05)
