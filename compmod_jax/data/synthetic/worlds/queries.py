"""What is asked: nested descriptions, their values in a world, and the facts that a value needs.

A query is a tuple of its kind and its parts, which are queries again down to words:

    is w                            the word w itself
    friend x, place x               of a person (place: or a thing)
    holder t, colour t, material t  of a thing
    giver x t                       from whom person x got thing t, if from one person only
    before x p                      where a person or thing was just before it was in place p
    possession x, inside p          the only thing that a person has, or that is in a place
    coloured c, made m              the only thing of a colour, or of a material
    occupant p                      the only person in a place
    things x, persons p, visited x  all that a person has, are in a place, or a person went to
    count q                         how many these are
    describe t                      a thing's colour and material
    told x                          the events that a person or thing takes part in
    sentence q                      the value of q together with what q is asked of
    equal q r, same x y             yes or no: equal values; two persons or things in one place

`("colour", ("possession", ("friend", ("is", "Anna"))))` is the colour of the thing that Anna's best
friend has.
"""

from collections.abc import Callable, Sequence
from typing import Any

from compmod_jax.data.synthetic.worlds.world import NOBODY, Event, World

Query = tuple[Any, ...]
Value = Any  # a word, a number, a tuple of words, or None: it does not follow


def evaluate(query: Query, world: World) -> Value:
  """The value of a query, as far as the world's events tell; None if it does not follow."""
  return _VALUES[query[0]](query, world)


def words_in(query: Query) -> list[str]:
  """The content words that a query names."""
  if query[0] == "is":
    return [query[1]]
  return [word for part in query[1:] for word in words_in(part)]


def supporting(query: Query, events: Sequence[Event], most: int) -> list[int] | None:
  """Numbers of the events without any one of which the value of the query is another one or none.

  Args:
    query: what is asked.
    events: a story.
    most: of more than so many, None is returned.

  Returns:
    Numbers from 0, in order; None also where the query has no value, or these events alone do not
    give it, because it follows in two ways.
  """
  kinds = _kinds_that_matter(query)
  numbers = [i for i, event in enumerate(events) if event[0] in kinds]
  events = [events[i] for i in numbers]
  whole = evaluate(query, World(events))
  if whole is None:
    return None
  found = []
  for i in range(len(events)):
    if evaluate(query, World([*events[:i], *events[i + 1 :]])) != whole:
      found.append(i)
      if len(found) > most:
        return None
  alone = evaluate(query, World([events[i] for i in found]))
  return [numbers[i] for i in found] if alone == whole else None


def _kinds_that_matter(query: Query) -> set[str]:
  """Kinds of events without which any world gives the query the same value."""
  if query[0] == "is":
    return set()
  kinds = set(_EVENTS.get(query[0], ()))
  return kinds.union(*map(_kinds_that_matter, query[1:]))


_HAVING = ("take", "pass", "drop", "leave")
_EVENTS = {
  **dict.fromkeys(("holder", "possession", "things"), _HAVING),
  **dict.fromkeys(("place", "before", "occupant", "inside", "same"), ("go", *_HAVING)),
  **dict.fromkeys(("persons", "visited"), ("go",)),
  **dict.fromkeys(("colour", "coloured"), ("colour",)),
  **dict.fromkeys(("material", "made"), ("material",)),
  "describe": ("colour", "material"),
  "friend": ("friend",),
  "giver": ("pass",),
  "told": ("go", *_HAVING, "colour", "material", "friend"),
}


def _looked_up(table: str) -> Callable[[Query, World], Value]:
  """The value that a table of the world has for what the query's part describes."""

  def value(query: Query, world: World) -> Value:
    return getattr(world, table).get(evaluate(query[1], world))

  return value


def _found(table: str) -> Callable[[Query, World], Value]:
  """The only thing for which a table of the world has what the query's part describes."""

  def value(query: Query, world: World) -> Value:
    wanted = evaluate(query[1], world)
    return world.only([one for one, has in getattr(world, table).items() if has == wanted])

  return value


def _listed(method: str, *, only: bool = False) -> Callable[[Query, World], Value]:
  """What a method of the world finds, as a tuple, or the only one."""

  def value(query: Query, world: World) -> Value:
    one = evaluate(query[1], world)
    found = getattr(world, method)(one) if one is not None else []
    if only:
      return world.only(found)
    return tuple(dict.fromkeys(found)) or None

  return value


def _giver(query: Query, world: World) -> Value:
  got = world.givers.get((evaluate(query[1], world), evaluate(query[2], world)), [])
  return world.only(list(dict.fromkeys(got)))


def _before(query: Query, world: World) -> Value:
  one, place = evaluate(query[1], world), evaluate(query[2], world)
  trail = world.places_of(one) if one is not None else []
  if trail.count(place) != 1 or trail[0] == place:
    return None
  return trail[trail.index(place) - 1]


def _count(query: Query, world: World) -> Value:
  found = evaluate(query[1], world)
  return found and len(found)


def _describe(query: Query, world: World) -> Value:
  thing = evaluate(query[1], world)
  colour, material = world.colour.get(thing), world.material.get(thing)
  return (colour, thing, material) if colour or material else None


def _sentence(query: Query, world: World) -> Value:
  """The value of a relation together with what it is said of."""
  value, one = evaluate(query[1], world), evaluate(query[1][1], world)
  return None if value is None else (one, value)


def _told(query: Query, world: World) -> Value:
  """The events that a person or a thing takes part in."""
  one = evaluate(query[1], world)
  return tuple(event for event in world.events if one in event[1:]) or None


def _equal(query: Query, world: World) -> Value:
  one, other = evaluate(query[1], world), evaluate(query[2], world)
  if one is None or other is None:
    return None
  return "yes" if one == other else "no"


def _same(query: Query, world: World) -> Value:
  """Whether two are in one place; a thing is where its holder is, even if that is not told."""
  ones = [evaluate(part, world) for part in query[1:]]
  if None in ones:
    return None
  holders = [world.holder.get(one, one) for one in ones]
  if holders[0] == holders[1] != NOBODY:
    return "yes"
  places = [world.place_of(one) for one in ones]
  if None in places:
    return None
  return "yes" if places[0] == places[1] else "no"


_VALUES: dict[str, Callable[[Query, World], Value]] = {
  "is": lambda query, world: query[1],
  "friend": _looked_up("friend"),
  "holder": _looked_up("holder"),
  "colour": _looked_up("colour"),
  "material": _looked_up("material"),
  "place": lambda query, world: world.place_of(evaluate(query[1], world)),
  "giver": _giver,
  "before": _before,
  "possession": _listed("things_of", only=True),
  "occupant": _listed("persons_in", only=True),
  "inside": _listed("things_in", only=True),
  "coloured": _found("colour"),
  "made": _found("material"),
  "things": _listed("things_of"),
  "persons": _listed("persons_in"),
  "visited": _listed("places_of"),
  "count": _count,
  "describe": _describe,
  "told": _told,
  "sentence": _sentence,
  "equal": _equal,
  "same": _same,
}
