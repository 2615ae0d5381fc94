"""GPT-2's tokenizer: its ids, tokens of their own beside them, and its use by a task."""

import functools
import gzip
import itertools
import json
import shutil
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.unified import END, LABELS, SPECIAL_TOKENS, encode
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import (
  TokenizerConfig,
  cached_tokenizer,
  pair_tokenizers,
  tokenizer_from_bytes,
  train_tokenizer,
)
from compmod_jax.data.tokenizers.gpt2 import MERGES, VOCAB, read_gpt2_tokenizer
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.causal_lm import CausalLMConfig

GRAMMAR = GrammarDocuments(GrammarData(train=60, valid=10, test=10, shifted=4))
SPECIAL = tuple(token for token in SPECIAL_TOKENS if token != END)
TEXTS = [
  "The dog that sees the cats sleeps.",
  " leading and trailing  ",
  "don't we'll\tTABS\n\nlines  \u00a0x\u3000y",
  "Zoë, naïve: 東京 🙂 e\u0301",
  "<|endoftext|> <pad></s><s> <unk>",
  "",
]
# Text of assigned characters: what the others count as depends on the Unicode version.
ANY_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=40)
MIXED = st.lists(st.sampled_from([*SPECIAL, " ", "a", "(", ")", "the dog", "é", "🙂"]), max_size=12)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
  """Files as GPT-2's, with 380 tokens; the last is the end."""
  made, path = tokenizers.ByteLevelBPETokenizer(), tmp_path_factory.mktemp("gpt2")
  made.train_from_iterator(GRAMMAR.load("train"), vocab_size=379, show_progress=False)
  made.save_model(str(path))
  vocab = json.loads((path / VOCAB).read_text("utf-8"))
  vocab["<|endoftext|>"] = len(vocab)
  (path / VOCAB).write_text(json.dumps(vocab))
  return path


@pytest.fixture(scope="session")
def tokenizer(folder):
  return train_tokenizer([], TokenizerConfig("gpt2", folder=str(folder), special_tokens=SPECIAL))


@pytest.fixture
def copied(folder, tmp_path):
  """A copy of the files that may be damaged."""
  return shutil.copytree(folder, tmp_path / "copied")


class Reference:
  """Byte pair encoding as in GPT-2's paper and code, word by word and merge by merge."""

  PATTERN = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
  )

  def __init__(self, vocab, merges):
    self.vocab = vocab
    lines = [line for line in merges.split("\n")[1:] if line]
    self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    self.spelt = {byte: chr(byte) for byte in printed}
    self.spelt |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    self.word = functools.cache(self.word)

  def word(self, text):
    parts = [self.spelt[byte] for byte in text.encode()]
    while len(parts) > 1:
      ranks = [self.ranks.get(pair, np.inf) for pair in itertools.pairwise(parts)]
      if min(ranks) == np.inf:
        break
      place = int(np.argmin(ranks))
      parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [self.vocab[part] for part in parts]

  def __call__(self, text):
    return [number for word in self.PATTERN.findall(text) for number in self.word(word)]


@pytest.fixture(scope="session")
def reference(folder):
  vocab = json.loads((folder / VOCAB).read_text("utf-8"))
  return Reference(vocab, (folder / MERGES).read_text("utf-8"))


def test_half_a_surrogate_pair_is_the_replacement_character(tokenizer):
  assert tokenizer.encode("the \ud800 dog") == tokenizer.encode("the \ufffd dog")


def plain(text):
  """The text without what would be a token of its own."""
  return functools.reduce(lambda left, token: left.replace(token, ""), SPECIAL, text)


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT | MIXED.map("".join).map(plain))
def test_ids_are_those_of_a_plain_reference(tokenizer, reference, text):
  assert tokenizer.encode(text) == reference(text)


