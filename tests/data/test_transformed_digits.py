"""Halves of different images, and transformations that lose nothing."""

import dataclasses

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.transformed_digits import SPLITS, TRANSFORMATIONS, TransformedDigits


@pytest.fixture
def data(tmp_path):
  """Images whose pixels all differ, so that each is known by its mean."""
  draw = np.random.default_rng(0)
  for name, count in (("train", 41), ("test", 12)):
    images = draw.integers(50, 255, size=(count, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / f"{name}.npz", images=images, labels=np.arange(count) % 10)
  return TransformedDigits(str(tmp_path), side=4, border=3, shift=3, valid=10)


def transformed(data, name, images, seed=1):
  numbers = np.full(len(images), TRANSFORMATIONS.index(name))
  return data.transformed(images, numbers, np.random.default_rng(seed))


def test_halves_of_a_split_have_no_image_in_common_and_all_together(data):
  sizes = {"train": (15, 16), "valid": (5, 5), "test": (6, 6)}
  seen = []
  for split in SPLITS:
    halves = data.load(split)
    assert tuple(map(len, halves)) == sizes[split]
    seen += [image.tobytes() for half in halves for image in half]
  assert len(set(seen)) == len(seen) == 53
  again, other = data.load("train"), dataclasses.replace(data, seed=1).load("train")
  np.testing.assert_array_equal(again.hidden, data.load("train").hidden)
  assert not np.array_equal(again.hidden, other.hidden)


def test_a_translation_moves_every_pixel_and_its_opposite_brings_it_back(data):
  images = data.load("train").hidden
  assert np.all(images[:, 3:-3, 3:-3] > 0)
  assert not images[:, :3].any()
  opposite = {"up": "down", "left": "right", "up left": "down right", "up right": "down left"}
  for one, other in opposite.items():
    moved = transformed(data, one, images)
    np.testing.assert_array_equal(transformed(data, other, moved), images)
    np.testing.assert_allclose(moved.sum(axis=(1, 2)), images.sum(axis=(1, 2)), rtol=1e-5)
  np.testing.assert_array_equal(transformed(data, "up", images)[:, :-3], images[:, 3:])
  np.testing.assert_array_equal(
    transformed(data, "down right", images)[:, 3:, 3:], images[:, :-3, :-3]
  )


def test_inversion_is_its_own_inverse_and_noise_stays_in_range(data):
  images = data.load("train").hidden
  np.testing.assert_allclose(
    transformed(data, "inverted", transformed(data, "inverted", images)), images, atol=1e-6
  )
  noisy = transformed(data, "noise", images)
  assert noisy.min() == 0
  assert noisy.max() == 1
  inside = (noisy > 0) & (noisy < 1) & (images > 0.45) & (images < 0.55)
  assert inside.any()
  np.testing.assert_array_equal(noisy, transformed(data, "noise", images))
  assert not np.array_equal(noisy, transformed(data, "noise", images, seed=2))


def test_every_image_has_the_transformation_of_its_number(data):
  images = np.repeat(data.load("train").hidden[:1], 9, axis=0)
  whole = data.transformed(images, np.arange(9), np.random.default_rng(0))
  for number, name in enumerate(TRANSFORMATIONS[:9]):
    np.testing.assert_array_equal(whole[number], transformed(data, name, images[:1])[0])


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"shift": 4}, "task.data.shift is 4 and task.data.border 2"),
    ({"shift": 0}, "task.data.shift is 0"),
    ({"noise": 0.0}, "task.data.noise is 0.0; it must be positive"),
    ({"valid": 1}, "task.data.valid is 1; it must be 2"),
    ({"side": 1}, "task.data.side is 1"),
  ],
)
def test_impossible_data_are_refused(fields, message):
  with pytest.raises(UserError, match=message):
    TransformedDigits(**fields)
