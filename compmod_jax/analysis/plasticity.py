"""What plastic connections remember, when it changes, and what a model loses without them.

Of recurrent cells with Hebbian traces, and of decoders with fast weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.routing import added
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import Edit, Intermediates
from compmod_jax.core.sharding import fetch
from compmod_jax.core.types import Params
from compmod_jax.data.sequences import AssociationData
from compmod_jax.tasks.base import Batch, Task, lower_is_better
from compmod_jax.tasks.causal_lm import CausalModel

_BOUND = 1 - 1e-6  # traces are clipped to -1 and 1; fast weights are not


@dataclasses.dataclass(frozen=True)
class Plasticity:
  """Traces of plastic connections (or fast weights) step by step, the modulation that changes them,
  how many are at their bounds, and what the model loses where they stay at zero."""

  cell: str = "cell"
  """The cell: what stands in front of /recurrent in the names of its intermediates."""
  shown: int = 2
  """Sequences that are drawn one by one."""
  connections: int = 60
  """Connections that are drawn, those whose traces vary most."""

  def __post_init__(self):
    check_least(self, "--", shown=0, connections=1)

  def measure(self, subject: Subject) -> "Measured":
    """Means over the chosen sequences, the first of them one by one, and scores of the whole split.

    Raises:
      UserError: the model has no plastic connections.
    """
    sources = _sources(subject, self.cell)
    run = jax.jit(functools.partial(_read, subject.task, sources))
    parts, shown = list[dict[str, Any]](), list[Shown]()
    for number, batch in enumerate(subject.batches):
      sums, raw = fetch(run(subject.params, subject.place(batch)))
      time = next(iter(raw.values()))["drive"].shape[1]
      parts.append({f"{time}/{name}": values for name, values in sums.items()})
      for row in np.flatnonzero(np.asarray(batch["index"]) >= 0)[: self.shown - len(shown)]:
        read = np.asarray(batch["tokens"])[row, :time]
        layers = {name: self._layer(values, row) for name, values in raw.items()}
        shown.append(Shown(read, layers))
      subject.status("batches", number + 1, len(subject.batches))
    totals = added(parts)
    longest = max(int(name.partition("/")[0]) for name in totals)
    means = {name: _means(totals[f"{longest}/{name}"]) for name in sources}
    return Measured(means, shown, _scores(subject, sources, means))

  def _layer(self, raw: Mapping[str, np.ndarray], row: int) -> "Layer":
    """The connections of one sequence whose traces vary most, in the order of their changes."""
    traces = raw["traces"][row].reshape(len(raw["drive"][row]), -1)
    chosen = np.sort(np.argsort(-traces.std(axis=0), kind="stable")[: self.connections])
    changes = np.abs(np.diff(traces[:, chosen], axis=0, prepend=0))
    order = np.argsort(changes.argmax(axis=0), kind="stable")
    return Layer(traces[:, chosen][:, order], raw["drive"][row])


class Source(NamedTuple):
  """Where a model has plastic connections.

  Attributes:
    traces: site of the traces, or of what is written into fast weights.
    drive: site of what changes them: M(t) of cells, the plasticity of fast weights; none where the
      rate is always the same.
    keys: site of what it is written for, of fast weights alone.
    off: site that is zero where nothing is plastic.
  """

  traces: str
  drive: str | None
  keys: str | None
  off: str


class Layer(NamedTuple):
  """Plastic connections of one sequence: some traces [time, connections], and M [time]."""

  traces: np.ndarray
  drive: np.ndarray


class Shown(NamedTuple):
  """One sequence: what is read [time], and the connections by the names of their sources."""

  read: np.ndarray
  layers: dict[str, Layer]


class Means(NamedTuple):
  """Means over sequences at every step [time], and of every token that is read [vocab].

  Attributes:
    size: absolute value of a trace.
    change: absolute change of a trace at the step.
    clipped: share of traces at their bounds.
    drive: modulation.
    spread: standard deviation of the modulation.
    count: how often every token is read.
    by_token: modulation where it is read.
    change_by_token: absolute change of a trace where it is read.
    sequences: how many.
  """

  size: np.ndarray
  change: np.ndarray
  clipped: np.ndarray
  drive: np.ndarray
  spread: np.ndarray
  count: np.ndarray
  by_token: np.ndarray
  change_by_token: np.ndarray
  sequences: int


class Measured(NamedTuple):
  """What plastic connections do in a split.

  Attributes:
    means: of every source.
    shown: single sequences.
    scores: scores of the split by how the model ran: as trained, with traces of zero, and with the
      mean of the modulation at every step, where there is one.
  """

  means: dict[str, Means]
  shown: list[Shown]
  scores: dict[str, dict[str, float]]


def _sources(subject: Subject, cell: str) -> dict[str, Source]:
  """The plastic connections of a model, by name.

  Raises:
    UserError: there are none.
  """
  model, shapes = subject.task.model, subject.shapes
  name = f"{cell}/recurrent"
  if f"{name}/hebbian" in shapes:
    drive, site = f"{name}/modulation", f"{name}/hebbian"
    return {name: Source(site, drive if drive in shapes else None, None, site)}
  # Positions of sites with auxiliary tokens in front are not those of what is read.
  found = {
    site.removesuffix("/written"): Source(
      site, site.replace("written", "plasticity"), site.replace("written", "key"), site
    )
    for site in shapes
    if site.endswith("/fast/written") and not model.config.auxiliary_at(site)
  }
  errors.check(
    bool(found) and isinstance(model, CausalModel),
    "The model has no plastic connections, or reads no running text; give the workdir of a run such"
    " as those of configs/cue_association.py and configs/plastic_lm.py.",
  )
  return found


def _read(
  task: Task, sources: Mapping[str, Source], params: Params, batch: Batch
) -> tuple[dict[str, Any], dict[str, dict[str, jax.Array]]]:
  """Sums over a batch, and what they are sums of."""
  wanted = (site for source in sources.values() for site in source[:3] if site is not None)
  intermediates = Intermediates(capture=frozenset(wanted))
  task.model.forward(params, batch, intermediates=intermediates)
  intermediates.check_all_met()
  found, sums, raw = intermediates.captured, {}, {}
  for name, source in sources.items():
    traces = found[source.traces]
    if source.keys is not None:
      begins = _begins(task, jnp.asarray(batch["tokens"])[:, : traces.shape[1]])
      traces = _fast_weights(_inside(params, name), begins, found[source.keys], traces)
    time = traces.shape[1]
    traces = traces.reshape(len(traces), time, -1)
    drive = jnp.ones(traces.shape[:2])
    if source.drive is not None:
      drive = jnp.mean(found[source.drive].reshape(len(traces), time, -1), axis=-1)
    real = task.model.valid_mask(source.traces, batch).astype(jnp.float32)
    change = jnp.abs(jnp.diff(traces, axis=1, prepend=0)).mean(axis=-1)
    clipped = source.keys is None and jnp.abs(traces) >= _BOUND
    read = jnp.asarray(batch["tokens"])[:, :time].astype(jnp.int32)
    sums[name] = {
      "size": jnp.sum(real * jnp.abs(traces).mean(axis=-1), axis=0),
      "change": jnp.sum(real * change, axis=0),
      "clipped": jnp.sum(real * jnp.mean(jnp.broadcast_to(clipped, traces.shape), axis=-1), axis=0),
      "drive": jnp.sum(real * drive, axis=0),
      "square": jnp.sum(real * drive**2, axis=0),
      "count": jnp.sum(real, axis=0),
      "tokens": _by_token(task, read, real),
      "drive_by_token": _by_token(task, read, real * drive),
      "change_by_token": _by_token(task, read, real * change),
    }
    raw[name] = {"traces": traces, "drive": drive}
  return sums, raw


def _by_token(task: Task, read: jax.Array, values: jax.Array) -> jax.Array:
  """Sums of values over all steps at which every token is read."""
  return jnp.zeros(task.model.module.vocab).at[read].add(values)


def _inside(params: Params, name: str) -> Any:
  """The parameters of a module."""
  for part in name.split("/"):
    params = params[part]
  return params


def _begins(task: Task[Any, Any, Any], read: jax.Array) -> jax.Array:
  """Where a text begins that knows none before it, bool [batch, time]."""
  segments = task.model.text(read).segments
  if segments is None:
    return jnp.zeros(read.shape, bool)
  return jnp.diff(segments, axis=1, prepend=segments[:, :1]) > 0


def _fast_weights(params: Any, begins: jax.Array, key: jax.Array, written: jax.Array) -> jax.Array:
  """Fast weights after every position, [batch, time, heads, head_dim, head_dim]."""
  decay = nn.sigmoid(params["decay"])[None, :, None, None]

  def step(held: jax.Array, new: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    begins, key, written = new
    held = jnp.where(begins[:, None, None, None], 0, held * decay)
    held = held + key[..., None] * written[..., None, :]
    return held, held

  zeros = jnp.zeros((*key[:, 0].shape, key.shape[-1]))
  columns = tuple(column.swapaxes(0, 1) for column in (begins, key, written))
  return lax.scan(step, zeros, columns)[1].swapaxes(0, 1)


def _means(sums: Mapping[str, np.ndarray]) -> Means:
  count, tokens = np.maximum(sums["count"], 1), np.maximum(sums["tokens"], 1)
  drive = sums["drive"] / count
  return Means(
    size=sums["size"] / count,
    change=sums["change"] / count,
    clipped=sums["clipped"] / count,
    drive=drive,
    spread=np.sqrt(np.maximum(sums["square"] / count - drive**2, 0)),
    count=sums["tokens"],
    by_token=sums["drive_by_token"] / tokens,
    change_by_token=sums["change_by_token"] / tokens,
    sequences=int(sums["count"].max()),
  )


def _constant(value: float) -> Edit:
  return lambda activation: jnp.full_like(activation, value)


def _scores(
  subject: Subject, sources: Mapping[str, Source], means: Mapping[str, Means]
) -> dict[str, dict[str, float]]:
  """Scores of the whole split: as trained, and with changes of all plastic connections."""
  changes: dict[str, dict[str, Edit]] = {
    "as trained": {},
    "traces zero": {source.off: jnp.zeros_like for source in sources.values()},
  }
  mean = {
    source.drive: _constant(float(means[name].drive.mean()))
    for name, source in sources.items()
    if source.drive is not None
  }
  changes |= {"modulation constant": mean} if mean else {}
  scores = {}
  for name, edits in changes.items():
    task = subject.task.edited(edits)
    found = task.evaluate(
      subject.params, subject.split, sharing=subject.sharing, decode=False, status=subject.status
    )
    scores[name] = {
      score: float(value) for score, value in found.values.items() if isinstance(value, float)
    }
  return scores


def make_page(settings: Plasticity, subject: Subject, found: Measured) -> Page:
  """What plastic connections do."""
  words = _words(subject.task)
  metric = subject.task.metric
  whole, without = (found.scores[name][metric] for name in ("as trained", "traces zero"))
  last = {name: 100 * float(means.clipped[-1]) for name, means in found.means.items()}
  modulated = "modulation constant" in found.scores
  bounded = any(name.endswith("/recurrent") for name in found.means)
  kept = "traces" if bounded else "fast weights"
  over_time = [
    Picture(
      f"over_time_{number}",
      _over_time(name, means, bounded=bounded, modulated=modulated),
      f"{name}: means over {means.sequences:,} sequences; of the modulation the standard deviation,"
      " too.",
    )
    for number, (name, means) in enumerate(found.means.items())
  ]
  sequences = [
    Picture(
      f"sequence_{number}_{place}",
      _sequence(name, kept, layer, [words(token) for token in one.read], modulated=modulated),
      f"{name}: the {layer.traces.shape[1]} {kept} that vary most, in the order of their largest"
      " change, while a sequence is read.",
    )
    for number, one in enumerate(found.shown)
    for place, (name, layer) in enumerate(one.layers.items())
  ]
  tables = [
    Table(
      f"tokens_{number}",
      ("token", "times read", "modulation", "change of a trace"),
      list(_tokens(means, words)),
      f"{name}: means where a token is read, of the 40 tokens that are read most.",
      order="change of a trace",
    )
    for number, (name, means) in enumerate(found.means.items())
  ]
  names = tuple(found.scores)
  scores = Table(
    "scores",
    ("score", *names),
    [(score, *(found.scores[name][score] for name in names)) for score in found.scores[names[0]]],
    "The whole split. Traces zero: nothing that the model reads changes its connections. Modulation"
    " constant: its mean at every step.",
  )
  summary = [
    f"{metric} is {whole:.4g} as trained, and {without:.4g} where all traces stay at zero"
    f" ({'lower' if lower_is_better(metric) else 'higher'} is better)."
  ]
  if bounded:
    shares = ", ".join(f"{share:.1f} % ({name})" for name, share in last.items())
    summary.append(f"Traces at their bounds after the last step: {shares}.")
  if modulated:
    summary += [_strongest(name, means, words) for name, means in found.means.items()]
  sections = [
    Section("Without plasticity", [scores]),
    Section("Over time", over_time),
    *([Section("Single sequences", sequences)] if sequences else []),
    Section("By what is read", tables),
  ]
  first = next(iter(found.means.values()))
  return Page(
    "Plastic connections",
    f"{subject.task.describe()} {first.sequences:,} sequences of {len(first.size)} steps.",
    summary,
    sections,
    {
      "scores": found.scores,
      "means": {
        name: {
          "size": means.size.tolist(),
          "change": means.change.tolist(),
          "clipped": means.clipped.tolist(),
          "drive": means.drive.tolist(),
        }
        for name, means in found.means.items()
      },
    },
    tiles=[
      (metric, f"{whole:.4g}", "as trained"),
      (metric, f"{without:.4g}", "traces zero"),
    ],
  )


def _words(task: Task) -> Callable[[int], str]:
  """From the number of what is read to a word for it."""
  data = getattr(task.dataset.config, "data", None)
  tokenizer = getattr(task.dataset, "tokenizer", None)
  if tokenizer is not None:
    return lambda number: tokenizer.text_of(int(number)).strip()
  if isinstance(data, AssociationData):
    cues = data.cues

    def name(number: int) -> str:
      if number == 0:
        return "?"
      return f"cue {number}" if number <= cues else f"answer {number - cues}"

    return name
  return lambda number: f"{number:g}"


def _tokens(means: Means, words: Callable[[int], str]) -> Iterator[tuple[Any, ...]]:
  for token in np.argsort(-means.count, kind="stable")[:40].tolist():
    if means.count[token]:
      values = float(means.by_token[token]), float(means.change_by_token[token])
      yield (words(token), int(means.count[token]), *values)


def _strongest(name: str, means: Means, words: Callable[[int], str]) -> str:
  """Where the modulation is strongest, of the tokens that are read in one step of a hundred."""
  enough = min(0.01 * means.count.sum(), means.count.max())
  often = np.flatnonzero(means.count >= enough)
  size = np.abs(means.by_token[often])
  most, least = (int(often[place]) for place in (np.argmax(size), np.argmin(size)))
  return (
    f"Modulation ({name}) is strongest where {words(most)!r} is read (mean"
    f" {means.by_token[most]:.3f}) and weakest at {words(least)!r} ({means.by_token[least]:.3f});"
    " of tokens read at 1 % of steps or more."
  )


def _over_time(name: str, means: Means, *, bounded: bool, modulated: bool) -> Figure:
  """Curves over the steps: traces, their changes, how many are at bounds, modulation."""
  curves = [("absolute value of a trace", means.size), ("its change at a step", means.change)]
  curves += [("share of traces at their bounds", means.clipped)] if bounded else []
  curves += [("modulation", means.drive)] if modulated else []
  figure = style.canvas(style.WIDTH, 0.5 + 1.25 * len(curves))
  steps, first = np.arange(len(means.size)), None
  for number, (title, values) in enumerate(curves):
    axes: Axes = figure.add_subplot(len(curves), 1, number + 1, sharex=first)
    first = first or axes
    style.line(axes, steps, values, title)
    if title == "modulation":
      color = style.PALETTE[0]
      low, high = values - means.spread, values + means.spread
      axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    else:
      axes.set_ylim(0, max(1.05 * float(values.max()), 0.01))
    last = number + 1 == len(curves)
    style.label(axes, title, "step" if last else "", "")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelbottom=last)
  style.finish(figure, f"{name}, means over sequences")
  return figure


def _sequence(name: str, kept: str, layer: Layer, read: list[str], *, modulated: bool) -> Figure:
  """Traces down, time across, and below them the modulation, with what is read at every step."""
  figure = style.canvas(style.WIDTH, 4.6 if modulated else 3.4)
  rows = (3, 1.2) if modulated else (1,)
  grid = figure.add_gridspec(len(rows), 1, height_ratios=rows)
  axes = figure.add_subplot(grid[0])
  reach = max(float(np.abs(layer.traces).max()), 1e-9)
  image = axes.imshow(
    layer.traces.T,
    aspect="auto",
    interpolation="nearest",
    cmap="PuOr_r",
    vmin=-reach,
    vmax=reach,
  )
  style.label(axes, kept, "", "connection")
  axes.set_yticks([])
  axes.grid(visible=False)
  bar = figure.colorbar(image, ax=axes, pad=0.01)
  bar.ax.tick_params(colors=style.MUTED, labelsize=style.SMALL)
  bar.ax.spines["outline"].set_visible(False)
  lowest = axes
  if modulated:
    lowest = figure.add_subplot(grid[1], sharex=axes)
    style.line(lowest, np.arange(len(layer.drive)), layer.drive, "")
    style.label(lowest, "modulation", "", "")
    axes.tick_params(labelbottom=False)
  every = max(1, -(-len(read) // 50))
  places = range(0, len(read), every)
  texts = [read[place] for place in places]
  lowest.set_xticks(list(places), texts, rotation=90, fontsize=style.SMALL, parse_math=False)
  lowest.set_xlabel("what is read", fontsize=style.BODY, color=style.MUTED)
  style.finish(figure, f"{name}, one sequence")
  return figure
