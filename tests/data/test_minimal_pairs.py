"""Minimal pairs from their published formats, and from the grammar."""

import json
import os
from pathlib import Path

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.minimal_pairs import (
  attractors,
  other_number,
  read_minimal_pairs,
  treebank_style,
)
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer

HEAD = "pattern\tconstr_id\tsent_id\tcorrect_number\tform\tclass\ttype\tprefix\tn_attr\tsent\n"


def rows(*lines):
  return HEAD + "".join("\t".join(line) + "\n" for line in lines)


def row(form, kind, sent="0"):
  return ("P", "1", sent, "sing", form, kind, "original", "The dog near the cats", "1", "...")


def write(folder, name, text):
  (folder / name).write_text(text)
  return str(folder / name)


def test_gulordava_items_are_a_beginning_with_the_right_and_the_wrong_form(tmp_path):
  text = rows(row("sleep", "wrong"), row("sleeps", "correct"))
  pair = read_minimal_pairs("gulordava", write(tmp_path, "g.tab", text))[0]
  assert pair.good == "The dog near the cats sleeps"
  assert pair.bad == "The dog near the cats sleep"
  assert pair.group == "original, 1 attractors"
  assert (pair.whole, pair.where) == (False, "g.tab:2")


def test_damaged_items_are_named_with_their_line(tmp_path):
  cut = rows(row("sleeps", "correct"), row("sleep", "wrong"), row("eats", "correct", "1"))
  with pytest.raises(DataError, match=r"cut\.tab:4: this form has no partner"):
    read_minimal_pairs("gulordava", write(tmp_path, "cut.tab", cut))
  twice = rows(row("sleeps", "correct"), row("eats", "correct"))
  with pytest.raises(DataError, match=r"twice\.tab:3: a right and a wrong form"):
    read_minimal_pairs("gulordava", write(tmp_path, "twice.tab", twice))
  with pytest.raises(DataError, match="no column pattern"):
    read_minimal_pairs("gulordava", write(tmp_path, "other.tab", "a\tb\n1\t2\n"))
  with pytest.raises(DataError, match=r"head\.tab has no pairs"):
    read_minimal_pairs("gulordava", write(tmp_path, "head.tab", HEAD))
  with pytest.raises(DataError, match=r"b\.jsonl:1 is no item of BLiMP"):
    read_minimal_pairs("blimp", write(tmp_path, "b.jsonl", "{}\n"))
  with pytest.raises(UserError, match="format"):
    read_minimal_pairs("blimb", "x")


def test_linzen_items_end_at_the_verb_and_count_attractors(tmp_path):
  head = "orig_sentence\tverb_index\tverb_pos\tn_diff_intervening\n"
  text = head + "the keys to the cabinet are here .\t6\tVBP\t1\n"
  pair = read_minimal_pairs("linzen", write(tmp_path, "l.tsv", text))[0]
  assert pair.good == "the keys to the cabinet are"
  assert pair.bad == "the keys to the cabinet is"
  assert pair.group == "1 attractors"
  with pytest.raises(DataError, match=r"bad\.tsv:2: verb_index"):
    read_minimal_pairs("linzen", write(tmp_path, "bad.tsv", head + "a b\t9\tVBP\t0\n"))


@pytest.mark.parametrize(
  ("singular", "plural"),
  [
    ("is", "are"), ("has", "have"), ("does", "do"), ("goes", "go"), ("carries", "carry"),
    ("plays", "play"), ("watches", "watch"), ("passes", "pass"), ("fixes", "fix"), ("dies", "die"),
    ("comes", "come"), ("uses", "use"), ("sees", "see"), ("buzzes", "buzz"),
  ],
)  # fmt: skip
def test_verbs_change_their_number(singular, plural):
  assert other_number(singular, "VBZ") == plural
  if singular != "dies":
    assert other_number(plural, "VBP") == singular


def test_blimp_items_are_whole_sentences(tmp_path):
  item = {"sentence_good": "A.", "sentence_bad": "B.", "UID": "island"}
  pair = read_minimal_pairs("blimp", write(tmp_path, "b.jsonl", json.dumps(item) + "\n"))[0]
  assert (pair.good, pair.bad, pair.group, pair.whole) == ("A.", "B.", "island", True)


def test_the_grammar_s_twins_differ_in_one_word():
  pairs = attractors(GrammarData(train=10, shifted=40))
  assert len(pairs) == 40
  assert {pair.group for pair in pairs} == {f"{n} attractors" for n in range(4)}
  for pair in pairs:
    good, bad = pair.good.split(), pair.bad.split()
    assert len(good) == len(bad)
    assert sum(a != b for a, b in zip(good, bad, strict=True)) == 1


def test_sentences_in_treebank_style():
  tokenizer = train_tokenizer(["$ %"], TokenizerConfig(kind="words"))
  expected = {
    "The girl didn't pay $5,000.": "the girl did n't pay $ N",
    "Helen's dog , which I 've seen ,": "helen 's dog which i 've seen",
    "queen do n’t rhyme .": "queen do n't rhyme",
    "a Band-Aid": "a band-aid",
  }
  assert treebank_style(expected, tokenizer) == list(expected.values())


@pytest.mark.real_data
def test_the_published_sets_have_their_published_sizes():
  folder = Path(os.environ["COMPMOD_DATA"])
  found = read_minimal_pairs("gulordava", str(folder / "agreement/generated.tab"))
  assert len(found) == 410
  assert sum(pair.group.startswith("original") for pair in found) == 41
  found = read_minimal_pairs("blimp", str(folder / "blimp/blimp.jsonl.gz"))
  assert len(found) == 67_000
  assert len({pair.group for pair in found}) == 67
