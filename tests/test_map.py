"""docs/map.md: what it says of files, folders and functions is so."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "compmod_jax"
TEXT = (ROOT / "docs/map.md").read_text()


def section(heading):
  return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)[1]


def rows(heading):
  lines = [line for line in section(heading).splitlines() if line.startswith("|")]
  return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def definitions(path):
  """Names of functions, classes and methods of a file, methods with their class."""
  found = set()
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      found.add(node.name)
      found |= {
        f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
      }
  return found


def paths_of(line):
  """Path in backticks -> what it is, or None: below the repository, the package, or a folder that
  the line named before."""
  found, bases = {}, [ROOT, PACKAGE]
  for path in re.findall(r"`([\w/.]+(?:\.py|\.md|\.yml|/))`", line):
    found[path] = next((base / path for base in bases if (base / path).exists()), None)
    if found[path] is not None:
      bases.append(found[path] if found[path].is_dir() else found[path].parent)
  return found


@pytest.mark.parametrize(
  "heading", ["Folders", "One batch, from text to updated parameters", "Where to change what",
              "How to add"]
)  # fmt: skip
def test_every_path_of_the_map_exists(heading):
  found = [pair for line in section(heading).splitlines() for pair in paths_of(line).items()]
  assert found
  assert not [path for path, here in found if here is None]


def test_every_folder_of_the_package_has_a_line():
  named = {cell.strip("`") for cell, *_ in rows("Folders")}
  folders = {f"compmod_jax/{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
  assert folders <= named


def test_the_walk_is_of_ten_functions_that_are_there():
  walk = rows("One batch, from text to updated parameters")
  assert [int(number) for number, *_ in walk] == list(range(1, 11))
  for _, function, path, _ in walk:
    assert function.strip("`") in definitions(ROOT / path.strip("`"))


def test_functions_that_are_to_be_changed_are_there():
  named = 0
  for _, where in rows("Where to change what"):
    files = [
      file
      for path in paths_of(where).values()
      for file in (path.glob("*.py") if path.is_dir() else [path])
    ]
    known = set().union(*map(definitions, files))
    words = re.findall(r"`([A-Za-z_]+)`", where)
    assert known.issuperset(words)
    named += len(words)
  assert named >= 5
