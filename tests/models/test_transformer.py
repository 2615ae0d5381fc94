"""The Transformer: sizes, identities, independence, decoding step by step."""

import dataclasses
import functools
import re
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
from compmod_jax.mechanisms.competition.router import CompetitionConfig, routing_parameter
from compmod_jax.models.transformer import ATTENTION_KINDS, Transformer, TransformerConfig

SOURCE_TYPES, TARGET_TYPES = 23, 19
SMALL = CompetitionConfig(key_dim=6, hidden_dim=8)
CAH = TransformerConfig(
  encoder_layers=1,
  decoder_layers=1,
  dim=16,
  heads=4,
  ffn_dim=24,
  dropout=0.2,
  max_length=16,
  share_embeddings="none",
  compete=ATTENTION_KINDS,
  competition=SMALL,
)
VALUE = CompetitionConfig(key_dim=6, hidden_dim=8, rule="top_k", inactive="value")
PRE = dataclasses.replace(
  CAH,
  norm="pre",
  positions="learned",
  activation="gelu",
  compete=("encoder_self", "decoder_self"),
  competition=VALUE,
)
# No token stands twice, so that a token's embedding says where an influence comes from.
SOURCE = np.int32([[4, 5, 6, 7, 8, 9], [10, 11, 12, 0, 0, 0]])
TARGET = np.int32([[2, 4, 5, 6, 7], [8, 9, 10, 11, 0]])


def transformer(config: TransformerConfig) -> Transformer:
  return Transformer(config, SOURCE_TYPES, TARGET_TYPES)


@functools.cache
def params(config: TransformerConfig) -> Any:
  """Random parameters; those that two configurations share are equal."""
  tokens = jnp.ones((1, 2), jnp.int32)
  shapes = nn.unbox(jax.eval_shape(transformer(config).init, jax.random.key(0), tokens, tokens))
  flat = flatten_dict(shapes["params"], sep="/")

  def make(path: str, leaf: Any) -> jax.Array:
    seed = sum(ord(letter) * n for n, letter in enumerate(path, 1))
    values = 0.4 * np.random.default_rng(seed).normal(size=leaf.shape)
    return jnp.asarray(values + path.endswith("/scale"), jnp.float32)

  made = {tuple(path.split("/")): make(path, leaf) for path, leaf in flat.items()}
  return unflatten_dict(made)


def apply(
  config: TransformerConfig, params: Any, source: Any = SOURCE, target: Any = TARGET, **kwargs: Any
) -> Any:
  """The model called on arrays of any kind; with `capture` or `edits`, its sites too."""
  call = transformer(config).apply
  function = functools.partial(run, call) if {"capture", "edits"} & kwargs.keys() else call
  return function({"params": params}, jnp.asarray(source), jnp.asarray(target), **kwargs)


def loss(
  config: TransformerConfig, params: Any, source: Any, target: Any, edits: Any = None
) -> tuple[jax.Array, jax.Array]:
  logits, _ = apply(config, params, source, target, edits=edits)
  weights = np.random.default_rng(0).normal(size=logits.shape).astype(np.float32)
  return jnp.mean(weights * jax.nn.log_softmax(logits)), logits


@functools.cache
def gradient(config: TransformerConfig) -> Any:
  """Compiled gradient and logits: (params, source, target) -> (gradient, logits)."""
  return jax.jit(jax.grad(functools.partial(loss, config), has_aux=True))


@functools.cache
def logits_and_gradients(config: TransformerConfig) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  gradients, logits = jax.device_get(gradient(config)(params(config), SOURCE, TARGET))
  return logits, flatten_dict(gradients, sep="/")


def count(config: TransformerConfig) -> int:
  tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
  model = Transformer(config, 8848, 6632)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


# Sizes.


def test_the_recipe_has_39469056_parameters():
  assert count(TransformerConfig()) == 39_469_056


def test_competition_everywhere_makes_it_40708464_which_is_68856_a_module():
  assert count(TransformerConfig(compete=ATTENTION_KINDS)) == 40_708_464
  assert 40_708_464 - 39_469_056 == 18 * 68_856


