"""SCAN: the published counts, the semantics, and which commands each split holds out."""

import gzip
import itertools
import zlib
from collections import Counter

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.divergence import Derivation
from compmod_jax.data.synthetic import scan
from compmod_jax.data.synthetic.scan import (
  CUTS,
  PROGRESS,
  SPLITS,
  ScanData,
  derive,
  interpret,
  progress,
  published_lines,
  with_scratchpad,
  word_functions,
)

COUNTS = {
  "simple": (16_728, 4_182),
  "length": (16_990, 3_920),
  "addprim_jump": (14_670, 7_706),
  "addprim_turn_left": (21_890, 1_208),
  "template_right": (15_225, 4_476),
  "template_opposite_right": (15_225, 4_476),
  "template_around_right": (15_225, 4_476),
  "template_jump_around_right": (18_528, 1_173),
  "mcd1": (8_365, 1_045),
  "mcd2": (8_365, 1_045),
  "mcd3": (8_365, 1_045),
}


def commands(split: str, part: str) -> list[str]:
  return list(ScanData(split).load(part).source)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_the_published_number_of_lines(split):
  lines = [published_lines(split, part) for part in ("train", "test")]
  assert tuple(map(len, lines)) == COUNTS[split]
  assert not set(lines[0]) & set(lines[1])
  known = ScanData(split).published_counts  # type: ignore[arg-type]
  assert (known["train"], known["test"]) == COUNTS[split]


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


@pytest.mark.parametrize("cut", CUTS)
def test_at_every_cut_training_has_all_commands_up_to_it(cut):
  data = ScanData("length", cut=cut)
  train, test = data.load("train"), data.load("test")
  assert len(set(train.source) | set(test.source)) == len(train) + len(test) == 20_910
  assert max(len(actions.split()) for actions in train.target) <= cut
  assert min(len(actions.split()) for actions in test.target) > cut
  assert bool(data.published_counts) == (cut == 22)


def test_a_derivation_has_a_rule_for_every_word():
  around = Derivation("D around LR", (Derivation("jump"), Derivation("left")))
  walk = Derivation("D LR", (Derivation("walk"), Derivation("right")))
  assert derive("jump around left thrice after walk right") == Derivation(
    "S after S", (Derivation("V thrice", (around,)), walk)
  )
  assert derive("run and look twice") == Derivation(
    "S and S", (Derivation("run"), Derivation("V twice", (Derivation("look"),)))
  )
  with pytest.raises(UserError, match="jump jump"):
    derive("jump jump")


def test_splits_of_compound_divergence_keep_its_bounds_and_their_parts_apart():
  measure = scan._measure()  # of all commands, in the order of the grammar
  numbers = {command: number for number, command in enumerate(scan._commands())}
  tests = []
  for split in ("mcd1", "mcd2", "mcd3"):
    parts = {part: commands(split, part) for part in ("train", "valid", "test")}
    assert [len(parts[part]) for part in parts] == [8_365, 1_045, 1_045]
    assert len(set().union(*parts.values())) == 8_365 + 2 * 1_045
    chosen = {part: [numbers[command] for command in parts[part]] for part in parts}
    atom, compound = measure.divergences(chosen["train"], chosen["valid"] + chosen["test"])
    assert atom <= 0.02
    assert compound >= 0.55
    assert measure.divergences(chosen["valid"], chosen["test"]).compound < 0.1
    tests.append(set(parts["test"]))
  assert not any(len(a & b) > 400 for a in tests for b in tests if a is not b)
  # A random split of these sizes is far from the bound.
  simple = [numbers[command] for command in commands("simple", "train")]
  assert measure.divergences(simple[:8_365], simple[8_365:10_455]).compound < 0.05


@pytest.mark.parametrize(
  ("split", "sums"),
  [("mcd1", (2349936218, 2054323367)), ("mcd2", (3481382846, 9152191))],
)
def test_a_split_that_was_searched_for_is_the_same_everywhere(split, sums):
  found = (zlib.crc32("\n".join(commands(split, part)).encode()) for part in ("train", "test"))
  assert tuple(found) == sums, "results of runs on the old split do not compare with new ones"


