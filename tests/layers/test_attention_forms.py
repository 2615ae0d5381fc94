"""Self-attention that is not a softmax over keys, against loops over single pairs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.intermediates import run
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.attention_forms import geometric_weights
from compmod_jax.layers.context import AttentionMask, Context

BATCH, TIME, HEADS, WIDTH = 2, 6, 2, 4
DIM = HEADS * WIDTH
RANDOM = np.random.default_rng(0)
INPUTS = jax.device_put(RANDOM.normal(size=(BATCH, TIME, DIM)).astype(np.float32))
PADDED = np.arange(TIME) < np.array([[TIME], [4]])
MASKS = {
  "both sides": AttentionMask(valid=jax.device_put(PADDED)),
  "causal": AttentionMask(causal=True),
}
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def allowed(mask: AttentionMask) -> np.ndarray:
  return np.broadcast_to(np.asarray(mask.dense(TIME, TIME)), (BATCH, 1, TIME, TIME))[:, 0]


def projections(params: Any) -> np.ndarray:
  """Queries, keys and values [3, batch, time, heads, head_dim], in float64."""
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"]["query_key_value"])
  found = np.einsum("btd,dhpk->pbthk", np.asarray(INPUTS, np.float64), p["kernel"])
  return found + np.moveaxis(p["bias"], 1, 0)[:, None, None]


def sites(form: Any, mask: AttentionMask, **fields: Any) -> tuple[Any, dict[str, np.ndarray]]:
  """Parameters of an attention module, and its activations."""
  module = Attention(DIM, HEADS, form=form, **fields)
  params = jax.device_put(drawn(module.init, INPUTS, spread=0.5))
  ctx = Context(mask=mask)
  call = jax.jit(lambda p: run(module.apply, p, INPUTS, ctx=ctx, capture=None)[1])
  return params, jax.device_get(call(params))


def by_distance(probability: np.ndarray, read: np.ndarray, i: int) -> np.ndarray:
  """Weights of all keys: one after the other, the nearest first and the right one of two."""
  weights, passed = np.zeros(len(probability)), 1.0
  for distance in range(1, len(probability)):
    for j in (i + distance, i - distance):
      if 0 <= j < len(probability) and read[j]:
        weights[j] = passed * probability[j]
        passed *= 1 - probability[j]
  return weights


@masks
def test_geometric_weights_are_those_of_the_walk_by_distance(mask):
  logits = RANDOM.normal(0, 3, (BATCH, HEADS, TIME, TIME)).astype(np.float32)
  numbers, read = np.arange(TIME), allowed(mask) & ~np.eye(TIME, dtype=bool)
  to_left = jnp.asarray(numbers < numbers[:, None])[None, None]
  given = jnp.asarray(logits), jnp.asarray(read[:, None]), to_left
  found = [geometric_weights(*given, later=True)]
  if mask.causal:
    found.append(geometric_weights(*given, later=False))
  for b, h, i in np.ndindex(BATCH, HEADS, TIME):
    expected = by_distance(1 / (1 + np.exp(-logits[b, h, i].astype(np.float64))), read[b, i], i)
    for weights in found:
      np.testing.assert_allclose(weights[b, h, i], expected, rtol=2e-5, atol=1e-7)


@masks
def test_geometric_attention_is_that_of_its_equations(mask):
  params, found = sites("geometric", mask)
  (query, key, value), p = projections(params), params["params"]["read"]
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
  direction = np.einsum("btm,mhp->bthp", np.asarray(INPUTS), p["kernel"]) + p["bias"]
  read = allowed(mask) & ~np.eye(TIME, dtype=bool)
  for b, h, i in np.ndindex(BATCH, HEADS, TIME):
    side = np.where(np.arange(TIME) < i, *direction[b, i, h])
    logits = p["scale"][h] * (key[b, :, h] @ query[b, i, h]) + side + p["shift"][h]
    weights = by_distance(1 / (1 + np.exp(-logits)), read[b, i], i)
    np.testing.assert_allclose(found["attention"][b, h, i], weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["heads"][b, i, h], weights @ value[b, :, h], atol=1e-5)


def test_certain_probabilities_have_finite_gradients():
  """A key that is read for certain leaves nothing to those behind it."""
  logits = jnp.full((1, 1, 5, 5), 200.0)
  numbers = np.arange(5)
  read, to_left = (
    jnp.asarray(one)[None, None] for one in (~np.eye(5, dtype=bool), numbers < numbers[:, None])
  )

  def total(logits: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(geometric_weights(logits, read, to_left, later=True)))

  weights = np.asarray(geometric_weights(logits, read, to_left, later=True))[0, 0]
  np.testing.assert_array_equal(weights[2], [0, 0, 0, 1, 0])
  np.testing.assert_array_equal(weights[4], [0, 0, 0, 1, 0])
  assert np.isfinite(jax.grad(total)(logits)).all()


@masks
def test_a_hypernetwork_is_configured_by_the_heads_of_each_pair(mask):
  params, found = sites("hyla", mask)
  query, key, value = projections(params)
  read, shape = allowed(mask), (BATCH, TIME, TIME)
  codes, heads = np.zeros((BATCH, HEADS, TIME, TIME)), np.zeros((BATCH, TIME, HEADS, WIDTH))
  for b, i, j in np.ndindex(shape):
    if read[b, i, j]:
      logits = np.array([query[b, i, h] @ key[b, j, h] for h in range(HEADS)]) / np.sqrt(WIDTH)
      codes[b, :, i, j] = logits / np.sqrt(np.mean(logits**2) + 1e-6)
      hidden = np.maximum(sum(codes[b, h, i, j] * value[b, j, h] for h in range(HEADS)), 0)
      heads[b, i] += codes[b, :, i, j][:, None] * hidden
  np.testing.assert_allclose(found["head_code"], codes, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(found["heads"], heads, rtol=1e-4, atol=1e-4)


@masks
def test_differential_attention_is_the_difference_of_two_softmaxes(mask):
  """In the layer of number 0, where the second one counts 0.2 at first."""
  params, found = sites("differential", mask)
  (query, key, value), p = projections(params), params["params"]["read"]
  (a, b), (c, d) = np.asarray(p["lambda"], np.float64)
  share, read = np.exp(a @ b) - np.exp(c @ d) + 0.2, allowed(mask)
  for b, h, i in np.ndindex(BATCH, HEADS, TIME):
    each = []
    for half in (slice(None, WIDTH // 2), slice(WIDTH // 2, None)):
      logits = key[b, :, h, half] @ query[b, i, h, half] / np.sqrt(WIDTH / 2)
      powers = np.exp(logits) * read[b, i]
      each.append(powers / powers.sum())
    weights = each[0] - share * each[1]
    np.testing.assert_allclose(found["attention"][b, h, i], weights, rtol=1e-4, atol=1e-5)
    head = weights @ value[b, :, h]
    expected = 0.8 * head / np.sqrt(np.mean(head**2) + 1e-5) * np.asarray(p["norm"]["scale"])
    np.testing.assert_allclose(found["heads"][b, i, h], expected, rtol=1e-3, atol=1e-4)
