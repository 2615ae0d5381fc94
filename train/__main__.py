"""Lists the programs of this package.

python -m train
"""

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import train
from compmod_jax.errors import check
from train import cli


def programs() -> Iterator[tuple[str, str]]:
  """Name of every module that is a program, and the first line of its docstring."""
  for found in pkgutil.iter_modules(train.__path__, "train."):
    path = Path(train.__path__[0], f"{found.name.removeprefix('train.')}.py")
    if found.ispkg or found.name == "train.__main__":
      continue
    text = path.read_text(encoding="utf-8")
    if 'if __name__ == "__main__":' in text:
      yield found.name, (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]


def main(argv: list[str]) -> None:
  """Prints the list; other arguments are a mistake."""
  names = [name.removeprefix("train.") for name, _ in programs()]
  first = argv[0] if argv else ""
  check(
    first not in names,
    f"train {first} has a blank where the name has a dot; run python -m train.{first}.",
  )
  check(
    not set(argv) - {"-h", "--help"},
    f"{first} is not an option; python -m train takes none and lists the programs.",
  )
  rows = [(f"python -m {name}", about) for name, about in programs()]
  print(
    f"usage: python -m train.PROGRAM [OPTION ...]\n\n{cli.table(rows, 34)}\n\n"
    f"Each has --help. {cli.DEBUG}"
  )


if __name__ == "__main__":
  cli.run(main)
