"""What every program shares: the exit status and the message of a mistake."""

import errno
import sys
import traceback
from collections.abc import Callable

from compmod_jax.errors import UserError


def run(main: Callable[[list[str]], int | None]) -> None:
  """Runs a program: mistakes print one paragraph and exit with status 2 (traceback: `--debug`)."""
  argv = sys.argv[1:]
  debug = "--debug" in argv
  try:
    status = main([argument for argument in argv if argument != "--debug"])
  except UserError as error:
    _fail(str(error), debug)
  except OSError as error:
    if error.errno != errno.ENOSPC:
      raise
    _fail(f"The disk is full ({error.filename}). Free some space and run it again.", debug)
  except BrokenPipeError:
    status = 0
  sys.exit(status or 0)


def _fail(message: str, debug: bool) -> None:
  if debug:
    traceback.print_exc()
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)