def by_grammar(command: str) -> str:
  """What a command with copied primitives stands for, from what the plain one does."""
  words = command.split()
  plain = " ".join(word.split("_")[0] for word in words)
  actions = interpret(plain)
  for word in words:
    name, _, number = word.partition("_")
    if number:
      prefix = "I_TURN_" if name in ("left", "right") else "I_"
      action = f"{prefix}{name.upper()}"
      actions = [f"{one}_{number}" if one == action else one for one in actions]
  return " ".join(actions)


@pytest.mark.parametrize(
  ("split", "words"),
  [
    ("addprim_jump", {"walk", "look", "run", "jump"}),
    ("template_around_right", {"left", "right"}),
    ("template_jump_around_right", {"walk", "look", "run", "jump", "left", "right"}),
  ],
)
def test_added_primitives_are_used_as_those_that_they_copy(split, words):
  plain, data = ScanData(split), ScanData(split, added_primitives=1)
  old, new = (one.load("train") for one in (plain, data))
  count = len(old)
  assert (new.source[:count], new.target[:count]) == (old.source, old.target)
  added = list(zip(new.source[count:], new.target[count:], strict=True))
  copies = {f"{word}_1": word for word in words}
  found = Counter(copy for command, _ in added for copy in set(command.split()) & set(copies))
  assert found == {
    copy: sum(word in command.split() for command in old.source) for copy, word in copies.items()
  }
  for command, actions in added[::97]:
    assert sum("_" in word for word in command.split()) >= 1
    # A primitive that comes twice is copied twice, by the same copy.
    assert len({word for word in command.split() if "_" in word}) == 1
    assert actions == by_grammar(command)
  for part in ("valid", "test"):
    assert data.load(part).source == plain.load(part).source


def test_every_copy_has_a_number_of_its_own():
  data = ScanData("addprim_jump", added_primitives=3).load("train")
  last = dict(zip(data.source, data.target, strict=True))
  assert [last[f"jump_{n}"] for n in (1, 2, 3)] == ["I_JUMP_1", "I_JUMP_2", "I_JUMP_3"]


def traced(command: str) -> list[tuple[str, int, int, int]]:
  """(action, argument, repetition, step) of every action, by running the command on a stack."""
  for connective in ("and", "after"):
    left, found, right = command.partition(f" {connective} ")
    if found:
      first = traced(left)
      second = [(action, 1, *rest) for action, _, *rest in traced(right)]
      return first + second if connective == "and" else second + first  # type: ignore[operator]
  for word, times in (("twice", 2), ("thrice", 3)):
    if command.endswith(f" {word}"):
      once = traced(command.removesuffix(f" {word}"))
      return [(action, 0, n, step) for n in range(times) for action, _, _, step in once]
  words = command.split()
  turn = [f"I_TURN_{words[-1].upper()}"] if len(words) > 1 else []
  act = [] if words[0] == "turn" else [f"I_{words[0].upper()}"]
  how = words[1] if len(words) == 3 else ""
  actions = (turn + act) * 4 if how == "around" else turn * (2 if how == "opposite" else 1) + act
  return [(action, 0, 0, step) for step, action in enumerate(actions)]


def test_labels_of_progress_are_those_of_a_run_of_the_command():
  seen: dict[str, set[int]] = {name: set() for name in PROGRESS}
  pairs = ScanData("simple").load("test")
  for command, actions in list(zip(pairs.source, pairs.target, strict=True))[::7]:
    run, labels = traced(command), progress(command)
    assert [action for action, *_ in run] == actions.split()
    for number, name in enumerate(PROGRESS, 1):
      assert labels[name] == [one[number] for one in run], command
      seen[name].update(labels[name])
  assert {name: set(range(count)) for name, count in PROGRESS.items()} == seen
  assert progress("jump thrice")["repetition"] == [0, 1, 2]
  assert progress("walk_12 around left_3 twice") == progress("walk around left twice")
  with pytest.raises(UserError, match="jump jump"):
    progress("jump jump")


