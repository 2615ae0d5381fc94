"""Question answering: questions in one text format in, generated answers out."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import LabelStatistics, Term, cross_entropy_of
from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.dataset import MULTIPLE_CHOICE, QuestionSets
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.tokenized import TRAINED_TOKENS, QuestionTokenizer, texts_of
from compmod_jax.data.qa.unified import QUESTION
from compmod_jax.data.text_tokenizer import FILE, UNKNOWN
from compmod_jax.data.tokenizers import (
  Tokenizer,
  TokenizerConfig,
  cached_tokenizer,
  tokenizer_from_bytes,
)
from compmod_jax.decoding import DecodeConfig
from compmod_jax.layers.output import OutputKind
from compmod_jax.models.base import Decoder, ModelConfig, valid_at
from compmod_jax.models.nemot import OUTPUT
from compmod_jax.models.text import OutputLayers, Text
from compmod_jax.tasks.answer_scores import scores, source_text
from compmod_jax.tasks.answerer import Answerer
from compmod_jax.tasks.base import (
  Batch,
  Carry,
  Metrics,
  Params,
  Scoring,
  StepContext,
  Task,
  TaskModel,
  Terms,
)
from compmod_jax.tasks.objectives import standard
from compmod_jax.tasks.translator import mean_entropy


@dataclasses.dataclass(frozen=True)
class AnsweringConfig:
  """A question answering task: sets of questions, tokenizer, batches, losses, how answers are made.

  Source: Knowles 2022, chapter 3.4.
  """

  data: Mixed = Mixed()
  """Sets of questions."""
  tokenizer: TokenizerConfig = TokenizerConfig(vocab_size=1000, special_tokens=TRAINED_TOKENS)
  """The tokenizer, whose special tokens are those of the unified format."""
  tokenizer_questions: int = 20_000
  """The tokenizer is trained on the first N training questions of each set, at most."""
  length: int = 192
  """Most tokens of a question with its answer; longer passages are cut."""
  truncate: Literal["start", "end"] = "start"
  """Which end of a passage is cut."""
  answer_length: int = 24
  """Most tokens of an answer that is generated, the end token included."""
  batch_questions: int = 32
  """Rows of a global batch: questions, or passages with several of them."""
  turns: int = 1
  """Training: most questions on one passage in a row of a batch, each as if it stood alone. Sets
  have to have the questions of a passage one after another."""
  buckets: int = 3
  """Padded lengths, at most; each is a shape to compile."""
  answer_mean: Literal["token", "question"] = "token"
  """What the loss on answers is a mean over: tokens, or questions, so that long answers weigh no
  more than labels."""
  answer_weight: float = 1.0
  """Weight of the loss on the answer: on the label alone in multiple choice."""
  sequence_weight: float = 0.2
  """Weight of the next-token loss over the whole text."""
  vanilla_weight: float = 0.5
  """Weight of the answer's loss by the vanilla set's own head; models without one do without."""
  output_layer: OutputKind = "fused"
  """How losses are computed: logits and loss in one kernel where there is one, which never writes
  the logits to memory (fused), or from all logits (plain)."""
  decode: DecodeConfig = DecodeConfig(method="greedy")
  """How answers are searched for; its limits of length do not count, `answer_length` does."""
  small_share: float = 0.07
  """Share of the training questions in the small part, for phases that train on a part."""

  def __post_init__(self):
    check_least(
      self,
      "task.",
      tokenizer_questions=1,
      length=1,
      answer_length=1,
      batch_questions=1,
      turns=1,
      buckets=1,
    )
    for field in ("answer_weight", "sequence_weight", "vanilla_weight"):
      value = getattr(self, field)
      errors.check(value >= 0, f"task.{field} is {value}; it must be 0 or more.")
    errors.check(
      self.answer_weight + self.sequence_weight > 0,
      "task.answer_weight and task.sequence_weight are both 0; the model would learn nothing."
      " Give one of them a positive value.",
    )
    errors.check(
      self.answer_length < self.length,
      f"task.answer_length is {self.answer_length} but task.length is {self.length}, which is for"
      " question and answer together; raise task.length.",
    )
    errors.check_choice("task.output_layer", self.output_layer, get_args(OutputKind))
    errors.check_choice("task.truncate", self.truncate, ("start", "end"))
    errors.check_choice("task.answer_mean", self.answer_mean, ("token", "question"))
    errors.check(
      0 < self.small_share < 1,
      f"task.small_share is {self.small_share}; it must lie between 0 and 1.",
    )

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "Answering":
    """The task with its tokenizer: the one in `files`, else trained on the training questions.

    Args:
      model: the configuration of a decoder.
      files: what `QuestionSets.files` returned.
      cache: folder in which the tokenizer is kept.

    Raises:
      UserError: the model is of another kind, data are missing, or `files` lacks the tokenizer.
    """
    model.decoder(1, 0)  # a model of another kind is refused before the tokenizer is trained
    return self.build_with(model, self.make_tokenizer(files, cache))

  def build_with(self, model: ModelConfig, tokenizer: Tokenizer) -> "Answering":
    """The task with this tokenizer.

    Raises:
      UserError: the model is of another kind, has too few positions, or cannot read several
        questions in a row.
    """
    errors.check(
      self.length <= model.max_length,
      f"task.length is {self.length} but model.max_length is {model.max_length}; every token"
      " needs a position. Raise model.max_length.",
    )
    errors.check(
      self.turns == 1 or not model.reads_options,
      f"task.turns is {self.turns} but model.option_interaction is on, which is for one question"
      " a row. Set task.turns = 1.",
    )
    errors.check(
      self.turns == 1 or not model.sliding_window,
      f"task.turns is {self.turns} but model.sliding_window is {model.sliding_window}; later"
      " questions of a row would read less of the passage than if they came first. Set"
      " task.turns = 1.",
    )
    tagged = model.reads_tags
    question_tokenizer = QuestionTokenizer(tokenizer, self.length, self.truncate, tagged=tagged)
    dataset = QuestionSets(self, question_tokenizer, model.output_tasks(), tagged=tagged)
    module = model.decoder(tokenizer.vocab_size, tokenizer.pad)
    return Answering(
      dataset=dataset,
      model=QuestionModel(
        module,
        tokenizer,
        question_tokenizer.special_ids[QUESTION],
        output_kind=self.output_layer,
      ),
      objective=standard(AnswerLosses(self, dataset), model),
      evaluators=(AnswerLoss(), AnswerScores()),
      generator=Answerer(
        question_tokenizer,
        self.answer_length,
        edges=tuple(sorted({min(e, self.length - self.answer_length) for e in dataset.lengths})),
        rows=self.batch_questions,
        decode=self.decode,
      ),
    )

  def make_tokenizer(
    self, files: Mapping[str, bytes] | None = None, cache: Path | None = None
  ) -> Tokenizer:
    """The tokenizer in `files`, else one that is trained on the first questions of every set."""
    if files is not None:
      errors.check(FILE in files, f"{FILE} is missing among the saved files; restore the folder.")
      return tokenizer_from_bytes(files[FILE], self.tokenizer)
    texts = list[str]()
    for data, split in self.data.sets("train"):
      items = data.load(split).items
      texts += texts_of(items[i] for i in range(min(len(items), self.tokenizer_questions)))
    return cached_tokenizer(texts, self.tokenizer, cache)

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return f"Question answering, {model.describe()}; {self.data.describe()}."


@dataclasses.dataclass(frozen=True, eq=False)
class QuestionModel(TaskModel[Decoder]):
  """A decoder on questions; logits are those of every token after the first of a text.

  Attributes:
    tokenizer: of the texts.
    question: the token in front of every question.
    swapped: auxiliary token that takes the place of each, int32 [auxiliary tokens]; none: itself.
    output_kind: how its losses are computed; see `AnsweringConfig.output_layer`.
  """

  tokenizer: Tokenizer
  question: int
  swapped: jax.Array | None = None
  output_kind: OutputKind = "fused"

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    tasks = self.config.output_tasks() or (MULTIPLE_CHOICE,)
    batch: dict[str, jax.Array] = {f"rows/{task}": jnp.zeros(1, jnp.int32) for task in tasks}
    tokens = jnp.full((len(tasks), 3), self.tokenizer.eos, jnp.int32)
    batch["answer"] = jnp.ones((len(tasks), 1), jnp.int32)
    batch["options"] = jnp.zeros((len(tasks), 2), jnp.int32)
    batch["tags"] = jnp.full(tokens.shape, -1, jnp.int32)
    text = self.text(batch, tokens)
    return self.module.init(rng, text, blocks_of(batch), vanilla_logits=True)["params"]

  def running_config(self, batch: Batch) -> ModelConfig:
    """The configuration as if the model had the outputs of a batch's tasks alone."""
    return self.config.for_tasks([task for task, _ in blocks_of(batch)])

  def unused_parameters(self, batch: Batch) -> tuple[str, ...]:
    """Parameters of the outputs whose tasks a batch does not have."""
    return self.config.unused_parameters([task for task, _ in blocks_of(batch)])

  def text(self, batch: Batch, tokens: jax.Array) -> Text:
    """What the module is given."""
    config, segments, options, tags = self.config, None, None, None
    if batch["answer"].shape[1] > 1 or config.convolution > 1:
      # The passage, and every question with its answer, into which no convolution carries it over.
      segments = jnp.cumsum(tokens == self.question, axis=1, dtype=jnp.int32)
    ids = [config.auxiliary_ids("dec", task) for task, n in blocks_of(batch) for _ in range(n)]
    if not any(ids):
      return Text(tokens, segments=segments)
    auxiliary = jnp.asarray(ids, jnp.int32)
    auxiliary = auxiliary if self.swapped is None else jnp.take(self.swapped, auxiliary)
    if config.reads_options:
      options = in_options(batch, tokens.shape[1])
    if config.reads_tags:
      tags = jnp.asarray(batch["tags"])[:, : tokens.shape[1]]
    return Text(tokens, auxiliary, segments, options, tags)

  def label_statistics(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
    vanilla_positions: jax.Array | None = None,
  ) -> tuple[LabelStatistics, OutputLayers]:
    """What the losses of the tokens after the first need of the logits, and what these are made of.

    Logits are formed where they are read or changed, and where nothing else can be.

    Args:
      params: parameters.
      batch: of questions.
      intermediates: sites to read or change.
      rng: for dropout; none is dropped without.
      vanilla_positions: where the output of the vanilla set's own head is wanted, if it is.
    """
    intermediates = self._edited(batch, intermediates)
    layers = self._output_layers(params, batch, intermediates, rng, vanilla_positions)
    labels = jnp.asarray(batch["tokens"])[:, 1:]
    return layers.output.label_statistics(labels, self.output_kind, intermediates), layers

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits of every token after the first of a text; with dropout if a key is given."""
    intermediates = self._edited(batch, intermediates)
    return self._output_layers(params, batch, intermediates, rng).formed(intermediates).logits

  def _output_layers(
    self,
    params: Params,
    batch: Batch,
    intermediates: Intermediates,
    rng: jax.Array | None,
    vanilla_positions: jax.Array | None = None,
  ) -> OutputLayers:
    vanilla: dict[str, Any] = {}
    if vanilla_positions is not None:
      vanilla = {"vanilla_logits": True, "vanilla_positions": vanilla_positions}
    return self.module.apply(
      {"params": params},
      self.text(batch, jnp.asarray(batch["tokens"])[:, :-1]),
      blocks_of(batch),
      **vanilla,
      deterministic=rng is None,
      intermediates=intermediates,
      rngs=None if rng is None else {"dropout": rng},
      method="output_layers",
    )

  def _edited(self, batch: Batch, intermediates: Intermediates) -> Intermediates:
    return intermediates.editing(self.edits, lambda site: self.valid_mask(site, batch))

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Positions that hold real tokens, auxiliary ones where a site has them; a set's own rows."""
    real = (batch["tokens"][:, :-1] != self.tokenizer.pad) & (batch["index"] >= 0)[:, None]
    real, start = valid_at(self.config, site, real), 0
    for task, count in blocks_of(batch):
      if site.startswith(f"{OUTPUT}_{task}/"):
        return real[start : start + count]
      start += count
    return real

  def counted(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Which tokens after the first the losses are of; see the function `counted`."""
    return counted(batch, self.tokenizer, interacting=self.config.reads_options)


# Which tokens of a batch the losses are of, and how much each of them counts. What these functions
# say of tokens they say of those after the first, as logits predict them.


def in_options(batch: Batch, time: int) -> jax.Array:
  """Positions of answer options, bool [rows, time]."""
  positions, ends = jnp.arange(time)[None], batch["options"]
  return (positions >= ends[:, :1]) & (positions < ends[:, 1:])


def counted(
  batch: Batch, tokenizer: Tokenizer, *, interacting: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Which tokens after the first the losses are of, bool [rows, time]: of answers, of all text.

  Of answers in multiple choice it is the label alone, of others all up to the end token, which
  nothing but an answer has. Over the whole text, what follows an answer is left out.

  Args:
    batch: of questions.
    tokenizer: of its tokens.
    interacting: options see each other; what their positions predict, as they see it, is left out.
  """
  tokens, starts = jnp.asarray(batch["tokens"]), jnp.asarray(batch["answer"])
  positions = jnp.arange(1, tokens.shape[1])
  real = (tokens[:, 1:] != tokenizer.pad) & (batch["index"] >= 0)[:, None]
  real &= tokens[:, :-1] != tokenizer.eos
  labels = [jnp.full((count, 1), task == MULTIPLE_CHOICE) for task, count in blocks_of(batch)]
  begins = jnp.any(positions[None, :, None] == starts[:, None], axis=-1)
  ends = tokens[:, 1:] == tokenizer.eos
  inside = jnp.cumsum(begins, axis=1) > jnp.cumsum(ends, axis=1) - ends
  answer = real & jnp.where(jnp.concatenate(labels), begins, inside)
  if interacting:
    real = real & ~in_options(batch, len(positions))
  return answer, real


def shares(answer: jax.Array, starts: ArrayLike, mean: str) -> jax.Array:
  """How much every token counts in the loss on answers, float [rows, time].

  Args:
    answer: tokens of answers, of `counted`.
    starts: where the answers of a row begin, [rows, questions]; 0 for none.
    mean: over what the loss is a mean: `token`, or `question`, where all answers count alike.
  """
  share = answer.astype(jnp.float32)
  if mean == "token":
    return share
  starts, positions = jnp.asarray(starts), jnp.arange(1, answer.shape[1] + 1)
  begun = positions[None, :, None] >= starts[:, None]
  number = jnp.sum(begun & (starts > 0)[:, None], axis=-1)
  mine = number[..., None] == jnp.arange(1, starts.shape[1] + 1)[None, None]
  lengths = jnp.sum(share[..., None] * mine, axis=1, keepdims=True)
  return share / jnp.maximum(jnp.sum(mine * lengths, axis=-1), 1)


def positions_of(answer: jax.Array, most: int) -> jax.Array:
  """Distinct positions [rows, positions] among which are all that predict answers.

  Args:
    answer: tokens of answers, of `counted`.
    most: tokens of answers in a row.
  """
  return jax.lax.top_k(answer.astype(jnp.int32), min(most, answer.shape[1]))[1]


@dataclasses.dataclass(frozen=True)
class AnswerLosses:
  """The losses in nats per token on the answer, on the whole text, and of the vanilla set's head.

  Source: Knowles 2022, equations 3.16 and 3.17.

  Attributes:
    config: their weights, and what the loss on the answer is a mean over.
    dataset: knows the longest answer, where the vanilla set's loss is wanted.
  """

  config: AnsweringConfig
  dataset: QuestionSets[AnsweringConfig]

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Of the losses whose weight is not 0."""
    found = {"answer": self.config.answer_weight, "sequence": self.config.sequence_weight}
    if config.has_vanilla_head:
      found["vanilla"] = self.config.vanilla_weight
    return {name: weight for name, weight in found.items() if weight}

  def __call__(
    self, model: QuestionModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    wanted, positions = self.weights(model.config), None
    labels, (answer, whole) = jnp.asarray(batch["tokens"])[:, 1:], model.counted(batch)
    if "vanilla" in wanted:
      positions = positions_of(answer, self.dataset.longest_answer)
    found, layers = model.label_statistics(
      params,
      batch,
      intermediates=context.intermediates,
      rng=context.dropout_rng,
      vanilla_positions=positions,
    )
    share = shares(answer, batch["answer"], self.config.answer_mean)
    losses = {"answer": (found.nll, share), "sequence": (found.nll, whole.astype(jnp.float32))}
    if positions is not None and layers.vanilla is not None:
      own, mine = (jnp.take_along_axis(values, positions, axis=1) for values in (labels, share))
      losses["vanilla"] = layers.vanilla.label_statistics(own, model.output_kind).nll, mine
    terms = {
      name: Term(jnp.sum(values * weights), jnp.sum(weights), weight=wanted[name])
      for name, (values, weights) in losses.items()
      if name in wanted
    }
    one = cross_entropy_of(found, len(layers.output.table), answer)
    return terms, carry, {"nll": (one.nll, one.count), "accuracy": (one.correct, one.count)}


def _sums(model: QuestionModel, params: Params, batch: Batch) -> tuple[jax.Array, ...]:
  """Sums of loss, right predictions and tokens, of answers."""
  answer, _ = model.counted(batch)
  found, layers = model.label_statistics(params, batch)
  losses = cross_entropy_of(found, len(layers.output.table), answer)
  return losses.nll, losses.correct, losses.count


@dataclasses.dataclass(frozen=True)
class AnswerLoss:
  """Loss of a split's gold answers."""

  metric: str = ""
  units: str = ""

  def __call__(self, scoring: Scoring["Answering"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    dataset = scoring.task.dataset
    nll, correct, tokens = scoring.sums(_sums)
    tokenized = dataset.tokenized(scoring.split)
    yield "sentences", len(tokenized) + len(tokenized.too_long)
    yield "truncated", tokenized.truncated
    yield "loss", nll / tokens
    yield "accuracy", correct / tokens
    yield "unknown", dataset.unknown(scoring.split)


@dataclasses.dataclass(frozen=True)
class AnswerScores:
  """Answers the questions of a split, or some drawn once and for all, and scores the answers.

  Its `score` is the mean over sets of the mean main score of their questions, 0 to 100.
  """

  metric: str = "score"
  units: str = (
    "Score: per cent, the mean over questions (and then over sets) of accuracy in multiple choice"
    " and yes/no, SQuAD's F1 in extractive and ROUGE-L in abstractive questions, all of answers"
    " that were generated; malformed: per cent of labels and yes/no answers that are none. Loss:"
    " nats per token of the gold answers, given the tokens before." + UNKNOWN
  )

  def __call__(self, scoring: Scoring["Answering"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    task = scoring.task
    questions, sets = task.dataset.chosen(scoring.split, scoring.decode)
    if not questions:
      return
    answers = task.generator(
      task.model,
      scoring.params,
      questions,
      sharing=scoring.sharing,
      status=scoring.status,
      name=scoring.split,
    )
    scoring.outputs = [best[0].text for best in answers]
    scoring.references = [question.answer for question in questions]
    scoring.sources = [source_text(question) for question in questions]
    yield "decoded", len(scoring.outputs)
    yield "search", task.generator.decode.describe()
    yield from scores(questions, sets, scoring.outputs).items()
    yield from mean_entropy(answers).items()


class Answering(Task[QuestionSets[AnsweringConfig], QuestionModel, Answerer]):
  """A question answering task; made by `AnsweringConfig.build`."""
