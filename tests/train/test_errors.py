"""Mistakes get one clear paragraph and exit status 2, without a traceback, and lose nothing."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from programs import (
  CONFIG,
  STEPS,
  Place,
  Program,
  assert_as_uninterrupted,
  checkpoint_folders,
  make_newer,
  metrics_of,
  steps_saved,
  write_data,
)

from compmod_jax.checkpoints.model_folder import load_model_folder, save_model_folder
from compmod_jax.commands import average, cli, evaluate, predict, train
from compmod_jax.data.tokenizers.vocabulary import Words
from compmod_jax.training.workdir import alone


@pytest.fixture
def here(tmp_path, monkeypatch):
  """A place with data and configuration, for programs that run in this process and do not train."""
  place = Place(tmp_path / "place")
  write_data(place.data, {"train": 40, "valid": 9, "test": 5})
  place.config.write_text(CONFIG)
  monkeypatch.setenv("TINY_DATA", str(place.data))
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  before = jax.config.jax_compilation_cache_dir
  yield place
  jax.config.update("jax_compilation_cache_dir", before)
  compilation_cache.reset_cache()


@pytest.fixture
def mistake(monkeypatch, capsys):
  """Runs a program in this process and returns its message, after checking its form."""

  def run(program, *arguments):
    monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
      cli.run(program)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    *before, message = err.splitlines()
    assert out == ""
    assert message.startswith("error: ")
    assert len(message) > 40
    assert not any("Traceback" in line or line.startswith("error") for line in before)
    return message

  return run


def _contents(folder: Path) -> dict[str, str]:
  files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
  return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (["--config.model.headz=4"], ["--config.model.headz", "--config.model.heads?"]),
    (["--config.model.heads=four"], ["--config.model.heads", "four"]),
    (["--config.optimizer.schedule=cosin"], ["schedule", "'cosin'", "cosine"]),
    (["--config.model.heads=3"], ["model.heads is 3", "does not divide model.dim = 16"]),
    (["--config.mesh.fsdp=3"], ["'fsdp': 3", "8", "multiply to the number of devices"]),
    (["--config.mesh.data=-1", "--config.mesh.fsdp=-1"], ["only one axis may be -1"]),
    (["--config.seed=-1"], ["seed", "-1", "negative"]),
    (["--config.micro_batches=0"], ["micro_batches is 0", "at least 1"]),
    (["--config.phases.0.steps=0"], ["epochs", "steps", "positive"]),
    (["--config.model.max_length=4"], ["8 tokens", "model.max_length is 4", "Raise"]),
    (["--config.task.tokenizer.vocab_size=3"], ["vocab_size is 3"]),
    (["--config.task.data.folder=/nowhere"], ["folder is '/nowhere'", "no folder"]),
    (["--config.task.data.folder=$NOT_SET/x"], ["environment variable NOT_SET is not set"]),
    (["--config.task.data.valid=dev"], ["dev.de", "valid.de"]),
    (["--config.task.batch.buckets", "2"], ["No training pair is left", "ceiling"]),
    (["bogus"], ["bogus is not an option", "--help"]),
  ],
)
def test_a_wrong_option_is_named_and_the_workdir_stays_free(here, mistake, options, words):
  workdir = here.root / "run"
  message = mistake(train.main, *here.arguments(workdir, *options))
  assert [word for word in words if word not in message] == []
  # The command can be mended: nothing has claimed the workdir.
  assert not _contents(workdir)


def _write(data: Path, split: str, text: str) -> None:
  for side in ("de", "en"):
    (data / f"{split}.{side}").write_text(text)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (lambda data: (data / "train.en").unlink(), ["train.en", "train.de", "valid.en"]),
    (lambda data: (data / "train.de").write_text(""), ["train.de is empty"]),
    (lambda data: (data / "train.en").write_text("A\nB\n"), ["train.de has 40", "train.en has 2"]),
    (lambda data: (data / "train.de").write_bytes(b"a\n\xff\n"), ["train.de:2", "not UTF-8"]),
    (lambda data: (data / "test.de").unlink(), ["test.de", "test.en"]),
    (lambda data: _write(data, "valid", "a " * 9), ["'valid'", "8 tokens", "ceiling"]),
    (lambda data: _write(data, "train", "\n"), ["train.de is empty"]),
  ],
)
def test_what_is_wrong_with_data_files_is_told(here, mistake, change, words):
  change(here.data)
  message = mistake(train.main, *here.arguments(here.root / "run"))
  assert [word for word in words if word not in message] == []
  assert not _contents(here.root / "run")


@pytest.mark.parametrize(
  ("text", "words"),
  [
    (None, ["config.py", "not a file"]),
    ("x = 1\n", ["no function get_config"]),
    ("def get_config(variant):\n  return 3\n", ["must return an Experiment"]),
    ("def get_config(variant)\n  return 3\n", ["config.py:1", "SyntaxError"]),
    (CONFIG.replace("heads=2", "headz=2"), ["config.py:", "TypeError", "'headz'"]),
    (CONFIG.replace("heads=2", "heads='2'"), ["config.py:", "heads"]),
    (CONFIG.replace("heads=2", "heads=5"), ["model.heads is 5"]),
    (CONFIG.replace("PHASES[variant]", "PHASES['tree']"), ["config.py:", "KeyError", "'tree'"]),
  ],
)
def test_a_mistake_in_a_configuration_file_is_told_with_its_line(here, mistake, text, words):
  here.config.write_text(text) if text else here.config.unlink()
  message = mistake(train.main, *here.arguments(here.root / "run"))
  assert [word for word in words if word not in message] == []


def test_debug_adds_the_traceback(here, monkeypatch, capsys):
  arguments = here.arguments(here.root / "run", "--config.task.data.folder=/nowhere", "--debug")
  monkeypatch.setattr(sys, "argv", ["program", *arguments])
  with pytest.raises(SystemExit) as stop:
    cli.run(train.main)
  err = capsys.readouterr().err
  assert stop.value.code == 2
  assert "Traceback" in err
  assert "UserError" in err
  assert err.splitlines()[-1].startswith("error: folder is '/nowhere'")


def test_a_workdir_that_cannot_be_written_is_told(here, mistake):
  (here.root / "file").write_text("mine")
  for workdir in (here.root / "file", here.root / "file" / "run", Path("/proc/run")):
    message = mistake(train.main, *here.arguments(workdir))
    assert f"--workdir {workdir} cannot be written" in message
  assert (here.root / "file").read_text() == "mine"


def test_a_workdir_in_which_another_program_trains_is_told(here, mistake):
  workdir = here.root / "run"
  with alone(workdir):
    message = mistake(train.main, *here.arguments(workdir))
  assert f"--workdir {workdir} is in use" in message
  assert not _contents(workdir)


@pytest.mark.parametrize("program", [evaluate, predict, average])
def test_programs_that_use_a_model_say_where_there_is_none(here, mistake, program):
  message = mistake(program.main, "--workdir", here.root / "nowhere")
  assert str(here.root / "nowhere") in message


class TestWithARun:
  """Mistakes about a workdir that holds a run."""

  @pytest.fixture
  def run(self, here, place, tmp_path, monkeypatch):
    """A copy of the reference as it was after step 24."""
    monkeypatch.setenv("TINY_DATA", str(place.data))
    self.place = place
    return place.stopped_at(24, tmp_path / "run")

  def test_another_configuration_is_refused_and_what_differs_is_listed(self, run, mistake):
    before = _contents(run)
    options = ("--config.model.heads=4", "--config.seed=3", "--config.mesh.fsdp=4")
    message = mistake(train.main, *self.place.arguments(run, *options))
    assert f"{run} belongs to another configuration" in message
    assert "model.heads: 2 there, 4 here" in message
    assert "seed: 0 there, 3 here" in message
    assert "mesh" not in message  # other devices are fine
    assert _contents(run) == before

  def test_tokenizers_of_another_text_are_refused(self, run, mistake):
    """A folder that is whole, but of another run."""
    folder = run / "tokenizers"
    files = load_model_folder(folder)[1]
    names = sorted(files)
    files[names[0]] = Words(["other", "words"]).to_bytes()
    save_model_folder(folder, params={}, files=files, meta={})
    before = _contents(run / "checkpoints")
    message = mistake(train.main, *self.place.arguments(run))
    assert "The checkpoint of step 24 was made with another tokenizer" in message
    assert "Remove that folder" in message
    assert _contents(run / "checkpoints") == before

  def test_where_every_checkpoint_is_damaged_the_run_does_not_start_again(self, run, mistake):
    for folder in checkpoint_folders(run):
      (folder / "meta.json").write_text("{}")
    before = _contents(run)
    message = mistake(train.main, *self.place.arguments(run))
    assert "no checkpoint in" in message
    assert "step_00000024: meta.json was changed" in message
    assert _contents(run) == before

  def test_a_checkpoint_of_a_newer_version_is_refused(self, run, mistake):
    for folder in checkpoint_folders(run):
      make_newer(folder)
    before = _contents(run)
    message = mistake(train.main, *self.place.arguments(run))
    assert "schema version 99" in message
    assert "newer" in message
    assert _contents(run) == before

  def test_a_log_that_cannot_be_written_is_told(self, run, mistake):
    """A full disk that any user can have."""
    (run / ".metrics.jsonl.new").symlink_to("/dev/full")
    before = _contents(run)
    message = mistake(train.main, *self.place.arguments(run))
    assert f"{run / 'metrics.jsonl'}: cannot be written (No space left on device)" in message
    assert _contents(run) == before


def _mount(folder: Path, size: int) -> bool:
  command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
  return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
  """A function that makes a disk of so many kB, and one that enlarges it; root may do that."""
  folder = tmp_path / "disk"
  folder.mkdir()
  if not shutil.which("mount") or not _mount(folder, 64):
    pytest.skip("mounting a small disk is not permitted")

  def resize(size):
    command = ["mount", "-o", f"remount,size={size}k", str(folder)]
    subprocess.run(command, check=True)

  yield folder, resize
  subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_more_room_continues_it(place, small_disk):
  disk, resize = small_disk
  workdir = disk / "run"
  resize(2500)  # room for a few checkpoints
  with Program(place, workdir) as program:
    shown = program.finish(2)
  message = shown.splitlines()[-1]
  assert re.match(r"error: checkpoint step_000000\d\d cannot be written to .*Free some", message)
  assert steps_saved(workdir)
  assert "Traceback" not in shown
  resize(50000)
  with Program(place, workdir) as program:
    program.trained()
  assert_as_uninterrupted(workdir, place.reference)


@pytest.mark.programs
@pytest.mark.parametrize("left", [0, 200])
def test_a_disk_that_is_full_at_the_end_keeps_the_result(place, small_disk, mistake, left):
  disk, resize = small_disk
  resize(50000)
  workdir = place.stopped_at(STEPS, disk / "run")
  for path in (*workdir.glob("report*"), *workdir.glob("results*")):
    path.unlink()
  shutil.rmtree(workdir / "plots")
  status = os.statvfs(disk)
  used = (status.f_blocks - status.f_bfree) * status.f_frsize // 1024
  resize(used + left)
  before = _contents(workdir / "checkpoints") | _contents(workdir / "models")
  with Program(place, workdir) as program:
    shown = program.finish(2)
  assert "Traceback" not in shown
  assert "cannot be written (No space left" in shown or "the disk is full" in shown.lower()
  assert _contents(workdir / "checkpoints") | _contents(workdir / "models") == before
  assert metrics_of(workdir, "eval") == metrics_of(place.reference, "eval")
