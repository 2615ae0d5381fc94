r"""PCFG SET: string edits in each other, `append swap_first_last F G H , repeat I J`.

    S -> unary S | binary S , S | X            X -> two to five symbols of A1 to Z20
    unary -> copy | reverse | shift | echo | swap_first_last | repeat
    binary -> append | prepend | remove_first | remove_second

Every sentence has a function; there are no brackets, and none are needed. The probabilities of the
published sentences were fitted to English and are not published; these give as many functions a
sentence: more than eight in about one of eight.

Source: Hupkes et al. 2020, "Compositionality Decomposed: How do Neural Networks Generalise?".
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.base import DataError, Pairs
from compmod_jax.data.sources.text import TextData, expand_folder
from compmod_jax.data.synthetic import pcfg_set_steps
from compmod_jax.data.synthetic.parts import Draw, Example, PartedData

Symbols = list[str]

UNARY: Mapping[str, Callable[[Symbols], Symbols]] = {
  "copy": lambda x: x,
  "reverse": lambda x: x[::-1],
  "shift": lambda x: [*x[1:], x[0]],
  "echo": lambda x: [*x, x[-1]],
  "swap_first_last": lambda x: [x[-1], *x[1:-1], x[0]],
  "repeat": lambda x: x + x,
}
BINARY: Mapping[str, Callable[[Symbols, Symbols], Symbols]] = {
  "append": lambda x, y: x + y,
  "prepend": lambda x, y: y + x,
  "remove_first": lambda x, y: y,
  "remove_second": lambda x, y: x,
}
SYMBOLS = tuple(f"{letter}{n}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for n in range(1, 21))
PAIRS = (
  ("swap_first_last", "repeat"),
  ("append", "remove_second"),
  ("repeat", "remove_second"),
  ("append", "swap_first_last"),
)
"""Functions that never follow each other in training with the split `systematicity`."""
_UNARY, _BELOW_UNARY, _BELOW_BINARY = (
  0.6,
  0.75,
  0.4,
)  # probabilities of a unary, and of any function
_FEWEST, _MOST = 2, 5  # symbols of a string

SplitName = Literal["iid", "systematicity", "productivity"]
_BETWEEN = f" {pcfg_set_steps.SEPARATOR} "  # sentences that are joined
_FOLDERS: Mapping[str, str] = {"iid": "pcfgset"}  # of the published files, where it is not the name


def count_functions(source: str) -> int:
  """How many functions a sentence has."""
  return sum(word in UNARY or word in BINARY for word in source.split())


def held_out_pair(source: str) -> str:
  """The pair of `PAIRS` that a sentence has, `several` where it has more than one, or `none`."""
  words = source.split()
  found = sorted(set(itertools.pairwise(words)) & set(PAIRS))
  return "several" if len(found) > 1 else " ".join(found[0]) if found else "none"


@dataclasses.dataclass(frozen=True)
class PcfgSetData(PartedData):
  """Sentences of string edits and the strings that they give.

  Splits: `iid`; `systematicity`, whose training sentences lack four pairs of functions next to each
  other (`PAIRS`) and whose test sentences have one of them; `productivity`, with up to eight
  functions in training and more in the test. With the last two, `valid` and `iid` are parts from
  the distribution of training. The published splits train on 82, 82 and 81 thousand sentences and
  test on 10, 10 and 11 thousand.

  Raises:
    UserError: a size is too small, or the split is unknown.
  """

  name: ClassVar[str] = "pcfg_set"
  source_language = "edits"
  target_language = "strings"

  train: int = 82_000
  """training sentences"""
  split: SplitName = "iid"
  """what training lacks"""
  functions: int = 8
  """productivity: most functions of a training sentence"""
  longest: int = 128
  """most words of a sentence, and symbols of its string"""
  scratchpad: bool = False
  """targets say every step to the string, for which words are numbered; see `pcfg_set_steps`"""
  joined: int = 0
  """training examples are sentences one behind the other, `;` between them, of which the first is
  asked for: as many as have at most so many functions together, a number that is drawn from 1 to
  this one for each. 0: one sentence each. With a scratchpad alone"""
  folder: str = ""
  """where the published folders pcfgset, systematicity and productivity are, with train, dev and
  test as .src and .tgt, plain or gzipped; may start with an environment variable. All splits have
  the validation part of pcfgset. Empty: sentences are generated"""

  def __post_init__(self) -> None:
    super().__post_init__()
    check_choice("split", self.split, ("iid", "systematicity", "productivity"))
    check(1 <= self.functions <= 8, f"functions is {self.functions}; it must be 1 to 8.")
    check(
      32 <= self.longest <= 1024,
      f"longest is {self.longest}; it must be 32, to leave room for nine functions, to 1,024.",
    )
    check_least(self, joined=0)
    check(
      self.scratchpad or not self.joined,
      f"joined is {self.joined}, but scratchpad is off: only steps have sentences that are joined. "
      "Set scratchpad, or joined to 0.",
    )

  def sentence(self, chance: random.Random) -> Example:
    """A sentence of at least one function, as the grammar draws it."""
    while True:
      words, value = _function(chance)
      if max(len(words), len(value)) <= self.longest:
        source = " ".join(words)
        return Example(source, " ".join(value), self._info(source))

  def _info(self, source: str) -> Mapping[str, int | str]:
    info: dict[str, int | str] = {"functions": count_functions(source)}
    return info | {"pair": held_out_pair(source)} if self.split == "systematicity" else info

  def _new(self, example: Example) -> bool:
    """Whether training lacks what is in a sentence."""
    if self.split == "systematicity":
      return example.info["pair"] != "none"
    return self.split == "productivity" and int(example.info["functions"]) > self.functions

  def parts(self) -> Mapping[str, Sequence[Example]]:
    """See `PartedData`."""

    def drawn(new: bool) -> Draw:
      def draw(chance: random.Random) -> Example:
        while self._new(example := self.sentence(chance)) != new:
          pass
        return example

      return draw

    others = {} if self.split == "iid" else {"iid": drawn(False)}
    test = drawn(self.split != "iid")
    parts = self.draw(train=drawn(False), valid=drawn(False), test=test, **others)
    if not self.scratchpad:
      return parts
    groups = self._groups([int(one.info["functions"]) for one in parts["train"]])
    parts["train"] = [
      parts["train"][group.start]._replace(
        source=_BETWEEN.join(one.source for one in parts["train"][group.start : group.stop])
      )
      for group in groups
    ]
    return self.rewritten(parts, _with_steps)

  def _groups(self, functions: Sequence[int]) -> list[range]:
    """Which training sentences, of so many functions, are joined."""
    chance = random.Random(f"{self.seed} {self.name} joined")
    ends, total, most = list[int](), 0, 0
    for number, count in enumerate(functions):
      total += count
      if total > most:
        total, most = count, chance.randint(1, max(1, self.joined))
        ends.append(number)
    return [range(*pair) for pair in itertools.pairwise([*ends, len(functions)])]

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    iid = self.split == "iid" or self.folder
    return ("train", "valid", "test") if iid else ("train", "valid", "test", "iid")

  def load(self, split: str) -> Pairs:
    """The pairs of a part; `info` has the number of `functions`, and with the split systematicity
    the `pair` that training lacks.

    Raises:
      UserError: unknown part, no such files, or fewer sentences than asked for.
      DataError: a file is damaged.
    """
    if not self.folder:
      return super().load(split)
    check_choice("split", split, self.splits())
    name = "iid" if split == "valid" else self.split
    folder = expand_folder(self.folder) / _FOLDERS.get(name, name)
    pairs = _files(folder).load(split)
    pairs = dataclasses.replace(pairs, info=[self._info(source) for source in pairs.source])
    return self._files_with_steps(split, pairs) if self.scratchpad else pairs

  def _files_with_steps(self, split: str, pairs: Pairs) -> Pairs:
    """Pairs of files with numbers and steps, which must end with the strings of the files."""
    groups = [range(n, n + 1) for n in range(len(pairs))]
    if split == "train":
      groups = self._groups([count_functions(source) for source in pairs.source])
    chance = random.Random(f"{self.seed} {self.name} {split} rewritten")
    found = []
    for group in groups:
      source, target = _BETWEEN.join(pairs.source[n] for n in group), pairs.target[group.start]
      where = pairs.where(group.start)
      try:
        found.append(_with_steps(chance, Example(source, target, {})))
      except ValueError as error:
        raise DataError(f"{where}: {source!r} is no sentence of PCFG SET: {error}.") from None
      string = " ".join(pcfg_set_steps.answer(found[-1].target.split()))
      if string != " ".join(target.split()):
        raise DataError(f"{where}: the string of {source!r} is {string!r}, not {target!r}.")
    pairs = pairs.select([group.start for group in groups])
    return dataclasses.replace(
      pairs, source=[one.source for one in found], target=[one.target for one in found]
    )


def _with_steps(chance: random.Random, example: Example) -> Example:
  """A sentence with numbers, of which the first is drawn, and the steps to its string."""
  words = example.source.split()
  number = chance.randrange(pcfg_set_steps.NUMBERS)
  source = pcfg_set_steps.numbered_source(words, number)
  target = pcfg_set_steps.steps(words, number)
  return example._replace(source=" ".join(source), target=" ".join(target))


def _files(folder: Path) -> TextData:
  return TextData(
    folder=str(folder),
    source_language="src",
    target_language="tgt",
    valid="dev",
    metric="exact_match",
  )


def _function(chance: random.Random) -> tuple[list[str], Symbols]:
  """The words of a function with its arguments, and the string that it gives."""
  if chance.random() < _UNARY:
    name = chance.choice(sorted(UNARY))
    words, value = _argument(chance, _BELOW_UNARY)
    return [name, *words], UNARY[name](value)
  name = chance.choice(sorted(BINARY))
  (first, left), (second, right) = (_argument(chance, _BELOW_BINARY) for _ in range(2))
  return [name, *first, ",", *second], BINARY[name](left, right)


def _argument(chance: random.Random, nested: float) -> tuple[list[str], Symbols]:
  if chance.random() < nested:
    return _function(chance)
  string = [chance.choice(SYMBOLS) for _ in range(chance.randint(_FEWEST, _MOST))]
  return string, string
