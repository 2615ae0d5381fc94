"""The encoder: what depends on what, and its sites."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.layers.embedding import sinusoids
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.encoder import Encoder, EncoderConfig

VOCAB, PAD = 13, 1
CONFIG = EncoderConfig(
  encoder_layers=2,
  dim=8,
  heads=2,
  ffn_dim=12,
  max_length=8,
  dropout=0.0,
  attention_dropout=0.0,
  compete=("encoder_self",),
  competition=CompetitionConfig(key_dim=3, hidden_dim=4),
  expert_layers=("encoder_1",),
  experts=ExpertsConfig(count=3, competition=CompetitionConfig(key_dim=3, hidden_dim=4)),
)
TOKENS = np.array([[2, 4, 5, 6, 3, PAD, PAD], [2, 7, 8, 9, 10, 11, 3]])
ATTENTION = ("attention", "heads", "heads_scaled")
ROUTER = ("router/signatures", "router/scores", "router/weights")
NAMES = {
  *(f"encoder/layer_{i}/self/{name}" for i in (0, 1) for name in ATTENTION + ROUTER),
  *(f"encoder/layer_{i}/output" for i in (0, 1)),
  *(f"encoder/layer_1/ffn/{name}" for name in (*ROUTER, "hidden", "experts", "experts_scaled")),
  "encoder/layer_0/ffn/hidden",
  "encoder/output",
  "logits",
}


def model(config: EncoderConfig = CONFIG) -> Encoder:
  return Encoder(config, VOCAB, PAD)


@functools.cache
def variables(config: EncoderConfig = CONFIG):
  shapes = nn.unbox(jax.eval_shape(model(config).init, jax.random.key(0), TOKENS))
  leaves, tree = jax.tree.flatten(shapes)
  random = np.random.default_rng(0)
  made = [np.float32(0.4 * random.normal(size=leaf.shape)) for leaf in leaves]
  return jax.tree.unflatten(tree, made)


@functools.cache
def applied(config: EncoderConfig = CONFIG):
  call = functools.partial(jax.jit(model(config).apply), variables(config))
  return lambda *args, **kwargs: np.asarray(call(*args, **kwargs))


def test_no_prediction_depends_on_padding():
  logits = applied()(TOKENS)
  without = applied()(TOKENS[:1, :5])
  np.testing.assert_allclose(without[0], logits[0, :5], atol=1e-6)

  @jax.jit
  @jax.grad
  def slope(table, params, tokens, chosen):
    params = {**params, "embedding": {"table": table}}
    found = run(model().apply, {"params": params}, tokens, capture=["encoder/output"])[1]
    return jnp.sum(jnp.where(chosen[:, None], jnp.square(found["encoder/output"][0]), 0))

  params = variables()["params"]
  table = params["embedding"]["table"]
  real = np.asarray(slope(table, params, TOKENS, np.arange(7) < 5))
  np.testing.assert_array_equal(real[PAD], 0)
  assert np.abs(real[4]).max() > 0
  # Padding itself has activations, which nobody reads.
  padding = np.asarray(slope(table, params, TOKENS, np.arange(7) >= 5))
  assert np.abs(padding[PAD]).max() > 0


def test_every_prediction_depends_on_earlier_and_later_tokens():
  logits = applied()(TOKENS)
  for place in range(7):
    changed = TOKENS.copy()
    changed[1, place] = 12
    other = applied()(changed)
    assert (np.abs(other - logits)[1].max(axis=-1) > 1e-6).all()
    np.testing.assert_array_equal(other[0], logits[0])


def test_chosen_positions_have_the_logits_that_they_have_among_all():
  positions = np.array([[3, 1], [6, 0]])
  chosen = applied()(TOKENS, positions=positions)
  expected = np.take_along_axis(applied()(TOKENS), positions[..., None], 1)
  np.testing.assert_allclose(chosen, expected, atol=1e-6)


def test_its_sites_are_those_of_the_translation_encoder_and_logits():
  call = functools.partial(run, model().apply, capture=None)
  logits, captured = jax.tree.map(np.asarray, jax.jit(call)(variables(), TOKENS))
  assert set(captured) == NAMES
  assert captured["logits"].shape == (2, 7, VOCAB)
  np.testing.assert_array_equal(captured["logits"], logits)
  weights = list(model().routing_sites())
  assert weights == [
    "encoder/layer_0/self/router/weights",
    "encoder/layer_1/self/router/weights",
    "encoder/layer_1/ffn/router/weights",
  ]
  for site in weights:
    np.testing.assert_allclose(captured[site].sum(-1), 1, atol=1e-6)


def test_one_head_and_one_expert_are_the_plain_model_bit_for_bit():
  one = dataclasses.replace(CONFIG, heads=1, experts=ExpertsConfig(count=1))
  plain = dataclasses.replace(CONFIG, heads=1).plain()
  params = variables(plain)["params"]
  competing = jax.tree.map(lambda leaf: leaf, variables(one))["params"]

  def put(mine, theirs):
    """The competing model's parameters, with the plain one's where both have them."""
    return {
      name: put(value, theirs[name])
      if isinstance(value, dict)
      else theirs[name].reshape(value.shape)
      for name, value in mine.items()
      if name in theirs
    } | {name: value for name, value in mine.items() if name not in theirs}

  found = jax.jit(model(one).apply)({"params": put(competing, params)}, TOKENS)
  np.testing.assert_array_equal(found, jax.jit(model(plain).apply)({"params": params}, TOKENS))


def test_recomputed_activations_give_the_same_gradients():
  @functools.partial(jax.jit, static_argnums=2)
  @jax.grad
  def slopes(params, tokens, config):
    return jnp.sum(jnp.square(model(config).apply(params, tokens)))

  plain = slopes(variables(), TOKENS, CONFIG)
  again = slopes(variables(), TOKENS, dataclasses.replace(CONFIG, remat=True))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), plain, again)


def test_normalising_first_adds_a_last_norm():
  config = dataclasses.replace(CONFIG, norm="pre").plain()
  assert "output_norm" in variables(config)["params"]
  assert "output_norm" not in variables()["params"]
  assert np.isfinite(applied(config)(TOKENS)).all()


def test_a_sequence_without_positions_for_all_its_tokens_is_refused():
  with pytest.raises(UserError, match="has 9 tokens, but the model has positions for 8"):
    applied()(np.ones((1, 9), int))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"compete": ("cross",)}, "model.compete is 'cross'"),
    ({"expert_layers": ("encoder_2",)}, "model.expert_layers is 'encoder_2'"),
    ({"expert_layers": ("decoder",)}, "model.expert_layers is 'decoder'"),
    ({"norm_epsilon": 0.0}, "model.norm_epsilon is 0"),
    ({"heads": 3}, "does not divide"),
    ({"encoder_layers": 0}, "model.encoder_layers is 0"),
  ],
)
def test_what_an_encoder_cannot_have_is_refused_by_name(fields, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(CONFIG, **fields)


def test_learned_positions_can_start_as_sinusoids_of_the_usual_size():
  def fresh(config):
    def positions(tokens):
      params = nn.unbox(model(config).init(jax.random.key(0), tokens))["params"]
      return params["positions"]["table"]

    return np.asarray(jax.jit(positions)(TOKENS))

  table = fresh(dataclasses.replace(CONFIG, sinusoids_first=True))
  np.testing.assert_allclose(table, 0.02 * np.sqrt(2) * sinusoids(*table.shape), rtol=1e-5)
  assert np.sqrt(np.mean(table**2)) == pytest.approx(0.02)
  assert np.std(fresh(CONFIG)) == pytest.approx(0.02, rel=0.3)
