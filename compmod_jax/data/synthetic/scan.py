r"""SCAN: navigation commands and the actions they stand for, generated from the published grammar.

The grammar (C is the start symbol):

    C -> S and S | S after S | S
    S -> V twice | V thrice | V
    V -> D opposite LR | D around LR | D LR | U          D -> U | turn
    U -> walk | look | run | jump                        LR -> left | right

It derives 20,910 commands, each in one way. Source: Lake and Baroni 2018, "Generalization without
systematicity", supplement; template splits: Loula, Baroni and Lake 2018; length at other cuts:
Newman et al. 2020; splits of maximum compound divergence: Keysers et al. 2020; added primitives:
Jiang et al. 2022, "Mutual Exclusivity Training and Primitive Augmentation"; labels of progress:
Jiang and Bansal 2021, "Inducing Transformer's Compositional Generalization Ability via Auxiliary
Sequence Prediction Tasks".
"""

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, overload

from compmod_jax.core.errors import check, check_choice, short
from compmod_jax.data.base import DataError, Pairs
from compmod_jax.data.divergence import Derivation, Measure, divergent_split
from compmod_jax.data.sources.text import expand_folder, find_file, read_lines

SplitName = Literal[
  "simple",
  "length",
  "addprim_jump",
  "addprim_turn_left",
  "template_right",
  "template_opposite_right",
  "template_around_right",
  "template_jump_around_right",
  "mcd1",
  "mcd2",
  "mcd3",
]
SPLITS: tuple[str, ...] = SplitName.__args__  # type: ignore[attr-defined]
Command = tuple[str, str]  # the command and its actions, both of words separated by blanks

CUTS = (22, 24, 25, 26, 27, 28, 30, 32, 33, 36, 40)
"""Lengths at which the split `length` may be cut: of those that outputs have, 22 is the published
one."""
_PRIMITIVES = ("walk", "look", "run", "jump")
_DIRECTIONS = ("left", "right")
_SIMPLE_TRAIN = 16_728
_MCD_TRAIN, _MCD_SCORED = (
  8_365,
  1_045,
)  # the published sizes; as many for validation as for the test
# How often the published training parts say the bare primitive: about a tenth of all lines.
_REPEATED = {"addprim_jump": ("jump", 1_467), "addprim_turn_left": ("turn left", 2_189)}
_MOST_COPIES = 1_000
_PUBLISHED = {
  "simple": (_SIMPLE_TRAIN, 4_182),
  "length": (16_990, 3_920),
  "addprim_jump": (14_670, 7_706),
  "addprim_turn_left": (21_890, 1_208),
  "template_right": (15_225, 4_476),
  "template_opposite_right": (15_225, 4_476),
  "template_around_right": (15_225, 4_476),
  "template_jump_around_right": (18_528, 1_173),
}


def interpret(command: str) -> list[str]:
  """The actions that a SCAN command stands for.

  Args:
    command: words separated by blanks, such as `jump opposite left after walk twice`.

  Returns:
    Actions in order, such as `["I_WALK", "I_WALK", "I_TURN_LEFT", "I_TURN_LEFT", "I_JUMP"]`.

  Raises:
    UserError: SCAN's grammar does not derive the command.
  """
  actions = _commands().get(command)
  check(
    actions is not None,
    f"The command {command!r} is not one of SCAN's 20,910; use its words in the order that its"
    " grammar gives, separated by single blanks.",
  )
  return str(actions).split()


@functools.cache
def _commands() -> dict[str, str]:
  """All commands with their actions, in the order of the grammar."""
  phrases = [
    (f"{words}{suffix}", actions * times)
    for words, actions in _verb_phrases()
    for suffix, times in (("", 1), (" twice", 2), (" thrice", 3))
  ]
  texts = [(words, " ".join(actions)) for words, actions in phrases]
  commands = dict(texts)
  for first, first_actions in texts:
    for second, second_actions in texts:
      commands[f"{first} and {second}"] = f"{first_actions} {second_actions}"
      commands[f"{first} after {second}"] = f"{second_actions} {first_actions}"
  return commands


