"""Questions of the four formats before they are put in English."""

import dataclasses
from collections.abc import Sequence

from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.question import Format
from compmod_jax.data.synthetic.worlds.lexicon import CLASSES
from compmod_jax.data.synthetic.worlds.plots import Plot, Stuck
from compmod_jax.data.synthetic.worlds.queries import Query, Value, evaluate, supporting, words_in
from compmod_jax.data.synthetic.worlds.relations import RELATIONS, matched, same
from compmod_jax.data.synthetic.worlds.repertoire import LISTS, Repertoire
from compmod_jax.data.synthetic.worlds.stories import Cast, Random, draw_cast, pick, several, tell
from compmod_jax.data.synthetic.worlds.world import Event, World

_TOPICS = {
  "person": ("holder", "friend", "giver", "occupant", "persons", "told"),
  "place": ("place", "before", "visited", "same"),
  "thing": ("possession", "inside", "things"),
  "colour": ("colour", "describe"),
  "material": ("material",),
}
_TOPIC_OF = {kind: topic for topic, kinds in _TOPICS.items() for kind in kinds}

_ROUNDS = 100  # in which a kind of question is drawn
_STORIES = 40  # that a kind of question is tried on before another one is drawn
_LONGEST_LIST = 3
# Of stories may end with a planned event: more, and the last sentence alone would tell too often.
_LATE = 0.08


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
  """What a question should be like.

  Attributes:
    format: its format.
    facts: how many events its answer needs.
    sentences: least and greatest number of events of its story.
    options: how many there are, in multiple choice.
    right: whether the answer to a yes/no question is yes.
    told: whether the story holds the answer.
    choices: words that could be the answer, which is one of them, if not for the story; at least.
    outside: words of every class; if given, wrong options are some of those that the story does not
      have, where there are enough.
  """

  format: Format
  facts: int
  sentences: tuple[int, int]
  options: int = 0
  right: bool = True
  told: bool = True
  choices: int = 4
  outside: Cast | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
  """A question that is not in English yet.

  Attributes:
    kind: of question.
    query: what is asked.
    events: the story.
    value: the answer; None where the story does not tell.
    supporting: numbers of the events that the answer needs.
    options: words to choose from.
  """

  kind: str
  query: Query
  events: Sequence[Event]
  value: Value
  supporting: tuple[int, ...]
  options: tuple[str, ...] = ()


def draw(random: Random, words: Cast, plan: Plan, repertoire: Repertoire) -> Draft:
  """A question as planned, with a story of its own.

  Args:
    random: draws from [0, 1).
    words: of every class, for stories to choose from.
    plan: what it should be like.
    repertoire: what may be asked for.

  Raises:
    UserError: there is hardly any such question, as few kinds may be asked for.
  """
  for _ in range(_ROUNDS):
    kind = pick(random, repertoire.asked(plan.format, plan.facts))
    for _ in range(_STORIES):
      try:
        draft = _attempt(random, words, plan, kind, repertoire)
      except Stuck:
        continue
      if draft is not None:
        return draft
  raise UserError(
    f"kinds is {repertoire.kinds}; a question needs {plan.facts} of their facts in {plan.format}"
    f" format, and in {_ROUNDS * _STORIES:,} stories there was none. Add kinds, so that more"
    " can happen and be described by it, such as place, friend and holder."
  )


def _attempt(
  random: Random, words: Cast, plan: Plan, kind: str, repertoire: Repertoire
) -> Draft | None:
  """A question of a kind, unless the rest of the story made it another one than was planned."""
  inner = kind.rpartition(" ")[2]
  low, high = plan.sentences
  count = low + int((high - low + 1) * random())
  cast = draw_cast(random, words, count)
  plot = Plot(random, cast, repertoire)
  query = _planned(plot, plan, inner)
  _add_decoys(plot, plan, query)
  count = max(count, len(plot.timed) + 1)
  if count > high:
    return None
  late = random() < _LATE
  topic = _TOPIC_OF[inner]
  count += not plan.told
  world = tell(random, cast, topic, count, plot.events(), late=late, kinds=repertoire.events)
  if world is None:
    return None
  draft = finished(random, plan, kind, query, world)
  return draft if draft is None or plan.told else _untold(random, draft)


