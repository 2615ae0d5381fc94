"""What heads and experts do in the course of training, drawn from the log of a run.

The pictures of Kolios 2023, figures 5.5 to 5.13: norms of signatures, and by position mean weights
and norms of the heads' outputs. They read `train` records (`router/<site>/signature_norm_<unit>`)
and `heads` records (see `compmod_jax.analysis.watch`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.plot import Records, series
from compmod_jax.core.errors import check_choice

_KEY = re.compile(r"router/(.+)/signature_norm_(\d+)")


def pictures(records: Records) -> Iterator[tuple[str, str, Figure]]:
  """Name, caption and figure of every picture of this file that a log has the numbers for.

  Norms are drawn where heads compete, and everywhere in a model without competition.
  """
  if any(_KEY.fullmatch(key) for record in records for key in record):
    caption = "Euclidean norms. Numbers at the right name the heads (or experts)."
    yield "signature_norms", caption, signature_norms(records)
  found = places(records)
  routed = [place for place, quantities in found.items() if "weight" in quantities]
  where = "means over the first sentences of the validation split"
  for place in routed:
    caption = f"Weights, {where}. Dashed grey: uniform weights."
    yield f"weights_{_file(place)}", caption, weights_by_position(records, place)
  for place, quantities in found.items():
    if "norm" in quantities and (place in routed or not routed):
      weighted = "before and after they are weighted" if place in routed else "no heads compete"
      caption = f"Euclidean norms of the heads' outputs ({weighted}), {where}."
      yield f"norms_{_file(place)}", caption, norms_by_position(records, place)


def places(records: Records) -> dict[str, set[str]]:
  """Kind of module ("encoder self", "decoder cross", "encoder ffn") -> what was measured there."""
  found: dict[str, set[str]] = {}
  for record in records:
    for site, values in record.get("sites", {}).items() if record.get("kind") == "heads" else ():
      found.setdefault(_place(site)[0], set()).update(set(values) - {"first"})
  return {place: found[place] for place in sorted(found, key=_place_order)}


def signature_norms(records: Records) -> Figure:
  """The norm of every unit's signature over the steps, a panel for each router.

  Source: Kolios 2023, figures 5.5 and 5.6.
  """
  title = "Norm of each signature during training"
  curves: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
  for key in sorted({key for record in records for key in record}, key=style.site_order):
    match = _KEY.fullmatch(key)
    if match:
      curves.setdefault(match[1], {})[int(match[2])] = series(records, key, "train")
  if not curves:
    return style.message(title, "No norms of signatures were recorded.")
  figure, panels = style.small_multiples(list(curves), 2.1)
  for site, axes in panels.items():
    for unit, (steps, values) in sorted(curves[site].items()):
      style.line(axes, steps, values, str(unit), unit)
    style.label(axes, style.site_title(site), "step", "norm")
    style.step_axis(axes, max(int(steps[-1]) for steps, _ in curves[site].values()))
  style.outer_labels(panels.values())
  lowest = min(axes.get_ylim()[0] for axes in panels.values())
  style.same_limits(panels.values(), bottom=lowest)
  for axes in panels.values():
    style.name_lines(axes)
  style.finish(figure, title)
  return figure


def weights_by_position(records: Records, place: str) -> Figure:
  """Mean weight of each unit at each of the first tokens over the steps; a row for each layer.

  Args:
    records: the lines of metrics.jsonl, parsed.
    place: one of `places(records)` where units compete.

  Source: Kolios 2023, figures 5.7 and 5.8.
  """
  title = f"Mean weights in {place} during training, by position"
  return _grid(records, place, {"weight": "mean weight"}, title)


def norms_by_position(records: Records, place: str) -> Figure:
  """Mean norm of each head's output at each of the first tokens over the steps.

  A layer has a row for the norms before the competition and one for those after it, or the first
  alone where heads do not compete.

  Args:
    records: the lines of metrics.jsonl, parsed.
    place: one of `places(records)` with attention.

  Source: Kolios 2023, figures 5.9 to 5.13.
  """
  title = f"Mean norms of the heads' outputs in {place} during training, by position"
  rows = {"norm": "norm before", "norm_scaled": "norm after"}
  if "norm_scaled" not in places(records).get(place, ()):
    rows = {"norm": "norm"}
  return _grid(records, place, rows, title)


def _grid(records: Records, place: str, rows: Mapping[str, str], title: str) -> Figure:
  """A row of panels for each layer and quantity, a column for each position, lines for units."""
  check_choice("place", place, places(records))
  measured = _measurements(records, place)
  layers = sorted({layer for _, found in measured for layer in found}, key=lambda n: n or 0)
  columns = max(
    len(found[layer][name]) for _, found in measured for layer in found for name in rows
  )
  height = 0.9 + 1.25 * len(layers) * len(rows)
  figure = style.canvas(style.WIDTH, height)
  axes = figure.subplots(len(layers) * len(rows), columns, squeeze=False, sharex=True, sharey="row")
  steps = np.array([step for step, _ in measured])
  for number, (layer, name) in enumerate((layer, name) for layer in layers for name in rows):
    # [evaluations, positions, units]; None where no sentence was so long becomes NaN.
    values = np.array([found[layer][name] for _, found in measured], dtype=np.float64)
    line = axes[number]
    for position in range(columns):
      _panel(line[position], steps, values[:, position], name == "weight")
      where = f"token {position + 1}" if layer is None else f"layer {layer}, token {position + 1}"
      across = "step" if number == len(axes) - 1 else ""
      style.label(line[position], where, across, "" if position else rows[name])
      line[position].title.set_fontsize(style.BODY)
    line[0].set_ylim(0, max(float(np.nanmax(values, initial=0.0)) * 1.05, 1e-6))
  _name_units(figure, axes[0, 0], "expert" if place.endswith("ffn") else "head")
  style.finish(figure, title)
  return figure


def _name_units(figure: Figure, axes: Axes, kind: str) -> None:
  """One legend for all panels, below them."""
  handles, names = axes.get_legend_handles_labels()
  figure.legend(
    handles, [f"{kind} {name}" for name in names], loc="outside lower center", ncols=8,
    frameon=False, fontsize=style.SMALL, handlelength=1.6, labelcolor="linecolor",
  )  # fmt: skip


def _panel(axes: Axes, steps: np.ndarray, values: np.ndarray, uniform: bool) -> None:
  """Lines of [evaluations, units]."""
  units = values.shape[1]
  for unit in range(units):
    style.line(axes, steps, values[:, unit], str(unit), unit)
  if uniform:
    style.reference(axes, 1 / units)
  style.step_axis(axes, int(steps[-1]))
  axes.xaxis.set_major_locator(MaxNLocator(2, integer=True))


def _measurements(
  records: Records, place: str
) -> list[tuple[int, dict[int | None, dict[str, Any]]]]:
  """(step, layer -> values) of every `heads` record; the last one counts of those of a step."""
  found: dict[int, dict[int | None, dict[str, Any]]] = {}
  for record in records:
    if record.get("kind") == "heads":
      sites = record["sites"].items()
      found[int(record["step"])] = {
        _place(site)[1]: values for site, values in sites if _place(site)[0] == place
      }
  return [(step, found[step]) for step in sorted(found) if found[step]]


def _place(site: str) -> tuple[str, int | None]:
  """Of "encoder/layer_0/self": ("encoder self", 0)."""
  match = re.fullmatch(r"(.*?)/?layer_(\d+)/(.*)", site)
  if not match:
    return site.replace("/", " "), None
  return f"{match[1]} {match[3]}".replace("/", " ").strip(), int(match[2])


def _place_order(place: str) -> list[tuple[int, str]]:
  return style.site_order(place.replace(" ", "/"))


def _file(place: str) -> str:
  return place.replace(" ", "_")
