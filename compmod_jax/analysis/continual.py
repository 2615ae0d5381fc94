"""What a network keeps of classes that it learned one after the other, and what its gates do."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.sharding import fetch
from compmod_jax.tasks.base import Batch, Params
from compmod_jax.tasks.continual import Continual, measured
from compmod_jax.tasks.protocols import PROTOCOLS, ContinualModel, Outcome

_CHUNK = 500  # examples that are read at once
_SITES = ("hidden", "gate", "features")
_TITLES = {"hidden": "before the gate", "gate": "gate", "features": "behind the gate"}


class Activity(NamedTuple):
  """How many units of the last hidden layer are active.

  A unit is active for a picture if it is above a share of the picture's largest activation before
  the gate.

  Attributes:
    before: share of units, before the gate, mean over pictures.
    behind: the same behind the gate.
    used_before: share of units that are active for any picture.
    used_behind: the same behind the gate.
    gates: how often a gate has a value, in equal bins from 0 to 1, as shares.
  """

  before: float
  behind: float
  used_before: float
  used_behind: float
  gates: Float[np.ndarray, " bins"]


class Measured(NamedTuple):
  """What a network makes of a split's classes.

  Attributes:
    task: the task.
    outcomes: of every protocol.
    nearest: accuracy of the nearest neighbours by activations of a site.
    activity: of units; None for a network without gates.
    pictures: of different classes, [pictures, height, width].
    shown: their activations, site -> [pictures, features]; empty for a network without gates.
    classes: how many were learned.
  """

  task: Continual
  outcomes: Mapping[str, Outcome]
  nearest: Mapping[str, float]
  activity: Activity | None
  pictures: np.ndarray
  shown: Mapping[str, np.ndarray]
  classes: int


@dataclasses.dataclass(frozen=True)
class Forgetting:
  """What is left of classes that were learned one after the other, by their number, beside classes
  that were learned mixed; how many units are active before and behind the gates; what the gates
  alone tell of a class."""

  protocols: tuple[str, ...] = ()
  """Names of protocols; none: those of the run's configuration."""
  classes: int = 0
  """Classes that are learned; 0: as many as the configuration has."""
  neighbours: int = 1
  """Nearest learned examples whose classes vote."""
  active: float = 0.05
  """Share of a picture's largest activation above which a unit is active."""
  pictures: int = 3
  """Pictures whose activations are drawn."""

  def __post_init__(self):
    for name in self.protocols:
      errors.check_choice("--protocols", name, PROTOCOLS)
    check_least(self, "--", classes=0, neighbours=1, pictures=1)
    errors.check(self.classes != 1, "--classes is 1; there is nothing to forget. Give 2 or more.")
    errors.check(
      0 <= self.active < 1, f"--active is {self.active}; it is a share, at least 0 and below 1."
    )

  def measure(self, subject: Subject) -> Measured:
    """Protocols, activity and neighbours on the classes of the subject's split.

    Raises:
      UserError: the run is of another task.
    """
    task = subject.task
    if not isinstance(task, Continual):
      raise errors.UserError(
        "The model learns no classes one after the other; give the workdir of a run such as that of"
        " configs/continual_anml.py."
      )
    use, params = task.dataset.config.use, fetch(subject.params)
    outcomes = {
      name: measured(
        task,
        params,
        subject.split,
        name,
        classes=self.classes or None,
        status=subject.status,
      )
      for name in self.protocols or use.protocols
    }
    sequence = task.dataset.sequence(subject.split, self.classes or use.classes[-1])
    shown = _activations(task, params, sequence.examples.inputs[sequence.shown.ravel()])
    asked = _activations(task, params, sequence.examples.inputs[sequence.asked.ravel()])
    known, wanted = (
      np.repeat(np.arange(len(sequence)), part.shape[1])
      for part in (sequence.shown, sequence.asked)
    )
    nearest = {
      site: float(np.mean(_vote(shown[site], known, asked[site], self.neighbours) == wanted))
      for site in asked
    }
    first = np.arange(min(self.pictures, len(sequence))) * sequence.asked.shape[1]
    gated = "gate" in asked
    return Measured(
      task=task,
      outcomes=outcomes,
      nearest=nearest,
      activity=_activity(asked, self.active) if gated else None,
      pictures=sequence.examples.inputs[sequence.asked.ravel()[first]][..., 0],
      shown={site: asked[site][first] for site in _SITES} if gated else {},
      classes=len(sequence),
    )


