"""Classes that are learned one after the other, without forgetting those before.

Training is meta-training: a step learns a class of the training alphabets by single examples, and
lowers the loss on that class and on a set of others that have to be remembered (ANML, OML; see
`mechanisms.continual`); or, without a trajectory, plain classification of all training classes.
Evaluation is by protocols, in which the trained network learns classes that it has never seen; see
`tasks.protocols`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.losses import Term, token_nll
from compmod_jax.core.sharding import fetch
from compmod_jax.data import pipeline
from compmod_jax.data.class_episodes import Classes
from compmod_jax.data.drawn import DrawnDataset
from compmod_jax.data.episodes import episode_shapes
from compmod_jax.data.sources.classes import ClassFolder, ClassLines, DigitsData, TfdsClasses
from compmod_jax.data.synthetic.glyphs import GlyphData
from compmod_jax.mechanisms import continual
from compmod_jax.models.base import ModelConfig
from compmod_jax.tasks.base import (
  Batch,
  Carry,
  Metrics,
  NoSearch,
  Params,
  Scoring,
  Status,
  StepContext,
  Task,
  Terms,
  silent,
)
from compmod_jax.tasks.few_shot import summed_over_tasks
from compmod_jax.tasks.protocols import (
  PROTOCOLS,
  ContinualModel,
  Learner,
  Outcome,
  Rows,
  Sequence,
  Trial,
  UseConfig,
  beginner,
  learn,
  level_of,
  parameters_at_first,
  with_fresh_row,
)
from compmod_jax.trained import Axis, TrainedModel

_TRAINED, _ORDER = 0xC017, 0xC018  # keep draws of the same seed apart


@dataclasses.dataclass(frozen=True)
class ContinualConfig:
  """Meta-training on trajectories of single classes, and use on classes one after the other."""

  data: GlyphData | DigitsData | TfdsClasses | ClassFolder | ClassLines = GlyphData(
    valid_alphabets=8
  )
  """Where examples come from."""
  trajectory: int = 20
  """Examples of one class that a step of meta-training learns one by one; 0 for none: the network
  is trained to classify the training classes."""
  remember: int = 64
  """Examples of any training classes that are to be remembered (or classified) in the same step."""
  trajectories: int = 1
  """Trajectories of a global batch, each with a set to remember."""
  inner_rate: float = 0.1
  """Size of the steps on a trajectory."""
  inner_parameters: tuple[str, ...] = ("prediction",)
  """Names of what learns on a trajectory, or of modules for all in them."""
  first_order: bool = False
  """Takes the gradient of the steps on a trajectory for a constant."""
  row_gain: float = 1.0
  """Scale of the row of the trajectory's class, drawn anew before each trajectory."""
  use: UseConfig = UseConfig()
  """How trained networks are used."""

  def __post_init__(self):
    check_numbers(self, "task.")
    check_least(self, "task.", trajectory=0, remember=1, trajectories=1)
    errors.check(self.inner_rate > 0, f"task.inner_rate is {self.inner_rate}; it must be positive.")
    errors.check(self.row_gain >= 0, f"task.row_gain is {self.row_gain}; it must not be negative.")
    errors.check(
      bool(self.inner_parameters),
      "task.inner_parameters is empty; name what learns, such as 'prediction'.",
    )

  @property
  def rows(self) -> int:
    """Examples of a trajectory and of what is to be remembered with it."""
    return self.trajectory + self.remember

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "Continual":
    """The task; its data are loaded for the shape of an example and the number of classes.

    Args:
      model: the configuration of a network with a prediction network.
      files: nothing is in them.
      cache: not used.

    Raises:
      UserError: the model is another one or does not fit the examples, or data are missing.
    """
    dataset = ClassSequences(self)
    train = dataset.classes("train")
    shape = train.inputs.shape[1:]
    task = Continual(
      dataset=dataset,
      model=ContinualModel.of(model, shape, len(train.names)),
      objective=MetaLoss(self),
      evaluators=(ProtocolScores(self.use),),
      generator=NoSearch(),
    )
    level_of(task.shapes, self.inner_parameters)  # raises for a pattern of no parameter
    return task

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    how = f"meta-learned by trajectories of {self.trajectory} examples"
    how = how if self.trajectory else "trained to classify"
    return (
      f"Classes learned one after the other; {model.describe()}, {how}; {self.data.describe()}."
    )


