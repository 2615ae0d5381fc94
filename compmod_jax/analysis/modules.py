"""Which modules of a recurrent cell are active, when, and what they read from each other."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.routing import added
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.sharding import fetch
from compmod_jax.tasks.base import Batch, Task

_SITES = ("active", "null", "communication")
_READ = ("zero", "other")  # a blank, or a black pixel; and all else


@dataclasses.dataclass(frozen=True)
class Modules:
  """Which modules of a cell of recurrent independent mechanisms are active at every step, how much
  they attend to the row of zeros, and from which modules they read."""

  cell: str = "cell"
  """The cell: what stands in front of /active in the names of its intermediates."""
  shown: int = 4
  """Sequences that are drawn one by one."""

  def __post_init__(self):
    errors.check(self.shown >= 0, f"--shown is {self.shown}; it must not be negative.")

  def measure(self, subject: Subject) -> "Measured":
    """Means over the chosen sequences, and the first of them one by one.

    Raises:
      UserError: the model has no such cell.
    """
    sites = {name: f"{self.cell}/{name}" for name in _SITES}
    run = jax.jit(functools.partial(_read, subject.task, sites))
    parts, shown = [], list[dict[str, np.ndarray]]()
    for number, batch in enumerate(subject.batches):
      sums, raw = fetch(run(subject.params, subject.place(batch)))
      parts.append({str(np.shape(batch["tokens"])[1]): sums})
      for row in np.flatnonzero(np.asarray(batch["index"]) >= 0)[: self.shown - len(shown)]:
        read = np.asarray(batch["tokens"])[row]
        shown.append({"read": read, **{name: value[row] for name, value in raw.items()}})
      subject.status("batches", number + 1, len(subject.batches))
    totals = added(parts)
    time = max(totals, key=int)
    sums = totals[time]
    count = np.maximum(sums["rows"], 1)
    return Measured(
      active=sums["active"] / count,
      null=sums["null"] / count,
      by_read=sums["by_read"] / np.maximum(sums["steps_read"], 1)[:, None],
      null_active=sums["null_active"] / np.maximum(sums["steps_active"], 1),
      communication=sums["communication"] / np.maximum(sums["steps_active"], 1)[:, None],
      sequences=int(sums["rows"]),
      shown=shown,
    )


class Measured(NamedTuple):
  """What modules do in the sequences of a split.

  Attributes:
    active: share of sequences in which each is active, [time, modules].
    null: mean weight on the row of zeros, [time, modules].
    by_read: share of steps at which each is active, where zero is read and elsewhere, [2, modules].
    null_active: mean weight on the row of zeros of active modules, [modules].
    communication: mean weight with which each, while active, reads from each, [modules, modules].
    sequences: how many.
    shown: `read` [time], `active` and `null` [time, modules] of single sequences.
  """

  active: np.ndarray
  null: np.ndarray
  by_read: np.ndarray
  null_active: np.ndarray
  communication: np.ndarray
  sequences: int
  shown: list[dict[str, np.ndarray]]


def _read(
  task: Task, sites: Mapping[str, str], params: Any, batch: Batch
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """Sums over a batch, and what they are sums of."""
  intermediates = Intermediates(capture=frozenset(sites.values()))
  task.model.forward(params, batch, intermediates=intermediates)
  intermediates.check_all_met()
  found = intermediates.captured
  active, null = found[sites["active"]], found[sites["null"]]
  communication = jnp.mean(found[sites["communication"]], axis=3)  # over heads
  real = task.model.valid_mask(sites["active"], batch)[..., None].astype(jnp.float32)
  zero = (jnp.asarray(batch["tokens"]) == 0)[..., None]
  where = [real * zero, real * ~zero]
  sums = {
    "active": jnp.sum(real * active, axis=0),
    "null": jnp.sum(real * null, axis=0),
    "by_read": jnp.stack([jnp.sum(one * active, axis=(0, 1)) for one in where]),
    "steps_read": jnp.stack([jnp.sum(one) for one in where]),
    "steps_active": jnp.sum(real * active, axis=(0, 1)),
    "null_active": jnp.sum(real * active * null, axis=(0, 1)),
    "communication": jnp.sum((real * active)[..., None] * communication, axis=(0, 1)),
    "rows": jnp.sum(real[:, 0]),
  }
  return sums, {"active": active, "null": null}


def make_page(settings: Modules, subject: Subject, found: Measured) -> Page:
  """What the modules do."""
  share = found.active.mean(axis=0)
  means = Picture(
    "over_time",
    _over_time(found.active, found.null),
    "Above: share of sequences in which a module is active at a step. Below: its weight on the row"
    " of zeros; the modules with the least are active.",
  )
  reading = Picture(
    "communication",
    _matrix(found.communication),
    "Rows: an active module; columns: the module it reads from. Mean over heads; rows sum to 1.",
  )
  pictures = [
    Picture(
      f"sequence_{number}",
      _over_time(one["active"], one["null"], one["read"]),
      "A single sequence: what is read, active modules, and their weight on the row of zeros.",
    )
    for number, one in enumerate(found.shown)
  ]
  table = Table(
    "modules",
    ("module", "active, %", *(f"active where {name} is read, %" for name in _READ), "null, active"),
    list(_rows(found)),
    "Null: weight on the row of zeros, while the module is active.",
  )
  sections = [Section("Modules over time", [means, table])]
  sections += [Section("Single sequences", pictures)] if pictures else []
  sections.append(Section("Who reads from whom", [reading]))
  least, most = int(np.argmin(share)), int(np.argmax(share))
  changes = np.abs(found.by_read[0] - found.by_read[1])
  sharpest = int(np.argmax(changes))
  return Page(
    "Modules",
    f"{subject.task.describe()} {found.sequences:,} sequences of {len(found.active)} steps.",
    [
      f"Module {most} is active most often ({100 * share[most]:.0f} % of steps), module {least}"
      f" least ({100 * share[least]:.0f} %).",
      f"Module {sharpest} depends most on what is read: active at"
      f" {100 * found.by_read[0, sharpest]:.0f} % of steps that read zero (a blank, a black pixel)"
      f" and {100 * found.by_read[1, sharpest]:.0f} % of others.",
    ],
    sections,
    {
      "active": found.active.tolist(),
      "null": found.null.tolist(),
      "by_read": dict(zip(_READ, found.by_read.tolist(), strict=True)),
      "communication": found.communication.tolist(),
    },
    tiles=[
      ("sequences", f"{found.sequences:,}", f"of {len(found.active)} steps"),
      ("modules", str(len(share)), f"{found.active.sum(axis=1).mean():.1f} active"),
    ],
  )


def _rows(found: Measured) -> Iterator[tuple[Any, ...]]:
  share = 100 * found.active.mean(axis=0)
  for module, value in enumerate(share.tolist()):
    by_read = (100 * found.by_read[:, module]).tolist()
    yield (module, value, *by_read, float(found.null_active[module]))


def _over_time(active: np.ndarray, null: np.ndarray, read: np.ndarray | None = None) -> Figure:
  """Modules down, time across: which are active, and their weights on the row of zeros."""
  strips = [] if read is None else [("what is read", read[:, None].astype(float), None)]
  strips += [("active", active, (0.0, 1.0)), ("weight on the row of zeros", null, (0.0, 1.0))]
  heights = [1 if values.shape[1] == 1 else 3 for _, values, _ in strips]
  figure = style.canvas(style.WIDTH, 0.6 + 0.62 * sum(heights))
  grid = figure.add_gridspec(len(strips), 1, height_ratios=heights)
  first: Axes | None = None
  for number, (title, values, limits) in enumerate(strips):
    axes = first = figure.add_subplot(grid[number], sharex=first)
    low, high = limits or (float(values.min()), float(values.max()))
    image = axes.imshow(
      values.T, aspect="auto", interpolation="nearest", cmap="viridis", vmin=low, vmax=high
    )
    last = number + 1 == len(strips)
    style.label(axes, title, "step" if last else "", "module" if values.shape[1] > 1 else "")
    axes.set_yticks(range(values.shape[1]) if values.shape[1] > 1 else [])
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, pad=0.01)
  return figure


def _matrix(weights: np.ndarray) -> Figure:
  figure = style.canvas(0.5 * style.WIDTH, 3.6)
  axes = figure.add_subplot(1, 1, 1)
  image = axes.imshow(weights, cmap="viridis", vmin=0, vmax=max(float(weights.max()), 1e-6))
  for (row, column), value in np.ndenumerate(weights):
    shade = "black" if value > 0.6 * weights.max() else "white"
    axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=shade, size=style.SMALL)
  style.label(axes, "", "reads from", "module")
  axes.set_xticks(range(len(weights)))
  axes.set_yticks(range(len(weights)))
  axes.grid(visible=False)
  figure.colorbar(image, ax=axes, pad=0.02)
  return figure
