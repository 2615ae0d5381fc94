"""Lines of the log: when they are written, dead units, and the warnings about them."""

import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compmod_jax.mechanisms.competition.statistics import CHANCE, least_tokens
from compmod_jax.training.experiment import Phase
from compmod_jax.training.log import Log, Step
from compmod_jax.training.run import Run
from compmod_jax.training.writer import Writer

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

  def steps(self, first: int, wins: list[list[float]], share: Sequence[float] = ()) -> None:
    """A step for each list of tokens won by every unit.

    Without `share`, the mean weights of the units, a unit's weights are what it wins.
    """
    for number, won in enumerate(wins, first):
      tokens = np.sum(won)
      weight = np.array(share) * tokens if share else np.array(won, float)
      task = {f"{SITE}/wins": (np.array(won), tokens), f"{SITE}/weight": (weight, tokens)}
      task["nll"] = (2.0 * number, 2.0)
      metrics = {"terms": {}, "task": task, "objective": 1.0, "gradient_norm": 1.0}
      self.log.add(Step(number, metrics | {"learning_rate": 0.1, "skipped": 0}, {}, 0.0, 0.0))
      self.log.read()

  def written(self, kind: str) -> list[dict[str, Any]]:
    self.log.flush()
    return _lines_of(self.path, kind)


@pytest.fixture
def lines(tmp_path):
  made = Lines(tmp_path, run_of(2))
  yield made
  made.writer.close()


def dead_of(lines: Lines) -> list[list[int]]:
  return [line[f"{SITE}/dead"] for line in lines.written("train")]


def test_a_line_has_the_share_of_tokens_that_each_unit_won_since_the_line_before(lines):
  lines.steps(1, [[3, 0, 1, 0], [0, 2, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1]])
  wins = [[line[f"{SITE}/wins_{unit}"] for unit in range(4)] for line in lines.written("train")]
  np.testing.assert_allclose(wins, [[3 / 6, 2 / 6, 1 / 6, 0], [2 / 4, 1 / 4, 0, 1 / 4]])


def test_a_router_of_equal_shares_and_few_tokens_a_line_gives_no_warning(lines):
  units, rng = 8, np.random.default_rng(0)
  drawn = rng.multinomial(3, np.full(units, 1 / units), size=2000).astype(float)
  # As if the lines' rare winners had all of the weight, so that wins alone keep units alive.
  lines.steps(1, drawn.tolist())
  assert min(drawn[:2].sum(axis=0)) == 0  # by the wins of one line, several would be dead
  assert not any(dead_of(lines))
  assert lines.said == []


def test_a_unit_that_wins_nothing_is_dead_once_enough_tokens_have_been_seen(lines):
  units = 4
  lines.steps(1, [[5, 5, 5, 0]] * 10)  # 30 tokens a line, and 53 are enough
  assert least_tokens(units) == 53
  assert dead_of(lines) == [[], [3], [3], [3], [3]]
  assert [line["step"] for line in lines.written("warning")] == [4]
  (warning,) = lines.said
  assert "step 4: head 3 of encoder/layer_0/self" in warning
  assert "the last 53 tokens or more" in warning
  assert "an equal share: 0.25" in warning


def test_a_unit_that_never_has_the_most_weight_but_a_good_share_of_it_is_not_dead(lines):
  lines.steps(1, [[50, 50, 0]] * 4, share=(0.35, 0.35, 0.3))
  assert not any(dead_of(lines))
  assert lines.said == []


def test_a_router_that_sees_no_tokens_has_no_dead_units(lines):
  lines.steps(1, [[0, 0]] * 4)
  assert not any(dead_of(lines))


@pytest.mark.parametrize("units", [2, 3, 4, 8, 16, 64])
def test_least_tokens_are_the_fewest_that_leave_no_more_than_the_chance(units):
  n = least_tokens(units)
  assert units * (1 - 1 / units) ** n <= CHANCE < units * (1 - 1 / units) ** (n - 1)


def test_a_warning_comes_once_for_each_death(lines):
  alive, dead = [[50, 50], [50, 50]], [[50, 0], [50, 0]]
  lines.steps(1, dead + dead + alive + dead + dead)
  assert [line["step"] for line in lines.written("warning")] == [2, 8]
  assert [text.split(" is dead")[0] for text in lines.said] == [
    f"warning: step {n}: head 1 of encoder/layer_0/self" for n in (2, 8)
  ]


def test_a_continued_run_does_not_warn_again_of_who_was_dead(lines, tmp_path):
  lines.steps(1, [[50, 0], [50, 0], [50, 0]])
  lines.log.flush()
  saved = json.loads(json.dumps(lines.log.saved(lines.log.held())))
  again = Lines(tmp_path / "again", run_of(2))
  again.log.restore(saved)
  again.steps(4, [[50, 0], [0, 50], [0, 50]])
  assert [line["step"] for line in again.written("warning")] == [6]
  assert dead_of(again) == [[1], [0]]
  assert again.said[0].startswith("warning: step 6: head 0 of")
  again.writer.close()


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_run_continued_anywhere_writes_the_dead_units_and_warnings_of_one_that_was_not(
  stop, tmp_path
):
  rng = np.random.default_rng(1)
  wins = [[9.0, 0.0, float(rng.integers(2))] for _ in range(6)] + [[5.0, 3.0, 0.0]] * 6
  whole, first, second = (Lines(tmp_path / name, run_of(2)) for name in ("whole", "one", "two"))
  whole.steps(1, wins)
  first.steps(1, wins[:stop])
  saved = json.loads(json.dumps(first.log.saved(first.log.held())))
  before = {kind: _lines_of(first.path, kind) for kind in ("train", "warning")}
  second.log.restore(saved)
  second.steps(stop + 1, wins[stop:])
  for kind in ("train", "warning"):
    expected = [_untimed(line) for line in whole.written(kind)]
    assert expected, kind
    assert [_untimed(line) for line in before[kind] + second.written(kind)] == expected
  for made in (whole, first, second):
    made.writer.close()


def _lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
  lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  return [line for line in lines if line["kind"] == kind]


def _untimed(line: dict[str, Any]) -> dict[str, Any]:
  return {name: value for name, value in line.items() if "second" not in name}


def test_a_death_in_a_line_that_was_not_written_yet_is_told_by_the_continued_run(lines, tmp_path):
  lines.steps(1, [[50, 0], [50, 0]])  # the second step waits to be read
  saved = json.loads(json.dumps(lines.log.saved(lines.log.held())))
  again = Lines(tmp_path / "again", run_of(2))
  again.log.restore(saved)
  assert [line["step"] for line in again.written("train")] == [2]
  assert [line["step"] for line in again.written("warning")] == [2]
  again.writer.close()


def test_the_log_of_an_older_checkpoint_can_be_continued(lines):
  lines.log.restore({"window": {"sums": {}}, "lines": [], "dead": {f"{SITE}/dead": [0]}})
  lines.steps(1, [[50, 0], [50, 0]])
  assert len(lines.written("warning")) == 1


def test_a_step_that_was_not_finite_kills_nobody(lines):
  sums = {f"{SITE}/{name}": (np.zeros(2), 0.0) for name in ("wins", "weight")}
  metrics = {"terms": {}, "task": sums, "objective": np.nan}
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
