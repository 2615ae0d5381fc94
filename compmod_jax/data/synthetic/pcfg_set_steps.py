r"""The steps from a sentence of PCFG SET to its string, as words that a model writes.

Scratchpads (Nye et al. 2021) for strings of any length: a stack machine whose every step is written
out. The sentence is read from its last word to its first; each string is put on a stack, reversed,
and a function takes one or two of them and puts its own. Each word depends on some that stand near
and on one that is found by the two words before it, however many functions there are and however
long strings become. Before each word of the source, and each word of a string, stands its number,
`#` and one more than the last one; where a word is taken again, it stands behind the same number.
Strings have names, `$` and one more than the last one, from fewer numbers, so that each is often
met:

    #3 < #4 < #5 < #6 < #7 < #8 reverse #9 B7 #10 C2 finish $3 #11 >

    start $4 #12 $4 read $3 #11 > first $4 #10 C2 open $4 none
      leaf $4 #10 C2 #13 C2            leaf $4 #9 B7 #14 B7      leaf $4 #8 reverse
    finish $4 #15 end
    start $5 #16 $5 read $4 #8 reverse next $5 #7 < pop $4 none open $5 none
      reverse1 $5 finish $4 #15 end    reverse1 $5 #14 B7 #17 B7
      reverse1 $5 #13 C2 #18 C2        reverse1 $5 #12 $4
    finish $5 #19 end
    start $6 #20 $6 read $5 #7 <
      answer finish $5 #19 end   answer #18 C2   answer #17 B7   answer #16 $5

Before a number stands what is done, and for which string. The words of a string are its name, its
symbols and `end`. `start` and `finish` stand before the name of the string whose first or last
number follows; the next string starts where one is finished. `next` tells what is read after a
function, `first` the first symbol that is copied. `open` is followed by the new string and all
under it on the stack, down to `none`, and so is `pop`, which finds them again. The first record of
a part of a function begins at its argument's start or finish. Where all symbols but the last are
copied, each is written when the next one has been taken: `shift2 $9 #59 C16 #67 R5`.

A sentence begins five times, so that no word that is looked up is the first of all. Behind it
others may stand, each after `;`. Their strings are put on the stack, too, and are never taken: the
answer is the first sentence's.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

NUMBERS = 800
"""Different numbers; longer sentences have some of them twice."""
NAMES = 100
"""Different names of strings."""
FIRST, LAST = "<", ">"
"""The words around a sentence."""
SEPARATOR = ";"
"""The word before a sentence that is not asked for."""
_END = "end"  # of a string
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
  """A sentence between words, each behind its number, as a string that is finished; see `steps`."""
  words = enumerate(_between(sentence), number)
  numbered = [one for n, word in words for one in (_number(n), word)]
  return [*numbered[:-2], "finish", _string(number), *numbered[-2:]]


def answer(written: Sequence[str]) -> list[str]:
  """The string at the end of steps; empty if there is none."""
  after = zip(written, written[2:], strict=False)
  return [word for told, word in after if told == "answer" and word != _END and word[0] != "$"]


def _between(sentence: Sequence[str]) -> list[str]:
  return [*[FIRST] * _BEGINNINGS, *sentence, LAST]


def _number(number: int) -> str:
  return f"#{number % NUMBERS}"


def _string(name: int) -> str:
  return f"${name % NAMES}"


class _String(NamedTuple):
  """A string's name, and the numbers of the words around its symbols: its name and its end."""

  name: str
  start: int
  end: int


class _Record(NamedTuple):
  """What is read by its number, and the number of what is then written, if anything is; before the
  first one of a part, which end of which string it begins at."""

  read: int
  written: int | None = None
  begins: tuple[str, ...] = ()


def _records(string: _String, part: _Part) -> list[_Record]:
  """How a part of a string is copied."""
  first, *others = _copies(string, part)
  edge = "start" if first.read == string.start else "finish"
  return [first._replace(begins=(edge, string.name)), *others]


