"""Experiments: configuration files, overrides on the command line, and their mistakes."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from compmod_jax.commands import cli
from compmod_jax.commands.config_option import load_experiment, parse
from compmod_jax.core.config import from_json, to_json
from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase, load_code, load_config

ROOT = Path(__file__).parents[2]

CONFIG = """
from compmod_jax.core import errors
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase


def get_config(variant):
  errors.check_choice("variant", variant, ("", "wide"))
  return Experiment(
    name="test" + variant,
    task=TranslationConfig(),
    model=TransformerConfig(dim=64 if variant else 32, heads=4),
    phases=(Phase("first", steps=7), Phase("second", epochs=2, trainable="routing")),
  )
"""


@dataclasses.dataclass(frozen=True)
class Args:
  """Arguments of a program."""

  config: Experiment
  """The experiment."""
  workdir: Path = Path("runs/default")
  """A folder."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
  path = tmp_path_factory.mktemp("configs") / "small.py"
  path.write_text(CONFIG)
  return str(path)


# Overrides.


def test_fields_of_a_file_have_the_types_of_the_experiment(tmp_path):
  """What is saved must be readable, so that a run can go on."""
  file = tmp_path / "typed.py"

  def of(optimizer: str) -> Experiment:
    line = "from compmod_jax.training.optimizer import OptimizerConfig as Optimizer"
    text = CONFIG.replace("phases=(", f"optimizer=Optimizer({optimizer}), phases=(")
    text = text.replace("phases=(Phase", "phases=[Phase").replace('"routing")),', '"routing")],')
    file.write_text(text.replace("\n\n\ndef", f"\n{line}\n\n\ndef"))
    return load_config(str(file))

  found = of("learning_rate=1")
  assert isinstance(found.phases, tuple)
  assert isinstance(found.optimizer.learning_rate, float)
  assert from_json(Experiment, to_json(found)) == found
  with pytest.raises(UserError, match=r"typed\.py .*optimizer\.warmup_steps is 10\.0; it must be"):
    of("warmup_steps=1e1")


def test_a_configuration_without_overrides_is_what_its_file_returns(config):
  assert load_experiment(config, []) == load_config(config)
  assert load_config(config).name == "test"


def test_a_variant_stands_after_a_colon(config):
  found = load_config(f"{config}:wide")
  assert (found.name, found.model.dim) == ("testwide", 64)


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    (["--config.model.heads=8"], lambda e: e.model.heads == 8),
    (["--config.model.heads", "8"], lambda e: e.model.heads == 8),
    (
      ["--config.model.compete", "encoder_self", "cross"],
      lambda e: e.model.compete == ("encoder_self", "cross"),
    ),
    (["--config.model.compete"], lambda e: e.model.compete == ()),
    (
      ["--config.phases.0.steps=10"],
      lambda e: (
        (e.phases[0].steps, e.phases[1]) == (10, Phase("second", epochs=2, trainable="routing"))
      ),
    ),
    (
      ["--config.model.competition.rule=top_k", "--config.model.competition.keep=3"],
      lambda e: (e.model.competition.rule, e.model.competition.keep) == ("top_k", 3),
    ),
    (["--config.model.competition.keep=None"], lambda e: e.model.competition.keep is None),
    (["--config.model.remat=True"], lambda e: e.model.remat),
    (["--config.mesh.fsdp=4"], lambda e: e.mesh.fsdp == 4),
    (["--config.optimizer.learning_rate=1e-3"], lambda e: e.optimizer.learning_rate == 1e-3),
    (["--config.task.data.seed=3"], lambda e: e.task.data == GrammarData(seed=3)),
    (["--config.task.batch.buckets", "8", "16"], lambda e: e.task.batch.buckets == (8, 16)),
    (["--config.name=a name"], lambda e: e.name == "a name"),
  ],
  ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_any_field_can_be_overridden_with_its_type(config, options, expected):
  found = load_experiment(config, options)
  assert expected(found)
  assert found.task.label_smoothing == 0.1  # the rest stays


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    (["--config.model.remat=True"], True),
    (["--config.model.remat", "true"], True),
    (["--config.model.remat"], True),
    (["--config.model.remat=False"], False),
    (["--config.model.remat", "False"], False),
    (["--config.model.no_remat"], False),
    (["--config.model.remat", "--config.seed=3"], True),
  ],
)
def test_yes_or_no_can_be_given_as_a_value_or_as_a_flag(config, options, expected):
  found = load_experiment(config, ["--config.model.competition.no_scale", *options])
  assert (found.model.remat, found.model.competition.scale) == (expected, False)
  assert load_experiment(config, ["--config.model.competition.scale=false"]).model == (
    dataclasses.replace(found.model, remat=False)
  )


