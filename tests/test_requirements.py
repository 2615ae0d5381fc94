"""The locked requirements: hashes for all, the versions of the constraints, all dependencies."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path.stem for path in (ROOT / "requirements").glob("*.txt"))


def normalised(name: str) -> str:
  return re.sub(r"[-_.]+", "-", name).lower()


def locked(file: str) -> dict[str, tuple[str, list[str]]]:
  """Version and hashes of every package of a file."""
  text = (ROOT / f"requirements/{file}.txt").read_text().replace("\\\n", " ")
  packages = {}
  for line in text.splitlines():
    name, version = line.split()[0].split("==")
    packages[normalised(name)] = (version, re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line))
  return packages


def pinned() -> dict[str, str]:
  lines = (ROOT / "constraints.txt").read_text().split()
  return {normalised(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("file", FILES)
def test_every_package_has_a_hash_and_the_version_of_the_constraints(file):
  pins = pinned()
  packages = locked(file)
  assert packages
  for name, (version, hashes) in packages.items():
    assert hashes, name
    assert pins.get(name, version) == version, name


def test_what_the_project_depends_on_is_locked():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extras = project["optional-dependencies"]

  def of(requirements: list[str]) -> list[str]:
    """Requirements, those of the project's own extras in the place of their names."""
    found = []
    for line in requirements:
      own = re.fullmatch(r"compmod_jax\[(.*)\]", line)
      found += of([one for name in own[1].split(",") for one in extras[name]]) if own else [line]
    return found

  asked = {"run": [*project["dependencies"], *of(extras["train"])]}
  asked["test"] = [*project["dependencies"], *of(extras["test"])]
  for file, requirements in asked.items():
    names = {normalised(re.split(r"[^\w.-]", line)[0]) for line in requirements}
    assert names <= set(locked(file)), names - set(locked(file))
  # Tests run what users install.
  test = locked("test")
  assert all(test[name] == version for name, version in locked("run").items())


def test_make_installs_nothing_without_a_hash_but_this_project():
  command = ["make", "--dry-run", "--always-make", "VENV=nowhere", "nowhere/.test"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  installs = [line for line in done.stdout.splitlines() if "pip install" in line]
  assert len(installs) == 4
  for line in installs:
    assert "--no-deps" in line
    assert ("--require-hashes" in line) != line.endswith("--editable .")


def test_the_compilers_for_other_machines_are_of_the_locked_versions():
  makefile = (ROOT / "Makefile").read_text()
  others = locked("tpu") | locked("cuda12")
  named = re.findall(r"\b(libtpu|jax-cuda12-\w+|nvidia-[\w-]+)==([\w.]+)", makefile)
  assert len(named) == 4
  for name, version in named:
    assert others[name][0] == version
