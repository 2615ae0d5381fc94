"""Fast weights: chunks, steps and the definition; what depends on what; gates."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.layers.fast_weights import FastWeights, Written, read_in_chunks, read_step
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.text import Text

BATCH, TIME, HEADS, WIDTH = 3, 11, 2, 4
RANDOM = np.random.default_rng(0)
GIVEN = Written(
  *(RANDOM.normal(size=(BATCH, TIME, HEADS, WIDTH)).astype(np.float32) for _ in range(3))
)
LOG_DECAY = np.log(np.float32([0.6, 0.95]))
VALID = np.arange(TIME) < np.array([[11], [7], [9]])
# Of one segment; of several apart; of a first one that the others go on from.
SEGMENTS = {
  "one": np.zeros((BATCH, TIME), int),
  "apart": 1 + np.cumsum(RANDOM.integers(0, 2, (BATCH, TIME)), axis=1),
  "after a first": np.cumsum(np.arange(TIME) % 3 == np.array([[2], [1], [2]]), axis=1),
}
SIZES = {"dim": 8, "heads": 2, "ffn_dim": 12, "max_length": 16, "dropout": 0.0}


def by_definition(segments):
  """What positions read, and fast weights after the last one, write by write."""
  read = np.zeros((BATCH, TIME, HEADS, WIDTH))
  last = np.zeros((BATCH, HEADS, WIDTH, WIDTH))
  query, key, value = (np.asarray(part, np.float64) for part in GIVEN)
  decay = np.exp(np.asarray(LOG_DECAY, np.float64))
  for n in range(BATCH):
    for head in range(HEADS):
      shared = weights = np.zeros((WIDTH, WIDTH))
      number = 0
      for t in range(TIME):
        if bool(VALID[n, t]):
          if segments[n, t] != number:
            number, weights = segments[n, t], shared
          weights = decay[head] * weights + np.outer(key[n, t, head], value[n, t, head])
          shared = weights if number == 0 else shared
        read[n, t, head] = query[n, t, head] @ weights
      last[n, head] = weights
  return read, last


@functools.cache
def in_chunks(chunk):
  return jax.jit(functools.partial(read_in_chunks, chunk=chunk))


@pytest.mark.parametrize("chunk", [1, 3, 4, 32])
@pytest.mark.parametrize("kind", SEGMENTS)
def test_chunks_of_any_size_read_what_the_definition_says(kind, chunk):
  segments = SEGMENTS[kind]
  read, last = in_chunks(chunk)(GIVEN, LOG_DECAY, VALID, segments)
  expected, weights = by_definition(segments)
  np.testing.assert_allclose(np.where(VALID[..., None, None], read, 0),
                             np.where(VALID[..., None, None], expected, 0), atol=1e-5)  # fmt: skip
  np.testing.assert_allclose(last, weights, atol=1e-5)


def test_steps_go_on_as_the_whole_sequence_does():
  found = in_chunks(4)(GIVEN, LOG_DECAY, np.ones((BATCH, TIME), bool), SEGMENTS["one"])
  expected, last = map(np.asarray, found)
  step = jax.jit(read_step)
  state = np.zeros((BATCH, 1, HEADS, WIDTH, WIDTH), np.float32)
  for t in range(TIME):
    now = Written(*(part[:, t : t + 1] for part in GIVEN))
    read, state = step(now, LOG_DECAY, state)
    np.testing.assert_allclose(np.asarray(read)[:, 0], expected[:, t], atol=1e-5)
  np.testing.assert_allclose(np.asarray(state)[:, 0], last, atol=1e-5)


@functools.cache
def layer(plasticity="modulated"):
  module = FastWeights(HEADS * WIDTH, HEADS, plasticity)
  return module, drawn(module.init, X, seed=1)


X = RANDOM.normal(size=(2, 6, HEADS * WIDTH)).astype(np.float32)
CTX = Context(mask=AttentionMask(causal=True))


@pytest.mark.parametrize("plasticity", ["hebbian", "modulated"])
def test_nothing_that_is_read_depends_on_a_later_position(plasticity):
  module, params = layer(plasticity)

  @jax.jit
  @jax.grad
  def slope(x, params, t):
    return jnp.sum(jnp.sin(module.apply(params, x, ctx=CTX)[0][0, t]))

  for t in range(6):
    gradient = np.asarray(slope(X, params, t))
    assert not gradient[0, t + 1 :].any()
    assert not gradient[1].any()
    assert np.abs(gradient[0, : t + 1]).max(axis=-1).min() > 0


def test_no_prediction_of_a_decoder_depends_on_a_later_token():
  model = DecoderConfig(decoder_layers=2, fast_weights="modulated", **SIZES).decoder(11, 0)
  tokens = np.array([[4, 5, 6, 7, 8]])
  run = jax.jit(lambda params, tokens: model.apply(params, Text(tokens)).logits)
  call = functools.partial(run, drawn(model.init, Text(tokens), seed=1))
  whole = np.asarray(call(tokens))
  for t in range(1, 5):
    changed = tokens.copy()
    changed[0, t] = 9
    other = np.asarray(call(changed))
    np.testing.assert_array_equal(other[0, :t], whole[0, :t])
    assert not np.allclose(other[0, t:], whole[0, t:], atol=1e-5)


def test_documents_of_a_block_have_fast_weights_of_their_own():
  module, params = layer()
  segments = jnp.asarray([[1, 1, 1, 2, 2, 2]] * 2)
  ctx = Context(mask=AttentionMask(causal=True, segments=segments))
  both, _ = jax.jit(functools.partial(module.apply, ctx=ctx))(params, X)
  alone, _ = jax.jit(functools.partial(module.apply, ctx=CTX))(params, X[:, 3:])
  np.testing.assert_allclose(np.asarray(both)[:, 3:], alone, atol=1e-5)


def test_a_gate_of_zero_writes_nothing_and_one_of_one_changes_nothing():
  module, params = layer()
  call = functools.partial(run, module.apply, ctx=CTX)
  (plain, _), _ = jax.jit(call)(params, X)
  gated = jax.jit(functools.partial(call, capture=("written", "read")))
  (opened, _), _ = gated(params, X, None, np.ones_like(X))
  np.testing.assert_array_equal(opened, plain)
  (shut, _), found = gated(params, X, None, np.zeros_like(X))
  assert not np.any(found["written"])
  assert not np.any(found["read"])
  (same, _), _ = jax.jit(functools.partial(call, edits={"written": jnp.zeros_like}))(params, X)
  np.testing.assert_array_equal(same, shut)


def test_plasticity_is_the_rate_times_a_sigmoid_of_the_input():
  module, params = layer()
  call = functools.partial(run, module.apply, ctx=CTX, capture=("plasticity",))
  (_, _), found = jax.jit(call)(params, X)
  own = params["params"]
  gate = 1 / (1 + np.exp(-np.float64(X @ own["gate"]["kernel"] + own["gate"]["bias"])))
  rate = np.log1p(np.exp(own["rate"]))
  expected = gate.reshape(2, 6, HEADS, WIDTH) * rate[:, None]
  np.testing.assert_allclose(found["plasticity"], expected, rtol=1e-5)


def test_gradients_reach_every_parameter():
  module, params = layer()

  @jax.jit
  @jax.grad
  def slope(params, x):
    return jnp.sum(module.apply(params, x, ctx=CTX)[0] ** 2)

  gradient = slope(params, X)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    assert np.abs(leaf).max() > 1e-5, path


def test_the_neuromodulatory_set_gates_the_plasticity_of_a_layer():
  sizes = {"vanilla_layers": 2, "modulatory_layers": 1, "output_layers": 1, "read_after": 1}
  config = NemotConfig(
    fast_weights="hebbian", gate_places=("vanilla_1/plasticity",), **sizes, **SIZES
  )
  model, tokens = config.decoder(11, 0), jnp.asarray([[4, 5, 6, 7]])
  text = Text(tokens, jnp.asarray([config.auxiliary_ids("dec", "lm")]))
  site, read = "gates/vanilla_1/plasticity", "vanilla/layer_1/fast/read"
  sites = (site, read, "vanilla/layer_0/fast/read")

  @jax.jit
  def captured(factor):
    params = nn.unbox(model.init(jax.random.key(0), text, [("lm", 1)]))
    call = functools.partial(run, model.apply, params, text, [("lm", 1)])
    return call(capture=sites, edits={site: lambda gate: factor * gate})[1]

  found, shut = (jax.tree.map(np.asarray, captured(factor)) for factor in (1.0, 0.0))
  np.testing.assert_array_equal(found[site], 0.5)  # before training
  assert np.abs(found[read]).max() > 0
  assert not shut[read].any()
  assert shut["vanilla/layer_0/fast/read"].any()
  assert config.plain().fast_weights == "off"


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (
      lambda: DecoderConfig(fast_weights="hebbian", dim=16, heads=3, head_dim=4),
      r"model\.heads = 3 does not divide model\.dim = 16",
    ),
    (
      lambda: DecoderConfig(fast_weights="hebbian", mechanism_layers=("decoder_0",)),
      "reads its slice of the width alone",
    ),
    (lambda: NemotConfig(gate_places=("output_0/plasticity",)), r"model\.fast_weights is off"),
  ],
)
def test_what_cannot_be_is_refused(make, words):
  with pytest.raises(UserError, match=words):
    make()
