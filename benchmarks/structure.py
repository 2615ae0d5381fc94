"""Measures the structure of the code: how far a reader has to follow it, and what ties it up.

    python -m benchmarks.structure --json results/structure/now.json
    python -m benchmarks.structure --base v0.1.0      # beside those of an older revision

Traces: Python functions of the project that a training step (as JAX traces it), a translation, a
generated answer and a recoded evaluation pass, files in which they stand, and calls from one file
to another. Read from the source: circles of imports (at module level; with imports inside functions
and under TYPE_CHECKING), such deferred imports, annotations `: Any`, `isinstance` of models in
tasks, members of the task, parameters named `taps` or `intermediates`, lines by folder.

A traced function is counted once, however often it is called; comprehensions and lambdas belong to
the function around them. A move is a pair of files of which a function of the first called one of
the second, counted once for each pair of functions.
"""

import argparse
import ast
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("compmod_jax", "train")
_INNER = ("<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>")


class Trace(NamedTuple):
  """What a computation passes through.

  Attributes:
    functions: (file, name) of every function of the project that was entered.
    moves: (caller, callee) of calls between functions of two files.
  """

  functions: set[tuple[str, str]]
  moves: set[tuple[tuple[str, str], tuple[str, str]]]

  def figures(self) -> dict[str, int]:
    """Numbers of functions, files and moves."""
    files = {file for file, _ in self.functions}
    return {"functions": len(self.functions), "files": len(files), "moves": len(self.moves)}


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
  """Records the project's functions that are entered inside the block, by this thread."""
  trace = Trace(set(), set())
  roots = tuple(f"{ROOT / folder}/" for folder in FOLDERS)

  def place(frame: FrameType | None) -> tuple[str, str] | None:
    """The innermost function of the project at or above a frame."""
    while frame is not None:
      code = frame.f_code
      if code.co_filename.startswith(roots) and code.co_name not in _INNER:
        return str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname
      frame = frame.f_back
    return None

  def profile(frame: FrameType, event: str, _: object) -> None:
    if event != "call" or not frame.f_code.co_filename.startswith(roots):
      return
    here = place(frame)
    if here is None:
      return
    trace.functions.add(here)
    caller = place(frame.f_back)
    if caller is not None and caller[0] != here[0]:
      trace.moves.add((caller, here))

  sys.setprofile(profile)
  try:
    yield trace
  finally:
    sys.setprofile(None)


def trace_figures() -> dict[str, dict[str, int]]:
  """Figures of a training step, a translation, an answer and a recoded evaluation."""
  import jax

  from benchmarks import structure_cases

  found = {}
  for name, make in structure_cases.CASES.items():
    run: Callable[[], object] = make()
    jax.clear_caches()
    with traced() as trace:
      run()
    found[name] = trace.figures()
  return found


# The source.


class Import(NamedTuple):
  """An import of one of the project's modules by another.

  Attributes:
    source: the importing module.
    target: the imported one.
    deferred: whether it stands inside a function or under TYPE_CHECKING.
  """

  source: str
  target: str
  deferred: bool


def modules(root: Path) -> dict[str, tuple[Path, ast.Module]]:
  """The project's modules by their dotted names."""
  found = {}
  for folder in FOLDERS:
    for path in sorted((root / folder).rglob("*.py")):
      parts = path.relative_to(root).with_suffix("").parts
      name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
      found[name] = (path, ast.parse(path.read_text()))
  return found


def imports(trees: dict[str, tuple[Path, ast.Module]]) -> list[Import]:
  """Every import of one of these modules by another."""
  found = []
  for name, (_, tree) in trees.items():
    for node, deferred in _import_nodes(tree, False):
      names = (
        [alias.name for alias in node.names]
        if isinstance(node, ast.Import)
        else [f"{node.module}.{alias.name}" for alias in node.names]
      )
      targets = {one if one in trees else one.rpartition(".")[0] for one in names}
      found += [Import(name, target, deferred) for target in sorted(targets) if target in trees]
  return [one for one in found if one.source != one.target]


def _import_nodes(
  node: ast.AST, deferred: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.Import | ast.ImportFrom):
      yield child, deferred
      continue
    inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
    yield from _import_nodes(child, deferred or inner or types)


def circles(edges: Sequence[tuple[str, str]]) -> list[list[str]]:
  """Strongly connected components of more than one module (Tarjan 1972)."""
  graph: dict[str, list[str]] = {}
  for source, target in edges:
    graph.setdefault(source, []).append(target)
    graph.setdefault(target, [])
  number, low, stack, held = dict[str, int](), dict[str, int](), list[str](), set[str]()
  found = []

  def visit(node: str) -> None:
    number[node] = low[node] = len(number)
    stack.append(node)
    held.add(node)
    for other in graph[node]:
      if other not in number:
        visit(other)
        low[node] = min(low[node], low[other])
      elif other in held:
        low[node] = min(low[node], number[other])
    if low[node] == number[node]:
      component = []
      while True:
        last = stack.pop()
        held.discard(last)
        component.append(last)
        if last == node:
          break
      if len(component) > 1:
        found.append(sorted(component))

  limit = sys.getrecursionlimit()
  sys.setrecursionlimit(max(limit, 10_000))
  try:
    for node in sorted(graph):
      if node not in number:
        visit(node)
  finally:
    sys.setrecursionlimit(limit)
  return sorted(found)


