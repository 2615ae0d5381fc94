"""The training program as a user runs it: a process of its own, on a task that takes seconds."""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from xla_flags import QUICK

from compmod_jax.training import compile_cache, final_evaluation
from compmod_jax.training.checkpoint import Checkpointer
from compmod_jax.training.loop import Loop
from compmod_jax.training.preemption import Preemption
from compmod_jax.training.profiling import Profiler
from compmod_jax.training.run import set_up
from compmod_jax.training.writer import Writer

ROOT = Path(__file__).parents[2]
STEPS, CHECKPOINT_EVERY, EVALUATE_EVERY, LOG_EVERY = 60, 8, 20, 5

CONFIG = """
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig
from compmod_jax.training.regimes import iterative

PHASES = {
  "": (Phase(steps=60),),
  "two": (Phase("rest", trainable="rest", steps=30), Phase("heads", trainable="routing", steps=30)),
  "turns": iterative(2),
}

def get_config(variant):
  return Experiment(
    name="tiny",
    task=TranslationConfig(
      data=TextData(folder="$TINY_DATA"),
      tokenizer=TokenizerConfig(kind="words", vocab_size=40),
      batch=BatchConfig(tokens=100, buckets=(8,)),
      decode=DecodeConfig(beams=2, max_ratio=1.0, max_extra=2),
    ),
    model=TransformerConfig(
      encoder_layers=1, decoder_layers=1, dim=16, heads=2, ffn_dim=32, max_length=16, norm="pre",
      dropout=0.1, share_embeddings="all", compete=("encoder_self",),
    ),
    optimizer=OptimizerConfig(
      learning_rate=1e-2, schedule="cosine", warmup_steps=10, clip=1.0, weight_decay=0.01
    ),
    phases=PHASES[variant],
    ema=0.9,
    evaluate_every=20,
    evaluate_sentences=400,
    log_every=5,
    checkpoint_every=8,
    keep_last=20,
    keep_models=2,
    score_train=variant == "turns",
  )
"""


def write_data(folder: Path, sizes: dict[str, int], longest: int = 6) -> Path:
  """Parallel text in which every word has one translation."""
  folder.mkdir(parents=True)
  rng = random.Random(0)
  words = [a + b for a in "bdfg" for b in "aei"]
  for split, count in sizes.items():
    sources = [" ".join(rng.choices(words, k=rng.randint(2, longest))) for _ in range(count)]
    (folder / f"{split}.de").write_text("".join(f"{line}\n" for line in sources))
    (folder / f"{split}.en").write_text("".join(f"{line.upper()}\n" for line in sources))
  return folder


