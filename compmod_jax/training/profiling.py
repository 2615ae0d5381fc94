"""Traces of single steps, to see where their time goes.

    python -m train.main --config configs/nmt_cah.py --workdir runs/nmt_cah --profile 20:25

See docs/pods-aot.md.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compmod_jax.core.errors import check

FOLDER = "profile"
ANNOTATION = "train"
"""What steps are called in a trace."""


def parse(text: str) -> range:
  """The steps of FIRST:LAST, both included; none of an empty text.

  Raises:
    UserError: the text says something else.
  """
  if not text:
    return range(0)
  found = re.fullmatch(r"(\d+):(\d+)", text)
  rule = "; it must be FIRST:LAST, the numbers of two steps, such as 20:25 for six steps."
  check(found, f"--profile is {text!r}{rule}")
  assert found is not None
  first, last = int(found[1]), int(found[2])
  check(1 <= first <= last, f"--profile is {text!r}{rule} Steps count from 1.")
  return range(first, last + 1)


class Profiler:
  """Writes a trace of some steps; as a context, it ends the trace where training ends within it.

  The trace begins once all earlier steps are done and ends once its last one is, so that it holds
  all that the devices did from the first to the last and nothing of other steps.

  Args:
    steps: which are traced, neighbours; from 1.
    folder: where to.
    say: is called with the folder of the trace.
  """

  def __init__(
    self, steps: range = range(0), folder: Path = Path(), say: Callable[[str], None] = print
  ):
    self.steps, self.folder, self.say = steps, folder, say
    self.traced: list[int] = []
    self._wait: Callable[[], Any] = lambda: None

  def check(self, done: int, total: int) -> None:
    """Tells if the steps are over already.

    Args:
      done: steps that the run has made before.
      total: steps of the whole run.

    Raises:
      UserError: the run has no such steps.
    """
    if not self.steps:
      return
    first, last = self.steps[0], self.steps[-1]
    check(
      last <= total,
      f"--profile is {first}:{last}, but the run has {total} steps; choose some of them.",
    )
    if last <= done:
      self.say(f"no trace: steps {first} to {last} were made before; the run goes on at {done + 1}")

  @contextlib.contextmanager
  def step(self, number: int, wait: Callable[[], Any]) -> Iterator[None]:
    """What runs inside is a step.

    Args:
      number: of the step, from 1.
      wait: returns once the devices have done all that they were given.
    """
    if number not in self.steps:
      yield
      return
    import jax

    if not self.traced:
      wait()
      jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
      self._wait = wait
    self.traced.append(number)
    with jax.profiler.StepTraceAnnotation(ANNOTATION, step_num=number):
      yield
    if number == self.steps[-1]:
      self.stop()

  def stop(self) -> None:
    """Writes the trace."""
    import jax

    self._wait()
    jax.profiler.stop_trace()
    first, last = self.traced[0], self.traced[-1]
    self.traced = []
    written = max(self.folder.glob("plugins/profile/*/"), key=lambda path: path.stat().st_mtime)
    self.say(
      f"trace of steps {first} to {last}: {written}. Open it with `xprof --logdir {self.folder}`"
      " (pip install xprof) or TensorBoard's profile plugin, or drop its perfetto_trace.json.gz on"
      " https://ui.perfetto.dev"
    )

  def __enter__(self) -> "Profiler":
    return self

  def __exit__(self, *_: object) -> None:
    if self.traced:
      self.stop()
