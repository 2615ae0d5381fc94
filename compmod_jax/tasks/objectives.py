"""Objectives that wrap another one: what mechanisms add to the loss of any task.

A wrapper hands the objective inside it a context whose `taps` read or change intermediates of the
one forward pass, and adds terms and metrics of what was read.
"""

import dataclasses
import functools
from typing import Any

import jax

from compmod_jax.mechanisms.competition import losses
from compmod_jax.mechanisms.competition.statistics import routers_captured, routers_statistics
from compmod_jax.mechanisms.modulation import gate_statistics
from compmod_jax.models.base import ModelConfig
from compmod_jax.tasks.base import Batch, Carry, Context, Metrics, Objective, Params, Terms


def standard(objective: Objective, config: ModelConfig) -> Objective:
  """An objective with all that the mechanisms of a model add to it, and nothing of others.

  Args:
    objective: of the task.
    config: the model's configuration.
  """
  if config.training_edits():
    objective = WithTrainingEdits(objective)
  if losses.objective(config.routers()):
    objective = WithRouterLosses(objective)
  if sites := config.routing_sites():
    objective = WithRouterStatistics(objective, sites)
  if site := config.gate_site():
    objective = WithGateStatistics(objective, site)
  return objective


@dataclasses.dataclass(frozen=True)
class WithTrainingEdits:
  """Changes activations in training (DropHead), as the model's configuration says.

  Attributes:
    objective: of the model whose activations they are.
  """

  objective: Objective

  def weights(self, config: Any) -> dict[str, float]:
    """Those of the objective inside."""
    return self.objective.weights(config)

  def __call__(
    self, model: Any, params: Params, carry: Carry, batch: Batch, context: Context
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    if context.train:
      for make in model.running_config(batch).training_edits():
        edits = make(rng=context.rng, progress=context.progress)
        context = context._replace(taps=context.taps.editing(edits))
    return self.objective(model, params, carry, batch, context)


@dataclasses.dataclass(frozen=True)
class WithRouterLosses:
  """Adds the losses that keep routers healthy, where their weights are not 0.

  Attributes:
    objective: of the model whose routers they are.
  """

  objective: Objective

  def weights(self, config: Any) -> dict[str, float]:
    """Those of the objective inside, and of the routers' losses."""
    return self.objective.weights(config) | losses.objective(config.routers())

  def __call__(
    self, model: Any, params: Params, carry: Carry, batch: Batch, context: Context
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    routers = model.running_config(batch).routers()
    outside = context.taps
    taps = outside.also(losses.captured_sites(routers))
    terms, carry, found = self.objective(model, params, carry, batch, context._replace(taps=taps))
    outside.merge(taps.captured, taps.seen)
    valid = functools.partial(model.valid_mask, batch=batch)
    return losses.terms(routers, taps.captured, valid) | terms, carry, found


@dataclasses.dataclass(frozen=True)
class WithRouterStatistics:
  """Adds statistics of the routers to the metrics; see `routers_statistics`.

  Attributes:
    objective: of the model whose routers they are.
    sites: of all routers' weights. Those that a batch does not run are left out.
  """

  objective: Objective
  sites: tuple[str, ...]

  def weights(self, config: Any) -> dict[str, float]:
    """Those of the objective inside."""
    return self.objective.weights(config)

  def __call__(
    self, model: Any, params: Params, carry: Carry, batch: Batch, context: Context
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    outside = context.taps
    taps = outside.also(routers_captured(self.sites))
    terms, carry, found = self.objective(model, params, carry, batch, context._replace(taps=taps))
    outside.merge(taps.captured, taps.seen)
    ran = [site for site in self.sites if site in taps.captured]
    valid = functools.partial(model.valid_mask, batch=batch)
    return terms, carry, routers_statistics(ran, taps.captured, valid) | found


@dataclasses.dataclass(frozen=True)
class WithGateStatistics:
  """Adds the mean and the saturation of the gate of a modulated model to the metrics.

  Attributes:
    objective: of the model whose gate it is.
    site: of the gate.
  """

  objective: Objective
  site: str

  def weights(self, config: Any) -> dict[str, float]:
    """Those of the objective inside."""
    return self.objective.weights(config)

  def __call__(
    self, model: Any, params: Params, carry: Carry, batch: Batch, context: Context
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    outside = context.taps
    taps = outside.also([self.site])
    terms, carry, found = self.objective(model, params, carry, batch, context._replace(taps=taps))
    outside.merge(taps.captured, taps.seen)
    gate = jax.lax.stop_gradient(taps.captured[self.site])
    statistics = gate_statistics(gate, model.valid_mask(self.site, batch))
    return terms, carry, found | {f"gate/{name}": value for name, value in statistics.items()}
