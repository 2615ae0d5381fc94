"""Sequences with answers at some of their steps: a recurrent model, loss per answer."""

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import Term
from compmod_jax.data import pipeline
from compmod_jax.data.base import Dataset, TrainIterator
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.data.sequences import AssociationData, CopyingData, DigitsData, Sequences
from compmod_jax.data.subsets import subset_numbers
from compmod_jax.models.base import ModelConfig, Module
from compmod_jax.models.lstm_lm import Output
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


@dataclasses.dataclass(frozen=True)
class SequenceConfig:
  """A task on sequences: what is read at every step, and the answers at some."""

  data: CopyingData | AssociationData | DigitsData = CopyingData()
  """Where sequences come from."""
  rows: int = 64
  """Sequences of a batch."""
  eval_rows: int = 250
  """Sequences that evaluation reads side by side."""
  small_share: float = 0.07
  """Share of the training sequences in the small part, for phases that train on a part."""

  def __post_init__(self):
    check_least(self, "task.", rows=1, eval_rows=1)

  @property
  def length(self) -> int:
    """Steps of a training sequence."""
    return self.data.steps

  @property
  def batch_tokens(self) -> int:
    """Steps of a batch, of all its sequences together."""
    return self.rows * self.length

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "SequenceTask":
    """The task.

    Args:
      model: the configuration of a recurrent model.
      files: nothing is kept with the parameters here.
      cache: nothing is made that could be kept.

    Raises:
      UserError: the model is of another kind, or cannot read such sequences.
    """
    module = model.recurrent(self.data.vocab)
    errors.check(
      model.reads_vectors or not self.data.vectors,
      f"model is a {type(model).__name__}, which reads tokens, but the inputs of task.data, a"
      f" {type(self.data).__name__}, are real numbers. Set a model that reads them.",
    )
    return SequenceTask(
      dataset=SequenceData(self),
      model=SequenceModel(module, self.data.vectors),
      objective=standard(SequenceLoss(), model),
      evaluators=(SequenceScores(),),
      generator=NoSearch(),
    )

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return f"Recurrent model, {model.describe()}; {self.data.describe()}."


