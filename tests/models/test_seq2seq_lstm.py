"""The sequence-to-sequence LSTM: who influences what, padding, attention, recoding, edits."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF, Taps, run
from compmod_jax.decoding import DecodeConfig, recoding
from compmod_jax.layers.recoding_signals import step_size_parameters
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig

SOURCE_TYPES, TARGET_TYPES = 23, 19
PLAIN = Seq2SeqLstmConfig(
  encoder_layers=2,
  decoder_layers=2,
  dim=6,
  embedding_dim=5,
  attention_dim=4,
  share_embeddings="none",
  max_length=16,
  dropout=0.2,
)
# No token stands twice, so that a token's embedding says where an influence comes from.
SOURCE = np.int32([[4, 5, 6, 7, 8, 9], [10, 11, 12, 0, 0, 0]])
TARGET = np.int32([[2, 4, 5, 6, 7], [8, 9, 10, 11, 0]])
PAIR = jnp.asarray(SOURCE), jnp.asarray(TARGET)
ATTENTION = "decoder/cross/attention"


def recoded(signal, **fields):
  return dataclasses.replace(PLAIN, recoding=RecodingConfig(signal, **{"size": 0.7, **fields}))


def module(config):
  return config.seq2seq(SOURCE_TYPES, TARGET_TYPES, 0)


@functools.cache
def params():
  """Random parameters, which all configurations without learned step sizes share."""
  shapes = nn.unbox(jax.eval_shape(module(PLAIN).init, jax.random.key(0), SOURCE, TARGET))
  random = np.random.default_rng(0)
  return jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.6, x.shape), x.dtype), shapes)


@functools.cache
def everything(config):
  """Logits and all sites."""
  return jax.device_get(jax.jit(functools.partial(run, module(config).apply, capture=None))(
    params(), *PAIR
  ))  # fmt: skip


KINDS = {name: recoded(name) for name in ("entropy", "nll")} | {"plain": PLAIN}
each = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


@each
def test_no_prediction_depends_on_a_later_token_on_padding_or_on_another_example(config):
  p = params()["params"]

  @jax.jit
  def influence(tables, example, position):
    def prediction(tables):
      changed = {name: {"table": table} for name, table in tables.items()}
      rngs = {"dropout": jax.random.key(0)}
      call = functools.partial(module(config).apply, deterministic=False, rngs=rngs)
      logits = call({"params": {**p, **changed}}, *PAIR)
      return jnp.sum(logits[example, position] * np.arange(float(TARGET_TYPES)))

    gradients = jax.grad(prediction)(tables)
    return {name: jnp.any(gradient != 0, axis=-1) for name, gradient in gradients.items()}

  tables = {name: p[name]["table"] for name in ("encoder_embedding", "decoder_embedding")}
  for example, position in ((0, 0), (0, 2), (0, 4), (1, 1), (1, 3)):
    reached = jax.device_get(influence(tables, example, position))
    assert set(np.flatnonzero(reached["encoder_embedding"])) == set(SOURCE[example]) - {0}
    past = set(TARGET[example, : position + 1])
    assert set(np.flatnonzero(reached["decoder_embedding"])) == past


@each
def test_predictions_are_the_same_in_a_wider_batch_with_other_examples(config):
  wide_source, wide_target = np.zeros((3, 9), np.int32), np.zeros((3, 8), np.int32)
  wide_source[2, :3], wide_target[2, :4] = SOURCE[1, :3], TARGET[1, :4]
  wide_source[0, :9], wide_target[0, :8] = 21, 3  # and row 1 is a filler, all padding
  wide = np.asarray(jax.jit(module(config).apply)(params(), wide_source, wide_target))
  np.testing.assert_allclose(wide[2, :4], everything(config)[0][1, :4], rtol=2e-5, atol=2e-5)
  assert np.isfinite(wide).all()


def test_a_batch_of_padding_alone_has_finite_gradients():
  config = recoded("entropy")

  def loss(p):
    return jnp.mean(jax.nn.log_softmax(module(config).apply(p, 0 * PAIR[0], 0 * PAIR[1])) ** 2)

  for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params())):
    assert np.isfinite(leaf).all()


def test_attention_looks_at_tokens_alone_and_its_weights_sum_to_1():
  weights = everything(PLAIN)[1][ATTENTION]
  assert weights.shape == (2, 1, 5, 6)
  np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)
  assert not weights[1, ..., 3:].any()
  assert (weights[1, ..., :3] > 0).all()


def test_the_memory_is_read_through_the_attention_weights():
  """With all weight on one position, the step reads that position's vector and no other."""
  only = {ATTENTION: lambda w: jnp.zeros_like(w).at[..., 1].set(1.0)}
  moved = {**only, "encoder/output": lambda h: h.at[:, 2].add(1.0)}
  read = {**only, "encoder/output": lambda h: h.at[:, 1].add(1.0)}
  call = functools.partial(run, module(PLAIN).apply, params(), *PAIR)
  base, other, changed = (call(edits=edits)[0] for edits in (only, moved, read))
  np.testing.assert_allclose(other, base, atol=1e-6)
  assert np.abs(changed - base).max() > 0.01