def _verb_phrases() -> list[tuple[str, list[str]]]:
  """The 34 derivations of V: `turn` adds no action of its own to the turns around it."""
  phrases = [(primitive, [f"I_{primitive.upper()}"]) for primitive in _PRIMITIVES]
  for verb in (*_PRIMITIVES, "turn"):
    own = [] if verb == "turn" else [f"I_{verb.upper()}"]
    for direction in _DIRECTIONS:
      turn = [f"I_TURN_{direction.upper()}"]
      phrases += [
        (f"{verb} {direction}", turn + own),
        (f"{verb} opposite {direction}", turn * 2 + own),
        (f"{verb} around {direction}", (turn + own) * 4),
      ]
  return phrases


def _simple(seed: int) -> tuple[list[Command], list[Command]]:
  """A random four fifths for training; `random` keeps its stream over Python versions."""
  commands = list(_commands().items())
  generator = random.Random(seed)
  commands.sort(key=lambda command: (generator.random(), command))
  return commands[:_SIMPLE_TRAIN], commands[_SIMPLE_TRAIN:]


def _length(cut: int) -> tuple[list[Command], list[Command]]:
  short: list[Command] = []
  long: list[Command] = []
  for command in _commands().items():
    (short if len(command[1].split()) <= cut else long).append(command)
  return short, long


def _addprim(split: str) -> tuple[list[Command], list[Command]]:
  """Training knows the primitive alone, repeated; every longer command with it is in the test."""
  primitive, repeats = _REPEATED[split]
  train: list[Command] = []
  test: list[Command] = []
  for command in _commands().items():
    if command[0] == primitive:
      train += [command] * repeats
    elif primitive in command[0]:
      test.append(command)
    else:
      train.append(command)
  return train, test


def _template(split: str) -> tuple[list[Command], list[Command]]:
  """Training lacks the template; commands where `turn` fills it are in neither part.

  `jump around right` is one filler of one template: the other fillers are trained.
  """
  template = split.removeprefix("template_").replace("_", " ")
  held_out = (
    [template] if template.startswith("jump") else [f"{verb} {template}" for verb in _PRIMITIVES]
  )
  turned = f"turn {template.removeprefix('jump ')}"
  train: list[Command] = []
  test: list[Command] = []
  for command in _commands().items():
    if turned in command[0]:
      continue
    (test if any(phrase in command[0] for phrase in held_out) else train).append(command)
  return train, test


def _actions(command: Command) -> int:
  """How many actions a command has."""
  return len(command[1].split())


def derive(command: str) -> Derivation:
  """The rules that derive a command, named by what they write, such as `D around LR`.

  Rules that write no word of their own (C -> S, S -> V, V -> U) are left out, as the others imply
  them: `jump around left twice` is `V twice` over `D around LR` over `jump` and `left`.

  Raises:
    UserError: SCAN's grammar does not derive the command.
  """
  interpret(command)
  return _derived(*command.split())


@functools.cache
def _derived(*words: str) -> Derivation:
  for connective in ("and", "after"):
    if connective in words:
      place = words.index(connective)
      parts = _derived(*words[:place]), _derived(*words[place + 1 :])
      return Derivation(f"S {connective} S", parts)
  match words:
    case [*verb, "twice" | "thrice" as times]:
      return Derivation(f"V {times}", (_derived(*verb),))
    case [verb, *how, direction]:
      rule = " ".join(["D", *how, "LR"])
      return Derivation(rule, (Derivation(verb), Derivation(direction)))
    case _:
      return Derivation(words[0])