@pytest.mark.parametrize("place", ATTENTION_KINDS)
def test_each_place_adds_its_own_modules_only(place):
  config = dataclasses.replace(CAH, encoder_layers=2, compete=(place,))
  added = flatten_dict(params(config)).keys() - flatten_dict(params(config.plain())).keys()
  module = "cross_attention" if place == "cross" else "self_attention"
  side = "encoder" if place == "encoder_self" else "decoder"
  assert {path[:3] for path in added} == {
    (f"{side}_{i}", module, "router") for i in range(2 if side == "encoder" else 1)
  }


def test_embeddings_can_be_three_two_or_one():
  config = dataclasses.replace(CAH.plain(), share_embeddings="none")

  def size(shared: str, source: int) -> int:
    model = Transformer(dataclasses.replace(config, share_embeddings=shared), source, 19)
    tokens = jnp.ones((1, 2), jnp.int32)
    init = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)
    return sum(leaf.size for leaf in jax.tree.leaves(init))

  table = 19 * config.dim
  assert size("none", 19) - size("decoder", 19) == table
  assert size("decoder", 19) - size("all", 19) == table
  with pytest.raises(UserError, match=r"share_embeddings is 'all' but .* 23 and 19"):
    size("all", 23)


# Identities.


def test_competition_off_is_the_plain_transformer_bit_for_bit():
  off = CAH.plain()
  never = dataclasses.replace(off, competition=CompetitionConfig())
  one, two = (str(jax.make_jaxpr(gradient(c))(params(c), SOURCE, TARGET)) for c in (off, never))
  assert one == two  # forward and backward are the same program
  assert params(off).keys() == params(never).keys()
  assert not any(routing_parameter(path) for path in flatten_dict(params(off), sep="/"))


@pytest.mark.parametrize(("routing", "tolerance"), [("plain", 1e-6), ("fused", 5e-6)])
def test_competition_at_its_identity_value_is_the_plain_transformer(routing, tolerance):
  competition = dataclasses.replace(SMALL, rescale=True, routing=routing)
  config = dataclasses.replace(CAH, competition=competition)
  sites = [site.replace("weights", "scores") for site in transformer(config).routing_sites()]
  edits = dict.fromkeys(sites, jnp.zeros_like)
  edited = jax.jit(jax.grad(functools.partial(loss, config, edits=edits), has_aux=True))
  gradients, logits = jax.device_get(edited(params(config), SOURCE, TARGET))
  expected, peers = logits_and_gradients(CAH.plain())
  np.testing.assert_allclose(logits, expected, atol=tolerance)
  for path, found in flatten_dict(gradients, sep="/").items():
    if routing_parameter(path):
      np.testing.assert_array_equal(found, 0)
    else:
      np.testing.assert_allclose(found, peers[path], atol=tolerance)


def test_a_model_with_one_head_ignores_its_router_bit_for_bit():
  one = dataclasses.replace(CAH, heads=1)
  logits, gradients = logits_and_gradients(one)
  routing = {path: leaf for path, leaf in gradients.items() if routing_parameter(path)}
  assert len(routing) == 3 * 5
  for leaf in routing.values():
    np.testing.assert_array_equal(leaf, 0)
  flat = flatten_dict(params(one), sep="/")
  other = {path: 3 * leaf if routing_parameter(path) else leaf for path, leaf in flat.items()}
  found = gradient(one)(unflatten_dict(other, sep="/"), SOURCE, TARGET)
  for leaf, peer in zip(jax.tree.leaves(found[0]), gradients.values(), strict=True):
    np.testing.assert_array_equal(leaf, peer)
  np.testing.assert_array_equal(found[1], logits)
  plain, _ = logits_and_gradients(one.plain())
  np.testing.assert_array_equal(logits, plain)


def test_competition_makes_a_difference_and_every_parameter_has_a_gradient():
  logits, gradients = logits_and_gradients(CAH)
  assert np.abs(logits - logits_and_gradients(CAH.plain())[0]).max() > 0.01
  assert [path for path, leaf in gradients.items() if not leaf.any()] == []


