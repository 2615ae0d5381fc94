"""Episodes of study pairs: one meaning for all pairs of an episode, the true one where scored."""

import dataclasses

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data import check
from compmod_jax.data.synthetic.lengths import LengthData
from compmod_jax.data.synthetic.mlc import MlcData
from compmod_jax.data.synthetic.scan import ScanData
from compmod_jax.data.tokenizers import TokenizerConfig, pair_tokenizers

TRUE = {word: f"I_{word.upper()}" for word in ("walk", "look", "run", "jump")}
TRUE |= {word: f"I_TURN_{word.upper()}" for word in ("left", "right")}
JUMP = MlcData(ScanData("addprim_jump"), episodes=400)
EXCHANGED = dataclasses.replace(JUMP, exchange_words=True)


def symbols(command: str) -> list[str]:
  """The words of a command in the order of the actions that they stand for."""
  for connective in ("and", "after"):
    left, found, right = command.partition(f" {connective} ")
    if found:
      first, second = symbols(left), symbols(right)
      return first + second if connective == "and" else second + first
  for word, times in (("twice", 2), ("thrice", 3)):
    if command.endswith(f" {word}"):
      return symbols(command.removesuffix(f" {word}")) * times
  verb, *how = command.split()
  own = [] if verb == "turn" else [verb]
  if "around" in how:
    return [how[-1], *own] * 4
  return how[-1:] * (2 if "opposite" in how else 1) + own


def meanings(source: str, target: str) -> tuple[list[tuple[str, str]], dict[str, str]]:
  """The pairs of an episode, the query first, and the one meaning of every word in them."""
  query, *studied = source.split(" | ")
  pairs = [(query, target)]
  for text in studied:
    command, _, actions = text.partition(" -> ")
    pairs.append((command, actions))
  found: dict[str, str] = {}
  for command, actions in pairs:
    for word, action in zip(symbols(command), actions.split(), strict=True):
      assert found.setdefault(word, action) == action, source
  assert len(set(found.values())) == len(found), source
  return pairs, found


@pytest.mark.parametrize("data", [JUMP, EXCHANGED], ids=["meanings", "words too"])
def test_all_pairs_of_a_training_episode_follow_one_permutation_that_is_not_the_true_one(data):
  train, scan = data.load("train"), {part: data.data.load(part) for part in ("train", "test")}
  kept = set(zip(scan["test"].source, scan["test"].target, strict=True))
  assert len(train) == 400
  permutations, composed, whole = set(), 0, 0
  for source, target in zip(train.source, train.target, strict=True):
    pairs, found = meanings(source, target)
    assert len(pairs) == 7
    assert set(symbols(pairs[0][0])) <= {word for one in pairs[1:] for word in symbols(one[0])}
    assert kept.isdisjoint(pairs)
    whole += len(found) == 6
    assert len(found) < 6 or found != TRUE
    permutations.add(tuple(sorted(found.items())))
    composed += any(command in scan["test"].source for command, _ in pairs)
    if not data.exchange_words:
      assert {command for command, _ in pairs} <= set(scan["train"].source)
  assert whole > 5
  assert len(permutations) > 40
  assert (composed > 100) == data.exchange_words  # jump in other commands


def test_the_test_part_has_true_meanings_and_the_study_pair_of_jump():
  test, scan = JUMP.load("test"), JUMP.data.load("test")
  training = set(JUMP.data.load("train").source)
  assert len(test) == len(scan) == 7_706
  assert test.target == scan.target
  for number in range(0, len(test), 101):
    pairs, found = meanings(test.source[number], test.target[number])
    assert pairs[0][0] == scan.source[number]
    assert ("jump", "I_JUMP") in pairs[1:]
    assert {command for command, _ in pairs[1:]} <= training
    assert found.items() <= TRUE.items()
    assert all(len(actions.split()) <= 12 for _, actions in pairs[1:])
  assert test.where(3).endswith("of scan:addprim_jump/test[3]")


def test_an_episode_depends_on_seed_part_and_number_alone():
  first, fewer = JUMP.load("train"), dataclasses.replace(JUMP, episodes=50).load("train")
  assert first.source[:50] == fewer.source
  other = dataclasses.replace(JUMP, episodes=50, seed=1).load("train")
  assert len(set(fewer.source) & set(other.source)) < 5


def test_the_check_of_data_finds_no_leak_and_no_unknown_word():
  words = TokenizerConfig(kind="words")
  reports = check.check_splits(
    JUMP.load,
    JUMP.splits(),
    lambda train: pair_tokenizers(train.source, train.target, words, words),
  )
  assert [report.split for report in reports] == ["train", "valid", "test"]
  for report in reports:
    found = {kind: one.count for kind, one in report.findings.items() if one.count}
    assert set(found) <= {"over-long"}, found


def test_other_data_have_episodes_too():
  data = MlcData(
    LengthData(task="reverse", train=300, scored=20),
    primitives=("a:a b:b c:c",),
    study=4,
    longest=20,
    episodes=50,
  )
  assert data.splits() == ("train", "valid", "test", "longer_2", "longer_3")
  changed = 0
  for part in ("train", "longer_2"):
    pairs = data.load(part)
    for source, target in zip(pairs.source, pairs.target, strict=True):
      query, *studied = source.split(" | ")
      texts = [(query, target), *(tuple(text.split(" -> ")) for text in studied)]
      found: dict[str, str] = {}
      for left, right in texts:
        for word, meaning in zip(left.split(), right.split()[::-1], strict=True):
          assert found.setdefault(word, meaning) == meaning
      moved = {word for word, meaning in found.items() if word != meaning}
      assert moved <= set("abc")
      assert part == "train" or not moved
      changed += bool(moved)
  assert changed > 40
  assert pairs.info is not None
  assert pairs.info[0]["length"] > 20


def test_what_cannot_be_is_refused(tmp_path):
  with pytest.raises(UserError, match="primitives has the group 'walk:I_WALK'"):
    MlcData(primitives=("walk:I_WALK",))
  with pytest.raises(UserError, match="primitives has the group 'walk look'"):
    MlcData(primitives=("walk look",))
  with pytest.raises(UserError, match="study is 0"):
    MlcData(study=0)
  with pytest.raises(UserError, match=r"study is 1, but the query .* has 2 primitives"):
    dataclasses.replace(JUMP, study=1).load("test")
  with pytest.raises(UserError, match=r"longest is 1, but only"):
    dataclasses.replace(JUMP, longest=1, study=4).load("test")
  with pytest.raises(UserError, match="split"):
    JUMP.load("none")
  for part, words in (("train", "walk look jump"), ("test", "run")):
    lines = "\n".join(f"IN: {word} OUT: {TRUE[word]}" for word in words.split())
    (tmp_path / f"tasks_{part}_simple.txt").write_text(lines)
  with pytest.raises(UserError, match="has the primitive run, but no training pair has it"):
    MlcData(ScanData(folder=str(tmp_path), valid=1), study=1).load("test")
