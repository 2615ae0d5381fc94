"""Causal language modelling: blocks of text in, a decoder, loss per token out."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import CrossEntropy, Term, cross_entropy_of, token_nll
from compmod_jax.data import pipeline
from compmod_jax.data.blocks import TextBlocks, check_blocks
from compmod_jax.data.paired import PairedDataset
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.text_tokenizer import UNKNOWN, DocumentData, count_words, text_tokenizer
from compmod_jax.data.tokenizers import Tokenizer, TokenizerConfig
from compmod_jax.decoding import DecodeConfig, recoding
from compmod_jax.decoding.types import Cache
from compmod_jax.layers.output import OutputKind
from compmod_jax.models.base import Decoder, ModelConfig, valid_at
from compmod_jax.models.nemot import LM
from compmod_jax.models.text import OutputLayers, Text
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
from compmod_jax.tasks.objectives import standard
from compmod_jax.tasks.scorer import Scorer
from compmod_jax.tasks.text_generator import Prompts, TextGenerator


@dataclasses.dataclass(frozen=True)
class CausalLMConfig:
  """A language modelling task for decoders: text, tokenizer, and blocks of documents."""

  data: DocumentData = GrammarDocuments()
  """Where documents come from; each ends with an end token."""
  tokenizer: TokenizerConfig = TokenizerConfig()
  """The tokenizer."""
  tokenizer_documents: int = 200_000
  """The tokenizer is trained on the first N training documents, at most."""
  length: int = 128
  """Tokens of a block: the start token, and a stretch of documents with an end token after each."""
  batch_tokens: int = 4096
  """Tokens of a global batch, a multiple of `length`."""
  joined: bool = False
  """Tokens see the documents before their own in a block; else every document is apart."""
  output_layer: OutputKind = "fused"
  """How losses are computed: logits and loss in one kernel where there is one, which never writes
  the logits to memory (fused), or from all logits (plain)."""
  stride: int = 0
  """Evaluation: windows start every N tokens, and only the last ones of a window count (all
  of the first); 0: a block's length, so that every token is read once."""
  small_share: float = 0.07
  """Share of the training blocks in the small part, for phases that train on a part."""
  bilevel: BilevelConfig | None = None
  """Parameters that learn on the small part after steps of the rest on the large one, such as the
  neuromodulatory set."""

  def __post_init__(self):
    check_blocks(self)
    errors.check_choice("task.output_layer", self.output_layer, get_args(OutputKind))
    errors.check(
      0 <= self.stride < self.length,
      f"task.stride is {self.stride}; give 1 to {self.length - 1} tokens (task.length - 1), or 0"
      " for the whole length.",
    )

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "CausalLM":
    """The task with its tokenizer: the one in `files`, else trained on the training split.

    Args:
      model: the configuration of a decoder.
      files: what `CausalBlocks.files` returned.
      cache: folder in which the tokenizer and tokenised text are kept.

    Raises:
      UserError: the model is of another kind, data are missing, or `files` lacks the tokenizer.
    """
    model.decoder(1, 0)  # a model of another kind is refused before the tokenizer is trained
    return self.build_with(model, self.make_tokenizer(files, cache), cache)

  def build_with(
    self, model: ModelConfig, tokenizer: Tokenizer, cache: Path | None = None
  ) -> "CausalLM":
    """The task with this tokenizer.

    Raises:
      UserError: the model is of another kind, has too few positions, or reads no running text.
    """
    errors.check(
      self.length - 1 <= model.max_length,
      f"task.length is {self.length} but model.max_length is {model.max_length}; every token but"
      " the last of a block needs a position. Raise model.max_length.",
    )
    model.check_running_text()
    module = model.decoder(tokenizer.vocab_size, tokenizer.pad)
    dataset = CausalBlocks(self, tokenizer, tokenizer.eos, cache)
    task = CausalLM(
      dataset=dataset,
      model=CausalModel(
        module, tokenizer.eos, tokenizer.pad, self.joined, output_kind=self.output_layer
      ),
      objective=standard(NextTokenLoss(), model),
      evaluators=(WindowPerplexity(self.length - 1, dataset.stride),),
      generator=TextGenerator(tokenizer, Scorer(tokenizer, _token_scores)),
    )
    return task if self.bilevel is None else self.bilevel.over(task)

  def make_tokenizer(
    self, files: Mapping[str, bytes] | None = None, cache: Path | None = None
  ) -> Tokenizer:
    """The tokenizer in `files`, else one that is trained on the training split."""
    return text_tokenizer(self.data, self.tokenizer, self.tokenizer_documents, files, cache)

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return f"Language model, {model.describe()}; {self.data.describe()}."


