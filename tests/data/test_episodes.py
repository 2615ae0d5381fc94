"""Episodes: rows of one group, the same for any number of processes, resumed exactly."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import Dataset
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.episodes import (
  EpisodeConfig,
  EpisodeDataset,
  episode_plan,
  fixed_episodes,
  flat,
  split_episode,
)
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.sources.documents import GrammarTopics
from compmod_jax.data.synthetic.grammar import GrammarData

SIZES = (7, 3, 0, 12, 4)  # rows of every group
GROUPS = np.repeat(np.arange(len(SIZES)), SIZES)[np.random.default_rng(0).permutation(sum(SIZES))]
CONFIG = EpisodeConfig(support=1, query=2, batch=4)


class Rows(Dataset):
  """Row i is i + 1, once or several times."""

  config = type("Config", (), {"small_share": 0.3, "data": None})()
  batch = BatchConfig(tokens=64, buckets=(6,))

  def splits(self):
    return ("train", "valid")

  def examples(self, split):
    rows = [[i + 1] * (1 + i % 5) for i in range(len(GROUPS))]
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
    return ""

  def unigram(self):
    return 3


def dataset(**fields) -> EpisodeDataset[Rows]:
  return EpisodeDataset(Rows(), EpisodeConfig(**{**vars(CONFIG), **fields}), lambda split: GROUPS)


def take(count, skip=0, whole=None, **options):
  iterator, _ = (whole or dataset()).train_batches(**{"seed": 1, "multiple": 1, **options})
  found = [next(iterator) for _ in range(skip + count)][skip:]
  iterator.close()
  return found


def same(one, two):
  return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two)))


@given(st.lists(st.integers(0, 4), min_size=0, max_size=40), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_has_of_every_group_as_many_episodes_as_it_has_rows_for(groups, rows, epoch):
  groups = np.asarray(groups, int)
  plan = episode_plan(groups, rows, seed=3, epoch=epoch)
  assert len(np.unique(plan)) == plan.size  # no row twice
  assert all(len(np.unique(groups[episode])) == 1 for episode in plan)
  expected = sum(count // rows for count in np.bincount(groups, minlength=1))
  assert len(plan) == len(fixed_episodes(groups, rows)) == expected


def test_epochs_differ_in_episodes_and_in_what_is_left_over_and_are_functions_of_seed_and_epoch():
  plans = [episode_plan(GROUPS, 4, seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0))]
  assert len({plan.tobytes() for plan in plans}) == 3
  assert len({tuple(np.sort(plan, axis=None)) for plan in plans}) == 3
  np.testing.assert_array_equal(plans[1], episode_plan(GROUPS, 4, seed=0, epoch=1))


def test_support_comes_before_query_in_one_batch_of_episodes():
  (batch,) = take(1)
  assert batch["tokens"].shape == (4, 3, 6)
  assert batch["index"].shape == (4, 3)
  for tokens, index in zip(batch["tokens"], batch["index"], strict=True):
    assert len(set(GROUPS[index])) == 1
    for row, number in zip(tokens, index, strict=True):
      assert row.tolist() == [number + 1] * (1 + number % 5) + [0] * (5 - number % 5)
  episode = {name: column[0] for name, column in batch.items()}
  support, query = split_episode(episode, CONFIG.support)
  np.testing.assert_array_equal(support["index"], batch["index"][0, :1])
  np.testing.assert_array_equal(query["tokens"], batch["tokens"][0, 1:])
  np.testing.assert_array_equal(flat(batch)["tokens"], np.concatenate(batch["tokens"]))


def test_the_last_batch_of_an_epoch_is_filled_up_with_episodes_of_nothing():
  whole = dataset()
  count = sum(size // 3 for size in SIZES)
  _, batches = whole.train_batches(seed=1, multiple=1)
  assert (count, batches) == (8, 2)
  uneven = dataset(batch=5)
  last = take(1, skip=1, whole=uneven)[0]
  assert (last["index"][:3] >= 0).all()
  assert (last["index"][3:] == -1).all()
  assert (last["tokens"][3:] == 0).all()


@pytest.mark.parametrize("processes", [2, 4])
def test_the_parts_of_processes_are_the_batch_of_one(processes):
  whole = take(5, multiple=4)
  parts = [take(5, multiple=4, process=i, processes=processes) for i in range(processes)]
  for batch, *of in zip(whole, *parts, strict=True):
    joined = jax.tree.map(lambda *each: np.concatenate(each), *of)
    assert same(joined, batch)


def test_a_position_leads_back_to_exactly_the_same_episodes():
  expected = take(6)
  iterator, _ = dataset().train_batches(seed=1, multiple=1)
  for _ in range(3):
    next(iterator)
  position = iterator.get_state()
  iterator.close()
  again, _ = dataset().train_batches(seed=1, multiple=1)
  again.set_state(position)
  assert all(same(next(again), batch) for batch in expected[3:])
  again.close()


def test_episodes_are_a_multiple_that_devices_and_micro_batches_can_share():
  sizes = {n: len(take(1, multiple=n)[0]["index"]) for n in (1, 3, 8)}
  assert sizes == {1: 4, 3: 3, 8: 8}


def test_a_part_of_the_data_has_episodes_of_its_own():
  large, small = (
    {int(i) for batch in take(6, part=part) for i in batch["index"].ravel()} - {-1}
    for part in ("large", "small")
  )
  assert large
  assert small
  assert not large & small


def test_evaluation_has_the_same_episodes_every_time_each_once():
  one, two = (list(dataset().episodes("valid", multiple=3)) for _ in range(2))
  assert all(map(same, one, two))
  found = np.concatenate([batch["index"] for batch in one])
  found = found[found[:, 0] >= 0]
  np.testing.assert_array_equal(found, fixed_episodes(GROUPS, 3))


def test_without_groups_episodes_are_rows_that_follow_each_other():
  whole = EpisodeDataset(Rows(), CONFIG)
  for batch in take(3, whole=whole):
    index = batch["index"][batch["index"][:, 0] >= 0]
    assert (index // 3 == index[:, :1] // 3).all()


def test_all_else_is_that_of_the_data_set_inside():
  whole = dataset()
  assert whole.eval_batches("valid", multiple=2) == ["valid", 2]
  assert whole.files() == {"a": b"b"}
  assert whole.unigram() == 3
  assert whole.notes()[0] == "rows"
  assert "1 + 2 rows" in whole.describe_batches()
  with pytest.raises(AttributeError, match="bigram"):
    _ = whole.bigram


def test_groups_that_are_too_small_for_an_episode_are_a_mistake():
  with pytest.raises(UserError, match=r"is 13 rows of one group, but the largest .*'train' has 12"):
    dataset(query=12).check()
  with pytest.raises(UserError, match="processes cannot share"):
    dataset().train_batches(seed=0, multiple=3, processes=2)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"support": 0}, r"episodes.support is 0; it must be at least 1"),
    ({"batch": 0}, r"episodes.batch is 0"),
    ({"within": "book"}, r"episodes.within is 'book'; it must be one of: document, text"),
  ],
)
def test_bad_settings_name_their_field(fields, words):
  with pytest.raises(UserError, match=words):
    EpisodeConfig(**fields)


# Documents of one topic.


@functools.cache
def topics(count=4):
  return list(GrammarTopics(GrammarData(train=400), sentences=count).load("train"))


def test_a_document_has_sentences_of_one_first_noun():
  pairs = GrammarData(train=400).load("train")
  nouns = {}
  for text, info in zip(pairs.target, pairs.info, strict=True):
    tags = info["pos_target"]
    if "noun" in tags:
      nouns[text] = text.split()[tags.index("noun")].strip(".,?!").lower()
  assert len(topics()) > 20
  for document in topics():
    rest, found = document, []
    while rest:
      sentence = next(text for text in nouns if rest.startswith(text))
      found.append(nouns[sentence])
      rest = rest[len(sentence) :].lstrip()
    assert len(found) == 4
    assert len(set(found)) == 1
