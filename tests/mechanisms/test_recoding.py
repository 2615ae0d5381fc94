"""Recoding on functions whose gradients are known, and its error signals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.recoding import signals
from compmod_jax.mechanisms.recoding.descent import descend, descend_safely, recode, smoothness

STEP = jax.jit(recode, static_argnums=0, static_argnames=("steps", "through"))


def numbers(*shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def squares(tree):
  """A signal whose gradient is twice the activation."""
  return (tree["a"] ** 2).sum(axis=-1) + tree["b"] ** 2


@pytest.fixture
def tree():
  return {"a": numbers(4, 3, seed=0), "b": numbers(4, seed=1)}


def test_a_step_goes_down_the_gradient_of_every_leaf(tree):
  found = STEP(squares, tree, 0.1)
  for name in tree:
    np.testing.assert_allclose(found.activations[name], 0.8 * tree[name], rtol=1e-6)
  np.testing.assert_allclose(found.error, squares(tree), rtol=1e-6)


def test_an_example_moves_the_same_whatever_else_is_in_the_batch(tree):
  alone = jax.tree.map(lambda leaf: leaf[:1], tree)
  together = STEP(squares, tree, 0.3).activations
  single = STEP(squares, alone, 0.3).activations
  for name in tree:
    np.testing.assert_array_equal(np.asarray(together[name])[:1], single[name])


def test_step_sizes_may_differ_by_example_and_by_leaf(tree):
  sizes = {"a": np.float32([0.0, 0.1, 0.2, 0.5]), "b": np.float32(0.25)}
  found = STEP(squares, tree, sizes).activations
  np.testing.assert_allclose(found["a"], tree["a"] * (1 - 2 * sizes["a"][:, None]), rtol=1e-5)
  np.testing.assert_allclose(found["b"], tree["b"] * 0.5, rtol=1e-6)


def test_a_step_of_size_zero_changes_nothing(tree):
  found = STEP(squares, tree, 0.0).activations
  for name in tree:
    np.testing.assert_array_equal(found[name], tree[name])


def test_several_steps_are_steps_one_after_the_other(tree):
  once = STEP(squares, STEP(squares, tree, 0.1).activations, 0.1).activations
  twice = STEP(squares, tree, 0.1, steps=2)
  for name in tree:
    np.testing.assert_allclose(twice.activations[name], once[name], rtol=1e-6)
  np.testing.assert_allclose(twice.error, squares(tree), rtol=1e-6)
  with pytest.raises(UserError, match="steps is 0"):
    STEP(squares, tree, 0.1, steps=0)


def test_a_loss_reaches_the_step_size_always_and_the_gradient_only_if_it_may_pass_through(tree):
  @functools.partial(jax.jit, static_argnums=2)
  @functools.partial(jax.grad, argnums=(0, 1))
  def slopes(tree, size, through):
    return jnp.sum(recode(squares, tree, size, through=through).activations["a"])

  for through, factor in ((False, 1.0), (True, 0.8)):
    by_tree, by_size = slopes(tree, 0.1, through)
    np.testing.assert_allclose(by_tree["a"], factor, rtol=1e-6)
    np.testing.assert_allclose(by_size, -2 * np.sum(tree["a"]), rtol=1e-5)


@jax.jit
def tried(first, second, at):
  """Errors before, and after safe steps of several sizes with the shares that were taken."""

  def error(at):
    logits = jnp.tanh(at @ first) @ second
    return signals.predictive_entropy(logits[None])

  gradient = jax.grad(lambda at: jnp.sum(error(at)))(at)
  found = []
  for size in (1e3, 1.0, 1 / smoothness(error, at, gradient)):
    after, share = descend_safely(error, at, gradient, size)
    found.append((error(after), share))
  return error(at), found


@pytest.mark.parametrize("seed", range(5))
def test_a_safe_step_never_raises_the_error_of_any_example(seed):
  random = np.random.default_rng(seed)
  shapes = ((6, 32), 3), ((32, 9), 3), ((50, 6), 1)
  given = [np.float32(scale * random.normal(size=shape)) for shape, scale in shapes]
  before, found = jax.tree.map(np.asarray, tried(*given))
  assert len(found) == 3
  for after, share in found:
    assert np.all(after <= before)
    assert np.all((share >= 0) & (share <= 1))
    assert np.any(share > 0)


def test_a_step_of_one_over_the_lipschitz_constant_lowers_a_quadratic_as_theorem_1_says(tree):
  @jax.jit
  def run(tree):
    found = recode(squares, tree, 0.0)
    constant = smoothness(squares, tree, found.gradients)
    after = squares(descend(tree, found.gradients, 1 / constant))
    norm = sum(jnp.sum(jnp.square(g).reshape(4, -1), axis=1) for g in found.gradients.values())
    return constant, found.error, after, norm

  constant, before, after, norm = map(np.asarray, run(tree))
  np.testing.assert_allclose(constant, 2.0, rtol=1e-3)
  assert np.all(before - after >= norm / (2 * constant) - 1e-4)


def test_a_safe_step_can_be_part_of_a_loss(tree):
  def loss(scale, tree):
    at = jax.tree.map(lambda leaf: scale * leaf, tree)
    found = recode(squares, at, 0.0)
    after, _ = descend_safely(squares, at, found.gradients, 5.0)
    return jnp.sum(squares(after))

  assert np.isfinite(jax.jit(jax.grad(loss))(1.0, tree))


# Error signals.


VALUE = jax.jit(signals.value, static_argnums=0)
SLOPE = jax.jit(signals.slope, static_argnums=0)


def test_surprisal_is_the_published_function_with_its_maximum_at_one_over_e():
  o = np.float32([1e-6, 0.1, 1 / np.e, 0.5, 0.999999])
  found = np.asarray(VALUE("surprisal", -np.log(o)))
  np.testing.assert_allclose(found, o**-o - 1, atol=1e-5)
  np.testing.assert_allclose(found[2], np.e ** (1 / np.e) - 1, rtol=1e-5)
  assert np.argmax(found) == 2


@pytest.mark.parametrize("kind", ["surprisal", "argmax", "nll"])
def test_the_slope_is_the_derivative(kind):
  nll = np.linspace(0.01, 12.0, 40, dtype=np.float32)
  derivative = jax.jit(jax.grad(lambda n: jnp.sum(signals.value(kind, n))))(nll)
  np.testing.assert_allclose(SLOPE(kind, nll), derivative, rtol=1e-4, atol=1e-6)


def test_the_closed_form_of_the_likelihood_is_its_gradient():
  @jax.jit
  def run(logits, token):
    found = signals.likelihood(logits, token)
    expected = -jax.nn.log_softmax(logits)[jnp.arange(5), token]
    gradient = jax.grad(lambda x: jnp.sum(signals.likelihood(x, token).nll))(logits)
    return found.nll, expected, found.error, gradient

  nll, expected, error, gradient = run(3 * numbers(5, 7, seed=2), np.array([0, 3, 6, 2, 2]))
  np.testing.assert_allclose(nll, expected, rtol=1e-5)
  np.testing.assert_allclose(error, gradient, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 4])
def test_the_closed_form_of_the_entropy_is_its_gradient(samples):
  @jax.jit
  def run(logits):
    mean = jnp.mean(jax.nn.softmax(logits), axis=0)
    expected = -jnp.sum(mean * jnp.log(mean), axis=-1)
    gradient = jax.grad(lambda x: jnp.sum(signals.predictive_entropy(x)))(logits)
    return *signals.predictive_entropy_error(logits), expected, gradient

  entropy, error, expected, gradient = run(2 * numbers(samples, 5, 7, seed=3))
  np.testing.assert_allclose(entropy, expected, rtol=1e-5)
  np.testing.assert_allclose(error, gradient, atol=1e-6)


def test_logits_without_bound_give_finite_signals():
  logits = np.float32([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]])
  nll = jax.jit(lambda *given: signals.likelihood(*given).nll)(logits, np.array([1, 0]))
  for kind in ("surprisal", "nll"):
    assert np.all(np.isfinite(VALUE(kind, nll)))
    assert np.all(np.isfinite(SLOPE(kind, nll)))
  entropy, error = jax.jit(signals.predictive_entropy_error)(logits[None])
  assert np.all(np.isfinite(entropy))
  assert np.all(np.isfinite(error))
  np.testing.assert_allclose(entropy, [0.0, np.log(3)], atol=1e-6)


def test_the_label_loss_is_binary_cross_entropy():
  logit, label = np.float32([-3.0, 0.5, 2.0]), np.float32([0.0, 1.0, 0.0])
  p = 1 / (1 + np.exp(-logit))
  expected = -(label * np.log(p) + (1 - label) * np.log(1 - p))
  np.testing.assert_allclose(jax.jit(signals.label_loss)(logit, label), expected, rtol=1e-5)