def finished(random: Random, plan: Plan, kind: str, query: Query, world: World) -> Draft | None:
  """The question after a query's value, unless in this world it is another one than was planned.

  Args:
    random: draws from [0, 1).
    plan: what it should be like; whether the story holds the answer is left to the caller.
    kind: of question, one of `repertoire.KINDS`.
    query: what is asked for, without what the kind puts around it (count, sentence).
    world: after all events of the story.
  """
  asked = _asked(random, plan, kind, query, world)
  if asked is None:
    return None
  outer = kind.rpartition(" ")[0]
  query, options = asked
  query = (outer, query) if outer else query
  facts = supporting(query, world.events, plan.facts)
  if facts is None or len(facts) != plan.facts:
    return None
  value = evaluate(query, world)
  if plan.format == "yes_no" and value != ("yes" if plan.right else "no"):
    return None
  return Draft(kind, query, world.events, value, tuple(facts), options)


def _planned(plot: Plot, plan: Plan, kind: str) -> Query:
  """What is asked, with its events planned."""
  if kind == "same":
    return same(plot, plan.facts, plan.right)
  # Both sides of the question are described; no thing that someone has takes more than one fact.
  matching = plan.format == "yes_no" and kind in ("holder", "friend") and plan.facts > 1
  if matching and (plan.facts > 2 or plot.random() < 0.5):
    return matched(plot, kind, plan.facts, plan.right)
  return RELATIONS[kind](plot, plan.facts)


def _add_decoys(plot: Plot, plan: Plan, query: Query) -> None:
  """Plans what else could be the answer, if one did not read, told of as often."""
  kind = query[0]
  if kind == "describe":
    plot.rival()
  elif kind in (*LISTS, "told"):
    plot.decoys(_TOPIC_OF[kind], 2)
  elif kind in _TOPIC_OF and kind != "same":
    topic = _TOPIC_OF[kind]
    told = {word for _, event in plot.timed for word in event[1:] if CLASSES[word] == topic}
    told.difference_update(words_in(query))
    plot.decoys(topic, max(plan.choices, plan.options) - len(told))


def _asked(
  random: Random, plan: Plan, kind: str, query: Query, world: World
) -> tuple[Query, tuple[str, ...]] | None:
  """The query as its format has it, and options; None if the story leaves too little to choose."""
  value = evaluate(query, world)
  if value is None:
    return None
  if query[0] in LISTS:
    least = 2 if kind in LISTS else 1
    return (query, ()) if least <= len(value) <= _LONGEST_LIST else None
  if query[0] in ("equal", "same", "describe", "told"):
    return query, ()
  choices = _choices(query, world, _TOPIC_OF[query[0]])
  if value not in choices or len(choices) < max(plan.choices, plan.options):
    return None
  choices.remove(value)
  if plan.format == "multiple_choice":
    options = several(random, _wrong(plan, world, choices), plan.options - 1)
    options.insert(int(random() * plan.options), value)
    return query, tuple(options)
  if plan.format == "yes_no":
    return ("equal", query, ("is", value if plan.right else pick(random, choices))), ()
  return query, ()


def _choices(query: Query, world: World, topic: str) -> list[str]:
  """The words of a class that the story has and the question has not."""
  told = dict.fromkeys(word for event in world.events for word in event[1:])
  named = set(words_in(query))
  return [word for word in told if CLASSES[word] == topic and word not in named]


def _wrong(plan: Plan, world: World, choices: list[str]) -> list[str]:
  """The words that wrong options are drawn from: `choices`, unless the plan has others."""
  if plan.outside is None:
    return choices
  told = {word for event in world.events for word in event[1:]}
  others = [word for word in getattr(plan.outside, CLASSES[choices[0]]) if word not in told]
  return others if len(others) >= plan.options - 1 else choices


def _untold(random: Random, draft: Draft) -> Draft | None:
  """The question about the story without one of the events that its answer needs.

  None if another answer follows from the rest, the question names what the rest does not, or the
  rest contradicts itself: someone passes on what, as far as it tells, another person has.
  """
  missing = pick(random, draft.supporting)
  events = [event for i, event in enumerate(draft.events) if i != missing]
  world = World([])
  for event in events:
    if not world.allows(event):
      return None
    world.happen(event)
  world.events = events
  told = {word for event in events for word in event[1:]}
  if evaluate(draft.query, world) is not None or world.ambiguous:
    return None
  if not told.issuperset(words_in(draft.query)):
    return None
  return dataclasses.replace(draft, events=events, value=None, supporting=())
