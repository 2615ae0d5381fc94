"""Tasks on sequences: their answers by other means, and how long each part is."""

import typing

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.lengths import LengthData, LengthTask

TASKS = typing.get_args(LengthTask)


def data_of(task) -> LengthData:
  return LengthData(task=task, train=1_000, scored=100)


def expected(task: str, source: list[str]) -> list[str]:
  if task == "addition":
    first, second = ("".join(source[: source.index("+")]), "".join(source[source.index("+") + 1 :]))
    assert len(first) == len(second)
    return list(f"{int(first) + int(second):0{len(first) + 1}d}")
  if task == "parity":
    return [str(sum(map(int, source)) % 2)]
  return {"copy": source, "reverse": source[::-1], "sorting": sorted(source)}[task]


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_and_lengths_are_those_of_the_part(task):
  data = data_of(task)
  assert data.splits() == ("train", "valid", "test", "longer_2", "longer_3")
  bounds = {"train": (1, 20), "test": (1, 20), "longer_2": (21, 40), "longer_3": (41, 60)}
  seen: set[str] = set()
  for part, (least, most) in bounds.items():
    pairs = data.load(part)
    lengths = {int(one["length"]) for one in pairs.info or ()}
    assert least <= min(lengths)
    assert max(lengths) == most
    for source, target in zip(pairs.source, pairs.target, strict=True):
      assert target.split() == expected(task, source.split())
    assert not seen & set(pairs.source)
    seen |= set(pairs.source)


@pytest.mark.parametrize("task", ["copy", "reverse", "addition"])
def test_hints_number_symbols_alike_in_source_and_target(task):
  data = LengthData(task=task, train=300, scored=300, hints=70)
  pairs = data.load("longer_3")
  starts = set()
  for source, target in zip(pairs.source, pairs.target, strict=True):
    given = [word for word in source.split() if word[0] != "#"]
    made = [word for word in target.split() if word[0] != "#"]
    if task == "addition":
      assert given[0] == given[given.index("+") + 1] == "0"
      given = [*given[1 : given.index("+")], "+", *given[given.index("+") + 2 :]]
      made = made[::-1]
    assert expected(task, given) == made
    numbers = [int(word[1:]) for word in source.split() if word[0] == "#"]
    written = [int(word[1:]) for word in target.split()[::2]]
    if task == "addition":
      half = len(numbers) // 2
      assert numbers[:half] == numbers[half:]
      numbers = numbers[half - 1 :: -1]
    assert written == (numbers[::-1] if task == "reverse" else numbers)
    assert numbers == sorted(set(numbers))
    assert 0 <= numbers[0] <= numbers[-1] < 70
    starts.add(tuple(numbers))
  assert len(starts) > 100


def test_a_scratchpad_adds_digit_by_digit():
  plain, written = (
    LengthData(task="addition", train=300, scored=300, hints=70, scratchpad=on)
    for on in (False, True)
  )
  for part in ("train", "longer_3"):
    pairs = written.load(part)
    assert pairs.source == plain.load(part).source
    for steps, digits in zip(pairs.target, plain.load(part).target, strict=True):
      words = steps.split()
      assert " ".join(f"{n} {digit}" for n, digit in zip(words[::5], words[4::5], strict=True)) == (
        digits
      )
      carries = [int(word.removeprefix("carry_")) for word in words[3::5]]
      sums = [sum(map(int, two)) for two in zip(words[1::5], words[2::5], strict=True)]
      for one, carry, after, digit in zip(
        sums, carries, [*carries[1:], 0], words[4::5], strict=True
      ):
        assert one + carry == 10 * after + int(digit)
  first = LengthData(task="addition", length=8, hints=70, scratchpad=True).load("train")
  source, target = first.source[0].split(), first.target[0].split()
  middle = source.index("+")
  assert target[:3] == [source[middle - 2], source[middle - 1], source[-1]]


@pytest.mark.parametrize(
  ("fields", "match"),
  [
    ({"task": "add"}, "'add'"),
    ({"length": 4}, "length is 4"),
    ({"hints": 60}, "hints is 60"),
    ({"task": "parity", "hints": 70}, "task 'parity'"),
    ({"times": 1}, "times is 1"),
    ({"task": "addition", "scratchpad": True}, "scratchpad is on with task 'addition' and 0 hints"),
    ({"hints": 70, "scratchpad": True}, "scratchpad is on with task 'copy'"),
  ],
)
def test_what_cannot_be_made_is_refused_by_name(fields, match):
  with pytest.raises(UserError, match=match):
    LengthData(**fields)
