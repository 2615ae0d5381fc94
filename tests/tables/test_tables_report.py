"""A grid of runs becomes a table that says what differs, how surely, and what could have been."""

import math

import numpy as np
import pytest

from compmod_jax.analysis.report import page as pages
from compmod_jax.core.errors import UserError
from compmod_jax.metrics.significance import paired_test
from compmod_jax.tables import report
from compmod_jax.tables.grid import Column, planned, summarise

COLUMNS = (Column("BLEU", "test", "bleu"), Column("PPL", "test", "perplexity", lower=True))
VALUES = {
  "none": {seed: {"BLEU": 30 + 0.1 * seed, "PPL": 5 + 0.01 * seed} for seed in range(3)},
  "enc": {seed: {"BLEU": 32 + 0.1 * seed**2, "PPL": 5 - 0.02 * seed} for seed in range(3)},
  "all": {0: {"BLEU": 30.5}},
}
PUBLISHED = {"none": {"BLEU": 33.25}, "enc": {"BLEU": 33.61}}


@pytest.fixture
def table():
  return summarise("A table", VALUES, COLUMNS, reference="none", published=PUBLISHED)


def test_rows_are_tested_against_the_plain_one_on_common_seeds(table):
  entry = table.rows["enc"]["BLEU"]
  test = paired_test([32.0, 32.1, 32.4], [30.0, 30.1, 30.2])
  assert entry.paired.difference.mean == pytest.approx(2.0667, abs=1e-3)
  # "all" has one seed, so one test is left, and nothing to correct for.
  assert entry.p == pytest.approx(test.p)
  assert entry.significant
  assert table.rows["all"]["BLEU"].paired.difference.mean == pytest.approx(0.5)
  assert math.isnan(table.rows["all"]["BLEU"].p)
  assert table.rows["none"]["BLEU"].paired is None


def test_more_rows_raise_every_corrected_p_value():
  values = VALUES | {"dec": {seed: {"BLEU": 30 + 0.1 * (seed - 1) ** 2} for seed in range(3)}}
  wide = summarise("A", values, COLUMNS, reference="none", published={})
  narrow = summarise("A", VALUES, COLUMNS, reference="none", published={})
  assert wide.rows["enc"]["BLEU"].p == pytest.approx(2 * narrow.rows["enc"]["BLEU"].p)
  assert wide.rows["enc"]["BLEU"].detectable > narrow.rows["enc"]["BLEU"].detectable


def test_rows_of_several_data_sets_are_tested_each_against_its_own():
  values = {
    f"{data}, {model}": {seed: {"BLEU": base + gain * seed + 0.1 * seed**2} for seed in range(3)}
    for data, base in (("far", 60.0), ("near", 30.0))
    for model, gain in (("other", 0.02), ("plain", 0.0))
  }
  references = {f"{data}, other": f"{data}, plain" for data in ("far", "near")}
  table = summarise("A", values, COLUMNS, reference=references, published={})
  differences = {row: entry["BLEU"].paired for row, entry in table.rows.items()}
  assert [row for row, test in differences.items() if test is None] == ["far, plain", "near, plain"]
  for row, plain in references.items():
    both = [[v["BLEU"] for v in values[one].values()] for one in (row, plain)]
    test = paired_test(*both)
    assert differences[row] == test
    # Two tests: the correction is for two and not for three rows.
    assert table.rows[row]["BLEU"].p == pytest.approx(min(1.0, 2 * test.p))
  figure = report.forest(table)
  assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
    "far, other, less far, plain", "near, other, less near, plain"
  ]  # fmt: skip
  assert "* differs from the row that it is compared with" in report.text(table)


FACTORS = {"enc": ("enc", "enc+dec"), "dec": ("dec", "enc+dec")}
COMPLETE = {
  row: {seed: {"BLEU": base + 0.3 * seed, "PPL": 5 + slip * seed} for seed in range(3)}
  for row, base, slip in (
    ("none", 30.0, 0.1), ("enc", 29.0, 0.2), ("dec", 28.0, 0.1), ("enc+dec", 27.5, 0.1)
  )
}  # fmt: skip


def factorial(values, **published):
  return summarise("A", values, COLUMNS, reference="none", published=published, factors=FACTORS)


def test_rows_that_are_all_settings_of_factors_are_tested_as_such():
  figures = {row: {"BLEU": 1.0 + ("enc" in row)} for row in COMPLETE}
  found = factorial(COMPLETE, **figures)
  effects = {e.name: e for e in found.effects["BLEU"].effects}
  assert effects["enc"].size.mean == pytest.approx(-0.75)
  assert effects["dec"].size.mean == pytest.approx(-1.75)
  assert effects["enc x dec"].size.mean == pytest.approx(0.25)
  shown = report.text(found)
  assert "*" not in shown
  assert "-1.75 ± 0.00, p " in shown
  assert "[+1.00]" in shown
  assert len(report.effect_numbers(found)) == 3 * len(COLUMNS)


