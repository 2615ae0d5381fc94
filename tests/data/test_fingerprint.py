"""Fingerprints of training data: every example and its place count."""

import dataclasses

import numpy as np
import pytest

from compmod_jax.data import fingerprint as module
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.fingerprint import combined, fingerprint
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.scan import ScanData
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.lstm_lm import LstmConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.tasks.translation import TranslationConfig


def _of(sequences):
  index = np.arange(len(sequences))
  return Examples(columns={"text": Ragged(sequences)}, index=index).fingerprints()["text"]


EXAMPLES = [[5, 6, 3], [7, 3], [5, 3]]


@pytest.mark.parametrize(
  "other",
  [
    EXAMPLES[::-1],
    EXAMPLES[:2],
    [[5, 6, 3], [7, 3], [6, 3]],
    [[5, 6], [3, 7, 3], [5, 3]],  # the same ids in a row
    [],
  ],
)
def test_content_order_and_bounds_of_examples_count(other):
  assert _of(EXAMPLES) == _of([list(example) for example in EXAMPLES])
  assert _of(other) != _of(EXAMPLES)
  assert _of(other).count == len(other)


def test_neither_the_width_of_numbers_nor_the_pieces_read_at_once_count(monkeypatch):
  ids = np.arange(1000) % 97
  whole = fingerprint(1, "tokens", [ids.astype(np.uint16)])
  assert fingerprint(1, "tokens", [ids.astype(np.int32)]) == whole
  monkeypatch.setattr(module, "_PIECE", 7)
  assert fingerprint(1, "tokens", [ids]) == whole


def test_the_name_of_all_parts_changes_with_each(monkeypatch):
  one, two = _of(EXAMPLES), _of(EXAMPLES[::-1])
  names = [combined(parts) for parts in ({"a": one, "b": one}, {"a": one, "b": two}, {"a": one})]
  assert len(set(names)) == 3
  assert combined({"b": two, "a": one}) == names[1]


GRAMMAR = GrammarData(train=40, valid=5, test=5, shifted=5)
WORDS = TokenizerConfig(kind="words", vocab_size=200)
SIZES = {"dim": 8, "heads": 2, "ffn_dim": 8, "decoder_layers": 1}
TRANSFORMER = TransformerConfig(
  encoder_layers=1, decoder_layers=1, dim=8, heads=2, ffn_dim=8, max_length=160
)
QUESTIONS = AnsweringConfig(data=Mixed((WorldsData(train=40, valid=8, test=8),)))
GENERATED = {
  "translation": (TranslationConfig(data=GRAMMAR, tokenizer=WORDS), TRANSFORMER),
  "scan": (TranslationConfig(data=ScanData("simple"), tokenizer=WORDS), TRANSFORMER),
  "blocks": (
    CausalLMConfig(data=GrammarDocuments(GRAMMAR), tokenizer=WORDS, length=16, batch_tokens=64),
    DecoderConfig(**SIZES, max_length=64),
  ),
  "streams": (
    LanguageModelConfig(data=GrammarDocuments(GRAMMAR), tokenizer=WORDS, rows=2),
    LstmConfig(dim=8),
  ),
  "questions": (QUESTIONS, DecoderConfig(**SIZES, max_length=256)),
}


def _seeded(data, seed):
  """The same generated data with another seed: what a changed generator gives."""
  if isinstance(data, Mixed):
    return dataclasses.replace(data, seeds=tuple(_seeded(one, seed) for one in data.seeds))
  if isinstance(data, GrammarDocuments):
    return dataclasses.replace(data, grammar=_seeded(data.grammar, seed))
  return dataclasses.replace(data, seed=seed)


@pytest.mark.parametrize("kind", GENERATED)
def test_generated_data_have_fingerprints_that_tell_another_generation(kind):
  config, model = GENERATED[kind]
  task = config.build(model)
  found = task.dataset.fingerprints()
  assert all(part.count > 0 for part in found.values())
  again = config.build(model, files=task.dataset.files()).dataset.fingerprints()
  assert again == found
  other = dataclasses.replace(config, data=_seeded(config.data, 7))
  changed = other.build(model, files=task.dataset.files()).dataset.fingerprints()
  assert changed.keys() == found.keys()
  assert all(changed[name] != found[name] for name in found)