def test_programs_parse_their_own_options_beside_the_configuration(config):
  found = parse(Args, ["--workdir", "somewhere", "--config", config, "--config.seed=4"])
  assert (found.workdir, found.config.seed) == (Path("somewhere"), 4)
  assert parse(Args, [f"--config={config}"]).workdir == Path("runs/default")


# Mistakes.

MISTAKES = [
  (["--config.model.hads=8"], ["--config.model.hads", "Did you mean --config.model.heads?"]),
  (["--config.model.hads", "8"], ["--config.model.hads", "Did you mean --config.model.heads?"]),
  (["--config.phases.0.stpes=1"], ["Did you mean --config.phases.0.steps?"]),
  (["--config.task.data.sed=1"], ["Did you mean --config.task.data.seed?"]),
  (["--wokdir=x"], ["--wokdir is not an option", "Did you mean --workdir?"]),
  (["--config.model.heads=7"], ["model.heads is 7", "does not divide model.dim = 32", "Choose"]),
  (["--config.model.heads=four"], ["--config.model.heads", "'four'"]),
  (["--config.model.heads"], ["--config.model.heads", "Missing value"]),
  (["--config.model.compete", "crss"], ["--config.model.compete", "'crss'", "cross"]),
  (["--config.model.competition.keep=2"], ["competition.keep is 2", "top_k"]),
  (["--config.model.competition.rule=best"], ["competition.rule", "'best'", "threshold"]),
  (["--config.phases.0.steps=0"], ["phases.first", "exactly one"]),
  (["--config.phases.1.trainable=none"], ["trainable", "'none'", "routing"]),
  (["--config.optimizer.momentum=0.9"], ["optimizer.momentum is 0.9", "sgd"]),
  (["--config.micro_batches=0"], ["micro_batches is 0", "at least 1"]),
  (["--config.products=float16"], ["products", "float16", "bfloat16"]),
  (["--config.ema=1"], ["ema is 1", "below 1"]),
  (["--config.model.remat=perhaps"], ["--config.model.remat is 'perhaps'", "true or false"]),
  (["--config.mesh.data=0"], ["mesh.data is 0"]),
  (["--config.task.label_smoothing=2"], ["label_smoothing is 2"]),
  (["stray"], ["stray is not an option"]),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES, ids=lambda value: str(value[0])[:40])
def test_a_mistake_is_told_in_one_paragraph_that_names_field_and_remedy(
  config, options, words, capsys
):
  with pytest.raises(UserError) as error:
    parse(Args, ["--config", config, *options])
  message = str(error.value)
  assert all(word in message for word in words), message
  assert "\n" not in message
  assert not set("│╭╰─") & set(message)
  printed = capsys.readouterr()
  assert printed.out == printed.err == ""


