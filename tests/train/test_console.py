"""The console script, and what stands for it where it is not on the path."""

import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT

import compmod_jax
from compmod_jax.commands import cli, console, init, programs
from compmod_jax.core.errors import UserError
from compmod_jax.tables.registry import table
from compmod_jax.training.experiment import load_config, variants

TEXT = "Run python -m train.main --config C, then python -m train.check_data."


def end(monkeypatch, *words: str) -> int:
  monkeypatch.setattr(sys, "argv", list(words))
  with pytest.raises(SystemExit) as stop:
    console.main()
  return int(stop.value.code or 0)


@pytest.mark.parametrize(
  ("script", "shown"),
  [
    ("/bin/compmod", "Run compmod train --config C, then compmod check-data."),
    (
      "/lib/compmod_jax/__main__.py",
      "Run python -m compmod_jax train --config C, then python -m compmod_jax check-data.",
    ),
    ("/checkout/train/main.py", TEXT),
  ],
)
def test_commands_in_texts_are_written_as_those_of_the_program_that_runs(
  script, shown, monkeypatch
):
  monkeypatch.setattr(sys, "argv", [script])
  assert cli.as_started(TEXT) == shown


def test_a_recorded_command_starts_the_program_again(monkeypatch):
  argv = ["--config", "own:pairs", "--workdir", "my runs"]
  monkeypatch.setattr(sys, "argv", ["/bin/compmod"])
  assert cli.command("main", argv) == "compmod train --config own:pairs --workdir 'my runs'"
  monkeypatch.setattr(sys, "argv", ["/checkout/train/main.py"])
  assert cli.command("main", []) == "python -m train.main"


@pytest.mark.parametrize("words", [["compmod"], ["compmod", "--help"], ["compmod", "help"]])
def test_without_a_program_all_are_listed(words, monkeypatch, capsys):
  assert end(monkeypatch, *words) == 0
  shown = capsys.readouterr().out
  assert shown.startswith("usage: compmod PROGRAM")
  for name, _ in programs():
    assert f"  compmod {name.replace('_', '-')} " in shown


def test_help_of_a_program_may_be_asked_for_in_words(monkeypatch, capsys):
  assert end(monkeypatch, "compmod", "help", "check-data") == 0
  assert capsys.readouterr().out.startswith("usage: compmod check-data ")
  assert end(monkeypatch, "compmod", "help", "trian") == 2
  assert "Did you mean 'train'?" in capsys.readouterr().err


def test_the_version_is_printed(monkeypatch, capsys):
  assert end(monkeypatch, "compmod", "--version") == 0
  assert capsys.readouterr().out == f"compmod_jax {compmod_jax.__version__}\n"


def test_an_unknown_program_is_a_mistake_that_names_the_nearest(monkeypatch, capsys):
  assert end(monkeypatch, "compmod", "trian") == 2
  assert "Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["check-data", "check_data"])
def test_a_program_prints_its_help_with_the_console_scripts_name(name, monkeypatch, capsys):
  assert end(monkeypatch, "compmod", name, "--help") == 0
  assert capsys.readouterr().out.startswith("usage: compmod check-data ")


def test_the_help_of_analyses_has_the_console_scripts_name(monkeypatch, capsys):
  assert end(monkeypatch, "compmod", "analyse", "--help") == 0
  shown = capsys.readouterr().out
  assert shown.startswith("usage: compmod analyse ")
  assert "python -m" not in shown


def test_the_package_is_a_program_of_the_same_kind():
  command = [sys.executable, "-m", "compmod_jax", "init", "--nonsense"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
  assert done.returncode == 2
  assert done.stderr.startswith("error: ")


# Configurations by name.


@pytest.mark.parametrize("argument", ["scan:simple", "configs/scan.py:simple"])
def test_the_packages_configurations_are_found_in_any_folder(argument, tmp_path, monkeypatch):
  expected = load_config(str(ROOT / "configs/scan.py:simple"))
  monkeypatch.chdir(tmp_path)
  assert load_config(argument) == expected


def test_a_folder_of_configurations_of_ones_own_is_not_filled_up(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").mkdir()
  with pytest.raises(UserError, match=r"'configs/scan\.py', which is not a file, nor the name"):
    load_config("configs/scan.py:simple")


def test_a_published_table_is_known_in_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").mkdir()
  for name in ("5.1", "roberta", "recoding", "nemot-3.1", "nemot-3.7"):
    assert table(name, "tiny", 4).rows


# The starter project.


def test_a_starter_project_has_a_configuration_that_reads_its_data(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert end(monkeypatch, "compmod", "init", "first") == 0
  shown = capsys.readouterr().out
  assert "cd first" in shown
  files = sorted(str(path.relative_to("first")) for path in Path("first").rglob("*.*"))
  assert files == ["README.md", "data/train.tsv", "data/valid.tsv", "translate.py"]
  assert all(file in shown for file in files)
  monkeypatch.chdir("first")
  assert variants("translate.py") == ["plain"]
  for variant, heads_compete in (("", True), ("plain", False)):
    given = load_config(f"translate.py:{variant}")
    assert bool(given.model.compete) is heads_compete
    task = given.task.build(given.model)
    task.dataset.check()
    batches, _ = task.dataset.train_batches(seed=0, multiple=1)
    assert (next(batches)["index"] >= 0).sum() > 1


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_starter_project_overwrites_nothing(kind, tmp_path):
  place = tmp_path / "mine"
  if kind == "folder":
    place.mkdir()
    (place / "README.md").write_text("mine")
  else:
    place.write_text("mine")
  with pytest.raises(UserError, match="not an empty folder"):
    init.write(place)
  kept = place / "README.md" if kind == "folder" else place
  assert kept.read_text() == "mine"
  (tmp_path / "empty").mkdir()
  assert init.write(tmp_path / "empty")
