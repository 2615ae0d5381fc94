"""Few-shot classification: classes are recognised after a few examples of each.

The methods are pure functions in `mechanisms.few_shot`; `few_shot_methods` has them as
configurations, and `FewShotConfig.method` chooses one for the task. Episodes, loss and scores here
serve any model that embeds examples (`EpisodeModel`), texts' too.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from compmod_jax.core import errors, sharding
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import Term, token_nll
from compmod_jax.core.sharding import fetch
from compmod_jax.data.class_episodes import ClassEpisodeConfig, ClassEpisodes
from compmod_jax.data.episodes import split_episode
from compmod_jax.data.sources.classes import ClassFolder, ClassLines, DigitsData, TfdsClasses
from compmod_jax.data.synthetic.glyphs import GlyphData
from compmod_jax.mechanisms.few_shot import (
  adapt,
  adapted_loss,
  matching_logits,
  prototype_logits,
)
from compmod_jax.models.base import Classifier, ModelConfig, Module
from compmod_jax.tasks.base import (
  Batch,
  Carry,
  Metrics,
  NoSearch,
  Params,
  Scoring,
  StepContext,
  Task,
  TaskModel,
  Terms,
)
from compmod_jax.tasks.few_shot_methods import (
  BlackBox,
  FineTune,
  Leopard,
  Maml,
  Matching,
  Method,
  Prototypes,
  by_class,
  check_shots,
  tuned,
)
from compmod_jax.trained import Axis, TrainedModel

__all__ = [
  "BlackBox",
  "Classify",
  "EpisodeLoss",
  "EpisodeModel",
  "EpisodeScores",
  "FewShot",
  "FewShotClassifier",
  "FewShotConfig",
  "FewShotModel",
  "FineTune",
  "Leopard",
  "Maml",
  "Matching",
  "Method",
  "Prototypes",
  "adapt",
  "adapted_loss",
  "matching_logits",
  "prototype_logits",
  "summed_over_tasks",
]

FewShotData = GlyphData | DigitsData | TfdsClasses | ClassFolder | ClassLines
M = TypeVar("M", bound=Module)


@dataclasses.dataclass(frozen=True)
class FewShotConfig:
  """A few-shot classification task: classes, episodes and the method."""

  data: FewShotData = GlyphData()
  """Where examples come from."""
  episodes: ClassEpisodeConfig = ClassEpisodeConfig()
  """What an episode holds."""
  method: Maml | Prototypes | Matching | Leopard | BlackBox = Maml()
  """How classes are learned within an episode."""
  train_ways: int = 0
  """Classes of a training episode, where the method can have others; 0 for as many as scored."""
  also_ways: tuple[int, ...] = ()
  """Further numbers of classes that are scored, where the method can have them."""
  quarter_turns: bool = False
  """Quarter turns of a training class are classes of their own (Santoro et al. 2016)."""
  evaluate_episodes: int = 600
  """Episodes on which a split is scored; fewer in training, see `evaluate_sentences`."""
  tasks_at_once: int = 1
  """Episodes of a batch that are computed together (`vmap`), one such group after the other; 0 for
  all, which accelerators want."""
  small_share: float = 0.07
  """Share of the training classes in the small part, for phases that train on a part."""

  def __post_init__(self):
    check_least(self, "task.", train_ways=0, evaluate_episodes=2, tasks_at_once=0)
    errors.check(
      self.train_ways != 1 and all(ways >= 2 for ways in self.also_ways),
      f"task.train_ways is {self.train_ways} and task.also_ways {self.also_ways}; an episode has 2"
      " classes at least.",
    )
    check_shots(self.method, self.episodes.shots)
    errors.check(
      not tuned(self.method),
      "task.method.tuned is set, but the scores of pictures choose no steps on validation classes;"
      " those of texts do. Leave it out.",
    )
    fixed = self.method.outputs(self.episodes.ways)
    other = [ways for ways in (self.train_ways, *self.also_ways) if ways not in (0, fixed)]
    errors.check(
      not (fixed and other),
      f"task.train_ways or task.also_ways asks for {other} classes, but the head of"
      f" {self.method.describe()} has {fixed}, as task.episodes.ways says. Leave them out, or set"
      " another task.method.",
    )

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "FewShot":
    """The task; its data are loaded for the shape of an example.

    Args:
      model: the configuration of a classifier.
      files: not needed.
      cache: not needed.

    Raises:
      UserError: the model is of another kind or does not fit the examples, or data are missing.
    """
    del files, cache
    dataset = ClassEpisodes(self)
    shape = dataset.classes("train").inputs.shape[1:]
    task = FewShot(
      dataset=dataset,
      model=FewShotModel(
        model.classifier(shape, self.method.outputs(self.episodes.ways)), self.method, shape
      ),
      objective=EpisodeLoss(dataset.trained, self.tasks_at_once),
      evaluators=(
        EpisodeScores(self.episodes, self.evaluate_episodes, self.tasks_at_once),
        *(
          EpisodeScores(
            self.episodes.of_ways(ways),
            self.evaluate_episodes,
            self.tasks_at_once,
            f"{ways}_way/",
          )
          for ways in self.also_ways
        ),
      ),
      generator=Classify(),
    )
    _ = task.shapes  # raises for a pattern of no parameter
    return task

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return (
      f"{self.episodes.ways}-way {self.episodes.shots}-shot classification by"
      f" {self.method.describe()}; {model.describe()}; {self.data.describe()}."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeModel(TaskModel[M]):
  """A model that embeds examples, and the method by which it learns an episode.

  Attributes:
    method: the method.
  """

  method: Method

  @abc.abstractmethod
  def embed(
    self, params: Params, inputs: jax.Array, intermediates: Intermediates = OFF
  ) -> jax.Array:
    """Logits or features, [rows, dim]; parameters of the method (`method.own`) are ignored."""

  def with_method(self, params: Params, inputs: jax.Array, rng: jax.Array) -> Params:
    """Parameters of the module and those of the method.

    Args:
      params: of the module, boxed.
      inputs: examples, to know the number of features by.
      rng: of the method's.
    """
    plain = nn.unbox(params)
    dim = jax.eval_shape(self.embed, plain, inputs).shape[1]
    return {**params, **self.method.more_parameters(plain, dim, rng)}

  def without_method(self, params: Params) -> dict[str, Any]:
    """The module's parameters alone."""
    return {name: part for name, part in params.items() if name not in self.method.own}