class Place:
  """Data, configuration and compile cache that runs share.

  Args:
    root: where they are.
    optimised: whether XLA optimises as usual. Without, it compiles in half the time, and what
      these tests claim does not depend on it.
  """

  def __init__(self, root: Path, *, optimised: bool = False):
    self.root, self.optimised = root, optimised
    self.data, self.cache, self.config = root / "data", root / "cache", root / "config.py"
    self.reference = root / "reference"

  def make(self) -> None:
    """Writes data and configuration and runs the reference: a run that nothing interrupts."""
    write_data(self.data, {"train": 300, "valid": 400, "test": 40})
    self.config.write_text(CONFIG)
    with Program(self, self.reference) as program:
      program.finish(0)
    (self.root / "reference.log").write_text("".join(program.lines))

  def once(self, name: str, make: Callable[[], None]) -> None:
    """Calls `make` in the first test process that comes here; others wait until it is done."""
    with open(self.root / f"{name}.lock", "w") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      if not (self.root / f"{name}.done").exists():
        make()
        (self.root / f"{name}.done").touch()

  def environment(self, devices: int | None = None, **changes: str) -> dict[str, str]:
    """Variables of a process with so many virtual devices; none of this process's XLA flags."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    count = f"--xla_force_host_platform_device_count={devices}" if devices else ""
    kept["XLA_FLAGS"] = count if self.optimised else f"{count} {QUICK}"
    own = {
      "COMPMOD_CACHE": str(self.cache),
      "TINY_DATA": str(self.data),
      "JAX_PLATFORMS": "cpu",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(not self.optimised)),
    }
    return kept | own | changes

  def arguments(self, workdir: Path, *options: str, variant: str = "") -> list[str]:
    """What follows `python -m train.main` for a run in `workdir`."""
    config = f"{self.config}:{variant}" if variant else str(self.config)
    return ["--config", config, "--workdir", str(workdir), *options]

  def stopped_at(self, step: int, workdir: Path, source: Path | None = None) -> Path:
    """A copy of a finished run (the reference) as it was after `step`, but for its later models."""
    shutil.copytree(source or self.reference, workdir)
    for folder in checkpoint_folders(workdir):
      if int(folder.name[5:13]) > step:
        shutil.rmtree(folder)
    assert steps_saved(workdir)[-1] == step
    return workdir


class Program:
  """A running `python -m train.main`; its lines are read as they come, and it ends with us."""

  def __init__(
    self,
    place: Place,
    workdir: Path,
    *options: str,
    variant: str = "",
    devices: int | None = None,
    module: str = "train.main",
    **environment: str,
  ):
    command = [sys.executable, "-W", "error", "-m", module]
    arguments = place.arguments(workdir, *options, variant=variant)
    if module != "train.main":  # a model's configuration lies beside it
      arguments = arguments[2:]
    self.began, self.lines = time.monotonic(), []
    self.process = subprocess.Popen(
      [*command, *arguments],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      cwd=ROOT,
      env=place.environment(devices, **environment),
    )
    self._news = threading.Condition()
    self._ended = False
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def __enter__(self) -> "Program":
    return self

  def __exit__(self, *_: object) -> None:
    self.process.kill()
    self.process.wait()
    self._reader.join()
    self.process.stdout.close()

  def _read(self) -> None:
    for line in self.process.stdout:
      with self._news:
        self.lines.append(line)
        self._news.notify_all()
    with self._news:
      self._ended = True
      self._news.notify_all()

  @property
  def text(self) -> str:
    """Everything printed so far."""
    return "".join(self.lines)

  def wait_for(self, pattern: str, timeout: float = 120.0) -> re.Match:
    """The first line that matches, as soon as it is printed."""
    with self._news:
      assert self._news.wait_for(lambda: self._ended or self._found(pattern), timeout), self.text
      found = self._found(pattern)
    assert found, f"the program ended without a line like {pattern!r}:\n{self.text}"
    return found

  def _found(self, pattern: str) -> re.Match | None:
    return next((found for line in self.lines if (found := re.search(pattern, line))), None)

  def finish(self, status: int, timeout: float = 180.0) -> str:
    """Waits for the end; returns what was printed."""
    try:
      found = self.process.wait(timeout)
    except subprocess.TimeoutExpired as error:
      raise AssertionError(f"still running after {timeout} seconds:\n{self.text}") from error
    self._reader.join()
    assert found == status, f"exit status {found}, not {status}:\n{self.text}"
    return self.text

  def trained(self, timeout: float = 120.0) -> str:
    """Waits until training is over and kills the rest, which takes longer; returns the lines."""
    self.wait_for("^loss on test", timeout)
    self.process.kill()
    return self.finish(-signal.SIGKILL)

  def stop(self, number: signal.Signals = signal.SIGTERM) -> str:
    """Sends a signal and waits for the end it asks for; returns what was printed."""
    self.process.send_signal(number)
    sent = time.monotonic()
    status = -9 if number == signal.SIGKILL else 128 + number
    text = self.finish(status, timeout=60)
    assert time.monotonic() - sent < 60
    return text

  def kill_when(self, condition: Callable[[], Any], timeout: float = 120.0) -> bool:
    """Kills as soon as the condition holds; False where the program had ended by itself."""
    if not self.wait_until(condition, timeout):
      self.finish(0)
      return False
    self.process.kill()
    return self.process.wait() == -signal.SIGKILL

  def wait_until(self, condition: Callable[[], Any], timeout: float = 120.0) -> bool:
    """Waits until the condition holds; False where the program ends before."""
    end = time.monotonic() + timeout
    while not condition():
      if self.process.poll() is not None:
        return False
      assert time.monotonic() < end, self.text
      time.sleep(0.0005)
    return True


def free_ports() -> int:
  """A free port whose neighbour is free too."""
  while True:
    with socket.socket() as one, socket.socket() as two:
      one.bind(("127.0.0.1", 0))
      port = one.getsockname()[1]
      with contextlib.suppress(OSError, OverflowError):
        two.bind(("127.0.0.1", port + 1))
        return port


def checkpoint_folders(workdir: Path) -> list[Path]:
  """The complete checkpoints of a run, oldest first."""
  return sorted((workdir / "checkpoints").glob("step_*"))


def steps_saved(workdir: Path) -> list[int]:
  """The steps of a run's complete checkpoints."""
  return [int(folder.name[5:13]) for folder in checkpoint_folders(workdir)]