def test_a_factorial_of_which_runs_are_missing_has_no_effects():
  fewer = {row: runs for row, runs in COMPLETE.items() if row != "dec"}
  assert not factorial(fewer).effects
  short = COMPLETE | {"dec": {0: COMPLETE["dec"][0]}}
  assert not factorial(short).effects
  without = COMPLETE | {"dec": {seed: {"BLEU": 1.0} for seed in range(3)}}
  assert list(factorial(without).effects) == ["BLEU"]


def test_effects_stand_in_the_report_in_latex_and_as_numbers(tmp_path):
  found = factorial(COMPLETE)
  written = pages.write(report.page(found, description="", data={}), tmp_path, command="a command")
  assert "enc x dec" in written.html.read_text()
  assert (tmp_path / "effects.csv").read_text().count("\n") == 7
  assert {path.stem for path in written.pictures} == {"effects"}
  assert report.latex(found).count(r"\begin{tabular}") == 2


def test_no_finished_run_is_an_error():
  with pytest.raises(UserError, match="no run is finished"):
    summarise("A", {"none": {}}, COLUMNS, reference="none", published={})


def test_the_text_shows_means_intervals_stars_and_published_figures(table):
  shown = report.text(table)
  assert "32.17 ± 0.52 * [33.61]" in shown
  assert "30.50" in shown
  assert "BLEU (+)" in shown
  assert "PPL (-)" in shown


SETTINGS = {
  "none": {"model.dropout": 0.15, "model.signal": "none"},
  "enc": {"model.dropout": 0.15, "model.signal": "nll", "model.size": 0.1},
  "all": {"model.dropout": 0.15, "model.signal": "entropy"},
}


def test_every_row_has_its_whole_configuration():
  given = {"reference": "none", "published": PUBLISHED, "settings": SETTINGS}
  table = summarise("A table", VALUES, COLUMNS, **given)
  common, own = report.split_settings(table)
  assert {row: common | settings for row, settings in own.items()} == SETTINGS
  assert common == {"model.dropout": 0.15}
  shown = report.text(table)
  assert "Every row: model.dropout = 0.15." in shown
  assert "enc: model.signal = nll, model.size = 0.1." in shown
  section = report.page(table, description="", data={}).sections[-1]
  assert section.title == "Configurations"
  (shown,) = section.items
  assert isinstance(shown, pages.Table)
  assert list(shown.rows[1]) == ["enc", "nll", 0.1]


def test_latex_has_a_cell_for_every_column_and_no_bare_sign(table):
  body = [line for line in report.latex(table).splitlines() if not line.startswith("%")]
  rows = [line for line in body if line.endswith(r"\\")]
  assert len(rows) == 4
  assert all(row.count(" & ") == len(COLUMNS) for row in rows)
  assert r"$\pm$" in rows[1]
  assert "±" not in "".join(body)


def test_the_report_holds_table_picture_and_numbers(table, tmp_path):
  found = report.page(table, description="Two rows.", data={"cells": 7})
  written = pages.write(found, tmp_path, command="a command")
  html = written.html.read_text()
  assert "32.17 ± 0.52" in html
  assert "<svg" in html
  assert (tmp_path / "numbers.csv").read_text().count("\n") == 6
  assert {path.suffix for path in written.pictures} == {".png", ".svg"}


def test_differences_have_the_units_of_their_scores():
  columns = (Column("BLEU", "test", "bleu"), Column("PPL", "test", "perplexity", lower=True))
  values = {row: {s: {"BLEU": 10.0 + s, "PPL": 3.0 + s} for s in (0, 1)} for row in ("plain", "a")}
  figure = report.forest(summarise("t", values, columns, reference="plain", published={}))
  assert [axes.get_xlabel() for axes in figure.axes] == [
    "difference, points (more is better)",
    "difference, per token (less is better)",
  ]


def test_without_the_plain_row_the_picture_says_what_is_missing(tmp_path):
  alone = summarise("A", {"enc": VALUES["enc"]}, COLUMNS, reference="none", published={})
  written = pages.write(report.page(alone, description="", data={}), tmp_path)
  assert "No row has a seed in common" in written.html.read_text()


def test_what_seeds_will_show_is_what_paired_tests_of_such_runs_find():
  chance = np.random.default_rng(0)
  there = {row: {seed: {"BLEU": chance.normal(30, 2)} for seed in range(200)} for row in ("a", "b")}
  least = planned(there, "BLEU", seeds=6, tests=1)
  found = 0
  for _ in range(2000):
    plain, other = chance.normal(30, 2, (2, 6))
    found += paired_test(list(other + least), list(plain)).p <= 0.05
  assert abs(found / 2000 - 0.8) < 0.04
  assert planned(there, "BLEU", seeds=6, tests=5) > least
  once = {row: {0: {"BLEU": 30.0}} for row in ("a", "b")}
  assert planned(once, "BLEU", seeds=6, tests=1) == math.inf
