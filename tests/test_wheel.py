"""The wheel, installed outside the checkout: what users get and do with it.

`make test-wheel` installs it with its extras first and names that environment in
COMPMOD_INSTALLED. Without that, the wheel is built here and gets an environment that borrows the
dependencies of the tests.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from website import changes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
INGREDIENTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
# A run of seconds.
_FIELDS = {
  "evaluate_every": 20,
  "evaluate_sentences": 10,
  "model.decoder_layers": 1,
  "model.dim": 16,
  "model.encoder_layers": 1,
  "model.ffn_dim": 32,
  "model.heads": 2,
  "optimizer.warmup_steps": 5,
  "phases.0.steps": 20,
  "task.batch.bucket_count": 1,
  "task.batch.tokens": 512,
  "task.data.shifted": 5,
  "task.data.test": 20,
  "task.data.train": 400,
  "task.data.valid": 20,
  "task.decode.method": "greedy",
  "task.tokenizer.vocab_size": 300,
}
TINY = [f"--config.{field}={value}" for field, value in _FIELDS.items()]


def built(folder: Path) -> Path:
  """The wheel of a copy of the sources, so that nothing of an earlier build gets into it."""
  source = folder / "source"
  for name in ("compmod_jax", "configs"):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / name, source / name, ignore=ignored)
  for name in INGREDIENTS:
    shutil.copy(ROOT / name, source / name)
  pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
  subprocess.run([*pip, "--wheel-dir", str(folder / "dist"), str(source)], check=True)
  (wheel,) = (folder / "dist").glob("*.whl")
  return wheel


def borrowed(folder: Path) -> Path:
  """An environment with the wheel, whose other packages are those of the running one."""
  subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
  (packages,) = (folder / "env").glob("lib/python3*/site-packages")
  pip = [sys.executable, "-m", "pip", "--python", str(folder / "env" / "bin" / "python")]
  install = ["install", "--quiet", "--no-deps", "--ignore-installed", str(built(folder))]
  subprocess.run([*pip, *install], check=True)
  lent = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
  (packages / "borrowed.pth").write_text("\n".join(lent))
  return folder / "env"


class Place:
  """A folder far from the checkout, in which `compmod` is an installed program."""

  def __init__(self, folder: Path, environment: Path):
    self.folder, self.programs = folder, environment / "bin"

  def run(self, *words: object, folder: str = ".", text: str = "", status: int = 0) -> str:
    """Runs a program of the environment; its standard output."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "PYTEST_", "PYTHON"))}
    path = os.pathsep.join([str(self.programs), kept["PATH"]])
    more = {"PATH": path, "COMPMOD_CACHE": str(self.folder / "cache"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
      list(map(str, words)),
      cwd=self.folder / folder,
      env={**kept, **more},
      input=text,
      capture_output=True,
      text=True,
    )
    assert done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + (done.stderr if status else "")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
  folder = tmp_path_factory.mktemp("wheel")
  given = os.environ.get("COMPMOD_INSTALLED")
  environment = Path(given).absolute() if given else borrowed(folder)
  (folder / "empty").mkdir()
  return Place(folder / "empty", environment)


@pytest.fixture(scope="module")
def trained(place) -> str:
  """The workdir of a short run on the grammar's sentences."""
  place.run("compmod", "train", "--config", "nmt_cah:grammar", "--workdir", "runs/tiny", *TINY)
  return "runs/tiny"


def test_the_installed_package_stands_alone(place):
  code = (
    "import importlib.util, compmod_jax\n"
    "print(compmod_jax.__file__)\n"
    "print([n for n in ('train', 'configs', 'tests') if importlib.util.find_spec(n)])"
  )
  # Old configurations import `train`, which is an empty package where there is none.
  file, found = place.run("python", "-c", code).splitlines()
  assert "site-packages" in Path(file).parts
  assert not Path(file).is_relative_to(ROOT / "compmod_jax")
  assert found == "['train']"


def test_the_console_script_lists_its_programs_and_configurations(place):
  shown = place.run("compmod")
  assert shown.startswith("usage: compmod PROGRAM")
  for name in ("train", "predict", "check-data", "init"):
    assert f"  compmod {name} " in shown
  shown = place.run("compmod", "train", "--help")
  assert shown.startswith("usage: compmod train --config ")
  for file in (ROOT / "configs").glob("*.py"):
    assert f"\n  {file.stem} " in shown


def test_a_model_is_trained_used_and_looked_into(place, trained):
  assert (place.folder / trained / "report.html").is_file()
  output = place.run("compmod", "predict", "--workdir", trained, text="Der Hund schläft.\n\n")
  assert len(output.splitlines()) == 2
  place.run("compmod", "analyse", "heads", "--workdir", trained, "--sentences", "10")
  assert (place.folder / trained / "analysis/heads/report.html").is_file()
  shown = place.run("compmod", "evaluate", "--workdir", trained, "--split", "test")
  assert "BLEU" in shown
  code = (
    f"import compmod_jax; print(compmod_jax.load({trained!r}).translate(['Der Hund schläft.']))"
  )
  assert place.run("python", "-c", code).startswith("[")


def test_a_mechanism_in_a_file_of_ones_own_trains_and_is_used(place):
  for name, text in changes.outside((ROOT / "docs/your_own_mechanism.md").read_text()).items():
    (place.folder / name).write_text(text)
  (place.folder / "beside.py").write_text("from gated import get_config\n")
  shown = place.run("compmod", "train", "--config", "beside.py", "--describe")
  assert "* | self_attention/output_gate " in shown
  place.run("compmod", "train", "--config", "noisy.py", "--workdir", "runs/noisy", *TINY)
  words = ("compmod", "predict", "--workdir", "runs/noisy")
  shown = place.run(*words, text="Der Hund schläft.\n", status=2)
  assert "--code FILE" in shown
  assert len(place.run(*words, "--code", "noisy.py", text="Der Hund.\n").splitlines()) == 1


def test_the_command_of_a_published_table_runs(place):
  words = "reproduce 5.1 --scale tiny --rows none --seeds 1 --show"
  assert "1 of 1 runs are not done yet" in place.run("compmod", *words.split())


def test_the_supervisor_starts_training(place):
  words = ["compmod", "supervise", "--", "compmod", "train", "--config", "own:pairs", "--describe"]
  assert "encoder" in place.run(*words)


def test_mistakes_are_explained_with_the_console_scripts_name(place):
  shown = place.run("compmod", "supervise", status=2)
  assert "compmod supervise -- --config" in shown
  shown = place.run("python", "-m", "compmod_jax", "supervise", status=2)
  assert "python -m compmod_jax supervise -- --config" in shown


def test_a_configuration_with_old_imports_opens(place):
  (place.folder / "old.py").write_text(
    "from train.experiment import load_config\n"
    "import compmod_jax.data.text\n"
    "def get_config(variant):\n"
    '  return load_config("own:pairs")\n'
  )
  assert "encoder" in place.run("compmod", "train", "--config", "old.py", "--describe")


def test_the_commands_of_the_starter_project_run_as_written(place):
  place.run("compmod", "init", "first")
  readme = (place.folder / "first/README.md").read_text()
  (commands,) = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)
  lines = commands.splitlines()
  assert [re.findall(r"compmod ([\w-]+)", line) for line in lines] == [
    ["check-data"],
    ["train"],
    ["predict"],
    ["analyse"],
  ]
  outputs = [place.run("bash", "-o", "pipefail", "-c", line, folder="first") for line in lines]
  assert outputs[2] == "the dog sees the cat\n"
  for report in re.findall(r"runs/first/\S*report\.html", readme):
    assert (place.folder / "first" / report).is_file()
  (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
  assert place.run("python", "-c", code, folder="first") == "['the child laughs']\n"
