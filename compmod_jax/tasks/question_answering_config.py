"""The configuration of question answering."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from compmod_jax.core import errors
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.tokenized import TRAINED_TOKENS, texts_of
from compmod_jax.data.tokenizers import (
  Tokenizer,
  TokenizerConfig,
  cached_tokenizer,
  tokenizer_from_bytes,
)
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot_config import NemotConfig
from compmod_jax.tasks.text_tokenizer import FILE

if TYPE_CHECKING:
  from compmod_jax.tasks.question_answering import Answering


@dataclasses.dataclass(frozen=True)
class AnsweringConfig:
  """A question answering task: sets of questions, tokenizer, batches, losses, how answers are made.

  Source: Knowles 2022, chapter 3.4.
  """

  data: Mixed = Mixed()
  """Sets of questions."""
  tokenizer: TokenizerConfig = TokenizerConfig(vocab_size=1000, special_tokens=TRAINED_TOKENS)
  """The tokenizer, whose special tokens are those of the unified format."""
  tokenizer_questions: int = 20_000
  """The tokenizer is trained on the first so many training questions of each set, at most."""
  length: int = 192
  """Most tokens of a question with its answer; longer passages are cut."""
  truncate: Literal["start", "end"] = "start"
  """Which end of a passage is cut."""
  answer_length: int = 24
  """Most tokens of an answer that is generated, the end token included."""
  batch_questions: int = 32
  """Rows of a global batch: questions, or passages with several of them."""
  turns: int = 1
  """Training: most questions on one passage in a row of a batch, each as if it stood alone. Sets
  have to have the questions of a passage one after another."""
  buckets: int = 3
  """Padded lengths, at most; each is a shape to compile."""
  answer_mean: Literal["token", "question"] = "token"
  """What the loss on answers is a mean over: tokens, or questions, so that long answers weigh no
  more than labels."""
  answer_weight: float = 1.0
  """Weight of the loss on the answer: on the label alone in multiple choice."""
  sequence_weight: float = 0.2
  """Weight of the next-token loss over the whole text."""
  vanilla_weight: float = 0.5
  """Weight of the answer's loss by the vanilla set's own head; models without one do without."""
  decode: DecodeConfig = DecodeConfig(method="greedy")
  """How answers are searched for; its limits of length do not count, `answer_length` does."""
  small_share: float = 0.07
  """Share of the training questions in the small part, for phases that train on a part."""

  def __post_init__(self):
    for field in (
      "tokenizer_questions",
      "length",
      "answer_length",
      "batch_questions",
      "turns",
      "buckets",
    ):
      value = getattr(self, field)
      errors.check(value >= 1, f"task.{field} is {value}; it must be at least 1.")
    for field in ("answer_weight", "sequence_weight", "vanilla_weight"):
      value = getattr(self, field)
      errors.check(value >= 0, f"task.{field} is {value}; it must be 0 or more.")
    errors.check(
      self.answer_weight + self.sequence_weight > 0,
      "task.answer_weight and task.sequence_weight are both 0; the model would learn nothing."
      " Give one of them a positive value.",
    )
    errors.check(
      self.answer_length < self.length,
      f"task.answer_length is {self.answer_length} but task.length is {self.length}, which is for"
      " question and answer together; raise task.length.",
    )
    errors.check_choice("task.truncate", self.truncate, ("start", "end"))
    errors.check_choice("task.answer_mean", self.answer_mean, ("token", "question"))
    errors.check(
      0 < self.small_share < 1,
      f"task.small_share is {self.small_share}; it must lie between 0 and 1.",
    )

  def build(
    self,
    model: Any,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "Answering":
    """The task with its tokenizer: the one in `files`, else trained on the training questions.

    Args:
      model: the model's configuration.
      files: what `Answering.files` returned.
      cache: folder in which the tokenizer is kept.

    Raises:
      UserError: the model is none for this task, data are missing, or `files` lacks the tokenizer.
    """
    if not isinstance(model, NemotConfig | DecoderConfig):
      raise errors.UserError(
        f"The task is question answering but model is a {type(model).__name__}; it needs a"
        " NemotConfig or a DecoderConfig."
      )
    # What uses this configuration imports it.
    from compmod_jax.tasks.question_answering import Answering

    return Answering(self, model, self.make_tokenizer(files, cache))

  def make_tokenizer(
    self, files: Mapping[str, bytes] | None = None, cache: Path | None = None
  ) -> Tokenizer:
    """The tokenizer in `files`, else one that is trained on the first questions of every set."""
    if files is not None:
      errors.check(FILE in files, f"{FILE} is missing among the saved files; restore the folder.")
      return tokenizer_from_bytes(files[FILE], self.tokenizer)
    texts = list[str]()
    for data, split in self.data.sets("train"):
      items = data.load(split).items
      texts += texts_of(items[i] for i in range(min(len(items), self.tokenizer_questions)))
    return cached_tokenizer(texts, self.tokenizer, cache)

  def questions(self, split: str) -> "list[Sequence[Any]]":
    """The questions of every set of a split."""
    return [data.load(name).items for data, name in self.data.sets(split)]
