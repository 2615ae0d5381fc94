"""Ids of texts are made once on a machine and read from the disk afterwards."""

import itertools

import numpy as np
import pytest

from compmod_jax.data import token_cache
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer
from compmod_jax.data.tokenizers.vocabulary import Words

TEXTS = ["a dog", "", "the dogs sleep", "zzz \ud800", "a dog", " dog  the "]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
  """A cache of the test's own, in which the quickest texts are worth keeping."""
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(token_cache, "_WORTH", 0.0)
  return tmp_path / "cache"


@pytest.fixture
def encoded(monkeypatch):
  """Encodes texts: their ids as lists, and whether the tokenizer had to do it."""

  def encode(texts, tokenizer):
    calls = []
    batch = type(tokenizer).encode_batch
    with monkeypatch.context() as patch:
      patch.setattr(
        type(tokenizer), "encode_batch", lambda *given: (calls.append(1), batch(*given))[1]
      )
      lengths, ids = token_cache.encode(texts, tokenizer)
    assert (lengths.dtype, ids.dtype, ids.flags.writeable) == (np.int64, np.int32, True)
    ends = [0, *np.cumsum(lengths).tolist()]
    return [ids[a:b].tolist() for a, b in itertools.pairwise(ends)], bool(calls)

  return encode


def trained(kind="words"):
  texts = ["a dog sleeps", "the dogs sleep", "the dog"] * 20
  return train_tokenizer(texts, TokenizerConfig(kind=kind, vocab_size=40))


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_ids_are_those_of_the_tokenizer_and_made_once(kind, encoded):
  tokenizer = trained(kind)
  wanted = [list(ids) for ids in tokenizer.encode_batch(TEXTS)]
  assert encoded(TEXTS, tokenizer) == (wanted, True)
  assert encoded(TEXTS, tokenizer) == (wanted, False)
  assert encoded([], tokenizer)[0] == []


@pytest.mark.parametrize(
  "texts", [TEXTS[::-1], [*TEXTS, ""], ["a do", "g", *TEXTS[2:]], ["a dog", "the dogs sleep"]]
)
def test_other_texts_are_encoded_anew(texts, encoded):
  tokenizer = trained()
  encoded(TEXTS, tokenizer)
  assert encoded(texts, tokenizer) == (list(map(list, tokenizer.encode_batch(texts))), True)


def test_another_tokenizer_or_other_code_encodes_anew(encoded, monkeypatch):
  one, other = Words(["a", "dog"]), Words(["dog", "a"])
  first, _ = encoded(TEXTS, one)
  second, anew = encoded(TEXTS, other)
  assert anew
  assert first != second
  monkeypatch.setattr(token_cache, "_versions", lambda: ["another"])
  assert encoded(TEXTS, one) == (first, True)


def test_large_vocabularies_keep_their_ids(encoded):
  tokenizer = Words([f"w{i}" for i in range(70_000)])
  texts = ["w69999 w0 w65535", "w65536"]
  wanted = list(map(list, tokenizer.encode_batch(texts)))
  assert max(wanted[0]) > 2**16
  assert encoded(texts, tokenizer) == (wanted, True)
  assert encoded(texts, tokenizer) == (wanted, False)


def test_a_damaged_file_is_made_again(encoded, place):
  tokenizer = trained()
  wanted, _ = encoded(TEXTS, tokenizer)
  (file,) = (place / "token_ids").iterdir()
  file.write_bytes(file.read_bytes()[:-2] + b"??")
  assert encoded(TEXTS, tokenizer) == (wanted, True)
  assert encoded(TEXTS, tokenizer) == (wanted, False)


@pytest.mark.parametrize("reason", ["quick", "no cache"])
def test_what_is_quick_or_not_wanted_is_not_kept(encoded, place, monkeypatch, reason):
  if reason == "quick":
    monkeypatch.setattr(token_cache, "_WORTH", 60.0)
  else:
    monkeypatch.setenv("COMPMOD_CACHE_GB", "0")
  tokenizer = trained()
  assert encoded(TEXTS, tokenizer)[1]
  assert encoded(TEXTS, tokenizer)[1]
  assert not place.exists()
