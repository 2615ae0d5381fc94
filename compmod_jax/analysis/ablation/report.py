"""The report on ablations: a heat map for each place, intervals, a table and sentences."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Module, Subject, called
from compmod_jax.metrics.bootstrap import Comparison
from compmod_jax.metrics.statistics import Statistics

if TYPE_CHECKING:
  from compmod_jax.analysis.ablation.measure import Ablate, Effect

_SCORES = {"bleu": "BLEU", "exact_match": "exact match"}
_LEVEL = 0.05
_ROWS = 30  # more effects than this are told by the table alone


def make_page(
  subject: Subject,
  modules: Sequence[Module],
  effects: "Sequence[Effect]",
  whole: tuple[Statistics, Statistics | None],
  settings: "Ablate",
) -> Page:
  """What the ablations show."""
  loss, score = whole
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
    summary=list(_sentences(effects, metric, settings.samples)),
    sections=list(_sections(effects, modules, metric)),
    tiles=tiles,
    data=_data(subject, effects, whole, settings),
  )


def _sections(
  effects: "Sequence[Effect]", modules: Sequence[Module], metric: str
) -> Iterator[Section]:
  from compmod_jax.analysis.report import panels

  alone = [effect for effect in effects if len(effect.units) == 1]
  pictures: list[Any] = []
  unit_name = called(modules)
  measures = [("loss", "loss", "nats per token")]
  if any(effect.score for effect in effects):
    measures.append(("score", metric, "points"))
  for name, measure, unit in measures:
    maps = heat_maps(alone, modules, name)
    pictures.append(
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
    pictures.append(Picture(f"{name}_intervals", figure, "Lines: 95 % paired bootstrap intervals."))
  yield Section("Effects", [*pictures, _table(effects, metric)])


def heat_maps(effects: "Sequence[Effect]", modules: Sequence[Module], name: str) -> dict[str, Any]:
  """Kind of module -> map [layer, unit] of an effect, NaN where it was not measured."""
  from compmod_jax.analysis.report.panels import Heat

  measured = {effect.units[0]: effect for effect in effects}
  places: dict[str, list[Module]] = {}
  for module in modules:
    if any((module.name, unit) in measured for unit in range(module.units)):
      places.setdefault(_place(module), []).append(module)
  found = {}
  for place, rows in places.items():
    shape = (len(rows), max(module.units for module in rows))
    values, marked = np.full(shape, np.nan), np.zeros(shape, bool)
    for (row, module), unit in ((r, u) for r in enumerate(rows) for u in range(r[1].units)):
      if (module.name, unit) in measured:
        effect = measured[module.name, unit]
        values[row, unit] = _of(effect, name).difference.value
        marked[row, unit] = (effect.loss_p if name == "loss" else effect.score_p) < _LEVEL
    layers = [module.title.rpartition(" ")[2] for module in rows]
    found[place] = Heat(values, layers, [str(unit) for unit in range(shape[1])], marked)
  return found


def _place(module: Module) -> str:
  """The kind of module, as a path: `encoder/self`."""
  return module.title.partition(", layer")[0].replace(" ", "/")


def _of(effect: "Effect", name: str) -> Comparison:
  found = effect.loss if name == "loss" else effect.score
  assert found is not None
  return found


def _table(effects: "Sequence[Effect]", metric: str) -> Table:
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
  return Table("effects", columns, rows, caption)


def _sentences(effects: "Sequence[Effect]", metric: str, samples: int) -> Iterator[str]:
  alone = [effect for effect in effects if len(effect.units) == 1]
  yield from _about_loss(alone)
  for effect in effects:
    if len(effect.units) > 1:
      yield (
        f"All {len(effect.units)} units named, together: {_told(effect.loss, 4)} nats per token;"
        " their single effects add up to"
        f" {sum(e.loss.difference.value for e in alone):+.4f}."
      )
  scored = [e for e in alone if e.score is not None]
  sure = [e for e in scored if e.score_p < _LEVEL]
  if sure:
    most = sorted(sure, key=lambda e: -abs(_of(e, "score").difference.value))[:3]
    told = "; ".join(f"{e.title} {_told(_of(e, 'score'), 2)}" for e in most)
    yield f"{metric}: changed beyond chance without {len(sure)} of {len(scored)} units ({told})."
  elif scored:
    yield f"{metric}: no single unit changes it beyond chance on the sentences decoded."
  if len(effects) / (samples + 1) >= _LEVEL:
    yield (
      f"With {samples:,} resampled test sets and {len(effects)} ablations, no effect can pass the"
      " correction; take more samples."
    )


def _about_loss(alone: "Sequence[Effect]") -> Iterator[str]:
  sure = [effect for effect in alone if effect.loss_p < _LEVEL]
  missed = [effect for effect in sure if effect.loss.difference.value > 0]
  better = [effect for effect in sure if effect not in missed]
  rest = [effect for effect in alone if effect not in sure]
  if missed:
    worst = sorted(missed, key=lambda e: -e.loss.difference.value)[:3]
    told = "; ".join(f"{e.title} {_told(e.loss, 4)}" for e in worst)
    yield (
      f"{len(missed)} of {len(alone)} are missed: without any one of them the loss is higher beyond"
      f" chance. Most of all: {told} nats per token."
    )
  else:
    yield f"None of {len(alone)} is missed by itself: the loss is not higher beyond chance."
  if better:
    yield f"The loss is lower, beyond chance, without: {'; '.join(e.title for e in better)}."
  if rest and missed:
    ends = [end for e in rest for end in (e.loss.difference.low, e.loss.difference.high)]
    yield (
      f"The other {len(rest)} change it by no more than {max(map(abs, ends)):.4f} nats per token"
      " (the outermost end of their intervals)."
    )


def _told(found: Comparison, digits: int) -> str:
  d = found.difference
  text = f"{d.value:+.{digits}f} [{d.low:+.{digits}f}, {d.high:+.{digits}f}]"
  return text.replace("-", "−")


def _data(
  subject: Subject,
  effects: "Sequence[Effect]",
  whole: tuple[Statistics, Statistics | None],
  settings: "Ablate",
) -> dict[str, Any]:
  loss, score = whole

  def comparison(found: Comparison | None, p: float) -> dict[str, Any] | None:
    if found is None:
      return None
    return {**vars(found.difference), "p": found.p, "p_corrected": p}

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
        "units": [f"{place}:{unit}" for place, unit in effect.units],
        "loss": comparison(effect.loss, effect.loss_p),
        "score": comparison(effect.score, effect.score_p),
      }
      for effect in effects
    ],
  }
