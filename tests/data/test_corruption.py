"""Masks: how many tokens are predicted, which, and what stands in their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from compmod_jax.core.errors import UserError
from compmod_jax.data.corruption import MaskingConfig, mask_tokens

VOCAB, MASK, SPECIAL, LENGTH, ROWS = 40, 4, 5, 64, 400
ORDINARY = np.arange(VOCAB) >= SPECIAL


def sequences(seed: int = 0) -> np.ndarray:
  """Random ordinary tokens between a start and an end token, padded from some place on."""
  random = np.random.default_rng(seed)
  tokens = random.integers(SPECIAL, VOCAB, (ROWS, LENGTH)).astype(np.int32)
  tokens[:, 0] = 2
  for row, length in enumerate(random.integers(3, LENGTH + 1, ROWS)):
    tokens[row, length - 1 :] = 0
    tokens[row, length - 1] = 3
  return tokens


@jax.jit
def _mask(seed, tokens, index):
  config = MaskingConfig()
  return mask_tokens(jax.random.key(seed), tokens, index, ORDINARY, mask=MASK, config=config)


def mask(tokens: np.ndarray, seed: int = 0, index=None) -> tuple[np.ndarray, ...]:
  """tokens, positions, targets, predict."""
  index = np.arange(len(tokens)) if index is None else index
  return tuple(np.asarray(x) for x in _mask(seed, tokens, index))


def interval(count: int, total: int) -> tuple[float, float]:
  """Of a share, with probability 0.9999."""
  found = stats.binomtest(count, total).proportion_ci(0.9999, method="exact")
  return found.low, found.high


def test_special_and_padding_tokens_are_never_predicted_nor_changed():
  tokens = sequences()
  made, positions, targets, predict = mask(tokens)
  assert ORDINARY[targets[predict]].all()
  special = ~ORDINARY[tokens]
  np.testing.assert_array_equal(made[special], tokens[special])
  rows = np.broadcast_to(np.arange(ROWS)[:, None], positions.shape)[predict]
  np.testing.assert_array_equal(tokens[rows, positions[predict]], targets[predict])
  # Nothing changes where nothing is predicted, and no position is predicted twice.
  changed = made != tokens
  changed[rows, positions[predict]] = False
  assert not changed.any()
  assert len(set(zip(rows.tolist(), positions[predict].tolist(), strict=True))) == predict.sum()


def test_every_sequence_has_its_share_of_predicted_tokens_rounded_up_or_down():
  tokens = sequences()
  predict = mask(tokens)[3]
  exact = 0.15 * ORDINARY[tokens].sum(1)
  assert (np.abs(predict.sum(1) - exact) < 1).all()
  # On average the rounding is fair: its standard error is at most 0.5 a sequence.
  assert abs(predict.sum() - exact.sum()) < 4 * 0.5 * np.sqrt(ROWS)


def test_of_ten_predicted_tokens_eight_are_masked_one_is_random_and_one_stays():
  made, positions, targets, predict = (
    np.concatenate(parts)
    for parts in zip(*(mask(sequences(seed), seed) for seed in range(4)), strict=True)
  )
  there = np.take_along_axis(made, positions, 1)[predict]
  wanted, total = targets[predict], predict.sum()
  # A random token is the right one once in so many cases.
  by_chance = 0.1 / ORDINARY.sum()
  shares = {0.8: there == MASK, 0.1 - by_chance: (there != MASK) & (there != wanted)}
  shares[0.1 + by_chance] = there == wanted
  for share, found in shares.items():
    low, high = interval(int(found.sum()), int(total))
    assert low < share < high, (share, low, high)
  others = there[(there != MASK) & (there != wanted)]
  assert ORDINARY[others].all()
  assert stats.chisquare(np.bincount(others, minlength=VOCAB)[SPECIAL:]).pvalue > 1e-4


def test_every_place_is_predicted_equally_often():
  tokens = np.full((ROWS, 20), 7, np.int32)
  counts = np.zeros(20)
  for seed in range(4):
    _, positions, _, predict = mask(tokens, seed)
    counts += np.bincount(positions[predict], minlength=20)
  assert stats.chisquare(counts).pvalue > 1e-4


def test_masks_are_a_function_of_the_key_and_the_sequence_not_of_its_batch():
  tokens = sequences()
  whole = mask(tokens)
  order = np.random.default_rng(1).permutation(ROWS)
  shuffled = mask(tokens[order], index=order)
  for a, b in zip(whole, shuffled, strict=True):
    np.testing.assert_array_equal(a[order], b)
  assert (mask(tokens, seed=1)[0] != whole[0]).any()


def test_a_sequence_without_ordinary_tokens_predicts_nothing():
  tokens = np.zeros((ROWS, LENGTH), np.int32)
  made, *_, predict = mask(tokens)
  assert not predict.any()
  np.testing.assert_array_equal(made, tokens)


def test_all_tokens_can_be_predicted():
  tokens = jnp.asarray(sequences()[:4])
  config = MaskingConfig(share=1.0, masked=1.0, random=0.0)
  made = mask_tokens(jax.random.key(0), tokens, jnp.arange(4), ORDINARY, mask=MASK, config=config)
  expected = np.where(ORDINARY[np.asarray(tokens)], MASK, tokens)
  np.testing.assert_array_equal(made.tokens, expected)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"share": 0.0}, "masking.share is 0"),
    ({"masked": 1.2}, r"masking.masked is 1\.2"),
    ({"masked": 0.8, "random": 0.3}, r"masking.masked \+ masking.random is 1\.1"),
  ],
)
def test_shares_that_are_none_are_refused(fields, message):
  with pytest.raises(UserError, match=message):
    MaskingConfig(**fields)
