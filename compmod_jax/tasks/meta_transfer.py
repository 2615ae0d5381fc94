"""Which of two variables is the cause, and how they are encoded, by the speed of adaptation.

Every example is an episode: samples from a distribution in which that of the cause was changed. Two
models that were fitted to the training distribution, A to B and B to A, adapt to the samples as
they come, and the regret of both (`mechanisms.meta_transfer`) trains the belief in either
direction, and the angle of an encoder that turns what is observed into A and B.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import Term
from compmod_jax.core.sharding import fetch
from compmod_jax.data import pipeline
from compmod_jax.data.drawn import DrawnDataset
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.mechanisms.meta_transfer import (
  Adaptation,
  Tables,
  fit_gaussians,
  fit_tables,
  gaussian_log_probability,
  online_log_likelihood,
  regret,
  rotation,
  table_log_probability,
)
from compmod_jax.models.base import ModelConfig
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

Direction = Literal["a_to_b", "b_to_a"]
_DIRECTIONS = ("a_to_b", "b_to_a")
_SPLITS = ("train", "valid", "test")
# Keep apart what is drawn from one seed: the distribution, its pairs, episodes.
_DISTRIBUTION, _PAIRS, _EPISODES = 0xD157, 0x9A12, 0xE915


# Data.


class Observed(NamedTuple):
  """Pairs of numbers as they are observed, two arrays of one shape."""

  x: np.ndarray
  y: np.ndarray


@dataclasses.dataclass(frozen=True)
class DiscretePairs:
  """A cause and an effect of a few values each; both tables, and every new distribution of the
  cause, are drawn from flat Dirichlet distributions."""

  values: int = 10
  """Values of each variable."""
  direction: Direction = "a_to_b"
  """Which one is the cause. The seed gives the same pairs either way, with A and B exchanged."""
  pairs: int = 10_000
  """Pairs of the training distribution, to which models are fitted."""
  seed: int = 0
  """Of the distribution and of all that is drawn from it."""

  def __post_init__(self):
    _check_data(self)
    errors.check(
      2 <= self.values <= 1000,
      f"task.data.values is {self.values}; a variable has at least 2 values, and tables hold at"
      " most 1000 x 1000.",
    )

  def splits(self) -> tuple[str, ...]:
    """Names of the splits."""
    return _SPLITS

  def training(self) -> Observed:
    """Pairs of the training distribution, [pairs]."""
    causes, effects = self._tables()
    draw = np.random.default_rng([self.seed, _PAIRS])
    joint = (causes[:, None] * effects).ravel()
    drawn = draw.choice(len(joint), self.pairs, p=joint / joint.sum())
    return self._observed(drawn // self.values, drawn % self.values)

  def episodes(self, draw: np.random.Generator, shape: tuple[int, int, int]) -> Observed:
    """Samples [episodes, steps, samples]; each episode has a distribution of the cause of its own.

    Args:
      draw: where random numbers come from.
      shape: episodes, steps, samples of a step.
    """
    _, effects = self._tables()
    changed = draw.dirichlet(np.ones(self.values), size=shape[0])
    cause = _inverse(np.cumsum(changed, axis=1)[:, None, None], draw.random(shape))
    effect = _inverse(np.cumsum(effects, axis=1)[cause], draw.random(shape))
    return self._observed(cause, effect)

  def describe(self) -> str:
    """What it holds, in a few words."""
    return f"pairs of variables with {self.values} values each"

  def _tables(self) -> tuple[np.ndarray, np.ndarray]:
    """P(cause) and P(effect | cause)."""
    draw = np.random.default_rng([self.seed, _DISTRIBUTION])
    flat = np.ones(self.values)
    return draw.dirichlet(flat), draw.dirichlet(flat, size=self.values)

  def _observed(self, cause: np.ndarray, effect: np.ndarray) -> Observed:
    pair = (cause, effect) if self.direction == "a_to_b" else (effect, cause)
    return Observed(*(column.astype(np.int32) for column in pair))


def _inverse(cumulative: np.ndarray, uniform: np.ndarray) -> np.ndarray:
  """The values at which cumulative distributions [..., values] pass these numbers."""
  return np.minimum((uniform[..., None] > cumulative).sum(axis=-1), cumulative.shape[-1] - 1)


@dataclasses.dataclass(frozen=True)
class RotatedPairs:
  """A real cause and an effect that is a function of it with noise, observed as turned by an angle.

  In training, the cause is standard normal; in an episode it is normal around a mean drawn evenly
  from -change to change. The effect has mean 0 and standard deviation 1 in training.
  """

  function: Literal["cubic", "linear"] = "cubic"
  """The effect's mean: a polynomial with coefficients drawn by the seed. With linear, the training
  distribution is Gaussian, and tells nothing about direction or angle."""
  direction: Direction = "a_to_b"
  """Which one is the cause."""
  angle: float | None = None
  """By which (A, B) is turned, in degrees; None: drawn from 0 to 180 by the seed."""
  noise: float = 1.0
  """Standard deviation of the noise before the effect is scaled; the function's is about 1 to 2."""
  change: float = 1.5
  """Largest change of the cause's mean in an episode."""
  spread: float = 0.5
  """Standard deviation of the cause within an episode."""
  pairs: int = 10_000
  """Pairs of the training distribution, to which models are fitted."""
  seed: int = 0
  """Of the distribution and of all that is drawn from it."""

  def __post_init__(self):
    _check_data(self)
    errors.check_choice("task.data.function", self.function, ("cubic", "linear"))
    for field in ("noise", "spread"):
      value = getattr(self, field)
      errors.check(value > 0, f"task.data.{field} is {value}; it must be positive.")
    errors.check(self.change >= 0, f"task.data.change is {self.change}; it must not be negative.")

  def splits(self) -> tuple[str, ...]:
    """Names of the splits."""
    return _SPLITS

  def training(self) -> Observed:
    """Pairs of the training distribution, [pairs]."""
    draw = np.random.default_rng([self.seed, _PAIRS])
    return self._observed(draw.normal(size=self.pairs), draw)

  def episodes(self, draw: np.random.Generator, shape: tuple[int, int, int]) -> Observed:
    """Samples [episodes, steps, samples]; each episode has a distribution of the cause of its own.

    Args:
      draw: where random numbers come from.
      shape: episodes, steps, samples of a step.
    """
    means = draw.uniform(-self.change, self.change, size=(shape[0], 1, 1))
    return self._observed(means + self.spread * draw.normal(size=shape), draw)

  def degrees(self) -> float:
    """The angle in degrees."""
    if self.angle is not None:
      return self.angle
    return float(np.random.default_rng([self.seed, _DISTRIBUTION]).uniform(0, 180))

  def describe(self) -> str:
    """What it holds, in a few words."""
    return f"pairs of real variables ({self.function}) turned by {self.degrees():.1f} degrees"

  def _coefficients(self) -> np.ndarray:
    """Of the powers 1 to 3."""
    draw = np.random.default_rng([self.seed, _DISTRIBUTION, 1])
    signs = draw.choice([-1.0, 1.0], size=2)
    if self.function == "linear":
      return np.array([signs[0] * draw.uniform(0.5, 1.5), 0, 0])
    return np.array(
      [draw.uniform(-1, 1), draw.uniform(-0.5, 0.5), signs[1] * draw.uniform(0.1, 0.3)]
    )

  def _observed(self, cause: np.ndarray, draw: np.random.Generator) -> Observed:
    one, two, three = self._coefficients()
    # Moments of a standard normal cause: 1, 3 and 15 of the powers 2, 4 and 6.
    variance = one**2 + 2 * two**2 + 15 * three**2 + 6 * one * three + self.noise**2
    effect = one * cause + two * cause**2 + three * cause**3 - two
    effect = (effect + self.noise * draw.normal(size=cause.shape)) / np.sqrt(variance)
    a, b = (cause, effect) if self.direction == "a_to_b" else (effect, cause)
    turn = np.deg2rad(self.degrees())
    x, y = np.cos(turn) * a - np.sin(turn) * b, np.sin(turn) * a + np.cos(turn) * b
    return Observed(x.astype(np.float32), y.astype(np.float32))


