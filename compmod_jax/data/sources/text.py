"""Parallel text files in any language pair: one file for each side, or tab-separated."""

import dataclasses
import hashlib
import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from compmod_jax.core.errors import UserError, check, check_choice, short
from compmod_jax.core.untrusted import LARGEST, OverLimit, gunzip, read_bounded
from compmod_jax.data.base import DataError, Metric, Pairs

UNSEEN = "-unseen"


@dataclasses.dataclass(frozen=True)
class TextData:
  """Sentence pairs in text files: UTF-8, one sentence a line, plain or gzipped (`.gz`).

  Lines end with a line feed only, so that other Unicode line separators stay inside their sentence
  and the two sides stay aligned. White space at the ends of a sentence is removed.
  """

  folder: str = ""
  """Where the files are; may start with an environment variable, as in `$COMPMOD_DATA/multi30k`."""
  source_language: str = "de"
  """Language translated from: fills `{language}` in the file names."""
  target_language: str = "en"
  """Language translated into."""
  pattern: str = "{split}.{language}"
  """File names. Without `{language}`: tab-separated files that hold both sides. Without `{split}`
  too: one such file, cut into train, valid and test by a hash of the source sentence."""
  columns: tuple[int, int] = (0, 1)
  """Tab-separated files: the columns of source and target, counted from 0."""
  held_out: float = 0.02
  """One file for everything: the share of source sentences for valid, and again for test."""
  valid: str = "valid"
  """What the file names say for the split `valid`, such as `val` or `dev`."""
  tests: tuple[str, ...] = ("test",)
  """Names of the test splits, such as `test_2016_flickr`."""
  unseen: bool = False
  """Adds for every test split a split `NAME-unseen`: its pairs whose source is not in training."""
  max_train: int | None = None
  """Trains on the first N pairs only; None: all."""
  lowercase: bool = False
  """Lower-cases both sides, references included."""
  nfc: bool = True
  """Brings both sides to Unicode normalisation form C."""
  metric: Metric = "bleu"
  """What translations are scored with."""

  def __post_init__(self) -> None:
    for field in ("source_language", "target_language", "pattern", "valid"):
      check(getattr(self, field), f"{field} is empty; it is needed to find the files: give a name.")
    check(
      "{language}" not in self.pattern or "{split}" in self.pattern,
      f"pattern is {self.pattern!r}; a file for each side also needs `{{split}}` in its name, as in"
      " '{split}.{language}'.",
    )
    check(
      "{language}" not in self.pattern or self.source_language != self.target_language,
      f"source_language and target_language are both {self.source_language!r}; they name different"
      " files: set one of them.",
    )
    check(
      min(self.columns) >= 0 and self.columns[0] != self.columns[1],
      f"columns is {self.columns}; give two different columns, counted from 0.",
    )
    check(
      0 < self.held_out < 0.5,
      f"held_out is {self.held_out}; valid and test each get this share: give 0 < held_out < 0.5.",
    )
    check(
      self.max_train is None or self.max_train > 0,
      f"max_train is {self.max_train}; it must be a positive number of pairs, or None for all.",
    )
    names = ("train", "valid", *self.tests)
    check(
      len(set(names)) == len(names) and not any(name.endswith(UNSEEN) for name in names),
      f"tests is {self.tests}; give different names, none of them 'train' or 'valid' and none that"
      f" ends in {UNSEEN!r}.",
    )
    check(
      "{split}" in self.pattern or self.tests == ("test",),
      f"tests is {self.tests} but pattern {self.pattern!r} is one file, which is cut into train,"
      " valid and test: leave tests at ('test',).",
    )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: train, valid, the tests and, if wanted, their unseen parts."""
    unseen = tuple(name + UNSEEN for name in self.tests) if self.unseen else ()
    return ("train", "valid", *self.tests, *unseen)

  def load(self, split: str) -> Pairs:
    """Reads a split; `NAME-unseen` of a test split is there whether `unseen` is set or not.

    Raises:
      UserError: unknown split, unset environment variable, missing folder or file.
      DataError: files that are empty, damaged, not UTF-8, of unequal length or lack columns.
    """
    whole, cut = split.removesuffix(UNSEEN), split.endswith(UNSEEN)
    if whole not in self.tests or not cut:
      check_choice("split", split, (*self.splits(), *(name + UNSEEN for name in self.tests)))
      return self._read(split)
    pairs, seen = self._read(whole), set(self._read("train").source)
    return pairs.select([i for i, source in enumerate(pairs.source) if source not in seen])

  def _read(self, split: str) -> Pairs:
    folder = expand_folder(self.folder)
    name = self.pattern.replace("{split}", self.valid if split == "valid" else split)
    if "{language}" in name:
      source = find_file(folder, name.replace("{language}", self.source_language))
      target = find_file(folder, name.replace("{language}", self.target_language))
      pairs = _pair_files(source, target)
    else:
      pairs = _split_columns(find_file(folder, name), self.columns)
    if "{split}" not in self.pattern:
      chosen = [i for i, text in enumerate(pairs.source) if self._part(self._clean(text)) == split]
      check(chosen, f"held_out is {self.held_out}, which leaves {split} of {name} without pairs.")
      pairs = pairs.select(chosen)
    if split == "train" and self.max_train is not None:
      pairs = pairs.select(range(min(self.max_train, len(pairs))))
    return dataclasses.replace(
      pairs,
      source=[self._clean(text) for text in pairs.source],
      target=[self._clean(text) for text in pairs.target],
      metric=self.metric,
    )

  def _part(self, source: str) -> Literal["train", "valid", "test"]:
    # By content, not by position: equal sources never fall on both sides of a cut.
    place = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") / 2**64
    if place < self.held_out:
      return "test"
    return "valid" if place < 2 * self.held_out else "train"

  def _clean(self, text: str) -> str:
    if self.nfc:
      text = unicodedata.normalize("NFC", text)
    return text.lower() if self.lowercase else text


def expand_folder(folder: str) -> Path:
  """The folder with `~` and environment variables filled in.

  Raises:
    UserError: a variable is not set, or there is no such folder.
  """
  for name in re.findall(r"\$\{?(\w+)\}?", folder):
    meaning = " (the folder with the real data sets)" if name == "COMPMOD_DATA" else ""
    check(
      os.environ.get(name),
      f"folder is {folder!r}, but the environment variable {name} is not set. Set {name}{meaning},"
      f" as in `export {name}=/path/to/data`, or give folder as a plain path.",
    )
  path = Path(os.path.expandvars(folder)).expanduser()
  check(path.is_dir(), f"folder is {folder!r}, but there is no folder {path}: check its spelling.")
  return path


def matching_files(folder: Path, pattern: str) -> list[Path]:
  """The files below a folder that a pattern names, in the order of their paths.

  Args:
    folder: where to look.
    pattern: a path under it, with `*` and `?` in any of its parts, and `**` for any folders.

  Raises:
    UserError: the pattern cannot name a file of the folder.
  """
  try:
    return sorted(path for path in folder.glob(pattern) if path.is_file())
  except (ValueError, NotImplementedError, OSError) as error:
    reason = error.strerror if isinstance(error, OSError) else error
    raise UserError(
      f"pattern is {short(pattern)}, which cannot name files under {folder}: {reason}. Give a path"
      " with *, ? or, as a part of its own, **."
    ) from error


def find_file(
  folder: Path, name: str, fields: str = "folder, pattern, valid, tests or the languages"
) -> Path:
  """`folder/name` or `folder/name.gz`, whichever is there, in this order.

  Args:
    folder: where to look.
    name: of the file.
    fields: what can be set so that another file is looked for.

  Raises:
    UserError: neither is there; lists what is.
  """
  for path in (folder / name, folder / f"{name}.gz"):
    if path.is_file():
      return path
  present = sorted(path.name for path in folder.iterdir() if path.is_file())
  listing = ", ".join(present[:12]) + (", ..." if len(present) > 12 else "")
  raise UserError(
    f"There is neither {name} nor {name}.gz in {folder}; the files there are: {listing or 'none'}."
    f" Set {fields} so that they name existing files."
  )


def read_lines(path: Path) -> list[str]:
  """The lines of a UTF-8 file, gzipped if its name ends in `.gz`.

  Raises:
    DataError: the file is empty, not UTF-8, a damaged archive or one that expands beyond reason.
    UserError: the file cannot be read.
  """
  try:
    data = read_bounded(path, LARGEST)
    data = gunzip(data) if path.suffix == ".gz" else data
  except OverLimit as error:
    raise DataError(f"{path} {error}.") from error
  except ValueError as error:
    raise DataError(f"{path} {error}; fetch it again.") from error
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error.strerror}.") from error
  try:
    text = data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    # `error.object` is what the codec saw, which may lack the byte order mark.
    line = bytes(error.object).count(b"\n", 0, error.start) + 1
    raise DataError(
      f"{path}:{line} is not UTF-8 ({error.reason}); convert the file, for example with iconv."
    ) from error
  lines = text.removesuffix("\n").split("\n")
  if not text.strip():
    raise DataError(f"{path} is empty; it must hold one sentence a line.")
  return lines


def _rows(path: Path) -> list[str]:
  """`read_lines`, of which each is an example.

  Raises:
    DataError: the file's lines end in carriage returns alone, so that it would be a single one.
  """
  lines = read_lines(path)
  if len(lines) == 1 and "\r" in lines[0].strip():
    raise DataError(
      f"{path} has no line feeds, but carriage returns as ends of lines; convert the file, for"
      " example with `tr '\\r' '\\n'`."
    )
  return lines


def _pair_files(source: Path, target: Path) -> Pairs:
  sources, targets = ([line.strip() for line in _rows(path)] for path in (source, target))
  if len(sources) != len(targets):
    raise DataError(
      f"{source} has {len(sources)} lines but {target} has {len(targets)}; line n of one must be"
      " the translation of line n of the other: make them again from one source."
    )
  return Pairs(source=sources, target=targets, where=lambda i: f"{source.name}:{i + 1}")


def _split_columns(path: Path, columns: tuple[int, int]) -> Pairs:
  sides: tuple[list[str], list[str]] = ([], [])
  for number, line in enumerate(_rows(path), start=1):
    fields: Sequence[str] = line.split("\t")
    if len(fields) <= max(columns):
      raise DataError(
        f"{path}:{number} has {len(fields)} tab-separated columns, but columns is {columns},"
        " counted from 0; mend the line or set columns."
      )
    for side, column in zip(sides, columns, strict=True):
      side.append(fields[column].strip())
  return Pairs(source=sides[0], target=sides[1], where=lambda i: f"{path.name}:{i + 1}")
