"""One pass over a split: sums of weights and outputs of competing units. No activation is kept."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from compmod_jax.analysis.heads.specialisation import spearman
from compmod_jax.analysis.labels import Labels
from compmod_jax.analysis.reading import NOTHING, Reader
from compmod_jax.analysis.subject import Module, Subject
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.tasks.base import Batch

Sums = dict[str, Any]

# Wider outputs are projected to this many random directions before they are compared.
_DIRECTIONS = 64
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass
class Totals:
  """Sums over the tokens that a module's positions read, start tokens left out.

  Attributes:
    module: whose.
    sums: `count` []; `weight`, `norm`, `norm_scaled` [units]: weights, and Euclidean norms of
      outputs before and after they are weighted (as far as the module has them); `weight_second`
      [units, units]; `outputs` [columns] and `outputs_second` [columns, columns], all units'
      outputs side by side; `by`: name of the labels -> `count` [categories], `norm`, `norm_scaled`
      [categories, units], and `weight` [1 + shuffles, categories, units], the true labels first.
    signatures: norms of the units' signatures, [units]; empty without a router.
    between: for each batch, Spearman's correlation of log mean weight and log mean norm over units.
    sampled: weights and norms of a sample of tokens, [tokens, 2, units], and the block of sentences
      that each token belongs to, [tokens].
  """

  module: Module
  sums: Sums
  signatures: np.ndarray
  between: np.ndarray
  sampled: tuple[np.ndarray, np.ndarray]

  def mean(self, name: str) -> np.ndarray:
    """Mean of a quantity over tokens, [units]."""
    return self.sums[name] / max(float(self.sums["count"]), 1.0)

  def by(self, labels: str, name: str) -> np.ndarray:
    """Mean of a quantity over the tokens of each category, [categories, units]; NaN for none."""
    found = self.sums["by"][labels]
    values = found[name][0] if name == "weight" else found[name]
    count = found["count"][:, None]
    return np.where(count > 0, values / np.maximum(count, 1), np.nan)


@dataclasses.dataclass(frozen=True)
class Sampling:
  """What of single tokens is kept, and how often categories are shuffled.

  Attributes:
    shuffles: of the categories.
    tokens: most tokens whose weights and norms are kept for rank correlations.
    blocks: of sentences, for intervals.
    seed: of everything that is drawn.
  """

  shuffles: int = 20
  tokens: int = 50_000
  blocks: int = 20
  seed: int = 0


def collect(
  subject: Subject,
  reader: Reader,
  labels: Mapping[str, Sequence[Labels]],
  sampling: Sampling,
  *,
  params: PyTree = None,
  modules: Sequence[Module] | None = None,
) -> list[Totals]:
  """Adds up what the modules do on all sentences of a subject.

  Args:
    subject: model and sentences.
    reader: how to read the sentences.
    labels: stream -> categories of its positions.
    sampling: what is kept of single tokens.
    params: other parameters than the subject's, for example untrained ones.
    modules: which; all of the model by default.
  """
  params = subject.params if params is None else params
  modules = subject.modules if modules is None else list(modules)
  if not modules:
    return []
  step = jax.jit(functools.partial(_batch_sums, subject, reader, labels, modules))
  extra = {stream: _with_shuffles(stream, made, sampling) for stream, made in labels.items()}
  kept = {stream: _sample(subject, reader, stream, sampling) for stream in labels}
  sums: dict[str, Sums] = {}
  signatures: dict[str, np.ndarray] = {}
  between: dict[str, list[float]] = {module.name: [] for module in modules}
  sampled: dict[str, list] = {module.name: [] for module in modules}
  for number, batch in enumerate(subject.batches):
    more = {name: ids[number] for stream in extra for name, ids in extra[stream].items()}
    found, norms, tokens = jax.device_get(step(params, subject.place({**batch, **more})))
    signatures |= norms
    found = jax.tree.map(lambda value: np.asarray(value, np.float64), found)
    sums = jax.tree.map(np.add, sums, found) if sums else found
    for name, values in tokens.items():
      chosen = kept[reader.stream(name)][number]
      blocks = np.broadcast_to(batch["index"][:, None] % sampling.blocks, chosen.shape)
      sampled[name].append((values[chosen], blocks[chosen]))
      between[name].append(spearman(found[name]["weight"], found[name]["norm"]))
    subject.status(f"reading {subject.split}", number + 1, len(subject.batches))
  return [
    Totals(
      module,
      sums[module.name],
      signatures.get(module.name, np.zeros(0)),
      np.asarray(between[module.name]),
      _joined(sampled[module.name], module.units),
    )
    for module in modules
  ]


def untrained(subject: Subject) -> Any:
  """Fresh parameters of the subject's model, laid over the devices like its own."""
  import flax.linen as nn

  fresh = nn.unbox(subject.task.init(jax.random.key(subject.seed)))
  return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), fresh, subject.params)


