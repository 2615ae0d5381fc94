"""Running text: files, JSON lines, the grammar, TFDS; and the blocks that it is cut into."""

import gzip
import json
import types

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data import check_documents
from compmod_jax.data.base import DataError
from compmod_jax.data.blocks import Blocks, block_examples, token_stream
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.pipeline import eval_batches, train_batches
from compmod_jax.data.sources.documents import (
  Documents,
  GrammarDocuments,
  TextDocuments,
  TfdsDocuments,
)
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer

PROSE = "Once  upon\na time.\n\n \nThe end,\tsaid she.\n\n\nOver\n"


def placed(data, split="train"):
  return list(data.load(split).placed())


def test_blank_lines_part_documents_and_places_name_their_first_line(tmp_path):
  (tmp_path / "a.txt").write_text(PROSE)
  data = TextDocuments(folder=str(tmp_path), valid=("none",), test=("none",))
  assert placed(data) == [
    ("a.txt:1", "Once upon a time."),
    ("a.txt:5", "The end, said she."),
    ("a.txt:8", "Over"),
  ]


def test_a_file_or_a_line_may_be_a_document(tmp_path):
  with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
    file.write(PROSE)
  common = {"folder": str(tmp_path), "valid": ("none",), "test": ("none",)}
  whole = TextDocuments(unit="file", **common)
  assert placed(whole) == [("a.txt.gz", "Once upon a time. The end, said she. Over")]
  lines = TextDocuments(unit="line", **common)
  assert [place for place, _ in placed(lines)] == [f"a.txt.gz:{n}" for n in (1, 2, 5, 8)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json.gz"])
def test_json_lines_hold_a_document_each(tmp_path, suffix):
  lines = [json.dumps({"text": text, "url": "x"}) for text in ("One.\nTwo.", "Drei \u2028 vier.")]
  opened = gzip.open if suffix.endswith(".gz") else open
  with opened(tmp_path / f"c4-train.00000{suffix}", "wt", encoding="utf-8") as file:
    file.write("\n".join(lines) + "\n\n")
  data = TextDocuments(folder=str(tmp_path), valid=("none",), test=("none",))
  assert [text for _, text in placed(data)] == ["One. Two.", "Drei vier."]
  with pytest.raises(DataError, match="no JSON object with a field 'body'"):
    placed(TextDocuments(folder=str(tmp_path), field="body", valid=("none",), test=("none",)))


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ('{"text": "a"}\n{"text": ', r"d\.jsonl:2 is no JSON object"),
    ('["text"]\n', r"d\.jsonl:1 is no JSON object"),
    ('{"text": 4}\n', r"d\.jsonl:1: field 'text' holds '4', no text"),
  ],
)
def test_a_damaged_line_is_named(tmp_path, content, message):
  (tmp_path / "d.jsonl").write_text(content)
  with pytest.raises(DataError, match=message):
    placed(TextDocuments(folder=str(tmp_path), valid=("none",), test=("none",)))


def test_held_out_documents_are_in_one_split_only_and_equal_ones_together(tmp_path):
  texts = [f"document number {n % 180}" for n in range(200)]
  (tmp_path / "a.txt").write_text("\n\n".join(texts))
  data = TextDocuments(folder=str(tmp_path), held_out=0.1)
  assert data.splits() == ("train", "valid", "test")
  parts = {split: [text for _, text in placed(data, split)] for split in data.splits()}
  assert sorted(text for part in parts.values() for text in part) == sorted(texts)
  assert all(parts.values())
  names = list(parts)
  assert not any(set(parts[a]) & set(parts[b]) for a in names for b in names if a < b)
  assert 0.04 < len(parts["valid"]) / 200 < 0.18


def test_files_of_other_splits_are_left_out_of_training(tmp_path):
  for name in ("one", "two", "valid"):
    (tmp_path / f"{name}.txt").write_text(f"text of {name}")
  data = TextDocuments(folder=str(tmp_path), valid=("valid*",))
  assert data.splits() == ("train", "valid")
  assert [place for place, _ in placed(data)] == ["one.txt:1", "two.txt:1"]
  assert placed(data, "valid") == [("valid.txt:1", "text of valid")]
  with pytest.raises(UserError, match="There is no file dev for the split valid"):
    TextDocuments(folder=str(tmp_path), valid=("dev",)).load("valid")
  with pytest.raises(UserError, match="split is 'test'"):
    data.load("test")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"unit": "word"}, "unit is 'word'"),
    ({"train": ()}, "train is empty"),
    ({"held_out": 0.5}, r"held_out is 0\.5"),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(UserError, match=message):
    TextDocuments(**fields)


