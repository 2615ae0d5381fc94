"""Few-shot classification of texts: an encoder's features, and a method that learns an episode.

An example is the mean over its tokens of the encoder's last layer. With `FineTune` training is
masked language modelling on the examples without their classes, and evaluation fine-tunes on every
support; the encoder that it gives is what other methods start from (`Experiment.start`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import Term, cross_entropy
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.data.corruption import Masked, MaskingConfig, mask_tokens
from compmod_jax.data.episodes import flat, split_episode
from compmod_jax.data.text_classes import QuestionsBySet, SentenceData, TextEpisodes, TextLines
from compmod_jax.data.text_tokenizer import FILE
from compmod_jax.data.tokenizers import (
  Tokenizer,
  TokenizerConfig,
  cached_tokenizer,
  tokenizer_from_bytes,
)
from compmod_jax.data.tokenizers.vocabulary import MASK
from compmod_jax.mechanisms.competition.losses import objective as router_losses
from compmod_jax.models.base import Encoder, ModelConfig, valid_at
from compmod_jax.tasks.base import (
  Batch,
  Carry,
  Metrics,
  NoSearch,
  Objective,
  Params,
  Scoring,
  StepContext,
  Task,
  Terms,
)
from compmod_jax.tasks.few_shot import (
  EpisodeLoss,
  EpisodeModel,
  EpisodeScores,
  over_episodes,
  probabilities,
  query_sums,
)
from compmod_jax.tasks.few_shot_methods import (
  FineTune,
  Leopard,
  Method,
  by_class,
  check_shots,
  tuned,
)
from compmod_jax.tasks.objectives import Mixture, Share
from compmod_jax.trained import Axis, TrainedModel

_HEAD = "classes"  # the softmax layer of methods that have one
# Keeps the masks apart from dropout, which is drawn from the same key.
_STREAM = 0x3A5D


@dataclasses.dataclass(frozen=True)
class FewShotTextConfig:
  """A few-shot classification task on texts: classes, episodes and the method."""

  data: SentenceData | QuestionsBySet | TextLines = SentenceData()
  """Where texts come from."""
  tokenizer: TokenizerConfig = TokenizerConfig(vocab_size=1200)
  """The tokenizer, trained on the texts of meta-training; the token <mask> is added to its special
  tokens. A run that starts from a trained model takes that one's."""
  length: int = 24
  """Tokens of a text, its start and end included; what is longer is cut."""
  episodes: ClassEpisodeConfig = ClassEpisodeConfig(ways=2, shots=8, queries=8, batch=8)
  """What an episode holds."""
  method: Method = Leopard()
  """How classes are learned within an episode."""
  mixed_ways: tuple[int, ...] = ()
  """Numbers of classes of training episodes, batch by batch in turn, where the method can have
  others; none: as many as scored."""
  also_ways: tuple[int, ...] = ()
  """Further numbers of classes that are scored, where the method can have them."""
  also_shots: tuple[int, ...] = ()
  """Further numbers of examples of a class that are scored."""
  masking: MaskingConfig = MaskingConfig()
  """Which tokens are predicted, where masked language modelling is trained."""
  masked: float = 0.0
  """Weight of masked language modelling on the same texts beside the episodes; 0 for none. With
  `FineTune` it is all that is trained."""
  evaluate_episodes: int = 600
  """Episodes on which a split is scored; fewer in training, see `evaluate_sentences`."""
  tasks_at_once: int = 0
  """Episodes of a batch that are computed together (`vmap`), one such group after the other; 0 for
  all."""
  small_share: float = 0.07
  """Share of the training classes in the small part, for phases that train on a part."""

  quarter_turns = False

  def __post_init__(self):
    check_least(self, "task.", length=3, evaluate_episodes=2, tasks_at_once=0)
    errors.check(self.masked >= 0, f"task.masked is {self.masked}; it must not be negative.")
    errors.check(
      all(ways >= 2 for ways in (*self.mixed_ways, *self.also_ways)),
      f"task.mixed_ways is {self.mixed_ways} and task.also_ways {self.also_ways}; an episode has 2"
      " classes at least.",
    )
    fixed = self.method.outputs(self.episodes.ways)
    other = [ways for ways in (*self.mixed_ways, *self.also_ways) if ways != fixed]
    errors.check(
      not (fixed and other),
      f"task.mixed_ways or task.also_ways asks for {other} classes, but the head of"
      f" {self.method.describe()} has {fixed}, as task.episodes.ways says. Leave them out, or set"
      " another task.method.",
    )
    for config in self.scored():
      check_shots(self.method, config.shots)

  @property
  def train_ways(self) -> int:
    """Most classes of a training episode."""
    return max(self.mixed_ways, default=0)

  @property
  def batch_tokens(self) -> int:
    """Tokens of a batch of training, padding included."""
    return self.episodes.batch * self.episodes.rows * self.length

  def scored(self) -> list[ClassEpisodeConfig]:
    """What the episodes hold that are scored, the main ones first."""
    own = self.episodes
    return [
      own,
      *(dataclasses.replace(own, ways=ways) for ways in self.also_ways),
      *(dataclasses.replace(own, shots=shots) for shots in self.also_shots),
    ]

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "FewShotText":
    """The task with its tokenizer: the one in `files`, else trained on meta-training's texts.

    Args:
      model: the configuration of an encoder.
      files: what `TextEpisodes.files` returned.
      cache: folder in which trained tokenizers are kept.

    Raises:
      UserError: the model is of another kind or does not fit, data are missing, or `files` lacks
        the tokenizer.
    """
    model.encoder(1, 0)  # a model of another kind is refused before the tokenizer is trained
    errors.check(
      not router_losses(model.routers()) and not model.training_edits(),
      "model has routers with losses of their own, or changes of activations in training, which"
      " training on episodes does not compute. Set their weights to 0, or let nothing compete.",
    )
    errors.check(
      self.length <= model.max_length,
      f"task.length is {self.length} but model.max_length is {model.max_length}; every token"
      " needs a position. Raise model.max_length.",
    )
    tokenizer = self.make_tokenizer(files, cache)
    errors.check(
      tokenizer.mask is not None,
      "The tokenizer has no token <mask>; start from a masked language model.",
    )
    dataset = TextEpisodes(self, tokenizer)
    module = model.encoder(tokenizer.vocab_size, tokenizer.pad)
    errors.check(
      hasattr(module, "encode"),
      f"model is a {type(model).__name__}, whose module gives no features. Set an EncoderConfig.",
    )
    task = FewShotText(
      dataset=dataset,
      model=FewShotTextModel(
        module,
        self.method,
        tokenizer.pad,
        self.length,
        self.method.outputs(self.episodes.ways),
      ),
      objective=self._objective(dataset),
      evaluators=tuple(self._evaluators()),
      generator=ClassifyTexts(dataset.tokens),
    )
    _ = task.shapes  # raises for a pattern of no parameter
    return task

  def _objective(self, dataset: "TextEpisodes[FewShotTextConfig]") -> Objective:
    """Episodes, masked tokens, or both."""
    tokenizer = dataset.tokenizer
    ordinary = np.ones(tokenizer.vocab_size, bool)
    ordinary[list(tokenizer.controls)] = False
    assert tokenizer.mask is not None
    masked = MaskedTexts(
      functools.partial(mask_tokens, ordinary=ordinary, mask=tokenizer.mask, config=self.masking)
    )
    if isinstance(self.method, FineTune):
      return masked
    episodes = EpisodeLoss(dataset.trained, self.tasks_at_once)
    if not self.masked:
      return episodes
    return Mixture({"episodes": Share(episodes), "masked": Share(masked, self.masked)})

  def _evaluators(self) -> Iterator[EpisodeScores]:
    kind = FineTunedScores if tuned(self.method) else EpisodeScores
    own = self.episodes
    for config in self.scored():
      ways = f"{config.ways}_way/" if config.ways != own.ways else ""
      shots = f"{config.shots}_shot/" if config.shots != own.shots else ""
      yield kind(config, self.evaluate_episodes, self.tasks_at_once, ways + shots)

  @property
  def tokenizer_with_mask(self) -> TokenizerConfig:
    """How the tokenizer is trained: with the token <mask>."""
    tokens = self.tokenizer.special_tokens
    if MASK in tokens:
      return self.tokenizer
    return dataclasses.replace(self.tokenizer, special_tokens=(MASK, *tokens))

  def make_tokenizer(
    self, files: Mapping[str, bytes] | None = None, cache: Path | None = None
  ) -> Tokenizer:
    """The tokenizer in `files`, else one that is trained on the texts of meta-training."""
    config = self.tokenizer_with_mask
    if files is not None:
      errors.check(FILE in files, f"{FILE} is missing among the saved files; restore the folder.")
      return tokenizer_from_bytes(files[FILE], config)
    texts = dict.fromkeys(map(str, self.data.load("train").inputs))
    return cached_tokenizer(texts, config, cache)

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return (
      f"{self.episodes.ways}-way {self.episodes.shots}-shot classification by"
      f" {self.method.describe()}; encoder of {model.describe()}; {self.data.describe()}."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FewShotTextModel(EpisodeModel[Encoder]):
  """An encoder of texts, and the method by which it learns an episode.

  Attributes:
    pad: the token that marks padding.
    length: tokens of a text.
    outputs: classes of the softmax layer `classes`; 0 for none, the result is then the features.
  """

  pad: int
  length: int
  outputs: int

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, those of the method among them."""
    inputs = jnp.full((2, self.length), self.pad + 1, jnp.int32)
    params = dict(self.module.init(rng, inputs)["params"])
    if self.outputs:
      plain = nn.unbox(params)
      dim = jax.eval_shape(self._features, plain, inputs).shape[1]
      kernel = 0.01 * jax.random.normal(jax.random.fold_in(rng, 2), (dim, self.outputs))
      params[_HEAD] = {"kernel": kernel, "bias": jnp.zeros(self.outputs)}
    return self.with_method(params, inputs, jax.random.fold_in(rng, 1))

  def _features(
    self, params: Params, tokens: jax.Array, intermediates: Intermediates = OFF
  ) -> jax.Array:
    """Means over the tokens of the encoder's last layer, [rows, dim]."""
    found = self.module.apply(
      {"params": {k: x for k, x in self.without_method(params).items() if k != _HEAD}},
      tokens,
      method="encode",
      intermediates=intermediates,
    )
    real = (tokens != self.pad)[..., None].astype(found.dtype)
    means = jnp.sum(found * real, axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1)
    return intermediates("features", means.astype(jnp.float32))

  def embed(
    self, params: Params, inputs: jax.Array, intermediates: Intermediates = OFF
  ) -> jax.Array:
    """Logits or features, [rows, dim]; without dropout."""
    intermediates = intermediates.editing(
      self.edits, lambda site: self._holds(site, inputs, jnp.ones(len(inputs), bool))
    )
    features = self._features(params, inputs, intermediates)
    if not self.outputs:
      return features
    head = params[_HEAD]
    return intermediates("logits", features @ head["kernel"] + head["bias"][None])

  def masked_logits(
    self,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits of the tokens that belong at positions, [rows, predicted, vocab]."""
    return self.module.apply(
      {"params": {k: x for k, x in self.without_method(params).items() if k != _HEAD}},
      tokens,
      positions=positions,
      deterministic=rng is None,
      intermediates=intermediates.editing(
        self.edits, lambda site: self._masked_site(site, tokens, positions)
      ),
      rngs=None if rng is None else {"dropout": rng},
    )

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits or features before adaptation, as of one position: [rows, 1, dim]."""
    return self.embed(params, batch["inputs"], intermediates)[:, None]

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Positions that hold real tokens; `features` and `logits` have one position a row."""
    return self._holds(site, batch["inputs"], jnp.asarray(batch["index"]) >= 0)

  def _holds(self, site: str, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    if site in ("features", "logits"):
      return rows[:, None]
    return valid_at(self.config, site, (jnp.asarray(tokens) != self.pad) & rows[:, None])

  def _masked_site(self, site: str, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return valid_at(self.config, site, tokens != self.pad, positions)

  def start_tokens(self, site: str) -> int:
    """One: every text begins with the start token."""
    return 0 if site in ("features", "logits") else 1


@dataclasses.dataclass(frozen=True)
class MaskedTexts:
  """Cross-entropy in nats per masked token of the texts of episodes, whose classes do not matter.

  Attributes:
    mask: from a key, tokens and their rows' numbers to masked tokens.
  """

  mask: Callable[[jax.Array, jax.Array, jax.Array], Masked]

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"cross_entropy": 1.0}

  def __call__(
    self,
    model: FewShotTextModel,
    params: Params,
    carry: Carry,
    batch: Batch,
    context: StepContext,
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    rows = flat({name: batch[name] for name in ("inputs", "index")})
    key = jax.random.fold_in(context.rng, _STREAM)
    masked = self.mask(key, rows["inputs"], rows["index"])
    intermediates, rng = context.intermediates, context.dropout_rng
    logits = model.masked_logits(params, masked.tokens, masked.positions, intermediates, rng)
    losses = cross_entropy(logits, masked.targets, masked.predict & (rows["index"] >= 0)[:, None])
    metrics = {"nll": (losses.nll, losses.count), "accuracy": (losses.correct, losses.count)}
    return {"cross_entropy": Term(losses.nll, losses.count)}, carry, metrics


def _trajectories(
  model: FewShotTextModel,
  params: Params,
  batch: Batch,
  rate: jax.Array,
  episodes: ClassEpisodeConfig,
  at_once: int,
) -> dict[str, jax.Array]:
  """Sums of every episode after each number of steps, each [episodes, steps]."""
  method = model.method
  assert isinstance(method, FineTune | Leopard)

  def one(episode: Batch) -> dict[str, jax.Array]:
    support, query = split_episode(episode, episodes.support)
    ways = episodes.ways
    logits = method.trajectory(model.embed, params, support, query, ways, rate)
    return jax.vmap(lambda one: query_sums(one, query))(logits)

  return over_episodes(one, batch, at_once)


@dataclasses.dataclass(frozen=True)
class FineTunedScores(EpisodeScores):
  """Scores after fine-tuning on every support; see `EpisodeScores`.

  Step size and number of steps are the ones of `FineTune` that are best on the first episodes of
  the split `valid`, with as many classes and examples.
  """

  @property
  def units(self) -> str:
    """What its scores are, and per what."""
    chosen = f"{self.prefix}fine_tuning/step_size and .../steps"
    return f"{super().units} {chosen}: chosen on validation classes."

  def __call__(self, scoring: Scoring[Any]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    method = tuned(scoring.task.model.method)
    assert method
    run = scoring.task.model.jit(_trajectories, episodes=self.episodes, at_once=self.tasks_at_once)

    def at(rate: float) -> Callable[[Params, Batch], dict[str, jax.Array]]:
      return lambda params, batch: run(params, batch, jnp.float32(rate))

    count = self.count_of(scoring)
    found = list[tuple[float, int, int]]()
    for number, rate in enumerate(method.rates):
      sums = self.of_episodes(scoring, at(rate), "valid", min(count, method.choose_on))
      accuracy = np.sum(sums["correct"], axis=0) / np.sum(sums["count"], axis=0)
      found.append((float(accuracy.max()), -number, int(accuracy.argmax())))
    _, number, steps = max(found)  # of equals the smallest step size
    rate = method.rates[-number]
    sums = self.of_episodes(scoring, at(rate), scoring.split, count)
    of_steps = {k: x[:, steps] for k, x in sums.items() if k != "group"}
    yield from self.summary({**of_steps, "group": sums["group"]})
    yield f"{self.prefix}fine_tuning/step_size", rate
    yield f"{self.prefix}fine_tuning/steps", method.steps[steps]


class ClassifyTexts(NoSearch):
  """Tells the classes of texts, given a few of each."""

  def __init__(self, tokens: Callable[[Sequence[str]], np.ndarray]):
    """Takes: from texts to rows of tokens."""
    self._tokens = tokens

  def __call__(
    self,
    model: FewShotTextModel,
    params: Params,
    support: Sequence[str],
    labels: np.ndarray,
    query: Sequence[str],
  ) -> np.ndarray:
    """Probabilities of the classes of every query text, [query, classes].

    Fine-tuning takes the first of its step sizes and the most steps.

    Args:
      model: the task's model.
      params: its parameters.
      support: texts to learn from.
      labels: their classes, from 0, [support].
      query: texts to tell.

    Raises:
      UserError: no texts, or labels that do not fit them or the model.
    """
    for name, texts in (("support", support), ("query", query)):
      errors.check(
        not isinstance(texts, str) and len(texts) > 0,
        f"{name} is {errors.short(texts)}; give a list with at least one text.",
      )
    labels = np.asarray(labels)
    errors.check(
      labels.shape == (len(support),) and labels.dtype.kind in "iu" and labels.min() >= 0,
      f"labels has the shape {labels.shape} and type {labels.dtype}; give a whole number from 0 for"
      f" each of the {len(support)} texts of the support.",
    )
    ways = int(labels.max()) + 1
    errors.check(
      not model.outputs or ways <= model.outputs,
      f"labels goes up to {ways - 1}, but the model has outputs for {model.outputs} classes. Give"
      " fewer classes, or train one with more (task.episodes.ways).",
    )
    order = by_class(model.method, labels)
    rows = {
      "inputs": jnp.asarray(self._tokens(support)[order]),
      "labels": jnp.asarray(labels[order], jnp.int32),
    }
    run = model.jit(probabilities, ways=model.outputs or ways)
    return np.asarray(run(params, rows, {"inputs": jnp.asarray(self._tokens(query))}))


@dataclasses.dataclass(frozen=True)
class FewShotTextClassifier(TrainedModel[str]):
  """A trained few-shot classifier of texts; made by `compmod_jax.load`."""

  task: "FewShotText"

  def classify(
    self, support: Sequence[str], labels: np.ndarray, query: Sequence[str]
  ) -> np.ndarray:
    """Probabilities of the classes of every query text; see `ClassifyTexts`."""
    return self.task.generator(self.task.model, self.params, support, labels, query)

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    """The tokens; one position without a text for features and logits."""
    valid = np.asarray(self.task.model.valid_mask(site, batch))
    if valid.shape[1] == 1:
      nothing = [[""]] * len(valid)
      return Axis(nothing, nothing, valid)
    return Axis.of(self.task.dataset.tokenizer, batch["inputs"], batch["inputs"], valid)

  def _read(
    self, texts: Sequence[str], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Texts as one batch."""
    inputs = jnp.asarray(self.task.dataset.tokens(texts))
    return {"inputs": inputs, "index": jnp.arange(len(texts), dtype=jnp.int32)}, ["inputs"]


class FewShotText(Task[TextEpisodes[FewShotTextConfig], FewShotTextModel, ClassifyTexts]):
  """A few-shot classification task on texts; made by `FewShotTextConfig.build`."""

  opened_as = FewShotTextClassifier
