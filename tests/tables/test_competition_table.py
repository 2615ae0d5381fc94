"""The trial of competition: complete factorials of models with as many parameters."""

import dataclasses
import itertools

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.tables.competition import competition
from compmod_jax.tools import describe

GRAMMAR = ("published", "rescaled")


def parameters(experiment) -> int:
  """With a vocabulary of fewer sentences, which is made sooner."""
  task = experiment.task
  if isinstance(task.data, GrammarData):
    task = dataclasses.replace(task, data=dataclasses.replace(task.data, train=2_000))
  task, _ = describe.assemble(dataclasses.replace(experiment, task=task))
  return int(describe.count_parameters(task))


@pytest.mark.parametrize("scale", GRAMMAR)
def test_rows_are_all_settings_of_the_factors(scale):
  spec = competition(scale)
  settings = {row: tuple(row in rows for rows in spec.factors.values()) for row in spec.rows}
  assert sorted(settings.values()) == sorted(itertools.product((False, True), repeat=4))
  assert settings[spec.reference] == (False, False, False, False)
  for row, made in spec.rows.items():
    model = made.experiment.model
    encoder, others, post, many = settings[row]
    places = [*["encoder_self"] * encoder, *["decoder_self", "cross"] * others]
    assert list(model.compete) == places
    assert (model.norm == "post", model.heads == 8) == (post, many)
    assert model.competition.rescale == (scale == "rescaled" and places != [])


@pytest.mark.parametrize("scale", [*GRAMMAR, "tatoeba"])
def test_all_are_trained_alike(scale):
  spec = competition(scale)
  plain = spec.rows[spec.reference].experiment
  for row in spec.rows.values():
    assert dataclasses.replace(row.experiment, model=plain.model) == plain
  assert (plain.model.compete, plain.model_selection, plain.time_limit_minutes) == ((), "last", 0)


@pytest.mark.parametrize("scale", ["published", "tatoeba"])
def test_competition_costs_no_parameters(scale):
  spec = competition(scale)
  plain = parameters(spec.rows[spec.reference].experiment)
  for row in spec.rows.values():
    assert abs(parameters(row.experiment) - plain) <= 0.01 * plain


def test_unknown_scales_are_refused():
  with pytest.raises(UserError, match="--scale"):
    competition("tiny")
