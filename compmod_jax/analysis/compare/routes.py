"""Where two models route the same tokens differently.

Heads have no names that two runs share: the first head of one may do what the third of the other
does. So the heads of a module are matched first, one to one, by the correlation of their weights
over all tokens; what remains is a difference.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from scipy.optimize import linear_sum_assignment

from compmod_jax.analysis.reading import NOTHING, Reader, read_sentence
from compmod_jax.analysis.subject import Module, Subject
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.tasks.base import Batch


class Matching(NamedTuple):
  """The units of the second model that stand for those of the first, in one module.

  Attributes:
    module: which.
    units: for each unit of the first model, its partner in the second.
    correlation: of the weights of each pair over tokens; NaN for weights that do not vary.
    distance: mean over tokens of how much weight is elsewhere, 0 to 1.
  """

  module: Module
  units: np.ndarray
  correlation: np.ndarray
  distance: float


class Difference(NamedTuple):
  """How differently a sentence is routed in one module.

  Attributes:
    module: which.
    distance: mean over its tokens of how much weight is elsewhere, 0 to 1.
    word: the word whose token differs most.
    most: how much there.
  """

  module: Module
  distance: float
  word: str
  most: float


def shared_modules(first: Subject, second: Subject) -> list[Module]:
  """Modules that both models route, over equally many units."""
  theirs = {module.name: module for module in second.modules if module.routed}
  return [
    module
    for module in first.modules
    if module.routed and module.name in theirs and theirs[module.name].units == module.units
  ]


def shared_batches(first: Subject, second: Subject) -> list[dict[str, np.ndarray]]:
  """Batches that both models can read: those of the one that pads its longest texts less.

  Each has positions for its own batches; the other's may be longer, though no text is.
  """

  def longest(subject: Subject) -> int:
    columns = [column for batch in subject.batches for column in batch.values()]
    return max(column.shape[1] for column in columns if column.ndim > 1)

  return min((first, second), key=longest).batches


def match(first: Subject, second: Subject, modules: Sequence[Module]) -> list[Matching]:
  """Matches the units of every module.

  Args:
    first: a model and its sentences.
    second: another model with the same sentences, whose tokens must be the same, too.
    modules: routed by both.
  """
  sums = jax.jit(functools.partial(_sums, first, second, modules))
  totals: dict[str, Any] = {}
  batches = shared_batches(first, second)
  for number, batch in enumerate(batches):
    placed = first.place(batch)
    found = jax.device_get(sums(first.params, second.params, placed))
    found = jax.tree.map(lambda value: np.asarray(value, np.float64), found)
    totals = jax.tree.map(np.add, totals, found) if totals else found
    first.status("matching units", number + 1, len(batches))
  partners = {}
  for module in modules:
    correlation = _correlation(totals[module.name])
    _, units = linear_sum_assignment(-np.nan_to_num(correlation))
    partners[module.name] = units, correlation[np.arange(module.units), units]
  distance = _mean_distances(first, second, modules, partners)
  return [
    Matching(module, units, correlation, distance[module.name])
    for module in modules
    for units, correlation in (partners[module.name],)
  ]


def differences(
  first: Subject, second: Subject, reader: Reader, matchings: Sequence[Matching]
) -> dict[int, list[Difference]]:
  """Number of an example -> its difference in every module, largest first.

  Args:
    first: a model, and the examples that are compared.
    second: another model, and the same examples.
    reader: of both.
    matchings: of their units.
  """
  modules = [matching.module for matching in matchings]
  partners = {m.module.name: m.units for m in matchings}
  distances = jax.jit(functools.partial(_distances, first, second, modules))
  found: dict[int, list[Difference]] = {}
  for batch in shared_batches(first, second):
    values = jax.device_get(distances(first.params, second.params, partners, first.place(batch)))
    for row in np.flatnonzero(batch["index"] >= 0).tolist():
      rows = [_difference(reader, module, batch, row, *values[module.name]) for module in modules]
      found[int(batch["index"][row])] = sorted(rows, key=lambda d: -d.distance)
  return found


def _difference(
  reader: Reader,
  module: Module,
  batch: dict[str, np.ndarray],
  row: int,
  distance: np.ndarray,
  rows: np.ndarray,
) -> Difference:
  stream = reader.stream(module.weights)
  tokens = reader.tokens(stream, batch)[row]
  sentence = read_sentence(reader.tokenizer(stream), tokens.tolist())
  values = np.where(rows[row], distance[row], 0.0)
  in_words = np.asarray(sentence.word) != NOTHING
  place = int(np.argmax(np.where(in_words, values, -1.0)))
  word = sentence.words[sentence.word[place]] if in_words.any() else ""
  mean = float(values.sum() / max(int(rows[row].sum()), 1))
  return Difference(module, mean, word, float(values[place]))


def _weights(
  subject: Subject, params: PyTree, modules: Sequence[Module], batch: Batch
) -> dict[str, jax.Array]:
  intermediates = Intermediates(capture=frozenset(module.weights for module in modules))
  subject.task.model.forward(params, batch, intermediates=intermediates)
  return {
    module.name: intermediates.captured[module.weights].astype(jnp.float32) for module in modules
  }


def _rows(subject: Subject, module: Module, batch: Batch) -> jax.Array:
  rows = subject.task.model.valid_mask(module.weights, batch)
  return rows & (jnp.arange(rows.shape[1]) >= subject.task.model.start_tokens(module.weights))[None]


def _sums(
  first: Subject,
  second: Subject,
  modules: Sequence[Module],
  ours: PyTree,
  theirs: PyTree,
  batch: Batch,
) -> dict[str, dict[str, jax.Array]]:
  """Moments of both models' weights over tokens."""
  one, other = _weights(first, ours, modules, batch), _weights(second, theirs, modules, batch)
  found = {}
  for module in modules:
    rows = _rows(first, module, batch)[..., None]
    a, b = (jnp.where(rows, w[module.name], 0).reshape(rows.size, -1) for w in (one, other))
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    found[module.name] = {
      "count": jnp.sum(rows),
      "first": jnp.sum(a, axis=0),
      "second": jnp.sum(b, axis=0),
      "first_squares": jnp.sum(a * a, axis=0),
      "second_squares": jnp.sum(b * b, axis=0),
      "products": product(a.T, b),
    }
  return found


