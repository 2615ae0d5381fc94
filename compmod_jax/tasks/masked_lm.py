"""Masked language modelling: running text in, an encoder, loss per masked token out.

With `next_sentence` texts are pairs, and whether the second follows the first is learned besides,
as BERT is trained (Devlin et al. 2019, section 3.1).
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import CrossEntropy, Term, cross_entropy
from compmod_jax.core.sharding import fetch
from compmod_jax.data import pipeline
from compmod_jax.data.blocks import TextBlocks, check_blocks
from compmod_jax.data.corruption import Masked, MaskingConfig, mask_tokens
from compmod_jax.data.episodes import EpisodeDataset
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.text_tokenizer import UNKNOWN, DocumentData, text_tokenizer
from compmod_jax.data.tokenizers import Tokenizer, TokenizerConfig
from compmod_jax.data.tokenizers.vocabulary import MASK
from compmod_jax.models.base import Encoder, ModelConfig, valid_at
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
from compmod_jax.tasks.fill_mask import FillMask
from compmod_jax.tasks.objectives import MetaConfig, standard

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_NEXT = "next_sentence"
# Keeps the masks apart from dropout, which is drawn from the same key.
_STREAM = 0x3A5C


@dataclasses.dataclass(frozen=True)
class MaskedLMConfig:
  """A masked language modelling task: text, tokenizer, blocks and masks."""

  data: DocumentData = GrammarDocuments()
  """Where documents come from."""
  tokenizer: TokenizerConfig = TokenizerConfig()
  """The tokenizer; the token <mask> is added to its special tokens."""
  tokenizer_documents: int = 200_000
  """The tokenizer is trained on the first N training documents, at most."""
  length: int = 128
  """Tokens of a block: the start token, and a stretch of documents with an end token after each."""
  batch_tokens: int = 4096
  """Tokens of a global batch, a multiple of `length`."""
  masking: MaskingConfig = MaskingConfig()
  """Which tokens are predicted; drawn anew whenever a block is trained on."""
  mask_seed: int = 0
  """Of the masks of evaluation, which are always the same."""
  small_share: float = 0.07
  """Share of the training blocks in the small part, for phases that train on a part."""
  meta: MetaConfig | None = None
  """Meta-learning: training on episodes of blocks, after steps on their supports."""
  next_sentence: bool = False
  """Blocks are pairs of stretches of sentences; in half of them the second follows the first in its
  document, and in which ones is learned besides."""

  def __post_init__(self):
    check_blocks(self)
    errors.check(
      not self.next_sentence or self.length >= 8,
      f"task.length is {self.length} and task.next_sentence is set; a pair with its start and two"
      " ends needs at least 8.",
    )
    errors.check(
      not self.next_sentence or self.meta is None,
      "task.next_sentence and task.meta are both set, but episodes are of blocks of running text;"
      " leave one of them out.",
    )
    errors.check(self.mask_seed >= 0, f"task.mask_seed is {self.mask_seed}; it cannot be negative.")

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "MaskedLM":
    """The task with its tokenizer: the one in `files`, else trained on the training split.

    Args:
      model: the configuration of an encoder.
      files: what `MaskedBlocks.files` returned.
      cache: folder in which the tokenizer and tokenised text are kept.

    Raises:
      UserError: the model is of another kind, data are missing, or `files` lacks the tokenizer.
    """
    model.encoder(1, 0)  # a model of another kind is refused before the tokenizer is trained
    errors.check(
      not self.next_sentence or getattr(model, _NEXT, False),
      "task.next_sentence is set, but the model has no output for it. Use an EncoderConfig with"
      " segments = 2 and next_sentence = True.",
    )
    kind = PairedBlocks if self.next_sentence else MaskedBlocks
    dataset = kind(self, self.make_tokenizer(files, cache), cache)
    errors.check(
      self.length <= model.max_length,
      f"task.length is {self.length} but model.max_length is {model.max_length}; every token"
      " needs a position. Raise model.max_length.",
    )
    tokenizer, objective = dataset.tokenizer, MaskedTokenLoss(dataset.mask)
    task = MaskedLM(
      dataset=dataset,
      model=MaskedModel(
        model.encoder(tokenizer.vocab_size, tokenizer.pad), tokenizer.pad, tokenizer.eos
      ),
      objective=standard(WithNextSentence(objective) if self.next_sentence else objective, model),
      evaluators=(MaskedTokenScores(), *((NextSentenceScores(),) if self.next_sentence else ())),
      generator=FillMask(tokenizer, self.batch_tokens),
    )
    if self.meta is None:
      return task
    within = dataset.documents if self.meta.episodes.within == "document" else None
    meta = self.meta.over(task.objective)
    meta.check(nn.unbox(task.shapes))
    return dataclasses.replace(
      task,
      dataset=EpisodeDataset(dataset, self.meta.episodes, within),
      objective=meta,
      evaluators=(self.meta.evaluator(task.objective, self.mask_seed), *task.evaluators),
    )

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
    """The tokenizer in `files`, else one that is trained on the training split."""
    documents = self.tokenizer_documents
    return text_tokenizer(self.data, self.tokenizer_with_mask, documents, files, cache)

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return f"Masked language model with {model.describe()}, {self.data.describe()}."


class MaskedBlocks(TextBlocks[MaskedLMConfig]):
  """Blocks of which some tokens are masked.

  Batches of evaluation also hold `positions`, `targets` and `predict` (see `Masked`), and their
  tokens are masked already.

  Attributes:
    ordinary: tokens that may be predicted, bool [vocab]: all but controls.
  """

  def __init__(self, config: MaskedLMConfig, tokenizer: Tokenizer, cache: Path | None = None):
    mask = tokenizer.mask
    if mask is None:
      raise errors.UserError("The tokenizer has no token <mask>; masked models need one.")
    super().__init__(config, tokenizer, tokenizer.bos, cache)
    self.ordinary = np.ones(tokenizer.vocab_size, bool)
    self.ordinary[list(tokenizer.controls)] = False
    self._mask = mask
    self._fixed = jax.jit(
      lambda tokens, index: self.mask(jax.random.key(config.mask_seed), tokens, index)
    )

  def mask(self, rng: jax.Array, tokens: jax.Array, index: jax.Array) -> Masked:
    """Masks of the blocks with these numbers; see `mask_tokens`."""
    return mask_tokens(
      rng, tokens, index, self.ordinary, mask=self._mask, config=self.config.masking
    )

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches in which every block of a split is once, with the masks of every evaluation."""
    for batch in pipeline.eval_batches(self.blocks(split), self.batch, multiple=multiple):
      masked = jax.device_get(self._fixed(batch["tokens"], batch["index"]))
      yield {**masked._asdict(), "index": batch["index"]}

  def unigram_entropy(self, split: str) -> float:
    """Entropy of the frequencies of a split's ordinary tokens, in nats per token."""
    counts = np.zeros(self.tokenizer.vocab_size)
    for block in self.blocks(split).columns["tokens"]:
      counts += np.bincount(block, minlength=len(counts))
    shares = counts[self.ordinary & (counts > 0)]
    shares = shares / shares.sum()
    return float(-(shares * np.log(shares)).sum())

  def filled(self, batch: Batch, best: np.ndarray, count: int) -> dict[int, tuple[str, str, str]]:
    """Number -> input, output and reference text of the blocks below `count` in a batch.

    Args:
      batch: of `eval_batches`.
      best: predicted tokens, [rows, predicted].
      count: numbers from here on are left out.
    """
    found = {}
    for row in np.flatnonzero((batch["index"] >= 0) & (batch["index"] < count)).tolist():
      real = batch["predict"][row]
      where, tokens = batch["positions"][row][real], np.asarray(batch["tokens"][row])
      output, reference = tokens.copy(), tokens.copy()
      output[where], reference[where] = best[row][real], batch["targets"][row][real]
      found[int(batch["index"][row])] = tuple(map(self._text, (tokens, output, reference)))
    return found

  def _text(self, ids: np.ndarray) -> str:
    """Text of a block, its documents parted by bars."""
    ids = ids[ids != self.tokenizer.pad]
    parts = np.split(ids, np.flatnonzero(ids == self.tokenizer.eos) + 1)
    text = " | ".join(self.tokenizer.decode(part.tolist()) for part in parts if len(part))
    return text.replace(self.tokenizer.mask_text, f" {MASK} ").replace("  ", " ").strip()


