"""Two processes of two devices each train like one process of four, whatever happens to them."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from programs import (
  Place,
  Program,
  assert_as_uninterrupted,
  computed,
  free_ports,
  metrics_of,
  state_of,
  steps_saved,
  write_data,
)

from compmod_jax.training.distributed.multihost import LOST

pytestmark = pytest.mark.programs

STEPS = 12
CONFIG = """
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.core.sharding import MeshConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

def get_config(variant):
  return Experiment(
    name="tiny",
    task=TranslationConfig(
      data=TextData(folder="$TINY_DATA"),
      tokenizer=TokenizerConfig(kind="words", vocab_size=40),
      batch=BatchConfig(tokens=128, buckets=(8,)),
      decode=DecodeConfig(method="greedy", max_ratio=1.0, max_extra=2),
    ),
    model=TransformerConfig(
      encoder_layers=1, decoder_layers=1, dim=16, heads=2, ffn_dim=16, max_length=16, norm="pre",
      dropout=0.1, share_embeddings="all", compete=("encoder_self",),
      competition=CompetitionConfig(balance=0.1),
    ),
    # Adam would divide rounding by rounding where a gradient is zero.
    optimizer=OptimizerConfig(name="sgd", learning_rate=0.5, warmup_steps=5, clip=1.0),
    ema=0.9,
    phases=(Phase(steps=12),),
    mesh=MeshConfig(data=1, fsdp=-1),  # every parameter lies on devices of both processes
    evaluate_every=12,
    log_every=4,
    checkpoint_every=2,
    keep_last=30,
    keep_models=1,
  )
"""


class Pair:
  """Two processes that train together, of two devices each."""

  def __init__(self, place: Place, workdir: Path, *options: str, module: str = "train.main"):
    self._stack = contextlib.ExitStack()
    together = ("--multihost", f"--multihost.coordinator=127.0.0.1:{free_ports()}")
    self.programs = [
      self._stack.enter_context(
        Program(
          place,
          workdir,
          *together,
          f"--multihost.process={number}",
          "--multihost.processes=2",
          *options,
          devices=2,
          module=module,
        )
      )
      for number in range(2)
    ]

  def __enter__(self) -> list[Program]:
    return self.programs

  def __exit__(self, *_: object) -> None:
    self._stack.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Finished runs, `alone` (one process of four devices) and `together` (two of two)."""
  root = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:  # the workers' folders lie in one that they share
    root = root.parent
  place = Place(root / "multihost")
  place.root.mkdir(exist_ok=True)

  def make():
    write_data(place.data, {"train": 300, "valid": 37, "test": 11})
    place.config.write_text(CONFIG)
    with Program(place, place.root / "alone", devices=4) as program:
      program.trained(500)
    with Pair(place, place.root / "together") as (first, second):
      first.finish(0, timeout=500)
      (place.root / "second.log").write_text(second.finish(0))

  place.once("runs", make)
  return place


def lines_of(workdir: Path, kind: str) -> dict[str, np.ndarray]:
  """The numbers in a run's log, by name."""
  lines = computed(workdir, kind)
  return {
    name: np.array([line[name] for line in lines])
    for name in lines[0]
    if isinstance(lines[0][name], int | float)
  }


def assert_logged_alike(one: Path, two: Path, kind: str) -> None:
  found, expected = lines_of(one, kind), lines_of(two, kind)
  assert found.keys() == expected.keys()
  for name, values in expected.items():
    np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-7, err_msg=name)


def assert_close_states(one: Path, two: Path) -> None:
  found, expected = state_of(one), state_of(two)
  assert found.keys() == expected.keys()
  for path, values in expected.items():
    np.testing.assert_allclose(found[path], values, rtol=1e-5, atol=1e-6, err_msg=path)


def test_two_processes_train_like_one(runs):
  together, alone = runs.root / "together", runs.root / "alone"
  assert_logged_alike(together, alone, "train")
  assert_close_states(together, alone)  # opened here, on one device


