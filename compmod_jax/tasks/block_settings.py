"""What configurations of tasks on blocks of text must keep to."""

from typing import Protocol

from compmod_jax.core.errors import check


class BlockSettings(Protocol):
  """The fields that they share."""

  @property
  def length(self) -> int:
    """Tokens of a block."""
    ...

  @property
  def batch_tokens(self) -> int:
    """Tokens of a global batch."""
    ...

  @property
  def tokenizer_documents(self) -> int:
    """Documents that the tokenizer is trained on, at most."""
    ...

  @property
  def small_share(self) -> float:
    """Share of the training blocks in the small part."""
    ...


def check_blocks(task: BlockSettings) -> None:
  """Raises a `UserError` for a value that cannot be."""
  check(task.length >= 2, f"task.length is {task.length}; it must be at least 2.")
  check(
    task.batch_tokens >= task.length and task.batch_tokens % task.length == 0,
    f"task.batch_tokens is {task.batch_tokens}; it must be a multiple of task.length ="
    f" {task.length}.",
  )
  check(
    task.tokenizer_documents >= 1,
    f"task.tokenizer_documents is {task.tokenizer_documents}; it must be at least 1.",
  )
  check(
    0 < task.small_share < 1,
    f"task.small_share is {task.small_share}; it must lie between 0 and 1.",
  )
