"""One training step: gradients of the objective, the update, and what a bad step leaves alone."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from compmod_jax.core import errors, losses
from compmod_jax.core.rounding import Products, rounded
from compmod_jax.core.types import Params
from compmod_jax.tasks.base import Batch, Carry, Loss, Metrics, StepContext, Task, Terms
from compmod_jax.training.optimizer import ParamGroup, groups, like_parameters, plateau_factor


class TrainState(flax.struct.PyTreeNode):
  """Everything that training changes.

  Attributes:
    step: batches seen so far.
    params: parameters.
    opt_state: the optimizer's state.
    ema: moving average of the parameters, or an empty tuple.
    carry: recurrent state.
    skipped: steps whose loss or gradient was not finite.
    bad_run: such steps in a row, up to now.
  """

  step: jax.Array
  params: Params
  opt_state: optax.OptState
  ema: PyTree
  carry: Carry
  skipped: jax.Array
  bad_run: jax.Array

  @property
  def weights(self) -> Params:
    """The parameters to evaluate: the moving average where there is one."""
    return self.params if self.ema == () else self.ema


def init_state(
  params: Params, carry: Carry, optimizer: optax.GradientTransformation, ema: float
) -> TrainState:
  """The state before the first step."""
  zero = jnp.int32(0)
  return TrainState(
    step=zero,
    params=params,
    opt_state=optimizer.init(params),
    ema=jax.tree.map(jnp.array, params) if ema else (),
    carry=carry,
    skipped=zero,
    bad_run=zero,
  )


def trainable_mask(
  params: Params, which: str, own: Sequence[ParamGroup] = ()
) -> Mapping[str, PyTree]:
  """True for every parameter that moves in a phase.

  Args:
    params: the parameters, or their shapes.
    which: `all`, or names of groups with + between them: `routing`, `rest`, those of `own`.
    own: the experiment's groups.

  Raises:
    UserError: a group has no parameters.
  """
  labels, wanted = groups(params, own), which.split("+")
  there = {"all", *jax.tree.leaves(labels)}
  for name in wanted:
    remedy = "Let heads or experts compete" if name == "routing" else "Name groups that have some"
    errors.check(
      name in there,
      f"phases.trainable is {which!r}, but the model has no such parameters"
      f"{f' as {name!r}' if name != which else ''}: nothing would train. {remedy}, or use trainable"
      " = all.",
    )
  return jax.tree.map(lambda label: "all" in wanted or label in wanted, labels)


def gradients(
  loss: Loss, params: Params, carry: Carry, batch: Batch, context: StepContext, micro_batches: int
) -> tuple[Params, jax.Array, Terms, Carry, Metrics]:
  """Gradient of the objective over a batch, taken in `micro_batches` parts that add up exactly.

  Terms are functions of totals, so the totals come first: one pass adds up every term's statistics,
  the objective's derivative with respect to them is taken there, and a second pass pulls it back
  through each part. Only what that derivative depends on is computed in the first pass; for means
  over tokens that is the counts alone.

  Returns:
    The gradient, the objective, the terms with their totals, the new carry and the metrics.
  """
  if micro_batches == 1:

    def whole(params: Params) -> tuple[jax.Array, tuple[Terms, Carry, Metrics]]:
      terms, new, found = loss(params, carry, batch, context)
      return losses.objective(terms), (terms, new, found)

    (value, (terms, new, found)), grads = jax.value_and_grad(whole, has_aux=True)(params)
    return grads, value, terms, new, found

  def split(leaf: jax.Array) -> jax.Array:
    # Neighbouring rows go to different parts, so that every device keeps its own rows.
    return leaf.reshape(-1, micro_batches, *leaf.shape[1:]).swapaxes(0, 1)

  def join(leaf: jax.Array) -> jax.Array:
    return leaf.swapaxes(0, 1).reshape(-1, *leaf.shape[2:])

  parts = jax.tree.map(split, (dict(batch), carry))
  numbers = jnp.arange(micro_batches)

  def part_loss(
    params: Params, number: jax.Array, part: tuple[Batch, Carry]
  ) -> tuple[Terms, Carry, Metrics]:
    rng = jax.random.fold_in(context.rng, number)
    return loss(params, part[1], part[0], context._replace(rng=rng))

  def statistics(
    number_part: tuple[jax.Array, tuple[Batch, Carry]],
  ) -> tuple[Terms, Carry, Metrics]:
    return part_loss(params, *number_part)

  def total(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), stacked)

  terms, carries, found = jax.lax.map(statistics, (numbers, parts))
  terms, found = total(terms), total(found)
  value, cotangent = jax.value_and_grad(losses.objective, allow_int=True)(terms)

  def add(grads: Params, number_part: tuple[jax.Array, tuple[Batch, Carry]]) -> tuple[Params, None]:
    _, pull = jax.vjp(lambda p: part_loss(p, *number_part)[0], params)
    return jax.tree.map(jnp.add, grads, pull(cotangent)[0]), None

  zeros = jax.tree.map(jnp.zeros_like, params)
  grads, _ = jax.lax.scan(add, zeros, (numbers, parts))
  return grads, value, terms, jax.tree.map(join, carries), found


def make_step(
  task: Task,
  optimizer: optax.GradientTransformation,
  rate: Callable[[ArrayLike], jax.Array],
  *,
  micro_batches: int,
  ema: float,
  mask: Mapping[str, PyTree],
  total_steps: int = 1,
  group_rates: Mapping[str, Callable[[ArrayLike], jax.Array]] | None = None,
  products: Products = "model",
  update_shardings: PyTree | None = None,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, dict[str, Any]]]:
  """The step of a phase: a pure function from state, batch and random key to state and metrics.

  The key is the run's, the same at every step; the state's counter tells steps apart.

  Frozen parameters (`mask` false), those that a batch has no use for, and the optimizer state of
  both keep their bits. Where the loss or the gradient is not finite, everything but the counters
  does. What the task varies in the course of training spans `total_steps` batches, those of all
  phases. Where groups of parameters have rates of their own, metrics have those of `group_rates`.
  `products` of the loss and its gradients, not of the optimizer, may be rounded.
  With `update_shardings`, a tree like the parameters, every device updates its part of them.
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def choose(moves: PyTree, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda m, n, o: n if m else o, moves, new, old)

  def divided(tree: Params) -> Params:
    if update_shardings is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, update_shardings)

  def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, dict[str, Any]]:
    rng = jax.random.fold_in(key, state.step)
    progress = jnp.minimum(state.step / max(total_steps - 1, 1), 1)
    context = StepContext(rng=rng, step=state.step, train=True, progress=progress)
    slopes = functools.partial(gradients, task.loss, context=context, micro_batches=micro_batches)
    slopes = rounded(slopes) if products == "bfloat16" else slopes
    grads, value, terms, carry, found = slopes(state.params, state.carry, batch)
    idle = task.model.unused_parameters(batch)
    moving = {
      name: jax.tree.map(lambda _: False, part) if name in idle else part
      for name, part in mask.items()
    }
    grads = divided(choose(moving, grads, jax.tree.map(jnp.zeros_like, grads)))
    before = divided(state.params)
    norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, before, moving=moving)
    params = choose(moving, optax.apply_updates(before, updates), before)
    moves = like_parameters(optimizer, opt_state, moving, lambda _: True)
    opt_state = choose(moves, opt_state, state.opt_state)
    average = state.ema
    if ema:
      # The average forgets its start faster than its decay says, as long as few steps are in it.
      decay = jnp.minimum(ema, (1 + state.step) / (10 + state.step))
      average = jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), state.ema, params)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    moved = (params, opt_state, average, carry)
    old = (before, state.opt_state, state.ema, state.carry)
    params, opt_state, average, carry = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), moved, old
    )
    bad, updated = 1 - finite.astype(jnp.int32), state.step - state.skipped
    new = TrainState(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      ema=average,
      carry=carry,
      skipped=state.skipped + bad,
      bad_run=(state.bad_run + 1) * bad,
    )
    metrics = {
      "objective": value,
      "terms": {name: term.logged() for name, term in terms.items()},
      "task": found,
      "gradient_norm": norm,
      "learning_rate": rate(updated)
      * plateau_factor(state.opt_state, "rest" if group_rates else None),
      "learning_rates": {
        name: one(updated) * plateau_factor(state.opt_state, name)
        for name, one in (group_rates or {}).items()
      },
      "skipped": new.skipped,
      "bad_run": new.bad_run,
    }
    return new, metrics

  return step
