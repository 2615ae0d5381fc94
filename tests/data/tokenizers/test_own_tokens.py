"""Tokens that a corpus has of its own for unknown words, numbers and boundaries."""

import json

import pytest

from compmod_jax.data.check_documents import check_documents
from compmod_jax.data.sources.documents import Documents
from compmod_jax.data.tokenizers import (
  EOS,
  UNK,
  TokenizerConfig,
  tokenizer_from_bytes,
  train_tokenizer,
)
from compmod_jax.data.tokenizers.vocabulary import Words

# As the Penn Treebank set is written.
TREEBANK = ["the <unk> fell N points", "the horse raced past the <unk> in N", "N 30-year bonds"]


def words(texts, size=100, **settings):
  return train_tokenizer(texts, TokenizerConfig(kind="words", vocab_size=size, **settings))


def saved_before(tokenizer):
  """The bytes that earlier versions wrote of a tokenizer, which lacked `own`."""
  state = json.loads(tokenizer.to_bytes())
  state.pop("own", None)
  return json.dumps(state, ensure_ascii=False).encode()


def test_unknown_words_become_the_corpus_s_own_unknown_word():
  tokenizer = words(TREEBANK)
  assert tokenizer.encode("the zebra fell") == tokenizer.encode("the <unk> fell")
  assert UNK not in tokenizer.encode("zebra <unk> barn")
  assert tokenizer.unk == tokenizer.encode("<unk>")[0] != UNK
  assert tokenizer.unknown("the zebra fell , <unk>") == ["zebra", ","]
  assert tokenizer.surfaces("the  zebra fell") == ["the", "zebra", "fell"]


@pytest.mark.parametrize("spelling", ["<unk>", "<UNK>", "[UNK]"])
def test_the_unknown_word_may_be_spelt_in_the_usual_ways(spelling):
  tokenizer = words([f"a {spelling} b"])
  assert tokenizer.encode("zebra") == tokenizer.encode(spelling) != [UNK]


def test_unknown_numbers_become_the_corpus_s_n_where_it_has_no_numbers():
  tokenizer = words(TREEBANK)
  for number in ("1987", "1,000", "3.5"):
    assert tokenizer.encode(number) == tokenizer.encode("N")
  assert tokenizer.encode("30-year") != tokenizer.encode("40-year") == [tokenizer.unk]
  numbered = words(["N is a letter , 7 a number <unk>"])
  assert numbered.encode("1987") == [numbered.unk]
  assert words(["no such letter"]).encode("1987") == [UNK]


@pytest.mark.parametrize("kind", ["words", "bpe", "unigram"])
def test_marks_of_beginning_and_end_are_not_read_beside_the_task_s_own(kind):
  texts = ["<s> the cat sleeps </s>", "<s> the dog sleeps </s>"] * 20
  marked = train_tokenizer(texts, TokenizerConfig(kind=kind, vocab_size=40))
  plain = ["the cat sleeps", "the dog sleeps"] * 20
  unmarked = train_tokenizer(plain, TokenizerConfig(kind=kind, vocab_size=40))
  assert marked.to_bytes() == unmarked.to_bytes()
  for text in ("<s> the cat sleeps </s>", "the cat sleeps </s> ", " <s>  the cat sleeps"):
    assert marked.encode(text) == unmarked.encode("the cat sleeps")
  assert marked.encode("<s> </s>") == marked.encode("<s>") == marked.encode("") == []


def test_marks_within_a_text_stay_words_and_end_nothing():
  tokenizer = words(["<s> a b </s> <s> b a </s>"])
  ids = tokenizer.encode("a </s> <s> b")
  assert len(ids) == 4
  assert EOS not in ids
  assert tokenizer.decode(ids) == "a </s> <s> b"
  assert tokenizer_from_bytes(tokenizer.to_bytes()).encode("<s> a b") == tokenizer.encode("a b")
  joined = words(["<s>x a x</s>"])
  assert joined.decode(joined.encode("<s>x a x</s>")) == "<s>x a x</s>"


def test_what_stands_for_no_word_is_never_offered():
  tokenizer = words(TREEBANK)
  assert {UNK, tokenizer.unk} <= tokenizer.controls
  assert {UNK, tokenizer.unk} <= set(tokenizer.never_produced)
  assert EOS not in tokenizer.never_produced


def test_saved_vocabularies_of_earlier_versions_read_unknown_words_as_the_corpus_s_own():
  tokenizer = words(TREEBANK)
  config = TokenizerConfig(kind="words", vocab_size=100)
  for trained in (None, config):
    old = tokenizer_from_bytes(saved_before(tokenizer), trained)
    assert old.encode("the zebra 1987") == tokenizer.encode("the zebra 1987")
    assert old.vocab_size == tokenizer.vocab_size
    again = tokenizer_from_bytes(old.to_bytes(), trained)
    assert again.own == old.own
    assert again.fingerprint == old.fingerprint


def test_saved_vocabularies_that_were_cut_keep_the_token_that_their_models_have_learned():
  config = TokenizerConfig(kind="words", vocab_size=8)
  new = words(TREEBANK, 8)
  assert new.encode("bonds") == [new.unk] != [UNK]
  old = tokenizer_from_bytes(saved_before(new), config)
  assert old.encode("bonds zebra") == [UNK, UNK]
  assert old.unk == UNK
  assert tokenizer_from_bytes(old.to_bytes(), config).encode("zebra") == [UNK]
  assert tokenizer_from_bytes(old.to_bytes()).encode("zebra") == [UNK]


def test_saved_vocabularies_with_marks_as_words_keep_them():
  old = tokenizer_from_bytes(saved_before(words(["a <s> the cat sleeps </s> ."])))
  assert old.decode(old.encode("<s> the cat </s>")) == "<s> the cat </s>"


def test_vocabularies_without_such_tokens_are_saved_as_before():
  tokenizer = words(["the cat sleeps"])
  assert "own" not in json.loads(tokenizer.to_bytes())
  state = json.loads(words(TREEBANK).to_bytes())
  assert state["own"] == ["unknown", "number", "boundary"]
  state["own"] = ["numbers"]
  with pytest.raises(ValueError, match="own is 'numbers'"):
    tokenizer_from_bytes(json.dumps(state).encode())


def test_the_check_of_data_lists_words_that_are_lacking_not_the_corpus_s_own():
  def report(*texts):
    documents = Documents(lambda: ((f"x:{i}", text) for i, text in enumerate(texts, 1)), "x")
    return check_documents("valid", documents, Words(["the", "<unk>", "N"]))[0].findings

  assert not report("the <unk>", "N 7")["unknown"].count
  assert "x:2" in report("the <unk>", "the zebra")["unknown"].places[0]
