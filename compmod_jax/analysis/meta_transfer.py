"""How fast either direction adapts to a changed cause, and what training made of it."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compmod_jax.analysis.report import plot, style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.core.sharding import fetch
from compmod_jax.metrics.significance import Mean, mean_interval
from compmod_jax.tasks.base import Scoring
from compmod_jax.tasks.meta_transfer import (
  DirectionScores,
  MetaTransfer,
  RotatedPairs,
  log_likelihoods,
)

_NAMES = ("A to B", "B to A")


class Adapted(NamedTuple):
  """What a split's episodes show.

  Attributes:
    task: the task.
    curves: mean log probability of a sample before each step, [2, episodes, steps], in nats.
    scores: those of the whole split.
  """

  task: MetaTransfer
  curves: Float[np.ndarray, "2 episodes steps"]
  scores: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Direction:
  """How fast either direction adapts to a changed cause: log likelihoods by the number of samples
  seen, and belief and angle over training; for runs of the meta-transfer objective."""

  def measure(self, subject: Subject) -> Adapted:
    """Both directions on the subject's episodes.

    Raises:
      UserError: the model compares no directions.
    """
    task = subject.task
    if not isinstance(task, MetaTransfer):
      raise UserError(
        "The model compares no causal directions; give the workdir of a run such as that of"
        " configs/meta_transfer.py."
      )
    run, parts = task.model.jit(log_likelihoods), []
    for batch in subject.batches:
      found = np.asarray(fetch(run(subject.params, subject.place(batch))), np.float64)
      parts.append(found[:, : len(batch["index"])][:, batch["index"] >= 0].mean(axis=-1))
    scoring = Scoring(task, subject.params, subject.split, subject.sharing)
    return Adapted(task, np.concatenate(parts, axis=1), dict(DirectionScores()(scoring)))


def make_page(settings: Direction, subject: Subject, found: Adapted) -> Page:
  """Adaptation by the number of samples, and training."""
  task, curves, scores = found
  config = task.dataset.config
  rows = _rows(curves, config.samples)
  ratio = mean_interval((config.samples * (curves[0] - curves[1]).sum(axis=-1)).tolist())
  columns = ("samples seen", *(f"{name}{sign}" for name in _NAMES for sign in ("", " ±")))
  columns = (*columns, "difference", "difference ±")
  sections = [
    Section(
      "Adaptation",
      [
        Picture(
          "adaptation",
          _adaptation(rows),
          "Log likelihood of new samples of an episode by the number of samples of it that a model"
          " has adapted to; bands: 95 % intervals over episodes.",
        ),
        Table("adaptation", columns, rows, "Nats a sample, with half their 95 % intervals."),
      ],
    )
  ]
  if training := list(_training(subject.records, task)):
    sections.append(Section("Training", training))
  records = {key: _series(subject.records, key) for key in _KEYS}
  return Page(
    title=f"Causal direction, on {subject.split}",
    description=f"{task.describe()} {curves.shape[1]:,} episodes of {config.steps} steps on"
    f" {config.samples} samples each.",
    summary=_summary(task, ratio, scores),
    sections=sections,
    data={
      "split": subject.split,
      "episodes": curves.shape[1],
      "scores": dict(scores),
      "log_ratio": {"mean": ratio.mean, "half": ratio.half},
      "adaptation": [dict(zip(columns, row, strict=True)) for row in rows],
      "training": {key: [list(map(float, one)) for one in both] for key, both in records.items()},
    },
    tiles=[("belief that A causes B", f"{scores['transfer/belief']:.4f}", "")],
  )


def _rows(curves: np.ndarray, samples: int) -> list[list[float]]:
  """For every step: samples seen, means and half intervals of both directions and of the first
  minus the second."""
  rows = []
  for step in range(curves.shape[-1]):
    forth, back = curves[..., step]
    means = [mean_interval(one.tolist()) for one in (forth, back, forth - back)]
    rows.append([step * samples, *(x for one in means for x in (one.mean, one.half))])
  return rows


def _summary(task: MetaTransfer, ratio: Mean, scores: Mapping[str, float]) -> list[str]:
  data = task.dataset.config.data
  lines = [
    f"The belief that A causes B is {scores['transfer/belief']:.4f} (gamma"
    f" {scores['transfer/gamma']:+.2f}).",
    f"ln L(A to B) - ln L(B to A) of an episode is {ratio.mean:+.2f} ± {ratio.half:.2f} nats.",
  ]
  if isinstance(data, RotatedPairs) and "transfer/angle" in scores:
    lines.append(
      f"The encoder turns by {scores['transfer/angle']:.2f} degrees,"
      f" {abs(scores['transfer/angle_error']):.2f} from the nearest valid solution."
    )
  else:
    is_right = "is" if scores["transfer/right"] else "is not"
    lines.append(f"The direction that is believed in {is_right} that of the data.")
  return lines


def _adaptation(rows: Sequence[Sequence[float]]) -> Figure:
  columns = np.asarray(rows).T
  seen = columns[0]
  figure = style.canvas(style.WIDTH, 2.8)
  across = "samples that a model has adapted to"
  axes = figure.add_subplot(1, 2, 1)
  for place, name in enumerate(_NAMES):
    _band(axes, seen, columns[2 * place + 1], columns[2 * place + 2], name, place)
  style.label(axes, "Each direction", across, "nats a sample")
  style.name_lines(axes)
  axes = figure.add_subplot(1, 2, 2)
  _band(axes, seen, columns[5], columns[6], "", 2)
  style.reference(axes, 0.0)
  style.label(axes, "A to B minus B to A", across, "nats a sample")
  style.finish(figure, "Log likelihood of new samples under adaptation to a changed cause")
  return figure


def _band(
  axes: Axes, across: np.ndarray, mean: np.ndarray, half: np.ndarray, name: str, number: int
) -> None:
  """A line with its interval."""
  colour = style.PALETTE[number]
  axes.fill_between(across, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
  style.line(axes, across, mean, name, number)


_KEYS = ("direction/belief", "direction/gamma", "direction/angle")


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
  return plot.series(records, key, "train")


def _training(records: Sequence[Mapping[str, Any]], task: MetaTransfer) -> Iterator[Picture]:
  steps, belief = _series(records, "direction/belief")
  if not len(steps):
    return
  turns, angle = _series(records, "direction/angle")
  figure = style.canvas(style.WIDTH, 2.6)
  axes = figure.add_subplot(1, 1 + bool(len(turns)), 1)
  style.line(axes, steps, belief, "", 0)
  style.reference(axes, 0.5)
  axes.set_ylim(-0.02, 1.02)
  style.label(axes, "Belief that A causes B", "step", "sigmoid of gamma")
  caption = "Means over the log's lines."
  data = task.dataset.config.data
  if len(turns) and isinstance(data, RotatedPairs):
    axes = figure.add_subplot(1, 2, 2)
    style.line(axes, turns, angle, "", 0)
    # The valid angles next to the curve; half a turn more is valid again.
    right = data.degrees() + 90 * np.arange(-8, 9)
    near = (right > angle.min() - 50) & (right < angle.max() + 50)
    for one in right[near]:
      style.reference(axes, float(one))
    style.label(axes, "Angle of the encoder", "step", "degrees")
    caption += " Dashed: valid angles, by turns with the direction of the data and the other one."
  style.finish(figure, "Training")
  yield Picture("training", figure, caption)
