r"""Episodes of meta-learning for compositionality (MLC): what words mean is said by study pairs.

    look twice | run -> I_LOOK | jump -> I_RUN | look -> I_JUMP | walk left -> I_TURN_LEFT I_WALK

stands for `I_JUMP I_JUMP`: primitives have other meanings in every training episode, so that a
network has to read them from the study pairs and to compose them as all episodes do. It is scored
with the true meanings, which no training episode has.

Here the query and all study pairs are one sequence; Lake and Baroni encode each study pair apart,
together with the query, and join what is encoded.

Source: Lake and Baroni 2023, "Human-like systematic generalization through a meta-learning neural
network"; meanings that are permuted anew in every episode: Lake 2019, "Compositional generalization
through meta sequence-to-sequence learning".
"""

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.data.base import DataError, Pairs
from compmod_jax.data.sources.cogs import CogsData
from compmod_jax.data.synthetic.lengths import LengthData
from compmod_jax.data.synthetic.pcfg_set import PcfgSetData
from compmod_jax.data.synthetic.scan import ScanData

BEFORE, ARROW = "|", "->"
"""Words that stand before every study pair, and between its sides."""
_TRIES = 300  # episodes drawn in a row that training may not have
_Pair = tuple[str, str]


class _Meanings(NamedTuple):
  """What primitives stand for in an episode.

  Attributes:
    words: word of a training pair -> the word in its place.
    targets: target word of a primitive -> the target word in its place.
  """

  words: Mapping[str, str]
  targets: Mapping[str, str]

  def of(self, pair: _Pair) -> _Pair:
    """A pair under these meanings."""
    source, target = (
      " ".join(changes.get(word, word) for word in side.split())
      for side, changes in zip(pair, self, strict=True)
    )
    return source, target


class _Library(NamedTuple):
  """What study pairs are taken from: different training pairs.

  Attributes:
    shortest: primitive -> the pair with the shortest source that has it.
    short: pairs of short targets.
  """

  shortest: Mapping[str, _Pair]
  short: Sequence[_Pair]


