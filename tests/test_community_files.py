"""Files for those who contribute, cite, report and read: they say what holds, and they parse."""

import ast
import gc
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import compmod_jax
from website import changes, offline

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
YAML = sorted([*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml"])


def pages_of(navigation) -> list[str]:
  """Every page that a navigation names, in its order."""
  if isinstance(navigation, str):
    return [navigation]
  parts = navigation.values() if isinstance(navigation, dict) else navigation
  return [page for part in parts for page in pages_of(part)]


def parsed(path: Path) -> ast.Module:
  """Syntax of a file; no collection, since one in the midst confuses Python 3.11's parser."""
  gc.disable()
  try:
    return ast.parse(path.read_text())
  finally:
    gc.enable()


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_what_is_yaml_parses(path):
  assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_issue_forms_have_what_they_must_have():
  forms = [path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.stem != "config"]
  assert forms
  for path in forms:
    form = yaml.safe_load(path.read_text())
    assert form.keys() >= {"name", "description", "body"}, path.name
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids)), path.name
    assert all(part["attributes"]["label"] for part in form["body"]), path.name


def test_the_citation_is_of_this_version_and_of_the_three_theses():
  citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  assert citation.keys() >= {"cff-version", "message", "title", "authors"}
  assert citation["version"] == compmod_jax.__version__
  assert citation["license"] == PROJECT["license"]
  theses = {ref["authors"][0]["family-names"]: ref["year"] for ref in citation["references"]}
  assert theses == {"Kolios": 2023, "Ulmer": 2019, "Knowles": 2022}


def test_the_changelog_begins_with_what_is_unreleased_and_this_version():
  text = (ROOT / "CHANGELOG.md").read_text()
  headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
  assert headings[0] == "[Unreleased]"
  assert headings[1].split()[0].strip("[]") == compmod_jax.__version__
  kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
  assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_hooks_run_tools_that_the_test_extra_installs():
  config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
  extra = " ".join(PROJECT["optional-dependencies"]["test"])
  for repository in config["repos"]:
    assert repository["repo"] == "local"  # versions of others' hooks would differ from ours
    for hook in repository["hooks"]:
      tool = Path(hook["entry"].split()[0]).name
      assert re.search(rf"\b{tool}\b", extra), tool


def test_what_the_site_is_built_with_is_pinned():
  pins = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split()}
  names = {re.split(r"[^\w-]", line)[0] for line in PROJECT["optional-dependencies"]["docs"]}
  assert names - {PROJECT["name"]} <= pins


def test_the_site_leads_to_every_page_once():
  named = pages_of(SITE["nav"])
  assert len(named) == len(set(named))
  made = SITE["extra"]["pages"]
  written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
  assert set(named) == written | set(made)
  assert all((ROOT / source).is_file() for source in made.values())


def test_the_reference_covers_namespaces_that_are_there():
  package = ROOT / SITE["extra"]["package"]
  for name in SITE["extra"]["namespaces"]:
    assert (package / name).is_dir() or (package / f"{name}.py").is_file(), name


def test_pages_whose_code_is_run_are_kept_without_output():
  pages = SITE["extra"]["notebooks"]
  assert len(pages) == 3
  for page in pages:
    text = (ROOT / "docs" / page).read_text()
    assert re.search(r"^```(python|sh)\b", text, re.MULTILINE), page
    assert 'class="output"' not in text
    assert "data:image" not in text
  for path in (ROOT / "docs").rglob("*.ipynb"):
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), path


def test_a_page_that_loads_from_a_network_or_what_is_not_there_is_named(tmp_path):
  (tmp_path / "here.js").write_text("")
  (tmp_path / "style.css").write_text("@import url(https://fonts.example/a.css);")
  (tmp_path / "page.html").write_text(
    '<link rel="canonical" href="https://docs.example/"><a href="https://paper.example">paper</a>'
    '<script src="here.js?v=1"></script><img src="data:image/png;base64,AA=="><img src="gone.png">'
    '<script src="//cdn.example/a.js"></script><link rel="stylesheet" href="https://cdn.example/b">'
  )
  faults = "\n".join(offline.faults(tmp_path))
  for wrong in ("gone.png", "//cdn.example/a.js", "https://cdn.example/b", "fonts.example/a.css"):
    assert faults.count(wrong) == 1, wrong
  assert len(faults.splitlines()) == 4


def test_a_change_to_lines_that_are_not_there_is_refused():
  assert changes.apply("a\nb\n", "@@\n a\n+c\n") == "a\nc\nb\n"
  for text in ("b\n", "a\na\n"):
    with pytest.raises(ValueError, match="times"):
      changes.apply(text, "@@\n a\n+c\n")


def test_nothing_unpickles_or_runs_text_as_code():
  """What SECURITY.md promises about files of others."""
  forbidden = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
  for path in [*(ROOT / "compmod_jax").rglob("*.py"), *(ROOT / "train").rglob("*.py")]:
    for node in ast.walk(parsed(path)):
      match node:
        case ast.Import(names=names):
          modules = {name.name.split(".")[0] for name in names}
        case ast.ImportFrom(module=str(module)):
          modules = {module.split(".")[0]}
        case ast.Call(func=ast.Name(id="eval" | "exec")):
          pytest.fail(f"{path}:{node.lineno} runs text as code")
        case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
          pytest.fail(f"{path} unpickles")
        case _:
          continue
      assert not modules & forbidden, path
