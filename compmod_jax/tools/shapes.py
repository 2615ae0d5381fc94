"""Shapes of training batches, known without any data."""

from collections.abc import Mapping

import jax
import numpy as np

from compmod_jax.core import errors
from compmod_jax.data import pipeline
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.qa.batches import BLOCK
from compmod_jax.data.qa.sampling import apportion
from compmod_jax.tasks.base import Task
from compmod_jax.tasks.language_model import LanguageModel
from compmod_jax.tasks.question_answering import Answering

Shapes = dict[str, jax.ShapeDtypeStruct]


def longest(task: Task) -> int:
  """Most positions of a row, as configured.

  Raises:
    UserError: rows have no positions, as pictures have none.
  """
  config = task.dataset.config
  errors.check(
    hasattr(config, "batch") or hasattr(config, "length"),
    f"the examples of a {type(config).__name__} are no sequences of tokens, whose shapes are asked"
    " for here. Give the configuration of a task on text.",
  )
  return config.batch.longest if hasattr(config, "batch") else config.length


def batch_of(task: Task, rows: int, length: int, blocks: Mapping[str, int] | None = None) -> Shapes:
  """Shapes of a training batch, made from the task's example.

  Args:
    task: the task.
    rows: of the batch.
    length: positions of every row.
    blocks: rows of each block where batches have blocks of one task each; evenly shared unless
      given.
  """
  example = jax.eval_shape(task.dataset.example)
  time = max(leaf.shape[1] for leaf in example.values() if leaf.ndim > 1)
  there = [name for name in example if name.startswith(BLOCK)]
  counts = dict.fromkeys(there, rows // max(1, len(there))) if blocks is None else blocks

  def grown(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    rest = (length if size == time else size for size in leaf.shape[1:])
    return jax.ShapeDtypeStruct((counts.get(name, rows), *rest), leaf.dtype)

  batch = {name: grown(name, leaf) for name, leaf in example.items()}
  if jax.tree.leaves(jax.eval_shape(task.model.init_carry)):
    batch |= {"counted": batch["tokens"], "fresh": batch["index"]}
  return {name: leaf for name, leaf in batch.items() if leaf.shape[0]}


def largest_batch(task: Task, multiple: int) -> Shapes:
  """Shapes of the longest batch that the task is configured for.

  Questions are taken to be shared evenly by the tasks that ask any, as the sets would tell.

  Args:
    task: the task.
    multiple: the rows of a batch are a multiple of this.

  Raises:
    UserError: rows that devices cannot share.
  """
  config, length = task.dataset.config, longest(task)
  if isinstance(task, Answering):
    return _questions(task, multiple)
  if isinstance(task, LanguageModel):
    _check_rows("rows", config.rows, multiple)
    batch = batch_of(task, config.rows, length)
    return {name: leaf for name, leaf in batch.items() if name != "label" or task.dataset.labelled}
  tokens = config.batch.tokens if hasattr(config, "batch") else config.batch_tokens
  rows = pipeline.rows_of(length, BatchConfig(tokens=tokens, buckets=(length,)), multiple)
  return task.dataset.trained_shapes(batch_of(task, rows, length), multiple)


def _questions(task: Answering, multiple: int) -> Shapes:
  config = task.dataset.config
  _check_rows("batch_questions", config.batch_questions, multiple)
  names = [name for name in sorted(task.dataset.example(), reverse=True) if name.startswith(BLOCK)]
  asked = [name for name in names if name != f"{BLOCK}lm"]
  shares = np.full(len(asked), 1 / len(asked))
  units = apportion(shares, config.batch_questions // multiple, 1)[0]
  blocks = {name: multiple * int(n) for name, n in zip(asked, units, strict=True)}
  blocks = dict.fromkeys(names, 0) | blocks
  batch = batch_of(task, config.batch_questions, config.length, blocks)
  answers = batch["answer"]
  return {
    **batch,
    "answer": jax.ShapeDtypeStruct((answers.shape[0], config.turns), answers.dtype),
  }


def _check_rows(field: str, rows: int, multiple: int) -> None:
  errors.check(
    rows >= multiple and rows % multiple == 0,
    f"task.{field} is {rows}, which {multiple} devices or micro-batches cannot share evenly; make"
    f" it a multiple of {multiple}.",
  )