def _sites(model: ContinualModel, params: Params, batch: Batch) -> dict[str, jax.Array]:
  """Activations of the last hidden layer, as far as there are, for `TaskModel.jit`."""
  intermediates = Intermediates(capture=None)
  model.forward(params, batch, intermediates=intermediates)
  return {site: x for site, x in intermediates.captured.items() if site in _SITES}


def _activations(task: Continual, params: Params, inputs: np.ndarray) -> dict[str, np.ndarray]:
  run, parts = task.model.jit(_sites), []
  for start in range(0, len(inputs), _CHUNK):
    chunk = inputs[start : start + _CHUNK]
    more = [(0, _CHUNK - len(chunk)), *[(0, 0)] * (chunk.ndim - 1)]
    found = run(params, {"inputs": np.pad(chunk, more)})
    parts.append({site: np.asarray(x)[: len(chunk)] for site, x in found.items()})
  joined = {site: np.concatenate([part[site] for part in parts]) for site in parts[0]}
  if "gate" not in joined:  # both are the same
    joined.pop("hidden")
  return joined


def _vote(known: np.ndarray, labels: np.ndarray, asked: np.ndarray, neighbours: int) -> np.ndarray:
  """The class that most of the nearest examples have, by Euclidean distance; ties: the nearest."""
  lengths = np.sum(np.square(known), axis=1)
  found = []
  for part in np.array_split(asked, max(1, len(asked) // _CHUNK)):
    distance = lengths[None] - 2 * part @ known.T
    order = np.argsort(distance, axis=1, kind="stable")[:, :neighbours]
    near = labels[order]
    votes = np.sum(near[:, :, None] == near[:, None, :], axis=2)
    found.append(near[np.arange(len(near)), votes.argmax(axis=1)])
  return np.concatenate(found)


def _activity(found: Mapping[str, np.ndarray], share: float) -> Activity:
  largest = share * found["hidden"].max(axis=1, keepdims=True)
  before, behind = found["hidden"] > largest, found["features"] > largest
  counts, _ = np.histogram(found["gate"], bins=20, range=(0, 1))
  return Activity(
    before=float(before.mean()),
    behind=float(behind.mean()),
    used_before=float(before.any(axis=0).mean()),
    used_behind=float(behind.any(axis=0).mean()),
    gates=counts / counts.sum(),
  )


# The page.


def make_page(settings: Forgetting, subject: Subject, found: Measured) -> Page:
  """Accuracies by the number of classes, activity of units, nearest neighbours."""
  sections = [_accuracy(found), *_kept(found), _neighbours(settings, found)]
  if found.activity:
    sections.append(_gates(settings, found, found.activity))
  first, end = next(iter(found.outcomes.items()))
  return Page(
    f"Classes one after the other, on {subject.split}",
    f"{found.task.describe()} {found.classes} classes.",
    _summary(found),
    sections,
    _figures(subject, found),
    tiles=[(f"of {end.stages[-1]} classes, in order", f"{100 * end.asked[-1]:.1f} %", first)],
  )


def _accuracy(found: Measured) -> Section:
  """Curves and tables of accuracy by the number of classes."""
  stages = sorted({stage for one in found.outcomes.values() for stage in one.stages})
  shown = found.task.dataset.config.use.shown
  numbers = [f"{n} classes" for n in stages]
  asked = [
    [name, *one.setting, *(_at(one, one.asked, stage) for stage in stages)]
    for name, one in found.outcomes.items()
  ]
  learned = [
    [name, *(_at(one, one.shown, stage) for stage in stages)]
    for name, one in found.outcomes.items()
  ]
  return Section(
    "Accuracy by the number of classes",
    [
      Picture(
        "accuracy",
        _curves(found.outcomes),
        f"After {shown} examples of each class, once each. Left: other examples of the same"
        " classes; right: the examples that were learned. The choice is among all classes.",
      ),
      Table(
        "accuracy",
        ("protocol", "rate", "row gain", "strength", *numbers),
        asked,
        "Accuracy on examples that were not learned, and the settings, which are those that are"
        " best on validation classes. "
        + " ".join(f"{name}: {PROTOCOLS[name].about}." for name in found.outcomes),
      ),
      Table(
        "learned",
        ("protocol", *numbers),
        learned,
        "Accuracy on the examples that were learned.",
      ),
    ],
  )


def _kept(found: Measured) -> list[Section]:
  """What later classes left of earlier ones, where protocols have stages that tell."""
  kept = [
    [name, measures.retention, measures.forgetting, measures.backward, measures.forward]
    for name, one in found.outcomes.items()
    if (measures := one.transfer())
  ]
  if not kept:
    return []
  matrices = Picture(
    "matrix",
    _matrices(found.outcomes),
    "Accuracy on the classes that each stage added (columns), after each stage (rows).",
  )
  table = Table(
    "kept",
    ("protocol", "retention", "forgetting", "backward transfer", "forward transfer"),
    kept,
    "A stage's classes are a task. Retention: what is left at the end of earlier tasks'"
    " accuracies, as a share of what they were when each was learned.",
  )
  return [Section("What was kept", [matrices, table])]


def _summary(found: Measured) -> list[str]:
  """A sentence for every protocol, and what else a reader should know first."""
  sentences = [
    f"{name}: {100 * one.asked[-1]:.1f} % of unseen examples of {one.stages[-1]} classes are right"
    f" ({PROTOCOLS[name].about}; step size {one.setting.rate:g}, row gain"
    f" {one.setting.row_gain:g})."
    for name, one in found.outcomes.items()
  ]
  rates = found.task.dataset.config.use.rates
  ends = min(rates), max(rates)
  if at_end := [name for name, one in found.outcomes.items() if one.setting.rate in ends]:
    sentences.append(
      f"The step size of {', '.join(at_end)} is the first or last of task.use.rates: another one"
      " may be better."
    )
  if found.activity:
    sentences.append(
      f"{100 * found.activity.before:.1f} % of units are active before the gate,"
      f" {100 * found.activity.behind:.1f} % behind it."
    )
  nearest = (f"{_title(found, site)} {100 * x:.1f} %" for site, x in found.nearest.items())
  return [*sentences, f"Nearest neighbours: {', '.join(nearest)}."]


def _figures(subject: Subject, found: Measured) -> dict[str, Any]:
  """The page's figures, as JSON can hold them."""
  protocols = {
    name: {
      "setting": one.setting._asdict(),
      "stages": list(one.stages),
      "accuracy": one.asked.tolist(),
      "train_accuracy": one.shown.tolist(),
      "matrix": None if one.matrix is None else one.matrix.tolist(),
      "transfer": measures._asdict() if (measures := one.transfer()) else None,
    }
    for name, one in found.outcomes.items()
  }
  activity = found.activity
  return {
    "split": subject.split,
    "classes": found.classes,
    "protocols": protocols,
    "nearest": dict(found.nearest),
    "activity": activity and {**activity._asdict(), "gates": activity.gates.tolist()},
  }


def _at(outcome: Outcome, values: np.ndarray, stage: int) -> float | None:
  """The value after a number of classes; None where it was not measured."""
  return float(values[outcome.stages.index(stage)]) if stage in outcome.stages else None


def _title(found: Measured, site: str) -> str:
  """What activations of a site are called."""
  return _TITLES[site] if found.activity else "last hidden layer"


def _curves(outcomes: Mapping[str, Outcome]) -> Figure:
  figure = style.canvas(style.WIDTH, 3.2)
  panels = figure.subplots(1, 2, sharey=True)
  for axes, field, title in zip(
    panels, ("asked", "shown"), ("Unseen examples", "Learned examples"), strict=True
  ):
    for number, (name, one) in enumerate(outcomes.items()):
      values = 100 * np.asarray(getattr(one, field))
      style.line(axes, np.asarray(one.stages), values, name, number)
    axes.set_ylim(0, 102)
    style.label(axes, title, "classes learned", "right, %")
    style.step_axis(axes, max(one.stages[-1] for one in outcomes.values()))
    style.name_lines(axes)
  style.finish(figure, "Accuracy by the number of classes that were learned")
  return figure


def _matrices(outcomes: Mapping[str, Outcome]) -> Figure:
  shown = {name: one for name, one in outcomes.items() if one.matrix is not None}
  columns = min(3, len(shown))
  rows = -(-len(shown) // columns)
  figure = style.canvas(min(style.WIDTH, 3.6 * columns), 0.6 + 2.9 * rows)
  for place, (name, one) in enumerate(shown.items()):
    axes = figure.add_subplot(rows, columns, place + 1)
    image = axes.imshow(100 * np.asarray(one.matrix), cmap="viridis", vmin=0, vmax=100)
    style.label(axes, name, "classes up to", "after classes")
    ticks = [f"{stage}" for stage in one.stages]
    axes.set_xticks(range(len(ticks)), ticks, rotation=60)
    axes.set_yticks(range(len(ticks)), ticks)
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
  style.finish(figure, "Accuracy on the classes of each stage, after each stage, %")
  return figure


def _neighbours(settings: Forgetting, found: Measured) -> Section:
  rows = [[_title(found, site), value] for site, value in found.nearest.items()]
  return Section(
    "Nearest neighbours",
    [
      Table(
        "neighbours",
        ("activations", "accuracy"),
        rows,
        f"Share of unseen examples whose {settings.neighbours} nearest learned"
        f" example{'s' if settings.neighbours > 1 else ''}, of {found.classes} classes, by"
        " Euclidean distance, have their class. Nothing is learned here: it is what the"
        " activations tell.",
      )
    ],
  )


def _gates(settings: Forgetting, found: Measured, activity: Activity) -> Section:
  rows = [
    ["before the gate", activity.before, activity.used_before],
    ["behind the gate", activity.behind, activity.used_behind],
  ]
  return Section(
    "Gates",
    [
      Picture("gates", _histogram(activity), "All gates of all unseen examples."),
      Table(
        "activity",
        ("units", "active", "active for any example"),
        rows,
        "Shares of the last hidden layer's units. A unit is active for a picture if it is above"
        f" {settings.active:g} of the picture's largest activation before the gate.",
      ),
      Picture(
        "activations",
        _pictures(found),
        "The last hidden layer's units, as a square, of pictures of different classes.",
      ),
    ],
  )


def _histogram(activity: Activity) -> Figure:
  figure = style.canvas(0.55 * style.WIDTH, 2.6)
  axes = figure.add_subplot(1, 1, 1)
  bins = len(activity.gates)
  axes.bar(
    (np.arange(bins) + 0.5) / bins, 100 * activity.gates, width=0.9 / bins, color=style.PALETTE[0]
  )
  axes.set_xlim(0, 1)
  style.label(axes, "", "value of the gate", "share of gates, %")
  style.finish(figure, "Values of the gates")
  return figure


def _pictures(found: Measured) -> Figure:
  names = ("picture", *(_TITLES[site] for site in _SITES))
  figure = style.canvas(style.WIDTH, 0.6 + 2.3 * len(found.pictures))
  panels = figure.subplots(len(found.pictures), len(names), squeeze=False)
  for row, (picture, axes_of_row) in enumerate(zip(found.pictures, panels, strict=True)):
    top = float(found.shown["hidden"][row].max())
    for column, (name, axes) in enumerate(zip(names, axes_of_row, strict=True)):
      if column == 0:
        axes.imshow(picture, cmap="gray")
      else:
        site = _SITES[column - 1]
        most = 1.0 if site == "gate" else top
        axes.imshow(_square(found.shown[site][row]), cmap="viridis", vmin=0, vmax=most)
      axes.set_xticks([])
      axes.set_yticks([])
      axes.set_frame_on(False)
      if row == 0:
        axes.set_title(name, fontsize=style.SMALL)
  style.finish(figure, "Units before the gate, gates, and units behind them")
  return figure


def _square(values: np.ndarray) -> np.ndarray:
  """Values row by row in the smallest square that holds them; NaN at its end."""
  side = int(np.ceil(np.sqrt(len(values))))
  return np.pad(values, (0, side * side - len(values)), constant_values=np.nan).reshape(side, side)