def test_ids_are_those_of_the_package_without_a_prefix_space(folder, tokenizer):
  paths = (str(folder / VOCAB), str(folder / MERGES))
  theirs = tokenizers.ByteLevelBPETokenizer.from_file(*paths, add_prefix_space=False)
  texts = [*TEXTS, *itertools.islice(GRAMMAR.load("test"), 20)]
  assert tokenizer.encode_batch(texts) == [theirs.encode(text).ids for text in texts]
  assert max(map(max, filter(None, tokenizer.encode_batch(texts)))) > 256


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT | MIXED.map("".join))
def test_any_text_decodes_to_itself(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert not {tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos} & set(ids)
  assert not tokenizer.unknown(text)


def test_added_tokens_follow_gpt2s_and_then_what_it_lacks(folder, tokenizer):
  size = len(json.loads((folder / VOCAB).read_text("utf-8")))
  assert tokenizer.eos == size - 1
  assert [tokenizer.encode(token) for token in SPECIAL] == [
    [number] for number in range(size, size + len(SPECIAL))
  ]
  added = size + len(SPECIAL)
  assert [tokenizer.pad, tokenizer.unk, tokenizer.bos] == [added, added + 1, added + 2]
  assert tokenizer.vocab_size == added + 3
  pieces = [tokenizer.piece(number) for number in range(tokenizer.vocab_size)]
  assert pieces[size - 1 :] == ["<|endoftext|>", *SPECIAL, "<pad>", "<unk>", "<s>"]


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.tuples(ANY_TEXT.map(plain), st.sampled_from(SPECIAL)), max_size=5))
def test_added_tokens_are_never_split_and_part_the_text(tokenizer, parts):
  ids = tokenizer.encode("".join(text + token for text, token in parts))
  each = [[*tokenizer.encode(text), *tokenizer.encode(token)] for text, token in parts]
  assert ids == [number for one in each for number in one]


def test_added_tokens_outside_ascii_are_text_and_a_mask_is_found(folder):
  tokens = ("§é", "<mask>")
  tokenizer = read_gpt2_tokenizer(folder, tokens)
  text = "x§é<mask> §"
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.encode(text)[2] == tokenizer.mask == tokenizer.eos + 2
  assert tokenizer.text_of(tokenizer.eos + 1) == "§é"
  assert read_gpt2_tokenizer(folder).mask is None


def test_decoding_stops_at_the_end_and_leaves_out_padding(tokenizer):
  ids = tokenizer.encode("the dog (2)")
  given = [tokenizer.bos, tokenizer.pad, *ids, tokenizer.eos, *ids, tokenizer.pad]
  assert tokenizer.decode(given) == "the dog (2)"
  assert tokenizer.decode([tokenizer.eos, *ids]) == tokenizer.decode([]) == ""
  with pytest.raises(UserError, match="another tokenizer"):
    tokenizer.decode([tokenizer.vocab_size])


def test_texts_of_tokens_make_up_the_text(tokenizer):
  text = "The dog sees the cat. (1)"
  ids = tokenizer.encode(text)
  assert len(ids) < len(text)
  assert "".join(map(tokenizer.text_of, ids)) == text
  assert tokenizer.text_of(tokenizer.encode(" the")[0]) == " the"


def test_a_question_in_the_unified_format_ends_with_gpt2s_end(tokenizer):
  question = Question("multiple_choice", "who sleeps?", options=("a dog", "two cats"), label=2)
  numbers = {token: tokenizer.encode(token)[0] for token in SPECIAL} | {END: tokenizer.eos}
  found = encode(question, tokenizer.encode, numbers, 64)
  assert found.ids[-1] == tokenizer.eos
  assert tokenizer.decode(found.ids) == "<q>who sleeps?(1)a dog(2)two cats<sep>(2)"
  assert tokenizer.decode(found.ids[found.answer_start :]) == LABELS[1]


def test_bytes_bring_back_the_same_tokenizer_without_the_files(tokenizer):
  again = tokenizer_from_bytes(tokenizer.to_bytes())
  assert again.fingerprint == tokenizer.fingerprint
  assert again.encode_batch([*TEXTS, *SPECIAL]) == tokenizer.encode_batch([*TEXTS, *SPECIAL])
  for name in ("kind", "special_tokens", "vocab_size", "pad", "unk", "bos", "eos"):
    assert getattr(again, name) == getattr(tokenizer, name)


