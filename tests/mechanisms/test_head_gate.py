"""Sigmoid gates of heads."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.mechanisms.competition import CompetitionConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.transformer import TransformerConfig

DIM, HEADS = 12, 3
INPUTS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, DIM)), jnp.float32)
CTX = Context(mask=AttentionMask(causal=True))


def made(**fields):
  module = Attention(DIM, HEADS, gated=True, **fields)
  shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), INPUTS))
  random = np.random.default_rng(1)
  return module, jax.tree.map(
    lambda x: jnp.asarray(random.normal(0, 0.5, x.shape), x.dtype), shapes
  )


def test_heads_are_multiplied_by_the_sigmoid_of_a_product():
  module, params = made()
  (_, _), found = run(module.apply, params, INPUTS, ctx=CTX, capture=None)
  p = params["params"]
  plain = {"params": {name: leaf for name, leaf in p.items() if name != "head_gate"}}
  (_, _), ungated = run(Attention(DIM, HEADS).apply, plain, INPUTS, ctx=CTX, capture=None)
  gate = jax.tree.map(np.asarray, p["head_gate"]["gate"])
  product = np.asarray(INPUTS) @ gate["kernel"] + gate["bias"]
  gates = 1 / (1 + np.exp(-np.float64(product)))
  np.testing.assert_allclose(found["head_gates"], gates, rtol=1e-5)
  np.testing.assert_allclose(found["heads"], ungated["heads"] * gates[..., None], atol=1e-5)


def test_before_training_every_gate_is_one_half():
  module, _ = made()
  params = nn.unbox(module.init(jax.random.key(0), INPUTS))
  _, found = run(module.apply, params, INPUTS, ctx=CTX, capture={"head_gates"})
  np.testing.assert_array_equal(found["head_gates"], 0.5)


@pytest.mark.parametrize("routing", ["fused", "plain"])
def test_gated_heads_compete_as_others_do(routing):
  competition = CompetitionConfig(key_dim=3, hidden_dim=6, routing=routing)
  module, params = made(competition=competition)
  kept = {"head_gates": jnp.ones_like}
  (opened, _), _ = run(module.apply, params, INPUTS, ctx=CTX, edits=kept)
  plain = {"params": {n: leaf for n, leaf in params["params"].items() if n != "head_gate"}}
  expected, _ = Attention(DIM, HEADS, competition=competition).apply(plain, INPUTS, ctx=CTX)
  np.testing.assert_allclose(opened, expected, atol=1e-6)


def test_the_configuration_names_kinds_of_attention():
  assert TransformerConfig(gated_heads=("cross", "decoder_self")).plain().gated_heads == ()
  with pytest.raises(UserError, match=r"model\.gated_heads"):
    EncoderConfig(gated_heads=("cross",))
