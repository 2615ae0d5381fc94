"""What every benchmark shares: alternating timing, the machine's name, a table, JSON, a verdict."""

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Runs = Mapping[str, Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Spread:
  """A median and the quartiles around it."""

  median: float
  low: float
  high: float

  @classmethod
  def of(cls, values: Any) -> "Spread":
    """The spread of measurements."""
    low, median, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75]).tolist()
    return cls(median, low, high)

  def text(self, digits: int = 3) -> str:
    """For a table: median [quartiles]."""
    return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclasses.dataclass(frozen=True)
class Claim:
  """A ratio and the target that it has to meet, if it has one."""

  name: str
  ratio: Spread
  at_most: float | None = None
  at_least: float | None = None

  @property
  def met(self) -> bool | None:
    """Whether the median meets the target; None without a target."""
    if self.at_most is None and self.at_least is None:
      return None
    value = self.ratio.median
    # What is no number meets nothing.
    low_enough = self.at_most is None or value <= self.at_most
    return low_enough and (self.at_least is None or value >= self.at_least)

  def text(self) -> str:
    """One line."""
    if self.met is None:
      return f"{self.name}: {self.ratio.text()}"
    target = f"at most {self.at_most}" if self.at_most is not None else f"at least {self.at_least}"
    return f"{self.name}: {self.ratio.text()}, target {target}: {'met' if self.met else 'MISSED'}"


class Report:
  """Collects and shows what a benchmark measured."""

  def __init__(self, title: str, options: argparse.Namespace):
    self.title, self.options = title, options
    self.machine = machine(options.device)
    self.timings: dict[str, dict[str, Any]] = {}
    self.claims: list[Claim] = []
    self.facts: list[str] = []
    self.tables: dict[str, Any] = {}
    self._start = time.perf_counter()
    self.say(f"{title} on {describe(self.machine)}")

  def say(self, text: str) -> None:
    """A line of progress."""
    print(f"[{time.perf_counter() - self._start:5.0f} s] {text}", flush=True)

  def measure(
    self, group: str, runs: Runs, rounds: int, *, amount: float, unit: str, warm_up: int = 2
  ) -> dict[str, np.ndarray]:
    """Times runs in turn; `amount` of `unit` is done by each call. Returns seconds of each."""
    seconds = alternate(runs, rounds, lambda text: self.say(f"{group}: {text}"), warm_up)
    for name, values in seconds.items():
      self.timings[f"{group}: {name}"] = {
        "seconds": dataclasses.asdict(Spread.of(values)),
        "rate": dataclasses.asdict(Spread.of(amount / values)),
        "unit": f"{unit}/s",
        "alternations": rounds,
      }
      rate = Spread.of(amount / values).text(1)
      self.say(f"{group}: {name}: {Spread.of(values).text()} s, {rate} {unit}/s")
    return seconds

  def claim(self, name: str, numerator: Any, denominator: Any, **target: float) -> None:
    """A ratio, round by round, so that what slows the whole machine cancels."""
    self.claims.append(Claim(name, Spread.of(np.asarray(numerator) / denominator), **target))
    self.say(self.claims[-1].text())

  def note(self, fact: str) -> None:
    """Something that was checked or that a reader must know."""
    self.facts.append(fact)
    self.say(fact)

  def finish(self) -> None:
    """Prints a summary, writes the JSON file; with --check, exits with 1 if a target is missed."""
    print(f"\n{self.title}\n{describe(self.machine)}\nmedian [quartiles]\n")
    width = max(map(len, self.timings), default=0)
    for name, row in self.timings.items():
      seconds, rate = Spread(**row["seconds"]).text(), Spread(**row["rate"]).text(1)
      print(f"  {name:{width}}  {seconds} s   {rate} {row['unit']}")
    print()
    for line in [claim.text() for claim in self.claims] + self.facts:
      print(f"  {line}")
    self.save()
    if self.options.check and any(claim.met is False for claim in self.claims):
      sys.exit(1)

  def save(self) -> None:
    """Writes what has been measured so far to the JSON file, if there is to be one."""
    if self.options.json is not None:
      self.options.json.write_text(json.dumps(self._as_json(), indent=2) + "\n")

  def _as_json(self) -> dict[str, Any]:
    claims = [{**dataclasses.asdict(claim), "met": claim.met} for claim in self.claims]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    options = {k: v for k, v in vars(self.options).items() if k not in ("json", "check")}
    return {
      "benchmark": self.title,
      "date": now,
      "machine": self.machine,
      "options": options,
      "timings": self.timings,
      "claims": claims,
      "facts": self.facts,
      **({"tables": self.tables} if self.tables else {}),
    }