def word_functions(command: str) -> dict[str, tuple[str, ...]]:
  """What every word of a command does in it, a label for each word.

  - `rule_source`: the rule of its verb phrase, `U` (a verb alone), `D LR`, `D opposite LR` or
    `D around LR`; connectives have their own name.
  - `times_source`: how often its verb phrase is performed, `once`, `twice` or `thrice`.
  - `order_source`: whether its half of the command is performed `first` or `second`, or `alone`;
    halves of `after` are performed in the other order.

  Args:
    command: words of the grammar; verbs and directions may be any words, such as added primitives.
  """
  words = command.split()
  found: dict[str, list[str]] = {"rule_source": [], "times_source": [], "order_source": []}

  def half(part: Sequence[str], order: str) -> None:
    verb = [word for word in part if word not in ("twice", "thrice")]
    rule = " ".join(["D", *verb[1:-1], "LR"]) if len(verb) > 1 else "U"
    times = part[-1] if len(verb) < len(part) else "once"
    for name, label in zip(found, (rule, times, order), strict=True):
      found[name] += [label] * len(part)

  (place,) = [i for i, word in enumerate(words) if word in ("and", "after")] or [len(words)]
  if place == len(words):
    half(words, "alone")
  else:
    orders = ("first", "second") if words[place] == "and" else ("second", "first")
    half(words[:place], orders[0])
    for labels in found.values():
      labels.append(words[place])
    half(words[place + 1 :], orders[1])
  return {name: tuple(labels) for name, labels in found.items()}


class _WordFunctions(Sequence[Mapping[str, Sequence[str]]]):
  """`word_functions` of commands, found when they are asked for."""

  def __init__(self, commands: Sequence[str]):
    self._commands = commands

  def __len__(self) -> int:
    return len(self._commands)

  @overload
  def __getitem__(self, place: int) -> Mapping[str, Sequence[str]]: ...

  @overload
  def __getitem__(self, place: slice) -> "_WordFunctions": ...

  def __getitem__(self, place: int | slice) -> "Mapping[str, Sequence[str]] | _WordFunctions":
    found = self._commands[place]
    return word_functions(found) if isinstance(found, str) else _WordFunctions(found)


@functools.cache
def _measure() -> Measure:
  return Measure.of([_derived(*command.split()) for command in _commands()])


class _Parts(NamedTuple):
  """The parts of a split; `valid` is empty where it has no validation part of its own."""

  train: Sequence[Command]
  test: Sequence[Command]
  valid: Sequence[Command] = ()


def _divergent(split: str, seed: int) -> _Parts:
  """One whose compounds diverge by 0.55 or more; half of what is not trained is for validation."""
  name, commands = f"{seed} {split}", list(_commands().items())
  train, scored = divergent_split(_measure(), _MCD_TRAIN, 2 * _MCD_SCORED, seed=name)
  random.Random(name).shuffle(scored)
  valid, test = sorted(scored[:_MCD_SCORED]), sorted(scored[_MCD_SCORED:])
  return _Parts(*([commands[number] for number in part] for part in (train, test, valid)))


@functools.lru_cache(maxsize=16)
def _parts(split: str, seed: int, cut: int = CUTS[0]) -> _Parts:
  """The parts of a split."""
  if split == "simple":
    return _Parts(*_simple(seed))
  if split == "length":
    return _Parts(*_length(cut))
  if split.startswith("mcd"):
    return _divergent(split, seed)
  return _Parts(*(_addprim if split in _REPEATED else _template)(split))


def published_lines(split: SplitName, part: Literal["train", "test"], seed: int = 0) -> list[str]:
  """The lines of a published split's file, `IN: jump twice OUT: I_JUMP I_JUMP`, in our order.

  The published random split is one draw that no rule gives back; `simple` is ours, drawn by `seed`.
  So are the splits `mcd1` to `mcd3`, which have the published sizes and bounds of divergence.

  Raises:
    UserError: unknown split or part.
  """
  check_choice("split", split, SPLITS)
  check_choice("part", part, ("train", "test"))
  commands = getattr(_parts(split, seed), part)
  return [f"IN: {command} OUT: {actions}" for command, actions in commands]


PROGRESS: Mapping[str, int] = {"argument": 2, "repetition": 3, "step": 8}
"""Kinds of labels of actions, and how many different ones there are; see `progress`."""
_NUMBER_OF_COPY = re.compile(r"_\d+\b")


