"""Names that the code once had for things that the field calls otherwise do not come back.

The glossary (`docs/glossary.md`) has the names in use. Old module names that users may import are
in `compmod_jax/_renamed.py`; nothing of the project uses them.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

from compmod_jax import _renamed

ROOT = Path(__file__).parents[1]
FOLDERS = ("compmod_jax", "train", "configs", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

# Retired module name -> what to look for instead.
MODULES = {
  "answer_tokens": "tasks/answerer.py",
  "block_settings": "layers/block.py",
  "coded": "data/qa/tokenized.py",
  "competing": "layers/experts.py",
  "kinds": "tasks/configs.py",
  "modulated": "models/nemot.py",
  "of_questions": "tasks/question_answering.py",
  "over_blocks": "tasks/causal_lm.py",
  "recurrent_reader": "tasks/language_model.py",
  "roll_call": "training/distributed/rendezvous.py",
  "runs": "the state of a block, or None",
  "step_sizes": "layers/recoding_signals.py",
  "unseen": "data/zero_shot.py",
  "ways": "training/regimes.py",
}
# Retired name of a class, function, parameter, field or variable -> the one in use.
NAMES = {
  "coded": "tokenized",
  "Coded": "TokenizedQuestions",
  "health": "router statistics",
  "Places": "PositionIds",
  "recoded_step": "recoding_step",
  "roll_call": "rendezvous",
  "taps": "intermediates",
  "TappedStep": "ReadableStep",
  "word_decoder": "lm_head",
}
# Retired phrase of documentation -> plain English.
PHRASES = {
  r"\bputs? out\b": "outputs, gives, prints",
  r"\bis told\b": "is reported, is given",
  r"\bare told\b": "are reported",
  r"\bunless told\b": "unless an option says otherwise",
  r"\broll.call\b": "rendezvous",
  r"\btaps\b": "intermediates",
}
# `runs` of a table and cells of `tables/` are another sense.
ELSEWHERE = {"compmod_jax/tables/runs.py"}
# Stories are told there, and what they say is `told`.
STORIES = re.compile(r"synthetic/worlds|nemot|data/qa/")


def shown(path: Path) -> str:
  return str(path.relative_to(ROOT))


@functools.cache
def lines(path: Path) -> list[str]:
  return path.read_text().splitlines()


@functools.cache
def names_in(path: Path) -> tuple[frozenset[str], list[str]]:
  """Every name that a module defines or uses, and the modules that it imports."""
  names, imported = set(), []
  for node in ast.walk(ast.parse(path.read_text())):
    match node:
      case ast.FunctionDef() | ast.ClassDef():
        names.add(node.name)
      case ast.arg() | ast.keyword() if node.arg:
        names.add(node.arg)
      case ast.Name():
        names.add(node.id)
      case ast.Attribute():
        names.add(node.attr)
      case ast.ImportFrom() if node.module:
        imported.append(node.module)
      case ast.Import():
        imported += [one.name for one in node.names]
  return frozenset(names), imported


def test_no_module_has_a_retired_name():
  found = {shown(path): MODULES[path.stem] for path in FILES if path.stem in MODULES}
  assert not {path: new for path, new in found.items() if path not in ELSEWHERE}


def test_a_configuration_or_a_page_has_no_file_beside_that_of_its_class():
  names = {path.with_suffix("") for path in FILES}
  twins = [
    shown(path)
    for path in FILES
    for end in ("_config", "_page")
    if path.stem.endswith(end) and path.with_name(path.stem.removesuffix(end)) in names
  ]
  assert not twins


@pytest.mark.parametrize("name", NAMES)
def test_no_code_uses_a_retired_name(name):
  found = [shown(path) for path in FILES if name in names_in(path)[0]]
  assert not found, f"{name} is called {NAMES[name]}"


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_page_or_docstring_uses_a_retired_phrase(phrase):
  found = [
    f"{shown(path)}:{number}: {line.strip()}"
    for path in [*FILES, *PAGES]
    if not STORIES.search(shown(path))
    for number, line in enumerate(lines(path), 1)
    if re.search(phrase, line) and shown(path) != "benchmarks/structure.py"
  ]
  assert not found, f"say {PHRASES[phrase]}"


def test_the_project_imports_no_module_by_an_old_name():
  old = set(_renamed._NAMES)
  found = [f"{shown(path)}: {name}" for path in FILES for name in names_in(path)[1] if name in old]
  assert not found
