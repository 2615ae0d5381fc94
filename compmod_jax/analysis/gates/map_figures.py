"""Pictures of the gates at every token of single texts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compmod_jax.analysis.gates.figures import COLOURS, SHUT, WIDE, file_name, legend, place_title
from compmod_jax.analysis.gates.maps import Map
from compmod_jax.analysis.gates.reading import KINDS, TEXT_KINDS, Totals
from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Picture
from compmod_jax.mechanisms.modulation import CLOSED, OPEN

_ACROSS, _LINES = 64, 4  # tokens side by side, and such lines one below the other


def maps(found: Sequence[Map], totals: Mapping[str, Totals]) -> Iterator[Picture]:
  """Every text's gates, token by token; channels in the order of their means over the sample."""
  for place, one in enumerate(found):
    for site, gate in one.gates.items():
      title = one.title if len(one.title) < 60 else f"{one.title[:57]}..."
      last = _ACROSS * _LINES
      cut = f" The last {last} of {len(gate)} tokens." if len(gate) > last else ""
      yield Picture(
        f"map_{place}_{file_name(site)}",
        _map(
          f"{place_title(site).capitalize()}: {title}", one, gate, np.argsort(-totals[site].means)
        ),
        f"{one.remark}{' ' if one.remark else ''}Above: at each token the mean of the gate (dots)"
        f" and shares of its channels: closed (below {CLOSED}) from below, open (above {OPEN}) from"
        " above. Below: every channel, the most open ones (by their mean over the sample) on top."
        f"{cut}",
      )


def _map(title: str, one: Map, gate: np.ndarray, order: np.ndarray) -> Figure:
  start = max(0, len(gate) - _ACROSS * _LINES)
  words, kinds, gate = one.words[start:], one.kinds[start:], gate[start:, order]
  lines = math.ceil(len(words) / _ACROSS)
  each = math.ceil(len(words) / lines)
  names = [kind for kind in (*KINDS, *TEXT_KINDS) if kind in kinds]
  figure = style.canvas(style.WIDTH, 0.8 + 2.9 * lines)
  grid = figure.add_gridspec(2 * lines, 1, height_ratios=[2, 3] * lines)
  image: Any = None
  drawn = []
  for line in range(lines):
    part = slice(line * each, (line + 1) * each)
    above, below = (figure.add_subplot(grid[2 * line + row]) for row in (0, 1))
    _token_shares(above, gate[part])
    drawn += [above, below]
    image = below.imshow(
      gate[part].T, aspect="auto", interpolation="nearest", cmap=COLOURS, vmin=0, vmax=1
    )
    style.label(below, "", "", "channel")
    below.set_yticks([])
    below.grid(False)
    below.set_xticks(np.arange(len(words[part])), words[part], rotation=90, parse_math=False)
    for text, kind in zip(below.get_xticklabels(), kinds[part], strict=True):
      text.set(color=_kind_colour(kind), fontsize=style.SMALL - 1)
    for axes in (above, below):
      axes.set_xlim(-0.5, each - 0.5)
  bar = figure.colorbar(image, ax=drawn, fraction=0.02, pad=0.01, aspect=30)
  bar.set_label("gate", color=style.MUTED, fontsize=style.BODY)
  bar.ax.tick_params(colors=style.MUTED, labelsize=style.SMALL)
  bar.ax.spines["outline"].set_visible(False)
  legend(figure, {name: _kind_colour(name) for name in names})
  style.finish(figure, title)
  return figure


def _kind_colour(kind: str) -> str:
  return style.PALETTE[(*KINDS, *TEXT_KINDS).index(kind) % len(style.PALETTE)]


def _token_shares(axes: Axes, gate: np.ndarray) -> None:
  places = np.arange(len(gate))
  closed, wide = np.mean(gate < CLOSED, axis=1), np.mean(gate > OPEN, axis=1)
  axes.bar(places, closed, width=1.0, color=SHUT)
  axes.bar(places, wide, width=1.0, bottom=1 - wide, color=WIDE)
  axes.plot(
    places, gate.mean(axis=1), linestyle="", marker="o", markersize=3.5, color="white",
    markeredgecolor="black", markeredgewidth=0.7,
  )  # fmt: skip
  style.label(axes, "", "", "share")
  axes.set_ylim(0, 1)
  axes.set_yticks([0, 0.5, 1], ["0", "½", "1"])
  axes.set_xticks([])
