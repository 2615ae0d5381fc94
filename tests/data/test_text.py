"""Parallel text files: what is read, and how mistakes in files are told."""

import gzip
import os

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError, Pairs
from compmod_jax.data.sources.text import TextData

TRAIN = [("Hallo!", "Hi."), ("Ich gehe.", "I am going."), ("Guten Tag.", "Good day.")]
TEST = [("Hallo!", "Hello!"), ("Bis morgen.", "See you tomorrow."), ("Guten Tag.", "Hello.")]


def write(folder, split, pairs, suffix="", languages=("de", "en")):
  for side, language in enumerate(languages):
    data = "".join(pair[side] + "\n" for pair in pairs).encode()
    path = folder / f"{split}.{language}{suffix}"
    path.write_bytes(gzip.compress(data) if suffix == ".gz" else data)


@pytest.fixture
def folder(tmp_path):
  write(tmp_path, "train", TRAIN)
  write(tmp_path, "valid", TEST[:1])
  write(tmp_path, "test", TEST)
  return tmp_path


def pairs_of(pairs):
  return list(zip(pairs.source, pairs.target, strict=True))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_plain_and_gzipped_files_read_the_same(tmp_path, suffix):
  write(tmp_path, "train", TRAIN, suffix)
  pairs = TextData(folder=str(tmp_path)).load("train")
  assert pairs_of(pairs) == TRAIN
  assert pairs.where(1) == f"train.de{suffix}:2"


def test_any_language_pair_in_either_direction(tmp_path):
  write(tmp_path, "train", TRAIN, languages=("fi", "pt-BR"))
  data = TextData(folder=str(tmp_path), source_language="pt-BR", target_language="fi")
  assert pairs_of(data.load("train")) == [(b, a) for a, b in TRAIN]


def test_split_names_follow_the_files(tmp_path):
  for split in ("train", "val", "test_2016_flickr", "test_2017_flickr"):
    write(tmp_path, split, TEST)
  tests = ("test_2016_flickr", "test_2017_flickr")
  data = TextData(folder=str(tmp_path), valid="val", tests=tests)
  assert data.splits() == ("train", "valid", *tests)
  assert all(len(data.load(split)) == 3 for split in data.splits())
  assert data.load("valid").where(0) == "val.de:1"


def test_the_unseen_part_of_a_test_split_lacks_the_sources_of_training(folder):
  data = TextData(folder=str(folder), unseen=True)
  assert data.splits() == ("train", "valid", "test", "test-unseen")
  unseen = data.load("test-unseen")
  assert pairs_of(unseen) == [TEST[1]]
  assert unseen.where(0) == "test.de:2"
  assert pairs_of(TextData(folder=str(folder)).load("test-unseen")) == [TEST[1]]


def test_what_counts_as_seen_is_what_is_trained_on(folder):
  assert len(TextData(folder=str(folder), max_train=1).load("test-unseen")) == 2
  (folder / "test.de").write_text("HALLO!\nBis morgen.\nGuten Tag.\n")
  assert len(TextData(folder=str(folder)).load("test-unseen")) == 2
  assert len(TextData(folder=str(folder), lowercase=True).load("test-unseen")) == 1


def test_training_can_be_limited_to_the_first_pairs(folder):
  data = TextData(folder=str(folder), max_train=2)
  assert pairs_of(data.load("train")) == TRAIN[:2]
  assert len(data.load("test")) == 3
  assert len(TextData(folder=str(folder), max_train=99).load("train")) == 3


def test_case_and_unicode_form_are_brought_to_one(tmp_path):
  write(tmp_path, "train", [("Gru\u0308ße", "GREETINGS")])
  pairs = TextData(folder=str(tmp_path)).load("train")
  assert pairs_of(pairs) == [("Gr\u00fcße", "GREETINGS")]
  assert pairs_of(TextData(folder=str(tmp_path), nfc=False).load("train"))[0][0] == "Gru\u0308ße"
  lower = TextData(folder=str(tmp_path), lowercase=True).load("train")
  assert pairs_of(lower) == [("gr\u00fcße", "greetings")]


