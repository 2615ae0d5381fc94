"""Patching: pairs by hand, and a model of which every site's part in the output is known."""

import dataclasses
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.analysis.codes import ALL
from compmod_jax.analysis.composition import Composition, make_page
from compmod_jax.analysis.composition.measure import EVERYWHERE
from compmod_jax.analysis.composition.pairs import Pair, disjoint, pairs_of, read_tokens
from compmod_jax.analysis.composition.patching import (
  ELSE,
  SOURCE,
  UNCHANGED,
  Outcome,
  Patching,
  Place,
  Sites,
  other_words,
)
from compmod_jax.analysis.reading import reader
from compmod_jax.analysis.report import page
from compmod_jax.analysis.report.page import Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF
from compmod_jax.data.base import Pairs
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.base import ModelConfig
from compmod_jax.tasks.translation import TranslationConfig

LETTERS = "abcd"
EVEN, ODD = "encoder self, layer 0", "encoder self head_code, layer 1"
IDLE, FIRST, LAST = (
  "encoder self head_gates, layer 1", "residual stream, encoder, layer 0",
  "residual stream, encoder, layer 1",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Letters:
  """Every sequence of one to three letters, which is to be copied."""

  source_language: str = "letters"
  target_language: str = "letters"
  metric: str = "exact_match"
  kind: str = "Letters"

  def splits(self) -> tuple[str, ...]:
    return ("train", "valid", "test")

  def load(self, split: str) -> Pairs:
    every = [" ".join(x) for n in (1, 2, 3) for x in itertools.product(LETTERS, repeat=n)]
    return Pairs(every, every, str, metric="exact_match")


class Copy(nn.Module):
  """Copies its source: even positions through the weights of a router, odd ones through the mean
  over keys of a code of queries and keys; gates are shown, and do nothing."""

  config: ModelConfig
  words: int

  def encode(self, source: jax.Array, intermediates: Any) -> jax.Array:
    read = jax.nn.one_hot(source, self.words)
    encoder = intermediates.scope("encoder")
    first, second = encoder.scope("layer_0"), encoder.scope("layer_1")
    even = (jnp.arange(source.shape[1]) % 2 == 0)[None, :, None]
    routed = first.scope("self")("router/weights", read)
    stream = first("output", jnp.where(even, routed, read))
    code = jnp.moveaxis(stream, 2, 1)[..., None] * jnp.ones(source.shape[1])[None, None, None]
    code = second.scope("self")("head_code", code)
    second.scope("self")("head_gates", read)
    coded = jnp.moveaxis(code.mean(axis=-1), 1, 2)
    return second("output", jnp.where(even, stream, coded))

  def __call__(self, source, target, *, deterministic=True, intermediates=OFF):
    return self.encode(source, intermediates)[:, : target.shape[1]]

  def prefill(self, source, *, beams, length, routing=False, intermediates=OFF):
    memory = self.encode(source, intermediates)
    room = ((0, 0), (0, max(length - memory.shape[1], 0)), (0, 0))
    return {"memory": jnp.pad(memory, room)[:, None], "position": jnp.zeros((), jnp.int32)}

  def step(self, cache, tokens, *, intermediates=OFF):
    logits = jax.lax.dynamic_index_in_dim(cache["memory"], cache["position"], 2, keepdims=False)
    return 9 * logits, {**cache, "position": cache["position"] + 1}


@dataclasses.dataclass(frozen=True)
class CopyConfig(ModelConfig):
  """See `Copy`."""

  max_length: int = 16

  def seq2seq(self, source_vocab: int, target_vocab: int, pad: int) -> Copy:
    return Copy(self, source_vocab)

  def describe(self) -> str:
    return "nothing to learn"


@pytest.fixture(scope="module")
def copying():
  task = TranslationConfig(
    data=Letters(),
    tokenizer=TokenizerConfig(kind="words"),
    batch=BatchConfig(tokens=256, buckets=(4, 8)),
    decode=DecodeConfig(method="greedy", max_ratio=1.0, max_extra=1),
  ).build(CopyConfig())
  return Subject(task, {}, "test")


@pytest.fixture(scope="module")
def found(copying):
  return Composition(pairs=0).measure(copying)


def test_pairs_differ_in_one_token_and_duplicates_count_once():
  sentences = {0: (1, 2, 9), 1: (1, 3, 9), 2: (1, 2, 9), 3: (4, 3, 9), 4: (1, 9), 5: (5, 6, 9)}
  found = pairs_of(sentences, np.random.default_rng(0))
  assert sorted(found) == [Pair(0, 1, 1, (2, 3)), Pair(1, 3, 0, (1, 4))]
  assert Pair(0, 1, 1, (2, 3)).turned() == Pair(1, 0, 1, (3, 2))
  assert disjoint(found) == found[:1]


def test_equal_frames_make_chains_of_pairs():
  found = pairs_of({number: (number, 9) for number in range(30)}, np.random.default_rng(0))
  assert len(found) == 29
  assert len({number for pair in found for number in pair[:2]}) == 30
  assert all(pair.words == (pair.base, pair.source) for pair in found)


def test_other_words_are_of_neither_sentence_and_of_its_length():
  sentences = {0: (1, 2, 9), 1: (1, 3, 9), 2: (4, 2, 9), 3: (7, 7, 7, 9), 4: (5, 9), 5: (6, 9)}
  pairs = [Pair(0, 1, 1, (2, 3)), Pair(4, 5, 0, (5, 6))]
  drawn = set()
  for seed in range(20):
    others = other_words(sentences, pairs, 9, np.random.default_rng(seed))
    assert list(others) == pairs[:1]  # of two tokens there is no third word
    drawn.add(others[pairs[0]])
  assert drawn == {Place(0, 0), Place(1, 0), Place(2, 0)}


def test_patching_a_site_exchanges_outputs_where_words_pass_through_it(found):
  patches = found.patches
  assert list(patches.patched) == [EVEN, ODD, IDLE, ALL, EVERYWHERE, FIRST, LAST]
  assert patches.equal == 0
  assert patches.both_right == len(patches.pairs) > 20
  even = np.array([pair.position % 2 == 0 for pair in patches.pairs])
  assert 0 < even.sum() < len(even)
  kinds = {name: one.kinds for name, one in patches.patched.items()}
  assert kinds[EVEN].tolist() == np.where(even, SOURCE, UNCHANGED).tolist()
  assert kinds[ODD].tolist() == np.where(even, UNCHANGED, SOURCE).tolist()
  assert set(kinds[IDLE]) == {UNCHANGED}
  for name in (ALL, EVERYWHERE, FIRST, LAST):
    assert set(kinds[name]) == {SOURCE}
  for name, one in patches.patched.items():
    assert one.right.tolist() == (one.kinds == SOURCE).tolist(), name


def test_the_control_puts_another_word_there(found):
  patches = found.patches
  even = np.array([pair.position % 2 == 0 for pair in patches.pairs])
  controls = {name: one.kinds for name, one in patches.controls.items()}
  assert controls[EVEN].tolist() == np.where(even, ELSE, UNCHANGED).tolist()
  assert controls[ODD].tolist() == np.where(even, UNCHANGED, ELSE).tolist()
  assert set(controls[FIRST]) == {ELSE}
  assert not any(one.right.any() for one in patches.controls.values())


def test_a_word_that_is_put_elsewhere_stands_there(copying):
  reads = reader(copying.task)
  sentences = read_tokens(copying, reads)
  texts = copying.task.dataset.pairs["test"].source
  base, source = texts.index("a b c"), texts.index("d c b")
  site = "encoder/layer_0/output"
  run = Patching(copying, reads, sentences, [site])
  outputs, references = run([Place(base, 2)], [Place(source, 0)], Sites((site,)), "sentences")
  assert (outputs, references) == (["a b d"], ["a b c"])
  outputs, _ = run([Place(base, 2)], [Place(source, 0)], Sites(()), "sentences")
  assert outputs == ["a b c"]


def test_what_is_a_sum_over_words_has_no_homomorphism_error(found):
  assert list(found.errors) == [FIRST, LAST]
  for one in found.errors.values():
    assert len(one.words) == found.pairs
    for label in ("additive", "linear"):
      np.testing.assert_allclose(one.found[label], 0, atol=1e-8)
      assert one.shuffled[label].sum() > 0.5 * one.identity.sum()


def test_memory_is_all_that_the_decoder_reads(subject):
  reads = reader(subject.task)
  sentences = read_tokens(dataclasses.replace(subject, sentences=0), reads)
  by_length = sorted(sentences, key=lambda number: len(sentences[number]))
  base, source = next(
    two for two in itertools.pairwise(by_length) if len(sentences[two[0]]) == len(sentences[two[1]])
  )
  last, router = "encoder/output", "encoder/layer_0/self/router/weights"
  run = Patching(subject, reads, sentences, [last, router])
  places = [Place(base, 0)], [Place(source, 0)]
  own, _ = run(*places, Sites(()), "sentences")
  wanted, _ = run(*places[::-1], Sites(()), "sentences")
  assert own != wanted
  assert run(*places, Sites((last,), everywhere=True), "sentences")[0] == wanted


def test_the_page_has_both_measures(copying, found, tmp_path):
  made = make_page(Composition(), copying, found)
  written = page.write(made, tmp_path)
  assert len(written.pictures) == 4
  patching, homomorphism = made.sections
  table = patching.items[1]
  assert isinstance(table, Table)
  assert [row[0] for row in table.rows] == list(found.patches.patched)
  shares = made.data["patching"]["replaced"][ALL]
  assert shares["patched"]["source"]["share"] == 1
  assert shares["control"]["else"]["share"] == 1
  assert made.data["homomorphism"][LAST]["additive"]["value"] == pytest.approx(0, abs=1e-8)
  assert "100.0 % of" in made.summary[0]
  assert isinstance(homomorphism.items[2], Table)
  assert sum(row[1] for row in homomorphism.items[2].rows) == found.pairs


def test_outputs_that_are_equal_and_words_that_training_lacks_are_said(copying, found):
  patches = found.patches
  nothing = {name: Outcome(one.kinds[:0], one.right[:0]) for name, one in patches.patched.items()}
  equal = patches._replace(pairs=[], equal=3, both_right=0, patched=nothing, controls=nothing)
  made = make_page(Composition(), copying, found._replace(patches=equal, errors={}))
  assert made.summary[0] == "The model has one output for both sentences of all 3 pairs."
  assert made.summary[1].startswith("No homomorphism error")
  assert len(made.sections) == 1


def test_what_cannot_be_paired_is_named(copying):
  with pytest.raises(UserError, match="No two of the 1 sentences of test"):
    Composition().measure(dataclasses.replace(copying, sentences=1))
  with pytest.raises(UserError, match="--pairs is -1"):
    Composition(pairs=-1)
