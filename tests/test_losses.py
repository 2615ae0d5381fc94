"""Losses: cross-entropy against numpy in float64, and terms of an objective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.losses import Term, cross_entropy, objective, ratio

entropy = jax.jit(
  lambda *args, label_smoothing=0.0: vars(cross_entropy(*args, label_smoothing=label_smoothing)),
  static_argnames="label_smoothing",
)
SHAPE = (3, 5, 11)


def example() -> tuple[jax.Array, jax.Array, jax.Array]:
  rng = np.random.default_rng(0)
  logits = jnp.asarray(3 * rng.normal(size=SHAPE), jnp.float32)
  labels = jnp.asarray(rng.integers(SHAPE[-1], size=SHAPE[:2]), jnp.int32)
  mask = jnp.asarray([[True] * n + [False] * (5 - n) for n in (5, 3, 0)])
  return logits, labels, mask


def log_softmax(logits: jax.Array) -> np.ndarray:
  x = np.asarray(logits, np.float64)
  shifted = x - x.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_cross_entropy_is_minus_the_log_softmax_of_the_label():
  logits, labels, mask = example()
  log_p = np.take_along_axis(log_softmax(logits), np.asarray(labels)[..., None], -1)[..., 0]
  found = entropy(logits, labels, mask)
  np.testing.assert_allclose(found["nll"], -log_p[np.asarray(mask)].sum(), rtol=1e-6)
  np.testing.assert_array_equal(found["smoothed"], found["nll"])
  assert found["count"] == 8
  right = np.asarray(logits).argmax(axis=-1) == np.asarray(labels)
  assert found["correct"] == right[np.asarray(mask)].sum()


def test_label_smoothing_is_cross_entropy_with_a_smoothed_distribution():
  logits, labels, mask = example()
  target = np.eye(SHAPE[-1])[np.asarray(labels)] * 0.9 + 0.1 / SHAPE[-1]
  losses = -(target * log_softmax(logits)).sum(axis=-1)
  found = entropy(logits, labels, mask, label_smoothing=0.1)
  np.testing.assert_allclose(found["smoothed"], losses[np.asarray(mask)].sum(), rtol=1e-6)
  np.testing.assert_array_equal(found["nll"], entropy(logits, labels, mask)["nll"])


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_masked_tokens_count_neither_in_values_nor_in_gradients(label_smoothing):
  logits, labels, mask = example()
  other = jnp.where(mask[..., None], logits, 7.0), jnp.where(mask, labels, 1), mask
  one = entropy(logits, labels, mask, label_smoothing=label_smoothing)
  two = entropy(*other, label_smoothing=label_smoothing)
  for name in one:
    np.testing.assert_array_equal(one[name], two[name])

  def smoothed(logits):
    return cross_entropy(logits, labels, mask, label_smoothing=label_smoothing).smoothed

  gradient = np.asarray(jax.jit(jax.grad(smoothed))(logits))
  np.testing.assert_array_equal(gradient[~np.asarray(mask)], 0)
  assert (gradient[np.asarray(mask)] != 0).all()


def test_the_gradient_is_probability_minus_the_smoothed_target():
  logits, labels, mask = example()
  target = np.eye(SHAPE[-1])[np.asarray(labels)] * 0.9 + 0.1 / SHAPE[-1]
  expected = (np.exp(log_softmax(logits)) - target) * np.asarray(mask)[..., None]

  def smoothed(logits):
    return cross_entropy(logits, labels, mask, label_smoothing=0.1).smoothed

  np.testing.assert_allclose(jax.jit(jax.grad(smoothed))(logits), expected, atol=1e-6)


def test_losses_of_bfloat16_logits_are_computed_in_float32():
  logits, labels, mask = example()
  rough = logits.astype(jnp.bfloat16)
  found, exact = entropy(rough, labels, mask), entropy(jnp.float32(rough), labels, mask)
  for name, value in found.items():
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(value, exact[name])


def test_losses_of_huge_logits_are_finite():
  _, labels, mask = example()
  for value in entropy(jnp.full(SHAPE, 1e30), labels, mask, label_smoothing=0.1).values():
    assert np.isfinite(value)


def test_the_objective_is_the_weighted_sum_of_sum_over_count():
  terms = {"a": Term(jnp.float32(6), jnp.float32(3)), "b": Term(jnp.float32(5), 2, weight=0.1)}
  np.testing.assert_allclose(objective(terms), 2.25, rtol=1e-6)
  np.testing.assert_allclose(terms["b"].value(), 2.5, rtol=1e-6)


def test_a_term_that_counted_nothing_is_zero_with_zero_gradient():
  value, gradient = jax.value_and_grad(lambda x: Term(x, jnp.float32(0)).value())(0.0)
  assert value == 0
  assert np.isfinite(gradient)


def test_a_term_may_finish_its_totals_in_its_own_way():
  term = Term({"p": jnp.array([1.0, 3.0])}, 4.0, finish=lambda s, n: jnp.sum((s["p"] / n) ** 2))
  np.testing.assert_allclose(term.value(), 1 / 16 + 9 / 16)


def test_no_gradient_passes_through_a_count():
  assert jax.grad(lambda n: Term(jnp.float32(3), n, finish=ratio).value())(2.0) == 0
