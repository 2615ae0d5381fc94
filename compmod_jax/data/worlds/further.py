"""Further questions about a story that was told for another one."""

from collections.abc import Callable, Sequence

from compmod_jax.data.worlds.drafts import Draft, Plan, finished
from compmod_jax.data.worlds.lexicon import CLASSES
from compmod_jax.data.worlds.plots import HELD
from compmod_jax.data.worlds.queries import Query
from compmod_jax.data.worlds.repertoire import Repertoire
from compmod_jax.data.worlds.stories import Random, pick
from compmod_jax.data.worlds.world import NOBODY, Event, World

May = Callable[[str], bool]  # whether a way of description may be used

_TRIES = 60
_CLASSES = ("person", "place", "thing", "colour", "material")
_DEEP = ("person", "thing")
"""classes that can be described by another thing or person in turn"""
_ASKED_OF = {
  "friend": ("person",),
  "possession": ("person",),
  "things": ("person",),
  "visited": ("person",),
  "holder": ("thing",),
  "colour": ("thing",),
  "material": ("thing",),
  "describe": ("thing",),
  "occupant": ("place",),
  "inside": ("place",),
  "persons": ("place",),
  "place": ("person", "thing"),
  "giver": ("person", "thing"),
  "before": ("person", "thing"),
  "same": ("person", "thing"),
  "told": ("person",),
}
"""kind of question -> classes of what it can be asked of"""


def draw_further(
  random: Random, plan: Plan, events: Sequence[Event], repertoire: Repertoire
) -> Draft | None:
  """A question as planned about these events; None if none is found soon.

  Args:
    random: draws from [0, 1).
    plan: what it should be like; its answer is always told.
    events: the story.
    repertoire: what may be asked for.
  """
  world = World(events)
  words = dict.fromkeys(word for event in events for word in event[1:])
  by_class = {kind: [word for word in words if CLASSES[word] == kind] for kind in _CLASSES}
  for _ in range(_TRIES):
    kind = pick(random, repertoire.asked(plan.format, plan.facts))
    inner = kind.rpartition(" ")[2]
    asked_of = [word for name in _ASKED_OF[inner] for word in by_class[name]]
    may = repertoire.describes if inner != "describe" else _apart(repertoire)
    query = _query(random, inner, asked_of, by_class, plan.facts, world, may) if asked_of else None
    draft = None if query is None else finished(random, plan, kind, query, world)
    if draft is not None:
      return draft
  return None


def _apart(repertoire: Repertoire) -> May:
  """Ways to describe what is to be described itself: not by its colour or material."""
  return lambda way: way not in HELD and repertoire.describes(way)


def _query(
  random: Random,
  kind: str,
  asked_of: Sequence[str],
  by_class: dict[str, list[str]],
  facts: int,
  world: World,
  may: May,
) -> Query | None:
  """A query of a kind, whatever its value."""
  one = pick(random, asked_of)
  first = _described(random, one, int(random() * facts), world, may)
  if first is None:
    return None
  if kind == "before":
    return (kind, first, ("is", pick(random, by_class["place"]))) if by_class["place"] else None
  if kind == "giver":
    given = [(person, thing) for person, thing in world.givers if one in (person, thing)]
    if not given:
      return None
    person, thing = pick(random, given)
    other = _described(random, thing if one == person else person, 0, world, may)
    return (kind, first, other) if one == person else (kind, other, first)
  if kind == "same":
    other = _described(random, pick(random, asked_of), int(random() * facts), world, may)
    return None if other is None or other == first else (kind, first, other)
  return kind, first


def _described(random: Random, word: str, depth: int, world: World, may: May) -> Query | None:
  """What a question calls a word, by so many descriptions within each other.

  None if the drawn way of description does not fit; whether it fits the word alone is not checked.
  """
  if depth == 0:
    return "is", word
  if CLASSES[word] == "person":
    ways = [("friend", person) for person, friend in world.friend.items() if friend == word]
    ways += [("holder", thing) for thing in world.things_of(word)]
    ways += [("occupant", world.place[word])] if word in world.place else []
  elif CLASSES[word] == "thing":
    person, place = world.holder.get(word), world.place_of(word)
    ways = [("possession", person)] if person not in (None, NOBODY) else []
    ways += [("inside", place)] if place else []
    ways += [("coloured", world.colour[word])] if word in world.colour else []
    ways += [("made", world.material[word])] if word in world.material else []
  else:
    return None
  ways = [(way, other) for way, other in ways if may(way)]
  if not ways:
    return None
  way, other = pick(random, ways)
  inner = _described(random, other, depth - 1 if CLASSES[other] in _DEEP else 0, world, may)
  return None if inner is None else (way, inner)
