"""Bytes that no reader expects: hostile lines, and damage to files that are right."""

import json
import random
from collections.abc import Callable
from typing import Any

DEEP = 100_000  # levels of nesting, far beyond what Python recurses to
DIGITS = 5_000  # of a number, more than Python turns into an integer
LONG = 1_200_000  # bytes of a long line
_TEXT = (
  b"",
  b" \t ",
  b"\x00",
  b"a\x00b",
  b"\r",
  b"a\rb",
  "a\u2028b\u2029c\x85d\x0be\x0cf".encode(),
  "\ufeff".encode(),
  "\ufeffa".encode(),
  "e\u0301\u0301\u0301 \u202e\u200b\u200d \U0001f600".encode(),
  "\u0130\ufb01\u00df \u1e9e".encode(),
  "\uff11\u0661\u00b2".encode(),  # digits that are not ASCII, and one that is no digit for `int`
  b"\xff\xfe",
  b"\xc3",
  b"\xed\xa0\x80",
  b"\xf4\x90\x80\x80",
  b"9" * DIGITS,
  b"-1",
  b"1e999",
  b"NaN",
  b"null",
  b"[]",
  b"{}",
  b'"',
  b'""',
  b'"a',
  b"'",
  b"\\",
  b"\t",
  b"\t\t\t\t\t\t\t\t\t\t\t\t",
  b",",
  b"|",
  b"||",
  b"a | b?",
  b"a? (1) b (2) c",
  b"a? (1) b (3) c",
  b"a? " + b" ".join(b"(%d) x" % n for n in range(1, 10)),
  b"(" + b"9" * DIGITS + b")",
  b"<mask>",
  b"<mask> <mask> <pad> </s> <unk> <s>",
  b"<p> <q> <sep> (1)",
  b"<mask>" * 200,
  b"%s %d {0} {} $HOME ${HOME} ~",
  b"../../x",
  b"\x1b[31m",
)
_HUGE = (
  b"x" * LONG,
  b"x y " * (LONG // 4),
  b'"' * (LONG // 8),
  b"\t" * (LONG // 8),
  b"[" * DEEP,
  b"{" * DEEP,
  b'{"a":' * DEEP,
  b"[" * DEEP + b"]" * DEEP,
)
# In JSON, a value may become one of these; the first three are written after `json.dumps`.
_PLACED = {
  "@deep@": "[" * DEEP + "]" * DEEP,
  "@number@": "9" * DIGITS,
  "@half@": '"\\ud800"',
}
_VALUES: tuple[Any, ...] = (
  *_PLACED,
  None,
  True,
  False,
  0,
  -1,
  5,
  2**70,
  0.5,
  float("inf"),
  float("nan"),
  "",
  " ",
  "9" * DIGITS,
  "\u00b2",
  "a\nb",
  "\x00",
  "a\u2028b",
  "a" * 1000,
  [],
  [[]],
  [1, 2],
  [None],
  ["a"],
  ["a", "b", "c"],
  list("abcdefghi"),
  {},
  {"a": 1},
  {"": {"": []}},
)
HUGE_SHARE = 0.002
"""How many of the lines are very long or nested very deeply; they take as long as many others."""


class Hostile:
  """A source of hostile lines and damaged files; the same seed gives the same ones."""

  def __init__(self, seed: str):
    self.random = random.Random(seed)

  def line(self) -> bytes:
    """A line without its end."""
    chance = self.random.random()
    if chance < HUGE_SHARE:
      return self.random.choice(_HUGE)
    if chance < 0.5:
      return self.random.choice(_TEXT)
    if chance < 0.6:
      return self.random.randbytes(self.random.randint(1, 40)).replace(b"\n", b" ")
    parts = self.random.choices(_TEXT, k=self.random.randint(2, 4))
    return self.random.choice((b" ", b"", b"\t", b",")).join(parts)

  def damaged_line(self, line: bytes) -> bytes:
    """A line that was right, changed in one way."""
    ways: list[Callable[[bytes], bytes]] = [
      lambda _: self.line(),
      self._inserted,
      self._shortened,
      self._flipped,
      self._columns,
    ]
    if line.lstrip()[:1] in (b"{", b"["):
      ways += [self.damaged_json] * 5
    return self.random.choice(ways)(line)

  def damaged_lines(self, content: bytes) -> bytes:
    """A file of lines, some of them changed, or damaged as a whole."""
    lines = content.removesuffix(b"\n").split(b"\n")
    for _ in range(self.random.choice((1, 1, 1, 2, 3))):
      place = self.random.randrange(len(lines))
      way = self.random.random()
      if way < 0.8:
        lines[place] = self.damaged_line(lines[place])
      elif way < 0.9 and len(lines) > 1:
        del lines[place]
      else:
        lines.insert(place, self.random.choice((self.line(), lines[place])))
    return self._as_a_whole(b"\n".join(lines) + b"\n")

  def damaged_json(self, text: bytes) -> bytes:
    """JSON with a value exchanged, taken out or put in."""
    try:
      root = json.loads(text)
    except (ValueError, RecursionError):
      return self._flipped(text)
    root = [root]
    places = list(_places(root))
    holder, key = self.random.choice(places[1:] or places)
    if self.random.random() < 0.2 and holder is not root:
      del holder[key]
    else:
      holder[key] = self.random.choice(_VALUES)
    found = json.dumps(root[0], ensure_ascii=self.random.random() < 0.5)
    for name, value in _PLACED.items():
      found = found.replace(f'"{name}"', value)
    return found.encode(errors="surrogatepass")

  def damaged_bytes(self, content: bytes) -> bytes:
    """An archive or a compressed file, damaged."""
    way = self.random.randrange(4)
    if way == 0:
      return self._shortened(content)
    if way == 1:
      return self._inserted(content)
    changed = bytearray(content)
    for _ in range(self.random.choice((1, 1, 8))):
      if changed:
        changed[self.random.randrange(len(changed))] = self.random.randrange(256)
    return bytes(changed)

  def _as_a_whole(self, content: bytes) -> bytes:
    """Mostly the file itself; else with other ends of lines, encoded otherwise, cut or empty."""
    way = self.random.random()
    if way < 0.9:
      return content
    ways: tuple[Callable[[], bytes], ...] = (
      lambda: content.replace(b"\n", b"\r\n"),
      lambda: content.replace(b"\n", b"\r"),
      lambda: b"\xef\xbb\xbf" + content,
      lambda: content.decode(errors="replace").encode("utf-16"),
      lambda: content[: self.random.randrange(len(content) + 1)],
      lambda: content.removesuffix(b"\n"),
      lambda: content + b"\n\n\n",
      lambda: b"\n" + content,
      lambda: b"",
      lambda: b"\n\n",
      lambda: bytes(self.random.randint(1, 100)),
      lambda: self.random.randbytes(self.random.randint(1, 400)),
    )
    return self.random.choice(ways)()

  def _inserted(self, line: bytes) -> bytes:
    place = self.random.randint(0, len(line))
    return line[:place] + self.line() + line[place:]

  def _shortened(self, line: bytes) -> bytes:
    first, last = sorted(self.random.randint(0, len(line)) for _ in range(2))
    return line[:first] + line[last:] if self.random.random() < 0.5 else line[:first]

  def _flipped(self, line: bytes) -> bytes:
    changed = bytearray(line)
    for _ in range(self.random.choice((1, 1, 4))):
      if changed:
        value = self.random.choice((0, 9, 13, 34, 39, 44, 92, 128, 255, self.random.randrange(256)))
        changed[self.random.randrange(len(changed))] = value if value != 10 else 11
    return bytes(changed)

  def _columns(self, line: bytes) -> bytes:
    """A column exchanged, taken out or put in."""
    mark = b"\t" if b"\t" in line else b","
    columns = line.split(mark)
    place, way = self.random.randrange(len(columns)), self.random.random()
    if way < 0.6:
      columns[place] = self.line()
    elif way < 0.8:
      del columns[place]
    else:
      columns.insert(place, self.line())
    return mark.join(columns)


def _places(holder: Any) -> Any:
  """(object or list, key) of every value that it holds, at all levels."""
  keys = list(holder) if isinstance(holder, dict) else range(len(holder))
  for key in keys:
    yield holder, key
    if isinstance(holder[key], dict | list):
      yield from _places(holder[key])
