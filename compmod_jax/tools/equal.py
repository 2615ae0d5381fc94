"""Widths with which a model has as many parameters as another, or takes as many operations."""

import dataclasses
from collections.abc import Callable

from compmod_jax.core import errors
from compmod_jax.layers.block import StackConfig
from compmod_jax.tasks.base import Task
from compmod_jax.tools import describe, flops
from compmod_jax.training.experiment import Experiment


def equal_parameters(experiment: Experiment, like: Experiment, *, multiple: int = 8) -> Experiment:
  """The experiment with feed-forward networks so wide that its model has as many parameters.

  No parameter is made, and nothing is trained but tokenizers. Where those are missing, vocabularies
  are as large as configured, of both models alike.

  Args:
    experiment: whose `model.ffn_dim` changes.
    like: whose model's parameters are counted.
    multiple: of what the width has to be.

  Raises:
    UserError: a model has no such networks, or has too many parameters without them already.
  """
  return _equal(experiment, like, multiple, "parameters", describe.count_parameters)


def equal_flops(experiment: Experiment, like: Experiment, *, multiple: int = 8) -> Experiment:
  """As `equal_parameters`, with as many operations of a training step for every token.

  They are what `tools.flops` counts before XLA optimises the program.
  """
  return _equal(experiment, like, multiple, "operations", _operations)


def _operations(task: Task) -> float:
  return flops.count(task, describe.abstract_parameters(task)).training


def _equal(
  experiment: Experiment,
  like: Experiment,
  multiple: int,
  what: str,
  cost: Callable[[Task], float],
) -> Experiment:
  task, _ = describe.assemble(like)
  wanted, model = cost(task), experiment.model
  if not isinstance(model, StackConfig):
    raise errors.UserError(
      f"model of {experiment.name!r} is a {type(model).__name__}; it needs feed-forward networks"
      " whose width ffn_dim may change. Choose its sizes by hand."
    )

  def of_width(width: int) -> float:
    changed = dataclasses.replace(model, ffn_dim=width)
    return cost(experiment.task.build(changed, files=task.dataset.files()))

  width = nearest_width(of_width, wanted, model.ffn_dim, multiple)
  errors.check(
    width >= multiple,
    f"the model of {experiment.name!r} has more {what} than that of {like.name!r} ({wanted:,.0f})"
    " even without feed-forward networks. Make model.dim or its mechanism smaller.",
  )
  return dataclasses.replace(experiment, model=dataclasses.replace(model, ffn_dim=width))


def nearest_width(cost: Callable[[int], float], wanted: float, width: int, multiple: int) -> int:
  """The multiple whose cost is nearest to what is wanted, by a line through two widths.

  Parameters and operations of feed-forward networks are such a line.

  Args:
    cost: of a width; it rises.
    wanted: the cost to come near to; the answer may be 0 or negative.
    width: one that is allowed; twice as much is the other.
    multiple: of what the answer is one.
  """
  low, high = cost(width), cost(2 * width)
  return round((width + (wanted - low) * width / (high - low)) / multiple) * multiple
