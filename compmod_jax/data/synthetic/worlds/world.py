"""What a story makes true: events, and the state of the world that they lead to.

An event is a tuple of its kind and the words that take part in it:

    go person place             the person is in that place from now on
    take person thing           has it, and carries it along, from now on; nobody is said to lose it
    pass person other thing     the other person has it from now on
    drop person thing           it stays where the person is now
    leave thing place           it is there; nobody has it
    colour thing colour, material thing material, friend person other       never change

Nothing but what is told happens. A state knows only what follows from the events given, so that the
state after some of a story's events is what a reader of those sentences alone can know. Stories
(`stories`) have no event from which the place of a person would follow in a roundabout way: things
are taken that no place is known of, and passing them on does not bring persons together.
"""

from collections.abc import Sequence

Event = tuple[str, ...]

NOBODY = "nobody"


class World:
  """The state after some events, as far as they tell.

  Attributes:
    place: person -> where they are.
    trail: person -> the places that they went to, in order.
    holder: thing -> who has it; NOBODY once it is dropped or left.
    spot: thing that nobody has -> where it is; None where it was dropped by someone whose place
      is not told.
    dropped: things that were dropped where they are.
    colour, material: of things.
    friend: person -> their best friend.
    givers: person and thing -> from whom they got it, each time.
    ambiguous: set by `only` once a description fitted several.
  """

  __slots__ = (
    "ambiguous",
    "colour",
    "dropped",
    "events",
    "friend",
    "givers",
    "holder",
    "material",
    "place",
    "spot",
    "trail",
  )

  def __init__(self, events: Sequence[Event]):
    self.events = events
    self.place: dict[str, str] = {}
    self.trail: dict[str, list[str]] = {}
    self.holder: dict[str, str] = {}
    self.spot: dict[str, str | None] = {}
    self.dropped: set[str] = set()
    self.colour: dict[str, str] = {}
    self.material: dict[str, str] = {}
    self.friend: dict[str, str] = {}
    self.givers: dict[tuple[str, str], list[str]] = {}
    self.ambiguous = False
    for event in events:
      self.happen(event)

  def happen(self, event: Event) -> None:
    """Changes the state by one event."""
    kind, one, two = event[0], event[1], event[2]
    if kind == "go":
      if self.place.get(one) != two:
        self.trail.setdefault(one, []).append(two)
      self.place.pop(one, None)
      self.place[one] = two
    elif kind == "take":
      self.holder.pop(two, None)
      self.holder[two] = one
    elif kind == "pass":
      self.holder.pop(event[3], None)
      self.holder[event[3]] = two
      self.givers.setdefault((two, event[3]), []).append(one)
    elif kind == "drop":
      self.holder[two] = NOBODY
      self.spot[two] = self.place.get(one)
      self.dropped.add(two)
    elif kind == "leave":
      self.holder[one] = NOBODY
      self.spot[one] = two
    else:
      getattr(self, kind)[one] = two

  def allows(self, event: Event) -> bool:
    """Whether an event can follow: it neither repeats nor contradicts what is told.

    Nobody goes to where they are, takes or leaves a thing that someone has or that lies somewhere,
    or passes on or drops what another person has; what never changes is told once.
    """
    kind, one, two = event[0], event[1], event[2]
    if kind == "go":
      return self.place.get(one) != two
    if kind == "take":
      return two not in self.holder
    if kind == "leave":
      return one not in self.holder
    if kind == "pass":
      return one != two and self.holder.get(event[3], one) == one
    if kind == "drop":
      return self.holder.get(two, one) == one
    return one != two and one not in getattr(self, kind)

  def place_of(self, one: str) -> str | None:
    """Where a person or a thing is; None if that does not follow."""
    holder = self.holder.get(one)
    if holder is None:
      return self.place.get(one)
    return self.spot.get(one) if holder == NOBODY else self.place.get(holder)

  def things_of(self, person: str) -> list[str]:
    """What a person has, in the order in which they got it."""
    return [thing for thing, holder in self.holder.items() if holder == person]

  def persons_in(self, place: str) -> list[str]:
    """Who is in a place, in the order in which they came."""
    return [person for person, where in self.place.items() if where == place]

  def things_in(self, place: str) -> list[str]:
    """What is in a place, carried or not."""
    return [thing for thing in self.holder if self.place_of(thing) == place]

  def only(self, found: Sequence[str]) -> str | None:
    """The one that was found; None for none of them, and for several, which is remembered."""
    if len(found) > 1:
      self.ambiguous = True
    return found[0] if len(found) == 1 else None

  def places_of(self, one: str) -> list[str | None]:
    """The places where a person or a thing was, in order; None for one that is not told."""
    return list(self.trail[one]) if one in self.trail else self._trail_of_thing(one)

  def _trail_of_thing(self, thing: str) -> list[str | None]:
    """A thing was with whoever took it, passed it on, got it or dropped it, and goes where they go.

    Places are those of the moment. Before the first of these events nothing is known.
    """
    place: dict[str, str] = {}
    trail: list[str | None] = []
    holder = None

    def note(where: str | None) -> None:
      if not trail or trail[-1] != where:
        trail.append(where)

    for event in self.events:
      kind, one = event[0], event[1]
      if kind == "go":
        place[one] = event[2]
        if one == holder:
          note(event[2])
      elif event[-1] == thing and kind in ("take", "pass", "drop"):
        if one != holder:
          note(place.get(one))
        holder = {"take": one, "pass": event[2], "drop": None}[kind]
        if kind == "pass":
          note(place.get(event[2]))
      elif kind == "leave" and one == thing:
        note(event[2])
    return trail
