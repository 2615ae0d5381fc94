"""The house style of the pictures: colours, small multiples, and lines named at their ends.

The colours are distinguishable with every common kind of colour blindness; every second group of
four lines is dashed as well. No text is read as TeX: names of sites and languages are shown as they
are.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, MUTED, GRID = "#24292f", "#6e7781", "#d8dee4"
PALETTE = (
  "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#a89a00", "#57606a",
)  # fmt: skip
WIDTH = 9.8  # inches: the text column of the report
SMALL, BODY, LARGE = 8, 9, 12  # points
_DASHES = ("solid", "dashed", "dotted")


_ORDER = ("encoder", "decoder", "self", "cross")  # as a sentence passes through the model


def site_order(site: str) -> list[tuple[int, str]]:
  """A sorting key: encoder before decoder, self before cross, layer_2 before layer_10."""
  words = re.split(r"(\d+)|[/_]", site)
  return [
    (int(word), "") if word.isdigit() else (_ORDER.index(word) if word in _ORDER else 9, word)
    for word in words
    if word
  ]


def site_title(site: str) -> str:
  """Of "encoder/layer_0/self", for example: "encoder self, layer 0"."""
  stack, layer = _place(site)
  return stack if layer is None else f"{stack}, layer {layer}"


def _place(site: str) -> tuple[str, int | None]:
  words = [word for word in site.split("/") if word]
  if len(words) > 1 and words[-1] == "router":
    words.pop()
  found = [re.fullmatch(r"layer_(\d+)", word) for word in words]
  layer = next((int(match[1]) for match in found if match), None)
  rest = [word for word, match in zip(words, found, strict=True) if not match]
  return " ".join(rest) or site, layer


def canvas(width: float, height: float) -> Figure:
  """An empty figure of that many inches, with room between its panels."""
  return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.09))


def small_multiples(
  sites: Sequence[str], height: float, most: int = 3
) -> tuple[Figure, dict[str, Axes]]:
  """A figure with a panel for each site: layers side by side, each stack on a row of its own.

  Args:
    sites: names such as "encoder/layer_0/self".
    height: of a row, in inches.
    most: panels of a row, at most 3.

  Returns:
    The figure, and site -> axes in natural order.
  """
  stacks: dict[str, list[str]] = {}
  for site in sorted(sites, key=site_order):
    stacks.setdefault(_place(site)[0], []).append(site)
  groups = [
    stacks[stack] for stack in sorted(stacks, key=lambda s: site_order(s.replace(" ", "/")))
  ]
  if max(map(len, groups)) == 1:  # one layer each: rows of their own would be empty but for one
    groups = [[site for group in groups for site in group]]
  columns = min(most, max(map(len, groups)))
  rows = sum(math.ceil(len(group) / columns) for group in groups)
  # Few columns keep the size of a panel, not the width of the page.
  width = WIDTH if columns == 3 else 0.7 + columns * WIDTH / 2.6
  figure = canvas(min(width, WIDTH), 0.6 + height * rows)
  grid = figure.add_gridspec(rows, columns)
  panels, row = {}, 0
  for group in groups:
    for number, site in enumerate(group):
      panels[site] = figure.add_subplot(grid[row + number // columns, number % columns])
    row += math.ceil(len(group) / columns)
  return figure, panels


def label(axes: Axes, title: str, across: str, up: str) -> None:
  """Title, axis labels and the quiet frame that all panels share."""
  axes.set_title(title, loc="left", fontsize=BODY + 1, color=INK, parse_math=False)
  axes.set_xlabel(across, fontsize=BODY, color=MUTED)
  axes.set_ylabel(up, fontsize=BODY, color=MUTED)
  axes.tick_params(colors=MUTED, labelsize=SMALL, length=3, which="both")
  axes.set_facecolor("none")
  for side, spine in axes.spines.items():
    spine.set_visible(side in ("left", "bottom"))
    spine.set_color(GRID)
  axes.grid(axis="y", color=GRID, linewidth=0.7)
  axes.set_axisbelow(True)


def outer_labels(panels: Iterable[Axes]) -> None:
  """Keeps axis labels at the left and below only, where panels have the same axes."""
  below: dict[int, Axes] = {}
  for axes in panels:
    place = axes.get_subplotspec()
    if place is None:
      continue
    if not place.is_first_col():
      axes.set_ylabel("")
    above = below.get(place.colspan.start)
    if above is not None:
      above.set_xlabel("")
    below[place.colspan.start] = axes


def finish(figure: Figure, title: str) -> None:
  """Puts the title at the left, in lines that fit, and settles the layout, which each file format
  would redo."""
  letter = 0.55 * LARGE / 72  # inches, on average
  title = textwrap.fill(title, int(figure.get_figwidth() / letter))
  figure.suptitle(title, x=0.006, ha="left", fontsize=LARGE, color=INK, parse_math=False)
  engine = figure.get_layout_engine()
  if figure.axes and engine is not None:
    engine.execute(figure)
  figure.set_layout_engine("none")


def message(title: str, text: str) -> Figure:
  """A figure without axes that says why there is nothing to see."""
  figure = canvas(WIDTH, 1.4)
  figure.text(0.006, 0.4, text, fontsize=BODY + 1, color=MUTED, parse_math=False)
  finish(figure, title)
  return figure


def line(axes: Axes, steps: np.ndarray, values: np.ndarray, name: str, number: int = 0) -> None:
  """A curve in the colour and dash of its number; one lone point is shown as a dot."""
  axes.plot(
    steps,
    values,
    label=name,
    color=PALETTE[number % len(PALETTE)],
    linestyle=_DASHES[number // 4 % len(_DASHES)],
    linewidth=1.4,
    marker="o" if len(steps) == 1 else "",
    markersize=4,
  )


def reference(axes: Axes, value: float, name: str = "") -> None:
  """A dashed grey line across the panel: what uniform weights would give."""
  axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
  if name:
    axes.annotate(
      name,
      xy=(1, value),
      xycoords=("axes fraction", "data"),
      xytext=(4, 0),
      textcoords="offset points",
      va="center",
      fontsize=SMALL,
      color=MUTED,
    )


def step_axis(axes: Axes, last: int) -> None:
  """From 0 to the last step of the whole picture, with separators for thousands."""
  axes.set_xlim(0, max(last, 1))
  axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
  axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def same_limits(panels: Iterable[Axes], bottom: float) -> None:
  """One vertical scale for all panels, from `bottom` to a little above the highest."""
  panels = list(panels)
  top = max(axes.get_ylim()[1] for axes in panels)
  for axes in panels:
    axes.set_ylim(bottom, top if top > bottom else bottom + 1)


def name_lines(axes: Axes) -> None:
  """Writes the name of every labelled line at its right end, moved apart where they would touch."""
  to_axes = axes.transData + axes.transAxes.inverted()
  axes.autoscale_view(scalex=False)  # settles the limits, which otherwise happens when drawn
  ends = []
  for curve in axes.get_lines():
    name, values = str(curve.get_label()), np.asarray(curve.get_ydata(), dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(values))
    if not name or name.startswith("_") or not len(finite):
      continue
    last = (float(np.asarray(curve.get_xdata())[finite[-1]]), float(values[finite[-1]]))
    ends.append((float(to_axes.transform(last)[1]), name, curve.get_color()))
  ends.sort(key=lambda end: end[0])
  gap = min(0.095, 1 / max(len(ends) - 1, 1))
  places = _apart([height for height, _, _ in ends], gap)
  for place, (_, name, colour) in zip(places, ends, strict=True):
    axes.annotate(
      name,
      xy=(1, place),
      xycoords="axes fraction",
      xytext=(4, 0),
      textcoords="offset points",
      va="center",
      fontsize=SMALL if gap > 0.09 else SMALL - 2,
      color=colour,
      parse_math=False,
    )


def _apart(heights: Sequence[float], gap: float) -> list[float]:
  """The places nearest to ascending `heights` that are `gap` apart and lie in 0 to 1.

  Least squares under the constraint: heights less i * gap, made monotone by pooling neighbours.
  """
  pools: list[tuple[float, int]] = []  # mean and size of labels that touch
  for number, height in enumerate(heights):
    mean, size = height - number * gap, 1
    while pools and pools[-1][0] > mean:
      before, count = pools.pop()
      mean, size = (before * count + mean * size) / (count + size), count + size
    pools.append((mean, size))
  most = max(1 - (len(heights) - 1) * gap, 0)
  flat = [min(max(mean, 0), most) for mean, size in pools for _ in range(size)]
  return [place + number * gap for number, place in enumerate(flat)]
