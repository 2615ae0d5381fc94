"""Attention masks: what their fields allow, alone and composed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.layers.attention import attend
from compmod_jax.layers.context import AttentionMask

BATCH, TIME, PREFIX = 2, 6, 2
VALID = jnp.asarray([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]], bool)
SEGMENTS = jnp.asarray([[0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1]])


def allowed(
  batch: int, query: int, key: int, *, causal: bool, segments: bool, window: int = 0
) -> bool:
  """The rules in words, for positions of which the first `PREFIX` are auxiliary."""
  of_text = [position - PREFIX for position in (query, key)]
  if key >= PREFIX and not VALID[batch, of_text[1]]:
    return False
  if key < PREFIX:  # all read the prefix
    return True
  of_key = SEGMENTS[batch, of_text[1]]
  if query < PREFIX:
    return not causal and (not segments or of_key == 0)
  if causal and (key > query or (window and key <= query - window)):
    return False
  return not segments or of_key in (0, SEGMENTS[batch, of_text[0]])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_it_allows_what_its_fields_say_together(causal, segments, window):
  valid = jnp.pad(VALID, ((0, 0), (PREFIX, 0)), constant_values=True)
  mask = AttentionMask(causal, valid, SEGMENTS if segments else None, PREFIX, window)
  length, seen = PREFIX + TIME, mask.visibility()
  found = np.broadcast_to(mask.dense(length, length), (BATCH, 1, length, length))
  # As kernels know it, but for padding's own queries, which nobody reads.
  in_kernels = np.broadcast_to(seen.dense(length, length), found.shape)
  real = np.asarray(valid)[:, None, :, None]
  np.testing.assert_array_equal(in_kernels & real, found & real)
  for batch, _, query, key in np.ndindex(found.shape):
    expected = allowed(batch, query, key, causal=causal, segments=segments, window=window)
    assert found[batch, 0, query, key] == expected, (batch, query, key)


def test_without_any_rule_there_is_no_mask():
  assert AttentionMask().dense(3, 4) is None
  assert (AttentionMask() | AttentionMask(causal=True)).dense(3, 3) is None
  assert not AttentionMask().only_causal
  assert AttentionMask(causal=True).only_causal
  assert not AttentionMask(causal=True, window=3).only_causal
  for more in (AttentionMask(valid=VALID), AttentionMask(causal=True)):
    assert not (AttentionMask(causal=True) & more).only_causal


def test_masks_compose_as_sets_do():
  some = np.random.default_rng(0).random((3, BATCH, 1, TIME, TIME)) < 0.5
  a, b, c = (AttentionMask(explicit=jnp.asarray(one)) for one in some)
  causal, valid = AttentionMask(causal=True), AttentionMask(valid=VALID)
  lower = np.tril(np.ones((TIME, TIME), bool))[None, None]
  real = np.asarray(VALID)[:, None, None]
  for mask, expected in (
    (a & b, some[0] & some[1]),
    (a | b, some[0] | some[1]),
    ((a | b) & c & causal, (some[0] | some[1]) & some[2] & lower),
    (a & (b | c) & valid, some[0] & (some[1] | some[2]) & real),
    ((a & valid) | causal, (some[0] & real) | lower),
  ):
    np.testing.assert_array_equal(mask.dense(TIME, TIME), expected)


def test_rows_are_taken_of_what_has_rows():
  mask = AttentionMask(causal=True, valid=VALID, segments=SEGMENTS[:1])
  np.testing.assert_array_equal(mask[1:].dense(TIME, TIME), mask.dense(TIME, TIME)[1:])


def test_it_passes_through_jit_and_attention_reads_it():
  query, key, value = (
    jnp.asarray(x, jnp.float32)
    for x in np.random.default_rng(1).normal(size=(3, BATCH, TIME, 2, 4))
  )
  mask = AttentionMask(causal=True, valid=VALID)
  found = jax.jit(attend)(query, key, value, mask)
  expected = jax.nn.dot_product_attention(query, key, value, mask=mask.dense(TIME, TIME))
  np.testing.assert_allclose(found, expected, atol=1e-6)
