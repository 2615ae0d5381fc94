"""Data files on disk and inside archives."""

import gzip
import io
import tarfile
import zipfile

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.qa import files

MEMBERS = {
  "set/questions/train/b.csv": b"b\n",
  "set/questions/train/a.csv": b"a1\na2\n",
  "set/questions/val/c.csv": b"c",
  "set/stories/a.csv": b"story",
  "set/a.csv.gz": gzip.compress(b"zipped\n"),
  "__MACOSX/set/a.csv": b"\x00\x05",
}


def pack(path):
  if path.suffix == ".zip":
    with zipfile.ZipFile(path, "w") as archive:
      for name, data in MEMBERS.items():
        archive.writestr(name, data)
    return path
  with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as tar:
    for name, data in MEMBERS.items():
      member = tarfile.TarInfo(name)
      member.size = len(data)
      tar.addfile(member, io.BytesIO(data))
  return path


@pytest.fixture(autouse=True)
def forgotten():
  yield
  files.forget()


@pytest.mark.parametrize("name", ["x.zip", "x.tgz", "x.tar.gz", "x.tar"])
def test_an_archive_is_read_like_a_folder_and_nothing_is_unpacked(tmp_path, name):
  path = pack(tmp_path / name)
  found = files.find_files(tmp_path, f"{name}/set/questions/*/*.csv")
  assert [str(file.relative_to(path)) for file in found] == sorted(list(MEMBERS)[:3])
  assert files.read_text(found[0]) == ["a1", "a2"]
  assert files.read_text(path / "set" / "a.csv.gz") == ["zipped"]
  assert files.is_file(found[0])
  assert not files.is_file(path / "set")
  assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_star_stands_for_one_part_of_a_path(tmp_path):
  path = pack(tmp_path / "x.zip")
  assert files.find_files(tmp_path, "x.zip/*/*/a.csv") == [
    path / "__MACOSX/set/a.csv",
    path / "set/stories/a.csv",
  ]
  assert files.find_files(tmp_path, "*.zip/*/a.csv.gz") == [path / "set" / "a.csv.gz"]


def test_plain_files_are_found_in_the_order_of_their_paths(tmp_path):
  for name in ("b/2.txt", "a/9.txt", "a/10.txt", "c.md"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
  names = [str(path.relative_to(tmp_path)) for path in files.find_files(tmp_path, "*/*.txt")]
  assert names == ["a/10.txt", "a/9.txt", "b/2.txt"]


@pytest.mark.parametrize(
  ("pattern", "message"),
  [
    ("none.txt", r"is named none\.txt; there are: a\.txt, x\.zip\. Set folder"),
    ("x.zip", r"is named x\.zip; there are: x\.zip/__MACOSX/set/a\.csv, x\.zip/set/a\.csv\.gz"),
    ("x.zip/set/*.txt", r"is named x\.zip/set/\*\.txt; there are: x\.zip/__MACOSX"),
    ("y.zip/*", r"is named y\.zip/\*; there are: a\.txt, x\.zip\."),
    ("/a.txt", "pattern is '/a.txt'"),
    ("../a.txt", "pattern is '../a.txt'"),
  ],
)
def test_a_pattern_that_names_nothing_is_answered_with_what_is_there(tmp_path, pattern, message):
  (tmp_path / "a.txt").write_text("x")
  pack(tmp_path / "x.zip")
  with pytest.raises(UserError, match=message):
    files.find_files(tmp_path, pattern)


@pytest.mark.parametrize("name", ["x.zip", "x.tgz"])
def test_a_damaged_archive_is_named(tmp_path, name):
  path = pack(tmp_path / name)
  path.write_bytes(path.read_bytes()[:-60])
  with pytest.raises(DataError, match=rf"{name} is not a complete archive"):
    files.find_files(tmp_path, f"{name}/set/a.csv.gz")


def test_damaged_members_are_named(tmp_path):
  with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
    archive.writestr("a.csv", b"good\n\xff\n")
    archive.writestr("b.csv", b" \n")
    archive.writestr("c.csv.gz", gzip.compress(b"hello")[:-3])
  with pytest.raises(DataError, match=r"x\.zip/a\.csv:2 is not UTF-8"):
    files.read_text(tmp_path / "x.zip" / "a.csv")
  with pytest.raises(DataError, match=r"x\.zip/b\.csv is empty"):
    files.read_text(tmp_path / "x.zip" / "b.csv")
  with pytest.raises(DataError, match=r"c\.csv\.gz is not a complete gzip file"):
    files.read_text(tmp_path / "x.zip" / "c.csv.gz")
  with pytest.raises(UserError, match=r"x\.zip holds no file of this name"):
    files.read_text(tmp_path / "x.zip" / "d.csv")


def test_an_archive_that_changed_is_read_again(tmp_path):
  path = tmp_path / "x.zip"
  for text in ("one", "three"):
    with zipfile.ZipFile(path, "w") as archive:
      archive.writestr("a.txt", text)
    assert files.read_text(path / "a.txt") == [text]