def options(
  description: str | None, devices: Sequence[str] = ("cpu", "gpu")
) -> argparse.ArgumentParser:
  """The options of every benchmark, with the devices that it knows; each may add its own."""
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
  parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
  parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
  parser.add_argument("--device", choices=devices, default="cpu")
  return parser


def start(title: str, options: argparse.Namespace) -> Report:
  """Sets JAX and PyTorch up as the training program would, each on all cores; the empty report.

  Not every benchmark's environment has PyTorch.
  """
  import jax

  from compmod_jax.training.memory import keep_freed_memory
  from compmod_jax.training.run import use_compile_cache

  keep_freed_memory()
  jax.config.update("jax_platforms", "cpu" if options.device == "cpu" else None)
  if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
  use_compile_cache()
  return Report(title, options)


def repeat(function: Callable[..., Any], times: int) -> Callable[..., Any]:
  """A program that runs a function several times, each time after the one before.

  What a GPU does in microseconds cannot be timed call by call, as a call takes as long. Every run
  is given the arguments by a barrier that sees the loop's counter, so that XLA for GPUs moves
  nothing out of the loop. For CPUs it takes barriers out first; for TPUs it keeps on the chip what
  a run alone would write.

  Args:
    function: from arrays to arrays.
    times: how often it runs, at least once.

  Returns:
    What the last run returns.
  """
  import jax

  def program(*args: Any) -> Any:
    def run(turn: jax.Array, _: Any) -> Any:
      same, _ = jax.lax.optimization_barrier((args, turn))
      return jax.lax.optimization_barrier(function(*same))

    empty = jax.tree.map(
      lambda a: jax.numpy.zeros(a.shape, a.dtype), jax.eval_shape(function, *args)
    )
    return jax.lax.fori_loop(0, times, run, empty)

  return program


def alternate(
  runs: Runs, rounds: int, progress: Callable[[str], None], warm_up: int = 2
) -> dict[str, np.ndarray]:
  """Seconds [rounds] of each run, taken in turn, in an order that changes every round."""
  for name, run in runs.items():
    start = time.perf_counter()
    for _ in range(warm_up):
      run()
    progress(f"{name} is warm after {time.perf_counter() - start:.1f} s")
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  names, told = list(runs), time.perf_counter()
  for number in range(rounds):
    names = names[1:] + names[:1]
    for name in names:
      start = time.perf_counter()
      runs[name]()
      seconds[name].append(time.perf_counter() - start)
    if time.perf_counter() - told > 10:
      told = time.perf_counter()
      progress(f"round {number + 1} of {rounds}")
  return {name: np.asarray(values) for name, values in seconds.items()}


def machine(device: str) -> dict[str, Any]:
  """What ran: processor, cores, accelerator, versions."""
  found: dict[str, Any] = {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0))}
  if device != "cpu":
    import jax

    try:
      found[device] = jax.devices(device)[0].device_kind
    except RuntimeError as error:
      sys.exit(f"--device is {device}, but JAX cannot use one here ({error}).")
  found["python"] = platform.python_version()
  for package in ("jax", "jaxlib", "flax", "torch", "transformers", "ctranslate2"):
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def describe(found: Mapping[str, Any]) -> str:
  """The machine in one line."""
  return ", ".join(f"{name} {value}" for name, value in found.items())


def _cpu_model() -> str:
  """The model name, with family, model and widest vectors where the name alone says little."""
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor() or platform.machine()
  facts = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
  flags = facts.get("flags", "").split()
  vectors = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "")
  family = f"(family {facts.get('cpu family', '?')}, model {facts.get('model', '?')}, {vectors})"
  return f"{facts.get('model name', platform.machine())} {family}"
