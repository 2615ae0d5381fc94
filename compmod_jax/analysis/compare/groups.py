"""Subsets of a split: by length, and by gold annotations."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compmod_jax.analysis.reading import Reader
from compmod_jax.analysis.subject import Subject

_GROUPS = 5  # groups of source lengths
_VALUES = 12  # a gold annotation with more values than this makes no groups


def subsets_of(subject: Subject, read: Reader) -> list[tuple[str, str, np.ndarray]]:
  """Kind, name and numbers of the examples of every subset.

  All of them; by words of the source, in groups of about equal size; by the value of each gold
  annotation that has few (depth, kind of sentence, attractors).
  """
  chosen = subject.numbers
  texts = read.texts(read.streams[0], subject.split)
  words = np.array([len(texts[int(number)].split()) for number in chosen])
  subsets = [("all", "all", chosen)]
  edges = np.unique(np.quantile(words, np.linspace(0, 1, _GROUPS + 1)[1:]).astype(int))
  least = int(words.min())
  for edge in edges.tolist():
    inside = (words >= least) & (words <= edge)
    if inside.any() and len(edges) > 1:
      name = str(edge) if least == edge else f"{least} to {edge}"
      subsets.append(("source words", name, chosen[inside]))
    least = edge + 1
  infos = [read.info(subject.split, int(number)) for number in chosen]
  for key in infos[0] if infos else ():
    subsets += [(key, name, chosen[inside]) for name, inside in _values(infos, key)]
  return subsets


def _values(infos: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, np.ndarray]]:
  """The values of a gold annotation that divides the sentences, and who has each."""
  values = [info.get(key) for info in infos]
  if not all(isinstance(value, int | str) for value in values):
    return []
  distinct: list[Any] = sorted(set(values), key=lambda value: (str(type(value)), value))
  if not 1 < len(distinct) <= _VALUES:
    return []
  return [(str(one), np.array([value == one for value in values])) for one in distinct]
