"""What a model costs for every token, as XLA counts it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from compmod_jax.core import errors, losses
from compmod_jax.core.types import Params
from compmod_jax.kernels.attention import blocks as attention_blocks
from compmod_jax.layers.block import StackConfig
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms import dispatch
from compmod_jax.tasks.base import Batch, Carry, StepContext, Task
from compmod_jax.tools import shapes

TOKENS = 4096
"""About this many tokens are in the batch that is counted."""
VANILLA = "vanilla_weight"


class Flops(NamedTuple):
  """Floating-point operations for each position of the logits.

  Attributes:
    forward: of the loss, as in evaluation.
    training: of the loss, as in training, and of its gradient.
    rows: of the batch that was counted.
    length: positions of the logits in each row.
  """

  forward: float
  training: float
  rows: int
  length: int


def count(task: Task, params: Params) -> Flops:
  """Counts the programs before XLA optimises them; nothing is compiled or run.

  Every operation on an element counts one, comparisons and random bits too, and a multiplication of
  matrices [n, k] and [k, m] counts 2 n k m; exponentials and the like count nothing. One turn of
  each loop counts: recurrent models are given rows of one token, experts that are chosen run as on
  GPUs, and attention as one operation, without a loop.

  Args:
    task: the task.
    params: its parameters, or their shapes.

  Raises:
    UserError: the loss needs data that are missing, or this backend does not count.
  """
  carry = jax.eval_shape(task.model.init_carry)
  recurrent = task.model.config.steps_through_time
  batch = _batch(task, recurrent=recurrent)
  task = _countable(task)
  rows, length, _ = jax.eval_shape(task.model.forward, params, batch).shape
  carry = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), carry
  )
  key = jax.eval_shape(lambda: jax.random.key(0))

  def loss(params: Params, carry: Carry, batch: Batch, key: jax.Array, train: bool) -> jax.Array:
    context = StepContext(key, jnp.int32(0), train)
    return losses.objective(task.loss(params, carry, batch, context)[0])

  forward = functools.partial(loss, train=False)
  training = functools.partial(jax.value_and_grad(loss), train=True)
  given = params, carry, batch, key
  found = [_counted(function, *given) / (rows * length) for function in (forward, training)]
  return Flops(found[0], found[1], rows, length)


def meaning(found: Flops, task: Task) -> str:
  """What was counted, in a few sentences."""
  rows = (
    f"{found.rows} rows of {found.length} {'target ' * ('source' in task.dataset.example())}tokens"
  )
  if found.length == 1:
    rows = f"single steps of {found.rows} tokens"
    if "source" in task.dataset.example():
      rows += ", each behind a source of one token, which is all that attention looks at"
  parts = [
    "FLOPs: XLA's count before it optimises; a product of matrices [n, k] and [k, m] has 2 n k m,"
    " other operations 1 for each element, exponentials and the like none; loops count as one turn."
    " Forward: the loss, as in evaluation. Training: the loss and its gradient, without the"
    f" optimizer. Counted on {rows}, none of them padding, and divided by the number of tokens.",
  ]
  if task.objective.weights(task.model.config).get("vanilla"):
    parts.append("The loss of the vanilla set's own head is not counted.")
  if task.generator.decode is not None and task.generator.decode.recode_layer is not None:
    parts.append("Recoding in decoding is not counted.")
  return " ".join(parts)


def _counted(function: Callable[..., PyTree], *args: PyTree) -> float:
  with attention_blocks.as_one():
    cost = jax.jit(function).lower(*args).cost_analysis() or {}
  errors.check("flops" in cost, "this backend does not count them")
  return cost["flops"]


def _batch(task: Task, *, recurrent: bool) -> shapes.Shapes:
  """Shapes of a batch of `TOKENS` tokens as long as they may be, of one position if recurrent."""
  length = 1 if recurrent else shapes.longest(task)
  rows = max(leaf.shape[0] for leaf in jax.eval_shape(task.dataset.example).values())
  return shapes.batch_of(task, rows * max(1, TOKENS // (length * rows)), length)


def _countable(task: Task) -> Task:
  """The task with a loss that needs no data, and without loops, where that is possible."""
  config, model = task.dataset.config, task.model.config
  if hasattr(config, VANILLA):  # how far this loss reaches depends on the longest training answer
    config = dataclasses.replace(config, **{VANILLA: 0.0})
  if isinstance(model, StackConfig) and model.expert_layers and _chosen_alone(model.experts):
    experts = dataclasses.replace(model.experts, implementation="batched")
    model = dataclasses.replace(model, experts=experts)
  return config.build(model, files=task.dataset.files())


def _chosen_alone(experts: ExpertsConfig) -> bool:
  """Whether the experts that were not chosen do not run."""
  competition = experts.competition
  if experts.implementation != "auto" or competition.rule != "top_k":
    return experts.implementation not in ("auto", "dense")
  return dispatch.worthwhile(TOKENS, experts.count, competition.kept(experts.count))