@pytest.mark.parametrize(
  "change", [{"merges": ["q q"]}, {"pieces": ["a"]}, {"merges": 5}, {"x": 1}]
)
def test_damaged_bytes_are_refused(tokenizer, change):
  state = json.loads(tokenizer.to_bytes())
  state["model"] |= change
  with pytest.raises(UserError, match="are not a tokenizer"):
    tokenizer_from_bytes(json.dumps(state).encode())


def test_gzipped_files_in_a_folder_named_by_a_variable(copied, tokenizer, monkeypatch):
  for name in (VOCAB, MERGES):
    (copied / f"{name}.gz").write_bytes(gzip.compress((copied / name).read_bytes()))
    (copied / name).unlink()
  monkeypatch.setenv("HERE", str(copied.parent))
  config = TokenizerConfig("gpt2", folder=f"$HERE/{copied.name}", special_tokens=SPECIAL)
  assert train_tokenizer([], config).fingerprint == tokenizer.fingerprint
  monkeypatch.delenv("HERE")
  with pytest.raises(UserError, match="HERE is not set"):
    train_tokenizer([], config)


def test_files_are_read_afresh_and_not_kept_in_the_cache(copied, tmp_path):
  config = TokenizerConfig("gpt2", folder=str(copied))
  first = cached_tokenizer(["a"], config, tmp_path / "cache")
  merges = (copied / MERGES).read_text("utf-8").splitlines()
  (copied / MERGES).write_text("\n".join([merges[0], *merges[:0:-1]]) + "\n", "utf-8")
  assert cached_tokenizer(["a"], config, tmp_path / "cache").fingerprint != first.fingerprint
  assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", [VOCAB, MERGES])
def test_missing_empty_and_cut_files_are_explained(copied, name):
  data = (copied / name).read_bytes()
  (copied / name).unlink()
  with pytest.raises(UserError, match=f"neither {name} nor {name}.gz"):
    read_gpt2_tokenizer(copied)
  (copied / name).write_bytes(b"")
  with pytest.raises(UserError, match=f"{name} is empty"):
    read_gpt2_tokenizer(copied)
  (copied / name).write_bytes(data[: len(data) // 2])
  with pytest.raises(UserError, match=rf"({name} is no JSON|Merge \d+|No merge in {name}).*Copy"):
    read_gpt2_tokenizer(copied)
  (copied / name).write_bytes(b"\xff" + data)
  with pytest.raises(UserError, match=f"{name}:1 is not UTF-8"):
    read_gpt2_tokenizer(copied)
  with pytest.raises(UserError, match="there is no folder"):
    read_gpt2_tokenizer(copied / "not here")


def without(vocab, piece):
  """The vocabulary with all ids closed up after one token is gone."""
  kept = sorted((number, name) for name, number in vocab.items() if name != piece)
  return {name: number for number, (_, name) in enumerate(kept)}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda vocab: without(vocab, "<|endoftext|>"), r"no <\|endoftext\|>"),
    (lambda vocab: without(vocab, "q"), "lacks 1 of the 256 bytes"),
    (lambda vocab: without(vocab, "he"), "Merge .* is 'h e'"),
    (lambda vocab: vocab | {"xyzzy": len(vocab)}, r"such as \['xyzzy'\]"),
    (lambda vocab: vocab | {"he": 7}, "each of them once"),
    (lambda vocab: vocab | {"he": "7"}, "each of them once"),
    (lambda vocab: list(vocab), "each of them once"),
    (lambda vocab: vocab | {"<sep>": len(vocab)}, r"special_tokens is \('<sep>',\)"),
    (lambda vocab: vocab | {"<pad>": len(vocab)}, "<pad>, <unk>, <s> are added"),
  ],
)
def test_a_vocabulary_that_is_not_gpt2s_is_refused(copied, change, message):
  vocab = json.loads((copied / VOCAB).read_text("utf-8"))
  (copied / VOCAB).write_text(json.dumps(change(vocab)))
  with pytest.raises(UserError, match=message) as caught:
    read_gpt2_tokenizer(copied, ("<sep>",))
  assert str(copied) in str(caught.value)


