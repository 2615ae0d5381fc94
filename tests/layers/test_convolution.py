"""Short convolutions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.layers.context import Context
from compmod_jax.layers.convolution import ShortConvolution, neighbours
from compmod_jax.models.decoder_lm import DecoderConfig


def test_neighbours_are_of_the_same_segment_and_there():
  found = neighbours(jnp.asarray([[0, 0, 0, 1, 1]]), 3)
  nearest, next_one = found[0, :, 0].tolist(), found[0, :, 1].tolist()
  assert nearest == [False, True, True, False, True]
  assert next_one == [False, False, True, False, False]


def test_of_one_segment_it_is_a_convolution_of_every_channel():
  random = np.random.default_rng(0)
  x, kernel = random.normal(size=(2, 7, 3)), random.normal(size=(3, 3))
  near = neighbours(jnp.zeros((1, 7), jnp.int32), 4)
  found, _ = ShortConvolution(4, 3).apply(
    {"params": {"kernel": kernel}}, jnp.asarray(x, "f4"), None, Context(same_segment=near)
  )
  for row in range(2):
    for channel in range(3):
      expected = np.convolve(x[row, :, channel], [1, *kernel[:, channel]])[:7]
      np.testing.assert_allclose(found[row, :, channel], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [4, 9])
def test_nothing_comes_over_from_another_segment(width):
  x = jax.random.normal(jax.random.key(0), (1, 6, 2))
  kernel = jax.random.normal(jax.random.key(1), (width - 1, 2))
  module, params = ShortConvolution(width, 2), {"params": {"kernel": kernel}}

  def mixed(x, segments):
    near = neighbours(jnp.asarray(segments), width)
    return module.apply(params, x, None, Context(same_segment=near))[0]

  both, alone = mixed(x, [[0, 0, 1, 1, 1, 1]]), mixed(x[:, 2:], [[0, 0, 0, 0]])
  np.testing.assert_allclose(both[:, 2:], alone, atol=1e-6)


def test_a_width_below_1_is_told():
  with pytest.raises(UserError, match=r"model\.convolution is 0; it is a width"):
    DecoderConfig(convolution=0)
