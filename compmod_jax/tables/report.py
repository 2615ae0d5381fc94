"""A table of a grid of runs, beside the published one: for terminals, LaTeX and reports."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from compmod_jax.analysis.report.page import Page, Picture, Section
from compmod_jax.analysis.report.page import Table as PageTable
from compmod_jax.analysis.report.results import unit
from compmod_jax.metrics.factorial import Effect
from compmod_jax.metrics.significance import Mean
from compmod_jax.tables.grid import ALPHA, Column, Entry, Table

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
  ]
  if table.effects:
    return [*found, *_notes_on_effects(table)]
  if not table.references:
    return found
  found.append(
    f"* differs from {_reference(table)}: paired t-test over seeds, corrected for the number of"
    f" rows that are tested (Holm), p at most {ALPHA}."
  )
  for column in table.columns:
    least = [
      entries[column.name].detectable for entries in table.rows.values() if column.name in entries
    ]
    least = [value for value in least if math.isfinite(value)]
    if least:
      found.append(
        f"{column.name}: with these seeds a true difference from {_reference(table)} would have"
        f" to be {min(least):.{column.digits}f} to {max(least):.{column.digits}f}, by row, to be"
        " found in four of five repetitions."
      )
  return found


def _reference(table: Table) -> str:
  """What rows are tested against, in a few words."""
  names = list(dict.fromkeys(table.references.values()))
  return f"the row {names[0]!r}" if len(names) == 1 else "the row that it is compared with"


def _comparisons(table: Table) -> dict[str, str]:
  """Row -> what a picture calls its difference; the name alone where all have one reference."""
  tested = [row for row in table.rows if row in table.references]
  if len(set(table.references.values())) == 1:
    return {row: row for row in tested}
  return {row: f"{row}, less {table.references[row]}" for row in tested}


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


def _notes_on_effects(table: Table) -> list[str]:
  """How effects were computed, and how far runs of a setting spread."""
  one = next(iter(table.effects.values()))
  settings = 2 ** sum(len(effect.factors) == 1 for effect in one.effects)
  spread = ", ".join(
    f"{c.name} {table.effects[c.name].deviation:.{c.digits}f}"
    for c in table.columns
    if c.name in table.effects
  )
  return [
    f"Effects: least squares over all {settings} settings, seeds as blocks ({one.freedom} degrees"
    " of freedom). A main effect is the mean with the factor less the mean without it, whatever the"
    " others are; an interaction of two is half of what the second changes in the effect of the"
    f" first. ± half the 95 % interval; p is not corrected for the {len(one.effects)} effects of a"
    " column (effects.csv has both); the same contrast of published figures in brackets.",
    f"Standard deviation of what effects and seeds leave unexplained: {spread}.",
  ]


def cells(table: Table) -> list[list[str]]:
  """The heading, then a line a row: mean ± half the interval, * where it differs, published.

  Where effects are tested there is no *.
  """
  body = [
    [row, *(_cell(entries.get(c.name), c.digits, not table.effects) for c in table.columns)]
    for row, entries in table.rows.items()
  ]
  return [_head("row", table), *body]


def _head(first: str, table: Table) -> list[str]:
  return [first, *(f"{c.name} {'(-)' if c.lower else '(+)'}" for c in table.columns)]


def _cell(entry: Entry | None, digits: int, stars: bool) -> str:
  if entry is None:
    return "-"
  shown = _interval(entry.runs, digits)
  shown += " *" if stars and entry.significant else ""
  return shown + ("" if entry.published is None else f" [{entry.published:.{digits}f}]")


def _interval(mean: Mean, digits: int, sign: str = "") -> str:
  half = "" if math.isnan(mean.half) else f" ± {mean.half:.{digits}f}"
  return f"{mean.mean:{sign}.{digits}f}{half}"


def effect_cells(table: Table) -> list[list[str]]:
  """The heading, then a line an effect: size ± half the interval, p, published; none: no line."""
  if not table.effects:
    return []
  names = [effect.name for effect in next(iter(table.effects.values())).effects]
  body = [
    [name, *(_effect_cell(_effect(table, c, place), c.digits) for c in table.columns)]
    for place, name in enumerate(names)
  ]
  return [_head("effect", table), *body]


def _effect(table: Table, column: Column, place: int) -> Effect | None:
  found = table.effects.get(column.name)
  return None if found is None else found.effects[place]


def _effect_cell(effect: Effect | None, digits: int) -> str:
  if effect is None:
    return "-"
  shown = _interval(effect.size, digits, "+")
  shown += "" if math.isnan(effect.p) else f", p {effect.p:.2g}"
  return shown + ("" if effect.published is None else f" [{effect.published:+.{digits}f}]")


def text(table: Table) -> str:
  """For a terminal; (+) marks columns in which more is better, (-) those in which less is."""
  parts = [aligned(lines) for lines in (cells(table), effect_cells(table)) if lines]
  found = configurations(table)
  end = ["", "Configurations", "", *found] if found else []
  body = [line for part in parts for line in ("", *part)]
  return "\n".join([table.title, *body, "", *notes(table), *end])


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
  """Lines of a table, the heading first, with columns as wide as their longest text."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  drawn = [
    "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    for line in lines
  ]
  drawn.insert(1, "-" * max(map(len, drawn)))
  return drawn


_LATEX = {
  "±": r"$\pm$", "*": r"$^{*}$", "%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#",
  "(+)": r"$\uparrow$", "(-)": r"$\downarrow$",
}  # fmt: skip


