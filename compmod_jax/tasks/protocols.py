"""Protocols: how a trained network learns classes that it has never seen, each example once.

Classes come one after the other, or all mixed, which is the bound without forgetting. `PROTOCOLS`
has what learns and what is done against forgetting. The size of steps, the scale of new rows of the
last layer and the strength of a penalty are chosen on other classes from the same values for every
protocol and every network (`Trial.choose`).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import token_nll
from compmod_jax.core.sharding import fetch
from compmod_jax.data.base import ClassExamples
from compmod_jax.mechanisms import continual
from compmod_jax.models.base import ModelConfig
from compmod_jax.models.neuromodulated import NeuromodulatedNet, fresh_rows
from compmod_jax.tasks.base import Batch, Params, Status, TaskModel, silent

HEAD = "prediction/head/kernel"
"""The last layer, a row a class."""

_SEED = 0xC019  # of new rows, of fresh parameters, and of the order of mixed examples
_CHUNK = 500  # examples that are classified at once
Rows = dict[str, Any]
Level = Literal["inputs", "context", "features"]


@dataclasses.dataclass(frozen=True)
class Protocol:
  """How a network learns classes that it has not seen, each example once.

  Attributes:
    about: a few words on it.
    learns: names of the parameters that learn.
    interleaved: examples of all classes come in random order, and not class after class.
    fresh: the network has fresh parameters in place of the trained ones.
    keeps: what is done against forgetting.
  """

  about: str
  learns: tuple[str, ...] = ("prediction/head",)
  interleaved: bool = False
  fresh: bool = False
  keeps: Literal["nothing", "rehearsal", "ewc", "lwf"] = "nothing"

  @property
  def has_strength(self) -> bool:
    """Whether a term is added to the loss, with a strength that has to be chosen."""
    return self.keeps in ("ewc", "lwf")


PROTOCOLS = {
  "last_layer": Protocol("class after class, the last layer learns"),
  "prediction_layers": Protocol(
    "class after class, the prediction network learns", ("prediction",)
  ),
  "all_layers": Protocol("class after class, everything learns", ("*",)),
  "interleaved": Protocol("all classes mixed, the last layer learns", interleaved=True),
  "fine_tuned": Protocol("all classes mixed, everything learns", ("*",), interleaved=True),
  "scratch": Protocol(
    "all classes mixed, a fresh network learns", ("*",), interleaved=True, fresh=True
  ),
  "rehearsal": Protocol("the last layer, with rehearsal", keeps="rehearsal"),
  "ewc": Protocol("the last layer, with elastic weight consolidation", keeps="ewc"),
  "lwf": Protocol("the last layer, with distillation (learning without forgetting)", keeps="lwf"),
}
"""Name -> protocol. `last_layer` is ANML's use and OML-OLFT, `prediction_layers` OML's use,
`interleaved` the bound without forgetting."""


@dataclasses.dataclass(frozen=True)
class UseConfig:
  """How trained networks are used, and what protocols choose from."""

  protocols: tuple[str, ...] = ("last_layer", "interleaved")
  """Names of `PROTOCOLS` that are scored on the test classes; the first one gives `accuracy`, and
  is all that is scored on others."""
  classes: tuple[int, ...] = (10, 50, 100, 200, 300, 400, 500, 600)
  """Numbers of classes after which accuracies are measured; the last one is how many are learned,
  or all that there are."""
  shown: int = 15
  """Examples of a class that are learned, once each."""
  asked: int = 5
  """Further examples of a class that test what was learned."""
  choice: int = 200
  """Validation classes on which settings are chosen, or all that there are."""
  rates: tuple[float, ...] = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
  """Step sizes to choose from."""
  row_gains: tuple[float, ...] = (0.0, 1.0)
  """Scales of new rows of the last layer to choose from; 1 for those of fresh parameters."""
  strengths: tuple[float, ...] = (0.1, 1.0, 10.0)
  """Strengths of a penalty or of distillation to choose from."""
  buffer: int = 500
  """Examples that rehearsal keeps."""
  replay: int = 8
  """Of them, how many are learned again with each new example."""
  balanced: bool = True
  """Whether rehearsal keeps about as many of every class; else each example so far has the same
  probability to be kept."""
  temperature: float = 2.0
  """Of distillation."""

  def __post_init__(self):
    for name in self.protocols:
      errors.check_choice("task.use.protocols", name, PROTOCOLS)
    for field in ("protocols", "classes", "rates", "row_gains", "strengths"):
      errors.check(
        bool(getattr(self, field)), f"task.use.{field} is empty; give one value at least."
      )
    errors.check(
      self.classes[0] >= 2 and list(self.classes) == sorted(set(self.classes)),
      f"task.use.classes is {self.classes}; they must be ascending numbers of 2 classes at least.",
    )
    check_least(self, "task.use.", shown=1, asked=1, choice=2, buffer=1, replay=1)
    errors.check(
      min(self.rates) > 0 and min(self.row_gains) >= 0 and min(self.strengths) > 0,
      f"task.use.rates is {self.rates}, row_gains {self.row_gains} and strengths {self.strengths};"
      " rates and strengths must be positive, and row gains not negative.",
    )
    errors.check(
      self.temperature > 0,
      f"task.use.temperature is {self.temperature}; it must be positive.",
    )

  @property
  def each(self) -> int:
    """Examples of a class that a protocol takes."""
    return self.shown + self.asked

  def stages(self, count: int) -> tuple[int, ...]:
    """Of this number of classes, those after which accuracies are measured; all at last."""
    return (*(number for number in self.classes if number < count), count)

  def settings(self, protocol: Protocol) -> "list[Setting]":
    """What a protocol chooses from."""
    strengths = self.strengths if protocol.has_strength else (0.0,)
    return [Setting(*one) for one in itertools.product(self.rates, self.row_gains, strengths)]


class Setting(NamedTuple):
  """What a protocol chooses.

  Attributes:
    rate: size of its steps.
    row_gain: scale of new rows of the last layer.
    strength: of a penalty or of distillation; 0 where there is none.
  """

  rate: float
  row_gain: float
  strength: float = 0.0


# The network.


@dataclasses.dataclass(frozen=True, eq=False)
class ContinualModel(TaskModel[NeuromodulatedNet]):
  """A network of `models.neuromodulated`, read at three levels.

  Attributes:
    shape: of an example.
  """

  shape: tuple[int, ...]

  @classmethod
  def of(cls, model: ModelConfig, shape: tuple[int, ...], classes: int) -> "ContinualModel":
    """The network of a configuration.

    Args:
      model: one that learns class after class, such as a `NeuromodulatedConfig`.
      shape: of an example.
      classes: rows of the last layer.

    Raises:
      UserError: the model is another one, or does not fit the examples.
    """
    return cls(model.continual_learner(shape, classes), shape)

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters."""
    return self.module.init(rng, jnp.zeros((2, *self.shape)))["params"]

  @staticmethod
  def scaled(inputs: jax.Array) -> jax.Array:
    """Pictures between 0 and 1."""
    return inputs / jnp.float32(255) if inputs.dtype == jnp.uint8 else inputs

  def context(self, params: Params, inputs: jax.Array) -> jax.Array:
    """See `NeuromodulatedNet.context`."""
    found: Any = self.module.apply({"params": params}, self.scaled(inputs), method="context")
    return found

  def features(self, params: Params, inputs: jax.Array, context: jax.Array) -> jax.Array:
    """See `NeuromodulatedNet.features`."""
    found: Any = self.module.apply(
      {"params": params}, self.scaled(inputs), context, method="features"
    )
    return found

  def rows(self, params: Params, inputs: jax.Array, level: Level) -> Rows:
    """Examples as `logits` reads them: computed as far as nothing learns."""
    if level == "inputs":
      return {"inputs": inputs}
    context = self.context(params, inputs)
    if level == "context":
      return {"inputs": inputs, "context": context}
    return {"features": self.features(params, inputs, context)}

  def logits(self, params: Params, rows: Rows) -> jax.Array:
    """Logits of all classes for which the last layer has a row, [rows, classes]."""
    features = rows.get("features")
    if features is None:
      context = rows.get("context")
      context = self.context(params, rows["inputs"]) if context is None else context
      features = self.features(params, rows["inputs"], context)
    return features @ params["prediction"]["head"]["kernel"].T

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits of the training classes; an example has one position: [rows, 1, classes]."""
    inputs = self.scaled(jnp.asarray(batch["inputs"]))
    found: Any = self.module.apply(
      {"params": params}, inputs, intermediates=intermediates.editing(self.edits)
    )
    return found[:, None]

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Rows that hold an example, bool [rows, 1]."""
    return (jnp.asarray(batch["index"]) >= 0)[:, None]


