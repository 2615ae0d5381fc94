"""Few-shot classification: classes are recognised after a few examples of each.

Methods are pure functions of a loss or an embedding, parameters and an episode, for any model:
`adapt` and `adapted_loss` (MAML, to the first order, Meta-SGD, ANIL), `prototype_logits`,
`matching_logits`. `FewShotConfig.method` chooses one for the task.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import Term, token_nll
from compmod_jax.core.parameters import chosen
from compmod_jax.core.sharding import fetch
from compmod_jax.data.class_episodes import ClassEpisodeConfig, ClassEpisodes
from compmod_jax.data.episodes import split_episode
from compmod_jax.data.sources.classes import ClassFolder, ClassLines, DigitsData, TfdsClasses
from compmod_jax.data.synthetic.glyphs import GlyphData
from compmod_jax.models.base import Classifier, ModelConfig
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
from compmod_jax.trained import Axis, TrainedModel

FewShotData = GlyphData | DigitsData | TfdsClasses | ClassFolder | ClassLines
Embed = Callable[[Params, jax.Array], jax.Array]
"""From parameters and inputs [rows, ...] to logits or features [rows, dim]."""

# Methods, for any loss and any embedding.


def adapt(
  loss: Callable[[Params, Batch], jax.Array],
  params: Params,
  support: Batch,
  *,
  steps: int = 1,
  rate: float | PyTree = 0.1,
  parameters: tuple[str, ...] = ("*",),
  first_order: bool = False,
) -> Params:
  r"""Parameters after a few steps of gradient descent on a support.

  .. math:: \phi^{(i+1)} = \phi^{(i)} - \alpha \odot \nabla_\phi L(\phi^{(i)}, D)

  The result can be differentiated with respect to the parameters before and to the rates. A step is
  computed anew when it is differentiated, so that its memory does not grow with what is inside.

  Args:
    loss: from parameters and rows to a scalar.
    params: the parameters before, nested dictionaries.
    support: D, what `loss` takes.
    steps: how many.
    rate: alpha: a number, or one for every parameter that adapts (a scalar or of its shape, in a
      tree like `params`, in which others may be left out).
    parameters: names of what adapts; see `core.parameters.matches`. All else stays as it is.
    first_order: the gradient of the steps is taken for a constant.

  Source: Finn et al. 2017, equation 1; rates by element, Li et al. 2017; the last layer alone,
    Raghu et al. 2020.
  """
  mask = jax.tree.leaves(chosen(params, parameters, "parameters"))
  leaves, tree = jax.tree.flatten(params)
  rates = _rates(rate, params, mask)

  def whole(moving: list[jax.Array]) -> Params:
    new = iter(moving)
    return tree.unflatten([next(new) if m else x for m, x in zip(mask, leaves, strict=True)])

  def step(moving: list[jax.Array], _: None) -> tuple[list[jax.Array], None]:
    at = jax.lax.stop_gradient(moving) if first_order else moving
    slopes = jax.grad(lambda moving: loss(whole(moving), support))(at)
    slopes = jax.lax.stop_gradient(slopes) if first_order else slopes
    return [x - r * g for x, r, g in zip(moving, rates, slopes, strict=True)], None

  moving = [x for m, x in zip(mask, leaves, strict=True) if m]
  if steps == 1:  # a loop of one step would be compiled as a loop
    moving, _ = jax.checkpoint(step)(moving, None)
  else:
    moving, _ = jax.lax.scan(jax.checkpoint(step), moving, None, length=steps)
  return whole(moving)


def _rates(rate: float | PyTree, params: Params, mask: list[bool]) -> list[Any]:
  """The rate of every parameter that adapts."""
  if not isinstance(rate, Mapping):
    return [rate] * sum(mask)
  given: dict[str, Any] = flatten_dict(dict(rate), sep="/")
  names = flatten_dict(dict(jax.tree.map(lambda _: 0, params)), sep="/")
  ordered = jax.tree.leaves(unflatten_dict({name: _Name(name) for name in names}, sep="/"))
  moving = [one.name for one, m in zip(ordered, mask, strict=True) if m]
  missing = [name for name in moving if name not in given]
  errors.check(
    not missing,
    f"rate has no entry for {errors.short_list(missing)}, which adapt; give one for each, or one"
    " number for all.",
  )
  return [given[name] for name in moving]


@dataclasses.dataclass(frozen=True)
class _Name:
  """A name as a leaf of a tree."""

  name: str


def adapted_loss(
  loss: Callable[[Params, Batch], jax.Array],
  params: Params,
  episode: tuple[Batch, Batch],
  **how: Any,
) -> jax.Array:
  r"""The loss on a query after adaptation to its support: what MAML lowers in the mean of episodes.

  .. math:: L(\phi^{(k)}(\theta, D_{tr}), D_{ts})

  Args:
    loss: from parameters and rows to a scalar.
    params: theta.
    episode: support and query.
    **how: as `adapt` has it.

  Source: Finn et al. 2017, Algorithm 1.
  """
  support, query = episode
  return loss(adapt(loss, params, support, **how), query)


def prototype_logits(
  support: Float[Array, "support dim"],
  labels: Int[Array, "support"],
  query: Float[Array, "query dim"],
  ways: int,
) -> Float[Array, "query ways"]:
  r"""Minus the squared distance to the mean of every class.

  .. math:: p(k \mid x) = \mathrm{softmax}_k(-|f(x) - c_k|^2), \qquad
            c_k = \frac{1}{|S_k|} \sum_{i \in S_k} f(x_i)

  Source: Snell et al. 2017, equations 1 and 2.
  """
  member = jax.nn.one_hot(labels, ways, axis=0, dtype=support.dtype)
  count = jnp.maximum(jnp.sum(member, axis=1, keepdims=True), 1)
  means = member @ support / count
  # |f|^2 is the same for all classes, but the distance has it.
  return -jnp.sum(jnp.square(query[:, None] - means[None]), axis=-1)


def matching_logits(
  support: Float[Array, "support dim"],
  labels: Int[Array, "support"],
  query: Float[Array, "query dim"],
  ways: int,
  scale: float = 1.0,
) -> Float[Array, "query ways"]:
  r"""Log-probabilities of attention over the support's labels by the cosine.

  .. math:: p(k \mid x) = \sum_{i \in S_k} \mathrm{softmax}_i(s \cos(f(x), f(x_i)))

  Args:
    support: features of the examples to learn from.
    labels: their classes.
    query: features of those to tell.
    ways: number of classes.
    scale: s.

  Source: Vinyals et al. 2016, equations 1 and 2, without full context embeddings.
  """

  def unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)

  attention = jax.nn.log_softmax(scale * unit(query) @ unit(support).T, axis=-1)
  member = labels[None, None, :] == jnp.arange(ways)[None, :, None]
  # What no example is for has a probability of nearly 0, and finite gradients.
  return jax.nn.logsumexp(jnp.where(member, attention[:, None], -1e9), axis=-1)


# Methods, as a configuration chooses them.


@dataclasses.dataclass(frozen=True)
class Maml:
  """Steps of gradient descent from learned parameters; see `adapt`."""

  steps: int = 1
  """Steps on the support in training."""
  evaluate_steps: int = 0
  """Steps in evaluation; 0 for as many as in training."""
  rate: float = 0.4
  """Their size; the first one, where it is learned."""
  learned: Literal["no", "parameter", "element"] = "no"
  """Sizes that are learned, too: one for every parameter, or for every number in it (Meta-SGD)."""
  parameters: tuple[str, ...] = ("*",)
  """Names of what adapts: of parameters, or of modules for all in them; `head` alone is ANIL."""
  first_order: bool = False
  """Takes the gradient at the adapted parameters for that of the parameters before."""

  def __post_init__(self):
    for field, least in (("steps", 1), ("evaluate_steps", 0)):
      value = getattr(self, field)
      errors.check(value >= least, f"method.{field} is {value}; it must be at least {least}.")
    errors.check(self.rate > 0, f"method.rate is {self.rate}; it must be positive.")
    errors.check_choice("method.learned", self.learned, ("no", "parameter", "element"))
    errors.check(
      bool(self.parameters), "method.parameters is empty; name what adapts, such as '*' for all."
    )

  def outputs(self, ways: int) -> int:
    """A logit for every class of an episode."""
    return ways

  def more_parameters(self, params: Params) -> dict[str, Any]:
    """What is learned besides the model's parameters: `step_sizes`."""
    mask = chosen(params, self.parameters, "method.parameters")
    if self.learned == "no":
      return {}
    flat: dict[str, Any] = flatten_dict(dict(params), sep="/")
    adapts: dict[str, Any] = flatten_dict(dict(mask), sep="/")
    element = self.learned == "element"
    sizes = {
      name: jnp.full(leaf.shape if element else (), self.rate, leaf.dtype)
      for name, leaf in flat.items()
      if adapts[name]
    }
    return {"step_sizes": unflatten_dict(sizes, sep="/")}

  def logits(
    self, embed: Embed, params: Params, support: Batch, query: Batch, ways: int, train: bool
  ) -> jax.Array:
    """Logits of a query after adaptation, [query, ways]."""
    own = {name: part for name, part in params.items() if name != "step_sizes"}

    def loss(params: Params, rows: Batch) -> jax.Array:
      return jnp.mean(token_nll(embed(params, rows["inputs"]), rows["labels"]))

    adapted = adapt(
      loss,
      own,
      support,
      steps=self.steps if train else self.evaluate_steps or self.steps,
      rate=self.rate if self.learned == "no" else params["step_sizes"],
      parameters=self.parameters,
      first_order=self.first_order or not train,
    )
    return embed(adapted, query["inputs"])

  def describe(self) -> str:
    """The method, in a few words."""
    adapting = "" if self.parameters == ("*",) else f" of {', '.join(self.parameters)}"
    order = "first-order MAML" if self.first_order else "MAML"
    sizes = "" if self.learned == "no" else f", step sizes learned by {self.learned}"
    return f"{order}, {self.steps} step{'s' if self.steps > 1 else ''}{adapting}{sizes}"


