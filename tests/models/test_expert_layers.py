"""Transformers with competing feed-forward networks: identities, sites, decoding, training."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.decoding.types import permute_cache
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig, routing_parameter
from compmod_jax.models.transformer import ATTENTION_KINDS, Transformer, TransformerConfig

TYPES = 19
SMALL = CompetitionConfig(key_dim=3, hidden_dim=5)
TOP_2 = dataclasses.replace(SMALL, rule="top_k", keep=2)
PLAIN = TransformerConfig(
  encoder_layers=1,
  decoder_layers=1,
  dim=16,
  heads=4,
  ffn_dim=24,
  dropout=0.0,
  max_length=16,
  competition=SMALL,
)
EXPERTS = dataclasses.replace(
  PLAIN,
  expert_layers=("encoder", "decoder"),
  experts=ExpertsConfig(4, matched=True, competition=TOP_2, implementation="blocked"),
)
BOTH = dataclasses.replace(EXPERTS, compete=ATTENTION_KINDS, norm="pre")
SOURCE = np.int32([[4, 5, 6, 7, 8, 9], [10, 11, 12, 0, 0, 0]])
TARGET = np.int32([[2, 4, 5, 6, 7], [8, 9, 10, 11, 0]])


def transformer(config: TransformerConfig) -> Transformer:
  return Transformer(config, TYPES, TYPES)


@functools.cache
def params(config: TransformerConfig) -> Any:
  """Random parameters; those that two configurations share are equal."""
  tokens = jnp.ones((1, 2), jnp.int32)
  shapes = nn.unbox(jax.eval_shape(transformer(config).init, jax.random.key(0), tokens, tokens))
  made = {}
  for path, leaf in flatten_dict(shapes["params"], sep="/").items():
    random = np.random.default_rng(sum(ord(letter) * n for n, letter in enumerate(path, 1)))
    made[path] = jnp.asarray(0.4 * random.normal(size=leaf.shape) + path.endswith("/scale"))
  return unflatten_dict(jax.tree.map(jnp.float32, made), sep="/")


@functools.cache
def gradient(config: TransformerConfig) -> Any:
  """Compiled gradient and logits: (params, source, target) -> (gradient, logits)."""

  def loss(params: Any, source: jax.Array, target: jax.Array) -> Any:
    logits = transformer(config).apply({"params": params}, source, target)
    weights = np.random.default_rng(0).normal(size=logits.shape).astype(np.float32)
    return jnp.mean(weights * jax.nn.log_softmax(logits)), logits

  return jax.jit(jax.grad(loss, has_aux=True))


def numbers(config: TransformerConfig, values: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
  """Logits and gradients."""
  values = params(config) if values is None else values
  gradients, logits = jax.device_get(gradient(config)(values, SOURCE, TARGET))
  return logits, flatten_dict(gradients, sep="/")


# Identities.


def test_experts_off_compile_to_the_same_program():
  off = dataclasses.replace(BOTH.plain(), experts=ExpertsConfig(5, competition=TOP_2))
  plain = dataclasses.replace(PLAIN, norm="pre")
  one, two = (gradient(c).lower(params(c), SOURCE, TARGET).as_text() for c in (off, plain))
  assert one == two
  assert "router" not in str(params(off))


def expert_params(values: Any, config: TransformerConfig) -> Any:
  """The plain model's parameters in the shapes of a model with one unit a layer."""
  flat = flatten_dict(values, sep="/")
  wanted = flatten_dict(params(config), sep="/")
  made = {path: flat.get(path, leaf).reshape(leaf.shape) for path, leaf in wanted.items()}
  return unflatten_dict(made, sep="/")


