"""Regression of fuzzy Boolean expressions: one model predicts the values of many.

The values of variables are from 0 to 1, and

    and(x, y) = x y,    not(x) = 1 - x,    or(x, y) = not(and(not(x), not(y)))

A model learns some expressions side by side, and then others, with all of its parameters or with
some: parameters that are common to all expressions have to be of use for new ones.

Source: Rahaman et al. 2021, section 5.1; Kolios 2023, section 4.12.3, equations 4.45 (where the
negation is printed as -x, which leaves the interval).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import Term
from compmod_jax.data import pipeline
from compmod_jax.data.drawn import DrawnDataset
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.metrics.regression import determination
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
from compmod_jax.tasks.objectives import standard
from compmod_jax.trained import BatchModel

_SPLITS = ("train", "valid", "test")
# Keep apart what is drawn from one seed: expressions, and points.
_EXPRESSIONS, _POINTS = 0xF022, 0x9017
# Points at which expressions are compared, and on which the loss is scaled.
_COMPARED, _SCALED = 256, 2**14


# Expressions.


class Not(NamedTuple):
  """1 - x."""

  of: "Expression"


class And(NamedTuple):
  """x y."""

  left: "Expression"
  right: "Expression"


Expression: TypeAlias = int | Not | And
"""The number of a variable, or an operation."""


def either(left: Expression, right: Expression) -> Expression:
  """The disjunction, by De Morgan."""
  return Not(And(Not(left), Not(right)))


def values(
  expression: Expression, points: Float[np.ndarray, "points variables"]
) -> Float[np.ndarray, " points"]:
  """The expression at points."""
  if isinstance(expression, Not):
    return 1 - values(expression.of, points)
  if isinstance(expression, And):
    return values(expression.left, points) * values(expression.right, points)
  return points[:, expression]


def written(expression: Expression) -> str:
  """The expression as text, such as `(a & ~b) | c`."""
  match expression:
    case Not(And(Not(left), Not(right))):
      return f"({written(left)} | {written(right)})"
    case And(left, right):
      return f"({written(left)} & {written(right)})"
    case Not(of):
      return f"~{written(of)}"
    case _:
      return chr(ord("a") + expression)


@dataclasses.dataclass(frozen=True)
class FuzzyExpressions:
  """Random expressions: literals, of which every variable has at least one, are joined in pairs by
  and or or, in a random order, until one expression is left."""

  variables: int = 5
  """Variables of an expression, all of which occur."""
  count: int = 20
  """Expressions that are learned."""
  first: int = 0
  """How many expressions of the same seed stand before them: others than those are learned."""
  more_literals: int = 3
  """Most literals that an expression has beyond one of each variable."""
  seed: int = 0
  """Of the expressions and of the points of evaluation."""

  def __post_init__(self):
    check_numbers(self, "task.data.")
    check_least(self, "task.data.", variables=2, count=1, first=0, more_literals=0)
    errors.check(
      self.variables <= 26, f"task.data.variables is {self.variables}; there are letters for 26."
    )
    errors.check(self.seed >= 0, f"task.data.seed is {self.seed}; it must not be negative.")

  def splits(self) -> tuple[str, ...]:
    """Names of the splits, of points."""
    return _SPLITS

  def expressions(self) -> list[Expression]:
    """The expressions; no two of a seed have the same values.

    Raises:
      UserError: there are not so many different ones.
    """
    draw = np.random.default_rng([self.seed, _EXPRESSIONS])
    points = draw.random((_COMPARED, self.variables))
    found, known = list[Expression](), list[np.ndarray]()
    for _ in range(100 * (self.first + self.count)):
      one = self._draw(draw)
      here = values(one, points)
      if any(np.allclose(here, other, atol=1e-9) for other in known):
        continue
      found.append(one)
      known.append(here)
      if len(found) == self.first + self.count:
        return found[self.first :]
    raise errors.UserError(
      f"task.data asks for {self.first + self.count} expressions of {self.variables} variables, but"
      f" only {len(found)} different ones were found. Ask for fewer, or raise"
      " task.data.more_literals."
    )

  def _draw(self, draw: np.random.Generator) -> Expression:
    more = draw.integers(self.variables, size=draw.integers(self.more_literals + 1))
    names = [*range(self.variables), *more.tolist()]
    parts: list[Expression] = [Not(name) if draw.random() < 0.5 else name for name in names]
    while len(parts) > 1:
      left, right = (parts.pop(int(draw.integers(len(parts)))) for _ in range(2))
      parts.append(either(left, right) if draw.random() < 0.5 else And(left, right))
    return parts[0]

  def describe(self) -> str:
    """What it holds, in a few words."""
    after = f" after the first {self.first}" if self.first else ""
    return f"{self.count} random fuzzy expressions of {self.variables} variables{after}"


# Task.


@dataclasses.dataclass(frozen=True)
class FuzzyLogicConfig:
  """The task of predicting the values of fuzzy expressions at a point."""

  data: FuzzyExpressions = FuzzyExpressions()
  """The expressions."""
  rows: int = 32
  """Points of a batch, at which all expressions are predicted; drawn evenly, without end."""
  eval_points: int = 2000
  """Points of each split that is scored."""
  eval_rows: int = 250
  """Points that evaluation reads side by side."""

  def __post_init__(self):
    check_numbers(self, "task.")
    check_least(self, "task.", rows=1, eval_points=2, eval_rows=1)

  @property
  def length(self) -> int:
    """Positions of a row: its variables, and one for every expression."""
    return self.data.variables + self.data.count

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "FuzzyLogic":
    """The task.

    Args:
      model: the configuration of a classifier that reads sets of numbers.
      files: nothing is in them.
      cache: not used.

    Raises:
      UserError: the model is of another kind, or has one CLS vector for all expressions.
    """
    errors.check(
      getattr(model, "cls", "outputs") == "outputs",
      "model.cls is 'one', but each expression has a CLS vector of its own. Set it to 'outputs'.",
    )
    dataset = FuzzyPoints(self)
    module = model.classifier((self.data.variables,), self.data.count)
    return FuzzyLogic(
      dataset=dataset,
      model=FuzzyModel(module, self.data.variables, self.data.count),
      objective=standard(Unexplained(tuple(dataset.variances.tolist())), model),
      evaluators=(Determination(),),
      generator=NoSearch(),
    )

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return f"Regression by {model.describe()}, of {self.data.describe()}."


class FuzzyPoints(DrawnDataset[FuzzyLogicConfig]):
  """Points and the values of all expressions there; a training epoch is 100 batches.

  Batches have the columns `inputs` [rows, variables], `targets` [rows, expressions] and `index`.

  Attributes:
    config: the task's configuration.
    expressions: what is learned.
    variances: of the expressions' values at evenly drawn points, [expressions].
  """

  drawn = "points"
  no_parts = "points are drawn without end and have no parts"

  def __init__(self, config: FuzzyLogicConfig):
    self.config = config
    self.expressions = config.data.expressions()
    draw = np.random.default_rng([config.data.seed, _POINTS])
    self.variances = self.targets(draw.random((_SCALED, config.data.variables))).var(axis=0)

  def targets(
    self, points: Float[np.ndarray, "points variables"]
  ) -> Float[np.ndarray, "points expressions"]:
    """Values of all expressions."""
    return np.stack([values(one, points) for one in self.expressions], axis=1)

  def points(self, split: str) -> np.ndarray:
    """The points of a split, [points, variables]; of the training split the first ones."""
    errors.check_choice("split", split, self.splits())
    draw = np.random.default_rng([self.config.data.seed, _POINTS, *split.encode()])
    return draw.random((self.config.eval_points, self.config.data.variables), np.float32)

  def batch(self, points: np.ndarray, rows: int, first: int = 0) -> pipeline.Batch:
    """These points, numbered from `first`, and filler rows below them."""
    targets = self.targets(points).astype(np.float32)
    index = first + np.arange(len(points), dtype=np.int32)
    return pipeline.filled({"inputs": points, "targets": targets, "index": index}, rows)

  def notes(self) -> list[str]:
    """The expressions."""
    first = self.config.data.first
    return [f"expression {first + i}: {text}" for i, text in enumerate(self.texts())]

  def texts(self) -> list[str]:
    """The expressions as text."""
    return [written(one) for one in self.expressions]

  def fingerprints(self) -> Fingerprints:
    """What identifies the expressions: their values at some points."""
    found = self.targets(self.points("train")).astype(np.float32)
    return {"expressions": fingerprint(len(found), "points", [found.reshape(-1)])}

  @property
  def batch_rows(self) -> int:
    """Points of a batch."""
    return self.config.rows

  def seeds(self, seed: int) -> tuple[int, ...]:
    """That of the data, too."""
    return (self.config.data.seed, _POINTS, seed)

  def draw(self, random: np.random.Generator, rows: int) -> pipeline.Batch:
    """Evenly distributed points."""
    return self.batch(random.random((rows, self.config.data.variables), np.float32), rows)

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches in which every point of a split is once."""
    points = self.points(split)
    rows = pipeline.scored_rows(self.config.eval_rows, len(points), multiple)
    for first in range(0, len(points), rows):
      yield self.batch(points[first : first + rows], rows, first)

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes."""
    data = self.config.data
    inputs, targets = jnp.zeros((1, data.variables)), jnp.zeros((1, data.count))
    return {"inputs": inputs, "targets": targets, "index": jnp.zeros(1, jnp.int32)}

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    return f"batches of {self.config.rows} points"


@dataclasses.dataclass(frozen=True, eq=False)
class FuzzyModel(TaskModel[Classifier]):
  """A model that predicts the values of all expressions at a point.

  Attributes:
    variables: numbers that it reads.
    expressions: numbers that it predicts.
  """

  variables: int
  expressions: int

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    return self.module.init(rng, jnp.zeros((2, self.variables)))["params"]

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> Float[Array, "batch expressions 1"]:
    """The values, each at a position of its own."""
    found: jax.Array = self.module.apply(
      {"params": params},
      jnp.asarray(batch["inputs"]),
      intermediates=intermediates.editing(self.edits, lambda site: self.valid_mask(site, batch)),
    )
    return found[..., None]

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """All positions of rows that are no filler: variables and expressions, or these alone."""
    of_cls = site in ("features", "logits")
    count = self.expressions if of_cls else self.variables + self.expressions
    return jnp.repeat(jnp.asarray(batch["index"])[:, None] >= 0, count, axis=1)


@dataclasses.dataclass(frozen=True)
class Unexplained:
  r"""The share of the variance that is not explained, mean over expressions.

  .. math:: \frac{1}{N} \sum_n \frac{\mathrm{E}[(\hat y_n - y_n)^2]}{\mathrm{Var}[y_n]}

  Attributes:
    variances: of the expressions.
  """

  variances: tuple[float, ...]

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"unexplained": 1.0}

  def __call__(
    self, model: FuzzyModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    errors = _squares(model, params, batch, context.intermediates)
    total = jnp.sum(errors / jnp.asarray(self.variances, jnp.float32)[None])
    count = jnp.sum(jnp.asarray(batch["index"]) >= 0) * float(len(self.variances))
    return {"unexplained": Term(total, count)}, carry, {"unexplained": (total, count)}


def _squares(
  model: FuzzyModel, params: Params, batch: Batch, intermediates: Intermediates = OFF
) -> Float[Array, "batch expressions"]:
  """Squared errors, 0 in rows of filler."""
  made = model.forward(params, batch, intermediates=intermediates)[..., 0]
  real = jnp.asarray(batch["index"])[:, None] >= 0
  return jnp.where(real, jnp.square(made - jnp.asarray(batch["targets"])), 0)


def _sums(model: FuzzyModel, params: Params, batch: Batch) -> Float[Array, " expressions"]:
  return jnp.sum(_squares(model, params, batch), axis=0)


@dataclasses.dataclass(frozen=True)
class Determination:
  r"""The coefficient of determination of every expression, their mean and the least of them.

  .. math:: R^2 = 1 - \frac{\sum_i (\hat y_i - y_i)^2}{\sum_i (y_i - \bar y)^2}
  """

  metric: str = "fuzzy/r2"
  units: str = (
    "fuzzy/r2: coefficient of determination, mean over the expressions; fuzzy/r2_min: the least;"
    " fuzzy/r2_NUMBER: of one."
  )

  def __call__(self, scoring: Scoring["FuzzyLogic"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    dataset = scoring.task.dataset
    squares = np.asarray(scoring.sums(_sums))
    targets = dataset.targets(dataset.points(scoring.split))
    found = determination(squares, targets)
    yield "fuzzy/points", len(targets)
    yield self.metric, float(found.mean())
    yield "fuzzy/r2_min", float(found.min())
    for number, one in enumerate(found.tolist()):
      yield f"fuzzy/r2_{number:02d}", one


@dataclasses.dataclass(frozen=True)
class FuzzyRegression(BatchModel):
  """A trained regression of expressions; made by `compmod_jax.load`."""

  task: "FuzzyLogic"

  def predict(self, points: np.ndarray) -> np.ndarray:
    """The values of all expressions, [points, expressions].

    Args:
      points: values of the variables, [points, variables].

    Raises:
      UserError: points have another shape.
    """
    points, variables = np.asarray(points, np.float32), self.task.model.variables
    errors.check(
      points.ndim == 2 and points.shape[1] == variables,
      f"points has the shape {points.shape}; it must be [points, {variables}].",
    )
    batch = {"inputs": points, "index": np.arange(len(points))}
    return np.asarray(self.task.model.jit(_values)(self.params, batch))


def _values(model: FuzzyModel, params: Params, batch: Batch) -> jax.Array:
  return model.forward(params, batch)[..., 0]


class FuzzyLogic(Task[FuzzyPoints, FuzzyModel, NoSearch]):
  """A regression of expressions; made by `FuzzyLogicConfig.build`."""

  opened_as = FuzzyRegression