def progress(command: str) -> dict[str, list[int]]:
  """How far the functions of a command have come at each of its actions.

  `argument`: which argument of `and` or `after` the action belongs to, 0 the first in the command;
  so `after` begins with 1. `repetition`: how often `twice` or `thrice` has finished what it
  repeats, such as 0 1 2 for `jump thrice`. `step`: how many actions of the verb with its `opposite`
  or `around` precede it in this repetition, such as 0 to 7 for `jump around left`. All are 0 where
  a command has no such function.

  Args:
    command: words separated by blanks; primitives may be copies, as `with_copies` makes them.

  Returns:
    Name -> a label for every action, in the order of the actions; names and numbers of different
    labels are those of `PROGRESS`.

  Raises:
    UserError: SCAN's grammar does not derive the command.

  Source: after Jiang and Bansal 2021, who track functions and arguments by two sequences; here each
  of the three levels of the grammar has one.
  """
  found: dict[str, list[int]] = {name: [] for name in PROGRESS}
  for argument, repetitions, steps in _arguments(command):
    for labels in itertools.product((argument,), range(repetitions), range(steps)):
      for name, label in zip(PROGRESS, labels, strict=True):
        found[name].append(label)
  return found


def _arguments(command: str) -> Iterator[tuple[int, int, int]]:
  """Number in the command, repetitions and actions of each argument, in the order of the actions.

  Raises:
    UserError: SCAN's grammar does not derive the command.
  """
  plain = _NUMBER_OF_COPY.sub("", command)
  interpret(plain)
  parts = [part.split() for part in re.split(" and | after ", plain)]
  for argument in reversed(range(2)) if " after " in plain else range(len(parts)):
    words = parts[argument]
    repetitions = {"twice": 2, "thrice": 3}.get(words[-1], 1)
    verb, *how = words if repetitions == 1 else words[:-1]
    turns = {"opposite": 2, "around": 4}.get(how[0], 1) if how else 0
    yield argument, repetitions, turns + (0 if verb == "turn" else turns if "around" in how else 1)


def with_scratchpad(
  command: str, actions: str, *, what_follows: bool = False, separator: bool = False
) -> str:
  """The actions, before each of which stands how much of the command's functions is left.

  `A1 R0 S2 I_JUMP`: after this action, one argument of `and` or `after`, no repetition of the
  present one and two actions of this repetition. A decoder reads what it has written, and after
  `A0 R0 S0` comes one action.

  Args:
    command: words separated by blanks.
    actions: likewise.
    what_follows: whether a word more before each action says what follows it: the next `step` of
      this repetition, the next `repetition`, the next `argument` or the `end`. After it numbers are
      counted down or copied by that word alone, whichever of them training has seen together.
    separator: whether `;` follows every action. What is left is then never predicted at an action's
      own word, which training may have seen by itself alone, before the end.

  Raises:
    UserError: SCAN's grammar does not derive the command.

  Source: Nye et al. 2021 for scratchpads; after Jiang and Bansal 2021, whose decoder predicts and
  reads two sequences of such numbers beside the actions.
  """
  arguments = list(_arguments(command))
  left = [
    label
    for number, (_, repetitions, steps) in enumerate(arguments, start=1)
    for label in itertools.product(
      (len(arguments) - number,), reversed(range(repetitions)), reversed(range(steps))
    )
  ]
  words = list[str]()
  for (argument, repetition, step), action in zip(left, actions.split(), strict=True):
    words += (f"A{argument}", f"R{repetition}", f"S{step}")
    if what_follows:
      remains = {"step": step, "repetition": repetition, "argument": argument}
      words.append(next((name for name, number in remains.items() if number), "end"))
    words.append(action)
    if separator:
      words.append(";")
  return " ".join(words)


_LINE = re.compile(r"IN: (\S.*?) OUT: (\S.*)")


def read_commands(path: Path) -> list[Command]:
  """The commands and actions of a file in the published format; see `published_lines`.

  Raises:
    DataError: the file is empty, damaged, or has a line of another form.
    UserError: it cannot be read.
  """
  commands = []
  for number, line in enumerate(read_lines(path), start=1):
    found = _LINE.fullmatch(line.strip())
    if found is None:
      raise DataError(
        f"{path}:{number} is {short(line)}; every line must be as IN: jump twice OUT: I_JUMP"
        " I_JUMP. Mend the line, or give files in SCAN's format."
      )
    commands.append((found[1], found[2]))
  return commands


