"""The figures of the report on gates: of a split, and token by token of single texts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from compmod_jax.analysis.gates.edits import TOKEN, TOKEN_AND_SET
from compmod_jax.analysis.gates.effects import Effect, with_ends
from compmod_jax.analysis.gates.maps import Map
from compmod_jax.analysis.gates.reading import ALL, BINS, KIND, KINDS, TEXT_KINDS, Cell, Totals
from compmod_jax.analysis.report import panels, style
from compmod_jax.analysis.report.page import Picture
from compmod_jax.mechanisms.modulation import CLOSED, OPEN

_COLOURS = colormaps["viridis"]
_SHUT, _WIDE = (to_hex(_COLOURS(value)) for value in (0.08, 0.95))

_ACROSS, _LINES = 64, 4  # tokens side by side, and such lines one below the other


def _gate_title(site: str) -> str:
  """Of "gates/vanilla_2/ffn", for example: "gate on the ffn of vanilla_2"."""
  if not site.startswith("gates/"):
    return "gate on the vanilla set's output"
  _, layer, kind = site.split("/")
  return f"gate on the {kind} of {layer}"


def _file_name(site: str) -> str:
  """A site as part of the name of a file."""
  return site.replace("/", "_")


def _legend(figure: Figure, colours: Mapping[str, str], marker: str = "s") -> None:
  """Names of colours at the bottom of a picture."""
  shape = {"marker": marker, "markersize": 6, "linestyle": ""}
  handles = [Line2D([], [], color=colour, **shape) for colour in colours.values()]
  figure.legend(
    handles, list(colours), loc="outside lower left", ncols=len(colours), frameon=False,
    fontsize=style.SMALL, labelcolor=style.MUTED, handletextpad=0.1, columnspacing=1.2,
  )  # fmt: skip


def groups(cells: Mapping[str, Sequence[Cell]]) -> Iterator[Picture]:
  """Means and shares by category, a picture for each gate; and of all gates side by side."""
  caption = (
    "Left: means over tokens and channels, 95 % bootstrap intervals over texts and (pale) one"
    " standard deviation. Right: shares of values. In brackets: tokens."
  )
  if len(cells) > 1:
    every = [found[0]._replace(category=_gate_title(site)) for site, found in cells.items()]
    yield Picture("places", _groups("All gates", every), caption)
  for site, found in cells.items():
    yield Picture(
      f"groups_{_file_name(site)}",
      _groups(f"By kind of token, part of speech and task: {_gate_title(site)}", found),
      caption,
    )


def _groups(title: str, cells: Sequence[Cell]) -> Figure:
  rows: list[Cell | str] = []
  for cell in cells:
    if cell.group != ALL and not any(isinstance(r, Cell) and r.group == cell.group for r in rows):
      rows.append(cell.group)
    rows.append(cell)
  figure = style.canvas(style.WIDTH, 1.1 + 0.23 * len(rows))
  left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
  places = np.array([place for place, row in enumerate(rows) if isinstance(row, Cell)])
  means, spreads = (
    np.array([getattr(cell, name) for cell in cells]) for name in ("mean", "spread")
  )
  low, high = ([getattr(cell, name) for cell in cells] for name in ("low", "high"))
  left.hlines(places, means - spreads, means + spreads, color=style.GRID, linewidth=5)
  left.hlines(places, low, high, color=style.PALETTE[0], linewidth=1.8)
  left.plot(means, places, linestyle="", marker="o", markersize=4.5, color=style.PALETTE[0])
  closed, wide = (np.array([getattr(cell, name) for cell in cells]) for name in ("closed", "open"))
  right.barh(places, closed, height=0.7, color=_SHUT)
  right.barh(places, 1 - closed - wide, left=closed, height=0.7, color=style.GRID)
  right.barh(places, wide, left=1 - wide, height=0.7, color=_WIDE)
  labels = [row if isinstance(row, str) else f"{row.category} ({row.tokens:,})" for row in rows]
  style.label(left, "", "gate", "")
  style.label(right, "", "share of values", "")
  left.set_yticks(np.arange(len(rows)), labels, parse_math=False)
  left.set_ylim(len(rows) - 0.4, -0.6)
  left.set_xlim(0, 1)
  right.set_xlim(0, 1)
  right.tick_params(axis="y", labelleft=False, length=0)
  for text, row in zip(left.get_yticklabels(), rows, strict=True):
    text.set(color=style.INK if isinstance(row, str) else style.MUTED)
  for axes in (left, right):
    axes.grid(False, axis="y")
  left.grid(axis="x", color=style.GRID, linewidth=0.7)
  shown = {f"below {CLOSED}": _SHUT, "between": style.GRID, f"above {OPEN}": _WIDE}
  _legend(figure, shown)
  style.finish(figure, title)
  return figure


def histograms(cells: Mapping[str, Sequence[Cell]]) -> Iterator[Picture]:
  """Histograms of all values and by kind of token, a picture for each gate."""
  for site, found in cells.items():
    shown = {cell.category: cell.bins for cell in found if cell.group in (ALL, KIND)}
    yield Picture(
      f"histogram_{_file_name(site)}",
      _histograms(f"Values of the {_gate_title(site)}", shown),
      f"Shares of values in {BINS} intervals; the line is that of all tokens.",
    )


def _histograms(title: str, shares: Mapping[str, np.ndarray]) -> Figure:
  figure, axes_of = style.small_multiples(list(shares), 1.7)
  edges = np.linspace(0, 1, BINS + 1)
  middle = (edges[:-1] + edges[1:]) / 2
  grey = [_SHUT if m < CLOSED else _WIDE if m > OPEN else style.MUTED for m in middle]
  for name, axes in axes_of.items():
    axes.bar(middle, shares[name], width=0.9 / BINS, color=grey)
    axes.stairs(shares[ALL], edges, color=style.PALETTE[1], linewidth=1)
    style.label(axes, name, "gate", "share")
    axes.set_xlim(0, 1)
  style.outer_labels(axes_of.values())
  style.same_limits(axes_of.values(), bottom=0.0)
  style.finish(figure, title)
  return figure


def channels(totals: Mapping[str, Totals]) -> Picture:
  """Mean and standard deviation of every channel over tokens."""
  columns = min(3, len(totals))
  rows = math.ceil(len(totals) / columns)
  figure = style.canvas(min(style.WIDTH, 1 + 3 * max(2, columns)), 0.4 + 2.2 * rows)
  for number, (site, total) in enumerate(totals.items()):
    axes = figure.add_subplot(rows, columns, number + 1)
    order = np.argsort(-total.means)
    means, spread = total.means[order], total.deviations[order]
    places = np.arange(len(order))
    low, high = np.clip(means - spread, 0, 1), np.clip(means + spread, 0, 1)
    axes.fill_between(places, low, high, color=style.PALETTE[0], alpha=0.2, linewidth=0)
    axes.plot(places, means, color=style.PALETTE[0], linewidth=1.6)
    style.label(
      axes, _gate_title(site), "channels, most open first", "" if number % columns else "gate"
    )
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
  style.finish(figure, "Every channel over tokens")
  return Picture(
    "channels",
    figure,
    "Line: mean of each channel over tokens; band: one standard deviation. A thin band means that a"
    " channel hardly depends on the text.",
  )


_CHANGES = {"score": "change, points", "loss": "change, nats per token"}


def effects(found: Sequence[Effect]) -> Iterator[Picture]:
  """Changes of scores and losses, side by side: with other tokens, and with other gates."""
  for name, title, of_tokens in (
    ("effects_gates", "With other gates, against the model as trained", False),
    ("effects_tokens", "With other task tokens, against the model as trained", True),
  ):
    some = [
      e for e in found if e.loss_change and (e.variant in (TOKEN, TOKEN_AND_SET)) == of_tokens
    ]
    if some:
      yield Picture(
        name,
        panels.forest(title, _charts(some), across=_CHANGES),
        "Lines: 95 % paired bootstrap intervals over texts. A fall of the score and a rise of the"
        " loss mean that the model is worse off.",
      )


def _charts(found: Sequence[Effect]) -> dict[str, tuple[list[str], list[panels.Series]]]:
  """Heading -> variants, and the changes of each part of the sample."""
  rows, charts = list(dict.fromkeys(effect.variant for effect in found)), {}
  for heading, field, count in (
    ("score", "score_change", "questions"),
    ("loss", "loss_change", "texts"),
  ):
    series = []
    for part in dict.fromkeys(effect.part for effect in found):
      some = [effect for effect in found if effect.part == part]
      if all(getattr(effect, field) for effect in some):
        ends = [with_ends(getattr(e, field), getattr(e, count)) for e in some]
        series.append(panels.Series(part, *map(list, zip(*ends, strict=True))))
    if series:
      charts[heading] = (rows, series)
  return charts


def over_training(records: Sequence[Mapping[str, Any]]) -> Iterator[Picture]:
  """Mean and saturation of the gate as the log has them."""
  lines = [record for record in records if record.get("kind") == "train"]
  curves = {}
  for name in ("mean", "closed", "open"):
    seen = [(r["step"], r[f"gate/{name}"]) for r in lines if r.get(f"gate/{name}") is not None]
    if seen:
      curves[name] = tuple(np.asarray(column) for column in zip(*seen, strict=True))
  if curves:
    figure = panels.lines(
      "The gate over training", {"training batches": curves}, across="step", up="mean, share"
    )
    yield Picture("training", figure, f"Closed: below {CLOSED}; open: above {OPEN}.")


def maps(found: Sequence[Map], totals: Mapping[str, Totals]) -> Iterator[Picture]:
  """Every text's gates, token by token; channels in the order of their means over the sample."""
  for place, one in enumerate(found):
    for site, gate in one.gates.items():
      title = one.title if len(one.title) < 60 else f"{one.title[:57]}..."
      last = _ACROSS * _LINES
      cut = f" The last {last} of {len(gate)} tokens." if len(gate) > last else ""
      yield Picture(
        f"map_{place}_{_file_name(site)}",
        _map(
          f"{_gate_title(site).capitalize()}: {title}", one, gate, np.argsort(-totals[site].means)
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
  images, drawn = [], []
  for line in range(lines):
    part = slice(line * each, (line + 1) * each)
    above, below = (figure.add_subplot(grid[2 * line + row]) for row in (0, 1))
    _token_shares(above, gate[part])
    drawn += [above, below]
    image = below.imshow(
      gate[part].T, aspect="auto", interpolation="nearest", cmap=_COLOURS, vmin=0, vmax=1
    )
    images.append(image)
    style.label(below, "", "", "channel")
    below.set_yticks([])
    below.grid(False)
    below.set_xticks(np.arange(len(words[part])), words[part], rotation=90, parse_math=False)
    for text, kind in zip(below.get_xticklabels(), kinds[part], strict=True):
      text.set(color=_kind_colour(kind), fontsize=style.SMALL - 1)
    for axes in (above, below):
      axes.set_xlim(-0.5, each - 0.5)
  bar = figure.colorbar(images[-1], ax=drawn, fraction=0.02, pad=0.01, aspect=30)
  bar.set_label("gate", color=style.MUTED, fontsize=style.BODY)
  bar.ax.tick_params(colors=style.MUTED, labelsize=style.SMALL)
  bar.ax.spines["outline"].set_visible(False)
  _legend(figure, {name: _kind_colour(name) for name in names})
  style.finish(figure, title)
  return figure


def _kind_colour(kind: str) -> str:
  return style.PALETTE[(*KINDS, *TEXT_KINDS).index(kind) % len(style.PALETTE)]


def _token_shares(axes: Axes, gate: np.ndarray) -> None:
  places = np.arange(len(gate))
  closed, wide = np.mean(gate < CLOSED, axis=1), np.mean(gate > OPEN, axis=1)
  axes.bar(places, closed, width=1.0, color=_SHUT)
  axes.bar(places, wide, width=1.0, bottom=1 - wide, color=_WIDE)
  axes.plot(
    places, gate.mean(axis=1), linestyle="", marker="o", markersize=3.5, color="white",
    markeredgecolor="black", markeredgewidth=0.7,
  )  # fmt: skip
  style.label(axes, "", "", "share")
  axes.set_ylim(0, 1)
  axes.set_yticks([0, 0.5, 1], ["0", "½", "1"])
  axes.set_xticks([])
