"""Which kinds of questions there are, and what has to happen in stories for them."""

import dataclasses
import functools

from compmod_jax.data.qa.question import Format

_DEEP = ("place", "friend", "colour", "material", "giver", "possession")
_SPANS = {
  1: (*_DEEP, "holder", "occupant", "inside"),
  2: (*_DEEP, "holder", "inside", "before"),
  3: (*_DEEP, "before"),
  4: (*_DEEP, "before"),
}
_TRUTHS = ("place", "holder", "friend", "colour", "material", "giver")
_COUNTS = ("count things", "count persons", "count visited")
_SENTENCES = ("sentence place", "sentence possession", "sentence holder")
LISTS = ("things", "persons", "visited")
KINDS: dict[Format, dict[int, tuple[str, ...]]] = {
  "multiple_choice": _SPANS,
  "extractive": _SPANS,
  "yes_no": {1: _TRUTHS, **dict.fromkeys((2, 3, 4), (*_TRUTHS, "same"))},
  "abstractive": {
    1: (*_COUNTS, *_SENTENCES * 2, *("describe",) * 6, *("told",) * 5),
    2: (*_COUNTS, *_SENTENCES, "describe", "describe", *LISTS, *("told",) * 4),
    3: (*_COUNTS, *_SENTENCES[:2], "describe", "describe", *LISTS, *("told",) * 4),
    4: (*_SENTENCES[:2], "describe", "describe", "things", "told"),
  },
}
"""format -> number of facts -> kinds of questions, each as likely as it is often listed"""

ALL = tuple(dict.fromkeys(kind for by in KINDS.values() for kinds in by.values() for kind in kinds))

FEW_KINDS = ("place", "friend", "told")
"""A small world to begin with: who went where, and who is the best friend of whom."""

_EVENTS = {
  "place": ("go",),
  "before": ("go",),
  "occupant": ("go",),
  "persons": ("go",),
  "visited": ("go",),
  "same": ("go",),
  "inside": ("go", "take", "drop", "leave"),
  "holder": ("take",),
  "possession": ("take",),
  "things": ("take",),
  "giver": ("take", "pass"),
  "friend": ("friend",),
  "colour": ("colour",),
  "material": ("material",),
  "describe": ("colour", "material", "take"),
  "told": ("go", "take", "friend"),
}
"""kind, without what is around it -> events that it is about"""

_DESCRIBED_BY = {"coloured": "colour", "made": "material"}  # others are kinds themselves


@dataclasses.dataclass(frozen=True)
class Repertoire:
  """What is asked for, and with it what happens in stories and how things are described.

  Attributes:
    kinds: of questions, some of `ALL`.
  """

  kinds: tuple[str, ...] = ALL

  def asked(self, format: Format, facts: int) -> tuple[str, ...]:
    """The kinds of a format that need so many facts, each as likely as it is often there."""
    return self._of(KINDS[format][facts])

  def _of(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(kind for kind in kinds if kind in self.kinds)

  def lacking(self, facts: int) -> list[tuple[Format, int]]:
    """Formats and numbers of facts, up to a greatest, for which there is no kind."""
    numbers = range(1, facts + 1)
    return [(name, n) for name, by in KINDS.items() for n in numbers if not self._of(by[n])]

  @functools.cached_property
  def events(self) -> frozenset[str]:
    """Kinds of events that stories have."""
    inner = (kind.rpartition(" ")[2] for kind in self.kinds)
    return frozenset(event for kind in inner for event in _EVENTS[kind])

  def describes(self, way: str) -> bool:
    """Whether a person or thing may be called in a way, such as `friend` or `coloured`."""
    return _DESCRIBED_BY.get(way, way) in self.kinds
