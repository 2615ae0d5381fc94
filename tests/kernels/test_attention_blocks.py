"""Attention of a few heads of one example at a time has the values and gradients of the whole."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core import sharding
from compmod_jax.core.rounding import rounded
from compmod_jax.kernels.attention import ProbabilityDropout, blocks
from compmod_jax.kernels.attention.distances import DistanceBias
from compmod_jax.layers import attention
from compmod_jax.layers.basic import Dropout
from compmod_jax.layers.context import AttentionMask

BATCH, QUERIES, KEYS, HEADS, WIDTH = 3, 6, 5, 4, 8


def numbers(*shape, seed=0, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rows(dtype=jnp.float32, batch=BATCH, queries=QUERIES, keys=KEYS):
  return (
    numbers(batch, queries, HEADS, WIDTH, dtype=dtype),
    *(numbers(batch, keys, HEADS, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2)),
  )


def allowed(*shape, seed=5):
  return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.6).at[..., 0].set(True)


def whole(query, key, value, bias=None, mask=None, dropout=None):
  if dropout is None:
    return jax.nn.dot_product_attention(query, key, value, bias, mask)
  scores = jnp.einsum("bthd,bshd->bhts", query, key) / np.sqrt(np.float32(query.shape[-1]))
  scores = scores if bias is None else scores + bias
  scores = scores if mask is None else jnp.where(mask, scores, -1e30)
  keep = dropout.keep(*scores.shape[2:])
  weights = jnp.where(keep, jax.nn.softmax(scores) * dropout.scale, 0.0)
  return jnp.einsum("bhts,bshd->bthd", weights, value)


def value_and_gradients(function, rows, bias, *rest):
  def value(rows, bias):
    return jnp.sum(jnp.sin(function(*rows, bias, *rest).astype(jnp.float32)))

  return jax.jit(jax.value_and_grad(value, (0, 1) if bias is not None else 0))(rows, bias)


def agree(ours, theirs, tolerance=2e-5):
  for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    one, other = (np.asarray(leaf, np.float32) for leaf in (one, other))
    np.testing.assert_allclose(one, other, atol=tolerance * max(1.0, np.abs(other).max()))


DROPOUT = ProbabilityDropout.of(jax.random.key(7), 0.3, BATCH, HEADS)
CASES = {
  "plain": (None, None, None),
  "bias": (numbers(1, HEADS, QUERIES, KEYS, seed=3), None, None),
  "bias of examples": (numbers(BATCH, HEADS, QUERIES, KEYS, seed=3), None, None),
  "mask": (None, allowed(1, 1, QUERIES, KEYS), None),
  "mask of examples": (None, allowed(BATCH, 1, 1, KEYS), None),
  "mask of heads": (None, allowed(1, HEADS, QUERIES, KEYS), None),
  "all": (
    numbers(1, HEADS, QUERIES, KEYS, seed=3),
    allowed(BATCH, HEADS, QUERIES, KEYS),
    DROPOUT,
  ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [1, 2 * QUERIES * KEYS], ids=["head", "two_heads"])
def test_values_and_gradients_are_those_of_the_whole_operation(case, block, monkeypatch):
  monkeypatch.setattr(blocks, "_BLOCK", block)
  ours = value_and_gradients(blocks.attention_in_blocks, rows(), *CASES[case])
  agree(ours, value_and_gradients(whole, rows(), *CASES[case]))


CAUSAL = jnp.tril(jnp.ones((QUERIES, QUERIES), bool))[None, None]
CAUSAL_CASES = {
  "plain": (None, CAUSAL, None),
  "bias": (numbers(1, HEADS, QUERIES, QUERIES, seed=3), CAUSAL, None),
  "bias of examples": (numbers(BATCH, HEADS, QUERIES, QUERIES, seed=3), CAUSAL, None),
  "all": (
    numbers(1, HEADS, QUERIES, QUERIES, seed=3),
    CAUSAL & allowed(BATCH, HEADS, QUERIES, QUERIES),
    DROPOUT,
  ),
}


@pytest.mark.parametrize("case", CAUSAL_CASES)
@pytest.mark.parametrize("most", [1, 3, 4], ids=["one_part", "three_parts", "unequal_parts"])
def test_parts_of_causal_attention_have_the_values_and_gradients_of_the_whole(
  case, most, monkeypatch
):
  monkeypatch.setattr(blocks, "_QUERIES", 1)
  monkeypatch.setattr(blocks, "_PARTS", most)
  in_parts = functools.partial(blocks.attention_in_blocks, causal=True)
  given = rows(keys=QUERIES)
  ours = value_and_gradients(in_parts, given, *CAUSAL_CASES[case])
  agree(ours, value_and_gradients(whole, given, *CAUSAL_CASES[case]))


def test_parts_of_causal_attention_leave_out_what_is_hidden(monkeypatch):
  monkeypatch.setattr(blocks, "_QUERIES", 1)
  given = rows(queries=16, keys=16)
  mask = jnp.tril(jnp.ones((16, 16), bool))[None, None]

  def operations(causal):
    run = jax.jit(functools.partial(blocks.attention_in_blocks, causal=causal))
    lowered = run.lower(*given, None, mask)
    return lowered.compile().cost_analysis()["flops"]

  assert operations(True) < 0.75 * operations(False)


DISTANCES = DistanceBias(numbers(HEADS, 2 * QUERIES - 1, seed=3))


@pytest.mark.parametrize("examples", [1, BATCH])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [1, 2 * QUERIES**2], ids=["head", "two_heads"])
def test_numbers_of_distances_have_the_values_and_gradients_of_a_bias_in_full(
  examples, causal, block, monkeypatch
):
  monkeypatch.setattr(blocks, "_QUERIES", 1)
  monkeypatch.setattr(blocks, "_BLOCK", block)
  given, mask = rows(batch=examples, keys=QUERIES), CAUSAL if causal else None

  def in_full(query, key, value, bias, mask):
    places = QUERIES - 1 - np.arange(QUERIES)[:, None] + np.arange(QUERIES)[None]
    return whole(query, key, value, bias.numbers[None, :, places], mask)

  in_parts = functools.partial(blocks.attention_in_blocks, causal=causal)
  ours = value_and_gradients(in_parts, given, DISTANCES, mask)
  agree(ours, value_and_gradients(in_full, given, DISTANCES, mask))


def test_one_example_and_one_head_are_blocks_too():
  query, key, value = (one[:1, :, :1] for one in rows())
  bias = numbers(1, 1, QUERIES, KEYS, seed=3)
  ours = value_and_gradients(blocks.attention_in_blocks, (query, key, value), bias)
  agree(ours, value_and_gradients(whole, (query, key, value), bias))


def test_a_query_that_may_read_nothing_reads_all_alike_and_changes_no_other_gradient():
  mask = allowed(1, 1, QUERIES, KEYS).at[:, :, 2].set(False)
  bias = numbers(1, HEADS, QUERIES, KEYS, seed=3)
  found = blocks.attention_in_blocks(*rows(), bias, mask)
  np.testing.assert_allclose(found[:, 2], rows()[2].mean(1), atol=1e-6)
  ours = value_and_gradients(blocks.attention_in_blocks, rows(), bias, mask)
  agree(ours, value_and_gradients(whole, rows(), bias, mask))
  assert not np.asarray(ours[1][1])[:, :, 2].any()


def test_bfloat16_rows_give_bfloat16_heads_and_gradients():
  given = rows(jnp.bfloat16)
  ours = value_and_gradients(blocks.attention_in_blocks, given, None)
  assert {leaf.dtype for leaf in ours[1]} == {jnp.dtype(jnp.bfloat16)}
  exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), given)
  agree(ours, value_and_gradients(whole, exact, None), tolerance=0.03)


def test_products_of_a_program_in_bfloat16_leave_attention_as_it_is():
  found = jax.jit(rounded(blocks.attention_in_blocks))(*rows())
  agree(found, blocks.attention_in_blocks(*rows()), tolerance=1e-6)


@pytest.mark.parametrize(
  ("rate", "bias", "sequence"),
  [
    (0.0, numbers(1, HEADS, 8, 8, seed=3), 2),
    (0.4, numbers(1, HEADS, 8, 8, seed=3), 2),
    (0.0, DistanceBias(numbers(HEADS, 15, seed=3)), 2),
    (0.4, DistanceBias(numbers(HEADS, 15, seed=3)), 1),
  ],
)
def test_attention_is_the_same_in_blocks_on_one_device_and_on_several(
  rate, bias, sequence, monkeypatch
):
  mask, seen = AttentionMask(causal=True, explicit=allowed(1, HEADS, 8, 8)), []
  mask = dataclasses.replace(mask, explicit=mask.explicit | jnp.eye(8, dtype=bool)[None, None])
  query, key, value = rows(batch=4, queries=8, keys=8)

  class Attends(nn.Module):
    @nn.compact
    def __call__(self, query, key, value):
      dropout = Dropout(rate) if rate else None
      return attention.attend(query, key, value, mask, bias=bias, dropout=dropout)

  attend = functools.partial(Attends().apply, {}, rngs={"dropout": jax.random.key(3)})
  expected = attend(query, key, value)
  inner = blocks.attention_in_blocks
  monkeypatch.setattr(blocks, "_FEW", 1)
  monkeypatch.setattr(blocks, "_ALL", 1)
  monkeypatch.setattr(
    attention,
    "attention_in_blocks",
    lambda *given, causal: (seen.append((given[0].shape, causal)), inner(*given, causal=causal))[1],
  )
  agree(attend(query, key, value), expected)
  assert seen == [((4, 8, HEADS, WIDTH), True)]
  config = sharding.MeshConfig(data=2, tensor=2, sequence=sequence)
  mesh = sharding.make_mesh(config, jax.devices()[: 4 * sequence])
  with jax.set_mesh(mesh):
    placed = [jax.device_put(one, sharding.replicated(mesh)) for one in (query, key, value)]
    agree(jax.jit(attend)(*placed), expected)
  assert seen[-1] == ((2, 8 // sequence, HEADS // 2, WIDTH), sequence == 1)