@dataclasses.dataclass(frozen=True)
class MlcData:
  """Episodes made of other data: a query and study pairs as source, the query's target as target.

  Of every primitive of a query, the shortest training pair that has it is among the study pairs;
  the others are drawn from training, without the query. In `train` the meanings of primitives are
  permuted, differently in every episode and never as they truly are; all other parts are those of
  the data, with the true meanings. An episode depends on `seed`, its part and its number alone.

  The data must mean the same when primitives exchange their meanings, word for word: SCAN's do, and
  symbols that are copied or moved.

  Raises:
    UserError: a size is too small, or `primitives` has a group of another form.
  """

  data: ScanData | CogsData | PcfgSetData | LengthData = dataclasses.field(
    default_factory=lambda: ScanData("addprim_jump")
  )
  """Where queries come from; study pairs come from its training part."""
  primitives: tuple[str, ...] = (
    "walk:I_WALK look:I_LOOK run:I_RUN jump:I_JUMP",
    "left:I_TURN_LEFT right:I_TURN_RIGHT",
  )
  """Groups of primitives that exchange their meanings, each as WORD:MEANING, a target word."""
  study: int = 6
  """Study pairs of an episode."""
  longest: int = 12
  """Most target words of a study pair that is drawn by chance."""
  exchange_words: bool = False
  """Whether primitives also exchange their places in training pairs. Then a word that training has
  by itself is composed in training episodes, with other meanings than its own: no pair of an
  episode is one that other parts alone have."""
  episodes: int = 20_000
  """Training episodes."""
  seed: int = 0
  """Draws queries, study pairs and meanings."""

  def __post_init__(self) -> None:
    check_least(self, study=1, longest=1, episodes=1)
    for group in self.primitives:
      named = [one.split(":") for one in group.split()]
      sides = list(zip(*named, strict=True)) if all(len(one) == 2 for one in named) else []
      check(
        len(named) >= 2 and len(sides) == 2 and all(len({*side}) == len(named) for side in sides),
        f"primitives has the group {group!r}; give two or more different WORD:MEANING, separated by"
        " blanks, such as 'left:I_TURN_LEFT right:I_TURN_RIGHT'.",
      )
    check(bool(self.primitives), "primitives is empty; give at least one group.")

  @property
  def source_language(self) -> str:
    """What sources are."""
    return f"{self.data.source_language} with study pairs"

  @property
  def target_language(self) -> str:
    """What targets are."""
    return self.data.target_language

  @property
  def metric(self) -> str:
    """What outputs are scored with."""
    return self.data.metric

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: those of the data."""
    return self.data.splits()

  def load(self, split: str) -> Pairs:
    """The episodes of a part; those of other parts than `train` are as many as its pairs.

    Raises:
      UserError: unknown part; a query has more primitives than there are study pairs, or training
        lacks one of them; too few training pairs are short.
      DataError: the data have a word that separates study pairs.
    """
    check_choice("split", split, self.splits())
    asked, training = self.data.load(split), _listed(self.data.load("train"))
    library, queries = self._library(training), _listed(asked)
    made: list[_Pair] = []
    numbers = list(range(len(queries)))
    if split == "train":
      kept = {pair for part in self.splits() for pair in _listed(self.data.load(part))}
      kept -= set(training)
      numbers = []
      for episode in range(self.episodes):
        chance = random.Random(f"{self.seed} {split} {episode}")
        numbers.append(chance.randrange(len(queries)))
        made.append(self._trained(queries[numbers[-1]], library, chance, kept))
    else:
      for episode, query in enumerate(queries):
        chance = random.Random(f"{self.seed} {split} {episode}")
        made.append(_joined([query, *self._studied(query, library, chance)]))
    return Pairs(
      source=[source for source, _ in made],
      target=[target for _, target in made],
      where=lambda i: f"mlc:{split}[{i}] of {asked.where(numbers[i])}",
      info=None if asked.info is None else [asked.info[number] for number in numbers],
      metric=asked.metric,
    )

  @functools.cached_property
  def _groups(self) -> tuple[dict[str, str], ...]:
    """Of each group, word -> its true meaning."""
    return tuple(
      {word: meaning for word, _, meaning in (one.partition(":") for one in group.split())}
      for group in self.primitives
    )

  def _library(self, training: Sequence[_Pair]) -> _Library:
    shortest: dict[str, _Pair] = {}
    different = sorted(set(training), key=lambda pair: (len(pair[0].split()), pair))
    words = {word for group in self._groups for word in group}
    for pair in different:
      found = set(pair[0].split())
      for word in found & words:
        shortest.setdefault(word, pair)
      if {BEFORE, ARROW} & (found | set(pair[1].split())):
        raise DataError(f"A pair has the source {pair[0]!r}; {BEFORE} and {ARROW} separate pairs.")
    short = [pair for pair in different if len(pair[1].split()) <= self.longest]
    check(
      len(short) > 2 * self.study,
      f"longest is {self.longest}, but only {len(short)} training pairs have so short a target, and"
      f" study is {self.study}; raise longest, or lower study.",
    )
    return _Library(shortest, short)

  def _trained(
    self, query: _Pair, library: _Library, chance: random.Random, kept: set[_Pair]
  ) -> _Pair:
    """A training episode without pairs that are kept for other parts."""
    for _ in range(_TRIES):
      meanings = self._drawn(chance)
      pairs = [meanings.of(pair) for pair in (query, *self._studied(query, library, chance))]
      if kept.isdisjoint(pairs):
        return _joined(pairs)
    raise UserError(
      f"No episode on {query[0]!r} was found without pairs of other parts; set exchange_words ="
      " False, or lower study."
    )

  def _drawn(self, chance: random.Random) -> _Meanings:
    """Meanings of an episode, which are not the true ones of all primitives."""
    while True:
      words: dict[str, str] = {}
      targets: dict[str, str] = {}
      for group in self._groups:
        for side, changes in ((list(group), words), (list(group.values()), targets)):
          moves = changes is targets or self.exchange_words
          changes.update(zip(side, chance.sample(side, len(side)) if moves else side, strict=True))
      true = {word: meaning for group in self._groups for word, meaning in group.items()}
      if any(targets[meaning] != true[words[word]] for word, meaning in true.items()):
        return _Meanings(words, targets)

  def _studied(self, query: _Pair, library: _Library, chance: random.Random) -> list[_Pair]:
    """Study pairs of a query, before anything is exchanged."""
    primitives = {word for group in self._groups for word in group}
    needed: dict[_Pair, None] = {}
    for word in query[0].split():
      if word in primitives:
        check(
          word in library.shortest,
          f"The query {query[0]!r} has the primitive {word}, but no training pair has it, so that"
          " no study pair can say what it means. Leave it out of primitives.",
        )
        needed[library.shortest[word]] = None
    check(
      len(needed) <= self.study,
      f"study is {self.study}, but the query {query[0]!r} has {len(needed)} primitives that study"
      " pairs have to explain; raise study.",
    )
    drawn = chance.sample(library.short, min(2 * self.study + 1, len(library.short)))
    others = [pair for pair in drawn if pair not in needed and pair[0] != query[0]]
    pairs = [*needed, *others[: self.study - len(needed)]]
    chance.shuffle(pairs)
    return pairs


def _listed(pairs: Pairs) -> list[_Pair]:
  return list(zip(pairs.source, pairs.target, strict=True))


def _joined(pairs: Sequence[_Pair]) -> _Pair:
  """The source and the target of an episode: the query is the first pair."""
  (query, target), *studied = pairs
  return " ".join([query, *(f"{BEFORE} {a} {ARROW} {b}" for a, b in studied)]), target