def test_one_expert_and_one_head_are_the_plain_model_bit_for_bit():
  plain = dataclasses.replace(PLAIN, heads=1)
  one = dataclasses.replace(
    plain, compete=ATTENTION_KINDS, expert_layers=("encoder", "decoder"), experts=ExpertsConfig(1)
  )
  logits, gradients = numbers(plain)
  found, slopes = numbers(one, expert_params(params(plain), one))
  np.testing.assert_array_equal(found, logits)
  routing = {path for path in slopes if routing_parameter(path)}
  assert len(routing) == 5 * 5  # three attention modules and two networks
  for path, slope in slopes.items():
    expected = np.zeros_like(slope) if path in routing else gradients[path].reshape(slope.shape)
    np.testing.assert_array_equal(slope, expected, err_msg=path)


def test_experts_make_a_difference_and_every_parameter_has_a_gradient():
  logits, gradients = numbers(BOTH)
  assert np.abs(logits - numbers(dataclasses.replace(PLAIN, norm="pre"))[0]).max() > 0.01
  assert [path for path, leaf in gradients.items() if not leaf.any()] == []


def test_sparse_and_dense_experts_agree_in_a_whole_model():
  dense = dataclasses.replace(BOTH.experts, implementation="dense")
  found, expected = numbers(BOTH), numbers(dataclasses.replace(BOTH, experts=dense))
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
  for path, peer in expected[1].items():
    np.testing.assert_allclose(found[1][path], peer, rtol=1e-4, atol=1e-6, err_msg=path)


def test_rematerialisation_changes_neither_values_nor_gradients():
  found, expected = numbers(dataclasses.replace(BOTH, remat=True)), numbers(BOTH)
  np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
  for path, peer in expected[1].items():
    np.testing.assert_allclose(found[1][path], peer, atol=1e-6, err_msg=path)


def test_padding_and_later_tokens_change_nothing_however_tokens_are_sorted():
  other_source, other_target = SOURCE.copy(), TARGET.copy()
  other_source[0], other_target[0, 2:] = 13, 14  # another example, and later tokens of it
  logits = numbers(BOTH)[0]
  found = jax.device_get(gradient(BOTH)(params(BOTH), other_source, other_target))[1]
  np.testing.assert_allclose(found[1], logits[1], rtol=2e-6, atol=2e-6)
  other_source[0] = SOURCE[0]
  found = jax.device_get(gradient(BOTH)(params(BOTH), other_source, other_target))[1]
  np.testing.assert_allclose(found[0, :2], logits[0, :2], rtol=2e-6, atol=2e-6)
  assert np.abs(found[0, 2:] - logits[0, 2:]).max() > 0.01


# Which layers, which sites.


def names(**fields: Any) -> list[str]:
  config = dataclasses.replace(PLAIN, encoder_layers=2, **fields)
  return [site.removesuffix("/router/weights") for site in transformer(config).routing_sites()]


def test_routing_sites_are_in_the_models_order():
  assert names(expert_layers=("encoder",)) == ["encoder/layer_0/ffn", "encoder/layer_1/ffn"]
  assert names(expert_layers=("encoder_1", "decoder_0")) == [
    "encoder/layer_1/ffn",
    "decoder/layer_0/ffn",
  ]
  assert names(compete=ATTENTION_KINDS, expert_layers=("encoder_1", "decoder")) == [
    "encoder/layer_0/self",
    "encoder/layer_1/self",
    "encoder/layer_1/ffn",
    "decoder/layer_0/self",
    "decoder/layer_0/cross",
    "decoder/layer_0/ffn",
  ]


def test_only_the_named_layers_have_experts_of_the_width_that_was_asked_for():
  config = dataclasses.replace(EXPERTS, encoder_layers=2, expert_layers=("encoder_1",))
  flat = flatten_dict(params(config), sep="/")
  assert {path.split("/")[0] for path in flat if "/ffn/router/" in path} == {"encoder_1"}
  assert flat["encoder_0/ffn/up/kernel"].shape == (16, 24)
  assert flat["encoder_1/ffn/up/kernel"].shape == (16, 4, 6)
  whole = dataclasses.replace(config, experts=dataclasses.replace(config.experts, matched=False))
  assert flatten_dict(params(whole), sep="/")["encoder_1/ffn/up/kernel"].shape == (16, 4, 24)


