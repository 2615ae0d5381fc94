"""The one exception for mistakes that the person at the keyboard can mend."""

import difflib
from collections.abc import Iterable

# A message lists no more valid choices than these; of more, the nearest.
MANY = 32


class UserError(ValueError):
  """A mistake in a configuration, a file or a command, told so that it can be mended.

  The message is one paragraph that names the field, its value, the rule and the remedy.
  Programs print it without a traceback and exit with status 2.
  """


def check(condition: object, message: str) -> None:
  """Raises `UserError(message)` unless `condition` holds."""
  if not condition:
    raise UserError(message)


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
  """Raises a `UserError` that names the nearest valid choice when `value` is none of `choices`."""
  choices = sorted(choices)
  if value in choices:
    return
  near = difflib.get_close_matches(value, choices, n=8)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  listed = ", ".join(choices)
  if len(choices) > MANY:
    listed = f"{len(choices)} names, such as {', '.join(near or choices[:8])}"
  raise UserError(f"{field} is {value!r}; it must be one of: {listed}.{hint}")
