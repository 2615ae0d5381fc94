"""Trajectories, penalties, distillation, buffers and measures against closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.continual import (
  accuracy_matrix,
  add_balanced,
  add_to_reservoir,
  distillation_loss,
  drawn,
  empty_buffer,
  fisher_diagonal,
  online_trajectory,
  outer_loss,
  quadratic_penalty,
  replaced,
  selected,
  transfer,
)


def numbers(*shape, seed):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def rows(count, seed):
  return {"x": numbers(count, 3, seed=seed), "y": numbers(count, seed=seed + 1)}


def quadratic(params, rows):
  return 0.5 * jnp.mean((rows["x"] @ params["head"]["w"] - rows["y"]) ** 2)


def network(params, rows):
  hidden = jnp.tanh(rows["x"] @ params["body"]["kernel"])
  return jnp.mean((hidden @ params["head"]["w"] - rows["y"]) ** 2)


def parameters():
  return {"body": {"kernel": numbers(3, 3, seed=7)}, "head": {"w": numbers(3, seed=8)}}


# Trajectories.


def test_a_trajectory_is_a_step_on_each_example_in_turn():
  params, examples = parameters(), rows(5, 0)
  found = jax.jit(functools.partial(online_trajectory, network, rate=0.1))(params, examples)

  @jax.jit
  def step(params, one):
    return jax.tree.map(lambda x, g: x - 0.1 * g, params, jax.grad(network)(params, one))

  for place in range(5):
    params = step(params, {name: np.asarray(x)[place : place + 1] for name, x in examples.items()})
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, params)


def test_only_named_parameters_learn_on_a_trajectory():
  params = parameters()
  how = {"rate": 0.1, "parameters": ("head",)}
  found = jax.jit(functools.partial(online_trajectory, network, **how))(params, rows(4, 0))
  np.testing.assert_array_equal(found["body"]["kernel"], params["body"]["kernel"])
  assert not np.allclose(found["head"]["w"], params["head"]["w"])
  with pytest.raises(UserError, match="'hed', which stands for no parameter"):
    online_trajectory(network, params, rows(4, 0), parameters=("hed",))


@pytest.mark.parametrize("first_order", [False, True])
def test_for_a_quadratic_loss_the_outer_gradient_is_its_closed_form(first_order):
  """A product of I - beta x x' before the gradient of the rows that are scored."""
  with jax.enable_x64(True):
    trajectory, remember, start = rows(4, 0), rows(3, 2), numbers(3, seed=8)
    how = {"rate": 0.1, "first_order": first_order}
    slopes = jax.jit(jax.grad(functools.partial(outer_loss, quadratic, **how)))
    found = slopes({"head": {"w": start}}, trajectory, remember)
  w, ahead = np.asarray(start), np.eye(3)
  for x, y in zip(np.asarray(trajectory["x"]), np.asarray(trajectory["y"]), strict=True):
    w = w - 0.1 * x * (x @ w - y)
    ahead = (np.eye(3) - 0.1 * np.outer(x, x)) @ ahead
  both = {name: np.concatenate([trajectory[name], remember[name]]) for name in trajectory}
  slope = both["x"].T @ (both["x"] @ w - both["y"]) / 7
  expected = slope if first_order else ahead.T @ slope
  np.testing.assert_allclose(found["head"]["w"], expected, rtol=1e-10)


@pytest.mark.parametrize("remat", [False, True])
def test_the_outer_gradient_also_of_examples_and_rate_is_that_of_finite_differences(remat):
  with jax.enable_x64(True):
    whole = {"params": parameters(), "trajectory": rows(4, 0), "rate": jnp.asarray(0.2)}

    @jax.jit
    @jax.value_and_grad
    def value(whole):
      return outer_loss(
        network, whole["params"], whole["trajectory"], rows(3, 2), rate=whole["rate"], remat=remat
      )

    slopes = jax.device_get(value(whole)[1])
    whole = jax.device_get(whole)
    for seed in range(3):
      way = jax.tree.map(lambda x, seed=seed: np.asarray(numbers(*x.shape, seed=seed)), whole)
      ends = [
        float(value(jax.tree.map(lambda x, w, size=size: x + size * w, whole, way))[0])
        for size in (1e-5, -1e-5)
      ]
      products = jax.tree.map(lambda g, w: np.sum(g * w), slopes, way)
      expected = (ends[0] - ends[1]) / 2e-5
      np.testing.assert_allclose(sum(jax.tree.leaves(products)), expected, rtol=1e-6)


