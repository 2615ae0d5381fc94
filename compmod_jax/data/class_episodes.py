"""Episodes of classes: N classes with K examples each to learn from, and further ones to tell.

A batch has the columns

    {"inputs": [episodes, rows, ...], "labels": [episodes, rows], "index": [episodes, rows]}

The first N K rows of an episode are its support, class by class, and the next N Q its query. The
labels are 0 to N - 1, in an order of classes that every episode draws anew. Where classes are in
groups, such as values of properties, an episode is of one group.

Source: Vinyals et al. 2016, section 4 (episodes).
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import UserError, check, check_choice, short_list
from compmod_jax.data import pipeline
from compmod_jax.data.base import Batch, ClassExamples, Dataset, HasClasses, TrainIterator
from compmod_jax.data.episodes import EpisodeBatches, episode_shapes, flat
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.data.subsets import subset_numbers

# Keeps the draw of episodes apart from others of the same seed.
_TRAINED, _SCORED = 0xC1A55, 0xC1A56
_ROWS = 100  # of a batch that has no episodes


@dataclasses.dataclass(frozen=True)
class ClassEpisodeConfig:
  """What an episode of classes holds."""

  ways: int = 5
  """N: classes of an episode."""
  shots: int = 1
  """K: examples of every class that a learner sees."""
  queries: int = 15
  """Q: further examples of every class that it has to tell."""
  batch: int = 16
  """Episodes of a global batch."""

  def __post_init__(self):
    check_least(self, "episodes.", ways=2, shots=1, queries=1, batch=1)

  @property
  def support(self) -> int:
    """Rows of the support."""
    return self.ways * self.shots

  @property
  def rows(self) -> int:
    """Rows of an episode."""
    return self.ways * (self.shots + self.queries)

  @property
  def labels(self) -> np.ndarray:
    """The class of every row, from 0, int32 [rows]."""
    classes = np.arange(self.ways, dtype=np.int32)
    return np.concatenate([np.repeat(classes, self.shots), np.repeat(classes, self.queries)])

  def of_ways(self, ways: int) -> "ClassEpisodeConfig":
    """The same with so many classes."""
    return dataclasses.replace(self, ways=ways)

  def of_rows(self, rows: int) -> "ClassEpisodeConfig":
    """The same with as many classes as this number of rows has."""
    return self.of_ways(rows // (self.shots + self.queries))

  def describe(self) -> str:
    """Its size, in a few words."""
    return f"{self.ways}-way {self.shots}-shot with {self.queries} queries a class"


def draw_episode(
  random: np.random.Generator,
  members: list[np.ndarray],
  config: ClassEpisodeConfig,
  groups: Sequence[np.ndarray] = (),
) -> np.ndarray:
  """The examples of an episode, [rows]: classes and examples drawn without repetition.

  Args:
    random: what it is drawn with.
    members: numbers of the examples of every class, each of `shots + queries` at least.
    config: its size.
    groups: classes, as numbers of `members`, of which those of an episode are one group's, each as
      likely; none where any may meet.
  """
  order = random.permutation(groups[int(random.integers(len(groups)))] if groups else len(members))
  chosen = order[: config.ways]
  each = config.shots + config.queries
  drawn = np.stack([random.permutation(members[one])[:each] for one in chosen])
  return np.concatenate([drawn[:, : config.shots].ravel(), drawn[:, config.shots :].ravel()])


@dataclasses.dataclass(frozen=True, eq=False)
class ClassSource:
  """The classes of a split as episodes; see `data.episodes.EpisodeSource`.

  Attributes:
    examples: the examples.
    members: numbers of the examples of every class that takes part.
    config: what an episode holds.
    turns: quarter turns of a picture that are classes of their own: 1 for none, or 4.
    groups: see `draw_episode`.
  """

  examples: ClassExamples
  members: list[np.ndarray]
  config: ClassEpisodeConfig
  turns: int = 1
  groups: Sequence[np.ndarray] = ()

  def __len__(self) -> int:
    """An epoch has about as many rows as there are examples, in whole batches."""
    batch = self.config.batch
    return max(1, round(sum(map(len, self.members)) / self.config.rows / batch)) * batch

  def plan(self, seed: int, epoch: int) -> np.ndarray:
    """An epoch's episodes, [episodes, rows]; an example n turned t times is t times all + n."""
    random = np.random.default_rng([seed, epoch, _TRAINED])
    drawn = (self._turned, self.config, self.groups)
    return np.stack([draw_episode(random, *drawn) for _ in range(len(self))])

  @functools.cached_property
  def _turned(self) -> list[np.ndarray]:
    step = len(self.examples)
    return [turn * step + one for turn in range(self.turns) for one in self.members]

  def fixed(self, count: int) -> np.ndarray:
    """Episodes of evaluation, [count, rows]: the first ones are the same for every count."""
    drawn = (np.random.default_rng([_SCORED, number]) for number in range(count))
    each = (self.members, self.config, self.groups)
    return np.stack([draw_episode(random, *each) for random in drawn])

  def batch(self, episodes: np.ndarray, size: int, first: int = 0) -> pipeline.Batch:
    """Episodes `first` to `first + size` of these; those beyond the last are filler."""
    mine = episodes[first : first + size]
    turn, index = np.divmod(mine, len(self.examples))
    inputs = self.examples.inputs[index]
    for number in range(1, self.turns):
      inputs[turn == number] = np.rot90(inputs[turn == number], number, axes=(1, 2))
    labels = np.broadcast_to(self.config.labels, index.shape)

    def filled(values: np.ndarray, filler: int) -> np.ndarray:
      more = [(0, size - len(values)), *[(0, 0)] * (values.ndim - 1)]
      return np.pad(values, more, constant_values=filler)

    return {
      "inputs": filled(inputs, 0),
      "labels": filled(labels, 0),
      "index": filled(index.astype(np.int32), -1),
    }


