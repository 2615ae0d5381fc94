"""Small models with competing heads, on sentences with gold parts of speech."""

import dataclasses

import jax
import pytest
import tiny_model

from compmod_jax.analysis.subject import Subject
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig


@pytest.fixture(scope="session")
def grammar_task():
  """A translation task on the grammar whose encoder's heads compete."""
  config = TranslationConfig(
    data=GrammarData(train=60, valid=6, test=20),
    tokenizer=TokenizerConfig(vocab_size=110),
    target_tokenizer=TokenizerConfig(vocab_size=90),
    batch=BatchConfig(tokens=1024, buckets=(64, 128)),
    decode=DecodeConfig(method="greedy", max_ratio=0.2, max_extra=2),
  )
  model = TransformerConfig(
    encoder_layers=1,
    decoder_layers=1,
    dim=16,
    heads=4,
    ffn_dim=16,
    norm="pre",
    max_length=128,
    compete=("encoder_self",),
  )
  return config.build(model)


@pytest.fixture(scope="session")
def subject(grammar_task):
  """That model with random parameters, and 12 sentences of its test split."""
  params = jax.device_put(tiny_model.random_parameters(grammar_task, 0), jax.devices()[0])
  return Subject(grammar_task, params, "test", sentences=12)


@pytest.fixture(scope="session")
def other(subject):
  """The same with other random parameters."""
  params = tiny_model.random_parameters(subject.task, 1)
  return dataclasses.replace(subject, params=jax.device_put(params, jax.devices()[0]))
