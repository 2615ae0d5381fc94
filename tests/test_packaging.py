"""What is installed: the public names, the extras, and what works without them."""

import ast
import gc
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tiny_model

import compmod_jax
from compmod_jax.commands import garbage
from compmod_jax.core import extras

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted(
  path for folder in ("compmod_jax", "configs", "train") for path in (ROOT / folder).rglob("*.py")
)
# Folders whose modules are used with an extra alone, which they may import at their head.
WITH_EXTRAS = {"analysis", "tables", "tools", "training"}
# flax imports rich itself.
BLOCKED = sorted(set(extras.PACKAGES) - {"rich"})
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED}))\n"


@pytest.fixture
def no_collection():
  """No garbage collection, which confuses Python 3.11's parser in its midst."""
  gc.disable()
  yield
  gc.enable()


def python(code: str, *arguments: object, status: int = 0) -> tuple[str, str]:
  """Runs code in a process of its own; (standard output, errors)."""
  kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "PYTEST_"))}
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
    cwd=ROOT,
    env={**kept, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == status, done.stderr
  return done.stdout, done.stderr


# Public names.


def checked_imports() -> dict[str, str]:
  """Name -> module, of the imports that type checkers read in `compmod_jax/__init__.py`."""
  tree = ast.parse((ROOT / "compmod_jax" / "__init__.py").read_text())
  (guard,) = (node for node in tree.body if isinstance(node, ast.If))
  return {
    alias.name: str(node.module)
    for node in guard.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
  }


def test_every_public_name_is_imported_on_use_and_known_to_type_checkers():
  declared = {name: f"compmod_jax.{home}" for name, home in compmod_jax._HOMES.items()}
  assert declared == checked_imports()
  assert sorted(compmod_jax.__all__) == sorted(declared)
  for name, home in declared.items():
    value = getattr(compmod_jax, name)
    assert value is getattr(importlib.import_module(home), name)
    assert value.__doc__, name


def test_a_name_that_does_not_exist_is_an_attribute_error():
  with pytest.raises(AttributeError, match="no attribute 'Rooter'"):
    _ = compmod_jax.Rooter


def test_the_page_on_python_lists_the_public_names():
  page = (ROOT / "docs" / "python.md").read_text()
  table = page.split("## Public names")[1].split("\n## ")[0]
  listed = [
    name
    for row in re.findall(r"^\| ([^|]*`[^|]*) \|", table, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row)
  ]
  assert sorted(listed) == sorted(compmod_jax.__all__)


@pytest.mark.programs
def test_the_code_on_public_names_runs():
  page = (ROOT / "docs" / "python.md").read_text()
  section = page.split("## Public names")[1].split("\n## ")[0]
  (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
  printed, _ = python(code)
  assert printed.count("(2, 3, 4)") == 1
  assert "True" in printed


# What is imported when.


def test_importing_the_package_is_free_and_opening_models_imports_no_extra_and_no_program():
  printed, _ = python(
    "import sys, compmod_jax\nprint(*sys.modules)\ncompmod_jax.load\nprint(*sys.modules)"
  )
  first, second = ({*line.split()} for line in printed.splitlines())
  tops = {name.partition(".")[0] for name in first}
  assert not tops & {"jax", "flax", "numpy", "scipy", "tyro", *extras.PACKAGES}
  assert "jax" in second
  assert not {name.partition(".")[0] for name in second} & {*BLOCKED, "scipy.stats", "tyro"}
  ours = {name.split(".")[1] for name in second if name.startswith("compmod_jax.")}
  assert not ours & {"analysis", "commands", "tables", "tools", "training"}


def test_a_program_that_trains_starts_without_what_takes_long():
  """Garbage is looked for rarely, large packages are imported later, and no data set is drawn."""
  code = (
    "import sys, gc\n"
    "sys.argv = ['-m']\n"
    "import train\n"
    "import compmod_jax.commands.train\n"
    "from compmod_jax.data.synthetic import scan\n"
    "print(gc.get_threshold(), scan._parts.cache_info().currsize, *sys.modules)"
  )
  printed, _ = python(code)
  assert printed.startswith(f"{garbage.THRESHOLDS} 0 ")
  late = {"jax.experimental.pallas", "scipy.sparse", "grain", "matplotlib", "orbax"}
  assert not late & {*printed.split()}


def test_mechanisms_import_nothing_but_jax_numpy_flax_and_jaxtyping():
  printed, _ = python(
    "import sys, jax, numpy, flax.linen, jaxtyping, jax.numpy, jax.scipy, jax.experimental.pallas\n"
    "jaxtyping.PyTree\n"  # jaxtyping loads it, and what it needs, on use
    "before = set(sys.modules)\n"
    "import pkgutil, importlib, compmod_jax.mechanisms as all_of\n"
    "for found in pkgutil.walk_packages(all_of.__path__, 'compmod_jax.mechanisms.'):\n"
    "  importlib.import_module(found.name)\n"
    "print(*set(sys.modules) - before)"
  )
  new = set(printed.split())
  assert "compmod_jax.mechanisms.competition.router" in new
  allowed = {"compmod_jax", "jax", "jaxlib", "numpy", "flax", "jaxtyping", *sys.stdlib_module_names}
  assert {name.partition(".")[0] for name in new} <= allowed


# Without extras.


def test_the_extra_of_every_package_is_that_of_the_project_file():
  given = {
    re.split(r"[<>=!\[ ]", requirement)[0].replace("-", "_").removesuffix("_checkpoint"): extra
    for extra in ("data", "report", "train", "hf")
    for requirement in PROJECT["optional-dependencies"][extra]
  }
  given.pop("compmod_jax")
  assert given == extras.PACKAGES


def importing(tree: ast.AST, guarded: bool = False, inside: bool = False):
  """Every import of an extra's package: (line, whether it is explained, whether in a function)."""
  for node in ast.iter_child_nodes(tree):
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      continue
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
      names = [str(node.module)]
    if any(name.partition(".")[0] in extras.PACKAGES for name in names):
      assert isinstance(node, ast.Import | ast.ImportFrom)
      yield node.lineno, guarded, inside
    with_it = isinstance(node, ast.With) and "extras.needed()" in ast.unparse(node.items[0])
    function = isinstance(node, ast.FunctionDef)
    yield from importing(node, guarded or with_it, inside or function)


def test_packages_of_extras_are_imported_where_their_absence_is_explained(no_collection):
  found = 0
  for path in SOURCES:
    folder = path.relative_to(ROOT).parts[1]
    for line, guarded, inside in importing(ast.parse(path.read_text())):
      found += 1
      assert guarded or (not inside and folder in WITH_EXTRAS), f"{path}:{line}"
  assert found > 10


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
  return tiny_model.make_workdir(tmp_path_factory.mktemp("packaging") / "run")


@pytest.mark.programs
def test_without_extras_a_model_opens_and_works_and_what_needs_one_says_which(workdir):
  printed, _ = python(
    BLOCK + "import compmod_jax\n"
    "from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer\n"
    "from compmod_jax.metrics.text import bleu\n"
    "model = compmod_jax.load(sys.argv[1])\n"
    "assert len(model.translate(['der hund schläft', ''], beams=1)) == 2\n"
    "for use in (\n"
    "  lambda: bleu(['a'], ['a']),\n"
    "  lambda: train_tokenizer(['a b'], TokenizerConfig(kind='bpe')),\n"
    "  lambda: model.attention_pictures('der hund'),\n"
    "  lambda: compmod_jax.Experiment,\n"
    "):\n"
    "  try:\n"
    "    use()\n"
    "  except compmod_jax.UserError as error:\n"
    "    assert isinstance(error, ImportError)\n"
    "    print(error)\n",
    workdir,
  )
  lines = printed.splitlines()
  packages = [re.search(r"package '(\w+)' is not installed", line) for line in lines]
  names = [package[1] for package in packages if package]
  assert names == ["sacrebleu", "sentencepiece", "matplotlib", "optax"]
  for name, line in zip(names, lines, strict=True):
    assert f"compmod_jax[{extras.PACKAGES[name]}]" in line
    assert 'pip install "compmod_jax[train]"' in line


CONSOLE = "from compmod_jax.commands import console; sys.argv[0] = 'compmod'; console.main()"


def test_without_extras_the_console_lists_its_programs():
  printed, _ = python(BLOCK + CONSOLE, "--help")
  assert printed.startswith("usage: compmod PROGRAM")
  assert "compmod train " in printed


@pytest.mark.programs
@pytest.mark.parametrize(
  "arguments",
  [("train", "--config", "nmt_cah", "--workdir", "unused"), ("analyse", "heads", "--help")],
)
def test_without_extras_a_program_that_needs_one_ends_with_the_command_that_installs_it(arguments):
  printed, errors = python(BLOCK + CONSOLE, *arguments, status=2)
  assert printed == ""
  assert errors.startswith("error: The Python package ")
  assert 'pip install "compmod_jax[train]"' in errors
  assert errors.count("\n") == 1
  assert not Path("unused").exists()


def test_a_package_of_no_extra_is_not_explained_as_one():
  with pytest.raises(ModuleNotFoundError) as error, extras.needed():
    importlib.import_module("nonsense_of_nobody")
  assert not isinstance(error.value, extras.MissingExtraError)
  assert extras.missing("tokenizers.models") == (
    "The Python package 'tokenizers' is not installed. It comes with compmod_jax[hf]: pip install"
    ' "compmod_jax[hf]", and run the same again.'
  )


# Versions of Python.


def test_sources_have_no_syntax_that_the_oldest_python_lacks(no_collection):
  oldest = re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])
  assert oldest
  assert len(SOURCES) > 100
  for path in SOURCES:  # one that has is a SyntaxError with its line
    ast.parse(path.read_text(), str(path), feature_version=(3, int(oldest[1])))


def test_the_classifiers_begin_with_the_oldest_python():
  oldest = PROJECT["requires-python"].removeprefix(">=")
  prefix = "Programming Language :: Python :: 3."
  versions = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if line.startswith(prefix)]
  assert versions[0] == oldest
  assert versions == [f"3.{number}" for number in range(11, 11 + len(versions))]