def test_an_edit_that_asks_for_the_mask_gets_that_of_its_position():
  valid = jnp.asarray(TARGET != 0)
  edits = {"decoder/layer_1/output": lambda h, mask: jnp.where(mask[..., None], h, 100.0)}
  taps = Taps(capture=frozenset(["decoder/layer_1/output"]), edits=edits).knowing(lambda _: valid)
  module(PLAIN).apply(params(), *PAIR, taps=taps)
  found = taps.captured["decoder/layer_1/output"]
  np.testing.assert_array_equal(np.asarray(found == 100.0).all(axis=-1), ~np.asarray(valid))


# Recoding.


@pytest.mark.parametrize("signal", ["surprisal", "argmax", "nll", "entropy"])
def test_steps_of_size_zero_and_recoding_of_the_other_mode_change_nothing(signal):
  plain = everything(PLAIN)[0]
  for config in (recoded(signal, size=0.0), recoded(signal, when="train")):
    np.testing.assert_allclose(everything(config)[0], plain, atol=1e-6)


@pytest.mark.parametrize("signal", ["surprisal", "nll"])
def test_a_signal_of_the_token_moves_no_prediction_of_that_token(signal):
  """The first token is predicted before anything is known; what follows is not the same."""
  plain, found = everything(PLAIN)[0], everything(recoded(signal))[0]
  np.testing.assert_allclose(found[:, 0], plain[:, 0], atol=1e-6)
  assert np.abs(found[:, 1:] - plain[:, 1:]).max() > 1e-3


def entropies(logits):
  p = jax.nn.softmax(logits)
  return np.asarray(-jnp.sum(p * jnp.log(p), axis=-1))


def test_recoding_by_entropy_lowers_that_of_the_first_prediction():
  plain = entropies(everything(PLAIN)[0])[:, 0]
  small, found = everything(recoded("entropy", size=0.05)), recoded("entropy", size=0.05, steps=3)
  np.testing.assert_allclose(small[1]["decoder/recoding_error"][:, 0], plain, rtol=1e-5)
  assert (entropies(small[0])[:, 0] < plain).all()
  assert (entropies(everything(found)[0])[:, 0] < entropies(small[0])[:, 0]).all()


def test_the_step_is_minus_the_size_times_the_derivative_by_finite_differences():
  """Of the first prediction's entropy with respect to the top cell state, through h."""
  size, site = 0.5, "decoder/layer_1"
  sites = everything(recoded("entropy", size=size))[1]
  moved = sites[f"{site}/cell_recoded"][:, 0] - sites[f"{site}/cell"][:, 0]
  hidden, cell = sites[f"{site}/output"], sites[f"{site}/cell"]
  epsilon = 1e-2

  @jax.jit
  def entropy(change):
    # h as the cell makes it of a changed c: o tanh(c).
    gate = hidden[:, 0] / jnp.tanh(cell[:, 0])
    new = gate * jnp.tanh(cell[:, 0] + change)
    edit = {f"{site}/output": lambda h: h + (new - hidden[:, 0])[:, None]}
    logits = run(module(PLAIN).apply, params(), PAIR[0], PAIR[1][:, :1], edits=edit)[0]
    p = jax.nn.softmax(logits[:, 0])
    return -jnp.sum(p * jnp.log(p), axis=-1)

  for unit in range(PLAIN.dim):
    change = epsilon * np.eye(PLAIN.dim, dtype=np.float32)[unit]
    ahead, back = (entropy(sign * change[None]) for sign in (1.0, -1.0))
    slope = (ahead - back) / (2 * epsilon)
    np.testing.assert_allclose(moved[:, unit], -size * slope, atol=2e-4)


