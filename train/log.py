"""From the metrics of single steps to lines of the log."""

import time
from collections import deque
from typing import Any

import jax
import jax.monitoring
import numpy as np

from train.run import Run
from train.writer import Writer

# Peak dense bfloat16 FLOP/s of one device, from the makers' data sheets.
PEAK_FLOPS = {
  "NVIDIA H100 80GB HBM3": 989e12,
  "NVIDIA H200": 989e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
}


class Compilations:
  """Counts compilations and the seconds spent in them, from JAX's own events."""

  def __init__(self):
    self.count = self.hits = 0
    self.seconds = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._duration)
    jax.monitoring.register_event_listener(self._event)

  def _duration(self, name: str, seconds: float, **_: Any) -> None:
    if name == "/jax/core/compile/backend_compile_duration":
      self.count += 1
      self.seconds += seconds

  def _event(self, name: str, **_: Any) -> None:
    if name == "/jax/compilation_cache/cache_hits":
      self.hits += 1


class Log:
  """Adds up the steps' sums and counts and writes a line every `log_every` steps.

  A step's metrics are read after the next step has been dispatched, so that reading them never
  keeps the device waiting.

  Attributes:
    last: metrics and batch of the step read last: (step, host metrics, batch), or None.
  """

  def __init__(self, run: Run, writer: Writer):
    self.writer, self.every = writer, run.experiment.log_every
    self.compilations = Compilations()
    kind = jax.devices()[0].device_kind
    self.peak = PEAK_FLOPS.get(kind, 0.0) * jax.device_count()
    self.pending: deque[Any] = deque()
    self.last: Any = None
    self._reset()

  def _reset(self) -> None:
    self.sums: dict[str, Any] = {}
    self.steps = 0
    self.flops = self.waited = 0.0
    self.began = time.monotonic()

  def add(
    self, step: int, metrics: Any, batch: Any, *, waited: float, epoch: float, flops: float
  ) -> None:
    """Takes the metrics of a step just dispatched and reads those of the step before."""
    self.pending.append((step, metrics, batch, waited, epoch, flops))
    if len(self.pending) > 1:
      self._read()

  def flush(self) -> None:
    """Reads what is left and forgets the time that passes until the next step."""
    while self.pending:
      self._read()
    self.sums, self.steps = {}, 0
    self._reset()

  def _read(self) -> None:
    step, metrics, batch, waited, epoch, flops = self.pending.popleft()
    host = jax.device_get(metrics)
    self.last = (step, host, batch)
    named = {f"loss/{name}": pair for name, pair in host["terms"].items()} | host["task"]
    if np.isfinite(host["objective"]) and np.isfinite(host["gradient_norm"]):
      for name, pair in named.items():
        old = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = tuple(np.add(a, b) for a, b in zip(old, pair, strict=True))
    self.steps += 1
    self.flops += flops
    self.waited += waited
    if step % self.every == 0:
      self._write(step, host, epoch)

  def _write(self, step: int, host: Any, epoch: float) -> None:
    seconds = max(time.monotonic() - self.began, 1e-9)
    values: dict[str, Any] = {"epoch": round(epoch, 4)}
    for name, (total, count) in self.sums.items():
      values |= _flat(name, np.asarray(total) / np.maximum(count, 1))
    if "nll" in values:
      values["loss"] = values.pop("nll")
      values["perplexity"] = float(np.exp(values["loss"]))
      values["tokens_per_second"] = float(self.sums["nll"][1] / seconds)
    values |= {
      "learning_rate": float(host["learning_rate"]),
      "gradient_norm": float(host["gradient_norm"]),
      "steps_per_second": self.steps / seconds,
      "input_seconds": self.waited,
      "compilations": self.compilations.count,
      "compile_seconds": self.compilations.seconds,
      "compile_cache_hits": self.compilations.hits,
      "skipped": int(host["skipped"]),
    }
    if self.peak and self.flops:
      values["mfu"] = self.flops / seconds / self.peak
    self.writer.write("train", step, values)
    self._reset()


def _flat(name: str, value: np.ndarray) -> dict[str, float]:
  """A scalar under its name; a vector under `name_0`, `name_1`, ..."""
  if value.ndim == 0:
    return {name: float(value)}
  return {f"{name}_{i}": float(v) for i, v in enumerate(value)}
