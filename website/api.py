"""A page of the API reference for every public module of the public namespaces."""

from pathlib import Path
from typing import Any

_FOLDER = "api"


def modules(package: Path, namespace: str) -> list[str]:
  """Dotted names of a namespace and of all public modules in it, parents before children."""
  place = package.parent.joinpath(*namespace.split("."))
  if not place.is_dir():
    if not place.with_suffix(".py").is_file():
      raise FileNotFoundError(f"{namespace} is no module; correct extra.namespaces in mkdocs.yml")
    return [namespace]
  names = [namespace]
  for path in sorted(place.iterdir()):
    public = (path.is_dir() and (path / "__init__.py").is_file()) or path.suffix == ".py"
    if public and not path.name.startswith("_"):
      names += modules(package, f"{namespace}.{path.stem}")
  return names


def address(module: str) -> str:
  """The page of a module, relative to the documentation."""
  return f"{_FOLDER}/{module}.md"


def content(module: str) -> str:
  """The Markdown of a module's page, which mkdocstrings fills."""
  return f"---\ntitle: {module}\n---\n\n::: {module}\n"


def navigation(package: Path, namespaces: list[str]) -> list[Any]:
  """Entries of the navigation: a page for the package, a section or a page for each namespace."""
  entries: list[Any] = [{package.name: address(package.name)}]
  for namespace in namespaces:
    short = namespace.removeprefix(f"{package.name}.")
    first, *others = modules(package, namespace)
    below = [{name.removeprefix(f"{namespace}."): address(name)} for name in others]
    entries.append({short: [address(first), *below] if below else address(first)})
  return entries
