"""The report tells all of the results, safely, and needs nothing beside itself."""

import csv
import html.parser
import json
import math
import re
import shutil
import subprocess

import pytest
from phone import WIDTH, assert_fits_a_phone

from compmod_jax.analysis.report import results, style, training
from compmod_jax.core.errors import UserError

SITE = "encoder/layer_0/self"
HOSTILE = '"><script>alert(1)</script>{{ 7 * 7 }}&amp;$\\frac'


BEST = {
  **{"step": 40, "metric": "bleu", "value": 97.83, "evaluations": 4},
  **{"sentences": 200, "of": 1000, "search": "greedy search"},
}


def full_results():
  weights = {"mean": [0.1, 0.2, 0.3, 0.4], "by_position": [[0.1, 0.2, 0.3, 0.4], [None] * 4]}
  test = {"split": "test", "sentences": 2345, "loss": 0.1234, "perplexity": 1.131}
  test |= {"word_perplexity": 1.298, "bleu": 97.64, "bleu_low": 97.01, "bleu_high": 98.22}
  test |= {"chrf": 98.76, "exact_match": 90.85, "signature": "nrefs:1|case:mixed|tok:13a"}
  test |= {"decoded": 2345, "search": "beam search with 5 beams"}
  test |= {"chrf_signature": "nrefs:1|case:mixed|nc:6"}
  sample = {"split": "test", "source": "the dog", "reference": "der Hund", "output": "den Hund"}
  return {
    "name": "nmt_cah",
    "command": "python -m train.main --config configs/nmt_cah.py",
    "description": "A small model.",
    "parameters": 1_030_000,
    "plain_parameters": 1_000_000,
    "train_seconds": 287.3,
    "ended": {
      "reason": "time_limit",
      "step": 1484,
      "total_steps": 1900,
      "text": "time limit (5 minutes) at step 1,484 of 1,900",
    },
    "best": dict(BEST),
    "splits": [test, {"split": "depth", "sentences": 10, "exact_match": None}],
    "samples": [sample | {"score": -0.5}],
    "head_weights": {SITE: weights},
    "configuration": {"model": {"heads": 8, "places": ("encoder",)}, "phases": [{"steps": 6000}]},
    "provenance": {"git": "3f2c1ab", "device": "CPU, 2 cores", "versions": {"jax": "0.10.2"}},
  }


def records(site=SITE):
  lines = [{"kind": "start"}]
  for step in range(10, 50, 10):
    record = {"kind": "train", "step": step, "loss": 8 / step, "learning_rate": 1e-3}
    for head in range(4 if site else 0):
      statistics = {"entropy": 1.2, f"weight_{head}": 0.25, f"wins_{head}": 0.1 * (head + 1)}
      record |= {f"router/{site}/{name}": value for name, value in statistics.items()}
    lines += [record, {"kind": "eval", "split": "valid", "step": step, "bleu": float(step)}]
  return lines


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  lines = "".join(json.dumps(record) + "\n" for record in records())
  (folder / "metrics.jsonl").write_text(lines + '{"kind": "train", "st')
  return training.write_report(folder, full_results())


