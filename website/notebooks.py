"""Markdown pages as notebooks: their code runs when the site is built, and the output is shown.

On such a page every fenced block of these kinds is a cell, and all other text is Markdown:

    ```python              runs in the page's Python
    ```sh                  runs in a shell
    ```python file=PATH    is written to a file
    ```diff file=PATH      changes a file (see website/changes.py)

Pages run one after the other in one copy of the repository, so that one can use what an earlier one
trained. A cell that fails stops the build.
"""

import functools
import html
import os
import re
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 600
"""Seconds a cell may take. Pages are written to take under two minutes on two idle cores."""

_FENCE = re.compile(r"^```(python|sh|diff)(?: file=(\S+))?\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_LEFT_OUT = ("site", "runs", "results", "build", "dist", "docs", "__pycache__", ".*", "*.egg-info")
_SETUP = "%load_ext website.changes"
_WRAPPER = textwrap.TextWrapper(width=100, break_long_words=False, break_on_hyphens=False)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def to_notebook(markdown: str) -> NotebookNode:
  """The page as a notebook without outputs."""
  cells, end = [], 0
  if re.search(r"^```\w+ file=", markdown, re.MULTILINE):
    cells.append(nbformat.v4.new_code_cell(_SETUP, metadata={"tags": ["setup"]}))
  for match in _FENCE.finditer(markdown):
    if text := markdown[end : match.start()].strip():
      cells.append(nbformat.v4.new_markdown_cell(text))
    cells.append(_cell(*match.groups()))
    end = match.end()
  if text := markdown[end:].strip():
    cells.append(nbformat.v4.new_markdown_cell(text))
  for number, cell in enumerate(cells):
    cell["id"] = f"cell-{number}"  # random otherwise
  kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
  return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def _cell(language: str, file: str | None, code: str) -> NotebookNode:
  magic = {"sh": "%%bash\n", "diff": f"%%change {file}\n"}.get(language, "")
  if language == "python" and file:
    magic = f"%%newfile {file}\n"
  # What the page shows in place of the magic.
  shown = {"language": language, "file": file, "code": code.rstrip("\n")}
  # A file ends with the newline that other cells do without.
  source = magic + (code if file else code.rstrip("\n"))
  return nbformat.v4.new_code_cell(source, metadata={"shown": shown})


@functools.cache
def repository() -> Path:
  """A copy of the repository's code to run in; removed with the process."""
  place = tempfile.TemporaryDirectory(prefix="compmod_jax-docs-")
  _KEPT.append(place)
  root = Path(place.name) / "compmod_jax"
  shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*_LEFT_OUT))
  return root


_KEPT: list[tempfile.TemporaryDirectory] = []


@functools.cache
def execute(markdown: str) -> NotebookNode:
  """The page as a notebook with outputs; the same page is run once in a process.

  Raises:
    CellExecutionError: a cell raised, or its command failed.
  """
  notebook, root = to_notebook(markdown), repository()
  environment = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(root),
    "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
  }
  resources = {"metadata": {"path": str(root)}}
  # Sockets that are files, which nobody else on the machine can listen to.
  sockets = str(root.parent / "kernel")
  kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=sockets)
  NotebookClient(notebook, km=kernel, timeout=TIMEOUT, resources=resources).execute(env=environment)
  return notebook


def to_markdown(notebook: NotebookNode) -> str:
  """The page with each cell's output behind it."""
  return "\n\n".join(filter(None, map(_render, notebook.cells))) + "\n"


def _render(cell: NotebookNode) -> str:
  if cell.cell_type == "markdown":
    return cell.source
  if "setup" in cell.metadata.get("tags", ()):
    return ""
  shown = cell.metadata["shown"]
  title = f' title="{shown["file"]}"' if shown["file"] else ""
  code = f"```{shown['language']}{title}\n{shown['code']}\n```"
  return "\n\n".join([code, *_outputs(cell.outputs)])


def _outputs(outputs: list[NotebookNode]) -> list[str]:
  """Pictures, and everything else as text, in HTML that Markdown leaves as it is."""
  rendered, text = [], ""
  for output in outputs:
    data = output.get("data", {})
    if "image/png" in data:
      picture = "".join(data["image/png"].split())
      rendered.append(
        f'<p><img alt="Output of the code above" src="data:image/png;base64,{picture}"></p>'
      )
    else:
      text += output.get("text", data.get("text/plain", ""))
  if text := _plain(text):
    rendered.insert(0, f'<div class="output"><pre>{html.escape(text)}</pre></div>')
  return rendered


def _plain(text: str) -> str:
  """What a terminal would show in the end: no colours, nothing overwritten, long lines broken."""
  text = _ESCAPES.sub("", text.replace(f"{repository()}/", "")).rstrip()
  lines = (line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))
  return "\n".join(_WRAPPER.fill(line) if len(line) > _WRAPPER.width else line for line in lines)
