"""Which tokens of a batch of questions the losses are of, and how much each of them counts.

Batches are those of `data.qa.batches`; what is said of tokens is said of those after the first, as
logits predict them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.tasks.base import Batch

MULTIPLE_CHOICE = "mqa"


def in_options(batch: Batch, time: int) -> jax.Array:
  """Positions of answer options, bool [rows, time]."""
  places, ends = jnp.arange(time)[None], batch["options"]
  return (places >= ends[:, :1]) & (places < ends[:, 1:])


def counted(
  batch: Batch, tokenizer: Tokenizer, *, interacting: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Which tokens after the first the losses are of, bool [rows, time]: of answers, of all text.

  Of answers in multiple choice it is the label alone, of others all up to the end token, which
  nothing but an answer has. Over the whole text, what follows an answer is left out.

  Args:
    batch: of questions.
    tokenizer: of its tokens.
    interacting: options see each other; what their positions predict, as they see it, is left out.
  """
  tokens, starts = jnp.asarray(batch["tokens"]), jnp.asarray(batch["answer"])
  places = jnp.arange(1, tokens.shape[1])
  real = (tokens[:, 1:] != tokenizer.pad) & (batch["index"] >= 0)[:, None]
  real &= tokens[:, :-1] != tokenizer.eos
  labels = [jnp.full((count, 1), task == MULTIPLE_CHOICE) for task, count in blocks_of(batch)]
  begins = jnp.any(places[None, :, None] == starts[:, None], axis=-1)
  ends = tokens[:, 1:] == tokenizer.eos
  inside = jnp.cumsum(begins, axis=1) > jnp.cumsum(ends, axis=1) - ends
  answer = real & jnp.where(jnp.concatenate(labels), begins, inside)
  if interacting:
    real = real & ~in_options(batch, len(places))
  return answer, real


def shares(answer: jax.Array, starts: Any, mean: str) -> jax.Array:
  """How much every token counts in the loss on answers, float [rows, time].

  Args:
    answer: tokens of answers, of `counted`.
    starts: where the answers of a row begin, [rows, questions]; 0 for none.
    mean: over what the loss is a mean: `token`, or `question`, where all answers count alike.
  """
  share = answer.astype(jnp.float32)
  if mean == "token":
    return share
  starts, places = jnp.asarray(starts), jnp.arange(1, answer.shape[1] + 1)
  begun = places[None, :, None] >= starts[:, None]
  number = jnp.sum(begun & (starts > 0)[:, None], axis=-1)
  mine = number[..., None] == jnp.arange(1, starts.shape[1] + 1)[None, None]
  lengths = jnp.sum(share[..., None] * mine, axis=1, keepdims=True)
  return share / jnp.maximum(jnp.sum(mine * lengths, axis=-1), 1)


def places_of(answer: jax.Array, most: int) -> jax.Array:
  """Distinct positions [rows, places] among which are all that predict answers.

  Args:
    answer: tokens of answers, of `counted`.
    most: tokens of answers in a row.
  """
  return jax.lax.top_k(answer.astype(jnp.int32), min(most, answer.shape[1]))[1]