@dataclasses.dataclass(frozen=True, eq=False)
class FewShotModel(EpisodeModel[Classifier]):
  """A classifier, and the method by which it learns an episode.

  Attributes:
    shape: of an example.
  """

  shape: tuple[int, ...]

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, those of the method among them."""
    inputs = jnp.zeros((2, *self.shape))
    params = self.module.init(rng, inputs)["params"]
    return self.with_method(params, inputs, jax.random.fold_in(rng, 1))

  def embed(
    self, params: Params, inputs: jax.Array, intermediates: Intermediates = OFF
  ) -> jax.Array:
    """Logits or features, [rows, dim]."""
    inputs = inputs / jnp.float32(255) if inputs.dtype == jnp.uint8 else inputs
    return self.module.apply(
      {"params": self.without_method(params)},
      inputs,
      intermediates=intermediates.editing(self.edits),
    )

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits or features before adaptation; an example has one position: [rows, 1, dim]."""
    return self.embed(params, batch["inputs"], intermediates)[:, None]

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Rows that hold an example, bool [rows, 1]."""
    return (jnp.asarray(batch["index"]) >= 0)[:, None]


def _sums(
  model: EpisodeModel[Any],
  episodes: ClassEpisodeConfig,
  train: bool,
  params: Params,
  episode: Batch,
) -> dict[str, jax.Array]:
  """Sums over the query of an episode: nats, right answers and rows."""
  support, query = split_episode(episode, episodes.support)
  logits = model.method.logits(model.embed, params, support, query, episodes.ways, train)
  return query_sums(logits, query)


def query_sums(logits: jax.Array, query: Batch) -> dict[str, jax.Array]:
  """Sums over a query: nats, right answers and rows."""
  real = query["index"] >= 0
  nll, right = token_nll(logits, query["labels"]), jnp.argmax(logits, -1) == query["labels"]
  return {
    "nll": jnp.sum(jnp.where(real, nll, 0)),
    "correct": jnp.sum(real & right).astype(jnp.float32),
    "count": jnp.sum(real).astype(jnp.float32),
  }


def _groups(batch: Batch, at_once: int) -> dict[str, jax.Array]:
  """Columns [groups, episodes of a group, ...]."""
  count = len(batch["index"])
  size = count if not at_once else math.gcd(count, at_once)
  return {k: x.reshape(-1, size, *x.shape[1:]) for k, x in batch.items()}


def _on_parts(function: Callable[..., PyTree], params: Params, batch: Batch) -> PyTree:
  """What a function of parameters and episodes finds on every device for its part of a batch.

  Args:
    function: its arrays are [episodes or groups, ...].
    params: the same for all.
    batch: columns [episodes, rows, ...].
  """

  def names(x: jax.Array, first: str | None) -> tuple[str | None, ...]:
    return (first, *(None for _ in x.shape[1:])) if x.ndim else ()

  return sharding.on_parts(
    lambda params, batch, _: function(params, batch),
    [params, batch, batch["index"]],
    [
      jax.tree.map(lambda x: names(x, None), params),
      jax.tree.map(lambda x: names(x, "batch"), batch),
      names(batch["index"], "batch"),
    ],
    result=("batch",),
  )


def _summed(tree: PyTree) -> PyTree:
  """Sums over the first axis of every array."""
  return jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)


def summed_over_tasks(
  one: Callable[[Params, Batch], dict[str, jax.Array]], params: Params, batch: Batch, at_once: int
) -> dict[str, jax.Array]:
  """Sums over the episodes of a batch, which can be differentiated; `nll` alone has a gradient.

  Where groups are computed one after the other, the gradient of each is taken with its value, so
  that what has to be kept is that of one group; each device has groups of its own part of the
  batch. Reverse mode, any order.

  Args:
    one: from parameters and an episode to sums.
    params: the parameters.
    batch: columns [episodes, rows, ...].
    at_once: episodes that are computed together; 0 for all.
  """

  def group(params: Params, group: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    found = jax.vmap(one, (None, 0))(params, group) if len(group["index"]) > 1 else one(
      params, jax.tree.map(lambda x: x[0], group)
    )  # fmt: skip
    found = jax.tree.map(jnp.sum, found)
    return found["nll"], jax.lax.stop_gradient(found)

  if at_once % len(batch["index"]) == 0:  # one group
    nll, found = group(params, batch)
    return {**found, "nll": nll}

  def plain(params: Params) -> dict[str, jax.Array]:
    def sums(params: Params, batch: Batch) -> dict[str, jax.Array]:
      nll, found = jax.lax.map(lambda part: group(params, part), _groups(batch, at_once))
      return {**found, "nll": nll}

    return _summed(_on_parts(sums, params, batch))

  def forward(params: Params) -> tuple[dict[str, jax.Array], Params]:
    def sums(params: Params, batch: Batch) -> tuple[dict[str, jax.Array], Params]:
      def add(slopes: Params, part: Batch) -> tuple[Params, dict[str, jax.Array]]:
        (nll, found), slope = jax.value_and_grad(group, has_aux=True)(params, part)
        return jax.tree.map(jnp.add, slopes, slope), {**found, "nll": nll}

      zeros = jax.tree.map(jnp.zeros_like, params)
      slopes, found = jax.lax.scan(add, zeros, _groups(batch, at_once))
      return found, jax.tree.map(lambda x: x[None], slopes)

    return _summed(_on_parts(sums, params, batch))

  def backward(slopes: Params, cotangents: dict[str, jax.Array]) -> tuple[Params]:
    return (jax.tree.map(lambda slope: cotangents["nll"] * slope, slopes),)

  run = jax.custom_vjp(plain)
  run.defvjp(forward, backward)
  return run(params)


@dataclasses.dataclass(frozen=True)
class EpisodeLoss:
  """Cross-entropy in nats per query example, after its episode's support was learned.

  Attributes:
    episodes: what an episode of training holds; a batch may have episodes of another number of
      classes.
    tasks_at_once: as in `FewShotConfig`.
  """

  episodes: ClassEpisodeConfig
  tasks_at_once: int = 0

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"cross_entropy": 1.0}

  def __call__(
    self,
    model: EpisodeModel[Any],
    params: Params,
    carry: Carry,
    batch: Batch,
    context: StepContext,
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    episodes = self.episodes.of_rows(batch["index"].shape[1])
    one = functools.partial(_sums, model, episodes, context.train)
    found = summed_over_tasks(one, params, batch, self.tasks_at_once)
    metrics = {name: (found[name], found["count"]) for name in ("nll", "correct")}
    metrics["accuracy"] = metrics.pop("correct")
    return {"cross_entropy": Term(found["nll"], found["count"])}, carry, metrics


def _scores(
  model: EpisodeModel[Any],
  params: Params,
  batch: Batch,
  episodes: ClassEpisodeConfig,
  at_once: int,
) -> dict[str, jax.Array]:
  """Sums of every episode, each [episodes]."""
  return over_episodes(functools.partial(_sums, model, episodes, False, params), batch, at_once)


def over_episodes(
  one: Callable[[Batch], dict[str, jax.Array]], batch: Batch, at_once: int
) -> dict[str, jax.Array]:
  """What is found of every episode of a batch, each [episodes, ...].

  Args:
    one: from an episode, columns [rows, ...].
    batch: columns [episodes, rows, ...].
    at_once: episodes that are computed together; 0 for all.
  """
  found = jax.lax.map(lambda group: jax.vmap(one)(group), _groups(batch, at_once))
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


@dataclasses.dataclass(frozen=True)
class EpisodeScores:
  """Loss and accuracy over fixed episodes of a split, with the accuracy's 95 % interval.

  The interval is 1.96 standard errors of the episodes' accuracies around their mean.

  Attributes:
    episodes: what an episode holds.
    count: episodes.
    tasks_at_once: as in `FewShotConfig`.
    prefix: of the names of its scores.
  """

  episodes: ClassEpisodeConfig
  count: int = 600
  tasks_at_once: int = 0
  prefix: str = ""

  @property
  def metric(self) -> str:
    """The accuracy, of the task's own number of classes."""
    return "" if self.prefix else "accuracy"

  @property
  def units(self) -> str:
    """What its scores are, and per what."""
    return (
      f"{self.prefix}accuracy: share of the query examples that are classified rightly, mean over"
      f" up to {self.count} episodes ({self.episodes.describe()}), with a 95 % interval"
      f" ({self.prefix}accuracy_low, {self.prefix}accuracy_high); {self.prefix}loss: nats per query"
      f" example. {self.prefix}accuracy/GROUP: of episodes of one group of classes, where they are"
      " in groups."
    )

  def __call__(self, scoring: Scoring[Any]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    run = scoring.task.model.jit(_scores, episodes=self.episodes, at_once=self.tasks_at_once)
    sums = self.of_episodes(scoring, run, scoring.split, self.count_of(scoring))
    yield from self.summary(sums)

  def count_of(self, scoring: Scoring[Any]) -> int:
    """How many episodes are scored: in training, as many as there are to be outputs."""
    return max(2, scoring.count(self.count)) if scoring.decode else self.count

  def of_episodes(
    self,
    scoring: Scoring[Any],
    run: Callable[..., dict[str, jax.Array]],
    split: str,
    count: int,
  ) -> dict[str, np.ndarray]:
    """What `run(params, batch)` finds of the episodes of a split, each [episodes, ...]; `group`
    is the group of their classes, or empty."""
    found = list[dict[str, np.ndarray]]()
    multiple, seen = scoring.sharing.multiple, 0
    examples = scoring.task.dataset.classes(split)
    groups = np.array(examples.groups or [""] * len(examples.names))
    for batch in scoring.task.dataset.episodes(
      split, multiple=multiple, count=count, config=self.episodes
    ):
      sums = fetch(run(scoring.params, scoring.sharing.place(batch)))
      # The group of an episode is that of its first example.
      group = groups[examples.classes[batch["index"][:, 0]]]
      found.append({**sums, "group": group})
      seen = min(count, seen + len(batch["index"]))
      scoring.status(f"episodes of {split}", seen, count)
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

  def summary(self, sums: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Any]]:
    """The scores, of sums of episodes."""
    real = sums["count"] > 0  # filler has none
    accuracy = sums["correct"][real].astype(np.float64) / sums["count"][real]
    half = 1.96 * accuracy.std(ddof=1) / math.sqrt(len(accuracy))
    yield f"{self.prefix}episodes", len(accuracy)
    yield f"{self.prefix}loss", float(sums["nll"][real].sum() / sums["count"][real].sum())
    yield f"{self.prefix}accuracy", float(accuracy.mean())
    yield f"{self.prefix}accuracy_low", float(accuracy.mean() - half)
    yield f"{self.prefix}accuracy_high", float(accuracy.mean() + half)
    groups = sums["group"][real]
    for group in np.unique(groups[groups != ""]):
      yield f"{self.prefix}accuracy/{group}", float(accuracy[groups == group].mean())


