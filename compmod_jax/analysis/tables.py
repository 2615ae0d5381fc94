"""A table of a grid of runs, beside the published one: for terminals, LaTeX and reports."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compmod_jax.analysis.grid import ALPHA, Column, Entry, Table
from compmod_jax.analysis.page import Page, Picture, Section
from compmod_jax.analysis.page import Table as PageTable
from compmod_jax.analysis.results import unit
from compmod_jax.analysis.statistics import Mean, Paired

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure


def notes(table: Table) -> list[str]:
  """What a reader of the table must know, a sentence each."""
  counts = sorted({e.runs.runs for entries in table.rows.values() for e in entries.values()})
  seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
  found = [
    f"Mean ± half the 95 % interval over {seeds} {'seed' if counts[-1] == 1 else 'seeds'};"
    " published figures, one run each, in brackets.",
    f"* differs from the row {table.reference!r}: paired t-test over seeds, corrected for the"
    f" number of rows (Holm), p at most {ALPHA}.",
  ]
  for column in table.columns:
    least = [
      entries[column.name].detectable for entries in table.rows.values() if column.name in entries
    ]
    least = [value for value in least if math.isfinite(value)]
    if least:
      found.append(
        f"{column.name}: with these seeds a true difference from {table.reference!r} would have to"
        f" be {min(least):.{column.digits}f} to {max(least):.{column.digits}f}, by row, to be found"
        " in four of five repetitions."
      )
  return found


def split_settings(table: Table) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
  """What the configurations of all rows have in common, and what each has of its own.

  Together they are every row's whole configuration.
  """
  rows = {row: dict(table.settings.get(row, {})) for row in table.rows}
  fields = dict.fromkeys(field for own in rows.values() for field in own)
  first = next(iter(rows.values()))
  common = {
    field: first[field]
    for field in fields
    if all(field in own and own[field] == first.get(field) for own in rows.values())
  }
  own = {
    row: {field: value for field, value in held.items() if field not in common}
    for row, held in rows.items()
  }
  return common, own


def _written(settings: Mapping[str, Any]) -> str:
  return ", ".join(f"{field} = {value}" for field, value in settings.items()) or "nothing else"


def configurations(table: Table) -> list[str]:
  """Every row's whole configuration: a line of what all have, and one a row of its own."""
  if not table.settings:
    return []
  common, own = split_settings(table)
  rows = [f"{row}: {_written(settings)}." for row, settings in own.items()]
  return [f"Every row: {_written(common)}.", *rows]


def cells(table: Table) -> list[list[str]]:
  """The heading, then a line a row: mean ± half the interval, * where it differs, published."""
  head = ["row", *(f"{c.name} {'(-)' if c.lower else '(+)'}" for c in table.columns)]
  body = [
    [row, *(_cell(entries.get(c.name), c.digits) for c in table.columns)]
    for row, entries in table.rows.items()
  ]
  return [head, *body]


def _cell(entry: Entry | None, digits: int) -> str:
  if entry is None:
    return "-"
  shown = f"{entry.runs.mean:.{digits}f}"
  if not math.isnan(entry.runs.half):
    shown += f" ± {entry.runs.half:.{digits}f}"
  shown += " *" if entry.significant else ""
  return shown + ("" if entry.published is None else f" [{entry.published:.{digits}f}]")


def text(table: Table) -> str:
  """For a terminal; (+) marks columns in which more is better, (-) those in which less is."""
  lines = cells(table)
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  drawn = [
    "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    for line in lines
  ]
  drawn.insert(1, "-" * max(map(len, drawn)))
  lines = [table.title, "", *drawn, "", *notes(table)]
  found = configurations(table)
  return "\n".join([*lines, "", "Configurations", "", *found] if found else lines)


_LATEX = {
  "±": r"$\pm$", "*": r"$^{*}$", "%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#",
  "(+)": r"$\uparrow$", "(-)": r"$\downarrow$",
}  # fmt: skip


