"""Batches drawn from several sets: equal shares, passes without repeats, blocks of one task."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.sampling import Mixture, apportion, passes


@given(st.integers(1, 30), st.integers(0, 100), st.integers(0, 60), st.integers(0, 3))
def test_draws_go_through_a_set_in_passes(size, start, count, seed):
  whole = passes(size, 0, start + count, (seed,))
  assert np.array_equal(passes(size, start, count, (seed,)), whole[start:])
  for first in range(0, len(whole) - size + 1, size):
    assert sorted(whole[first : first + size].tolist()) == list(range(size))


@given(
  st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.integers(1, 40), st.integers(1, 200)
)
def test_rows_are_apportioned(weights, whole, batches):
  shares = np.array(weights) / sum(weights)
  found = apportion(shares, whole, batches)
  assert (found >= 0).all()
  assert (found.sum(axis=1) == whole).all()
  # At every batch, every part has had its share to within a row for each other part.
  owed = shares * whole * np.arange(1, batches + 1)[:, None]
  assert (np.abs(found.cumsum(axis=0) - owed) < len(shares)).all()
  assert (np.abs(found - shares * whole) <= len(shares)).all()


def mixture(sizes, rows=12, multiple=1, seed=0):
  """Sets of so many questions of tasks a and b."""
  task, source = [], []
  for number, (first, second) in enumerate(sizes):
    task += ["mqa"] * first + ["gqa"] * second
    source += [number] * (first + second)
  task, source = np.array(task), np.array(source, np.int32)
  lengths = np.random.default_rng(0).integers(5, 50, len(task))
  made = Mixture(task, source, lengths, rows=rows, multiple=multiple, seed=seed)
  return made, task, source, lengths


def numbers_of(plan):
  return np.concatenate([numbers for batch in plan for _, numbers in batch.blocks])


def test_sets_are_drawn_as_often_whatever_their_size():
  made, _, source, _ = mixture([(30, 0), (0, 300), (60, 90)])
  drawn = np.concatenate([numbers_of(made.plan(epoch)) for epoch in range(5)])
  assert len(drawn) == 5 * made.per_epoch * 12 == 5 * 480
  shares = np.bincount(source[drawn]) / len(drawn)
  assert shares == pytest.approx([1 / 3] * 3, abs=0.01)
  # Within a set, no question is drawn twice more often than another.
  for number in range(3):
    counts = np.bincount(drawn, minlength=len(source))[source == number]
    assert counts.max() - counts.min() <= 1 + 1 * (number == 2)


def test_one_set_is_read_once_an_epoch():
  made, task, _, _ = mixture([(30, 90)])
  assert made.per_epoch == 10
  for epoch in range(3):
    assert sorted(numbers_of(made.plan(epoch)).tolist()) == list(range(len(task)))


@pytest.mark.parametrize(("rows", "multiple"), [(12, 1), (12, 2), (16, 4), (2, 1)])
def test_batches_have_blocks_of_one_task(rows, multiple):
  made, task, _, lengths = mixture([(40, 0), (30, 0), (0, 50), (10, 30)], rows, multiple)
  layouts = set()
  for batch in made.plan(0):
    for name, numbers in batch.blocks:
      assert (task[numbers] == name).all()
      assert len(numbers) % multiple == 0
    sizes = tuple(len(numbers) for _, numbers in batch.blocks)
    assert sum(sizes) == rows
    assert batch.length == max(lengths[numbers].max() for _, numbers in batch.blocks)
    layouts.add(tuple((name, len(numbers)) for name, numbers in batch.blocks))
  assert len(layouts) <= 2


def test_similar_lengths_share_a_batch():
  made, _task, _, lengths = mixture([(300, 900)])
  plan = made.plan(0)
  padded = sum(batch.length * 12 for batch in plan)
  assert padded < 1.1 * lengths.sum()
  assert np.std([batch.length for batch in plan[:20]]) > 5  # but batches come in any order


def test_the_order_is_a_function_of_seed_and_epoch():
  again = [
    mixture([(30, 90)], seed=seed)[0].plan(epoch) for seed, epoch in ((0, 1), (0, 1), (1, 1))
  ]
  first, same, other = (numbers_of(plan).tolist() for plan in again)
  assert first == same
  assert first != other
  assert first != numbers_of(mixture([(30, 90)])[0].plan(0)).tolist()


def test_rows_that_devices_cannot_share_are_told():
  with pytest.raises(UserError, match="multiple of 8"):
    mixture([(30, 90)], rows=12, multiple=8)
  with pytest.raises(UserError, match="no training questions"):
    Mixture(np.array([], str), np.array([]), np.array([]), rows=2, multiple=1, seed=0)
