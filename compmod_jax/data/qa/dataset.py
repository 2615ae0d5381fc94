"""Sets of questions as a data set: read, turned into tokens once, and batched."""

import functools
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core import errors
from compmod_jax.data.base import Batch, Dataset, TrainIterator
from compmod_jax.data.fingerprint import Fingerprints, fingerprint
from compmod_jax.data.qa.batches import edges_of, eval_batches, train_batches, whole_batch
from compmod_jax.data.qa.mixed import Mixed, name_of
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.sampling import Mixture
from compmod_jax.data.qa.tokenized import QuestionTokenizer, TokenizedQuestions, tokenize_questions
from compmod_jax.data.subsets import subset_numbers
from compmod_jax.data.text_tokenizer import FILE
from compmod_jax.data.tokenizers import Tokenizer

MULTIPLE_CHOICE, GENERAL = "mqa", "gqa"
"""Tasks of questions: with answer options, and all others."""


@runtime_checkable
class QuestionsConfig(Protocol):
  """What the configuration of a task on questions says of them; see `AnsweringConfig`."""

  @property
  def data(self) -> Mixed:
    """Sets of questions."""
    ...

  @property
  def length(self) -> int:
    """Most tokens of a question with its answer."""
    ...

  @property
  def batch_questions(self) -> int:
    """Rows of a global batch."""
    ...

  @property
  def turns(self) -> int:
    """Most questions on one passage in a row."""
    ...

  @property
  def buckets(self) -> int:
    """Padded lengths, at most."""
    ...

  @property
  def small_share(self) -> float:
    """Share of the training questions in the small part."""
    ...


C = TypeVar("C", bound=QuestionsConfig, covariant=True)