def test_the_grammar_gives_either_side():
  grammar = GrammarData(train=20, valid=5, test=5)
  pairs = grammar.load("valid")
  english, german = (GrammarDocuments(grammar, side=side) for side in ("target", "source"))
  assert [text for _, text in placed(english, "valid")] == list(pairs.target)
  assert [text for _, text in placed(german, "valid")] == list(pairs.source)
  assert english.splits() == grammar.splits()
  assert english.describe().endswith("en")


def test_tfds_text_is_read_in_blocks_and_cleaned(monkeypatch):
  class Records:
    dataset_info = types.SimpleNamespace(features=("text", "title"), full_name="toy/1.0.0")

    def __len__(self):
      return 3000

    def __getitems__(self, numbers):
      assert len(numbers) <= 1024
      return [{"text": f"page\n {n}".encode(), "title": b"x"} for n in numbers]

  opened = []

  def open_split(name, split, **options):
    opened.append((name, split))
    return Records()

  monkeypatch.setattr("compmod_jax.data.sources.documents.open_split", open_split)
  data = TfdsDocuments(name="toy")
  found = placed(data, "valid")
  assert opened == [("toy", "validation")]
  assert len(found) == 3000
  assert found[2999] == ("toy:validation[2999]", "page 2999")
  with pytest.raises(UserError, match="field of toy is 'txt'"):
    TfdsDocuments(name="toy", field="txt").load("train")


@pytest.fixture(scope="module")
def tokenizer():
  return train_tokenizer(["a b c d e f"], TokenizerConfig(kind="words", vocab_size=20))


def documents(*texts, fingerprint="one"):
  return Documents(lambda: ((f"x:{n}", text) for n, text in enumerate(texts)), fingerprint)


def test_every_token_is_in_exactly_one_block_behind_a_start_token(tokenizer):
  texts = ("a b c", "", "d", "e f a b c d e")
  stream = token_stream(documents(*texts), tokenizer, None)
  assert stream.tolist() == [
    number for text in texts if text for number in (*tokenizer.encode(text), tokenizer.eos)
  ]
  blocks = Blocks(stream, 5, tokenizer.bos)
  assert {block[0] for block in blocks} == {tokenizer.bos}
  assert np.concatenate([block[1:] for block in blocks]).tolist() == stream.tolist()
  assert blocks.lengths.tolist() == [len(block) for block in blocks] == [5, 5, 5, 3]
  some = blocks.take(np.asarray([3, 1]))
  assert [block.tolist() for block in some] == [blocks[3].tolist(), blocks[1].tolist()]
  assert some.lengths.tolist() == [3, 5]
  with pytest.raises(IndexError):
    blocks[4]


@pytest.mark.parametrize(("count", "stride"), [(13, 1), (13, 2), (13, 4), (12, 4), (4, 3), (2, 1)])
def test_windows_begin_every_stride_and_reach_the_end(count, stride):
  stream = np.arange(10, 10 + count)
  blocks = Blocks(stream, 5, 1, stride)
  for number, block in enumerate(blocks):
    assert block.tolist() == [
      1,
      *range(10 + number * stride, min(14 + number * stride, 10 + count)),
    ]
  # Each has news, and together they tell all.
  ends = [block[-1] for block in blocks]
  assert sorted(set(ends)) == ends
  assert ends[-1] == stream[-1]
  assert [len(block) for block in blocks] == blocks.lengths.tolist()
  with pytest.raises(UserError, match="1 to 4"):
    Blocks(stream, 5, 1, 5)


def test_a_cached_stream_is_the_same_and_is_read_from_its_file(tokenizer, tmp_path):
  texts = ("a b c", "d e f")
  plain = token_stream(documents(*texts), tokenizer, None)
  first = token_stream(documents(*texts), tokenizer, tmp_path)

  def unreadable():
    raise AssertionError("read again")
    yield

  again = token_stream(Documents(unreadable, "one"), tokenizer, tmp_path)
  assert isinstance(again, np.memmap)
  assert plain.tolist() == first.tolist() == again.tolist()
  other = token_stream(documents("f", fingerprint="two"), tokenizer, tmp_path)
  assert other.tolist() != plain.tolist()
  assert not list(tmp_path.glob("*.part"))