def level_of(params: Params, learns: tuple[str, ...]) -> Level:
  """How far examples can be computed before these parameters learn.

  Raises:
    UserError: a pattern stands for no parameter.
  """
  names = continual.selected(params, learns)
  if set(names) == {HEAD}:
    return "features"
  return "context" if all(name.startswith("prediction/") for name in names) else "inputs"


# Learning.


class Sequence(NamedTuple):
  """Classes in the order in which they are learned; their labels are 0, 1, ...

  Attributes:
    examples: of the split.
    shown: numbers of the examples that are learned, [classes, shown].
    asked: numbers of those that test it, [classes, asked].
  """

  examples: ClassExamples
  shown: np.ndarray
  asked: np.ndarray

  def __len__(self) -> int:
    """How many classes there are."""
    return self.shown.shape[0]


def parameters_at_first(model: ContinualModel, trained: Params, protocol: Protocol) -> Params:
  """What a protocol learns from: trained parameters, or fresh ones."""
  return nn.unbox(model.init(jax.random.key(_SEED))) if protocol.fresh else trained


def with_fresh_row(
  params: Params, label: jax.Array, rng: jax.Array, gain: jax.Array | float
) -> Params:
  """Parameters with the row of a class drawn anew; nothing is learned of the row before."""
  head = params["prediction"]["head"]["kernel"]
  row = fresh_rows(rng, 1, head.shape[1], gain)[0]
  return continual.replaced(params, {HEAD: head.at[label].set(row)})


