"""Translation: sentence pairs in, a sequence-to-sequence model, BLEU or exact match out."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import CrossEntropy, Term, cross_entropy_of
from compmod_jax.data import pipeline
from compmod_jax.data.base import Dataset, Splits, TrainIterator
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples, tokenise
from compmod_jax.data.fingerprint import Fingerprints
from compmod_jax.data.paired import PairedDataset
from compmod_jax.data.sources.text_to_text import PairData, TextToTextData
from compmod_jax.data.subsets import subset_numbers
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.text_tokenizer import UNKNOWN
from compmod_jax.data.tokenizers import (
  BOS,
  PAD,
  Tokenizer,
  TokenizerConfig,
  pair_tokenizers,
  tokenizer_from_bytes,
)
from compmod_jax.decoding import DecodeConfig
from compmod_jax.layers.output import OutputKind
from compmod_jax.metrics import groups, text
from compmod_jax.models.base import ModelConfig, Seq2Seq
from compmod_jax.models.text import joined
from compmod_jax.models.transformer import shift_right
from compmod_jax.tasks import target_labels
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
from compmod_jax.tasks.bilevel import BilevelConfig
from compmod_jax.tasks.error_prediction import ErrorPredictionScores, WithErrorPrediction
from compmod_jax.tasks.objectives import standard
from compmod_jax.tasks.translator import Translator, mean_entropy

SOURCE_FILE, TARGET_FILE = "source.tokenizer", "target.tokenizer"


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
  """A translation task: data, tokenizers, batches, loss and decoding."""

  data: PairData | TextToTextData = GrammarData()
  """Where sentence pairs come from."""
  tokenizer: TokenizerConfig = TokenizerConfig()
  """The joint tokenizer, or the source side's where `target_tokenizer` is given."""
  target_tokenizer: TokenizerConfig | None = None
  """The target side's tokenizer; none for a joint one."""
  batch: BatchConfig = BatchConfig()
  """Token budget and padded lengths."""
  label_smoothing: float = 0.1
  """Share of probability spread evenly over the vocabulary."""
  output_layer: OutputKind = "fused"
  """How losses are computed: logits and loss in one kernel where there is one, which never writes
  the logits to memory (fused), or from all logits (plain)."""
  label_weight: float = 0.0
  """Weight of the loss of each kind of labels that the data have of target words; see
  `tasks.target_labels`. 0: none are learned."""
  decode: DecodeConfig = DecodeConfig()
  """How outputs are searched for."""
  small_share: float = 0.07
  """Share of the training examples in the small part, for phases that train on a part."""
  bilevel: BilevelConfig | None = None
  """Routers, or other parameters, that learn on the small part after steps of the rest on the
  large one."""

  def __post_init__(self):
    errors.check(
      0 <= self.label_smoothing < 1,
      f"task.label_smoothing is {self.label_smoothing}; it must be at least 0 and below 1.",
    )
    errors.check_choice("task.output_layer", self.output_layer, get_args(OutputKind))
    errors.check(
      self.label_weight >= 0,
      f"task.label_weight is {self.label_weight}; it must not be negative.",
    )
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
  ) -> "Translation":
    """The task with its tokenizers: those in `files`, else trained on the training split.

    Args:
      model: the configuration of a sequence-to-sequence model.
      files: what `SentencePairs.files` returned.
      cache: folder in which trained tokenizers are kept.

    Raises:
      UserError: the model is of another kind, data are missing, or `files` lacks a tokenizer.
    """
    model.seq2seq(1, 1, PAD)  # a model of another kind is refused before tokenizers are trained
    splits = Splits(self.data)
    if files is None:
      train = splits["train"]
      source, target = pair_tokenizers(
        train.source, train.target, self.tokenizer, self.target_tokenizer, cache
      )
    else:
      for name in (SOURCE_FILE, TARGET_FILE):
        errors.check(name in files, f"{name} is missing among the saved files; restore the folder.")
      source = tokenizer_from_bytes(files[SOURCE_FILE], self.tokenizer)
      target = tokenizer_from_bytes(files[TARGET_FILE], self.target_tokenizer or self.tokenizer)
    return self.build_with(model, splits, source, target)

  def build_with(
    self, model: ModelConfig, splits: Splits, source: Tokenizer, target: Tokenizer
  ) -> "Translation":
    """The task with these tokenizers.

    Raises:
      UserError: the model is of another kind, or has too few positions.
    """
    module = model.seq2seq(source.vocab_size, target.vocab_size, PAD)
    longest, room = self.batch.longest, model.room_for_target(self.batch.longest)
    both = ", for source and target together" if room < model.max_length else ""
    errors.check(
      longest <= room,
      f"task.batch lets sentences have {longest} tokens but model.max_length is"
      f" {model.max_length}{both}; every token needs a position. Raise model.max_length.",
    )
    dataset = SentencePairs(self, splits, source, target)
    objective, evaluators = SmoothedCrossEntropy(self.label_smoothing), (TokenLoss(),)
    if self.label_weight:
      counts = target_labels.label_counts(self.data, model)
      objective = target_labels.WithTargetLabels(objective, counts, self.label_weight)
      evaluators = (*evaluators, target_labels.TargetLabelScores(counts))
    if site := model.error_prediction_site():
      objective = WithErrorPrediction(objective, site)
      evaluators = (*evaluators, ErrorPredictionScores(site))
    task = Translation(
      dataset=dataset,
      model=PairModel(module, self.output_layer),
      objective=standard(objective, model),
      evaluators=(*evaluators, TranslationScores(self.data.metric)),
      generator=Translator(dataset, self.decode),
    )
    return task if self.bilevel is None else self.bilevel.over(task)

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    languages = f"{self.data.source_language} to {self.data.target_language}"
    return f"{model.family} with {model.describe()}, {languages}."


