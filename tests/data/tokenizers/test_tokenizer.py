"""Tokenizers: round trips, determinism, special tokens, storage and caching."""

import json
import pickle
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.core.errors import UserError
from compmod_jax.data import tokenizers as module
from compmod_jax.data.tokenizers import (
  BOS,
  EOS,
  PAD,
  UNK,
  Tokenizer,
  TokenizerConfig,
  cached_tokenizer,
  pair_tokenizers,
  tokenizer_from_bytes,
  train_tokenizer,
)

TEXTS = [
  "Der große Hund jagt die Katze durch den Garten.",
  "Die Katze, die im Garten schläft, gehört dem Nachbarn.",
  "Wann kommt der Zug an?",
  "Ich weiß nicht, ob er heute noch kommt!",
  "The big dog chases the cat through the garden.",
  "The cat that sleeps in the garden belongs to the neighbour.",
  "  spaced   out  text  ",
] * 5
KINDS = ("bpe", "unigram", "words")
SUBWORDS = ("bpe", "unigram")


def trained(kind, **settings):
  return train_tokenizer(TEXTS, TokenizerConfig(kind=kind, **{"vocab_size": 120, **settings}))


@pytest.mark.parametrize("kind", SUBWORDS)
def test_known_text_decodes_to_itself_white_space_included(kind):
  tokenizer = trained(kind)
  for text in TEXTS:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", SUBWORDS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=sorted(set("".join(TEXTS))), max_size=60))
def test_any_text_of_known_characters_decodes_to_itself(kind, text):
  tokenizer = _cached_for_property(kind)
  assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


_BUILT: dict[str, Tokenizer] = {}


