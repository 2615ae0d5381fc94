"""Lines of the log: when they are written, dead units, and the warnings about them."""

import json
import types
from typing import Any

import numpy as np
import pytest

from train.experiment import Phase
from train.log import Log, Step
from train.run import Run
from train.writer import Writer

SITE = "router/encoder/layer_0/self"


def run_of(every: int, *phases: Phase, batches: tuple[int, ...] = (100,)) -> Run:
  """A run of which only lengths are known."""
  made: Any = dict.fromkeys(Run.__dataclass_fields__)
  experiment = types.SimpleNamespace(log_every=every, phases=phases or (Phase(steps=100),))
  return Run(**{**made, "experiment": experiment, "batches_per_epoch": list(batches), "past": []})


class Lines:
  """A log of made-up steps and what it wrote."""

  def __init__(self, folder, run: Run):
    self.said: list[str] = []
    self.writer = Writer(folder, total_steps=100, quiet=True, tensorboard=False)
    self.writer.say = self.said.append
    self.path, self.log = folder / "metrics.jsonl", Log(run, self.writer)

  def steps(self, first: int, wins: list[list[float]]) -> None:
    """A step for each list of tokens won by every unit."""
    for number, won in enumerate(wins, first):
      task = {f"{SITE}/wins": (np.array(won), np.sum(won)), "nll": (2.0 * number, 2.0)}
      metrics = {"terms": {}, "task": task, "objective": 1.0, "gradient_norm": 1.0}
      self.log.add(Step(number, metrics | {"learning_rate": 0.1, "skipped": 0}, {}, 0.0, 0.0))
      self.log.read()

  def written(self, kind: str) -> list[dict[str, Any]]:
    self.log.flush()
    lines = [json.loads(line) for line in self.path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def lines(tmp_path):
  made = Lines(tmp_path, run_of(2))
  yield made
  made.writer.close()


def test_a_line_names_the_units_that_no_token_chose_since_the_line_before(lines):
  lines.steps(1, [[3, 0, 1, 0], [0, 2, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1]])
  train = lines.written("train")
  assert [line[f"{SITE}/dead"] for line in train] == [[3], [2]]
  assert train[0][f"{SITE}/wins_1"] == pytest.approx(2 / 6)


def test_a_warning_comes_once_for_each_death(lines):
  alive, dead = [[1, 1], [1, 1]], [[2, 0], [2, 0]]
  lines.steps(1, dead + dead + alive + dead + dead)
  assert [line["step"] for line in lines.written("warning")] == [2, 8]
  assert lines.said == [
    f"warning: step {n}: head 1 of encoder/layer_0/self is dead: no token of the last steps weighs"
    " it most"
    for n in (2, 8)
  ]


def test_a_continued_run_does_not_warn_again_of_who_was_dead(lines, tmp_path):
  lines.steps(1, [[2, 0], [2, 0], [2, 0]])
  lines.log.flush()
  saved = json.loads(json.dumps(lines.log.saved(lines.log.held())))
  again = Lines(tmp_path / "again", run_of(2))
  again.log.restore(saved)
  again.steps(4, [[2, 0], [0, 2], [0, 2]])
  assert [line["step"] for line in again.written("warning")] == [6]
  assert [line[f"{SITE}/dead"] for line in again.written("train")] == [[1], [0]]
  assert again.said[0].startswith("warning: step 6: head 0 of")
  again.writer.close()


def test_a_death_in_a_line_that_was_not_written_yet_is_told_by_the_continued_run(lines, tmp_path):
  lines.steps(1, [[2, 0], [2, 0]])  # the second step waits to be read
  saved = json.loads(json.dumps(lines.log.saved(lines.log.held())))
  again = Lines(tmp_path / "again", run_of(2))
  again.log.restore(saved)
  assert [line["step"] for line in again.written("train")] == [2]
  assert [line["step"] for line in again.written("warning")] == [2]
  again.writer.close()


def test_the_log_of_an_older_checkpoint_can_be_continued(lines):
  lines.log.restore({"window": {"sums": {}}, "lines": []})
  lines.steps(1, [[2, 0], [2, 0]])
  assert len(lines.written("warning")) == 1


def test_a_step_that_was_not_finite_kills_nobody(lines):
  metrics = {"terms": {}, "task": {f"{SITE}/wins": (np.zeros(2), 0.0)}, "objective": np.nan}
  metrics |= {"gradient_norm": 1.0, "learning_rate": 0.1, "skipped": 1}
  for number in (1, 2):
    lines.log.add(Step(number, metrics, {}, 0.0, 0.0))
  assert f"{SITE}/dead" not in lines.written("train")[0]
  assert lines.said == []


# Epochs and phases.


def test_no_line_is_about_two_epochs_or_two_phases(tmp_path):
  phases = (Phase("rest", steps=7), Phase("routing", steps=4))
  made = Lines(tmp_path, run_of(3, *phases, batches=(5, 2)))
  made.steps(1, [[1, 1]] * 11)
  train = made.written("train")
  assert [line["step"] for line in train] == [3, 5, 6, 7, 9, 11]
  assert [line["epoch"] for line in train] == [0.6, 1.0, 1.2, 1.4, 2.4, 3.4]
  assert [line["phase"] for line in train] == ["rest"] * 4 + ["routing"] * 2
  # A step's loss is its number: means are over the steps since the line before.
  assert [line["loss"] for line in train] == [2.0, 4.5, 6.0, 7.0, 8.5, 10.5]
  made.writer.close()


def test_epochs_of_one_phase_are_counted_as_ever():
  run = run_of(1, Phase(epochs=2.5), batches=(10,))
  assert run.phase_ends == [25]
  assert [run.epoch(step) for step in (1, 10, 25)] == [0.1, 1.0, 2.5]
  assert [step for step in range(1, 26) if run.ends_epoch(step)] == [10, 20, 25]


def test_a_step_belongs_to_the_phase_that_made_it():
  run = run_of(1, Phase(steps=3), Phase(steps=2), Phase(steps=1), batches=(3, 2, 9))
  assert [run.phase_at(step) for step in range(1, 7)] == [
    (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1),
  ]  # fmt: skip
  assert run.phase_at(7) == (2, 2)  # after the last step nothing follows
