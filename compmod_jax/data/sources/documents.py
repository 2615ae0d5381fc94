"""Running text: documents in files, in TensorFlow Datasets, or made by the grammar."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check, check_choice
from compmod_jax.core.untrusted import parse_json
from compmod_jax.data.base import DataError, Relations
from compmod_jax.data.sources.text import expand_folder, matching_files, read_lines
from compmod_jax.data.sources.tfds import open_split
from compmod_jax.data.synthetic.grammar import GrammarData

JSON_LINES = (".json", ".jsonl")
_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Documents:
  """The documents of a split, read anew by every loop over them, so that they need not fit memory.

  White space within a document, line breaks included, is one space; blank documents are left out.

  Attributes:
    read: gives (where it stands, text) of every document, such as `("a.txt:17", "Once ...")`.
    fingerprint: says what `read` gives, without reading it.
    relations: the number of a document that is not blank -> which of its words depend on which;
      None where that is not known.
  """

  read: Callable[[], Iterator[tuple[str, str]]]
  fingerprint: str
  relations: Callable[[int], Relations] | None = None

  def placed(self) -> Iterator[tuple[str, str]]:
    """(where it stands, text) of every document."""
    for place, text in self.read():
      text = " ".join(text.split())
      if text:
        yield place, text

  def __iter__(self) -> Iterator[str]:
    return (text for _, text in self.placed())


@dataclasses.dataclass(frozen=True)
class TextDocuments:
  """Documents in text files (UTF-8) and in files of JSON lines, plain or gzipped (`.gz`)."""

  folder: str = "$COMPMOD_DATA/lm_public_domain"
  """Where the files are; may start with an environment variable."""
  train: tuple[str, ...] = ("*",)
  """Patterns of the training files' names; those of the other splits are left out of them."""
  valid: tuple[str, ...] = ()
  """Patterns of the validation files' names; none: cut from the training files."""
  test: tuple[str, ...] = ()
  """Patterns of the test files' names; none: cut from the training files if validation is."""
  unit: Literal["paragraph", "file", "line"] = "paragraph"
  """What a document of a text file is: what blank lines part, the whole file, or a line."""
  field: str = "text"
  """Files of JSON lines (.json, .jsonl): the field that holds a document."""
  held_out: float = 0.02
  """Where training files are cut: the share of documents for valid, and again for test, chosen by a
  hash of the text, so that equal documents stay on one side."""

  def __post_init__(self) -> None:
    check(bool(self.train), "train is empty; give at least one pattern, such as '*.txt'.")
    check(bool(self.field), "field is empty; it names what holds the text of a JSON line.")
    check_choice("unit", self.unit, ("paragraph", "file", "line"))
    check(
      0 < self.held_out < 0.5,
      f"held_out is {self.held_out}; valid and test each get this share: give 0 < held_out < 0.5.",
    )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: train, valid, and test where it has files or is cut from training."""
    return ("train", "valid", *(("test",) if self.test or not self.valid else ()))

  def describe(self) -> str:
    """What the documents are, in a few words."""
    return f"text of {Path(self.folder).name}"

  def load(self, split: str) -> Documents:
    """Finds the files of a split; they are read when the documents are.

    Raises:
      UserError: unknown split, no such folder, or no file of these names.
      DataError: (while reading) a file that is damaged, empty or not UTF-8, or a line without the
        field.
    """
    check_choice("split", split, self.splits())
    folder = expand_folder(self.folder)
    own = {"train": self.train, "valid": self.valid, "test": self.test}
    cut = not own[split] or split == "train"
    others = {path for name in ("valid", "test") for path in _find(folder, own[name])}
    paths = sorted(_find(folder, self.train) - others) if cut else _find(folder, own[split])
    patterns = ", ".join(self.train if cut else own[split])
    check(
      bool(paths),
      f"There is no file {patterns} for the split {split} in {folder}; set folder and the patterns"
      f" of {split} so that they name existing files.",
    )
    paths = sorted(paths)

    def read() -> Iterator[tuple[str, str]]:
      for path in paths:
        for place, text in self._documents(path):
          if not cut or self._part(text) == split:
            yield place, text

    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return Documents(read, repr((self, split, states)))

  def _part(self, text: str) -> str:
    """The split of a document of the training files."""
    digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if self.valid:
      return "train"
    if place < self.held_out and not self.test:
      return "test"
    return "valid" if self.held_out <= place < 2 * self.held_out else "train"

  def _documents(self, path: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of every document of a file."""
    lines = read_lines(path)
    if Path(path.name.removesuffix(".gz")).suffix in JSON_LINES:
      for number, line in enumerate(lines, start=1):
        if line.strip():
          yield f"{path.name}:{number}", self._field(path, number, line)
    elif self.unit == "file":
      yield path.name, "\n".join(lines)
    elif self.unit == "line":
      yield from ((f"{path.name}:{number}", line) for number, line in enumerate(lines, start=1))
    else:
      yield from _paragraphs(path.name, lines)

  def _field(self, path: Path, number: int, line: str) -> str:
    try:
      row = parse_json(line, surrogates=False)
    except ValueError as error:
      raise DataError(f"{path}:{number} is no JSON object ({error}); mend the line.") from error
    if not isinstance(row, dict) or self.field not in row:
      raise DataError(
        f"{path}:{number} is no JSON object with a field {self.field!r}; mend the line, or set"
        " field."
      )
    text = row[self.field]
    if not isinstance(text, str):
      raise DataError(
        f"{path}:{number}: field {self.field!r} holds {str(text)[:40]!r}, no text; mend the line,"
        " or set field."
      )
    return text


