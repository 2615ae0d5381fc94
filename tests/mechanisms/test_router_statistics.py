"""Router health: sums and counts over real tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.intermediates import Intermediates
from compmod_jax.mechanisms.competition.statistics import router_statistics, weights_by_position
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.objectives import WithRouterStatistics

by_position = jax.jit(weights_by_position, static_argnums=2)
ROWS = jnp.array([[True, True, False], [True, False, False]])
SIGNATURES = jnp.array([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0], [1.0, 0.0]])


@jax.jit
def statistics(weights: jax.Array, rows: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
  return router_statistics("x", weights, SIGNATURES, rows)


def random_weights(seed: int = 0) -> jax.Array:
  weights = np.random.default_rng(seed).dirichlet(np.ones(4), size=(2, 3))
  return jnp.asarray(weights, jnp.float32)


def means(found: dict) -> dict[str, np.ndarray]:
  return {name: np.asarray(total) / np.asarray(count) for name, (total, count) in found.items()}


def test_mean_weight_and_share_of_wins_are_over_real_tokens_only():
  weights = random_weights()
  real = np.asarray(weights)[np.asarray(ROWS)]
  found = means(statistics(weights, ROWS))
  np.testing.assert_allclose(found["router/x/weight"], real.mean(axis=0), rtol=1e-6)
  wins = np.bincount(real.argmax(axis=-1), minlength=4) / 3
  np.testing.assert_allclose(found["router/x/wins"], wins, rtol=1e-6)
  entropy = -(real * np.log(real)).sum(axis=-1).mean()
  np.testing.assert_allclose(found["router/x/entropy"], entropy, rtol=1e-5)


def test_what_padding_holds_does_not_matter():
  weights = random_weights()
  other = jnp.where(ROWS[..., None], weights, jnp.nan)
  for one, two in zip(
    jax.tree.leaves((statistics(weights, ROWS), by_position(weights, ROWS, 2))),
    jax.tree.leaves((statistics(other, ROWS), by_position(other, ROWS, 2))),
    strict=True,
  ):
    np.testing.assert_array_equal(one, two)


def test_entropy_is_log_heads_for_uniform_weights_and_zero_for_a_lone_winner():
  uniform = means(statistics(jnp.full((2, 3, 4), 0.25), ROWS))
  np.testing.assert_allclose(uniform["router/x/entropy"], np.log(4), rtol=1e-6)
  alone = means(statistics(jnp.broadcast_to(jnp.eye(4)[2], (2, 3, 4)), ROWS))
  np.testing.assert_array_equal(alone["router/x/entropy"], 0)
  np.testing.assert_array_equal(alone["router/x/wins"], [0, 0, 1, 0])


def test_a_tie_is_won_by_the_lower_head():
  found = means(statistics(jnp.full((2, 3, 4), 0.25), ROWS))
  np.testing.assert_array_equal(found["router/x/wins"], [1, 0, 0, 0])


def test_statistics_of_two_batches_add_up_to_those_of_both():
  one, two = random_weights(0), random_weights(1)
  both = statistics(jnp.concatenate([one, two]), jnp.concatenate([ROWS, ROWS]))
  added = jax.tree.map(np.add, statistics(one, ROWS), statistics(two, ROWS))
  one, two = means(both), means(added)
  for name, (_, count) in both.items():
    np.testing.assert_allclose(one[name], two[name], rtol=1e-6)
    assert name.endswith("/signature_norm") or count == added[name][1]


def test_no_gradient_passes_through_the_statistics():
  def total(weights, signatures):
    found = router_statistics("x", weights, signatures, ROWS)
    return sum(jnp.sum(x) for x, _ in found.values())

  gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(random_weights(), SIGNATURES)
  for gradient in gradients:
    np.testing.assert_array_equal(gradient, 0)


def test_a_batch_without_tokens_counts_nothing():
  found = statistics(random_weights(), jnp.zeros((2, 3), bool))
  del found["router/x/signature_norm"]
  for leaf in jax.tree.leaves(found):
    np.testing.assert_array_equal(leaf, 0)


def test_norms_of_signatures_do_not_depend_on_tokens():
  for rows in (ROWS, ~ROWS, jnp.zeros((2, 3), bool)):
    norms, count = statistics(random_weights(), rows)["router/x/signature_norm"]
    np.testing.assert_allclose(norms, [5, 0, 2, 1])
    assert count == 1


RAN = {"a/self/router/weights": ROWS, "b/ffn/router/weights": ~ROWS}


WAITING = jnp.array([[0.5, 1.0, 1.0], [0.0, 0.5, 0.5]])


class Routed:
  """An objective, and its model, of which two routers of three run."""

  def weights(self, config):
    return {}

  def __call__(self, model, params, carry, batch, context):
    for site in RAN:
      router = context.intermediates.scope(site.removesuffix("/weights"))
      router("signatures", batch[site][1])
      router("weights", batch[site][0])
      if site.startswith("b/"):
        router("waiting", WAITING)
    return {}, carry, {"own": (jnp.float32(1), jnp.float32(1))}

  def valid_mask(self, site, batch):
    return RAN[site]


def test_routers_are_told_apart_and_those_that_do_not_run_left_out():
  first, second = RAN
  batch = {first: (random_weights(0), SIGNATURES), second: (random_weights(1), jnp.ones((4, 9)))}
  objective = WithRouterStatistics(Routed(), (first, second, "c/self/router/weights"))
  outside = Intermediates(capture=frozenset([first]))
  context = StepContext(jax.random.key(0), jnp.int32(0), True, intermediates=outside)
  _, _, found = objective(Routed(), {}, (), batch, context)
  expected = {"own": (1, 1)}
  for name, site in (("a/self", first), ("b/ffn", second)):
    expected |= router_statistics(name, *batch[site], RAN[site])
  # Of choices of the three real tokens of the second.
  expected["router/b/ffn/waiting"] = (2.0, 3)
  assert found.keys() == expected.keys()
  for name, pair in expected.items():
    for one, two in zip(found[name], pair, strict=True):
      np.testing.assert_allclose(one, two, rtol=1e-6)
  # Who looks in from outside still sees what it asked for.
  np.testing.assert_array_equal(outside.captured[first], batch[first][0])


def test_weights_by_position_are_sums_over_the_tokens_at_each_position():
  weights = np.asarray(random_weights())
  found = by_position(jnp.asarray(weights), ROWS, 2)
  np.testing.assert_allclose(found["by_position"][0][0], weights[:, 0].sum(axis=0), rtol=1e-6)
  np.testing.assert_allclose(found["by_position"][0][1], weights[0, 1], rtol=1e-6)
  np.testing.assert_array_equal(found["by_position"][1], [2, 1])
  np.testing.assert_allclose(found["mean"][0], weights[np.asarray(ROWS)].sum(axis=0), rtol=1e-6)
  assert found["mean"][1] == 3


def test_positions_beyond_the_batch_are_empty():
  sums, counts = by_position(random_weights(), ROWS, 5)["by_position"]
  assert sums.shape == (5, 4)
  np.testing.assert_array_equal(sums[3:], 0)
  np.testing.assert_array_equal(counts, [2, 1, 0, 0, 0])
