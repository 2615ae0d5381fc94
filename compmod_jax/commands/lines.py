"""Programs that read lines and write one for each of them, whatever a line holds."""

import codecs
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, NamedTuple

from compmod_jax.training.progress import Progress

# Bytes of a line that are read, and of the lines that are held at once: input may have no end.
_LINE = 1 << 20
_CHUNK = 16 << 20
# What `str.splitlines` takes for the end of a line, and the tab, which parts columns.
_ENDS = dict.fromkeys(map(ord, "\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
_WARNED = 300  # most characters of a warning about a line

# From the lines of a chunk, the number of lines before it and the display to output lines.
Worker = Callable[[list[str], int, Progress], Iterable[str]]


def answer(
  work: Worker,
  source: IO[bytes],
  sink: IO[bytes],
  progress: Progress,
  *,
  chunk: int,
  terminal: bool = False,
  strip: bool = True,
) -> int:
  """Writes what a worker makes of every line of `source` to `sink`; returns how many lines it read.

  Args:
    work: makes the output lines of a chunk.
    source: lines that end with a line feed.
    sink: gets the output lines of each chunk as soon as they are made.
    progress: shows how many lines are finished.
    chunk: most lines of a chunk.
    terminal: whether a person types the lines, each of which is then answered at once.
    strip: whether lines come without the white space at their ends; else only without their end.
  """
  first = 0
  for lines in _chunks(source, 1 if terminal else max(1, chunk)):
    for text in work(_read(lines, first, strip), first, progress):
      sink.write(text.encode(errors="replace"))
    sink.flush()
    first += len(lines)
  return first


def on_standard_input(work: Worker, *, chunk: int, quiet: bool, strip: bool = True) -> None:
  """`answer` from standard input to standard output."""
  terminal = sys.stdin.isatty()
  progress = Progress(0, quiet=quiet or terminal or sys.stdout.isatty())
  try:
    given = sys.stdin.buffer, sys.stdout.buffer
    count = answer(work, *given, progress, chunk=chunk, terminal=terminal, strip=strip)
    progress.status("finished lines", count, count)
  finally:
    progress.close()


class _Line(NamedTuple):
  """The bytes of a line, and whether those after `_LINE` were left out."""

  data: bytes
  cut: bool


def _chunks(stream: IO[bytes], size: int) -> Iterator[list[_Line]]:
  """Lists of at most `size` lines; fewer where lines are long."""
  chunk, held = list[_Line](), 0
  # Binary, because text streams also end lines at carriage returns.
  while data := stream.readline(_LINE + 1):
    cut = len(data) > _LINE and not data.endswith(b"\n")
    rest = data
    while cut and rest and not rest.endswith(b"\n"):
      rest = stream.readline(_LINE)
    chunk.append(_Line(data[:_LINE], cut))
    held += len(data)
    if len(chunk) == size or held >= _CHUNK:
      yield chunk
      chunk, held = [], 0
  if chunk:
    yield chunk


def _read(lines: list[_Line], first: int, strip: bool) -> list[str]:
  """The sentences of a chunk; warns of what could not be read."""
  sentences = []
  damaged, long = [], []
  for number, (data, cut) in enumerate(lines, start=first + 1):
    # Where a line is cut, the beginning of a character may be left.
    try:
      text, _ = codecs.utf_8_decode(data, "strict", not cut)
    except UnicodeDecodeError:
      text, _ = codecs.utf_8_decode(data, "replace", not cut)
      damaged.append(number)
    if cut:
      long.append(number)
    text = text.removeprefix("\ufeff") if number == 1 else text
    sentences.append(text.strip() if strip else text.rstrip("\r\n"))
  warn(damaged, "is not UTF-8; what could not be read was replaced")
  warn(long, f"has more than {_LINE:,} bytes; the rest was left out")
  return sentences


def warn(numbers: list[int], what: str) -> None:
  """A warning about lines, if there are any: the first by its number, and some more."""
  if numbers:
    more = f" (and {len(numbers) - 1} more: {numbers[1:6]})" if len(numbers) > 1 else ""
    print(f"warning: line {numbers[0]} {what}{more}", file=sys.stderr, flush=True)


def warn_of(number: int, error: Exception) -> None:
  """A warning about one line that has an empty answer."""
  text = str(error)
  text = text if len(text) <= _WARNED else text[: _WARNED - 3] + "..."
  print(f"warning: line {number}: {one_line(text)}", file=sys.stderr, flush=True)


def status(progress: Progress, first: int) -> Callable[..., None]:
  """A status display that counts the lines of a chunk after those before it."""
  return lambda text, done=0, total=None: progress.status(
    "finished lines", first + (done or 0), None
  )


def one_line(text: str) -> str:
  """The text without what would break a line or a column apart."""
  return text.translate(_ENDS)
