"""Every run that is kept under results/ belongs to the table of today, so that commands go on."""

import dataclasses
import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from compmod_jax.commands.reproduce import Args, grid
from compmod_jax.core.config import to_json
from compmod_jax.core.errors import UserError
from compmod_jax.tables import runs

ROOT = Path(__file__).parents[2] / "results"
CELLS = sorted(ROOT.glob("*/*/*-seed*.json"))
# Folder -> why its runs belong to no table.
OLDER = {"nemot-3.7/tiny-generator-1": "made with the first version of the generator of questions"}


def folders() -> list[str]:
  found = dict.fromkeys(str(file.parent.relative_to(ROOT)) for file in CELLS)
  return [folder for folder in found if folder not in OLDER]


@pytest.mark.parametrize("folder", folders())
def test_kept_runs_are_those_of_their_table(folder):
  name, scale = folder.split("/")
  steps = re.search(r"-(\d+)-steps$", scale)
  records = {file: json.loads(file.read_text()) for file in CELLS if file.parent == ROOT / folder}
  records = {file: record for file, record in records.items() if "table" in record}
  heads = re.search(r"-heads(\d)$", name)
  for file, record in records.items():
    args = Args(
      record["table"],
      scale=record["scale"],
      heads=int(heads[1]) if heads else 4,
      seeds=record["seed"] + 1,
      rows=(record["row"],),
      steps=int(steps[1]) if steps else 0,
      results=ROOT,
    )
    cell = grid(args)[1][-1]
    assert cell.file == file
    assert runs.read(cell) == record


def test_padding_and_evaluations_on_the_way_make_no_other_run(tmp_path):
  """Where the last parameters are scored; not where an evaluation chooses them."""
  rows = ("plain", "plain, best in distribution")
  args = Args("generalisation", scale="scan_jump", seeds=1, rows=rows, results=tmp_path)
  last, best = grid(args)[1]
  for cell, fields, same in (
    (last, {"evaluate_every": 7, "evaluate_sentences": 6}, True),
    (last, {"batch": dataclasses.replace(last.experiment.task.batch, own_lengths=False)}, True),
    (last, {"seed": 3}, False),
    (best, {"evaluate_every": 7}, False),
  ):
    other = cell.experiment
    if "batch" in fields:
      fields = {"task": dataclasses.replace(other.task, **fields)}
    record = {"experiment": to_json(dataclasses.replace(other, **fields))}
    runs.write(cell, record)
    with nullcontext() if same else pytest.raises(UserError, match="another configuration"):
      assert runs.read(cell) == record
