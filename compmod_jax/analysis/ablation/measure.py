"""What a model loses without some of its units: heads or experts, alone or together."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from compmod_jax.analysis.reading import Reader, reader
from compmod_jax.analysis.scoring import decoded, sentence_losses, translates
from compmod_jax.analysis.subject import Module, Subject, drawn
from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import Edit, Intermediates
from compmod_jax.metrics.bootstrap import Comparison, paired_bootstrap
from compmod_jax.metrics.significance import holm
from compmod_jax.metrics.statistics import (
  MetricName,
  Statistics,
  loss_statistics,
  sentence_statistics,
)
from compmod_jax.tasks.base import Batch

Unit = tuple[str, int]


class Effect(NamedTuple):
  """What leaving out some units does.

  Attributes:
    name: of what was left out, as `--units` has it.
    title: the same for people.
    units: which.
    loss: ablated less whole, nats per token; positive if they are missed.
    score: ablated less whole, in points; None if nothing was decoded.
    loss_p: of `loss`, corrected for the number of ablations (Holm).
    score_p: of `score`, the same; NaN without.
  """

  name: str
  title: str
  units: tuple[Unit, ...]
  loss: Comparison
  score: Comparison | None
  loss_p: float = float("nan")
  score_p: float = float("nan")


class Ablated(NamedTuple):
  """What a model loses.

  Attributes:
    modules: those with units that can be left out.
    effects: of every ablation.
    loss: of the whole model.
    score: of the whole model; None if nothing was decoded.
  """

  modules: list[Module]
  effects: list[Effect]
  loss: Statistics
  score: Statistics | None


@dataclasses.dataclass(frozen=True)
class Ablate:
  """What a model loses without some of its heads or experts: each one alone, or the ones named,
  replaced by zero or by their mean; effects on loss and score with paired bootstrap intervals."""

  units: tuple[str, ...] = ()
  """Units such as encoder/layer_0/self:2 (all of a module: without the number), each alone and all
  together; none: every unit of the model alone."""
  replace: Literal["zero", "mean"] = "zero"
  """What takes the place of a unit's output: zeros, or its mean over tokens."""
  mean_split: str = "valid"
  """Split over which that mean is taken."""
  decode: int = 100
  """Examples that are also decoded, for BLEU or exact match; 0: none."""
  samples: int = 2000
  """Resampled test sets of the bootstrap."""

  def __post_init__(self):
    errors.check_choice("--replace", self.replace, ("zero", "mean"))
    check_least(self, "--", decode=0, samples=100)

  def measure(self, subject: Subject) -> Ablated:
    """Measures the whole model and every ablation of it.

    Raises:
      UserError: a unit that the model does not have, or a split with nothing to read.
    """
    read = reader(subject.task)
    modules = [module for module in subject.modules if module.dim]
    errors.check(
      bool(modules),
      "The model has neither heads nor experts: none of its sites ends in heads or experts.",
    )
    chosen = chosen_units(self.units, modules)
    fillings = {module.scaled: np.zeros((module.units, module.dim)) for module in modules}
    if self.replace == "mean":
      errors.check_choice("--mean_split", self.mean_split, subject.task.dataset.splits())
      elsewhere = dataclasses.replace(subject, split=self.mean_split)
      fillings = mean_outputs(elsewhere, modules)
    measure = _Measure(subject, read, modules, fillings, self.decode)
    whole = measure("whole model", ())
    effects = []
    for number, (name, units) in enumerate(chosen):
      without = measure(f"without {name} ({number + 1} of {len(chosen)})", units)
      title = _title(name, units, modules)
      effects.append(self._effect(name, title, units, whole, without, subject.seed))
    return Ablated(modules, _corrected(effects), *whole)

  def _effect(
    self,
    name: str,
    title: str,
    units: tuple[Unit, ...],
    whole: tuple[Statistics, Statistics | None],
    without: tuple[Statistics, Statistics | None],
    seed: int,
  ) -> Effect:
    pairs = [
      paired_bootstrap(one, other, seed=seed, samples=self.samples)
      if one is not None and other is not None
      else None
      for one, other in zip(whole, without, strict=True)
    ]
    loss, score = pairs
    assert loss is not None
    return Effect(name, title, units, loss, score)


def chosen_units(
  names: Sequence[str], modules: Sequence[Module]
) -> list[tuple[str, tuple[Unit, ...]]]:
  """Name and units of every ablation.

  Args:
    names: `module:number` or `module`; none for every unit alone.
    modules: of the model.

  Returns:
    Every unit alone; and where names are given, all of theirs together.

  Raises:
    UserError: a module or a number that the model does not have.
  """
  sizes = {module.name: module.units for module in modules}
  found: list[Unit] = []
  for name in names or sizes:
    module, _, number = name.partition(":")
    errors.check_choice("a module of --units", module, sizes)
    every = range(sizes[module])
    errors.check(
      not number or (number.isdecimal() and int(number) in every),
      f"--units has {name!r}, but {module} has the units 0 to {sizes[module] - 1}; name one of"
      " them, or the module alone for all.",
    )
    found += [(module, unit) for unit in every if not number or unit == int(number)]
  found = list(dict.fromkeys(found))
  alone = [(f"{module}:{unit}", ((module, unit),)) for module, unit in found]
  return alone + ([("all of these together", tuple(found))] if names and len(found) > 1 else [])