def _copied(split: str) -> tuple[str, ...]:
  """The primitives that added ones are copies of: of the kind that the split holds out."""
  if split == "addprim_jump":
    return _PRIMITIVES
  if split == "addprim_turn_left" or (split.startswith("template") and "jump" not in split):
    return _DIRECTIONS
  return _PRIMITIVES + _DIRECTIONS


def with_copies(train: Sequence[Command], words: Sequence[str], copies: int) -> list[Command]:
  """Training commands, and after them their like with a copy of a primitive in its place.

  `jump` has the copies `jump_1`, `jump_2`, ..., which stand for `I_JUMP_1`, `I_JUMP_2`, ...; `left`
  is copied with `I_TURN_LEFT`.

  Args:
    train: commands and actions.
    words: primitives that are copied, each together with every command that has it.
    copies: of each primitive.

  Source: Jiang et al. 2022 (prim2primX).
  """
  made = list(train)
  for word in words:
    action = f"I_TURN_{word.upper()}" if word in _DIRECTIONS else f"I_{word.upper()}"
    having = [one for one in train if word in one[0].split()]
    for n in range(1, copies + 1):
      made += [
        (command.replace(word, f"{word}_{n}"), actions.replace(action, f"{action}_{n}"))
        for command, actions in having
      ]
  return made


