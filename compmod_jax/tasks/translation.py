"""Translation: sentence pairs in, an encoder-decoder Transformer, BLEU or exact match out."""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Edit, Taps
from compmod_jax.core.losses import Term, cross_entropy, token_nll
from compmod_jax.data import pipeline
from compmod_jax.data.base import Splits
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples, tokenise
from compmod_jax.data.fingerprint import Fingerprints
from compmod_jax.data.subsets import part_numbers
from compmod_jax.data.tokenizers import BOS, PAD, Tokenizer
from compmod_jax.decoding import DecodeConfig
from compmod_jax.metrics import text
from compmod_jax.models.transformer import Transformer, TransformerConfig, shift_right
from compmod_jax.tasks import competing
from compmod_jax.tasks.base import (
  Batch,
  Context,
  Evaluation,
  Metrics,
  OfSplits,
  Sharing,
  Status,
  silent,
  total_losses,
)
from compmod_jax.tasks.scorer import PairScorer
from compmod_jax.tasks.text_tokenizer import UNKNOWN
from compmod_jax.tasks.translation_config import SOURCE_FILE, TARGET_FILE, TranslationConfig
from compmod_jax.tasks.translator import Translator, mean_entropy

__all__ = ["Translation", "TranslationConfig"]


class Translation(OfSplits):
  """A translation task; see `TranslationConfig` and the contract in `tasks.base`.

  Attributes:
    config: the task's configuration.
    model: the Transformer.
    splits: the data.
    source_tokenizer: from text to source tokens.
    target_tokenizer: from target tokens to text.
    edits: site -> change of that activation, wherever the model runs.
  """

  def __init__(
    self,
    config: TranslationConfig,
    model: TransformerConfig,
    splits: Splits,
    source: Tokenizer,
    target: Tokenizer,
    edits: Mapping[str, Edit] | None = None,
  ):
    self.config, self.splits, self.edits = config, splits, dict(edits or {})
    self.source_tokenizer, self.target_tokenizer = source, target
    self.model = Transformer(model, source.vocab_size, target.vocab_size, PAD)
    errors.check(
      config.batch.longest <= model.max_length,
      f"task.batch lets sentences have {config.batch.longest} tokens but model.max_length is"
      f" {model.max_length}; every token needs a position. Raise model.max_length.",
    )
    self._token_losses = jax.jit(self._eval_sums)

  def edited(self, edits: Mapping[str, Edit]) -> "Translation":
    """The same task with activations changed at these sites besides those of `self.edits`."""
    sides = self.source_tokenizer, self.target_tokenizer
    model, edits = self.model.config, {**self.edits, **edits}
    return Translation(self.config, model, self.splits, *sides, edits)

  def decoding(self, decode: DecodeConfig) -> "Translation":
    """The same task, whose outputs are searched for in another way."""
    other = copy.copy(self)
    other.config = dataclasses.replace(self.config, decode=decode)
    other.translator = self.translator  # what is compiled for one serves the other
    return other

  @property
  def decode(self) -> DecodeConfig:
    """How translations are searched for."""
    return self.config.decode

  def describe(self) -> str:
    """One sentence on model and data."""
    model, data = self.model.config.describe(), self.config.data
    return f"Transformer with {model}, {data.source_language} to {data.target_language}."

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    buckets = ", ".join(map(str, self.batch.buckets))
    return f"batches of {self.batch.tokens} tokens padded to {buckets}"

  def describe_scores(self) -> str:
    """What loss and perplexity are per."""
    return (
      "Loss: nats per target token, end of sentence included, without label smoothing. Perplexity:"
      " per token of the model's vocabulary, and per word of the raw reference." + UNKNOWN
    )

  @property
  def metric(self) -> str:
    """`bleu` or `exact_match`, as the data say."""
    return self.config.data.metric

  def files(self) -> dict[str, bytes]:
    """The tokenizers, serialised."""
    return {
      SOURCE_FILE: self.source_tokenizer.to_bytes(),
      TARGET_FILE: self.target_tokenizer.to_bytes(),
    }

  def check_data(self) -> None:
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

  @functools.cached_property
  def batch(self) -> BatchConfig:
    """The batch configuration with its buckets chosen from the training split."""
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
    return tokenise(self.splits[split], self.source_tokenizer, self.target_tokenizer, batch)

  # Training.

  def init(self, rng: jax.Array) -> Any:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    tokens = jnp.ones((1, 2), jnp.int32)
    return self.model.init(rng, tokens, tokens)["params"]

  def init_carry(self) -> tuple[()]:
    """Nothing: a Transformer has no recurrent state."""
    return ()

  def forward(
    self, params: Any, batch: Batch, *, taps: Taps = OFF, rng: jax.Array | None = None
  ) -> jax.Array:
    """Logits of every target token, [batch, time, vocab]; with dropout if a key is given."""
    logits: Any = self.model.apply(
      {"params": params},
      batch["source"],
      shift_right(batch["target"], BOS),
      deterministic=rng is None,
      taps=taps.editing(self.edits).knowing(lambda site: self.rows(site, batch)),
      rngs=None if rng is None else {"dropout": rng},
    )
    return logits

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    tokens = jnp.ones((1, 2), jnp.int32)
    return {"source": tokens, "target": tokens}

  def routing_sites(self) -> list[str]:
    """Names of the weights [batch, time, units] of every router, in the model's order."""
    return list(self.model.routing_sites())

  def rows(self, site: str, batch: Batch) -> jax.Array:
    """Positions at which a site holds real tokens: source or target tokens, without padding."""
    return batch["source" if site.startswith("encoder/") else "target"] != PAD

  def start_tokens(self, site: str) -> int:
    """One for the decoder's sites: what it reads is the target behind a start token."""
    return 0 if site.startswith("encoder/") else 1

  def objective(self) -> dict[str, float]:
    """Label-smoothed cross-entropy, and the routers' losses where their coefficients are not 0."""
    return {"cross_entropy": 1.0} | competing.objective(self.model.config)

  def loss(
    self, params: Any, carry: Any, batch: Batch, context: Context
  ) -> tuple[dict[str, Term], Any, Metrics]:
    """Label-smoothed cross-entropy per target token, end of sentence included."""
    config, rng = self.model.config, context.rng if context.train else None
    taps = competing.loss_taps(config, context)
    logits = self.forward(params, batch, taps=taps, rng=rng)
    target, smoothing = batch["target"], self.config.label_smoothing
    losses = cross_entropy(logits, target, target != PAD, label_smoothing=smoothing)
    terms, found = competing.read(config, taps, lambda site: self.rows(site, batch))
    terms["cross_entropy"] = Term(losses.smoothed, losses.count)
    found |= {"nll": (losses.nll, losses.count), "accuracy": (losses.correct, losses.count)}
    return terms, carry, found

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[Any, int]:
    """An endless iterator over training batches, and how many make an epoch.

    The parts "large" and "small" of the examples are functions of the seed and their number.
    """
    examples, share = self.train_examples, self.config.small_share
    if part != "all":
      numbers = part_numbers(part, len(examples), small_share=share, seed=seed)
      examples = examples.select(numbers)
    iterator = pipeline.train_batches(
      examples, self.batch, seed=seed, multiple=multiple, process=process, processes=processes
    )
    return iterator, pipeline.batches_per_epoch(examples, self.batch, multiple)

  def data_notes(self) -> list[str]:
    """What of the training split was left out, for the log."""
    return self.train_examples.notes(self.splits["train"])

  def fingerprints(self) -> Fingerprints:
    """Of the source and the target side of the training examples."""
    return self.train_examples.fingerprints()

  # Evaluation and use.

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[pipeline.Batch]:
    """Batches in which every pair of a split is once, but for those over the length ceiling."""
    return pipeline.eval_batches(self.examples(split), self.batch, multiple=multiple)

  def evaluate(
    self,
    params: Any,
    split: str,
    *,
    sharing: Sharing = Sharing(),
    decode: bool | int = True,
    status: Status = silent,
  ) -> Evaluation:
    """Loss and perplexity of a split, and BLEU and chrF or exact match of its translations.

    Perplexity is e to the mean negative log-likelihood in nats, per target token (end of sentence
    included), and per word (whitespace words and one end for each sentence). Pairs over the length
    ceiling are left out of the loss, as in training, and counted; every source is translated.

    Args:
      params: the model's parameters.
      split: name of the split.
      sharing: how batches are laid over devices.
      decode: translate all sentences, the first n, or none.
      status: shows progress.
    """
    pairs, examples = self.splits[split], self.examples(split)
    batches = self.eval_batches(split, multiple=sharing.multiple)
    nll, correct, tokens = total_losses(self._token_losses, params, batches, split, sharing, status)
    scored = [pairs.target[int(i)] for i in examples.index]
    words = text.count_words(scored) + len(scored)
    perplexity = text.perplexity(nll, int(tokens), words)
    values: dict[str, Any] = {
      "sentences": len(pairs),
      "dropped": len(examples.dropped),
      "loss": nll / tokens,
      "perplexity": perplexity.per_token,
      "word_perplexity": perplexity.per_word,
      "accuracy": correct / tokens,
      "unknown": self._unknown(examples),
    }
    count = len(pairs) if decode is True else min(int(decode), len(pairs))
    sources, references = list(pairs.source[:count]), list(pairs.target[:count])
    if not count:
      return Evaluation(values, [], [], [])
    hypotheses = self.translator(
      params, sources, self.decode, sharing=sharing, status=status, name=split
    )
    outputs = [best[0].text for best in hypotheses]
    values |= {"decoded": len(outputs), "search": self.decode.describe()}
    values |= text.score_outputs(outputs, references) | mean_entropy(hypotheses)
    return Evaluation(values, outputs, references, sources)

  def _unknown(self, examples: Examples) -> float:
    """Per cent of the tokens of both sides, ends included, that are unknown words."""
    sides = (("source", self.source_tokenizer), ("target", self.target_tokenizer))
    found = sum(
      int(np.sum(tokens == tokenizer.unk))
      for side, tokenizer in sides
      for tokens in examples.columns[side]
    )
    return 100 * found / max(1, sum(examples.tokens.values()))

  def _eval_sums(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    target = batch["target"]
    losses = cross_entropy(self.forward(params, batch), target, target != PAD)
    return losses.nll, losses.correct, losses.count

  @functools.cached_property
  def scorer(self) -> PairScorer:
    """Scores given translations; see `PairScorer`."""

    def run(params: Any, batch: Batch) -> jax.Array:
      return token_nll(self.forward(params, batch), jnp.asarray(batch["target"]))

    sides = self.source_tokenizer, self.target_tokenizer
    return PairScorer(*sides, run, self.batch, self.model.config.max_length)

  @functools.cached_property
  def translator(self) -> Translator:
    """Translates sentences; see `Translator`."""
    return Translator(
      self.model, self.source_tokenizer, self.target_tokenizer, self.batch, self.edits
    )
