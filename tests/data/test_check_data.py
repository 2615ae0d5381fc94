"""The data check: what it finds, where, its exit status, and the export."""

import dataclasses
import sys

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data import check
from compmod_jax.data.base import Pairs
from compmod_jax.data.export import export
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig, pair_tokenizers

LIMITS = check.Limits(longest=12, max_ratio=2.0, min_difference=3, first=2)


def make(pairs, name="train.de"):
  return Pairs([a for a, _ in pairs], [b for _, b in pairs], where=lambda i: f"{name}:{i + 1}")


def words(train):
  return pair_tokenizers(train.source, train.target, TokenizerConfig(kind="words"))


def look(pairs, train=None, name="train.de", limits=LIMITS):
  train = make(train or pairs)
  return check.check_pairs(
    "x", make(pairs, name), words(train), limits, check.Seen(train) if name != "train.de" else None
  )


def found(report):
  return {kind: finding.count for kind, finding in report.findings.items() if finding.count}


def test_clean_data_has_no_findings():
  report = look([("a b", "c d"), ("a", "c")])
  assert found(report) == {}
  assert not report.failed
  assert (report.pairs, report.mean, report.longest) == (2, (2.5, 2.5), (3, 3))


def test_empty_sides_are_errors_with_their_line():
  report = look([("a", "b"), ("", "b"), ("a", " "), ("", "")])
  assert found(report)["empty side"] == 3
  assert report.findings["empty side"].places == [
    "train.de:2: source is empty",
    "train.de:3: target is empty",
  ]
  assert report.failed


def test_length_ratios_are_warned_of_unless_sentences_are_short():
  report = look([("a", "b b b b b b"), ("a", "b b"), ("a a a a a a a a", "b b b b b b")])
  assert found(report) == {"length ratio": 1}
  assert report.findings["length ratio"].places == ["train.de:1: 2 to 7 tokens"]
  assert not report.failed


def test_pairs_that_are_no_translations_may_have_any_length_ratio():
  pairs = dataclasses.replace(make([("a", "b b b b b b")]), metric="exact_match")
  report = check.check_pairs("x", pairs, words(pairs), LIMITS)
  assert found(report) == {}
  assert "length ratio" not in report.findings


def test_sides_over_the_ceiling_are_warned_of():
  report = look([("a " * 11, "b " * 11), ("a " * 11, "b " * 12)])
  assert found(report) == {"over-long": 1}
  assert report.findings["over-long"].places[0].startswith("train.de:2: 12 to 13 tokens")


def test_repeated_pairs_are_told_with_their_first_place():
  report = look([("a", "b"), ("a", "c"), ("a", "b"), ("a", "b")])
  assert found(report) == {"duplicate": 2}
  assert report.findings["duplicate"].places == [
    "train.de:3: the same pair as train.de:1",
    "train.de:4: the same pair as train.de:1",
  ]


def test_text_outside_the_tokenizer_is_told():
  report = look([("a x", "b"), ("a", "y z y"), ("a", "b")], [("a", "b")], "test.de")
  assert report.findings["unknown"].count == 2
  assert report.findings["unknown"].places == [
    "test.de:1: source has 'x'",
    "test.de:2: target has 'y', 'z'",
  ]


def test_characters_outside_a_subword_tokenizer_are_told():
  train = make([("hello world", "hallo welt")] * 3)
  tokenizers = pair_tokenizers(train.source, train.target, TokenizerConfig(vocab_size=60))
  report = check.check_pairs("test", make([("hello 日", "hallo")], "t"), tokenizers)
  assert report.findings["unknown"].places == ["t:1: source has '日'"]


def test_what_test_shares_with_training_is_told():
  train = [("a", "b"), ("c", "d")]
  report = look([("c", "b"), ("c", "d"), ("d", "b")], train, "test.de")
  assert found(report) == {"source in train": 2, "pair in train": 1}
  assert report.findings["pair in train"].places == ["test.de:2: also train.de:2"]
  assert not report.failed


def test_only_the_first_places_are_kept_but_all_are_counted():
  report = look([("", "b")] * 9 + [("a", "b")])
  finding = report.findings["empty side"]
  assert (finding.count, len(finding.places)) == (9, 2)
  assert "  and 7 more" in check.details([report])


def test_without_tokenizers_words_are_counted():
  report = check.check_pairs("train", make([("a b", "c " * 20)]), None, LIMITS)
  assert report.unit == "words"
  assert report.longest == (2, 20)
  assert found(report) == {"length ratio": 1}


def test_findings_are_the_same_across_blocks():
  pairs = [(f"a{i}", "b") for i in range(9000)] + [("", "b"), ("a3", "b")]
  report = check.check_pairs("train", make(pairs), None, LIMITS)
  assert report.findings["empty side"].places == ["train.de:9001: source is empty"]
  assert report.findings["duplicate"].places == ["train.de:9002: the same pair as train.de:4"]


@pytest.fixture
def folder(tmp_path):
  for split, lines in (
    ("train", [("ein Hund", "a dog"), ("eine Katze", "a cat")]),
    ("valid", [("ein Hund", "a hound")]),
    ("test", [("eine Katze", "a cat"), ("ein Hund", "a dog")]),
  ):
    for side, language in enumerate(("de", "en")):
      text = "".join(pair[side] + "\n" for pair in lines)
      (tmp_path / f"{split}.{language}").write_text(text)
  return tmp_path


