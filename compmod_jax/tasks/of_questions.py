"""What a question answering task says of itself, and its data."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from compmod_jax.data.fingerprint import Fingerprints
from compmod_jax.data.qa.tokenized import Coder
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.decoder_lm import DecoderLM
from compmod_jax.models.nemot import Nemot
from compmod_jax.models.nemot_config import NemotConfig
from compmod_jax.tasks.answer_tokens import MULTIPLE_CHOICE
from compmod_jax.tasks.base import Batch, OfSplits
from compmod_jax.tasks.question_answering_config import AnsweringConfig
from compmod_jax.tasks.question_batches import QuestionBatches
from compmod_jax.tasks.text_tokenizer import FILE, UNKNOWN


class OfQuestions(OfSplits):
  """The half of a question answering task that needs no parameters.

  Attributes:
    config: the task's configuration.
    model: the decoder.
    tokenizer: from text to tokens.
    coder: from questions to tokens.
    asked: the questions of every split.
    tagged: whether the model reads parts of speech.
  """

  config: AnsweringConfig
  model: Nemot | DecoderLM
  tokenizer: Tokenizer
  coder: Coder
  asked: QuestionBatches
  tagged: bool

  # Words.

  @property
  def metric(self) -> str:
    """The mean over sets of the mean main score of their questions, 0 to 100."""
    return "score"

  @property
  def decode(self) -> DecodeConfig:
    """How answers are searched for."""
    return self.config.decode

  def describe(self) -> str:
    """One sentence on model and data."""
    return f"Question answering, {self.model.config.describe()}; {self.config.data.describe()}."

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    rows, turns = self.config.batch_questions, self.config.turns
    return f"batches of {rows} questions" if turns == 1 else f"batches of {rows} passages"

  def describe_scores(self) -> str:
    """What score and loss are."""
    return (
      "Score: per cent, the mean over questions (and then over sets) of accuracy in multiple choice"
      " and yes/no, SQuAD's F1 in extractive and ROUGE-L in abstractive questions, all of answers"
      " that were generated; malformed: per cent of labels and yes/no answers that are none. Loss:"
      " nats per token of the gold answers, given the tokens before." + UNKNOWN
    )

  # Data.

  def resolved_config(self) -> AnsweringConfig:
    """The configuration; nothing in it is chosen from the training data."""
    return self.config

  def files(self) -> dict[str, bytes]:
    """The tokenizer, serialised."""
    return {FILE: self.tokenizer.to_bytes()}

  def check_data(self) -> None:
    """Loads every split that will be scored, so that what is missing is told before training."""
    for split in self.split_names():
      self.config.questions(split)

  def data_notes(self) -> list[str]:
    """How many training questions there are, and what was cut or left out of them."""
    coded = self.asked.rows
    return [
      f"{(coded.answer > 0).sum():,} training questions; {coded.truncated:,} passages cut,"
      f" {len(coded.too_long):,} questions left out as too long"
    ]

  def fingerprints(self) -> Fingerprints:
    """Of the training questions of every set."""
    return self.asked.fingerprints()

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[Any, int]:
    """An endless iterator over training batches, and how many make an epoch."""
    return self.asked.train_batches(part, seed, multiple, process, processes)

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches of one task each in which every question of a split is once."""
    return self.asked.eval_batches(split, multiple)

  def example(self) -> dict[str, jax.Array]:
    """A batch with a row for every task of the model, to trace it with."""
    tasks = self.tasks
    columns = {f"rows/{task}": jnp.zeros(1, jnp.int32) for task in tasks}
    tokens = jnp.full((len(tasks), 3), self.tokenizer.eos, jnp.int32)
    zeros = jnp.zeros(len(tasks), jnp.int32)
    if self.tagged:
      columns["tags"] = jnp.full(tokens.shape, -1, jnp.int32)
    return {
      "tokens": tokens,
      "index": jnp.arange(len(tasks)),
      "answer": zeros[:, None] + 1,
      "options": jnp.stack([zeros, zeros], axis=1),
      **columns,
    }

  @property
  def tasks(self) -> tuple[str, ...]:
    """Tasks that the model has an output for."""
    config = self.model.config
    return config.tasks if isinstance(config, NemotConfig) else (MULTIPLE_CHOICE, "gqa")