class CausalBlocks(TextBlocks[CausalLMConfig]):
  """Blocks of running text; in evaluation, windows in which every token counts once.

  A document begins with the end token of the one before it, and a block with that token, too.
  Batches of evaluation also hold `counted`, which says of every predicted token whether it counts.
  """

  @property
  def stride(self) -> int:
    """Tokens after which a window of evaluation starts behind the one before."""
    return self.config.stride or self.config.length - 1

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches of windows in which every token of a split counts once."""
    examples, news = self.blocks(split, self.stride), self.config.length - 1 - self.stride
    for batch in pipeline.eval_batches(examples, self.batch, multiple=multiple):
      places = np.arange(batch["tokens"].shape[1] - 1)[None]
      new = (places >= news) | (batch["index"] == 0)[:, None]
      yield {**batch, "counted": new & predicted(batch, self.tokenizer.pad)}

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    return {"tokens": jnp.full((1, 3), self.tokenizer.eos, jnp.int32), "index": jnp.arange(1)}


def predicted(batch: Batch, pad: int) -> jax.Array:
  """Which tokens after the first are predicted: all but padding, and none of a row that is none."""
  return (batch["tokens"][:, 1:] != pad) & (batch["index"] >= 0)[:, None]


@dataclasses.dataclass(frozen=True, eq=False)
class CausalModel(TaskModel[Decoder]):
  """A decoder on blocks of text; logits are those of every token after the first.

  Attributes:
    eos: the token that ends documents and starts blocks.
    pad: the token that marks padding.
    joined: tokens see the documents before their own.
    swapped: auxiliary token that takes the place of each, int32 [auxiliary tokens]; none: itself.
    output_kind: how its losses are computed; see `CausalLMConfig.output_layer`.
  """

  eos: int
  pad: int
  joined: bool
  swapped: jax.Array | None = None
  output_kind: OutputKind = "fused"

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    tokens = jnp.full((1, 2), self.eos, jnp.int32)
    return self.module.init(rng, self.text(tokens), [(LM, 1)])["params"]

  def text(self, tokens: jax.Array) -> Text:
    """What the module is given."""
    auxiliary, segments, numbers = None, None, self.config.auxiliary_ids("dec", LM)
    if numbers:
      ids = jnp.asarray(numbers, jnp.int32)
      auxiliary = jnp.broadcast_to(ids[None], (len(tokens), len(ids)))
      auxiliary = auxiliary if self.swapped is None else jnp.take(self.swapped, auxiliary)
    if not self.joined:
      segments = 1 + jnp.cumsum(tokens == self.eos, axis=1, dtype=jnp.int32)
    return Text(tokens, auxiliary, segments)

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits of every token after the first of a block; with dropout if a key is given."""
    return self.logits(params, jnp.asarray(batch["tokens"])[:, :-1], intermediates, rng)

  def logits(
    self,
    params: Params,
    tokens: jax.Array,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Logits of the token after each, [batch, time, vocab]."""
    intermediates = self._edited(tokens, intermediates)
    return self._output_layers(params, tokens, intermediates, rng).formed(intermediates).logits

  def losses(
    self,
    params: Params,
    batch: Batch,
    counted: Bool[Array, "batch time"],
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> CrossEntropy:
    """Losses of the tokens after the first that count; with dropout if a key is given.

    Logits are formed where they are read or changed, and where nothing else can be.
    """
    tokens = jnp.asarray(batch["tokens"])
    intermediates = self._edited(tokens[:, :-1], intermediates)
    layer = self._output_layers(params, tokens[:, :-1], intermediates, rng).output
    found = layer.label_statistics(tokens[:, 1:], self.output_kind, intermediates)
    return cross_entropy_of(found, len(layer.table), counted)

  def _edited(self, tokens: jax.Array, intermediates: Intermediates) -> Intermediates:
    return intermediates.editing(self.edits, lambda site: self._holds(site, tokens))

  def _output_layers(
    self,
    params: Params,
    tokens: jax.Array,
    intermediates: Intermediates,
    rng: jax.Array | None,
  ) -> OutputLayers:
    return self.module.apply(
      {"params": params},
      self.text(tokens),
      [(LM, len(tokens))],
      deterministic=rng is None,
      intermediates=intermediates,
      rngs=None if rng is None else {"dropout": rng},
      method="output_layers",
    )

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Positions that hold real tokens, auxiliary ones where a site has them."""
    return self._holds(site, batch["tokens"][:, :-1], batch["index"] >= 0)

  def _holds(
    self, site: str, tokens: jax.Array, rows: jax.Array | bool = True
  ) -> Bool[Array, "batch time"]:
    real = (tokens != self.pad) & jnp.reshape(jnp.asarray(rows), (-1, 1))
    return valid_at(self.config, site, real)

  def start_tokens(self, site: str) -> int:
    """One: every block begins with the start token."""
    return 1

  def prepare(
    self, params: Params, prompts: Prompts, config: DecodeConfig, length: int
  ) -> recoding.Searched:
    """What a search after prompts takes."""
    apply = functools.partial(self.module.apply, {"params": params})
    text, intermediates = self.text(prompts.tokens), OFF.editing(self.edits)
    before = intermediates.knowing(lambda site: self._holds(site, prompts.tokens))
    cache = apply(
      text, LM, beams=config.width, length=length, intermediates=before.apart(), method="prefill"
    )

    def step(
      cache: Cache, tokens: jax.Array, intermediates: Intermediates
    ) -> tuple[jax.Array, Cache]:
      return apply(cache, tokens, LM, intermediates=intermediates, method="step")

    rows = len(prompts.tokens)
    intermediates = recoding.knowing_rows(intermediates, jnp.ones(rows, bool), config)
    stack = functools.partial(self.config.decoding_stack, LM)
    return recoding.prepared(step, cache, intermediates, config, batch=rows, stack=stack)


@dataclasses.dataclass(frozen=True)
class NextTokenLoss:
  """Cross-entropy in nats per token after the first of a block."""

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """One term."""
    return {"cross_entropy": 1.0}

  def __call__(
    self, model: CausalModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    losses = model.losses(
      params,
      batch,
      predicted(batch, model.pad),
      intermediates=context.intermediates,
      rng=context.dropout_rng,
    )
    metrics = {"nll": (losses.nll, losses.count), "accuracy": (losses.correct, losses.count)}
    return {"cross_entropy": Term(losses.nll, losses.count)}, carry, metrics


def _token_scores(model: CausalModel, params: Params, batch: Batch) -> dict[str, jax.Array]:
  """What `Scored` holds of every token of texts."""
  logits = model.logits(params, jnp.asarray(batch["tokens"]))
  return {"nll": token_nll(logits, jnp.asarray(batch["targets"]))}


def _sums(model: CausalModel, params: Params, batch: Batch) -> tuple[jax.Array, ...]:
  """Sums of loss, right predictions and tokens."""
  losses = model.losses(params, batch, batch["counted"])
  return losses.nll, losses.correct, losses.count


@dataclasses.dataclass(frozen=True)
class WindowPerplexity:
  """Loss, perplexity and accuracy over windows in which every token of a split counts once.

  Attributes:
    window: tokens of a window.
    stride: tokens after which the next one starts.
  """

  window: int
  stride: int
  metric: str = "perplexity"

  @property
  def units(self) -> str:
    """What loss and perplexity are per, and how far back a prediction looks."""
    return (
      "Loss: nats per token; perplexity per token and per word between blanks. The end of every"
      f" document counts as a token and as a word. Windows of {self.window} tokens start every"
      f" {self.stride}; after the first, only tokens that no window had before count." + UNKNOWN
    )

  def __call__(self, scoring: Scoring["CausalLM"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    dataset = scoring.task.dataset
    nll, correct, tokens = scoring.sums(_sums)
    words = count_words(dataset.config.data.load(scoring.split), dataset.tokenizer)
    yield "tokens", int(tokens)
    yield "loss", nll / tokens
    yield "perplexity", float(np.exp(nll / tokens))
    yield "word_perplexity", float(np.exp(nll / words))
    yield "accuracy", correct / tokens
    yield "unknown", dataset.unknown(scoring.split)


class CausalLM(Task[CausalBlocks | PairedDataset[CausalBlocks], CausalModel, TextGenerator]):
  """A causal language modelling task; made by `CausalLMConfig.build`."""
