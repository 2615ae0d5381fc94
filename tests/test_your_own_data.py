"""The page on one's own data: its files are read, and its commands do what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compmod_jax.commands import analyse, cli, generate, predict, score
from compmod_jax.commands import train as main_program
from compmod_jax.commands.config_option import parse
from configs.own import get_config

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "your_own_data.md").read_text()
FILES = dict(re.findall(r"```\w+ file=(\S+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
  line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
VARIANTS = ("pairs", "text", "questions")


@pytest.fixture
def place(tmp_path, monkeypatch):
  """A folder with the page's files."""
  for name, content in FILES.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
  shutil.copytree(ROOT / "configs", tmp_path / "configs")
  monkeypatch.chdir(tmp_path)
  return tmp_path


def test_the_training_files_have_ten_lines_each():
  trained = [content for name, content in FILES.items() if "train." in name]
  assert [len(content.splitlines()) for content in trained] == [10, 10, 10]


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_files_are_read_whole_by_its_configuration(place, variant):
  given = get_config(variant)
  task = given.task.build(given.model)
  task.dataset.check()
  notes = " ".join(task.dataset.notes())
  assert not re.search(r"[1-9]\d* (pairs|questions) (are )?left out", notes), notes
  batches, _ = task.dataset.train_batches(seed=0, multiple=1)
  batch = next(batches)
  assert (batch["index"] >= 0).any()


def test_the_options_of_its_commands_exist(place):
  """Every command is parsed by its own program."""
  programs = {"predict": predict, "score": score, "generate": generate}
  seen = set()
  for command in COMMANDS:
    words = re.search(r"python -m train\.(\w+) (.*)", command)
    assert words, command
    name, options = words[1], re.findall(r'"[^"]*"|\S+', words[2])
    options = [option.strip('"') for option in options]
    seen.add(name)
    if name == "main":
      assert parse(main_program.Args, options).workdir.parts[0] == "runs"
    elif name == "analyse":
      kind = analyse.ANALYSES[options[0]]
      cli.options(analyse._arguments(kind.options), options[1:])
    else:
      cli.options(programs[name].Args, options)
  assert seen == {"main", "predict", "score", "generate", "analyse"}


def _run(place: Path, command: str) -> str:
  kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "PYTEST_"))}
  path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
  more = {"PYTHONPATH": str(ROOT), "PATH": path, "COMPMOD_CACHE": str(place / "cache")}
  done = subprocess.run(
    ["bash", "-o", "pipefail", "-c", command],
    cwd=place,
    env={**kept, **more, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, f"{command}\n{done.stderr}"
  return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_its_commands_run_as_written_and_answer(place, variant):
  """Training included: a minute or two of one core for each."""
  mine = [command for command in COMMANDS if f"own_{variant}" in command]
  outputs = [_run(place, command).splitlines() for command in mine]
  if variant == "pairs":
    assert outputs[1] == ["the dog sees the cat"]
    total, count, *tokens = outputs[2][0].split("\t")
    assert float(total) > -3
    assert int(count) == len(tokens) == 4
    assert (place / "runs/own_pairs/analysis/attention/report.html").is_file()
  elif variant == "text":
    assert outputs[1][0].startswith("the cat ")
    assert len(outputs[2]) == 3
    assert all(line.split("\t")[2].startswith("the child ") for line in outputs[2])
    assert float(outputs[3][0].split("\t")[0]) < 0
  else:
    assert outputs[1] == ["hall"]
    assert outputs[2] == ["(2)"]
