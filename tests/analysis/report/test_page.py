"""A page tells all of its tables, pictures and samples, safely, and needs nothing beside itself."""

import csv
import json
import math

import numpy as np
import pytest
from phone import assert_fits_a_phone

from compmod_jax.analysis.report import page, panels, style

HOSTILE = '"><script>alert(1)</script>{{ 7 * 7 }}&amp;'


def make_page(text="plain"):
  heat = panels.Heat(np.array([[0.1, -2.0], [np.nan, 0.5]]), [text, "b"], ["0", "1"])
  series = [panels.Series(name, [0.1, 0.2], [0.0, 0.1], [0.3, 0.4]) for name in ("one", text)]
  curves = {"encoder/layer_0/self": {"0": (np.arange(1, 4), np.array([1.0, np.nan, 3.0]))}}
  figures = {
    "heat": panels.heat_maps(text, {text: heat}, across="x", down="y", unit="u", numbers=True),
    "forest": panels.forest(text, {text: ([text, "b"], series)}, across="x"),
    "lines": panels.lines(text, curves, across="x", up="y", logarithmic=True),
    "bars": panels.bars(text, {"encoder/layer_0/self": np.ones(3)}, across="x", up="y"),
  }
  pictures = [page.Picture(name, figure, text) for name, figure in figures.items()]
  rows = [[text, 1234, 0.123456, 1e-7], ["b", 5, math.nan, None]]
  table = page.Table("numbers", ("name", "count", "value", "small"), rows, text)
  hidden = page.Table("hidden", ("name",), [["not shown"]], shown=False)
  sample = page.Sample([(text, text), ("runs", [(text, True), ("same", False)])], text)
  return page.Page(
    title=text,
    description=text,
    summary=[text],
    sections=[page.Section(text, [*pictures, table, hidden, sample], [text])],
    data={"value": math.inf, "text": text},
    tiles=[(text, text, text)],
  )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp("page") / "new"
  return page.write(make_page(HOSTILE), folder, command=HOSTILE, provenance={"a": {"b": HOSTILE}})


def test_hostile_text_stays_text_everywhere(written):
  text = written.html.read_text()
  assert "<script" not in text
  assert text.count("&lt;script&gt;") >= 15
  assert "49" not in text.split("<body>")[1].split("<svg")[0]


def test_the_page_loads_nothing_and_holds_every_picture(written):
  text = written.html.read_text()
  assert "://" not in text
  assert "@import" not in text
  assert "<img" not in text
  assert text.count("<svg") == 4 == text.count("<figure")
  assert {p.suffix for p in written.pictures} == {".png", ".svg"}
  assert not list(written.html.parent.glob("*.part"))
  body = text[text.index("<body>") :]
  assert not set(style.PALETTE) & {f"#{part[:6]}" for part in body.split("#")[1:]}


def test_an_analysis_fits_a_phone(written):
  assert_fits_a_phone(written.html.read_text())


def test_tables_are_rounded_on_the_page_and_exact_in_their_files(written):
  text = written.html.read_text()
  for shown in ("1,234", "0.123", "1e-07", "–"):
    assert f">{shown}<" in text
  assert "not shown" not in text
  tables = {path.name: path for path in written.tables}
  with tables["numbers.csv"].open(newline="") as file:
    rows = list(csv.reader(file))
  assert rows[1] == [HOSTILE, "1234", "0.123456", "1e-07"]
  assert rows[2] == ["b", "5", "", ""]
  assert "not shown" in tables["hidden.csv"].read_text()


def test_numbers_are_strict_json(written):
  data = json.loads(written.json.read_text(), parse_constant=pytest.fail)
  assert (data["value"], data["text"], data["command"]) == (None, HOSTILE, HOSTILE)


def test_words_that_differ_are_marked_and_no_others():
  left, right = page.differences("the old dog sleeps", "the dog sleeps well")
  assert left == [("the", False), ("old", True), ("dog sleeps", False)]
  assert right == [("the", False), ("dog sleeps", False), ("well", True)]


def test_an_analysis_that_found_nothing_has_a_page(tmp_path):
  nothing = page.Page("empty", "", [], [page.Section("none", [], ["nothing to see"])], {})
  written = page.write(nothing, tmp_path)
  assert "nothing to see" in written.html.read_text()
  assert (written.pictures, written.tables) == ([], [])
  for draw in (panels.heat_maps, panels.lines, panels.bars, panels.forest):
    options = {"across": "x"} | ({} if draw is panels.forest else {"up": "y"})
    if draw is panels.heat_maps:
      options = {"across": "x", "down": "y", "unit": "u"}
    figure = draw("nothing", {}, **options)
    assert figure.axes == []
