r"""The steps from a sentence of PCFG SET to its string, as words that a model writes.

Scratchpads (Nye et al. 2021) for strings of any length: a stack machine whose every step is written
out. The sentence is read from its last word to its first; each string is put on a stack, reversed,
and a function takes one or two of them and puts its own. Each word depends on some that stand near
and on one that is found by its number, however many functions there are and however long strings
become. Behind each word of the source, and each symbol that is written, stands its number, `#` and
one more than the last one; `@` and a number point to it:

    <s> #7 reverse #8 B7 #9 C2 #10 </s> #11

    </s> #11 open none #12 start #13 @10
      leaf @13 @10 C2 #14   leaf @13 @9 B7 #15   leaf @13 @8 reverse
    end #16 @13 @9 @8 reverse open @13 @12 none #17 start #18 @8
      reverse1 @18 @16 end      reverse1 @18 @15 B7 #19
      reverse1 @18 @14 C2 #20   reverse1 @18 @13 start
    end #21 @18 @8 @7 <s>
      answer @21 end   answer @20 C2   answer @19 B7   answer @18 start

A string is opened by the starts of the one or two strings that it is made of, which are on top of
the stack, the start of the string under it, and the word of the source. The number before that of
its start is the one of the string under it: `@12 none` says that there is none under `@13`. Each
symbol has four words before its number: what makes it, to which string it belongs, the number of
the symbol that is taken, and that symbol.

Behind a sentence others may stand, each after `;`. Their strings are put on the stack, too, and are
never taken: the answer is the first sentence's.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

NUMBERS = 600
"""Different numbers; longer sentences have some of them twice."""
FIRST, LAST = "<s>", "</s>"
"""The words around a sentence."""
SEPARATOR = ";"
"""The word before a sentence that is not asked for."""
_AROUND = "start", "end"  # of a string
_NONE = "none"  # where there is no string
_BINARY = "append", "prepend", "remove_first", "remove_second"

_Part = Literal["forward", "backward", "first", "last", "all but last", "inner"]
_PARTS: Mapping[str, tuple[tuple[int, _Part], ...]] = {
  "copy": ((0, "forward"),),
  "reverse": ((0, "backward"),),
  "shift": ((0, "last"), (0, "all but last")),
  "echo": ((0, "first"), (0, "forward")),
  "swap_first_last": ((0, "last"), (0, "inner"), (0, "first")),
  "repeat": ((0, "forward"), (0, "forward")),
  "append": ((1, "forward"), (0, "forward")),
  "prepend": ((0, "forward"), (1, "forward")),
  "remove_first": ((1, "forward"),),
  "remove_second": ((0, "forward"),),
}
"""Function -> of which argument its string has which symbols; strings are reversed."""


def steps(sentence: Sequence[str], number: int) -> list[str]:
  """What a model writes for a sentence.

  Args:
    sentence: its words; others may follow behind `;`.
    number: of the word before it; all others follow.

  Returns:
    The words, which end with the sentence's string; see `answer`.

  Raises:
    ValueError: arguments are missing, or left over.
  """
  return _Machine([FIRST, *sentence, LAST], number).run()


def numbered_source(sentence: Sequence[str], number: int) -> list[str]:
  """A sentence with a word on either side, and a number behind each word; see `steps`."""
  words = enumerate([FIRST, *sentence, LAST], number)
  return [one for n, word in words for one in (word, _name("#", n))]


def answer(written: Sequence[str]) -> list[str]:
  """The string at the end of steps; empty if there is none."""
  after = zip(written, written[2:], strict=False)
  return [word for told, word in after if told == "answer" and word not in _AROUND]


def _name(kind: str, number: int) -> str:
  return f"{kind}{number % NUMBERS}"


class _String(NamedTuple):
  """The numbers of the words around a string's symbols."""

  start: int
  end: int


