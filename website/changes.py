"""Changes to files as the tutorials write them: new files, and lines added to those that are there.

A fenced block names its file: `python file=PATH` is the whole file, `diff file=PATH` has hunks that
begin with `@@` and whose lines begin with a blank (there already), `+` (added) or `-` (removed).
"""

import re
import textwrap
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"```(python|diff) file=(\S+)\n(.*?)```", re.DOTALL)


def blocks(markdown: str) -> list[tuple[str, str, str]]:
  """(language, file, content) of every block that names a file."""
  return _BLOCK.findall(markdown)


def outside(markdown: str) -> dict[str, str]:
  """Name -> content of every file that a sentence ending in its name and a colon introduces."""
  found = re.findall(r"`(\w+\.py)`:\n\n((?:    .*\n|\n)+)", markdown)
  return {name: textwrap.dedent(text).strip() + "\n" for name, text in found}


def apply(text: str, change: str) -> str:
  """The text with the lines of every hunk replaced.

  Raises:
    ValueError: what a hunk says is there is not there exactly once.
  """
  for hunk in filter(None, change.split("@@\n")):
    lines = hunk.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    if text.count(old) != 1:
      raise ValueError(f"the tutorial changes lines that are there {text.count(old)} times:\n{old}")
    text = text.replace(old, new)
  return text


def load_ipython_extension(shell: Any) -> None:
  """Adds the magics `%%newfile PATH` and `%%change PATH`, which write files and change them."""

  def new_file(line: str, cell: str) -> None:
    path = Path(line)
    if path.exists() and path.read_text() != cell:
      raise FileExistsError(f"{path} is there already, and says something else")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(cell)

  def change(line: str, cell: str) -> None:
    path = Path(line)
    path.write_text(apply(path.read_text(), cell))

  shell.register_magic_function(new_file, "cell", "newfile")
  shell.register_magic_function(change, "cell", "change")
