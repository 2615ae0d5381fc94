"""Widths of equal cost: counted again, no other multiple comes nearer."""

import dataclasses

import pytest
import tiny_model

from compmod_jax.core.errors import UserError
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig
from compmod_jax.tools import describe, equal, flops


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
  return tiny_model.make_experiment(
    tiny_model.write_data(tmp_path_factory.mktemp("equal") / "data")
  )


def of(experiment, **changes):
  return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **changes))


def parameters(experiment):
  return describe.count_parameters(describe.assemble(experiment)[0])


def operations(experiment):
  task, _ = describe.assemble(experiment)
  return flops.count(task, describe.abstract_parameters(task)).training


@pytest.mark.parametrize(
  ("match", "cost"), [(equal.equal_parameters, parameters), (equal.equal_flops, operations)]
)
def test_no_other_width_costs_more_nearly_as_much(experiment, match, cost):
  plain = of(experiment, compete=(), ffn_dim=600)
  found = match(experiment, plain, multiple=4)
  width, wanted = found.model.ffn_dim, cost(plain)
  assert found.model.compete == experiment.model.compete
  assert width % 4 == 0
  assert 16 < width < 600  # routers cost something
  nearest = min(
    (width - 4, width, width + 4), key=lambda w: abs(cost(of(found, ffn_dim=w)) - wanted)
  )
  assert nearest == width


def test_what_cannot_be_as_cheap_is_refused(experiment):
  with pytest.raises(UserError, match="has more parameters than that of 'tiny'"):
    equal.equal_parameters(of(experiment, dim=64), experiment)
  recurrent = dataclasses.replace(experiment, model=Seq2SeqLstmConfig())
  with pytest.raises(UserError, match="is a Seq2SeqLstmConfig; it needs feed-forward networks"):
    equal.equal_parameters(recurrent, experiment)


def test_the_width_lies_on_the_line_through_two():
  assert equal.nearest_width(lambda w: 10 + 3.0 * w, 10 + 3 * 41, 64, 8) == 40
  assert equal.nearest_width(lambda w: 10 + 3.0 * w, 1, 64, 8) == 0