# Elastic weight consolidation.


def logistic(params, rows):
  """Mean negative log-likelihood of a logistic regression."""
  return jnp.mean(jax.nn.softplus((1 - 2 * rows["y"]) * (rows["x"] @ params["w"])))


def test_the_fisher_diagonal_of_a_logistic_regression_is_its_closed_form():
  examples = {"x": numbers(6, 3, seed=0), "y": jnp.asarray([0.0, 1, 1, 0, 1, 0])}
  params = {"w": numbers(3, seed=1), "other": numbers(2, seed=2)}
  fisher = functools.partial(fisher_diagonal, logistic, parameters=("w",))
  found = jax.jit(fisher)(params, examples)
  assert set(found) == {"w"}
  p = 1 / (1 + np.exp(-np.asarray(examples["x"]) @ np.asarray(params["w"])))
  slopes = (p - np.asarray(examples["y"]))[:, None] * np.asarray(examples["x"])
  np.testing.assert_allclose(found["w"], np.mean(slopes**2, axis=0), rtol=1e-5)


def test_the_penalty_pulls_by_importance_to_the_anchor_and_is_nothing_there():
  params = jax.device_get(parameters())
  anchor = selected(params, ("head",))
  importance = {"head/w": np.float32([0.0, 1.0, 4.0])}
  penalty = jax.jit(jax.value_and_grad(quadratic_penalty))
  assert penalty(params, anchor, importance)[0] == 0
  moved = replaced(params, {"head/w": anchor["head/w"] + np.float32(0.5)})
  value, slope = penalty(moved, anchor, importance)
  np.testing.assert_allclose(value, 0.5 * 0.25 * 5, rtol=1e-6)
  np.testing.assert_allclose(slope["head"]["w"], 0.5 * importance["head/w"], rtol=1e-6)
  assert not np.any(slope["body"]["kernel"])


# Distillation.


def test_distillation_is_the_cross_entropy_of_known_classes_with_the_model_before():
  logits, teacher = np.array(numbers(4, 5, seed=0)), np.array(numbers(4, 5, seed=1))
  known, heat = np.array([True, False, True, True, False]), 2.0
  found = jax.jit(distillation_loss, static_argnums=3)(logits, teacher, known, heat)

  def softmax(z):
    raised = np.exp(z[:, known] / heat)
    return raised / raised.sum(axis=1, keepdims=True)

  np.testing.assert_allclose(
    found, -np.sum(softmax(teacher) * np.log(softmax(logits)), 1), rtol=1e-5
  )


def test_distillation_has_no_gradient_where_nothing_changed_or_nothing_is_known():
  logits, change = (np.asarray(numbers(4, 5, seed=seed)) for seed in (0, 1))

  @jax.jit
  def slopes(logits, teacher, known):
    return jax.grad(lambda z: jnp.sum(distillation_loss(z, teacher, known)))(logits)

  def slope(known, teacher):
    return np.asarray(slopes(logits, teacher, np.array(known)))

  some = [True, False, True, True, False]
  np.testing.assert_allclose(slope(some, logits), 0, atol=1e-6)
  changed = slope(some, logits + change)
  assert np.any(np.abs(changed[:, np.array(some)]) > 1e-3)
  assert not np.any(changed[:, ~np.array(some)])
  assert not np.any(slope([False] * 5, change))


# Rehearsal.


def fill(add, labels, capacity, seed):
  labels = jnp.asarray(labels, jnp.int32)

  def step(buffer, one):
    number, label, key = one
    return add(buffer, {"number": number}, label, key), None

  keys = jax.random.split(jax.random.key(seed), len(labels))
  start = empty_buffer(capacity, 4, {"number": jnp.int32(0)})
  return jax.lax.scan(step, start, (jnp.arange(len(labels)), labels, keys))[0]


def test_a_reservoir_keeps_every_example_with_the_same_probability():
  labels = np.arange(12) % 4
  run = jax.jit(jax.vmap(lambda seed: fill(add_to_reservoir, labels, 4, seed)))
  buffer = jax.device_get(run(np.arange(3000)))
  kept = np.bincount(np.asarray(buffer.items["number"]).ravel(), minlength=12) / 3000
  np.testing.assert_allclose(kept, 4 / 12, atol=0.04)  # four standard deviations
  np.testing.assert_array_equal(buffer.labels, labels[np.asarray(buffer.items["number"])])
  np.testing.assert_array_equal(buffer.seen[0], [3, 3, 3, 3])