@pytest.mark.parametrize(
  ("argument", "words"),
  [
    ("{config}:wied", ["variant is 'wied'", "Did you mean 'wide'?"]),
    ("{folder}/nothing.py", ["nothing.py", "not a file"]),
    ("{folder}", ["not a file"]),
    ("{folder}/empty.py", ["empty.py", "get_config"]),
    ("{folder}/text.txt", ["text.txt", ".py"]),
    ("{folder}/number.py", ["number.py", "return an Experiment"]),
    ("{folder}/broken.py", ["broken.py:2", "ZeroDivisionError"]),
    ("{folder}/typo.py", ["typo.py:4", "hads"]),
  ],
)
def test_a_mistake_in_a_configuration_file_names_the_file(config, argument, words):
  folder = Path(config).parent
  (folder / "empty.py").write_text("")
  (folder / "text.txt").write_text("words")
  (folder / "number.py").write_text("def get_config(variant):\n  return 3\n")
  (folder / "broken.py").write_text("def get_config(variant):\n  return 1 / 0\n")
  (folder / "typo.py").write_text(
    "from compmod_jax.models.transformer import TransformerConfig\n\n"
    "def get_config(variant):\n  return TransformerConfig(hads=3)\n"
  )
  with pytest.raises(UserError) as error:
    load_config(argument.format(config=config, folder=folder))
  message = str(error.value)
  assert all(word in message for word in words), message
  assert "\n" not in message


def test_a_missing_configuration_is_a_mistake():
  with pytest.raises(UserError, match="--config is missing"):
    parse(Args, ["--workdir=x"])
  with pytest.raises(UserError, match="--config: expected one argument"):
    parse(Args, ["--config"])


def test_an_experiment_without_phases_is_a_mistake():
  with pytest.raises(UserError, match="phases is empty"):
    Experiment(name="x", task=TranslationConfig(), model=TransformerConfig(), phases=())


@pytest.mark.parametrize("fields", [{}, {"epochs": 1, "steps": 5}, {"epochs": -1}])
def test_a_phase_is_given_in_epochs_or_in_steps(fields):
  with pytest.raises(UserError, match="exactly one"):
    Phase(**fields)


def test_help_of_all_lists_every_field_and_ends_well(config, capsys):
  with pytest.raises(SystemExit) as stop:
    parse(Args, ["--config", config, "--help-all"])
  assert not stop.value.code
  assert "--config.model.heads" in capsys.readouterr().out


# Programs.


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
  monkeypatch.setattr(sys, "argv", ["program", *argv])
  with pytest.raises(SystemExit) as stop:
    cli.run(lambda arguments: print(parse(Args, arguments).config.model.heads))
  return stop.value.code


def test_a_program_ends_with_status_2_and_one_line_without_traceback(config, monkeypatch, capsys):
  assert run(monkeypatch, "--config", config, "--config.model.heads=7") == 2
  printed = capsys.readouterr()
  assert printed.out == ""
  assert printed.err.startswith("error: model.heads is 7")
  assert printed.err.count("\n") == 1


def test_debug_shows_the_traceback_and_is_no_option_of_the_program(config, monkeypatch, capsys):
  assert run(monkeypatch, "--config", config, "--config.model.heads=7", "--debug") == 2
  error = capsys.readouterr().err
  assert "Traceback (most recent call last)" in error
  assert "transformer.py" in error  # where the rule stands
  assert error.splitlines()[-1].startswith("error: model.heads is 7")
  assert run(monkeypatch, "--config", config, "--debug") == 0
  assert capsys.readouterr().out == "4\n"


@pytest.mark.programs
def test_the_training_program_itself_ends_with_status_2(config):
  command = ["-m", "train.main", "--config", config, "--config.model.heads=7", "--workdir=unused"]
  done = subprocess.run(
    [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
  )
  assert done.returncode == 2
  assert done.stderr.startswith("error: model.heads is 7, which does not divide")
  assert done.stdout == ""
  assert "Traceback" not in done.stderr
  assert not (ROOT / "unused").exists()


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.py")), ids=lambda path: path.stem)
def test_every_configuration_of_the_project_loads_and_refuses_unknown_variants(path):
  assert isinstance(load_config(str(path)), Experiment)
  with pytest.raises(UserError, match="variant is 'no such variant'"):
    load_config(f"{path}:no such variant")


def test_a_file_of_classes_alone_is_run_as_code_and_is_no_configuration(tmp_path):
  file = tmp_path / "classes.py"
  file.write_text("RUN = []\nRUN.append(1)\n")
  load_code(file)
  assert sys.modules["config_classes"].RUN == [1]
  with pytest.raises(UserError, match=r"has no function get_config\(variant\)"):
    load_config(str(file))
