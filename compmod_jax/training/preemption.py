"""SIGTERM and Ctrl-C: save the last completed step and leave, whatever the main thread is doing.

Python runs its signal handlers in the main thread between two bytecodes, so not while XLA compiles
or a jitted loop decodes. The interpreter's C handler, though, writes the signal's number to a file
descriptor at once, and a thread of our own reads it. No signal is ever blocked: threads and child
processes, which inherit masks, are as killable as they always were, and it does not matter which
threads already run.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from compmod_jax.training.distributed.connections import Links
from compmod_jax.training.distributed.multihost import Group

_CURSOR_ON = "\x1b[?25h"
_CATCH_UP = 300.0  # seconds in which the other processes' last step may be compiled and run


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

  Where several processes train together (`group`) a signal to one stops all: they tell each other
  the last step they completed, those behind go on to the latest one, and all save that.

  Args:
    signals: the signals to act on, for example also SIGUSR1 where a scheduler sends that first.
    patience: seconds to wait for the lock before saving without it. A main thread that compiles
      while holding it has not donated anything yet; if it has, the save fails with a message.

  Attributes:
    save: called in the signal's thread with the step and the object last given to `hold`.
    lock: reentrant; held by the main loop while it replaces the published state.
    requested: set from the first signal on.
    group: the processes that train together.
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
    self._group = Group()
    self._last_step: int | None = None  # at which the main thread is to stop
    self._arrived = threading.Event()  # there
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

  @property
  def group(self) -> Group:
    """The processes that train together."""
    return self._group

  @group.setter
  def group(self, group: Group) -> None:
    self._group = group
    if group.links is not None:
      group.links.listen("stop", lambda number: os.write(self._write, bytes([number])))

  @property
  def _links(self) -> Links | None:
    """Connections with the other processes, as long as they are there."""
    links = self._group.links
    return None if links is None or links.leaving else links

  def hold(self, step: int, snapshot: object) -> None:
    """Publishes what `save` shall be called with: the step just completed and what belongs to it.

    Nothing is copied. Blocks for ever once a signal is being served.
    """
    with self.lock:
      self._held = step, snapshot
      if step == self._last_step:
        self._arrived.set()
        threading.Event().wait()  # the other thread saves and ends the process

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
    # Also in a forked child: a worker that has to stop must neither ignore it nor wake its parent.
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
    if self._links is not None:
      self._links.post("stop", int(number))
    self.lock.acquire(timeout=self._patience)
    status = 128 + number
    try:
      held = self._agreed()
      if held is None or self.save is None:
        message = "nothing was saved, as no step was completed yet"
      else:
        self.save(*held)
        message = f"checkpoint of step {held[0]} saved; run the same command to continue"
    except BaseException as error:
      step = "the last step" if self._held is None else f"step {self._held[0]}"
      message = f"the checkpoint of {step} could not be saved: {error or repr(error)}"
      status = 1
    self._part()
    # In a thread, as the main thread may hold the stream's lock, stuck at a pipe nobody reads.
    last_words = threading.Thread(target=_say, args=(f"{number.name}: {message}",), daemon=True)
    last_words.start()
    last_words.join(timeout=5.0)
    os._exit(status)

  def _agreed(self) -> tuple[int, Any] | None:
    """What is held, once every process has completed the latest step that any has."""
    step = -1 if self._held is None else self._held[0]
    if self._links is None:
      return self._held
    latest = max(self._links.gather("last step", step, timeout=2 * self._patience))
    if latest > step:
      self._last_step = latest
      self.lock.release()
      if not self._arrived.wait(_CATCH_UP):
        raise TimeoutError(f"step {latest}, which another process completed, does not end here")
    return self._held

  def _part(self) -> None:
    """Leaves the other processes, none before all have saved."""
    if links := self._links:
      with contextlib.suppress(LookupError):
        links.gather("saved", timeout=self._patience)
      links.leave()


def _say(message: str) -> None:
  # A progress display stands in for sys.stderr, has hidden the terminal's cursor and will not get
  # to show it again.
  stream = sys.__stderr__ or sys.stderr
  stream.write(("\n" + _CURSOR_ON if stream.isatty() else "") + message + "\n")
  stream.flush()
  sys.stdout.flush()
