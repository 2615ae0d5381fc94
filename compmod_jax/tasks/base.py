"""A task: a data set, a model, an objective, evaluators and a generator.

The training loop, the programs and the analyses know these five contracts and nothing else of a
task. Its parts do not know each other; `Task` brings them together where a loss is computed, a
split is scored or an output is generated.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import (
  TYPE_CHECKING,
  Any,
  ClassVar,
  Generic,
  NamedTuple,
  Protocol,
  Self,
  TypeAlias,
  TypeVar,
  runtime_checkable,
)

import jax
import numpy as np
from jaxtyping import PyTree

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF, Edit, Intermediates
from compmod_jax.core.losses import Term
from compmod_jax.core.sharding import fetch
from compmod_jax.core.types import Params
from compmod_jax.data.base import Batch, Dataset, TrainIterator
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.base import ModelConfig, Module

__all__ = [
  "Batch",
  "Dataset",
  "Evaluation",
  "Evaluator",
  "Generator",
  "Loss",
  "Metrics",
  "Objective",
  "Scoring",
  "Sharing",
  "Status",
  "StepContext",
  "Task",
  "TaskModel",
  "Terms",
  "TrainIterator",
  "lower_is_better",
  "silent",
]

Carry: TypeAlias = PyTree
"""Recurrent state, leaves [rows, ...]; an empty tuple for models without."""
Terms = dict[str, Term]
Metrics = dict[str, tuple[jax.Array, jax.Array]]


class Status(Protocol):
  """Shows progress."""

  def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None:
    """What is being done; how many of how many are done, where that is known."""
    ...


def silent(text: str, done: int | None = None, total: int | None = None) -> None:
  """A status display that shows nothing."""


@dataclasses.dataclass(frozen=True)
class Sharing:
  """How batches are laid over devices.

  Attributes:
    place: puts a batch on the devices; with several processes all have the whole batch.
    multiple: rows of a batch are a multiple of this.
  """

  place: Callable[[Batch], Batch] = dict
  multiple: int = 1


class StepContext(NamedTuple):
  """What a loss may depend on besides parameters, carry and batch.

  Attributes:
    rng: key of this step.
    step: number of updates made so far.
    train: whether dropout and the like are on.
    progress: 0 at the first step of the run and 1 at the last.
    intermediates: intermediates of the forward pass that are read or changed.
  """

  rng: jax.Array
  step: jax.Array
  train: bool
  progress: jax.Array | float = 0.0
  intermediates: Intermediates = OFF

  @property
  def dropout_rng(self) -> jax.Array | None:
    """The key of dropout; None where it is off."""
    return self.rng if self.train else None


# The name in objectives of users until version 0.3.
Context = StepContext

M = TypeVar("M", bound=Module)
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, eq=False)
class TaskModel(abc.ABC, Generic[M]):
  """A module, and how the batches of a task become its inputs.

  Attributes:
    module: the Linen module.
    edits: site -> change of that activation, wherever the model runs.
  """

  module: M
  edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict, kw_only=True)

  @property
  def config(self) -> ModelConfig:
    """The configuration of the module."""
    return self.module.config

  def edited(self, edits: Mapping[str, Edit]) -> Self:
    """The same model with activations changed at these sites besides those of `self.edits`."""
    return dataclasses.replace(self, edits={**self.edits, **edits})

  @abc.abstractmethod
  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, boxed with the logical names of their dimensions."""

  def init_carry(self) -> Carry:
    """Recurrent state at the start of an epoch of training; nothing for models without."""
    return ()

  @abc.abstractmethod
  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits on a batch, [batch, time, vocab]; with dropout if a key is given."""

  @abc.abstractmethod
  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Positions at which a site holds real tokens, bool [batch, time]."""

  def start_tokens(self, site: str) -> int:
    """How many positions at the start of a site's sequences hold a start token and no word."""
    return 0

  def routing_sites(self) -> tuple[str, ...]:
    """Names of the weights [batch, time, units] of every router, in the model's order."""
    return self.config.routing_sites()

  def running_config(self, batch: Batch) -> ModelConfig:
    """The configuration as if the model had nothing but what runs on a batch."""
    return self.config

  def unused_parameters(self, batch: Batch) -> tuple[str, ...]:
    """Top-level names of the parameters that do not run on a batch: a step leaves them alone."""
    return ()

  def jit(self, function: Callable[..., R], **static: Hashable) -> Callable[..., R]:
    """`function(self, ..., **static)`, compiled once for this model and these static arguments."""
    key = (function, *sorted(static.items()))
    if key not in self._compiled:
      self._compiled[key] = jax.jit(functools.partial(function, self, **static))
    return self._compiled[key]

  @functools.cached_property
  def _compiled(self) -> dict[Any, Callable[..., Any]]:
    return {}


