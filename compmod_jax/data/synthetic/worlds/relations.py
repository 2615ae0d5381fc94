"""What can be asked for: each function plans the events of an answer and returns the query."""

from collections.abc import Callable

from compmod_jax.data.synthetic.worlds.plots import HELD, WAYS, Plot
from compmod_jax.data.synthetic.worlds.queries import Query
from compmod_jax.data.synthetic.worlds.stories import pick, several


def place(plot: Plot, facts: int) -> Query:
  """Where a person or thing is."""
  return "place", plot.somewhere(plot.new("place"), facts)


def holder(plot: Plot, facts: int, person: str | None = None) -> Query:
  """Who has a thing."""
  thing, described = plot.thing(facts - 1, HELD)
  plot.happen(plot.getting(person or plot.new("person"), thing))
  return "holder", described


def friend(plot: Plot, facts: int, person: str | None = None) -> Query:
  """Who is the best friend of a person."""
  other, described = plot.person(facts - 1)
  plot.happen(("friend", other, person or plot.new("person")))
  return "friend", described


def possession(plot: Plot, facts: int) -> Query:
  """What a person has."""
  person, described = plot.person(facts - 1)
  plot.happen(plot.getting(person, plot.new("thing")))
  return "possession", described


def colour(plot: Plot, facts: int) -> Query:
  """The colour of a thing."""
  thing, described = plot.thing(facts - 1, [way for way in WAYS if way != "coloured"])
  plot.happen(("colour", thing, plot.new("colour")))
  return "colour", described


def material(plot: Plot, facts: int) -> Query:
  """What a thing is made of."""
  thing, described = plot.thing(facts - 1, [way for way in WAYS if way != "made"])
  plot.happen(("material", thing, plot.new("material")))
  return "material", described


def giver(plot: Plot, facts: int) -> Query:
  """From whom a person got a thing; either is described."""
  spare = int(facts > 1 and plot.random() < 0.5)
  thing, called = plot.thing(spare, HELD)
  person, described = plot.person(facts - 1 - spare)
  plot.happen(("pass", plot.new("person"), person, thing))
  return "giver", described, called


def before(plot: Plot, facts: int) -> Query:
  """Where a person or a thing was before it was in some place."""
  first, second = plot.new("place"), plot.new("place")
  if facts == 2 or plot.random() < 0.5:
    person, described = plot.person(facts - 2)
    events = [("go", person, first), ("go", person, second)]
    if plot.random() < 0.5:
      events.insert(0, ("go", person, plot.new("place")))
  else:
    thing, described = plot.thing(facts - 3, HELD)
    person = plot.new("person")
    events = [("go", person, first), ("take", person, thing)]
    if plot.random() < 0.5:
      events.reverse()
    events.append(("go", person, second))
  plot.happen(*events)
  return "before", described, ("is", second)


def occupant(plot: Plot, facts: int) -> Query:
  """Who is in a place."""
  where = plot.new("place")
  plot.happen(("go", plot.new("person"), where))
  return "occupant", ("is", where)


def inside(plot: Plot, facts: int) -> Query:
  """What is in a place."""
  where = plot.new("place")
  plot.put(plot.new("thing"), where, facts)
  return "inside", ("is", where)


def things(plot: Plot, facts: int) -> Query:
  """All that a person has."""
  count = _listed(plot, facts)
  person, described = plot.person(facts - count)
  for _ in range(count):
    plot.happen(plot.getting(person, plot.new("thing")))
  return "things", described


def visited(plot: Plot, facts: int) -> Query:
  """The places that a person went to."""
  count = _listed(plot, facts)
  person, described = plot.person(facts - count)
  for _ in range(count):
    plot.happen(("go", person, plot.new("place")))
  return "visited", described


def persons(plot: Plot, facts: int) -> Query:
  """All who are in a place."""
  where = plot.new("place")
  for _ in range(facts):
    plot.happen(("go", plot.new("person"), where))
  return "persons", ("is", where)


def _listed(plot: Plot, facts: int) -> int:
  """How many are listed, three at most; the other events serve to recognise the person."""
  most = min(facts, 3)
  return max(1, most - (plot.random() < 0.35))


def describe(plot: Plot, facts: int) -> Query:
  """Colour or material of a thing, or both."""
  count = 1 + (facts > 1 and plot.random() < 0.7)
  thing, described = plot.thing(facts - count, ("possession", "inside"))
  for kind in several(plot.random, ("colour", "material"), count):
    plot.happen((kind, thing, plot.new(kind)))
  return "describe", described


def told(plot: Plot, facts: int) -> Query:
  """All that is told of a person."""
  person = plot.new("person")
  for _ in range(facts):
    event = pick(plot.random, (("go", "place"), ("take", "thing"), ("friend", "person")))
    plot.happen((event[0], person, plot.new(event[1])))
  return "told", ("is", person)


def same(plot: Plot, facts: int, right: bool) -> Query:
  """Whether two persons or things are in one place; `right`: they are."""
  where = plot.new("place")
  first = 1 + int(plot.random() * (facts - 1))
  one = plot.somewhere(where, first)
  elsewhere = where if right else plot.new("place")
  return "same", one, plot.somewhere(elsewhere, facts - first)


def matched(plot: Plot, kind: str, facts: int, right: bool) -> Query:
  """Whether the holder of a thing, or someone's best friend, is a person described otherwise.

  Args:
    plot: where events are planned.
    kind: holder or friend.
    facts: number of events, at least 2.
    right: whether it is so.
  """
  spare = 1 + int(plot.random() * (facts - 1))
  person = plot.new("person")
  query = (holder if kind == "holder" else friend)(plot, facts - spare, person)
  return "equal", query, plot.person(spare, person if right else None)[1]


RELATIONS: dict[str, Callable[[Plot, int], Query]] = {
  function.__name__: function
  for function in (
    place,
    holder,
    friend,
    possession,
    colour,
    material,
    giver,
    before,
    occupant,
    inside,
    things,
    visited,
    persons,
    describe,
    told,
  )
}
