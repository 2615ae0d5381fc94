"""Sizes and options of the recurrent language model."""

import dataclasses
from typing import TYPE_CHECKING

from compmod_jax.core.bounds import check_numbers
from compmod_jax.core.errors import check
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.base import ModelConfig

if TYPE_CHECKING:
  from compmod_jax.models.lstm_lm import LstmLM


# What recoding lowers, in words; {} is the number of samples.
_SIGNALS = {
  "surprisal": "surprisal of the right token",
  "argmax": "surprisal of the most probable token",
  "nll": "negative log-likelihood of the right token",
  "entropy": "entropy of the next token's distribution",
  "mc_dropout": "entropy of the mean of {} distributions, under dropout",
  "locked_dropout": "entropy of the mean of {} copies, under masks on layers' outputs",
  "variational_rnn": "entropy of the mean of {} copies, under masks on words, inputs and states",
  "ensemble": "entropy of the mean of {} decoders",
  "weak_supervision": "loss of a diagnostic classifier",
}


@dataclasses.dataclass(frozen=True)
class LstmConfig(ModelConfig):
  """Sizes and options; the defaults are the recipe of Gulordava et al. 2018."""

  family = "LSTM"
  steps_through_time = True

  layers: int = 2
  """LSTM layers."""
  dim: int = 650
  """Width of hidden and cell states."""
  embedding_dim: int = 650
  """Width of word vectors; that of hidden states if `tied`."""
  tied: bool = False
  """The decoder's weights are the word vectors."""
  dropout: float = 0.15
  """Dropout in training, with every error signal alike: on word vectors, between layers, and on
  what the decoder reads for the prediction that is scored. The error signal reads the decoder's
  input under the same mask. A signal with masks of its own puts them in the place of these:
  mc_dropout in that one's; locked_dropout between layers and before the decoder;
  variational_rnn everywhere."""
  recoding: RecodingConfig = RecodingConfig()
  """Recoding in training; also in use, unless told otherwise there."""

  def __post_init__(self):
    check_numbers(self, "model.")
    for field in ("layers", "dim", "embedding_dim"):
      value = getattr(self, field)
      check(value >= 1, f"model.{field} is {value}; it must be at least 1.")
    check(
      not self.tied or self.dim == self.embedding_dim,
      f"model.tied needs model.embedding_dim = model.dim, but they are {self.embedding_dim} and"
      f" {self.dim}; make them equal or set tied to False.",
    )
    check(
      0 <= self.dropout < 1,
      f"model.dropout is {self.dropout}; it must be at least 0 and below 1.",
    )
    check(
      not (self.tied and self.recoding.members > 1),
      "model.tied shares one table with the embeddings, but model.recoding.signal = ensemble has"
      " several decoders; set tied to False.",
    )

  def plain(self) -> "LstmConfig":
    """The same model without recoding."""
    return dataclasses.replace(self, recoding=RecodingConfig())

  def parts(self, vocab: int) -> list[tuple[str, str, str]]:
    """Every part from input to output: name, pattern of its parameters' names, what it is."""
    r, dim = self.recoding, self.dim
    found = [("embedding", "embedding", f"{vocab:,} tokens x {self.embedding_dim}")]
    for i in range(self.layers):
      below = dim if i else self.embedding_dim
      found.append((f"layer_{i}/lstm", rf"(input|recurrent|bias)_{i}", f"{below} -> {dim}"))
      if r.active:
        found.append((f"layer_{i}/recoding", rf"step_{i}_.*", self._moves()))
    many = f"{r.members} of {dim}" if r.members > 1 else str(dim)
    tied = ", the embedding once more" if self.tied else ""
    found.append(("decoder", r"decoder(_bias)?", f"{many} -> {vocab:,}{tied}"))
    if r.active:
      found.append(("recoding signal", "anchor|steps", _SIGNALS[r.signal].format(r.samples)))
    return found

  def _moves(self) -> str:
    r = self.recoding
    how = {
      "constant": f"a step of {r.size:g}",
      "learned": f"a learned step, at first {r.size:g}",
      "predicted": f"a step predicted from h, at first {r.size:g}",
      "safe": f"a safe step of at most {r.size:g}",
    }
    often = f", {r.steps} times" if r.steps > 1 else ""
    when = {"always": "", "train": "; in training alone", "test": "; in use alone"}[r.when]
    return f"h and c go down the signal's gradient by {how[r.step]}{often}{when}"

  def warnings(self) -> list[str]:
    """What is allowed here but hardly meant, a sentence each; empty if nothing is."""
    r = self.recoding
    if r.signal in ("surprisal", "argmax") and r.step == "constant" and r.size > 5:
      return [
        f"model.recoding.size is {r.size:g}; steps over 5 along surprisal made training unstable in"
        " Ulmer 2019, Table 5.1."
      ]
    return []

  def describe(self) -> str:
    """Sizes and recoding, in a few words."""
    c = self.recoding
    how = "no recoding"
    if c.active:
      how = f"recoding by {c.signal.replace('_', ' ')}, {c.step} step size from {c.size:g}"
    return f"{self.layers} layers of width {self.dim}, {how}"

  def recurrent(self, vocab: int) -> "LstmLM":
    """The module."""
    from compmod_jax.models.lstm_lm import LstmLM  # which imports its configuration

    return LstmLM(self, vocab)
