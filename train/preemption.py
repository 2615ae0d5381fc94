"""SIGTERM and Ctrl-C: save the last completed step and leave, whatever the main thread is doing.

Python runs its signal handlers in the main thread between two bytecodes, so not while XLA compiles
or a jitted loop decodes. The interpreter's C handler, though, writes the signal's number to a file
descriptor at once, and a thread of our own reads it. No signal is ever blocked: threads and child
processes, which inherit masks, are as killable as they always were, and it does not matter which
threads already run.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

_CURSOR_ON = "\x1b[?25h"


class Preemption:
  """Ends the process on a signal, after saving what the main loop last published.

  The main loop computes while it holds `lock`, because a step donates the state that is published:

      with Preemption() as preemption:                 # at the top of the program
        preemption.save = lambda step, held: ...       # returns once the checkpoint is complete
        preemption.hold(step, state)                   # after initialising or restoring
        ...
          compiled = ...                               # compile outside of the lock: it takes long
          with preemption.lock:
            state = compiled(state, batch)             # dispatched only; nothing waits here
            preemption.hold(step, state)

  On a signal a thread takes the lock, which it never gives back, calls `save`, writes one line to
  stderr and ends the process with status 128 + the signal's number: 143 for SIGTERM, 130 for
  Ctrl-C. Where nothing is held it does so at once. Where saving fails the line says why, and the
  status is 1. Further signals change nothing.

  This is for one process. Where several train together they must agree on the step first; make
  this after `jax.distributed.initialize`, whose own handler would otherwise take its place.

  Args:
    signals: the signals to act on, for example also SIGUSR1 where a scheduler sends that first.
    patience: seconds to wait for the lock before saving without it. A main thread that compiles
      while holding it has not donated anything yet; if it has, the save fails, and that is told.

  Attributes:
    save: called in the signal's thread with the step and the object last given to `hold`.
    lock: reentrant; held by the main loop while it replaces the published state.
    requested: set from the first signal on.
  """

  def __init__(
    self,
    signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    *,
    patience: float = 20.0,
  ):
    self.save: Callable[[int, Any], object] | None = None
    self.lock = threading.RLock()
    self.requested = threading.Event()
    self._patience = patience
    self._held: tuple[int, Any] | None = None
    self._read, self._write = os.pipe()
    os.set_blocking(self._write, False)
    self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
    self._thread.start()
    self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    self._signals = frozenset(signals)
    self._before = {}
    for number in self._signals:
      self._before[number] = signal.signal(number, lambda *_: None)
      signal.siginterrupt(number, False)  # so that no library sees its system calls fail
    os.register_at_fork(after_in_child=self._restore_handlers)

  def hold(self, step: int, snapshot: Any) -> None:
    """Publishes what `save` shall be called with: the step just completed and what belongs to it.

    Nothing is copied. Blocks for ever once a signal is being served.
    """
    with self.lock:
      self._held = step, snapshot

  def close(self) -> None:
    """Puts the signals' former handlers back. If a signal came, waits for the process to end."""
    if self._thread.is_alive():
      self._restore_handlers()
      os.close(self._write)
      self._thread.join()
      os.close(self._read)

  def __enter__(self) -> "Preemption":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _restore_handlers(self) -> None:
    # Also in a forked child: a worker told to stop must neither ignore it nor wake its parent.
    if self._before:
      signal.set_wakeup_fd(self._wakeup_before)
      for number, handler in self._before.items():
        signal.signal(number, handler)
      self._before = {}

  def _watch(self) -> None:
    while number := os.read(self._read, 1):
      if number[0] in self._signals:
        self._leave(signal.Signals(number[0]))

  def _leave(self, number: signal.Signals) -> None:
    self.requested.set()
    self.lock.acquire(timeout=self._patience)
    status = 128 + number
    if self._held is None or self.save is None:
      message = "nothing was saved, as no step was completed yet"
    else:
      step, snapshot = self._held
      try:
        self.save(step, snapshot)
        message = f"checkpoint of step {step} saved; run the same command to continue"
      except BaseException as error:
        message = f"the checkpoint of step {step} could not be saved: {error or repr(error)}"
        status = 1
    # In a thread, as the main thread may hold the stream's lock, stuck at a pipe nobody reads.
    last_words = threading.Thread(target=_say, args=(f"{number.name}: {message}",), daemon=True)
    last_words.start()
    last_words.join(timeout=5.0)
    os._exit(status)


def _say(message: str) -> None:
  # A progress display stands in for sys.stderr, has hidden the terminal's cursor and will not get
  # to show it again.
  stream = sys.__stderr__ or sys.stderr
  stream.write(("\n" + _CURSOR_ON if stream.isatty() else "") + message + "\n")
  stream.flush()
  sys.stdout.flush()