class SentencePairs(Dataset[TranslationConfig]):
  """Sentence pairs in batches of `source` and `target` tokens, [rows, bucket] each.

  Attributes:
    config: the task's configuration.
    pairs: the raw text of every split.
    source_tokenizer: from text to source tokens.
    target_tokenizer: from target tokens to text.
  """

  def __init__(
    self, config: TranslationConfig, pairs: Splits, source: Tokenizer, target: Tokenizer
  ):
    self.config, self.pairs = config, pairs
    self.source_tokenizer, self.target_tokenizer = source, target

  def files(self) -> dict[str, bytes]:
    """The tokenizers, serialised."""
    return {
      SOURCE_FILE: self.source_tokenizer.to_bytes(),
      TARGET_FILE: self.target_tokenizer.to_bytes(),
    }

  def check(self) -> None:
    """Loads every split that will be scored.

    Raises:
      UserError: one is missing, damaged, or has no pair that fits the model.
    """
    for split in self.final_splits():
      errors.check(
        len(self.examples(split)) > 0,
        f"No pair of the split {split!r} can be scored: all have an empty side or more than"
        f" {self.batch.longest} tokens. Raise task.batch.ceiling (or the last of"
        " task.batch.buckets), or check the data with `python -m train.check_data`.",
      )

  @property
  def batch(self) -> BatchConfig:
    """The batch configuration with its buckets chosen from the training split."""
    return self._batch

  @functools.cached_property
  def _batch(self) -> BatchConfig:
    if self.config.batch.buckets:
      return self.config.batch
    return self.config.batch.resolve(self.train_examples.lengths)

  def resolved_config(self) -> TranslationConfig:
    """The configuration with the buckets that were chosen, so that no training data are needed."""
    return dataclasses.replace(self.config, batch=self.batch)

  @functools.cached_property
  def train_examples(self) -> Examples:
    """The tokenised training split, without pairs that are too long."""
    return self._tokenise("train", self.config.batch)

  def examples(self, split: str) -> Examples:
    """A tokenised split, without pairs that are too long."""
    # Other splits have the ceiling that the buckets set, so that a saved model counts the same.
    return self.train_examples if split == "train" else self._tokenise(split, self.batch)

  def _tokenise(self, split: str, batch: BatchConfig) -> Examples:
    pairs, data = self.pairs[split], self.config.data
    examples = tokenise(pairs, self.source_tokenizer, self.target_tokenizer, batch)
    if self.config.label_weight and isinstance(data, target_labels.HasLabels):
      return target_labels.with_labels(examples, pairs, data)
    return examples

  def notes(self) -> list[str]:
    """What of the training split was left out."""
    return self.train_examples.notes(self.pairs["train"])

  def fingerprints(self) -> Fingerprints:
    """Of the source and the target side of the training examples, and of labels they have."""
    return self.train_examples.fingerprints()

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """An endless iterator over training batches, and how many make an epoch.

    The parts "large" and "small" of the examples are functions of the seed and their number.
    """
    examples, share = self.train_examples, self.config.small_share
    if part != "all":
      numbers = subset_numbers(part, len(examples), small_share=share, seed=seed)
      examples = examples.select(numbers)
    iterator = pipeline.train_batches(
      examples, self.batch, seed=seed, multiple=multiple, process=process, processes=processes
    )
    return iterator, pipeline.batches_per_epoch(examples, self.batch, multiple)

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[pipeline.Batch]:
    """Batches in which every pair of a split is once, but for those over the length ceiling."""
    return pipeline.eval_batches(self.examples(split), self.batch, multiple=multiple)

  def trained_shapes(
    self, shapes: Mapping[str, jax.ShapeDtypeStruct], multiple: int
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Labels have the shape of the target."""
    data, labels = self.config.data, dict[str, jax.ShapeDtypeStruct]()
    if self.config.label_weight and isinstance(data, target_labels.HasLabels):
      labels = {target_labels.COLUMN + name: shapes["target"] for name in data.label_counts}
    return {**shapes, **labels}

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    tokens = jnp.ones((1, 2), jnp.int32)
    return {"source": tokens, "target": tokens}

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    buckets = ", ".join(map(str, self.batch.buckets))
    return f"batches of {self.batch.tokens} tokens padded to {buckets}"

  def unknown(self, examples: Examples) -> float:
    """Per cent of the tokens of both sides, ends included, that are unknown words."""
    sides = (("source", self.source_tokenizer), ("target", self.target_tokenizer))
    found = sum(
      int(np.sum(tokens == tokenizer.unk))
      for side, tokenizer in sides
      for tokens in examples.columns[side]
    )
    return 100 * found / max(1, sum(examples.tokens[side] for side, _ in sides))


@dataclasses.dataclass(frozen=True, eq=False)
class PairModel(TaskModel[Seq2Seq]):
  """A sequence-to-sequence model on sentence pairs; logits are those of every target token.

  Attributes:
    output_kind: how its losses are computed; see `TranslationConfig.output_layer`.
  """

  output_kind: OutputKind = "fused"

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    tokens = jnp.ones((1, 2), jnp.int32)
    return self.module.init(rng, tokens, tokens)["params"]

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits of every target token, [batch, time, vocab]; with dropout if a key is given."""
    return self._apply(params, batch, self._edited(batch, intermediates), rng)

  def losses(
    self,
    params: Params,
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> CrossEntropy:
    """Losses of the target tokens, padding apart; with dropout if a key is given.

    Logits are formed where they are read or changed, and where nothing else can be.
    """
    intermediates, target = self._edited(batch, intermediates), batch["target"]
    layer = self._apply(params, batch, intermediates, rng, method="output_layer")
    found = layer.label_statistics(target, self.output_kind, intermediates)
    return cross_entropy_of(found, len(layer.table), target != PAD, label_smoothing=label_smoothing)

  def _edited(self, batch: Batch, intermediates: Intermediates) -> Intermediates:
    return intermediates.editing(self.edits, lambda site: self.valid_mask(site, batch))

  def _apply(
    self,
    params: Params,
    batch: Batch,
    intermediates: Intermediates,
    rng: jax.Array | None,
    method: str | None = None,
  ) -> Any:
    return self.module.apply(
      {"params": params},
      batch["source"],
      shift_right(batch["target"], BOS),
      deterministic=rng is None,
      intermediates=intermediates,
      rngs=None if rng is None else {"dropout": rng},
      method=method,
    )

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Tokens of the source, the target, or both; see `ModelConfig.side_at`."""
    source, target = batch["source"] != PAD, batch["target"] != PAD
    match self.config.side_at(site):
      case "source":
        return source
      case "target":
        return target
      case "both":
        return joined(source, target, jnp.sum(source, axis=1), self.config.max_length)

  def start_tokens(self, site: str) -> int:
    """One where positions are those of the target: what is read there is behind a start token."""
    return 1 if self.config.side_at(site) == "target" else 0


@dataclasses.dataclass(frozen=True)
class SmoothedCrossEntropy:
  """Label-smoothed cross-entropy per target token, end of sentence included.

  Attributes:
    label_smoothing: share of probability spread evenly over the vocabulary.
  """

  label_smoothing: float

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"cross_entropy": 1.0}

  def __call__(
    self, model: PairModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    losses = model.losses(
      params,
      batch,
      label_smoothing=self.label_smoothing,
      intermediates=context.intermediates,
      rng=context.dropout_rng,
    )
    metrics = {"nll": (losses.nll, losses.count), "accuracy": (losses.correct, losses.count)}
    return {"cross_entropy": Term(losses.smoothed, losses.count)}, carry, metrics


def _sums(model: PairModel, params: Params, batch: Batch) -> tuple[jax.Array, ...]:
  """Sums of loss, right predictions and tokens."""
  losses = model.losses(params, batch)
  return losses.nll, losses.correct, losses.count


@dataclasses.dataclass(frozen=True)
class TokenLoss:
  """Loss, perplexity and accuracy over the target tokens of a split.

  Perplexity is e to the mean negative log-likelihood in nats, per target token (end of sentence
  included), and per word (whitespace words and one end for each sentence). Pairs over the length
  ceiling are left out, as in training, and counted.
  """

  metric: str = ""
  units: str = (
    "Loss: nats per target token, end of sentence included, without label smoothing. Perplexity:"
    " per token of the model's vocabulary, and per word of the raw reference." + UNKNOWN
  )

  def __call__(self, scoring: Scoring["Translation"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    dataset = scoring.task.dataset
    pairs, examples = dataset.pairs[scoring.split], dataset.examples(scoring.split)
    nll, correct, tokens = scoring.sums(_sums)
    scored = [pairs.target[int(i)] for i in examples.index]
    perplexity = text.perplexity(nll, int(tokens), text.count_words(scored) + len(scored))
    yield "sentences", len(pairs)
    yield "dropped", len(examples.dropped)
    yield "loss", nll / tokens
    yield "perplexity", perplexity.per_token
    yield "word_perplexity", perplexity.per_word
    yield "accuracy", correct / tokens
    yield "unknown", dataset.unknown(examples)


@dataclasses.dataclass(frozen=True)
class TranslationScores:
  """Translates the sources of a split: BLEU, chrF and exact match of the outputs.

  Where pairs have annotations or are scored by exact match, also the exact match of groups of them:
  see `metrics.groups`.

  Attributes:
    metric: `bleu` or `exact_match`, by which checkpoints are compared.
  """

  metric: str
  units: str = ""

  def __call__(self, scoring: Scoring["Translation"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    task = scoring.task
    pairs = task.dataset.pairs[scoring.split]
    count = scoring.count(len(pairs))
    if not count:
      return
    scoring.sources, scoring.references = list(pairs.source[:count]), list(pairs.target[:count])
    found = task.generator(
      task.model,
      scoring.params,
      scoring.sources,
      references=scoring.references,
      sharing=scoring.sharing,
      status=scoring.status,
      name=scoring.split,
    )
    scoring.outputs = [best[0].text for best in found]
    yield "decoded", len(scoring.outputs)
    yield "search", task.generator.decode.describe()
    yield from text.score_outputs(scoring.outputs, scoring.references).items()
    if pairs.info is not None or pairs.metric == "exact_match":
      outputs, references = scoring.outputs, scoring.references
      yield from groups.exact_match_by_group(outputs, references, pairs.info).items()
    yield from mean_entropy(found).items()


class Translation(Task[SentencePairs | PairedDataset[SentencePairs], PairModel, Translator]):
  """A translation task; made by `TranslationConfig.build`."""