def test_every_routing_site_is_met_and_has_its_own_number_of_units():
  config = dataclasses.replace(BOTH, experts=dataclasses.replace(BOTH.experts, count=3))
  sites = transformer(config).routing_sites()

  def apply(params: Any) -> Any:
    call = transformer(config).apply
    return run(call, {"params": params}, jnp.asarray(SOURCE), jnp.asarray(TARGET), capture=sites)[1]

  found = jax.eval_shape(apply, params(config))
  assert set(found) == set(sites)
  for site in sites:
    assert found[site].shape[-1] == (3 if "/ffn/" in site else 4)


# Decoding.


def test_decoding_with_a_cache_equals_the_model_without_and_records_experts():
  config = dataclasses.replace(BOTH, experts=dataclasses.replace(BOTH.experts, count=3))
  model, variables = transformer(config), {"params": params(config)}
  sites = model.config.routing_sites("decoder")
  assert sum("/ffn/" in site for site in sites) == 1
  prefill = jax.jit(
    lambda source: model.apply(variables, source, beams=3, length=4, routing=True, method="prefill")
  )
  step = jax.jit(lambda cache, tokens: model.apply(variables, cache, tokens, method="step"))
  whole = jax.jit(lambda s, t: run(model.apply, variables, s, t, capture=sites))
  random, beams, steps = np.random.default_rng(0), 3, 3
  cache, past = prefill(SOURCE), np.zeros((2, beams, 0), np.int32)
  for t in range(steps):
    parents = random.integers(beams, size=(2, beams)).astype(np.int32)
    if t:
      cache = permute_cache(cache, parents)
      past = np.take_along_axis(past, parents[..., None], axis=1)
    tokens = random.integers(2, TYPES, size=(2, beams)).astype(np.int32)
    past = np.concatenate([past, tokens[..., None]], axis=2)
    logits, cache = step(cache, tokens)
  expected, found = whole(np.repeat(SOURCE, beams, axis=0), past.reshape(-1, steps))
  np.testing.assert_allclose(logits, np.asarray(expected)[:, -1].reshape(2, beams, -1), atol=2e-5)
  for site in sites:
    kept = np.asarray(cache["routing"][site])[:, :, :steps].reshape(2 * beams, steps, -1)
    np.testing.assert_allclose(kept, found[site], atol=1e-5)


# Configuration.


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"expert_layers": ("encoder_1",)}, ["expert_layers is 'encoder_1'", "encoder_0"]),
    ({"expert_layers": ("encodr",)}, ["'encodr'", "Did you mean 'encoder'?"]),
    ({"ffn_dim": 30}, ["experts.count = 4", "ffn_dim = 30", "divides"]),
  ],
)
def test_a_bad_configuration_names_field_value_and_rule(fields, words):
  with pytest.raises(UserError) as error:
    dataclasses.replace(EXPERTS, **fields)
  assert all(word in str(error.value) for word in words), error.value


def test_experts_whose_router_cannot_learn_are_warned_of():
  lone = dataclasses.replace(SMALL, rule="top_k", keep=1)
  config = dataclasses.replace(EXPERTS, experts=ExpertsConfig(4, competition=lone))
  (line,) = config.warnings()
  assert "one of 4 experts" in line
  assert "experts.competition.keep" in line
  assert EXPERTS.warnings() == BOTH.warnings() == config.plain().warnings() == []
  assert len(dataclasses.replace(config, heads=1, compete=ATTENTION_KINDS).warnings()) == 2
  assert dataclasses.replace(EXPERTS, experts=ExpertsConfig(1)).warnings()


def test_the_plain_model_has_neither_experts_nor_competing_heads():
  assert transformer(BOTH.plain()).routing_sites() == ()
  assert BOTH.plain() == dataclasses.replace(BOTH, compete=(), expert_layers=())