def test_rematerialisation_changes_neither_values_nor_gradients():
  config = dataclasses.replace(CAH, remat=True)
  logits, gradients = logits_and_gradients(config)
  expected, peers = logits_and_gradients(CAH)
  np.testing.assert_allclose(logits, expected, atol=1e-6)
  for path, peer in peers.items():
    np.testing.assert_allclose(gradients[path], peer, atol=1e-6)
  program = str(jax.make_jaxpr(functools.partial(apply, config))(params(config)))
  assert len(re.findall("= (?:remat|checkpoint)", program)) == 2


# Types.


def test_bfloat16_keeps_parameters_logits_and_router_scores_in_float32():
  config = dataclasses.replace(CAH, dtype="bfloat16")
  tokens = jnp.ones((1, 2), jnp.int32)
  made = jax.eval_shape(transformer(config).init, jax.random.key(0), tokens, tokens)
  assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype("float32")}
  logits, sites = jax.eval_shape(lambda p: apply(config, p, capture=None), params(config))
  assert logits.dtype == jnp.float32
  for name, value in sites.items():
    exact = "/router/" in name or name.endswith(("attention", "logits"))
    assert value.dtype == (jnp.float32 if exact else jnp.bfloat16), name


def test_bfloat16_is_near_float32():
  config = dataclasses.replace(CAH, dtype="bfloat16")
  logits = np.asarray(jax.jit(functools.partial(apply, config))(params(config)))
  expected, _ = logits_and_gradients(CAH)
  assert np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()


# Who can influence what.


@pytest.mark.parametrize(
  ("config", "train"),
  [(CAH, False), (CAH, True), (PRE, False)],
  ids=["post_norm", "training", "pre_norm_top_k"],
)
def test_no_prediction_depends_on_a_later_token_on_padding_or_on_another_example(config, train):
  p = params(config)

  @jax.jit
  def influence(tables: Any, example: Any, position: Any) -> Any:
    def prediction(tables: Any) -> jax.Array:
      changed = {name: {"table": table} for name, table in tables.items()}
      rngs = {"dropout": jax.random.key(0)}
      logits = apply(config, {**p, **changed}, deterministic=not train, rngs=rngs)
      return jnp.sum(logits[example, position] * np.arange(float(TARGET_TYPES)))

    gradients = jax.grad(prediction)(tables)
    return {name: jnp.any(gradient != 0, axis=-1) for name, gradient in gradients.items()}

  tables = {name: p[name]["table"] for name in ("encoder_embedding", "decoder_embedding")}
  for example, position in ((0, 0), (0, 2), (0, 4), (1, 1), (1, 3)):
    reached = jax.device_get(influence(tables, example, position))
    seen = set(SOURCE[example]) - {0}
    assert set(np.flatnonzero(reached["encoder_embedding"])) == seen
    past = set(TARGET[example, : position + 1])
    assert set(np.flatnonzero(reached["decoder_embedding"])) == past


def test_predictions_are_the_same_in_a_wider_batch_with_other_examples():
  wide_source, wide_target = np.zeros((3, 9), np.int32), np.zeros((3, 8), np.int32)
  wide_source[2, :3], wide_target[2, :4] = SOURCE[1, :3], TARGET[1, :4]
  wide_source[0, :9], wide_target[0, :8] = 21, 3  # and row 1 is a filler, all padding
  wide = np.asarray(jax.jit(functools.partial(apply, CAH))(params(CAH), wide_source, wide_target))
  expected, _ = logits_and_gradients(CAH)
  # A product over more rows is blocked otherwise, so sums round in another order.
  np.testing.assert_allclose(wide[2, :4], expected[1, :4], rtol=2e-6, atol=2e-6)
  assert np.isfinite(wide).all()


def test_a_batch_of_padding_alone_has_finite_gradients():
  found = gradient(CAH)(params(CAH), 0 * SOURCE, 0 * TARGET)
  for leaf in jax.tree.leaves(found):
    assert np.isfinite(leaf).all()


# Decoding step by step.


@functools.cache
def decoder(config: TransformerConfig) -> Any:
  """Compiled prefill and step for three beams, and the uncached model with its routing."""
  model, variables = transformer(config), {"params": params(config)}
  sites = model.config.routing_sites("decoder")
  prefill = jax.jit(
    lambda source: model.apply(variables, source, beams=3, length=6, routing=True, method="prefill")
  )
  step = jax.jit(lambda cache, tokens: model.apply(variables, cache, tokens, method="step"))
  whole = jax.jit(functools.partial(apply, config, params(config), capture=sites))
  return prefill, step, whole


