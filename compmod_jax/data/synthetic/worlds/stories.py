"""Stories: a cast, and events that could happen one after the other."""

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from compmod_jax.data.synthetic.worlds.world import NOBODY, Event, World

Random = Callable[[], float]  # draws from [0, 1)

# How often each kind of event is tried, and how often more where a question is about its words.
_SHARES = {
  "go": 5,
  "take": 4,
  "pass": 2,
  "drop": 1,
  "leave": 2,
  "colour": 2,
  "material": 1,
  "friend": 2,
}
_MORE = {
  "place": {"go": 5, "leave": 2},
  "person": {"go": 2, "take": 3, "pass": 2, "friend": 3},
  "thing": {"take": 5, "leave": 3},
  "colour": {"colour": 4, "take": 2},
  "material": {"material": 4, "take": 2},
}
_TRIES = 200  # to find something that can happen
_KINDS = {
  topic: tuple(kind for kind, share in _SHARES.items() for _ in range(share + more.get(kind, 0)))
  for topic, more in _MORE.items()
}


def pick(random: Random, items: Sequence[Any]) -> Any:
  """One of the items, all as likely."""
  return items[int(random() * len(items))]


def several(random: Random, items: Sequence[Any], count: int) -> list[Any]:
  """So many of different items in random order."""
  found: list[Any] = []
  while len(found) < count:
    item = items[int(random() * len(items))]
    if item not in found:
      found.append(item)
  return found


class Cast(NamedTuple):
  """Who and what a story is about, or can be; each list of a story's cast in random order."""

  person: Sequence[str]
  place: Sequence[str]
  thing: Sequence[str]
  colour: Sequence[str]
  material: Sequence[str]


def draw_cast(random: Random, words: Cast, count: int) -> Cast:
  """A cast for so many events: five of each class of words, more of them in long stories."""
  size = max(5, count // 2)
  return Cast(*(several(random, of_class, min(size, len(of_class))) for of_class in words))


def tell(
  random: Random,
  cast: Cast,
  topic: str,
  count: int,
  planned: Sequence[Event],
  *,
  late: bool,
  kinds: Container[str],
) -> World | None:
  """A story of so many events, the planned ones among others that are drawn.

  Args:
    random: draws from [0, 1).
    cast: who and what it is about.
    topic: class of the words that a question asks for; the story has more of them.
    count: number of events, more than are planned.
    planned: events that happen in this order, at any time; no others tell the same before them.
    late: whether the last event may be a planned one.
    kinds: of events that may happen besides.

  Returns:
    The world at the end, with its events; None if a planned one did not fit in, or nothing else
    could happen any more.
  """
  events: list[Event] = []
  world = World(events)
  likely = [kind for kind in _KINDS[topic] if kind in kinds]
  reserved = {(_STATE.get(event[0]), event[_THEME.get(event[0], 1)]) for event in planned}
  rest = len(planned)
  early = not late
  for slots in range(count - early, -early, -1):
    if random() * slots < rest:
      event = planned[-rest]
      rest -= 1
      if not world.allows(event):
        return None
    else:
      event = _proposed(random, cast, world, reserved, likely)
      if event is None:
        return None
    events.append(event)
    world.happen(event)
  return world


def _proposed(
  random: Random, cast: Cast, world: World, reserved: "_Reserved", likely: Sequence[str]
) -> Event | None:
  """An event that can happen now; None if none was found soon."""
  for _ in range(_TRIES):
    event = _PROPOSALS[pick(random, likely)](random, cast, world, reserved)
    if event is not None:
      return event
  return None


# What of the world an event tells: a table, and which of its words it is looked up by.
_STATE = {"take": "holder", "pass": "holder", "drop": "holder", "leave": "holder"}
_STATE |= {kind: kind for kind in ("colour", "material", "friend")}
_THEME = {"take": 2, "pass": 3, "drop": 2}
_Reserved = set[tuple[str | None, str]]


def _go(random: Random, cast: Cast, world: World, reserved: _Reserved) -> Event | None:
  person, place = pick(random, cast.person), pick(random, cast.place)
  return None if world.place.get(person) == place else ("go", person, place)


def _new_thing(random: Random, cast: Cast, world: World, reserved: _Reserved) -> str | None:
  """A thing that nobody is said to have."""
  thing = pick(random, cast.thing)
  return None if thing in world.holder or ("holder", thing) in reserved else thing


def _take(random: Random, cast: Cast, world: World, reserved: _Reserved) -> Event | None:
  thing = _new_thing(random, cast, world, reserved)
  return None if thing is None else ("take", pick(random, cast.person), thing)


def _leave(random: Random, cast: Cast, world: World, reserved: _Reserved) -> Event | None:
  thing = _new_thing(random, cast, world, reserved)
  return None if thing is None else ("leave", thing, pick(random, cast.place))


def _pass(random: Random, cast: Cast, world: World, reserved: _Reserved) -> Event | None:
  thing, other = pick(random, cast.thing), pick(random, cast.person)
  person = world.holder.get(thing)
  if person is None and ("holder", thing) not in reserved:
    person = pick(random, cast.person)
  return None if person in (other, NOBODY, None) else ("pass", person, other, thing)


def _drop(random: Random, cast: Cast, world: World, reserved: _Reserved) -> Event | None:
  thing = pick(random, cast.thing)
  person = world.holder.get(thing)
  return ("drop", person, thing) if person in world.place else None


def _colour(random: Random, cast: Cast, world: World, reserved: _Reserved) -> Event | None:
  thing = pick(random, cast.thing)
  if thing in world.colour or ("colour", thing) in reserved:
    return None
  return "colour", thing, pick(random, cast.colour)


def _material(random: Random, cast: Cast, world: World, reserved: _Reserved) -> Event | None:
  thing = pick(random, cast.thing)
  if thing in world.material or ("material", thing) in reserved:
    return None
  return "material", thing, pick(random, cast.material)


def _friend(random: Random, cast: Cast, world: World, reserved: _Reserved) -> Event | None:
  person, other = pick(random, cast.person), pick(random, cast.person)
  if person == other or person in world.friend or ("friend", person) in reserved:
    return None
  return "friend", person, other


_PROPOSALS: dict[str, Callable[[Random, Cast, World, _Reserved], Any]] = {
  "go": _go,
  "take": _take,
  "pass": _pass,
  "drop": _drop,
  "leave": _leave,
  "colour": _colour,
  "material": _material,
  "friend": _friend,
}
