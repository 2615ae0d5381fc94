"""What tasks on blocks of running text have in common."""

from collections.abc import Callable
from typing import Any

import jax

from compmod_jax.core import errors
from compmod_jax.core.intermediates import Taps
from compmod_jax.core.losses import CrossEntropy, Term
from compmod_jax.data.fingerprint import Fingerprints
from compmod_jax.tasks import competing, modulated
from compmod_jax.tasks.base import Metrics, OfSplits
from compmod_jax.tasks.text_blocks import TextBlocks
from compmod_jax.tasks.text_tokenizer import FILE


class OverBlocks(OfSplits):
  """The part of a task that reads blocks, and whose model has no recurrent state.

  Attributes:
    config: the task's configuration.
    model: the module.
    blocks: the data.
  """

  decode = None
  config: Any
  model: Any
  blocks: TextBlocks

  def decoding(self, decode: Any) -> Any:
    """Raises a `UserError`: text is scored, and nothing searched for."""
    raise errors.UserError(
      f"{type(self).__name__} scores text and does not search for outputs; leave decoding options"
      " out."
    )

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    blocks = self.config.batch_tokens // self.config.length
    return f"batches of {blocks} blocks of {self.config.length} tokens"

  def resolved_config(self) -> Any:
    """The configuration; nothing in it is chosen from the training data."""
    return self.config

  def files(self) -> dict[str, bytes]:
    """The tokenizer, serialised."""
    return {FILE: self.blocks.tokenizer.to_bytes()}

  def check_data(self) -> None:
    """Loads every split that will be scored, and that of training.

    Raises:
      UserError: one is missing, damaged or empty.
    """
    for split in self.split_names():
      self.blocks[split]

  def data_notes(self) -> list[str]:
    """How much training text there is."""
    blocks = self.blocks["train"]
    return [f"{blocks.tokens['tokens'] - len(blocks):,} training tokens in {len(blocks):,} blocks"]

  def fingerprints(self) -> Fingerprints:
    """Of the training text."""
    return self.blocks.fingerprints()

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[Any, int]:
    """An endless iterator over training batches, and how many make an epoch."""
    return self.blocks.train_batches(part, seed, multiple, process, processes)

  def init_carry(self) -> tuple[()]:
    """Nothing: the model has no recurrent state."""
    return ()

  def routing_sites(self) -> list[str]:
    """Names of the weights [batch, time, units] of every router, in the model's order."""
    return list(self.model.routing_sites())

  def start_tokens(self, site: str) -> int:
    """One: every block begins with the start token."""
    return 1

  def objective(self) -> dict[str, float]:
    """Cross-entropy, and the routers' losses where their coefficients are not 0."""
    return {"cross_entropy": 1.0, **competing.objective(self.model.config)}

  def _read(
    self, losses: CrossEntropy, taps: Taps, rows: Callable[[str], jax.Array]
  ) -> tuple[dict[str, Term], Metrics]:
    """The terms of a batch's loss, what competition adds among them, and what is logged of it.

    Args:
      losses: of its tokens.
      taps: of `modulated.loss_taps`, after the model ran.
      rows: from a site to the positions at which it holds real tokens.
    """
    config = self.model.config
    terms, found = competing.read(config, taps, rows)
    terms["cross_entropy"] = Term(losses.nll, losses.count)
    found |= {"nll": (losses.nll, losses.count), "accuracy": (losses.correct, losses.count)}
    return terms, found | modulated.gate_health(config, taps, rows)
