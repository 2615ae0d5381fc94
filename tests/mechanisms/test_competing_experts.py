"""Winners, losses and their gradients, assignment; PyTorch's in tests/peers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.mechanisms.competing_experts import (
  assignment,
  balance_loss,
  compete,
  identity_error,
  of_winners,
  owners,
  winners,
)

EXPERTS, BATCH, DIM = 3, 7, 4


def experts(params, x):
  return jnp.tanh(jnp.einsum("eij,bj->ebi", params, x))


def discriminator(params, x):
  return jnp.sin(3 * x) @ params


@pytest.fixture(scope="module")
def inputs():
  draw = np.random.default_rng(0)
  params = draw.normal(size=(EXPERTS, DIM, DIM)), draw.normal(size=DIM)
  transformed, originals = draw.normal(size=(BATCH, DIM)), draw.normal(size=(5, DIM))
  return jax.tree.map(lambda x: jnp.asarray(x.astype(np.float32)), (params, transformed, originals))


@jax.jit
def competed(params, transformed, originals):
  return compete(experts, discriminator, params, transformed, originals)


def losses(params, transformed, originals):
  """L_E and L_D, each a mean."""
  found = compete(experts, discriminator, params, transformed, originals)
  against = jnp.mean(found.discriminator_loss_original) + jnp.mean(found.discriminator_loss_output)
  return jnp.mean(found.expert_loss), against


@jax.jit
def slopes(params, transformed, originals):
  """Gradients of L_E, of L_D and of their sum."""
  of_one = [jax.grad(lambda p, n=n: losses(p, transformed, originals)[n])(params) for n in (0, 1)]
  return *of_one, jax.grad(lambda p: sum(losses(p, transformed, originals)))(params)


def test_winners_and_losses_are_those_of_a_loop_over_images_and_experts(inputs):
  (of_experts, of_discriminator), transformed, originals = jax.device_get(inputs)
  found = jax.device_get(competed(*inputs))

  def probability(x):
    return 1 / (1 + np.exp(-np.asarray(np.sin(3 * x) @ of_discriminator, np.float64)))

  for place, x in enumerate(transformed):
    made = [probability(np.tanh(matrix @ x)) for matrix in of_experts]
    winner = int(np.argmax(made))
    assert found.winner[place] == winner
    np.testing.assert_allclose(found.expert_loss[place], -np.log(made[winner]), rtol=1e-5)
    against = -np.mean([np.log(1 - p) for p in made])
    np.testing.assert_allclose(found.discriminator_loss_output[place], against, rtol=1e-5)
  expected = [-np.log(probability(x)) for x in originals]
  np.testing.assert_allclose(found.discriminator_loss_original, expected, rtol=1e-5)


def test_an_image_teaches_the_expert_that_wins_it_and_no_other(inputs):
  params, transformed, originals = inputs
  winner_of = competed(*inputs).winner.tolist()
  assert len(set(winner_of)) > 1

  def each(params):
    return compete(experts, discriminator, params, transformed, originals).expert_loss

  by_place = jax.device_get(jax.jit(jax.jacrev(each))(params))
  for place, winner in enumerate(winner_of):
    of_experts, of_discriminator = (leaf[place] for leaf in by_place)
    reached = np.abs(of_experts).sum(axis=(1, 2)) > 0
    assert np.flatnonzero(reached).tolist() == [winner]
    assert not np.any(of_discriminator)


def test_the_discriminator_s_loss_reaches_the_discriminator_alone_and_through_every_expert(inputs):
  params, transformed, originals = inputs
  of_experts, of_discriminator = slopes(*inputs)[1]
  assert not np.any(of_experts)

  # Its slope is one over all experts, by finite differences of the definition.
  @jax.jit
  def definition(of_discriminator):
    made = jnp.tanh(jnp.einsum("eij,bj->ebi", params[0], transformed))
    fake = jnp.mean(jax.nn.softplus(discriminator(of_discriminator, made)))
    return jnp.mean(jax.nn.softplus(-discriminator(of_discriminator, originals))) + fake

  for axis in range(DIM):
    step, at = np.float32(1e-2) * np.eye(DIM, dtype=np.float32)[axis], np.asarray(params[1])
    slope = np.subtract(definition(at + step), definition(at - step)) / 2e-2
    np.testing.assert_allclose(np.asarray(of_discriminator)[axis], slope, rtol=1e-2, atol=1e-3)


def test_one_gradient_of_both_losses_is_the_gradient_of_each(inputs):
  first, second, both = slopes(*inputs)
  np.testing.assert_allclose(both[0], first[0], rtol=1e-6)
  np.testing.assert_allclose(both[1], second[1], rtol=1e-6)


def test_a_step_on_the_winner_s_loss_raises_its_score(inputs):
  params, transformed, originals = inputs
  before, slope = competed(*inputs), np.asarray(slopes(*inputs)[0][0])
  moved = np.asarray(params[0]) - np.float32(1e-2) * slope
  after = competed((moved, params[1]), transformed, originals)
  scores = (
    np.take_along_axis(np.asarray(found.scores), np.asarray(before.winner)[None], axis=0)[0]
    for found in (before, after)
  )
  before, after = scores
  loss = [np.mean(np.log1p(np.exp(-one))) for one in (before, after)]
  assert loss[1] < loss[0]


def test_a_bias_decides_who_wins_and_changes_no_loss_otherwise(inputs):
  bias = np.float32([0, 1e3, -1e3])
  plain = competed(*inputs)
  found = jax.device_get(
    jax.jit(lambda *args: compete(experts, discriminator, *args))(*inputs, bias)
  )
  assert len(set(np.asarray(plain.winner).tolist())) > 1
  assert found.winner.tolist() == [1] * BATCH
  np.testing.assert_array_equal(found.scores, plain.scores)
  np.testing.assert_allclose(found.expert_loss, np.log1p(np.exp(-found.scores[1])), rtol=1e-5)
  np.testing.assert_array_equal(found.discriminator_loss_output, plain.discriminator_loss_output)


def test_the_slope_of_a_bias_is_how_much_more_its_expert_wins_than_its_share():
  winner, weight = np.int32([0, 0, 2, 0, 2, 1]), np.float32([1, 1, 1, 1, 1, 0])
  bias = np.float32([0.3, -0.2, 0.5])

  @jax.jit
  def total(bias, winner, weight):
    return jnp.sum(balance_loss(bias, winner, weight))

  slope = jax.jit(jax.grad(total))(bias, winner, weight)
  np.testing.assert_allclose(slope, np.array([3, 0, 2]) - 5 / 3, rtol=1e-5)
  np.testing.assert_allclose(total(bias, winner, weight), np.dot(slope, bias), rtol=1e-5)


def test_of_equal_scores_the_first_expert_wins():
  scores = np.float32([[1.0, 0.0], [1.0, 2.0], [0.0, 2.0]])
  assert jax.jit(winners)(scores).tolist() == [0, 1]
  outputs = np.arange(6, dtype=np.float32).reshape(3, 2, 1)
  assert jax.jit(of_winners)(outputs, np.int32([2, 0])).tolist() == [[4.0], [1.0]]


def test_pretraining_pulls_every_expert_to_the_identity_as_if_it_were_alone(inputs):
  (of_experts, _), transformed, _ = inputs

  error = jax.jit(identity_error)

  @jax.jit
  @jax.grad
  def slope(params):
    return jnp.sum(jnp.mean(identity_error(experts(params, transformed), transformed), axis=1))

  of_experts = np.asarray(of_experts)
  whole = np.asarray(slope(of_experts))
  for number in range(EXPERTS):
    alone = np.asarray(slope(of_experts[number : number + 1]))
    np.testing.assert_allclose(whole[number], alone[0], rtol=1e-5, atol=1e-6)
  perfect = np.broadcast_to(transformed, (EXPERTS, *transformed.shape))
  assert not np.any(error(perfect, transformed))
  np.testing.assert_allclose(error(perfect + 2, transformed), 4, rtol=1e-5)


def test_assignment_counts_wins():
  draw = np.random.default_rng(1)
  winner, kind = draw.integers(4, size=50), draw.integers(3, size=50)
  weight = draw.integers(2, size=50).astype(np.float32)
  expected = np.zeros((3, 4))
  for w, k, one in zip(winner, kind, weight, strict=True):
    expected[k, w] += one
  found = jax.jit(assignment, static_argnums=2)(winner, kind, (3, 4), weight)
  np.testing.assert_array_equal(found, expected)


def test_a_transformation_has_an_expert_of_its_own_only_if_that_has_no_other():
  counts = np.array([
    [9.0, 1, 0, 0],  # expert 0's alone
    [0, 6, 4, 0],  # expert 1 wins this one
    [1, 8, 1, 0],  # and this one
    [4, 0, 5, 1],  # nobody wins more than half
    [0, 0, 0, 0],  # no images
  ])  # fmt: skip
  assert owners(counts).tolist() == [0, -1, -1, -1, -1]
  assert owners(np.eye(4)).tolist() == [0, 1, 2, 3]