class Learner(NamedTuple):
  """A network that learns classes.

  Attributes:
    params: its parameters.
    anchor: those after the class before, where a penalty holds them.
    importance: of those parameters, summed over classes.
    buffer: what rehearsal keeps.
  """

  params: Params
  anchor: dict[str, jax.Array]
  importance: dict[str, jax.Array]
  buffer: continual.Buffer | None


def beginner(
  model: ContinualModel,
  params: Params,
  rows: Rows,
  rng: jax.Array,
  row_gain: jax.Array,
  *,
  classes: int,
  protocol: Protocol,
  use: UseConfig,
) -> Learner:
  """A network with new rows for so many classes; a function that `TaskModel.jit` compiles.

  Args:
    model: the task's.
    params: trained parameters.
    rows: of any class, as it will learn them.
    rng: key of the rows.
    row_gain: their scale.
    classes: how many.
    protocol: how they will be learned.
    use: sizes.
  """
  head = params["prediction"]["head"]["kernel"]
  new = fresh_rows(rng, classes, head.shape[1], row_gain)
  params = continual.replaced(params, {HEAD: new})
  anchor = dict[str, jax.Array]()
  if protocol.keeps == "ewc":
    anchor = continual.selected(params, protocol.learns)
  buffer = None
  if protocol.keeps == "rehearsal":
    one = jax.tree.map(lambda x: x[0], rows)
    buffer = continual.empty_buffer(use.buffer, classes, one)
  return Learner(params, anchor, jax.tree.map(jnp.zeros_like, anchor), buffer)


def learn(
  model: ContinualModel,
  learner: Learner,
  rows: Rows,
  rng: jax.Array,
  rate: jax.Array,
  strength: jax.Array,
  *,
  protocol: Protocol,
  use: UseConfig,
) -> Learner:
  """The network after some examples, each learned once; a function that `TaskModel.jit` compiles.

  Args:
    model: the task's.
    learner: the network before.
    rows: examples, in their order; those of one class unless the protocol mixes them.
    rng: key of rehearsal.
    rate: size of the steps.
    strength: of a penalty or of distillation.
    protocol: what learns, and what is done against forgetting.
    use: sizes.
  """
  first, second = jax.random.split(rng)
  examples, count = dict(rows), len(rows["labels"])
  classes = learner.params["prediction"]["head"]["kernel"].shape[0]
  known = jnp.arange(classes) < jnp.min(rows["labels"])
  if protocol.keeps == "lwf":
    examples["teacher"] = model.logits(learner.params, rows)
  if learner.buffer is not None:
    kept, _, there = continual.drawn(learner.buffer, count * use.replay, first)
    again = {**kept, "weight": there.astype(jnp.float32)}
    examples["again"] = jax.tree.map(lambda x: x.reshape(count, use.replay, *x.shape[1:]), again)

  def nll(params: Params, rows: Rows) -> Float[Array, " rows"]:
    return token_nll(model.logits(params, rows), rows["labels"])

  def loss(params: Params, rows: Rows) -> jax.Array:
    total, weight = jnp.mean(nll(params, rows)), jnp.float32(1)
    if protocol.keeps == "lwf":
      held = continual.distillation_loss(
        model.logits(params, rows), rows["teacher"], known, use.temperature
      )
      total = total + strength * jnp.mean(held)
    if protocol.keeps == "ewc":
      total = total + strength * continual.quadratic_penalty(
        params, learner.anchor, learner.importance
      )
    if protocol.keeps == "rehearsal":
      again = jax.tree.map(lambda x: x[0], rows["again"])
      total = total + jnp.sum(again["weight"] * nll(params, again))
      weight = weight + jnp.sum(again["weight"])
    return total / weight

  params = continual.online_trajectory(
    loss, learner.params, examples, rate=rate, parameters=protocol.learns
  )
  anchor, importance, buffer = learner.anchor, learner.importance, learner.buffer
  if protocol.keeps == "ewc":
    anchor = continual.selected(params, protocol.learns)
    fisher = continual.fisher_diagonal(
      lambda params, rows: jnp.mean(nll(params, rows)), params, rows, protocol.learns
    )
    importance = jax.tree.map(jnp.add, importance, fisher)
  if buffer is not None:
    add = continual.add_balanced if use.balanced else continual.add_to_reservoir

    def keep(buffer: continual.Buffer, one: tuple[Rows, jax.Array]) -> tuple[Any, None]:
      return add(buffer, one[0], one[0]["labels"], one[1]), None

    buffer, _ = jax.lax.scan(keep, buffer, (rows, jax.random.split(second, count)))
  return Learner(params, anchor, importance, buffer)


