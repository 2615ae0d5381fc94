"""From the metrics of single steps to lines of the log."""

import dataclasses
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.monitoring
import numpy as np

from compmod_jax.mechanisms.competition.statistics import (
  dead_units,
  least_tokens,
  since_last_assignment,
  unit_kind,
)
from compmod_jax.tasks.base import Batch
from compmod_jax.tools.devices import PEAK_FLOPS
from compmod_jax.training.run import Run
from compmod_jax.training.writer import Writer


class Compilations:
  """Counts compilations and the seconds spent in them, from JAX's own events."""

  def __init__(self):
    self.count = self.hits = 0
    self.seconds = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._duration)
    jax.monitoring.register_event_listener(self._event)

  def _duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      self.count += 1
      self.seconds += duration_secs

  def _event(self, event: str, **kwargs: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
      self.hits += 1


class Step(NamedTuple):
  """What a step leaves to be read once it is done.

  Attributes:
    number: batches seen, this one included.
    metrics: what the step returned, on the devices.
    batch: what it was given, on the host.
    waited: seconds lost to input.
    flops: operations of the step's program, 0 where not known.
  """

  number: int
  metrics: Mapping[str, Any]
  batch: Batch
  waited: float
  flops: float


class Read(NamedTuple):
  """A step whose metrics have been read.

  Attributes:
    number: batches seen, this one included.
    metrics: what it returned, on the host.
    batch: what it was given, on the host.
  """

  number: int
  metrics: Mapping[str, Any]
  batch: Batch


@dataclasses.dataclass(frozen=True)
class Window:
  """Sums over the steps since the last line. Never changed, so it can be kept and saved.

  Attributes:
    sums: name -> (sum, count), float64.
    steps: how many.
    flops: their operations.
    waited: seconds lost to input.
    seconds: time they took, evaluations and pauses left out.
  """

  sums: Mapping[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
  steps: int = 0
  flops: float = 0.0
  waited: float = 0.0
  seconds: float = 0.0

  def plus(self, step: Step, host: Mapping[str, Any]) -> "Window":
    """The window with one more step, whose metrics are `host`; bad steps add no sums."""
    sums = dict(self.sums)
    named = {f"loss/{name}": pair for name, pair in host["terms"].items()} | host["task"]
    if np.isfinite(host["objective"]) and np.isfinite(host["gradient_norm"]):
      for name, pair in named.items():
        old = sums.get(name, (0.0, 0.0))
        total, count = (np.asarray(value, np.float64) for value in pair)
        sums[name] = old[0] + total, old[1] + count
    return dataclasses.replace(
      self,
      sums=sums,
      steps=self.steps + 1,
      flops=self.flops + step.flops,
      waited=self.waited + step.waited,
    )

  def to_json(self) -> dict[str, Any]:
    """Lists and numbers that `from_json` takes."""
    sums = {name: [np.asarray(x).tolist() for x in pair] for name, pair in self.sums.items()}
    return dataclasses.asdict(dataclasses.replace(self, sums={})) | {"sums": sums}

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> "Window":
    """The window that `to_json` wrote, exactly."""
    sums = {
      name: (np.asarray(total, np.float64), np.asarray(count, np.float64))
      for name, (total, count) in data["sums"].items()
    }
    return cls(**{**data, "sums": sums})


class Held(NamedTuple):
  """The log after a completed step; see `Log.held`.

  Attributes:
    window: sums up to the last step that was read.
    pending: steps that were not.
    dead: as `Log.dead`.
    since: as `Log.since`.
  """

  window: Window
  pending: tuple[Step, ...]
  dead: Mapping[str, list[int]]
  since: Mapping[str, np.ndarray]


class Log:
  """Adds up the steps' sums and counts and writes a line every `log_every` steps.

  An epoch ends with a line too, so that no line is about two parts of the data. A line also names
  each router's dead units (see `statistics.dead_units`); a warning says when a unit dies.

  A step's metrics are read after the next step has been dispatched, so that reading them never
  keeps the device waiting. What is added up between two lines is part of every checkpoint, so that
  a run that was interrupted writes the lines of one that was not.

  Attributes:
    last: the step read last, or None.
    dead: key of the log -> units that were dead at the last line; never changed, but replaced.
    since: router -> tokens and weights of its units since they last won one, up to the last line;
      never changed, but replaced.
  """

  def __init__(self, run: Run, writer: Writer):
    self.run, self.writer, self.every = run, writer, run.experiment.log_every
    self.compilations = Compilations()
    kind = jax.devices()[0].device_kind
    self.peak = PEAK_FLOPS.get(kind, 0.0) * jax.device_count()
    self.pending: deque[Step] = deque()
    self.window = Window()
    self.began: float | None = None
    self.last: Read | None = None
    self.dead: Mapping[str, list[int]] = {}
    self.since: Mapping[str, np.ndarray] = {}

  def add(self, step: Step) -> None:
    """Takes a step just dispatched; waits for nothing."""
    if self.began is None:
      self.began = time.monotonic()
    self.pending.append(step)

  def read(self) -> None:
    """Reads the metrics of the steps before the last one added."""
    while len(self.pending) > 1:
      self._read()

  def flush(self) -> None:
    """Reads what is left and stops the clock until the next step."""
    while self.pending:
      self._read()
    self.window, self.began = self._timed(), None

  def held(self) -> Held:
    """What `saved` needs, and no later step changes. Waits for nothing."""
    return Held(self._timed(), tuple(self.pending), self.dead, self.since)

  def saved(self, held: Held) -> dict[str, Any]:
    """What to keep in a checkpoint: the sums so far, and lines that are not written yet."""
    window, pending, dead, since = held
    lines = []
    for step in pending:
      host = jax.device_get(step.metrics)
      window = window.plus(step, host)
      if self._due(step.number):
        since = _routers(window, since)
        lines.append([step.number, self._line(window, step, host, since)])
        window = Window()
    counted = {name: values.tolist() for name, values in since.items()}
    return {"window": window.to_json(), "lines": lines, "dead": dead, "since": counted}

  def restore(self, saved: Mapping[str, Any]) -> None:
    """Goes on from what a checkpoint kept; writes the lines that were left."""
    self.window, self.dead = Window.from_json(saved["window"]), saved.get("dead", {})
    # Older checkpoints have not counted: the count begins anew.
    self.since = {name: np.asarray(values) for name, values in saved.get("since", {}).items()}
    for number, values in saved["lines"]:
      self._write(number, values)

  def _due(self, number: int) -> bool:
    return number % self.every == 0 or self.run.ends_epoch(number)

  def _timed(self) -> Window:
    passed = 0.0 if self.began is None else time.monotonic() - self.began
    return dataclasses.replace(self.window, seconds=self.window.seconds + passed)

  def _read(self) -> None:
    step = self.pending.popleft()
    host = jax.device_get(step.metrics)
    self.last = Read(step.number, host, step.batch)
    self.window = self.window.plus(step, host)
    if self._due(step.number):
      self.since = _routers(self.window, self.since)
      self._write(step.number, self._line(self._timed(), step, host, self.since))
      self.window, self.began = Window(), time.monotonic()

  def _write(self, number: int, values: Mapping[str, Any]) -> None:
    """Writes a line, and a warning for every unit that is dead now and was not before."""
    self.writer.write("train", number, values)
    dead = {name: units for name, units in values.items() if name.endswith("/dead")}
    for name, units in dead.items():
      for unit in units:
        if unit not in self.dead.get(name, ()):
          site = name.removeprefix("router/").removesuffix("/dead")
          kind = unit_kind(site)
          units = sum(key.startswith(f"router/{site}/weight_") for key in values)
          mean = values[f"router/{site}/weight_{unit}"]
          text = (
            f"{kind} {unit} of {site} is dead: of the last {least_tokens(units)} tokens or more, it"
            f" has the largest weight for none, and its mean weight is {mean:.2g} (an equal share:"
            f" {1 / units:.2g}); where it stays so, competition.balance = 0.01 spreads the tokens"
          )
          self.writer.write("warning", number, {"text": text})
          self.writer.say(f"warning: step {number}: {text}")
    self.dead = {**self.dead, **dead}

  def _line(
    self, window: Window, step: Step, host: Mapping[str, Any], since: Mapping[str, np.ndarray]
  ) -> dict[str, Any]:
    seconds = max(window.seconds, 1e-9)
    values: dict[str, Any] = {"epoch": round(self.run.epoch(step.number), 4)}
    if len(self.run.experiment.phases) > 1:
      number, _ = self.run.phase_at(step.number)
      values["phase"] = self.run.experiment.phases[number].name
    for name, (total, count) in window.sums.items():
      values |= _flat(name, total / np.maximum(count, 1))
      if name.endswith(_ASSIGNED):
        router = name.removesuffix(_ASSIGNED)
        values[f"{router}/dead"] = dead_units(since[router])
    if "nll" in values:
      values["loss"] = values.pop("nll")
      with np.errstate(over="ignore"):
        values["perplexity"] = float(np.exp(values["loss"]))
      values["tokens_per_second"] = float(window.sums["nll"][1] / seconds)
    values |= {
      "learning_rate": float(host["learning_rate"]),
      **{f"learning_rate/{name}": float(x) for name, x in host.get("learning_rates", {}).items()},
      "gradient_norm": float(host["gradient_norm"]),
      "steps_per_second": window.steps / seconds,
      "input_seconds": window.waited,
      "compilations": self.compilations.count,
      "compile_seconds": self.compilations.seconds,
      "compile_cache_hits": self.compilations.hits,
      "skipped": int(host["skipped"]),
    }
    if self.peak and window.flops:
      values["mfu"] = window.flops / seconds / self.peak
    return values


_ASSIGNED = "/wins"  # ends the name of the sum from which a router is known


def _routers(window: Window, since: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
  """`Log.since` after a line about this window."""
  counted = dict(since)
  for name, (assigned, tokens) in window.sums.items():
    if name.endswith(_ASSIGNED):
      router = name.removesuffix(_ASSIGNED)
      weight, _ = window.sums[f"{router}/weight"]
      counted[router] = since_last_assignment(since.get(router), assigned, weight, float(tokens))
  return counted


def _flat(name: str, value: np.ndarray) -> dict[str, float]:
  """A scalar under its name; a vector under `name_0`, `name_1`, ..."""
  if value.ndim == 0:
    return {name: float(value)}
  return {f"{name}_{i}": float(v) for i, v in enumerate(value)}