def _records(string: _String, part: _Part) -> list[tuple[int, ...]]:
  """Which symbols are named one after the other; of those in pairs, the second one is taken."""
  start, end = string
  match part:
    case "forward":
      return [(at,) for at in range(start, end + 1)]
    case "backward":
      return [(at,) for at in range(end, start - 1, -1)]
    case "first":
      return [(start,), (start + 1,)]
    case "last":
      return [(end,), (end - 1,)]
    case _:
      least = start if part == "all but last" else start + 1
      return [*((at + 1, at) for at in range(least, end - 1)), (end,)]


class _Machine:
  """Reads the words of a sentence, from the last to the first, and writes the steps."""

  def __init__(self, words: Sequence[str], number: int) -> None:
    self._words, self._first = words, number
    self._number = number + len(words) - 1  # the next one
    self._stack: list[_String] = []
    self._before: dict[int, str] = {}  # number -> the word before it
    self._written: list[str] = []

  def run(self) -> list[str]:
    """The steps."""
    at = len(self._words) - 1
    self._written.append(LAST)
    self._give_number()
    while self._words[at] != FIRST:
      at = self._function(at) if self._words[at] in _PARTS else self._symbols(at)
      self._written += [self._source(at)[0], *self._source(at - 1)]
      at -= 1
    (string,) = self._take(1, FIRST)
    left = len(self._stack) - self._words.count(SEPARATOR)
    if left:
      raise ValueError(f"{1 + left} strings have no function that joins them")
    for (taken,) in _records(string, "backward"):
      self._written += ["answer", *self._taken(taken)]
    return self._written

  def _symbols(self, at: int) -> int:
    """Writes the string of the symbols before a word; returns where the first of them is."""
    start = self._start((), self._source(at - 1)[0])
    while True:
      at -= 1
      self._written += ["leaf", _name("@", start), *self._source(at)]
      if self._words[at] in (FIRST, ",", SEPARATOR, *_PARTS):
        break
      self._give_number()
    if self._number == start + 1:
      raise ValueError(f"no symbols stand behind {self._words[at]!r}")
    self._end(start)
    return at + 1

  def _function(self, at: int) -> int:
    """Writes the string that a function gives; returns where the function is."""
    name = self._words[at]
    arguments = self._take(2 if name in _BINARY else 1, name)
    start = self._start(arguments, self._source(at)[0])
    for n, (argument, part) in enumerate(_PARTS[name], 1):
      for place, record in enumerate(_records(arguments[argument], part)):
        self._written += [f"{name}{n}", _name("@", start)]
        for taken in record:
          self._written += self._taken(taken)
        # The first one says where the part starts.
        if place and self._before[record[0]] not in _AROUND:
          self._give_number()
    self._end(start)
    return at

  def _take(self, count: int, name: str) -> list[_String]:
    """So many strings from the stack for a word, the first argument first."""
    if len(self._stack) < count:
      raise ValueError(f"{name!r} needs {count} strings and finds {len(self._stack)}")
    return [self._stack.pop() for _ in range(count)]

  def _start(self, arguments: Sequence[_String], word: str) -> int:
    """Opens a string that is made of others, for a word; returns the number of its start."""
    self._written.append("open")
    if arguments:
      self._written.append(_name("@", arguments[0].start))
    under = [*arguments[1:], self._stack[-1] if self._stack else None]
    for argument, below in itertools.zip_longest(arguments, under):
      if argument is not None:
        self._written.append(_name("@", argument.start - 1))
      self._written.append(_NONE if below is None else _name("@", below.start))
    self._give_number()
    self._written.append("start")
    number = self._give_number()
    self._written.append(word)
    return number

  def _end(self, start: int) -> None:
    """Closes a string, and puts it on the stack."""
    self._written.append("end")
    self._stack.append(_String(start, self._give_number()))
    self._written.append(_name("@", start))

  def _taken(self, number: int) -> list[str]:
    """A symbol behind its number."""
    return [_name("@", number), self._before[number]]

  def _source(self, at: int) -> list[str]:
    """A word of the sentence behind its number."""
    return [_name("@", self._first + at), self._words[at]]

  def _give_number(self) -> int:
    """Numbers the last word."""
    number = self._number
    self._before[number] = self._written[-1]
    self._written.append(_name("#", number))
    self._number += 1
    return number