class Page(html.parser.HTMLParser):
  """Collects tags, attributes and text of a page, and that its tags are balanced."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.text, self.open = [], [], [], []
    self.feed(text)
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(tag, *attribute) for attribute in attrs]
    if tag not in ("meta", "br"):
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(tag, *attribute) for attribute in attrs]

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


def test_the_page_loads_nothing(written):
  text = written.html.read_text()
  page = Page(text)
  assert not {"script", "link", "iframe", "object", "embed", "base", "img"} & set(page.tags)
  for tag, name, value in page.attributes:
    assert not name.startswith("on"), (tag, name)
    if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
      assert value.startswith(("#", "data:")), (tag, name, value)
  assert "@import" not in text
  assert "://" not in text
  assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", text))


def test_the_page_and_the_table_tell_every_number(written):
  shown = " ".join(Page(written.html.read_text()).text)
  numbers = ["2,345", "0.1234", "1.131", "1.298", "97.64", "97.01", "98.22", "98.76", "90.85 %"]
  signatures = ["nrefs:1|case:mixed|tok:13a", "nrefs:1|case:mixed|nc:6"]
  for number in numbers + signatures:
    assert number in shown
    assert number in training.table(full_results())
  for text in ("97.83", "at step 40", "1,030,000", "+3.00 %", "4 min 47 s", "CPU, 2 cores"):
    assert text in shown
  for text in ("model.heads", "phases[0].steps", "6000", "versions.jax", "0.10.2", "3f2c1ab"):
    assert text in shown


def test_page_and_table_say_why_training_ended_and_what_each_score_was_measured_on(written):
  shown, table = " ".join(Page(written.html.read_text()).text), training.table(full_results())
  for text in (
    "Training ended: time limit (5 minutes) at step 1,484 of 1,900.",
    "Best validation BLEU 97.83 at step 40: the best of 4 evaluations, on 200 of 1,000 sentences,"
    " greedy search.",
    "do not compare the two",
    "Scores of outputs on test: the whole split, beam search with 5 beams.",
  ):
    assert text in shown
    assert text in table
  last = full_results()
  last["configuration"] = {**last["configuration"], "model_selection": "last"}
  assert "Last validation BLEU 97.83 at step 40, on 200 of 1,000" in training.table(last)
  tiles = shown[: shown.index("Results")]
  assert "at step 40 · 200 of 1,000 sentences, greedy search" in tiles
  assert "2,345 sentences · the whole split, beam search with 5 beams" in tiles
  assert "time limit (5 minutes) at step 1,484 of 1,900 · CPU, 2 cores" in tiles
  kept = json.loads(written.json.read_text())
  assert kept["ended"]["reason"] == "time_limit"
  assert kept["best"] == BEST
  assert (kept["splits"][0]["decoded"], kept["splits"][0]["search"]) == (
    2345,
    "beam search with 5 beams",
  )


def test_results_of_an_older_run_make_no_claim_on_what_scores_were_measured_on():
  old = full_results()
  del old["ended"]
  old["best"] = {"step": 40, "metric": "bleu", "value": 97.83}
  del old["splits"][0]["search"]
  assert results.notes(old) == []


def test_the_report_fits_a_phone(written):
  text = written.html.read_text()
  assert_fits_a_phone(text)
  for wrong in (
    text.replace('<div class="scroll">\n<table class="scores">', '<div>\n<table class="scores">'),
    text.replace('name="viewport"', 'name="nothing"'),
    text.replace("figure svg { display: block; max-width: 100%;", "figure svg { display: block;"),
    text.replace("figure {", "figure { min-width: 34rem;"),
  ):
    assert wrong != text
    with pytest.raises((AssertionError, ValueError)):
      assert_fits_a_phone(wrong)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs the browser chromium")
def test_a_browser_lays_the_report_out_without_scrolling_the_page(tmp_path):
  long = full_results()
  long["splits"][0]["signature"] = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0" * 3
  long["name"], long["provenance"]["path"] = "x" * 300, "/".join(["folder"] * 60)
  written = training.write_report(tmp_path, long, records=records())
  frame = tmp_path / "frame.html"
  frame.write_text(
    f'<iframe id="page" src="{written.html.name}" width="{WIDTH}" height="2000"></iframe><script>'
    "addEventListener('load', () => { const page ="
    " document.getElementById('page').contentDocument.documentElement;"
    " document.title = page.scrollWidth; });</script>"
  )
  options = "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-sync"
  options += " --disable-background-networking --disable-component-update --disable-quic"
  profile = f"--user-data-dir={tmp_path / 'profile'}"
  command = ["chromium", *options.split(), "--allow-file-access-from-files", profile]
  printed = subprocess.run(
    [*command, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120
  ).stdout
  (width,) = re.findall(r"<title>(\d+)</title>", printed)
  assert int(width) <= WIDTH


def test_the_words_that_differ_are_marked_and_no_others(written):
  text = written.html.read_text()
  assert "<mark>den</mark> Hund" in text
  assert "<mark>der</mark> Hund" in text
  assert "<mark>Hund" not in text


def test_every_picture_is_in_the_page_and_beside_it(written):
  names = {"training", "head_weights", "head_weights_by_position"}
  names |= {"router_weight", "router_wins", "router_entropy"}
  page = Page(written.html.read_text())
  assert page.tags.count("svg") == len(names)
  assert names == {value for tag, name, value in page.attributes if (tag, name) == ("figure", "id")}
  assert {path.name for path in written.pictures} == {
    f"{name}.{suffix}" for name in names for suffix in ("png", "svg")
  }
  assert not list(written.html.parent.glob("*.part"))


def test_the_pictures_follow_the_theme_of_the_page(written):
  text = written.html.read_text()
  body = text[text.index("<body>") :]
  used = set(re.findall(r"var\((--\w+)\)", body))
  assert {"--ink", "--muted", "--grid", "--c0"} <= used
  light, dark = re.findall(r":root \{(.*?)\}", text, flags=re.DOTALL)
  for variable in used:
    assert f"{variable}:" in light
    assert f"{variable}:" in dark
  assert not set(style.PALETTE) & set(re.findall(r"#[0-9a-f]{6}", body))


def test_missing_values_are_dashes(written):
  last = training.table(full_results()).splitlines()[3].split()
  assert last == ["depth", "10", *["-"] * 7]
  assert written.html.read_text().count("<td>–</td>") == 7
  with written.csv.open(newline="") as file:
    rows = list(csv.DictReader(file))
  assert rows[1]["bleu"] == rows[1]["exact_match"] == ""
  assert float(rows[0]["word_perplexity"]) == 1.298


def test_the_columns_of_the_table_are_aligned():
  lines = training.table(full_results()).splitlines()[:4]
  assert len({len(line) for line in lines}) == 1
  assert lines[0].index("sentences") + len("sentences") == lines[2].index("2,345") + len("2,345")


def test_hostile_text_stays_text(tmp_path):
  hostile = full_results()
  for field in ("name", "command", "description"):
    hostile[field] = HOSTILE
  hostile["best"]["metric"] = HOSTILE
  hostile["splits"][0] |= {"split": HOSTILE, "signature": HOSTILE}
  for field in ("split", "source", "reference", "output"):
    hostile["samples"][0][field] = HOSTILE
  hostile["head_weights"] = {HOSTILE: hostile["head_weights"][SITE]}
  hostile["configuration"] = {HOSTILE: [HOSTILE]}
  hostile["provenance"] = {"device": HOSTILE}
  log = records(HOSTILE)
  text = training.write_report(tmp_path, hostile, title=HOSTILE, records=log).html.read_text()
  page = Page(text)
  assert "script" not in page.tags
  assert "<script" not in text
  assert text.count("&lt;script&gt;") > 15
  assert "".join(page.text).count(HOSTILE) > 10, "shown as it is, and no template in it is run"


def test_the_page_has_the_scores_of_parts_of_every_split(written, tmp_path):
  assert "Parts of the splits" not in written.html.read_text()
  found = full_results()
  found["splits"][0]["parts"] = {"exact_match/category/passive": 99.97, "race/score": 31.25}
  found["splits"][1]["parts"] = {"exact_match/category/passive": 12.5}
  text = training.write_report(tmp_path, found, records=records()).html.read_text()
  assert_fits_a_phone(text)
  cells = [piece.strip() for piece in Page(text).text if piece.strip()]
  start = cells.index("Parts of the splits")
  assert cells[start + 1 : start + 10] == [
    *("score", "test", "depth"),
    *("exact_match/category/passive", "99.97 %", "12.50 %"),
    *("race/score", "31.25", "–"),
  ]


def test_a_model_without_a_router_has_a_report_without_its_pictures(tmp_path):
  plain = full_results()
  del plain["head_weights"]
  written = training.write_report(tmp_path, plain, records=records(site=None))
  page = Page(written.html.read_text())
  assert page.tags.count("svg") == 1
  assert "router" not in written.html.read_text()


def test_the_least_results_make_a_report(tmp_path):
  written = training.write_report(tmp_path / "new", {"name": "bare", "splits": []})
  text = written.html.read_text()
  assert "No training records yet." in text
  assert "Samples" not in text


def test_results_survive_their_file_and_infinity_is_strict_json(tmp_path):
  given = full_results()
  given["splits"][1] |= {"perplexity": math.inf, "loss": math.nan}
  written = training.write_report(tmp_path, given, records=[])
  read = json.loads(written.json.read_text(), parse_constant=pytest.fail)
  assert read["splits"][1]["perplexity"] is None
  assert read["splits"][0] == given["splits"][0]
  assert "inf" in training.table(given)
  assert (
    training.write_report(tmp_path, read, records=[]).json.read_text() == written.json.read_text()
  )


def test_a_perfect_score_is_not_claimed_by_rounding():
  cells = results.cells({"split": "test", "exact_match": 99.97, "bleu": 99.99}, "-", "-")
  assert cells["exact_match"] == "99.97 %"
  assert cells["bleu"] == "99.99"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda r: r.update(nmae="x"), "nmae.*name"),
    (lambda r: r.pop("splits"), "lacks splits"),
    (lambda r: r["splits"][1].update(belu=1.0), r"splits\[1\].*belu.*bleu"),
    (lambda r: r["samples"][0].pop("output"), r"samples\[0\] lacks output"),
    (lambda r: r["head_weights"].update(x={}), "'x'.*lacks mean"),
    (lambda r: r["best"].pop("step"), "best lacks step"),
    (lambda r: r["ended"].pop("reason"), "ended lacks reason"),
  ],
)
def test_a_field_outside_the_schema_is_an_error(change, message, tmp_path):
  wrong = full_results()
  change(wrong)
  with pytest.raises(UserError, match=message):
    training.write_report(tmp_path, wrong, records=[])
