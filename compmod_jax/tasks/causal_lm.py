"""Language modelling by decoders: blocks of text in, loss per token out."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Edit, Taps
from compmod_jax.core.losses import Term, cross_entropy, token_nll
from compmod_jax.data import pipeline
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot_config import NemotConfig
from compmod_jax.models.text import Text, TextOutput
from compmod_jax.tasks import modulated, recoded_step
from compmod_jax.tasks.base import (
  Batch,
  Context,
  Evaluation,
  Metrics,
  Sharing,
  Status,
  silent,
  total_losses,
)
from compmod_jax.tasks.causal_lm_config import CausalLMConfig
from compmod_jax.tasks.generator import Generator, Prompts
from compmod_jax.tasks.over_blocks import OverBlocks
from compmod_jax.tasks.scorer import Scorer
from compmod_jax.tasks.text_blocks import TextBlocks
from compmod_jax.tasks.text_tokenizer import UNKNOWN, count_words

__all__ = ["CausalLM", "CausalLMConfig"]


class CausalLM(OverBlocks):
  """A language modelling task for decoders; see `CausalLMConfig` and the contract in `tasks.base`.

  Batches hold `tokens` [rows, length] and `index`; those of evaluation also `counted`, which says
  of every predicted token whether it counts. A document begins with the end token of the one before
  it, and a block with that token, too.

  Attributes:
    config: the task's configuration.
    model: the decoder.
    blocks: the data.
    tokenizer: from text to tokens.
    edits: site -> change of that activation, wherever the model runs.
  """

  def __init__(
    self,
    config: CausalLMConfig,
    model: NemotConfig | DecoderConfig,
    tokenizer: Tokenizer,
    cache: Path | None = None,
    edits: Mapping[str, Edit] | None = None,
  ):
    errors.check(
      config.length - 1 <= model.max_length,
      f"task.length is {config.length} but model.max_length is {model.max_length}; every token but"
      " the last of a block needs a position. Raise model.max_length.",
    )
    if isinstance(model, NemotConfig):
      modulated.check_running_text(model)
    self.config, self.tokenizer, self.edits = config, tokenizer, dict(edits or {})
    self.blocks = TextBlocks(config, tokenizer, tokenizer.eos, cache)
    self.model = modulated.build(model, tokenizer.vocab_size, tokenizer.pad)
    self._scores = jax.jit(self._score)

  def edited(self, edits: Mapping[str, Edit]) -> "CausalLM":
    """The same task with activations changed at these sites besides those of `self.edits`."""
    cache, model = self.blocks.cache, self.model.config
    return CausalLM(self.config, model, self.tokenizer, cache, {**self.edits, **edits})

  # Words.

  @property
  def metric(self) -> str:
    """Perplexity per token."""
    return "perplexity"

  def describe(self) -> str:
    """One sentence on model and data."""
    return f"Language model, {self.model.config.describe()}; {self.config.data.describe()}."

  def describe_scores(self) -> str:
    """What loss and perplexity are per, and how far back a prediction looks."""
    window, stride = self.config.length - 1, self._stride
    return (
      "Loss: nats per token; perplexity per token and per word between blanks. The end of every"
      f" document counts as a token and as a word. Windows of {window} tokens start every {stride};"
      " after the first, only tokens that no window had before count." + UNKNOWN
    )

  # Data.

  @property
  def _stride(self) -> int:
    return self.config.stride or self.config.length - 1

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches of windows in which every token of a split counts once."""
    examples, news = self.blocks.windows(split, self._stride), self.config.length - 1 - self._stride
    for batch in pipeline.eval_batches(examples, self.blocks.batch, multiple=multiple):
      places = np.arange(batch["tokens"].shape[1] - 1)[None]
      new = (places >= news) | (batch["index"] == 0)[:, None]
      yield {**batch, "counted": new & self._real(batch)}

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    return {"tokens": jnp.full((1, 3), self.tokenizer.eos, jnp.int32), "index": jnp.arange(1)}

  def _real(self, batch: Batch) -> Any:
    """Which tokens are predicted: all but padding, and none of a row that is filler."""
    return (batch["tokens"][:, 1:] != self.tokenizer.pad) & (batch["index"] >= 0)[:, None]

  # Model.

  def init(self, rng: jax.Array) -> Any:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    tokens = self.example()["tokens"][:, :-1]
    return self.model.init(rng, self.text(tokens), [(modulated.LM, 1)])["params"]

  def text(self, tokens: jax.Array) -> Text:
    """What the model is given."""
    config, auxiliary, segments = self.model.config, None, None
    if isinstance(config, NemotConfig):
      ids = jnp.asarray(config.auxiliary_ids("dec", modulated.LM), jnp.int32)
      auxiliary = jnp.broadcast_to(ids[None], (len(tokens), len(ids)))
    if not self.config.joined:
      segments = 1 + jnp.cumsum(tokens == self.tokenizer.eos, axis=1, dtype=jnp.int32)
    return Text(tokens, auxiliary, segments)

  def forward(
    self, params: Any, batch: Batch, *, taps: Taps = OFF, rng: jax.Array | None = None
  ) -> jax.Array:
    """Logits of every token after the first of a block; with dropout if a key is given."""
    return self._logits(params, jnp.asarray(batch["tokens"])[:, :-1], taps, rng)

  def _logits(
    self, params: Any, tokens: jax.Array, taps: Taps = OFF, rng: jax.Array | None = None
  ) -> jax.Array:
    out: TextOutput = self.model.apply(  # pyright: ignore[reportAssignmentType]
      {"params": params},
      self.text(tokens),
      [(modulated.LM, len(tokens))],
      deterministic=rng is None,
      taps=taps.editing(self.edits).knowing(lambda site: self._holds(site, tokens)),
      rngs=None if rng is None else {"dropout": rng},
    )
    return out.logits

  def rows(self, site: str, batch: Batch) -> jax.Array:
    """Positions that hold real tokens, auxiliary ones where a site has them."""
    return self._holds(site, batch["tokens"][:, :-1], batch["index"] >= 0)

  def _holds(
    self, site: str, tokens: jax.Array, rows: jax.Array | bool = True
  ) -> Bool[Array, "batch time"]:
    real = (tokens != self.tokenizer.pad) & jnp.reshape(jnp.asarray(rows), (-1, 1))
    return modulated.with_auxiliary(self.model.config, site, real)

  def loss(
    self, params: Any, carry: Any, batch: Batch, context: Context
  ) -> tuple[dict[str, Term], Any, Metrics]:
    """Cross-entropy in nats per token."""
    rng = context.rng if context.train else None
    taps = modulated.loss_taps(self.model.config, context)
    logits = self.forward(params, batch, taps=taps, rng=rng)
    losses = cross_entropy(logits, batch["tokens"][:, 1:], self._real(batch))
    terms, found = self._read(losses, taps, functools.partial(self.rows, batch=batch))
    return terms, carry, found

  def evaluate(
    self,
    params: Any,
    split: str,
    *,
    sharing: Sharing = Sharing(),
    decode: bool | int = True,
    status: Status = silent,
  ) -> Evaluation:
    """Loss, perplexity and accuracy of a split.

    Args:
      params: the model's parameters.
      split: name of the split.
      sharing: how batches are laid over devices.
      decode: of no importance: nothing is put out.
      status: shows progress.
    """
    batches = self.eval_batches(split, multiple=sharing.multiple)
    nll, correct, tokens = total_losses(self._scores, params, batches, split, sharing, status)
    words = count_words(self.config.data.load(split), self.tokenizer)
    values = {
      "tokens": int(tokens),
      "loss": nll / tokens,
      "perplexity": float(np.exp(nll / tokens)),
      "word_perplexity": float(np.exp(nll / words)),
      "accuracy": correct / tokens,
      "unknown": self.blocks.unknown(split),
    }
    return Evaluation(values, [], [], [])

  @functools.cached_property
  def scorer(self) -> Scorer:
    """Scores texts one by one; see `Scorer`."""

    def run(params: Any, batch: Batch) -> dict[str, jax.Array]:
      logits = self._logits(params, jnp.asarray(batch["tokens"]))
      return {"nll": token_nll(logits, jnp.asarray(batch["targets"]))}

    return Scorer(self.tokenizer, run, self.model.config.max_length)

  @functools.cached_property
  def generator(self) -> Generator:
    """Continues texts; see `Generator`."""
    return Generator(self.tokenizer, self._prepare, self.model.config.max_length)

  def _prepare(
    self, params: Any, prompts: Prompts, config: DecodeConfig, length: int
  ) -> recoded_step.Searched:
    """What a search takes."""
    apply = functools.partial(self.model.apply, {"params": params})
    text, taps, task = self.text(prompts.tokens), OFF.editing(self.edits), modulated.LM
    before = taps.knowing(lambda site: self._holds(site, prompts.tokens))
    cache = apply(
      text, task, beams=config.width, length=length, taps=before.apart(), method="prefill"
    )

    def step(cache: Any, tokens: jax.Array, taps: Taps) -> Any:
      return apply(cache, tokens, task, taps=taps, method="step")

    side = self.model.config.last_side(task)
    return recoded_step.prepared(
      step,
      cache,
      recoded_step.knowing_rows(taps, jnp.ones(len(prompts.tokens), bool), config),
      config,
      batch=len(prompts.tokens),
      side=side,
      layers=self.model.config.layers(side),
    )

  def _score(self, params: Any, batch: Batch) -> tuple[jax.Array, ...]:
    """Sums of loss, right predictions and tokens."""
    logits = self.forward(params, batch)
    losses = cross_entropy(logits, batch["tokens"][:, 1:], batch["counted"])
    return losses.nll, losses.correct, losses.count
