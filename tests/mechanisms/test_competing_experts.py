"""Winners, losses and their gradients, assignment; PyTorch's in tests/peers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.mechanisms.competing_experts import (
  assignment,
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
  as_arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, transformed, originals))
  return as_arrays


def losses(params, transformed, originals):
  """L_E and L_D, each a mean."""
  found = compete(experts, discriminator, params, transformed, originals)
  against = jnp.mean(found.discriminator_loss_original) + jnp.mean(found.discriminator_loss_output)
  return jnp.mean(found.expert_loss), against


def test_winners_and_losses_are_those_of_a_loop_over_images_and_experts(inputs):
  (of_experts, of_discriminator), transformed, originals = inputs
  found = compete(experts, discriminator, inputs[0], transformed, originals)

  def probability(x):
    return 1 / (1 + np.exp(-np.asarray(discriminator(of_discriminator, x), np.float64)))

  for place, x in enumerate(transformed):
    made = [probability(jnp.tanh(matrix @ x)) for matrix in of_experts]
    winner = int(np.argmax(made))
    assert found.winner[place] == winner
    np.testing.assert_allclose(found.expert_loss[place], -np.log(made[winner]), rtol=1e-5)
    against = -np.mean([np.log(1 - p) for p in made])
    np.testing.assert_allclose(found.discriminator_loss_output[place], against, rtol=1e-5)
  expected = [-np.log(probability(x)) for x in originals]
  np.testing.assert_allclose(found.discriminator_loss_original, expected, rtol=1e-5)


def test_an_image_teaches_the_expert_that_wins_it_and_no_other(inputs):
  params, transformed, originals = inputs
  found = compete(experts, discriminator, params, transformed, originals)
  assert len(set(found.winner.tolist())) > 1

  def one(params, place):
    made = compete(experts, discriminator, params, transformed, originals)
    return made.expert_loss[place]

  for place, winner in enumerate(found.winner.tolist()):
    of_experts, of_discriminator = jax.grad(one)(params, place)
    reached = np.abs(of_experts).sum(axis=(1, 2)) > 0
    assert np.flatnonzero(reached).tolist() == [winner]
    assert not np.any(of_discriminator)


def test_the_discriminator_s_loss_reaches_the_discriminator_alone_and_through_every_expert(inputs):
  params, transformed, originals = inputs
  of_experts, of_discriminator = jax.grad(lambda p: losses(p, transformed, originals)[1])(params)
  assert not np.any(of_experts)

  # Its slope is one over all experts, by finite differences of the definition.
  def definition(of_discriminator):
    made = jnp.tanh(jnp.einsum("eij,bj->ebi", params[0], transformed))
    fake = jnp.mean(jax.nn.softplus(discriminator(of_discriminator, made)))
    return jnp.mean(jax.nn.softplus(-discriminator(of_discriminator, originals))) + fake

  for axis in range(DIM):
    step = 1e-2 * jnp.eye(DIM)[axis]
    slope = (definition(params[1] + step) - definition(params[1] - step)) / 2e-2
    np.testing.assert_allclose(of_discriminator[axis], slope, rtol=1e-2, atol=1e-3)


def test_one_gradient_of_both_losses_is_the_gradient_of_each(inputs):
  params, transformed, originals = inputs
  both = jax.grad(lambda p: sum(losses(p, transformed, originals)))(params)
  first = jax.grad(lambda p: losses(p, transformed, originals)[0])(params)
  second = jax.grad(lambda p: losses(p, transformed, originals)[1])(params)
  np.testing.assert_allclose(both[0], first[0], rtol=1e-6)
  np.testing.assert_allclose(both[1], second[1], rtol=1e-6)


def test_a_step_on_the_winner_s_loss_raises_its_score(inputs):
  params, transformed, originals = inputs
  before = compete(experts, discriminator, params, transformed, originals)
  slope = jax.grad(lambda p: losses(p, transformed, originals)[0])(params)[0]
  after = compete(
    experts, discriminator, (params[0] - 1e-2 * slope, params[1]), transformed, originals
  )
  scores = (
    np.take_along_axis(np.asarray(found.scores), np.asarray(before.winner)[None], axis=0)[0]
    for found in (before, after)
  )
  before, after = scores
  loss = [np.mean(np.log1p(np.exp(-one))) for one in (before, after)]
  assert loss[1] < loss[0]


def test_of_equal_scores_the_first_expert_wins():
  assert winners(jnp.array([[1.0, 0.0], [1.0, 2.0], [0.0, 2.0]])).tolist() == [0, 1]
  outputs = jnp.arange(6.0).reshape(3, 2, 1)
  assert of_winners(outputs, jnp.array([2, 0])).tolist() == [[4.0], [1.0]]


def test_pretraining_pulls_every_expert_to_the_identity_as_if_it_were_alone(inputs):
  (of_experts, _), transformed, _ = inputs

  def wrong(params):
    return jnp.sum(jnp.mean(identity_error(experts(params, transformed), transformed), axis=1))

  whole = jax.grad(wrong)(of_experts)
  for number in range(EXPERTS):
    alone = jax.grad(wrong)(of_experts[number : number + 1])
    np.testing.assert_allclose(whole[number], alone[0], rtol=1e-5, atol=1e-6)
  perfect = jnp.broadcast_to(transformed, (EXPERTS, *transformed.shape))
  assert not np.any(identity_error(perfect, transformed))
  np.testing.assert_allclose(identity_error(perfect + 2, transformed), 4, rtol=1e-5)


def test_assignment_counts_wins():
  draw = np.random.default_rng(1)
  winner, kind = draw.integers(4, size=50), draw.integers(3, size=50)
  weight = draw.integers(2, size=50).astype(np.float32)
  expected = np.zeros((3, 4))
  for w, k, one in zip(winner, kind, weight, strict=True):
    expected[k, w] += one
  found = assignment(jnp.asarray(winner), jnp.asarray(kind), (3, 4), jnp.asarray(weight))
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
