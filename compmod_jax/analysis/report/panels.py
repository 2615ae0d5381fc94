"""Pictures of the analyses: heat maps, lines, bars and estimates, a panel for each module.

Pure functions that return a matplotlib `Figure`, in the style of `plot`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compmod_jax.analysis.report import style

_ROW = 0.19  # inches


class Heat(NamedTuple):
  """One heat map: values [rows, columns] and what rows and columns are called."""

  values: np.ndarray
  rows: Sequence[str]
  columns: Sequence[str]
  marked: np.ndarray | None = None
  """Cells whose number is set in bold, bool [rows, columns]."""


class Series(NamedTuple):
  """Values of a forest plot, one a row, each with an interval or without (NaN)."""

  name: str
  values: Sequence[float]
  low: Sequence[float] | None = None
  high: Sequence[float] | None = None


def heat_maps(
  title: str,
  maps: Mapping[str, Heat],
  *,
  across: str,
  down: str,
  unit: str,
  centre: float | None = None,
  orange: Literal["high", "low"] = "high",
  numbers: bool = False,
  most: int = 3,
  slanted: bool = False,
) -> Figure:
  """Heat maps with one scale of colours for all.

  Args:
    title: of the picture.
    maps: module (such as "encoder/layer_0/self") or heading -> its map.
    across: what columns are.
    down: what rows are.
    unit: what colours show.
    centre: the value of the neutral colour; without it colours go from the least to the largest.
    orange: which side of the centre is orange; the other one is purple.
    numbers: write the values into the cells.
    most: panels of a row, at most 3.
    slanted: names of columns slant, and the picture is as wide as the page: for long names.
  """
  if not maps:
    return style.message(title, "There is nothing to show.")
  values = np.concatenate([heat.values[np.isfinite(heat.values)] for heat in maps.values()])
  scale = _colours(values, centre, orange)
  tallest = max(len(heat.rows) for heat in maps.values())
  # Lower ones have no room for the name of the colours.
  height = 1.5 + 1.3 * _ROW * tallest if slanted else max(1.7, 0.75 + _ROW * tallest)
  figure, panels = style.small_multiples(list(maps), height, most)
  if slanted:
    figure.set_figwidth(style.WIDTH)
  largest = float(np.abs(values).max(initial=0.0))
  decimals = min(3, max(0, 1 - math.floor(math.log10(largest)))) if largest > 0 else 2
  meshes = []
  for site, axes in panels.items():
    heat = maps[site]
    mesh = axes.pcolormesh(np.ma.masked_invalid(heat.values), linewidth=0, **scale)
    meshes.append(mesh)
    _name_cells(axes, heat, across, down, style.site_title(site))
    if slanted:
      axes.tick_params(axis="x", labelrotation=30)
      for name in axes.get_xticklabels():
        name.set_horizontalalignment("right")
    if numbers:
      _write_numbers(axes, heat, decimals, np.asarray(mesh.to_rgba(heat.values)))
  bar = figure.colorbar(meshes[-1], ax=list(panels.values()), fraction=0.03, pad=0.02, aspect=25)
  bar.set_label(unit, color=style.MUTED, fontsize=style.BODY)
  bar.ax.tick_params(colors=style.MUTED, labelsize=style.SMALL)
  bar.ax.spines["outline"].set_visible(False)
  style.outer_labels(panels.values())
  style.finish(figure, title)
  return figure


def _colours(values: np.ndarray, centre: float | None, orange: str) -> dict[str, Any]:
  """Colour map and limits for all values of a picture; see `heat_maps`."""
  if centre is None:
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    return {"cmap": "viridis", "vmin": low, "vmax": high if high > low else low + 1}
  reach = max(1e-9, float(np.abs(values - centre).max(initial=0.0)))
  colours = "PuOr_r" if orange == "high" else "PuOr"
  return {"cmap": colours, "vmin": centre - reach, "vmax": centre + reach}


def _name_cells(axes: Axes, heat: Heat, across: str, down: str, title: str) -> None:
  every = math.ceil(len(heat.columns) / 16)
  places = range(0, len(heat.columns), every)
  axes.set_xticks(
    [place + 0.5 for place in places], [heat.columns[place] for place in places], parse_math=False
  )
  axes.set_yticks(np.arange(len(heat.rows)) + 0.5, list(heat.rows), parse_math=False)
  axes.invert_yaxis()
  style.label(axes, title, across, down)
  axes.grid(False)


def _write_numbers(axes: Axes, heat: Heat, decimals: int, colours: np.ndarray) -> None:
  """Writes every value into its cell, whose colour is in `colours` [rows, columns, 4]."""
  for (row, column), value in np.ndenumerate(heat.values):
    if not np.isfinite(value):
      continue
    red, green, blue, _ = colours[row, column]
    bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
    bold = heat.marked is not None and bool(heat.marked[row, column])
    text = f"{value:.{decimals}f}"
    if float(text) == 0:
      text = f"{value:.1g}" if abs(value) >= 0.1 ** (decimals + 1) else "0"
    axes.text(
      column + 0.5,
      row + 0.5,
      text,
      ha="center",
      va="center",
      fontsize=style.SMALL - 1,
      fontweight="bold" if bold else "normal",
      color="#111111" if bright else "#fefefe",
    )


def lines(
  title: str,
  curves: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]],
  *,
  across: str,
  up: str,
  bottom: float | None = 0.0,
  logarithmic: bool = False,
) -> Figure:
  """A panel for each module, with named lines.

  Args:
    title: of the picture.
    curves: module -> name of the line -> places and values, NaN where there is none.
    across: what places are.
    up: what values are.
    bottom: where the vertical scale, the same for all panels, begins; None: each has its own.
    logarithmic: draw places on a logarithmic scale.
  """
  if not curves:
    return style.message(title, "There is nothing to show.")
  figure, panels = style.small_multiples(list(curves), 2.2)
  for site, axes in panels.items():
    for number, (name, (places, values)) in enumerate(curves[site].items()):
      style.line(axes, places, values, name, number)
    style.label(axes, style.site_title(site), across, up)
    if logarithmic:
      axes.set_xscale("log")
      axes.minorticks_off()
      low, high = axes.get_xlim()
      ticks = [t for t in _round_numbers(low, high) if low <= t <= high]
      axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
  style.outer_labels(panels.values())
  if bottom is not None:
    style.same_limits(panels.values(), bottom=bottom)
  for axes in panels.values():
    style.name_lines(axes)
  style.finish(figure, title)
  return figure


def _round_numbers(low: float, high: float) -> list[float]:
  """Up to about five numbers with one digit between two bounds."""
  decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  for digits in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 4, 7), (1, 3), (1,)):
    found = [digit * 10.0**decade for decade in decades for digit in digits]
    if sum(low <= number <= high for number in found) <= 5:
      return found
  return [10.0**decade for decade in decades][:: max(1, len(decades) // 4)]


def bars(title: str, values: Mapping[str, np.ndarray], *, across: str, up: str) -> Figure:
  """A panel for each module, a bar for each of its units; the vertical scale is the same."""
  if not values:
    return style.message(title, "There is nothing to show.")
  figure, panels = style.small_multiples(list(values), 1.9)
  for site, axes in panels.items():
    units = len(values[site])
    axes.bar(np.arange(units), values[site], color=style.PALETTE[0], width=0.72)
    axes.set_xticks(np.arange(0, units, math.ceil(units / 16)))
    style.label(axes, style.site_title(site), across, up)
  style.outer_labels(panels.values())
  style.same_limits(panels.values(), bottom=0.0)
  style.finish(figure, title)
  return figure


def forest(
  title: str,
  panels: Mapping[str, tuple[Sequence[str], Sequence[Series]]],
  *,
  across: str | Mapping[str, str],
  reference: float | None = 0.0,
) -> Figure:
  """Estimates with their intervals, a row each, side by side in panels.

  Args:
    title: of the picture.
    panels: heading -> names of the rows, and series with a value for each row.
    across: what values are, with their unit; or heading -> that of its panel.
    reference: where a dashed line stands; None for none.
  """
  if not panels:
    return style.message(title, "There is nothing to show.")
  tallest = max(len(rows) for rows, _ in panels.values())
  most = max(len(series) for _, series in panels.values())
  columns = min(3, len(panels))
  height = 1.0 + 0.26 * max(tallest, 3)
  figure = style.canvas(style.WIDTH, 0.4 + height * math.ceil(len(panels) / columns))
  names: dict[str, int] = {}
  drawn: dict[str, Any] = {}
  left: Sequence[str] = ()
  for number, (heading, (rows, series)) in enumerate(panels.items()):
    axes = figure.add_subplot(math.ceil(len(panels) / columns), columns, number + 1)
    for one in series:
      place = names.setdefault(one.name, len(names))
      drawn[one.name] = _estimates(axes, one, place, most)
    repeated = number % columns and list(rows) == list(left)
    axes.set_yticks(
      np.arange(len(rows)), [""] * len(rows) if repeated else list(rows), parse_math=False
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(4 if columns > 1 else 8))
    style.label(axes, heading, across if isinstance(across, str) else across[heading], "")
    axes.grid(axis="x", color=style.GRID, linewidth=0.7)
    axes.grid(False, axis="y")
    if reference is not None:
      axes.axvline(reference, color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
    left = rows
  if len(drawn) > 1:
    where = {"loc": "upper right", "bbox_to_anchor": (0.995, 1.0), "ncols": len(drawn)}
    small = {"frameon": False, "fontsize": style.SMALL, "labelcolor": style.MUTED}
    figure.legend(list(drawn.values()), list(drawn), **where, **small)
  style.finish(figure, title)
  return figure


_MARKS = ("o", "D", "s", "^")


def _estimates(axes: Axes, series: Series, number: int, of: int) -> Any:
  """The values of one series as marks, their intervals as lines, a little apart from the others."""
  values = np.asarray(series.values, np.float64)
  places = np.arange(len(values)) + (number - (of - 1) / 2) * 0.2
  colour = style.PALETTE[number % len(style.PALETTE)]
  if series.low is not None and series.high is not None:
    axes.hlines(places, series.low, series.high, color=colour, linewidth=1.6)
  shape = {"marker": _MARKS[number % 4], "markersize": 5, "linestyle": "", "label": series.name}
  return axes.plot(values, places, color=colour, **shape)[0]
