r"""SCAN: navigation commands and the actions they stand for, generated from the published grammar.

The grammar (C is the start symbol):

    C -> S and S | S after S | S
    S -> V twice | V thrice | V
    V -> D opposite LR | D around LR | D LR | U          D -> U | turn
    U -> walk | look | run | jump                        LR -> left | right

It derives 20,910 commands, each in one way. Source: Lake and Baroni 2018, "Generalization without
systematicity", supplement; template splits: Loula, Baroni and Lake 2018.
"""

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Literal

from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.base import Pairs

SplitName = Literal[
  "simple",
  "length",
  "addprim_jump",
  "addprim_turn_left",
  "template_right",
  "template_opposite_right",
  "template_around_right",
  "template_jump_around_right",
]
SPLITS: tuple[str, ...] = SplitName.__args__  # type: ignore[attr-defined]
Command = tuple[str, str]  # the command and its actions, both of words separated by blanks

_PRIMITIVES = ("walk", "look", "run", "jump")
_DIRECTIONS = ("left", "right")
_TRAINED_ACTIONS = 22  # the longest output in the training part of the length split
_SIMPLE_TRAIN = 16_728
# How often the published training parts say the bare primitive: about a tenth of all lines.
_REPEATED = {"addprim_jump": ("jump", 1_467), "addprim_turn_left": ("turn left", 2_189)}


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


def _length() -> tuple[list[Command], list[Command]]:
  short: list[Command] = []
  long: list[Command] = []
  for command in _commands().items():
    (short if len(command[1].split()) <= _TRAINED_ACTIONS else long).append(command)
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


@functools.lru_cache(maxsize=16)
def _parts(split: str, seed: int) -> tuple[list[Command], list[Command]]:
  """The training and the test part of a split."""
  if split == "simple":
    return _simple(seed)
  if split == "length":
    return _length()
  return _addprim(split) if split in _REPEATED else _template(split)


def published_lines(split: SplitName, part: Literal["train", "test"], seed: int = 0) -> list[str]:
  """The lines of a published split's file, `IN: jump twice OUT: I_JUMP I_JUMP`, in our order.

  The published random split is one draw that no rule gives back; `simple` is ours, drawn by `seed`.

  Raises:
    UserError: unknown split or part.
  """
  check_choice("split", split, SPLITS)
  check_choice("part", part, ("train", "test"))
  commands = _parts(split, seed)[part == "test"]
  return [f"IN: {command} OUT: {actions}" for command, actions in commands]


@dataclasses.dataclass(frozen=True)
class ScanData:
  """SCAN commands (source) and actions (target), scored by exact match.

  `load("train")` and `load("test")` are the published parts. The published splits have no
  validation part: with `held_out = 0`, `valid` is a seeded sample of distinct training commands, to
  watch training by, and tells nothing about generalisation; with `held_out = n`, it is n distinct
  training commands that `train` then lacks, repetitions included.
  """

  split: SplitName = "simple"
  """which published split"""
  seed: int = 0
  """draws the random split `simple` and the validation commands"""
  held_out: int = 0
  """commands taken from training for validation; 0 keeps the published training part whole"""
  valid: int = 500
  """size of the validation sample where held_out is 0"""

  source_language = "commands"
  target_language = "actions"
  metric = "exact_match"

  def __post_init__(self):
    check_choice("split", self.split, SPLITS)
    distinct = len(set(_parts(self.split, self.seed)[0]))
    for field, least in (("held_out", 0), ("valid", 1)):
      size = getattr(self, field)
      check(
        least <= size < distinct,
        f"{field} is {size}; it must be at least {least} and below {distinct:,}, the number of"
        f" different training commands of the split {self.split}; choose a number in that range.",
      )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return ("train", "valid", "test")

  def load(self, split: str) -> Pairs:
    """The pairs of a part.

    Raises:
      UserError: `split` is none of `splits()`.
    """
    check_choice("split", split, self.splits())
    train, test = _parts(self.split, self.seed)
    if split == "test":
      return self._pairs("test", test)
    generator = random.Random(f"{self.seed} valid")
    ranked = sorted((generator.random(), command) for command in sorted(set(train)))
    sample = [command for _, command in ranked[: self.held_out or self.valid]]
    if split == "valid":
      return self._pairs("valid", sample)
    held_out = frozenset(sample if self.held_out else ())
    return self._pairs("train", [command for command in train if command not in held_out])

  def _pairs(self, part: str, commands: Sequence[Command]) -> Pairs:
    return Pairs(
      source=[command for command, _ in commands],
      target=[actions for _, actions in commands],
      where=lambda i: f"scan:{self.split}/{part}[{i}]",
      metric="exact_match",
    )