def _find(folder: Path, patterns: tuple[str, ...]) -> set[Path]:
  return {path for pattern in patterns for path in matching_files(folder, pattern)}


def _paragraphs(name: str, lines: list[str]) -> Iterator[tuple[str, str]]:
  """(place of the first line, text) of what blank lines part."""
  held: list[str] = []
  for number, line in enumerate([*lines, ""], start=1):
    if line.strip():
      held.append(line)
    elif held:
      yield f"{name}:{number - len(held)}", "\n".join(held)
      held = []


@dataclasses.dataclass(frozen=True)
class GrammarDocuments:
  """One side of the project's grammar: every sentence is a document. Needs no files."""

  grammar: GrammarData = GrammarData()
  """The sentence pairs."""
  side: Literal["source", "target"] = "target"
  """Which side is read; the target of German to English is English."""

  def __post_init__(self) -> None:
    check_choice("side", self.side, ("source", "target"))

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: those of the grammar."""
    return self.grammar.splits()

  def describe(self) -> str:
    """What the documents are, in a few words."""
    data = self.grammar
    language = data.source_language if self.side == "source" else data.target_language
    return f"sentences of the grammar, {language}"

  def load(self, split: str) -> Documents:
    """The sentences of a split.

    Raises:
      UserError: unknown split.
    """
    check_choice("split", split, self.splits())

    def read() -> Iterator[tuple[str, str]]:
      pairs = self.grammar.load(split)
      yield from ((pairs.where(i), text) for i, text in enumerate(getattr(pairs, self.side)))

    def relations(number: int) -> Relations:
      known = self.grammar.load(split).relations
      return () if known is None else known(number)[self.side]

    return Documents(read, repr((self, split)), relations)

  def labels(self, split: str) -> list[int]:
    """The number of every sentence's subject: 1 for plural."""
    return [int(info["number"] == "pl") for info in self.grammar.load(split).info or ()]

  def attractors(self, split: str) -> list[int]:
    """Nouns of the other number between subject and verb of every sentence."""
    return [info["attractors"] for info in self.grammar.load(split).info or ()]


