"""Masked language modelling: running text in, an encoder, loss per masked token out."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Edit, Taps
from compmod_jax.core.losses import Term, cross_entropy
from compmod_jax.core.sharding import fetch
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.nemot_config import NemotConfig
from compmod_jax.tasks import modulated
from compmod_jax.tasks.base import Batch, Context, Evaluation, Metrics, Sharing, Status, silent
from compmod_jax.tasks.filler import Filler
from compmod_jax.tasks.masked_blocks import MaskedBlocks
from compmod_jax.tasks.masked_lm_config import MaskedLMConfig
from compmod_jax.tasks.over_blocks import OverBlocks
from compmod_jax.tasks.text_tokenizer import UNKNOWN

__all__ = ["MaskedLM", "MaskedLMConfig"]

# Keeps the masks apart from dropout, which is drawn from the same key.
_STREAM = 0x3A5C


class MaskedLM(OverBlocks):
  """A masked language modelling task; see `MaskedLMConfig` and the contract in `tasks.base`.

  Batches hold `tokens` [rows, length] and `index`; those of evaluation also `positions`, `targets`
  and `predict` (see `Masked`), and their tokens are masked already.

  Attributes:
    config: the task's configuration.
    model: the encoder, or a modulated model in encoder mode.
    blocks: the data.
    tokenizer: from text to tokens.
    edits: site -> change of that activation, wherever the model runs.
  """

  blocks: MaskedBlocks

  def __init__(
    self,
    config: MaskedLMConfig,
    model: EncoderConfig | NemotConfig,
    blocks: MaskedBlocks,
    edits: Mapping[str, Edit] | None = None,
  ):
    errors.check(
      config.length <= model.max_length,
      f"task.length is {config.length} but model.max_length is {model.max_length}; every token"
      " needs a position. Raise model.max_length.",
    )
    self.config, self.edits = config, dict(edits or {})
    self.blocks, self.tokenizer = blocks, blocks.tokenizer
    self.model = modulated.encoder(model, self.tokenizer.vocab_size, self.tokenizer.pad)
    self._scores = jax.jit(self._score)

  def edited(self, edits: Mapping[str, Edit]) -> "MaskedLM":
    """The same task with activations changed at these sites besides those of `self.edits`."""
    return MaskedLM(self.config, self.model.config, self.blocks, {**self.edits, **edits})

  # Words.

  @property
  def metric(self) -> str:
    """The loss per masked token, in nats."""
    return "loss"

  def describe(self) -> str:
    """One sentence on model and data."""
    model, data = self.model.config.describe(), self.config.data.describe()
    return f"Masked language model with {model}, {data}."

  def describe_scores(self) -> str:
    """What loss, perplexity and accuracy are per, and what unigram means."""
    return (
      "Tokens: those that are predicted. Loss: nats per predicted token; perplexity and accuracy"
      " are over the same tokens. Unigram: the loss of the best prediction that does not look at"
      " the context, the entropy of the split's own token frequencies." + UNKNOWN
    )

  # Data.

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches in which every block of a split is once, masked as in every evaluation."""
    return self.blocks.eval_batches(split, multiple)

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    return {"tokens": jnp.full((1, 2), self.tokenizer.unk, jnp.int32), "index": jnp.arange(1)}

  # Model.

  def init(self, rng: jax.Array) -> Any:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    return self.model.init(rng, jnp.full((1, 2), self.tokenizer.unk, jnp.int32))["params"]

  def forward(
    self, params: Any, batch: Batch, *, taps: Taps = OFF, rng: jax.Array | None = None
  ) -> jax.Array:
    """Logits at every position, [batch, time, vocab]; with dropout if a key is given."""
    return self._apply(params, batch["tokens"], None, taps, rng)

  def _apply(
    self, params: Any, tokens: Any, positions: Any, taps: Taps, rng: jax.Array | None
  ) -> jax.Array:
    logits: Any = self.model.apply(
      {"params": params},
      tokens,
      positions=positions,
      deterministic=rng is None,
      taps=taps.editing(self.edits).knowing(
        lambda site: self._holds(site, tokens, positions=positions)
      ),
      rngs=None if rng is None else {"dropout": rng},
    )
    return logits

  def rows(self, site: str, batch: Batch) -> jax.Array:
    """Positions that hold real tokens, auxiliary ones where a site has them."""
    return self._holds(site, batch["tokens"], batch["index"] >= 0)

  def _holds(
    self,
    site: str,
    tokens: jax.Array,
    rows: jax.Array | bool = True,
    positions: jax.Array | None = None,
  ) -> Bool[Array, "batch time"]:
    real = (tokens != self.tokenizer.pad) & jnp.reshape(jnp.asarray(rows), (-1, 1))
    return modulated.with_auxiliary(self.model.config, site, real, positions)

  def loss(
    self, params: Any, carry: Any, batch: Batch, context: Context
  ) -> tuple[dict[str, Term], Any, Metrics]:
    """Cross-entropy in nats per predicted token; the masks are a function of seed and step."""
    rng = context.rng if context.train else None
    masked = self.blocks.mask(
      jax.random.fold_in(context.rng, _STREAM), batch["tokens"], batch["index"]
    )
    taps = modulated.loss_taps(self.model.config, context)
    logits = self._apply(params, masked.tokens, masked.positions, taps, rng)
    losses = cross_entropy(logits, masked.targets, masked.predict)
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
    """Loss, perplexity and accuracy over the masked tokens of a split; always the same tokens.

    Args:
      params: the model's parameters.
      split: name of the split.
      sharing: how batches are laid over devices.
      decode: how many blocks are put out with their masked tokens filled in: all, the first n, or
        none.
      status: shows progress.
    """
    batches = list(self.eval_batches(split, multiple=sharing.multiple))
    sums, texts = np.zeros(3), dict[int, tuple[str, str, str]]()
    count = len(self.blocks[split]) if decode is True else int(decode)
    for i, batch in enumerate(batches):
      *found, best = fetch(self._scores(params, sharing.place(batch)))
      sums += np.asarray(found, np.float64)
      texts |= self.blocks.filled(batch, best, count)
      status(f"loss on {split}", i + 1, len(batches))
    nll, correct, tokens = (float(x) for x in sums)
    errors.check(tokens > 0, f"No token of the split {split!r} is masked: it has too little text.")
    values = {
      "tokens": int(tokens),
      "loss": nll / tokens,
      "unigram": self.blocks.unigram_entropy(split),
      "perplexity": float(np.exp(nll / tokens)),
      "accuracy": correct / tokens,
      "unknown": self.blocks.unknown(split),
    }
    ordered = [texts[number] for number in sorted(texts)]
    inputs, outputs, references = ([three[i] for three in ordered] for i in range(3))
    return Evaluation(values, outputs, references, inputs)

  def _score(self, params: Any, batch: Batch) -> tuple[jax.Array, ...]:
    """Sums of loss, right predictions and predicted tokens; and the predictions."""
    logits = self._apply(params, batch["tokens"], batch["positions"], OFF, None)
    losses = cross_entropy(logits, batch["targets"], batch["predict"])
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return losses.nll, losses.correct, losses.count, best

  @functools.cached_property
  def filler(self) -> Filler:
    """Fills in what is masked in a text; see `Filler`."""
    return Filler(self.model, self.tokenizer, self.config.batch_tokens, self.edits)