def _right(model: ContinualModel, params: Params, rows: Rows) -> Bool[Array, " rows"]:
  return jnp.argmax(model.logits(params, rows), axis=-1) == rows["labels"]


class Outcome(NamedTuple):
  """What a protocol came to.

  Attributes:
    setting: what was chosen, and used.
    stages: numbers of classes after which accuracies were measured.
    shown: accuracy on the examples that were learned, of the classes so far, [stages].
    asked: the same on others, [stages].
    matrix: accuracy on the others, after each stage and of the classes that it added,
      [stages, stages]; None where classes are mixed.
    before: that of every stage's classes before anything was learned, [stages]; None likewise.
  """

  setting: Setting
  stages: tuple[int, ...]
  shown: Float[np.ndarray, " stages"]
  asked: Float[np.ndarray, " stages"]
  matrix: Float[np.ndarray, "stages stages"] | None = None
  before: Float[np.ndarray, " stages"] | None = None

  def transfer(self) -> continual.Transfer | None:
    """Retention and transfer; None where classes are mixed or there is one stage."""
    if self.matrix is None or self.before is None or len(self.stages) < 2:
      return None
    return continual.transfer(self.matrix, self.before)

  def scores(self, name: str) -> Iterator[tuple[str, float]]:
    """Names and values, as they are logged."""
    for stage, shown, asked in zip(self.stages, self.shown, self.asked, strict=True):
      yield f"{name}/accuracy_{stage}", float(asked)
      yield f"{name}/train_accuracy_{stage}", float(shown)
    if found := self.transfer():
      for measure in ("retention", "forgetting", "backward", "forward"):
        if math.isfinite(value := getattr(found, measure)):
          yield f"{name}/{measure}", value
    yield f"{name}/rate", self.setting.rate
    yield f"{name}/row_gain", self.setting.row_gain
    if PROTOCOLS[name].has_strength:
      yield f"{name}/strength", self.setting.strength