class QuestionSets(Dataset[C]):
  """Questions in batches whose rows lie in blocks of one task each; see `data.qa.batches`.

  Attributes:
    config: the task's configuration.
    question_tokenizer: from questions to tokens.
    tasks: what the model can be asked; None where a model has one output for all.
    tagged: whether batches hold the part of speech of every token.
  """

  def __init__(
    self,
    config: C,
    question_tokenizer: QuestionTokenizer,
    tasks: tuple[str, ...] | None,
    *,
    tagged: bool = False,
  ):
    self.config, self.question_tokenizer, self.tasks, self.tagged = (
      config,
      question_tokenizer,
      tasks,
      tagged,
    )
    self._tokenized = dict[str, TokenizedQuestions]()

  @property
  def tokenizer(self) -> Tokenizer:
    """From text to tokens."""
    return self.question_tokenizer.tokenizer

  def questions(self, split: str) -> list[Sequence[Question]]:
    """The questions of every set of a split."""
    return [data.load(name).items for data, name in self.config.data.sets(split)]

  def tokenized(self, split: str) -> TokenizedQuestions:
    """The questions of a split as tokens, each with its answer.

    Raises:
      UserError: an unknown split, missing data, or a task for which the model has no output set.
    """
    if split not in self._tokenized:
      self._tokenized[split] = self._tokenize(split, 1)
    return self._tokenized[split]

  @functools.cached_property
  def rows(self) -> TokenizedQuestions:
    """The training questions as batches have them, up to `config.turns` on one passage in a row."""
    turns = self.config.turns
    return self.tokenized("train") if turns == 1 else self._tokenize("train", turns)

  def _tokenize(self, split: str, turns: int) -> TokenizedQuestions:
    found = tokenize_questions(self.questions(split), self.question_tokenizer, turns=turns)
    for task in sorted(set(found.task.tolist())) if self.tasks is not None else ():
      needed = f"task {task!r}, which the questions of {split} need,"
      errors.check_choice(needed, task, self.tasks or ())
    return found

  @functools.cached_property
  def longest_answer(self) -> int:
    """Most tokens of the answers of a training row, their ends included."""
    return int(np.max(self.rows.answered))

  @functools.cached_property
  def lengths(self) -> tuple[int, ...]:
    """Padded lengths in evaluation: quarters of the longest, as no training data are at hand."""
    longest = self.config.length
    return tuple(sorted({-(-longest * part // 32) * 8 for part in (1, 2, 3)} | {longest}))

  def unknown(self, split: str) -> float:
    """Per cent of the tokens of a split's questions, passages included, that are unknown words."""
    rows = self.tokenized(split).tokens
    found = sum(int(np.sum(tokens == self.tokenizer.unk)) for tokens in rows)
    return 100 * found / max(1, int(np.sum(rows.lengths)))

  def fingerprints(self) -> Fingerprints:
    """Of the training rows of every set: questions, or passages with several of them."""
    found = {}
    for number, (data, _) in enumerate(self.config.data.sets("train")):
      rows = self.rows.select(np.flatnonzero(self.rows.source == number))
      tags = () if rows.tags is None else rows.tags.numbers()
      numbers = (*rows.tokens.numbers(), rows.answer.ravel(), rows.options.ravel(), *tags)
      found[name_of(data)] = fingerprint(len(rows), "rows", numbers)
    return found

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[TrainIterator, int]:
    """An endless iterator over training batches, and how many make an epoch."""
    whole, config = self.rows, self.config
    tokenized = whole
    if part != "all":
      share = config.small_share
      tokenized = whole.select(subset_numbers(part, len(whole), small_share=share, seed=seed))
    mixture = Mixture(
      tokenized.task,
      tokenized.source,
      tokenized.tokens.lengths,
      rows=config.batch_questions,
      multiple=multiple,
      seed=seed,
    )
    iterator = train_batches(
      tokenized,
      mixture,
      edges=edges_of(whole, config.buckets, config.length),
      pad=self.tokenizer.pad,
      process=process,
      processes=processes,
    )
    return iterator, mixture.per_epoch

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """Batches of one task each in which every question of a split is once."""
    return eval_batches(
      self.tokenized(split),
      rows=self.config.batch_questions,
      edges=self.lengths,
      pad=self.tokenizer.pad,
      multiple=multiple,
    )

  def batch(self, questions: Sequence[Question]) -> dict[str, jax.Array]:
    """Questions of one task, with their answers, as one batch in their order.

    Raises:
      UserError: they are of several tasks, or one does not fit without its passage.
    """
    tokenized = tokenize_questions([questions], self.question_tokenizer)
    errors.check(
      not tokenized.too_long,
      f"{len(tokenized.too_long)} questions have more than {self.config.length} tokens without"
      " their passage; leave them out.",
    )
    made = whole_batch(tokenized, self.tokenizer.pad)
    return {name: jnp.asarray(value) for name, value in made.items()}

  def chosen(self, split: str, count: bool | int) -> tuple[list[Question], list[str]]:
    """Questions of a split, all or a fixed draw of them, and the name of each's set."""
    parts = zip(self.config.data.sets(split), self.questions(split), strict=True)
    places = [(name_of(data), items, i) for (data, _), items in parts for i in range(len(items))]
    if count is not True and int(count) < len(places):
      order = np.random.default_rng(0).permutation(len(places))[: int(count)]
      places = [places[i] for i in np.sort(order).tolist()]
    return [items[i] for _, items, i in places], [name for name, _, _ in places]

  def files(self) -> dict[str, bytes]:
    """The tokenizer, serialised."""
    return {FILE: self.tokenizer.to_bytes()}

  def check(self) -> None:
    """Loads every split that will be scored, and that of training.

    Raises:
      UserError: a set is missing or damaged.
    """
    for split in self.splits():
      self.questions(split)

  def notes(self) -> list[str]:
    """How many training questions there are, and what was cut or left out of them."""
    tokenized = self.rows
    return [
      f"{(tokenized.answer > 0).sum():,} training questions; {tokenized.truncated:,} passages cut,"
      f" {len(tokenized.too_long):,} questions left out as too long"
    ]

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    rows, turns = self.config.batch_questions, self.config.turns
    return f"batches of {rows} questions" if turns == 1 else f"batches of {rows} passages"

  def example(self) -> dict[str, jax.Array]:
    """A batch with a row for every task of the model, to trace it with."""
    tasks = (MULTIPLE_CHOICE, GENERAL) if self.tasks is None else self.tasks
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