class PairedBlocks(MaskedBlocks):
  """Pairs of stretches of sentences, start A end B end, some of whose tokens are masked.

  In pairs with an even number B follows A in its document, in those with an odd one it is from
  another document. Every A and every B is in one pair of each kind, so that neither says by itself
  which it is.
  """

  def blocks(self, split: str, stride: int | None = None) -> Examples:
    """The pairs of a split.

    Raises:
      UserError: an unknown split, or one with too few documents of two sentences.
    """
    key = (split, 0)
    if key not in self._loaded:
      errors.check_choice("split", split, self.config.data.splits())
      random = np.random.default_rng(zlib.crc32(split.encode()))
      room = self.config.length - 3
      cut = list(stretches(self.config.data.load(split), self.tokenizer, room, random))
      owners = np.asarray([document for document, _, _ in cut], np.int64)
      most = int(np.bincount(owners).max()) if len(cut) else 0
      errors.check(
        len(cut) > 0 and 2 * most <= len(cut),
        f"The split {split!r} has {len(cut)} pairs of sentences, {most} of them in one document;"
        " for pairs that do not belong together, no document may have more than half. Give more"
        " documents, or smaller ones.",
      )
      # Pairs of a document stand together, so that a rotation by more of them meets another one.
      shift = int(random.integers(most, len(cut) - most + 1))
      rows = []
      for number, (_, first, second) in enumerate(cut):
        other = cut[(number + shift) % len(cut)][2]
        rows += [self._pair(first, second, room), self._pair(first, other, room)]
      self._loaded[key] = Examples(
        {"tokens": Ragged(rows)}, np.arange(len(rows), dtype=np.int32), pad=self.tokenizer.pad
      )
    return self._loaded[key]

  def _pair(self, first: Sequence[int], second: Sequence[int], room: int) -> list[int]:
    """Start A end B end; of the longer one, tokens far from the other are left out."""
    least = room // 2
    before = max(least, room - len(second))
    first = first[-before:]
    bos, eos = self.tokenizer.bos, self.tokenizer.eos
    return [bos, *first, eos, *second[: room - len(first)], eos]


