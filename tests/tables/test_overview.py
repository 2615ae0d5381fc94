"""All runs of a table side by side: which are shown, in what order, and what a reader gets."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from compmod_jax.commands import reproduce
from compmod_jax.core.errors import UserError
from compmod_jax.tables import overview
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec
from compmod_jax.training.experiment import load_config

RESULTS = Path(__file__).parents[2] / "results"
SPLITS = {"copy": ("test", "longer"), "reverse": ("test", "longer"), "jump": ("test",)}
ROWS = ("plain", "relative", "heads compete")


def spec(scale):
  columns = tuple(Column(f"exact {split}", split, "exact_match", 1) for split in SPLITS[scale])
  rows = {row: Row(load_config("systematic:copy")) for row in ROWS}
  return Spec("A table", scale, rows, "plain", columns)


def write(folder, scale, row, seed, value, steps=100, minutes=2.0, **other):
  scores = {split: {"exact_match": value} for split in SPLITS[scale]}
  record = {
    "table": "generalisation",
    "scale": scale,
    "row": row,
    "seed": seed,
    "scores": scores,
    "train_seconds": 60 * minutes,
    "parameters": 7,
    "experiment": {
      "phases": [{"epochs": 0, "steps": part} for part in (steps // 2, steps - steps // 2)]
    },
  }
  file = folder / f"{scale}-{steps}-steps" / f"{row}-seed{seed}.json"
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(json.dumps(record | other))


@pytest.fixture
def folder(tmp_path):
  write(tmp_path, "copy", "heads compete", 0, 10.0)
  write(tmp_path, "copy", "plain", 1, 30.0, minutes=5.0)
  write(tmp_path, "copy", "plain", 0, 20.0)
  write(tmp_path, "copy", "plain", 0, 90.0, steps=40)
  write(tmp_path, "jump", "relative", 0, 50.0)
  write(tmp_path, "reverse", "relative", 0, 70.0)
  (tmp_path / "copy-100-steps" / "result.json").write_text("no run")
  return tmp_path


def test_runs_are_in_the_order_of_the_table(folder):
  found = [(r.scale, r.row, r.steps, r.seed) for r in overview.collect(folder, spec).runs]
  assert found == [
    ("copy", "plain", 40, 0),
    ("copy", "plain", 100, 0),
    ("copy", "plain", 100, 1),
    ("copy", "heads compete", 100, 0),
    ("jump", "relative", 100, 0),
    ("reverse", "relative", 100, 0),
  ]


def test_scales_of_the_same_columns_stand_together_with_the_longest_runs(folder):
  both, jump = overview.parts(overview.collect(folder, spec))
  assert (both.scales, both.rows) == (["copy", "reverse"], ["plain", "relative", "heads compete"])
  assert both.values("plain", "copy", both.columns[1]) == [20, 30]
  assert both.values("plain", "reverse", both.columns[1]) == []
  ours = ["copy: exact test", "copy: exact longer", "reverse: exact test", "reverse: exact longer"]
  assert overview.lines(both) == [
    ["row", *ours, "minutes"],
    ["plain", "20.0, 30.0", "20.0, 30.0", "", "", "2 to 5"],
    ["relative", "", "", "70.0", "70.0", "2"],
    ["heads compete", "10.0", "10.0", "", "", "2"],
  ]
  assert overview.lines(jump) == [["row", "jump", "minutes"], ["relative", "50.0", "2"]]


def test_a_whole_run_in_epochs_is_longer_than_a_trial_in_steps(folder):
  phases = {"experiment": {"phases": [{"epochs": 40, "steps": 0}]}}
  write(folder, "copy", "plain", 0, 60.0, steps=0, **phases)
  found = overview.collect(folder, spec)
  both, _ = overview.parts(found)
  assert both.values("plain", "copy", both.columns[0]) == [60]
  (numbers,) = overview.page("A table", found).sections[-1].items
  assert [40, 0] in [list(row[1:3]) for row in numbers.rows]


def test_a_score_that_a_run_lacks_leaves_its_place_empty(tmp_path):
  scores = {"test": {"exact_match": None}, "longer": {"exact_match": 5.0}}
  write(tmp_path, "copy", "plain", 0, 0.0, scores=scores)
  (part,) = overview.parts(overview.collect(tmp_path, spec))
  assert overview.lines(part)[1] == ["plain", "", "5.0", "2"]


def test_folders_of_one_scale_are_apart_and_values_have_the_digits_of_their_column(tmp_path):
  def precise(scale):
    columns = (Column("R2", "test", "exact_match", 4), Column("loss", "longer", "exact_match", 3))
    return dataclasses.replace(spec(scale), columns=columns)

  write(tmp_path, "copy", "plain", 0, 0.12345)
  (tmp_path / "copy-100-steps").rename(tmp_path / "copy-moved")
  write(tmp_path, "copy", "plain", 0, 0.5)
  (part,) = overview.parts(overview.collect(tmp_path, precise))
  assert part.scales == ["copy", "copy-moved"]
  assert overview.lines(part)[1] == ["plain", "0.5000", "0.500", "0.1235", "0.123", "2"]


def test_files_of_other_programs_are_left_out_and_counted(folder):
  other = folder / "jump-100-steps" / "network-seed0.json"
  other.write_text('{"name": "of another program"}')
  found = overview.collect(folder, spec)
  assert (len(found.runs), found.left_out) == (6, [other])


def test_what_is_no_run_is_named(tmp_path):
  with pytest.raises(UserError, match="has no runs; train some without --overview"):
    overview.collect(tmp_path, spec)
  write(tmp_path, "copy", "plain", 0, 0.0)
  (file,) = tmp_path.glob("*/*.json")
  file.write_text('{"table": "generalisation", "scale": "copy"}')
  with pytest.raises(UserError, match=r"plain-seed0\.json is not the result of a run"):
    overview.collect(tmp_path, spec)
  file.unlink()
  write(tmp_path, "copy", "gone", 0, 0.0)
  with pytest.raises(UserError, match="'gone', which the table of copy does not have"):
    overview.collect(tmp_path, spec)


def test_committed_runs_are_shown_drawn_and_written(tmp_path, capsys):
  for scale in ("scan_mcd1-3000-steps", "scan_mcd2-3000-steps", "copy"):
    shutil.copytree(RESULTS / "generalisation" / scale, tmp_path / "generalisation" / scale)
  assert reproduce.main(["generalisation", "--overview", "--results", str(tmp_path)]) == 0
  shown = capsys.readouterr().out
  assert "scan_mcd1" in shown
  assert "copy: exact longer 3" in shown
  where = tmp_path / "generalisation"
  assert {file.name for file in (where / "plots").glob("*.png")} == {
    "overview_1_exact_match.png",
    "overview_2_exact_match.png",
  }
  runs = json.loads((where / "result.json").read_text())["runs"]
  one = next(r for r in runs if r["scale"] == "scan_mcd2")
  assert (one["row"], one["steps"]) == ("relative, scratchpad", 3000)
  assert one["scores"] == {"exact test": 100.0}
  assert (where / "numbers.csv").read_text().startswith(",".join(overview.NUMBERS))