def probabilities(
  model: EpisodeModel[Any], params: Params, support: Batch, query: Batch, ways: int
) -> jax.Array:
  """Probabilities of the classes of a query, [query, ways]."""
  logits = model.method.logits(model.embed, params, support, query, ways, False)
  return jax.nn.softmax(logits, axis=-1)


class Classify(NoSearch):
  """Tells the classes of examples, given a few of each."""

  def __call__(
    self,
    model: FewShotModel,
    params: Params,
    support: np.ndarray,
    labels: np.ndarray,
    query: np.ndarray,
  ) -> np.ndarray:
    """Probabilities of the classes of every query example, [query, classes].

    A network that normalises by its batch takes the query's statistics: give a whole query at once.

    Args:
      model: the task's model.
      params: its parameters.
      support: examples to learn from, [support, ...], as the task's.
      labels: their classes, from 0, [support].
      query: examples to tell, [query, ...].

    Raises:
      UserError: shapes or labels do not fit each other or the model.
    """
    support, labels, query = np.asarray(support), np.asarray(labels), np.asarray(query)
    wanted = ", ".join(map(str, model.shape))
    for name, given in (("support", support), ("query", query)):
      errors.check(
        given.shape[1:] == tuple(model.shape) and len(given),
        f"{name} has the shape {given.shape}; it must be [examples, {wanted}], with one example at"
        " least.",
      )
    errors.check(
      labels.shape == (len(support),) and labels.dtype.kind in "iu" and labels.min() >= 0,
      f"labels has the shape {labels.shape} and type {labels.dtype}; give a whole number from 0 for"
      f" each of the {len(support)} examples of the support.",
    )
    ways = int(labels.max()) + 1
    outputs = model.method.outputs(ways)
    head = getattr(model.module, "outputs", outputs)
    errors.check(
      not outputs or ways <= head,
      f"labels goes up to {ways - 1}, but the model has outputs for {head} classes. Give fewer"
      " classes, or train one with more (task.episodes.ways).",
    )
    ways = head if outputs else ways
    order = by_class(model.method, labels)
    rows = {
      "inputs": jnp.asarray(support[order]),
      "labels": jnp.asarray(labels[order], jnp.int32),
    }
    asked = {"inputs": jnp.asarray(query)}
    return np.asarray(model.jit(probabilities, ways=ways)(params, rows, asked))


@dataclasses.dataclass(frozen=True)
class FewShotClassifier(TrainedModel[np.ndarray]):
  """A trained few-shot classifier; made by `compmod_jax.load`."""

  task: "FewShot"

  def classify(self, support: np.ndarray, labels: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Probabilities of the classes of every query example; see `Classify`."""
    return self.task.generator(self.task.model, self.params, support, labels, query)

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    """One position without a text for every example."""
    rows = len(batch["index"])
    return Axis([[""]] * rows, [[""]] * rows, np.ones((rows, 1), bool))

  def _read(
    self, texts: Any, names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Examples as one batch."""
    inputs, rows = jnp.asarray(np.asarray(texts)), len(texts)
    return {"inputs": inputs, "index": jnp.arange(rows, dtype=jnp.int32)}, []


class FewShot(Task[ClassEpisodes[FewShotConfig], FewShotModel, Classify]):
  """A few-shot classification task; made by `FewShotConfig.build`."""

  opened_as = FewShotClassifier
