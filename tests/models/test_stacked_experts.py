"""Experts side by side are each the network that its parameters make alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.models.competing_experts import (
  CompetingExperts,
  CompetingExpertsConfig,
  leaky_clip,
  patches,
)

CONFIG = CompetingExpertsConfig(
  experts=3, layers=3, filters=4, discriminator_layers=2, discriminator_filters=3
)
SIZE = 7


ACTIVATIONS = {
  "leaky_relu": lambda x: jnp.where(x > 0, x, 0.2 * x),
  "elu": lambda x: jnp.where(x > 0, x, jnp.expm1(x)),
}


def make(config, *shape):
  random = np.random.default_rng(0)
  images = random.random(shape).astype(np.float32)
  module = CompetingExperts(config)
  shapes = jax.eval_shape(module.init, jax.random.key(0), images)["params"]
  params = jax.tree.map(lambda s: 0.4 * random.normal(size=s.shape).astype(s.dtype), shapes)
  return module, params, images


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_stacked_experts_are_convolutional_networks_one_by_one(activation):
  module, params, images = make(dataclasses.replace(CONFIG, activation=activation), 5, SIZE, SIZE)
  outputs = np.asarray(jax.jit(module.apply)({"params": params}, images)[0])

  @jax.jit
  def network(own, x):
    for layer in range(CONFIG.layers):
      kernel = own[f"layer_{layer}"]["kernel"].reshape(3, 3, x.shape[-1], -1)
      x = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
      )
      x = x + own[f"layer_{layer}"]["bias"].reshape(1, 1, 1, -1)
      x = leaky_clip(x) if layer + 1 == CONFIG.layers else ACTIVATIONS[activation](x)
    return x[..., 0]

  for number in range(CONFIG.experts):
    own = jax.tree.map(lambda leaf, number=number: np.asarray(leaf)[number], params["experts"])
    np.testing.assert_allclose(
      outputs[number], network(own, images[..., None]), rtol=1e-4, atol=1e-5
    )
  assert not np.allclose(outputs[0], outputs[1])


def test_a_pixel_depends_on_none_that_is_further_away_than_there_are_layers():
  config = CompetingExpertsConfig(experts=2, layers=2, filters=4)
  module, params, images = make(config, 2, SIZE, SIZE)

  @jax.jit
  @jax.grad
  def slope(images, params):
    return module.apply({"params": params}, images, method="transform")[0, 0, 3, 3]

  expected = np.zeros((2, SIZE, SIZE), bool)
  expected[0, 1:6, 1:6] = True  # of its own image
  np.testing.assert_array_equal(np.asarray(slope(images, params)) != 0, expected)


def test_an_expert_s_output_depends_on_its_own_parameters_alone():
  module, params, images = make(CONFIG, 5, SIZE, SIZE)

  @jax.jit
  @jax.grad
  def slope(params, images):
    return jnp.sum(module.apply({"params": params}, images, method="transform")[1])

  for leaf in map(np.asarray, jax.tree.leaves(slope(params, images)["experts"])):
    assert np.any(leaf[1])
    assert not np.any(leaf[[0, 2]])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [4, 5])
def test_patches_are_the_values_around_every_place(stride, size):
  x = np.random.default_rng(2).random((2, 3, size, size)).astype(np.float32)
  found = np.asarray(jax.jit(patches, static_argnums=1)(x, stride)).reshape(
    9, 2, 3, -(-size // stride), -1
  )
  bordered = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
  for place in range(9):
    for row in range(found.shape[3]):
      for column in range(found.shape[4]):
        down, right = divmod(place, 3)
        expected = bordered[:, :, row * stride + down, column * stride + right]
        np.testing.assert_array_equal(found[place, :, :, row, column], expected)


def test_outputs_keep_a_slope_outside_the_range_of_images():
  x = np.float32([-1.0, 0.25, 3.0])
  values, slopes = jax.jit(jax.vmap(jax.value_and_grad(leaky_clip)))(x)
  np.testing.assert_allclose(values, [-0.1, 0.25, 1.2], rtol=1e-6)
  np.testing.assert_allclose(slopes, [0.1, 1.0, 0.1], rtol=1e-6)


@pytest.mark.parametrize("field", ["experts", "layers", "filters", "discriminator_filters"])
def test_sizes_below_one_are_refused(field):
  with pytest.raises(UserError, match=rf"model\.{field} is 0; it must be at least 1"):
    CompetingExpertsConfig(**{field: 0})


def test_an_activation_that_there_is_not_is_refused():
  with pytest.raises(UserError, match=r"model\.activation .*elu"):
    CompetingExpertsConfig(activation="tanh")
