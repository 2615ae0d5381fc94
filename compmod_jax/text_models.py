"""Trained models that work on one text: fill it in, score it, answer it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from compmod_jax import errors
from compmod_jax.data.qa.example import Question
from compmod_jax.data.tokenizer import Tokenizer
from compmod_jax.decoding import override
from compmod_jax.models.decoder_lm import DecoderLM
from compmod_jax.models.encoder import Encoder
from compmod_jax.models.lstm_lm import LstmLM
from compmod_jax.models.nemot import Nemot
from compmod_jax.tasks.answerer import Answer
from compmod_jax.tasks.answering import Answering
from compmod_jax.tasks.base import Status, silent
from compmod_jax.tasks.causal_lm import CausalLM
from compmod_jax.tasks.filler import Filled
from compmod_jax.tasks.language_model import LanguageModel
from compmod_jax.tasks.masked_lm import MaskedLM
from compmod_jax.tasks.scorer import Scored
from compmod_jax.trained import TrainedModel


@dataclasses.dataclass(frozen=True)
class MaskedModel(TrainedModel):
  """A trained masked language model.

  model.fill(["The <mask> sleeps."], top=3)[0].candidates[0]
  """

  task: MaskedLM

  @property
  def model(self) -> Encoder:
    """The module; `model.apply({"params": params}, tokens)` gives logits."""
    return self.task.model

  @property
  def tokenizer(self) -> Tokenizer:
    """From text to tokens."""
    return self.task.tokenizer

  def fill(self, texts: Sequence[str], *, top: int = 5, status: Status = silent) -> list[Filled]:
    """Every text with what is `<mask>` in it filled in, and the best candidates for each place.

    Args:
      texts: raw text. What is over the model's positions is cut off.
      top: candidates for each place.
      status: shows progress.
    """
    errors.check(
      not isinstance(texts, str),
      f"texts is one string, {str(texts)[:40]!r}; give a list of texts.",
    )
    errors.check(top >= 1, f"top is {top}; it must be at least 1.")
    return self.task.filler(self.params, texts, top=top, status=status)

  def _read(
    self, texts: Sequence[str], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Texts between start and end token, as one padded batch."""
    ids = [self.task.filler.encode(text, cut=False) for text in texts]
    return {"tokens": self._padded("given", ids, self.tokenizer.pad)}, ["tokens"]


@dataclasses.dataclass(frozen=True)
class ScoringModel(TrainedModel):
  """A trained language model.

  model.score(["The dog sleeps ."])[0].surprisal
  """

  task: LanguageModel | CausalLM

  @property
  def tokenizer(self) -> Tokenizer:
    """From text to tokens."""
    return self.task.tokenizer

  def score(self, texts: Sequence[str], *, status: Status = silent) -> list[Scored]:
    """How surprising every token of every text is, each text read from the start.

    Args:
      texts: raw text; a blank one consists of its end.
      status: shows progress.

    Raises:
      UserError: a text has more tokens than the model has positions.
    """
    errors.check(
      not isinstance(texts, str),
      f"texts is one string, {str(texts)[:40]!r}; give a list of texts.",
    )
    return self.task.scorer(self.params, texts, status=status)


@dataclasses.dataclass(frozen=True)
class RecurrentModel(ScoringModel):
  """A trained recurrent language model."""

  task: LanguageModel

  @property
  def model(self) -> LstmLM:
    """The module; see `LstmLM.__call__`."""
    return self.task.model

  def _read(
    self, texts: Sequence[str], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Texts as one padded batch."""
    return self.task.scorer.batch(texts), ["tokens", "targets"]


@dataclasses.dataclass(frozen=True)
class CausalModel(ScoringModel):
  """A trained decoder, with modulation or without."""

  task: CausalLM

  @property
  def model(self) -> Nemot | DecoderLM:
    """The module; see `Nemot.__call__`."""
    return self.task.model

  def _read(
    self, texts: Sequence[str], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Texts as one padded batch, each behind an end token."""
    ids = [[self.tokenizer.eos, *ids] for ids in self.task.scorer.encode(texts)]
    tokens = self._padded("given", ids, self.tokenizer.pad)
    return {"tokens": tokens, "index": jnp.arange(len(ids))}, ["tokens"]


@dataclasses.dataclass(frozen=True)
class AnsweringModel(TrainedModel):
  """A trained model that answers questions.

  question = Question("abstractive", "Where is the ball?", passage="...", answers=("",))
  model.answer([question])
  """

  task: Answering

  @property
  def model(self) -> Nemot | DecoderLM:
    """The module; see `Nemot.__call__`."""
    return self.task.model

  @property
  def tokenizer(self) -> Tokenizer:
    """From text to tokens."""
    return self.task.tokenizer

  def answer(
    self, questions: Sequence[Question], *, seed: int = 0, status: Status = silent, **decode: Any
  ) -> list[str]:
    """The best answer to every question: `(2)` for the second option, nothing for no answer.

    Args:
      questions: their gold answers are not looked at.
      seed: of the method `sample`.
      status: shows progress.
      **decode: fields of `DecodeConfig` that differ from the task's own, such as `beams=4`.

    Raises:
      UserError: a field that `DecodeConfig` does not have, or a bad value.
    """
    found = self.answers(questions, seed=seed, status=status, **decode)
    return [answers[0].text for answers in found]

  def answers(
    self, questions: Sequence[Question], *, seed: int = 0, status: Status = silent, **decode: Any
  ) -> list[list[Answer]]:
    """The `n_best` answers to every question, best first, with scores and tokens; as `answer`."""
    return self.task.answerer(
      self.params,
      questions,
      override(self.task.decode, decode),
      rng=jax.random.key(seed),
      status=status,
    )

  def _read(
    self, texts: Sequence[Question], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Questions of one task with their answers as one padded batch."""
    return self.task.asked.batch(texts), ["tokens"]
