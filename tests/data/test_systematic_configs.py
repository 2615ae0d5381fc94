"""Configurations of systematic generalisation: no output is too long to be scored or to be made."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from compmod_jax.data.synthetic.parts import PartedData
from compmod_jax.training.experiment import load_config, variants

SIZES = {"train": 600, "scored": 200}


def experiment(name: str) -> Any:
  """The configuration, with small data where they are drawn."""
  found: Any = load_config(name)
  task = found.task
  data = dataclasses.replace(task.data, **SIZES) if isinstance(task.data, PartedData) else task.data
  return dataclasses.replace(found, task=dataclasses.replace(task, data=data))


def assert_fits(found: Any) -> None:
  """Every pair of every part is read whole, and its output can be made."""
  batch, decode, most = found.task.batch, found.task.decode, found.model.max_length
  assert batch.longest <= most
  for part in found.task.data.splits():
    pairs = found.task.data.load(part)
    source, target = (
      np.array([len(text.split()) + 1 for text in side]) for side in (pairs.source, pairs.target)
    )
    assert max(source.max(), target.max()) <= batch.longest
    limits = np.asarray(decode.limits(source, most))
    assert np.all(target <= limits), (part, pairs.source[int(np.argmax(target - limits))])


@pytest.mark.parametrize("variant", variants("configs/systematic.py"))
def test_expressions_and_sequences_fit(variant):
  assert_fits(experiment(f"configs/systematic.py:{variant}"))


@pytest.mark.parametrize("variant", variants("configs/pcfg_set.py"))
def test_string_edits_fit(variant):
  found = experiment(f"configs/pcfg_set.py:{variant}")
  assert_fits(found)
  # The shortest sentence with the longest string: doubled six times.
  decode = found.task.decode
  assert int(decode.limits(np.array([9]), found.model.max_length)[0]) >= found.task.data.longest + 1


def test_all_commands_fit_and_all_splits_have_the_same_lengths():
  simple, written = (
    experiment(f"configs/scan.py:{one}") for one in ("simple", "length_scratchpad")
  )
  assert_fits(simple)
  assert_fits(written)
  for variant in variants("configs/scan.py"):
    other = experiment(f"configs/scan.py:{variant}")
    alike = written if variant.endswith("scratchpad") else simple
    assert other.task.data.scratchpad == (alike is written)
    assert (other.task.batch, other.task.decode) == (alike.task.batch, alike.task.decode)
    assert dataclasses.replace(other.model, target_labels=()) == simple.model
    assert bool(other.model.target_labels) == bool(other.task.label_weight)


@pytest.mark.parametrize("variant", ["length", "addprim_jump_exchanged"])
def test_episodes_fit(variant):
  found = experiment(f"configs/mlc.py:{variant}")
  data = dataclasses.replace(found.task.data, episodes=300)
  assert_fits(dataclasses.replace(found, task=dataclasses.replace(found.task, data=data)))


def test_variants_say_which_data_they_have():
  cut = experiment("configs/scan.py:length_26").task.data
  assert (cut.split, cut.cut) == ("length", 26)
  added = experiment("configs/scan.py:addprim_jump_added").task.data
  assert (added.split, added.added_primitives) == ("addprim_jump", 20)
  assert experiment("configs/scan.py:mcd2").task.data.split == "mcd2"
  assert experiment("configs/cogs.py").task.data.gen == "published"
  assert experiment("configs/cogs.py:exposures_100").task.data.exposures == 100
  assert experiment("configs/pcfg_set.py").task.data.split == "iid"


@pytest.mark.real_data
def test_logical_forms_fit():
  found = experiment("configs/cogs.py:held_out")
  assert_fits(found)
  # Twelve phrases in each other, as in the published generalisation part: 22 words for each three.
  source, target = 5 + 12 * 3, 40 + 12 * 22
  decode = found.task.decode
  assert int(decode.limits(np.array([source + 1]), found.model.max_length)[0]) > target
  assert found.task.batch.longest > 480
