"""Streams of text in stretches: every token is a target once, after the one before it."""

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.streams import (
  Stretches,
  eval_stretches,
  rows_of_evaluation,
  train_stretches,
)

START = 99


def made(count, rows, length, **columns):
  return Stretches(np.arange(1, count + 1), start=START, rows=rows, length=length, columns=columns)


@pytest.mark.parametrize(
  ("count", "rows", "length"), [(40, 4, 5), (41, 4, 5), (7, 3, 10), (3, 3, 1)]
)
def test_every_target_is_counted_once_and_read_after_the_one_before_it(count, rows, length):
  seen = []
  for batch in eval_stretches(made(count, rows, length)):
    counted = batch["counted"] == 1
    assert batch["tokens"].shape == (rows, length)
    targets, tokens = batch["targets"][counted], batch["tokens"][counted]
    np.testing.assert_array_equal(tokens, np.where(targets == 1, START, targets - 1))
    seen += targets.tolist()
  assert sorted(seen) == list(range(1, count + 1))


def test_rows_go_on_from_one_stretch_to_the_next_and_start_anew_in_an_epoch():
  stretches = made(60, 3, 5)
  first, second = stretches[0], stretches[1]
  np.testing.assert_array_equal(second["tokens"][:, 0], first["targets"][:, -1])
  assert first["fresh"].all()
  assert not second["fresh"].any()
  assert len(stretches) == 4


def test_further_columns_stand_beside_their_targets():
  stretches = made(10, 2, 5, label=np.arange(1, 11) * 10)
  np.testing.assert_array_equal(stretches[0]["label"], stretches[0]["targets"] * 10)


def test_training_goes_round_and_its_position_can_be_restored():
  stretches = made(40, 4, 5)
  iterator = train_stretches(stretches)
  batches = [next(iterator) for _ in range(3)]
  np.testing.assert_array_equal(batches[2]["targets"], batches[0]["targets"])
  state = iterator.get_state()
  after = next(iterator)
  again = train_stretches(stretches)
  again.set_state(state)
  np.testing.assert_array_equal(next(again)["targets"], after["targets"])


def test_processes_read_their_rows_of_every_batch():
  stretches = made(40, 4, 5)
  parts = [next(train_stretches(stretches, process=p, processes=2)) for p in range(2)]
  joined = np.concatenate([part["targets"] for part in parts])
  np.testing.assert_array_equal(joined, stretches[0]["targets"])
  with pytest.raises(UserError, match="4 rows cannot be shared evenly by 3"):
    train_stretches(stretches, process=0, processes=3)


@pytest.mark.parametrize(
  ("tokens", "length", "types", "rows"),
  [
    (73_760, 35, 10_003, 128),
    (9_000, 35, 200, 32),  # 281 tokens of each
    (279, 35, 200, 1),
    (10**8, 35, 50_000, 76),  # 7 MB of logits each
    (10**8, 350, 10**6, 1),
  ],
)
def test_evaluation_reads_as_many_streams_as_text_and_memory_have_room_for(
  tokens, length, types, rows
):
  assert rows_of_evaluation(tokens, length, types) == rows


def test_sizes_that_cannot_be_are_refused():
  with pytest.raises(UserError, match="rows is 0"):
    made(10, 0, 5)
  with pytest.raises(UserError, match="too few for 11 rows"):
    made(10, 11, 5)