def test_lines_end_with_line_feeds_only(tmp_path):
  (tmp_path / "train.de").write_bytes("\ufeffa\u2028b\r\nc\x85d \ne".encode())  # no last line feed
  (tmp_path / "train.en").write_bytes(b"1\n2\n3\n")
  pairs = TextData(folder=str(tmp_path)).load("train")
  assert pairs_of(pairs) == [("a\u2028b", "1"), ("c\x85d", "2"), ("e", "3")]


def test_files_whose_lines_end_in_carriage_returns_alone_are_refused(tmp_path):
  for name, data in (("train.tsv", b"a\tb\rc\td\r"), ("train.de", b"a\rc"), ("train.en", b"b\rd")):
    (tmp_path / name).write_bytes(data)
  for pattern, name in (("{split}.tsv", "tsv"), ("{split}.{language}", "de")):
    with pytest.raises(DataError, match=rf"train\.{name} has no line feeds, but carriage returns"):
      TextData(folder=str(tmp_path), pattern=pattern).load("train")
  (tmp_path / "train.tsv").write_bytes(b"a\tb\r")
  pairs = TextData(folder=str(tmp_path), pattern="{split}.tsv").load("train")
  assert pairs_of(pairs) == [("a", "b")]


def test_an_empty_line_is_an_empty_sentence(tmp_path):
  write(tmp_path, "train", [("", "a"), ("b", "b"), ("c", "")])
  assert pairs_of(TextData(folder=str(tmp_path)).load("train"))[0] == ("", "a")


def test_tab_separated_files_hold_both_sides(tmp_path):
  (tmp_path / "train.tsv").write_text("id1\tHi.\tHallo!\textra\nid2\t\tLeer\t\n")
  data = TextData(folder=str(tmp_path), pattern="{split}.tsv", columns=(2, 1))
  pairs = data.load("train")
  assert pairs_of(pairs) == [("Hallo!", "Hi."), ("Leer", "")]
  assert pairs.where(1) == "train.tsv:2"


def test_one_tab_separated_file_is_cut_without_sharing_sources(tmp_path):
  lines = [f"source {i % 400}\ttarget {i}" for i in range(1200)]
  (tmp_path / "all.tsv").write_text("\n".join(lines))
  data = TextData(folder=str(tmp_path), pattern="all.tsv", held_out=0.1)
  parts = {split: data.load(split) for split in data.splits()}
  assert sorted(text for part in parts.values() for text in part.target) == sorted(
    line.split("\t")[1] for line in lines
  )
  sources = [set(part.source) for part in parts.values()]
  assert len(set.union(*sources)) == sum(map(len, sources))
  assert all(60 < len(parts[split]) < 200 for split in ("valid", "test"))
  number = int(parts["test"].where(0).removeprefix("all.tsv:")) - 1
  assert lines[number] == f"{parts['test'].source[0]}\t{parts['test'].target[0]}"


def test_a_folder_may_start_with_an_environment_variable(folder, monkeypatch):
  monkeypatch.setenv("COMPMOD_DATA", str(folder.parent))
  assert len(TextData(folder=f"$COMPMOD_DATA/{folder.name}").load("train")) == 3
  monkeypatch.delenv("COMPMOD_DATA")
  with pytest.raises(UserError, match=r"COMPMOD_DATA is not set\. Set COMPMOD_DATA"):
    TextData(folder="$COMPMOD_DATA/x").load("train")


