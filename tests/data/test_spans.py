"""Texts with spans cut out, and mixtures of tasks that are told apart by prefixes."""

import itertools

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.corruption import SpansConfig, corrupt_spans, restore_spans
from compmod_jax.data.export import export
from compmod_jax.data.sources.documents import GrammarDocuments, GrammarTopics, TextDocuments
from compmod_jax.data.sources.text_to_text import (
  PrefixedData,
  SpanCorruptionData,
  TextToTextData,
  sentinels,
)
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer

NAMES = tuple(range(-1, -101, -1))
GRAMMAR = GrammarData(train=64, valid=12, test=8, shifted=4)


def corrupt(length: int, seed: int, **fields: float) -> tuple[list[int], list[int]]:
  random = np.random.default_rng(seed)
  return corrupt_spans(range(length), NAMES, random, SpansConfig(**fields))


@pytest.mark.parametrize("length", [2, 3, 5, 17, 64, 300])
@pytest.mark.parametrize(("share", "mean"), [(0.15, 3.0), (0.5, 1.0), (0.9, 8.0), (0.02, 2.0)])
def test_source_and_target_make_the_text_again(length, share, mean):
  for seed in range(20):
    source, target = corrupt(length, seed, share=share, mean_length=mean)
    assert restore_spans(source, target, NAMES) == list(range(length))
    assert [one for one in source if one < 0] == [one for one in target if one < 0][:-1]
    for first, second in itertools.pairwise(source):  # spans do not touch
      assert first >= 0 or second >= 0
    for first, second in itertools.pairwise(target):  # and none is empty
      assert first >= 0 or second >= 0
    assert 0 < sum(one >= 0 for one in source) < length


@pytest.mark.parametrize("length", [60, 101])
def test_the_share_and_the_mean_length_are_the_configured_ones(length):
  pairs = [corrupt(length, seed) for seed in range(3000)]
  cut = np.asarray([sum(one >= 0 for one in target) for _, target in pairs])
  spans = np.asarray([sum(one < 0 for one in source) for source, _ in pairs])
  # Bounds of five standard errors.
  assert abs(cut.mean() / length - 0.15) <= 5 * cut.std() / length / np.sqrt(len(cut))
  assert abs(spans.mean() - cut.mean() / 3) <= 5 * spans.std() / np.sqrt(len(cut))


def test_every_token_is_cut_out_as_often_as_any_other_but_for_the_ends():
  """Of 9 tokens in one span of 3 there are 7 places, all equally probable."""
  counts = np.zeros(7)
  for seed in range(4000):
    _, target = corrupt(9, seed, share=1 / 3, mean_length=3.0)
    if sum(one < 0 for one in target) == 2:
      counts[target[1]] += 1
  assert counts.sum() > 3000
  expected = counts.sum() / 7
  assert ((counts - expected) ** 2 / expected).sum() < 22.5  # chi squared, 6 degrees, p = 0.001


def test_the_example_of_the_paper():
  text = "Thank you for inviting me to your party last week"
  source, target = "Thank you <X> me to your party <Y> week", "<X> for inviting <Y> last <Z>"
  names = ("<X>", "<Y>", "<Z>")
  assert restore_spans(source.split(), target.split(), names) == text.split()


def test_a_target_of_another_source_is_refused():
  with pytest.raises(UserError, match="do not belong together"):
    restore_spans(["a", "<X>"], ["<X>", "b", "<Y>", "c", "<Z>"], ("<X>", "<Y>", "<Z>"))


def test_there_are_no_more_spans_than_sentinels():
  source, target = corrupt_spans(
    range(200), NAMES[:3], np.random.default_rng(0), SpansConfig(mean_length=1.0)
  )
  assert sum(one < 0 for one in source) == 2
  assert restore_spans(source, target, NAMES) == list(range(200))


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: SpansConfig(share=0.0), "spans.share is 0.0"),
    (lambda: SpansConfig(share=1.0), "spans.share is 1.0"),
    (lambda: SpansConfig(mean_length=0.5), "spans.mean_length is 0.5"),
    (lambda: corrupt(1, 0), "needs two"),
    (lambda: SpanCorruptionData(words=1), "words is 1"),
    (lambda: SpanCorruptionData(sentinels=1), "sentinels is 1"),
    (lambda: SpanCorruptionData(draws=0), "draws is 0"),
    (lambda: TextToTextData(()), "tasks is empty"),
    (lambda: TextToTextData((PrefixedData("a", "a:", GRAMMAR),) * 2), "different ones"),
    (lambda: PrefixedData("a", "a:", GRAMMAR, ("tests",)), "tests of a"),
  ],
)
def test_bad_values_are_named(make, words):
  with pytest.raises(UserError, match=words):
    make()


