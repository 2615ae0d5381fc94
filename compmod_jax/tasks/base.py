"""What the training loop knows of a task."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from compmod_jax.losses import Term
from compmod_jax.sites import OFF, Taps

Batch = Mapping[str, Any]
Metrics = dict[str, tuple[jax.Array, jax.Array]]
Status = Callable[..., None]
Place = Callable[[Batch], Batch]


def silent(text: str, done: int | None = None, total: int | None = None) -> None:
  """A status display that shows nothing."""


@dataclasses.dataclass(frozen=True)
class Sharing:
  """How batches are laid over devices.

  Attributes:
    place: puts a batch on the devices.
    multiple: rows of a batch are a multiple of this.
  """

  place: Place = dict
  multiple: int = 1


class Context(NamedTuple):
  """What a loss may depend on besides parameters, carry and batch.

  Attributes:
    rng: key of this step.
    step: number of updates made so far.
    train: whether dropout and the like are on.
  """

  rng: jax.Array
  step: jax.Array
  train: bool


class TrainIterator(Protocol):
  """An endless iterator over batches whose state can be saved and restored exactly."""

  def __next__(self) -> Mapping[str, np.ndarray]: ...

  def get_state(self) -> Any:
    """The position, as JSON can hold it."""
    ...

  def set_state(self, state: Any) -> None:
    """Goes to a position that `get_state` gave."""
    ...


class Evaluation(NamedTuple):
  """Scores of one split.

  Attributes:
    values: name -> number or text (`signature`), as written to the log.
    outputs: what the model put out, one for each example; empty if nothing was decoded.
    references: what it should have put out.
    sources: what it was given.
  """

  values: dict[str, Any]
  outputs: list[str]
  references: list[str]
  sources: list[str]


class Task(Protocol):
  """A task: its data, its model, what a batch means and how it is scored."""

  @property
  def metric(self) -> str:
    """Name of the score by which checkpoints are compared; higher is better unless a loss."""
    ...

  def final_splits(self) -> tuple[str, ...]:
    """Names of the splits that are scored at the end."""
    ...

  def check_data(self) -> None:
    """Loads what will be scored, so that what is missing is told before training, not after."""
    ...

  def resolved_config(self) -> Any:
    """The task's configuration with everything in it that was chosen from the training data."""
    ...

  def data_notes(self) -> list[str]:
    """Sentences on what of the training data was left out."""
    ...

  def objective(self) -> dict[str, float]:
    """The active terms of the objective and their weights."""
    ...

  def files(self) -> dict[str, bytes]:
    """What must be kept with the parameters to use them: tokenizers."""
    ...

  def init(self, rng: jax.Array) -> Any:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    ...

  def init_carry(self) -> Any:
    """Recurrent state at the start of an epoch; an empty tuple for models without."""
    ...

  def loss(
    self, params: Any, carry: Any, batch: Batch, context: Context
  ) -> tuple[dict[str, Term], Any, Metrics]:
    """Terms of the objective, the next carry, and additive metrics (sum, count)."""
    ...

  def train_batches(
    self, *, part: str, seed: int, multiple: int, process: int, processes: int
  ) -> tuple[TrainIterator, int]:
    """Training batches of a part of the data, and how many make an epoch."""
    ...

  def evaluate(
    self,
    params: Any,
    split: str,
    *,
    sharing: Sharing = Sharing(),
    decode: bool | int = True,
    status: Status = silent,
  ) -> Evaluation:
    """Scores a split; `decode` says whether outputs are made: for all, for the first n, or none."""
    ...

  def forward(self, params: Any, batch: Batch, *, taps: Taps = OFF) -> jax.Array:
    """The model's logits on a batch, without dropout."""
    ...
