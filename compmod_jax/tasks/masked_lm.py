"""Masked language modelling: running text in, an encoder, loss per masked token out."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import Term, cross_entropy
from compmod_jax.core.sharding import fetch
from compmod_jax.data import pipeline
from compmod_jax.data.blocks import TextBlocks, check_blocks
from compmod_jax.data.corruption import Masked, MaskingConfig, mask_tokens
from compmod_jax.data.episodes import EpisodeDataset
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

  def __post_init__(self):
    check_blocks(self)
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
    dataset = MaskedBlocks(self, self.make_tokenizer(files, cache), cache)
    errors.check(
      self.length <= model.max_length,
      f"task.length is {self.length} but model.max_length is {model.max_length}; every token"
      " needs a position. Raise model.max_length.",
    )
    tokenizer = dataset.tokenizer
    task = MaskedLM(
      dataset=dataset,
      model=MaskedModel(model.encoder(tokenizer.vocab_size, tokenizer.pad), tokenizer.pad),
      objective=standard(MaskedTokenLoss(dataset.mask), model),
      evaluators=(MaskedTokenScores(),),
      generator=FillMask(tokenizer, self.batch_tokens),
    )
    if self.meta is None:
      return task
    within = dataset.documents if self.meta.episodes.within == "document" else None
    meta = self.meta.over(task.objective)
    meta.check(jax.eval_shape(lambda: nn.unbox(task.model.init(jax.random.key(0)))))
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


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedModel(TaskModel[Encoder]):
  """An encoder on blocks of text.

  Attributes:
    pad: the token that marks padding.
  """

  pad: int

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
      positions=positions,
      deterministic=rng is None,
      intermediates=intermediates.editing(
        self.edits, lambda site: self._holds(site, tokens, positions=positions)
      ),
      rngs=None if rng is None else {"dropout": rng},
    )

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