def _correlation(sums: Mapping[str, np.ndarray]) -> np.ndarray:
  """Correlation of every unit of the first with every unit of the second, [units, units]."""
  count = max(float(sums["count"]), 1.0)
  one, other = sums["first"] / count, sums["second"] / count
  covariance = sums["products"] / count - np.outer(one, other)
  spreads = []
  for name, mean in (("first", one), ("second", other)):
    variance = sums[f"{name}_squares"] / count - mean**2
    spreads.append(np.sqrt(np.where(variance > 1e-10 * mean**2, variance, np.nan)))
  return covariance / spreads[0][:, None] / spreads[1][None, :]


def _distances(
  first: Subject,
  second: Subject,
  modules: Sequence[Module],
  ours: PyTree,
  theirs: PyTree,
  partners: Mapping[str, Any],
  batch: Batch,
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Total variation distance of the matched weights [batch, time], and which positions count."""
  one, other = _weights(first, ours, modules, batch), _weights(second, theirs, modules, batch)
  found = {}
  for module in modules:
    matched = jnp.take(other[module.name], jnp.asarray(partners[module.name]), axis=-1)
    distance = 0.5 * jnp.sum(jnp.abs(one[module.name] - matched), axis=-1)
    found[module.name] = distance, _rows(first, module, batch)
  return found


def _mean_distances(
  first: Subject,
  second: Subject,
  modules: Sequence[Module],
  partners: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> dict[str, float]:
  @jax.jit
  def sums(ours: PyTree, theirs: PyTree, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
    units = {name: units for name, (units, _) in partners.items()}
    found = _distances(first, second, modules, ours, theirs, units, batch)
    return {
      name: (jnp.sum(jnp.where(rows, distance, 0)), jnp.sum(rows))
      for name, (distance, rows) in found.items()
    }

  totals = {module.name: np.zeros(2) for module in modules}
  for batch in shared_batches(first, second):
    found = jax.device_get(sums(first.params, second.params, first.place(batch)))
    for name, pair in found.items():
      totals[name] += np.asarray(pair, np.float64)
  return {name: float(total / max(count, 1.0)) for name, (total, count) in totals.items()}
