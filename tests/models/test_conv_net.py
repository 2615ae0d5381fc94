"""The convolutional net: derivatives as JAX has them, twice; statistics are those of the batch."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.models.conv_net import ConvBlock, ConvNetConfig, convolve, largest, moments
from compmod_jax.models.encoder import EncoderConfig


def numbers(*shape, seed, dtype=np.float32):
  return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def parameters(module, x):
  return drawn(module.init, x, seed=2, spread=0.5)["params"]


def plain(x, kernel, stride):
  return jax.lax.conv_general_dilated(
    x, kernel, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
  )


@pytest.mark.parametrize("size", [(5, 6), (4, 4)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [3, 5])  # fewer than filters, and more
def test_first_and_second_derivatives_of_the_convolution_are_those_of_jax(channels, stride, size):
  def results(convolution, *given):
    def inside(x, kernel):
      return jnp.sum(jnp.tanh(convolution(x, kernel, stride)))

    def outside(x, kernel):
      of_x, of_kernel = jax.grad(inside, (0, 1))(x, kernel)
      return jnp.sum(jnp.sin(of_x)) + jnp.sum(of_kernel**3)

    return jax.value_and_grad(inside, (0, 1))(*given), jax.value_and_grad(outside, (0, 1))(*given)

  given = (
    numbers(2, *size, channels, seed=0, dtype=np.float64),
    numbers(3, 3, channels, 4, seed=1, dtype=np.float64),
  )
  with jax.enable_x64(True):
    both = jax.jit(lambda *given: (results(convolve, *given), results(plain, *given)))(*given)
  for one, two in zip(*map(jax.tree.leaves, both), strict=True):
    assert one.dtype == np.float64
    np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-10)


def test_every_task_can_have_filters_of_its_own():
  x, kernels = numbers(3, 2, 4, 4, 2, seed=0), numbers(3, 3, 3, 2, 3, seed=1)

  @jax.jit
  def slope(x, kernel):
    return jax.grad(lambda k: jnp.sum(jnp.sin(convolve(x, k, 1))))(kernel)

  together = jax.jit(jax.vmap(slope))(x, kernels)
  for i in range(3):
    np.testing.assert_allclose(together[i], slope(x[i], kernels[i]), rtol=1e-4, atol=1e-5)


def test_pooling_takes_the_largest_of_four_and_leaves_out_what_is_odd():
  x = np.arange(2 * 5 * 4 * 3, dtype=np.float32).reshape(2, 5, 4, 3)
  found = jax.jit(largest)(x)
  np.testing.assert_array_equal(found, x[:, 1:4:2, 1::2])  # the last of each grows with its place


def test_of_equal_values_the_first_has_all_of_the_gradient():
  x = np.zeros((1, 2, 4, 1), np.float32)
  x[0, 1, 2:, 0] = 1
  found = jax.jit(jax.grad(lambda x: jnp.sum(largest(x))))(x)
  np.testing.assert_array_equal(np.asarray(found)[0, :, :, 0], [[1, 0, 0, 0], [0, 0, 1, 0]])


@pytest.mark.parametrize("filters", [4, 20])
def test_a_block_is_its_equation_also_where_a_scale_is_negative(filters):
  """Its statistics are those of its outputs, or of the patches where these are fewer numbers."""
  x = numbers(5, 6, 6, 2, seed=0) + 0.5
  block = ConvBlock(filters, "pool")
  params = parameters(block, x)
  params["scale"] = np.tile(np.float32([1.0, -1.0, 0.5, -2.0]), filters // 4)
  params["bias"] = np.tile(np.float32([0.0, 0.1, -0.1, 0.2]), filters // 4)

  def equation(params, x):
    x = plain(x, params["kernel"], 1)
    mean, variance = jnp.mean(x, (0, 1, 2), keepdims=True), jnp.var(x, (0, 1, 2), keepdims=True)
    x = (x - mean) / jnp.sqrt(variance + 1e-5)
    x = x * params["scale"][None, None, None] + params["bias"][None, None, None]
    return nn.max_pool(nn.relu(x), (2, 2), (2, 2))

  def results(function):
    def total(params, x):
      return jnp.sum(jnp.sin(function(params, x)))

    return jax.jit(jax.value_and_grad(total, (0, 1)))(params, x)

  jax.tree.map(
    lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5),
    results(lambda params, x: block.apply({"params": params}, x)),
    results(equation),
  )


@pytest.mark.parametrize(("stride", "channels"), [(1, 1), (2, 2)])
def test_moments_are_those_of_the_outputs(stride, channels):
  given = numbers(3, 9, 6, channels, seed=0) + 2, numbers(3, 3, channels, 5, seed=1)
  x, kernel = map(jnp.asarray, given)
  outputs = convolve(x, kernel, stride)
  mean, variance = moments(x, kernel, stride)
  np.testing.assert_allclose(mean, jnp.mean(outputs, (0, 1, 2)), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(variance, jnp.var(outputs, (0, 1, 2)), rtol=1e-5)


@pytest.mark.parametrize("halve", ["pool", "stride"])
def test_statistics_are_those_of_the_batch_so_that_brightness_and_contrast_do_not_matter(halve):
  module = ConvNetConfig(blocks=2, filters=4, halve=halve).classifier((8, 8, 1), 3)
  x = numbers(5, 8, 8, 1, seed=0)
  params = parameters(module, x)
  call = functools.partial(jax.jit(module.apply), {"params": params})
  out = np.asarray(call(x))
  assert out.shape == (5, 3)
  np.testing.assert_allclose(call(7 * x), out, atol=1e-4)
  other = np.asarray(call(np.concatenate([x, 3 * x[:2] + 1])))[:5]
  assert np.abs(other - out).max() > 1e-3  # what else is in the batch matters


def test_sites_are_blocks_features_and_logits():
  module = ConvNetConfig(blocks=2, filters=4).classifier((9, 8, 1), 3)
  x = numbers(2, 9, 8, 1, seed=0)
  params = parameters(module, x)
  call = functools.partial(run, module.apply, capture=None)
  out, found = jax.jit(call)({"params": params}, x)
  assert {name: value.shape for name, value in found.items()} == {
    "block_0": (2, 4, 4, 4), "block_1": (2, 2, 2, 4), "features": (2, 16), "logits": (2, 3),
  }  # fmt: skip
  features = ConvNetConfig(blocks=2, filters=4).classifier((9, 8, 1), 0)
  own = {name: part for name, part in params.items() if name != "head"}
  np.testing.assert_array_equal(jax.jit(features.apply)({"params": own}, x), found["features"])
  np.testing.assert_array_equal(out, found["logits"])


def test_what_does_not_fit_is_refused():
  with pytest.raises(UserError, match=r"example has the shape \(5,\); it must be \[height, width"):
    ConvNetConfig().classifier((5,), 3)
  with pytest.raises(UserError, match=r"model.blocks is 4, but pictures of 9 x 28 can be halved 3"):
    ConvNetConfig().classifier((9, 28, 1), 3)
  with pytest.raises(UserError, match=r"model.filters is 0; it must be at least 1"):
    ConvNetConfig(filters=0)
  with pytest.raises(UserError, match="but the task needs a classifier of single examples"):
    EncoderConfig().classifier((28, 28, 1), 5)
