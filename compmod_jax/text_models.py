"""Trained models that work on one text: fill it in, score it, answer it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from compmod_jax.core import errors
from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.typed_lines import typed_question
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.decoding import for_generation, override
from compmod_jax.decoding.config import DecodeOptions, GenerationOptions
from compmod_jax.models.base import Decoder, Encoder, ModelConfig
from compmod_jax.models.lstm_lm import LstmLM
from compmod_jax.models.nemot import LM
from compmod_jax.tasks.answerer import Answer
from compmod_jax.tasks.base import Status, silent
from compmod_jax.tasks.causal_lm import CausalLM
from compmod_jax.tasks.fill_mask import Filled
from compmod_jax.tasks.language_model import LanguageModel
from compmod_jax.tasks.masked_lm import MaskedLM
from compmod_jax.tasks.question_answering import Answering
from compmod_jax.tasks.scorer import Scored
from compmod_jax.tasks.text_generator import Generated
from compmod_jax.trained import Axis, TrainedModel


@dataclasses.dataclass(frozen=True)
class MaskedModel(TrainedModel[str]):
  """A trained masked language model.

  model.fill(["The <mask> sleeps."], top=3)[0].candidates[0]
  """

  task: MaskedLM

  @property
  def model(self) -> Encoder:
    """The module; `model.apply({"params": params}, tokens)` gives logits."""
    return self.task.model.module

  @property
  def tokenizer(self) -> Tokenizer:
    """From text to tokens."""
    return self.task.dataset.tokenizer

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
    return self.task.generator(self.task.model, self.params, texts, top=top, status=status)

  def score(self, texts: Sequence[str], *, status: Status = silent) -> list[Scored]:
    """How probable every token of every text is given all the others, each masked in turn.

    The sum over a text, `log_probability`, is its pseudo-log-likelihood in nats (Salazar et al.
    2020): good for comparing texts, but no probability. There is no end token among the tokens.

    Args:
      texts: raw text.
      status: shows progress.

    Raises:
      UserError: a text has more tokens than the model has positions.
    """
    errors.check(
      not isinstance(texts, str),
      f"texts is one string, {str(texts)[:40]!r}; give a list of texts.",
    )
    return self.task.generator.scorer(self.task.model, self.params, texts, status=status)

  def _read(
    self, texts: Sequence[str], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Texts between start and end token, as one padded batch."""
    ids = [self.task.generator.encode(text) for text in texts]
    tokens = self._padded("given", ids, self.tokenizer.pad)
    return {"tokens": tokens, "index": jnp.arange(len(ids))}, ["tokens"]

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    """The text's tokens, each predicted where it is read."""
    tokens = batch["tokens"]
    axis = Axis.of(self.tokenizer, tokens, tokens, tokens != self.tokenizer.pad)
    return _behind_auxiliary(axis, self.model.config, site, "enc", [LM] * len(tokens))


@dataclasses.dataclass(frozen=True)
class ScoringModel(TrainedModel[str]):
  """A trained language model.

  model.score(["The dog sleeps ."])[0].surprisal
  model.generate(["The dog"], length=20, top_p=0.9, seed=1)
  """

  task: LanguageModel | CausalLM

  @property
  def tokenizer(self) -> Tokenizer:
    """From text to tokens."""
    return self.task.dataset.tokenizer

  def score(self, texts: Sequence[str], *, status: Status = silent) -> list[Scored]:
    """How probable every token of every text is given those before, each text from its start.

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
    return self.task.generator.scorer(self.task.model, self.params, texts, status=status)

  def generate(
    self,
    prompts: Sequence[str],
    *,
    length: int | None = None,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    status: Status = silent,
    **decode: Unpack[GenerationOptions],
  ) -> list[str]:
    """Every prompt and how the model goes on; greedily, unless an option is of another method.

    Args:
      prompts: raw text; a blank one starts a text. Of one that leaves no position for `length`
        tokens, the model reads the newest tokens alone.
      length: most tokens that are generated, the end token included; None: 50, or half the model's
        positions if these are fewer.
      stop: a string, or several: a text ends before the first of them.
      seed: of sampling. A prompt's draws depend on the seed and the prompt, not on its place.
      status: shows progress.
      **decode: fields of `DecodeConfig`: `beams=4` for beam search; `temperature`, `top_k` or
        `top_p` for sampling, or `method="sample"`.

    Raises:
      UserError: an option that does not exist, does not go with the others, or has a bad value.
    """
    found = self.generations(prompts, length=length, stop=stop, seed=seed, status=status, **decode)
    return [best[0].whole for best in found]

  def generations(
    self,
    prompts: Sequence[str],
    *,
    length: int | None = None,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    status: Status = silent,
    **decode: Unpack[GenerationOptions],
  ) -> list[list[Generated]]:
    """The `n_best` continuations of every prompt, best first, with scores; as `generate`."""
    errors.check(
      not isinstance(prompts, str),
      f"prompts is one string, {str(prompts)[:40]!r}; give a list of prompts.",
    )
    return self.task.generator(
      self.task.model,
      self.params,
      prompts,
      for_generation(decode),
      length=length,
      stop=(stop,) if isinstance(stop, str) else tuple(stop),
      seed=seed,
      status=status,
    )


@dataclasses.dataclass(frozen=True)
class RecurrentModel(ScoringModel):
  """A trained recurrent language model."""

  task: LanguageModel

  @property
  def model(self) -> LstmLM:
    """The module; see `LstmLM.__call__`."""
    return self.task.model.module

  def _read(
    self, texts: Sequence[str], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Texts as one padded batch."""
    return self.task.generator.scorer.batch(texts), ["tokens", "targets"]

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    """The end token and the text, and one token later what is predicted."""
    targets = batch["targets"]
    given = targets if site == "targets" else batch["tokens"]
    return Axis.of(self.tokenizer, given, targets, batch["counted"])


