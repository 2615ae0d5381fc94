"""Keeps the words that orbax has for a failed write off the terminal."""

import logging
import os
import sys


def _not_from_orbax(record: logging.LogRecord) -> bool:
  return f"{os.sep}orbax{os.sep}" not in record.pathname


def _not_of_orbax(record: logging.LogRecord) -> bool:
  return f"{os.sep}orbax{os.sep}" not in record.getMessage()


def quiet_orbax() -> None:
  """Keeps the tracebacks of a failed write, which becomes one error here, off the terminal."""
  logger = logging.getLogger("absl")
  if _not_from_orbax in logger.filters:
    return
  logger.addFilter(_not_from_orbax)
  # Of several writes that fail together orbax takes one; the others' tasks say so when collected.
  logging.getLogger("asyncio").addFilter(_not_of_orbax)
  inner = sys.unraisablehook

  def hook(unraisable):
    # The writes still under way when one fails find their event loop gone, and each says so.
    closed = isinstance(unraisable.exc_value, RuntimeError)
    if not closed or str(unraisable.exc_value) != "Event loop is closed":
      inner(unraisable)

  sys.unraisablehook = hook
