"""The programs: a module each, whose `main` goes from arguments to an exit status.

Started as `compmod NAME`, or in a checkout as `python -m train.NAME`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path


def programs() -> Iterator[tuple[str, str]]:
  """Name of every module that is a program, and the first line of its docstring."""
  for path in sorted(Path(__file__).parent.glob("*.py")):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.stem != "console" and any(
      isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body
    ):
      yield path.stem, (ast.get_docstring(tree) or "").split("\n")[0]
