"""The tutorial's code is run as a reader would: its changes are made to a copy, which is tested."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from website import changes

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "your_own_mechanism.md"


def blocks() -> list[tuple[str, str, str]]:
  """(language, file, content) of every block that names a file."""
  return changes.blocks(TUTORIAL.read_text())


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
  """The repository with the tutorial's mechanism in it."""
  root = tmp_path_factory.mktemp("tutorial")
  for name in ("compmod_jax", "train", "configs", "tests"):
    shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
  for name in ("pyproject.toml", "conftest.py"):
    shutil.copy(ROOT / name, root / name)
  for language, file, content in blocks():
    path = root / file
    assert path.exists() == (language == "diff"), file
    path.write_text(content if language == "python" else changes.apply(path.read_text(), content))
  return root


def run(root: Path, *command: str) -> subprocess.CompletedProcess:
  environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "PYTEST_"))}
  environment |= {"PYTHONPATH": str(root), "COMPMOD_CACHE": str(root / "cache")}
  return subprocess.run(
    [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True
  )


def test_it_takes_three_files():
  assert len(blocks()) == 3
  assert sum(language == "python" for language, _, _ in blocks()) == 2


@pytest.mark.programs
def test_its_own_test_passes(copy):
  found = run(copy, "-m", "pytest", "-q", "-p", "no:xdist", "tests/mechanisms/test_score_noise.py")
  assert found.returncode == 0, found.stdout
  assert re.search(r"^5 passed", found.stdout, re.MULTILINE), found.stdout


@pytest.mark.programs
def test_its_option_is_known_to_the_program_and_its_mistakes_are_told(copy):
  option = "--config.model.score_noise.scale"
  command = ("-m", "train.main", "--config", "configs/nmt_cah.py")
  found = run(copy, *command, f"{option}=-1")
  assert (found.returncode, found.stderr.count("score_noise.scale is -1.0")) == (2, 1)
  assert option in run(copy, *command, "--help-all").stdout


def test_its_code_is_in_the_style_of_the_rest(copy):
  files = [str(copy / file) for _, file, _ in blocks()]
  for check in (("check",), ("format", "--check")):
    found = run(copy, "-m", "ruff", *check, *files)
    assert found.returncode == 0, found.stdout
