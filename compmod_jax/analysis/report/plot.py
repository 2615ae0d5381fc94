"""From records and arrays to pictures: pure functions that return a matplotlib `Figure`.

No function touches pyplot or its global state, so pictures can be drawn without a display. How they
look is in `style`.
"""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import ArrayLike

from compmod_jax.analysis.report import style
from compmod_jax.core import durable
from compmod_jax.core.errors import check, check_choice
from compmod_jax.mechanisms.competition.statistics import unit_kind

POSITIONS = 12  # further on, too few sentences are left for a mean to say much

Records = Sequence[Mapping[str, Any]]


def series(
  records: Records, key: str, kind: str, split: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Steps int64 [n] and values float64 [n] of `key`, in the order of the steps.

  A run that was cut off and resumed logs some steps twice: the last record of a step counts.
  What is not a number (JSON's null for a loss that was not finite) becomes NaN: a gap in the line.

  Args:
    records: the lines of metrics.jsonl, parsed.
    key: name of the quantity.
    kind: "train" or "eval".
    split: of the evaluation; `None` takes every split.
  """
  found: dict[int, float] = {}
  for record in records:
    if record.get("kind") != kind or key not in record or "step" not in record:
      continue
    if split is not None and record.get("split", split) != split:
      continue
    value = record[key]
    found[int(record["step"])] = float(value) if isinstance(value, int | float) else math.nan
  steps = sorted(found)
  return np.array(steps, dtype=np.int64), np.array([found[s] for s in steps], dtype=np.float64)


def training_curves(
  records: Records, *, best_step: int | None = None, split: str = "valid"
) -> Figure:
  """Loss, perplexity, validation scores, learning rate, gradient norm and speed over the steps.

  Args:
    records: the lines of metrics.jsonl, parsed. A quantity that they lack has no panel.
    best_step: marked in every panel by a dotted line, and by a ring on the curves of `split`.
    split: which evaluations are drawn beside the training curves.

  Returns:
    A figure with a panel for each, or with one sentence that says that nothing was recorded.
  """
  both = [("train", None, "train"), ("eval", split, split)]
  scores = [("bleu", "BLEU"), ("exact_match", "exact"), ("score", "score")]
  panels = [
    ("Loss", "nats per token", [(kind, part, "loss", name) for kind, part, name in both]),
    ("Perplexity", "per token", [(kind, part, "perplexity", name) for kind, part, name in both]),
    (f"Score on {split}", "0 to 100", [("eval", split, key, name) for key, name in scores]),
    (f"R2 on {split}", "share of variance", [("eval", split, "r2", "")]),
    ("Learning rate", "dimensionless", [("train", None, "learning_rate", "")]),
    ("Gradient norm", "before clipping", [("train", None, "gradient_norm", "")]),
    ("Speed", "tokens per second", [("train", None, "tokens_per_second", "")]),
  ]
  drawn = []
  for title, unit, wanted in panels:
    curves = [(kind, name, *series(records, key, kind, part)) for kind, part, key, name in wanted]
    curves = [curve for curve in curves if np.isfinite(curve[3]).any()]
    if curves:
      drawn.append((title, unit, curves))
  if not drawn:
    return style.message("Training", "No training records yet.")
  rows = math.ceil(len(drawn) / 2)
  last = max(int(curve[2][-1]) for _, _, curves in drawn for curve in curves)
  figure = style.canvas(style.WIDTH, 0.5 + 2.4 * rows)
  for number, (title, unit, curves) in enumerate(drawn):
    _curve_panel(figure.add_subplot(rows, 2, number + 1), title, unit, curves, best_step, last)
  mark = "" if best_step is None else f" (dotted line: parameters kept, step {best_step:,})"
  style.finish(figure, f"Training{mark}")
  return figure


def _curve_panel(
  axes: Axes,
  title: str,
  unit: str,
  curves: list[tuple[str, str, np.ndarray, np.ndarray]],
  best_step: int | None,
  last: int,
) -> None:
  for number, (kind, name, steps, values) in enumerate(curves):
    style.line(axes, steps, values, name, number)
    if kind == "eval" and best_step is not None:
      at = steps == best_step
      ring = {"marker": "o", "markersize": 7, "linestyle": "", "fillstyle": "none"}
      axes.plot(steps[at], values[at], color=style.PALETTE[number], label="_best", **ring)
  if best_step is not None:
    axes.axvline(best_step, color=style.MUTED, linewidth=1, linestyle="dotted", zorder=1.5)
  style.label(axes, title, "step", unit)
  style.step_axis(axes, last)
  if title == "Perplexity":
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
  elif title == "Learning rate":
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.yaxis.get_offset_text().set(fontsize=style.SMALL, color=style.MUTED)
  if title in ("Learning rate", "Gradient norm", "Speed"):
    axes.set_ylim(bottom=0)
  style.name_lines(axes)


def head_weights(mean: Mapping[str, ArrayLike]) -> Figure:
  """Bars: the mean weight of each head or expert, a panel for each site.

  Args:
    mean: site (such as "encoder/layer_0/self") -> [heads], mean weight over tokens, 1 in sum.

  Raises:
    UserError: an array has another number of axes.
  """
  title = f"Mean weight of each {_units(mean)}"
  if not mean:
    return style.message(title, "No routed attention in this model.")
  weights = {site: _array(site, values, 1) for site, values in mean.items()}
  figure, panels = style.small_multiples(list(weights), 1.9)
  for site, axes in panels.items():
    heads = len(weights[site])
    axes.bar(np.arange(heads), weights[site], color=style.PALETTE[0], width=0.72)
    style.reference(axes, 1 / heads, f"1/{heads}")
    axes.set_xticks(np.arange(0, heads, math.ceil(heads / 16)))
    style.label(axes, style.site_title(site), _units([site]), "mean weight")
  style.outer_labels(panels.values())
  style.same_limits(panels.values(), bottom=0.0)
  style.finish(figure, title)
  return figure


def head_weights_by_position(by_position: Mapping[str, ArrayLike]) -> Figure:
  """Heat maps: mean weight of each head at each of the first 12 positions, less the fair share.

  Args:
    by_position: site -> [positions, heads], mean weight; NaN where no sentence is so long.
      Sites may differ in their number of heads H: colours show weight - 1/H.

  Raises:
    UserError: an array has another number of axes.
  """
  title = f"Weight of each {_units(by_position)} by position, against its fair share"
  if not by_position:
    return style.message(title, "No routed attention in this model.")
  arrays = {site: _array(site, values, 2)[:POSITIONS] for site, values in by_position.items()}
  excess = {site: array.T - 1 / array.shape[1] for site, array in arrays.items()}
  # An untrained router differs from uniform by noise: that must not fill the colour scale.
  reach = max(0.01, *(np.abs(e[np.isfinite(e)]).max(initial=0.0) for e in excess.values()))
  figure, panels = style.small_multiples(list(excess), 2.1)
  for site, axes in panels.items():
    heads, positions = excess[site].shape
    cells = np.ma.masked_invalid(excess[site])
    mesh = axes.pcolormesh(cells, cmap="PuOr_r", vmin=-reach, vmax=reach, linewidth=0)
    across, down = np.arange(0, positions, 2), np.arange(0, heads, math.ceil(heads / 8))
    axes.set_xticks(across + 0.5, [str(position) for position in across])
    axes.set_yticks(down + 0.5, [str(head) for head in down])
    axes.invert_yaxis()
    style.label(axes, style.site_title(site), "position (0 = first)", _units([site]))
    axes.grid(False)
    if site == list(panels)[-1]:
      bar = figure.colorbar(mesh, ax=list(panels.values()), fraction=0.03, pad=0.02, aspect=25)
      bar.set_label("mean weight − 1/heads", color=style.MUTED, fontsize=style.BODY)
      bar.ax.tick_params(colors=style.MUTED, labelsize=style.SMALL)
      bar.ax.spines["outline"].set_visible(False)
  style.outer_labels(panels.values())
  style.finish(figure, title)
  return figure


def _array(site: str, values: ArrayLike, axes: int) -> np.ndarray:
  array = np.asarray(values, dtype=np.float64)
  wanted = "[heads]" if axes == 1 else "[positions, heads]"
  check(
    array.ndim == axes and array.size,
    f"The weights of site {site!r} have shape {array.shape}; they must be {wanted}, not empty.",
  )
  return array


def _units(sites: Iterable[str]) -> str:
  """What competes at sites: "head", "expert", or either."""
  kinds = {unit_kind(site) for site in sites} or {"head"}
  return " or ".join(sorted(kinds, reverse=True))


_ROUTER = {
  "weight": ("Mean weight of each {} during training", "mean weight"),
  "wins": ("Share of tokens that each {} wins during training", "share of tokens"),
  "entropy": ("Entropy of the router during training", "nats"),
}


def router_curves(
  records: Records, statistic: Literal["weight", "wins", "entropy"] = "weight"
) -> Figure:
  """A router statistic over the steps: a panel for each site, a line for each head.

  Args:
    records: the lines of metrics.jsonl, parsed; read are "router/<site>/weight_<head>",
      "router/<site>/wins_<head>" and "router/<site>/entropy" of the training records.
    statistic: "weight" (mean weight), "wins" (share of tokens on which a head has the largest
      weight) or "entropy" (nats; uniform weights have ln H).

  Returns:
    A figure, or one sentence that says that nothing was recorded.

  Raises:
    UserError: another statistic.
  """
  check_choice("statistic", statistic, _ROUTER)
  title, unit = _ROUTER[statistic]
  curves: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
  heads: dict[str, int] = {}
  for key in sorted({key for record in records for key in record}, key=style.site_order):
    match = re.fullmatch(r"router/(.+)/(entropy|(weight|wins)_(\d+))", key)
    if not match:
      continue
    site, name, kind, head = match.groups()
    heads[site] = max(heads.get(site, 0), int(head or -1) + 1)
    if statistic in (name, kind):
      curves.setdefault(site, {})[head or ""] = series(records, key, "train")
  curves = {s: c for s, c in curves.items() if any(np.isfinite(v).any() for _, v in c.values())}
  title = title.format(_units(curves))
  if not curves:
    return style.message(title, "No router statistics were recorded.")
  figure, panels = style.small_multiples(list(curves), 2.1)
  for site, axes in panels.items():
    for number, (head, (steps, values)) in enumerate(curves[site].items()):
      style.line(axes, steps, values, head, number)
    if heads[site]:
      uniform = math.log(heads[site]) if statistic == "entropy" else 1 / heads[site]
      style.reference(axes, uniform, f"ln {heads[site]}" if statistic == "entropy" else "")
    style.label(axes, style.site_title(site), "step", unit)
    style.step_axis(axes, max(int(steps[-1]) for steps, _ in curves[site].values()))
  style.outer_labels(panels.values())
  style.same_limits(panels.values(), bottom=0.0)
  for axes in panels.values():
    style.name_lines(axes)
  style.finish(figure, title if statistic == "entropy" else f"{title} (dashed grey: uniform)")
  return figure


def save(figure: Figure, folder: str | Path, name: str) -> list[Path]:
  """Writes `name`.png (150 dots an inch) and `name`.svg into `folder`; makes the folder.

  The same figure gives the same bytes: no date, no random identifiers.

  Returns:
    The two paths.
  """
  folder = Path(folder)
  paths = [folder / f"{name}.png", folder / f"{name}.svg"]
  picture = io.BytesIO()
  figure.savefig(picture, format="png", dpi=150, facecolor="white")
  durable.write(paths[0], [picture.getvalue()])
  durable.write(paths[1], [_svg(figure, name).encode()])
  return paths


def inline_svg(text: str) -> str:
  """A file that `save` wrote as an `<svg>` element for an HTML page, without a background.

  Colours become the page's variables --ink, --muted, --grid and --c0 to --c7, so that the picture
  follows a light or a dark page. Identifiers of several pictures differ by their names.

  Args:
    text: the whole file.
  """
  background = re.compile(r'(<g id="patch_1">.*?style="fill: )#ffffff', flags=re.DOTALL)
  text = background.sub(r"\1none", text, count=1)
  text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
  text = re.sub(r' xmlns(:\w+)?="[^"]*"| id="[A-Za-z0-9.]+_\d+"', "", text)
  names = {style.INK: "ink", style.MUTED: "muted", style.GRID: "grid"}
  names |= {colour: f"c{number}" for number, colour in enumerate(style.PALETTE)}
  for colour, variable in names.items():
    text = text.replace(colour, f"var(--{variable})")
  return text


def _svg(figure: Figure, name: str) -> str:
  buffer = io.StringIO()
  # Text stays text: searchable, small, and set in the page's own font.
  with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
    figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
  return buffer.getvalue()