class Trial:
  """A protocol on classes, with examples computed as far as nothing learns.

  Args:
    model: the network.
    params: trained parameters, on the host.
    sequence: the classes.
    protocol: how they are learned.
    use: settings to choose from, and sizes.
  """

  def __init__(
    self,
    model: ContinualModel,
    params: Params,
    sequence: Sequence,
    protocol: Protocol,
    use: UseConfig,
  ):
    self._model, self._use = model, use
    self._protocol, self._sequence = protocol, sequence
    self._params = params = parameters_at_first(model, params, protocol)
    self.shown = self._rows(sequence.shown)
    self.asked = self._rows(sequence.asked)

  def _rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Examples by class with their labels, leaves [classes, examples, ...]."""
    level = level_of(self._params, self._protocol.learns)
    flat, (classes, each) = numbers.reshape(-1), numbers.shape
    run = self._model.jit(ContinualModel.rows, level=level)
    parts = [
      fetch(run(self._params, self._sequence.examples.inputs[_whole(flat[start:])]))
      for start in range(0, len(flat), _CHUNK)
    ]
    joined = jax.tree.map(lambda *xs: np.concatenate(xs)[: len(flat)], *parts)
    found = {name: x.reshape(classes, each, *x.shape[1:]) for name, x in joined.items()}
    labels = np.repeat(np.arange(classes, dtype=np.int32)[:, None], each, axis=1)
    return {**found, "labels": labels}

  def right(self, learner: Learner, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Whether the network classifies examples rightly, bool [classes, examples]."""
    classes, each = rows["labels"].shape
    flat = {name: x.reshape(classes * each, *x.shape[2:]) for name, x in rows.items()}
    places, run = np.arange(classes * each), self._model.jit(_right)
    parts = [
      np.asarray(run(learner.params, {name: x[_whole(places[start:])] for name, x in flat.items()}))
      for start in range(0, len(places), _CHUNK)
    ]
    return np.concatenate(parts)[: len(places)].reshape(classes, each)

  def begin(self, setting: Setting) -> Learner:
    """The network before it learns."""
    static = {"classes": len(self._sequence), "protocol": self._protocol, "use": self._use}
    run, rows = self._model.jit(beginner, **static), {k: x[0] for k, x in self.shown.items()}
    return run(self._params, rows, jax.random.key(_SEED), jnp.float32(setting.row_gain))

  def learners(self, setting: Setting, stages: tuple[int, ...]) -> Iterator[tuple[int, Learner]]:
    """The network after so many classes, for each of these numbers."""
    run = self._model.jit(learn, protocol=self._protocol, use=self._use)
    rate, strength = jnp.float32(setting.rate), jnp.float32(setting.strength)
    # Keys of the kind that NumPy can hold: picking one of them is no computation.
    keys = np.asarray(jax.random.split(jax.random.PRNGKey(_SEED), len(self._sequence)))
    learner, done = self.begin(setting), 0
    for stage in stages:
      if self._protocol.interleaved:
        learner, done = self.begin(setting), 0
      rows = {name: x[done:stage] for name, x in self.shown.items()}
      if self._protocol.interleaved:
        rows = _mixed(rows)
      for place in range(stage - done):
        one = {name: x[place] for name, x in rows.items()}
        learner = run(learner, one, keys[done + place], rate, strength)
      done = stage
      yield stage, learner

  def choose(self, status: Status = silent, name: str = "protocol") -> Setting:
    """The setting of the grid with the best accuracy on examples that were not learned.

    Ties go to the first.
    """
    settings, found = self._use.settings(self._protocol), list[float]()
    for number, setting in enumerate(settings):
      for _, learner in self.learners(setting, (len(self._sequence),)):
        found.append(float(self.right(learner, self.asked).mean()))
      status(f"{name}: settings", number + 1, len(settings))
    return settings[int(np.argmax(found))]

  def outcome(self, setting: Setting, status: Status = silent, name: str = "protocol") -> Outcome:
    """Accuracies after every stage."""
    stages = self._use.stages(len(self._sequence))
    shown, asked, rights = list[float](), list[float](), list[np.ndarray]()
    mixed = self._protocol.interleaved
    for number, (stage, learner) in enumerate(self.learners(setting, stages)):
      tested = {name: x[:stage] if mixed else x for name, x in self.asked.items()}
      right = self.right(learner, tested)
      rights.append(right)
      asked.append(float(right[:stage].mean()))
      learned = {name: x[:stage] for name, x in self.shown.items()}
      shown.append(float(self.right(learner, learned).mean()))
      status(f"{name}: stages", number + 1, len(stages))
    matrix = before = None
    if not mixed:
      block = np.searchsorted(np.asarray(stages), np.arange(len(self._sequence)), side="right")
      tasks = np.repeat(block, self.asked["labels"].shape[1])
      matrix = continual.accuracy_matrix(np.stack([one.ravel() for one in rights]), tasks)
      start = self.right(self.begin(setting), self.asked)
      before = continual.accuracy_matrix(start.reshape(1, -1), tasks)[0]
    return Outcome(setting, stages, np.array(shown), np.array(asked), matrix, before)


def _whole(numbers: np.ndarray) -> np.ndarray:
  """The first ones, always as many: the last is repeated."""
  return np.pad(numbers[:_CHUNK], (0, max(0, _CHUNK - len(numbers))), mode="edge")


def _mixed(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Examples of all classes in random order, in as many groups of the same size."""
  classes, each = rows["labels"].shape
  order = np.random.default_rng([_SEED, classes]).permutation(classes * each)
  return {
    name: x.reshape(classes * each, *x.shape[2:])[order].reshape(x.shape)
    for name, x in rows.items()
  }
