"""Numbers that no configuration can mean: not finite, too large for anything, or too small."""

import dataclasses
import math
from collections.abc import Iterator

from compmod_jax.core.errors import check
from compmod_jax.core.types import Dataclass

# Whole numbers go into arrays of 32 bits.
LARGEST_WHOLE, LARGEST_REAL = 2**31 - 1, 1e9
# field -> the largest value, and why
_OWN = {
  "seed": (2**32 - 1, "seeds have 32 bits"),
  "layers": (1000, "a program grows with every layer, and takes hours to compile beyond this"),
  "dim": (2**20, "one matrix of this width already needs 4 TB"),
  "vocab_size": (2**24, "no text has as many different tokens"),
  "count": (2**16, "each needs parameters of its own"),
}


def check_numbers(config: Dataclass, prefix: str = "") -> None:
  """Refuses numbers beyond reason in a configuration and those inside it.

  Rules about single fields stand with their classes; these hold for all, also for fields to come,
  so that nothing is built, allocated or traced for a number that cannot be meant.

  Args:
    config: the configuration.
    prefix: path of the configuration, such as "task.".

  Raises:
    UserError: a number is not finite or too large; it names field, value, rule and remedy.
  """
  for path, value in numbers(config, prefix):
    name = path.rpartition(".")[2]
    check(
      math.isfinite(value),
      f"{path} is {value}; it must be a finite number. Give another one, or leave it out for the"
      " default.",
    )
    key = next((key for key in _OWN if name == key or name.endswith(f"_{key}")), None)
    most, why = _OWN[key] if key and isinstance(value, int) else (None, "")
    if most is None:
      most = LARGEST_WHOLE if isinstance(value, int) else LARGEST_REAL
      why = "nothing here is measured in larger numbers"
    check(
      abs(value) <= most,
      f"{path} is {value:,}; it must be at most {most:,}: {why}. Give a smaller one.",
    )


def check_least(config: object, prefix: str = "", /, **least: float) -> None:
  """Refuses fields that are smaller than they can be.

  Args:
    config: what has the fields.
    prefix: path of the configuration, such as "task.".
    **least: the smallest value of each field.

  Raises:
    UserError: a field is smaller; it names field, value and rule.
  """
  for field, smallest in least.items():
    value = getattr(config, field)
    check(value >= smallest, f"{prefix}{field} is {value}; it must be at least {smallest}.")


def numbers(config: object, prefix: str = "") -> Iterator[tuple[str, int | float]]:
  """Path and value of every number in a configuration and in those inside it."""
  if isinstance(config, bool) or not dataclasses.is_dataclass(config):
    return
  for field in dataclasses.fields(config):
    yield from _below(f"{prefix}{field.name}", getattr(config, field.name))


def _below(path: str, value: object) -> Iterator[tuple[str, int | float]]:
  if isinstance(value, int | float) and not isinstance(value, bool):
    yield path, value
  elif isinstance(value, tuple | list):
    for number, item in enumerate(value):
      yield from _below(f"{path}.{number}", item)
  else:
    yield from numbers(value, f"{path}.")
