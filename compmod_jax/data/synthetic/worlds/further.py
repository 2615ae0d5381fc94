"""Further questions about a story that was told for another one."""

from collections.abc import Callable, Sequence

from compmod_jax.data.synthetic.worlds.drafts import Draft, Plan, finished
from compmod_jax.data.synthetic.worlds.lexicon import CLASSES
from compmod_jax.data.synthetic.worlds.plots import HELD
from compmod_jax.data.synthetic.worlds.queries import Query, evaluate
from compmod_jax.data.synthetic.worlds.repertoire import Repertoire
from compmod_jax.data.synthetic.worlds.stories import Random, pick
from compmod_jax.data.synthetic.worlds.world import NOBODY, Event, World

May = Callable[[str], bool]  # whether a way of description may be used

_ROUNDS = 3  # in which a kind of question is drawn
_TRIES = 20  # to find one of the kind
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
_UNTOLD = {"place": "person", "friend": "person", "colour": "thing", "material": "thing"}
"""kind of question without an answer -> class of what it is asked of; one event would answer it"""


def draw_further(
  random: Random, plan: Plan, events: Sequence[Event], repertoire: Repertoire
) -> Draft | None:
  """A question as planned about these events; None if none is found soon.

  Args:
    random: draws from [0, 1).
    plan: what it should be like.
    events: the story.
    repertoire: what may be asked for.
  """
  world = World(events)
  words = dict.fromkeys(word for event in events for word in event[1:])
  by_class = {kind: [word for word in words if CLASSES[word] == kind] for kind in _CLASSES}
  for _ in range(_ROUNDS):
    kind = pick(random, repertoire.asked(plan.format, plan.facts))
    for _ in range(_TRIES):
      draft = _attempt(random, plan, kind, by_class, world, repertoire)
      if draft is not None:
        return draft
  return None


def _attempt(
  random: Random,
  plan: Plan,
  kind: str,
  by_class: dict[str, list[str]],
  world: World,
  repertoire: Repertoire,
) -> Draft | None:
  """A question of a kind, unless what was drawn makes it another one than was planned."""
  inner = kind.rpartition(" ")[2]
  if not plan.told:
    query = _untold(random, inner, by_class, plan.facts, world, repertoire.describes)
    return Draft(kind, query, world.events, None, ()) if query is not None else None
  asked_of = [word for name in _ASKED_OF[inner] for word in by_class[name]]
  may = repertoire.describes if inner != "describe" else _apart(repertoire)
  if not asked_of:
    return None
  # As often as among first questions, both sides of a question are described.
  matching = plan.format == "yes_no" and inner in ("holder", "friend") and plan.facts > 1
  if matching and (plan.facts > 2 or random() < 0.5):
    query = _matched(random, inner, asked_of, by_class["person"], plan, world, may)
  else:
    query = _query(random, inner, asked_of, by_class, plan.facts, world, may)
  return None if query is None else finished(random, plan, kind, query, world)


def _untold(
  random: Random, kind: str, by_class: dict[str, list[str]], facts: int, world: World, may: May
) -> Query | None:
  """A query that so many facts would answer, of which the story tells some, but not the next."""
  asked_of = _UNTOLD.get(kind)
  if asked_of is None or not by_class[asked_of]:
    return None
  # All but the last are told, or fewer: from a person on, others lead to best friends.
  told = int(random() * facts) if asked_of == "person" and may("friend") else facts - 1
  one = pick(random, by_class[asked_of])
  query = _described(random, one, told, world, may)
  if query is None or evaluate(query, world) != one:
    return None
  for _ in range(facts - 1 - told):
    query = ("friend", query)
  query = (kind, query)
  return query if evaluate(query, world) is None else None


def _matched(
  random: Random,
  kind: str,
  asked_of: Sequence[str],
  persons: Sequence[str],
  plan: Plan,
  world: World,
  may: May,
) -> Query | None:
  """Whether who has a thing, or is someone's best friend, is a person described otherwise."""
  spare = 1 + int(random() * (plan.facts - 1))
  first = _described(random, pick(random, asked_of), plan.facts - spare - 1, world, may)
  if first is None:
    return None
  person = evaluate((kind, first), world)
  if person not in persons:
    return None
  if not plan.right:
    person = pick(random, persons)  # if it is the same, the answer is not as planned
  other = _described(random, person, spare, world, may)
  return None if other is None else ("equal", (kind, first), other)


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