def stretches(
  documents: Iterable[str], tokenizer: Tokenizer, room: int, random: np.random.Generator
) -> Iterator[tuple[int, list[int], list[int]]]:
  """Number of a document, and two stretches of its sentences, one after the other, as tokens.

  Args:
    documents: of which those of one sentence are left out.
    tokenizer: from text to tokens.
    room: two stretches have as many sentences as fit in that many tokens, at least two.
    random: where the first ends.
  """
  for document, text in enumerate(documents):
    sentences = [ids for ids in tokenizer.encode_batch(_SENTENCE_END.split(text)) if ids]
    start = 0
    while start + 1 < len(sentences):
      fitting = np.cumsum([len(ids) for ids in sentences[start:]]) <= room
      ends = start + max(2, int(np.sum(fitting)))
      cut = int(random.integers(start + 1, ends))
      parts = sentences[start:cut], sentences[cut:ends]
      first, second = ([number for ids in part for number in ids] for part in parts)
      yield document, first, second
      start = ends


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedModel(TaskModel[Encoder]):
  """An encoder on blocks of text.

  Attributes:
    pad: the token that marks padding.
    end: the token that ends a segment, for models that have vectors of segments.
  """

  pad: int
  end: int | None = None

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    return self.module.init(rng, jnp.ones((1, 2), jnp.int32))["params"]

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits at every position, [batch, time, vocab]; with dropout if a key is given."""
    return self.logits(params, batch["tokens"], None, intermediates, rng)

  def logits(
    self,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array | None,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits at positions, [batch, predicted, vocab]; at all if none are given."""
    return self.module.apply(
      {"params": params},
      tokens,
      **self._segments(tokens),
      positions=positions,
      deterministic=rng is None,
      intermediates=intermediates.editing(
        self.edits, lambda site: self._holds(site, tokens, positions=positions)
      ),
      rngs=None if rng is None else {"dropout": rng},
    )

  def _segments(self, tokens: jax.Array) -> dict[str, jax.Array]:
    """How many ends stand before each token, up to the last segment that the model knows."""
    count = getattr(self.config, "segments", 0)
    if not count or self.end is None:
      return {}
    ends = (tokens == self.end).astype(jnp.int32)
    return {"segments": jnp.minimum(jnp.cumsum(ends, axis=1) - ends, count - 1)}

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Positions that hold real tokens, auxiliary ones where a site has them."""
    return self._holds(site, batch["tokens"], batch["index"] >= 0)

  def _holds(
    self,
    site: str,
    tokens: jax.Array,
    rows: jax.Array | bool = True,
    positions: jax.Array | None = None,
  ) -> Bool[Array, "batch time"]:
    real = (tokens != self.pad) & jnp.reshape(jnp.asarray(rows), (-1, 1))
    real = real[:, :1] if site == _NEXT else real
    return valid_at(self.config, site, real, positions)

  def start_tokens(self, site: str) -> int:
    """One: every block begins with the start token."""
    return 1


@dataclasses.dataclass(frozen=True)
class MaskedTokenLoss:
  """Cross-entropy in nats per masked token; the masks are a function of seed and step.

  Attributes:
    mask: from a key, tokens and their rows' numbers to masked tokens.
  """

  mask: Callable[[jax.Array, jax.Array, jax.Array], Masked]

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"cross_entropy": 1.0}

  def __call__(
    self, model: MaskedModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    key = jax.random.fold_in(context.rng, _STREAM)
    masked = self.mask(key, batch["tokens"], batch["index"])
    intermediates, rng = context.intermediates, context.dropout_rng
    logits = model.logits(params, masked.tokens, masked.positions, intermediates, rng)
    losses = cross_entropy(logits, masked.targets, masked.predict)
    metrics = {"nll": (losses.nll, losses.count), "accuracy": (losses.correct, losses.count)}
    return {"cross_entropy": Term(losses.nll, losses.count)}, carry, metrics


@dataclasses.dataclass(frozen=True)
class WithNextSentence:
  """Adds the cross-entropy in nats per pair of whether its second part follows the first.

  Attributes:
    objective: on the same batch of `PairedBlocks`.

  Source: Devlin et al. 2019, section 3.1, task 2; the loss is the sum of both, appendix A.2.
  """

  objective: MaskedTokenLoss

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of the objective inside, and 1."""
    return self.objective.weights(config) | {_NEXT: 1.0}

  def __call__(
    self, model: MaskedModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    outside = context.intermediates
    intermediates = outside.also([_NEXT])
    terms, carry, metrics = self.objective(
      model, params, carry, batch, context._replace(intermediates=intermediates)
    )
    outside.merge(intermediates.captured, intermediates.seen)
    losses = _next_losses(intermediates.captured[_NEXT], batch)
    terms |= {_NEXT: Term(losses.nll, losses.count)}
    return terms, carry, metrics | {f"{_NEXT}_accuracy": (losses.correct, losses.count)}


def _next_losses(logits: jax.Array, batch: Batch) -> CrossEntropy:
  """Of a batch of pairs: those with an odd number do not belong together."""
  index = batch["index"][:, None]
  return cross_entropy(logits, index % 2, index >= 0)


def _next_sums(model: MaskedModel, params: Params, batch: Batch) -> tuple[jax.Array, ...]:
  """Sums of loss, right predictions and pairs."""
  intermediates = OFF.also([_NEXT])
  model.logits(params, batch["tokens"], batch["positions"], intermediates)
  losses = _next_losses(intermediates.captured[_NEXT], batch)
  return losses.nll, losses.correct, losses.count


@dataclasses.dataclass(frozen=True)
class NextSentenceScores:
  """Loss and accuracy of whether the second part of a pair follows the first; half of them do."""

  metric: str = ""
  units: str = (
    "Next sentence: loss in nats per pair, and share of pairs told right; half of them are."
  )

  def __call__(self, scoring: Scoring["MaskedLM"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    nll, correct, pairs = scoring.sums(_next_sums)
    yield f"{_NEXT}_loss", nll / pairs
    yield f"{_NEXT}_accuracy", correct / pairs


def _predictions(model: MaskedModel, params: Params, batch: Batch) -> tuple[jax.Array, ...]:
  """Sums of loss, right predictions and predicted tokens; and the predictions."""
  logits = model.logits(params, batch["tokens"], batch["positions"])
  losses = cross_entropy(logits, batch["targets"], batch["predict"])
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  return losses.nll, losses.correct, losses.count, best


@dataclasses.dataclass(frozen=True)
class MaskedTokenScores:
  """Loss, perplexity and accuracy over the masked tokens of a split; always the same tokens.

  Its outputs are blocks with their masked tokens filled in.
  """

  metric: str = "loss"
  units: str = (
    "Tokens: those that are predicted. Loss: nats per predicted token; perplexity and accuracy"
    " are over the same tokens. Unigram: the loss of the best prediction that does not look at"
    " the context, the entropy of the split's own token frequencies." + UNKNOWN
  )

  def __call__(self, scoring: Scoring["MaskedLM"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    dataset = scoring.task.dataset
    run, split = scoring.task.model.jit(_predictions), scoring.split
    sums, texts = np.zeros(3), dict[int, tuple[str, str, str]]()
    count = scoring.count(len(dataset.blocks(split)))
    for batch in scoring.batches():
      *found, best = fetch(run(scoring.params, scoring.sharing.place(batch)))
      sums += np.asarray(found, np.float64)
      texts |= dataset.filled(batch, best, count)
    nll, correct, tokens = (float(x) for x in sums)
    errors.check(tokens > 0, f"No token of the split {split!r} is masked: it has too little text.")
    yield "tokens", int(tokens)
    yield "loss", nll / tokens
    yield "unigram", dataset.unigram_entropy(split)
    yield "perplexity", float(np.exp(nll / tokens))
    yield "accuracy", correct / tokens
    yield "unknown", dataset.unknown(split)
    ordered = [texts[number] for number in sorted(texts)]
    scoring.sources, scoring.outputs, scoring.references = (
      [three[i] for three in ordered] for i in range(3)
    )


class MaskedLM(Task[MaskedBlocks | EpisodeDataset[MaskedBlocks], MaskedModel, FillMask]):
  """A masked language modelling task; made by `MaskedLMConfig.build`."""
