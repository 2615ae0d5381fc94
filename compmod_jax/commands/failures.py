"""What may end a program besides its own mistakes: a paragraph and an exit status for each.

    0    done
    2    something has to be changed first: an option, a configuration, a file, room, permissions
    75   the machine failed, and the same command may succeed: input/output errors, networks
    130  Ctrl-C
    143  SIGTERM, after saving
    1    anything else, which is a defect of the program: the traceback shows where

Imports no third-party package, as what fails may be an import.
"""

import errno
import re
import sys
from collections.abc import Iterator

from compmod_jax.core import extras

MISTAKE, MACHINE, INTERRUPTED = 2, 75, 130
_AGAIN = "and run the same command again; what was complete before is untouched"
# errno -> what happened, and what to change
_SYSTEM = {
  errno.ENOSPC: ("the disk is full", f"Free some space {_AGAIN}."),
  errno.EDQUOT: ("the disk quota is used up", f"Remove files of yours {_AGAIN}."),
  errno.EROFS: ("it lies on a disk that can only be read", "Choose a folder on another disk."),
  errno.EACCES: (
    "permission denied",
    "Choose another place, or ask the owner for the right to read and write it.",
  ),
  errno.EPERM: ("the system does not permit it", "Choose another place, or another user."),
  errno.EIO: (
    "the disk, or the network to it, failed (input/output error)",
    f"Look at the system's log, mend the disk or choose another one, {_AGAIN}.",
  ),
  errno.EMFILE: (
    "too many files are open in this process",
    "Raise the limit (ulimit -n 4096) and run the same command again.",
  ),
  errno.ENFILE: ("too many files are open on this machine", f"Close other programs {_AGAIN}."),
  errno.EFBIG: ("the file is larger than the limit", "Raise the limit (ulimit -f) or write less."),
  errno.ENOENT: ("there is no such file or folder", "Look at the spelling of the path."),
  errno.EISDIR: ("it is a folder, where a file is needed", "Give the path of a file."),
  errno.ENOTDIR: ("a part of its path is a file, no folder", "Give another path."),
  errno.ENAMETOOLONG: ("its name is too long", "Give a shorter one."),
  errno.EAGAIN: (
    "the system has no room for another process or thread",
    "Raise the limit (ulimit -u), close other programs, and run the same command again.",
  ),
  errno.EADDRINUSE: ("another program uses that port", "Choose another port."),
}
# What may pass without a change.
_PASSING = {
  errno.EIO,
  errno.ESTALE,
  errno.ETIMEDOUT,
  errno.ECONNRESET,
  errno.ECONNABORTED,
  errno.EHOSTUNREACH,
  errno.ENETUNREACH,
  errno.ENETDOWN,
}
_SMALLER = (
  "Make a step smaller: raise micro_batches (--config.micro_batches=4 computes a batch in four"
  " parts, with the same result), set --config.model.remat=true, or lower the batch"
  " (--config.task.batch.tokens, batch_tokens, batch_questions or rows); for a model that is too"
  " large alone lower dim or the layers, or share it out (--config.mesh.fsdp). Programs that"
  " use a model take fewer lines at once (--chunk)."
)


def explain(error: BaseException) -> str | None:
  """The paragraph for an exception that a user can cause; None where it is a defect of ours."""
  text = " ".join(str(error).split())
  if "UserError" in _names(error):
    return str(error)
  if isinstance(error, KeyboardInterrupt):
    return "stopped by Ctrl-C; what was complete before is untouched. Run the same command again."
  if _device_is_full(error):
    size = re.search(r"allocat\w* ([\d.]+ ?\w*)", text)
    wanted = f" when {size[1].removesuffix(' bytes')} bytes more were wanted" if size else ""
    if size and re.search(r"[A-Za-z]", size[1].removesuffix(" bytes")):
      wanted = f" when {size[1]} more were wanted"
    return f"The memory of the device (GPU, TPU, or CPU) is full{wanted}. {_SMALLER}"
  if isinstance(error, MemoryError):
    what = f" ({text.rstrip('.')})" if text else ""
    return f"The memory of this machine is full{what}. Close other programs. {_SMALLER}"
  if isinstance(error, ImportError):
    return _import(error, text)
  if isinstance(error, OSError):
    return _system(error, text)
  return None


def status(error: BaseException) -> int:
  """The exit status that an exception which `explain` knows ends a program with."""
  if isinstance(error, KeyboardInterrupt):
    return INTERRUPTED
  return MACHINE if any(_number(one) in _PASSING for one in _causes(error)) else MISTAKE


def _names(error: BaseException) -> set[str]:
  """Names of an exception's classes, none of which has to be imported here."""
  return {kind.__name__ for kind in type(error).__mro__}


def _device_is_full(error: BaseException) -> bool:
  found = _names(error) & {"JaxRuntimeError", "XlaRuntimeError"}
  return bool(found) and ("RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error))


def _import(error: ImportError, text: str) -> str | None:
  top = (error.name or "").partition(".")[0]
  if top in ("compmod_jax", "train", "benchmarks"):
    return None
  if isinstance(error, ModuleNotFoundError):
    return extras.missing(top) or (
      f"The Python package {top!r} is not installed in {sys.prefix}. Install it there (pip install"
      f" {top}), and run the same command again."
    )
  return (
    f"The Python package {top or 'wanted'!r} is installed but cannot be loaded ({text}). Install it"
    " again in the version of constraints.txt."
  )


def _system(error: OSError, text: str) -> str | None:
  number = error.errno
  if number is None:
    return None
  happened, remedy = _SYSTEM.get(number, (error.strerror or text, f"Look at that place {_AGAIN}."))
  files = " to ".join(
    str(name) for name in (error.filename, error.filename2) if name not in (None, "")
  )
  where = f"{files}: " if files else ""
  return f"{where}{happened if where else happened[:1].upper() + happened[1:]}. {remedy}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
  """An exception and those that it was raised from."""
  while error is not None:
    yield error
    error = error.__cause__


def _number(error: BaseException) -> int | None:
  """The system's number of an error; tensorstore has it in its text alone."""
  if isinstance(error, OSError):
    return error.errno
  found = re.search(r"os_error_code='?(\d+)", str(error))
  return int(found[1]) if found else None
