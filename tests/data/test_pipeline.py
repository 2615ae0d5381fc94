"""Batches: each example once, few shapes, the same order for any number of processes."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import Pairs
from compmod_jax.data.pipeline import (
  BatchConfig,
  Examples,
  Ragged,
  auto_buckets,
  batch_plan,
  batches_per_epoch,
  eval_batches,
  filled,
  padding_share,
  scored_rows,
  tokenise,
  train_batches,
)
from compmod_jax.data.tokenizers import EOS, PAD, UNK, TokenizerConfig, pair_tokenizers
from compmod_jax.data.tokenizers.vocabulary import Words

CONFIG = BatchConfig(tokens=96, buckets=(4, 8, 16))


def make_examples(count=203, seed=0, longest=16):
  random = np.random.default_rng(seed)

  def sequence():
    return [*random.integers(4, 50, random.integers(0, longest)), EOS]

  return Examples(
    columns={name: Ragged([sequence() for _ in range(count)]) for name in ("source", "target")},
    index=random.permutation(1000)[:count].astype(np.int32),
  )


EXAMPLES = make_examples()


def take(iterator, count):
  return list(itertools.islice(iterator, count))


def equal(a, b):
  return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def rows_of(batches):
  """Every real row as (index, source ids, target ids) without padding."""
  for batch in batches:
    for row, index in enumerate(batch["index"]):
      if index >= 0:
        sides = (batch[name][row] for name in ("source", "target"))
        yield (int(index), *(tuple(side[side != PAD].tolist()) for side in sides))


def expected_rows(examples):
  sides = (examples.columns["source"], examples.columns["target"])
  return sorted(
    (int(index), tuple(source.tolist()), tuple(target.tolist()))
    for index, source, target in zip(examples.index, *sides, strict=True)
  )


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_epoch_has_every_example_exactly_once_whole(multiple):
  iterator = train_batches(EXAMPLES, CONFIG, seed=3, multiple=multiple)
  for _ in range(3):
    epoch = take(iterator, batches_per_epoch(EXAMPLES, CONFIG, multiple))
    assert sorted(rows_of(epoch)) == expected_rows(EXAMPLES)
  iterator.close()


@settings(max_examples=60, deadline=None)
@given(
  lengths=st.lists(st.integers(1, 16), min_size=1, max_size=80),
  multiple=st.sampled_from([1, 2, 8]),
  automatic=st.booleans(),
  epoch=st.integers(0, 5),
)
def test_a_plan_has_every_example_once_within_its_bucket_and_budget(
  lengths, multiple, automatic, epoch
):
  config = BatchConfig(tokens=64, bucket_count=3, ceiling=16) if automatic else CONFIG
  plan = batch_plan(np.array(lengths), config, seed=1, epoch=epoch, multiple=multiple)
  numbers = np.concatenate([members for _, members in plan])
  assert sorted(numbers) == list(range(len(lengths)))
  edges = sorted({bucket for bucket, _ in plan})
  assert len(edges) <= 3
  for bucket, members in plan:
    assert all(lengths[i] <= bucket for i in members)
    assert 0 < len(members) <= max(multiple, config.tokens // bucket)
    if not automatic:  # the least bucket that holds it
      assert all(
        lengths[i] > max([e for e in CONFIG.buckets if e < bucket] or [0]) for i in members
      )


def test_a_plan_is_a_function_of_seed_epoch_and_lengths():
  def plan(seed, epoch):
    batches = batch_plan(EXAMPLES.lengths, CONFIG, seed=seed, epoch=epoch, multiple=2)
    return [(bucket, members.tolist()) for bucket, members in batches]

  assert plan(5, 2) == plan(5, 2)
  assert plan(5, 2) != plan(5, 3)
  assert plan(5, 2) != plan(6, 2)
  assert plan(2, 5) != plan(5, 2)


def test_every_epoch_has_the_same_number_of_batches_and_the_same_shapes():
  def shapes(epoch):
    plan = batch_plan(EXAMPLES.lengths, CONFIG, seed=0, epoch=epoch, multiple=2)
    return sorted((bucket, len(members)) for bucket, members in plan)

  assert shapes(0) == shapes(1) == shapes(2)
  assert len(shapes(0)) == batches_per_epoch(EXAMPLES, CONFIG, 2)


@pytest.mark.parametrize("processes", [2, 4])
def test_slices_of_processes_concatenate_to_the_global_batch(processes):
  count = 2 * batches_per_epoch(EXAMPLES, CONFIG, 4) + 1
  whole = take(train_batches(EXAMPLES, CONFIG, seed=7, multiple=4), count)
  parts = [
    take(train_batches(EXAMPLES, CONFIG, seed=7, multiple=4, process=i, processes=processes), count)
    for i in range(processes)
  ]
  for number, batch in enumerate(whole):
    slices = [part[number] for part in parts]
    assert equal(batch, {key: np.concatenate([s[key] for s in slices]) for key in batch})


def test_evaluation_slices_concatenate_and_have_the_same_shapes():
  whole = list(eval_batches(EXAMPLES, CONFIG, multiple=4))
  parts = [list(eval_batches(EXAMPLES, CONFIG, multiple=4, process=i, processes=2)) for i in (0, 1)]
  assert len(parts[0]) == len(parts[1]) == len(whole)
  for batch, *slices in zip(whole, *parts, strict=True):
    assert slices[0]["source"].shape == slices[1]["source"].shape
    assert equal(batch, {key: np.concatenate([s[key] for s in slices]) for key in batch})


def test_there_are_at_most_as_many_shapes_as_buckets():
  config = BatchConfig(tokens=128, bucket_count=4, ceiling=16)
  for used in (CONFIG, config):
    batches = take(train_batches(EXAMPLES, used, seed=0), 100)
    shapes = {batch["source"].shape for batch in batches}
    assert 1 < len(shapes) <= (len(used.buckets) or used.bucket_count)
    assert all(batch["source"].shape == batch["target"].shape for batch in batches)
    assert all(rows * bucket <= used.tokens for rows, bucket in shapes)
    assert all(array.dtype == np.int32 for batch in batches for array in batch.values())


def test_filler_rows_are_all_padding_with_index_minus_one():
  batches = take(train_batches(EXAMPLES, CONFIG, seed=0, multiple=4), 40)
  filler = [
    (batch["source"][row], batch["target"][row])
    for batch in batches
    for row in np.flatnonzero(batch["index"] < 0)
  ]
  assert filler
  assert all((source == PAD).all() and (target == PAD).all() for source, target in filler)


def test_resuming_at_any_batch_gives_the_same_continuation():
  per_epoch = batches_per_epoch(EXAMPLES, CONFIG)
  iterator = train_batches(EXAMPLES, CONFIG, seed=11)
  states, batches = [], []
  for _ in range(per_epoch + 5):
    states.append(json.dumps(iterator.get_state()))
    batches.append(next(iterator))
  for number in range(0, per_epoch + 3):
    fresh = train_batches(EXAMPLES, CONFIG, seed=11)
    fresh.set_state(json.loads(states[number]))
    for expected in batches[number : number + 3]:
      assert equal(next(fresh), expected)
    fresh.close()
  iterator.set_state(json.loads(states[2]))  # back, in the iterator that went on
  assert equal(next(iterator), batches[2])


def test_a_position_is_the_same_for_every_number_of_processes():
  one = train_batches(EXAMPLES, CONFIG, seed=1, multiple=2)
  two = train_batches(EXAMPLES, CONFIG, seed=1, multiple=2, process=1, processes=2)
  take(one, 9), take(two, 9)
  assert one.get_state() == two.get_state()


def test_epochs_differ_in_order_and_in_which_examples_meet():
  per_epoch = batches_per_epoch(EXAMPLES, CONFIG)
  batches = take(train_batches(EXAMPLES, CONFIG, seed=0), 2 * per_epoch)
  first, second = (
    {tuple(sorted(batch["index"].tolist())) for batch in part}
    for part in (batches[:per_epoch], batches[per_epoch:])
  )
  assert len(first & second) < per_epoch / 4


def test_a_curriculum_has_short_batches_first_in_its_epochs_and_then_the_order_without_one():
  config = dataclasses.replace(CONFIG, short_first=2)
  plans, plain = (
    [batch_plan(EXAMPLES.lengths, one, seed=0, epoch=epoch) for epoch in range(3)]
    for one in (config, CONFIG)
  )
  for epoch, (plan, other) in enumerate(zip(plans, plain, strict=True)):
    lengths = [bucket for bucket, _ in plan]
    assert (lengths == sorted(lengths)) == (epoch < 2)
    key = {tuple(numbers) for _, numbers in plan}
    assert key == {tuple(numbers) for _, numbers in other}  # the same batches
  assert [tuple(n) for _, n in plans[2]] == [tuple(n) for _, n in plain[2]]
  assert [tuple(n) for _, n in plans[0]] != [tuple(n) for _, n in plans[1]]
  with pytest.raises(UserError, match="short_first is -1; it must not be negative"):
    BatchConfig(short_first=-1)


def test_training_begins_with_the_shortest_batches_where_some_come_first():
  lengths = EXAMPLES.lengths
  plain = batch_plan(lengths, CONFIG, seed=3, epoch=0)
  short = batch_plan(lengths, dataclasses.replace(CONFIG, short_batches=7), seed=3, epoch=0)

  def named(batches):
    return [(bucket, tuple(numbers)) for bucket, numbers in batches]

  assert sorted(named(short)) == sorted(named(plain))
  buckets = [bucket for bucket, _ in short]
  assert buckets[:7] == sorted(bucket for bucket, _ in plain)[:7]
  assert named(short)[7:] == [one for one in named(plain) if one not in named(short)[:7]]
  later = dataclasses.replace(CONFIG, short_batches=7)
  second, other = (batch_plan(lengths, one, seed=3, epoch=1) for one in (later, CONFIG))
  assert named(second) == named(other)
  with pytest.raises(UserError, match="short_batches is -1; it must not be negative"):
    BatchConfig(short_batches=-1)


@pytest.mark.parametrize("multiple", [1, 4])
def test_evaluation_has_each_example_once_longest_first(multiple):
  batches = list(eval_batches(EXAMPLES, CONFIG, multiple=multiple))
  assert sorted(rows_of(batches)) == expected_rows(EXAMPLES)
  lengths = [max(len(source), len(target)) for _, source, target in rows_of(batches)]
  assert lengths == sorted(lengths, reverse=True)
  assert len({batch["source"].shape for batch in batches}) <= len(CONFIG.buckets)


def test_evaluation_takes_examples_longer_than_any_in_training():
  config = BatchConfig(tokens=256, buckets=(8, 16, 24))
  longer = make_examples(30, seed=5, longest=40)
  assert longer.lengths.max() > config.buckets[-1]
  batches = list(eval_batches(longer, config))
  assert sorted(rows_of(batches)) == expected_rows(longer)
  assert len({batch["source"].shape for batch in batches}) <= len(config.buckets) + 1
  with pytest.raises(UserError, match="last bucket"):
    batches_per_epoch(longer, config)


def test_automatic_buckets_reach_the_ceiling_so_that_evaluation_keeps_longer_sentences():
  config = BatchConfig(tokens=256, ceiling=64).resolve(EXAMPLES.lengths)
  assert config.buckets[-1] == config.longest == 64
  assert EXAMPLES.lengths.max() <= config.buckets[-2] < 64
  shapes = {b["source"].shape[1] for b in take(train_batches(EXAMPLES, config, seed=0), 60)}
  assert 64 not in shapes


def test_training_and_evaluation_share_their_shapes():
  config = BatchConfig(tokens=96, ceiling=16, bucket_count=3).resolve(EXAMPLES.lengths)
  shapes = {b["source"].shape for b in take(train_batches(EXAMPLES, config, seed=0), 60)}
  few = make_examples(20, seed=9, longest=12)
  assert {b["source"].shape for b in eval_batches(few, config)} <= shapes


def test_nothing_to_evaluate_gives_no_batches():
  assert list(eval_batches(make_examples(0), CONFIG)) == []


@pytest.mark.parametrize("multiple", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_automatic_buckets_are_the_best_of_all_choices(count, multiple):
  lengths = np.random.default_rng(count).geometric(0.15, 300).clip(2, 21)
  chosen = auto_buckets(lengths, count, 21, multiple=multiple)
  candidates = sorted({*range(multiple, 21, multiple), 21})

  def positions(edges):
    return np.asarray(edges)[np.searchsorted(edges, lengths)].sum()

  everything = (
    choice
    for size in range(1, count + 1)
    for choice in itertools.combinations(candidates, size)
    if choice[-1] >= lengths.max()
  )
  assert len(chosen) <= count
  assert list(chosen) == sorted(set(chosen))
  assert positions(chosen) == min(positions(edges) for edges in everything)


def test_automatic_buckets_hold_the_longest_and_need_no_more_than_there_are_lengths():
  assert auto_buckets(np.array([3, 3, 3]), 6, 128) == (3,)
  assert auto_buckets(np.array([3, 9]), 6, 128) == (3, 9)
  assert auto_buckets(np.array([3, 127, 500]), 6, 127, multiple=8) == (8, 127)
  assert auto_buckets(np.array([], int), 6, 32) == (32,)


def test_the_padding_share_is_what_the_batches_show():
  for config, multiple in ((CONFIG, 1), (CONFIG, 4), (BatchConfig(tokens=96, ceiling=16), 2)):
    batches = take(
      train_batches(EXAMPLES, config, seed=0, multiple=multiple),
      batches_per_epoch(EXAMPLES, config, multiple),
    )
    sides = [batch[name] for batch in batches for name in ("source", "target")]
    shown = sum((side == PAD).sum() for side in sides) / sum(side.size for side in sides)
    assert padding_share(EXAMPLES, config, multiple) == pytest.approx(shown)


PAIRS = Pairs(
  source=["a b c", "a " * 20, "", "b", "c c", "a " * 9],
  target=["x y z", "x", "y", " ", "y y", "z " * 9],
  where=lambda i: f"train.de:{i + 1}",
)


def tokenised(**options):
  config = TokenizerConfig(kind="words")
  source, target = pair_tokenizers(["a b c"], ["x y z"], config, config)
  return tokenise(PAIRS, source, target, BatchConfig(tokens=64, buckets=(5, 10)), **options)


def test_training_leaves_out_long_and_empty_pairs_and_says_where():
  examples = tokenised()
  assert examples.index.tolist() == [0, 4, 5]
  assert (examples.dropped, examples.empty, examples.truncated) == ([1], [2, 3], [])
  assert [ids.tolist() for ids in examples.columns["source"]][:2] == [[4, 5, 6, EOS], [6, 6, EOS]]
  assert len(examples.columns["source"][2]) == 10  # exactly the ceiling stays
  notes = examples.notes(PAIRS)
  assert notes[0].startswith("1 of 6 pairs over the ceiling")
  assert notes[0].endswith("train.de:2")
  assert notes[1].endswith("train.de:3, train.de:4")


def test_evaluation_keeps_every_pair_and_cuts_long_ones():
  examples = tokenised(keep_long=True)
  assert examples.index.tolist() == list(range(6))
  assert (examples.dropped, examples.empty, examples.truncated) == ([], [], [1])
  cut = examples.columns["source"][1]
  assert len(cut) == 10
  assert cut[-1] == EOS
  assert examples.columns["source"][2].tolist() == [EOS]
  assert "cut to it: train.de:2" in examples.notes(PAIRS)[0]


@pytest.mark.parametrize("keep_long", [False, True])
def test_examples_are_those_of_a_loop_over_pairs(keep_long):
  chance = np.random.default_rng(3)
  texts = [" ".join("a" * chance.integers(0, 9)) for _ in range(400)]
  pairs = Pairs(texts[:200], texts[200:], where=str)
  tokenizer = Words(["a", "b"])
  config = BatchConfig(tokens=64, buckets=(3, 6))
  made = tokenise(pairs, tokenizer, tokenizer, config, keep_long=keep_long)
  ends = {"source": [], "target": []}
  found = {"index": [], "empty": [], "dropped": [], "truncated": []}
  for i, texts in enumerate(zip(pairs.source, pairs.target, strict=True)):
    sides = [tokenizer.encode(text) for text in texts]
    long = max(map(len, sides)) >= 6
    if not keep_long and (long or [] in sides):
      found["empty" if [] in sides else "dropped"].append(i)
      continue
    found["index"].append(i)
    if long:
      found["truncated"].append(i)
    for name, side in zip(ends, sides, strict=True):
      ends[name].append([*side[:5], EOS])
  for name, wanted in ends.items():
    assert [ids.tolist() for ids in made.columns[name]] == wanted
  assert {name: list(getattr(made, name)) for name in found} == found
  assert min(map(len, found.values())) == 0 < len(found["index"])


def test_pairs_longer_than_a_block_are_tokenised_in_order():
  count = 40_000
  pairs = Pairs([f"w{i}" for i in range(count)], ["x"] * count, where=str)
  config = TokenizerConfig(kind="words", vocab_size=50_000)
  source, target = pair_tokenizers(pairs.source, pairs.target, config, config)
  examples = tokenise(pairs, source, target, BatchConfig())
  assert len(examples) == count
  for number in (0, 32_767, 32_768, count - 1):
    ids = examples.columns["source"][number].tolist()
    assert ids == [*source.encode(f"w{number}"), EOS]
    assert UNK not in ids


def test_plain_lists_of_arrays_do_for_columns():
  columns = {name: list(column) for name, column in EXAMPLES.columns.items()}
  plain = Examples(columns=columns, index=EXAMPLES.index)
  ours, theirs = (take(train_batches(e, CONFIG, seed=2), 10) for e in (EXAMPLES, plain))
  assert all(equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_sequences_of_ids_are_indexed_like_lists():
  lists = [[1, 2], [], [3], [4, 5, 6]]
  ragged = Ragged.join([Ragged(lists[:2]), Ragged(), Ragged(lists[2:])])
  assert [ids.tolist() for ids in ragged] == lists
  assert [ids.tolist() for ids in ragged[1:]] == lists[1:]
  assert ragged[-1].tolist() == [4, 5, 6]
  for number in (4, -5):
    with pytest.raises(IndexError):
      ragged[number]


@pytest.mark.parametrize(
  "changes",
  [
    {"tokens": 0},
    {"tokens": 64, "ceiling": 128},
    {"tokens": 64, "buckets": (8, 128)},
    {"buckets": (8, 8)},
    {"buckets": (1, 8)},
    {"buckets": (16, 8)},
    {"bucket_count": 0},
    {"bucket_multiple": 0},
    {"ceiling": 1},
    {"prefetch": 0},
  ],
)
def test_bad_settings_name_their_field(changes):
  with pytest.raises(UserError, match=next(iter(changes))):
    BatchConfig(**changes)


def test_processes_must_share_rows_evenly():
  for options in (
    {"multiple": 3, "processes": 2},
    {"multiple": 2, "processes": 2, "process": 2},
    {"seed": -1},
  ):
    with pytest.raises(UserError):
      train_batches(EXAMPLES, CONFIG, **{"seed": 0, **options})


def test_no_pair_left_is_explained():
  examples = dataclasses.replace(make_examples(0), dropped=[0, 1], empty=[2])
  with pytest.raises(UserError, match="2 are over the ceiling of 16 tokens and 1 have an empty"):
    train_batches(examples, CONFIG, seed=0)


def test_sides_of_their_own_lengths_are_padded_to_the_least_bucket_that_holds_each():
  """The same batches of the same examples as without, narrower where a side is shorter."""
  random = np.random.default_rng(1)
  columns = {
    name: Ragged([[*random.integers(4, 50, random.integers(0, longest)), EOS] for _ in range(203)])
    for name, longest in (("source", 4), ("target", 16))
  }
  columns["labels/step"] = Ragged([target[:-1] for target in columns["target"]])
  examples = Examples(columns=columns, index=np.arange(203, dtype=np.int32))
  narrow = dataclasses.replace(CONFIG, own_lengths=True)
  count = batches_per_epoch(examples, narrow)
  both = [train_batches(examples, config, seed=3) for config in (CONFIG, narrow)]
  held = positions = 0
  for wide, own in zip(*(take(iterator, count) for iterator in both), strict=True):
    assert np.array_equal(wide["index"], own["index"])
    bucket = wide["source"].shape[1]
    assert own["source"].shape[1] == 4
    assert own["target"].shape[1] == own["labels/step"].shape[1] == bucket
    for name in columns:
      assert np.array_equal(own[name], wide[name][:, : own[name].shape[1]])
      assert not wide[name][:, own[name].shape[1] :].any()
      held += np.sum(own[name] != PAD)
      positions += own[name].size
  np.testing.assert_allclose(padding_share(examples, narrow), 1 - held / positions)
  for iterator in both:
    iterator.close()
  evaluated = list(eval_batches(examples, narrow))
  assert {batch["source"].shape[1] for batch in evaluated} == {4}
  assert sorted(rows_of(evaluated)) == expected_rows(examples)


@given(own=st.integers(0, 5), more=st.integers(0, 3))
def test_filler_lies_below_the_rows_of_a_batch_and_has_no_number(own, more):
  batch = {"x": np.ones((own, 2, 3), np.float32), "index": np.arange(own, dtype=np.int32)}
  found = filled(batch, own + more)
  assert {name: column.dtype for name, column in found.items()} == {
    name: column.dtype for name, column in batch.items()
  }
  for name, column in batch.items():
    np.testing.assert_array_equal(found[name][:own], column)
  assert found["x"].shape == (own + more, 2, 3)
  assert not found["x"][own:].any()
  assert found["index"][own:].tolist() == [-1] * more


@given(rows=st.integers(1, 40), count=st.integers(1, 60), multiple=st.integers(1, 8))
def test_scored_batches_have_no_row_more_than_devices_and_examples_ask_for(rows, count, multiple):
  found, wanted = scored_rows(rows, count, multiple), min(rows, count)
  assert found % multiple == 0
  assert wanted <= found < wanted + multiple