class _Compares:
  """The part of a method that compares features."""

  def outputs(self, ways: int) -> int:
    """None: features are compared."""
    return 0

  def more_parameters(self, params: Params) -> dict[str, Any]:
    """Nothing."""
    return {}


def _both(
  embed: Embed, params: Params, support: Batch, query: Batch
) -> tuple[jax.Array, jax.Array]:
  """Features of support and query, computed as one batch."""
  rows = jnp.concatenate([support["inputs"], query["inputs"]])
  found, count = embed(params, rows), len(support["inputs"])
  return found[:count], found[count:]


@dataclasses.dataclass(frozen=True)
class Prototypes(_Compares):
  """Prototypical networks; see `prototype_logits`."""

  def logits(
    self, embed: Embed, params: Params, support: Batch, query: Batch, ways: int, train: bool
  ) -> jax.Array:
    """Logits of a query, [query, ways]."""
    known, asked = _both(embed, params, support, query)
    return prototype_logits(known, support["labels"], asked, ways)

  def describe(self) -> str:
    """The method, in a few words."""
    return "prototypes"


@dataclasses.dataclass(frozen=True)
class Matching(_Compares):
  """Matching networks; see `matching_logits`."""

  scale: float = 10.0
  """What cosines are multiplied with; 1 as published."""

  def __post_init__(self):
    errors.check(self.scale > 0, f"method.scale is {self.scale}; it must be positive.")

  def logits(
    self, embed: Embed, params: Params, support: Batch, query: Batch, ways: int, train: bool
  ) -> jax.Array:
    """Log-probabilities of a query, [query, ways]."""
    known, asked = _both(embed, params, support, query)
    return matching_logits(known, support["labels"], asked, ways, self.scale)

  def describe(self) -> str:
    """The method, in a few words."""
    return "matching by the cosine"