@pytest.mark.parametrize(
  ("name", "data", "message"),
  [
    ("train.en", b"1\n2\n", "train.de has 3 lines but {folder}/train.en has 2"),
    ("train.en", b"1\n2\n3\n4\n", "train.de has 3 lines but {folder}/train.en has 4"),
    ("train.de", b"", "train.de is empty"),
    ("train.de", b"\n \n\n", "train.de is empty"),
    ("train.de", b"a\nb\xff\nc\n", "train.de:2 is not UTF-8"),
    ("train.de", b"\xef\xbb\xbfa\nb\nc\xff\n", "train.de:3 is not UTF-8"),
  ],
)
def test_wrong_contents_are_told_with_file_and_line(folder, name, data, message):
  (folder / name).write_bytes(data)
  with pytest.raises(DataError) as error:
    TextData(folder=str(folder)).load("train")
  assert message.format(folder=folder) in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "data",
  [b"not gzip", gzip.compress(b"a\n" * 5000, mtime=0)[:-12]],
  ids=["no archive", "cut short"],
)
def test_a_damaged_archive_is_told(tmp_path, data):
  write(tmp_path, "train", TRAIN, ".gz")
  (tmp_path / "train.en.gz").write_bytes(data)
  with pytest.raises(DataError, match=r"train\.en\.gz is not a complete gzip file"):
    TextData(folder=str(tmp_path)).load("train")


def test_a_line_without_its_columns_is_told(tmp_path):
  (tmp_path / "train.tsv").write_text("a\tb\nc\n")
  with pytest.raises(DataError, match=r"train\.tsv:2 has 1 tab-separated columns"):
    TextData(folder=str(tmp_path), pattern="{split}.tsv").load("train")


@pytest.mark.parametrize(
  ("changes", "split", "message"),
  [
    ({}, "tset", "Did you mean 'test'?"),
    ({"target_language": "fr"}, "train", "neither train.fr nor train.fr.gz"),
    ({"target_language": "fr"}, "train", "the files there are: test.de, test.en, train.de"),
    ({"valid": "val"}, "valid", "neither val.de nor val.de.gz"),
    ({"folder": "/nowhere/at/all"}, "train", "there is no folder /nowhere/at/all"),
  ],
)
def test_what_is_not_there_is_named(folder, changes, split, message):
  with pytest.raises(UserError) as error:
    TextData(**{"folder": str(folder), **changes}).load(split)
  assert message in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_told(folder):
  (folder / "train.de").chmod(0)
  with pytest.raises(UserError, match=r"train\.de cannot be read: Permission denied"):
    TextData(folder=str(folder)).load("train")


@pytest.mark.parametrize(
  "changes",
  [
    {"pattern": "all.{language}"},
    {"pattern": ""},
    {"target_language": "de"},
    {"columns": (1, 1)},
    {"columns": (-1, 0)},
    {"held_out": 0.6},
    {"max_train": 0},
    {"tests": ("test", "test")},
    {"tests": ("train",)},
    {"tests": ("a-unseen",)},
    {"pattern": "all.tsv", "tests": ("a", "b")},
  ],
)
def test_bad_settings_name_their_field(changes):
  with pytest.raises(UserError, match=list(changes)[-1]):
    TextData(**changes)


def test_every_source_needs_a_translation_and_all_or_no_annotations():
  with pytest.raises(UserError, match="2 source and 1 target"):
    Pairs(["a", "b"], ["a"], where=str)
  with pytest.raises(UserError, match="but 0 annotations"):
    Pairs(["a"], ["a"], where=str, info=[])


@pytest.mark.real_data
def test_real_sets_have_their_published_sizes():
  tatoeba = TextData(folder="$COMPMOD_DATA/tatoeba_en_de")
  assert [len(tatoeba.load(split)) for split in tatoeba.splits()] == [161_701, 2_073, 3_045]
  assert 0 < len(tatoeba.load("test-unseen")) < 3_045
  multi30k = TextData(folder="$COMPMOD_DATA/multi30k", valid="val", tests=("test_2016_flickr",))
  assert [len(multi30k.load(split)) for split in multi30k.splits()] == [29_000, 1_014, 1_000]