@dataclasses.dataclass(frozen=True)
class GrammarTopics:
  """English sentences of the project's grammar, those about the same thing in one document.

  The topic of a sentence is its first noun, in the singular or the plural as it stands there. A
  document has `sentences` sentences of one topic; the last ones of a topic, where they are fewer,
  are left out. Needs no files.
  """

  grammar: GrammarData = GrammarData()
  """The sentence pairs."""
  sentences: int = 16
  """Sentences of a document."""

  def __post_init__(self) -> None:
    check_least(self, sentences=1)

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: those splits of the grammar that are drawn as training is."""
    return ("train", "valid", "test")

  def describe(self) -> str:
    """What the documents are, in a few words."""
    return f"sentences of the grammar in documents of one topic, {self.grammar.target_language}"

  def load(self, split: str) -> Documents:
    """The documents of a split.

    Raises:
      UserError: unknown split.
    """
    check_choice("split", split, self.splits())

    def read() -> Iterator[tuple[str, str]]:
      pairs, held = self.grammar.load(split), dict[str, list[int]]()
      for number, info in enumerate(pairs.info or ()):
        tags, words = info["pos_target"], pairs.target[number].split()
        if "noun" not in tags:
          continue
        topic = words[tags.index("noun")].strip(".,?!").lower()
        held.setdefault(topic, []).append(number)
        if len(held[topic]) == self.sentences:
          numbers = held.pop(topic)
          yield pairs.where(numbers[0]), " ".join(pairs.target[i] for i in numbers)

    return Documents(read, repr((self, split)))


@dataclasses.dataclass(frozen=True)
class TfdsDocuments:
  """A text set of TensorFlow Datasets, such as `wiki40b/en`, read without TensorFlow."""

  name: str = "wiki40b/en"
  """Builder, configuration and, if wanted, version, as TFDS writes them."""
  field: str = "text"
  """Feature that holds the text of a document."""
  data_dir: str | None = None
  """Where TFDS keeps its sets; None: `TFDS_DATA_DIR`, or `~/tensorflow_datasets`."""
  download: bool = True
  """Fetches and prepares the set if it is not there yet; needs the network."""
  train: str = "train"
  """What TFDS calls the training split; slices such as `train[:10%]` are allowed."""
  valid: str = "validation"
  """What TFDS calls the validation split."""
  tests: tuple[str, ...] = ("test",)
  """What TFDS calls the test splits; they keep these names."""

  def __post_init__(self) -> None:
    for field in ("name", "field", "train", "valid"):
      check(getattr(self, field), f"{field} is empty; it must be a name that TFDS knows.")
    names = self.splits()
    check(
      len(set(names)) == len(names),
      f"tests is {self.tests}; give different names, none of them 'train' or 'valid'.",
    )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: train, valid and the tests."""
    return ("train", "valid", *self.tests)

  def describe(self) -> str:
    """What the documents are, in a few words."""
    return f"text of {self.name}"

  def load(self, split: str) -> Documents:
    """Opens a split; its documents are decoded when they are read.

    Raises:
      UserError: unknown split or set, no such field, a set that is neither on disk nor to be had.
      DataError: the split has no documents, or (while reading) one is not UTF-8.
    """
    check_choice("split", split, self.splits())
    name = {"train": self.train, "valid": self.valid}.get(split, split)
    records = open_split(self.name, name, data_dir=self.data_dir, download=self.download)
    check_choice(f"field of {self.name}", self.field, records.dataset_info.features)

    def read() -> Iterator[tuple[str, str]]:
      for start in range(0, len(records), _BLOCK):
        numbers = range(start, min(start + _BLOCK, len(records)))
        for number, record in zip(numbers, records.__getitems__(list(numbers)), strict=True):
          yield f"{self.name}:{name}[{number}]", _decoded(record[self.field], self.name, number)

    return Documents(read, repr((self, split, str(records.dataset_info.full_name), len(records))))


def _decoded(value: str | bytes, name: str, number: int) -> str:
  try:
    return value if isinstance(value, str) else bytes(value).decode("utf-8")
  except UnicodeDecodeError as error:
    raise DataError(f"Document {number} of {name} is not UTF-8 ({error.reason}).") from error
