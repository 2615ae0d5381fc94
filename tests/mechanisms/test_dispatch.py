"""Experts side by side, and experts that see only the tokens that chose them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from compmod_jax.core import sharding
from compmod_jax.core.sharding import MeshConfig, make_mesh
from compmod_jax.mechanisms import dispatch, expert_exchange
from compmod_jax.mechanisms.dispatch import ExpertWeights

BATCH, TIME, EMBED, EXPERTS, MLP, KEEP = 8, 4, 5, 8, 6, 2
TOKENS = BATCH * TIME


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


INPUTS = numbers(BATCH, TIME, EMBED)
WEIGHTS = ExpertWeights(
  numbers(EMBED, EXPERTS, MLP, seed=1),
  numbers(EXPERTS, MLP, seed=2),
  numbers(EXPERTS, MLP, EMBED, seed=3),
  numbers(EXPERTS, EMBED, seed=4),
)


def choices(seed: int, favour: float = 0.0, keep: int = KEEP) -> tuple[np.ndarray, np.ndarray]:
  """Weights of the `keep` random experts of every token, and which they are."""
  random = np.random.default_rng(seed)
  scores = random.normal(size=(BATCH, TIME, EXPERTS)) + favour * (np.arange(EXPERTS) == 3)
  best = np.argsort(-scores, axis=-1)[..., :keep]
  active = np.zeros(scores.shape, bool)
  np.put_along_axis(active, best, True, axis=-1)
  shares = np.where(active, random.uniform(0.1, 1, size=scores.shape), 0)
  return shares.astype(np.float32), active


def loop_over_experts(inputs: np.ndarray, shares: np.ndarray, weights: ExpertWeights) -> np.ndarray:
  """The definition, expert by expert, in float64."""
  total = np.zeros(inputs.shape)
  for i in range(EXPERTS):
    hidden = np.maximum(inputs.astype(np.float64) @ weights.up[:, i] + weights.up_bias[i], 0)
    total += shares[..., i : i + 1] * (hidden @ weights.down[i] + weights.down_bias[i])
  return total


def sparse(inputs, shares, active, weights, *, implementation="blocked", keep=KEEP, **kwargs):
  options = {"keep": keep, "implementation": implementation, **kwargs}
  return dispatch.sparse(inputs, shares, active, weights, jax.nn.relu, **options)


def dense(inputs, shares, weights):
  return dispatch.dense(dispatch.side_by_side(inputs, weights, jax.nn.relu), shares, weights)


def total(function, inputs, shares, weights):
  made = function(inputs, shares, weights)
  return jnp.sum(jnp.sin(made)), made


@functools.cache
def gradients(name: str) -> Any:
  """Compiled gradients with respect to inputs, shares and weights, and values."""

  def run(inputs, shares, active, weights):
    def one(inputs, shares, weights):
      if name == "dense":
        return dense(inputs, shares, weights)
      return sparse(inputs, shares, active, weights, implementation=name)

    function = functools.partial(total, one)
    return jax.grad(function, argnums=(0, 1, 2), has_aux=True)(inputs, shares, weights)

  return jax.jit(run)


def assert_close(found: Any, expected: Any) -> None:
  """Equal to 1e-5 of the largest entry: sums over tokens round in another order."""
  for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    largest = max(1.0, float(np.abs(two).max()))
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-5 * largest)


def assert_same(found: Any, expected: Any, active: np.ndarray) -> None:
  """Values and gradients; the weights of experts that do not run have none."""
  (found, made), (expected, values) = jax.device_get((found, expected))
  assert_close(made, values)
  assert_close(found[1][active], expected[1][active])
  assert_close((found[0], found[2]), (expected[0], expected[2]))


few = settings(max_examples=25, deadline=None, derandomize=True)
IMBALANCE = st.tuples(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 3.0, 100.0]))


@few
@given(drawn=IMBALANCE)
def test_dense_experts_are_their_weighted_sum(drawn):
  shares, active = choices(*drawn)
  expected = loop_over_experts(INPUTS, shares, WEIGHTS)
  made = gradients("dense")(INPUTS, shares, active, WEIGHTS)[1]
  np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["blocked", "ragged"])
@few
@given(drawn=IMBALANCE)
def test_no_token_is_dropped_at_any_imbalance_and_gradients_agree(implementation, drawn):
  shares, active = choices(*drawn)
  found = gradients(implementation)(INPUTS, shares, active, WEIGHTS)
  expected = loop_over_experts(INPUTS, shares, WEIGHTS)
  assert_close(found[1], expected)
  assert_same(found, gradients("dense")(INPUTS, shares, active, WEIGHTS), active)


@pytest.mark.parametrize("lucky", [0, EXPERTS - 1])
def test_all_tokens_may_go_to_one_expert(lucky):
  active = np.broadcast_to(np.arange(EXPERTS) == lucky, (BATCH, TIME, EXPERTS))
  shares = active * numbers(BATCH, TIME, 1, seed=9)
  run = jax.jit(functools.partial(sparse, keep=1))
  expected = loop_over_experts(INPUTS, shares, WEIGHTS)
  found = run(INPUTS, shares, active, WEIGHTS)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert (np.abs(expected).max(axis=-1) > 0).all()


@few
@given(drawn=IMBALANCE)
def test_the_sorted_rows_of_an_expert_lie_together_and_every_pair_has_one(drawn):
  _, active = choices(*drawn)
  chosen = np.argwhere(active.reshape(TOKENS, EXPERTS))[:, 1].reshape(TOKENS, KEEP)
  plan = jax.jit(dispatch.sort_by_expert, static_argnums=1)(chosen, EXPERTS)
  assert sorted(np.asarray(plan.pair)) == list(range(TOKENS * KEEP))
  np.testing.assert_array_equal(plan.row[plan.pair], np.arange(TOKENS * KEEP))
  np.testing.assert_array_equal(plan.sizes, np.bincount(chosen.ravel(), minlength=EXPERTS))
  expert = chosen.ravel()[plan.pair]
  assert (np.diff(expert) >= 0).all()
  np.testing.assert_array_equal(plan.expert, expert[:, None] == np.arange(EXPERTS))


def test_what_an_expert_that_was_not_chosen_holds_does_not_matter():
  shares, active = choices(0, 100.0, keep=1)
  run = jax.jit(functools.partial(sparse, keep=1))
  assert active[..., 3].all()
  others = (np.arange(EXPERTS) != 3).astype(np.float32)
  spoilt = WEIGHTS._replace(down=np.where(others[:, None, None] > 0, np.nan, WEIGHTS.down))
  np.testing.assert_array_equal(
    run(INPUTS, shares, active, spoilt), run(INPUTS, shares, active, WEIGHTS)
  )


def test_factors_multiply_the_hidden_units_of_the_chosen_experts():
  shares, active = choices(1)
  factors = np.random.default_rng(0).integers(0, 2, size=(BATCH, TIME, KEEP, MLP))
  found = jax.jit(sparse)(INPUTS, shares, active, WEIGHTS, factors=factors.astype(np.float32))
  expected = np.zeros(INPUTS.shape)
  for b, t in np.ndindex(BATCH, TIME):
    for place, i in enumerate(np.flatnonzero(active[b, t])):
      hidden = np.maximum(INPUTS[b, t] @ WEIGHTS.up[:, i] + WEIGHTS.up_bias[i], 0)
      made = (factors[b, t, place] * hidden) @ WEIGHTS.down[i] + WEIGHTS.down_bias[i]
      expected[b, t] += shares[b, t, i] * made
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_outputs_of_single_experts_sum_to_the_whole():
  shares, _ = choices(2)

  @jax.jit
  def run(inputs, weights):
    return dispatch.outputs(dispatch.side_by_side(inputs, weights, jax.nn.relu), weights)

  every = run(INPUTS, WEIGHTS)
  assert every.shape == (BATCH, TIME, EXPERTS, EMBED)
  summed = np.sum(np.asarray(every) * shares[..., None], axis=2)
  assert_close(summed, loop_over_experts(INPUTS, shares, WEIGHTS))


def test_few_tokens_go_through_all_experts():
  assert dispatch.worthwhile(2048, experts=8, keep=2)
  assert dispatch.worthwhile(2048, experts=8, keep=4)
  assert not dispatch.worthwhile(2048, experts=8, keep=8)
  assert not dispatch.worthwhile(32, experts=8, keep=2)
  assert not dispatch.worthwhile(1, experts=2, keep=1)


# Devices.

LAYOUTS = [
  MeshConfig(data=8),
  MeshConfig(data=2, fsdp=2, tensor=2),
  MeshConfig(data=1, tensor=8),
  MeshConfig(data=2, expert=4),
  MeshConfig(data=1, tensor=2, expert=2, sequence=2),
]


def layout_name(layout: MeshConfig) -> str:
  return "_".join(f"{axis}{size}" for axis, size in vars(layout).items() if size > 1)


def placed(layout: MeshConfig, shares: np.ndarray, active: np.ndarray) -> tuple[Any, ...]:
  mesh = make_mesh(layout)
  experts = sharding.RULES["experts"]
  places = ExpertWeights(
    PartitionSpec("fsdp" if EMBED % layout.fsdp == 0 else None, experts),
    PartitionSpec(experts),
    PartitionSpec(experts),
    PartitionSpec(experts),
  )
  rows = NamedSharding(mesh, PartitionSpec(sharding.RULES["batch"]))
  weights = jax.tree.map(
    lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), WEIGHTS, places
  )
  return (*(jax.device_put(x, rows) for x in (INPUTS, shares, active)), weights)


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
@pytest.mark.parametrize("imbalance", [1.0, 1e4], ids=["uneven", "one_expert_for_all_tokens"])
def test_eight_devices_give_the_values_and_gradients_of_one(layout, imbalance):
  shares, active = choices(3, imbalance)
  arrays = placed(layout, shares, active)
  found = gradients("blocked")(*arrays)
  assert_same(found, gradients("blocked")(INPUTS, shares, active, WEIGHTS), active)
  assert "shard_map" in str(jax.make_jaxpr(gradients("blocked"))(*arrays))


# Sent to experts.


def exchanged(inputs, shares, active, weights, factors=None, capacity=1.25):
  options = {"keep": KEEP, "capacity": capacity, "factors": factors, "implementation": "blocked"}
  return expert_exchange.sparse(inputs, shares, active, weights, jax.nn.relu, **options)


@jax.jit
def exchanged_gradients(inputs, shares, active, weights):
  """As `gradients`, and the share of every token's choices that waited."""

  def one(inputs, shares, weights):
    made, waited = exchanged(inputs, shares, active, weights)
    return jnp.sum(jnp.sin(made)), (made, waited)

  found, (made, waited) = jax.grad(one, argnums=(0, 1, 2), has_aux=True)(inputs, shares, weights)
  return (found, made), waited


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=layout_name)
def test_tokens_that_are_sent_to_experts_get_the_values_and_gradients_of_one_device(layout):
  both = np.isin(np.arange(EXPERTS), (2, 3)) & np.ones((BATCH, TIME, 1), bool)
  crowded = (both * numbers(BATCH, TIME, EXPERTS, seed=9), both)
  for shares, active in (choices(3), choices(3, 1.0), crowded):
    found, waited = exchanged_gradients(*placed(layout, shares, active))
    assert_same(found, gradients("blocked")(INPUTS, shares, active, WEIGHTS), active)
    if layout == MeshConfig(data=2, expert=4):
      # Two groups of four devices, each with two experts, eight pairs and room for ten.
      received = active.reshape(2, -1, 4, 2).sum(axis=(1, 3))
      assert float(waited.sum()) * KEEP == np.maximum(received - 10, 0).sum()
      assert active is not both or received.max() > 3 * 10
    # Four times cannot be shared by eight devices: all see all of them, and none waits.
    assert active is not both or (waited.sum() > 0) == (layout.tensor != 8)