@pytest.mark.parametrize("config", [CAH, PRE], ids=["post_norm", "pre_norm_top_k_value"])
def test_decoding_with_a_cache_equals_the_model_without_while_beams_change_places(config):
  prefill, step, whole = decoder(config)
  random, beams, steps = np.random.default_rng(0), 3, 5
  cache = prefill(SOURCE)
  past = np.zeros((2, beams, 0), np.int32)
  for t in range(steps):
    parents = random.integers(beams, size=(2, beams)).astype(np.int32)
    if t:
      cache = permute_cache(cache, parents)
      past = np.take_along_axis(past, parents[..., None], axis=1)
    tokens = random.integers(2, TARGET_TYPES, size=(2, beams)).astype(np.int32)
    past = np.concatenate([past, tokens[..., None]], axis=2)
    logits, cache = step(cache, tokens)
    padded = np.zeros((2 * beams, steps), np.int32)
    padded[:, : t + 1] = past.reshape(-1, t + 1)
    expected, sites = whole(np.repeat(SOURCE, beams, axis=0), padded)
    expected = np.asarray(expected)[:, t].reshape(2, beams, -1)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert set(sites) == set(cache["routing"])
    for site, weights in sites.items():
      kept = np.asarray(cache["routing"][site])[:, :, : t + 1].reshape(2 * beams, t + 1, -1)
      np.testing.assert_allclose(kept, np.asarray(weights)[:, : t + 1], atol=1e-5)


def test_beams_share_the_memory():
  cache = jax.eval_shape(decoder(CAH)[0], SOURCE)
  for layer in cache["layers"]:
    for leaf in jax.tree.leaves(layer["cross"]):
      assert leaf.shape[:2] == (2, 1)


# Configuration.


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"heads": 3}, ["heads is 3", "divide", "dim = 16"]),
    ({"encoder_layers": 0}, ["encoder_layers is 0", "at least 1"]),
    ({"dim": 15, "heads": 3}, ["dim is 15", "even", "learned"]),
    ({"dropout": 1.0}, ["dropout is 1.0", "below 1"]),
    ({"competition": VALUE}, ["'value'", "cross", "null"]),
    ({"competition": CompetitionConfig(rule="top_k", keep=5)}, ["keep is 5", "4 heads"]),
    ({"scale_logits": False, "attention_form": "differential"}, ["scale_logits", "differential"]),
    ({"scale_logits": False, "positions": "relative"}, ["scale_logits", "'relative'"]),
  ],
)
def test_a_bad_configuration_names_field_value_and_rule(fields, words):
  with pytest.raises(UserError) as error:
    dataclasses.replace(CAH, **fields)
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("labelled", [False, True])
def test_texts_beyond_the_positions_of_a_model_are_refused(labelled):
  fields: dict[str, Any] = {"positions": "relative", "random_positions": 32} if labelled else {}
  module = transformer(dataclasses.replace(CAH, **fields))
  tokens, many = jnp.ones((1, 2), jnp.int32), jnp.ones((1, 17), jnp.int32)
  for given, what in (((many, tokens), "A source"), ((tokens, many), "A target")):
    with pytest.raises(UserError, match=f"{what} has 17 tokens, .* positions for 16"):
      jax.eval_shape(module.init, jax.random.key(0), *given)


def test_a_router_that_cannot_learn_is_warned_of():
  lone = CompetitionConfig(rule="top_k", keep=1)
  assert CAH.warnings() == PRE.warnings() == CAH.plain().warnings() == []
  (line,) = dataclasses.replace(CAH, competition=lone).warnings()
  assert "weight is always 1" in line
  assert "learn nothing" in line
  assert dataclasses.replace(CAH, heads=2, competition=CompetitionConfig(rule="top_k")).warnings()
  assert dataclasses.replace(CAH, heads=1).warnings()
  assert dataclasses.replace(CAH, heads=1).plain().warnings() == []
