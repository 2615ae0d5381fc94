"""What a training run leaves behind for people: one HTML file, its pictures, and its table.

`write_report` takes a `Results` and the log of the run. The HTML file needs nothing beside itself:
pictures and style are inside it, it loads no font and runs no script.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compmod_jax.analysis.report import page
from compmod_jax.analysis.report import results as _results
from compmod_jax.analysis.report.results import (
  METRICS,
  Best,
  HeadWeights,
  Results,
  Sample,
  SplitResult,
  number,
  selection,
  table,
)
from compmod_jax.core.metric_lines import read_records

__all__ = [
  "Best", "HeadWeights", "Report", "Results", "Sample", "SplitResult", "read_records", "table",
  "write_report",
]  # fmt: skip


class Report(NamedTuple):
  """Where `write_report` wrote."""

  html: Path
  json: Path
  csv: Path
  pictures: list[Path]


def write_report(
  workdir: str | Path,
  results: Results,
  *,
  title: str | None = None,
  records: Sequence[Mapping[str, Any]] | None = None,
) -> Report:
  """Writes report.html, results.json, results.csv and plots/*.png, *.svg into `workdir`.

  Each file appears whole or not at all. Drawing takes a few seconds.

  Args:
    workdir: folder of the run; made if it is not there.
    results: what to tell.
    title: heading of the page; the run's name by default.
    records: the parsed lines of the run's log; read from workdir/metrics.jsonl by default.

  Raises:
    UserError: `results` lacks a required field, or has one that the schema does not know.
  """
  from compmod_jax.analysis.report import plot

  _results.check_schema(results)
  workdir = Path(workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  if records is None:
    records = read_records(workdir / "metrics.jsonl")
  pictures, saved = [], []
  for name, caption, figure in _figures(results, records):
    files = plot.save(figure, workdir / "plots", name)
    svg = plot.inline_svg(files[1].read_text("utf-8"))
    pictures.append({"name": name, "caption": caption, "svg": svg})
    saved += files
  html, data, rows = (workdir / name for name in ("report.html", "results.json", "results.csv"))
  text = json.dumps(_results.plain(results), indent=2, ensure_ascii=False, allow_nan=False)
  page.write_text(data, text + "\n")
  page.write_text(rows, _results.csv_table(results))
  page.write_text(html, _html(results, title or results["name"], pictures))
  return Report(html, data, rows, saved)


def _figures(results: Results, records: Sequence[Mapping[str, Any]]) -> Iterator[tuple]:
  """Name, caption and figure of each picture; router pictures only where there is a router."""
  from compmod_jax.analysis import learning_curves
  from compmod_jax.analysis.heads import over_training
  from compmod_jax.analysis.report import plot

  best = (results.get("best") or {}).get("step")
  yield (
    "training",
    "Loss and perplexity of training are means over the logged interval and include dropout and"
    " label smoothing, where these are used; those of validation do not.",
    plot.training_curves(records, best_step=best),
  )
  weights = results.get("head_weights") or {}
  if weights:
    caption = "Mean over tokens. The dashed line is what uniform weights give."
    figure = plot.head_weights({site: entry["mean"] for site, entry in weights.items()})
    yield "head_weights", caption, figure
  maps = {site: entry.get("by_position") for site, entry in weights.items()}
  maps = {site: rows for site, rows in maps.items() if rows}
  if maps:
    caption = "Orange: more than an equal share of the weight; purple: less. Empty: no such tokens."
    yield "head_weights_by_position", caption, plot.head_weights_by_position(maps)  # pyright: ignore[reportArgumentType]
  captions = {
    "weight": "Numbers at the right name the heads.",
    "wins": "A head wins a token when it has the largest weight there. Near 0 it never does.",
    "entropy": "Mean over tokens. At the dashed line heads share equally; at 0 one takes all.",
  }
  for statistic, caption in captions.items():
    if any(key.startswith("router/") and f"/{statistic}" in key for r in records for key in r):
      yield f"router_{statistic}", caption, plot.router_curves(records, statistic)  # pyright: ignore[reportArgumentType]
  yield from over_training.pictures(records)
  if any("phase" in record for record in records):
    caption = "Training: means over each epoch of the part of the data that it trained on."
    yield "learning_curves", caption, learning_curves.learning_curves({"": records})


def _html(results: Results, title: str, pictures: list[dict[str, str]]) -> str:
  from markupsafe import Markup

  columns, samples = _results.columns(results), []
  for sample in results.get("samples") or ():
    output, reference = page.differences(sample["output"], sample["reference"])
    entries = [("source", sample["source"]), ("output", output), ("reference", reference)]
    score = sample.get("score")
    note = sample["split"] if score is None else f"{sample['split']} · score {score:.3f}"
    samples.append({"entries": entries, "note": note})
  return page.render(
    "report.html",
    title=title,
    description=results.get("description"),
    command=results.get("command"),
    tiles=list(_tiles(results)),
    header=[_results.HEADINGS[column] for column in columns],
    rows=[
      {column: _results.cells(row, "–", "–")[column] for column in columns}
      for row in results["splits"]
    ],
    columns=columns,
    units=results.get("units"),
    groups=_parts(results),
    notes=_results.notes(results),
    signatures=_results.signatures(results),
    samples=samples,
    pictures=[{**picture, "svg": Markup(picture["svg"])} for picture in pictures],
    configuration=list(page.flat(results.get("configuration") or {})),
    provenance=list(page.flat(results.get("provenance") or {})),
  )


def _parts(results: Results) -> dict[str, Any] | None:
  """A table of the scores of parts of the splits, a row for each part; None if there are none."""
  rows = [row for row in results["splits"] if row.get("parts")]
  scores = [row.get("parts") or {} for row in rows]
  names = dict.fromkeys(name for one in scores for name in one)
  if not names:
    return None

  def cell(name: str, value: float | None) -> tuple[str, str]:
    return ("–" if value is None else number(name.partition("/")[0], value)), ""

  return {
    "header": [("score", "text"), *((row["split"], "") for row in rows)],
    "rows": [[(name, "text"), *(cell(name, one.get(name)) for one in scores)] for name in names],
    "caption": "Exact match: per cent of a part's sentences. A dash: the split has no such part.",
  }


def _tiles(results: Results) -> Iterator[tuple[str, str, str]]:
  """Headline figures: name, value, remark."""
  best = results.get("best")
  if best:
    metric = METRICS.get(best["metric"], best["metric"])
    yield (
      f"{selection(results)} validation {metric}",
      number(best["metric"], best["value"]),
      " · ".join([f"at step {best['step']:,}", *_on(best)]),
    )
  for row in results["splits"]:
    for metric in (best["metric"] if best else "bleu", "bleu", "exact_match", "loss"):
      value = row.get(metric)
      if row["split"] == "test" and value is not None:
        sentences = row.get("sentences")
        remark = [] if sentences is None else [f"{sentences:,} sentences"]
        yield f"test {METRICS[metric]}", number(metric, value), " · ".join([*remark, *_on(row)])
        break
  parameters, plain = results.get("parameters"), results.get("plain_parameters")
  if parameters is not None:
    remark = f"{(parameters / plain - 1) * 100:+.2f} % against the plain model" if plain else ""
    yield "parameters", f"{parameters:,}", remark
  seconds = results.get("train_seconds")
  if seconds is not None:
    ended, device = results.get("ended"), (results.get("provenance") or {}).get("device", "")
    remarks = [ended["text"] if ended else "", str(device)]
    yield "training time", _results.duration(seconds), " · ".join(filter(None, remarks))


def _on(row: Mapping[str, Any]) -> list[str]:
  """What a score was measured on, where that is known."""
  return [_results.measured_on(row)] if row.get("search") or "of" in row else []