@dataclasses.dataclass(frozen=True)
class CausalModel(ScoringModel):
  """A trained decoder, with modulation or without."""

  task: CausalLM

  @property
  def model(self) -> Decoder:
    """The module; see `Nemot.__call__`."""
    return self.task.model.module

  def _read(
    self, texts: Sequence[str], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Texts as one padded batch, each behind an end token."""
    ids = [[self.tokenizer.eos, *ids] for ids in self.task.generator.scorer.encode(texts)]
    tokens = self._padded("given", ids, self.tokenizer.pad)
    return {"tokens": tokens, "index": jnp.arange(len(ids))}, ["tokens"]

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    """Every token but the last, and one token later what is predicted."""
    tasks = [LM] * len(batch["tokens"])
    return _next_tokens(self.tokenizer, self.model.config, batch["tokens"], site, tasks)


@dataclasses.dataclass(frozen=True)
class AnsweringModel(TrainedModel[Question]):
  """A trained model that answers questions.

  model.answer(["Anna took the ball. | Where is the ball?", "Who barks? (1) a cat (2) a dog"])
  """

  task: Answering

  @property
  def model(self) -> Decoder:
    """The module; see `Nemot.__call__`."""
    return self.task.model.module

  @property
  def tokenizer(self) -> Tokenizer:
    """From text to tokens."""
    return self.task.dataset.tokenizer

  def answer(
    self,
    questions: Sequence[Question | str],
    *,
    seed: int = 0,
    status: Status = silent,
    **decode: Unpack[DecodeOptions],
  ) -> list[str]:
    """The best answer to every question: `(2)` for the second option, nothing for no answer.

    Args:
      questions: each a `Question`, whose gold answers are not looked at, or a line as
        `data.qa.typed_lines.typed_question` reads it: passage, `|`, question, numbered options.
      seed: of the method `sample`.
      status: shows progress.
      **decode: fields of `DecodeConfig` that differ from the task's own, such as `method="beam"`.

    Raises:
      UserError: a line without a question, one that the model has no output for, a field that
        `DecodeConfig` does not have or that has no effect, or a bad value.
    """
    found = self.answers(questions, seed=seed, status=status, **decode)
    return [answers[0].text for answers in found]

  def answers(
    self,
    questions: Sequence[Question | str],
    *,
    seed: int = 0,
    status: Status = silent,
    **decode: Unpack[DecodeOptions],
  ) -> list[list[Answer]]:
    """The `n_best` answers to every question, best first, with scores and tokens; as `answer`."""
    errors.check(
      not isinstance(questions, str),
      f"questions is one string, {str(questions)[:40]!r}; give a list of questions.",
    )
    return self.task.generator(
      self.task.model,
      self.params,
      [_question(number, one) for number, one in enumerate(questions)],
      override(self.task.generator.decode, decode),
      rng=jax.random.key(seed),
      status=status,
    )

  def _read(
    self, texts: Sequence[Question], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Questions of one task with their answers as one padded batch."""
    typed = [one for one in texts if isinstance(one, str)]
    errors.check(
      not typed,
      f"the question {errors.short(typed[0]) if typed else ''} is a string, but what is read is a"
      " question with its answer; give a `compmod_jax.data.qa.question.Question`.",
    )
    return self.task.dataset.batch(texts), ["tokens"]

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    """Every token but the last, and one token later what is predicted."""
    tasks = [task for task, count in blocks_of(batch) for _ in range(count)]
    return _next_tokens(self.tokenizer, self.model.config, batch["tokens"], site, tasks)


def _question(number: int, given: Question | str) -> Question:
  """The question that is given, as such or as a line."""
  if not isinstance(given, str):
    return given
  try:
    return typed_question(given)
  except errors.UserError as error:
    raise errors.UserError(f"questions[{number}], {errors.short(given)}: {error}") from error


def _next_tokens(
  tokenizer: Tokenizer, config: ModelConfig, tokens: jax.Array, site: str, tasks: Sequence[str]
) -> Axis:
  """What decoders read and predict, each row a text of one task."""
  if site == "tokens":
    return Axis.of(tokenizer, tokens, tokens, tokens != tokenizer.pad)
  given, predicted = tokens[:, :-1], tokens[:, 1:]
  axis = Axis.of(tokenizer, given, predicted, given != tokenizer.pad)
  return _behind_auxiliary(axis, config, site, "dec", tasks)


def _behind_auxiliary(
  axis: Axis, config: ModelConfig, site: str, mode: str, tasks: Sequence[str]
) -> Axis:
  """The positions of a site of the neuromodulatory set, which has auxiliary tokens in front."""
  if not config.auxiliary_at(site):
    return axis
  names = [f"<{config.auxiliary[number]}>" for number in config.auxiliary_ids(mode, tasks[0])]
  return axis.behind(names)
