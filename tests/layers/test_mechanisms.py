"""Layers of independent mechanisms: the published algorithm, who reads what, cached decoding."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core import intermediates
from compmod_jax.core.errors import UserError
from compmod_jax.layers.attention import AttentionMask
from compmod_jax.layers.block import Block, Inside
from compmod_jax.layers.context import Context
from compmod_jax.layers.mechanisms import MechanismsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.transformer import Transformer, TransformerConfig

BATCH, TIME, DIM, HEADS, FFN, COUNT = 2, 5, 16, 4, 24, 2
MECHANISMS = MechanismsConfig(count=COUNT, exchange_heads=2, exchange_dim=3)
CONFIG = TransformerConfig(
  encoder_layers=2,
  decoder_layers=2,
  dim=DIM,
  heads=HEADS,
  ffn_dim=FFN,
  dropout=0.0,
  max_length=16,
  mechanism_layers=("encoder_1", "decoder"),
  mechanisms=MECHANISMS,
  competition=CompetitionConfig(key_dim=3, hidden_dim=5),
)
X = np.random.default_rng(0).normal(size=(BATCH, TIME, DIM)).astype(np.float32)
VALID = jnp.asarray([[True] * 5, [True] * 3 + [False] * 2])
CTX = Context(mask=AttentionMask(valid=VALID))


def drawn(shapes):
  """Parameters with a spread of 0.5, biases and scales too."""
  leaves, tree = jax.tree.flatten(shapes)
  rng = np.random.default_rng(1)
  return jax.tree.unflatten(tree, [np.float32(rng.normal(0, 0.5, leaf.shape)) for leaf in leaves])


@functools.cache
def block(norm="post", competition=True):
  """A block of mechanisms, and its parameters."""
  own = dataclasses.replace(MECHANISMS, competition=competition)
  made = Block(CONFIG, norm, "encoder_self", inside=Inside(mechanisms=own))
  return made, drawn(nn.unbox(jax.eval_shape(made.init, jax.random.key(0), X)))


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def by_hand(params, x, valid, competition):
  """Algorithm 4.6 of Kolios 2023, mechanism by mechanism and position by position."""
  p = jax.tree.map(np.asarray, params["params"])
  size, heads = DIM // COUNT, HEADS // COUNT

  def part(m):
    return slice(m * size, (m + 1) * size)

  def norm(x, scale):
    out = np.empty_like(x)
    for m in range(COUNT):
      one = x[:, part(m)]
      mean, spread = one.mean(-1, keepdims=True), one.std(-1, keepdims=True)
      out[:, part(m)] = (one - mean) / np.sqrt(spread**2 + CONFIG.norm_epsilon)
    return out * scale["scale"]["scale"] + scale["scale"]["bias"]

  def grouped(x, m, layer, features):
    inner = features // COUNT
    out = x @ layer["kernel"][m]
    return out + layer["bias"][m * inner : (m + 1) * inner]

  weights = np.ones((TIME, COUNT))
  if competition:
    scores = np.stack(
      [
        x[:, part(m)] @ p["compete"]["signatures"][m] + p["compete"]["bias"][m]
        for m in range(COUNT)
      ],
      axis=-1,
    )
    weights = softmax(scores)
  attended = np.zeros_like(x)
  into, out = p["self_attention"]["query_key_value"], p["self_attention"]["output"]
  for m in range(COUNT):
    for h in range(m * heads, (m + 1) * heads):
      q, k, v = (x[:, part(m)] @ into["kernel"][:, h, i] + into["bias"][h, i] for i in range(3))
      scores = np.where(valid[None], q @ k.T / np.sqrt(DIM // HEADS), -np.inf)
      attended[:, part(m)] += softmax(scores) @ v @ out["kernel"][h]
    attended[:, part(m)] += out["bias"][part(m)]
    attended[:, part(m)] *= weights[:, m : m + 1]
  h = norm(x + attended, p["self_residual"])
  width = MECHANISMS.exchange_heads * MECHANISMS.exchange_dim
  q, k, v = (
    np.stack([grouped(h[:, part(m)], m, p["exchange"][name], COUNT * width) for m in range(COUNT)])
    for name in ("query", "key", "value")
  )
  read = np.zeros_like(h)
  for m in range(COUNT):
    for t in range(TIME):
      made = []
      for e in range(MECHANISMS.exchange_heads):
        at = slice(e * MECHANISMS.exchange_dim, (e + 1) * MECHANISMS.exchange_dim)
        scores = k[:, t, at] @ q[m, t, at] / np.sqrt(MECHANISMS.exchange_dim)
        made.append(softmax(scores) @ v[:, t, at])
      read[t, part(m)] = grouped(np.concatenate(made), m, p["exchange"]["output"], DIM)
  h = norm(h + read, p["exchange_residual"])
  ffn = np.zeros_like(h)
  for m in range(COUNT):
    hidden = np.maximum(grouped(h[:, part(m)], m, p["ffn"]["up"], FFN), 0)
    ffn[:, part(m)] = grouped(hidden, m, p["ffn"]["down"], DIM)
  return norm(h + ffn, p["ffn_residual"])


@pytest.mark.parametrize("competition", [True, False])
def test_a_layer_computes_the_published_algorithm(competition):
  layer, params = block(competition=competition)
  found, _ = jax.jit(lambda params, x: layer.apply(params, x, ctx=CTX))(params, X)
  for n in range(BATCH):
    wanted = by_hand(params, X[n], np.asarray(VALID)[n], competition)
    np.testing.assert_allclose(found[n], wanted, atol=2e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_exchange_and_competition_a_mechanism_reads_its_slice_alone(norm):
  layer, params = block(norm, competition=False)
  apart = {"mechanisms/attention": lambda a: jnp.broadcast_to(jnp.eye(COUNT), a.shape)}

  @functools.partial(jax.jit, static_argnames="alone")
  def compiled(params, x, *, alone):
    edits = apart if alone else {}
    (made, _), _ = intermediates.run(layer.apply, params, x, ctx=CTX, edits=edits)
    return made.reshape(BATCH, TIME, COUNT, -1)

  def out(x, *, alone):
    return np.asarray(compiled(params, x, alone=alone))

  moved = np.concatenate([X[..., : DIM // COUNT] + 1, X[..., DIM // COUNT :]], axis=-1)
  moved_alone = out(moved, alone=True) - out(X, alone=True)
  assert np.all(moved_alone[:, :, 1] == 0)
  assert np.any(moved_alone[:, :, 0] != 0)
  assert np.any(out(moved, alone=False)[:, :, 1] != out(X, alone=False)[:, :, 1])


def test_weights_sum_to_one_and_a_mechanism_without_weight_does_not_attend():
  layer, params = block()
  zero = {"mechanisms/router/weights": lambda w: w.at[..., 0].set(0)}
  names = ("mechanisms/router/weights", "self/heads")

  def called(**asked):
    return jax.jit(functools.partial(intermediates.run, layer.apply, ctx=CTX, **asked))(params, X)

  _, found = called(capture=names)
  np.testing.assert_allclose(np.sum(found[names[0]], axis=-1), 1, rtol=1e-6)

  def stream(edits):
    silent = {**edits, "self/heads": lambda h: h.at[:, :, : HEADS // COUNT].set(99.0)}
    return [np.asarray(called(edits=one)[0][0]) for one in (edits, silent)]

  np.testing.assert_array_equal(*stream(zero))
  assert np.any(np.subtract(*stream({})) != 0)


SOURCE = np.array([[4, 5, 6, 7, 8, 9], [10, 11, 12, 0, 0, 0]])
TARGET = np.array([[2, 4, 5, 6, 7], [8, 9, 10, 11, 3]])


@pytest.mark.parametrize("options", [{}, {"norm": "pre", "compete": ("decoder_self", "cross")}])
def test_cached_decoding_equals_the_whole_pass(options):
  model = Transformer(dataclasses.replace(CONFIG, **options), 19, 19)
  params = drawn(nn.unbox(jax.eval_shape(model.init, jax.random.key(0), SOURCE, TARGET)))
  whole = np.asarray(jax.jit(model.apply)(params, SOURCE, TARGET))
  prefill = functools.partial(model.apply, beams=1, length=5, method="prefill")
  step = jax.jit(functools.partial(model.apply, method="step"))
  cache = jax.jit(prefill)(params, SOURCE)
  for t in range(5):
    logits, cache = step(params, cache, TARGET[:, t : t + 1])
    np.testing.assert_allclose(np.asarray(logits)[:, 0], whole[:, t], atol=5e-4)


TEXT = {"dim": DIM, "heads": HEADS, "ffn_dim": FFN, "max_length": 16, "mechanisms": MECHANISMS}


def test_encoders_and_decoders_of_text_have_them_too():
  encoder = EncoderConfig(encoder_layers=2, mechanism_layers=("encoder_1",), **TEXT)
  assert encoder.routing_sites() == ("encoder/layer_1/mechanisms/router/weights",)
  decoder = DecoderConfig(decoder_layers=2, mechanism_layers=("decoder",), **TEXT)
  assert [decoder.units(site) for site in decoder.routing_sites()] == [COUNT, COUNT]
  assert decoder.plain().mechanism_layers == ()
  assert "2 mechanisms in the decoder" in decoder.describe()


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"mechanism_layers": ("encoder_7",)}, r"model\.mechanism_layers"),
    ({"mechanisms": MechanismsConfig(count=3)}, r"does not divide model\.dim = 16"),
    ({"expert_layers": ("decoder_1",)}, "both have decoder_1"),
  ],
)
def test_what_cannot_be_is_refused(options, words):
  with pytest.raises(UserError, match=words):
    dataclasses.replace(CONFIG, **options)


def test_one_mechanism_is_none():
  with pytest.raises(UserError, match=r"mechanisms\.count is 1"):
    MechanismsConfig(count=1)
