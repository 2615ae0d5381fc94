"""What is wrong with data before they are trained on, each with where it stands: parallel text."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check
from compmod_jax.data.base import DataError, Pairs
from compmod_jax.data.tokenizers.vocabulary import Tokenizer

Tokenizers = tuple[Tokenizer, Tokenizer]

_CHUNK = 8192


@dataclasses.dataclass(frozen=True)
class Limits:
  """What counts as remarkable."""

  longest: int = 128
  """Tokens of the longest sentence that is trained on, end of sentence included."""
  max_ratio: float = 3.0
  """The longer side has at most this many times the tokens of the shorter."""
  min_difference: int = 8
  """Sides that differ by fewer tokens pass at any ratio: short sentences vary."""
  first: int = 5
  """Places listed for each kind of finding; all are counted."""

  def __post_init__(self) -> None:
    check(self.max_ratio > 1, f"max_ratio is {self.max_ratio}; it must be above 1.")
    check_least(self, longest=2, min_difference=0, first=0)


@dataclasses.dataclass
class Finding:
  """One kind of thing found in a split.

  Args:
    kind: short name, a column of the summary.
    level: an error makes training on the data wrong; a warning is worth a look.
    count: how often.
    places: the first places, such as `train.de:17: source is empty`.
  """

  kind: str
  level: Literal["error", "warning"]
  count: int = 0
  places: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class SplitReport:
  """Counts of a split and what was found in it.

  Args:
    split: its name.
    pairs: how many pairs, or what else `noun` says.
    unit: what lengths count: tokens with the end of sentence, or words without a tokenizer; terms
      of expressions.
    mean: mean length of source and target sentences, of documents, or of expressions.
    longest: greatest length of the same.
    findings: by kind; kinds without findings are there with count 0.
    noun: what is counted.
    published: how many pairs the published split has; none where that is not known.
  """

  split: str
  pairs: int = 0
  unit: Literal["tokens", "words", "terms"] = "words"
  mean: tuple[float, ...] = (0.0, 0.0)
  longest: tuple[int, ...] = (0, 0)
  findings: dict[str, Finding] = dataclasses.field(default_factory=dict)
  noun: str = "pairs"
  published: int | None = None

  @property
  def failed(self) -> bool:
    """Whether there are errors."""
    return any(found.level == "error" and found.count for found in self.findings.values())


@runtime_checkable
class ChecksItself(Protocol):
  """A data configuration, of no text, that knows what may be wrong with its parts."""

  def reports(self, first: int) -> list[SplitReport]:
    """A report on each part; of each kind of finding the first places are listed."""
    ...


class Notes:
  """Collects findings; keeps the first places only."""

  def __init__(self, first: int):
    self.first = first
    self.findings: dict[str, Finding] = {}

  def kind(self, kind: str, level: Literal["error", "warning"]) -> Callable[[str], None]:
    """A function that adds a finding of this kind, from its text."""
    found = self.findings.setdefault(kind, Finding(kind, level))

    def add(place: str) -> None:
      found.count += 1
      if len(found.places) < self.first:
        found.places.append(place)

    return add


class Seen:
  """The training pairs, to look for those of other splits."""

  def __init__(self, pairs: Pairs):
    self._where = pairs.where
    self._sources: dict[str, int] = {}
    self._pairs: dict[tuple[str, str], int] = {}
    for number, pair in enumerate(zip(pairs.source, pairs.target, strict=True)):
      self._sources.setdefault(pair[0], number)
      self._pairs.setdefault(pair, number)

  def source(self, source: str) -> str | None:
    """Where a source sentence stands in training, if it does."""
    number = self._sources.get(source)
    return None if number is None else self._where(number)

  def pair(self, source: str, target: str) -> str | None:
    """Where a pair stands in training, if it does."""
    number = self._pairs.get((source, target))
    return None if number is None else self._where(number)


def check_pairs(
  split: str,
  pairs: Pairs,
  tokenizers: Tokenizers | None = None,
  limits: Limits = Limits(),
  seen: Seen | None = None,
) -> SplitReport:
  """Looks at every pair of a split.

  Finds empty sides (an error); and as warnings length ratios, sides over the ceiling, repeated
  pairs, text unknown to the tokenizers, and sources or whole pairs that are in training too. Pairs
  that are scored by exact match are no translations, and may have any ratio.

  Args:
    split: name, for the report.
    pairs: of the split.
    tokenizers: of source and target. Without them lengths are in words, nothing is unknown, and
      the ceiling is not looked at.
    limits: what is remarkable.
    seen: the training pairs, when this is another split.
  """
  notes = Notes(limits.first)
  translations = pairs.metric != "exact_match"
  check_lengths = _length_checks(notes, limits, tokenizers is not None, translations)
  check_repeats = _repeat_checks(notes, pairs, seen)
  unknown = notes.kind("unknown", "warning") if tokenizers else None
  lengths: tuple[list[int], list[int]] = ([], [])
  for start in range(0, len(pairs), _CHUNK):
    texts = tuple(list(side[start : start + _CHUNK]) for side in (pairs.source, pairs.target))
    counted = [_measure(side, i, tokenizers) for i, side in enumerate(texts)]
    for offset, (source, target) in enumerate(zip(*texts, strict=True)):
      place = pairs.where(start + offset)
      sizes = (counted[0][offset][0], counted[1][offset][0])
      check_lengths(place, (source, target), sizes)
      check_repeats(start + offset, place, source, target)
      for side, length in zip(lengths, sizes, strict=True):
        side.append(length)
      for name, side in zip(("source", "target"), counted, strict=True):
        if unknown and side[offset][1]:
          unknown(f"{place}: {name} has {listing(side[offset][1])}")
  return SplitReport(
    split=split,
    pairs=len(pairs),
    unit="tokens" if tokenizers else "words",
    mean=tuple(float(np.mean(side)) if side else 0.0 for side in lengths),
    longest=tuple(max(side, default=0) for side in lengths),
    findings=notes.findings,
  )


def _measure(
  texts: list[str], side: int, tokenizers: Tokenizers | None
) -> list[tuple[int, list[str]]]:
  """(length, what is unknown) of every text."""
  if tokenizers is None:
    return [(len(text.split()), []) for text in texts]
  tokenizer = tokenizers[side]
  return [
    (len(ids) + 1, tokenizer.unknown(text) if tokenizer.unk in ids else [])
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True)
  ]


def _length_checks(
  notes: Notes, limits: Limits, ceiling: bool, translations: bool
) -> Callable[..., None]:
  empty = notes.kind("empty side", "error")
  ratio = notes.kind("length ratio", "warning") if translations else None
  long = notes.kind("over-long", "warning") if ceiling else None

  def look(place: str, texts: tuple[str, str], sizes: tuple[int, int]) -> None:
    blank = [
      name for name, text in zip(("source", "target"), texts, strict=True) if not text.split()
    ]
    if blank:
      empty(f"{place}: {' and '.join(blank)} {'is' if len(blank) == 1 else 'are'} empty")
      return
    low, high = sorted(sizes)
    counts = f"{sizes[0]} to {sizes[1]} {'tokens' if ceiling else 'words'}"
    if ratio and high > limits.max_ratio * low and high - low >= limits.min_difference:
      ratio(f"{place}: {counts}")
    if long and high > limits.longest:
      long(f"{place}: {counts}, the ceiling is {limits.longest}")

  return look


def _repeat_checks(notes: Notes, pairs: Pairs, seen: Seen | None) -> Callable[..., None]:
  duplicate = notes.kind("duplicate", "warning")
  overlaps = (
    (notes.kind("source in train", "warning"), notes.kind("pair in train", "warning"))
    if seen
    else None
  )
  earlier: dict[tuple[str, str], int] = {}

  def look(number: int, place: str, source: str, target: str) -> None:
    first = earlier.setdefault((source, target), number)
    if first != number:
      duplicate(f"{place}: the same pair as {pairs.where(first)}")
    if seen and overlaps:
      for add, at in zip(overlaps, (seen.source(source), seen.pair(source, target)), strict=True):
        if at is not None:
          add(f"{place}: also {at}")

  return look


def listing(pieces: Iterable[str], most: int = 5) -> str:
  """The first different pieces as text, and how many more there are."""
  counts = collections.Counter(pieces)
  shown = ", ".join(repr(piece) for piece in list(counts)[:most])
  return shown + (f" and {len(counts) - most} more" if len(counts) > most else "")


def check_splits(
  load: Callable[[str], Pairs],
  splits: Sequence[str],
  tokenizers: Callable[[Pairs], Tokenizers],
  limits: Limits = Limits(),
  published: Mapping[str, int] = MappingProxyType({}),
) -> list[SplitReport]:
  """Checks every split; files whose content is wrong are an error of their split.

  Args:
    load: name of a split -> its pairs.
    splits: their names, "train" first.
    tokenizers: training pairs -> tokenizers for source and target.
    limits: what is remarkable.
    published: name of a split -> pairs of the published one, as far as that is known.

  Raises:
    UserError: a split cannot be found at all, or no tokenizer can be trained.
  """
  reports, seen, trained = [], None, None
  for split in splits:
    try:
      pairs = load(split)
    except DataError as error:
      unreadable = Finding("unreadable", "error", 1, [str(error)])
      reports.append(SplitReport(split, findings={"unreadable": unreadable}))
      continue
    if split == "train":
      trained = tokenizers(pairs)
    report = check_pairs(split, pairs, trained, limits, seen)
    reports.append(dataclasses.replace(report, published=published.get(split)))
    if split == "train":
      seen = Seen(pairs)
  return reports


def summary(reports: Sequence[SplitReport]) -> list[str]:
  """A table of the counts, one line a split; beside them those of published splits."""
  kinds = list(dict.fromkeys(kind for report in reports for kind in report.findings))
  known = any(report.published is not None for report in reports)
  counts = [reports[0].noun if reports else "pairs", *(["published"] if known else [])]
  rows = [["split", *counts, "mean length", "longest", *kinds]]
  for report in reports:
    found = (report.findings.get(kind) for kind in kinds)
    rows.append(
      [
        report.split,
        str(report.pairs),
        *(["-" if report.published is None else str(report.published)] if known else []),
        "/".join(f"{mean:.1f}" for mean in report.mean) + f" {report.unit}",
        "/".join(map(str, report.longest)),
        *("-" if one is None else str(one.count) for one in found),
      ]
    )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
  ]


def details(reports: Sequence[SplitReport]) -> list[str]:
  """Every finding with its first places."""
  lines = []
  for report in reports:
    for found in report.findings.values():
      if found.count:
        lines.append(f"{found.level}: {report.split}: {found.kind}: {found.count}")
        lines += [f"  {place}" for place in found.places]
        if found.count > len(found.places):
          lines.append(f"  and {found.count - len(found.places)} more")
  return lines
