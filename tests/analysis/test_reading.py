"""Every token is told the word that it belongs to, and the word's gold tag."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.analysis.reading import (
  MARK,
  NOTHING,
  TranslationReader,
  _same_starts,
  read_sentence,
  reader,
  tags_of,
  word_key,
)
from compmod_jax.core.errors import UserError
from compmod_jax.data.corruption import MaskingConfig
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import EOS, TokenizerConfig, train_tokenizer
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig

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


END = -1
SIZES = {"dim": 8, "heads": 2, "ffn_dim": 8, "max_length": 3000}


def task_on(length, *, masked=False, stride=0, kind="bpe"):
  """A task on blocks of the grammar's English sentences."""
  fields = {
    "data": GrammarDocuments(SENTENCES),
    "tokenizer": TokenizerConfig(kind=kind, vocab_size=160 if kind == "bpe" else 5000),
    "length": length,
    "batch_tokens": 2 * length,
  }
  if masked:
    return MaskedLMConfig(**fields, masking=MaskingConfig(share=0.5)).build(EncoderConfig(**SIZES))
  return CausalLMConfig(**fields, stride=stride).build(DecoderConfig(**SIZES))


def gold_pairs():
  """Relation, word and word that it depends on, of every test sentence."""
  pairs = SENTENCES.load("test")
  for number, text in enumerate(pairs.target):
    words = text.split()
    yield [(name, words[d], words[h]) for name, d, h in pairs.relations(number)["target"]]


def pairs_in(task):
  """The same of every block, as its positions read it."""
  read = reader(task)
  for batch in task.dataset.eval_batches("test"):
    for row in np.flatnonzero(batch["index"] >= 0).tolist():
      sentence = read_sentence(read.tokenizer("text"), read.tokens("text", batch)[row].tolist())
      relations = read.relations("text", "test", int(batch["index"][row]))
      # The last token of a causal block is predicted and not read.
      inside = [one for one in relations if max(one[1:]) < len(sentence.words)]
      yield [(name, sentence.words[d], sentence.words[h]) for name, d, h in inside]


@pytest.mark.parametrize("masked", [False, True])
def test_one_block_of_many_sentences_has_the_relations_of_all(masked):
  (found,) = pairs_in(task_on(3000, masked=masked))
  assert found == [pair for sentence in gold_pairs() for pair in sentence]
  assert len(found) > 100


@pytest.mark.parametrize("stride", [0, 7])
def test_a_block_has_the_relations_of_the_words_in_it(stride):
  """With words as tokens, so that none is cut; `stream` is where every token comes from."""
  pairs, length = SENTENCES.load("test"), 30
  stream = [(n, w) for n, text in enumerate(pairs.target) for w in (*range(len(text.split())), END)]
  gold = {n: pairs.relations(n)["target"] for n in range(len(pairs))}
  read = reader(task_on(length, stride=stride, kind="words"))
  blocks = read.blocks("test")
  assert len(blocks) > 10
  for number in range(len(blocks)):
    begin = number * (stride or length - 1)
    words = [one for one in stream[begin : begin + length - 1] if one[1] != END]
    expected = [
      (name, words.index((n, dependent)), words.index((n, head)))
      for n in sorted({n for n, _ in words})
      for name, dependent, head in gold[n]
      if {(n, dependent), (n, head)} <= set(words)
    ]
    assert read.relations("text", "test", number) == expected


def test_words_that_gold_has_as_one_are_known_by_their_first_letter():
  assert _same_starts(["he", "sleeps."], ["he", "sleeps", "."]) == {0: 0, 1: 1}
  assert _same_starts(["he", "sleeps."], ["hesl", "ee", "ps."]) == {0: 0}
  assert _same_starts(["he", "sleeps."], ["he", "<unk>"]) == {0: 0, 1: 1}
  assert _same_starts(["he", "sleeps."], ["he"]) == {}, "another text"


def test_the_end_of_a_document_and_special_tokens_part_words_that_no_blank_does():
  settings = TokenizerConfig(vocab_size=160, special_tokens=("<sep>",))
  tokenizer = train_tokenizer(PAIRS.source, settings)
  first = tokenizer.encode("Hund")
  inner = [one for one in tokenizer.encode("Hunde") if not tokenizer.text_of(one).startswith(" ")]
  assert len(read_sentence(tokenizer, [*first, *inner]).words) == 1
  for mark in (EOS, tokenizer.encode("<sep>")[-1], NOTHING):
    found = read_sentence(tokenizer, [*first, mark, *inner])
    assert found.words == ["Hund", tokenizer.decode(inner)]
    assert (found.word[len(first)], found.key[len(first)]) == (NOTHING, "")
