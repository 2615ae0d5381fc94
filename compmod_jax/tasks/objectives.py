"""Objectives that wrap others: what mechanisms add to a loss, mixtures, and meta-learning.

What mechanisms add hands the objective inside it a context whose `intermediates` read or change
intermediates of the one forward pass, and adds terms and metrics of what was read. `Mixture` and
`Meta` run objectives several times; they stand outside the others.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import objective as weighted_sum
from compmod_jax.core.parameters import chosen
from compmod_jax.core.sharding import fetch
from compmod_jax.data.episodes import EpisodeConfig, flat, split_episode
from compmod_jax.mechanisms.competition import losses
from compmod_jax.mechanisms.competition.statistics import (
  router_statistics,
  waiting_statistics,
)
from compmod_jax.mechanisms.modulation import gate_statistics
from compmod_jax.models.base import ModelConfig
from compmod_jax.tasks.base import (
  Batch,
  Carry,
  Metrics,
  Objective,
  Params,
  Scoring,
  StepContext,
  TaskModel,
  Terms,
)


def standard(objective: Objective, config: ModelConfig) -> Objective:
  """An objective with all that the mechanisms of a model add to it, and nothing of others.

  Args:
    objective: of the task.
    config: the model's configuration.
  """
  if config.training_edits():
    objective = WithTrainingEdits(objective)
  if losses.objective(config.routers()):
    objective = WithRouterLosses(objective)
  if sites := config.routing_sites():
    objective = WithRouterStatistics(objective, sites)
  if site := config.gate_site():
    objective = WithGateStatistics(objective, site)
  return objective


@dataclasses.dataclass(frozen=True)
class WithTrainingEdits:
  """Changes activations in training (DropHead), as the model's configuration says.

  Attributes:
    objective: of the model whose activations they are.
  """

  objective: Objective

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of the objective inside."""
    return self.objective.weights(config)

  def __call__(
    self, model: TaskModel[Any], params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    if context.train:
      for make in model.running_config(batch).training_edits():
        edits = make(rng=context.rng, progress=context.progress)
        context = context._replace(intermediates=context.intermediates.editing(edits))
    return self.objective(model, params, carry, batch, context)


@dataclasses.dataclass(frozen=True)
class WithRouterLosses:
  """Adds the losses that keep routers healthy, where their weights are not 0.

  Attributes:
    objective: of the model whose routers they are.
  """

  objective: Objective

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of the objective inside, and of the routers' losses."""
    return self.objective.weights(config) | losses.objective(config.routers())

  def __call__(
    self, model: TaskModel[Any], params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    routers = model.running_config(batch).routers()
    intermediates = context.intermediates.also(losses.captured_sites(routers))
    terms, carry, found = self.objective(
      model, params, carry, batch, context._replace(intermediates=intermediates)
    )
    valid = functools.partial(model.valid_mask, batch=batch)
    return losses.terms(routers, intermediates.captured, valid) | terms, carry, found


@dataclasses.dataclass(frozen=True)
class WithRouterStatistics:
  """Adds statistics of the routers to the metrics; see `router_statistics`.

  Attributes:
    objective: of the model whose routers they are.
    sites: of all routers' weights. Those that a batch does not run are left out.
  """

  objective: Objective
  sites: tuple[str, ...]

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of the objective inside."""
    return self.objective.weights(config)

  def __call__(
    self, model: TaskModel[Any], params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    sites, waiting = (
      {site: f"{site.removesuffix('/weights')}/{word}" for site in self.sites}
      for word in ("signatures", "waiting")
    )
    intermediates = context.intermediates.also([*sites, *sites.values(), *waiting.values()])
    terms, carry, found = self.objective(
      model, params, carry, batch, context._replace(intermediates=intermediates)
    )
    captured, statistics = intermediates.captured, Metrics()
    for site, signatures in sites.items():
      if site in captured:
        name = site.removesuffix("/router/weights")
        rows = model.valid_mask(site, batch)
        statistics |= router_statistics(name, captured[site], captured[signatures], rows)
        if waiting[site] in captured:
          statistics |= waiting_statistics(name, captured[waiting[site]], rows)
    return terms, carry, statistics | found


@dataclasses.dataclass(frozen=True)
class WithGateStatistics:
  """Adds the mean and the saturation of the gate of a modulated model to the metrics.

  Attributes:
    objective: of the model whose gate it is.
    site: of the gate.
  """

  objective: Objective
  site: str

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of the objective inside."""
    return self.objective.weights(config)

  def __call__(
    self, model: TaskModel[Any], params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    intermediates = context.intermediates.also([self.site])
    terms, carry, found = self.objective(
      model, params, carry, batch, context._replace(intermediates=intermediates)
    )
    gate = jax.lax.stop_gradient(intermediates.captured[self.site])
    statistics = gate_statistics(gate, model.valid_mask(self.site, batch))
    return terms, carry, found | {f"gate/{name}": value for name, value in statistics.items()}


@dataclasses.dataclass(frozen=True)
class Share:
  """An objective of a mixture.

  Attributes:
    objective: the objective.
    weight: factor of all its terms.
  """

  objective: Objective
  weight: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
  r"""A weighted sum of objectives of one model on one batch, as multi-task learning takes it.

  .. math:: L = \sum_i w_i L_i

  Terms and metrics are called NAME/TERM by the name of their share; metrics of the first share keep
  their names, so that the log's loss is its. Each share runs the model by itself, with dropout of
  its own.

  Attributes:
    shares: name -> objective and weight. The first one reads and advances recurrent states; what
      is read of intermediates from outside is read of it.

  Raises:
    UserError: there is no share, or a weight is not positive.

  Source: Caruana 1997, section 1.
  """

  shares: Mapping[str, Share]

  def __post_init__(self):
    errors.check(bool(self.shares), "shares is empty; a mixture needs at least one objective.")
    for name, share in self.shares.items():
      errors.check(
        share.weight > 0,
        f"shares.{name}.weight is {share.weight}; it must be positive. Leave the share out to train"
        " without it.",
      )

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of all shares."""
    return {
      f"{name}/{term}": share.weight * weight
      for name, share in self.shares.items()
      for term, weight in share.objective.weights(config).items()
    }

  def __call__(
    self, model: TaskModel[Any], params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    terms, metrics, after = Terms(), Metrics(), carry
    for number, (name, share) in enumerate(self.shares.items()):
      inner = context
      if number:
        rng = jax.random.fold_in(context.rng, number)
        inner = context._replace(rng=rng, intermediates=unread(context.intermediates))
      found, new, measured = share.objective(model, params, carry, batch, inner)
      terms |= {
        f"{name}/{term}": value.replace(weight=share.weight * value.weight)
        for term, value in found.items()
      }
      metrics |= {f"{name}/{key}" if number else key: value for key, value in measured.items()}
      after = after if number else new
    return terms, after, metrics


def unread(intermediates: Intermediates) -> Intermediates:
  """The same changes of intermediates, of which nothing is recorded."""
  return Intermediates(edits=intermediates.edits) if intermediates.edits else OFF


# Keeps the random numbers of the inner loop apart from those of the query.
_INNER = 0x1A9E
# From what adapts and a step's number to what adapts, and the terms before the step.
_Step = Callable[[list[jax.Array], ArrayLike], tuple[list[jax.Array], Metrics]]


@dataclasses.dataclass(frozen=True)
class MetaConfig:
  """Learning of parameters from which a few steps of gradient descent lead far (MAML)."""

  episodes: EpisodeConfig = EpisodeConfig()
  """What one adapts to, and is scored on."""
  steps: int = 1
  """Steps of gradient descent on the support in training; 0 trains on the queries as they are."""
  evaluate_steps: int = 0
  """Most steps in evaluation; 0 for as many as in training."""
  rate: float = 0.1
  """Their size; 0 adapts nothing."""
  parameters: tuple[str, ...] = ("*",)
  """Names of what is adapted: of parameters, or of modules for all parameters in them; * stands for
  any characters."""
  first_order: bool = False
  """Takes the gradient at the adapted parameters for that of the parameters before, which costs
  less."""

  def __post_init__(self):
    for field in ("steps", "evaluate_steps", "rate"):
      value = getattr(self, field)
      errors.check(value >= 0, f"meta.{field} is {value}; it must not be negative.")
    errors.check(
      bool(self.parameters),
      "meta.parameters is empty; name what is adapted, such as '*' for all, or set meta.steps to"
      " 0.",
    )

  def evaluator(self, objective: Objective, seed: int) -> "AdaptationScores":
    """The evaluator of what is learned so; arguments as in `AdaptationScores`."""
    meta = self.over(objective)
    return AdaptationScores(
      dataclasses.replace(meta, steps=self.evaluate_steps or self.steps), seed
    )

  def over(self, objective: Objective) -> "Meta":
    """This way of learning, for an objective."""
    return Meta(
      objective,
      functools.partial(split_episode, support=self.episodes.support),
      steps=self.steps,
      rate=self.rate,
      parameters=self.parameters,
      first_order=self.first_order,
    )


@dataclasses.dataclass(frozen=True)
class Meta:
  r"""An objective after a few steps of gradient descent on other rows: MAML.

  Every episode e of a batch has a support :math:`S_e` and a query :math:`Q_e`. The parameters
  :math:`\phi` that the patterns choose take steps on the support, all others stand still, and what
  training lowers is the objective on the query afterwards:

  .. math::
     \phi_e^{(0)} = \phi, \qquad
     \phi_e^{(i+1)} = \phi_e^{(i)} - \alpha \nabla_{\phi} L_{S_e}(\phi_e^{(i)}), \qquad
     \min_\theta L_{Q_1, Q_2, \ldots}(\phi_1^{(k)}, \phi_2^{(k)}, \ldots)

  The gradient goes through the steps: it has second derivatives of the objective, so that every
  custom derivative rule in the model has to be right to the second order; those of this package
  are. With `first_order` it is the query's gradient at the adapted parameters.

  The terms are additive sums over all queries, as those of any objective are over rows: a loss is
  a mean over all tokens of all queries, and micro-batches of whole episodes add up exactly. The
  inner loop descends the whole objective of one support, with all its terms.

  Attributes:
    objective: what is lowered.
    split: from the batch of an episode, columns [rows, ...], to support and query; see
      `data.episodes.split_episode`.
    steps: k. With none, or a rate of 0, this is the objective on the query.
    rate: alpha.
    parameters: names of what is adapted; see `core.parameters.matches`.
    first_order: leaves the second derivatives out.

  Source: Finn et al. 2017, Algorithm 1, and section 5.2 (first order).
  """

  field: ClassVar[str] = "meta"  # of the task's configuration, for messages
  batches: ClassVar[str] = "data.episodes.EpisodeDataset"  # the data set that it takes

  objective: Objective
  split: Callable[[Batch], tuple[Batch, Batch]]
  steps: int = 1
  rate: float = 0.1
  parameters: tuple[str, ...] = ("*",)
  first_order: bool = False

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of the objective inside."""
    return self.objective.weights(config)

  def check(self, params: Params) -> None:
    """Raises a `UserError` where a pattern stands for no parameter.

    Args:
      params: the model's parameters, or their shapes.
    """
    self.adapts(params)

  def adapts(self, params: Params) -> PyTree:
    """True for every parameter that takes steps on the support.

    Raises:
      UserError: a pattern stands for no parameter.
    """
    return chosen(params, self.parameters, f"{self.field}.parameters")

  def __call__(
    self, model: TaskModel[Any], params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`; columns of the batch are [episodes, rows, ...].

    Metrics have those of the query, and `support/TERM`, the terms on the support before each step.

    Raises:
      UserError: the task keeps a recurrent state, or the objective has no second derivative.
    """
    self._check_episodes(batch, carry)
    if not self.steps or not self.rate:
      query = flat(jax.vmap(self.split)(dict(batch))[1])
      return self.objective(model, params, carry, query, context)
    outside = context.intermediates
    seen: set[str] = set()

    def episode(number: jax.Array, batch: Batch) -> tuple[Terms, Metrics, dict[str, jax.Array]]:
      intermediates = outside.apart()
      rng = jax.random.fold_in(context.rng, number)
      inner = context._replace(rng=rng, intermediates=intermediates)
      support, query = self.split(batch)
      last = self.last(model, params, support, inner)
      terms, _, metrics = self.objective(model, last.params, carry, query, inner)
      seen.update(intermediates.seen)
      return terms, metrics | last.support, intermediates.captured

    numbers = jnp.arange(len(next(iter(batch.values()))))
    terms, metrics, captured = jax.vmap(episode)(numbers, dict(batch))
    outside.merge(flat(captured), seen)
    total = functools.partial(jax.tree.map, lambda leaf: jnp.sum(leaf, axis=0))
    return total(terms), carry, total(metrics)

  def adapted(
    self, model: TaskModel[Any], params: Params, support: Batch, context: StepContext
  ) -> Iterator["Adapted"]:
    """The parameters before the first step, and after each one, for one episode.

    Those that do not adapt are the same arrays in all.
    """
    moving, step, whole = self._descent(model, params, support, context)
    logged = list[Metrics]()
    yield Adapted(params, {})
    for number in range(self.steps):
      moving, found = step(moving, number)
      logged.append(found)
      yield Adapted(whole(moving), jax.tree.map(lambda *each: jnp.stack(each), *logged))

  def last(
    self, model: TaskModel[Any], params: Params, support: Batch, context: StepContext
  ) -> "Adapted":
    """The parameters after all steps, for one episode.

    Several steps are a loop, each of which is computed anew where it is differentiated, so that
    neither the program nor its memory grows with their number.
    """
    if self.steps == 1:  # would be compiled as a loop
      return list(self.adapted(model, params, support, context))[-1]
    moving, step, whole = self._descent(model, params, support, context)
    moving, logged = jax.lax.scan(jax.checkpoint(step), moving, jnp.arange(self.steps))
    return Adapted(whole(moving), logged)

  def _descent(
    self, model: TaskModel[Any], params: Params, support: Batch, context: StepContext
  ) -> tuple[list[jax.Array], _Step, Callable[[list[jax.Array]], Params]]:
    """What adapts, a step of it, and all parameters around it."""
    mask = jax.tree.leaves(self.adapts(params))
    leaves, tree = jax.tree.flatten(params)

    def whole(moving: list[jax.Array]) -> Params:
      new = iter(moving)
      return tree.unflatten([next(new) if m else x for m, x in zip(mask, leaves, strict=True)])

    def loss(moving: list[jax.Array], number: ArrayLike) -> tuple[jax.Array, Metrics]:
      rng = jax.random.fold_in(jax.random.fold_in(context.rng, _INNER), number)
      inner = context._replace(rng=rng, intermediates=unread(context.intermediates))
      terms, _, _ = self.objective(model, whole(moving), (), support, inner)
      logged = {f"support/{name}": term.logged() for name, term in terms.items()}
      return weighted_sum(terms), jax.lax.stop_gradient(logged)

    slope = jax.grad(loss, has_aux=True)

    def step(moving: list[jax.Array], number: ArrayLike) -> tuple[list[jax.Array], Metrics]:
      at = jax.lax.stop_gradient(moving) if self.first_order else moving
      slopes, logged = slope(at, number)
      slopes = jax.lax.stop_gradient(slopes) if self.first_order else slopes
      return [x - self.rate * g for x, g in zip(moving, slopes, strict=True)], logged

    moving = [x for m, x in zip(mask, leaves, strict=True) if m]
    if self.steps and not self.first_order:
      self._check_second_order(lambda moving: slope(moving, 0)[0], moving)
    return moving, step, whole

  def _check_episodes(self, batch: Batch, carry: Carry) -> None:
    errors.check(
      not jax.tree.leaves(carry),
      f"The {self.field} objective adapts to episodes of rows, but the task keeps a recurrent state"
      " from one batch to the next. Use a task without one, or train without the"
      f" {self.field} objective.",
    )
    wrong = [name for name, column in batch.items() if column.ndim < 2]
    errors.check(
      not wrong,
      f"The {self.field} objective has got a batch of rows, not of episodes:"
      f" {errors.short_list(wrong)} has one axis. Columns have to be [episodes, rows, ...], as"
      f" {self.batches} makes them.",
    )

  def _check_second_order(
    self, slope: Callable[[list[jax.Array]], list[jax.Array]], at: list[jax.Array]
  ) -> None:
    """Raises a `UserError` where a gradient, which there is, has itself no derivative."""

    def size(at: list[jax.Array]) -> jax.Array:
      return sum((jnp.sum(jnp.square(x)) for x in slope(at)), start=jnp.float32(0))

    try:
      jax.eval_shape(jax.grad(size), at)
    except Exception as error:
      text = " ".join(str(error).split())
      raise errors.UserError(
        f"The {self.field} objective differentiates the steps of its inner loop, but the model's"
        f" gradient has no derivative ({type(error).__name__}: {text[:200]}). Set {self.field}."
        "first_order = True, or use a model whose custom derivative rules hold to the second order."
      ) from error


@dataclasses.dataclass(frozen=True)
class Adapted:
  """Where a learner stands within an episode.

  Attributes:
    params: its parameters.
    support: `support/TERM` -> sums and counts, [steps], of the terms before each step so far.
  """

  params: Params
  support: Metrics


@dataclasses.dataclass(frozen=True)
class AdaptationScores:
  """The loss on the queries of a split before adaptation and after each step of it.

  Always the same episodes, without dropout, and with the same random numbers.

  Attributes:
    meta: how one adapts.
    seed: of what the objective draws, such as masks.
  """

  meta: Meta
  seed: int = 0
  metric: str = "query/adapted_loss"

  @property
  def units(self) -> str:
    """What its scores are, and per what."""
    return (
      "Query: the loss on the queries of all episodes, as in training, before adaptation (0_loss)"
      " and after each step on their supports (1_loss, ...); adapted_loss: after the last."
    )

  def __call__(self, scoring: Scoring[Any]) -> Iterator[tuple[str, float]]:
    """See `Evaluator`; the data set is an `EpisodeDataset`."""
    run, totals, tree = scoring.task.model.jit(self._terms), [], None
    for batch in scoring.task.dataset.episodes(scoring.split, multiple=scoring.sharing.multiple):
      found, tree = jax.tree.flatten(fetch(run(scoring.params, scoring.sharing.place(batch))))
      totals.append([np.asarray(leaf, np.float64) for leaf in found])
    errors.check(tree is not None, f"The split {scoring.split!r} has no episode to adapt to.")
    assert tree is not None
    terms = tree.unflatten([np.sum(leaves, axis=0) for leaves in zip(*totals, strict=True)])
    values = [float(weighted_sum(after)) for after in terms]
    for number, value in enumerate(values):
      yield f"query/{number}_loss", value
    yield self.metric, values[-1]

  def _terms(self, model: TaskModel[Any], params: Params, batch: Batch) -> list[Terms]:
    """Terms on all queries after 0, 1, ... steps."""
    # Nothing is differentiated through the steps here.
    meta = dataclasses.replace(self.meta, first_order=True)

    def episode(batch: Batch) -> list[Terms]:
      context = StepContext(jax.random.key(self.seed), jnp.int32(0), train=False)
      support, query = meta.split(batch)
      return [
        meta.objective(model, one.params, (), query, context)[0]
        for one in meta.adapted(model, params, support, context)
      ]

    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.vmap(episode)(dict(batch)))