@pytest.fixture
def folder(tmp_path):
  """The split mcd1 as published files, two of them plain."""
  lines = {
    "train": ["IN: walk OUT: I_WALK", "IN: jump twice OUT: I_JUMP I_JUMP", "IN: run OUT: I_RUN"],
    "test": ["IN: look left OUT: I_TURN_LEFT I_LOOK"],
  }
  for part, text in lines.items():
    (tmp_path / f"tasks_{part}_mcd1.txt").write_text("\n".join(text) + "\n")
  return tmp_path


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_scratchpad_says_what_is_left_after_every_action(part):
  plain, written = (
    ScanData("addprim_jump", added_primitives=1, scratchpad=on).load(part) for on in (False, True)
  )
  assert written.source == plain.source
  for command, actions, words in zip(plain.source, plain.target, written.target, strict=True):
    words = words.split()
    assert words[3::4] == actions.split()
    argument, repetition, step = progress(command).values()
    places = list(dict.fromkeys(argument))
    runs = list(zip(argument, repetition, step, strict=True))
    for number, (a, r, s) in enumerate(runs):
      most = max(one[1] for one in runs if one[0] == a)
      longest = max(one[2] for one in runs if one[0] == a)
      assert words[4 * number : 4 * number + 3] == [
        f"A{len(places) - 1 - places.index(a)}", f"R{most - r}", f"S{longest - s}"
      ]  # fmt: skip


def test_a_scratchpad_counts_down_arguments_repetitions_and_actions():
  assert with_scratchpad("run opposite left and jump twice", "LEFT LEFT RUN JUMP JUMP") == (
    "A1 R0 S2 LEFT A1 R0 S1 LEFT A1 R0 S0 RUN A0 R1 S0 JUMP A0 R0 S0 JUMP"
  )
  assert with_scratchpad("walk after turn left", "LEFT WALK") == "A1 R0 S0 LEFT A0 R0 S0 WALK"
  assert ScanData(scratchpad=True).label_counts == {}


def test_a_scratchpad_may_say_what_follows_every_action_and_changes_in_nothing_else():
  plain, longer = (
    ScanData("mcd1", scratchpad=True, what_follows=on).load("test").target for on in (False, True)
  )
  names = {"A": "argument", "R": "repetition", "S": "step"}
  for words, others in zip(plain, longer, strict=True):
    parts = others.split()
    follows = parts[3::5]
    del parts[3::5]
    assert " ".join(parts) == words
    numbers = [tuple(parts[i : i + 3]) for i in range(0, len(parts), 4)]
    for number, (now, after) in enumerate(itertools.pairwise(numbers)):
      # The first number that is another one says which function goes on.
      changed = next(a[0] for a, b in zip(now, after, strict=True) if a != b)
      assert follows[number] == names[changed]
    assert follows[-1] == "end"


