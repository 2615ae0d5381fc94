"""Training batches that are drawn: they follow from seeds and a number, for any processes."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.drawn import DrawnDataset


@dataclasses.dataclass(frozen=True)
class Names:
  def splits(self):
    return ("train", "test")


@dataclasses.dataclass(frozen=True)
class Config:
  data: Names = Names()
  rows: int = 6


class Numbers(DrawnDataset[Config]):
  drawn = "numbers"
  no_parts = "numbers have no parts"

  def __init__(self, config=Config()):
    self.config = config

  @property
  def batch_rows(self):
    return self.config.rows

  def draw(self, random, rows):
    return {"index": np.arange(rows), "numbers": random.random((rows, 3))}

  def notes(self):
    return []

  def fingerprints(self):
    return {}

  def eval_batches(self, split, *, multiple=1):
    return iter(())

  def example(self):
    return {"numbers": jnp.zeros((1, 3))}

  def describe_batches(self):
    return f"batches of {self.config.rows} numbers"


def first(count, data=None, **options):
  batches, _ = (data or Numbers()).train_batches(**{"seed": 0, "multiple": 1, **options})
  return list(itertools.islice(batches, count))


def same(one, other):
  return all(np.array_equal(one[name], other[name]) for name in one)


def test_the_same_seed_gives_the_same_batches_and_another_one_others():
  once, again, other = first(3), first(3), first(3, seed=1)
  assert all(map(same, once, again))
  assert not any(map(same, once, other))
  assert not same(once[0], once[1])


def test_an_iterator_that_is_restored_goes_on_with_the_batches_that_would_have_followed():
  batches, epoch = Numbers().train_batches(seed=0, multiple=1)
  next(batches)
  state = batches.get_state()
  expected = next(batches)
  fresh, _ = Numbers().train_batches(seed=0, multiple=1)
  fresh.set_state(state)
  assert same(next(fresh), expected)
  assert epoch == 100


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_rows_of_the_batch_that_one_would_have(processes):
  whole = first(2, multiple=processes)
  shares = [
    first(2, multiple=processes, process=one, processes=processes) for one in range(processes)
  ]
  for number in range(2):
    joined = {
      name: np.concatenate([share[number][name] for share in shares]) for name in whole[number]
    }
    assert same(joined, whole[number])


@pytest.mark.parametrize(("multiple", "rows"), [(1, 6), (4, 4), (6, 6), (8, 8)])
def test_rows_are_the_largest_multiple_up_to_those_asked_for(multiple, rows):
  assert len(first(1, multiple=multiple)[0]["index"]) == rows


def test_a_part_is_refused_with_the_reason():
  with pytest.raises(UserError, match=r"'small', but numbers have no parts\. Set it to 'all'"):
    first(1, part="small")


def test_there_is_nothing_to_check_and_no_file_to_keep():
  data = Numbers()
  data.check()
  assert data.files() == {}
