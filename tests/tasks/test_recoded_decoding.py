"""Recoding at decoding time: the newest position of a decoder layer, by the output's entropy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.decoding import DecodeConfig, recoding
from compmod_jax.models.transformer import Transformer, TransformerConfig
from compmod_jax.tasks.translator import Hypothesis, mean_entropy

BATCH, BEAMS, VOCAB, LAYERS, STEPS = 2, 1, 13, 2, 4
MODEL = Transformer(
  TransformerConfig(
    encoder_layers=1,
    decoder_layers=LAYERS,
    dim=16,
    heads=2,
    ffn_dim=16,
    dropout=0.0,
    max_length=16,
    compete=("decoder_self",),
  ),
  VOCAB,
  VOCAB,
  0,
)
SOURCE = jax.random.randint(jax.random.key(1), (BATCH, 5), 4, VOCAB)
TOKENS = jax.random.randint(jax.random.key(2), (BATCH, STEPS), 4, VOCAB)


@functools.cache
def params():
  variables = nn.unbox(jax.jit(MODEL.init)(jax.random.key(0), SOURCE, TOKENS))["params"]
  return jax.tree.map(lambda leaf: 2 * leaf, variables)


def step(cache, tokens, intermediates):
  return MODEL.apply(
    {"params": params()}, cache, tokens, intermediates=intermediates, method="step"
  )


def walk(one, cache):
  """Logits of every step over the tokens, [batch, time, vocab], and the last cache."""
  logits, one = [], jax.jit(one)
  for time in range(STEPS):
    found, cache = one(cache, TOKENS[:, time, None])
    logits.append(found[:, 0])
  return jnp.stack(logits, axis=1), cache


@functools.cache
def prefill():
  fill = functools.partial(MODEL.apply, beams=BEAMS, length=STEPS, method="prefill")
  return jax.jit(fill)({"params": params()}, SOURCE)


def recoded(layer, **fields):
  config = DecodeConfig(recode_layer=layer, **fields)
  site = recoding.site_of(layer, LAYERS)
  one = recoding.recoding_step(step, OFF, site, config)
  return walk(one, recoding.start(prefill(), BATCH, BEAMS))


@pytest.mark.parametrize("layer", [0, -1])
def test_steps_of_size_zero_change_nothing(layer):
  plain, _ = walk(lambda cache, tokens: step(cache, tokens, OFF), prefill())
  logits, cache = recoded(layer, recode_size=0.0)
  np.testing.assert_allclose(logits, plain, atol=1e-6)
  np.testing.assert_allclose(cache["entropy"][..., 0], cache["entropy"][..., 1], rtol=1e-6)


@pytest.mark.parametrize("layer", [0, -1])
def test_a_small_step_lowers_the_entropy_and_more_steps_lower_it_more(layer):
  before, once = recoded(layer, recode_size=0.05)[1]["entropy"][:, 0].T
  twice = recoded(layer, recode_size=0.05, recode_steps=3)[1]["entropy"][:, 0, 1]
  assert np.all(once < before)
  assert np.all(twice < once)


@pytest.mark.parametrize("layer", [0, -1])
def test_cached_steps_equal_a_pass_over_the_whole_prefix_with_the_corrected_activations(layer):
  """Uncached: every position's activation is put in place, and nothing is kept between steps."""
  size, site = 0.3, recoding.site_of(layer, LAYERS)
  cached, _ = recoded(layer, recode_size=size)

  @jax.jit
  def uncached(activations):
    edits = {} if activations is None else {site: lambda _: activations}
    intermediates = Intermediates(capture=frozenset([site]), edits=edits)
    logits = MODEL.apply({"params": params()}, SOURCE, TOKENS, intermediates=intermediates)
    return logits, intermediates.captured[site]

  @jax.jit
  def slope(corrected, time):
    def error(newest):
      logits, _ = uncached(corrected.at[:, time].set(newest))
      p = jax.nn.softmax(logits[:, time])
      return -jnp.sum(p * jnp.log(p))

    return jax.grad(error)(corrected[:, time])

  corrected = None
  for time in range(STEPS):
    # Activations below the site do not depend on corrections; so the plain pass has them.
    _, plain = uncached(None)
    corrected = plain if corrected is None else corrected.at[:, time].set(plain[:, time])
    corrected = corrected.at[:, time].add(-size * slope(corrected, time))
    logits, _ = uncached(corrected)
    np.testing.assert_allclose(cached[:, time], logits[:, time], rtol=1e-4, atol=1e-4)


def test_an_edit_of_the_same_site_acts_before_recoding():
  site = recoding.site_of(-1, LAYERS)
  intermediates = Intermediates(edits={site: lambda value: 0 * value})
  config = DecodeConfig(recode_layer=-1, recode_size=0.0)
  one = recoding.recoding_step(step, intermediates, site, config)
  logits, _ = walk(one, recoding.start(prefill(), BATCH, BEAMS))
  np.testing.assert_allclose(logits[:, 0], logits[:, 1], atol=1e-6)


def test_a_layer_that_is_not_there_is_refused():
  assert recoding.site_of(-1, 3) == "decoder/layer_2/output"
  with pytest.raises(UserError, match="recode_layer is 3, but decoder has 3 layers"):
    recoding.site_of(3, 3)
  with pytest.raises(UserError, match="recode_size is -1"):
    DecodeConfig(recode_size=-1)
  with pytest.raises(UserError, match="recode_steps is 0"):
    DecodeConfig(recode_steps=0)


def test_the_mean_entropy_is_over_the_steps_of_the_best_hypotheses():
  def one(tokens, before, after):
    return [Hypothesis("", 0.0, np.zeros(tokens, np.int32), {}, np.array([before, after]))]

  found = mean_entropy([one(2, 4.0, 2.0), one(3, 6.0, 3.0)])
  assert found == {"entropy_before": 2.0, "entropy": 1.0}
  assert mean_entropy([[Hypothesis("", 0.0, np.zeros(2, np.int32), {})]]) == {}
