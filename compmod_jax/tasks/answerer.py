"""From questions to answers: batching, jitted search after a prompt, text."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from compmod_jax.core.errors import check
from compmod_jax.core.intermediates import OFF, Edit, Intermediates
from compmod_jax.core.sharding import fetch
from compmod_jax.core.types import Params
from compmod_jax.data.qa.batches import blocks_of, eval_batches
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.tokenized import QuestionTokenizer, tokenize_questions
from compmod_jax.data.qa.unified import SEPARATOR, segments, task_token
from compmod_jax.decoding import DecodeConfig, decode, recoding, with_products
from compmod_jax.decoding.types import Cache, Decoded
from compmod_jax.layers.reading_strategies import PARTS_OF_SPEECH
from compmod_jax.models.base import Decoder, ModelConfig, valid_at
from compmod_jax.models.text import Text
from compmod_jax.tasks.base import Batch, Sharing, Status, silent

R = TypeVar("R")


class Answer(NamedTuple):
  """One answer of a model.

  Attributes:
    text: as it was written: `(2)` for the second option; empty for no answer.
    score: log-probability in nats over length ** length_penalty.
    tokens: token numbers, the end token included.
    entropy: of the distributions of all its steps together in nats, before and after recoding, if
      steps are recoded.
  """

  text: str
  score: float
  tokens: np.ndarray
  entropy: np.ndarray | None = None


NONE = Answer("", float("-inf"), np.zeros(0, np.int32))
"""The answer to a question that does not fit the model without its passage."""


@runtime_checkable
class ReadsQuestions(Protocol):
  """What answering needs of a model; see `QuestionModel`."""

  @property
  def module(self) -> Decoder:
    """The decoder."""
    ...

  @property
  def config(self) -> ModelConfig:
    """Its configuration."""
    ...

  @property
  def edits(self) -> Mapping[str, Edit]:
    """Site -> change of that activation."""
    ...

  def text(self, batch: Batch, tokens: jax.Array) -> Text:
    """What the decoder is given."""
    ...

  def jit(self, function: Callable[..., R], **static: Hashable) -> Callable[..., R]:
    """See `TaskModel.jit`."""
    ...


@dataclasses.dataclass(frozen=True, eq=False)
class Answerer:
  """Answers questions; one compiled search for each shape of a batch and way to search.

  Attributes:
    question_tokenizer: from questions to tokens.
    room: most tokens of an answer.
    edges: padded lengths of prompts.
    rows: prompts of a batch.
    decode: how to search unless a call says otherwise.
  """

  question_tokenizer: QuestionTokenizer
  room: int
  edges: tuple[int, ...]
  rows: int
  decode: DecodeConfig

  def decoding(self, decode: DecodeConfig) -> Self:
    """The same answerer, which searches in another way."""
    return dataclasses.replace(self, decode=decode)

  def __call__(
    self,
    model: ReadsQuestions,
    params: PyTree,
    questions: Sequence[Question],
    config: DecodeConfig | None = None,
    *,
    sharing: Sharing = Sharing(),
    rng: jax.Array | None = None,
    status: Status = silent,
    name: str = "questions",
    search: Callable[..., Decoded] | None = None,
  ) -> list[list[Answer]]:
    """The n best answers to every question, in the questions' order.

    Args:
      model: the model.
      params: its parameters, as `search` takes them.
      questions: their gold answers are not looked at.
      config: how to search; `decode` if not given.
      sharing: how batches are laid over devices.
      rng: key for sampling.
      status: shows progress.
      name: what the progress display calls the questions.
      search: in place of `search_answers`, with its arguments.

    Raises:
      UserError: as `check`.
    """
    for question in questions:
      self.check(model, question)
    config = self.decode if config is None else config
    search = model.jit(
      search or search_answers,
      question_tokenizer=self.question_tokenizer,
      room=self.room,
      config=config,
    )
    rng = jax.random.key(0) if rng is None else rng
    tokenized = tokenize_questions([questions], self.question_tokenizer, self.room)
    found: list[list[Answer]] = [[NONE] for _ in questions]
    batches = eval_batches(
      tokenized,
      rows=self.rows,
      edges=self.edges,
      pad=self.question_tokenizer.tokenizer.pad,
      multiple=sharing.multiple,
    )
    done = 0
    for number, batch in enumerate(batches):
      key = jax.random.fold_in(rng, number)
      out = fetch(search(params, sharing.place(batch), key))
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        found[batch["index"][row]] = self._answers(out, row)
        done += 1
      status(f"answering {name}", done, len(tokenized))
    return found

  def check(self, model: ReadsQuestions, question: Question) -> None:
    """Looks whether the model has labels and an output for what is asked.

    A question that does not fit the model is no mistake: its answer is `NONE`.

    Raises:
      UserError: it has more options than there are labels, or none of the model's outputs is for
        questions like it.
    """
    segments(question)
    tasks, task = model.config.output_tasks(), task_token(question).strip("<>")
    check(
      tasks is None or task in tasks,
      f"the question {question.question[:40]!r} is of the task {task!r}, but the model has"
      f" outputs for {', '.join(tasks or ())} alone; leave it out, or ask a model that was"
      " trained on such questions.",
    )

  def _answers(self, found: Decoded, row: int) -> list[Answer]:
    """The answers of one row of a decoded batch."""
    entropy, answers = (found.records or {}).get(recoding.ENTROPY), []
    for n, length in enumerate(found.lengths[row]):
      tokens = np.asarray(found.tokens[row, n, :length])
      text = self.question_tokenizer.tokenizer.decode(tokens.tolist()).strip()
      own = None if entropy is None else entropy[row, n]
      answers.append(Answer(text, float(found.scores[row, n]), tokens, own))
    return answers


@with_products
def search_answers(
  model: ReadsQuestions,
  params: Params,
  batch: Batch,
  rng: jax.Array,
  *,
  question_tokenizer: QuestionTokenizer,
  room: int,
  config: DecodeConfig,
) -> Decoded:
  """The best answers to a batch of questions of one task, of at most `room` tokens."""
  ((task, rows),) = blocks_of(batch)
  apply = functools.partial(model.module.apply, {"params": params})
  text, intermediates = model.text(batch, batch["tokens"]), OFF.editing(model.edits)
  first: dict[str, Any] = (
    {} if text.tags is None else {"first_tag": jnp.full(rows, PARTS_OF_SPEECH.index("special"))}
  )
  tokens, tokenizer = batch["tokens"], question_tokenizer.tokenizer
  real = tokens != tokenizer.pad
  before = intermediates.knowing(lambda site: valid_at(model.config, site, real)).apart()
  cache = apply(
    text, task, beams=config.width, length=room, intermediates=before, method="prefill", **first
  )
  intermediates = recoding.knowing_rows(intermediates, batch["index"] >= 0, config)

  def step(
    cache: Cache, tokens: jax.Array, intermediates: Intermediates
  ) -> tuple[jax.Array, Cache]:
    return apply(cache, tokens, task, intermediates=intermediates, method="step")

  stack = functools.partial(model.config.decoding_stack, task)
  one = recoding.prepared(step, cache, intermediates, config, batch=rows, stack=stack)
  return decode(
    one.step,
    one.cache,
    config,
    batch=rows,
    max_length=room,
    limit=jnp.where(batch["index"] >= 0, room, 0),
    bos=question_tokenizer.special_ids[SEPARATOR],
    eos=tokenizer.eos,
    pad=tokenizer.pad,
    forbidden=tokenizer.never_produced,
    rng=rng,
    record=one.recorded(),
  )
