"""Bytes of others are read within limits, and what is over one is refused with the reason."""

import gzip
import io
import json
import os
import tarfile
import zipfile
from typing import Literal

import pytest

from compmod_jax.core import untrusted
from compmod_jax.core.untrusted import OverLimit, archive_files, gunzip, parse_json, read_bounded
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.files import read_text
from compmod_jax.data.qa.records import json_file, json_lines
from compmod_jax.data.sources.text import read_lines


@pytest.mark.parametrize(
  "text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000]
)
def test_json_that_is_nested_too_deep_is_over_a_limit(text):
  for given in (text, text.encode()):
    with pytest.raises(OverLimit, match="nested deeper than 100 levels"):
      parse_json(given)


def test_the_limit_on_nesting_is_exact():
  assert parse_json("[" * 100 + "]" * 100)
  assert parse_json('{"a":' * 100 + "1" + "}" * 100)
  for text in ("[" * 101 + "]" * 101, '[{"a":[1]},' + "[" * 100 + "2" + "]" * 100 + "]"):
    with pytest.raises(OverLimit, match="nested deeper than 100"):
      parse_json(text)
  assert parse_json("1", depth=0) == 1
  assert parse_json('"[[["', depth=0) == "[[["
  with pytest.raises(OverLimit, match="deeper than 0"):
    parse_json("[]", depth=0)


def test_the_limit_on_nesting_holds_whatever_the_depth_of_the_caller():
  def below(levels):
    return parse_json("[" * 90 + "]" * 90) if levels == 0 else below(levels - 1)

  assert below(800)


def test_flat_json_may_have_any_number_of_lists():
  assert len(parse_json(json.dumps([[1]] * 5000))) == 5000


def test_long_numbers_long_texts_and_half_characters_are_refused():
  with pytest.raises(OverLimit, match="4,300 digits"):
    parse_json("1" * 5000)
  with pytest.raises(OverLimit, match="it is 12 characters long, and at most 10 are read"):
    parse_json(" " * 12, size=10)
  with pytest.raises(ValueError, match=r"holds \\udc00, half of a character"):
    parse_json(r'{"a": ["x\udc00"]}', surrogates=False)
  assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"
  assert parse_json(r'"\ud800"', surrogates=True) == "\ud800"
  with pytest.raises(json.JSONDecodeError):
    parse_json("{")
  with pytest.raises(ValueError, match="decode"):
    parse_json(b'"\xff"')


def test_gzip_is_unpacked_up_to_a_limit(monkeypatch):
  data = gzip.compress(b"a line\n" * 1000, mtime=0) + gzip.compress(b"more", mtime=0)
  assert gunzip(data) == b"a line\n" * 1000 + b"more"
  for damaged in (data[:-5], b"no gzip", data[:10] + b"\xff" * 40):
    with pytest.raises(ValueError, match="not a complete gzip file"):
      gunzip(damaged)
  monkeypatch.setattr(untrusted, "FREE", 1000)
  bomb = gzip.compress(bytes(1 << 20), mtime=0)
  with pytest.raises(OverLimit, match=rf"{len(bomb):,} bytes and expands to over .*gzip -d"):
    gunzip(bomb)


def _tar(path, files, *, mode: Literal["w", "w:gz"] = "w:gz"):
  with tarfile.open(path, mode) as tar:
    for name, content in files.items():
      info = tarfile.TarInfo(name)
      info.size = len(content)
      tar.addfile(info, io.BytesIO(content))
  return path


def test_archives_give_their_files_up_to_a_limit(tmp_path, monkeypatch):
  files = {"a/x.txt": b"some text", "y.txt": b"", "zeros": bytes(1 << 20)}
  with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
    for name, content in files.items():
      zipped.writestr(name, content)
  paths = [tmp_path / "a.zip", _tar(tmp_path / "a.tgz", files)]
  paths += [_tar(tmp_path / "a.tar", files, mode="w")]
  for path in paths:
    assert dict(archive_files(path)) == files
  with monkeypatch.context() as patched:
    patched.setattr(untrusted, "FREE", 1000)
    for path in paths[:2]:
      with pytest.raises(OverLimit, match=r"expands to over .*unpack it and name"):
        dict(archive_files(path))
    assert dict(archive_files(paths[2])) == files  # not compressed: it is as large as it says
  monkeypatch.setattr(untrusted, "MEMBERS", 2)
  for path in paths:
    with pytest.raises(OverLimit, match="over 2 files"):
      dict(archive_files(path))


