"""Pairs as questions: the same splits, sources and targets; what exact match cannot tell apart."""

import dataclasses

import pytest

from compmod_jax.data.base import DataError, Pairs
from compmod_jax.data.qa.pairs import PairQuestions
from compmod_jax.data.synthetic.scan import ScanData
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.matching_decoder import parameters
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tables import nemot


def test_every_pair_is_a_question_with_its_target_as_the_answer():
  data = ScanData(split="addprim_jump")
  pairs, found = data.load("test"), PairQuestions("scan", data).load("test")
  assert PairQuestions("scan", data).splits() == data.splits()
  assert [one.question for one in found.items] == list(pairs.source)
  assert [one.answer for one in found.items] == list(pairs.target)
  assert {one.format for one in found.items} == {"extractive"}
  assert pairs.info is not None
  assert found.items[0].info == pairs.info[0]
  assert found.where(3) == pairs.where(3)


@dataclasses.dataclass(frozen=True)
class Given:
  target: str

  def splits(self):
    return ("train",)

  def load(self, split):
    return Pairs(["a source"], [self.target], where=lambda i: f"line {i + 1}")


@pytest.mark.parametrize("target", ["walk Walk", "walk ( )", "say the word", " "])
def test_words_that_normalised_answers_do_not_tell_apart_are_refused_by_their_place(target):
  with pytest.raises(DataError, match="line 1 has"):
    PairQuestions("given", Given(target)).load("train")  # pyright: ignore[reportArgumentType]


def test_the_table_compares_models_of_as_many_parameters_trained_alike():
  spec = nemot.scan("jump")
  rows = {name: row.experiment for name, row in spec.rows.items()}
  models = rows["NeMoT"].model, rows["gate off"].model, rows["decoder"].model
  assert isinstance(models[0], NemotConfig)
  assert isinstance(models[1], NemotConfig)
  assert isinstance(models[2], DecoderConfig)
  gated, decoder = (parameters(model, 34) for model in (models[0], models[2]))
  assert abs(gated / decoder - 1) < 0.02
  for experiment in rows.values():
    same = dataclasses.replace(experiment, name="", model=rows["NeMoT"].model)
    assert same == dataclasses.replace(rows["NeMoT"], name="")
  assert models[1] == dataclasses.replace(models[0], gate="off")
