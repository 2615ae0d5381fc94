"""Generated characters: a function of (seed, class, example), alike in a class, not between."""

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic import glyphs
from compmod_jax.data.synthetic.glyphs import GlyphData, SineData, draw

FEW = GlyphData(examples=4)


def test_there_are_as_many_as_in_omniglot_and_no_alphabet_is_in_two_splits():
  alphabet, number = glyphs.alphabets(0)
  assert len(alphabet) == 1623
  assert len(set(alphabet)) == 50
  assert (alphabet < 30).sum() == 964
  assert np.bincount(alphabet).min() >= 14
  assert len({*zip(alphabet.tolist(), number.tolist(), strict=True)}) == 1623
  found = {split: FEW.load(split) for split in FEW.splits()}
  names = {split: {n.partition("/")[0] for n in one.names} for split, one in found.items()}
  assert not names["train"] & names["valid"]
  assert not (names["train"] | names["valid"]) & names["test"]
  assert {split: len(one.names) for split, one in found.items()} == {
    "train": 829, "valid": 135, "test": 659,
  }  # fmt: skip
  assert found["test"].inputs.shape == (659 * 4, 28, 28, 1)
  assert found["test"].inputs.dtype == np.uint8


def test_a_picture_depends_on_seed_class_and_example_and_on_nothing_else():
  whole = draw(np.array([3, 70, 1622]), np.arange(5))
  np.testing.assert_array_equal(draw(np.array([1622]), np.array([4]))[0, 0], whole[2, 4])
  np.testing.assert_array_equal(draw(np.arange(60, 80), np.array([2]))[10, 0], whole[1, 2])
  for other in (draw(np.array([3]), np.array([0]), seed=1)[0, 0], whole[0, 1], whole[1, 0]):
    assert (other != whole[0, 0]).any()


def test_without_jitter_all_examples_of_a_class_are_the_same_picture():
  plain = draw(np.array([0, 1]), np.arange(3), jitter=0)
  assert (plain == plain[:, :1]).all()
  assert (plain[0, 0] != plain[1, 0]).any()


def test_every_picture_has_ink_and_most_of_it_is_within_the_frame():
  made = draw(np.arange(0, 1623, 16), np.arange(3)) / 255
  ink = made.sum(axis=(2, 3))
  assert ink.min() > 8
  border = made[:, :, [0, -1]].sum(axis=(2, 3)) + made[:, :, :, [0, -1]].sum(axis=(2, 3))
  assert (border / ink).mean() < 0.03
  assert made.mean() < 0.3


def test_nearest_pixels_tell_classes_far_over_chance_and_far_from_always():
  """Five classes, one example of each to learn from."""
  random, right = np.random.default_rng(0), []
  pictures = draw(np.arange(1000, 1200), np.arange(6)).reshape(200, 6, -1) / 255
  for _ in range(100):
    chosen = pictures[random.permutation(200)[:5]]
    support, query = chosen[:, 0], chosen[:, 1:].reshape(-1, 784)
    nearest = ((query[:, None] - support[None]) ** 2).sum(-1).argmin(1)
    right.append((nearest == np.repeat(np.arange(5), 5)).mean())
  assert 0.45 < np.mean(right) < 0.8


def test_the_ink_of_a_straight_stroke_is_the_integral_of_a_gaussian():
  """Far from its ends a line has, at distance d, gain exp(-d^2 / 2 sigma^2), cut off at 1."""
  x = np.linspace(-20, 48, 2000)
  line = np.stack([x, np.full_like(x, 14.0)], axis=-1)[None, None]
  lengths, sigma = np.full((1, 1, 2000), x[1] - x[0]), np.full((1, 1), 0.8)
  found = glyphs._ink(line, lengths, sigma)[0, 0, :, 14]
  away = np.arange(28) - 14.0
  expected = np.minimum(1, glyphs._GAIN * np.exp(-(away**2) / (2 * 0.8**2)))
  np.testing.assert_allclose(found / 255, expected, atol=0.004)


def test_smooth_strokes_go_through_their_control_points():
  for count in (3, 4, 5):
    for basis in glyphs._basis(count):
      np.testing.assert_allclose(basis.sum(axis=1), 1)
      np.testing.assert_allclose(basis[0], np.eye(5)[0], atol=1e-12)
      np.testing.assert_allclose(basis[-1], np.eye(5)[count - 1], atol=1e-12)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"examples": 1}, r"task.data.examples is 1; it must be 2 to 1,000"),
    ({"valid_alphabets": 30}, r"task.data.valid_alphabets is 30; it must be 1 to 29"),
    ({"jitter": -1.0}, r"task.data.jitter is -1.0"),
    ({"seed": -1}, r"task.data.seed is -1"),
  ],
)
def test_bad_settings_name_their_field(fields, words):
  with pytest.raises(UserError, match=words):
    GlyphData(**fields)


def test_waves_are_sines_of_one_height_and_phase_and_always_the_same():
  found = SineData(3).episodes(np.array([5, 9]), 40)
  assert found["inputs"].shape == found["targets"].shape == (2, 40, 1)
  for x, y in zip(found["inputs"][..., 0], found["targets"][..., 0], strict=True):
    assert np.abs(x).max() <= 5
    basis = np.stack([np.sin(x), np.cos(x)], axis=1).astype(np.float64)
    (a, b), *_ = np.linalg.lstsq(basis, y, rcond=None)
    np.testing.assert_allclose(basis @ (a, b), y, atol=1e-5)
    assert 0.1 <= np.hypot(a, b) <= 5
    assert b >= -1e-6  # the phase is 0 to pi
  again = SineData(3).episodes(np.array([9]), 40)
  np.testing.assert_array_equal(again["targets"][0], found["targets"][1])