def record_of(workdir: Path, step: int | None = None) -> dict[str, Any]:
  """meta.json of a checkpoint, the newest unless told."""
  folders = checkpoint_folders(workdir)
  folder = folders[-1] if step is None else workdir / "checkpoints" / f"step_{step:08d}"
  return json.loads((folder / "meta.json").read_text())


def state_of(workdir: Path, step: int | None = None) -> dict[str, np.ndarray]:
  """Every array of a checkpoint by its path: parameters, optimizer, average, counters."""
  record = record_of(workdir, step)
  abstract = {
    path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in record["leaves"].items()
  }
  restored = Checkpointer(workdir / "checkpoints").restore(abstract, step=record["step"])
  assert restored is not None
  return {path: np.asarray(leaf) for path, leaf in restored[0].items()}


def metrics_of(workdir: Path, kind: str | None = None) -> list[dict[str, Any]]:
  """The lines of metrics.jsonl."""
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [line for line in lines if kind in (None, line["kind"])]


# What depends on the machine's mood and on where a process began, not on what is computed.
_TIMES = re.compile("_per_second$|_seconds$|^compil|^mfu$")


def computed(workdir: Path, kind: str) -> list[dict[str, Any]]:
  """The lines of a kind without what no two runs share: times and compilations."""
  lines = metrics_of(workdir, kind)
  return [{k: v for k, v in line.items() if not _TIMES.search(k)} for line in lines]


def assert_same_bits(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
  """Two states have the same arrays, bit for bit."""
  assert one.keys() == two.keys()
  different = [path for path in one if one[path].tobytes() != two[path].tobytes()]
  assert not different


def assert_as_uninterrupted(workdir: Path, reference: Path) -> None:
  """A run ended as the reference did: state, log and best model are the same, bit for bit."""
  assert_same_bits(state_of(workdir), state_of(reference))
  for kind in ("train", "eval"):
    assert computed(workdir, kind) == computed(reference, kind)
  mine, theirs = record_of(workdir)["meta"], record_of(reference)["meta"]
  assert mine["iterators"] == theirs["iterators"]
  for name in ("step", "evaluated", "best", "best_step", "stale", "stopped"):
    assert mine["history"][name] == theirs["history"][name], name
  best = Path("models/best/params.safetensors")
  assert (workdir / best).read_bytes() == (reference / best).read_bytes()


def make_newer(folder: Path) -> None:
  """Makes a checkpoint look like one that a later version wrote."""
  record = json.loads((folder / "meta.json").read_text())
  text = json.dumps({**record, "schema": 99})
  (folder / "meta.json").write_text(text)
  manifest = json.loads((folder / "manifest.json").read_text())
  manifest["sha256"]["meta.json"] = hashlib.sha256(text.encode()).hexdigest()
  (folder / "manifest.json").write_text(json.dumps(manifest))


@contextlib.contextmanager
def compile_cache_restored() -> Iterator[None]:
  """What is set about JAX's persistent compile cache inside is as before afterwards."""
  names = ("dir", "max_size")
  before = {name: getattr(jax.config, f"jax_compilation_cache_{name}") for name in names}
  get_file_cache = compile_cache.compilation_cache.get_file_cache
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    compile_cache.compilation_cache.get_file_cache = get_file_cache
    for name, value in before.items():
      jax.config.update(f"jax_compilation_cache_{name}", value)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def train(
  experiment: Any, workdir: Path, *, report: bool = True, profiler: Profiler | None = None
) -> None:
  """What the training program does, in this process."""
  made = set_up(experiment, workdir, command="x")
  with Writer(workdir, total_steps=made.total_steps, quiet=True) as writer, Preemption() as held:
    loop = Loop(made, writer, held, profiler=profiler)
    loop.train()
    if report:
      final_evaluation.report_run(made, loop.history, writer, command="x")
