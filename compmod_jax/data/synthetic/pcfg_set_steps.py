r"""The steps from a sentence of PCFG SET to its string, as words that a model writes.

Scratchpads (Nye et al. 2021) for strings of any length: a stack machine whose every step is written
out. The sentence is read from its last word to its first; each string is put on a stack, reversed,
and a function takes one or two of them and puts its own. Each word depends on some that stand near
and on one that is found by its number, however many functions there are and however long strings
become. Behind each word of the source, and each symbol that is written, stands its number, `#` and
one more than the last one; `@` and a number point to it, and `$` and the number of its start name a
string:

    <s> #3 <s> #4 <s> #5 <s> #6 <s> #7 reverse #8 B7 #9 C2 #10 </s> #11

    read none @11 </s>
    push none #12 start #13 @10 </s>
      leaf $13 @10 C2 #14      leaf $13 @9 B7 #15       leaf $13 @8 reverse
    end #16 $13 read $13 @8 reverse
    pop $13 @12 none #17 start #18 @7 reverse
      reverse1 $18 @16 end     reverse1 $18 @15 B7 #19
      reverse1 $18 @14 C2 #20  reverse1 $18 @13 start
    end #21 $18 read $18 @7 <s>
      answer @21 end   answer @20 C2   answer @19 B7   answer @18 start

What is found by a number always stands behind it, and the words before the number are always of the
same kinds: what is done, and for which string. `push` and `pop` are followed by the string on top
of the stack; behind the number before its start stands the one under it, which is `none` where
there is no other. A string's header ends with the number of the word of the source that is read
behind its function, and with the function; that of a string of the source with its last symbol's
number and the word behind it. Where all symbols but the last are copied, each is written when the
next one has been read: `shift2 $66 @59 C16 R5 #67`.

A sentence begins five times, so that no word that is looked up is the first of all. Behind it
others may stand, each after `;`. Their strings are put on the stack, too, and are never taken: the
answer is the first sentence's.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

NUMBERS = 600
"""Different numbers; longer sentences have some of them twice."""
FIRST, LAST = "<s>", "</s>"
"""The words around a sentence."""
SEPARATOR = ";"
"""The word before a sentence that is not asked for."""
_AROUND = "start", "end"  # of a string
_BEGINNINGS = 5  # words before a sentence
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
    number: of the first word before it; all others follow.

  Returns:
    The words, which end with the sentence's string; see `answer`.

  Raises:
    ValueError: arguments are missing, or left over.
  """
  return _Machine(_between(sentence), number).run()


def numbered_source(sentence: Sequence[str], number: int) -> list[str]:
  """A sentence with words on either side, and a number behind each word; see `steps`."""
  words = enumerate(_between(sentence), number)
  return [one for n, word in words for one in (word, _name("#", n))]


def answer(written: Sequence[str]) -> list[str]:
  """The string at the end of steps; empty if there is none."""
  after = zip(written, written[2:], strict=False)
  return [word for told, word in after if told == "answer" and word not in _AROUND]


def _between(sentence: Sequence[str]) -> list[str]:
  return [*[FIRST] * _BEGINNINGS, *sentence, LAST]


def _name(kind: str, number: int) -> str:
  return f"{kind}{number % NUMBERS}"


class _String(NamedTuple):
  """The numbers of the words around a string's symbols."""

  start: int
  end: int


class _Record(NamedTuple):
  """What is read by its number, and the number of what is then written, if anything is."""

  read: int
  written: int | None = None


def _records(string: _String, part: _Part) -> list[_Record]:
  """How a part of a string is copied. The first record says where it begins."""
  start, end = string
  match part:
    case "forward":
      return [_Record(start), *_copied(range(start + 1, end)), _Record(end)]
    case "backward":
      return [_Record(end), *_copied(range(end - 1, start, -1)), _Record(start)]
    case "first":
      return [_Record(start), _Record(start + 1, start + 1)]
    case "last":
      return [_Record(end), _Record(end - 1, end - 1)]
    case _:
      first = start + (1 if part == "all but last" else 2)
      later = [_Record(at, at - 1) for at in range(first + 1, end)]
      return [_Record(first), *later, _Record(end)] if first < end else [_Record(end)]


def _copied(numbers: Sequence[int]) -> list[_Record]:
  return [_Record(number, number) for number in numbers]


class _Machine:
  """Reads the words of a sentence, from the last to the first, and writes the steps."""

  def __init__(self, words: Sequence[str], number: int) -> None:
    self._words, self._first = words, number
    self._number = number + len(words)  # the next one
    self._stack: list[_String] = []
    self._before: dict[int, str] = dict(enumerate(words, number))
    self._written: list[str] = []

  def run(self) -> list[str]:
    """The steps."""
    at = len(self._words) - 1
    self._read(at)
    while self._words[at] != FIRST:
      at = self._function(at) if self._words[at] in _PARTS else self._symbols(at)
      self._read(at)
    left = len(self._stack) - self._words.count(SEPARATOR)
    if left != 1:
      raise ValueError(f"{left} strings have no function that joins them")
    for record in _records(self._stack[-1], "backward"):
      self._written += ["answer", *self._found(record.read)]
    return self._written

  def _symbols(self, at: int) -> int:
    """Writes the string of the symbols before a word; returns where the word before them is."""
    self._written += ["push", self._top()]
    start = self._start(at)
    while True:
      at -= 1
      self._written += ["leaf", _name("$", start), *self._found(self._first + at)]
      if self._words[at] in (FIRST, ",", SEPARATOR, *_PARTS):
        break
      self._give_number()
    if self._number == start + 1:
      raise ValueError(f"no symbols stand behind {self._words[at]!r}")
    self._end(start)
    return at

  def _function(self, at: int) -> int:
    """Writes the string that a function gives; returns where the word before the function is."""
    name = self._words[at]
    arguments = [self._pop(name) for _ in range(2 if name in _BINARY else 1)]
    start = self._start(at)
    for n, (argument, part) in enumerate(_PARTS[name], 1):
      for record in _records(arguments[argument], part):
        self._written += [f"{name}{n}", _name("$", start), *self._found(record.read)]
        if record.written is not None:
          if record.written != record.read:
            self._written.append(self._before[record.written])
          self._give_number()
    self._end(start)
    return at - 1

  def _pop(self, name: str) -> _String:
    """Takes a string from the stack for a function."""
    if not self._stack:
      raise ValueError(f"{name!r} lacks an argument")
    self._written += ["pop", self._top()]
    string = self._stack.pop()
    self._written += [_name("@", string.start - 1), self._top()]
    return string

  def _top(self) -> str:
    """The name of the string on top of the stack."""
    return _name("$", self._stack[-1].start) if self._stack else _NONE

  def _start(self, at: int) -> int:
    """Opens a string for a word, behind the one under it; returns the number of its start."""
    self._give_number()
    self._written.append("start")
    number = self._give_number()
    self._written += [_name("@", self._first + at - 1), self._words[at]]
    return number

  def _end(self, start: int) -> None:
    """Closes a string, and puts it on the stack."""
    self._written.append("end")
    self._stack.append(_String(start, self._give_number()))
    self._written.append(self._top())

  def _read(self, at: int) -> None:
    """Reads a word of the sentence for the string on top of the stack."""
    self._written += ["read", self._top(), *self._found(self._first + at)]

  def _found(self, number: int) -> list[str]:
    """A word behind its number."""
    return [_name("@", number), self._before[number]]

  def _give_number(self) -> int:
    """Numbers the last word."""
    number = self._number
    self._before[number] = self._written[-1]
    self._written.append(_name("#", number))
    self._number += 1
    return number
