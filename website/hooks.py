"""What MkDocs calls while it builds the site; `hooks` in mkdocs.yml."""

import logging
import re
import time
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from website import api, notebooks, offline
from website.formulas import MathExtension

_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
_log = logging.getLogger("mkdocs.hooks.website")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
  """Formulas, and the pages of the API in the navigation."""
  config["markdown_extensions"].append(MathExtension())
  reference = api.navigation(_package(config), _namespaces(config))
  config["nav"].append({"API reference": reference})
  return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds the pages that are made: of the API, from files at the root, and by running code."""
  for module in _modules(config):
    files.append(File.generated(config, api.address(module), content=api.content(module)))
  pages = {source: page for page, source in config.extra["pages"].items()}
  for source, page in pages.items():
    text, linked = _links((notebooks.ROOT / source).read_text(), source, page, pages)
    files.append(File.generated(config, page, content=text))
    for file in sorted(linked):
      if files.get_file_from_path(_copied(file)) is None:
        content = (notebooks.ROOT / file).read_bytes()
        files.append(File.generated(config, _copied(file), content=content))
  for page in config.extra["notebooks"]:
    markdown = (Path(config.docs_dir) / page).read_text()
    start = time.monotonic()
    notebook = notebooks.execute(markdown)
    _log.info("ran the code of %s in %.0f seconds", page, time.monotonic() - start)
    download = PurePosixPath(page).with_suffix(".ipynb")
    text = notebooks.to_markdown(notebook)
    text += f"\n[This page as a notebook]({download.name}), to be run in a checkout.\n"
    for name, content in ((page, text), (str(download), nbformat.writes(notebook))):
      if (old := files.get_file_from_path(name)) is not None:
        files.remove(old)
      files.append(File.generated(config, name, content=content))
  return files


def on_post_build(config: MkDocsConfig) -> None:
  """Stops the build if a page would load anything that is not in the site."""
  if faults := offline.faults(Path(config.site_dir)):
    raise PluginError("\n".join(faults[:20]))


def _links(text: str, source: str, page: str, pages: dict[str, str]) -> tuple[str, set[str]]:
  """The text of a file elsewhere in the repository, with links that are right for its page.

  Returns:
    The text, and the files that it links to and that are no pages; the site has copies of them.
  """
  linked = set()

  def replace(match: re.Match[str]) -> str:
    target = normpath(str(PurePosixPath(source).parent / match[2]))
    place = pages.get(target, target.removeprefix("docs/"))
    if place == target and (notebooks.ROOT / target).is_file():
      linked.add(target)
      place = _copied(target)
    return match[1] + relpath(place, str(PurePosixPath(page).parent)) + match[3]

  return _LINK.sub(replace, text), linked


def _copied(file: str) -> str:
  # Without a suffix of code a browser shows it instead of saving it.
  return f"files/{file}.txt"


def _package(config: MkDocsConfig) -> Path:
  return notebooks.ROOT / config.extra["package"]


def _namespaces(config: MkDocsConfig) -> list[str]:
  return [f"{config.extra['package']}.{name}" for name in config.extra["namespaces"]]


def _modules(config: MkDocsConfig) -> list[Any]:
  package = _package(config)
  below = [name for namespace in _namespaces(config) for name in api.modules(package, namespace)]
  return [package.name, *below]
