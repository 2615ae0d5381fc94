"""Exact match of parts of a split: by gold annotation, and by length of what is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compmod_jax.metrics.statistics import sentence_statistics

# An annotation with more values than this makes no groups, nor does one whose texts hardly recur,
# such as another sentence: more than eight, and less than four examples of each.
_VALUES, _TEXTS, _EXAMPLES = 64, 8, 4
_ALONE = 16  # numbers up to this one are groups of their own
LENGTH = "target_words"


def exact_match_by_group(
  outputs: Sequence[str],
  references: Sequence[str],
  annotations: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, float]:
  """Exact match of every group of outputs, 0 to 100: `exact_match/KEY/GROUP`.

  Groups are the values of every annotation that is text or a whole number for all sentences of the
  split and has two values or more, texts that recur; and, as `target_words`, words of the
  reference. Numbers above 16 are taken together: 17-24, 25-32, 33-48, 49-64, 65-96 and so on.

  Args:
    outputs: what was generated, for the first sentences of a split or for all of them.
    references: what should have been, as many.
    annotations: of all sentences of the split; none where there are none.

  Raises:
    UserError: there are not as many references as outputs, or none.
  """
  statistics = sentence_statistics("exact_match", outputs, references)
  right = statistics.values(statistics.rows)
  columns: dict[str, list[Any]] = {
    key: [one.get(key) for one in annotations or ()] for key in (annotations or [{}])[0]
  }
  columns[LENGTH] = [len(text.split()) for text in references]
  found: dict[str, float] = {}
  for key, values in columns.items():
    if not all(isinstance(value, int | str) for value in values):
      continue
    groups = {value: group(value) for value in sorted(set(values), key=lambda v: (str(type(v)), v))}
    names = dict.fromkeys(groups.values())
    texts = any(isinstance(value, str) for value in values)
    most = max(_TEXTS, len(values) // _EXAMPLES) if texts else _VALUES
    if not 1 < len(names) <= min(_VALUES, most):
      continue
    members = np.array([groups[value] for value in values[: len(outputs)]])
    for name in names:
      if (members == name).any():
        found[f"exact_match/{key}/{name}"] = float(right[members == name].mean())
  return found


def group(value: int | str) -> str:
  """The group of a value: itself, or where it is a number above 16, an interval of numbers."""
  if isinstance(value, str) or value <= _ALONE:
    return str(value)
  # Ends are 16, 24, 32, 48, 64, 96, ...: powers of two and halfway between them.
  power = 1 << (value - 1).bit_length() - 1  # below value, which is at most twice as much
  low, high = (power, 3 * power // 2) if 2 * value <= 3 * power else (3 * power // 2, 2 * power)
  return f"{low + 1}-{high}"
