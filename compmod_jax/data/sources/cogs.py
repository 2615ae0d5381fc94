"""COGS: English sentences and their logical forms, from the published files.

    The sailor dusted a boy .
    * sailor ( x _ 1 ) ; dust . agent ( x _ 2 , x _ 1 ) AND dust . theme ( x _ 2 , x _ 4 ) AND ...

Source: Kim and Linzen 2020, "COGS: A Compositional Generalization Challenge Based on Semantic
Interpretation".
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from compmod_jax.core.errors import check, check_choice, short
from compmod_jax.data.base import DataError, Pairs
from compmod_jax.data.sources.text import expand_folder, find_file, read_lines

_FILES = {"train": "train", "valid": "dev", "test": "test", "gen": "gen"}
_PUBLISHED = {"train": 24_155, "valid": 3_000, "test": 3_000, "gen": 21_000}
_PUBLISHED_EXPOSED = 39_500
_ROLES = ("agent", "theme", "recipient", "nmod")
_PRIMITIVE = "primitive"  # the category of words that stand alone
# A noun is held out in one role if training has it so often in each, and in so few sentences.
_LEAST, _SHARE = 10, 0.02
_RECURSION = 1  # the depth up to which training goes where deeper sentences are held out


class Role(NamedTuple):
  """What a noun is in a sentence: `agent`, `theme`, `recipient`, or `nmod` behind a preposition."""

  noun: str
  role: str
  proper: bool


class Form(NamedTuple):
  """What a logical form says that sentences are divided by.

  Attributes:
    roles: of its nouns.
    prepositions: prepositional phrases in each other, at most.
    clauses: clauses with `that` in each other, at most.
  """

  roles: tuple[Role, ...]
  prepositions: int
  clauses: int


_TERM = re.compile(r"(?:\* )?(\S+(?: \. \S+)*) \( ([^()]+) \)")


def read_form(form: str) -> Form:
  """Roles and depths of a logical form of a sentence.

  Raises:
    DataError: the text is no such form.
  """
  terms = [_TERM.fullmatch(term) for term in re.split(" ; | AND ", form)]
  if None in terms:
    raise DataError(f"{short(form)} is not a logical form as COGS has them.")
  split = [(one[1].split(" . "), one[2].split(" , ")) for one in terms if one]
  nouns = {arguments[0]: name[0] for name, arguments in split if len(arguments) == 1}
  roles = []
  inside: dict[str, list[tuple[str, str]]] = {"nmod": [], "ccomp": []}
  for name, arguments in split:
    if len(name) == 1 or len(arguments) != 2:
      continue
    relation, (head, argument) = name[1], arguments
    if relation in inside:
      inside[relation].append((head, argument))
    if relation in _ROLES:
      noun = nouns.get(argument, argument)
      roles.append(Role(noun, relation, argument not in nouns))
  return Form(tuple(roles), *(_longest(edges) for edges in inside.values()))


def _longest(edges: Iterable[tuple[str, str]]) -> int:
  """Edges of the longest path of a forest; the edges of a path come in its order."""
  depths: dict[str, int] = {}
  for head, argument in edges:
    depths[argument] = depths.get(head, 0) + 1
  return max(depths.values(), default=0)


class Line(NamedTuple):
  """A line of a file: a sentence, its logical form and its category."""

  sentence: str
  form: str
  category: str


def kept_roles(forms: Collection[Form]) -> dict[str, str]:
  """The nouns that are held out in all roles but one, and that role, `agent` or `theme`.

  Of the common nouns that are agents ten times and themes ten times or more, and stand in two per
  cent of the sentences at most, every other one in alphabetical order is kept as an agent and the
  others as themes; so with names.

  Args:
    forms: of the sentences of training.
  """
  counts = collections.Counter(role for form in forms for role in set(form.roles))
  kept: dict[str, str] = {}
  for proper in (False, True):
    nouns = sorted({one.noun for one in counts if one.proper is proper})
    chosen = []
    for noun in nouns:
      found = {role: counts[Role(noun, role, proper)] for role in _ROLES}
      if min(found["agent"], found["theme"]) >= _LEAST and (
        sum(found.values()) <= _SHARE * len(forms)
      ):
        chosen.append(noun)
    kept |= {noun: ("agent", "theme")[number % 2] for number, noun in enumerate(chosen)}
  return kept


def held_out_for(form: Form, kept: Mapping[str, str]) -> set[str]:
  """Why training lacks a sentence, such as `agent_to_theme_common` or `pp_recursion`.

  Args:
    form: its logical form.
    kept: see `kept_roles`.

  Returns:
    Nothing where training has it.
  """
  found = {
    f"{kept[one.noun]}_to_{one.role}_{'proper' if one.proper else 'common'}"
    for one in form.roles
    if kept.get(one.noun, one.role) != one.role
  }
  if form.prepositions > _RECURSION:
    found.add("pp_recursion")
  if form.clauses > _RECURSION:
    found.add("cp_recursion")
  return found


@dataclasses.dataclass(frozen=True)
class CogsData:
  """Sentences (source) and logical forms (target), scored by exact match and by category.

  With `gen = "published"`, the parts are those of the published files: `train`, `valid` (dev.tsv),
  `test`, both from the distribution of training, and `gen`, new combinations of what training has,
  whose categories are 18 of words in new roles and 3 of structure.

  With `gen = "held_out"`, where there is no file of `gen`, such sentences are taken out of
  training, and are the part `held_out`: those in which some nouns have another role than the one
  that training keeps (`kept_roles`; categories `agent_to_theme_common` and so on), and those with
  prepositional phrases or clauses one level deeper than the deepest that training keeps
  (`pp_recursion`, `cp_recursion`). Sentences of two categories are in no part, nor are those with a
  word that training lacks then; those of any category are not in `valid` and `test`. Scores of this
  part do not compare with those of `gen`: training has
  the nouns far more often than the published one, and recursion is one level deeper, not ten.

  The validation part is from the distribution of training: there is no other one (Csordas et al.
  2021 on what it tells).
  """

  folder: str = ""
  """Where train.tsv, dev.tsv, test.tsv and gen.tsv are, plain or gzipped; may start with an
  environment variable, as in `$COMPMOD_DATA/cogs`."""
  exposures: Literal[1, 100] = 1
  """Training sentences for each word that `gen` has in another role: 100 reads train_100.tsv."""
  gen: Literal["published", "held_out"] = "published"
  """What generalisation is scored on: the file gen.tsv, or sentences held out of training."""

  source_language = "sentences"
  target_language = "forms"
  metric = "exact_match"

  def __post_init__(self) -> None:
    check(
      self.exposures in (1, 100),
      f"exposures is {self.exposures}; there are files of 1 and of 100: choose one of these.",
    )
    check_choice("gen", self.gen, ("published", "held_out"))

  @property
  def published_counts(self) -> Mapping[str, int]:
    """Part -> pairs of the published file; none where parts are made of it."""
    if self.gen == "held_out":
      return {}
    return _PUBLISHED | ({"train": _PUBLISHED_EXPOSED} if self.exposures == 100 else {})

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return ("train", "valid", "test", "gen" if self.gen == "published" else "held_out")

  def load(self, split: str) -> Pairs:
    """The pairs of a part; `info` has their `category`.

    Raises:
      UserError: unknown part, no folder, or no file of the part.
      DataError: a file is damaged or has lines of another form.
    """
    check_choice("split", split, self.splits())
    path = self._path("train" if split == "held_out" else split)
    lines = read_table(path)
    chosen = {number: line.category for number, line in enumerate(lines)}
    if self.gen == "held_out":
      chosen = self._divided(split, path, lines)
    return Pairs(
      source=[lines[number].sentence for number in chosen],
      target=[lines[number].form for number in chosen],
      where=_places(path.name, list(chosen)),
      info=[{"category": category} for category in chosen.values()],
      metric="exact_match",
    )

  def _divided(self, split: str, path: Path, lines: Sequence[Line]) -> dict[int, str]:
    """Number of a line -> its category, of the lines of a part where some are held out."""
    train = lines if split in ("train", "held_out") else read_table(self._path("train"))
    forms = _forms(self._path("train"), train)
    kept = kept_roles(forms.values())
    trained = [
      number
      for number in range(len(train))
      if number not in forms or not held_out_for(forms[number], kept)
    ]
    if split == "train":
      return {number: train[number].category for number in trained}
    words = {word for number in trained for word in train[number].sentence.split()}
    found = {}
    for number, form in _forms(path, lines).items():
      line, why = lines[number], held_out_for(form, kept)
      if len(why) == (split == "held_out") and words.issuperset(line.sentence.split()):
        found[number] = min(why, default=line.category)
    return found

  def _path(self, part: str) -> Path:
    """The file of a part.

    Raises:
      UserError: there is no folder, or no such file.
    """
    check(
      self.folder,
      "folder is empty; COGS is read from its published files: set task.data.folder to the folder"
      " with train.tsv, dev.tsv, test.tsv and gen.tsv.",
    )
    name = _FILES[part] + ("_100" if part == "train" and self.exposures == 100 else "")
    fields = {"gen": "gen to 'held_out', or folder", "train": "folder and exposures"}
    return find_file(expand_folder(self.folder), f"{name}.tsv", fields.get(part, "folder"))


def _places(name: str, numbers: list[int]) -> Callable[[int], str]:
  return lambda i: f"{name}:{numbers[i] + 1}"


def read_table(path: Path) -> list[Line]:
  """The lines of a published file: sentence, logical form and category between tabs.

  Raises:
    DataError: the file is empty or damaged, or a line has other columns.
    UserError: it cannot be read.
  """
  lines = []
  for number, text in enumerate(read_lines(path), start=1):
    columns = text.rstrip("\r").split("\t")
    if len(columns) != len(Line._fields):
      raise DataError(
        f"{path}:{number} has {len(columns)} columns between tabs; it must have three, sentence,"
        " logical form and category: mend the line, or fetch the file again."
      )
    lines.append(Line(*(column.strip() for column in columns)))
  return lines


def _forms(path: Path, lines: Sequence[Line]) -> dict[int, Form]:
  """Number of a line -> its form, of all that are sentences and not single words."""
  forms = {}
  for number, line in enumerate(lines):
    if line.category != _PRIMITIVE:
      try:
        forms[number] = read_form(line.form)
      except DataError as error:
        raise DataError(f"{path}:{number + 1}: {error} Fetch the file again.") from error
  return forms
