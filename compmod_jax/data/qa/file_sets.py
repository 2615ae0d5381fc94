"""Sets of questions in files: what is read for which split, and the sets for development."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.qa import files
from compmod_jax.data.qa.question import Question, Questions
from compmod_jax.data.qa.readers import READERS, ReaderName
from compmod_jax.data.qa.reading import Reading, collect
from compmod_jax.data.sources.text import expand_folder

SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class QASet:
  """Questions in files of one format.

      QASet("mctest", "mctest", folder="$COMPMOD_DATA/qa/mctest",
            train=("mc160.train.tsv", "mc500.train.tsv"), valid=("mc*.dev.tsv",))

  A split without files of its own may be cut from the training files, by a hash of the passage, so
  that all questions on a passage are on one side: valid, if only it has none; valid and test, if
  neither has any. (Without a passage the question is hashed; FairytaleQA and WinoGrande keep more
  together, by `group` of `info`.)
  """

  name: str
  """What reports and tables call the set."""
  reader: ReaderName
  """The format of its files: the name of a reader, `jsonl` for the project's own."""
  folder: str
  """Where the files are; may start with an environment variable, as in `$COMPMOD_DATA/qa/boolq`."""
  train: tuple[str, ...] = ()
  """Patterns of the training files, below `folder`; an archive counts as a folder, as in
  `socialiqa.zip/*/train.jsonl`. None: there is no training split."""
  valid: tuple[str, ...] = ()
  """Patterns of the validation files."""
  test: tuple[str, ...] = ()
  """Patterns of the test files."""
  held_out: float = 0.1
  """Where training files are cut: the share of passages for valid, and again for test."""

  def __post_init__(self) -> None:
    check(bool(self.name), "name is empty; reports need one, such as 'boolq'.")
    check_choice("reader", self.reader, get_args(ReaderName))
    for field in SPLITS:
      patterns = getattr(self, field)
      check(
        isinstance(patterns, tuple) and all(patterns),
        f"{field} is {patterns!r}; it must be a tuple of patterns, such as ('{field}.jsonl',).",
      )
    check(
      bool(self.train or self.valid or self.test),
      f"train, valid and test of {self.name} are all empty; give the files of at least one.",
    )
    check(
      0 < self.held_out < 0.5,
      f"held_out is {self.held_out}; valid and test each get this share: give 0 < held_out < 0.5.",
    )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: those with files of their own, and those cut from the training files."""
    return tuple(split for split in SPLITS if getattr(self, split) or split in self._cut())

  def describe(self) -> str:
    """What the questions are, in a few words."""
    return f"questions of {self.name}"

  def load(self, split: str) -> Questions:
    """Reads a split; its notes say how many questions cannot be used, and why.

    For a split that is cut from the training files, notes are about all of these.

    Raises:
      UserError: unknown split, no such folder, or a pattern that names no file.
      DataError: files that are damaged or of another format, or without any question.
    """
    check_choice("split", split, self.splits())
    folder, cut = expand_folder(self.folder), self._cut()
    reading = Reading("train" if split in cut else split)
    paths = self._paths(folder, reading.split)

    def read() -> Iterator[tuple[str, Question]]:
      for path in paths:
        for place, question in READERS[self.reader](path, reading):
          if split not in cut or self._part(question) == split:
            yield place.removeprefix(f"{folder}/"), question
          else:
            reading.elsewhere += 1

    try:
      return collect(f"{split} of {self.name} ({_names(paths)})", read(), reading)
    finally:
      files.forget()

  def _cut(self) -> tuple[str, ...]:
    """The splits that share the training files."""
    if not self.train or self.valid:
      return ()
    return ("train", "valid") if self.test else SPLITS

  def _paths(self, folder: Path, split: str) -> list[Path]:
    """The files of a split; training leaves out those of the others."""
    own = [path for p in getattr(self, split) for path in files.find_files(folder, p)]
    others = self.valid + self.test if split == "train" else ()
    taken = {path.resolve() for p in others for path in files.find_files(folder, p)}
    left = [path for path in dict.fromkeys(own) if path.resolve() not in taken]
    check(
      bool(left) or not own,
      f"train of {self.name} has no file of its own: {_names(own)} is in valid or test as well,"
      " and training leaves the files of other splits out. Give train other files, or leave valid"
      " and test empty: they are cut from the training files then.",
    )
    return left

  def _part(self, question: Question) -> str:
    """The split of a question of training files that are cut."""
    # By content, not by position: what belongs together never falls on both sides of a cut.
    key = question.info.get("group") or question.passage or question.question
    digest = hashlib.sha256(" ".join(str(key).split()).encode(errors="replace")).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < self.held_out and not self.test:
      return "test"
    return "valid" if self.held_out <= place < 2 * self.held_out else "train"


def _names(paths: Sequence[Path]) -> str:
  """The names of files for a message, the first few."""
  paths = list(dict.fromkeys(paths))
  more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
  return ", ".join(path.name for path in paths[:3]) + more


def _development_sets() -> Iterator[QASet]:
  folder = "$COMPMOD_DATA/qa"
  yield QASet("boolq", "boolq", f"{folder}/boolq", train=("boolq.part.jsonl.gz",))
  yield QASet("race_middle", "race", f"{folder}/race_middle", train=("validation_middle.jsonl.gz",))
  yield QASet(
    "mctest",
    "mctest",
    f"{folder}/mctest",
    train=("mc160.train.tsv", "mc500.train.tsv"),
    valid=("mc160.dev.tsv", "mc500.dev.tsv"),
    test=("mc160.test.tsv",),
  )
  choices = f"{folder}/multiple_choice"
  for name, files_of in (
    ("arc_easy", ("arc-easy",)),
    ("arc_challenge", ("arc-challenge",)),
    ("arc", ("arc-easy", "arc-challenge")),
    ("openbookqa", ("openbookqa",)),
  ):
    train, test = (tuple(f"{f}.{split}.jsonl.gz" for f in files_of) for split in ("train", "test"))
    yield QASet(name, "options", choices, train=train, test=test)
  yield QASet("piqa", "options", choices, test=("piqa.test.jsonl.gz",))
  zipped = "socialiqa-train-dev.zip/socialiqa-train-dev"
  yield QASet(
    "siqa",
    "siqa",
    f"{folder}/socialiqa",
    train=(f"{zipped}/train.jsonl",),
    valid=(f"{zipped}/dev.jsonl",),
  )
  yield QASet("winogrande", "winogrande", f"{folder}/winogrande", valid=("dev.jsonl.gz",))
  stories = "train_val.tgz/data-by-train-split/questions"
  yield QASet(
    "fairytaleqa",
    "fairytaleqa",
    f"{folder}/fairytaleqa",
    train=(f"{stories}/train/*.csv",),
    valid=(f"{stories}/val/*.csv",),
  )
  for domain in ("electronics", "grocery", "restaurants", "tripadvisor", "*"):
    name, names = ("subjqa" if domain == "*" else f"subjqa_{domain}"), ("train", "dev", "test")
    train, valid, test = ((f"{domain}/{split}.csv.gz",) for split in names)
    yield QASet(name, "subjqa", f"{folder}/subjqa", train=train, valid=valid, test=test)


DEVELOPMENT_SETS: dict[str, QASet] = {data.name: data for data in _development_sets()}
"""The sets below the folder that COMPMOD_DATA names, by name.

PIQA and WinoGrande have no training split there, and so are for evaluation only; of the other sets,
valid is cut from train for ARC and OpenBookQA, and valid and test for BoolQ and RACE. `arc` is
`arc_easy` and `arc_challenge` together, `subjqa` its domains.
"""
