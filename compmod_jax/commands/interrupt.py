"""Ctrl-C in programs that keep no state: they end soon, with one line and status 130.

Python runs a signal's handler between two bytecodes, so not while XLA compiles or a jitted loop
decodes; and a KeyboardInterrupt inside an import or a callback of a library may come out as another
exception, or not at all. So the first Ctrl-C raises KeyboardInterrupt, as always, that files being
written are taken back; where the program has not ended a few seconds later, or Ctrl-C comes again,
a thread ends it. Imports no third-party package: it is at work before those are imported.
"""

import os
import signal
import sys
import threading
from types import FrameType

from compmod_jax.commands import failures

PATIENCE = 5.0  # seconds from Ctrl-C to the end, at most

_came = threading.Event()
_importing = (
  threading.Event()
)  # nothing is being written yet, and libraries may catch what is raised


def came() -> bool:
  """Whether Ctrl-C was pressed: what ends the program after that is its consequence."""
  return _came.is_set()


def install(*, importing: bool = False) -> None:
  """Takes Ctrl-C over, unless a program that started this one has it ignored.

  Args:
    importing: Ctrl-C ends the process at once; a later call without it changes that.
  """
  (_importing.set if importing else _importing.clear)()
  main = threading.current_thread() is threading.main_thread()
  if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
    return
  read, write = os.pipe()
  os.set_blocking(write, False)
  before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
  if before != -1:  # another part of this process listens
    signal.set_wakeup_fd(before)
    return
  signal.signal(signal.SIGINT, _interrupt)
  threading.Thread(target=_watch, args=(read,), name="interrupt", daemon=True).start()
  os.register_at_fork(after_in_child=_forget)


def release() -> None:
  """Leaves Ctrl-C to the caller, who sets a handler of its own."""
  _forget()


def _interrupt(number: int, frame: FrameType | None) -> None:
  _came.set()
  if _importing.is_set():
    end()
  raise KeyboardInterrupt


def _forget() -> None:
  signal.set_wakeup_fd(-1)
  if signal.getsignal(signal.SIGINT) is _interrupt:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _watch(read: int) -> None:
  times = 0
  while number := os.read(read, 1):
    if number[0] != signal.SIGINT:
      continue
    times += 1
    _came.set()
    if times == 1:
      timer = threading.Timer(PATIENCE, end)
      timer.daemon = True
      timer.start()
    else:
      end()


def end() -> None:
  """Ends the process at once, from any thread, with the line and the status of Ctrl-C."""
  message = failures.explain(KeyboardInterrupt())
  # Past Python's streams, whose locks the main thread may hold.
  os.write(2, f"\nerror: {message}\n".encode())
  os._exit(failures.INTERRUPTED)


def hook() -> None:
  """Explains what ends a program before its `main` is called, while it is being imported."""
  before = sys.excepthook

  def show(kind, error, trace):
    message = failures.explain(KeyboardInterrupt() if came() else error)
    if message is None or "--debug" in sys.argv:
      before(kind, error, trace)
    if message is None:
      return
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    os._exit(failures.INTERRUPTED if came() else failures.status(error))

  sys.excepthook = show
