r"""Learning one thing after the other without forgetting: by meta-learning, and by other means.

All functions take a loss of parameters and rows, `loss(params, rows) -> scalar`, rows being a tree
of arrays [rows, ...], and a filter of parameters by name (`core.parameters.matches`), so that they
serve any model.

- `online_trajectory` and `outer_loss`: gradient descent on one example at a time, and what
  meta-learning lowers (OML, ANML).
- `fisher_diagonal` and `quadratic_penalty`: elastic weight consolidation.
- `distillation_loss`: learning without forgetting.
- `Buffer`, `add_to_reservoir`, `add_balanced`, `drawn`: rehearsal.
- `accuracy_matrix`, `transfer`: what was kept, and what one task did for others.

Source: Kolios 2023, sections 4.8.10 and 4.8.11; each function names its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from compmod_jax.core import errors
from compmod_jax.core.parameters import chosen, names, path_name
from compmod_jax.core.types import Params

Rows = PyTree
Loss = Callable[[Params, Rows], Any]

# Parameters by name.


def selected(params: Params, parameters: Sequence[str]) -> dict[str, Any]:
  """The parameters that patterns stand for, name -> array or shape.

  Raises:
    UserError: a pattern stands for no parameter.
  """
  mask = jax.tree.leaves(chosen(params, parameters, "parameters"))
  both = zip(names(params), jax.tree.leaves(params), mask, strict=True)
  return {name: leaf for name, leaf, wanted in both if wanted}


def replaced(params: Params, new: Mapping[str, Any]) -> Params:
  """Parameters with others in place of those of the same names."""
  return jax.tree_util.tree_map_with_path(lambda path, leaf: new.get(path_name(path), leaf), params)


# Meta-learning.


def online_trajectory(
  loss: Loss,
  params: Params,
  examples: Rows,
  *,
  rate: jax.Array | float = 0.1,
  parameters: Sequence[str] = ("*",),
  first_order: bool = False,
  remat: bool = False,
) -> Params:
  r"""Parameters after a step of gradient descent on each of some examples, in their order.

  .. math:: \theta^{(j)} = \theta^{(j-1)} - \beta \nabla_\theta L(\theta^{(j-1)}, x_j)

  The result can be differentiated with respect to the parameters before, to the examples and to the
  step size.

  Args:
    loss: from parameters and one row to a scalar.
    params: the parameters before.
    examples: leaves [examples, ...]; `loss` gets them one by one, [1, ...].
    rate: beta.
    parameters: names of what learns. All else stays as it is.
    first_order: the gradient of the steps is taken for a constant.
    remat: steps are computed anew when they are differentiated, which keeps nothing but the
      parameters of every step.

  Raises:
    UserError: a pattern stands for no parameter.

  Source: Javed & White 2019, Algorithm 1, lines 6 to 8; Kolios 2023, Algorithm 4.4.
  """

  def step(moving: dict[str, jax.Array], example: Rows) -> tuple[dict[str, jax.Array], None]:
    row = jax.tree.map(lambda x: x[None], example)
    at = jax.lax.stop_gradient(moving) if first_order else moving
    slopes = jax.grad(lambda moving: loss(replaced(params, moving), row))(at)
    slopes = jax.lax.stop_gradient(slopes) if first_order else slopes
    return {name: x - rate * slopes[name] for name, x in moving.items()}, None

  run = jax.checkpoint(step) if remat else step
  moving, _ = jax.lax.scan(run, selected(params, parameters), examples)
  return replaced(params, moving)


def outer_loss(
  loss: Loss,
  params: Params,
  trajectory: Rows,
  remember: Rows,
  *,
  has_aux: bool = False,
  **how: Any,
) -> Any:
  r"""What OML and ANML lower: the loss on what was just learned and on what is to be remembered.

  .. math:: L(\theta^{(k)}, S_{traj} \cup S_{rem})

  Its gradient with respect to `params` goes through all steps of the trajectory.

  Args:
    loss: from parameters and rows to the mean over rows, and something else if `has_aux`.
    params: the parameters before.
    trajectory: S_traj, examples of a class that are learned one by one.
    remember: S_rem, examples of any classes; leaves like those of the trajectory.
    has_aux: `loss` returns a pair, and so does this.
    **how: as `online_trajectory` has it.

  Source: Javed & White 2019, equation 2; Beaulieu et al. 2020, Algorithm 1; Kolios 2023,
    Algorithm 4.4.
  """
  inner = (lambda params, rows: loss(params, rows)[0]) if has_aux else loss
  after = online_trajectory(inner, params, trajectory, **how)
  return loss(after, jax.tree.map(lambda *parts: jnp.concatenate(parts), trajectory, remember))


# Elastic weight consolidation.


def fisher_diagonal(
  loss: Loss, params: Params, examples: Rows, parameters: Sequence[str] = ("*",)
) -> dict[str, jax.Array]:
  r"""The diagonal of the Fisher information, name of a parameter -> array of its shape.

  .. math:: F_i = \frac{1}{n} \sum_x \Bigl(\frac{\partial \ln p(y_x \mid x)}
            {\partial \theta_i}\Bigr)^2

  With labels that the model itself gives, drawn from its distribution, it is an estimate of the
  Fisher information; with those of the data it is the empirical one.

  Args:
    loss: -ln p(y | x) of one row.
    params: the parameters.
    examples: leaves [examples, ...], taken one by one.
    parameters: names of those that are asked for.

  Source: Kirkpatrick et al. 2017, equation 3.
  """
  moving = selected(params, parameters)

  def add(total: dict[str, jax.Array], example: Rows) -> tuple[dict[str, jax.Array], None]:
    row = jax.tree.map(lambda x: x[None], example)
    slopes = jax.grad(lambda moving: loss(replaced(params, moving), row))(moving)
    return {name: total[name] + jnp.square(slope) for name, slope in slopes.items()}, None

  total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, moving), examples)
  count = len(jax.tree.leaves(examples)[0])
  return jax.tree.map(lambda x: x / count, total)


def quadratic_penalty(
  params: Params, anchor: Mapping[str, Any], importance: Mapping[str, Any]
) -> Float[Array, ""]:
  r"""What elastic weight consolidation adds to the loss of a new task, but for its strength.

  .. math:: \frac{1}{2} \sum_i F_i (\theta_i - \theta^*_i)^2

  Args:
    params: the parameters.
    anchor: those after earlier tasks, name -> array; others have no penalty.
    importance: F, of the same names: the sum over earlier tasks.

  Source: Kirkpatrick et al. 2017, equation 3; one anchor for all tasks, Schwarz et al. 2018,
    section 4.
  """
  now = selected(params, tuple(anchor))
  parts = [
    jnp.sum(importance[name] * jnp.square(now[name] - before)) for name, before in anchor.items()
  ]
  return 0.5 * sum(parts, start=jnp.float32(0))


# Learning without forgetting.


def distillation_loss(
  logits: Float[Array, "*batch classes"],
  teacher: Float[Array, "*batch classes"],
  known: Bool[Array, " classes"],
  temperature: float = 2.0,
) -> Float[Array, "*batch"]:
  r"""Cross-entropy with what the model before said of the same examples, over known classes.

  .. math:: -\sum_{k \in \text{known}} q_k \ln p_k, \qquad
            q = \mathrm{softmax}_{\text{known}}(z^* / T), \quad
            p = \mathrm{softmax}_{\text{known}}(z / T)

  It is 0 where no class is known.

  Args:
    logits: z, of the model that learns.
    teacher: z*, of the model before; no gradient passes through them.
    known: classes of earlier tasks.
    temperature: T.

  Source: Li & Hoiem 2017, equations 2 to 4.
  """
  shape = (1,) * (logits.ndim - 1) + (-1,)
  mask = known.reshape(shape)

  def log_softmax(z: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(jnp.where(mask, z / temperature, -1e9), axis=-1)

  q = jnp.exp(log_softmax(jax.lax.stop_gradient(teacher)))
  return -jnp.sum(jnp.where(mask, q * log_softmax(logits), 0), axis=-1)


# Rehearsal.


class Buffer(NamedTuple):
  """Examples that are kept for rehearsal.

  Attributes:
    items: the examples, leaves [capacity, ...].
    labels: their classes, -1 where there is none; places are taken in their order.
    seen: examples of every class that came by, kept or not.
    full: whether a class is, or was, among the largest since there is no room (`add_balanced`).
  """

  items: PyTree
  labels: Int[Array, " capacity"]
  seen: Int[Array, " classes"]
  full: Bool[Array, " classes"]

  @property
  def filled(self) -> Int[Array, ""]:
    """How many examples there are."""
    return jnp.sum(self.labels >= 0)


def empty_buffer(capacity: int, classes: int, example: PyTree) -> Buffer:
  """A buffer without examples.

  Args:
    capacity: examples that it can hold.
    classes: labels are below this.
    example: one, or the shapes of one.
  """
  items = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), example)
  none = jnp.full(capacity, -1, jnp.int32)
  return Buffer(items, none, jnp.zeros(classes, jnp.int32), jnp.zeros(classes, bool))


def _store(
  buffer: Buffer, example: PyTree, label: jax.Array, place: jax.Array, keep: jax.Array
) -> Buffer:
  """The example at a place if it is kept, and counted in any case."""
  place = jnp.where(keep, place, len(buffer.labels))  # beyond the end, where nothing is written

  def put(held: jax.Array, one: jax.Array) -> jax.Array:
    return held.at[place].set(jnp.asarray(one).astype(held.dtype), mode="drop")

  return buffer._replace(
    items=jax.tree.map(put, buffer.items, example),
    labels=put(buffer.labels, label),
    seen=buffer.seen.at[label].add(1),
  )


def add_to_reservoir(
  buffer: Buffer, example: PyTree, label: Int[Array, ""], rng: jax.Array
) -> Buffer:
  """The buffer after one more example: every example so far is in it with the same probability.

  Source: Vitter 1985, Algorithm R.
  """
  count, capacity = jnp.sum(buffer.seen), len(buffer.labels)
  drawn_place = jax.random.randint(rng, (), 0, count + 1)
  place = jnp.where(count < capacity, count, drawn_place)
  return _store(buffer, example, label, place, place < capacity)


def add_balanced(buffer: Buffer, example: PyTree, label: Int[Array, ""], rng: jax.Array) -> Buffer:
  """The buffer after one more example: classes are in it as evenly as what came by allows.

  While there is room, every example is kept. Then one of a class that has never been among the
  largest takes the place of one of the largest, and one of another class that of one of its own,
  with the probability that makes a reservoir of that class.

  Source: Chrysakis & Moens 2020, Algorithm 1.
  """
  capacity, classes = len(buffer.labels), len(buffer.seen)
  first, second = jax.random.split(rng)
  held = jnp.sum(buffer.labels[:, None] == jnp.arange(classes)[None], axis=0)
  largest = held == jnp.max(held)
  room = buffer.filled < capacity
  full = buffer.full | (largest & ~room)
  own = full[label]
  of_largest = largest[jnp.maximum(buffer.labels, 0)] & (buffer.labels >= 0)
  candidates = jnp.where(own, buffer.labels == label, of_largest)
  victim = jnp.argmax(jnp.where(candidates, jax.random.uniform(first, (capacity,)), -1.0))
  share = held[label] / jnp.maximum(buffer.seen[label] + 1, 1)
  keep = ~own | (jax.random.uniform(second) < share)
  place = jnp.where(room, buffer.filled, victim)
  return _store(buffer._replace(full=full), example, label, place, room | keep)


def drawn(
  buffer: Buffer, count: int, rng: jax.Array
) -> tuple[PyTree, Int[Array, " count"], Bool[Array, " count"]]:
  """Examples of a buffer at random, with repetition: items, labels, and whether there are any."""
  places = jax.random.randint(rng, (count,), 0, jnp.maximum(buffer.filled, 1))
  items = jax.tree.map(lambda x: x[places], buffer.items)
  return items, buffer.labels[places], jnp.full(count, buffer.filled > 0)


# Measures.


def accuracy_matrix(
  right: Bool[np.ndarray, "stages examples"], tasks: Int[np.ndarray, " examples"]
) -> Float[np.ndarray, "stages tasks"]:
  """The accuracy on the examples of every task after each stage.

  Args:
    right: whether an example was classified rightly after a stage.
    tasks: the task of every example, from 0; each has one at least.
  """
  member = np.eye(tasks.max() + 1)[tasks]
  return right @ member / member.sum(axis=0)


class Transfer(NamedTuple):
  """What a matrix of accuracies shows; all are shares or differences of shares.

  Attributes:
    accuracy: mean over tasks, after the last one.
    retention: what is left of earlier tasks' accuracies after the last one, as a share of what they
      were when each was learned; NaN where they were 0.
    forgetting: mean over earlier tasks of the best accuracy before the end less that at the end.
    backward: mean over earlier tasks of the accuracy at the end less that when each was learned.
    forward: mean over later tasks of the accuracy just before each was learned less that at first.
  """

  accuracy: float
  retention: float
  forgetting: float
  backward: float
  forward: float


def transfer(
  matrix: Float[np.ndarray, "tasks tasks"], before: Float[np.ndarray, " tasks"]
) -> Transfer:
  r"""Retention and transfer of tasks that were learned one after the other.

  .. math::
     \mathrm{ACC} &= \frac{1}{T} \sum_j R_{Tj} \\
     \mathrm{BWT} &= \frac{1}{T-1} \sum_{j<T} (R_{Tj} - R_{jj}) \\
     \mathrm{FWT} &= \frac{1}{T-1} \sum_{j>1} (R_{j-1,j} - b_j) \\
     \text{retention} &= \frac{\sum_{j<T} R_{Tj}}{\sum_{j<T} R_{jj}}

  Args:
    matrix: R, the accuracy on task j after learning task i.
    before: b, the accuracy on every task before the first was learned.

  Raises:
    UserError: there are fewer than two tasks.

  Source: Lopez-Paz & Ranzato 2017, equations 2 to 4; forgetting, Chaudhry et al. 2018, section 3.2.
  """
  tasks = len(matrix)
  errors.check(
    tasks >= 2 and matrix.shape == (tasks, tasks),
    f"matrix has the shape {matrix.shape}; it must be [tasks, tasks] with two tasks at least: what"
    " one task does for another needs another. Give more stages.",
  )
  learned, end = np.diagonal(matrix)[:-1], matrix[-1, :-1]
  best = np.array([matrix[task:-1, task].max() for task in range(tasks - 1)])
  total = learned.sum()
  return Transfer(
    accuracy=float(matrix[-1].mean()),
    retention=float(end.sum() / total) if total else float("nan"),
    forgetting=float((best - end).mean()),
    backward=float((end - learned).mean()),
    forward=float((np.diagonal(matrix, offset=1) - before[1:]).mean()),
  )
