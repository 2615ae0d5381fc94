"""Every program's help begins with how to call it; that of an experiment is short."""

import contextlib
import importlib
import re
from pathlib import Path

import pytest

from compmod_jax.commands import analyse, cli, help, programs
from compmod_jax.commands.config_option import parse
from compmod_jax.commands.train import Args
from compmod_jax.core.errors import UserError
from compmod_jax.training.experiment import Experiment, load_config, variants
from train.__main__ import main as list_programs

CONFIGS = sorted(map(str, Path("configs").glob("*.py")))
NAMES = ["main" if name == "train" else name for name, _ in programs()]


def printed(capsys, program, *argv: str) -> str:
  with contextlib.suppress(SystemExit):
    program(list(argv))
  return capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_every_program_begins_with_usage_and_has_debug(name, capsys):
  text = printed(capsys, importlib.import_module(f"train.{name}").main, "--help")
  assert text.startswith(f"usage: python -m train.{name} ")
  assert "--debug" in text


@pytest.mark.parametrize("name", analyse.ANALYSES)
def test_the_help_of_every_analysis_begins_with_usage_and_has_debug(name, capsys):
  text = printed(capsys, analyse.main, name, "--help")
  assert text.startswith(f"usage: python -m train.analyse {name} ")
  assert "--debug" in text


def test_the_package_lists_its_programs_by_the_first_lines_of_their_docstrings(capsys):
  text = " ".join(printed(capsys, list_programs).split())
  files = [p for p in Path("train").glob("*.py") if "cli.run(main)" in p.read_text()]
  assert sorted([*NAMES, "__main__"]) == sorted(path.stem for path in files)
  for name in NAMES:
    first = (importlib.import_module(f"train.{name}").__doc__ or "").split("\n")[0]
    assert first
    assert f"python -m train.{name} {first}" in text


def test_a_blank_in_place_of_the_dot_is_explained():
  with pytest.raises(cli.UserError, match=r"run python -m train\.predict"):
    list_programs(["predict"])


@pytest.mark.parametrize("config", CONFIGS)
def test_help_shows_the_variants_of_a_configuration_and_ten_fields_with_its_values(config, capsys):
  found = variants(config)
  assert found
  for variant in ("", found[0]):
    name = f"{config}:{variant}" if variant else config
    text = printed(capsys, lambda argv: parse(Args, argv), "--config", name, "--help")
    assert text.startswith("usage: python -m train.main --config PATH[:VARIANT] ")
    listed = text.split("all of them: ")[1].split(".\n")[0]
    assert listed.replace(",", " ").split() == found
    experiment = load_config(name)
    reads_text = hasattr(experiment.model, "dim")
    heading = f"The {'ten ' * reads_text}fields that matter"
    block = text.split(heading)[1].split("Other options")[0]
    fields = re.findall(r"^  --config\.(\S+?)(?:=(\S+)| (.*?))?(?:  +|$)", block, re.MULTILINE)
    assert len(help.FIELDS) == 10
    assert len(fields) == 10 if reads_text else 5 <= len(fields) < 10
    assert ("seed", str(experiment.seed), "") in fields
    rate = str(experiment.optimizer.learning_rate)
    assert ("optimizer.learning_rate", rate, "") in fields
    assert len(text.splitlines()) < 90


def test_every_field_that_matters_has_a_line_of_its_own_on_what_it_does():
  for config in CONFIGS:
    for _, about in help.important(load_config(config)):
      assert 5 < len(about) <= cli.WIDTH
      assert about.endswith(".")


@pytest.mark.parametrize("config", CONFIGS)
def test_the_variants_of_the_shipped_configurations_can_be_built(config):
  for variant in variants(config):
    if not variant.endswith("-decoder"):  # those count parameters, for seconds
      assert isinstance(load_config(f"{config}:{variant}"), Experiment)


def test_without_a_configuration_help_says_how_to_list_variants(capsys, tmp_path, monkeypatch):
  text = printed(capsys, lambda argv: parse(Args, argv), "--help")
  assert "--config PATH --help lists the variants" in text
  assert all(path in text for path in CONFIGS)
  monkeypatch.chdir(tmp_path)  # where there are no configurations
  text = printed(capsys, lambda argv: parse(Args, argv), "-h")
  assert text.startswith("usage: ")
  assert "--config PATH --help lists the variants" in text


@pytest.mark.parametrize("content", [b'"""half', b"\xff\xfe = 3\n"])
def test_the_help_of_a_file_with_a_mistake_names_it(content, tmp_path):
  file = tmp_path / "mine.py"
  file.write_bytes(content)
  with pytest.raises(UserError, match=r"mine\.py.* is not a valid configuration"):
    parse(Args, ["--config", str(file), "--help"])


def test_the_short_help_is_also_there_for_a_file_that_checks_no_variant(capsys, tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(
    '"""Mine."""\nfrom compmod_jax.training.experiment import load_config\n'
    'def get_config(variant):\n  return load_config("configs/scan.py")\n'
  )
  text = printed(capsys, lambda argv: parse(Args, argv), "--config", str(file), "--help")
  assert "Mine." in text
  assert "has no variants" in text


def test_the_short_help_has_every_option_besides_those_of_the_experiment(capsys):
  text = printed(capsys, lambda argv: parse(Args, argv), "--help")
  for name in ("workdir", "describe", "multihost", "multihost.coordinator", "aot", "profile"):
    assert re.search(rf"^  --{name}[ =\n]", text, re.MULTILINE), name
  assert "--debug" in text
  assert "--help-all" in text
