"""The large and the small part of the training data."""

import dataclasses

import numpy as np
import pytest
from tiny_model import make_experiment, write_data

from compmod_jax.core.errors import UserError
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.data.subsets import subset_numbers


def part(name: str, count: int = 1000, share: float = 0.07, seed: int = 3) -> np.ndarray:
  return subset_numbers(name, count, small_share=share, seed=seed)


@pytest.mark.parametrize("count", [2, 15, 160_239])
def test_the_parts_have_no_example_in_common_and_are_all_together(count):
  large, small = part("large", count, 0.4), part("small", count, 0.4)
  np.testing.assert_array_equal(np.sort(np.concatenate([large, small])), part("all", count))
  assert len(small) == round(0.4 * count)


def test_the_default_share_gives_the_sizes_of_the_thesis():
  assert [len(part(name, 160_239)) for name in ("large", "small")] == [149_022, 11_217]


def test_the_split_is_a_function_of_seed_and_number_of_examples():
  np.testing.assert_array_equal(part("small"), part("small"))
  assert not np.array_equal(part("small"), part("small", seed=4))
  assert np.all(np.diff(part("small")) > 0)
  assert not np.array_equal(part("small"), part("all")[:70])  # drawn, not the first ones


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (("smal", 10), ["phases.part", "'smal'", "Did you mean 'small'?"]),
    (("small", 5), ["small_share is 0.07", "gives 0 of 5", "another share"]),
    (("large", 10, 0.99), ["small_share is 0.99", "gives 10 of 10"]),
  ],
)
def test_a_part_that_cannot_be_is_a_mistake(arguments, words):
  with pytest.raises(UserError) as error:
    part(*arguments)
  assert all(word in str(error.value) for word in words)


def test_selected_examples_are_those_of_their_numbers():
  ids = [[4, 5], [6], [7, 8, 9], [10]]
  columns = {"source": Ragged(ids), "target": [np.array(i) for i in reversed(ids)]}
  found = Examples(columns=columns, index=np.array([2, 3, 5, 8])).select(np.array([2, 0]))
  assert [list(x) for x in found.columns["source"]] == [[7, 8, 9], [4, 5]]
  assert [list(x) for x in found.columns["target"]] == [[6], [10]]
  assert (list(found.index), list(found.lengths), len(found)) == ([5, 2], [3, 2], 2)
  assert found.tokens == {"source": 5, "target": 2}
  nothing = found.select(np.array([], int))
  assert (len(nothing), nothing.tokens["source"]) == (0, 0)


# In a task.


@pytest.fixture(scope="module")
def task(tmp_path_factory):
  data = write_data(tmp_path_factory.mktemp("parts") / "data")
  experiment = make_experiment(data)
  config = dataclasses.replace(experiment.task, small_share=0.3)
  return config.build(experiment.model)


def epoch(task, part: str, process: int = 0, processes: int = 1, epochs: int = 1) -> list[int]:
  """Indices of the examples of the first epochs."""
  iterator, count = task.dataset.train_batches(
    part=part, seed=1, multiple=2, process=process, processes=processes
  )
  found = [next(iterator)["index"] for _ in range(epochs * count)]
  return [int(i) for i in np.concatenate(found) if i >= 0]


def test_an_epoch_of_a_part_has_each_of_its_examples_once(task):
  large, small, every = (epoch(task, part) for part in ("large", "small", "all"))
  assert (
    sorted(large + small) == sorted(every) == sorted(task.dataset.train_examples.index.tolist())
  )
  assert len(small) == round(0.3 * len(every))
  again = epoch(task, "small", epochs=2)
  assert sorted(again) == sorted(small * 2)
  assert again[: len(small)] == small


def test_the_split_is_the_same_for_any_number_of_processes(task):
  shares = [epoch(task, "small", process, 2) for process in range(2)]
  assert sorted(shares[0] + shares[1]) == sorted(epoch(task, "small"))


def test_both_parts_have_the_shapes_of_the_whole(task):
  shapes = {part: next(task.dataset.train_batches(part=part, seed=1, multiple=2)[0]) for part in
            ("all", "large", "small")}  # fmt: skip
  assert len({batch["source"].shape for batch in shapes.values()}) == 1


def test_a_part_goes_on_exactly_where_it_was(task):
  iterator, count = task.dataset.train_batches(part="large", seed=1, multiple=2)
  for _ in range(count + 1):
    next(iterator)
  state = iterator.get_state()
  expected = [next(iterator)["source"] for _ in range(3)]
  other, _ = task.dataset.train_batches(part="large", seed=1, multiple=2)
  other.set_state(state)
  for batch in expected:
    np.testing.assert_array_equal(next(other)["source"], batch)