def latex(table: Table) -> str:
  """A `tabular` with booktabs rules, one of effects, and the notes as comments above them."""
  lines = [f"% {line}" for line in (table.title, *notes(table))]
  for part in (cells(table), effect_cells(table)):
    if part:
      lines.append(rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}")
      head, *body = (_latex_row(row) for row in part)
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


EFFECTS = (
  "effect", "column", "size", "low", "high", "p", "corrected p", "published", "deviation",
  "degrees of freedom",
)  # fmt: skip


def effect_numbers(table: Table) -> list[list[Any]]:
  """One line for each effect and column, under the headings `EFFECTS`."""
  return [
    [e.name, column, *_with_ends(e.size), e.p, e.corrected, e.published, f.deviation, f.freedom]
    for column, f in table.effects.items()
    for e in f.effects
  ]


class _Mark(NamedTuple):
  """A mark of a panel: a difference, whether it is beyond chance, and the published one."""

  difference: Mean
  strong: bool
  published: float | None


def forest(table: Table) -> "Figure":
  """A panel for each column: every row's difference from its reference, with its 95 % interval.

  A hollow mark is the published difference. Filled marks and solid lines differ after correction.
  """
  from compmod_jax.analysis.report import style

  rows = _comparisons(table)
  marks = {c: [_mark(table, row, c) for row in rows] for c in table.columns}
  title = f"Difference from {_reference(table)}"
  if not any(any(found) for found in marks.values()):
    return style.message(title, "No row has a seed in common with the reference row yet.")
  return _panels(title, list(rows.values()), marks)


def effects_forest(table: Table) -> "Figure":
  """A panel for each column: every effect with its 95 % interval, as `forest` draws differences."""
  lines = effect_cells(table)
  marks = {}
  for column in table.columns:
    found = table.effects.get(column.name)
    marks[column] = [
      _Mark(e.size, e.corrected <= ALPHA, e.published) for e in (found.effects if found else ())
    ]
  return _panels("Main effects and interactions", [line[0] for line in lines[1:]], marks)


def _panels(
  title: str, rows: Sequence[str], marks: Mapping[Column, Sequence[_Mark | None]]
) -> "Figure":
  from compmod_jax.analysis.report import style

  drawn = [column for column, found in marks.items() if any(found)]
  across = min(3, len(drawn))
  down = math.ceil(len(drawn) / across)
  figure = style.canvas(style.WIDTH, 0.8 + down * (0.7 + 0.24 * len(rows)))
  for place, column in enumerate(drawn):
    axes = figure.add_subplot(down, across, place + 1)
    for height, mark in enumerate(marks[column]):
      if mark is not None:
        _draw(axes, mark, height)
    axes.axvline(0, color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
    axes.set_yticks(range(len(rows)), rows if place % across == 0 else [""] * len(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    better = "less" if column.lower else "more"
    difference = f"difference, {column.unit or unit(column.value)} ({better} is better)"
    style.label(axes, column.name, difference, "")
  style.finish(figure, title)
  return figure


def _mark(table: Table, row: str, column: Column) -> _Mark | None:
  entry = table.rows[row].get(column.name)
  if entry is None or entry.paired is None:
    return None
  plain = table.rows[table.references[row]].get(column.name)
  there = None
  if entry.published is not None and plain is not None and plain.published is not None:
    there = entry.published - plain.published
  return _Mark(entry.paired.difference, entry.significant, there)


def _draw(axes: "Axes", mark: _Mark, height: int) -> None:
  from compmod_jax.analysis.report import style

  difference = mark.difference
  colour = style.PALETTE[0] if mark.strong else style.MUTED
  half = 0.0 if math.isnan(difference.half) else difference.half
  axes.errorbar(difference.mean, height, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
  if mark.published is not None:
    axes.plot(mark.published, height, "D", color=style.PALETTE[1], fillstyle="none", markersize=6)


def page(
  table: Table, *, description: str, data: Mapping[str, Any], more: Sequence[Section] = ()
) -> Page:
  """The table as a report: cells, picture, all numbers, notes.

  Args:
    table: what was measured.
    description: what was run.
    data: more plain values for `result.json`.
    more: sections between the picture and the numbers.
  """
  head, *body = cells(table)
  lines = numbers(table)
  caption = "Dot and bar: our mean and 95 % interval, blue where it differs after correction."
  published = any(e.published is not None for row in table.rows.values() for e in row.values())
  caption += " Orange diamond: the published difference." if published else ""
  sections = [Section("Table", [PageTable("table", head, body)], notes(table))]
  records = {"numbers": _records(NUMBERS, lines)}
  if table.effects:
    found = effect_numbers(table)
    picture = Picture("effects", effects_forest(table), caption)
    sections.append(Section("Effects", [PageTable("effects", EFFECTS, found), picture]))
    records["effects"] = _records(EFFECTS, found)
  else:
    sections.append(Section("Differences", [Picture("differences", forest(table), caption)]))
  sections += more
  sections.append(Section("All numbers", [PageTable("numbers", NUMBERS, lines)]))
  if table.settings:
    common, own = split_settings(table)
    fields = list(dict.fromkeys(field for settings in own.values() for field in settings))
    held = [[row, *(own[row].get(field) for field in fields)] for row in table.rows]
    shown = PageTable("configurations", ["row", *fields], held)
    sections.append(Section("Configurations", [shown], [f"Every row: {_written(common)}."]))
  return Page(table.title, description, [], sections, {**data, **records})


def _records(names: Sequence[str], lines: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
  return [dict(zip(names, line, strict=True)) for line in lines]
