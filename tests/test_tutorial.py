"""The tutorial's code is run as a reader would: its changes are made to a copy, which is tested."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.training.experiment import load_config
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
    if language == "python" and path.exists() and path.read_text() == content:
      pytest.skip("the tutorial's changes are made in this checkout already")
    assert path.exists() == (language == "diff"), file
    path.write_text(content if language == "python" else changes.apply(path.read_text(), content))
  return root


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
  """Folder of the tutorial's files outside the package."""
  folder = tmp_path_factory.mktemp("outside")
  for name, text in changes.outside(TUTORIAL.read_text()).items():
    (folder / name).write_text(text)
  return folder


def test_noise_outside_the_package_is_checked_and_none_is_no_edit(outside):
  model = load_config(str(outside / "noisy.py")).model
  plain = dataclasses.replace(model, noise=0.0)
  assert len(model.training_edits()) == len(plain.training_edits()) + 1
  with pytest.raises(UserError, match=r"model\.noise is -1"):
    dataclasses.replace(model, noise=-1.0)


def test_attention_outside_the_package_is_the_models(outside):
  (outside / "beside.py").write_text("from gated import get_config\n")
  config = load_config(str(outside / "beside.py")).model
  config = dataclasses.replace(config, dim=16, ffn_dim=16, encoder_layers=1, decoder_layers=1)
  tokens = jax.device_put(np.array([[2, 5, 4, 3]], np.int32))

  def run(config, edits=()):
    model = config.seq2seq(8, 8, 0)
    params = jax.device_put(drawn(model.init, tokens, tokens, seed=1))
    off = Intermediates().editing(dict.fromkeys(edits, jnp.ones_like))
    logits = model.apply(params, tokens, tokens, intermediates=off)
    return params["params"], np.asarray(logits)

  params, gated = run(config)
  kinds = ("encoder_0", "self"), ("decoder_0", "self"), ("decoder_0", "cross")
  for layer, kind in kinds:
    assert params[layer][f"{kind}_attention"]["output_gate"]["kernel"].shape == (16, 1)
  plain, _ = run(config.plain())
  assert "output_gate" not in str(plain)
  sites = [f"{layer.replace('_', '/layer_')}/{kind}/output_gate" for layer, kind in kinds]
  _, opened = run(config, sites)
  assert not np.array_equal(gated, opened)


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