def _flip(content):
  return content[:2] + bytes([content[2] ^ 1]) + content[3:]


@pytest.mark.parametrize("damage", [_flip, lambda content: content[:-3], lambda content: b""])
def test_a_damaged_cached_stream_is_made_anew(tokenizer, tmp_path, damage):
  texts = ("a b c", "d e f")
  plain = token_stream(documents(*texts), tokenizer, None).tolist()
  token_stream(documents(*texts), tokenizer, tmp_path)
  (path,) = tmp_path.iterdir()
  whole = path.read_bytes()
  path.write_bytes(damage(whole))
  assert token_stream(documents(*texts), tokenizer, tmp_path).tolist() == plain
  assert path.read_bytes() == whole


def test_the_order_of_blocks_is_seeded_resumable_and_the_same_for_any_processes(tokenizer):
  stream = token_stream(documents(*["a b c d e f"] * 40), tokenizer, None)
  examples = block_examples(stream, 8, start=tokenizer.bos, pad=tokenizer.pad)
  config = BatchConfig(tokens=32, buckets=(8,))

  def read(count, *, seed=0, state=None, **processes):
    iterator = train_batches(examples, config, seed=seed, multiple=2, **processes)
    if state is not None:
      iterator.set_state(state)
    batches = [next(iterator) for _ in range(count)]
    state = iterator.get_state()
    iterator.close()
    return batches, state

  whole, _ = read(20)
  assert [b["index"].tolist() for b in whole] != [b["index"].tolist() for b in read(20, seed=1)[0]]
  first, state = read(7)
  rest, _ = read(13, state=state)
  parts = [read(20, process=i, processes=2)[0] for i in (0, 1)]
  for number, batch in enumerate(whole):
    resumed = (first + rest)[number]
    joined = {k: np.concatenate([part[number][k] for part in parts]) for k in batch}
    for name, value in batch.items():
      np.testing.assert_array_equal(resumed[name], value)
      np.testing.assert_array_equal(joined[name], value)
  seen = np.concatenate([b["index"] for b in whole[: -(-len(examples) // 4)]])
  assert sorted(seen[seen >= 0]) == list(range(len(examples)))
  once = np.concatenate([b["index"] for b in eval_batches(examples, config, multiple=2)])
  assert sorted(once[once >= 0]) == list(range(len(examples)))


def test_the_check_finds_repeats_leaks_unknown_text_and_empty_splits(tokenizer):
  data = {
    "train": documents("a b", "c", "a b"),
    "valid": documents("c", "a x y"),
    "test": documents("", " "),
  }
  reports = check_documents.check_splits(data.__getitem__, list(data), lambda: tokenizer)
  counts = {
    report.split: {kind: found.count for kind, found in report.findings.items() if found.count}
    for report in reports
  }
  assert counts == {
    "train": {"duplicate": 1},
    "valid": {"document in train": 1, "unknown": 1},
    "test": {"no text": 1},
  }
  assert [report.failed for report in reports] == [False, False, True]
  assert [report.pairs for report in reports] == [3, 2, 0]
  assert reports[0].mean == (pytest.approx(8 / 3),)
  assert reports[1].findings["unknown"].places == ["x:1: has 'x', 'y'"]


def test_a_damaged_file_is_an_error_of_its_split(tokenizer, tmp_path):
  (tmp_path / "train.txt").write_text("a b\n\nc")
  (tmp_path / "valid.jsonl").write_text("no json\n")
  data = TextDocuments(folder=str(tmp_path), valid=("valid*",))
  train, valid = check_documents.check_splits(data.load, data.splits(), lambda: tokenizer)
  assert not train.failed
  assert valid.failed
  assert "valid.jsonl:1 is no JSON object" in valid.findings["unreadable"].places[0]


@pytest.mark.real_data
def test_real_text_and_real_json_lines_open():
  prose = TextDocuments()
  counts = {split: sum(1 for _ in prose.load(split)) for split in prose.splits()}
  assert counts["train"] > 15_000
  assert min(counts.values()) > 200
  c4 = TextDocuments("$COMPMOD_DATA/c4_sample", train=("*train*",), valid=("*validation*",))
  assert [sum(1 for _ in c4.load(split)) for split in c4.splits()] == [1000, 200]
