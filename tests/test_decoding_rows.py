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
from compmod_jax.decoding import DecodeConfig, beam_search
from compmod_jax.models.base import Seq2Seq
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


@functools.cache
def trained() -> tuple[TaskModel[Seq2Seq], dict]:
  """A model whose translations end after few or many tokens."""
  numbers: Any = Numbers()
  nothing: Any = None
  config = TranslationConfig(batch=BatchConfig(buckets=(8,)))
  task = config.build_with(MODEL, nothing, numbers, numbers)
  params = nn.unbox(jax.jit(task.model.init)(jax.random.key(0)))
  params = jax.tree.map(lambda leaf: 1.5 * leaf, params)
  return task.model, params


@functools.cache
def translator(rows: int) -> Translator:
  numbers = Numbers()
  batch = BatchConfig(tokens=8 * rows, buckets=(8,))
  data: Any = types.SimpleNamespace(source_tokenizer=numbers, target_tokenizer=numbers, batch=batch)
  return Translator(data, BEAM)


def translations(texts, rows, config):
  return translator(rows)(*trained(), texts, config)


@functools.cache
def one_by_one(config):
  return [translations([text], 1, config)[0] for text in sources()]


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


def test_few_sentences_make_a_small_batch():
  shapes = [batch["source"].shape for batch in translator(64)._batches(["5 6", "7", "8 9"], 1)]
  assert shapes == [(4, 8)]


def test_translations_with_products_in_bfloat16_have_nearly_the_same_scores():
  texts, config = sources(), dataclasses.replace(GREEDY, products="bfloat16")
  found, plain = translations(texts, 16, config), translations(texts, 16, GREEDY)
  scores = np.array([[one[0].score for one in part] for part in (found, plain)])
  assert np.abs(scores[0] - scores[1]).max() > 1e-5
  np.testing.assert_allclose(*scores, rtol=0.05)
