"""Learning at two levels: routers learn on one part of the data from what the rest makes of them.

The rest of a model learns on the large part of the training data. Its routers, or whatever else is
named, learn on the small part, and by the loss that the model has after the rest has taken steps on
the large part: they are meta-parameters, the hyper-gradient of which goes through those steps.
"""

import dataclasses
from typing import Any, ClassVar, TypeVar

import flax.linen as nn
import jax
from jaxtyping import PyTree

from compmod_jax.core import errors
from compmod_jax.data.episodes import flat
from compmod_jax.data.paired import QUERY, PairedDataset, split_parts
from compmod_jax.models.base import ModelConfig
from compmod_jax.tasks.base import (
  Batch,
  Carry,
  Metrics,
  Objective,
  Params,
  StepContext,
  Task,
  TaskModel,
  Terms,
)
from compmod_jax.tasks.objectives import Meta, unread

T = TypeVar("T", bound=Task[Any, Any, Any])


@dataclasses.dataclass(frozen=True)
class BilevelConfig:
  """Some parameters learn on the small part of the data, after steps of the rest on the large."""

  parameters: tuple[str, ...] = ("*/router",)
  """Names of the meta-parameters, or of modules for all in them; * stands for any characters."""
  steps: int = 1
  """Steps of gradient descent of the rest that their gradient goes through; 0 for none, which
  trains both by turns."""
  rate: float = 0.1
  """Their size."""
  query: float = 0.25
  """Rows of the small part in a batch for each row of the large part."""
  first_order: bool = False
  """Takes the steps of the rest for constants: their end is all that a meta-parameter sees."""

  def __post_init__(self):
    for field in ("steps", "rate"):
      value = getattr(self, field)
      errors.check(value >= 0, f"bilevel.{field} is {value}; it must not be negative.")
    errors.check(
      0 < self.query <= 1,
      f"bilevel.query is {self.query}; it is a share of the rows of the large part, over 0 and at"
      " most 1.",
    )
    errors.check(
      bool(self.parameters),
      "bilevel.parameters is empty; name the meta-parameters, such as '*/router', or leave"
      " task.bilevel out.",
    )

  def objective(self, inside: Objective) -> "Bilevel":
    """This way of learning, for an objective."""
    return Bilevel(
      inside,
      split_parts,
      steps=self.steps,
      rate=self.rate,
      parameters=self.parameters,
      first_order=self.first_order,
    )

  def over(self, task: T) -> T:
    """A task that is learned so.

    Args:
      task: on one batch of rows; its data set has `examples(split)` and `batch`.

    Raises:
      UserError: a pattern stands for no parameter, or they stand for all.
    """
    found = self.objective(task.objective)
    config = task.model.config
    # The plain model that others are compared with has none of what is learned so.
    if config != config.plain():
      found.check(nn.unbox(task.shapes))
    return dataclasses.replace(
      task, dataset=PairedDataset(task.dataset, self.query), objective=found
    )


@dataclasses.dataclass(frozen=True)
class Bilevel(Meta):
  r"""An objective in two levels, as one sum whose gradients are kept apart.

  Of a batch with rows S of the large part and rows Q of the small part, the rest :math:`\theta` of
  the parameters lowers the loss on S, and the meta-parameters :math:`\phi` that the patterns choose
  lower the loss on Q after k steps of the rest:

  .. math::
     J(\theta, \phi) &= L_S(\theta, \bar{\phi}) + L_Q(\theta^{(k)}, \phi) \\
     \theta^{(0)} &= \bar{\theta}, \qquad
     \theta^{(i+1)} = \theta^{(i)} - \alpha \nabla_\theta L_S(\theta^{(i)}, \phi)

  where a bar marks what the gradient takes for a constant. So

  .. math::
     \frac{\partial J}{\partial \theta} &= \nabla_\theta L_S(\theta, \phi) \\
     \frac{\partial J}{\partial \phi} &= \nabla_\phi L_Q(\theta^{(k)}, \phi)
       + \frac{\partial \theta^{(k)}}{\partial \phi}^{T} \nabla_\theta L_Q(\theta^{(k)}, \phi)

  The second term is what meta-learning adds; with `first_order` it is left out, and with no steps
  both parts of the parameters have the plain gradients on their part of the data, as where they
  train by turns.

  The steps of the inner loop are a look ahead; the rest itself moves by its own optimizer and by
  its gradient at :math:`\theta`, not to :math:`\theta^{(k)}`. Then it trains as in a phase on the
  large part alone, batch by batch, whatever k and :math:`\alpha` are; and a comparison with such
  phases is about what routers learn from, and about nothing else. (Rows, steps and their size would
  otherwise also decide how well the rest is optimised.)

  Every episode of a batch has its own steps; loss terms are sums over all episodes, so that
  micro-batches of whole episodes add up exactly.

  Attributes:
    objective: what is lowered.
    split: from the batch of an episode to S and Q; see `data.paired.split_parts`.
    steps: k.
    rate: alpha.
    parameters: names of the meta-parameters; see `core.parameters.matches`.
    first_order: leaves the second term out.

  Source: Kolios 2023, section 6.2 (routers that are meta-learned in phases of competition);
    Franceschi et al. 2018, equations 3 and 4 (a gradient through the steps of an inner problem).
  """

  field: ClassVar[str] = "bilevel"
  batches: ClassVar[str] = "data.paired.PairedDataset"

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of the objective inside, on the large part and on the small one."""
    inside = self.objective.weights(config)
    return inside | {f"{QUERY}{name}": weight for name, weight in inside.items()}

  def adapts(self, params: Params) -> PyTree:
    """True for every parameter of the rest.

    Raises:
      UserError: a pattern stands for no parameter, or there is no rest.
    """
    meta = super().adapts(params)
    errors.check(
      not all(jax.tree.leaves(meta)),
      f"{self.field}.parameters is {self.parameters}, which stand for all parameters; there is no"
      " rest that could learn on the large part. Narrow the patterns.",
    )
    return jax.tree.map(lambda m: not m, meta)

  def __call__(
    self, model: TaskModel[Any], params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`; columns of the batch are [episodes, rows, ...].

    Terms and metrics are those of the large part. Those of the small part, after the steps, are
    called query/NAME, but for statistics of routers, which are of the large part alone; and
    `support/TERM` are the terms before each step.
    """
    self._check_episodes(batch, carry)
    rest = self.adapts(params)
    support = flat(self.split(batch)[0])
    meta_still = jax.tree.map(lambda r, x: x if r else jax.lax.stop_gradient(x), rest, params)
    terms, carry, metrics = self.objective(model, meta_still, carry, support, context)
    after = context._replace(
      rng=jax.random.fold_in(context.rng, 1), intermediates=unread(context.intermediates)
    )
    rest_still = jax.tree.map(lambda r, x: jax.lax.stop_gradient(x) if r else x, rest, params)
    asked, _, found = super().__call__(model, rest_still, carry, batch, after)
    terms |= {f"{QUERY}{name}": term for name, term in asked.items()}
    for name, sums in found.items():
      if not name.startswith("router/"):
        metrics |= {name if name.startswith("support/") else f"{QUERY}{name}": sums}
    return terms, carry, metrics
