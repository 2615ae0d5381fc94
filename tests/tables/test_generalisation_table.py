"""The table of systematic generalisation: one protocol, equal parameters, data of known parts."""

import dataclasses

import pytest

from compmod_jax.data.synthetic.pcfg_set import PcfgSetData
from compmod_jax.data.synthetic.scan import ScanData
from compmod_jax.tables.generalisation import (
  INGREDIENTS,
  SCALES,
  generalisation,
  logic_in_context,
)
from compmod_jax.tasks.logic_in_context import LogicInContextConfig
from compmod_jax.tools import describe
from compmod_jax.training.experiment import translation_task

SLOW = {
  "quick",
  "scan_mcd1",
  "scan_mcd2",
  "scan_mcd3",
}  # the search for a split takes seconds; quick has four rows alone


WRITTEN = {"scratchpad": "scratchpad", "index hints": "hints"}
"""Words in a row's name -> the field of its data that makes targets longer."""


@pytest.mark.parametrize("scale", sorted(set(SCALES) - SLOW))
def test_all_rows_of_a_data_set_are_trained_alike_and_scored_on_parts_that_it_has(scale):
  spec = generalisation(scale)
  experiments = {name: row.experiment for name, row in spec.rows.items()}
  chosen = experiments.pop("plain, best in distribution")
  assert (chosen.model_selection, chosen.model) == ("best", experiments["plain"].model)
  plain = experiments[spec.reference]
  assert plain.model == plain.model.plain()
  assert {column.split for column in spec.columns} <= set(translation_task(plain).data.splits())
  for name, experiment in experiments.items():
    same = dataclasses.replace(experiment, model=plain.model)
    if any(words in name for words in ("published", "near words", "decoder alone")):
      same = dataclasses.replace(same, optimizer=plain.optimizer)
    task = translation_task(experiment)
    data = {
      field: getattr(task.data, field, 0) for field in ("added_primitives", *WRITTEN.values())
    }
    assert getattr(task.data, "blanks", 0) == 6 * ("blanks" in name)
    assert data["added_primitives"] == 20 * ("primitives" in name)
    assert task.label_weight == float("labels of progress" in name)
    longer = [words for words, field in WRITTEN.items() if data[field]]
    assert longer == [words for words in WRITTEN if words in name]
    if longer or data["added_primitives"] or task.label_weight:
      same = dataclasses.replace(same, task=plain.task)
    assert same == plain
    if longer:
      scored = task.data
      if isinstance(scored, PcfgSetData):  # whose training sentences take most of the time
        scored = dataclasses.replace(scored, train=1_000)
      targets = scored.load(spec.columns[-1].split).target
      longest = SCALES[scale].outputs or task.batch.ceiling
      beyond = sum(len(target.split()) >= longest for target in targets) / len(targets)
      if SCALES[scale].outputs:
        # Some have thousands of words more, which would take most of the time of a run.
        assert beyond < 0.03
        assert longest == task.decode.max_extra < experiment.model.max_length
      else:
        assert beyond == 0
  assert (plain.model_selection, plain.time_limit_minutes) == ("last", 0)


def test_settings_are_searched_for_on_training_commands_alone():
  spec = generalisation("scan_length_search")
  assert [column.split for column in spec.columns] == ["valid"]
  trained = set(ScanData("length", cut=26).load("train").source)
  for row in spec.rows.values():
    data = translation_task(row.experiment).data
    assert set(data.load("valid").source) | set(data.load("train").source) <= trained


def test_mechanisms_cost_no_parameters():
  rows = generalisation("scan_length").rows
  counts = {
    name: describe.count_parameters(describe.assemble(rows[name].experiment)[0])
    for name in (
      "relative",
      "relative, heads compete",
      "relative, all heads compete",
      "relative, MoH",
      "relative, SwitchHead",
      "relative, experts",
      "relative, mixture of depths",
      "plain, wider",
    )
  }
  for name, count in counts.items():
    assert abs(count / counts["relative"] - 1) < 0.01, name
  plain, lstm = (
    describe.count_parameters(describe.assemble(rows[name].experiment)[0])
    for name in ("plain", "LSTM, recoded by entropy")
  )
  assert abs(lstm / plain - 1) < 0.01
  assert (
    INGREDIENTS["heads compete"]["ffn_dim"] == INGREDIENTS["relative, heads compete"]["ffn_dim"]
  )


def test_the_quick_table_is_a_whole_factorial():
  spec = generalisation("quick")
  settings = {row: tuple(row in rows for rows in spec.factors.values()) for row in spec.rows}
  assert sorted(settings.values()) == [(False, False), (False, True), (True, False), (True, True)]
  assert settings[spec.reference] == (False, False)


@pytest.mark.parametrize(("scale", "steps"), [("small", 8000), ("paper", 50_000)])
def test_forms_of_attention_in_context_differ_in_the_model_alone(scale, steps):
  spec = logic_in_context(scale)
  plain = spec.rows[spec.reference].experiment
  assert (plain.model, plain.model_selection) == (plain.model.plain(), "last")
  wanted = describe.count_parameters(describe.assemble(plain)[0])
  for name, row in spec.rows.items():
    experiment = row.of_seed(3)
    assert dataclasses.replace(row.experiment, model=plain.model, name=plain.name) == plain
    assert isinstance(experiment.task, LogicInContextConfig)
    assert (experiment.seed, experiment.task.data.seed) == (3, 3)
    count = describe.count_parameters(describe.assemble(experiment)[0])
    assert abs(count / wanted - 1) < 0.01, name
  assert {column.split for column in spec.columns} == {"valid", "test", "ood"}
  assert plain.phases[0].steps == steps
