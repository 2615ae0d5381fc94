"""Reading strategies against their equations."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.layers.reading_strategies import PARTS_OF_SPEECH, Highlighting, OptionInteraction

BATCH, TIME, DIM = 2, 7, 4
RANDOM = np.random.default_rng(0)
INPUTS = jnp.asarray(RANDOM.normal(size=(BATCH, TIME, DIM)), jnp.float32)
OPTIONS = jnp.asarray([[0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0]], bool)


def drawn():
  init = OptionInteraction(DIM, 0.0).init
  shapes = nn.unbox(jax.eval_shape(init, jax.random.key(0), INPUTS, OPTIONS))
  return jax.tree.map(lambda leaf: jnp.asarray(RANDOM.normal(size=leaf.shape), jnp.float32), shapes)


@functools.partial(jax.jit, static_argnames=("rate", "deterministic"))
def applied(params, inputs, options, rate=0.0, **how):
  return OptionInteraction(DIM, rate).apply(params, inputs, options, **how)


def test_options_replace_themselves_by_the_equation():
  params = drawn()
  found = applied(params, INPUTS, OPTIONS)
  names = ("first", "second", "bilinear", "gate")
  w1, w2, w3, w4 = (np.asarray(params["params"][name]["kernel"], np.float64) for name in names)
  assert (w3.shape, w4.shape) == ((DIM, DIM), (2 * DIM, DIM))
  for row, options in enumerate(OPTIONS):
    x = np.asarray(INPUTS[row][options], np.float64)
    h1, h2 = x @ w1, x @ w2
    scores = h1 @ w3 @ h2.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    hint = np.maximum(weights / weights.sum(axis=1, keepdims=True) @ h2, 0)
    g = 1 / (1 + np.exp(-np.concatenate([hint, h1], axis=1) @ w4))
    np.testing.assert_allclose(found[row][options], g * h1 + (1 - g) * hint, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[row][~options], INPUTS[row][~options])


def test_a_text_without_options_stays_as_it_is():
  params = drawn()
  nothing = jnp.zeros_like(OPTIONS)
  np.testing.assert_array_equal(applied(params, INPUTS, nothing), INPUTS)


def test_options_see_all_options_and_nothing_else():
  params = drawn()

  def value(inputs):
    return jnp.sum(jnp.sin(applied(params, inputs, OPTIONS)[0, 1]))

  seen = np.abs(jax.jit(jax.grad(value))(INPUTS)).sum(axis=-1) > 0
  np.testing.assert_array_equal(seen, [OPTIONS[0], np.zeros(TIME, bool)])


def test_results_are_dropped_in_training_and_inputs_are_not():
  params = drawn()
  rngs = {"dropout": jax.random.key(0)}
  found = applied(params, INPUTS, OPTIONS, rate=0.5, deterministic=False, rngs=rngs)
  whole = applied(params, INPUTS, OPTIONS)
  dropped = found == 0
  assert dropped[OPTIONS].any()
  np.testing.assert_allclose(
    found[~dropped & OPTIONS[..., None]], 2 * whole[~dropped & OPTIONS[..., None]]
  )
  np.testing.assert_array_equal(found[~OPTIONS], INPUTS[~OPTIONS])


def test_every_part_of_speech_adds_its_vector_and_answers_get_none():
  module = Highlighting(DIM)
  tags = jnp.asarray([[0, 1, 7, 0, -1, -1, 2], [3, 4, 5, 6, 7, -1, -1]])
  fresh = module.init(jax.random.key(0), INPUTS, tags)
  np.testing.assert_array_equal(module.apply(fresh, INPUTS, tags), INPUTS)
  table = RANDOM.normal(size=(len(PARTS_OF_SPEECH), DIM)).astype(np.float32)
  found = module.apply({"params": {"table": table}}, INPUTS, tags)
  expected = INPUTS + np.where(tags[..., None] >= 0, table[np.maximum(tags, 0)], 0)
  np.testing.assert_allclose(found, expected, atol=1e-6)