def test_training_reaches_learned_step_sizes_and_second_order_changes_gradients():
  learned = recoded("entropy", step="learned")
  made = step_size_parameters(learned.recoding, 2, PLAIN.dim)
  sizes = {name: init(jax.random.key(0), shape).unbox() for name, (init, shape) in made.items()}
  p = {"params": {**params()["params"], "step_sizes": sizes}}

  def gradient(config, p):
    def loss(p):
      logits = module(config).apply(p, *PAIR)
      return jnp.mean(jax.nn.log_softmax(logits)[..., 3])

    return jax.jit(jax.grad(loss))(p)["params"]

  assert np.asarray(gradient(learned, p)["step_sizes"]["steps"]).all()
  first, second = (
    gradient(recoded("entropy", through=through), params()) for through in (False, True)
  )
  assert np.abs(first["readout"]["kernel"] - second["readout"]["kernel"]).max() > 1e-5


# Recoding of the search.


@pytest.mark.parametrize("layer", [0, -1])
def test_decoding_recodes_the_state_of_a_layer(layer):
  model, steps = module(PLAIN), 3
  cache = model.apply(params(), PAIR[0], beams=1, length=steps, method="prefill")

  def step(cache, tokens, taps):
    return model.apply(params(), cache, tokens, taps=taps, method="step")

  def sums(size):
    config = DecodeConfig(recode_layer=layer, recode_size=size)
    one = recoding.recoded(step, OFF, recoding.site_of(layer, 2), config)
    state, one = recoding.start(cache, 2, 1), jax.jit(one)
    for t in range(steps):
      logits, state = one(state, PAIR[1][:, t, None])
    return np.asarray(state["entropy"][:, 0]), logits

  still, logits = sums(0.0)
  np.testing.assert_allclose(logits[:, 0], everything(PLAIN)[0][:, steps - 1], atol=1e-5)
  np.testing.assert_allclose(still[:, 0], still[:, 1], rtol=1e-6)
  before, after = sums(0.05)[0].T
  assert (after < before).all()


def test_a_model_that_recodes_itself_is_not_recoded_once_more():
  assert PLAIN.decoding_stack("") == ("decoder", 2)
  assert recoded("entropy", when="train").decoding_stack("") == ("decoder", 2)
  with pytest.raises(UserError, match=r"recode_layer is given.*--recoding signal=none"):
    recoded("entropy").decoding_stack("")


# Configuration.


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"dim": 0}, r"model\.dim is 0"),
    ({"dropout": 1.0}, r"model\.dropout is 1\.0"),
    ({"recoding": RecodingConfig("mc_dropout")}, r"model\.recoding\.signal"),
    ({"recoding": RecodingConfig("nll", "safe")}, r"model\.recoding\.step"),
    ({"recoding": RecodingConfig("nll", share=0.5)}, r"recoding\.share is 0\.5"),
  ],
)
def test_a_bad_configuration_names_field_and_value(fields, words):
  with pytest.raises(UserError, match=words):
    dataclasses.replace(PLAIN, **fields)


def test_one_table_needs_one_vocabulary():
  config = dataclasses.replace(PLAIN, share_embeddings="all")
  with pytest.raises(UserError, match="23 and 19 tokens"):
    module(config).init(jax.random.key(0), SOURCE, TARGET)
  shapes = jax.eval_shape(config.seq2seq(9, 9, 0).init, jax.random.key(0), SOURCE, TARGET)
  assert [name for name in shapes["params"] if name.endswith("embedding")] == ["decoder_embedding"]
