"""SCAN: the published counts, the semantics, and which commands each split holds out."""

from collections import Counter

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.scan import SPLITS, ScanData, interpret, published_lines

COUNTS = {
  "simple": (16_728, 4_182),
  "length": (16_990, 3_920),
  "addprim_jump": (14_670, 7_706),
  "addprim_turn_left": (21_890, 1_208),
  "template_right": (15_225, 4_476),
  "template_opposite_right": (15_225, 4_476),
  "template_around_right": (15_225, 4_476),
  "template_jump_around_right": (18_528, 1_173),
}


def commands(split: str, part: str) -> list[str]:
  return list(ScanData(split).load(part).source)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_the_published_number_of_lines(split):
  lines = [published_lines(split, part) for part in ("train", "test")]
  assert tuple(map(len, lines)) == COUNTS[split]
  assert not set(lines[0]) & set(lines[1])


def test_the_grammar_derives_all_20910_commands_once():
  train, test = (commands("simple", part) for part in ("train", "test"))
  assert len(set(train + test)) == len(train + test) == 20_910


@pytest.mark.parametrize(
  ("command", "actions"),
  [
    ("jump", "I_JUMP"),
    ("turn left", "I_TURN_LEFT"),
    ("jump left", "I_TURN_LEFT I_JUMP"),
    ("walk opposite right", "I_TURN_RIGHT I_TURN_RIGHT I_WALK"),
    ("turn opposite left", "I_TURN_LEFT I_TURN_LEFT"),
    ("turn around right", "I_TURN_RIGHT I_TURN_RIGHT I_TURN_RIGHT I_TURN_RIGHT"),
    ("look around left", "I_TURN_LEFT I_LOOK " * 4),
    ("run twice and look thrice", "I_RUN I_RUN I_LOOK I_LOOK I_LOOK"),
    ("jump twice after walk left", "I_TURN_LEFT I_WALK I_JUMP I_JUMP"),
    # A line of the published file add_prim_split/tasks_test_addprim_turn_left.txt.
    (
      "turn opposite right twice after turn left twice",
      "I_TURN_LEFT I_TURN_LEFT I_TURN_RIGHT I_TURN_RIGHT I_TURN_RIGHT I_TURN_RIGHT",
    ),
  ],
)
def test_commands_mean_what_the_published_semantics_says(command, actions):
  assert interpret(command) == actions.split()


def test_lines_look_as_in_the_published_files():
  lines = published_lines("length", "train")
  assert "IN: jump twice OUT: I_JUMP I_JUMP" in lines
  assert not any(line != line.strip() or "  " in line for line in lines)


def test_the_length_split_tests_only_outputs_longer_than_trained():
  train, test = (
    {len(actions.split()) for actions in ScanData("length").load(part).target}
    for part in ("train", "test")
  )
  assert max(train) == 22
  assert (min(test), max(test)) == (24, 48)


@pytest.mark.parametrize(
  ("split", "primitive", "repeats"),
  [("addprim_jump", "jump", 1_467), ("addprim_turn_left", "turn left", 2_189)],
)
def test_a_held_out_primitive_is_trained_alone_and_often(split, primitive, repeats):
  train = Counter(commands(split, "train"))
  assert {c: n for c, n in train.items() if primitive in c} == {primitive: repeats}
  assert set(train.values()) == {1, repeats}
  assert all(primitive in command for command in commands(split, "test"))


@pytest.mark.parametrize(
  ("split", "template", "turn"),
  [
    ("template_right", "{} right", "turn right"),
    ("template_opposite_right", "{} opposite right", "turn opposite right"),
    ("template_around_right", "{} around right", "turn around right"),
    ("template_jump_around_right", "jump around right", "turn around right"),
  ],
)
def test_a_template_is_never_trained_and_turn_fills_it_nowhere(split, template, turn):
  phrases = [template.format(verb) for verb in ("walk", "look", "run", "jump")]
  train, test = commands(split, "train"), commands(split, "test")
  assert not any(phrase in command for command in train for phrase in phrases)
  assert all(any(phrase in command for phrase in phrases) for command in test)
  assert not any(turn in command for command in train + test)
  assert 20_910 - len(train) - len(test) == 1_209


def test_the_random_split_follows_its_seed():
  first = published_lines("simple", "train", seed=1)
  assert first == published_lines("simple", "train", seed=1)
  assert first != published_lines("simple", "train", seed=2)


def test_validation_is_a_sample_of_training_unless_held_out():
  sample = ScanData("addprim_jump", valid=300)
  train, valid = sample.load("train"), sample.load("valid")
  assert len(train) == 14_670
  assert len(set(valid.source)) == len(valid) == 300
  assert set(valid.source) <= set(train.source)
  held_out = ScanData("addprim_jump", held_out=300)
  train, valid = held_out.load("train"), held_out.load("valid")
  assert len(set(valid.source)) == len(valid) == 300
  assert not set(valid.source) & set(train.source)
  assert len(set(train.source) | set(valid.source)) == 14_670 - 1_466


def test_pairs_say_where_they_stand_and_how_they_are_scored():
  data = ScanData("length")
  pairs = data.load("test")
  assert pairs.where(3) == "scan:length/test[3]"
  assert pairs.metric == data.metric == "exact_match"
  assert data.splits() == ("train", "valid", "test")
  assert (data.source_language, data.target_language) == ("commands", "actions")


@pytest.mark.parametrize(
  ("make", "says"),
  [
    (lambda: ScanData("lenght"), "length"),  # type: ignore[arg-type]
    (lambda: ScanData(held_out=-1), "held_out is -1"),
    (lambda: ScanData(valid=0), "valid is 0"),
    (lambda: ScanData(held_out=20_000), "16,728"),
    (lambda: ScanData().load("dev"), "'dev'"),
    (lambda: published_lines("length", "valid"), "part is 'valid'"),  # type: ignore[arg-type]
    (lambda: interpret("jump jump"), "20,910"),
  ],
)
def test_mistakes_are_told(make, says):
  with pytest.raises(UserError, match=says):
    make()
