"""Recoding on functions whose gradients are known, and its error signals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.recoding import signals
from compmod_jax.mechanisms.recoding.descent import descend, descend_safely, recode, smoothness

KEYS = jax.random.split(jax.random.key(0), 8)


def squares(tree):
  """A signal whose gradient is twice the activation."""
  return jnp.sum(tree["a"] ** 2, axis=-1) + tree["b"] ** 2


@pytest.fixture
def tree():
  return {"a": jax.random.normal(KEYS[0], (4, 3)), "b": jax.random.normal(KEYS[1], (4,))}


def test_a_step_goes_down_the_gradient_of_every_leaf(tree):
  found = recode(squares, tree, 0.1)
  for name in tree:
    np.testing.assert_allclose(found.activations[name], 0.8 * tree[name], rtol=1e-6)
  np.testing.assert_allclose(found.error, squares(tree), rtol=1e-6)


def test_an_example_moves_the_same_whatever_else_is_in_the_batch(tree):
  alone = jax.tree.map(lambda leaf: leaf[:1], tree)
  together = recode(squares, tree, 0.3).activations
  single = recode(squares, alone, 0.3).activations
  for name in tree:
    np.testing.assert_array_equal(together[name][:1], single[name])


def test_step_sizes_may_differ_by_example_and_by_leaf(tree):
  sizes = {"a": jnp.array([0.0, 0.1, 0.2, 0.5]), "b": 0.25}
  found = recode(squares, tree, sizes).activations
  np.testing.assert_allclose(found["a"], tree["a"] * (1 - 2 * sizes["a"][:, None]), rtol=1e-5)
  np.testing.assert_allclose(found["b"], tree["b"] * 0.5, rtol=1e-6)


def test_a_step_of_size_zero_changes_nothing(tree):
  found = recode(squares, tree, 0.0).activations
  for name in tree:
    np.testing.assert_array_equal(found[name], tree[name])


def test_several_steps_are_steps_one_after_the_other(tree):
  once = recode(squares, recode(squares, tree, 0.1).activations, 0.1).activations
  twice = recode(squares, tree, 0.1, steps=2)
  for name in tree:
    np.testing.assert_allclose(twice.activations[name], once[name], rtol=1e-6)
  np.testing.assert_allclose(twice.error, squares(tree), rtol=1e-6)
  with pytest.raises(UserError, match="steps is 0"):
    recode(squares, tree, 0.1, steps=0)


def test_a_loss_reaches_the_step_size_always_and_the_gradient_only_if_it_may_pass_through(tree):
  def loss(tree, size, through):
    return jnp.sum(recode(squares, tree, size, through=through).activations["a"])

  for through, factor in ((False, 1.0), (True, 0.8)):
    by_tree, by_size = jax.grad(loss, (0, 1))(tree, 0.1, through)
    np.testing.assert_allclose(by_tree["a"], factor, rtol=1e-6)
    np.testing.assert_allclose(by_size, -2 * jnp.sum(tree["a"]), rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_a_safe_step_never_raises_the_error_of_any_example(seed):
  keys = jax.random.split(jax.random.key(seed), 3)
  first, second = jax.random.normal(keys[0], (6, 32)) * 3, jax.random.normal(keys[1], (32, 9)) * 3
  at = jax.random.normal(keys[2], (50, 6))

  def error(at):
    logits = jnp.tanh(at @ first) @ second
    return signals.predictive_entropy(logits[None])

  gradient = jax.grad(lambda at: jnp.sum(error(at)))(at)
  for size in (1e3, 1.0, 1 / smoothness(error, at, gradient)):
    after, share = descend_safely(error, at, gradient, size)
    assert np.all(error(after) <= error(at))
    assert np.all((share >= 0) & (share <= 1))
    assert np.any(share > 0)


def test_a_step_of_one_over_the_lipschitz_constant_lowers_a_quadratic_as_theorem_1_says(tree):
  found = recode(squares, tree, 0.0)
  constant = smoothness(squares, tree, found.gradients)
  np.testing.assert_allclose(constant, 2.0, rtol=1e-3)
  after = squares(descend(tree, found.gradients, 1 / constant))
  norm = sum(jnp.sum(jnp.square(g).reshape(4, -1), axis=1) for g in found.gradients.values())
  assert np.all(found.error - after >= norm / (2 * constant) - 1e-4)


def test_a_safe_step_can_be_part_of_a_loss(tree):
  def loss(scale):
    at = jax.tree.map(lambda leaf: scale * leaf, tree)
    found = recode(squares, at, 0.0)
    after, _ = descend_safely(squares, at, found.gradients, 5.0)
    return jnp.sum(squares(after))

  assert np.isfinite(jax.grad(loss)(1.0))


# Error signals.


def test_surprisal_is_the_published_function_with_its_maximum_at_one_over_e():
  o = jnp.array([1e-6, 0.1, 1 / np.e, 0.5, 0.999999])
  found = signals.value("surprisal", -jnp.log(o))
  np.testing.assert_allclose(found, o**-o - 1, atol=1e-5)
  np.testing.assert_allclose(found[2], np.e ** (1 / np.e) - 1, rtol=1e-5)
  assert np.argmax(found) == 2


@pytest.mark.parametrize("kind", ["surprisal", "argmax", "nll"])
def test_the_slope_is_the_derivative(kind):
  nll = jnp.linspace(0.01, 12.0, 40)
  derivative = jax.grad(lambda n: jnp.sum(signals.value(kind, n)))(nll)
  np.testing.assert_allclose(signals.slope(kind, nll), derivative, rtol=1e-4, atol=1e-6)


def test_the_closed_form_of_the_likelihood_is_its_gradient():
  logits = 3 * jax.random.normal(KEYS[2], (5, 7))
  token = jnp.array([0, 3, 6, 2, 2])
  found = signals.likelihood(logits, token)
  np.testing.assert_allclose(
    found.nll, -jax.nn.log_softmax(logits)[jnp.arange(5), token], rtol=1e-5
  )
  gradient = jax.grad(lambda x: jnp.sum(signals.likelihood(x, token).nll))(logits)
  np.testing.assert_allclose(found.error, gradient, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 4])
def test_the_closed_form_of_the_entropy_is_its_gradient(samples):
  logits = 2 * jax.random.normal(KEYS[3], (samples, 5, 7))
  entropy, error = signals.predictive_entropy_error(logits)
  mean = jnp.mean(jax.nn.softmax(logits), axis=0)
  np.testing.assert_allclose(entropy, -jnp.sum(mean * jnp.log(mean), axis=-1), rtol=1e-5)
  gradient = jax.grad(lambda x: jnp.sum(signals.predictive_entropy(x)))(logits)
  np.testing.assert_allclose(error, gradient, atol=1e-6)


def test_logits_without_bound_give_finite_signals():
  logits = jnp.array([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]])
  found = signals.likelihood(logits, jnp.array([1, 0]))
  for kind in ("surprisal", "nll"):
    assert np.all(np.isfinite(signals.value(kind, found.nll)))
    assert np.all(np.isfinite(signals.slope(kind, found.nll)))
  entropy, error = signals.predictive_entropy_error(logits[None])
  assert np.all(np.isfinite(entropy))
  assert np.all(np.isfinite(error))
  np.testing.assert_allclose(entropy, [0.0, np.log(3)], atol=1e-6)


def test_the_label_loss_is_binary_cross_entropy():
  logit, label = jnp.array([-3.0, 0.5, 2.0]), jnp.array([0.0, 1.0, 0.0])
  p = 1 / (1 + np.exp(-logit))
  expected = -(label * np.log(p) + (1 - label) * np.log(1 - p))
  np.testing.assert_allclose(signals.label_loss(logit, label), expected, rtol=1e-5)