def _title(name: str, units: Sequence[Unit], modules: Sequence[Module]) -> str:
  """For example "encoder self, layer 0, head 2"."""
  (owner, number), *more = units
  module = next(module for module in modules if module.name == owner)
  return name if more else f"{module.title}, {module.unit} {number}"


def keeping(
  modules: Sequence[Module], fillings: Mapping[str, np.ndarray], without: Sequence[Unit]
) -> dict[str, Edit]:
  """Edits that replace units; always of the same functions, so that nothing is compiled again.

  Args:
    modules: all that have an edit.
    fillings: site -> what takes a unit's place, [units, dim].
    without: the units that are replaced; none leaves every activation as it is, bit for bit.
  """
  edits: dict[str, Edit] = {}
  for module in modules:
    keep = np.array([(module.name, unit) not in without for unit in range(module.units)])
    filling = jnp.asarray(fillings[module.scaled], jnp.float32)
    edits[module.scaled] = jax.tree_util.Partial(_replace, jnp.asarray(keep), filling)
  return edits


def _replace(keep: jax.Array, filling: jax.Array, value: jax.Array) -> jax.Array:
  """`value` [..., units, dim] with the units that are not kept replaced."""
  front = (1,) * (value.ndim - 2)
  keep = keep.reshape(*front, -1, 1)
  return jnp.where(keep, value, filling.reshape(*front, *filling.shape).astype(value.dtype))


def mean_outputs(subject: Subject, modules: Sequence[Module]) -> dict[str, np.ndarray]:
  """Mean over tokens of every unit's output after the competition: site -> [units, dim]."""

  @jax.jit
  def sums_of(params: PyTree, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
    intermediates = Intermediates(capture=frozenset(module.scaled for module in modules))
    subject.task.model.forward(params, batch, intermediates=intermediates)
    found = {}
    for site, value in intermediates.captured.items():
      rows = subject.task.model.valid_mask(site, batch)[..., None, None]
      total = jnp.sum(jnp.where(rows, value.astype(jnp.float32), 0), axis=(0, 1))
      found[site] = total, jnp.sum(rows)
    return found

  totals: dict[str, tuple[np.ndarray, np.ndarray]] = {}
  for number, batch in enumerate(subject.batches):
    found = jax.device_get(sums_of(subject.params, subject.place(batch)))
    found = jax.tree.map(lambda value: np.asarray(value, np.float64), found)
    for site, sums in found.items():  # a model may run only some of its modules on a batch
      totals[site] = jax.tree.map(np.add, totals[site], sums) if site in totals else sums
    subject.status(f"means over {subject.split}", number + 1, len(subject.batches))
  nothing = {module.scaled: (np.zeros((module.units, module.dim)), 0.0) for module in modules}
  every = {**nothing, **totals}
  return {site: total / max(float(count), 1.0) for site, (total, count) in every.items()}


class _Measure:
  """Losses, and scores of what is decoded, of the model without some units."""

  def __init__(
    self,
    subject: Subject,
    read: Reader,
    modules: Sequence[Module],
    fillings: Mapping[str, np.ndarray],
    decode: int,
  ):
    self.subject, self.read = subject, read
    self.modules, self.fillings = modules, fillings
    self.numbers = subject.numbers[:0]
    if decode and translates(subject, read):
      self.numbers = drawn(subject.numbers, decode, subject.seed)
    self.losses = sentence_losses(subject, read)

  def __call__(self, name: str, without: tuple[Unit, ...]) -> tuple[Statistics, Statistics | None]:
    """Statistics of the loss, and of the task's score if anything is decoded."""
    edits = keeping(self.modules, self.fillings, without)
    self.subject.status(name)
    nats, counts = self.losses(self.subject.params, edits)
    loss = loss_statistics(nats, counts)
    if not len(self.numbers):
      return loss, None
    outputs, references = decoded(self.subject, self.read, self.numbers, edits=edits, name=name)
    metric = cast(MetricName, self.subject.task.metric)
    return loss, sentence_statistics(metric, outputs, references)


def _corrected(effects: Sequence[Effect]) -> list[Effect]:
  """The effects with p values corrected for their number."""
  nothing = float("nan")
  losses = holm([effect.loss.p for effect in effects])
  scores = holm([effect.score.p if effect.score else nothing for effect in effects])
  return [
    effect._replace(loss_p=one, score_p=other)
    for effect, one, other in zip(effects, losses, scores, strict=True)
  ]