def source_figures(root: Path) -> dict[str, Any]:
  """What is counted in the source of a checkout."""
  trees = modules(root)
  edges = imports(trees)
  every = circles([(one.source, one.target) for one in edges])
  top = circles([(one.source, one.target) for one in edges if not one.deferred])
  inside = {name: number for number, component in enumerate(every) for name in component}
  closing = [
    one
    for one in edges
    if one.deferred and inside.get(one.source, -1) == inside.get(one.target, -2)
  ]
  return {
    "import circles at module level": len(top),
    "import circles with deferred imports": len(every),
    "modules in circles": sum(map(len, every)),
    "deferred imports": sum(one.deferred for one in edges),
    "deferred imports inside circles": len(closing),
    "annotations Any": sum(_annotations_any(tree) for _, tree in trees.values()),
    "isinstance of models in tasks": _isinstance_of_models(trees),
    "members of Task": _members(trees, "Task"),
    "parameters named taps or intermediates": sum(
      _parameters(tree, name) for _, tree in trees.values() for name in ("taps", "intermediates")
    ),
    "lines": _lines(root),
  }


def _annotations_any(tree: ast.Module) -> int:
  """Parameters and variables annotated as `Any` and nothing else."""
  found = 0
  for node in ast.walk(tree):
    annotation = getattr(node, "annotation", None)
    if isinstance(node, ast.arg | ast.AnnAssign) and isinstance(annotation, ast.Name):
      found += annotation.id == "Any"
  return found


def _isinstance_of_models(trees: dict[str, tuple[Path, ast.Module]]) -> int:
  """Calls of `isinstance` in tasks whose class is a model's or a model's configuration."""
  models = {
    node.name
    for name, (_, tree) in trees.items()
    if name.startswith("compmod_jax.models")
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
  }
  found = 0
  for name, (_, tree) in trees.items():
    if not name.startswith("compmod_jax.tasks"):
      continue
    for node in ast.walk(tree):
      if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        words = {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
        found += bool(words & models)
  return found


def _members(trees: dict[str, tuple[Path, ast.Module]], name: str) -> int:
  """Public methods, properties and attributes of a class of `compmod_jax.tasks`."""
  for module, (_, tree) in trees.items():
    if not module.startswith("compmod_jax.tasks"):
      continue
    for node in tree.body:
      if isinstance(node, ast.ClassDef) and node.name == name:
        kinds = (ast.FunctionDef, ast.AnnAssign)
        return sum(isinstance(one, kinds) for one in node.body)
  return 0


def _parameters(tree: ast.Module, name: str) -> int:
  """Functions that have a parameter of this name."""
  found = 0
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      given = node.args
      found += name in {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
  return found


def _lines(root: Path) -> dict[str, int]:
  """Source lines of every folder of Python files."""
  found: dict[str, int] = {}
  for top in (*FOLDERS, "configs", "tests", "benchmarks"):
    for path in sorted((root / top).rglob("*.py")):
      parts = path.relative_to(root).parts[:-1]
      name = "/".join(parts[:2]) if top in FOLDERS else top
      found[name] = found.get(name, 0) + path.read_text().count("\n")
  return found


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the figures as a table, of this tree and, if one is named, of another revision."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--base", help="a revision to compare with")
  parser.add_argument("--no-traces", action="store_true", help="read the source only")
  parser.add_argument("--json", type=Path, help="also write the figures to this file")
  args = parser.parse_args(argv)
  found = {"this tree": figures(ROOT, traces=not args.no_traces)}
  if args.base:
    found = {args.base: _of_revision(args.base, traces=not args.no_traces), **found}
  print(table(found))
  if args.json:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(found, indent=1) + "\n")


def figures(root: Path, *, traces: bool) -> dict[str, Any]:
  """All figures of a checkout; traces only of the one that is imported."""
  return {"traces": trace_figures() if traces else {}, "source": source_figures(root)}


def _of_revision(revision: str, *, traces: bool) -> dict[str, Any]:
  """The figures of another revision, measured there by this program as it stands here."""
  with tempfile.TemporaryDirectory() as name:
    tree, file = Path(name) / "tree", Path(name) / "figures.json"
    add = ["git", "worktree", "add", "--quiet", "--detach", str(tree), revision]
    subprocess.run(add, cwd=ROOT, check=True)
    try:
      for path in Path(__file__).parent.glob("structure*.py"):
        (tree / "benchmarks" / path.name).write_text(path.read_text())
      command = [sys.executable, "-m", "benchmarks.structure", "--json", str(file)]
      command += [] if traces else ["--no-traces"]
      subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
      return json.loads(file.read_text())["this tree"]
    finally:
      subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def table(found: dict[str, dict[str, Any]]) -> str:
  """The figures, a line each and a column for each tree."""
  rows: dict[str, dict[str, Any]] = {}
  for tree, kinds in found.items():
    for case, numbers in kinds["traces"].items():
      for what, value in numbers.items():
        rows.setdefault(f"{case}: {what}", {})[tree] = value
    for what, value in kinds["source"].items():
      if isinstance(value, dict):
        for name, count in value.items():
          rows.setdefault(f"{what}: {name}", {})[tree] = count
        rows.setdefault(f"{what}: all", {})[tree] = sum(value.values())
      else:
        rows.setdefault(what, {})[tree] = value
  width = max(map(len, rows))
  lines = [" " * width + "".join(f"{tree:>14}" for tree in found)]
  for name, values in rows.items():
    lines.append(f"{name:{width}}" + "".join(f"{values.get(tree, ''):>14}" for tree in found))
  return "\n".join(lines)


if __name__ == "__main__":
  main()
