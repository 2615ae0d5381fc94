"""What an analysis leaves behind for people: one HTML file, its pictures, tables and numbers.

An analysis returns a `Page`; `write` makes the files. The HTML file needs nothing beside itself:
pictures and style are inside it, it loads no font and runs no script.
"""

import csv
import dataclasses
import difflib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from compmod_jax.analysis.report.results import plain
from compmod_jax.core import durable, extras

if TYPE_CHECKING:
  from matplotlib.figure import Figure

Runs = Sequence[tuple[str, bool]]


class Picture(NamedTuple):
  """A picture: `plots/<name>.png` and `.svg`, and in the page with its caption below."""

  name: str
  figure: "Figure"
  caption: str


class Table(NamedTuple):
  """A table: `<name>.csv` in full precision, and in the page rounded, unless it is not shown."""

  name: str
  columns: Sequence[str]
  rows: Sequence[Sequence[Any]]
  """Text, whole numbers, and floats; what is not known is None or NaN."""
  caption: str = ""
  shown: bool = True
  order: str = ""
  """Column by whose absolute values the page sorts rows, largest first, unknown ones last; empty:
  as they are. The CSV file keeps their order."""


class Sample(NamedTuple):
  """One sentence: names and texts, or runs of words (text, whether to mark it), and a remark."""

  entries: Sequence[tuple[str, str | Runs]]
  note: str = ""


class Section(NamedTuple):
  """A part of the page: its heading, paragraphs, and then what it shows, in order."""

  title: str
  items: Sequence[Picture | Table | Sample]
  text: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Page:
  """What an analysis found.

  Attributes:
    title: heading.
    description: a sentence or two on what was looked at.
    summary: what it shows, a sentence or two each.
    sections: pictures, tables and samples.
    data: everything of it as plain values, for `result.json`.
    tiles: headline figures: name, value, remark.
  """

  title: str
  description: str
  summary: Sequence[str]
  sections: Sequence[Section]
  data: Mapping[str, Any]
  tiles: Sequence[tuple[str, str, str]] = ()


class Written(NamedTuple):
  """Where `write` wrote."""

  html: Path
  json: Path
  tables: list[Path]
  pictures: list[Path]


def write(
  page: Page, folder: Path, *, command: str = "", provenance: Mapping[str, Any] | None = None
) -> Written:
  """Writes report.html, result.json, a CSV file for each table and plots/*.png, *.svg.

  Each file appears whole or not at all; an earlier one of the same name is replaced.

  Args:
    page: what to tell.
    folder: where; made if it is not there.
    command: how it was made.
    provenance: code, packages, machine.
  """
  from compmod_jax.analysis.report import plot

  folder.mkdir(parents=True, exist_ok=True)
  tables, pictures = [], []
  for item in (item for section in page.sections for item in section.items):
    if isinstance(item, Table):
      tables.append(folder / f"{item.name}.csv")
      write_text(tables[-1], _csv(item))
    elif isinstance(item, Picture):
      pictures += plot.save(item.figure, folder / "plots", item.name)
  record = {
    "title": page.title,
    "description": page.description,
    "summary": list(page.summary),
    "command": command,
    **page.data,
    "provenance": provenance,
  }
  text = json.dumps(plain(record), indent=2, ensure_ascii=False, allow_nan=False)
  write_text(folder / "result.json", text + "\n")
  html = render(
    "page.html",
    title=page.title,
    description=page.description,
    tiles=page.tiles,
    command=command,
    summary=page.summary,
    sections=[_for_template(section, folder / "plots") for section in page.sections],
    provenance=list(flat(provenance or {})),
  )
  write_text(folder / "report.html", html)
  return Written(folder / "report.html", folder / "result.json", tables, pictures)


def render(template: str, **values: object) -> str:
  """One of this package's templates, filled in; text is escaped, `Markup` is not."""
  with extras.needed():
    import jinja2

  def source(name: str) -> str:
    return resources.files("compmod_jax.analysis.report").joinpath(name).read_text("utf-8")

  environment = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    loader=jinja2.FunctionLoader(source),
  )
  return environment.get_template(template).render(**values)


