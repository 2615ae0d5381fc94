"""Generated predictors: closed forms, symmetries of supports and classes, exact gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.few_shot import (
  class_means,
  conditioned_logits,
  descend,
  generated_softmax,
  init_perceptron,
  leopard_adapted,
  perceptron,
  read_logits,
  set_context,
)

DIM, FEATURES, SOFT = 3, 5, 4


MEANS = jax.jit(class_means, static_argnames="ways")
SOFTMAX = jax.jit(generated_softmax, static_argnames="ways")
CONTEXT = jax.jit(set_context, static_argnames="ways")


def numbers(*shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def drawn(seed, *sizes):
  return jax.jit(lambda: init_perceptron(jax.random.key(seed), *sizes))()


def embed(params, x):
  return jnp.tanh(jnp.tanh(x @ params["low"]["kernel"]) @ params["high"]["kernel"])


def parameters():
  made = {
    "layers": {
      "low": {"kernel": numbers(DIM, 6, seed=0)},
      "high": {"kernel": numbers(6, FEATURES, seed=1)},
    },
    "generator": drawn(2, FEATURES, 7, SOFT + 1),
    "reader": drawn(3, FEATURES, 7, SOFT),
    "sizes": {"layers": {"high": 0.2}, "reader": 0.3, "softmax": 0.5},
  }
  return jax.tree.map(np.float32, made)


def rows(ways, shots, seed):
  labels = np.repeat(np.arange(ways), shots)
  return {"inputs": numbers(len(labels), DIM, seed=seed), "labels": labels}


@functools.partial(jax.jit, static_argnames=("ways", "steps", "first_order"))
def logits(params, parts, query, ways, **how):
  adapted = leopard_adapted(
    embed,
    params["layers"],
    parts,
    ways,
    generator=params["generator"],
    reader=params["reader"],
    sizes=params["sizes"],
    parameters=("high",),
    **how,
  )
  return read_logits(embed, adapted, query)


def test_a_generated_softmax_layer_is_the_mean_over_the_examples_of_its_class():
  values, labels = numbers(6, SOFT + 1, seed=0), np.array([2, 0, 1, 1, 2, 2])
  found = SOFTMAX(values, labels, ways=3)
  for k in range(3):
    mean = values[labels == k].mean(axis=0)
    np.testing.assert_allclose(found["weights"][k], mean[:-1], rtol=1e-6)
    np.testing.assert_allclose(found["bias"][k], mean[-1], rtol=1e-6)


def test_a_class_without_examples_has_zeros():
  found = MEANS(numbers(2, 3, seed=0), np.array([0, 0]), ways=2)
  np.testing.assert_array_equal(np.asarray(found)[1], 0)


def test_a_step_is_that_of_gradient_descent_on_all_that_adapts_and_nothing_else():
  params, first, second = parameters(), rows(2, 3, seed=4), rows(2, 3, seed=5)
  query = numbers(4, DIM, seed=6)
  found = logits(params, [first, second], query, ways=2)
  rates = {"high": 0.2, "reader": 0.3, "softmax": 0.5}

  @jax.jit
  def by_hand(params, first, second, query):
    generated = perceptron(params["generator"], embed(params["layers"], first["inputs"]))
    softmax = generated_softmax(generated, first["labels"], 2)
    moving = {"high": params["layers"]["high"], "reader": params["reader"], "softmax": softmax}

    def of(moving, x):
      features = embed({"low": params["layers"]["low"], "high": moving["high"]}, x)
      hidden = perceptron(moving["reader"], features)
      return hidden @ moving["softmax"]["weights"].T + moving["softmax"]["bias"][None]

    def loss(moving):
      chosen = jax.nn.log_softmax(of(moving, second["inputs"]))[jnp.arange(6), second["labels"]]
      return -jnp.mean(chosen)

    slopes = jax.grad(loss)(moving)
    after = {
      name: jax.tree.map(lambda x, g, rate=rates[name]: x - rate * g, moving[name], slopes[name])
      for name in moving
    }
    return of(moving, query), of(after, query)

  before, after = map(np.asarray, by_hand(params, first, second, query))
  np.testing.assert_allclose(found, after, rtol=1e-4, atol=1e-5)
  assert np.abs(found - before).max() > 1e-2


def test_the_order_of_a_support_does_not_matter_and_exchanged_classes_are_exchanged_logits():
  params, query = parameters(), numbers(4, DIM, seed=6)
  run = functools.partial(logits, ways=3)
  parts = [rows(3, 2, seed=4), rows(3, 2, seed=5)]
  found = run(params, parts, query)
  order = np.random.default_rng(0).permutation(6)
  mixed = [{name: x[order] for name, x in part.items()} for part in parts]
  np.testing.assert_allclose(run(params, mixed, query), found, rtol=1e-4, atol=1e-5)
  new = np.array([2, 0, 1])  # the new number of every class
  renamed = [{**part, "labels": new[part["labels"]]} for part in parts]
  np.testing.assert_allclose(
    np.asarray(run(params, renamed, query))[:, new], found, rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_the_same_parameters_serve_any_number_of_classes(ways):
  found = logits(parameters(), [rows(ways, 2, seed=4)], numbers(5, DIM, seed=6), ways=ways)
  assert found.shape == (5, ways)
  assert np.isfinite(found).all()


def test_one_part_is_generated_from_and_adapted_to():
  params, part, query = parameters(), rows(2, 3, seed=4), numbers(4, DIM, seed=6)
  np.testing.assert_array_equal(
    logits(params, [part], query, ways=2), logits(params, [part, part], query, ways=2)
  )


def outer(params, first_order=False):
  parts, query = [rows(2, 3, seed=4), rows(2, 3, seed=5)], rows(2, 2, seed=6)
  found = logits(params, parts, query["inputs"], ways=2, steps=2, first_order=first_order)
  chosen = jax.nn.log_softmax(found)[jnp.arange(4), query["labels"]]
  return -jnp.mean(chosen)


def test_what_stands_still_within_an_episode_learns_outside_and_step_sizes_too():
  slopes = jax.jit(jax.grad(outer))(parameters())
  for name, leaf in jax.tree_util.tree_leaves_with_path(slopes):
    assert np.abs(leaf).max() > 0, name
  simple = jax.jit(jax.grad(functools.partial(outer, first_order=True)))(parameters())
  one, two = (np.asarray(found["layers"]["low"]["kernel"]) for found in (simple, slopes))
  assert np.abs(one - two).max() > 1e-4


def test_a_step_size_that_is_missing_is_named():
  params = parameters()
  params["sizes"]["layers"] = {}
  with pytest.raises(UserError, match=r"rate has no entry for 'layers/high/kernel', which adapt"):
    logits(params, [rows(2, 1, seed=4)], numbers(1, DIM, seed=6), ways=2)


# Sets.


def test_what_a_set_says_does_not_depend_on_its_order_and_goes_with_its_class():
  values, labels = numbers(6, 4, seed=0), np.array([0, 1, 0, 2, 2, 1])
  found = np.asarray(CONTEXT(values, labels, ways=3))
  order = np.array([3, 1, 5, 0, 4, 2])
  np.testing.assert_allclose(CONTEXT(values[order], labels[order], ways=3), found, rtol=1e-6)
  new = np.array([1, 2, 0])
  other = np.asarray(CONTEXT(values, new[labels], ways=3))
  np.testing.assert_allclose(other[new], found, rtol=1e-6)
  np.testing.assert_allclose(found[:, 4:], np.broadcast_to(found[:, :4].mean(0), (3, 4)), rtol=1e-5)


def test_conditioned_logits_are_their_closed_form():
  hidden, scale, shift = numbers(3, 5, seed=0), numbers(2, 5, seed=1), numbers(2, 5, seed=2)
  readout = numbers(5, seed=3)
  found = np.asarray(jax.jit(conditioned_logits)(hidden, scale, shift, readout))
  for q in range(3):
    for n in range(2):
      units = np.maximum((1 + scale[n]) * hidden[q] + shift[n], 0)
      np.testing.assert_allclose(found[q, n], units @ readout, rtol=1e-5)


# Fine-tuning.


def quadratic(params, rows):
  return jnp.mean((rows["x"] @ params["w"] + params["b"]["c"] - rows["y"]) ** 2)


@pytest.mark.parametrize("adam", [True, False])
def test_fine_tuning_takes_the_steps_of_optax(adam):
  given = {"x": numbers(5, 3, seed=0), "y": numbers(5, seed=1)}
  params = {"w": numbers(3, seed=2), "b": {"c": np.float32(0.5)}}
  at = (1, 3, 7)
  run = jax.jit(functools.partial(descend, quadratic, at=at, rate=0.05, adam=adam))
  found = run(params, given)
  optimizer = optax.adam(0.05) if adam else optax.sgd(0.05)

  @jax.jit
  def updated(own, state):
    updates, state = optimizer.update(jax.grad(quadratic)(own, given), state)
    return optax.apply_updates(own, updates), state

  own, state = params, jax.jit(optimizer.init)(params)
  for step in range(1, 8):
    own, state = updated(own, state)
    if step in at:
      mine = found[at.index(step)]
      jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4), mine, own)


def test_fine_tuning_leaves_what_is_not_named_alone():
  given = {"x": numbers(5, 3, seed=0), "y": numbers(5, seed=1)}
  params = {"w": numbers(3, seed=2), "b": {"c": np.float32(0.5)}}
  run = functools.partial(descend, quadratic, at=(4,), rate=0.05, parameters=("w",))
  (found,) = jax.jit(run)(params, given)
  np.testing.assert_array_equal(found["b"]["c"], params["b"]["c"])
  assert np.abs(found["w"] - params["w"]).min() > 1e-3


def test_a_perceptron_is_tanh_between_linear_layers():
  params, x = drawn(0, 3, 4, 2), numbers(5, 3, seed=0)
  first, second = (np.asarray(params[f"layer_{i}"]["kernel"]) for i in range(2))
  np.testing.assert_allclose(jax.jit(perceptron)(params, x), np.tanh(x @ first) @ second, rtol=1e-4)
