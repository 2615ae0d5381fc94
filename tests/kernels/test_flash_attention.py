"""Flash attention with weights of heads, against NumPy in double precision and the definition.

Kernels run in Pallas' interpreter with blocks so small that every size needs several and fills the
last one in part; what a block holds past the end of its array is NaN there.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from compmod_jax.core import sharding
from compmod_jax.core.errors import UserError
from compmod_jax.core.random_bits import random_bits
from compmod_jax.kernels.attention import (
  ProbabilityDropout,
  Rotation,
  Tiles,
  Visibility,
  flash_attention,
  gpu,
  kernel_for,
  packed_attention,
  paired_attention,
  routed_attention,
  tpu,
)
from compmod_jax.kernels.attention.distances import DistanceBias, sums_of_diagonals, windows
from compmod_jax.kernels.attention.layout import KEY, QUERY, Layout
from compmod_jax.kernels.routing import Choice, Readout
from compmod_jax.tools import matmul_flops

SMALL = Tiles(forward=(16, 32), backward=(16, 16), tpu=(16, 32))
WAYS: dict[str, dict[str, Any]] = {
  "reference": {"implementation": "reference"},
  "gpu": {"implementation": "gpu", "interpret": True, "tiles": SMALL},
  "tpu": {"implementation": "tpu", "interpret": True},
  "tpu, by blocks": {"implementation": "tpu", "interpret": True, "tiles": SMALL},
}


def numbers(*shape: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def segments(batch: int, time: int, seed: int) -> np.ndarray:
  """Ascending numbers of segments, from 0 on."""
  steps = np.random.default_rng(seed).random((batch, time)) < 0.2
  return np.cumsum(steps, axis=1).astype(np.int32)


def hidden(ids: np.ndarray, last: int) -> np.ndarray:
  """The same; keys from `last` on are padding."""
  return np.where(np.arange(ids.shape[1]) < last, ids, -1).astype(np.int32)


def shuffled(batch: int, time: int) -> np.ndarray:
  """Positions in another order for every example."""
  random = np.random.default_rng(0)
  return np.stack([random.permutation(time) for _ in range(batch)]).astype(np.int32)


def reads(seen: Visibility, query: int, key: int, example: int) -> bool:
  """The rule of one pair, in words."""
  place = query + (0 if seen.first_query is None else int(seen.first_query[0]))
  if seen.query_positions is not None:
    place = int(seen.query_positions[example % len(seen.query_positions), query])
  far = key > place or (seen.window is not None and place - key >= seen.window)
  if seen.causal and key >= seen.prefix and far:
    return False
  if seen.key_ids is None:
    return True
  other = int(seen.key_ids[example % len(seen.key_ids), key])
  own = 0 if seen.query_ids is None else int(seen.query_ids[example % len(seen.query_ids), query])
  return other in (0, own)


def expected(query, key, value, weights, seen: Visibility, bias=None) -> np.ndarray:
  """Heads, pair by pair in double precision; a bias has a number a head and distance."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  made = np.zeros(query.shape)
  group = query.shape[2] // key.shape[2]
  for b, t, h in np.ndindex(query.shape[:3]):
    keys = [s for s in range(key.shape[1]) if reads(seen, t, s, b)]
    if keys:
      logits = key[b, keys, h // group] @ query[b, t, h] / np.sqrt(query.shape[3])
      if seen.penalties is not None:
        place = t + (0 if seen.first_query is None else int(seen.first_query[0]))
        logits = logits - np.float64(seen.penalties[h]) * np.abs(place - np.array(keys))
      if bias is not None:
        logits = logits + np.array([bias[h, query.shape[1] - 1 - t + s] for s in keys], np.float64)
      shares = np.exp(logits - logits.max())
      made[b, t, h] = shares @ value[b, keys, h // group] / shares.sum()
      made[b, t, h] *= 1 if weights is None else weights[b, t, h]
  return made


CASES = {
  "everything": ((2, 37, 37, 2, 2, 64), Visibility(), "tpu"),
  "everything, in blocks that are full": ((2, 32, 64, 2, 1, 32), Visibility(), "tpu"),
  "causal": ((1, 40, 40, 3, 3, 32), Visibility(causal=True), "tpu, by blocks"),
  "window and prefix": (
    (1, 50, 50, 2, 2, 40),
    Visibility(causal=True, window=9, prefix=3),
    "tpu, by blocks",
  ),
  "the later ones of a device's queries": (
    (2, 21, 50, 2, 2, 64),
    Visibility(causal=True, window=20, first_query=np.array([25], np.int32)),
    "tpu, by blocks",
  ),
  "queries in another order": (
    (2, 50, 50, 2, 2, 64),
    Visibility(causal=True, window=30, query_positions=shuffled(2, 50)),
    "tpu",
  ),
  "queries of segments in another order": (
    (2, 45, 45, 2, 2, 32),
    Visibility(
      causal=True,
      query_ids=segments(2, 45, 0) + 1,
      key_ids=hidden(segments(2, 45, 0) + 1, 40),
      query_positions=shuffled(2, 45),
    ),
    "tpu, by blocks",
  ),
  "penalties on distances, to both sides": (
    (1, 40, 40, 3, 3, 32),
    Visibility(penalties=np.array([0.5, 0.1, 2.0], np.float32)),
    "tpu",
  ),
  "penalties on distances of the later ones of a device's queries": (
    (2, 21, 50, 2, 1, 64),
    Visibility(
      causal=True,
      first_query=np.array([25], np.int32),
      penalties=np.array([0.25, 0.0625], np.float32),
    ),
    "tpu, by blocks",
  ),
  "cross attention to tokens alone, heads in groups": (
    (2, 21, 45, 4, 2, 64),
    Visibility(key_ids=hidden(np.zeros((2, 45), np.int32), 30)),
    "tpu",
  ),
  "segments, and rows that read nothing": (
    (2, 33, 33, 2, 1, 64),
    Visibility(
      causal=True,
      query_ids=segments(2, 33, 0) + 1,
      key_ids=hidden(segments(2, 33, 0) + 1, 28),
    ),
    "tpu, by blocks",
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_heads_and_gradients_are_those_of_double_precision(name):
  (batch, queries, keys, heads, key_heads, dim), seen, tpu_way = CASES[name]
  args = (
    numbers(batch, queries, heads, dim, seed=1),
    numbers(batch, keys, key_heads, dim, seed=2),
    numbers(batch, keys, key_heads, dim, seed=3),
    np.maximum(numbers(batch, queries, heads, seed=4), 0),  # zeros among them
  )
  slope = numbers(batch, queries, heads, dim, seed=5)
  found = {}
  for way in ("reference", "gpu", tpu_way):
    options = WAYS[way]

    def run(query, key, value, weights, seen, options=options):
      return flash_attention(query, key, value, weights=weights, visibility=seen, **options)

    @jax.jit
    def both(args, seen, slope, run=run):
      made, pull = jax.vjp(lambda *args: run(*args, seen), *args)
      return made, pull(slope)

    found[way] = jax.device_get(both(args, seen, slope))
    np.testing.assert_allclose(found[way][0], expected(*args, seen), rtol=2e-5, atol=2e-6)
  *true, true_of_weights = found["reference"][1]
  for way in ("gpu", tpu_way):
    *mine, of_weights = found[way][1]
    for one, other in zip(mine, true, strict=True):
      np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    # That of a weight of zero is zero, whatever it would be.
    positive = args[3] > 0
    truth = true_of_weights[positive]
    np.testing.assert_allclose(of_weights[positive], truth, rtol=1e-4, atol=1e-4)
    assert not of_weights[~positive].any()


BIASED = {
  "everything": ((2, 37, 37, 2, 2, 64), Visibility(), "tpu", 0.0),
  "blocks that are full": ((1, 32, 32, 2, 1, 32), Visibility(), "tpu, by blocks", 0.0),
  "window and prefix": (
    (1, 50, 50, 3, 3, 40),
    Visibility(causal=True, window=9, prefix=3),
    "tpu, by blocks",
    0.0,
  ),
  "segments, and rows that read nothing": (
    (3, 45, 45, 2, 1, 64),
    Visibility(
      causal=True,
      query_ids=segments(3, 45, 0) + 1,
      key_ids=hidden(segments(3, 45, 0) + 1, 40),
    ),
    "tpu, by blocks",
    0.0,
  ),
  "one position": ((2, 1, 1, 2, 2, 32), Visibility(), "tpu", 0.0),
  "a few of a device's queries": (
    (2, 5, 45, 2, 2, 64),
    Visibility(causal=True, first_query=np.array([25], np.int32)),
    "tpu, by blocks",
    0.0,
  ),
  "the later ones of a device's queries": (
    (2, 21, 50, 2, 2, 64),
    Visibility(causal=True, window=20, first_query=np.array([25], np.int32)),
    "tpu",
    0.0,
  ),
  "more queries than keys": ((1, 45, 14, 2, 1, 32), Visibility(), "tpu, by blocks", 0.0),
  "dropout": ((2, 40, 40, 2, 2, 32), Visibility(causal=True), "tpu, by blocks", 0.3),
}


@pytest.mark.parametrize("name", BIASED)
def test_biases_by_distance_and_their_gradients_are_those_of_double_precision(name):
  (batch, queries, keys, heads, key_heads, dim), seen, tpu_way, rate = BIASED[name]
  args = (
    numbers(batch, queries, heads, dim, seed=1),
    numbers(batch, keys, key_heads, dim, seed=2),
    numbers(batch, keys, key_heads, dim, seed=3),
    np.exp(numbers(batch, queries, heads, seed=4)),
    numbers(heads, queries + keys - 1, seed=6),
  )
  slope = numbers(batch, queries, heads, dim, seed=5)
  dropout = ProbabilityDropout.of(jax.random.key(7), rate, batch, heads) if rate else None
  found = {}
  for way in ("reference", "gpu", tpu_way):

    def run(query, key, value, weights, bias, seen, options=WAYS[way]):
      how = {"distance_bias": DistanceBias(bias), "visibility": seen, "dropout": dropout, **options}
      return flash_attention(query, key, value, weights=weights, **how)

    @jax.jit
    def both(args, seen, slope, run=run):
      made, pull = jax.vjp(lambda *args: run(*args, seen), *args)
      return made, *pull(slope)

    found[way] = jax.device_get(both(args, seen, slope))
  true = found.pop("reference")
  if not rate:
    *plain, bias = args
    np.testing.assert_allclose(true[0], expected(*plain, seen, bias), rtol=2e-5, atol=2e-6)
  for mine in found.values():
    for one, other in zip(mine, true, strict=True):
      np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * max(1, np.abs(other).max()))
  # Of a distance that no pair has, there is no gradient.
  met = np.zeros(queries + keys - 1, bool)
  for b, t, s in np.ndindex(batch, queries, keys):
    met[queries - 1 - t + s] |= reads(seen, t, s, b)
  assert not true[-1][:, ~met].any()


@pytest.mark.parametrize(
  ("queries", "keys", "block"), [(40, 40, (16, 16)), (40, 9, (16, 12)), (13, 40, (24, 16))]
)
def test_numbers_of_blocks_on_a_diagonal_are_those_of_their_pairs(queries, keys, block):
  line, blocks = numbers(2, queries + keys - 1, seed=0), -(-queries // block[0])
  found = np.asarray(windows(line, queries, blocks, block))
  for query, key in np.ndindex(queries, keys):
    (row, r), (column, c) = divmod(query, block[0]), divmod(key, block[1])
    place = found[:, column - row + blocks - 1, block[0] - 1 - r + c]
    np.testing.assert_array_equal(place, line[:, queries - 1 - query + key])


def test_diagonals_are_summed():
  pairs, sums = numbers(2, 24, 24, seed=1), np.zeros((2, 48))
  for r, c in np.ndindex(24, 24):
    sums[:, 23 - r + c] += pairs[:, r, c]
  np.testing.assert_allclose(sums_of_diagonals(pairs), sums, rtol=1e-5, atol=1e-5)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def rule_and_spans(seen: Visibility, queries: int, keys: int, block: tuple[int, int]):
  return seen.dense(queries, keys), seen.spans(queries, keys, block)


lengths = st.sampled_from([1, 33, 64])


@settings(max_examples=18, deadline=None, derandomize=True)
@given(
  lengths,
  lengths,
  st.sampled_from([(16, 32), (16, 16)]),
  st.booleans(),
  st.integers(0, 5),
  st.data(),
)
def test_spans_hold_all_that_is_read_and_full_blocks_mask_no_pair(
  queries, keys, block, causal, prefix, data
):
  """And the dense mask is the rule, pair by pair."""
  window = data.draw(st.sampled_from([None, 1, 7])) if causal else None
  seed = data.draw(st.integers(0, 9))
  ids = data.draw(st.sampled_from(["none", "keys", "both"]))
  place = data.draw(st.sampled_from([None, 0, 7, 40, "any"]))
  seen = Visibility(causal, prefix, window)
  if place == "any":
    seen = dataclasses.replace(seen, query_positions=shuffled(2, queries))
  elif place is not None:
    seen = dataclasses.replace(seen, first_query=np.array([place], np.int32))
  if ids != "none":
    own, others = segments(2, queries, seed), segments(2, keys, seed + 1)
    others = hidden(others, data.draw(st.integers(0, keys)))
    seen = dataclasses.replace(seen, query_ids=own if ids == "both" else None, key_ids=others)
  dense, both = rule_and_spans(seen, queries, keys, block)
  assert (dense is None) == (not causal and ids == "none")
  dense = np.broadcast_to(True if dense is None else dense, (2, 1, queries, keys))
  rule = [[[reads(seen, t, s, b) for s in range(keys)] for t in range(queries)] for b in range(2)]
  np.testing.assert_array_equal(dense[:, 0], rule)
  for axis, spans in enumerate(both):
    spans = np.broadcast_to(np.asarray(spans), (2, *spans.shape[1:]))
    visible = np.asarray(rule) if axis == 0 else np.asarray(rule).swapaxes(1, 2)
    for b, i in np.ndindex(spans.shape[:2]):
      rows = visible[b, i * block[axis] : (i + 1) * block[axis]]
      assert (np.diff(spans[b, i]) >= 0).all()
      first, begin, end, past = spans[b, i] * block[1 - axis]
      assert not rows[:, :first].any()
      assert not rows[:, past:].any()
      assert rows[:, begin:end].all()
      # Keys beyond the last are masked; queries beyond the last are harmless.
      past_the_keys = (end if axis == 0 else (i + 1) * block[1]) > keys
      assert begin == end or not past_the_keys


def test_most_blocks_of_a_causal_mask_are_full():
  spans, _ = Visibility(causal=True).spans(64, 64, (16, 16))
  np.testing.assert_array_equal(spans[0], [[0, 0, n, n + 1] for n in range(4)])


@pytest.mark.parametrize(
  ("queries", "keys", "filled"),
  [(64, 64, (True, True)), (64, 60, (True, False)), (32, 64, (False, True))],
)
def test_loads_go_without_masks_only_where_no_program_has_a_block_beyond(queries, keys, filled):
  """The reverse pass has as many programs as the longer side has blocks."""
  query, key = (jax.ShapeDtypeStruct((2, n, 2, 32), jnp.float32) for n in (queries, keys))
  static = gpu.Static(Layout.apart(query, key), (16, 16), Visibility())
  assert (static.filled(QUERY), static.filled(KEY)) == filled


HEADS, DIM, TIME = 4, 32, 37


@functools.cache
def routed(way: str, choice: Choice, by_kind: bool):
  """From packed, shift, kernel, bias, factor to their gradients, and heads and weights."""

  def run(packed, shift, kernel, bias, factor):
    return routed_attention(
      packed,
      shift,
      Readout(kernel, bias),
      heads=HEADS,
      head_dim=DIM,
      by_kind=by_kind,
      choice=choice,
      factor=factor,
      visibility=Visibility(causal=by_kind),
      **WAYS[way],
    )

  def total(*args):
    heads, weights = run(*args)
    return jnp.sum(jnp.sin(heads)) + jnp.sum(jnp.cos(2 * weights)), (heads, weights)

  return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3, 4), has_aux=True))


def routed_case(units: int) -> tuple[np.ndarray, ...]:
  return (
    numbers(2, TIME, 3 * HEADS * DIM + units, seed=1) / 2,
    numbers(3 * HEADS * DIM + units, seed=5) / 2,
    numbers(units, HEADS, seed=2) / np.sqrt(units / 24, dtype=np.float32),
    numbers(HEADS, seed=3),
    np.exp(numbers(2, TIME, HEADS, seed=4)),
  )


CHOICES = {
  "soft": Choice(),
  "top_k": Choice("top_k", 2),
  "threshold": Choice("threshold", threshold=0.3, temperature=0.5),
}


@pytest.mark.parametrize(
  ("rule", "units", "by_kind", "tpu_way"),
  [
    ("soft", 24, False, "tpu"),
    ("top_k", 128, True, "tpu, by blocks"),
    ("threshold", 128, True, "tpu"),
  ],
)
def test_competition_inside_is_that_of_the_definition(rule, units, by_kind, tpu_way):
  args, choice = routed_case(units), CHOICES[rule]
  packed, shift, kernel, bias, factor = args
  packed = packed + shift
  order = (3, HEADS) if by_kind else (HEADS, 3)
  columns = packed[..., : 3 * HEADS * DIM].reshape(2, TIME, *order, DIM)
  scores = np.maximum(packed[..., 3 * HEADS * DIM :], 0) @ kernel + bias
  scores = np.asarray(scores, np.float64) / choice.temperature
  shares = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
  if rule == "top_k":
    shares = np.where(shares >= np.sort(shares)[..., -2:-1], shares, 0)
  if rule == "threshold":
    shares = np.where((shares >= 0.3) | (shares == shares.max(-1, keepdims=True)), shares, 0)
  shares /= shares.sum(axis=-1, keepdims=True)
  parts = (columns.take(i, axis=2 if by_kind else 3) for i in range(3))
  truth = expected(*parts, shares * factor, Visibility(by_kind))
  gradients = []
  for way in ("reference", "gpu", tpu_way):
    found, (heads, weights) = jax.device_get(routed(way, choice, by_kind)(*args))
    gradients.append(found)
    np.testing.assert_allclose(weights, shares, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(heads.reshape(truth.shape), truth, rtol=1e-4, atol=1e-5)
  true, *mine = gradients
  for found in mine:
    for one, other in zip(found, true, strict=True):
      atol = 2e-5 * max(1, np.abs(other).max())  # terms cancel in sums over all positions
      np.testing.assert_allclose(one, other, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("way", ["gpu", "tpu, by blocks"])
def test_half_precision_is_as_near_as_its_inputs_allow(way):
  query, key, value = (numbers(1, 40, 2, 64, seed=n).astype(jnp.bfloat16) for n in range(3))
  found = jax.jit(lambda *args: flash_attention(*args, **WAYS[way]))(query, key, value)
  assert found.dtype == jnp.bfloat16
  truth = expected(query, key, value, None, Visibility())
  np.testing.assert_allclose(np.asarray(found, np.float64), truth, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_the_tpu_simulator_agrees_with_double_precision(rate):
  """Its memory is NaN where nothing was written, and it finds accesses that race."""
  simulated = pltpu.InterpretParams(detect_races=True)
  query, key, value = (numbers(1, 20, 2, 64, seed=n) for n in range(3))
  weights, seen = np.exp(numbers(1, 20, 2, seed=3)), Visibility(causal=True)
  dropout = ProbabilityDropout.of(jax.random.key(5), rate, 1, 2) if rate else None

  def run(how: dict[str, Any], *args: jax.Array) -> jax.Array:
    options = {"visibility": seen, "dropout": dropout, **how}
    return flash_attention(*args[:3], weights=args[3], **options)

  ways = WAYS["tpu, by blocks"] | {"interpret": simulated}, WAYS["reference"]

  @jax.jit
  def both(*args):
    pulled = [jax.vjp(functools.partial(run, how), *args) for how in ways]
    return [(heads, *pull(heads)) for heads, pull in pulled]

  found, true = jax.device_get(both(query, key, value, weights))
  if not rate:
    truth = expected(query, key, value, weights, seen)
    np.testing.assert_allclose(found[0], truth, rtol=1e-4, atol=1e-5)
  for one, other in zip(found, true, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * np.abs(other).max())


def test_packed_heads_are_those_of_their_parts():
  packed, weights = numbers(2, 20, 2, 96, seed=0), np.exp(numbers(2, 20, 2, seed=1))
  bias, seen = numbers(2, 96, seed=2), Visibility(causal=True)
  truth = expected(*np.split(packed + bias, 3, axis=-1), weights, seen)

  def by_kind(array: np.ndarray) -> np.ndarray:
    split = array.reshape(*array.shape[:-1], 3, -1).swapaxes(-3, -2)
    return split.reshape(*array.shape[:-2], 1, -1)

  for options in WAYS.values():
    run = functools.partial(packed_attention, heads=2, visibility=seen, **options)
    both = jax.jit(lambda weights, *cases, run=run: [run(*case, weights=weights) for case in cases])
    for found in both(weights, (packed, bias), (by_kind(packed), by_kind(bias))):
      np.testing.assert_allclose(found, truth, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("way", "by_kind"), [*itertools.product(WAYS, [False, True])])
@pytest.mark.parametrize("alike", [True, False])
def test_queries_and_keys_are_turned_as_positions_say(way, by_kind, alike):
  """All examples alike, or each by positions of its own; one pair of columns after the other."""
  packed, bias = numbers(2, 45, 2, 3, 40, seed=0), numbers(2, 3, 40, seed=1)
  slope, seen = numbers(2, 45, 2, 40, seed=2), Visibility(causal=True)
  ids = np.arange(45)[None] if alike else np.stack([np.arange(45), np.arange(45) % 17])

  def run(packed, bias):
    if by_kind:
      packed, bias = (jnp.moveaxis(one, -2, -3) for one in (packed, bias))
    parts = 1 if by_kind else 2
    rows, shift = packed.reshape(2, 45, parts, -1), bias.reshape(parts, -1)
    how = {"heads": 2, "visibility": seen, "rotation": Rotation.of(jnp.asarray(ids), 40)}
    return packed_attention(rows, shift, **how, **WAYS[way])

  def apart(packed, bias):
    query, key, value = jnp.unstack(packed + bias[None, None], axis=3)
    query, key = map(Rotation.of(jnp.asarray(ids), 40).turn, (query, key))
    return flash_attention(query, key, value, visibility=seen, **WAYS["reference"])

  @jax.jit
  def both(*args):
    pulled = [jax.vjp(function, *args) for function in (run, apart)]
    return [(made, *pull(slope)) for made, pull in pulled]

  found, true = jax.device_get(both(packed, bias))
  query, key, value = np.moveaxis(np.float64(packed + bias), 3, 0)
  for rows in (query, key):
    for i in range(20):
      angle = ids[..., None] * 10000.0 ** (-2 * i / 40)
      one, other = rows[..., i].copy(), rows[..., i + 20].copy()
      rows[..., i] = one * np.cos(angle) - other * np.sin(angle)
      rows[..., i + 20] = one * np.sin(angle) + other * np.cos(angle)
  np.testing.assert_allclose(
    found[0], expected(query, key, value, None, seen), rtol=2e-5, atol=5e-6
  )
  for one, other in zip(found, true, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize("way", WAYS)
def test_pairs_of_keys_and_values_are_read_and_get_gradients_where_they_lie(way):
  query, pairs = numbers(2, 21, 4, 32, seed=0), numbers(2, 37, 2, 2, 32, seed=1)
  weights, slope = np.exp(numbers(2, 21, 4, seed=2)), numbers(2, 21, 4, 32, seed=3)
  seen = Visibility(key_ids=hidden(np.zeros((2, 37), np.int32), 30))

  def run(query, pairs, weights):
    return paired_attention(query, pairs, weights=weights, visibility=seen, **WAYS[way])

  def apart(query, pairs, weights):
    key, value = pairs[..., 0, :], pairs[..., 1, :]
    how = {"weights": weights, "visibility": seen, **WAYS["reference"]}
    return flash_attention(query, key, value, **how)

  @jax.jit
  def both(*args):
    pulled = [jax.vjp(function, *args) for function in (run, apart)]
    return [(made, *pull(slope)) for made, pull in pulled]

  found, true = jax.device_get(both(query, pairs, weights))
  key, value = pairs[..., 0, :], pairs[..., 1, :]
  np.testing.assert_allclose(
    found[0], expected(query, key, value, weights, seen), rtol=2e-5, atol=2e-6
  )
  for one, other in zip(found, true, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * np.abs(other).max())


def test_what_is_dropped_is_a_function_of_the_place_in_the_whole_array():
  """In a kernel as without one, whatever the blocks and however examples and heads are split."""
  (batch, heads, time, keys), rate = (2, 3, 21, 45), 0.25
  key = jax.random.key(3)
  kept = random_bits(key, (batch, heads, time, keys)) >= round(rate * 2**16)
  args = tuple(numbers(batch, n, heads, 16, seed=n) for n in (time, keys, keys + 1))
  args = (*args[:2], args[2][:, :keys])
  slope = numbers(batch, time, heads, 16, seed=5)

  def true(query, key, value):
    shares = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", query, key) / 4, axis=-1)
    return jnp.einsum("bhts,bshd->bthd", jnp.where(kept, shares / (1 - rate), 0), value)

  def both(function):
    made, pull = jax.vjp(function, *args)
    return made, *pull(slope)

  truth = jax.device_get(jax.jit(lambda: both(true))())
  whole = ProbabilityDropout.of(key, rate, batch, heads)
  part = dataclasses.replace(whole, examples=whole.examples[1:], heads=whole.heads[1:])
  for options in WAYS.values():
    run = functools.partial(flash_attention, dropout=whole, **options)
    for one, other in zip(jax.jit(lambda run=run: both(run))(), truth, strict=True):
      np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)
    run = functools.partial(flash_attention, dropout=part, **options)
    found = jax.jit(run)(*(one[1:, :, 1:] for one in args))
    np.testing.assert_allclose(found, truth[0][1:, :, 1:], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("by_blocks", [False, True])
def test_what_the_output_projection_makes_of_heads_is_that_of_the_definition(by_blocks, rate):
  """Inside the kernel, which keeps heads where a block does not hold all keys."""
  tiles, layout = SMALL if by_blocks else Tiles(), Layout.packed(2, 20, 2, 64, True)
  assert tpu.takes_projection(layout, 128, tiles.tpu)
  assert tpu.keeps_heads(layout, tiles.tpu) == by_blocks
  assert not tpu.takes_projection(Layout.packed(2, 20, 2, 64), 128, tiles.tpu)
  args = (
    numbers(2, 20, 1, 384, seed=0) / 2,
    numbers(1, 384, seed=1) / 2,
    np.exp(numbers(2, 20, 2, seed=2) / 2),
    (numbers(128, 128, seed=3) / 8, numbers(128, seed=4)),
  )

  def run(how, packed, bias, weights, output):
    dropout = ProbabilityDropout.of(jax.random.key(5), rate, 2, 2) if rate else None
    options = {"heads": 2, "visibility": Visibility(causal=True), "dropout": dropout, **how}
    return packed_attention(packed, bias, weights=weights, output=output, **options)

  ways = {"implementation": "tpu", "interpret": True, "tiles": tiles}, WAYS["reference"]

  @jax.jit
  def both(*args):
    pulled = [jax.vjp(functools.partial(run, how), *args) for how in ways]
    return [(made, pull(jnp.sin(made))) for made, pull in pulled]

  found, true = map(jax.tree.leaves, jax.device_get(both(*args)))
  for one, other in zip(found, true, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * np.abs(other).max())


KERNELS = {
  "cuda": [
    f'name = "{one}"'
    for one in ("_route_columns", "_forward", "_backward", "_route_columns_backward")
  ],
  "tpu": ["tpu_custom_call"],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", DEVICES)
def test_it_lowers_for_devices_that_are_not_here(platform, dtype):
  packed = jax.ShapeDtypeStruct((2, 600, 3 * 4 * 64 + 128), dtype)
  bias = jax.ShapeDtypeStruct(packed.shape[-1:], jnp.float32)
  readout = Readout(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 4), (4,))))

  def training(packed, bias, readout):
    def total(packed, bias, readout):
      heads, _ = routed_attention(
        packed,
        bias,
        readout,
        heads=4,
        head_dim=64,
        by_kind=platform == "tpu",
        visibility=Visibility(causal=True),
      )
      return jnp.sum(heads.astype(jnp.float32))

    return jax.grad(total, argnums=(0, 1, 2))(packed, bias, readout)

  name = {"cuda": "gpu"}.get(platform, platform)
  array = jnp.zeros(1)
  with sharding.tracing_for(DEVICES[platform]):
    assert kernel_for(array, 64, dtype) == name
    assert kernel_for(array, 256, dtype) is None
    lowered = jax.jit(training).trace(packed, bias, readout).lower(lowering_platforms=(platform,))
  text = lowered.as_text()
  for kernel in KERNELS[platform]:
    assert kernel in text, kernel
  assert text.count("tpu_custom_call") == (4 if platform == "tpu" else 0)
  assert kernel_for(array, 64, dtype) is None  # here


@pytest.mark.parametrize("way", ["reference", "gpu", "tpu"])
def test_parts_on_devices_are_what_one_device_computes(way):
  """Examples and heads are split; each device has its own."""
  mesh = sharding.make_mesh(sharding.MeshConfig(data=2, tensor=2), jax.devices()[:4])
  packed, weights = numbers(2, 20, 2, 96, seed=0), np.exp(numbers(2, 20, 2, seed=1))
  run = functools.partial(packed_attention, **WAYS[way])

  def parts(packed, weights):
    names = ("batch", None, "heads")
    return sharding.on_parts(
      lambda weights, packed: run(packed, weights=weights),
      [weights, packed],
      [names, (*names, None)],
    )

  alone = jax.jit(lambda packed, weights: run(packed, weights=weights))(packed, weights)
  with jax.set_mesh(mesh):
    placed = jax.device_put(packed, sharding.replicated(mesh))
    found = jax.jit(parts)(placed, jax.device_put(weights, sharding.replicated(mesh)))
  np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6)


def test_what_cannot_be_done_is_refused():
  wide = numbers(1, 4, 2, 136, seed=0)
  for name in ("gpu", "tpu"):
    with pytest.raises(UserError, match=f"'{name}', which cannot run here: heads of 136 are wider"):
      flash_attention(wide, wide, wide, implementation=name, interpret=True)
  query, key = numbers(1, 4, 3, 8, seed=0), numbers(1, 4, 2, 8, seed=0)
  with pytest.raises(UserError, match="3 heads of queries and 2 of keys; they must be a multiple"):
    flash_attention(query, key, key)
  bias = DistanceBias(numbers(2, 6, seed=0))
  with pytest.raises(UserError, match=r"numbers \(2, 6\) for 2 heads, 4 queries and 4 keys"):
    flash_attention(key, key, key, distance_bias=bias)
  with pytest.raises(UserError, match=r"60 columns for 2 heads of 8 and 4 hidden units.* 52"):
    routed_attention(
      numbers(1, 4, 60, seed=0),
      numbers(60, seed=0),
      Readout(numbers(4, 2, seed=0), numbers(2, seed=0)),
      heads=2,
      head_dim=8,
    )
  with pytest.raises(UserError, match="3 parts for 6 heads; they must be 6, or 1"):
    packed_attention(numbers(1, 4, 3, 48, seed=0), heads=6)
  with pytest.raises(ValueError, match="window is 3 and causal False"):
    Visibility(window=3)
  with pytest.raises(ValueError, match="query_ids has numbers and key_ids none"):
    Visibility(query_ids=np.zeros((1, 4), np.int32))


def test_its_products_count_as_those_of_the_definition():
  query = jax.ShapeDtypeStruct((2, 40, 3, 32), jnp.float32)
  counts = []
  for options in WAYS.values():

    def training(query, key, value, options=options):
      heads, pull = jax.vjp(lambda *args: flash_attention(*args, **options), query, key, value)
      return pull(heads)

    counts.append(matmul_flops.count(jax.make_jaxpr(training)(query, query, query), "cuda"))
  assert counts == [12 * 2 * 3 * 40 * 40 * 32] * len(WAYS)


@pytest.mark.parametrize("field", ["first_query", "penalties"])
def test_positions_of_queries_go_without_a_first_one_and_penalties(field):
  with pytest.raises(ValueError, match=rf"visibility\.{field} is given, and query_positions"):
    Visibility(query_positions=shuffled(1, 4), **{field: np.ones(1, np.float32)})