class ClassSequences(Classes[ContinualConfig], DrawnDataset[ContinualConfig]):
  """Trajectories of single classes for training, and classes in a fixed random order for use.

  A training batch has the columns `inputs` [trajectories, rows, ...], `labels` and `index`
  [trajectories, rows]: first the trajectory, then what is to be remembered.
  """

  drawn = "trajectories"
  no_parts = "what is to be remembered comes from all training classes"

  def check(self) -> None:
    """Loads all splits.

    Raises:
      UserError: a class is in two splits, or has too few examples.
    """
    self.check_disjoint()
    for split in self.splits():
      config = self.config
      needs = config.trajectory if split == "train" else config.use.each
      names = self.classes(split).names
      few = [
        f"{name} ({len(one)})"
        for name, one in zip(names, self.members(split), strict=True)
        if len(one) < max(1, needs)
      ]
      field = "task.trajectory" if split == "train" else "task.use.shown + task.use.asked"
      errors.check(
        not few,
        f"{field} is {needs}, but of the split {split!r} these classes have fewer examples:"
        f" {errors.short_list(few)}. Ask for fewer, or leave those classes out.",
      )
      errors.check(
        len(names) >= 2,
        f"The split {split!r} has {len(names)} classes; it needs two at least. Give more.",
      )

  def notes(self) -> list[str]:
    """How many classes there are, and whether they suffice to choose settings on."""
    counts = {split: len(self.classes(split).names) for split in self.splits()}
    listed = ", ".join(f"{split} {count:,}" for split, count in counts.items())
    lines = [f"classes: {listed}"]
    wanted, there = self.config.use.choice, counts.get("valid", 0)
    if there < wanted:
      lines.append(
        f"settings are chosen on {there} validation classes, not on {wanted} (task.use.choice)"
      )
    return lines

  @property
  def batch_rows(self) -> int:
    """Trajectories of a batch."""
    return self.config.trajectories

  def seeds(self, seed: int) -> tuple[int, ...]:
    """Others than those of other draws with this seed."""
    return (_TRAINED, seed)

  def epoch(self, rows: int) -> int:
    """Batches that show as many examples as there are."""
    return max(1, len(self.classes("train")) // (rows * self.config.rows))

  @functools.cached_property
  def _training_members(self) -> list[np.ndarray]:
    return self.members("train")

  def draw(self, random: np.random.Generator, rows: int) -> pipeline.Batch:
    """Trajectories, each with what is to be remembered."""
    examples, config, members = self.classes("train"), self.config, self._training_members
    numbers = np.stack([
      np.concatenate([
        random.permutation(members[random.integers(len(members))])[: config.trajectory],
        random.integers(len(examples), size=config.remember),
      ])
      for _ in range(rows)
    ])  # fmt: skip
    return {
      "inputs": examples.inputs[numbers],
      "labels": examples.classes[numbers].astype(np.int32),
      "index": numbers.astype(np.int32),
    }

  def sequence(self, split: str, count: int) -> Sequence:
    """Classes of a split in a random order that is always the same: the first `count` of it."""
    examples, use = self.classes(split), self.config.use
    members = self.members(split)
    random = np.random.default_rng([_ORDER, *split.encode()])
    order = random.permutation(len(members))
    chosen = np.stack([random.permutation(members[one])[: use.each] for one in order])[:count]
    return Sequence(examples, chosen[:, : use.shown], chosen[:, use.shown :])

  def trained_shapes(
    self, shapes: Mapping[str, jax.ShapeDtypeStruct], multiple: int
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of trajectories, given those of one of rows."""
    trajectories = pipeline.rows_of_batch(self.batch_rows, multiple)
    return episode_shapes(shapes, trajectories, self.config.rows)

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    config = self.config
    return (
      f"batches of {config.trajectories} trajectories of {config.trajectory} examples, with"
      f" {config.remember} to remember"
    )


# Objective.


@dataclasses.dataclass(frozen=True)
class MetaLoss:
  """Cross-entropy in nats per example, after a trajectory was learned.

  Attributes:
    task: the task's configuration.
  """

  task: ContinualConfig

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"cross_entropy": 1.0}

  def __call__(
    self,
    model: ContinualModel,
    params: Params,
    carry: Carry,
    batch: Batch,
    context: StepContext,
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    one = functools.partial(_meta_sums, model, self.task, context.rng)
    found = summed_over_tasks(one, params, batch, 1)
    metrics = {
      "nll": (found["nll"], found["count"]),
      "accuracy": (found["newest"] + found["remembered"], found["count"]),
      "remembered": (found["remembered"], found["to_remember"]),
    }
    if self.task.trajectory:
      metrics["newest"] = (found["newest"], found["count"] - found["to_remember"])
    return {"cross_entropy": Term(found["nll"], found["count"])}, carry, metrics


def _meta_sums(
  model: ContinualModel, task: ContinualConfig, rng: jax.Array, params: Params, batch: Batch
) -> dict[str, jax.Array]:
  """Sums over a trajectory and its set to remember: nats, right answers, rows."""
  real = (batch["index"] >= 0).astype(jnp.float32)
  count, cut = jnp.sum(real), task.trajectory
  level = level_of(params, task.inner_parameters)
  rows = {**model.rows(params, batch["inputs"], level), "labels": batch["labels"], "real": real}

  def loss(params: Params, rows: Rows) -> tuple[jax.Array, jax.Array]:
    logits = model.logits(params, rows)
    nll = jnp.sum(rows["real"] * token_nll(logits, rows["labels"]))
    right = rows["real"] * (jnp.argmax(logits, axis=-1) == rows["labels"])
    return nll / jnp.maximum(jnp.sum(rows["real"]), 1), right

  if cut:
    key = jax.random.fold_in(rng, batch["index"][0])
    params = with_fresh_row(params, batch["labels"][0], key, task.row_gain)
    mean, right = continual.outer_loss(
      loss,
      params,
      jax.tree.map(lambda x: x[:cut], rows),
      jax.tree.map(lambda x: x[cut:], rows),
      has_aux=True,
      rate=task.inner_rate,
      parameters=task.inner_parameters,
      first_order=task.first_order,
    )
  else:
    mean, right = loss(params, rows)
  return {
    "nll": mean * count,
    "newest": jnp.sum(right[:cut]),
    "remembered": jnp.sum(right[cut:]),
    "to_remember": jnp.sum(real[cut:]),
    "count": count,
  }


# Scores.


def measured(
  task: "Continual",
  params: Params,
  split: str,
  name: str,
  *,
  classes: int | None = None,
  status: Status = silent,
) -> Outcome:
  """A protocol on the classes of a split, with the setting that is best on validation classes.

  Args:
    task: the task.
    params: trained parameters, on the host.
    split: whose classes are learned.
    name: of the protocol.
    classes: most of them, and of validation classes; None for as many as the configuration has.
    status: shows progress.
  """
  use = task.dataset.config.use
  most = use.classes[-1] if classes is None else classes

  def trial(split: str, classes: int) -> Trial:
    sequence = task.dataset.sequence(split, classes)
    return Trial(task.model, params, sequence, PROTOCOLS[name], use)

  setting = trial("valid", min(use.choice, most)).choose(status, name)
  return trial(split, most).outcome(setting, status, name)


@dataclasses.dataclass(frozen=True)
class ProtocolScores:
  """Accuracies of protocols: of all on the test classes, of the first one on others.

  During training, the first protocol is scored on as many validation classes as examples would be
  generated (`evaluate_sentences`).

  Attributes:
    use: the configuration's.
  """

  use: UseConfig
  metric: str = "accuracy"

  @property
  def units(self) -> str:
    """What its scores are, and per what."""
    return (
      "PROTOCOL/accuracy_N: share of unseen examples of the first N classes that are classified"
      " rightly among all classes, after these were learned; train_accuracy_N: of the examples that"
      f" were learned, {self.use.shown} a class, each once; accuracy: of the protocol"
      f" {self.use.protocols[0]} after all classes. Settings are those that are best on validation"
      " classes (rate, row_gain, strength)."
    )

  def __call__(self, scoring: Scoring["Continual"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    params, split = fetch(scoring.params), scoring.split
    all_of_them = scoring.decode is True and split == "test"
    classes = None
    if scoring.decode is not True:
      classes = min(max(2, int(scoring.decode) or self.use.choice), self.use.classes[-1])
    for number, name in enumerate(self.use.protocols if all_of_them else self.use.protocols[:1]):
      found = measured(scoring.task, params, split, name, classes=classes, status=scoring.status)
      if not number:
        yield self.metric, float(found.asked[-1])
      yield from found.scores(name)


@dataclasses.dataclass(frozen=True)
class ContinualLearner(TrainedModel[np.ndarray]):
  """A trained network that learns classes; made by `compmod_jax.load`."""

  task: "Continual"

  def learn(
    self,
    inputs: np.ndarray,
    labels: np.ndarray,
    *,
    rate: float,
    row_gain: float = 0.0,
    protocol: str = "last_layer",
  ) -> Learner:
    """Learns classes from examples in their order, each once.

    Args:
      inputs: examples, [examples, ...], as the task's.
      labels: their classes, from 0, [examples].
      rate: size of the steps; see the scores of a run for one that suits it.
      row_gain: scale of new rows of the last layer.
      protocol: a name of `PROTOCOLS` that does nothing else against forgetting.

    Returns:
      What `probabilities` takes.

    Raises:
      UserError: shapes or labels do not fit each other or the model, or the protocol needs to know
        where a class ends.
    """
    inputs, labels = np.asarray(inputs), np.asarray(labels)
    model, use = self.task.model, self.task.dataset.config.use
    errors.check_choice("protocol", protocol, PROTOCOLS)
    chosen = PROTOCOLS[protocol]
    errors.check(
      chosen.keeps == "nothing",
      f"protocol is {protocol!r}, which learns class by class. Use tasks.continual.learn, or"
      " another protocol.",
    )
    errors.check(
      inputs.shape[1:] == tuple(model.shape) and labels.shape == (len(inputs),) and len(inputs),
      f"inputs has the shape {inputs.shape} and labels {labels.shape}; give examples"
      f" [examples, {', '.join(map(str, model.shape))}] and a class for each.",
    )
    errors.check(
      labels.dtype.kind in "iu" and labels.min() >= 0,
      f"labels has the type {labels.dtype} and begins at {labels.min()}; give whole numbers from"
      " 0.",
    )
    rows = {"inputs": jnp.asarray(inputs), "labels": jnp.asarray(labels, jnp.int32)}
    static = {"classes": int(labels.max()) + 1, "protocol": chosen, "use": use}
    key, learned = jax.random.key(0), model.jit(learn, protocol=chosen, use=use)
    params = parameters_at_first(model, self.params, chosen)
    begun = model.jit(beginner, **static)(params, rows, key, jnp.float32(row_gain))
    return learned(begun, rows, key, jnp.float32(rate), jnp.float32(0))

  def probabilities(self, learner: Learner, inputs: np.ndarray) -> np.ndarray:
    """Probabilities of the learned classes of examples, [examples, classes]."""
    logits = self.task.model.jit(ContinualModel.logits)(
      learner.params, {"inputs": jnp.asarray(np.asarray(inputs))}
    )
    return np.asarray(jax.nn.softmax(logits, axis=-1))

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


class Continual(Task[ClassSequences, ContinualModel, NoSearch]):
  """A task of classes that are learned one after the other; made by `ContinualConfig.build`."""

  opened_as = ContinualLearner
