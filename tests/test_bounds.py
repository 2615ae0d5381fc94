"""Numbers beyond reason are refused before anything is built for them."""

import dataclasses
import math
import time
import types

import jax
import numpy as np
import pytest

from compmod_jax.core import sharding
from compmod_jax.core.bounds import check_least, numbers
from compmod_jax.core.errors import UserError
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.training import memory
from compmod_jax.training.experiment import load_config

VARIANTS = {
  "benchmarks/tiny_runs.py": ("translation", "masked", "recurrent", "questions"),
  "configs/cogs.py": ("",),
  "configs/everything.py": ("",),
  "configs/lm_recoding.py": ("", "ptb"),
  "configs/mlm_cah.py": ("grammar", "billion"),
  "configs/nemot_pretrain.py": ("grammar", "grammar-decoder"),
  "configs/nemot_qa.py": ("worlds", "general"),
  "configs/nmt_cah.py": ("grammar", "tatoeba"),
  "configs/pcfg_set.py": ("",),
  "configs/scan.py": ("", "length_26"),
}
CONFIGS = [f"{path}:{name}" for path, names in VARIANTS.items() for name in names]
# Where -1 has a meaning; and any number is the seed of another draw.
NEGATIVE = ("read_after", "recode_layer", "mesh.data", "mesh.fsdp", "data.seed", "noise_seed")
NEGATIVE += ("grammar.seed", "seeds.0.seed")
WHOLE = (10**12, 10**23, -(10**12), -1)
REAL = (math.nan, math.inf, -math.inf, 1e12, 1e23, -1e12, -0.5)


def replaced(config, path, value):
  """The configuration with one number, at a path such as phases.0.steps, replaced."""
  name, _, rest = path.partition(".")
  if isinstance(config, tuple):
    place = int(name)
    inner = replaced(config[place], rest, value) if rest else value
    return (*config[:place], inner, *config[place + 1 :])
  inner = replaced(getattr(config, name), rest, value) if rest else value
  return dataclasses.replace(config, **{name: inner})


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_every_configuration_is_sensible_or_refused(name):
  experiment = load_config(name)
  accepted, unclear = [], []
  began = time.monotonic()
  for path, usual in numbers(experiment):
    for value in WHOLE if isinstance(usual, int) else REAL:
      message = refusal(experiment, path, value)
      if message is None:
        accepted.append((path, value))
      elif not named(path, message) or len(message) > 600:
        unclear.append(message)
  assert unclear == []
  assert [(p, v) for p, v in accepted if not (v == -1 and p.endswith(NEGATIVE))] == []
  assert time.monotonic() - began < 20  # a loop over 10^12 layers would not end at all


def named(path, message):
  """Whether a message has the field of a path; a place in a tuple has its tuple's name."""
  return [part for part in path.split(".") if not part.isdigit()][-1] in message


def refusal(experiment, path, value):
  """The message with which a number is refused; None where it is accepted."""
  try:
    replaced(experiment, path, value)
  except UserError as error:
    return str(error)
  return None


def test_a_model_is_refused_before_anything_is_made_for_its_layers():
  for config, field in ((NemotConfig, "vanilla_layers"), (TransformerConfig, "encoder_layers")):
    with pytest.raises(UserError, match=rf"model.{field} is 1,000,000,000,000; it must be at most"):
      dataclasses.replace(config(), **{field: 10**12})


def test_a_model_that_does_not_fit_into_memory_is_refused_with_both_sizes(monkeypatch):
  params = {"table": jax.ShapeDtypeStruct((1000, 1000), np.float32)}
  shards = {"table": sharding.replicated(sharding.make_mesh(sharding.MeshConfig()))}
  monkeypatch.setattr(memory, "room", lambda: (int(2.5e6), 1, "this machine"))
  with pytest.raises(UserError, match=r"16\.0 MB .* 2\.5 MB.*model\.dim"):
    memory.check_fits(params, (shards, 2), (shards, 2))
  monkeypatch.setattr(memory, "room", lambda: (int(17e6), 1, "this machine"))
  memory.check_fits(params, (shards, 2), (shards, 2))


def test_moments_that_are_divided_count_by_their_part(monkeypatch):
  params = {"table": jax.ShapeDtypeStruct((1000, 1000), np.float32)}
  whole = {"table": sharding.replicated(sharding.make_mesh(sharding.MeshConfig()))}  # 8 devices
  divided = sharding.divided_over("data", whole, params)
  monkeypatch.setattr(memory, "room", lambda: (int(9.1e6), 1, "this machine"))
  memory.check_fits(params, (whole, 2), (divided, 2))  # of 4 MB and of 0.5 MB
  monkeypatch.setattr(memory, "room", lambda: (int(8.9e6), 1, "this machine"))
  with pytest.raises(UserError, match=r"9\.0 MB .* 8\.9 MB.*shard_optimizer"):
    memory.check_fits(params, (whole, 2), (divided, 2))


def test_the_memory_of_this_machine_is_known():
  size, copies, where = memory.room()
  assert 2**28 < size < 2**50
  assert copies == len(jax.local_devices())
  assert where == "this machine"


def test_fields_below_their_least_are_refused_by_path_and_value():
  given = types.SimpleNamespace(rows=1, share=0.5)
  check_least(given, "task.", rows=1, share=0.5)
  with pytest.raises(UserError, match=r"^task\.share is 0\.5; it must be at least 0\.75\.$"):
    check_least(given, "task.", rows=1, share=0.75)
  with pytest.raises(UserError, match=r"^rows is 1; it must be at least 2\.$"):
    check_least(given, rows=2, share=0.75)