def _batch_sums(
  subject: Subject,
  reader: Reader,
  labels: Mapping[str, Sequence[Labels]],
  modules: Sequence[Module],
  params: PyTree,
  batch: Batch,
) -> tuple[dict[str, Sums], dict[str, jax.Array], dict[str, jax.Array]]:
  """Sums of every module, norms of signatures, and (weight, norm) [batch, time, 2, units]."""
  wanted = {m.outputs for m in modules if m.dim}
  wanted |= {name for m in modules if m.routed for name in (m.weights, m.signatures)}
  wanted |= {m.scaled for m in modules if m.routed and m.dim}
  intermediates = Intermediates(capture=frozenset(wanted))
  subject.task.model.forward(params, batch, intermediates=intermediates)
  sums, norms, tokens = {}, {}, {}
  for module in modules:
    stream, site = reader.stream(module.outputs), module.outputs
    rows = subject.task.model.valid_mask(site if module.dim else module.weights, batch)
    rows = rows & (jnp.arange(rows.shape[1]) >= subject.task.model.start_tokens(site))[None]
    values = _quantities(module, intermediates.captured)
    sums[module.name] = _module_sums(module, values, intermediates.captured, rows)
    sums[module.name]["by"] = {
      made.name: _by_category(values, made, batch[f"labels/{stream}/{made.name}"], rows)
      for made in labels[stream]
    }
    if module.routed:
      signatures = intermediates.captured[module.signatures].astype(jnp.float32)
      norms[module.name] = jnp.sqrt(jnp.sum(jnp.square(signatures), axis=-1))
      if module.dim:
        tokens[module.name] = jnp.stack([values["weight"], values["norm"]], axis=2)
  return sums, norms, tokens


def _quantities(module: Module, captured: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Name -> [batch, time, units], as far as the module has them."""

  def norm(site: str) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(captured[site].astype(jnp.float32)), axis=-1))

  found = {"norm": norm(module.outputs)} if module.dim else {}
  if module.routed:
    found["weight"] = captured[module.weights].astype(jnp.float32)
    if module.dim:
      found["norm_scaled"] = norm(module.scaled)
  return found


def _module_sums(
  module: Module, values: dict[str, jax.Array], captured: Mapping[str, jax.Array], rows: jax.Array
) -> Sums:
  """Totals over tokens, and second moments."""
  found: Sums = {"count": jnp.sum(rows).astype(jnp.float32)}
  for name, value in values.items():
    found[name] = jnp.sum(jnp.where(rows[..., None], value, 0), axis=(0, 1))
  if module.routed:
    weights = jnp.where(rows[..., None], values["weight"], 0).reshape(-1, module.units)
    found["weight_second"] = jnp.matmul(weights.T, weights, precision=_EXACT)
  if module.dim:
    outputs = captured[module.outputs].astype(jnp.float32)
    if module.dim > _DIRECTIONS:
      basis = jax.random.normal(jax.random.key(0), (module.dim, _DIRECTIONS)) / _DIRECTIONS**0.5
      outputs = jnp.einsum("btud,dk->btuk", outputs, basis, precision=_EXACT)
    columns = jnp.where(rows[..., None, None], outputs, 0).reshape(rows.size, -1)
    found["outputs"] = jnp.sum(columns, axis=0)
    found["outputs_second"] = jnp.matmul(columns.T, columns, precision=_EXACT)
  return found


def _by_category(
  values: dict[str, jax.Array], labels: Labels, ids: jax.Array, rows: jax.Array
) -> Sums:
  """Sums over the tokens of each category; `ids` [batch, time, 1 + shuffles], the true one first.

  Filler rows of a batch are PAD throughout, so that `rows` leaves them out.
  """
  ids = jnp.where(rows[..., None], ids, NOTHING).reshape(rows.size, -1)
  hot = jax.nn.one_hot(ids, len(labels.categories), dtype=jnp.float32)
  found: Sums = {"count": jnp.sum(hot[:, 0], axis=0)}
  for name, value in values.items():
    flat = jnp.where(rows[..., None], value, 0).reshape(rows.size, -1)
    if name == "weight":
      found[name] = jnp.einsum("nkc,nu->kcu", hot, flat, precision=_EXACT)
    else:
      found[name] = jnp.einsum("nc,nu->cu", hot[:, 0], flat, precision=_EXACT)
  return found


def _with_shuffles(
  stream: str, labels: Sequence[Labels], sampling: Sampling
) -> dict[str, list[np.ndarray]]:
  """What `_by_category` takes: for each batch [batch, time, 1 + shuffles], by a name of its own."""
  return {
    f"labels/{stream}/{made.name}": [
      np.concatenate([ids[..., None], dealt], axis=-1)
      for ids, dealt in zip(made.ids, made.shuffled(sampling.shuffles, sampling.seed), strict=True)
    ]
    for made in labels
  }


def _sample(subject: Subject, reader: Reader, stream: str, sampling: Sampling) -> list[np.ndarray]:
  """For each batch, which positions' weights and norms are kept, bool [batch, time]."""
  read = [reader.tokens(stream, batch) != NOTHING for batch in subject.batches]
  count = sum(int(part.sum()) for part in read)
  if count <= sampling.tokens:
    return read
  random = np.random.default_rng(sampling.seed)
  return [part & (random.random(part.shape) < sampling.tokens / count) for part in read]


def _joined(parts: list, units: int) -> tuple[np.ndarray, np.ndarray]:
  if not parts:
    return np.zeros((0, 2, units)), np.zeros(0, np.int64)
  values, blocks = zip(*parts, strict=True)
  return np.concatenate(values), np.concatenate(blocks)