def _copies(string: _String, part: _Part) -> list[_Record]:
  _, start, end = string
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
      first = start + (2 if part == "all but last" else 3)
      left_out = [_Record(at) for at in range(start, min(first, end))]
      return [*left_out, *(_Record(at, at - 1) for at in range(first, end)), _Record(end)]


def _copied(numbers: Sequence[int]) -> list[_Record]:
  return [_Record(number, number) for number in numbers]


class _Machine:
  """Reads the words of a sentence, from the last to the first, and writes the steps."""

  def __init__(self, words: Sequence[str], number: int) -> None:
    self._words, self._first = words, number
    self._number, self._name = number + len(words), number + 1  # the next ones
    self._new = ("", 0)  # the name and the first number of the string that is written
    self._stack: list[_String] = []
    self._known: dict[int, str] = dict(enumerate(words, number))
    self._written: list[str] = []

  def run(self) -> list[str]:
    """The steps."""
    at = len(self._words) - 1
    self._start()
    self._read(at, _string(self._first))
    while self._words[at] != FIRST:
      at = self._function(at) if self._words[at] in _PARTS else self._symbols(at)
      self._read(at, self._stack[-1].name)
    left = len(self._stack) - self._words.count(SEPARATOR)
    if left != 1:
      raise ValueError(f"{left} strings have no function that joins them")
    for record in _records(self._stack[-1], "backward"):
      self._written += ["answer", *record.begins, *self._found(record.read)]
    return self._written

  def _symbols(self, at: int) -> int:
    """Writes the string of the symbols before a word; returns where the word before them is."""
    name, start = self._new
    self._written += ["first", name, *self._found(self._first + at - 1)]
    self._open(name)
    while True:
      at -= 1
      self._written += ["leaf", name, *self._found(self._first + at)]
      if self._words[at] in (FIRST, ",", SEPARATOR, *_PARTS):
        break
      self._write(self._words[at])
    if self._number == start + 1:
      raise ValueError(f"no symbols stand behind {self._words[at]!r}")
    self._finish()
    return at

  def _function(self, at: int) -> int:
    """Writes the string that a function gives; returns where the word before the function is."""
    function, (name, _) = self._words[at], self._new
    self._written += ["next", name, *self._found(self._first + at - 1)]
    arguments = [self._pop(function) for _ in range(2 if function in _BINARY else 1)]
    self._open(name)
    for n, (argument, part) in enumerate(_PARTS[function], 1):
      for record in _records(arguments[argument], part):
        self._written += [f"{function}{n}", name, *record.begins, *self._found(record.read)]
        if record.written is not None:
          self._write(self._known[record.written])
    self._finish()
    return at - 1

  def _pop(self, function: str) -> _String:
    """Takes a string from the stack for a function."""
    if not self._stack:
      raise ValueError(f"{function!r} lacks an argument")
    string = self._stack.pop()
    self._written += ["pop", string.name, *self._names()]
    return string

  def _names(self) -> list[str]:
    """Of the strings on the stack, the newest first."""
    return [*(string.name for string in reversed(self._stack)), _NONE]

  def _start(self) -> None:
    """Writes the name of the next string, its first word."""
    self._new = _string(self._name), self._number
    self._name += 1
    self._written += ["start", self._new[0]]
    self._write(self._new[0])

  def _open(self, name: str) -> None:
    """Opens a string above those on the stack."""
    self._written += ["open", name, *self._names()]

  def _finish(self) -> None:
    """Closes the string, puts it on the stack, and starts the next one."""
    name, start = self._new
    self._stack.append(_String(name, start, self._number))
    self._written += ["finish", name]
    self._write(_END)
    self._start()

  def _read(self, at: int, name: str) -> None:
    """Reads a word of the sentence behind a string."""
    self._written += ["read", name, *self._found(self._first + at)]

  def _found(self, number: int) -> list[str]:
    """A word behind its number."""
    return [_number(number), self._known[number]]

  def _write(self, word: str) -> None:
    """Writes a new word, behind the next number."""
    self._known[self._number] = word
    self._written += self._found(self._number)
    self._number += 1
