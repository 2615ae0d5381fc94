"""Objectives that wrap another one: what mechanisms add to the loss of any task.

A wrapper hands the objective inside it a context whose `taps` read or change intermediates of the
one forward pass, and adds terms and metrics of what was read.
"""

import dataclasses
import functools
from typing import Any

import jax

from compmod_jax.mechanisms.competition import drophead, losses
from compmod_jax.mechanisms.competition.statistics import routers_captured, routers_statistics
from compmod_jax.mechanisms.modulation import gate_statistics
from compmod_jax.tasks.base import Batch, Carry, Context, Metrics, Objective, Params, Terms


def standard(objective: Objective) -> Objective:
  """An objective with all that mechanisms add: DropHead, losses of routers, statistics."""
  return WithGateStatistics(WithRouterLosses(WithDropHead(objective)))


@dataclasses.dataclass(frozen=True)
class WithDropHead:
  """Drops heads in training, as the model's configuration says.

  Attributes:
    objective: of the model whose heads are dropped.
  """

  objective: Objective

  def weights(self, config: Any) -> dict[str, float]:
    """Those of the objective inside."""
    return self.objective.weights(config)

  def __call__(
    self, model: Any, params: Params, carry: Carry, batch: Batch, context: Context
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    config = model.running_config(batch)
    if context.train:
      edits = drophead.edits(
        config.drophead, config.dropped_sites(), rng=context.rng, progress=context.progress
      )
      context = context._replace(taps=context.taps.editing(edits))
    return self.objective(model, params, carry, batch, context)


@dataclasses.dataclass(frozen=True)
class WithRouterLosses:
  """Adds the losses that keep routers healthy, where their weights are not 0, and statistics.

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
    config = model.running_config(batch)
    sites, routers = config.routing_sites(), config.routers()
    if not sites:
      return self.objective(model, params, carry, batch, context)
    outside = context.taps
    taps = outside.also(routers_captured(sites) | losses.captured_sites(routers))
    terms, carry, found = self.objective(model, params, carry, batch, context._replace(taps=taps))
    outside.merge(taps.captured, taps.seen)
    valid = functools.partial(model.valid_mask, batch=batch)
    terms = losses.terms(routers, taps.captured, valid) | terms
    return terms, carry, routers_statistics(sites, taps.captured, valid) | found


@dataclasses.dataclass(frozen=True)
class WithGateStatistics:
  """Adds the mean and the saturation of the gate of a modulated model to the metrics.

  Attributes:
    objective: of the model whose gate it is.
  """

  objective: Objective

  def weights(self, config: Any) -> dict[str, float]:
    """Those of the objective inside."""
    return self.objective.weights(config)

  def __call__(
    self, model: Any, params: Params, carry: Carry, batch: Batch, context: Context
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    site = model.running_config(batch).gate_site()
    if site is None:
      return self.objective(model, params, carry, batch, context)
    outside = context.taps
    taps = outside.also([site])
    terms, carry, found = self.objective(model, params, carry, batch, context._replace(taps=taps))
    outside.merge(taps.captured, taps.seen)
    gate = jax.lax.stop_gradient(taps.captured[site])
    statistics = gate_statistics(gate, model.valid_mask(site, batch))
    return terms, carry, found | {f"gate/{name}": value for name, value in statistics.items()}