def write_text(path: Path, text: str) -> None:
  """Writes the file under another name first, so that a full disk cannot leave half of it.

  Half of a surrogate pair, which text of others may hold and UTF-8 cannot, becomes `?`.
  """
  durable.write(path, [text.encode("utf-8", "replace")])


def differences(one: str, other: str) -> tuple[Runs, Runs]:
  """Two texts, each as [(words, differs)]: runs of words that both have, or only one."""
  ours, theirs = one.split(), other.split()
  left: list[tuple[str, bool]] = []
  right: list[tuple[str, bool]] = []
  matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
  for kind, start, stop, first, last in matcher.get_opcodes():
    for side, words in ((left, ours[start:stop]), (right, theirs[first:last])):
      if words:
        side.append((" ".join(words), kind != "equal"))
  return left, right


def flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
  """The leaves of nested mappings, as (dotted path, text)."""
  if isinstance(value, Mapping):
    for key, inner in value.items():
      yield from flat(inner, f"{path}.{key}" if path else str(key))
  elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
    for place, inner in enumerate(value):
      yield from flat(inner, f"{path}[{place}]")
  else:
    yield (
      path,
      value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False),
    )


def _for_template(section: Section, plots: Path) -> dict[str, Any]:
  """A section as the template takes it, with the pictures that lie in a folder."""
  from markupsafe import Markup

  from compmod_jax.analysis.report import plot

  items: list[tuple[str, Any]] = []
  for item in section.items:
    if isinstance(item, Picture):
      svg = Markup(plot.inline_svg((plots / f"{item.name}.svg").read_text("utf-8")))
      items.append(("picture", {"name": item.name, "caption": item.caption, "svg": svg}))
    elif isinstance(item, Sample):
      items.append(("sample", item))
    elif item.shown:
      items.append(("table", _cells(item)))
  return {"title": section.title, "text": section.text, "shown": items}


def _cells(table: Table) -> dict[str, Any]:
  """Header and rows of a table as (text, CSS class), with as many digits as a column needs."""
  columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
  classes = ["text" if any(isinstance(v, str) for v in column) else "" for column in columns]
  digits = [_decimals(column) for column in columns]
  rows = [
    [(cell(value, d), css) for value, d, css in zip(row, digits, classes, strict=True)]
    for row in _ordered(table)
  ]
  header = list(zip(table.columns, classes, strict=True))
  return {"header": header, "rows": rows, "caption": table.caption}


def _ordered(table: Table) -> Sequence[Sequence[Any]]:
  """The rows in the order in which the page shows them."""
  if not table.order:
    return table.rows
  column = list(table.columns).index(table.order)

  def rank(row: Sequence[Any]) -> float:
    value = row[column]
    return math.inf if value is None or math.isnan(value) else -abs(value)

  return sorted(table.rows, key=rank)


def cell(value: str | float | np.integer | None, decimals: int = 3) -> str:
  """A value as a table shows it; a dash for what is not known."""
  if isinstance(value, str):
    return value
  if value is None or not math.isfinite(value):
    return "–"
  if isinstance(value, int | np.integer):
    return f"{value:,}"
  text = f"{value:,.{decimals}f}"
  return f"{value:.1g}" if value and not float(text.replace(",", "")) else text


def _decimals(column: Sequence[Any]) -> int:
  """Three significant digits of the largest number, and at most four decimals."""
  numbers = [abs(v) for v in column if isinstance(v, float | np.floating) and math.isfinite(v)]
  largest = max(numbers, default=0.0)
  return min(4, max(0, 2 - math.floor(math.log10(largest)))) if largest else 2


def _csv(table: Table) -> str:
  buffer = io.StringIO()
  writer = csv.writer(buffer, lineterminator="\n")
  writer.writerow(table.columns)
  for row in table.rows:
    writer.writerow(["" if v is None or v != v else v for v in row])
  return buffer.getvalue()