@runtime_checkable
class Loss(Protocol):
  """The loss of a task: an objective with its model."""

  def __call__(
    self, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """Terms of the objective, the next carry, and additive metrics (sum, count)."""
    ...


N_in = TypeVar("N_in", bound=TaskModel[Any], contravariant=True)


@runtime_checkable
class Objective(Protocol[N_in]):
  """What training lowers; `tasks.objectives` has the ones that wrap another."""

  def __call__(
    self, model: N_in, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """Terms of the objective, the next carry, and additive metrics (sum, count).

    The forward pass takes `context.intermediates`, through which a wrapper reads and changes
    activations.
    """
    ...

  def weights(self, config: Any) -> dict[str, float]:
    """The active terms for a model of this configuration, and their weights."""
    ...


T = TypeVar("T", bound="Task[Any, Any, Any]")


@dataclasses.dataclass
class Scoring(Generic[T]):
  """A split that is being scored, as its evaluators see it.

  Attributes:
    task: the task.
    params: parameters of its model.
    split: name of the split.
    sharing: how batches are laid over devices.
    decode: generate outputs for all examples, for the first n, or for none.
    status: shows progress.
    outputs: what was generated, one text for each example. The evaluator that generates puts them
      here for those that are listed after it; so it does with `references` and `sources`.
    references: what should have been generated.
    sources: what it was generated from.
  """

  task: T
  params: Params
  split: str
  sharing: Sharing = Sharing()
  decode: bool | int = True
  status: Status = silent
  outputs: list[str] = dataclasses.field(default_factory=list)
  references: list[str] = dataclasses.field(default_factory=list)
  sources: list[str] = dataclasses.field(default_factory=list)

  def count(self, examples: int) -> int:
    """For how many of these examples an output is generated."""
    return examples if self.decode is True else min(int(self.decode), examples)

  def batches(self) -> Iterator[Batch]:
    """The split's batches, each shown as read once the next is taken."""
    whole = list(self.task.dataset.eval_batches(self.split, multiple=self.sharing.multiple))
    for number, batch in enumerate(whole):
      yield batch
      self.status(f"loss on {self.split}", number + 1, len(whole))

  def sums(self, score: Callable[..., Any]) -> list[float]:
    """Results of `score(model, params, batch)` for every batch, summed in double precision."""
    run = self.task.model.jit(score)
    found = [
      np.asarray(fetch(run(self.params, self.sharing.place(batch))), np.float64)
      for batch in self.batches()
    ]
    return np.sum(found, axis=0).tolist()


@runtime_checkable
class Evaluator(Protocol):
  """Scores of a split. A new metric is a class like this, listed in its task."""

  @property
  def metric(self) -> str:
    """Name of its score by which checkpoints are compared; empty if it has none."""
    ...

  @property
  def units(self) -> str:
    """What its scores are, and per what."""
    ...

  def __call__(self, scoring: Scoring[Any]) -> Iterable[tuple[str, Any]]:
    """Names and values of its scores, as they are logged."""
    ...


class Evaluation(NamedTuple):
  """Scores of one split.

  Attributes:
    values: name -> number or text (`signature`), as written to the log.
    outputs: what the model generated, one for each example; empty if nothing was generated.
    references: what it should have generated.
    sources: what it was given.
  """

  values: dict[str, Any]
  outputs: list[str]
  references: list[str]
  sources: list[str]


@runtime_checkable
class Generator(Protocol):
  """Uses a model: translates, continues, answers or fills in texts."""

  @property
  def decode(self) -> DecodeConfig | None:
    """How outputs are searched for unless a call says otherwise; None where nothing is searched."""
    ...

  def decoding(self, decode: DecodeConfig) -> Self:
    """The same generator, which searches in another way.

    Raises:
      UserError: it does not search.
    """
    ...


class NoSearch:
  """The part of a generator that has no way to search of its own."""

  decode = None

  def decoding(self, decode: DecodeConfig) -> Self:
    """Raises a `UserError`: there is nothing to set."""
    raise UserError(
      f"{type(self).__name__} does not search for outputs when a split is scored; leave decoding"
      " options out."
    )


def lower_is_better(metric: str) -> bool:
  """Whether a smaller value of a score is the better one: of losses and perplexities, no other."""
  return metric == "loss" or metric.endswith(("_loss", "perplexity"))


if TYPE_CHECKING:  # a plain `Task` is one of which no more is known than the contracts
  import typing_extensions

  D = typing_extensions.TypeVar("D", bound=Dataset[Any], covariant=True, default=Dataset[Any])
  N = typing_extensions.TypeVar("N", bound=TaskModel[Any], covariant=True, default=TaskModel[Any])
  G = typing_extensions.TypeVar("G", bound=Generator, covariant=True, default=Any)
else:
  D = TypeVar("D", bound=Dataset[Any], covariant=True)
  N = TypeVar("N", bound=TaskModel[Any], covariant=True)
  G = TypeVar("G", bound=Generator, covariant=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Task(Generic[D, N, G]):
  """What is learned from which data by which model, and how well.

  Attributes:
    dataset: batches, tokenizers and the task's configuration.
    model: the module, and how batches become its inputs.
    objective: what training lowers.
    evaluators: scores of a split, computed in this order.
    generator: uses the model.
  """

  opened_as: ClassVar[Any] = None
  """The `TrainedModel` that `compmod_jax.load` gives for it; None where `api.model_of` knows."""

  dataset: D
  model: N
  objective: Objective[N]
  evaluators: tuple[Evaluator, ...]
  generator: G

  @functools.cached_property
  def init(self) -> jax.stages.Wrapped:
    """Fresh parameters of a random key, with the names of their axes; traced once, as `shapes`."""
    return jax.jit(self.model.init)

  @functools.cached_property
  def shapes(self) -> Params:
    """Shapes and types of the model's parameters, with the names of their axes."""
    return jax.eval_shape(self.init, jax.random.key(0))

  @property
  def metric(self) -> str:
    """Name of the score by which checkpoints are compared: the first that an evaluator names."""
    return next(one.metric for one in self.evaluators if one.metric)

  def loss(
    self, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """The objective for the task's model; see `Objective`."""
    return self.objective(self.model, params, carry, batch, context)

  def evaluate(
    self,
    params: Params,
    split: str,
    *,
    sharing: Sharing = Sharing(),
    decode: bool | int = True,
    status: Status = silent,
  ) -> Evaluation:
    """Scores a split.

    Args:
      params: the model's parameters.
      split: name of the split.
      sharing: how batches are laid over devices.
      decode: generate outputs for all examples, for the first n, or for none.
      status: shows progress.
    """
    scoring = Scoring(self, params, split, sharing, decode, status)
    values = {name: value for one in self.evaluators for name, value in one(scoring)}
    return Evaluation(values, scoring.outputs, scoring.references, scoring.sources)

  def edited(self, edits: Mapping[str, Edit]) -> Self:
    """The same task with activations changed at these sites besides those already changed."""
    return dataclasses.replace(self, model=self.model.edited(edits))

  def decoding(self, decode: DecodeConfig) -> Self:
    """The same task, whose outputs are searched for in another way."""
    return dataclasses.replace(self, generator=self.generator.decoding(decode))

  def describe(self) -> str:
    """One sentence on model and data."""
    return self.dataset.config.describe(self.model.config)

  def describe_scores(self) -> str:
    """What loss, perplexity and the other scores are per."""
    return " ".join(one.units for one in self.evaluators if one.units)