def _groups(names: tuple[str, ...], numbers: np.ndarray) -> list[np.ndarray]:
  """The classes of every group, as places in `numbers`, in the order of the groups' names."""
  of_place = np.array([names[number] for number in numbers] if names else [])
  return [np.flatnonzero(of_place == name) for name in np.unique(of_place)]


class HasClassData(Protocol):
  """The configuration of a task on examples by class."""

  @property
  def data(self) -> HasClasses:
    """Where examples come from."""
    ...


class ClassTaskConfig(HasClassData, Protocol):
  """What a task's configuration says about its episodes."""

  @property
  def episodes(self) -> ClassEpisodeConfig:
    """What an episode holds, in training and in evaluation."""
    ...

  @property
  def train_ways(self) -> int:
    """Classes of a training episode; 0 for as many as in evaluation."""
    ...

  @property
  def quarter_turns(self) -> bool:
    """Whether quarter turns of a training class are classes of their own."""
    ...

  @property
  def small_share(self) -> float:
    """Share of the training classes in the small part."""
    ...


D = TypeVar("D", bound=HasClassData, covariant=True)
C = TypeVar("C", bound=ClassTaskConfig, covariant=True)


class Classes(Dataset[D]):
  """Examples by class; batches of training are the subclass's, those of `eval_batches` examples one
  by one."""

  def __init__(self, config: D):
    self.config = config
    self._loaded: dict[str, ClassExamples] = {}

  def classes(self, split: str) -> ClassExamples:
    """The examples of a split; loaded once."""
    if split not in self._loaded:
      check_choice("split", split, self.splits())
      self._loaded[split] = self.config.data.load(split)
    return self._loaded[split]

  def members(self, split: str) -> list[np.ndarray]:
    """Numbers of the examples of every class of a split."""
    found = self.classes(split)
    order = np.argsort(found.classes, kind="stable")
    counts = np.bincount(found.classes, minlength=len(found.names))
    return np.split(order, np.cumsum(counts)[:-1])

  def check_disjoint(self) -> None:
    """Raises a `UserError` if a class, or a group of classes, is in two splits."""
    seen, taken = dict[str, str](), dict[str, str]()
    for split in self.splits():
      found = self.classes(split)
      for name in found.names:
        before = seen.setdefault(name, split)
        if before != split:
          raise UserError(
            f"The class {name!r} is in the splits {before!r} and {split!r}; what is learned about"
            " learning is tested on classes that were never seen. Leave it out of one."
          )
      for group in dict.fromkeys(found.groups):
        before = taken.setdefault(group, split)
        if before != split:
          raise UserError(
            f"The group {group!r} has classes in the splits {before!r} and {split!r}; what is"
            " learned about learning is tested on groups that were never seen. Keep it in one."
          )

  def fingerprints(self) -> Fingerprints:
    """What identifies the training examples."""
    found = self.classes("train")
    arrays = (found.inputs.reshape(-1), found.classes)
    return {"classes": fingerprint(len(found), "examples", arrays)}

  def files(self) -> dict[str, bytes]:
    """None."""
    return {}

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches of single examples with the numbers of their classes in the split."""
    found, size = self.classes(split), pipeline.rows_of_batch(_ROWS, multiple)
    for start in range(0, len(found), size):
      rows = np.arange(start, min(start + size, len(found)), dtype=np.int32)
      labels = found.classes[rows].astype(np.int32)
      batch = {"inputs": found.inputs[rows], "labels": labels, "index": rows}
      yield pipeline.filled(batch, size)

  def flat(self, batch: Batch) -> Batch:
    """The rows of a training batch as `eval_batches` has them."""
    return flat(batch)

  def example(self) -> dict[str, jax.Array]:
    """Two rows."""
    inputs = self.classes("train").inputs
    return two_rows(jnp.zeros((2, *inputs.shape[1:]), inputs.dtype))

  def where(self, split: str, number: int) -> Any:
    """Name of the class of an example."""
    found = self.classes(split)
    return found.names[int(found.classes[number])]


def two_rows(inputs: jax.Array) -> dict[str, jax.Array]:
  """Two inputs as a batch of single examples."""
  return {
    "inputs": inputs,
    "labels": jnp.zeros(2, jnp.int32),
    "index": jnp.arange(2, dtype=jnp.int32),
  }


class ClassEpisodes(Classes[C]):
  """Examples by class as episodes.

  Batches of training are episodes, those of `eval_batches` examples one by one, as of every data
  set in episodes; `episodes` gives the same episodes of a split every time.
  """

  @property
  def trained(self) -> ClassEpisodeConfig:
    """What an episode of training holds."""
    ways = self.config.train_ways or self.config.episodes.ways
    return dataclasses.replace(self.config.episodes, ways=ways)

  def source(
    self, split: str, config: ClassEpisodeConfig, *, part: str = "all", seed: int = 0
  ) -> ClassSource:
    """A split as episodes.

    Args:
      split: its name.
      config: what an episode holds.
      part: of the training classes; see `data.subsets`.
      seed: of the split into parts.

    Raises:
      UserError: it has fewer classes than an episode, or a class has too few examples.
    """
    examples, turns = self.classes(split), 4 if self.config.quarter_turns else 1
    numbers = np.arange(len(examples.names))
    if part != "all":
      share = self.config.small_share
      numbers = subset_numbers(part, len(numbers), small_share=share, seed=seed)
    turns = turns if split == "train" else 1
    check(
      len(numbers) * turns >= config.ways,
      f"episodes.ways is {config.ways}, but the split {split!r} has"
      f" {len(numbers)} classes{' in this part' if part != 'all' else ''}; an episode is of"
      " different classes. Ask for fewer ways, or give more classes.",
    )
    groups = _groups(examples.groups, numbers)
    large = [group for group in groups if len(group) >= config.ways]
    check(
      not groups or large,
      f"episodes.ways is {config.ways}, but the largest group of classes of the split {split!r} has"
      f" {max(map(len, groups), default=0)}; an episode is of classes of one group. Ask for fewer"
      " ways, or give groups with more classes.",
    )
    each, members = config.shots + config.queries, self.members(split)
    counts = [len(one) for one in members]
    few = [f"{examples.names[n]} ({counts[n]})" for n in numbers if counts[n] < each]
    check(
      not few,
      f"episodes.shots + episodes.queries is {each}, but of the split {split!r} these classes have"
      f" fewer examples: {short_list(few)}. Ask for fewer, or leave those classes out.",
    )
    check(
      turns == 1 or (examples.inputs.ndim == 4 and len({*examples.inputs.shape[1:3]}) == 1),
      f"task.quarter_turns is set, but an example has the shape {examples.inputs.shape[1:]}; only"
      " square pictures [side, side, channels] can be turned. Set task.quarter_turns = False.",
    )
    check(
      turns == 1 or not groups,
      "task.quarter_turns is set, but classes are in groups. Set task.quarter_turns = False.",
    )
    return ClassSource(examples, [members[n] for n in numbers], config, turns, large)

  # The contract of data sets.

  def check(self) -> None:
    """Loads all splits.

    Raises:
      UserError: a class is in two splits, or a split has no episode.
    """
    for split in self.splits():
      self.source(split, self.trained if split == "train" else self.config.episodes)
    self.check_disjoint()

  def notes(self) -> list[str]:
    """Sentences on the classes."""
    counts = ((split, self.classes(split)) for split in self.splits())
    found = [f"{split} {len(one.names):,} ({len(one):,} examples)" for split, one in counts]
    return [f"classes: {', '.join(found)}; training episodes are {self.trained.describe()}"]

  def _size(self, multiple: int) -> int:
    return pipeline.rows_of_batch(self.trained.batch, multiple)

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """An endless iterator over batches of episodes, and how many make an epoch; see `Dataset`."""
    pipeline.check_processes(multiple, process, processes)
    source = self.source("train", self.trained, part=part, seed=seed)
    batches = EpisodeBatches(source, self._size(multiple), seed, (process, processes))
    return pipeline.iterate(batches, prefetch=4), batches.per_epoch

  def episodes(
    self,
    split: str,
    *,
    multiple: int = 1,
    count: int = 600,
    config: ClassEpisodeConfig | None = None,
  ) -> Iterator[Batch]:
    """Batches of the episodes on which a split is scored: always the same ones.

    Args:
      split: its name.
      multiple: the episodes of a batch are a multiple of this.
      count: how many; the last batch is filled up with rows whose index is -1.
      config: what an episode holds; as the task's, if not given.
    """
    config = config or self.config.episodes
    source = self.source(split, config)
    size = pipeline.rows_of_batch(config.batch, multiple)
    found = source.fixed(count)
    for start in range(0, len(found), size):
      yield source.batch(found[start : start + size], size)

  def trained_shapes(
    self, shapes: Mapping[str, jax.ShapeDtypeStruct], multiple: int
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of episodes, given those of one of rows."""
    return episode_shapes(shapes, self._size(multiple), self.trained.rows)

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    return f"batches of {self.trained.batch} episodes, each {self.trained.describe()}"
