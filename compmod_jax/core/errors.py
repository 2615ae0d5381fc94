"""The one exception for mistakes that the person at the keyboard can mend."""

import difflib
from collections.abc import Iterable, Sequence

# A message lists no more valid choices than these; of more, the nearest.
MANY = 32
# A message shows no more characters of a value than these: a file of others may hold any number.
LONGEST = 60


class UserError(ValueError):
  """A mistake in a configuration, a file or a command, with what mends it.

  The message is one paragraph that names the field, its value, the rule and the remedy.
  Programs print it without a traceback and exit with status 2.
  """


class ChoiceError(UserError):
  """A name that is none of those which a field takes.

  Attributes:
    field: what the name was for.
    choices: the names that it takes, sorted.
  """

  def __init__(self, message: str, field: str, choices: Sequence[str]):
    super().__init__(message)
    self.field, self.choices = field, choices


def check(condition: object, message: str) -> None:
  """Raises `UserError(message)` unless `condition` holds."""
  if not condition:
    raise UserError(message)


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
  """Raises a `ChoiceError` that names the nearest valid choice if `value` is none of `choices`."""
  choices = sorted(choices)
  if value in choices:
    return
  close = difflib.get_close_matches(value[:LONGEST], choices, n=8)
  hint = f" Did you mean {close[0]!r}?" if close else ""
  listed = ", ".join(choice or "'' (none)" for choice in choices)
  if len(choices) > MANY:
    listed = f"{len(choices)} names, such as {', '.join(close or choices[:8])}"
  message = f"{field} is {short(value)}; it must be one of: {listed}.{hint}"
  raise ChoiceError(message, field, choices)


def near(value: str, choices: Iterable[str], likeness: float = 0.6) -> str:
  """A question that names the choice most like a value, after a space; empty if none is.

  Args:
    value: what was given.
    choices: what there is.
    likeness: least share of letters that both have in order, 0 to 1.
  """
  close = difflib.get_close_matches(value[:LONGEST], list(choices), n=1, cutoff=likeness)
  return f" Did you mean {close[0]!r}?" if close else ""


def short(value: object) -> str:
  """A value as a message shows it: its `repr`, cut where it is long."""
  text = repr(value)
  return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def short_list(values: Iterable[str]) -> str:
  """Names of others as a message lists them: the first dozen, each cut where it is long."""
  values = list(values)
  shown = ", ".join(short(value) for value in values[:12]) or "none"
  return shown + (f" and {len(values) - 12:,} more" if len(values) > 12 else "")