def _cached_for_property(kind):
  if kind not in _BUILT:
    _BUILT[kind] = trained(kind)
  return _BUILT[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_reserved_ids_are_the_same_for_every_kind_and_text_cannot_make_them(kind):
  tokenizer = train_tokenizer(
    [*TEXTS, "<pad> <s> </s> a<s>b"], TokenizerConfig(kind=kind, vocab_size=120)
  )
  assert [tokenizer.piece(i) for i in (PAD, UNK, BOS, EOS)] == ["<pad>", "<unk>", "<s>", "</s>"]
  for text in [*TEXTS, "<pad> <s> </s>", "a</s>b", "日本"]:
    assert not {PAD, BOS, EOS} & set(tokenizer.encode(text))


@pytest.mark.parametrize("kind", KINDS)
def test_training_twice_gives_the_same_bytes(kind):
  assert trained(kind).to_bytes() == trained(kind).to_bytes()
  assert trained(kind).fingerprint == trained(kind).fingerprint
  assert trained(kind).fingerprint != trained(kind, lowercase=True).fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_bring_back_the_same_tokenizer(kind):
  tokenizer = trained(kind, special_tokens=("<sep>",), lowercase=True)
  again = tokenizer_from_bytes(tokenizer.to_bytes())
  assert again.fingerprint == tokenizer.fingerprint
  assert again.vocab_size == tokenizer.vocab_size
  text = "DER große <sep> Hund xyz 日"
  assert again.encode(text) == tokenizer.encode(text)
  assert again.kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_a_batch_is_encoding_each(kind):
  tokenizer = trained(kind)
  texts = [*TEXTS, "", "unbekannt 日本"]
  assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
  assert tokenizer.encode_batch([]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_stops_at_the_end_and_leaves_out_padding(kind):
  tokenizer = trained(kind)
  ids = tokenizer.encode("Die Katze schläft")
  text = tokenizer.decode(ids)
  assert tokenizer.decode([BOS, PAD, *ids, EOS, *ids, PAD]) == text
  assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [-1, 100_000])
def test_ids_of_another_vocabulary_are_refused(kind, number):
  with pytest.raises(UserError, match="another tokenizer"):
    trained(kind).decode([number])


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_ids_of_their_own_and_are_never_split(kind):
  tokenizer = trained(kind, special_tokens=("<sep>", "[MASK]"))
  assert [tokenizer.piece(4), tokenizer.piece(5)] == ["<sep>", "[MASK]"]
  ids = tokenizer.encode("Der <sep> Hund [MASK]")
  assert ids.count(4) == ids.count(5) == 1
  assert tokenizer.decode(ids) == "Der <sep> Hund [MASK]"


@pytest.mark.parametrize("kind", KINDS)
def test_lower_casing_leaves_special_tokens_alone(kind):
  tokenizer = trained(kind, special_tokens=("[MASK]",), lowercase=True)
  assert tokenizer.encode("DER [MASK] Hund") == tokenizer.encode("der [MASK] hund")
  assert 4 in tokenizer.encode("DER [MASK] Hund")


@pytest.mark.parametrize("kind", KINDS)
def test_composed_and_decomposed_letters_are_the_same(kind):
  tokenizer = trained(kind)
  assert tokenizer.encode(unicodedata.normalize("NFD", TEXTS[0])) == tokenizer.encode(TEXTS[0])


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_an_unknown_character(kind):
  tokenizer = trained(kind)
  assert tokenizer.encode("der \ud800 Hund") == tokenizer.encode("der \ufffd Hund")
  assert tokenizer.unknown("der \udfff Hund") == ["\ufffd"]
  half = train_tokenizer(["der \ud800 Hund"] * 5, TokenizerConfig(kind=kind, vocab_size=20))
  assert tokenizer_from_bytes(half.to_bytes()).encode("\ud800") == half.encode("\ufffd")


def test_what_is_unknown_is_told():
  assert trained("bpe").unknown("Der 日 Hund") == ["日"]
  assert trained("words").unknown("Der Wal <s>") == ["Wal", "<s>"]
  assert trained("bpe").unknown(TEXTS[0]) == []


def test_words_are_ordered_by_frequency_then_alphabet_and_capped():
  config = TokenizerConfig(kind="words", vocab_size=7)
  tokenizer = train_tokenizer(["b a c c", "d b c"], config)
  assert [tokenizer.piece(i) for i in range(4, tokenizer.vocab_size)] == ["c", "b", "a"]
  assert tokenizer.encode("a d  c") == [6, UNK, 4]
  assert tokenizer.decode([6, UNK, 4]) == "a <unk> c"


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_text_gives_a_smaller_vocabulary(kind):
  tokenizer = train_tokenizer(["a small text"], TokenizerConfig(kind=kind, vocab_size=5000))
  assert tokenizer.vocab_size < 60
  assert tokenizer.decode(tokenizer.encode("a small text")) == "a small text"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_long_text_is_read_as_its_lines_are(kind):
  line, config = "zebras quickly jumped over it ", TokenizerConfig(kind, 60)
  whole = train_tokenizer([line * 40_000, "a b"], config)
  assert whole.decode(whole.encode("zebras jumped")) == "zebras jumped"


def test_a_long_text_without_blanks_is_read():
  whole = train_tokenizer(["zebras" * 180_000, "a b"], TokenizerConfig("bpe", 60))
  assert whole.decode(whole.encode("zebras")) == "zebras"


def test_bad_settings_and_texts_are_explained():
  for settings_ in (
    {"kind": "wordpiece"},
    {"vocab_size": 4},
    {"character_coverage": 0.2},
    {"special_tokens": ("a b",)},
    {"special_tokens": ("<s>",)},
    {"special_tokens": ("x", "x")},
  ):
    with pytest.raises(UserError, match=next(iter(settings_))):
      TokenizerConfig(**settings_)
  for kind in KINDS:
    with pytest.raises(UserError, match="no text"):
      train_tokenizer(["", " "], TokenizerConfig(kind=kind))
  for kind in SUBWORDS:
    with pytest.raises(UserError, match="vocab_size=20 can"):
      trained(kind, vocab_size=20)


def test_nothing_is_unpickled():
  class Trap:
    def __reduce__(self):
      return (pytest.fail, ("a pickle was executed",))

  for data in (pickle.dumps(Trap()), b"", b"\xff\xfe", b"[]", b"{}", b'{"format": 3}'):
    with pytest.raises(UserError, match="are not a tokenizer"):
      tokenizer_from_bytes(data)


@pytest.mark.parametrize("change", [{"kind": "charlm"}, {"model": "AAAA"}, {"model": 5}])
def test_a_damaged_tokenizer_is_refused(change):
  state = {**json.loads(trained("bpe").to_bytes()), **change}
  with pytest.raises(UserError, match="are not a tokenizer"):
    tokenizer_from_bytes(json.dumps(state).encode())


def test_a_cached_tokenizer_is_not_trained_again(tmp_path, monkeypatch):
  config = TokenizerConfig(vocab_size=120)
  first = cached_tokenizer(TEXTS, config, tmp_path)
  monkeypatch.setattr(module, "train_tokenizer", lambda *_: pytest.fail("trained again"))
  assert cached_tokenizer(iter(TEXTS), config, tmp_path).fingerprint == first.fingerprint
  assert len(list(tmp_path.iterdir())) == 1


def test_other_texts_or_settings_are_cached_apart(tmp_path):
  config = TokenizerConfig(vocab_size=120)
  cached_tokenizer(TEXTS, config, tmp_path)
  cached_tokenizer(TEXTS[:-1], config, tmp_path)
  cached_tokenizer(TEXTS, TokenizerConfig(vocab_size=121), tmp_path)
  cached_tokenizer([*TEXTS[:-2], "".join(TEXTS[-2:])], config, tmp_path)
  assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "swap"])
def test_a_damaged_cache_is_trained_again_and_mended(tmp_path, damage):
  config = TokenizerConfig(vocab_size=120)
  first = cached_tokenizer(TEXTS, config, tmp_path)
  (path,) = tmp_path.iterdir()
  good = path.read_bytes()
  middle = len(good) // 2
  path.write_bytes(
    {
      "cut": good[:middle],
      "flip": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
      "empty": b"",
      "swap": b"\xff" * 100,
    }[damage]
  )
  assert cached_tokenizer(TEXTS, config, tmp_path).fingerprint == first.fingerprint
  assert path.read_bytes() == good
  assert len(list(tmp_path.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_explained(tmp_path):
  blocked = tmp_path / "file"
  blocked.write_text("not a folder")
  with pytest.raises(UserError, match="cannot be cached"):
    cached_tokenizer(TEXTS, TokenizerConfig(vocab_size=120), blocked)


def test_one_tokenizer_for_both_sides_or_one_for_each():
  sources, targets = TEXTS[:4], TEXTS[4:6]
  config = TokenizerConfig(kind="words")
  both = pair_tokenizers(sources, targets, config)
  assert both[0] is both[1]
  apart = pair_tokenizers(sources, targets, config, config)
  assert apart[0].unknown("dog") == ["dog"]
  assert apart[1].unknown("dog") == []