DATA = SpanCorruptionData(GrammarTopics(GRAMMAR, sentences=2), words=12, sentinels=8, draws=3)


def test_pairs_restore_the_documents_and_every_draw_is_another():
  pairs, names = DATA.load("train"), sentinels(8)
  texts = [
    " ".join(d.split()[s : s + 12])
    for d in DATA.data.load("train")
    for s in range(0, len(d.split()), 12)
  ]
  texts = [text for text in texts if len(text.split()) > 1]
  assert len(texts) > 20
  found = [
    " ".join(restore_spans(source.split(), target.split(), names))
    for source, target in zip(pairs.source, pairs.target, strict=True)
  ]
  assert found == [text for text in texts for _ in range(3)]
  different = [len(set(pairs.source[i : i + 3])) for i in range(0, len(pairs), 3)]
  assert np.mean(different) > 2
  assert pairs.source == DATA.load("train").source  # the same in every process
  again = [restore_spans(*map(str.split, pair), names) for pair in _pairs("valid")]
  assert len({" ".join(text) for text in again}) == len(again)  # one draw of each


def _pairs(split: str) -> list[tuple[str, str]]:
  pairs = DATA.load(split)
  return list(zip(pairs.source, pairs.target, strict=True))


def test_a_text_that_has_a_sentinel_is_refused(tmp_path):
  (tmp_path / "a.txt").write_text("one <extra_id_3> two\n")
  data = SpanCorruptionData(TextDocuments(str(tmp_path), held_out=0.001))
  with pytest.raises(DataError, match=r"a\.txt:1 has the word <extra_id_3>"):
    data.load("train")


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_sentinels_are_single_tokens_and_texts_come_back_from_the_tokenizer(kind):
  pairs, names = DATA.load("train"), sentinels(8)
  config = TokenizerConfig(kind=kind, vocab_size=300, special_tokens=names)
  tokenizer = train_tokenizer([*pairs.source, *pairs.target], config)
  for text in (*pairs.source[:5], *pairs.target[:5]):
    ids = tokenizer.encode(text)
    marks = [name for name in text.split() if name in names]
    assert [tokenizer.piece(i) for i in ids if tokenizer.piece(i) in names] == marks
    assert tokenizer.decode(ids) == text


def test_a_mixture_has_each_task_s_pairs_behind_its_prefix_up_to_the_limit():
  documents = SpanCorruptionData(GrammarDocuments(GRAMMAR), sentinels=8)
  fill = PrefixedData("fill", "fill:", documents, ())
  data = TextToTextData((fill, PrefixedData("translate", "to English:", GRAMMAR)), limit=40)
  assert data.splits() == ("train", "valid", "translate_test")
  train = data.load("train")
  assert [text.split(":")[0] for text in train.source] == ["fill"] * 40 + ["to English"] * 40
  assert train.target[40:] == list(GRAMMAR.load("train").target[:40])
  assert len(data.load("valid")) == 24
  test = data.load("translate_test")
  assert test.source == [f"to English: {text}" for text in GRAMMAR.load("test").source]
  assert test.where(3) == "grammar:test[3]"


def test_a_mixture_is_exported_as_inputs_and_targets(tmp_path):
  data = TextToTextData((PrefixedData("translate", "to English:", GRAMMAR),))
  assert export(data, tmp_path)["valid"] == 12
  valid = data.load("valid")
  for side, texts in (("inputs", valid.source), ("targets", valid.target)):
    assert (tmp_path / f"valid.{side}").read_text().splitlines() == list(texts)
