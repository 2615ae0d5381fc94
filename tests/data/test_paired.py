"""Batches of two parts: the large one's are those of a phase, the small one's have their length."""

import itertools

import jax
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data import pipeline
from compmod_jax.data.base import Dataset
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.paired import QUERY, PairedDataset, query_rows, split_parts
from compmod_jax.data.subsets import subset_numbers

LENGTHS = 1 + np.random.default_rng(0).integers(0, 9, 120)
BATCH = BatchConfig(tokens=48, buckets=(3, 6, 9))


class Rows(Dataset):
  """Row i is i + 1, several times."""

  def __init__(self, lengths=LENGTHS, small_share=0.2, batch=BATCH):
    self.config = type("Config", (), {"small_share": small_share, "data": None})()
    self.batch, self.lengths = batch, lengths

  def splits(self):
    return ("train", "valid")

  def examples(self, split):
    rows = [[i + 1] * int(length) for i, length in enumerate(self.lengths)]
    return Examples({"tokens": Ragged(rows)}, np.arange(len(rows), dtype=np.int32))

  def check(self):
    pass

  def notes(self):
    return ["rows"]

  def fingerprints(self):
    return {}

  def files(self):
    return {"a": b"b"}

  def train_batches(self, **_):
    raise NotImplementedError

  def eval_batches(self, split, *, multiple=1):
    return [split, multiple]

  def example(self):
    return {}

  def describe_batches(self):
    return "batches"


def take(count, skip=0, whole=None, share=0.25, **options):
  whole = PairedDataset(Rows(), share) if whole is None else whole
  iterator, _ = whole.train_batches(**{"seed": 1, "multiple": 1, **options})
  found = list(itertools.islice(iterator, skip + count))[skip:]
  iterator.close()
  return found


def same(one, two):
  return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two)))


def members(part):
  return set(subset_numbers(part, len(LENGTHS), small_share=0.2, seed=1).tolist())


def index_of(batches, name="index"):
  return [int(i) for batch in batches for i in batch[name].ravel() if i >= 0]


def test_rows_of_the_large_part_are_those_of_a_phase_on_it():
  whole = Rows().examples("train").select(np.array(sorted(members("large"))))
  plain = pipeline.train_batches(whole, BATCH, seed=1)
  _, per_epoch = PairedDataset(Rows(), 0.25).train_batches(seed=1, multiple=1)
  assert per_epoch == pipeline.batches_per_epoch(whole, BATCH)
  for batch in take(2 * per_epoch):
    support, _ = split_parts(batch)
    assert same({name: column[0] for name, column in support.items()}, next(plain))
  plain.close()


def test_rows_of_the_small_part_are_of_it_alone_and_have_the_length_of_the_others():
  for batch in take(60):
    support, query = split_parts(batch)
    assert set(index_of([support])) <= members("large")
    assert set(index_of([query])) <= members("small")
    length = support["tokens"].shape[2]
    assert query["tokens"].shape == (1, query_rows(support["tokens"].shape[1], 0.25), length)
    assert (query["index"] >= 0).all()
    rows = LENGTHS[query["index"].ravel()]
    assert ((rows <= length) & (rows > length - 3)).all()
    for tokens, number in zip(query["tokens"][0], query["index"][0], strict=True):
      assert tokens[tokens > 0].tolist() == [number + 1] * LENGTHS[number]


def test_within_an_epoch_no_row_of_the_small_part_comes_more_than_once_oftener_than_another():
  _, per_epoch = PairedDataset(Rows(), 0.5).train_batches(seed=1, multiple=1)
  seen = np.bincount(index_of(take(per_epoch, share=0.5), f"{QUERY}index"), minlength=len(LENGTHS))
  small = np.array(sorted(members("small")))
  for top in BATCH.buckets:
    counts = seen[small[(LENGTHS[small] <= top) & (LENGTHS[small] > top - 3)]]
    assert counts.max() - counts.min() <= 1
    assert counts.max() > 0


def test_epochs_differ_in_what_is_paired():
  _, per_epoch = PairedDataset(Rows(), 0.25).train_batches(seed=1, multiple=1)
  batches = take(2 * per_epoch)
  one, two = batches[:per_epoch], batches[per_epoch:]
  assert index_of(one, f"{QUERY}index") != index_of(two, f"{QUERY}index")


@pytest.mark.parametrize("processes", [2, 4])
def test_the_parts_of_processes_are_the_batch_of_one(processes):
  whole = take(5, multiple=4)
  parts = [take(5, multiple=4, process=i, processes=processes) for i in range(processes)]
  for batch, *of in zip(whole, *parts, strict=True):
    assert batch["tokens"].shape[0] == 4
    assert same(jax.tree.map(lambda *each: np.concatenate(each), *of), batch)


def test_every_episode_has_its_share_of_rows_that_only_fill_up():
  _, per_epoch = PairedDataset(Rows(), 0.25).train_batches(seed=1, multiple=4)
  filled = [(batch["index"] < 0).sum(axis=1) for batch in take(per_epoch, multiple=4)]
  assert max(counts.max() for counts in filled) > 0
  assert all(counts.max() - counts.min() <= 1 for counts in filled)


def test_a_position_leads_back_to_exactly_the_same_batches():
  expected = take(9)
  iterator, _ = PairedDataset(Rows(), 0.25).train_batches(seed=1, multiple=1)
  for _ in range(4):
    next(iterator)
  position = iterator.get_state()
  iterator.close()
  again, _ = PairedDataset(Rows(), 0.25).train_batches(seed=1, multiple=1)
  again.set_state(position)
  assert all(same(next(again), batch) for batch in expected[4:])
  again.close()


def test_all_else_is_as_in_the_data_set_inside():
  whole = PairedDataset(Rows(), 0.25)
  assert whole.files() == {"a": b"b"}
  assert whole.eval_batches("valid", multiple=3) == ["valid", 3]
  assert whole.lengths is LENGTHS
  assert whole.notes()[0] == "rows"
  assert "0.25 times as many rows of the small part" in whole.notes()[1]
  with pytest.raises(AttributeError):
    whole.nothing  # noqa: B018


def test_flat_rows_are_those_of_the_large_part():
  (batch,) = take(1, multiple=4)
  found = PairedDataset(Rows(), 0.25).flat(batch)
  np.testing.assert_array_equal(found["tokens"], np.concatenate(batch["tokens"]))
  assert found.keys() == {"tokens", "index"}


# Mistakes.


@pytest.mark.parametrize("part", ["large", "small"])
def test_a_phase_on_one_part_is_refused(part):
  with pytest.raises(UserError, match=rf"phases.part is '{part}', but task.bilevel is set"):
    take(1, part=part)


def test_a_length_that_the_small_part_lacks_is_taken_from_shorter_rows():
  lengths = np.where(np.arange(40) < 4, 9, 5)
  numbers = subset_numbers("small", 40, small_share=0.1, seed=3)
  assert (lengths[numbers] == 5).all()  # of this seed
  whole = PairedDataset(Rows(lengths, small_share=0.1), 0.25)
  long = [b for b in take(8, whole=whole, seed=3) if b["tokens"].shape[2] == 9]
  assert long
  assert all((lengths[batch[f"{QUERY}index"]] == 5).all() for batch in long)


def test_a_small_part_without_a_row_that_is_short_enough_is_refused():
  lengths = np.where(np.arange(40) < 4, 2, 5)
  whole = PairedDataset(Rows(lengths, small_share=0.1), 0.25)
  with pytest.raises(UserError, match=r"small part has 3 tokens or fewer.*Raise task.small_share"):
    take(1, whole=whole, seed=3)
