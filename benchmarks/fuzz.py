"""Feeds damaged and hostile files to every reader, and such lines to `predict`.

    python -m benchmarks.fuzz --seconds 600 --json results/robustness/fuzz.json

Every reader is given at least `--lines` lines, in files of about ten of which one to three are
damaged; after that, readers and models take turns until the time is over. A reader may refuse a
file by a message of one paragraph that names a file, and goes on otherwise. What must not be is a
traceback, a message that names no file or is pages long, or a line that is lost without a word. Any
of them is counted, and makes the exit status 1.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import io
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import describe, machine
from benchmarks.fuzz_inputs import Hostile
from benchmarks.fuzz_readers import Reader, readers
from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.typed_lines import typed_question
from compmod_jax.data.synthetic.scan import interpret

KEPT = 3  # tracebacks and messages that are kept of each reader
_LONGEST = 1200  # characters of a message
_FILES = 25  # damaged files of a turn
_LINES = 250  # hostile lines of a turn of `predict`


@dataclasses.dataclass
class Count:
  """What one reader made of its input.

  Attributes:
    lines: that were read.
    inputs: files, or for `predict` batches of lines.
    read: inputs that were read without a message.
    errors: kind -> messages of it.
    unplaced: messages that name no file, of several lines, or longer than a person reads.
    tracebacks: inputs that ended in anything but a message.
    lost_lines: lines that are neither in the output nor in a message.
    seconds: that it took.
    kept: the first tracebacks and messages without a place.
  """

  lines: int = 0
  inputs: int = 0
  read: int = 0
  errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  unplaced: int = 0
  tracebacks: int = 0
  lost_lines: int = 0
  seconds: float = 0.0
  kept: list[str] = dataclasses.field(default_factory=list)

  @property
  def failed(self) -> bool:
    """Whether there is anything that must not be."""
    return bool(self.unplaced or self.tracebacks or self.lost_lines)

  def crashed(self) -> None:
    """Notes the exception at hand, which is no message."""
    self.tracebacks += 1
    self.keep(traceback.format_exc(limit=-6)[-2000:])

  def keep(self, text: str) -> None:
    """Keeps the first few texts."""
    if len(self.kept) < KEPT:
      self.kept.append(text)


Turn = Callable[[Count], None]
"""Feeds a little more to one reader and counts what came of it."""


def file_turn(name: str, reader: Reader, seed: int, folder: Path, files: int = _FILES) -> Turn:
  """Turns of a reader of files; `folder` is emptied and filled again."""
  hostile = Hostile(f"{seed} {name}")
  folder.mkdir()

  def turn(count: Count) -> None:
    for _ in range(files):
      damaged = hostile.random.choice(list(reader.files))
      for file, content in reader.files.items():
        if file == damaged:
          content = _damage(hostile, reader.damage, content)
          count.lines += content.count(b"\n") + 1
        (folder / file).write_bytes(content)
      count.inputs += 1
      _read(reader, folder, count)

  return turn


def _damage(hostile: Hostile, how: str, content: bytes) -> bytes:
  if how == "bytes":
    return hostile.damaged_bytes(content)
  if how == "json" and hostile.random.random() < 0.7:
    return hostile.damaged_json(content)
  return hostile.damaged_lines(content)


def _read(reader: Reader, folder: Path, count: Count) -> None:
  try:
    lost = reader.read(folder)
  except UserError as error:
    message = str(error)
    count.errors[kind_of(message, folder)] += 1
    placed = any(file in message for file in reader.files)
    if not placed or "\n" in message or len(message) > _LONGEST:
      count.unplaced += 1
      shown = message.replace(f"{folder}/", "")[:500]
      count.keep(f"a message of {len(message)} characters: {shown}")
  except Exception:
    count.crashed()
  else:
    count.read += 1
    if lost:
      count.lost_lines += abs(lost)
      count.keep(
        f"{lost} lines lost: {[(f, (folder / f).read_bytes()) for f in reader.files]}"[:2000]
      )


def kind_of(message: str, folder: Path) -> str:
  """A message without what differs from input to input: places, values and numbers."""
  text = message.replace(f"{folder}/", "")
  text = re.sub(r"\(.*?\)|'[^']*'|\"[^\"]*\"|\[.*?\]|\{.*?\}", "_", text)
  text = re.sub(r"\b[\w-]+\.(?:\w{2,5})(?:\.gz)?(?:[:/][\w.\-_]*)?", "FILE", text)
  text = re.sub(r"\d[\d,.]*", "N", text)
  text = text.encode("ascii", "replace").decode()
  return " ".join(text.split())[:60]


def line_turn(name: str, answer: Callable[[str], object], seed: int) -> Turn:
  """Turns of what takes one line and has no file: each is answered or refused by a message."""
  hostile = Hostile(f"{seed} {name}")

  def turn(count: Count) -> None:
    for _ in range(_LINES):
      line = hostile.damaged_line(_QUESTION if hostile.random.random() < 0.5 else _COMMAND)
      count.lines += 1
      count.inputs += 1
      try:
        answer(line.decode(errors="replace"))
      except UserError as error:
        count.errors[kind_of(str(error), Path())] += 1
      except Exception:
        count.crashed()
      else:
        count.read += 1

  return turn


_QUESTION = b'{"question": "Who?", "passage": "A b.", "options": ["a", "b"], "format": "yes_no"}'
_COMMAND = b"jump opposite left after walk twice"


def predict_turn(name: str, make: Callable[[], Any], seed: int, lines: int = _LINES) -> Turn:
  """Turns of `predict` with one model, which is made when it is first needed."""
  hostile = Hostile(f"{seed} {name}")
  made: list[Any] = []

  def turn(count: Count) -> None:
    if not made:
      made.append(make())
    model = made[0]
    own = [
      model.good
      if hostile.random.random() < 0.1
      else hostile.damaged_line(hostile.random.choice((model.good, _QUESTION))).replace(b"\n", b" ")
      for _ in range(lines)
    ]
    count.lines += len(own)
    count.inputs += 1
    warnings = io.StringIO()
    try:
      with contextlib.redirect_stderr(warnings):
        lost = model.lost(own, count.inputs)
    except Exception:
      count.crashed()
      count.lost_lines += len(own)
      return
    count.read += 1
    for line in warnings.getvalue().splitlines():
      count.errors[kind_of(re.sub(r"line \d+:?", "line N", line), Path())] += 1
    if lost:
      count.lost_lines += lost
      count.keep(f"{lost} lines lost or exchanged in turn {count.inputs}")

  return turn


def turns(seed: int, folder: Path, only: Sequence[str] = ()) -> dict[str, Turn]:
  """All that is fuzzed, by name; `only` those whose names hold one of these."""
  from benchmarks.fuzz_models import predictors

  known = {
    name: file_turn(name, reader, seed, folder / f"reader{number}")
    for number, (name, reader) in enumerate(readers().items())
  }
  known["questions: typed"] = line_turn("typed", typed_question, seed)
  known["SCAN commands"] = line_turn("scan", interpret, seed)
  for name, make in predictors(folder / "models").items():
    known[name] = predict_turn(name, make, seed)
  return {name: turn for name, turn in known.items() if not only or any(o in name for o in only)}


def fuzz(
  given: dict[str, Turn], *, seconds: float, lines: int, say: Callable[[str], None]
) -> dict[str, Count]:
  """Gives every reader at least `lines` lines, and then all of them more until the time is over."""
  counts = {name: Count() for name in given}
  start = told = time.monotonic()

  def take(name: str) -> None:
    nonlocal told
    began = time.monotonic()
    given[name](counts[name])
    counts[name].seconds += time.monotonic() - began
    if time.monotonic() - told > 15:
      told = time.monotonic()
      done = sum(count.lines >= lines for count in counts.values())
      say(f"[{told - start:4.0f} s] {done} of {len(given)} readers have had {lines:,} lines")

  for name, count in counts.items():
    while count.lines < lines:
      take(name)
  while time.monotonic() - start < seconds:
    for name in given:
      if time.monotonic() - start < seconds:
        take(name)
  return counts


def table(counts: dict[str, Count]) -> str:
  """One line for each reader, and what must not be after it."""
  heads = ("reader", "lines", "inputs", "read", "messages", "kinds", "unplaced", "traceb.", "lost")
  rows = [
    (
      name,
      f"{c.lines:,}",
      f"{c.inputs:,}",
      f"{c.read:,}",
      f"{c.errors.total():,}",
      str(len(c.errors)),
      str(c.unplaced),
      str(c.tracebacks),
      str(c.lost_lines),
    )
    for name, c in counts.items()
  ]
  widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
  lines = [
    "  ".join(
      v.ljust(w) if n == 0 else v.rjust(w) for n, (v, w) in enumerate(zip(row, widths, strict=True))
    )
    for row in (heads, *rows)
  ]
  for name, count in counts.items():
    lines += ["", f"{name}:", *count.kept] if count.failed else []
  return "\n".join(lines)


def as_json(counts: dict[str, Count], options: dict[str, Any], seconds: float) -> dict[str, Any]:
  """What is kept of a run: figures of every reader, and their sums."""
  return {
    "title": "fuzzing of readers and predict",
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "machine": machine("cpu"),
    "options": options,
    "seconds": round(seconds, 1),
    "sums": {
      name: sum(getattr(count, name) for count in counts.values())
      for name in ("lines", "inputs", "read", "unplaced", "tracebacks", "lost_lines")
    },
    "least_lines": min(count.lines for count in counts.values()),
    "readers": {
      name: {
        **dataclasses.asdict(count),
        "errors": dict(count.errors.most_common(12)),
        "kinds": len(count.errors),
        "messages": count.errors.total(),
        "seconds": round(count.seconds, 1),
      }
      for name, count in counts.items()
    },
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Fuzzes, prints the table, writes the JSON file; 1 if there is anything that must not be."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--seconds", type=float, default=600, help="time in all")
  parser.add_argument("--lines", type=int, default=10_000, help="least lines of each reader")
  parser.add_argument("--seed", type=int, default=0, help="the same one gives the same input")
  parser.add_argument("--only", nargs="*", default=(), help="readers whose names hold one of these")
  parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
  options = parser.parse_args(argv)
  print(f"fuzzing on {describe(machine('cpu'))}", flush=True)
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    given = turns(options.seed, Path(folder), options.only)
    counts = fuzz(
      given,
      seconds=options.seconds,
      lines=options.lines,
      say=lambda text: print(text, file=sys.stderr, flush=True),
    )
  print(table(counts))
  if options.json is not None:
    kept = {name: getattr(options, name) for name in ("seconds", "lines", "seed", "only")}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
      json.dumps(as_json(counts, kept, time.monotonic() - start), indent=2) + "\n"
    )
  return int(any(count.failed for count in counts.values()))


if __name__ == "__main__":
  sys.exit(main())
