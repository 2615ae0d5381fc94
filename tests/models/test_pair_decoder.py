"""A decoder that reads sources and writes targets: as a language model of both, and as a task's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from random_parameters import drawn

import compmod_jax
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.models.decoder_lm import DecoderConfig, DecoderLM
from compmod_jax.models.text import Text, joined

VOCAB, CONFIG = (
  17,
  DecoderConfig(
    decoder_layers=2, dim=8, heads=2, ffn_dim=12, max_length=10, dropout=0.0, norm_epsilon=1e-3
  ),
)
SOURCE = np.array([[5, 6, 7, 8], [9, 4, 0, 0], [3, 0, 0, 0]])
TARGET = np.array([[1, 11, 12, 0, 0], [1, 13, 0, 0, 0], [1, 14, 15, 16, 3]])
LENGTHS = np.array([4, 2, 1])


def lines(source, target):
  """Sources and targets without padding, one behind the other."""
  return [
    [*(token for token in one if token), *(token for token in other if token)]
    for one, other in zip(source.tolist(), target.tolist(), strict=True)
  ]


@pytest.mark.parametrize("positions", ["learned", "relative_bias", "relative"])
def test_logits_are_those_of_a_language_model_of_source_and_target(positions):
  config = dataclasses.replace(CONFIG, positions=positions)
  model, lm = config.seq2seq(VOCAB, VOCAB, 0), DecoderLM(config, VOCAB)
  params = drawn(model.init, SOURCE, TARGET, spread=0.4)
  own = drawn(lm.init, Text(jnp.asarray(SOURCE)), spread=0.4)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, own)
  found = np.asarray(jax.jit(model.apply)(params, SOURCE, TARGET))
  assert found.shape == (*TARGET.shape, VOCAB)
  whole: Any = jax.jit(lm.apply)
  for row, line in enumerate(lines(SOURCE, TARGET)):
    alone = np.asarray(whole(params, Text(jnp.asarray([line]))).logits)[0, LENGTHS[row] :]
    np.testing.assert_allclose(found[row, : len(alone)], alone, atol=2e-5)


def test_padding_of_sources_and_targets_changes_nothing():
  """Not even beyond the model's positions, as long as tokens have some."""
  model: Any = CONFIG.seq2seq(VOCAB, VOCAB, 0)
  params = drawn(model.init, SOURCE, TARGET, spread=0.4)
  apply = jax.jit(model.apply)
  found = apply(params, SOURCE, TARGET)
  wider = apply(params, np.pad(SOURCE, ((0, 0), (0, 5))), np.pad(TARGET, ((0, 0), (0, 3))))
  real = TARGET != 0
  np.testing.assert_allclose(wider[:, :5][real], found[real], atol=2e-5)


def test_targets_stand_right_behind_their_sources():
  both = joined(jnp.asarray(SOURCE), jnp.asarray(TARGET), jnp.asarray(LENGTHS), 9)
  for row, line in zip(np.asarray(both).tolist(), lines(SOURCE, TARGET), strict=True):
    assert row == [*line, *[0] * (9 - len(line))]
  shorter = joined(jnp.asarray(SOURCE), jnp.asarray(TARGET), jnp.asarray(LENGTHS), 7)
  np.testing.assert_array_equal(shorter, both[:, :7])


@pytest.mark.parametrize(
  ("config", "vocabularies", "match"),
  [
    (CONFIG, (17, 18), "17 and 18 tokens. Use a joint tokenizer"),
    (dataclasses.replace(CONFIG, tied=False), (17, 17), "model.tied is False"),
  ],
)
def test_what_cannot_be_is_told(config, vocabularies, match):
  with pytest.raises(UserError, match=match):
    config.seq2seq(*vocabularies, 0)


# A task's model.

PAIRS = [("der hund schläft", "the dog sleeps"), ("die katze", "A cat sees One bird")]
TINY = DecoderConfig(
  decoder_layers=1, dim=16, heads=2, ffn_dim=16, max_length=48, compete=("decoder_self",)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("pairs") / "run"
  return compmod_jax.load(tiny_model.make_workdir(workdir, TINY, joint=True))


def test_a_task_has_positions_for_source_and_target_together(tmp_path):
  experiment = tiny_model.make_experiment(tiny_model.write_data(tmp_path / "data"), joint=True)
  experiment.task.build(dataclasses.replace(TINY, max_length=24))
  with pytest.raises(UserError, match="max_length is 23, for source and target together"):
    experiment.task.build(dataclasses.replace(TINY, max_length=23))


def test_all_sites_have_the_positions_that_masks_say(model):
  """Words are those that are read there."""
  found = model.capture(PAIRS)
  batch = {name: jnp.asarray(found[name]) for name in ("source", "target")}
  read = [
    [*["der", "hund", "schläft", "</s>", "<s>", "the", "dog", "sleeps"], "", ""],
    [*["die", "katze", "</s>", "<s>", "A", "cat", "sees", "One", "bird"], ""],
  ]
  for site in model.sites():
    if site.endswith("router/signatures"):  # parameters
      continue
    mask = np.asarray(model.task.model.valid_mask(site, batch))
    assert found.valid(site).tolist() == mask.tolist()
    if site.endswith("/attention"):
      assert found[site].shape[2:] == (mask.shape[1], mask.shape[1])
      assert found.words(site, keys=True) == read
    else:
      assert found[site].shape[:2] == mask.shape
    if site != "logits":
      assert found.words(site) == read
  assert found.words("logits", predicted=True)[0] == ["the", "dog", "sleeps", "</s>", "", ""]
  assert [len(one) for one in found.words("logits")] == [6, 6]


def test_what_is_captured_at_the_target_does_not_depend_on_other_pairs(model):
  site = "decoder/layer_0/self/router/weights"
  together, alone = (model.capture(pairs, [site])[site] for pairs in (PAIRS, PAIRS[1:]))
  np.testing.assert_allclose(together[1, :9], alone[0, :9], atol=1e-5)


def test_it_translates_and_scores_what_it_writes(model):
  """The search's score is the sum that the whole pass gives, and routers' weights are recorded."""
  sources = [source for source, _ in PAIRS]
  found = model.hypotheses(sources, beams=1, n_best=1, routing=True)
  for source, ((best,),) in zip(sources, [(one,) for one in found], strict=True):
    batch = {
      "source": model.capture([source], ["logits"])["source"],
      "target": np.asarray(best.tokens)[None],
    }
    logits, seen = run(
      model.task.model.forward,
      model.params,
      {name: jnp.asarray(value) for name, value in batch.items()},
      capture=("decoder/layer_0/self/router/weights",),
    )
    log_probabilities = jax.nn.log_softmax(logits)[0, np.arange(len(best.tokens)), best.tokens]
    assert best.score == pytest.approx(float(jnp.mean(log_probabilities)), abs=1e-4)
    (weights,) = best.routing.values()
    behind = batch["source"].shape[1]
    whole = seen["decoder/layer_0/self/router/weights"][0, behind:]
    np.testing.assert_allclose(weights, whole[: len(weights)], atol=1e-5)


def test_pairs_without_positions_are_named(model):
  long = " ".join(["hund"] * 30)
  with pytest.raises(UserError, match=r"pairs\[1\] has 31 tokens .* target.* positions for 17"):
    model.score([PAIRS[0], (long, long)])
  with pytest.raises(UserError, match=r"A target has 31 tokens .* sources of 31 leave 17"):
    model.capture([(long, long)], ["logits"])