def test_a_size_that_a_header_claims_is_not_allocated(tmp_path):
  with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
    zipped.writestr("x", b"text")
    zipped.filelist[0].file_size = 1 << 45  # what the list at the archive's end says
  with pytest.raises(OverLimit, match="expands to over"):
    dict(archive_files(tmp_path / "a.zip"))
  info = tarfile.TarInfo("x")
  for size, message in ((1 << 50, "expands to over"), (-512, "a file of -512 bytes")):
    info.size = size
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    with pytest.raises(ValueError, match=message):
      dict(archive_files(tmp_path / "a.tar"))


def test_damaged_archives_are_named_as_such(tmp_path):
  whole = _tar(tmp_path / "a.tgz", {"x": os.urandom(5000)}).read_bytes()
  for name, data in (
    ("cut.tgz", whole[:2000]),
    ("none.zip", b"no archive"),
    ("none.tar", b"no archive"),
    ("swapped.zip", whole),
  ):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match="not a complete archive"):
      dict(archive_files(tmp_path / name))


def test_members_compressed_in_any_way_are_read_or_named_as_damaged(tmp_path):
  for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
    path = tmp_path / f"{method}.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
      archive.writestr("x", b"ab" * 500)
    assert dict(archive_files(path)) == {"x": b"ab" * 500}
    data = bytearray(path.read_bytes())
    data[44:60] = b"\xff" * 16
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not a complete archive"):
      dict(archive_files(path))


def test_only_plain_files_are_read_and_no_more_of_them_than_a_limit(tmp_path):
  path = tmp_path / "x"
  path.write_bytes(b"12345")
  assert read_bounded(path, 5) == b"12345"
  with pytest.raises(OverLimit, match="has 5 bytes, and at most 4 are read"):
    read_bounded(path, 4)
  os.mkfifo(tmp_path / "pipe")
  for odd in (tmp_path / "pipe", tmp_path, type(path)("/dev/zero")):
    with pytest.raises(ValueError, match="is no plain file"):
      read_bounded(odd, 5)
  with pytest.raises(FileNotFoundError):
    read_bounded(tmp_path / "none", 5)


def test_files_that_expand_beyond_reason_are_named_with_the_remedy(tmp_path, monkeypatch):
  bomb = gzip.compress(bytes(1 << 20), mtime=0)
  (tmp_path / "a.txt.gz").write_bytes(bomb)
  _tar(tmp_path / "a.tgz", {"q.jsonl": bytes(1 << 20)})
  _tar(tmp_path / "b.tar", {"q.jsonl.gz": bomb}, mode="w")
  monkeypatch.setattr(untrusted, "FREE", 1000)
  for read, path in (
    (read_lines, tmp_path / "a.txt.gz"),
    (read_text, tmp_path / "a.tgz/q.jsonl"),
    (read_text, tmp_path / "b.tar/q.jsonl.gz"),
  ):
    with pytest.raises(DataError, match=r"expands to over .* if you trust it, unpack it") as caught:
      read(path)
    assert path.name in str(caught.value) or "a.tgz" in str(caught.value)
  (tmp_path / "zero.txt").symlink_to("/dev/zero")
  with pytest.raises(DataError, match=r"zero.txt is no plain file"):
    read_lines(tmp_path / "zero.txt")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_data_in_json_beyond_reason_is_named_with_its_place(tmp_path, text):
  (tmp_path / "q.jsonl").write_text('{"a": 1}\n' + text + "\n")
  with pytest.raises(DataError, match=r"q\.jsonl:2 is no JSON"):
    list(json_lines(tmp_path / "q.jsonl"))
  (tmp_path / "q.json").write_text(text)
  with pytest.raises(DataError, match=r"q\.json is no JSON of this format"):
    json_file(tmp_path / "q.json")
