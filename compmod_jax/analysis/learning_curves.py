"""Learning curves of several runs beside each other, epoch by epoch: training regimes.

The pictures of Kolios 2023, figures 5.2 to 5.4. A run is the parsed lines of its metrics.jsonl.
"""

import itertools
import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.plot import Records, series

SCORES = {"bleu": "BLEU", "exact_match": "exact match", "score": "score", "accuracy": "accuracy"}
# Phases that change more often than this are not separated by lines.
_MARKED = 3


def epoch_means(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
  """Ends of epochs, float64 [n], and the mean of a training quantity over the steps of each.

  Epochs of all phases count on, each of the part of the data that its phase trains on. One that was
  cut short, or that two phases share, ends where it was left.
  """
  steps, epochs = series(records, "epoch", "train")
  found, values = series(records, key, "train")
  weights = np.diff(steps, prepend=0)  # steps that a line is about
  known = np.isin(steps, found)
  steps, epochs, weights = steps[known], epochs[known], weights[known]
  phase = {r["step"]: r.get("phase") for r in records if r.get("kind") == "train" and "step" in r}
  names = [(math.ceil(e - 1e-3), phase[int(s)]) for e, s in zip(epochs, steps, strict=True)]
  starts = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
  groups = list(itertools.pairwise([*starts, len(names)]))
  means = [np.average(values[a:b], weights=weights[a:b]) for a, b in groups]
  return np.array([epochs[b - 1] for _, b in groups]), np.array(means, dtype=np.float64)


def learning_curves(runs: Mapping[str, Records], *, split: str = "valid") -> Figure:
  """Loss, perplexity and score by epoch: a column for each run, the same scale along a row.

  Training curves are means over each epoch, on the part of the data that it trained on, with
  dropout. A dotted line is where one phase ends and the next begins.

  Args:
    runs: name -> records.
    split: whose evaluations are drawn beside the training.

  Source: Kolios 2023, figures 5.2 and 5.3.
  """
  title = "Learning curves"
  rows = [("Loss", "nats per token", "loss"), ("Perplexity", "per token", "perplexity")]
  score = next((key for key in SCORES if any(_evaluated(r, key, split) for r in runs.values())), "")
  if score:
    rows.append(
      (f"{SCORES[score]} on {split}", "0 to 1" if score == "accuracy" else "0 to 100", "")
    )
  if not any(len(epoch_means(records, "loss")[0]) for records in runs.values()):
    return style.message(title, "No training records yet.")
  figure, panels = _columns(runs, len(rows))
  for number, (records, column) in enumerate(zip(runs.values(), panels, strict=True)):
    for axes, (name, unit, key) in zip(column, rows, strict=True):
      if key:
        epochs, means = epoch_means(records, "loss")
        style.line(axes, epochs, np.exp(means) if key == "perplexity" else means, "train", 0)
      steps, values = series(records, key or score, "eval", split)
      style.line(axes, _epochs_at(records, steps), values, split, 1)
      _mark_phases(axes, records, "epoch")
      style.label(axes, name, "epoch" if axes is column[-1] else "", "" if number else unit)
      axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
      if key == "perplexity":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
  if score:  # once all runs are drawn, as they share the axis
    panels[0][-1].set_ylim(bottom=0)
  _finish(figure, panels, runs, title)
  return figure


def gradient_curves(runs: Mapping[str, Records]) -> Figure:
  """Gradient norm and learning rate over the steps: a column for each run.

  The norm is that of the parameters that train, before clipping.

  Args:
    runs: name -> records.

  Source: Kolios 2023, figure 5.4.
  """
  title = "Gradient norm and learning rate"
  rows = [("Gradient norm", "gradient_norm"), ("Learning rate", "learning_rate")]
  if not any(len(series(records, rows[0][1], "train")[0]) for records in runs.values()):
    return style.message(title, "No training records yet.")
  figure, panels = _columns(runs, len(rows))
  for number, (records, column) in enumerate(zip(runs.values(), panels, strict=True)):
    for place, (axes, (name, key)) in enumerate(zip(column, rows, strict=True)):
      steps, values = series(records, key, "train")
      style.line(axes, steps, values, "", 1 - place)
      _mark_phases(axes, records, "step")
      style.label(axes, name, "step" if place else "", "" if number else name.lower())
      style.step_axis(axes, int(steps[-1]) if len(steps) else 1)
      axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
  for axes in panels[0]:
    axes.set_ylim(bottom=0)
  _finish(figure, panels, runs, title)
  return figure


def _columns(runs: Mapping[str, Records], rows: int) -> tuple[Figure, list[list[Axes]]]:
  """A figure and its panels, [run][row]; panels of a row share their vertical axis."""
  columns = len(runs)
  width = style.WIDTH if columns > 2 else 1.0 + columns * style.WIDTH / 2.6
  figure = style.canvas(min(width, style.WIDTH), 0.7 + 2.1 * rows)
  grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
  return figure, [list(grid[:, column]) for column in range(columns)]


def _finish(figure: Figure, panels: list[list[Axes]], runs: Mapping[str, Records], title: str):
  for name, column in zip(runs, panels, strict=True):
    top = column[0]
    if len(runs) > 1:
      top.set_title(
        f"{name}: {top.get_title(loc='left').lower()}",
        loc="left", fontsize=style.BODY + 1, color=style.INK, parse_math=False,
      )  # fmt: skip
    for axes in column:
      style.name_lines(axes)
  style.finish(figure, title)


def _evaluated(records: Records, key: str, split: str) -> bool:
  return bool(np.isfinite(series(records, key, "eval", split)[1]).any())


def _epochs_at(records: Records, steps: np.ndarray) -> np.ndarray:
  """Epochs done after these steps, read off the training lines."""
  known, epochs = series(records, "epoch", "train")
  return np.interp(steps, np.append(0, known), np.append(0.0, epochs))


def _mark_phases(axes: Axes, records: Records, unit: str) -> None:
  """Dotted lines where a phase follows another, unless there are many."""
  ends, last = [], None
  for record in records:
    if record.get("kind") == "train" and "phase" in record:
      if last is not None and record["phase"] != last["phase"]:
        ends.append(last[unit])
      last = record
  for end in ends if len(ends) <= _MARKED else ():
    axes.axvline(end, color=style.MUTED, linewidth=1, linestyle="dotted", zorder=1.5)
