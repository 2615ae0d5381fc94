"""Experts that learn to invert transformations of images, without ever being told which is which.

Training has two phases: for `pretraining_steps` batches experts learn the identity on transformed
images; then they compete under a discriminator (`mechanisms.competing_experts`). Both losses are
terms of one objective whose gradients do not mix, and each group of parameters, `experts` and
`discriminator`, has an optimizer of its own.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
from compmod_jax.data.transformed_digits import TRANSFORMATIONS, Halves, TransformedDigits
from compmod_jax.mechanisms.competing_experts import (
  assignment,
  balance_loss,
  compete,
  identity_error,
  of_winners,
  owners,
  winners,
)
from compmod_jax.models.base import ModelConfig
from compmod_jax.models.competing_experts import CompetingExperts
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

_BATCHES, _SCORED = 0xE4B7, 0x5C0E  # keep draws of the same seed apart
_ROWS = 100  # of a batch that is scored
_COUNT = len(TRANSFORMATIONS)


# Data.


@dataclasses.dataclass(frozen=True)
class ImageExpertsConfig:
  """The task of inverting transformations by experts that compete."""

  data: TransformedDigits = TransformedDigits()
  """Images and their transformations."""
  pretraining_steps: int = 300
  """Batches, from the first, in which experts learn the identity and do not compete."""
  balance: bool = False
  """Whether every expert has a bias in the competition, which moves until all win as often."""
  rows: int = 32
  """Transformed images of a global batch, and as many untransformed ones."""

  def __post_init__(self):
    check_numbers(self, "task.")
    check_least(self, "task.", pretraining_steps=0, rows=1)

  @property
  def length(self) -> int:
    """Pixels of a side, by the name under which tools ask for the length of a row."""
    return self.data.size

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "ImageExperts":
    """The task.

    Args:
      model: one with experts of images, such as a `CompetingExpertsConfig`.
      files: nothing is in them.
      cache: not used.

    Raises:
      UserError: the model is another one.
    """
    return ImageExperts(
      dataset=TransformedImages(self),
      model=ImageExpertsModel(model.image_experts(), self.data.size, self.balance),
      objective=CompetitionLoss(self.pretraining_steps, self.balance),
      evaluators=(ExpertScores(),),
      generator=NoSearch(),
    )

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return f"{self.data.describe().capitalize()}, inverted by {model.describe()}."


class TransformedImages(DrawnDataset[ImageExpertsConfig]):
  """Images of one half, transformed, beside untransformed ones of the other.

  A batch has the columns `transformed` and `originals` [rows, height, width] and `index` [rows]. To
  be scored, every image of a split's hidden half is shown under every transformation, with the
  columns `untransformed` [rows, height, width] and `transformation` [rows], which training lacks.
  A training epoch is as many batches as show as many images as there are.
  """

  drawn = "transformed images"
  no_parts = "the images are already parted into those that are transformed and those that are not"

  def __init__(self, config: ImageExpertsConfig):
    self.config = config
    self._loaded: dict[str, Halves] = {}

  def halves(self, split: str) -> Halves:
    """The images of a split; loaded once."""
    if split not in self._loaded:
      self._loaded[split] = self.config.data.load(split)
    return self._loaded[split]

  def check(self) -> None:
    """Loads all splits."""
    for split in self.splits():
      self.halves(split)

  def notes(self) -> list[str]:
    """How many images there are."""
    found = self.halves("train")
    return [
      f"{len(found.originals):,} images are shown as they are, {len(found.hidden):,} others under"
      f" {_COUNT} transformations"
    ]

  def fingerprints(self) -> Fingerprints:
    """What identifies the training images."""
    found = self.halves("train")
    return {"images": fingerprint(sum(map(len, found)), "images", map(np.ravel, found))}

  @property
  def batch_rows(self) -> int:
    """Transformed images of a batch."""
    return self.config.rows

  def seeds(self, seed: int) -> tuple[int, ...]:
    """That of the data, too."""
    return (self.config.data.seed, _BATCHES, seed)

  def epoch(self, rows: int) -> int:
    """Batches that show as many images as there are."""
    return max(1, len(self.halves("train").hidden) // rows)

  def draw(self, random: np.random.Generator, rows: int) -> pipeline.Batch:
    """Images of one half under transformations, beside images of the other."""
    data, halves = self.config.data, self.halves("train")
    hidden = random.integers(len(halves.hidden), size=rows)
    shown = random.integers(len(halves.originals), size=rows)
    numbers = random.integers(_COUNT, size=rows)
    return {
      "transformed": data.transformed(halves.hidden[hidden], numbers, random).astype(np.float32),
      "originals": halves.originals[shown].astype(np.float32),
      "index": hidden.astype(np.int32),
    }

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Every image of the hidden half under every transformation, always with the same noise."""
    errors.check_choice("split", split, self.splits())
    data, halves = self.config.data, self.halves(split)
    draw = np.random.default_rng([data.seed, _SCORED, *split.encode()])
    image = np.repeat(np.arange(len(halves.hidden)), _COUNT)
    number = np.tile(np.arange(_COUNT), len(halves.hidden))
    size = pipeline.rows_of_batch(_ROWS, multiple)
    for start in range(0, len(image), size):
      part = slice(start, start + size)
      hidden = halves.hidden[image[part]].astype(np.float32)
      index = np.arange(start, start + len(hidden), dtype=np.int32)
      shown = {
        "transformed": data.transformed(hidden, number[part], draw).astype(np.float32),
        "originals": halves.originals[image[part] % len(halves.originals)].astype(np.float32),
        "untransformed": hidden,
        "transformation": number[part].astype(np.int32),
        "index": index,
      }
      yield pipeline.filled(shown, size)

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes."""
    images = jnp.zeros((1, self.config.data.size, self.config.data.size))
    return {"transformed": images, "originals": images, "index": jnp.zeros(1, jnp.int32)}

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    return f"batches of {self.config.rows} transformed images and as many others"


# Model, objective, scores.


@dataclasses.dataclass(frozen=True, eq=False)
class ImageExpertsModel(TaskModel[CompetingExperts]):
  """Experts and discriminator.

  Attributes:
    size: pixels of a side of an image.
    balance: whether experts have biases in the competition, the parameter `bias` [experts].
  """

  size: int
  balance: bool = False

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters."""
    params = self.module.init(rng, jnp.zeros((1, self.size, self.size)))["params"]
    if self.balance:
      return {**params, "bias": jnp.zeros(self.module.config.experts)}
    return params

  def experts(self, params: Params, images: jax.Array) -> jax.Array:
    """See `CompetingExperts.transform`; the parameters are those of the experts alone."""
    made: Any = self.module.apply({"params": {"experts": params}}, images, method="transform")
    return made

  def discriminator(self, params: Params, images: jax.Array) -> jax.Array:
    """See `CompetingExperts.score`; the parameters are those of the discriminator alone."""
    found: Any = self.module.apply({"params": {"discriminator": params}}, images, method="score")
    return found

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """The score of every expert for its output, [rows, 1, experts]."""
    return outputs_and_scores(self, params, batch["transformed"])[1].T[:, None]

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Rows that hold an image, bool [rows, 1]."""
    return (jnp.asarray(batch["index"]) >= 0)[:, None]


@dataclasses.dataclass(frozen=True)
class CompetitionLoss:
  """The identity at first; then the losses of winners and of the discriminator, in nats an image.

  Attributes:
    pretraining_steps: batches of the first.
    balance: whether biases learn from wins.
  """

  pretraining_steps: int
  balance: bool = False

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Terms, of which the first or the others count at a step."""
    terms = ("identity", "experts", "discriminator", *(("balance",) if self.balance else ()))
    return dict.fromkeys(terms, 1.0)

  def __call__(
    self,
    model: ImageExpertsModel,
    params: Params,
    carry: Carry,
    batch: Batch,
    context: StepContext,
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    real = (batch["index"] >= 0).astype(jnp.float32)
    found = jax.lax.cond(
      context.step < self.pretraining_steps,
      lambda params: _identity(model, params, batch["transformed"], real),
      lambda params: _competition(model, params, batch, real),
      params,
    )
    count = jnp.sum(real)
    terms = {
      "identity": Term(found.identity, count),
      "experts": Term(found.experts, count),
      "discriminator": Term(found.discriminator, count),
    }
    if self.balance:
      terms["balance"] = Term(found.balance, count)
    metrics = {
      "experts/score_originals": (found.score_originals, count),
      "experts/score_winners": (found.score_winners, count),
      **{f"experts/won_{i}": (won, count) for i, won in enumerate(found.won)},
    }
    return terms, carry, jax.lax.stop_gradient(metrics)


class _Sums(NamedTuple):
  """Sums over a batch: of losses, of probabilities of being untransformed, and of wins."""

  identity: jax.Array
  experts: jax.Array
  discriminator: jax.Array
  balance: jax.Array
  score_originals: jax.Array
  score_winners: jax.Array
  won: jax.Array


def _identity(
  model: ImageExpertsModel, params: Params, images: jax.Array, real: jax.Array
) -> _Sums:
  none = jnp.zeros(())
  # The sum over experts: each has the gradient that it would have alone.
  wrong = jnp.sum(identity_error(model.experts(params["experts"], images), images), axis=0)
  nobody = jnp.zeros(model.module.config.experts)
  return _Sums(jnp.sum(real * wrong), none, none, none, none, none, nobody)


def _competition(model: ImageExpertsModel, params: Params, batch: Batch, real: jax.Array) -> _Sums:
  bias = params.get("bias", jnp.zeros(model.module.config.experts))
  found = compete(
    model.experts,
    model.discriminator,
    (params["experts"], params["discriminator"]),
    batch["transformed"],
    batch["originals"],
    bias,
  )
  against = found.discriminator_loss_original + found.discriminator_loss_output
  won = jax.nn.one_hot(found.winner, len(found.scores), axis=0) @ real
  return _Sums(
    identity=jnp.zeros(()),
    experts=jnp.sum(real * found.expert_loss),
    discriminator=jnp.sum(real * against),
    balance=jnp.sum(balance_loss(bias, found.winner, real)),
    # The loss is -ln D.
    score_originals=jnp.sum(real * jnp.exp(-found.discriminator_loss_original)),
    score_winners=jnp.sum(real * jax.nn.sigmoid(jnp.max(found.scores, axis=0))),
    won=won,
  )


def won_and_restored(
  model: ImageExpertsModel, params: Params, batch: Batch
) -> Float[Array, "transformations columns"]:
  """Sums over the images of every transformation, for `TaskModel.jit`.

  Returns:
    A row a transformation: wins of every expert; then the mean squared difference of the winner's
    output, and of the transformed image, from the untransformed one.
  """
  outputs, scores = outputs_and_scores(model, params, batch["transformed"])
  winner, numbers = winners(scores), jnp.asarray(batch["transformation"])
  real = (batch["index"] >= 0).astype(jnp.float32)
  restored = identity_error(of_winners(outputs, winner)[None], batch["untransformed"])[0]
  before = identity_error(batch["transformed"][None], batch["untransformed"])[0]
  shape = (_COUNT, len(scores))
  errors_of = (
    jnp.zeros((_COUNT, 2)).at[numbers].add(real[:, None] * jnp.stack([restored, before], 1))
  )
  return jnp.concatenate([assignment(winner, numbers, shape, real), errors_of], axis=1)


@dataclasses.dataclass(frozen=True)
class ExpertScores:
  """Which expert took which transformation, and how well winners restore images."""

  metric: str = "experts/restored_loss"
  units: str = (
    "Experts: restored_loss, mean squared difference between the winner's output and the"
    " untransformed image; transformed_loss: that of the transformed image; specialised: number of"
    " transformations with an expert of their own, which wins more than half of its images and of"
    " no other transformation's; all_specialised: 1 if that is all of them, else 0; share: of"
    " images that the most frequent winner of their transformation wins; idle: experts that win"
    " less than one image in a hundred."
  )

  def __call__(self, scoring: Scoring["ImageExperts"]) -> Iterator[tuple[str, float]]:
    """See `Evaluator`."""
    sums = np.asarray(scoring.sums(won_and_restored))
    counts, (restored, before) = sums[:, :-2], sums[:, -2:].T
    images = np.maximum(counts.sum(axis=1), 1)
    total = images.sum()
    yield self.metric, float(restored.sum() / total)
    yield "experts/transformed_loss", float(before.sum() / total)
    specialised = int((owners(counts) >= 0).sum())
    yield "experts/specialised", float(specialised)
    yield "experts/all_specialised", float(specialised == len(counts))
    yield "experts/share", float(counts.max(axis=1).sum() / total)
    yield "experts/idle", float((counts.sum(axis=0) < 0.01 * total).sum())


@dataclasses.dataclass(frozen=True)
class TrainedExperts(TrainedModel[Any]):
  """Trained experts; made by `compmod_jax.load`."""

  task: "ImageExperts"

  def transform(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What every expert makes of images, and the logit that each output is untransformed.

    Args:
      images: between 0 and 1, [images, height, width], of the size that the model was trained on.

    Returns:
      [experts, images, height, width] and [experts, images]; the winner has the largest logit.
    """
    images, size = np.asarray(images, np.float32), self.task.model.size
    errors.check(
      images.ndim == 3 and images.shape[1:] == (size, size),
      f"images has the shape {images.shape}; it must be [images, {size}, {size}].",
    )
    outputs, scores = self.task.model.jit(outputs_and_scores)(self.params, images)
    return np.asarray(outputs), np.asarray(scores)

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    raise errors.UserError("The model reads images and has no named activations to look at.")

  def _read(self, texts: Any, names: tuple[str, ...] | None) -> Any:
    raise errors.UserError("The model reads images and no texts; use `transform`.")


def outputs_and_scores(
  model: ImageExpertsModel, params: Params, images: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """See `CompetingExperts.__call__`; a function that `TaskModel.jit` compiles."""
  found: Any = model.module.apply({"params": params}, images)
  return found


class ImageExperts(Task[TransformedImages, ImageExpertsModel, NoSearch]):
  """The task of inverting transformations; made by `ImageExpertsConfig.build`."""

  opened_as = TrainedExperts
