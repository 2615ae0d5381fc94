"""The analyses read masked language models: what is hidden counts as no word."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_masked
import tiny_model

from compmod_jax.analysis.ablation import Ablate, make_page
from compmod_jax.analysis.compare.measure import compare
from compmod_jax.analysis.labels import POSITION, WORD, labels_of
from compmod_jax.analysis.reading import NOTHING, MaskedReader, reader
from compmod_jax.analysis.scoring import sentence_losses
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.data.corruption import MaskingConfig


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
  counts = {"train": 40, "valid": 12, "test": 30}
  folder = tiny_masked.write_text(tmp_path_factory.mktemp("text") / "data", counts)
  task = tiny_masked.make_task(folder).build(tiny_masked.make_model())
  params = jax.tree.map(jax.numpy.asarray, tiny_model.random_parameters(task, 0))
  return Subject(task, params, "test")


def test_the_text_is_read_as_it_was_before_it_was_masked(masked):
  read, blocks = reader(masked.task), masked.task.dataset.blocks("test").columns["tokens"]
  assert isinstance(read, MaskedReader)
  seen = hidden = 0
  for batch in masked.batches:
    tokens, away = read.tokens("text", batch), read.hidden("text", batch)
    for row, number in enumerate(batch["index"].tolist()):
      block = [] if number < 0 else blocks[number].tolist()[1:]
      assert tokens[row][tokens[row] != NOTHING].tolist() == block
      assert tokens[row, 0] == NOTHING, "the start token"
      assert (~away[row] | (tokens[row] != NOTHING)).all()
      shown = (tokens[row] != NOTHING) & ~away[row]
      np.testing.assert_array_equal(batch["tokens"][row][shown], tokens[row][shown])
      seen, hidden = seen + len(block), hidden + int(away[row].sum())
  assert 0.1 < hidden / seen < 0.4


def test_a_hidden_token_has_a_position_and_no_word(masked):
  read = reader(masked.task)
  labels = {made.name: made for made in labels_of(masked, read, "text", words=("dog", "fox"))}
  assert list(labels) == [POSITION, WORD]
  assert labels[WORD].categories[:2] == ("dog", "fox")
  for number, batch in enumerate(masked.batches):
    away, first = read.hidden("text", batch), np.arange(batch["tokens"].shape[1]) < 13
    assert (labels[WORD].ids[number][away] == NOTHING).all()
    assert (labels[POSITION].ids[number][away & first] != NOTHING).all()


def test_losses_are_those_of_the_evaluation(masked):
  nats, counts = sentence_losses(masked, reader(masked.task))(masked.params, {})
  values = masked.task.evaluate(masked.params, "test", decode=False).values
  assert counts.sum() == values["tokens"]
  assert nats.sum() / counts.sum() == pytest.approx(values["loss"], rel=1e-5)


def test_units_are_ablated_though_nothing_is_decoded(masked):
  settings = Ablate(units=("encoder/layer_0/self",), samples=100)
  data = make_page(settings, masked, settings.measure(masked)).data
  assert [len(data["effects"]), data["decoded"], data["score"]] == [3, 0, None]
  assert any(effect["loss"]["value"] != 0 for effect in data["effects"])


def test_models_with_other_masks_do_not_compare(masked):
  config = masked.task.dataset.config
  for changes in ({"masking": MaskingConfig(share=0.6)}, {"mask_seed": 1}):
    task = dataclasses.replace(config, **changes).build(masked.task.model.config)
    other = dataclasses.replace(masked, task=task)
    with pytest.raises(UserError, match=r"different tokens: runs/a has .*share=0.25"):
      compare(masked, other, ("runs/a", "runs/b"))
