"""Configurations that users wrote for an older version still open, with a warning."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

from compmod_jax import _renamed
from compmod_jax.training.experiment import Experiment, load_config

CONFIG = '''
"""A configuration of version 0.1."""
from compmod_jax import errors
from compmod_jax.data.text import TextData
from compmod_jax.data.tokenizer import TokenizerConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.sites import zero_units
from compmod_jax.tasks.translation import TranslationConfig
from train.experiment import Experiment, Phase
from train.optimizer import OptimizerConfig
from train.ways import WAYS


def get_config(variant):
  errors.check_choice("variant", variant, ("", "ways"))
  return Experiment(
    name="old",
    task=TranslationConfig(
      data=TextData(folder="mine"), tokenizer=TokenizerConfig(kind="words")
    ),
    model=TransformerConfig(),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    phases=WAYS["iterative"](2) if variant else (Phase(steps=10),),
  )
'''


@pytest.fixture
def forgotten(monkeypatch):
  """As in a process in which no old name has been imported yet."""
  for name in _renamed._NAMES:
    monkeypatch.delitem(sys.modules, name, raising=False)
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
      monkeypatch.delattr(sys.modules[parent], last, raising=False)
  yield
  for name in _renamed._NAMES:
    sys.modules.pop(name, None)


@pytest.mark.parametrize("old", _renamed._NAMES)
def test_an_old_name_is_the_new_module_and_warns(forgotten, old):
  new = _renamed._NAMES[old]
  with pytest.warns(DeprecationWarning, match="the old name goes") as caught:
    assert importlib.import_module(old) is importlib.import_module(new)
  assert [str(one.message) for one in caught] == [
    f"{old} is called {new} now; the old name goes with version 0.3."
  ]


def test_an_old_configuration_opens_with_a_warning_for_each_old_name(forgotten, tmp_path):
  file = tmp_path / "old.py"
  file.write_text(CONFIG)
  with pytest.warns(DeprecationWarning, match="the old name goes") as caught:
    experiment = load_config(f"{file}:ways")
  assert type(experiment) is Experiment
  assert len(experiment.phases) > 1
  warned = {str(one.message).split()[0] for one in caught}
  assert warned == {
    "compmod_jax.data.text",
    "compmod_jax.data.tokenizer",
    "compmod_jax.errors",
    "compmod_jax.sites",
    "compmod_jax.training.regimes.WAYS",
    "train.experiment",
    "train.optimizer",
    "train.ways",
  }


def test_an_old_configuration_opens_where_there_is_no_package_train(
  forgotten, tmp_path, monkeypatch
):
  (tmp_path / "old.py").write_text(CONFIG)
  monkeypatch.chdir(tmp_path)
  elsewhere = [place for place in sys.path if not (Path(place) / "train").is_dir()]
  monkeypatch.setattr(sys, "path", elsewhere)
  for name in [name for name in sys.modules if name.split(".")[0] == "train"]:
    monkeypatch.delitem(sys.modules, name)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", DeprecationWarning)
      assert load_config("old.py").phases[0].steps == 10
    assert list(sys.modules["train"].__path__) == []
    with pytest.raises(ModuleNotFoundError, match=r"train\.main"):
      importlib.import_module("train.main")
  finally:
    sys.modules.pop("train", None)