def test_a_merge_of_more_or_fewer_than_two_tokens_is_refused(copied):
  with (copied / MERGES).open("a", encoding="utf-8") as file:
    file.write("a b c\n")
  with pytest.raises(UserError, match="is 'a b c'; it must be two tokens"):
    read_gpt2_tokenizer(copied)


def test_without_the_package_its_installation_is_named(folder, tokenizer, monkeypatch):
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(UserError, match=r'pip install "compmod_jax\[hf\]"'):
    read_gpt2_tokenizer(folder)
  with pytest.raises(UserError, match=r'pip install "compmod_jax\[hf\]"'):
    tokenizer_from_bytes(tokenizer.to_bytes())


def test_settings_that_do_not_fit_are_explained(folder):
  wrong: list[dict[str, Any]] = [
    {"kind": "gpt2"},
    {"kind": "bpe", "folder": str(folder)},
    {"kind": "gpt2", "folder": str(folder), "lowercase": True},
  ]
  for fields in wrong:
    with pytest.raises(UserError, match=r"kind is .* folder .* lowercase"):
      TokenizerConfig(**fields)
  config = TokenizerConfig("gpt2", folder=str(folder))
  with pytest.raises(UserError, match=r"target_tokenizer\.kind is 'gpt2'"):
    pair_tokenizers(["a"], ["b"], TokenizerConfig(kind="words"), config)


def test_a_language_model_reads_its_tokens(copied):
  config = CausalLMConfig(
    data=GRAMMAR,
    tokenizer=TokenizerConfig("gpt2", folder=str(copied), special_tokens=SPECIAL),
    length=16,
    batch_tokens=64,
  )
  sizes = {"dim": 16, "heads": 2, "ffn_dim": 24, "max_length": 16, "dropout": 0.0}
  model = NemotConfig(vanilla_layers=1, modulatory_layers=1, output_layers=1, **sizes)
  task = config.build(model)
  (batch, *_), tokenizer = list(task.dataset.eval_batches("valid")), task.dataset.tokenizer
  first = next(iter(GRAMMAR.load("valid")))
  assert batch["tokens"][0, 0] == tokenizer.eos
  assert first.startswith(tokenizer.decode(batch["tokens"][0, 1:]))

  filler = np.full((1, 16), tokenizer.pad, np.int32)
  tokens = np.concatenate([batch["tokens"][:3], filler])
  tokens[2, 9:] = tokenizer.pad
  shapes = jax.eval_shape(lambda key: nn.unbox(task.model.init(key)), jax.random.key(0))
  random = np.random.default_rng(0)
  params = jax.tree.map(lambda s: jnp.asarray(random.normal(0, 0.1, s.shape), s.dtype), shapes)
  context = StepContext(jax.random.key(1), jnp.int32(0), train=False)
  batch = {"tokens": jnp.asarray(tokens), "index": jnp.arange(4)}
  terms, _, _ = jax.jit(lambda params, batch: task.loss(params, (), batch, context))(params, batch)
  term = terms["cross_entropy"]
  assert term.count == np.sum(tokens[:, 1:] != tokenizer.pad) == 15 + 15 + 8
  np.testing.assert_allclose(term.sum / term.count, np.log(tokenizer.vocab_size), rtol=0.1)

  shutil.rmtree(copied)
  again = config.build(model, files=task.dataset.files())
  assert again.dataset.tokenizer.fingerprint == tokenizer.fingerprint


@pytest.mark.real_data
def test_the_real_vocabulary_gives_the_known_ids():
  tokenizer = read_gpt2_tokenizer("$COMPMOD_DATA/gpt2_vocab", SPECIAL)
  assert tokenizer.encode("Hello world") == [15496, 995]
  assert tokenizer.eos == 50256
  assert tokenizer.encode("<p>Hello<sep>") == [50257, 15496, 50259]
  assert tokenizer.vocab_size == 50257 + len(SPECIAL) + 3