PairData = DiscretePairs | RotatedPairs


def _check_data(data: PairData) -> None:
  check_numbers(data, "task.data.")
  errors.check_choice("task.data.direction", data.direction, _DIRECTIONS)
  errors.check(
    data.pairs >= 100,
    f"task.data.pairs is {data.pairs}; models are fitted to at least 100 pairs. Give more.",
  )
  errors.check(data.seed >= 0, f"task.data.seed is {data.seed}; it must not be negative.")


def angle_error(data: RotatedPairs, degrees: float, a_to_b: bool) -> float:
  """How far an encoder's angle is from the valid one, in degrees from -90 to 90.

  There are two valid solutions: the angle of the data with the direction of the data, and, a right
  angle further, the cause in the other place with the other direction; half a turn more changes the
  signs of both variables and nothing else.

  Args:
    data: what is known.
    degrees: the angle that was found.
    a_to_b: the direction that was found, between what the encoder gives.
  """
  right = data.degrees() + (0 if a_to_b == (data.direction == "a_to_b") else 90)
  return (degrees - right + 90) % 180 - 90


# Model.


@dataclasses.dataclass(frozen=True)
class CausalDirectionConfig(ModelConfig):
  """A belief in either direction, the models that adapt, and an encoder in front of them."""

  family = "Direction"

  encoder: Literal["none", "rotation"] = "none"
  """What makes A and B of what is observed: nothing, or a rotation by a learned angle."""
  start_angle: float = 0.0
  """The rotation's angle before training, in degrees."""
  start_gamma: float = 0.0
  """Logit of the belief in A to B before training."""
  cause_rate: float = 0.3
  """Step size with which the distribution of the cause adapts."""
  effect_rate: float = 0.3
  """Step size with which the distribution of the effect given the cause adapts."""
  pseudocount: float = 1.0
  """Is added to the count of every pair where tables are fitted."""
  centres: int = 14
  """Radial basis functions of a real cause."""

  def __post_init__(self):
    check_numbers(self, "model.")
    errors.check_choice("model.encoder", self.encoder, ("none", "rotation"))
    for field in ("cause_rate", "effect_rate"):
      value = getattr(self, field)
      errors.check(value >= 0, f"model.{field} is {value}; it must not be negative.")
    errors.check(
      self.pseudocount > 0,
      f"model.pseudocount is {self.pseudocount}; it must be positive: a pair that was never seen"
      " would have the probability 0, and an episode with it no regret.",
    )
    errors.check(
      2 <= self.centres <= 1000, f"model.centres is {self.centres}; it must be from 2 to 1000."
    )

  def describe(self) -> str:
    """Sizes and mechanisms, in a few words."""
    encoder = " behind a rotation" if self.encoder == "rotation" else ""
    return f"two models, A to B and B to A{encoder}"

  def causal_direction(self) -> "CausalDirection":
    """See `ModelConfig`."""
    return CausalDirection(self)


