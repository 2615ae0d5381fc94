"""Configurations to JSON and back, strictly."""

import copy
import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from compmod_jax.core.config import from_json, to_json
from compmod_jax.core.errors import UserError
from compmod_jax.core.sharding import MeshConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.sources.tfds import TfdsData
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.scan import ScanData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.mechanisms.plasticity import PlasticConfig
from compmod_jax.mechanisms.rims import RimConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.recurrent import RecurrentConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase


def experiment(**fields: Any) -> Experiment:
  parts = {"task": TranslationConfig(), "model": TransformerConfig(), **fields}
  return Experiment(name="an experiment", **parts)


@pytest.mark.parametrize(
  "config",
  [
    experiment(),
    experiment(phases=(Phase(steps=5), Phase("second", epochs=0.5, trainable="routing"))),
    experiment(
      model=TransformerConfig(
        compete=("encoder_self", "cross"), competition=CompetitionConfig(rule="top_k", keep=3)
      ),
      mesh=MeshConfig(fsdp=2),
    ),
    experiment(task=TranslationConfig(data=ScanData(split="length"))),
    experiment(task=TranslationConfig(data=TextData(columns=(2, 0), tests=("a", "b")))),
    experiment(
      task=TranslationConfig(data=TfdsData(), target_tokenizer=TokenizerConfig(kind="words"))
    ),
    CompetitionConfig(),
    GrammarData(seed=4),
  ],
  ids=["defaults", "phases", "model", "scan", "text", "tfds", "small", "data"],
)
def test_a_configuration_comes_back_equal_through_json_text(config):
  text = json.dumps(to_json(config))
  assert from_json(type(config), json.loads(text)) == config


def test_a_field_of_several_classes_is_tagged_with_its_class():
  saved = to_json(experiment(task=TranslationConfig(data=ScanData())))
  assert saved["task"]["data"]["kind"] == "ScanData"
  assert [saved["task"]["kind"], saved["model"]["kind"]] == [
    "TranslationConfig",
    "TransformerConfig",
  ]
  assert "kind" not in saved["optimizer"]


@pytest.mark.parametrize("cell", [PlasticConfig(kind="lstm"), RimConfig(kind="gru")])
def test_a_class_with_a_field_of_the_tag_s_name_keeps_the_field(cell):
  config = RecurrentConfig(cell=cell)
  saved = json.loads(json.dumps(to_json(config)))
  assert saved["cell"]["kind"] == cell.kind
  assert from_json(RecurrentConfig, saved) == config
  # Saved before, the field's value is lost, and the class is known.
  older = {**saved, "cell": {**saved["cell"], "kind": type(cell).__name__}}
  del older["cell"]["class"]
  assert type(from_json(RecurrentConfig, older).cell) is type(cell)


def test_what_was_saved_before_there_was_a_choice_of_tasks_and_models_still_opens():
  given = experiment(model=TransformerConfig(heads=8))
  saved = to_json(given)
  del saved["task"]["kind"], saved["model"]["kind"]
  assert from_json(Experiment, saved) == given


def literals(kind: type, seen: set[type]) -> Iterator[tuple[type, str, Any]]:
  """(class, field, value) of every choice of every configuration that a field of one holds."""
  if kind in seen:
    return
  seen.add(kind)
  for name, hint in typing.get_type_hints(kind).items():
    for inner in (hint, *typing.get_args(hint)):
      if typing.get_origin(inner) is Literal:
        yield from ((kind, name, value) for value in typing.get_args(inner))
      for one in (inner, *typing.get_args(inner)):
        if dataclasses.is_dataclass(one):
          yield from literals(typing.cast(type, one), seen)


def test_every_choice_of_every_field_is_read_as_it_was_written():
  found = [one for one in literals(Experiment, set()) if not one[1].startswith("_")]
  assert len(found) > 200
  fields = {(kind, field.name) for kind, *_ in found for field in dataclasses.fields(kind)}

  def refused(kind: type, fields: dict[str, Any]) -> bool:
    try:
      from_json(kind, fields)
    except UserError as error:  # of the field, and not of what does not go with it
      return any(words in str(error) for words in ("it must be one of", "of type", "be a list"))
    return False

  wrong = [
    (kind.__name__, name, value)
    for kind, name, value in found
    if (kind, name) in fields and all(refused(kind, {name: v}) for v in (value, [value]))
  ]
  assert wrong == []
  assert from_json(EncoderConfig, {"head_activation": "relu"}).head_activation == "relu"
  with pytest.raises(UserError, match=r"head_activation is 'sine'; it must be one of"):
    from_json(EncoderConfig, {"head_activation": "sine"})


def test_what_is_left_out_has_its_default():
  assert from_json(TransformerConfig, {"heads": 8}) == TransformerConfig(heads=8)
  assert from_json(TransformerConfig, {}) == TransformerConfig()
  assert from_json(TransformerConfig, {"competition": {"key_dim": 12}}).competition.key_dim == 12