def test_a_balanced_buffer_keeps_rare_classes_whole_and_shares_the_rest():
  labels = np.array([0] * 40 + [1] * 2 + [2] * 30 + [3] * 5)
  run = jax.jit(lambda seed: fill(add_balanced, labels, 12, seed))
  for seed in range(5):
    buffer = run(seed)
    held = np.bincount(np.asarray(buffer.labels), minlength=4)
    assert held[1] == 2
    assert sorted(held) in ([2, 3, 3, 4],)
    places = np.asarray(buffer.items["number"])
    np.testing.assert_array_equal(buffer.labels, labels[places])
    assert len(set(places.tolist())) == 12


def test_within_a_class_a_balanced_buffer_is_a_reservoir():
  run = jax.jit(jax.vmap(lambda seed: fill(add_balanced, np.zeros(10, int), 3, seed)))
  kept = np.bincount(np.asarray(run(np.arange(3000)).items["number"]).ravel(), minlength=10)
  np.testing.assert_allclose(kept / 3000, 3 / 10, atol=0.04)


@pytest.mark.parametrize("capacity", [6, 7])
def test_a_class_that_was_largest_stays_a_reservoir_when_another_is_larger(capacity):
  """They are kept as often as late ones, also where classes do not divide the capacity."""
  labels = np.arange(60) % 2
  run = jax.jit(jax.vmap(lambda seed: fill(add_balanced, labels, capacity, seed)))
  buffer = jax.device_get(run(np.arange(1000)))
  assert np.all(buffer.full[:, :2])
  assert not np.any(buffer.full[:, 2:])
  # Means of 1,000 x capacity places that are uniform in 0 ... 59: half a place is 2.2 deviations.
  assert abs(np.mean(buffer.items["number"]) - 29.5) < 1


def test_an_empty_buffer_gives_nothing_and_one_with_examples_only_those():
  @jax.jit
  def draws(rng):
    empty = empty_buffer(5, 4, {"number": jnp.int32(0)})
    return drawn(empty, 3, rng), drawn(fill(add_balanced, [3, 1], 5, 0), 40, rng)

  nothing, (items, labels, there) = jax.device_get(draws(jax.random.key(0)))
  assert not np.any(nothing[2])
  assert np.all(there)
  assert set(zip(items["number"].tolist(), labels.tolist(), strict=True)) == {(0, 3), (1, 1)}


# Measures.


def test_the_accuracy_matrix_is_a_mean_over_the_examples_of_a_task():
  right = np.array([[True, False, False], [True, True, False]])
  found = accuracy_matrix(right, np.array([0, 0, 1]))
  np.testing.assert_array_equal(found, [[0.5, 0], [1, 0]])


def test_transfer_is_its_definition():
  matrix = np.array([[0.8, 0.3, 0.1], [0.6, 0.9, 0.2], [0.4, 0.7, 1.0]])
  found = transfer(matrix, np.array([0.1, 0.1, 0.1]))
  assert found.accuracy == pytest.approx(2.1 / 3)
  assert found.backward == pytest.approx(((0.4 - 0.8) + (0.7 - 0.9)) / 2)
  assert found.forward == pytest.approx(((0.3 - 0.1) + (0.2 - 0.1)) / 2)
  assert found.retention == pytest.approx(1.1 / 1.7)
  assert found.forgetting == pytest.approx(((0.8 - 0.4) + (0.9 - 0.7)) / 2)


def test_who_forgets_nothing_retains_all_and_who_forgets_all_nothing():
  before = np.zeros(4)
  keeps = transfer(np.tril(np.ones((4, 4))), before)
  assert (keeps.accuracy, keeps.retention, keeps.forgetting, keeps.backward) == (1, 1, 0, 0)
  forgets = transfer(np.eye(4), before)
  assert (forgets.accuracy, forgets.retention, forgets.forgetting) == (0.25, 0, 1)
  assert np.isnan(transfer(np.zeros((4, 4)), before).retention)
  with pytest.raises(UserError, match=r"matrix has the shape \(1, 1\)"):
    transfer(np.ones((1, 1)), np.zeros(1))