def test_evaluation_counts_every_example_once(runs):
  """37 sentences on four devices of two processes."""
  together, alone = runs.root / "together", runs.root / "alone"
  assert_logged_alike(together, alone, "eval")
  (line,) = metrics_of(together, "eval")
  assert line["sentences"] == 37
  assert [line["split"] for line in metrics_of(together, "final")] == ["valid", "test"]


# A library of XLA's tells of its connections, from several threads at once: lines may be torn.
_GLOO = re.compile(
  r"\[Gloo\] Rank|\d+|is connected to|peer ranks\.|Expected number of connected peer ranks is :"
)


def test_one_process_writes_and_speaks(runs):
  """What two wrote would be there twice, or torn."""
  steps = [line["step"] for line in metrics_of(runs.root / "together", "train")]
  assert steps == sorted({*range(4, STEPS + 1, 4), *steps})
  assert (runs.root / "together" / "report.html").exists()
  said = (runs.root / "second.log").read_text()
  assert _GLOO.sub("", said).split() == []


def _newer_than(workdir: Path, step: int):
  return lambda: (steps_saved(workdir) or [0])[-1] > step


def _ends_without(survivor: Program, number: int) -> None:
  """The survivor ends soon, and its last words are about the other one."""
  killed = time.monotonic()
  shown = survivor.finish(LOST, timeout=60)
  assert time.monotonic() - killed < 60
  # The distributed runtime's own threads may still write of the same connection behind it.
  last = [line for line in shown.splitlines() if line.startswith("error: ")][-1]
  assert re.match(rf"error: process {number} of 2 \(\S+, pid \d+\) is lost: its connection", last)
  assert "Run the same command on all to continue" in last


def test_a_run_that_lost_a_process_and_was_stopped_ends_as_if_nothing_had_been(runs, tmp_path):
  workdir = tmp_path / "run"

  with Pair(runs, workdir) as (first, second):
    assert second.kill_when(_newer_than(workdir, 0))
    _ends_without(first, 1)
  killed = steps_saved(workdir)[-1]
  assert 0 < killed < STEPS

  with Pair(runs, workdir) as (first, second):
    first.wait_for(f"^continuing from the checkpoint of step {killed}$")
    assert first.wait_until(_newer_than(workdir, killed))
    said = [second.stop(signal.SIGTERM), first.finish(128 + signal.SIGTERM)]
  stopped = steps_saved(workdir)[-1]
  assert killed < stopped < STEPS
  for shown in said:
    last = shown.splitlines()[-1]
    assert last == f"SIGTERM: checkpoint of step {stopped} saved; run the same command to continue"

  with Pair(runs, workdir) as (first, second):
    first.wait_for(f"^continuing from the checkpoint of step {stopped}$")
    first.trained(500)  # which kills it: the one that coordinates, in an evaluation
    _ends_without(second, 0)
  assert_as_uninterrupted(workdir, runs.root / "together")


def test_a_process_that_waits_in_vain_says_for_whom(runs, tmp_path):
  options = (f"--multihost.coordinator=127.0.0.1:{free_ports()}", "--multihost.timeout=2")
  numbers = ("--multihost.process=0", "--multihost.processes=3")
  with Program(runs, tmp_path / "run", "--multihost", *options, *numbers) as program:
    shown = program.finish(2, timeout=60)
  assert "error: 1 of 3 processes reported within 2 seconds. Missing: process 1, 2." in shown
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_evaluate_together(runs, tmp_path):
  """Half a minute of two cores for what training does at its end too."""
  options = ("--json", str(tmp_path / "scores.json"))
  with Pair(runs, runs.root / "together", *options, module="train.evaluate") as (first, second):
    assert "valid" in first.finish(0)
    assert "valid" not in second.finish(0)
  found = json.loads((tmp_path / "scores.json").read_text())["splits"]
  for row, line in zip(found, metrics_of(runs.root / "together", "final"), strict=True):
    assert {name: line[name] for name in row if name in line and name != "kind"} == {
      name: row[name] for name in row if name in line
    }
