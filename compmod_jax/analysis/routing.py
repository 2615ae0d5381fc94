"""What routers do over a whole split."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.sharding import fetch
from compmod_jax.mechanisms.competition.statistics import weights_by_position
from compmod_jax.tasks.base import Batch, Sharing, Task


def mean_weights(
  task: Task,
  params: PyTree,
  split: str,
  *,
  sharing: Sharing = Sharing(),
  positions: int = 12,
) -> dict[str, dict[str, list]]:
  """Mean weight of every unit of every router over a split's real tokens.

  Args:
    task: the task.
    params: the model's parameters.
    split: name of the split; a decoder reads its references.
    sharing: how batches are laid over devices.
    positions: how many first positions have means of their own.

  Returns:
    Site -> `mean` [units] and `by_position` [positions, units].
  """
  if not task.model.routing_sites():
    return {}
  sums = jax.jit(functools.partial(_sums, task, positions=positions))
  batches = task.dataset.eval_batches(split, multiple=sharing.multiple)
  parts = [fetch(sums(params, sharing.place(batch))) for batch in batches]
  totals = added(parts)
  return {
    site: {
      name: (total / np.maximum(count, 1)[..., None]).tolist()
      for name, (total, count) in by_name.items()
    }
    for site, by_name in totals.items()
  }


def added(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
  """Sums of batches, site by site: a batch has none of a site that it does not run through.

  Args:
    parts: site -> name -> any pytree of arrays, for every batch.
  """
  totals: dict[str, dict[str, Any]] = {}
  for part in parts:
    for site, values in part.items():
      held = totals.get(site)
      totals[site] = jax.tree.map(np.add, held, dict(values)) if held else dict(values)
  return totals


def _sums(task: Task, params: PyTree, batch: Batch, *, positions: int) -> dict[str, Any]:
  intermediates = Intermediates(capture=frozenset(task.model.routing_sites()))
  task.model.forward(params, batch, intermediates=intermediates)
  return {
    site: weights_by_position(weights, task.model.valid_mask(site, batch), positions)
    for site, weights in intermediates.captured.items()
  }