def test_every_device_sorts_its_own_tokens_for_its_own_experts():
  shapes = []

  def spy(weights, inputs, shares):
    shapes.append((weights.shape, inputs.shape, shares.shape))
    return inputs

  layout = MeshConfig(data=2, fsdp=2, tensor=2)
  inputs, shares, _, weights = placed(layout, *choices(3))
  rows = ("tokens", "time", None)
  arguments, names = [weights.down, inputs, shares], [("experts", None, None), rows, rows]
  jax.jit(functools.partial(sharding.on_parts, spy, names=names))(arguments)
  assert shapes == [
    ((EXPERTS // 2, MLP, EMBED), (BATCH // 4, TIME, EMBED), (BATCH // 4, TIME, EXPERTS))
  ]
  shapes.clear()
  sharding.on_parts(spy, [WEIGHTS.down, jnp.asarray(INPUTS), jnp.asarray(INPUTS)], names)
  assert shapes[0][0] == (EXPERTS, MLP, EMBED)


def test_a_batch_or_experts_that_devices_cannot_share_evenly_stay_whole():
  mesh = make_mesh(MeshConfig(data=1, tensor=8))
  whole = NamedSharding(mesh, PartitionSpec())
  few_experts = jax.tree.map(
    jnp.asarray,
    ExpertWeights(WEIGHTS.up[:, :5], WEIGHTS.up_bias[:5], WEIGHTS.down[:5], WEIGHTS.down_bias[:5]),
  )
  first = np.broadcast_to(np.arange(5) < KEEP, (BATCH, TIME, 5))
  arguments = (INPUTS[:3, :1], (first * 0.5).astype(np.float32)[:3, :1], first[:3, :1])
  run = jax.jit(sparse)
  expected = run(*arguments, few_experts)
  found = run(*jax.device_put((*arguments, few_experts), whole))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_recomputing_in_the_backward_pass_changes_nothing():
  shares, active = choices(5, 1.0)

  @jax.jit
  def run(inputs, shares, active, weights):
    @jax.checkpoint
    def one(inputs, shares, weights):
      return sparse(inputs, shares, active, weights)

    function = functools.partial(total, one)
    return jax.grad(function, argnums=(0, 1, 2), has_aux=True)(inputs, shares, weights)

  expected = gradients("blocked")(INPUTS, shares, active, WEIGHTS)
  assert_same(run(*placed(LAYOUTS[1], shares, active)), expected, active)
