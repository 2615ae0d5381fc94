"""The report on ablations: a heat map for each kind of module, intervals and a table."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from compmod_jax.analysis.ablation.measure import Ablate, Ablated, Effect
from compmod_jax.analysis.report import panels
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Module, Subject, called
from compmod_jax.metrics.bootstrap import Comparison

_SCORES = {"bleu": "BLEU", "exact_match": "exact match"}
_LEVEL = 0.05
_ROWS = 30  # effects that are drawn; the table has all


def make_page(settings: Ablate, subject: Subject, found: Ablated) -> Page:
  """What the ablations show."""
  loss, score = found.loss, found.score
  metric = _SCORES.get(subject.task.metric, subject.task.metric)
  examples = len(loss.rows)
  tiles = [("loss of the whole model", f"{loss.score().value:.4f}", f"{examples:,} examples")]
  if score is not None:
    tiles.append((metric, f"{score.score().value:.2f}", f"{len(score.rows):,} decoded"))
  filling = "zeros" if settings.replace == "zero" else f"its mean over {settings.mean_split!r}"
  return Page(
    title=f"Without single units, on {subject.split}",
    description=f"{subject.task.describe()} The output of a head or expert, after its weight, is"
    f" replaced by {filling}; the weights of the others stay as they are. Effects are the model"
    " without it less the whole model.",
    summary=list(_summary(found.effects, metric, settings.samples)),
    sections=list(_sections(found.effects, found.modules, metric)),
    tiles=tiles,
    data=_data(settings, subject, found),
  )


def _sections(
  effects: Sequence[Effect], modules: Sequence[Module], metric: str
) -> Iterator[Section]:
  alone = [effect for effect in effects if len(effect.units) == 1]
  items: list[Picture | Table] = []
  unit_name = called(modules)
  for name, measure, unit, _ in _measures(effects, metric):
    maps = heat_maps(alone, modules, name)
    items.append(
      Picture(
        f"{name}_map",
        panels.heat_maps(
          f"Change of {measure} without each {unit_name}",
          maps,
          across=unit_name,
          down="layer",
          unit=f"change of {measure}, {unit}",
          centre=0.0,
          orange="high" if name == "loss" else "low",
          numbers=True,
        ),
        f"Orange: the model is worse without the {unit_name}. Bold: beyond chance at {_LEVEL} after"
        f" Holm's correction for {len(effects)} ablations.",
      )
    )
    ordered = sorted(effects, key=lambda e: -abs(_of(e, name).difference.value))[:_ROWS]
    differences = [_of(effect, name).difference for effect in ordered]
    series = panels.Series(
      measure, [d.value for d in differences], [d.low for d in differences],
      [d.high for d in differences],
    )  # fmt: skip
    rows = [effect.title for effect in ordered]
    figure = panels.forest(
      f"Change of {measure} without each {unit_name}, largest first",
      {f"at most {_ROWS} of {len(effects)}" if len(effects) > _ROWS else "": (rows, [series])},
      across=f"change of {measure}, {unit}",
    )
    items.append(Picture(f"{name}_intervals", figure, "Lines: 95 % paired bootstrap intervals."))
  yield Section("Effects", [*items, _table(effects, metric)])


def heat_maps(
  effects: Sequence[Effect], modules: Sequence[Module], name: str
) -> dict[str, panels.Heat]:
  """Kind of module -> map [layer, unit] of an effect, NaN where it was not measured."""
  measured = {effect.units[0]: effect for effect in effects}
  kinds: dict[str, list[Module]] = {}
  for module in modules:
    if any((module.name, unit) in measured for unit in range(module.units)):
      kinds.setdefault(_kind(module), []).append(module)
  maps = {}
  for kind, rows in kinds.items():
    shape = (len(rows), max(module.units for module in rows))
    values, marked = np.full(shape, np.nan), np.zeros(shape, bool)
    for (row, module), unit in ((r, u) for r in enumerate(rows) for u in range(r[1].units)):
      if (module.name, unit) in measured:
        effect = measured[module.name, unit]
        values[row, unit] = _of(effect, name).difference.value
        marked[row, unit] = (effect.loss_p if name == "loss" else effect.score_p) < _LEVEL
    layers = [module.title.rpartition(" ")[2] for module in rows]
    maps[kind] = panels.Heat(values, layers, [str(unit) for unit in range(shape[1])], marked)
  return maps


def _kind(module: Module) -> str:
  """The kind of module, as a path: `encoder/self`."""
  return module.title.partition(", layer")[0].replace(" ", "/")


def _of(effect: Effect, measure: str) -> Comparison:
  change = effect.loss if measure == "loss" else effect.score
  assert change is not None
  return change


def _table(effects: Sequence[Effect], metric: str) -> Table:
  columns = ["without", "loss", "low", "high", "p", "p, corrected"]
  decoded = any(effect.score for effect in effects)
  if decoded:
    columns += [metric, "low ", "high ", "p ", "p, corrected "]
  rows = []
  for effect in effects:
    row: list[Any] = [effect.name]
    for found, p in ((effect.loss, effect.loss_p), (effect.score, effect.score_p)):
      if found is not None:
        row += [found.difference.value, found.difference.low, found.difference.high, found.p, p]
    rows.append(row)
  caption = (
    "Change of the loss in nats per token (and of the score in points) when the unit is replaced,"
    " with 95 % paired bootstrap intervals and p values over sentences."
  )
  return Table("effects", columns, rows, caption, order="loss")


def _summary(effects: Sequence[Effect], metric: str, samples: int) -> Iterator[str]:
  """For each measure how many units count, and the largest effect."""
  for measure, name, unit, digits in _measures(effects, metric):
    title = name[0].upper() + name[1:]
    alone = [e for e in effects if len(e.units) == 1]
    sure = [e for e in alone if (e.loss_p if measure == "loss" else e.score_p) < _LEVEL]
    higher = sum(_of(e, measure).difference.value > 0 for e in sure)
    most = max(alone, key=lambda e: abs(_of(e, measure).difference.value))
    yield (
      f"{title}: {len(sure)} of {len(alone)} units change it beyond chance when they are left out"
      f" ({higher} raise it; p < {_LEVEL} after Holm's correction). Largest"
      f" change: {_with_interval(_of(most, measure), digits)} {unit} without {most.title}."
    )
    for e in effects:
      if len(e.units) > 1:
        total = sum(_of(one, measure).difference.value for one in alone)
        yield (
          f"{title} without all {len(e.units)} units named, together:"
          f" {_with_interval(_of(e, measure), digits)} {unit}; their single effects add up to"
          f" {total:+.{digits}f}."
        )
  if len(effects) / (samples + 1) >= _LEVEL:
    yield (
      f"With {samples:,} resampled test sets and {len(effects)} ablations, no effect can pass the"
      " correction; take more samples."
    )


def _measures(effects: Sequence[Effect], metric: str) -> list[tuple[str, str, str, int]]:
  """Field of an effect, name, unit and digits of every measure."""
  scored = [("score", metric, "points", 2)] if any(effect.score for effect in effects) else []
  return [("loss", "loss", "nats per token", 4), *scored]


def _with_interval(found: Comparison, digits: int) -> str:
  d = found.difference
  text = f"{d.value:+.{digits}f} [{d.low:+.{digits}f}, {d.high:+.{digits}f}]"
  return text.replace("-", "−")


def _data(settings: Ablate, subject: Subject, found: Ablated) -> dict[str, Any]:
  loss, score = found.loss, found.score

  def comparison(change: Comparison | None, p: float) -> dict[str, Any] | None:
    if change is None:
      return None
    return {**vars(change.difference), "p": change.p, "p_corrected": p}

  return {
    "split": subject.split,
    "settings": dataclasses.asdict(settings),
    "examples": len(loss.rows),
    "loss": loss.score().value,
    "metric": subject.task.metric,
    "decoded": 0 if score is None else len(score.rows),
    "score": None if score is None else score.score().value,
    "signature": None if score is None else score.signature,
    "effects": [
      {
        "name": effect.name,
        "units": [f"{module}:{unit}" for module, unit in effect.units],
        "loss": comparison(effect.loss, effect.loss_p),
        "score": comparison(effect.score, effect.score_p),
      }
      for effect in found.effects
    ],
  }
