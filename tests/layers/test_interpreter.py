"""Functions of neural interpreters: who has access, what has a gradient, and what cannot matter."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.layers.interpreter import (
  Script,
  ScriptConfig,
  compatibility,
  routed_attention,
  routed_read,
  type_distance,
)
from compmod_jax.models.neural_interpreter import InterpreterConfig, with_functions

TINY = InterpreterConfig(
  dim=8, functions=3, iterations=2, heads=2, ffn_dim=6, code_dim=5, type_dim=4,
  type_hidden=7, scripts=2, truncation=1.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
  """A tiny classifier of sets of 4 numbers with 3 outputs, its parameters, and inputs."""
  module, x = TINY.classifier((4,), 3), numbers(5, 4, seed=1)
  return module, parameters(module, x), x


@pytest.fixture(scope="module")
def script():
  """A script of two lines, its parameters, and a stream."""
  module, x = Script(dataclasses.replace(TINY, lines=2)), numbers(2, 6, 8, seed=3)
  return module, parameters(module, x), x


def numbers(*shape, seed):
  return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


def parameters(module, x):
  """Random ones."""
  return jax.device_put(drawn(module.init, x, spread=0.5)["params"])


def outputs(module, params, *args, **more):
  """What the module gives, by one program."""
  return applied(module)({"params": params}, *args, **more)


@functools.cache
def applied(module):
  return jax.jit(module.apply)


def edited(module, params, x, edits):
  """The same under changes of intermediates."""
  return jax.jit(functools.partial(run, module.apply, edits=edits))({"params": params}, x)[0]


def moved(params, *path, to):
  """Parameters with another value at a path."""
  head, *rest = path
  return {**params, head: moved(params[head], *rest, to=to) if rest else to}


def test_compatibilities_are_those_of_the_equation():
  signatures, types = np.eye(3, 4, dtype=np.float32), np.zeros((1, 2, 4), np.float32)
  types[0, 0], types[0, 1] = (3, 4, 0, 0), (-1, 0, 0, 0)
  distance = type_distance(jnp.asarray(7 * signatures), jnp.asarray(types))
  np.testing.assert_allclose(distance[0], [[0.4, 0.2, 1], [2, 1, 1]], atol=1e-6)
  found = compatibility(distance, jnp.float32(0.5), 0.9, 1e-9)
  near = np.exp([-0.8, -0.4])
  np.testing.assert_allclose(found[0, 0], [*near / near.sum(), 0], rtol=1e-6)
  np.testing.assert_array_equal(found[0, 1], [0, 0, 0])  # no function is near


@pytest.mark.parametrize("functions", [1, 3])
def test_weights_of_all_functions_sum_to_one_where_all_are_near(functions):
  distance = jnp.asarray(2 * np.random.default_rng(0).random((2, 5, functions), np.float32))
  found = np.asarray(compatibility(distance, jnp.float32(0.7), 2.1))
  np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-4)


def test_what_is_read_is_the_attention_times_the_values_with_the_same_gradients():
  scores, value = 3 * numbers(3, 2, 2, 5, 5, seed=0), numbers(3, 2, 2, 5, 4, seed=2)
  weights = np.random.default_rng(1).random((3, 2, 5), np.float32)
  weights[1, 0, 2] = weights[2] = 0

  def explicit(scores, weights, value):
    return jnp.matmul(routed_attention(scores, weights), value)

  def value_and_gradients(function):
    def total(*args):
      out = function(*args)
      return jnp.sum(jnp.sin(out)), out

    (_, out), slopes = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(
      scores, weights, value
    )
    return out, slopes

  (found, mine), (expected, theirs) = map(value_and_gradients, (routed_read, explicit))
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
  for one, other in zip(mine, theirs, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_attention_of_a_function_sums_to_one_over_the_positions_that_it_takes():
  scores = numbers(2, 1, 1, 4, 4, seed=0)
  weights = jnp.asarray([[[0.5, 0.0, 0.2, 0.9]], [[1.0, 1.0, 0.0, 1.0]]])
  found = np.asarray(routed_attention(scores, weights))
  taken = np.asarray(weights[:, 0]) > 0
  np.testing.assert_allclose(found.sum(-1)[:, 0, 0], taken, atol=1e-4)
  assert np.all(found[:, 0, 0].swapaxes(1, 2)[~taken] == 0)  # nobody looks at what it did not take


def test_reordering_functions_changes_nothing(model):
  module, params, x = model
  other = with_functions(params, [2, 0, 1])
  assert not np.array_equal(other["script_0"]["codes"], params["script_0"]["codes"])
  expected = outputs(module, params, x)
  np.testing.assert_allclose(outputs(module, other, x), expected, rtol=1e-4, atol=1e-5)


def test_leaving_a_function_out_is_putting_it_out_of_reach(model):
  module, params, x = model
  sites = [f"script_{s}/iteration_{i}/functions/router/distance" for s in (0, 1) for i in (0, 1)]
  far = dict.fromkeys(sites, lambda d: d.at[..., 1].set(2.5))
  expected = edited(module, params, x, far)
  fewer = dataclasses.replace(TINY, functions=2).classifier((4,), 3)
  found = outputs(fewer, with_functions(params, [0, 2]), x)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  assert not np.allclose(found, outputs(module, params, x), atol=1e-3)


def test_functions_that_are_added_stand_behind_the_others(model):
  _, params, _ = model
  more = with_functions(params, [0, 1, 2], 2, rng=jax.random.key(7))["script_1"]
  assert more["codes"].shape == (5, 5)
  assert more["router"]["signatures"].shape == (5, 4)
  np.testing.assert_array_equal(more["codes"][:3], params["script_1"]["codes"])
  with pytest.raises(UserError, match="kept is \\[0, 3\\]"):
    with_functions(params, [0, 3])
  with pytest.raises(UserError, match="at least one must be left"):
    with_functions(params, [])


def test_a_function_beyond_the_truncation_has_no_access_and_no_gradient(script):
  module, params, x = script
  far = {
    f"iteration_{i}/functions/router/distance": lambda d: d.at[..., 1].set(1.2) for i in (0, 1)
  }

  def total(params):
    y, found = run(
      module.apply,
      {"params": params},
      x,
      edits=far,
      capture=[f"{site[:-8]}weights" for site in far],
    )
    return jnp.sum(jnp.sin(y)), found

  (_, weights), slopes = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
  for one in weights.values():
    assert np.all(np.asarray(one)[..., 1] == 0)
  assert np.all(np.asarray(slopes["codes"])[1] == 0)
  assert np.all(np.any(np.asarray(slopes["codes"])[[0, 2]] != 0, axis=1))


def test_a_position_without_access_to_any_function_passes_unchanged(script):
  module, params, x = script
  far = {f"iteration_{i}/functions/router/distance": lambda d: d.at[:, 2].set(2.0) for i in (0, 1)}
  y = edited(module, params, x, far)
  np.testing.assert_array_equal(y[:, 2], x[:, 2])
  assert np.all(np.any(np.asarray(y != x)[:, [0, 1, 3, 4, 5]], axis=-1))


@pytest.mark.parametrize("trained", [False, True])
def test_signatures_have_a_gradient_only_where_they_are_trained(model, trained):
  _, params, x = model
  module = dataclasses.replace(TINY, train_signatures=trained, iterations=1).classifier((4,), 3)
  slopes = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(module.apply({"params": p}, x)))))(params)
  for name in ("script_0", "script_1"):
    assert np.any(np.asarray(slopes[name]["router"]["signatures"]) != 0) == trained
    assert slopes[name]["router"]["log_sigma"] != 0
    assert np.any(np.asarray(slopes[name]["router"]["type"]["kernel"]) != 0)


def test_only_the_direction_of_a_signature_matters(model):
  module, params, x = model
  longer = moved(
    params, "script_0", "router", "signatures", to=3 * params["script_0"]["router"]["signatures"]
  )
  np.testing.assert_allclose(
    outputs(module, longer, x), outputs(module, params, x), rtol=1e-5, atol=1e-5
  )


def test_all_functions_are_in_the_same_products():
  """As many products in the program of five functions as in that of two."""

  def products(functions):
    module = Script(dataclasses.replace(TINY, functions=functions))
    x = jnp.zeros((2, 6, 8))
    return str(jax.make_jaxpr(module.init)(jax.random.key(0), x)).count("dot_general")

  assert products(5) == products(2) > 0


def test_no_output_of_a_text_depends_on_padding():
  config = dataclasses.replace(TINY, scripts=1, max_length=6)
  module, tokens = config.encoder(11, 0), jnp.asarray([[3, 4, 5, 0, 0, 0]])
  params = parameters(module, tokens)

  def total(params):
    told = module.apply({"params": params}, tokens)
    return jnp.sum(jnp.sin(told[:, :3])), told

  (_, told), slopes = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
  assert np.all(np.asarray(slopes["place"])[3:] == 0)
  assert np.all(np.any(np.asarray(slopes["place"])[:3] != 0, axis=1))
  np.testing.assert_allclose(
    told[:, :3], outputs(module, params, tokens[:, :3]), rtol=1e-4, atol=1e-5
  )
  chosen = outputs(module, params, tokens, positions=jnp.asarray([[2, 0]]))
  np.testing.assert_allclose(chosen, np.asarray(told)[:, [2, 0]], rtol=1e-4, atol=1e-5)
  with pytest.raises(UserError, match="has 7 tokens"):
    outputs(module, params, jnp.ones((1, 7), jnp.int32))


def test_one_cls_vector_tells_classes_and_gives_features():
  config = dataclasses.replace(TINY, scripts=1, cls="one")
  x = jnp.ones((2, 4, 3))
  for count, width in ((5, 5), (0, 8)):
    make = config.classifier((4, 3), count).init_with_output
    made, variables = jax.eval_shape(make, jax.random.key(0), x)
    assert made.shape == (2, width)
    assert nn.unbox(variables)["params"]["cls"].shape == (1, 8)
  with pytest.raises(UserError, match="has the shape \\(28, 28, 1\\)"):
    config.classifier((28, 28, 1), 5)


@pytest.mark.parametrize(
  ("field", "value", "words"),
  [
    ("heads", 3, "which does not divide model.dim = 8"),
    ("truncation", 0.0, "no position would have access"),
    ("bandwidth", 0.0, "it must be positive"),
    ("functions", 0, "it must be at least 1"),
    ("scripts", 0, "it must be at least 1"),
  ],
)
def test_sizes_that_cannot_be_are_refused_by_name(field, value, words):
  with pytest.raises(UserError, match=f"model.{field} is {value}.*{words}"):
    dataclasses.replace(TINY, **{field: value})


def test_dropout_acts_in_training_alone():
  module = Script(ScriptConfig(dim=8, heads=2, ffn_dim=6, iterations=1, dropout=0.5))
  x = numbers(2, 3, 8, seed=0)
  params = parameters(module, x)
  plain = outputs(Script(dataclasses.replace(module.config, dropout=0.0)), params, x)
  np.testing.assert_array_equal(outputs(module, params, x), plain)

  @jax.jit
  def dropped(key):
    return module.apply({"params": params}, x, deterministic=False, rngs={"dropout": key})

  one, other = (dropped(jax.random.key(seed)) for seed in (2, 3))
  assert not np.array_equal(one, plain)
  assert not np.array_equal(one, other)
