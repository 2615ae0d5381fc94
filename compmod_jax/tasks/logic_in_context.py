"""Regression in context: the value of an expression at a point, from its values at others.

A sequence has points of one fuzzy expression with their values, and a last point without. The model
finds out from the sequence alone which expression it is; parts of the data have other combinations
of the same terms, or other terms (`data.synthetic.logic_in_context`).

Source: Schug et al. 2025 (Attention as a Hypernetwork), fuzzy logic.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import Term
from compmod_jax.data import pipeline
from compmod_jax.data.drawn import DrawnDataset
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.data.synthetic.logic_in_context import LogicInContextData, Sequences
from compmod_jax.metrics.regression import determination
from compmod_jax.models.base import ModelConfig, Regressor
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

# Sequences that identify the training data, and numbers at which training batches begin.
_IDENTIFIED, _NUMBERS = 1000, 2**62


@dataclasses.dataclass(frozen=True)
class LogicInContextConfig:
  """The task of predicting the value of an expression that a sequence shows at other points."""

  data: LogicInContextData = LogicInContextData()
  """The expressions, and the points of a sequence."""
  causal: bool = False
  """No point reads a later one; else all read all, as in the published program."""
  rows: int = 128
  """Sequences of a batch; drawn without end."""
  eval_sequences: int = 4000
  """Sequences of each part that is scored."""
  eval_rows: int = 250
  """Sequences that evaluation reads side by side."""

  def __post_init__(self):
    check_numbers(self, "task.")
    check_least(self, "task.", rows=1, eval_sequences=2, eval_rows=1)

  @property
  def length(self) -> int:
    """Points of a sequence."""
    return self.data.points

  @property
  def batch_tokens(self) -> int:
    """Points of a batch, of all its sequences together."""
    return self.rows * self.length

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "LogicInContext":
    """The task.

    Args:
      model: the configuration of a regressor of sequences of vectors.
      files: nothing is in them.
      cache: not used.

    Raises:
      UserError: the model is of another kind, or has too few positions.
    """
    module = model.regressor(1)
    errors.check(
      self.length <= model.max_length,
      f"task.data.points is {self.length} but model.max_length is {model.max_length}; every point"
      " needs a position. Raise model.max_length.",
    )
    return LogicInContext(
      dataset=ContextSequences(self),
      model=ContextModel(module, (self.length, self.data.variables + 1), self.causal),
      objective=standard(SquaredError(), model),
      evaluators=(ContextScores(),),
      generator=NoSearch(),
    )

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return f"Regression by {model.describe()}, of {self.data.describe()}."


class ContextSequences(DrawnDataset[LogicInContextConfig]):
  """Sequences as batches; a training epoch is 100 batches.

  Batches have the columns `inputs` [rows, points, variables + 1], `targets` [rows] and `index`.

  Attributes:
    config: the task's configuration.
  """

  drawn = "sequences"
  no_parts = "sequences are drawn without end and have no parts"

  def __init__(self, config: LogicInContextConfig):
    self.config = config
    self._scored: dict[str, Sequences] = {}

  def sequences(self, split: str) -> Sequences:
    """What a part is scored on, its first sequences, made once."""
    if split not in self._scored:
      self._scored[split] = self.config.data.sequences(split, 0, self.config.eval_sequences)
    return self._scored[split]

  def notes(self) -> list[str]:
    """How many expressions each part has."""
    data = self.config.data
    counts = (f"{len(data.tasks(split)):,} in {split}" for split in self.splits())
    return [f"expressions: {', '.join(counts)}"]

  def fingerprints(self) -> Fingerprints:
    """What identifies the training data: some sequences, with the values that are asked for."""
    found = self.config.data.sequences("train", 0, _IDENTIFIED)
    arrays = [found.inputs.reshape(-1), found.targets]
    return {"sequences": fingerprint(_IDENTIFIED, "sequences", arrays)}

  @property
  def batch_rows(self) -> int:
    """Sequences of a batch."""
    return self.config.rows

  def draw(self, random: np.random.Generator, rows: int) -> pipeline.Batch:
    """Successive sequences, from a number that is drawn."""
    first = int(random.integers(_NUMBERS))
    return _batch(self.config.data.sequences("train", first, rows), rows)

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches in which every sequence of a split is once."""
    found = self.sequences(split)
    count = len(found.targets)
    rows = pipeline.scored_rows(self.config.eval_rows, count, multiple)
    for first in range(0, count, rows):
      yield _batch(Sequences(*(one[first : first + rows] for one in found)), rows, first)

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes."""
    data = self.config.data
    inputs = jnp.zeros((1, data.points, data.variables + 1))
    return {"inputs": inputs, "targets": jnp.zeros(1), "index": jnp.zeros(1, jnp.int32)}

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    return f"batches of {self.config.rows} sequences of {self.config.length} points"


def _batch(found: Sequences, rows: int, first: int = 0) -> pipeline.Batch:
  """Sequences, numbered from `first`, and filler rows below them."""
  index = first + np.arange(len(found.targets), dtype=np.int32)
  batch = {"inputs": found.inputs, "targets": found.targets, "index": index}
  return pipeline.filled(batch, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class ContextModel(TaskModel[Regressor]):
  """A regressor that reads the points of a sequence.

  Attributes:
    shape: of a sequence: points, and numbers of each.
    causal: whether no point reads a later one.
  """

  shape: tuple[int, int]
  causal: bool

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    return self.module.init(rng, jnp.zeros((1, *self.shape)), causal=self.causal)["params"]

  def predict(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> Float[Array, " batch"]:
    """Values at the last points; with dropout if a key is given."""
    found: jax.Array = self.module.apply(
      {"params": params},
      jnp.asarray(batch["inputs"]),
      causal=self.causal,
      deterministic=rng is None,
      intermediates=intermediates.editing(self.edits, lambda site: self.valid_mask(site, batch)),
      rngs=None if rng is None else {"dropout": rng},
    )
    return found[:, 0]

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> Float[Array, "batch 1 1"]:
    """The same values, each at the one position of its row."""
    return self.predict(params, batch, intermediates=intermediates, rng=rng)[:, None, None]

  def valid_mask(self, site: str, batch: Batch) -> Bool[Array, "batch time"]:
    """All points of rows that are no filler; of the logits the last one alone."""
    time = 1 if site == "logits" else self.shape[0]
    return jnp.repeat(jnp.asarray(batch["index"])[:, None] >= 0, time, axis=1)


def _squares(found: jax.Array, batch: Batch) -> Float[Array, " batch"]:
  """Squared errors, 0 in rows of filler."""
  real = jnp.asarray(batch["index"]) >= 0
  return jnp.where(real, jnp.square(found - jnp.asarray(batch["targets"])), 0)


@dataclasses.dataclass(frozen=True)
class SquaredError:
  r"""The mean squared error at the last point.

  .. math:: \frac{1}{N} \sum_n (\hat y_n - y_n)^2
  """

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"squared_error": 1.0}

  def __call__(
    self, model: ContextModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    intermediates, rng = context.intermediates, context.dropout_rng
    found = model.predict(params, batch, intermediates=intermediates, rng=rng)
    total = jnp.sum(_squares(found, batch))
    count = jnp.sum(jnp.asarray(batch["index"]) >= 0).astype(jnp.float32)
    return {"squared_error": Term(total, count)}, carry, {"squared_error": (total, count)}


def _sum(model: ContextModel, params: Params, batch: Batch) -> Float[Array, ""]:
  return jnp.sum(_squares(model.predict(params, batch), batch))


@dataclasses.dataclass(frozen=True)
class ContextScores:
  """The coefficient of determination of a part, over all of its sequences together.

  Source: Schug et al. 2025 divide the error of every sequence by the variance within it instead,
  and have the mean of those.
  """

  metric: str = "r2"
  units: str = (
    "r2: coefficient of determination, the share of the variance of the values that is predicted;"
    " context/squared_error: mean squared error of a value from 0 to 1."
  )

  def __call__(self, scoring: Scoring["LogicInContext"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    targets = scoring.task.dataset.sequences(scoring.split).targets
    total = np.asarray(scoring.sums(_sum))
    yield "sentences", len(targets)
    yield self.metric, float(determination(total, targets))
    yield "context/squared_error", float(total) / len(targets)


@dataclasses.dataclass(frozen=True)
class ContextRegression(BatchModel):
  """A trained regression in context; made by `compmod_jax.load`."""

  task: "LogicInContext"

  def predict(self, inputs: np.ndarray) -> np.ndarray:
    """The values at the last points, [sequences].

    Args:
      inputs: points with their values, [sequences, points, variables + 1]; the last value of a
        sequence should be 0, as in training.

    Raises:
      UserError: inputs have another shape.
    """
    inputs, shape = np.asarray(inputs, np.float32), self.task.model.shape
    errors.check(
      inputs.ndim == 3 and inputs.shape[1:] == shape,
      f"inputs has the shape {inputs.shape}; it must be [sequences, {shape[0]}, {shape[1]}].",
    )
    batch = {"inputs": inputs, "index": np.arange(len(inputs))}
    return np.asarray(self.task.model.jit(ContextModel.predict)(self.params, batch))


class LogicInContext(Task[ContextSequences, ContextModel, NoSearch]):
  """A regression in context; made by `LogicInContextConfig.build`."""

  opened_as = ContextRegression