class CausalDirection(nn.Module):
  """Online log likelihoods of episodes in both directions.

  Its parameters are `gamma`, logit of the belief that A causes B, and, with an encoder, `angle` in
  radians. All else is fitted to the training distribution, behind the encoder.
  """

  config: CausalDirectionConfig

  @nn.compact
  def __call__(
    self,
    x: Shaped[Array, "episodes time samples"],
    y: Shaped[Array, "episodes time samples"],
    training: Tables | tuple[Array, Array],
  ) -> Float[Array, "2 episodes time samples"]:
    """Log probability of every sample before its step, from A to B and from B to A.

    Args:
      x: of what is observed.
      y: of the same.
      training: tables in both directions, [2, ...]; or pairs of the training distribution, [pairs].
    """
    config = self.config
    gamma = nn.initializers.constant(config.start_gamma)
    self.param("gamma", gamma, ())
    turns = config.encoder == "rotation"
    start = nn.initializers.constant(np.deg2rad(config.start_angle))
    angle = self.param("angle", start, ()) if turns else jnp.zeros(())
    rates = (config.cause_rate, config.effect_rate)
    if isinstance(training, Tables):
      return _directions(lambda tables, *pair: _by_tables(tables, rates, *pair), training, x, y)

    def encoded(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
      points = rotation(jnp.stack([x, y], axis=-1), -angle)
      return points[..., 0], points[..., 1]

    first, second = training
    if turns:
      (x, y), (first, second) = encoded(x, y), encoded(first, second)
    both = jnp.stack([first, second]), jnp.stack([second, first])
    return _directions(
      lambda fitted, *pair: _by_gaussians(fitted, rates, config.centres, *pair), both, x, y
    )


def _directions(adapt: Any, fitted: Any, x: jax.Array, y: jax.Array) -> jax.Array:
  """Log probabilities in both directions, computed side by side and so in the same way."""
  causes, effects = jnp.stack([x, y]), jnp.stack([y, x])
  return jax.vmap(adapt)(fitted, causes, effects)


def _by_tables(
  tables: Tables, rates: tuple[float, float], causes: jax.Array, effects: jax.Array
) -> jax.Array:
  cause, effect = map(jnp.float32, rates)

  def episode(*samples: jax.Array) -> jax.Array:
    return online_log_likelihood(table_log_probability, tables, samples, Tables(cause, effect))

  return jax.vmap(episode)(causes, effects)


def _by_gaussians(
  training: tuple[jax.Array, jax.Array],
  rates: tuple[float, float],
  centres: int,
  causes: jax.Array,
  effects: jax.Array,
) -> jax.Array:
  fit = fit_gaussians(*training, centres)
  cause, effect = map(jnp.float32, rates)

  def log_probability(change: Adaptation, samples: tuple[jax.Array, jax.Array]) -> jax.Array:
    return gaussian_log_probability(fit, change, samples)

  def episode(*samples: jax.Array) -> jax.Array:
    rate = Adaptation(cause, cause, effect, effect)
    return online_log_likelihood(log_probability, Adaptation.none(centres), samples, rate)

  return jax.vmap(episode)(causes, effects)


# Task.


@dataclasses.dataclass(frozen=True)
class MetaTransferConfig:
  """The task of finding the cause by how fast models adapt."""

  data: PairData = DiscretePairs()
  """The distribution and how it changes."""
  steps: int = 20
  """Steps of adaptation in an episode."""
  samples: int = 1
  """Samples that each step is made on."""
  episodes: int = 16
  """Episodes of a global batch."""
  evaluation_episodes: int = 128
  """Episodes of each split that is scored."""

  def __post_init__(self):
    check_numbers(self, "task.")
    check_least(self, "task.", steps=1, samples=1, episodes=1, evaluation_episodes=1)

  @property
  def length(self) -> int:
    """Steps of an episode, by the name under which tools ask for the length of a row."""
    return self.steps

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "MetaTransfer":
    """The task, its models fitted to the training distribution.

    Args:
      model: one of two directions, such as a `CausalDirectionConfig`.
      files: nothing is in them.
      cache: not used.

    Raises:
      UserError: the model is another one, or its encoder does not fit the data.
    """
    module: CausalDirection = model.causal_direction()
    discrete = isinstance(self.data, DiscretePairs)
    errors.check(
      not (discrete and module.config.encoder == "rotation"),
      "model.encoder is 'rotation', but task.data has values that are numbered and cannot be"
      " turned. Set model.encoder to 'none', or task.data to RotatedPairs.",
    )
    dataset = Episodes(self)
    return MetaTransfer(
      dataset=dataset,
      model=DirectionModel(module, _fitted(dataset.training, self.data, module.config)),
      objective=Regret(),
      evaluators=(DirectionScores(),),
      generator=NoSearch(),
    )

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return f"Causal direction by {model.describe()}, of {self.data.describe()}."


def _fitted(
  training: Observed, data: PairData, model: CausalDirectionConfig
) -> Tables | tuple[jax.Array, jax.Array]:
  """What `CausalDirection` is given besides episodes."""
  if not isinstance(data, DiscretePairs):
    return jnp.asarray(training.x), jnp.asarray(training.y)
  counts = np.zeros((data.values, data.values))
  np.add.at(counts, tuple(training), 1)
  both = jnp.stack([jnp.asarray(one, jnp.float32) for one in (counts, counts.T)])
  return jax.vmap(lambda one: fit_tables(one, model.pseudocount))(both)


class Episodes(DrawnDataset[MetaTransferConfig]):
  """Episodes of samples, drawn when they are needed; a training epoch is 100 batches.

  Batches have the columns `x` and `y` [episodes, steps, samples] and `index` [episodes].

  Attributes:
    training: pairs of the training distribution.
  """

  drawn = "episodes"
  no_parts = "episodes are drawn without end and have no parts"

  def __init__(self, config: MetaTransferConfig):
    self.config = config
    self.training = config.data.training()

  def batch(self, draw: np.random.Generator, episodes: int, rows: int) -> pipeline.Batch:
    """These many episodes, and filler rows below them."""
    config = self.config
    drawn = config.data.episodes(draw, (episodes, config.steps, config.samples))
    index = np.arange(episodes, dtype=np.int32)
    return pipeline.filled({"x": drawn.x, "y": drawn.y, "index": index}, rows)

  def notes(self) -> list[str]:
    """A sentence on the training distribution."""
    return [f"models are fitted to {self.config.data.pairs:,} pairs of the training distribution"]

  def fingerprints(self) -> Fingerprints:
    """What identifies the training distribution, from which all else follows."""
    return {"pairs": fingerprint(len(self.training.x), "pairs", self.training)}

  @property
  def batch_rows(self) -> int:
    """Episodes of a batch."""
    return self.config.episodes

  def seeds(self, seed: int) -> tuple[int, ...]:
    """That of the distribution, too."""
    return (self.config.data.seed, _EPISODES, seed)

  def draw(self, random: np.random.Generator, rows: int) -> pipeline.Batch:
    """Episodes without filler."""
    return self.batch(random, rows, rows)

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """One batch with all episodes of a split, always the same."""
    errors.check_choice("split", split, self.splits())
    count = self.config.evaluation_episodes
    draw = np.random.default_rng([self.config.data.seed, _EPISODES, *split.encode()])
    yield self.batch(draw, count, count + -count % multiple)

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes."""
    shape = (1, self.config.steps, self.config.samples)
    kind = self.training.x.dtype
    zeros = jnp.zeros(shape, kind)
    return {"x": zeros, "y": zeros, "index": jnp.zeros(1, jnp.int32)}

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    config = self.config
    size = f"{config.steps} steps on {config.samples} samples"
    return f"batches of {config.episodes} episodes, each {size}"


@dataclasses.dataclass(frozen=True, eq=False)
class DirectionModel(TaskModel[CausalDirection]):
  """The two models on episodes.

  Attributes:
    training: what they are fitted to; see `CausalDirection`.
  """

  training: Tables | tuple[jax.Array, jax.Array]

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters: the configuration's, whatever the key."""
    one = jnp.zeros((1, 1, 1), jnp.int32 if isinstance(self.training, Tables) else jnp.float32)
    return self.module.init(rng, one, one, self.training)["params"]

  def log_likelihoods(
    self, params: Params, batch: Batch
  ) -> Float[Array, "2 episodes time samples"]:
    """See `CausalDirection`."""
    found: Any = self.module.apply({"params": params}, batch["x"], batch["y"], self.training)
    return found

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Log probabilities of the samples in both directions, [episodes, time * samples, 2]."""
    found = self.log_likelihoods(params, batch)
    return jnp.moveaxis(found.reshape(*found.shape[:2], -1), 0, -1)

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Everywhere: episodes are of one length."""
    real = batch["index"] >= 0
    size = batch["x"].shape[1] * batch["x"].shape[2]
    return jnp.broadcast_to(real[:, None], (len(real), size))


@dataclasses.dataclass(frozen=True)
class Regret:
  """The regret in nats an episode; see `mechanisms.meta_transfer.regret`."""

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"regret": 1.0}

  def __call__(
    self, model: DirectionModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    regrets, ratios, real = episode_regrets(model, params, batch)
    count = jnp.sum(real)
    one = jnp.float32(1)
    metrics = {
      "direction/gamma": (params["gamma"], one),
      "direction/belief": (jax.nn.sigmoid(params["gamma"]), one),
      "direction/log_ratio": (jnp.sum(ratios * real), count),
    }
    if "angle" in params:
      metrics["direction/angle"] = (jnp.rad2deg(params["angle"]), one)
    return {"regret": Term(jnp.sum(regrets * real), count)}, carry, metrics


def episode_regrets(
  model: DirectionModel, params: Params, batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Regret and ln L(A to B) - ln L(B to A) of every episode, and 1 where there is one, [rows]."""
  forth, back = jnp.sum(model.log_likelihoods(params, batch), axis=(2, 3))
  real = (batch["index"] >= 0).astype(jnp.float32)
  return regret(params["gamma"], forth, back), forth - back, real


def _sums(model: DirectionModel, params: Params, batch: Batch) -> jax.Array:
  """Sums over episodes of 1, the regret, the log ratio, and whether that is positive."""
  regrets, ratios, real = episode_regrets(model, params, batch)
  columns = [jnp.ones_like(ratios), regrets, ratios, ratios > 0]
  return jnp.stack([jnp.sum(column * real) for column in columns])


@dataclasses.dataclass(frozen=True)
class DirectionScores:
  """Regret, direction and angle on a split; `right` is 1 where the direction is that of the data.

  With an encoder both directions can be right; then it is `angle_error`, in degrees, that counts.
  """

  metric: str = "transfer/regret_loss"
  units: str = (
    "Transfer: regret_loss, in nats an episode; belief that A causes B; log_ratio: mean of"
    " ln L(A to B) - ln L(B to A) of an episode; a_to_b_faster: share of episodes in which it is"
    " positive; right: whether the direction is that of the data; angle and angle_error: in"
    " degrees, the second from the nearest valid solution."
  )

  def __call__(self, scoring: Scoring["MetaTransfer"]) -> Iterator[tuple[str, float]]:
    """See `Evaluator`."""
    count, regrets, ratios, faster = scoring.sums(_sums)
    params, data = scoring.params, scoring.task.dataset.config.data
    gamma = float(fetch(params["gamma"]))
    yield self.metric, regrets / count
    yield "transfer/gamma", gamma
    yield "transfer/belief", float(1 / (1 + np.exp(-gamma)))
    yield "transfer/log_ratio", ratios / count
    yield "transfer/a_to_b_faster", faster / count
    if isinstance(data, RotatedPairs) and "angle" in params:
      degrees = float(np.rad2deg(fetch(params["angle"])))
      yield "transfer/angle", degrees
      yield "transfer/angle_error", angle_error(data, degrees, gamma > 0)
    else:
      yield "transfer/right", float((gamma > 0) == (data.direction == "a_to_b"))


@dataclasses.dataclass(frozen=True)
class FoundDirection(TrainedModel[Any]):
  """A trained belief in a direction; made by `compmod_jax.load`."""

  task: "MetaTransfer"

  @property
  def belief(self) -> float:
    """That A causes B, from 0 to 1."""
    return float(jax.nn.sigmoid(self.params["gamma"]))

  @property
  def degrees(self) -> float | None:
    """The angle of the encoder; None without one."""
    return float(np.rad2deg(self.params["angle"])) if "angle" in self.params else None

  def adapt(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Log probability of every sample before the step on it, A to B and B to A.

    Args:
      x: of what is observed, [episodes, steps, samples]; numbers of values from 0 where these are
        discrete.
      y: of the same.

    Returns:
      [2, episodes, steps, samples], in nats.

    Raises:
      UserError: the two have other shapes, or are no numbers of values.
    """
    x, y = np.asarray(x), np.asarray(y)
    errors.check(
      x.ndim == 3 and x.shape == y.shape,
      f"x has the shape {x.shape} and y {y.shape}; both must be [episodes, steps, samples].",
    )
    training = self.task.model.training
    if isinstance(training, Tables):
      values = training.cause.shape[-1]
      for name, given in (("x", x), ("y", y)):
        errors.check(
          given.dtype.kind in "iu" and given.min() >= 0 and given.max() < values,
          f"{name} has the type {given.dtype} and values from {given.min()} to {given.max()}; give"
          f" whole numbers from 0 to {values - 1}.",
        )
    return np.asarray(self.task.model.jit(log_likelihoods)(self.params, {"x": x, "y": y}))

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    raise errors.UserError("The model reads numbers and has no activations to look at.")

  def _read(self, texts: Any, names: tuple[str, ...] | None) -> Any:
    raise errors.UserError("The model reads numbers and no texts; use `adapt`.")


def log_likelihoods(model: DirectionModel, params: Params, batch: Batch) -> jax.Array:
  """See `DirectionModel.log_likelihoods`; a function that `TaskModel.jit` compiles."""
  return model.log_likelihoods(params, batch)


class MetaTransfer(Task[Episodes, DirectionModel, NoSearch]):
  """The task of finding the cause; made by `MetaTransferConfig.build`."""

  opened_as = FoundDirection
