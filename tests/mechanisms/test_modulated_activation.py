"""Neuromodulated activations: slope and offset of a nonlinearity, from a signal of the context."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.layers.basic import ACTIVATIONS, FeedForward
from compmod_jax.mechanisms.modulated_activation import modulated
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.transformer import TransformerConfig

BATCH, TIME, DIM, MLP, K = 2, 3, 6, 8, 3
RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.normal(size=(BATCH, TIME, MLP)), jnp.float32)
INPUTS = jnp.asarray(RANDOM.normal(size=(BATCH, TIME, DIM)), jnp.float32)
SIZES = {"dim": 8, "heads": 2, "ffn_dim": 12, "max_length": 8}


@functools.cache
def made(gated=False, activation="relu"):
  module = FeedForward(DIM, MLP, activation, gated=gated, signal_dim=K)
  shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), INPUTS))
  random = np.random.default_rng(1)
  return module, jax.tree.map(lambda s: jnp.asarray(random.normal(size=s.shape), s.dtype), shapes)


def test_every_number_is_scaled_and_shifted_as_the_equation_says():
  signal, scale, offset = (RANDOM.normal(size=s) for s in ((BATCH, TIME, K), (K,), (K,)))
  found = modulated(X, jnp.asarray(signal, "f4"), jnp.asarray(scale, "f4"),
                    jnp.asarray(offset, "f4"), ACTIVATIONS["gelu"])  # fmt: skip
  for place in np.ndindex(BATCH, TIME):
    for unit in range(MLP):
      inner = signal[place] @ (float(X[(*place, unit)]) * scale + offset)
      expected = jax.nn.gelu(inner, approximate=False)
      np.testing.assert_allclose(found[(*place, unit)], expected, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_with_a_constant_signal_and_no_offset_it_is_the_plain_network_scaled(gated):
  """A rectifier of a times x is a times the rectifier of x, if a is positive."""
  module, params = made(gated)
  own = params["params"]["modulated"]
  constant = jnp.asarray([0.5, 2.0, 1.0])
  scale = jnp.asarray([1.0, 0.5, 0.25])
  own = {**own, "scale": scale, "offset": jnp.zeros(K)}
  edits = {"modulated/signal": lambda z: jnp.broadcast_to(constant[None, None], z.shape)}
  weights = {"params": {**params["params"], "modulated": own}}
  _, found = run(module.apply, weights, INPUTS, edits=edits, capture=("hidden",))
  plain = {"params": {k: v for k, v in params["params"].items() if k != "modulated"}}
  module = FeedForward(DIM, MLP, gated=gated)
  _, expected = run(module.apply, plain, INPUTS, capture=("hidden",))
  slope = float(constant @ scale)
  assert slope != 1
  np.testing.assert_allclose(found["hidden"], slope * expected["hidden"], rtol=1e-5, atol=1e-6)


def test_gradients_reach_the_modulatory_network_and_the_activation_s_own_vectors():
  module, params = made(activation="gelu")
  gradient = jax.jit(jax.grad(lambda p: jnp.sum(module.apply(p, INPUTS) ** 2)))(params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient["params"]["modulated"]):
    assert np.all(np.isfinite(leaf)), path
    assert np.abs(leaf).max() > 1e-4, path


def test_before_training_it_is_about_the_plain_nonlinearity():
  module = FeedForward(64, 32, signal_dim=8)
  x = jax.random.normal(jax.random.key(1), (4, 50, 64))
  params = nn.unbox(module.init(jax.random.key(0), x))
  _, found = run(module.apply, params, x, capture=("modulated/signal",))
  slopes = np.asarray(found["modulated/signal"]).mean(axis=-1)
  assert abs(slopes.mean() - 1) < 0.1
  assert slopes.std() < 0.5


TOKENS = jnp.asarray([[4, 5, 6]])
MODELS = {
  "encoder and decoder": (
    TransformerConfig(encoder_layers=1, decoder_layers=1, signal_dim=K, **SIZES).seq2seq(9, 9, 0),
    (TOKENS, TOKENS),
    ("encoder/layer_0", "decoder/layer_0"),
  ),
  "encoder": (
    EncoderConfig(encoder_layers=1, signal_dim=K, **SIZES).encoder(9, 0),
    (TOKENS,),
    ("encoder/layer_0",),
  ),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_field_modulates_every_feed_forward_network_of_a_transformer(name):
  model, args, layers = MODELS[name]
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), *args))
  sites = [f"{layer}/ffn/modulated/signal" for layer in layers]
  logits, found = run(model.apply, params, *args, capture=sites)
  assert {found[site].shape for site in sites} == {(1, 3, K)}
  edited, _ = run(model.apply, params, *args, edits=dict.fromkeys(sites, jnp.zeros_like))
  assert not np.allclose(logits, edited, atol=1e-4)
  assert model.config.plain().signal_dim == 0
  assert f"modulated by {K} numbers" in model.config.describe()


@pytest.mark.parametrize(
  "fields", [{"signal_dim": -1}, {"signal_dim": 2, "expert_layers": ("decoder",)}]
)
def test_what_cannot_be_modulated_is_refused(fields):
  with pytest.raises(UserError, match=r"model\.signal_dim is"):
    DecoderConfig(decoder_layers=1, **SIZES, **fields)
