"""The heads of a model on a few fixed sentences, measured again and again while it trains."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from compmod_jax.analysis.routing import added
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.sharding import fetch
from compmod_jax.mechanisms.competition.statistics import weights_by_position
from compmod_jax.tasks.base import Batch, Sharing, Task

POSITIONS = 5  # as in Kolios 2023, figures 5.7 to 5.13: the first ones after a start token
DIGITS = 4


class HeadWatch:
  """Mean weights and output norms of every head, at each of the first positions.

  The sentences are the first of a split, always the same, in one batch.

  Args:
    task: whose model.
    sentences: how many, >= 1.
    split: of which split.
    sharing: how batches are laid over devices.
  """

  def __init__(
    self,
    task: Task,
    sentences: int,
    *,
    split: str = "valid",
    sharing: Sharing = Sharing(),
  ):
    batches = samples(task.dataset.eval_batches(split), sentences)
    self._task, self._sentences = task, sum(len(batch["index"]) for batch in batches)
    self._batches = [sharing.place(batch) for batch in batches]
    self._routed = {
      site.removesuffix("/router/weights"): site for site in task.model.routing_sites()
    }
    self._sums = jax.jit(self._measure)

  @functools.cached_property
  def _modules(self) -> list[str]:
    """Modules of attention. Found by tracing the model, which no step has to wait for."""
    intermediates, task = Intermediates(), self._task
    jax.eval_shape(
      lambda: task.model.forward(
        _zeros(task.shapes), task.dataset.example(), intermediates=intermediates
      )
    )
    ends = "/heads"
    return sorted(site.removesuffix(ends) for site in intermediates.seen if site.endswith(ends))

  @property
  def empty(self) -> bool:
    """Whether the model has neither heads nor anything that competes."""
    return not (self._modules or self._routed)

  def __call__(self, params: PyTree) -> dict[str, Any]:
    """What these parameters do with the sentences: a record of the log, but for kind and step.

    Returns:
      `sentences`, how many there are, and `sites`: attention module or layer of experts -> `first`,
      number of the first position with a mean of its own; `weight` [positions, units], where units
      compete; `norm` and, where heads compete, `norm_scaled` [positions, heads]: Euclidean norms of
      the heads' outputs before and after they are weighted. Means over sentences; None where no
      sentence is so long.
    """
    found = added(fetch(self._sums(params, batch)) for batch in self._batches)
    sites = {
      module: {
        "first": self._task.model.start_tokens(module),
        **{name: _means(*pair) for name, pair in values.items()},
      }
      for module, values in found.items()
    }
    return {"sentences": self._sentences, "sites": sites}

  def _measure(self, params: PyTree, batch: Batch) -> dict[str, dict[str, tuple[Any, Any]]]:
    scaled = [module for module in self._modules if module in self._routed]
    sites = {f"{module}/heads": (module, "norm") for module in self._modules}
    sites |= {f"{module}/heads_scaled": (module, "norm_scaled") for module in scaled}
    sites |= {site: (module, "weight") for module, site in self._routed.items()}
    intermediates = Intermediates(capture=frozenset(sites))
    self._task.model.forward(params, batch, intermediates=intermediates)
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    for site, (module, name) in sites.items():
      if site not in intermediates.captured:
        continue  # the batch does not run through it
      values = intermediates.captured[site]
      if name != "weight":
        values = jnp.sqrt(jnp.sum(jnp.square(values.astype(jnp.float32)), axis=-1))
      first, rows = self._task.model.start_tokens(module), self._task.model.valid_mask(site, batch)
      sums = weights_by_position(values[:, first:], rows[:, first:], POSITIONS)
      found.setdefault(module, {})[name] = sums["by_position"]
    return found


def samples(batches: Iterable[Mapping[str, np.ndarray]], count: int) -> list[dict[str, np.ndarray]]:
  """The examples with the lowest numbers (`index`), padded with zeros: a batch for all that have
  the same columns.

  Args:
    batches: each column [rows] or [rows, time, ...], `index` -1 where a row is filler.
    count: how many examples, at most.
  """
  rows: dict[int, dict[str, np.ndarray]] = {}
  for batch in batches:
    for row in np.flatnonzero(batch["index"] >= 0).tolist():
      rows[int(batch["index"][row])] = {name: column[row] for name, column in batch.items()}
  kinds: dict[tuple[str, ...], list[dict[str, np.ndarray]]] = {}
  for number in sorted(rows)[:count]:
    kinds.setdefault(tuple(rows[number]), []).append(rows[number])
  return [
    {name: _stack([row[name] for row in kind]) for name in kind[0]} for kind in kinds.values()
  ]


def _stack(values: list[np.ndarray]) -> np.ndarray:
  """[rows] of scalars, or [rows, longest, ...] of sequences; shorter ones end in zeros."""
  if values[0].ndim == 0:
    return np.stack(values)
  made = np.zeros((len(values), max(map(len, values)), *values[0].shape[1:]), values[0].dtype)
  for row, value in zip(made, values, strict=True):
    row[: len(value)] = value
  return made


def _means(sums: np.ndarray, counts: np.ndarray) -> list[list[float | None]]:
  """[positions, units] of means, to a few digits."""
  return [
    [float(f"{value / count:.{DIGITS}g}") if count else None for value in row.tolist()]
    for row, count in zip(sums, counts.tolist(), strict=True)
  ]


def _zeros(shapes: PyTree) -> PyTree:
  """Parameters of these shapes, to trace with."""
  import flax.linen as nn

  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nn.unbox(shapes))