Method = Maml | Prototypes | Matching

# The task.


@dataclasses.dataclass(frozen=True)
class FewShotConfig:
  """A few-shot classification task: classes, episodes and the method."""

  data: FewShotData = GlyphData()
  """Where examples come from."""
  episodes: ClassEpisodeConfig = ClassEpisodeConfig()
  """What an episode holds."""
  method: Method = Maml()
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
    for field, least in (("train_ways", 0), ("evaluate_episodes", 2), ("tasks_at_once", 0)):
      value = getattr(self, field)
      errors.check(value >= least, f"task.{field} is {value}; it must be at least {least}.")
    errors.check(
      self.train_ways != 1 and all(ways >= 2 for ways in self.also_ways),
      f"task.train_ways is {self.train_ways} and task.also_ways {self.also_ways}; an episode has 2"
      " classes at least.",
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
            dataclasses.replace(self.episodes, ways=ways),
            self.evaluate_episodes,
            self.tasks_at_once,
            f"{ways}_way/",
          )
          for ways in self.also_ways
        ),
      ),
      generator=Classify(),
    )
    jax.eval_shape(task.model.init, jax.random.key(0))  # raises for a pattern of no parameter
    return task

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return (
      f"{self.episodes.ways}-way {self.episodes.shots}-shot classification by"
      f" {self.method.describe()}; {model.describe()}; {self.data.describe()}."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FewShotModel(TaskModel[Classifier]):
  """A classifier, and the method by which it learns an episode.

  Attributes:
    method: the method.
    shape: of an example.
  """

  method: Method
  shape: tuple[int, ...]

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters; `step_sizes` among them where they are learned."""
    params = self.module.init(rng, jnp.zeros((2, *self.shape)))["params"]
    return {**params, **self.method.more_parameters(nn.unbox(params))}

  def embed(
    self, params: Params, inputs: jax.Array, intermediates: Intermediates = OFF
  ) -> jax.Array:
    """Logits or features, [rows, dim]; `step_sizes` are not the module's."""
    own = {name: part for name, part in params.items() if name != "step_sizes"}
    inputs = inputs / jnp.float32(255) if inputs.dtype == jnp.uint8 else inputs
    return self.module.apply(
      {"params": own}, inputs, intermediates=intermediates.editing(self.edits)
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
  model: FewShotModel,
  episodes: ClassEpisodeConfig,
  train: bool,
  params: Params,
  episode: Batch,
) -> dict[str, jax.Array]:
  """Sums over the query of an episode: nats, right answers and rows."""
  support, query = split_episode(episode, episodes.support)
  logits = model.method.logits(model.embed, params, support, query, episodes.ways, train)
  real = query["index"] >= 0
  nll, right = token_nll(logits, query["labels"]), jnp.argmax(logits, -1) == query["labels"]
  return {
    "nll": jnp.sum(jnp.where(real, nll, 0)),
    "correct": jnp.sum(real & right).astype(jnp.float32),
    "count": jnp.sum(real).astype(jnp.float32),
  }


def _groups(batch: Batch, at_once: int) -> tuple[dict[str, jax.Array], bool]:
  """Columns [groups, episodes of a group, ...], and whether there is one group only."""
  count = len(batch["index"])
  size = count if not at_once else math.gcd(count, at_once)
  return {k: x.reshape(-1, size, *x.shape[1:]) for k, x in batch.items()}, size == count


def summed_over_tasks(
  one: Callable[[Params, Batch], dict[str, jax.Array]], params: Params, batch: Batch, at_once: int
) -> dict[str, jax.Array]:
  """Sums over the episodes of a batch, which can be differentiated; `nll` alone has a gradient.

  Where groups are computed one after the other, the gradient of each is taken with its value, so
  that what has to be kept is that of one group. Reverse mode, any order.

  Args:
    one: from parameters and an episode to sums.
    params: the parameters.
    batch: columns [episodes, rows, ...].
    at_once: episodes that are computed together; 0 for all.
  """
  groups, whole = _groups(batch, at_once)

  def group(params: Params, group: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    found = jax.vmap(one, (None, 0))(params, group) if len(group["index"]) > 1 else one(
      params, jax.tree.map(lambda x: x[0], group)
    )  # fmt: skip
    found = jax.tree.map(jnp.sum, found)
    return found["nll"], jax.lax.stop_gradient(found)

  if whole:
    nll, found = group(params, jax.tree.map(lambda x: x[0], groups))
    return {**found, "nll": nll}

  def plain(params: Params) -> dict[str, jax.Array]:
    nll, found = jax.lax.map(lambda part: group(params, part), groups)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), {**found, "nll": nll})

  def forward(params: Params) -> tuple[dict[str, jax.Array], Params]:
    def add(slopes: Params, part: Batch) -> tuple[Params, dict[str, jax.Array]]:
      (nll, found), slope = jax.value_and_grad(group, has_aux=True)(params, part)
      return jax.tree.map(jnp.add, slopes, slope), {**found, "nll": nll}

    zeros = jax.tree.map(jnp.zeros_like, params)
    slopes, found = jax.lax.scan(add, zeros, groups)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), found), slopes

  def backward(slopes: Params, cotangents: dict[str, jax.Array]) -> tuple[Params]:
    return (jax.tree.map(lambda slope: cotangents["nll"] * slope, slopes),)

  run = jax.custom_vjp(plain)
  run.defvjp(forward, backward)
  return run(params)


