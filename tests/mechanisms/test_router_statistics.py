"""Router health: sums and counts over real tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.mechanisms.competition.statistics import (
  router_statistics,
  routers_captured,
  routers_statistics,
  weights_by_position,
)

statistics = jax.jit(router_statistics, static_argnums=0)
by_position = jax.jit(weights_by_position, static_argnums=2)
ROWS = jnp.array([[True, True, False], [True, False, False]])


def random_weights(seed: int = 0) -> jax.Array:
  weights = np.random.default_rng(seed).dirichlet(np.ones(4), size=(2, 3))
  return jnp.asarray(weights, jnp.float32)


def means(found: dict) -> dict[str, np.ndarray]:
  return {name: np.asarray(total) / np.asarray(count) for name, (total, count) in found.items()}


def test_mean_weight_and_share_of_wins_are_over_real_tokens_only():
  weights = random_weights()
  real = np.asarray(weights)[np.asarray(ROWS)]
  found = means(statistics("x", weights, ROWS))
  np.testing.assert_allclose(found["router/x/weight"], real.mean(axis=0), rtol=1e-6)
  wins = np.bincount(real.argmax(axis=-1), minlength=4) / 3
  np.testing.assert_allclose(found["router/x/wins"], wins, rtol=1e-6)
  entropy = -(real * np.log(real)).sum(axis=-1).mean()
  np.testing.assert_allclose(found["router/x/entropy"], entropy, rtol=1e-5)


def test_what_padding_holds_does_not_matter():
  weights = random_weights()
  other = jnp.where(ROWS[..., None], weights, jnp.nan)
  for one, two in zip(
    jax.tree.leaves((statistics("x", weights, ROWS), by_position(weights, ROWS, 2))),
    jax.tree.leaves((statistics("x", other, ROWS), by_position(other, ROWS, 2))),
    strict=True,
  ):
    np.testing.assert_array_equal(one, two)


def test_entropy_is_log_heads_for_uniform_weights_and_zero_for_a_lone_winner():
  uniform = means(statistics("x", jnp.full((2, 3, 4), 0.25), ROWS))
  np.testing.assert_allclose(uniform["router/x/entropy"], np.log(4), rtol=1e-6)
  alone = means(statistics("x", jnp.broadcast_to(jnp.eye(4)[2], (2, 3, 4)), ROWS))
  np.testing.assert_array_equal(alone["router/x/entropy"], 0)
  np.testing.assert_array_equal(alone["router/x/wins"], [0, 0, 1, 0])


def test_a_tie_is_won_by_the_lower_head():
  found = means(statistics("x", jnp.full((2, 3, 4), 0.25), ROWS))
  np.testing.assert_array_equal(found["router/x/wins"], [1, 0, 0, 0])


def test_statistics_of_two_batches_add_up_to_those_of_both():
  one, two = random_weights(0), random_weights(1)
  both = statistics("x", jnp.concatenate([one, two]), jnp.concatenate([ROWS, ROWS]))
  added = jax.tree.map(np.add, statistics("x", one, ROWS), statistics("x", two, ROWS))
  for a, b in zip(jax.tree.leaves(both), jax.tree.leaves(added), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_no_gradient_passes_through_the_statistics():
  def total(weights):
    return sum(jnp.sum(x) for x, _ in router_statistics("x", weights, ROWS).values())

  np.testing.assert_array_equal(jax.jit(jax.grad(total))(random_weights()), 0)


def test_a_batch_without_tokens_counts_nothing():
  found = statistics("x", random_weights(), jnp.zeros((2, 3), bool))
  for leaf in jax.tree.leaves(found):
    np.testing.assert_array_equal(leaf, 0)


def test_all_routers_of_a_model_are_told_apart_with_the_norms_of_their_signatures():
  sites = ["a/self/router/weights", "b/ffn/router/weights"]
  captured = {site: random_weights(n) for n, site in enumerate(sites)}
  captured["a/self/router/signatures"] = jnp.array([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
  captured["b/ffn/router/signatures"] = jnp.ones((4, 9))
  assert routers_captured(sites) == captured.keys()
  rows = {sites[0]: ROWS, sites[1]: ~ROWS}
  found = jax.jit(lambda c: routers_statistics(sites, c, rows.__getitem__))(captured)
  for n, name in enumerate(("a/self", "b/ffn")):
    own = statistics(name, random_weights(n), rows[sites[n]])
    for key, pair in own.items():
      for one, two in zip(pair, found[key], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)
  norms = means(found)
  np.testing.assert_allclose(norms["router/a/self/signature_norm"], [5, 0, 2, 1])
  np.testing.assert_allclose(norms["router/b/ffn/signature_norm"], 3, rtol=1e-6)


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