def test_files_with_wrong_contents_are_errors_and_other_splits_are_still_checked(folder):
  (folder / "valid.en").write_text("a\nb\n")
  data = TextData(folder=str(folder))
  reports = check.check_splits(data.load, data.splits(), words)
  assert [report.failed for report in reports] == [False, True, False]
  (place,) = reports[1].findings["unreadable"].places
  assert "valid.de has 1 lines but" in place
  assert reports[2].findings["pair in train"].count == 2


def test_a_missing_file_is_the_users_mistake(folder):
  (folder / "test.en").unlink()
  data = TextData(folder=str(folder))
  with pytest.raises(UserError, match=r"neither test\.en"):
    check.check_splits(data.load, data.splits(), words)


def test_the_summary_has_a_line_for_every_split(folder):
  data = TextData(folder=str(folder))
  lines = check.summary(check.check_splits(data.load, data.splits(), words))
  assert [line.split()[0] for line in lines] == ["split", "train", "valid", "test"]
  assert len({len(line) for line in lines}) == 1
  assert "source in train" in lines[0]


def test_counts_stand_beside_those_of_published_splits(folder):
  data = TextData(folder=str(folder))
  reports = check.check_splits(data.load, data.splits(), words, published={"train": 3, "test": 2})
  lines = [line.split()[:3] for line in check.summary(reports)]
  assert lines == [
    ["split", "pairs", "published"],
    ["train", "2", "3"],
    ["valid", "1", "-"],
    ["test", "2", "2"],
  ]
  assert "published" not in check.summary(check.check_splits(data.load, data.splits(), words))[0]


def test_what_is_exported_reads_back_the_same(folder, tmp_path_factory):
  target = tmp_path_factory.mktemp("export") / "new"
  data = TextData(folder=str(folder), unseen=True)
  assert export(data, target) == {"train": 2, "valid": 1, "test": 2, "test-unseen": 0}
  again = TextData(folder=str(target))
  for split in again.splits():
    pairs, copied = data.load(split), again.load(split)
    assert (copied.source, copied.target) == (pairs.source, pairs.target)
  export(data, target)  # the same once more is fine


def test_export_never_changes_a_file(folder):
  data = TextData(folder=str(folder), lowercase=True)
  before = {path.name: path.read_bytes() for path in folder.iterdir()}
  with pytest.raises(UserError, match=r"train\.de exists and holds something else"):
    export(data, folder)
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_line_breaks_inside_a_sentence_do_not_shift_lines(tmp_path):
  class Data:
    source_language, target_language = "a", "b"

    def splits(self):
      return ("train",)

    def load(self, split):
      return make([("one\ntwo", "x\r\ny"), ("three", "z")])

  export(Data(), tmp_path)
  assert (tmp_path / "train.a").read_text() == "one two\nthree\n"
  assert (tmp_path / "train.b").read_text() == "x y\nz\n"


def test_sides_of_one_name_are_not_exported(tmp_path):
  class Data:
    source_language, target_language = "text", "text"

    def splits(self):
      return ("train",)

    def load(self, split):
      return make([("one", "two")])

  with pytest.raises(UserError, match="source_language and target_language are both 'text'"):
    export(Data(), tmp_path / "new")
  assert not (tmp_path / "new").exists()


CONFIG = """
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment


def get_config(variant):
  task = TranslationConfig(data=TextData(folder=variant), tokenizer=TokenizerConfig(kind="words"))
  return Experiment(name="files", task=task, model=TransformerConfig())
"""


@pytest.fixture
def run(folder, tmp_path_factory, monkeypatch):
  """Runs the program on the files in `folder` and gives its exit status."""
  from compmod_jax.commands import check_data, cli

  config = tmp_path_factory.mktemp("config") / "files.py"
  config.write_text(CONFIG)

  def call(*options):
    monkeypatch.setattr(sys, "argv", ["check_data", f"--config={config}:{folder}", *options])
    with pytest.raises(SystemExit) as exit_:
      cli.run(check_data.main)
    return exit_.value.code

  return call


def test_the_exit_status_tells_errors_from_warnings_and_mistakes(folder, run, capsys):
  assert run() == 0
  output = capsys.readouterr().out
  assert "warning: test: pair in train: 2" in output
  assert "test.de:1: also train.de:2" in output
  (folder / "test.de").write_text("eine Katze\n\n")
  assert run() == 1
  assert "error: test: empty side: 1\n  test.de:2: source is empty" in capsys.readouterr().out
  (folder / "test.de").unlink()
  assert run() == 2
  streams = capsys.readouterr()
  assert "neither test.de nor" in streams.err
  assert "Traceback" not in streams.err


def test_the_program_exports_unless_a_split_cannot_be_read(folder, run, capsys, tmp_path_factory):
  target = tmp_path_factory.mktemp("out") / "text"
  (folder / "valid.de").write_text("one\nmore\n")
  assert run("--export", str(target)) == 1
  assert "Nothing was written" in capsys.readouterr().out
  assert not target.exists()
  (folder / "valid.de").write_text("ein Hund\n")
  assert run("--export", str(target)) == 0
  assert (target / "test.en").read_text() == "a cat\na dog\n"
  assert f"2 pairs of test are in {target}" in capsys.readouterr().out


def test_limits_are_checked():
  for changes in ({"max_ratio": 1.0}, {"longest": 1}, {"first": -1}, {"min_difference": -1}):
    with pytest.raises(UserError, match=next(iter(changes))):
      check.Limits(**changes)
