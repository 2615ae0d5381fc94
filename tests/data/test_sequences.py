"""Sequences with answers at some of their steps: symbols to copy, and digits pixel by pixel."""

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.sequences import CopyingData, DigitsData, shrunk

TINY = CopyingData(symbols=3, length=2, blanks=3, test_blanks=(0, 5), train=40, valid=5, test=6)


def test_symbols_are_read_first_and_named_after_the_cue():
  for split, blanks in (("train", 3), ("blanks_0", 0), ("blanks_5", 5)):
    inputs, targets, counted = TINY.load(split)
    assert inputs.shape[1] == 2 + blanks + 1 + 2
    assert set(np.unique(inputs[:, :2])) == {1, 2, 3}
    assert (inputs[:, 2 : 2 + blanks] == 0).all()
    assert (inputs[:, 2 + blanks] == 4).all()
    assert (inputs[:, -2:] == 0).all()
    np.testing.assert_array_equal(targets[:, -2:], inputs[:, :2])
    np.testing.assert_array_equal(counted.sum(axis=0), [0] * (3 + blanks) + [len(inputs)] * 2)


def test_splits_are_drawn_apart_and_tests_differ_in_blanks_alone():
  first = {split: TINY.load(split).inputs[:, :2] for split in TINY.splits()}
  assert (first["train"][:5] != first["valid"]).any()
  assert (first["valid"] != first["blanks_0"][:5]).any()
  np.testing.assert_array_equal(first["blanks_0"], first["blanks_5"])
  np.testing.assert_array_equal(first["train"], TINY.load("train").inputs[:, :2])


def test_a_smaller_image_has_means_over_areas():
  images = np.random.default_rng(0).random((3, 28, 28)).astype(np.float32)
  np.testing.assert_allclose(
    shrunk(images, 14), images.reshape(3, 14, 2, 14, 2).mean(axis=(2, 4)), atol=1e-6
  )
  for size in (16, 19, 24, 28):
    found = shrunk(images, size)
    assert found.shape == (3, size, size)
    # Areas are parted, none is counted twice.
    np.testing.assert_allclose(found.mean(axis=(1, 2)), images.mean(axis=(1, 2)), atol=1e-5)
  np.testing.assert_allclose(shrunk(images, 28), images, atol=1e-6)


@pytest.fixture
def digits(tmp_path):
  random = np.random.default_rng(0)
  for name, count in (("train", 9), ("test", 4)):
    images = random.integers(0, 256, (count, 8, 8), np.uint8)
    np.savez(tmp_path / f"{name}.npz", images=images, labels=np.arange(count) % 10)
  return DigitsData(str(tmp_path), size=4, test_sizes=(4, 5), valid=3)


def test_digits_are_rows_of_pixels_with_a_class_at_the_last(digits):
  inputs, targets, counted = digits.load("train")
  assert inputs.shape == (6, 16)
  assert 0 <= inputs.min() <= inputs.max() <= 1
  assert targets[:, -1].tolist() == [0, 1, 2, 3, 4, 5]
  assert counted.sum(axis=0).tolist() == [0] * 15 + [6]
  assert digits.load("valid").targets[:, -1].tolist() == [6, 7, 8]
  assert digits.load("pixels_5").inputs.shape == (4, 25)
  assert digits.splits() == ("train", "valid", "pixels_4", "pixels_5")


def test_what_is_no_file_of_images_is_an_error_that_names_it(tmp_path, digits):
  with pytest.raises(UserError, match=r"train\.npz cannot be read"):
    DigitsData(str(tmp_path / "nothing")).load("train")
  np.savez(tmp_path / "test.npz", images=np.zeros((2, 8)), labels=np.zeros(2))
  with pytest.raises(UserError, match=r"test\.npz has images"):
    digits.load("pixels_4")
  with pytest.raises(UserError, match=r"task\.data\.valid is 9, but the training file has 9"):
    DigitsData(str(tmp_path), valid=9).load("train")


@pytest.mark.parametrize(
  ("fields", "message"),
  [({"symbols": 0}, "symbols is 0"), ({"blanks": -1}, "blanks has -1"), ({"seed": -1}, "seed")],
)
def test_bad_sizes_are_errors(fields, message):
  with pytest.raises(UserError, match=message):
    CopyingData(**fields)


def test_an_unknown_split_is_an_error():
  with pytest.raises(UserError, match="blanks_5"):
    TINY.load("blanks_7")
