"""Figures of attention: where every head looks in a text, and how much each head counts."""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure

from compmod_jax.analysis.attention.measure import (
  CapturingModel,
  Weights,
  attention_modules,
  read_attention,
)
from compmod_jax.analysis.report import style
from compmod_jax.core import errors

R = TypeVar("R")

_CELL = 0.2  # inches of a token in a heat map
_LEAST, _MOST = 1.6, 5.0  # inches of a heat map
_WIDEST = 12.0  # inches of a figure


def attention_pictures(
  model: CapturingModel[R], text: R, modules: Sequence[str] | None = None
) -> dict[str, Figure]:
  """Where the heads of attention modules look while the model reads a text.

  Every head is a panel: a row for each token that looks, a column for each token that is looked at,
  all on one scale from 0 to 1; the weights of a row sum to 1, except in geometric and differential
  attention. Where heads compete, the router's weight of the head stands beside each row, on a scale
  from 0 to the largest weight of the module.

      figures = attention_pictures(model, "Der Hund schläft.", ["decoder/layer_0/cross"])
      figures["decoder/layer_0/cross"].savefig("cross.png", dpi=150)

  Args:
    model: with attention; a translation model is given a sentence, which it translates, or a pair
      (source, target).
    text: what the model reads, as one element of what `capture` takes.
    modules: names from `attention_modules`; None for all.

  Returns:
    Module -> a matplotlib figure.

  Raises:
    UserError: the model has no attention, or no module of that name; or as `capture`.
  """
  known = attention_modules(model)
  errors.check(
    bool(known), f"The model in {model.folder} has no attention, so there is nothing to draw."
  )
  chosen = known if modules is None else list(modules)
  for module in chosen:
    errors.check_choice("attention module", module, known)
  return {
    module: attention_figure(one) for module, one in read_attention(model, text, chosen).items()
  }


def attention_figure(weights: Weights) -> Figure:
  """The attention of one module on one text: a panel for each head."""
  heads, queries, keys = weights.attention.shape
  wide, high = (min(_MOST, max(_LEAST, _CELL * count)) for count in (keys, queries))
  # Words stand beside each heat map, and beside that the router's column.
  width, height = wide + (1.5 if weights.router is not None else 1.1), high + 1.1
  columns = max(1, min(heads, int(_WIDEST / width)))
  rows = math.ceil(heads / columns)
  figure = style.canvas(columns * width + 1.6, rows * height + 0.6)
  grid = figure.add_gridspec(rows, columns)
  panels = [figure.add_subplot(grid[head // columns, head % columns]) for head in range(heads)]
  meshes = [_heat(axes, weights, head) for head, axes in enumerate(panels)]
  small = {"fraction": 0.03, "pad": 0.02, "aspect": 25}
  _scale(figure.colorbar(meshes[-1], ax=panels, **small), "attention")
  if weights.router is not None:
    top = float(max(weights.router.max(initial=0.0), 1e-6))
    marks = [_beside(axes, weights.router[:, i], top) for i, axes in enumerate(panels)]
    _scale(figure.colorbar(marks[-1], ax=panels, **small), "router's weight of the head")
  style.finish(figure, style.site_title(weights.module))
  return figure


def _heat(axes: Axes, weights: Weights, head: int) -> QuadMesh:
  """One head's attention."""
  mesh = axes.pcolormesh(weights.attention[head], cmap="Blues", vmin=0, vmax=1, linewidth=0)
  title = f"head {head}"
  if weights.router is not None:
    title += f", mean weight {weights.router[:, head].mean():.2f}"
  style.label(axes, title, "", "")
  axes.grid(False)
  for ticks, words in ((axes.set_xticks, weights.keys), (axes.set_yticks, weights.queries)):
    every = math.ceil(len(words) / 40)
    shown = range(0, len(words), every)
    ticks([at + 0.5 for at in shown], [words[at].strip() for at in shown], parse_math=False)
  axes.tick_params(axis="x", rotation=90)
  axes.invert_yaxis()
  return mesh


def _beside(axes: Axes, values: np.ndarray, top: float) -> QuadMesh:
  """The router's weight of a head at every query, at the right of its panel."""
  axes = axes.inset_axes((1.04, 0.0, 0.07, 1.0))
  mesh = axes.pcolormesh(values[:, None], cmap="Oranges", vmin=0, vmax=top, linewidth=0)
  axes.set_xticks([])
  axes.set_yticks([])
  axes.invert_yaxis()
  for spine in axes.spines.values():
    spine.set_color(style.GRID)
  return mesh


def _scale(bar: Colorbar, name: str) -> None:
  bar.set_label(name, color=style.MUTED, fontsize=style.BODY)
  bar.ax.tick_params(colors=style.MUTED, labelsize=style.SMALL)
  bar.outline.set_visible(False)