class SequenceData(Dataset[SequenceConfig]):
  """Sequences as batches: `tokens`, which may be real numbers, `targets` and `counted`, 0 or 1,
  [rows, time] each, and `index`.

  Attributes:
    config: the task's configuration.
  """

  def __init__(self, config: SequenceConfig):
    self.config = config
    self._loaded: dict[str, Sequences] = {}

  def sequences(self, split: str) -> Sequences:
    """The sequences of a split, loaded once."""
    if split not in self._loaded:
      self._loaded[split] = self.config.data.load(split)
    return self._loaded[split]

  def batch(self, split: str, numbers: np.ndarray, rows: int, first: int = 0) -> pipeline.Batch:
    """Rows `first` to `first + rows` of the sequences with these numbers; filler beyond them."""
    found, mine = self.sequences(split), numbers[first : first + rows]
    batch = {
      "index": mine.astype(np.int32),
      "tokens": found.inputs[mine].astype(np.float32 if self.config.data.vectors else np.int32),
      "targets": found.targets[mine].astype(np.int32),
      "counted": found.counted[mine].astype(np.int32),
    }
    return pipeline.filled(batch, rows)

  def check(self) -> None:
    """Loads every split.

    Raises:
      UserError: one is missing or damaged.
    """
    for split in self.splits():
      self.sequences(split)

  def notes(self) -> list[str]:
    """How many training sequences there are."""
    count, time = self.sequences("train").inputs.shape
    return [f"{count:,} training sequences of {time} steps"]

  def fingerprints(self) -> Fingerprints:
    """Of the training sequences: what is read, and the answers."""
    found = self.sequences("train")
    count = len(found.inputs)
    return {
      "inputs": fingerprint(count, "sequences", [found.inputs.reshape(-1)]),
      "answers": fingerprint(count, "sequences", [found.targets[found.counted]]),
    }

  def files(self) -> dict[str, bytes]:
    """Nothing: there is no tokenizer."""
    return {}

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """See `Dataset`; the order is drawn anew in every epoch, whose rest is left out."""
    pipeline.check_processes(multiple, process, processes)
    rows = pipeline.rows_of_batch(self.config.rows, multiple)
    count = len(self.sequences("train").inputs)
    numbers = subset_numbers(part, count, small_share=self.config.small_share, seed=seed)
    errors.check(
      len(numbers) >= rows,
      f"task.rows is {rows}, but there are {len(numbers)} training sequences; lower task.rows.",
    )
    epochs = _Epochs(self, numbers, rows, seed, (process, processes))
    return pipeline.iterate(epochs, prefetch=4), epochs.per_epoch

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches in which every sequence of a split is once."""
    count = len(self.sequences(split).inputs)
    rows = pipeline.scored_rows(self.config.eval_rows, count, multiple)
    for first in range(0, count, rows):
      yield self.batch(split, np.arange(count), rows, first)

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    ones = jnp.ones((1, 2), jnp.int32)
    tokens = ones.astype(jnp.float32) if self.config.data.vectors else ones
    return {"tokens": tokens, "targets": ones, "counted": ones, "index": jnp.arange(1)}

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    return f"batches of {self.config.rows} sequences"


class _Epochs:
  """Batch i of an endless sequence of epochs, this process's rows: what grain iterates over."""

  def __init__(
    self, data: SequenceData, numbers: np.ndarray, rows: int, seed: int, part: tuple[int, int]
  ):
    self._data, self._numbers, self._rows, self._seed = data, numbers, rows, seed
    self._part, self._lock = part, threading.Lock()
    self._held: tuple[int, np.ndarray] | None = None
    self.per_epoch = len(numbers) // rows

  def __len__(self) -> int:
    return pipeline.ENDLESS

  def __repr__(self) -> str:
    return f"batches of {len(self._numbers)} sequences"

  def __getitem__(self, index: int) -> pipeline.Batch:
    epoch, place = divmod(int(index), self.per_epoch)
    process, processes = self._part
    mine = self._rows // processes
    numbers = self._order(epoch)[place * self._rows :][: self._rows]
    return self._data.batch("train", numbers, mine, process * mine)

  def _order(self, epoch: int) -> np.ndarray:
    with self._lock:
      if self._held is None or self._held[0] != epoch:
        draw = np.random.default_rng([self._seed, epoch])
        self._held = epoch, draw.permutation(self._numbers)
      return self._held[1]


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceModel(TaskModel[Module]):
  """A recurrent model on sequences, each read from its initial state.

  Attributes:
    vectors: whether it reads real numbers, not tokens.
  """

  vectors: bool

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    module: Any = self.module
    kind = jnp.float32 if self.vectors else jnp.int32
    targets, states = jnp.ones((1, 2), jnp.int32), module.initial_states(1)
    return module.init(rng, targets.astype(kind), targets, states, recode=False)["params"]

  def run(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
    logits: bool = False,
  ) -> Output:
    """What the model makes of a batch; with dropout if a key is given."""
    module: Any = self.module
    tokens = jnp.asarray(batch["tokens"])
    intermediates = intermediates.editing(self.edits).knowing(
      lambda site: self.valid_mask(site, batch)
    )
    return module.apply(
      {"params": params},
      tokens,
      jnp.asarray(batch["targets"]),
      module.initial_states(len(tokens)),
      rng=rng,
      recode=self.config.recoding.applies(train=rng is not None),
      logits=logits,
      intermediates=intermediates,
    )

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Log-probabilities at every step, [batch, time, vocab]; with dropout if a key is given."""
    out = self.run(params, batch, intermediates=intermediates, rng=rng, logits=True)
    assert out.logits is not None
    return out.logits

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """All steps of all rows that are no filler."""
    shape = jnp.shape(batch["tokens"])
    return jnp.broadcast_to(jnp.asarray(batch["index"])[:, None] >= 0, shape)


@dataclasses.dataclass(frozen=True)
class SequenceLoss:
  """Cross-entropy in nats per answer."""

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"cross_entropy": 1.0}

  def __call__(
    self, model: SequenceModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    intermediates, rng = context.intermediates, context.dropout_rng
    out = model.run(params, batch, intermediates=intermediates, rng=rng)
    counted = jnp.asarray(batch["counted"]) > 0
    nll, count = jnp.sum(jnp.where(counted, out.nll, 0)), jnp.sum(counted).astype(jnp.float32)
    return {"cross_entropy": Term(nll, count)}, carry, {"nll": (nll, count)}


def _sums(model: SequenceModel, params: Params, batch: Batch) -> jax.Array:
  """Sums of loss, right answers, answers, sequences that are all right, and sequences."""
  out = model.run(params, batch, logits=True)
  assert out.logits is not None
  counted, real = jnp.asarray(batch["counted"]) > 0, jnp.asarray(batch["index"]) >= 0
  right = jnp.argmax(out.logits, axis=-1) == jnp.asarray(batch["targets"])
  whole = jnp.all(right | ~counted, axis=1) & real
  found = jnp.where(counted, out.nll, 0), counted & right, counted, whole, real
  return jnp.stack([jnp.sum(values) for values in found])


@dataclasses.dataclass(frozen=True)
class SequenceScores:
  """Loss and accuracy over the answers of a split, and how many sequences are right as a whole."""

  metric: str = "loss"
  units: str = (
    "Loss: nats per answer; accuracy: share of right answers; exact match: per cent of sequences"
    " whose answers are all right."
  )

  def __call__(self, scoring: Scoring["SequenceTask"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    nll, right, answers, whole, sequences = scoring.sums(_sums)
    yield "sentences", int(sequences)
    yield "tokens", int(answers)
    yield "loss", nll / answers
    yield "accuracy", right / answers
    yield "exact_match", 100 * whole / sequences


class SequenceTask(Task[SequenceData, SequenceModel, NoSearch]):
  """A task on sequences; made by `SequenceConfig.build`."""
