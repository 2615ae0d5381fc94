"""Every token is told the word that it belongs to, and the word's gold tag."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.analysis.reading import (
  MARK,
  NOTHING,
  TranslationReader,
  read_sentence,
  tags_of,
  word_key,
)
from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import EOS, TokenizerConfig, train_tokenizer

SENTENCES = GrammarData(train=200, valid=40, test=40)
PAIRS = SENTENCES.load("train")
KINDS = ("bpe", "unigram", "words")


@pytest.fixture(scope="module")
def tokenizers():
  size = {"bpe": 160, "unigram": 160, "words": 5000}
  return {
    kind: train_tokenizer(PAIRS.source, TokenizerConfig(kind=kind, vocab_size=size[kind]))
    for kind in KINDS
  }


def spelt(tokenizer, ids, sentence, number):
  """What the tokens of a word spell."""
  mine = [token for token, word in zip(ids, sentence.word, strict=True) if word == number]
  return tokenizer.decode(mine).strip()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_a_word_spell_it(tokenizers, kind):
  tokenizer = tokenizers[kind]
  for text in PAIRS.source[:100]:
    ids = [*tokenizer.encode(text), EOS]
    sentence = read_sentence(tokenizer, ids)
    assert sentence.words == text.split()
    assert [spelt(tokenizer, ids, sentence, i) for i in range(len(sentence.words))] == text.split()
    assert sentence.word[-1] == NOTHING
    assert sorted(sentence.word[:-1]) == sentence.word[:-1]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*"abeghn,.", "Hund", " ", "  ", "ß", "☃", "☃☃", "qx"])))
def test_blanks_and_unknown_characters_leave_every_token_with_its_word(tokenizers, parts):
  tokenizer, text = tokenizers["bpe"], "".join(parts)
  ids = tokenizer.encode(text)
  sentence = read_sentence(tokenizer, ids)
  assert len(sentence.words) == len(text.split())
  for number, word in enumerate(text.split()):
    known = [t for t, w in zip(ids, sentence.word, strict=True) if w == number]
    assert known, "a word has at least one token"
    if tokenizer.unk not in known:
      assert sentence.words[number] == word == tokenizer.decode(known).strip()


def test_punctuation_is_not_counted_as_the_word_before_it(tokenizers):
  tokenizer = tokenizers["bpe"]
  ids = tokenizer.encode("Hunde, die")
  sentence = read_sentence(tokenizer, ids)
  assert sentence.words == ["Hunde,", "die"]
  comma = ids.index(tokenizer.encode("a,")[-1])
  assert (sentence.key[comma], sentence.word[comma], sentence.mark[comma]) == (",", 0, True)
  assert {key for i, key in enumerate(sentence.key) if i != comma} == {"hunde", "die"}
  assert tags_of(sentence, ["noun", "pron"], "here")[comma] == MARK
  assert word_key("Straße!“") == "straße"
  assert word_key("--") == "--"


def test_every_gold_tag_reaches_the_tokens_of_its_word(tokenizers):
  tokenizer = tokenizers["bpe"]
  for text, info in zip(PAIRS.source, PAIRS.info, strict=True):
    sentence = read_sentence(tokenizer, tokenizer.encode(text))
    tags = tags_of(sentence, info["pos_source"], "here")
    for word, tag, is_mark in zip(sentence.word, tags, sentence.mark, strict=True):
      assert tag == (MARK if is_mark else info["pos_source"][word])


def test_tags_that_do_not_fit_the_words_are_an_error(tokenizers):
  sentence = read_sentence(tokenizers["bpe"], tokenizers["bpe"].encode("der Hund"))
  with pytest.raises(UserError, match="test 7 has 3 gold tags for the 2 words 'der Hund'"):
    tags_of(sentence, ["det", "noun", "verb"], "test 7")


def test_a_decoder_reads_the_token_before_the_one_it_predicts(subject):
  read = TranslationReader(subject.task)
  batch = subject.batches[0]
  tokens, target = read.tokens("target", batch), batch["target"]
  assert (tokens[:, 0] == NOTHING).all(), "the start token is no word"
  real = target[:, 1:] != 0
  np.testing.assert_array_equal(tokens[:, 1:][real], target[:, :-1][real])
  assert (tokens[:, 1:][~real] == NOTHING).all()
  assert [read.stream(f"{s}/layer_0/x") for s in ("encoder", "decoder")] == ["source", "target"]
  row = int(np.flatnonzero(batch["index"] >= 0)[0])
  number = int(batch["index"][row])
  words = read_sentence(read.tokenizer("target"), tokens[row].tolist()).words
  assert words == subject.task.dataset.pairs["test"].target[number].split()
