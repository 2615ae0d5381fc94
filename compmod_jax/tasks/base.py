"""What the training loop knows of a task."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import jax
import numpy as np

from compmod_jax.core.intermediates import OFF, Edit, Taps
from compmod_jax.core.losses import Term
from compmod_jax.core.sharding import fetch
from compmod_jax.data.fingerprint import Fingerprints
from compmod_jax.decoding import DecodeConfig

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
    place: puts a batch on the devices; with several processes all have the whole batch.
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
    progress: 0 at the first step of the run and 1 at the last.
  """

  rng: jax.Array
  step: jax.Array
  train: bool
  progress: jax.Array | float = 0.0


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


def total_losses(
  score: Callable[[Any, Batch], Any],
  params: Any,
  batches: Iterable[Batch],
  split: str,
  sharing: Sharing,
  status: Status,
) -> list[float]:
  """What a jitted function puts out for every batch of a split, summed in double precision.

  Args:
    score: from parameters and a batch to numbers, such as sums of losses and counts.
    params: the model's parameters.
    batches: of the split.
    split: its name, for the display.
    sharing: how batches are laid over devices.
    status: shows progress.
  """
  found, whole = [], list(batches)
  for number, batch in enumerate(whole):
    found.append(np.asarray(fetch(score(params, sharing.place(batch))), np.float64))
    status(f"loss on {split}", number + 1, len(whole))
  return np.sum(found, axis=0).tolist()


def lower_is_better(metric: str) -> bool:
  """Whether a smaller value of a score is the better one: of losses and perplexities, no other."""
  return metric == "loss" or metric.endswith("perplexity")


class OfSplits:
  """The part of a task whose splits are those of `config.data`, and whose batches use all of it."""

  config: Any

  def idle(self, batch: Batch) -> tuple[str, ...]:
    """None: every batch uses all parameters."""
    return ()

  def split_names(self) -> tuple[str, ...]:
    """Names of all splits, that of training among them."""
    return self.config.data.splits()

  def final_splits(self) -> tuple[str, ...]:
    """Names of the splits that are scored at the end: all but the training split."""
    return tuple(split for split in self.split_names() if split != "train")


class Task(Protocol):
  """A task: its data, its model, what a batch means and how it is scored.

  Attributes:
    config: the task's configuration.
    model: the module.
    edits: site -> change of that activation, wherever the model runs.
  """

  config: Any
  model: Any
  edits: dict[str, Edit]

  @property
  def metric(self) -> str:
    """Name of the score by which checkpoints are compared; see `lower_is_better`."""
    ...

  @property
  def decode(self) -> DecodeConfig | None:
    """How outputs are searched for; none where nothing is searched for."""
    ...

  def decoding(self, decode: DecodeConfig) -> Self:
    """The same task, whose outputs are searched for in another way."""
    ...

  def edited(self, edits: Mapping[str, Edit]) -> Self:
    """The same task with activations changed at these sites besides those of `edits`."""
    ...

  def describe(self) -> str:
    """One sentence on model and data."""
    ...

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    ...

  def describe_scores(self) -> str:
    """What loss and perplexity are per, and other units of `evaluate`, in a sentence or two."""
    ...

  def split_names(self) -> tuple[str, ...]:
    """Names of all splits, that of training among them."""
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

  def fingerprints(self) -> Fingerprints:
    """Part of the training data -> what identifies its examples, as they are trained on."""
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

  def idle(self, batch: Batch) -> tuple[str, ...]:
    """Names of what parameters a batch has no use for, at the top level: they do not move."""
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

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterable[Mapping[str, np.ndarray]]:
    """Batches in which every example of a split is once, as they are scored."""
    ...

  def example(self) -> Mapping[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    ...

  def forward(
    self, params: Any, batch: Batch, *, taps: Taps = OFF, rng: jax.Array | None = None
  ) -> jax.Array:
    """The model's logits on a batch; with dropout if a key is given."""
    ...

  def routing_sites(self) -> list[str]:
    """Names of the weights [batch, time, units] of every router, in the model's order."""
    ...

  def rows(self, site: str, batch: Batch) -> jax.Array:
    """Positions [batch, time] at which a site holds real tokens."""
    ...

  def start_tokens(self, site: str) -> int:
    """How many positions at the start of a site's sequences hold a start token and no word."""
    ...