def latex(table: Table) -> str:
  """A `tabular` with booktabs rules, and the notes as comments above it."""
  lines = [f"% {line}" for line in (table.title, *notes(table))]
  lines.append(rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}")
  head, *body = (_latex_row(row) for row in cells(table))
  lines += [r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
  return "\n".join(lines) + "\n"


def _latex_row(items: Sequence[str]) -> str:
  row = " & ".join(items).replace(" & ", "\0")
  for plain, escaped in _LATEX.items():
    row = row.replace(plain, escaped)
  return row.replace("\0", " & ") + r" \\"


NUMBERS = (
  "row", "column", "runs", "mean", "low", "high", "difference", "difference low",
  "difference high", "corrected p", "detectable", "published",
)  # fmt: skip


def numbers(table: Table) -> list[list[Any]]:
  """One line for each row and column, under the headings `NUMBERS`; what is not known is NaN."""
  lines = []
  for row, entries in table.rows.items():
    for name, e in entries.items():
      difference = e.paired.difference if e.paired else Mean(math.nan, math.nan, 0)
      ends = (*_with_ends(e.runs), *_with_ends(difference))
      lines.append([row, name, e.runs.runs, *ends, e.p, e.detectable, e.published])
  return lines


def _with_ends(mean: Mean) -> tuple[float, float, float]:
  return mean.mean, mean.mean - mean.half, mean.mean + mean.half


def forest(table: Table) -> "Figure":
  """A panel for each column: every row's difference from the reference, with its 95 % interval.

  A hollow mark is the published difference. Filled marks and solid lines differ after correction.
  """
  from compmod_jax.analysis import style

  rows = [row for row in table.rows if row != table.reference]
  drawn = [c for c in table.columns if any(_paired(table, row, c) for row in rows)]
  title = f"Difference from the row {table.reference!r}"
  if not drawn:
    return style.message(title, "No row has a seed in common with the reference row yet.")
  across = min(3, len(drawn))
  down = math.ceil(len(drawn) / across)
  figure = style.canvas(style.WIDTH, 0.8 + down * (0.7 + 0.24 * len(rows)))
  for place, column in enumerate(drawn):
    axes = figure.add_subplot(down, across, place + 1)
    for height, row in enumerate(rows):
      _mark(axes, table, row, column, height)
    axes.axvline(0, color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
    axes.set_yticks(range(len(rows)), rows if place % across == 0 else [""] * len(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    better = "less" if column.lower else "more"
    difference = f"difference, {unit(column.value)} ({better} is better)"
    style.label(axes, column.name, difference, "")
  style.finish(figure, title)
  return figure


def _paired(table: Table, row: str, column: Column) -> Paired | None:
  entry = table.rows[row].get(column.name)
  return entry.paired if entry else None


def _mark(axes: "Axes", table: Table, row: str, column: Column, height: int) -> None:
  from compmod_jax.analysis import style

  entry = table.rows[row].get(column.name)
  if entry is None or entry.paired is None:
    return
  difference, strong = entry.paired.difference, entry.significant
  colour = style.PALETTE[0] if strong else style.MUTED
  half = 0.0 if math.isnan(difference.half) else difference.half
  axes.errorbar(difference.mean, height, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
  plain = table.rows[table.reference].get(column.name)
  if entry.published is not None and plain is not None and plain.published is not None:
    there = entry.published - plain.published
    axes.plot(there, height, "D", color=style.PALETTE[1], fillstyle="none", markersize=6)


def page(table: Table, *, description: str, data: Mapping[str, Any]) -> Page:
  """The table as a report: cells, picture, all numbers, notes.

  Args:
    table: what was measured.
    description: what was run.
    data: more plain values for `result.json`.
  """
  head, *body = cells(table)
  lines = numbers(table)
  caption = "Dot and bar: our mean and 95 % interval, blue where it differs after correction."
  published = any(e.published is not None for row in table.rows.values() for e in row.values())
  caption += " Orange diamond: the published difference." if published else ""
  sections = [
    Section("Table", [PageTable("table", head, body)], notes(table)),
    Section("Differences", [Picture("differences", forest(table), caption)]),
    Section("All numbers", [PageTable("numbers", NUMBERS, lines)]),
  ]
  if table.settings:
    common, own = split_settings(table)
    fields = list(dict.fromkeys(field for settings in own.values() for field in settings))
    held = [[row, *(own[row].get(field) for field in fields)] for row in table.rows]
    shown = PageTable("configurations", ["row", *fields], held)
    sections.append(Section("Configurations", [shown], [f"Every row: {_written(common)}."]))
  records = [dict(zip(NUMBERS, line, strict=True)) for line in lines]
  return Page(table.title, description, [], sections, {**data, "numbers": records})
