"""Minimal pairs: a grammatical sentence and one that differs from it in what makes it wrong.

Formats: Gulordava et al.'s agreement items (`generated.tab`), Linzen et al.'s (tab-separated, with
`orig_sentence` and `verb_index`), BLiMP's JSON lines, and the grammar's `attractor` split.
"""

import contextlib
import csv
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from compmod_jax.core.errors import check_choice
from compmod_jax.core.untrusted import parse_json
from compmod_jax.data.base import DataError
from compmod_jax.data.sources.text import expand_folder, read_lines
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.data.tokenizers.vocabulary import NUMBER, NUMBER_WORD


@dataclasses.dataclass(frozen=True)
class MinimalPair:
  """A sentence that should be more probable than another.

  Attributes:
    good: the grammatical one.
    bad: the ungrammatical one.
    group: what they are about, for example a construction or the number of attractors.
    where: where the pair stands, such as `generated.tab:3`.
    whole: whether sentences end; else both are beginnings, whose ends are not scored.
    label: 1 if the subject is plural, 0 if it is singular, None if that is not known.
  """

  good: str
  bad: str
  group: str
  where: str
  whole: bool = True
  label: float | None = None


def _table(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
  """Rows of a tab-separated file with headings, and their line numbers; blank lines are left out.

  Raises:
    DataError: a heading is missing, or a row has more or fewer columns than there are headings.
  """
  lines = read_lines(path)
  heads = _columns(lines[0])
  missing = [name for name in needed if name not in heads]
  if missing:
    raise DataError(f"{path}:1 has no column {', '.join(missing)}; it is in another format.")
  for number, line in enumerate(lines[1:], start=2):
    columns = _columns(line)
    if len(columns) == len(heads):
      yield number, dict(zip(heads, columns, strict=True))
    elif line.strip():
      raise DataError(
        f"{path}:{number} has {len(columns)} tab-separated columns for {len(heads)} headings; mend"
        " the line."
      )


def _columns(line: str) -> list[str]:
  """The columns of a line, without the quotes that a program may have put around them."""
  line = line.removesuffix("\r")
  if '"' in line:
    # By itself: in a whole file, a quote that opens a column and is a word there would swallow all
    # lines to the next one.
    with contextlib.suppress(csv.Error):
      return next(csv.reader([line], delimiter="\t", strict=True))
  return line.split("\t")


def gulordava(path: Path) -> list[MinimalPair]:
  """Items of Gulordava et al. 2018: the verb's right and wrong form after a beginning.

  Groups are `original` or `generated` (nonsense) and the number of attractors.

  Raises:
    DataError: the file is in another format, or a form has no partner.
  """
  needed = ("pattern", "constr_id", "sent_id", "form", "class", "type", "prefix", "n_attr")
  held: dict[tuple[str, ...], tuple[int, dict[str, str]]] = {}
  pairs = []
  for line, row in _table(path, needed):
    key = (row["pattern"], row["constr_id"], row["sent_id"])
    if key not in held:
      held[key] = (line, row)
      continue
    first, other = held.pop(key)
    by_class = {row["class"]: row, other["class"]: other}
    if set(by_class) != {"correct", "wrong"}:
      raise DataError(f"{path}:{line}: a right and a wrong form must stand together.")
    good, bad = (f"{row['prefix']} {by_class[c]['form']}" for c in ("correct", "wrong"))
    group = f"{row['type']}, {row['n_attr']} attractors"
    pairs.append(MinimalPair(good, bad, group, f"{path.name}:{first}", whole=False))
  if held:
    line = min(line for line, _ in held.values())
    raise DataError(f"{path}:{line}: this form has no partner; the file is cut off.")
  return pairs


_DIGITS = 9  # of a number that a column may hold


def linzen(path: Path) -> list[MinimalPair]:
  """Items of Linzen et al. 2016: beginnings up to a present-tense verb, and its other number.

  Groups are the numbers of attractors between subject and verb.

  Raises:
    DataError: the file is in another format.
  """
  needed = ("orig_sentence", "verb_index", "verb_pos", "n_diff_intervening")
  pairs = []
  for line, row in _table(path, needed):
    words = row["orig_sentence"].split()
    index = row["verb_index"].strip()
    place = int(index) if index.isdecimal() and len(index) <= _DIGITS else 0
    if not 1 <= place <= len(words):
      raise DataError(
        f"{path}:{line}: verb_index is {index[:40]!r} and names none of the sentence's {len(words)}"
        " words, counted from 1; mend the line."
      )
    verb, before = words[place - 1], " ".join(words[: place - 1])
    other = other_number(verb, row["verb_pos"])
    group = f"{row['n_diff_intervening']} attractors"
    where = f"{path.name}:{line}"
    pairs.append(MinimalPair(f"{before} {verb}", f"{before} {other}", group, where, whole=False))
  return pairs


_IRREGULAR = {"is": "are", "has": "have", "does": "do", "goes": "go", "was": "were"}


def other_number(verb: str, tag: str) -> str:
  """The form of an English present-tense verb for subjects of the other number.

  Args:
    verb: the form.
    tag: its Penn Treebank tag, VBZ (singular) or VBP (plural).
  """
  if tag == "VBZ":
    if verb in _IRREGULAR:
      return _IRREGULAR[verb]
    if re.search(r"[^aeiou]ies$", verb) and len(verb) > 4:
      return verb[:-3] + "y"
    return verb[:-2] if re.search(r"(ss|sh|ch|x|zz|o)es$", verb) else verb.removesuffix("s")
  plural = {theirs: ours for ours, theirs in _IRREGULAR.items()}
  if verb in plural:
    return plural[verb]
  if re.search(r"[^aeiou]y$", verb):
    return verb[:-1] + "ies"
  return verb + ("es" if re.search(r"(s|sh|ch|x|z|o)$", verb) else "s")


_BLIMP = ("sentence_good", "sentence_bad", "UID")


def blimp(path: Path) -> list[MinimalPair]:
  """BLiMP (Warstadt et al. 2020): whole sentences; groups are its 67 paradigms.

  Raises:
    DataError: a line is no JSON object with the fields of BLiMP.
  """
  pairs = []
  for number, line in enumerate(read_lines(path), start=1):
    if not line.strip():
      continue
    try:
      row = parse_json(line, surrogates=False)
    except ValueError as error:
      raise DataError(f"{path}:{number} is no JSON ({error}); mend the line.") from error
    fields: list[Any] = [row.get(name) if isinstance(row, dict) else None for name in _BLIMP]
    if not all(isinstance(field, str) for field in fields):
      raise DataError(
        f"{path}:{number} is no item of BLiMP; it needs {', '.join(_BLIMP)}, each of them text."
      )
    pairs.append(MinimalPair(*fields, where=f"{path.name}:{number}"))
  return pairs


def attractors(data: GrammarData) -> list[MinimalPair]:
  """The grammar's `attractor` split: each English sentence and its ungrammatical twin."""
  pairs = data.load("attractor")
  english = pairs.source if data.source_language == "en" else pairs.target
  found: Sequence[Any] = pairs.info or ()
  return [
    MinimalPair(
      good,
      info["ungrammatical"],
      f"{info['attractors']} attractors",
      pairs.where(i),
      label=float(info["number"] == "pl"),
    )
    for i, (good, info) in enumerate(zip(english, found, strict=True))
  ]


FORMATS: dict[str, Callable[[Path], list[MinimalPair]]] = {
  "gulordava": gulordava,
  "linzen": linzen,
  "blimp": blimp,
}


def read_minimal_pairs(kind: str, path: str) -> list[MinimalPair]:
  """The pairs of a file in one of `FORMATS`.

  Args:
    kind: name of the format.
    path: of the file; may start with an environment variable.

  Raises:
    UserError: an unknown format, or a file that cannot be read.
    DataError: its content is wrong, or there are no pairs.
  """
  check_choice("format", kind, FORMATS)
  folder, _, name = path.rpartition("/")
  pairs = FORMATS[kind]((expand_folder(folder) if folder else Path()) / name)
  if not pairs:
    raise DataError(f"{path} has no pairs, nothing after its headings; fetch it again.")
  return pairs


_WORD = rf"n't|'(?:s|re|ve|ll|d|m)\b|{NUMBER.pattern}(?!\w)|\w+(?:[-.]\w+)*|[^\w\s]"
_CONTRACTIONS = (
  (re.compile(r"(?<=\w)n[’']t\b"), " n't"),
  (re.compile(r"(?<=\w)[’'](s|re|ve|ll|d|m)\b"), r" '\1"),
)


def treebank_style(texts: Iterable[str], tokenizer: Tokenizer) -> list[str]:
  """Sentences as the Penn Treebank language modelling set writes them.

  Lower case, contractions apart, numbers as N, and no punctuation mark that the model does not
  know.

  Args:
    texts: as people write them, or split already.
    tokenizer: the model's.
  """

  @functools.cache
  def known(mark: str) -> bool:
    return tokenizer.unk not in tokenizer.encode(mark)

  def restyled(text: str) -> str:
    text = text.lower().replace(" n’t", " n't")
    for pattern, replacement in _CONTRACTIONS:
      text = pattern.sub(replacement, text)
    words = re.findall(_WORD, text)
    words = [NUMBER_WORD if NUMBER.fullmatch(word) else word for word in words]
    return " ".join(word for word in words if re.search(r"\w", word) or known(word))

  return [restyled(text) for text in texts]