def test_separators_follow_every_action_of_a_scratchpad_and_change_nothing_else():
  options = [{}, {"separator": True}, {"separator": True, "what_follows": True}]
  plain, separated, both = (
    ScanData("addprim_jump", scratchpad=True, **one).load("test").target for one in options
  )
  for words, others, more in zip(plain, separated, both, strict=True):
    assert others.split()[4::5] == [";"] * (len(others.split()) // 5)
    assert " ".join(word for word in others.split() if word != ";") == words
    assert " ".join(more.split()[5::6]) == " ".join(others.split()[4::5])


def test_published_files_are_read(folder):
  data = ScanData("mcd1", folder=str(folder), valid=2)
  train = data.load("train")
  assert train.source == ["walk", "jump twice", "run"]
  assert train.target == ["I_WALK", "I_JUMP I_JUMP", "I_RUN"]
  assert data.load("test").source == ["look left"]
  assert set(data.load("valid").source) < set(train.source)
  with gzip.open(folder / "tasks_val_mcd1.txt.gz", "wt") as file:
    file.write("IN: look OUT: I_LOOK\n")
  assert data.load("valid").source == ["look"]
  held_out = ScanData("mcd1", folder=str(folder), held_out=1, valid=1)
  assert len(held_out.load("train")) == 2
  assert set(held_out.load("valid").source) | set(held_out.load("train").source) == set(
    train.source
  )


def test_what_is_generated_reads_back_the_same(tmp_path):
  for part in ("train", "test"):
    lines = published_lines("template_around_right", part)
    (tmp_path / f"tasks_{part}_template_around_right.txt").write_text("\n".join(lines))
    read = ScanData("template_around_right", folder=str(tmp_path)).load(part)
    made = ScanData("template_around_right").load(part)
    assert (read.source, read.target) == (made.source, made.target)


def test_files_of_another_form_are_told_with_their_line(folder):
  with pytest.raises(UserError, match=r"below the number of different training commands"):
    ScanData("mcd1", folder=str(folder), held_out=-1)
  with pytest.raises(UserError, match=r"valid is 500; .* below 3, the number"):
    ScanData("mcd1", folder=str(folder)).load("train")
  with pytest.raises(UserError, match=r"tasks_train_mcd2\.txt .* Set folder and split"):
    ScanData("mcd2", folder=str(folder)).load("train")
  (folder / "tasks_test_mcd1.txt").write_text("IN: walk OUT: I_WALK\nwalk I_WALK\n")
  with pytest.raises(DataError, match=r"tasks_test_mcd1\.txt:2 is 'walk I_WALK'"):
    ScanData("mcd1", folder=str(folder)).load("test")


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


def test_settings_can_be_chosen_on_longer_commands_than_those_trained():
  data = ScanData("length", cut=26, trained_up_to=22)
  lengths = {
    part: [len(target.split()) for target in data.load(part).target] for part in data.splits()
  }
  assert max(lengths["train"]) == 22
  assert set(lengths["valid"]) == {24, 25, 26}
  assert len(lengths["valid"]) == 500
  assert sorted(lengths["train"]) == sorted(
    len(t.split()) for t in ScanData("length").load("train").target
  )
  assert data.load("test").source == ScanData("length", cut=26).load("test").source


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
    (lambda: ScanData(held_out=5, trained_up_to=20), "trained_up_to is 20 and held_out 5"),
    (lambda: ScanData(trained_up_to=48).load("train"), "0 longer ones"),
    (lambda: ScanData(valid=0), "valid is 0"),
    (lambda: ScanData(held_out=20_000), "16,728"),
    (lambda: ScanData("mcd2", held_out=8_365), "8,365"),
    (lambda: ScanData("length", cut=23), "cut is 23; it must be one of 22, 24, 25"),
    (lambda: ScanData(cut=24), "cut is 24"),
    (lambda: ScanData(added_primitives=-1), "added_primitives is -1"),
    (lambda: ScanData(what_follows=True), "what_follows is on, but scratchpad is off"),
    (lambda: ScanData(separator=True), "separator is on, but scratchpad is off"),
    (lambda: ScanData().load("dev"), "'dev'"),
    (lambda: published_lines("length", "valid"), "part is 'valid'"),  # type: ignore[arg-type]
    (lambda: interpret("jump jump"), "20,910"),
  ],
)
def test_mistakes_are_told(make, says):
  with pytest.raises(UserError, match=says):
    make()


def test_words_are_labelled_by_what_they_do():
  times = {"once": 1, "twice": 2, "thrice": 3}
  turns = {"U": 0, "D LR": 1, "D opposite LR": 2, "D around LR": 4}
  for command in ScanData().load("test").source[::40]:
    words, labels = command.split(), word_functions(command)
    assert {len(one) for one in labels.values()} == {len(words)}
    actions = []
    for order in ("alone", "first", "second"):
      here = [i for i, label in enumerate(labels["order_source"]) if label == order]
      if not here:
        continue
      half = " ".join(words[i] for i in here)
      (time,), (rule,) = (
        {labels[name][i] for i in here} for name in ("times_source", "rule_source")
      )
      once = interpret(half.removesuffix(f" {time}"))
      assert interpret(half) == once * times[time]
      turned = sum(action.startswith("I_TURN") for action in once)
      assert turned == turns[rule]
      actions += interpret(half)
    assert actions == interpret(command)


def test_functions_of_added_primitives_are_those_of_what_they_copy():
  assert word_functions("jump_3 around left_1 twice and walk") == word_functions(
    "jump around left twice and walk"
  )
  pairs = ScanData(split="addprim_jump", added_primitives=1).load("train")
  assert pairs.info is not None
  assert len(pairs.info) == len(pairs)
  assert pairs.info[-1] == word_functions(pairs.source[-1])
