"""A table's grid of runs: done cells are kept, killed ones continue, and the table is the same."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import ROOT, compile_cache_restored, write_data

from compmod_jax.analysis.report import style
from compmod_jax.analysis.report import training as run_report
from compmod_jax.commands import reproduce
from compmod_jax.core.errors import UserError
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tables import registry, report
from compmod_jax.tables.grid import Column
from compmod_jax.tables.registry import table
from compmod_jax.tables.spec import Row, Spec
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training import compile_cache
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def experiment(data):
  return Experiment(
    name="tiny",
    task=TranslationConfig(
      data=TextData(folder=str(data)),
      tokenizer=TokenizerConfig(kind="words", vocab_size=40),
      batch=BatchConfig(tokens=64, buckets=(8,)),
      decode=DecodeConfig(method="greedy", max_ratio=1.0, max_extra=2),
    ),
    model=TransformerConfig(
      encoder_layers=1, decoder_layers=1, dim=8, heads=2, ffn_dim=8, max_length=16
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    phases=(Phase(steps=4),),
    watch_sentences=0,
    score_train=True,
  )


@pytest.fixture(scope="module")
def grid(tmp_path_factory, one_device):
  """A table of two rows on a task that takes seconds, and everything it made with two seeds."""
  root = tmp_path_factory.mktemp("grid")
  plain = experiment(write_data(root / "data", {"train": 60, "valid": 8, "test": 8}))
  routed = dataclasses.replace(
    plain, model=dataclasses.replace(plain.model, compete=("encoder_self",))
  )
  columns = (
    Column("PPL test", "test", "perplexity", lower=True),
    Column("PPL train", "train", "perplexity", lower=True),
  )
  rows = {"none": Row(plain, {"PPL test": 5.45}), "enc": Row(routed)}
  spec = Spec("Two rows", "a tiny set", rows, "none", columns)
  with pytest.MonkeyPatch.context() as patch, compile_cache_restored():
    patch.setitem(registry.TABLES, "tiny", lambda scale, heads: spec)
    patch.setenv("COMPMOD_CACHE", str(root / "cache"))
    compile_cache.use(root / "cache" / "xla")
    # The pictures of each run's own report take longer than these runs.
    patch.setattr(run_report, "_figures", lambda *_: iter(()))
    yield root


def run(root, name, *options):
  """The files of the table after the program ran with these options; its runs are elsewhere."""
  arguments = ["tiny", "--results", str(root / name), "--workdir", str(root / f"{name}-runs")]
  seeds = () if "--seeds" in options else ("--seeds", "2")
  status = reproduce.main([*arguments, *seeds, *options])
  return status, root / name / "tiny" / "tiny"


@pytest.fixture(scope="module")
def whole(grid):
  status, folder = run(grid, "whole")
  assert status == 0
  return folder


def test_seeds_of_a_row_share_their_compiled_programs(grid, whole):
  names = [file.name for file in (grid / "cache" / "xla").iterdir()]
  for program in ("jit_step", "jit__init"):
    assert sum(name.startswith(f"{program}-") and name.endswith("-cache") for name in names) == 2


def numbers(folder):
  return (folder / "numbers.csv").read_text()


def test_every_row_and_seed_leaves_a_cell_that_says_how_it_was_made(whole):
  cells = sorted(whole.glob("*.json"))
  names = [f"{row}-seed{seed}.json" for row in ("enc", "none") for seed in (0, 1)]
  assert [cell.name for cell in cells if cell.name != "result.json"] == names
  cell = json.loads((whole / "enc-seed1.json").read_text())
  assert (cell["row"], cell["seed"], cell["experiment"]["seed"]) == ("enc", 1, 1)
  assert cell["experiment"]["model"]["compete"] == ["encoder_self"]
  assert set(cell["scores"]) == {"valid", "test", "train"}
  assert cell["train_seconds"] > 0
  assert {"git", "date", "devices"} <= set(cell["provenance"])


def test_the_table_holds_the_means_of_its_cells_and_the_published_figure(whole):
  seeds = [json.loads((whole / f"none-seed{s}.json").read_text()) for s in (0, 1)]
  mean = sum(cell["scores"]["test"]["perplexity"] for cell in seeds) / 2
  shown = (whole / "table.txt").read_text()
  assert f"{mean:.2f} ± " in shown
  assert "[5.45]" in shown
  # Every row says with what it was made.
  assert "Every row: task." in shown
  assert "model.dropout = " in shown
  for name in ("table.tex", "report.html", "numbers.csv", "result.json", "plots/differences.png"):
    assert (whole / name).stat().st_size > 0


@pytest.mark.slow
def test_shards_together_make_the_table_that_one_machine_makes(grid, whole, capsys):
  status, folder = run(grid, "shards", "--shard", "1/2")
  assert status == 0
  assert "2 of 4 runs are not done yet" in capsys.readouterr().out
  assert not (folder / "table.txt").exists()
  _, folder = run(grid, "shards", "--shard", "0/2")
  assert numbers(folder) == numbers(whole)


def test_what_the_seeds_will_show_is_said_from_the_runs_that_are_there(grid, whole, tmp_path):
  arguments = reproduce.Args("tiny", seeds=4, results=whole.parents[1])
  spec, cells = reproduce.grid(arguments)
  said = reproduce.expectations(spec, cells)
  assert "4 seeds of 2 rows" in said
  assert "PPL test " in said
  said = reproduce.expectations(*reproduce.grid(dataclasses.replace(arguments, results=tmp_path)))
  assert "known once a row has two" in said


def test_what_is_done_is_not_made_again(grid, whole, monkeypatch):
  monkeypatch.setattr(reproduce, "_make", lambda *_: pytest.fail("a finished cell was made again"))
  before = {path: path.stat().st_mtime_ns for path in whole.glob("*-seed*.json")}
  status, _ = run(grid, "whole")
  assert status == 0
  assert before == {path: path.stat().st_mtime_ns for path in whole.glob("*-seed*.json")}


def files(folder):
  """Path below the folder -> content, of every file."""
  found = sorted(path for path in folder.rglob("*") if path.is_file())
  return {str(path.relative_to(folder)): path.read_bytes() for path in found}


PARTS = [
  (("--rows", "enc"), "part-enc"),
  (("--seeds", "1"), "part-1-seeds"),
  (("--rows", "none", "--seeds", "1", "--show"), "part-none-1-seeds"),
]


def test_a_part_of_the_table_leaves_the_files_of_the_whole_one(grid, whole, capsys, tmp_path):
  shutil.copytree(whole, tmp_path / "whole" / "tiny" / "tiny")
  for options, name in PARTS:
    before = files(tmp_path)
    status, folder = run(tmp_path, "whole", *options)
    assert status == 0
    after = files(tmp_path)
    assert {path: after[path] for path in before} == before
    added = {path.removeprefix("whole/tiny/tiny/").split("/")[0] for path in after.keys() - before}
    assert added == {name}
    assert (folder / name / "table.txt").stat().st_size > 0
    printed = capsys.readouterr().out
    assert f"a part of the table: the files of the whole one in {folder} stay" in printed
    assert f"report: {folder / name}" in printed
  run(tmp_path, "whole", "--show")
  assert "a part of" not in capsys.readouterr().out


def test_cut_runs_have_a_folder_of_their_own(grid, whole, tmp_path):
  shutil.copytree(whole, tmp_path / "whole" / "tiny" / "tiny")
  before = files(tmp_path / "whole")
  status, folder = run(tmp_path, "whole", "--steps", "3", "--rows", "none", "--seeds", "1")
  assert status == 0
  assert {
    path: data for path, data in files(tmp_path / "whole").items() if path in before
  } == before
  cut = folder.with_name("tiny-3-steps")
  assert json.loads((cut / "none-seed0.json").read_text())["experiment"]["phases"][0]["steps"] == 3
  assert (cut / "part-none" / "table.txt").stat().st_size > 0


def test_a_cell_of_another_configuration_is_refused_and_kept(grid, whole, tmp_path):
  shutil.copytree(whole, tmp_path / "whole" / "tiny" / "tiny")
  path = tmp_path / "whole" / "tiny" / "tiny" / "none-seed0.json"
  cell = json.loads(path.read_text())
  cell["experiment"]["phases"][0]["steps"] = 3
  path.write_text(json.dumps(cell))
  before = path.read_bytes()
  with pytest.raises(UserError, match=r"another configuration: .*steps"):
    run(tmp_path, "whole")
  assert path.read_bytes() == before


def test_a_row_may_have_other_fields_in_use_than_in_training(grid, monkeypatch):
  plain = experiment(grid / "data")
  model = dataclasses.replace(plain.model, encoder_layers=2, shared_layers=1)
  repeated = dataclasses.replace(plain, model=model)
  columns = (Column("PPL test", "test", "perplexity", lower=True),)

  def use(layers):
    rows = {"repeated": Row(repeated, in_use={"encoder_layers": layers})}
    spec = Spec("A row", "a tiny set", rows, "repeated", columns)
    monkeypatch.setitem(registry.TABLES, "in_use", lambda scale, heads: spec)
    registry.table.cache_clear()
    where = ["--results", str(grid / "in_use"), "--workdir", str(grid / "in_use-runs")]
    return reproduce.main(["in_use", "--seeds", "1", *where])

  status, folder = use(1), grid / "in_use" / "in_use" / "tiny"
  cell = json.loads((folder / "repeated-seed0.json").read_text())
  assert status == 0
  assert cell["in_use"] == {"encoder_layers": 1}
  assert cell["experiment"]["model"]["encoder_layers"] == 2
  found, trained = (cell[name]["test"]["perplexity"] for name in ("scores", "scores_as_trained"))
  assert found != trained
  assert f"{found:.2f}" in (folder / "table.txt").read_text()
  with pytest.raises(UserError, match=r"another configuration: in_use\.encoder_layers: 1 there, 3"):
    use(3)


def test_a_damaged_cell_is_named(grid, whole, tmp_path):
  folder = tmp_path / "tiny" / "tiny"
  folder.mkdir(parents=True)
  (folder / "none-seed0.json").write_text("{")
  with pytest.raises(UserError, match=r"none-seed0\.json is not the result of a run"):
    reproduce.main(["tiny", "--results", str(tmp_path), "--show"])


def test_a_row_that_cannot_be_trained_is_reported_and_the_others_are_made(
  grid, whole, monkeypatch, capsys
):

  def fails(cell, *rest):
    if cell.row == "enc":
      raise UserError("out of luck.")
    cell.file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(whole / cell.file.name, cell.file)

  monkeypatch.setattr(reproduce, "_make", fails)
  status, folder = run(grid, "failing", "--seeds", "1")
  assert status == 1
  assert "failed: enc, seed 0: out of luck." in capsys.readouterr().out
  assert (folder / "none-seed0.json").exists()


@pytest.mark.parametrize("shard", ["2/2", "x", "1"])
def test_a_shard_that_is_none_is_refused(grid, shard):
  with pytest.raises(UserError, match="--shard"):
    run(grid, "whole", "--shard", shard)


def test_published_figures_stand_in_the_rows_of_their_tables():
  spec = table("5.1", "tiny", 4)
  assert spec.rows["enc"].published == {"BLEU test": 33.61, "PPL test": 5.41, "PPL train": 4.82}
  assert spec.rows["all"].experiment.model.compete == ("encoder_self", "decoder_self", "cross")
  assert table("5.1", "tiny", 8).rows["enc"].published["BLEU test"] == 32.83
  assert table("5.2", "tiny", 4).rows["12x256"].published == {"BLEU test": 33.71}
  silent = table("5.3", "tiny", 4).rows["dec"]
  assert silent.published == {"BLEU test": 33.41, "PPL test": 5.45}
  assert silent.experiment.model.competition.keep == 3
  ways = table("5.4", "tiny", 4).rows["iterative enc"]
  assert ways.published == {"BLEU test": 32.24, "PPL test": 5.76, "PPL train": 5.29}
  assert {phase.trainable for phase in ways.experiment.phases} == {"rest", "routing"}
  roberta = table("roberta", "tiny", 4)
  assert roberta.rows["enc"].published == {"PPL valid": 10.15, "PPL train": 12.76}
  assert roberta.rows["enc"].experiment.model.compete == ("encoder_self",)
  assert roberta.rows["none"].experiment.model.compete == ()


def test_meta_learned_routers_are_compared_at_equal_steps_on_equal_data():
  spec = table("meta_routers", "tiny", 4)
  made = {name: row.experiment for name, row in spec.rows.items()}
  joint = made["joint"]
  assert {sum(phase.steps for phase in one.phases) for one in made.values()} == {800}
  assert {one.task.data for one in made.values()} == {joint.task.data}
  assert [phase.steps for phase in made["sequential"].phases] == [744, 56]
  assert [phase.steps for phase in made["iterative"].phases] == [93, 7] * 8
  learned = {name: one.task.bilevel for name, one in made.items() if one.task.bilevel}
  assert {name: (one.steps, one.first_order) for name, one in learned.items()} == {
    "meta": (1, False), "meta, first order": (1, True), "meta, no inner steps": (0, False)
  }  # fmt: skip
  assert made["joint, 3 of 4 heads"].model.competition.keep == 3
  assert made["joint, short first"].task.batch.short_first == 1
  assert {column.split for column in spec.columns} == {
    "test", "combination", "attractor", "depth", "length"
  }  # fmt: skip
  with pytest.raises(UserError, match="--scale"):
    table("meta_routers", "paper", 4)


@pytest.mark.parametrize("name", ["5.1", "5.3"])
def test_where_heads_compete_is_a_factorial_of_three_places(name):
  spec = table(name, "tiny", 4)
  places = {"encoder": "encoder_self", "decoder": "decoder_self", "cross": "cross"}
  for row, made in spec.rows.items():
    on = [place for factor, place in places.items() if row in spec.factors[factor]]
    assert sorted(on) == sorted(made.experiment.model.compete)


def test_the_factorial_of_the_committed_runs_is_the_committed_table(tmp_path, monkeypatch):
  committed = ROOT / "results" / "5.1-heads4" / "tiny"
  folder = tmp_path / "5.1-heads4" / "tiny"
  folder.mkdir(parents=True)
  for cell in committed.glob("*-seed*.json"):
    shutil.copy(cell, folder)
  # Drawing takes longer than everything else.
  monkeypatch.setattr(report, "effects_forest", lambda _: style.message("", ""))
  reproduce.main(["5.1", "--results", str(tmp_path), "--show"])
  for name in ("table.txt", "table.tex", "table.csv", "effects.csv"):
    assert (folder / name).read_text() == (committed / name).read_text()


def test_drophead_is_compared_with_and_without_schedule_and_with_twice_the_heads():
  small = table("drophead", "tiny", 4)
  settings = [row.experiment.model for row in small.rows.values()]
  schedules = ("none", "constant", "v")
  expected = [(heads, schedule) for heads in (4, 8) for schedule in schedules]
  assert [(model.heads, model.drophead.schedule) for model in settings] == expected
  published = {"BLEU test": 29.6, "PPL test": 4.02}
  assert small.rows["8 heads, scheduled DropHead"].published == published
  big = table("drophead", "paper", 4).rows["32 heads"].experiment
  assert (big.model.dim, big.task.data.source_language) == (1024, "en")


def test_every_error_signal_is_compared_with_a_constant_and_a_learned_step():
  spec = table("recoding", "ptb", 4)
  found = [row.experiment.model.recoding for row in spec.rows.values()]
  signals = ("surprisal", "argmax", "nll", "mc_dropout", "ensemble")
  expected = [(signal, step) for signal in signals for step in ("constant", "learned")]
  assert [(one.signal, one.step) for one in found] == [("none", "constant"), *expected]
  assert spec.rows["ensemble, learned"].published == {"PPL test": 142.20}
  assert {one.samples for one in found[1:]} == {3}
  paper = table("recoding-5.6", "paper", 4).rows["MC dropout, constant, removed at test"]
  assert (paper.experiment.model.recoding.samples, paper.experiment.model.dim) == (15, 650)


def test_a_scale_that_a_table_does_not_have_is_refused():
  with pytest.raises(UserError, match="public_domain"):
    table("roberta", "tatoeba", 4)


COMMAND = ("5.1", "--rows", "none", "enc", "--seeds", "2", "--steps", "50")


def _start(folder: Path):
  command = [sys.executable, "-m", "train.reproduce", *COMMAND]
  options = ["--results", str(folder / "results"), "--workdir", str(folder / "runs")]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  environment.pop("XLA_FLAGS", None)
  with open(folder.with_suffix(".log"), "a") as log:
    return subprocess.Popen(
      [*command, *options], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_grid_that_is_killed_again_and_again_gives_the_same_table(tmp_path):
  whole = _start(tmp_path / "whole")
  assert whole.wait(1800) == 0
  kills, began = 0, time.monotonic()
  while True:
    process = _start(tmp_path / "killed")
    try:
      # From within the first compilation to well inside a run.
      assert process.wait(12 + 9 * kills) == 0
      break
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGKILL)
      process.wait()
      kills += 1
    assert time.monotonic() - began < 1800
  assert kills >= 3
  place = "results/5.1-heads4/tiny-50-steps/part-none_enc"
  one, two = (tmp_path / name / place for name in ("whole", "killed"))
  assert numbers(one) == numbers(two)
  assert (one / "table.txt").read_text() == (two / "table.txt").read_text()


def test_the_program_leaves_signals_as_they_were(grid, whole):
  before = signal.getsignal(signal.SIGTERM)
  run(grid, "whole", "--show")
  assert signal.getsignal(signal.SIGTERM) is before