@dataclasses.dataclass(frozen=True)
class EpisodeLoss:
  """Cross-entropy in nats per query example, after its episode's support was learned.

  Attributes:
    episodes: what an episode of training holds.
    tasks_at_once: as in `FewShotConfig`.
  """

  episodes: ClassEpisodeConfig
  tasks_at_once: int = 0

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"cross_entropy": 1.0}

  def __call__(
    self, model: FewShotModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    one = functools.partial(_sums, model, self.episodes, context.train)
    found = summed_over_tasks(one, params, batch, self.tasks_at_once)
    metrics = {name: (found[name], found["count"]) for name in ("nll", "correct")}
    metrics["accuracy"] = metrics.pop("correct")
    return {"cross_entropy": Term(found["nll"], found["count"])}, carry, metrics


def _scores(
  model: FewShotModel, params: Params, batch: Batch, episodes: ClassEpisodeConfig, at_once: int
) -> dict[str, jax.Array]:
  """Sums of every episode, each [episodes]."""
  groups, _ = _groups(batch, at_once)
  one = functools.partial(_sums, model, episodes, False, params)
  found = jax.lax.map(lambda group: jax.vmap(one)(group), groups)
  return jax.tree.map(lambda x: x.reshape(-1), found)


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
      " example."
    )

  def __call__(self, scoring: Scoring["FewShot"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    count = max(2, scoring.count(self.count)) if scoring.decode else self.count
    run = scoring.task.model.jit(_scores, episodes=self.episodes, at_once=self.tasks_at_once)
    found = list[dict[str, np.ndarray]]()
    multiple, seen = scoring.sharing.multiple, 0
    for batch in scoring.task.dataset.episodes(
      scoring.split, multiple=multiple, count=count, config=self.episodes
    ):
      found.append(fetch(run(scoring.params, scoring.sharing.place(batch))))
      seen = min(count, seen + len(batch["index"]))
      scoring.status(f"episodes of {scoring.split}", seen, count)
    sums = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    real = sums["count"] > 0  # filler has none
    accuracy = sums["correct"][real].astype(np.float64) / sums["count"][real]
    half = 1.96 * accuracy.std(ddof=1) / math.sqrt(len(accuracy))
    yield f"{self.prefix}episodes", len(accuracy)
    yield f"{self.prefix}loss", float(sums["nll"][real].sum() / sums["count"][real].sum())
    yield f"{self.prefix}accuracy", float(accuracy.mean())
    yield f"{self.prefix}accuracy_low", float(accuracy.mean() - half)
    yield f"{self.prefix}accuracy_high", float(accuracy.mean() + half)


def _probabilities(
  model: FewShotModel, params: Params, support: Batch, query: Batch, ways: int
) -> jax.Array:
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
    rows = {"inputs": jnp.asarray(support), "labels": jnp.asarray(labels, jnp.int32)}
    asked = {"inputs": jnp.asarray(query)}
    return np.asarray(model.jit(_probabilities, ways=ways)(params, rows, asked))


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