def test_a_whole_number_may_stand_for_a_float_but_not_the_other_way():
  found = from_json(TransformerConfig, {"dropout": 0})
  assert isinstance(found.dropout, float)
  with pytest.raises(UserError, match=r"heads is 4\.0; it must be of type int"):
    from_json(TransformerConfig, {"heads": 4.0})


def changed(path: str, value: Any) -> dict:
  data = copy.deepcopy(to_json(experiment()))
  *way, last = path.split(".")
  place: Any = data
  for key in way:
    place = place[int(key)] if isinstance(place, list) else place[key]
  place[last] = value
  return data


@pytest.mark.parametrize(
  ("path", "value", "words"),
  [
    ("model.hads", 4, ["hads", "Did you mean 'heads'"]),
    ("modle", {}, ["modle", "Did you mean 'model'"]),
    ("phases.0.stpes", 4, ["phases.0", "stpes", "'steps'"]),
    (
      "task.data.kind",
      "GramarData",
      ["task.data.kind", "GramarData", "Did you mean 'GrammarData'"],
    ),
    ("task.data", {"seed": 0}, ["task.data", "kind", "GrammarData"]),
    ("task.data", 3, ["task.data", "3", "table of fields"]),
    ("task.tokenizer", None, ["task.tokenizer", "None"]),
    ("model.heads", "4", ["model.heads", "'4'", "int"]),
    ("model.heads", True, ["model.heads", "True", "int"]),
    ("model.heads", 7, ["model.heads is 7", "does not divide"]),
    ("model.remat", "false", ["model.remat", "'false'", "bool"]),
    ("model.compete", "cross", ["model.compete", "'cross'", "list"]),
    ("model.compete", ["cros"], ["model.compete.0", "'cros'", "cross"]),
    ("model.norm", "mid", ["model.norm", "'mid'", "pre, post"]),
    ("model.competition.keep", "two", ["model.competition.keep", "'two'", "int"]),
    ("model", [], ["model", "table of fields"]),
    ("phases", [], ["phases is empty"]),
    ("name", 5, ["name", "5", "str"]),
    ("seed", None, ["seed", "None", "int"]),
    ("ema", float("nan"), ["ema", "nan"]),
  ],
)
def test_a_bad_field_is_an_error_that_names_it(path, value, words):
  with pytest.raises(UserError) as error:
    from_json(Experiment, changed(path, value))
  message = str(error.value)
  assert message.startswith("The saved Experiment cannot be read: ")
  assert all(word in message for word in words), message


def test_a_missing_field_without_default_is_an_error():
  data = to_json(experiment())
  del data["name"]
  with pytest.raises(UserError, match="name is missing"):
    from_json(Experiment, data)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_what_is_no_table_is_an_error(data):
  with pytest.raises(UserError, match="table of fields"):
    from_json(Experiment, data)


@dataclasses.dataclass(frozen=True)
class One:
  number: int = 1


@dataclasses.dataclass(frozen=True)
class Two:
  number: float = 2.0


@dataclasses.dataclass(frozen=True)
class Mixed:
  part: One | Two | None = None
  parts: tuple[One | Two, ...] = ()
  pair: tuple[int, str] = (1, "a")
  maybe: tuple[int, ...] | None = None
  level: Literal[1, 2] = 1


@pytest.mark.parametrize(
  "config",
  [
    Mixed(),
    Mixed(part=Two(3.5), parts=(One(), Two(), One(4)), pair=(2, "b"), maybe=(), level=2),
    Mixed(part=One(0), maybe=(5,)),
  ],
)
def test_unions_tuples_and_optional_fields_come_back_equal(config):
  assert from_json(Mixed, json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
  ("data", "words"),
  [
    ({"pair": [1]}, ["pair", "2 items"]),
    ({"pair": ["a", 1]}, ["pair.0", "int"]),
    ({"parts": [{"kind": "One"}, {"kind": "Three"}]}, ["parts.1.kind", "Three"]),
    ({"level": 3}, ["level", "1, 2"]),
    ({"maybe": 5}, ["maybe", "list"]),
  ],
)
def test_bad_items_are_named_by_their_position(data, words):
  with pytest.raises(UserError) as error:
    from_json(Mixed, data)
  assert all(word in str(error.value) for word in words)


@dataclasses.dataclass(frozen=True)
class OwnConfig(TransformerConfig):
  """A class made of one that a field takes, in a file that is not the package's."""

  extra: int = 3


def test_a_class_made_of_one_that_a_field_takes_is_saved_and_read():
  given = experiment(model=OwnConfig(dim=8, heads=2, extra=5))
  data = json.loads(json.dumps(to_json(given)))
  assert data["model"]["kind"] == "OwnConfig"
  assert from_json(Experiment, data) == given


def test_a_class_whose_file_was_not_run_is_asked_for():
  data = to_json(experiment())
  data["model"]["kind"] = "NoisyConfig"
  with pytest.raises(UserError, match=r"is 'NoisyConfig', which is no class .*--code FILE"):
    from_json(Experiment, data)