@dataclasses.dataclass(frozen=True)
class ScanData:
  """SCAN commands (source) and actions (target), scored by exact match.

  `load("train")` and `load("test")` are the published parts. Most published splits have no
  validation part: with `held_out = 0`, `valid` is a seeded sample of distinct training commands, to
  watch training by, and tells nothing about generalisation; with `held_out = n`, it is n distinct
  training commands that `train` then lacks, repetitions included. The splits of maximum compound
  divergence have one, from the distribution of their test; with `held_out = 0` it is used.
  """

  split: SplitName = "simple"
  """which published split"""
  seed: int = 0
  """draws the random split `simple`, those of maximum compound divergence, and the validation
  commands"""
  held_out: int = 0
  """commands taken from training for validation; 0 keeps the published training part whole"""
  valid: int = 500
  """size of the validation sample where held_out is 0 and the split has no validation part"""
  trained_up_to: int = 0
  """actions of the longest command that is trained. `valid` is a sample of the longer commands of
  the training part, so that settings can be chosen on outputs longer than training's without the
  test; 0: all of the training part is trained"""
  cut: int = CUTS[0]
  """of the split `length`: actions of the longest training command"""
  added_primitives: int = 0
  """copies of each primitive, with new words and new actions, that training has besides, every
  command with the primitive copied along (prim2primX). Copied are the verbs for addprim_jump, left
  and right for addprim_turn_left and the templates of all verbs, both for other splits. About 20
  are usual."""
  scratchpad: bool = False
  """before each action, targets say how much of the command's functions is left; see
  `with_scratchpad`"""
  what_follows: bool = False
  """before each action, a scratchpad says in one word what follows it, too"""
  separator: bool = False
  """`;` follows every action of a scratchpad"""
  folder: str = ""
  """where the published files of the split are (tasks_train_SPLIT.txt, tasks_test_SPLIT.txt, and
  tasks_val_SPLIT.txt if there is one), plain or gzipped; may start with an environment variable.
  Empty: the split is generated"""

  source_language = "commands"
  target_language = "actions"
  metric = "exact_match"

  def __post_init__(self):
    check_choice("split", self.split, SPLITS)
    check(
      self.cut in (CUTS if self.split == "length" else CUTS[:1]),
      f"cut is {self.cut}; it must be one of {', '.join(map(str, CUTS))} with the split 'length',"
      f" and {CUTS[0]} with others.",
    )
    check(
      self.trained_up_to >= 0 and not (self.trained_up_to and self.held_out),
      f"trained_up_to is {self.trained_up_to} and held_out {self.held_out}; neither is negative,"
      " and one of them at least is 0.",
    )
    check(
      0 <= self.added_primitives <= _MOST_COPIES,
      f"added_primitives is {self.added_primitives}; it must be 0 to {_MOST_COPIES:,}.",
    )
    for field in ("what_follows", "separator"):
      check(
        self.scratchpad or not getattr(self, field),
        f"{field} is on, but scratchpad is off, to which it adds a word; set scratchpad=True too,"
        f" or {field}=False.",
      )
    self._check_sizes(None if self.folder else self._distinct)

  def _check_sizes(self, distinct: int | None) -> None:
    """Refuses sizes that are too small, or too large for so many different training commands."""
    for field, least in (("held_out", 0), ("valid", 1)):
      size = getattr(self, field)
      check(
        least <= size and (distinct is None or size < distinct),
        f"{field} is {size}; it must be at least {least} and below"
        f" {'the' if distinct is None else f'{distinct:,}, the'} number of different training"
        f" commands of the split {self.split}; choose a number in that range.",
      )

  @property
  def _distinct(self) -> int:
    """Different training commands of a generated split, none of which is searched for that."""
    if self.split.startswith("mcd"):
      return _MCD_TRAIN
    return len(set(_parts(self.split, self.seed, self.cut).train))

  @property
  def published_counts(self) -> Mapping[str, int]:
    """Part -> lines of the published file, as far as there is one."""
    if self.split.startswith("mcd"):
      return {"train": _MCD_TRAIN, "valid": _MCD_SCORED, "test": _MCD_SCORED}
    if self.cut != CUTS[0]:
      return {}
    return dict(zip(("train", "test"), _PUBLISHED[self.split], strict=True))

  @property
  def label_counts(self) -> Mapping[str, int]:
    """Kinds of labels of actions, and how many different ones; none where targets say them."""
    return {} if self.scratchpad else PROGRESS

  def labels(self, source: str) -> Mapping[str, Sequence[int]]:
    """Kind -> label of every action of a command; see `progress`."""
    return progress(source)

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return ("train", "valid", "test")

  def load(self, split: str) -> Pairs:
    """The pairs of a part.

    Raises:
      UserError: `split` is none of `splits()`, or there is no file of it.
      DataError: a file is damaged.
    """
    check_choice("split", split, self.splits())
    if split == "test":
      return self._pairs("test", self._part("test"))
    sample = () if self.held_out or self.trained_up_to else self._part("valid")
    if split == "valid" and sample:
      return self._pairs("valid", sample)
    train, distinct = self._part("train"), list[Command]()
    if self.trained_up_to:
      distinct = sorted({command for command in train if _actions(command) > self.trained_up_to})
      train = [command for command in train if _actions(command) <= self.trained_up_to]
      check(
        bool(distinct and train),
        f"trained_up_to is {self.trained_up_to}, but the training part of {self.split} has"
        f" {len(train):,} commands of so many actions and {len(distinct):,} longer ones; there have"
        " to be some of both.",
      )
    elif not sample:
      distinct = sorted(set(train))
      self._check_sizes(len(distinct))
    if not sample:
      generator = random.Random(f"{self.seed} valid")
      ranked = sorted((generator.random(), command) for command in distinct)
      sample = [command for _, command in ranked[: self.held_out or self.valid]]
    if split == "valid":
      return self._pairs("valid", sample)
    held_out = frozenset(sample if self.held_out else ())
    train = [command for command in train if command not in held_out]
    return self._pairs("train", with_copies(train, _copied(self.split), self.added_primitives))

  def _part(self, name: Literal["train", "valid", "test"]) -> Sequence[Command]:
    """The commands of a part, made or read; none where the split has no such part."""
    if not self.folder:
      return getattr(_parts(self.split, self.seed, self.cut), name)
    folder = expand_folder(self.folder)
    file = f"tasks_{'val' if name == 'valid' else name}_{self.split}.txt"
    if name == "valid" and not any((folder / f"{file}{end}").is_file() for end in ("", ".gz")):
      return ()
    return read_commands(find_file(folder, file, "folder and split"))

  def _pairs(self, part: str, commands: Sequence[Command]) -> Pairs:
    sources, targets = ([pair[side] for pair in commands] for side in range(2))
    if self.scratchpad:
      more = {"what_follows": self.what_follows, "separator": self.separator}
      targets = [with_scratchpad(*pair, **more) for pair in commands]
    return Pairs(
      source=sources,
      target=targets,
      info=_WordFunctions(sources),
      where=lambda i: f"scan:{self.split}/{part}[{i}]",
      metric="exact_match",
    )
