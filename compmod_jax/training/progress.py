"""Progress of a run on a terminal (a bar) and elsewhere (a plain line every few seconds)."""

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from compmod_jax.core import extras

if TYPE_CHECKING:
  from rich.progress import Progress as Bar

_INTERVAL = 5.0
# name in metrics.jsonl -> (short name, format)
_SHORT = {
  "loss": ("loss", ".3g"),
  "squared_error": ("squared error", ".3g"),
  "perplexity": ("ppl", ".3g"),
  "tokens_per_second": ("tok/s", ",.0f"),
  "gradient_norm": ("gnorm", ".2g"),
  "learning_rate": ("lr", ".1e"),
}


class Progress:
  """Shows steps, phases and the time left.

  Args:
    total_steps: steps of the whole run.
    quiet: shows nothing.
    stream: stderr by default; a terminal gets a bar.
    interval: seconds between plain lines of the same sort, at least.
  """

  def __init__(
    self,
    total_steps: int,
    *,
    quiet: bool = False,
    stream: TextIO | None = None,
    interval: float = _INTERVAL,
  ):
    self._total = total_steps
    self._quiet = quiet
    self._stream = stream or sys.stderr
    self._interval = interval
    self._steps = _Rate()
    self._phase = _Rate()
    self._phase_text: str | None = None
    self._shown: dict[str, float] = {}
    self._bar: Bar | None = None
    self._tasks: dict[str, Any] = {}
    self._terminal = not quiet and self._stream.isatty()

  def show(self, kind: str, step: int | None, values: Mapping[str, Any]) -> None:
    """Shows a line of metrics: training as it goes, evaluations always, the rest not."""
    if kind == "train" and step is not None:
      self._steps.update(step)
      self._end_phase()
      left = self._steps.left(self._total)
      numbers = _numbers(values)
      if self._terminal:
        self._update_bar("steps", f"training  {numbers}", step, self._total)
      elif self._due("train", last=step >= self._total):
        self._print(f"step {step}/{self._total}  {numbers}" + (f"  eta {left}" if left else ""))
    elif kind in ("eval", "final"):
      self._end_phase()
      where = "" if step is None else f" at step {step}"
      self.say(f"{values.get('split', kind)}{where}:  {_all_numbers(values)}")

  def status(self, text: str, done: int | None, total: int | None) -> None:
    """Shows a phase; `done` of `total` give the estimate of the time that it takes."""
    if text != self._phase_text:
      self._phase, self._phase_text = _Rate(), text
      self._shown.pop("phase", None)
    if done is not None:
      self._phase.update(done)
    if self._terminal:
      self._update_bar("phase", text, done, total)
    elif self._due("phase", last=done is not None and done == total):
      left = "" if total is None else self._phase.left(total)
      count = "" if done is None else f" {done}" + ("" if total is None else f"/{total}")
      self._print(f"{text}{count}" + (f"  eta {left}" if left else ""))

  def say(self, text: str) -> None:
    """Shows a line that stays."""
    if self._bar is not None:
      self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
      self._print(text)

  def rewind(self) -> None:
    """Forgets the pace so far: the next steps are not those that follow the last ones shown."""
    self._steps = _Rate()

  def close(self) -> None:
    """Takes the bar off the terminal."""
    if self._bar is not None:
      self._bar.stop()
      self._bar, self._tasks = None, {}

  def _due(self, sort: str, last: bool) -> bool:
    now = time.monotonic()
    if last or now - self._shown.get(sort, -1e9) >= self._interval:
      self._shown[sort] = now
      return True
    return False

  def _print(self, text: str) -> None:
    if not self._quiet:
      self._stream.write(text + "\n")
      self._stream.flush()

  def _end_phase(self) -> None:
    self._phase_text = None
    if self._bar is not None and "phase" in self._tasks:
      self._bar.update(self._tasks["phase"], visible=False)

  def _update_bar(self, sort: str, text: str, done: int | None, total: int | None) -> None:
    if self._bar is None:
      self._bar = _make_bar(self._stream)
      self._bar.start()
    rate = self._steps if sort == "steps" else self._phase
    fields = {
      "description": text,
      "completed": done or 0,
      "total": total,
      "count": "" if done is None else f"{done}" + ("" if total is None else f"/{total}"),
      "left": "" if total is None else rate.left(total),
    }
    if sort not in self._tasks:
      self._tasks[sort] = self._bar.add_task(**fields)
    else:
      self._bar.update(self._tasks[sort], visible=True, **fields)


class _Rate:
  """Estimates the time left from what was done since the first update."""

  def __init__(self):
    self._first: tuple[float, int] | None = None
    self._last = (0.0, 0)

  def update(self, done: int) -> None:
    self._last = time.monotonic(), done
    self._first = self._first or self._last

  def left(self, total: int) -> str:
    """Such as "02:31", or "" where there is nothing to tell from."""
    if self._first is None or self._last[1] <= self._first[1]:
      return ""
    seconds, done = (last - first for last, first in zip(self._last, self._first, strict=True))
    return _clock(seconds / done * max(0, total - self._last[1]))


def _clock(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _numbers(values: Mapping[str, Any]) -> str:
  parts = []
  for name, (short, form) in _SHORT.items():
    value = values.get(name)
    if name in values:
      number = "nan" if value is None else format(value, form)
      # A rate reads better with its unit behind it.
      parts.append(f"{number} {short}" if "/" in short else f"{short} {number}")
  return "  ".join(parts)


def _all_numbers(values: Mapping[str, Any]) -> str:
  parts = []
  for name, value in values.items():
    if isinstance(value, int | float) and "/" not in name:
      parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
  return "  ".join(parts)


def _make_bar(stream: TextIO) -> "Bar":
  with extras.needed():
    from rich import progress
    from rich.console import Console

  return progress.Progress(
    progress.TextColumn("{task.description}", markup=False),
    progress.BarColumn(bar_width=20),
    progress.TextColumn("{task.fields[count]}"),
    progress.TextColumn("{task.fields[left]}"),
    console=Console(file=stream),
    refresh_per_second=2,  # more would take time from training on a small machine
  )
