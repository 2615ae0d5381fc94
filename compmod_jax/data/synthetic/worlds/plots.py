"""Plots: the events from which an answer will follow, and those that descriptions take."""

from collections.abc import Iterable

from compmod_jax.data.synthetic.worlds.queries import Query
from compmod_jax.data.synthetic.worlds.repertoire import Repertoire
from compmod_jax.data.synthetic.worlds.stories import Cast, Random, pick
from compmod_jax.data.synthetic.worlds.world import Event

Described = tuple[str, Query]  # a person or thing, and what the question calls it

WAYS = ("coloured", "made", "possession", "inside")
HELD = ("coloured", "made")  # ways to describe a thing whose holder or place other events tell
_MOST = {"coloured": 1, "made": 1, "possession": 9, "inside": 2}  # events that a way takes at most


class Stuck(Exception):
  """The cast is too small, or no description takes so many events."""


class Plot:
  """The planned events of a story, and the words of its cast that they do not use yet.

  Each method that describes something plans the events which the description takes. What else will
  happen in the story may change an answer, or the number of events that it needs: so both are found
  out afterwards.

  Args:
    random: draws from [0, 1).
    cast: of the story.
    repertoire: what may be asked for.
  """

  def __init__(self, random: Random, cast: Cast, repertoire: Repertoire):
    self.random = random
    self.cast = cast
    self.repertoire = repertoire
    self.free = {kind: list(words) for kind, words in cast._asdict().items()}
    self.timed: list[tuple[float, Event]] = []

  def events(self) -> list[Event]:
    """The planned events in an order in which they can happen."""
    return [event for _, event in sorted(self.timed)]

  def new(self, kind: str) -> str:
    """A word of a class that the plot does not have yet.

    Raises:
      Stuck: the cast has no other.
    """
    if not self.free[kind]:
      raise Stuck
    return self.free[kind].pop()

  def anyone(self) -> str:
    """A person, if possible one that the plot has nothing about."""
    return pick(self.random, self.free["person"] or self.cast.person)

  def happen(self, *events: Event) -> None:
    """Plans events in this order, with any others between them."""
    self.timed += zip(sorted([self.random() for _ in events]), events, strict=True)

  def person(self, facts: int, person: str | None = None) -> Described:
    """A person, whom it takes so many events to recognise.

    Args:
      facts: number of events.
      person: which one; a new one if None.

    Raises:
      Stuck: there is no such description.
    """
    person = person or self.new("person")
    if facts == 0:
      return person, ("is", person)
    way = self.random()
    can = self.repertoire.describes
    if (way < 0.6 or facts > 2) and can("friend"):  # a thing that they have takes no more than one
      other, described = self.person(facts - 1)
      self.happen(("friend", other, person))
      return person, ("friend", described)
    if way < 0.7 and facts == 1 and can("occupant"):
      place = self.new("place")
      self.happen(("go", person, place))
      return person, ("occupant", ("is", place))
    if facts > 2 or not can("holder"):
      raise Stuck
    thing, described = self.thing(facts - 1, HELD)
    self.happen(self.getting(person, thing))
    return person, ("holder", described)

  def thing(self, facts: int, ways: Iterable[str] = WAYS) -> Described:
    """A new thing, which it takes so many events to recognise.

    Args:
      facts: number of events.
      ways: descriptions to choose from; those that are at odds with other planned events, or give
        the answer away, are not among them.

    Raises:
      Stuck: there is no such description.
    """
    thing = self.new("thing")
    if facts == 0:
      return thing, ("is", thing)
    can = self.repertoire.describes
    fitting = [way for way in ways if facts <= _MOST[way] and can(way)]
    if not fitting:
      raise Stuck
    way = pick(self.random, fitting)
    if way == "possession":
      person, described = self.person(facts - 1)
      self.happen(self.getting(person, thing))
      return thing, (way, described)
    if way == "inside":
      place = self.new("place")
      self.put(thing, place, facts)
      return thing, (way, ("is", place))
    kind = "colour" if way == "coloured" else "material"
    word = self.new(kind)
    self.happen((kind, thing, word))
    return thing, (way, ("is", word))

  def getting(self, person: str, thing: str) -> Event:
    """The person takes the thing or gets it from someone."""
    others = [other for other in self.free["person"] if other != person]
    if others and "pass" in self.repertoire.events and self.random() < 0.4:
      return "pass", pick(self.random, others), person, thing
    return "take", person, thing

  def put(self, thing: str, place: str, facts: int) -> None:
    """The thing comes to be in a place, by one event or two."""
    happens = self.repertoire.events
    if facts == 1:
      if "leave" not in happens:
        raise Stuck
      self.happen(("leave", thing, place))
      return
    person = self.new("person")
    if "drop" in happens and self.random() < 0.35:
      self.happen(("go", person, place), ("drop", person, thing))
    else:
      self.happen(("go", person, place))
      self.happen(self.getting(person, thing))

  def somewhere(self, place: str, facts: int) -> Query:
    """A person or thing in a place; to recognise it and find it there takes so many events."""
    if facts > 3 or self.random() < 0.4:
      person, described = self.person(facts - 1)
      self.happen(("go", person, place))
      return described
    moves = min(facts, 2) if facts != 2 else 1 + int(2 * self.random())
    thing, described = self.thing(facts - moves, HELD)
    self.put(thing, place, moves)
    return described

  def decoys(self, kind: str, count: int) -> None:
    """Plans events that bring so many more words of a class into the story."""
    for _ in range(count):
      word = self.new(kind)
      if kind == "person":
        self.happen(("take", word, self.new("thing")))
      elif kind == "thing":
        self.happen(("take", self.anyone(), word))
      elif kind != "place":
        self.happen((kind, self.new("thing"), word))
      elif "leave" in self.repertoire.events and self.random() < 0.25 and self.free["thing"]:
        self.happen(("leave", self.new("thing"), word))
      else:
        self.happen(("go", self.anyone(), word))

  def rival(self) -> None:
    """Plans another thing that someone has, with its colour and material."""
    thing = self.new("thing")
    self.happen(("take", self.anyone(), thing))
    self.happen(("colour", thing, self.new("colour")))
    self.happen(("material", thing, self.new("material")))
