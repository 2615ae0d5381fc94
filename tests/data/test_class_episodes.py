"""Episodes of classes: disjoint, numbered anew, always the same; sources and their mistakes."""

import dataclasses
import json

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import ClassExamples, DataError
from compmod_jax.data.class_episodes import ClassEpisodeConfig, ClassEpisodes
from compmod_jax.data.sources.classes import (
  ClassFolder,
  ClassLines,
  DigitsData,
  TfdsClasses,
  shrunk,
)

CONFIG = ClassEpisodeConfig(ways=3, shots=2, queries=4, batch=4)


@dataclasses.dataclass(frozen=True)
class Numbered:
  """Example i of class c is the number 100 c + i; splits have 10, 4 and 5 classes of 8."""

  counts: dict[str, tuple[int, int]] = dataclasses.field(
    default_factory=lambda: {"train": (0, 10), "valid": (10, 14), "test": (14, 19)}
  )
  short: int = -1

  def splits(self):
    return tuple(self.counts)

  def describe(self):
    return "numbers"

  def load(self, split):
    rows = [(c, i) for c in range(*self.counts[split]) for i in range(5 if c == self.short else 8)]
    order = np.random.default_rng(0).permutation(len(rows))
    first = self.counts[split][0]
    return ClassExamples(
      inputs=np.array([[100.0 * rows[n][0] + rows[n][1]] for n in order], np.float32),
      classes=np.array([rows[n][0] - first for n in order]),
      names=tuple(f"class {c}" for c in range(*self.counts[split])),
    )


@dataclasses.dataclass(frozen=True)
class Config:
  data: object = Numbered()
  episodes: ClassEpisodeConfig = CONFIG
  train_ways: int = 0
  quarter_turns: bool = False
  small_share: float = 0.3


def check_episode(inputs, labels, config):
  """Support and query have the same classes in the same order, and no example in common."""
  classes, count = inputs[:, 0] // 100, config.support
  assert len({*inputs[:, 0]}) == config.rows
  of_label = {label: {*classes[labels == label]} for label in range(config.ways)}
  assert all(len(found) == 1 for found in of_label.values())
  assert len(set().union(*of_label.values())) == config.ways
  np.testing.assert_array_equal(np.bincount(labels[:count]), [config.shots] * config.ways)
  np.testing.assert_array_equal(np.bincount(labels[count:]), [config.queries] * config.ways)
  return [next(iter(of_label[label])) for label in range(config.ways)]


def test_support_and_query_are_disjoint_and_classes_are_numbered_anew_in_every_episode():
  dataset = ClassEpisodes(Config())
  iterator, per_epoch = dataset.train_batches(seed=0, multiple=1)
  assert per_epoch == round(10 * 8 / CONFIG.rows / 4)
  places = set()
  for _ in range(8):
    batch = next(iterator)
    assert batch["inputs"].shape[:2] == batch["labels"].shape == batch["index"].shape
    for inputs, labels, index in zip(*(batch[k] for k in ("inputs", "labels", "index"))):  # noqa: B905
      assert index.min() >= 0
      order = check_episode(inputs, labels, CONFIG)
      np.testing.assert_array_equal(dataset.classes("train").inputs[index], inputs)
      places |= {*zip(order, range(3), strict=True)}
  # Every class has had more than one number.
  assert all(len({n for c, n in places if c == one}) > 1 for one, _ in places)


def test_episodes_of_evaluation_are_always_the_same_and_the_first_ones_for_any_count():
  first = [*ClassEpisodes(Config()).episodes("test", count=6)]
  again = [*ClassEpisodes(Config(train_ways=5)).episodes("test", count=10)]
  assert [len(batch["index"]) for batch in first] == [4, 4]
  assert (first[1]["index"][2:] == -1).all()  # filler
  np.testing.assert_array_equal(first[0]["inputs"], again[0]["inputs"])
  np.testing.assert_array_equal(first[1]["inputs"][:2], again[1]["inputs"][:2])
  found = {tuple(row) for batch in again for row in batch["index"] if row[0] >= 0}
  assert len(found) == 10
  for batch in again:
    for inputs, labels, index in zip(batch["inputs"], batch["labels"], batch["index"], strict=True):
      if index[0] >= 0:
        check_episode(inputs, labels, CONFIG)


def test_training_is_a_function_of_the_seed_and_resumed_by_its_position():
  def batches(seed, state=None, count=5):
    iterator, _ = ClassEpisodes(Config()).train_batches(seed=seed, multiple=1)
    if state is not None:
      iterator.set_state(state)
    return [next(iterator)["index"] for _ in range(count)], iterator.get_state()

  whole, _ = batches(3)
  _, state = batches(3, count=2)
  np.testing.assert_array_equal(np.stack(batches(3, state, 3)[0]), np.stack(whole[2:]))
  assert (np.stack(batches(4)[0]) != np.stack(whole)).any()


def test_processes_share_the_episodes_of_a_batch():
  whole = next(ClassEpisodes(Config()).train_batches(seed=0, multiple=2)[0])
  parts = [
    next(ClassEpisodes(Config()).train_batches(seed=0, multiple=2, process=p, processes=2)[0])
    for p in range(2)
  ]
  for name, column in whole.items():
    np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), column)


def test_training_can_have_more_classes_than_evaluation_and_parts_of_them():
  dataset = ClassEpisodes(Config(train_ways=5))
  assert next(dataset.train_batches(seed=0, multiple=1)[0])["labels"].max() == 4
  classes = {}
  for part in ("small", "large"):
    source = dataset.source("train", CONFIG, part=part, seed=1)
    classes[part] = {int(dataset.classes("train").classes[m[0]]) for m in source.members}
  assert len(classes["small"]) == 3
  assert classes["small"] | classes["large"] == {*range(10)}
  assert not classes["small"] & classes["large"]


def test_quarter_turns_are_classes_of_their_own_in_training_alone():
  class Pictures(Numbered):
    def load(self, split):
      found = super().load(split)
      pictures = found.inputs.reshape(-1, 1, 1, 1) + np.arange(4.0).reshape(1, 2, 2, 1) / 10
      return dataclasses.replace(found, inputs=pictures.astype(np.float32))

  data = Pictures({"train": (0, 2), "valid": (10, 14), "test": (14, 19)})
  config = ClassEpisodeConfig(ways=6, shots=1, queries=1, batch=2)
  dataset = ClassEpisodes(Config(data, dataclasses.replace(config, ways=3), 6, True))
  dataset.check()
  batch, upright = next(dataset.train_batches(seed=0, multiple=1)[0]), dataset.classes("train")
  turns = set()
  for row, index in zip(batch["inputs"].reshape(-1, 2, 2, 1), batch["index"].ravel(), strict=True):
    turned = [np.array_equal(np.rot90(upright.inputs[index], n), row) for n in range(4)]
    assert sum(turned) == 1
    turns.add(turned.index(True))
  assert turns == {0, 1, 2, 3}
  scored = next(dataset.episodes("test", count=2))
  np.testing.assert_array_equal(
    scored["inputs"][0], dataset.classes("test").inputs[scored["index"][0]]
  )


@pytest.mark.parametrize(
  ("config", "words"),
  [
    (
      Config(Numbered(short=15)),
      r"queries is 6, but of the split 'test' these .* fewer examples: 'class 15 \(5\)'",
    ),
    (
      Config(Numbered({"train": (0, 10), "valid": (9, 14), "test": (14, 19)})),
      r"The class 'class 9' is in the splits 'train' and 'valid'",
    ),
    (
      Config(episodes=dataclasses.replace(CONFIG, ways=5)),
      r"episodes.ways is 5, but the split 'valid' has 4 classes",
    ),
    (Config(quarter_turns=True), r"task.quarter_turns is set, but an example has the shape \(1,\)"),
  ],
)
def test_episodes_that_cannot_be_are_refused_by_name(config, words):
  with pytest.raises(UserError, match=words):
    ClassEpisodes(config).check()


@pytest.mark.parametrize("field", ["ways", "shots", "queries", "batch"])
def test_bad_sizes_name_their_field(field):
  with pytest.raises(UserError, match=f"episodes.{field} is 0; it must be at least"):
    ClassEpisodeConfig(**{field: 0})


# Sources.


def write_folder(folder, kind):
  for split, names in (("train", "abc"), ("valid", "de"), ("test", "fg")):
    for number, name in enumerate(names):
      (folder / split / name).mkdir(parents=True)
      for i in range(2):
        picture = np.full((8, 8), 40 * number + i, np.uint8)
        if kind == "png":
          import PIL.Image

          PIL.Image.fromarray(picture).save(folder / split / name / f"{i}.png")
        else:
          np.save(folder / split / name / f"{i}.npy", picture[:4, :4, None])


@pytest.mark.parametrize("kind", ["png", "npy"])
def test_a_folder_has_a_class_in_every_folder(tmp_path, kind):
  write_folder(tmp_path, kind)
  found = ClassFolder(str(tmp_path), side=4).load("train")
  assert found.names == ("a", "b", "c")
  assert found.inputs.shape == (6, 4, 4, 1)
  np.testing.assert_array_equal(found.inputs[:, 0, 0, 0], [0, 1, 40, 41, 80, 81])
  np.testing.assert_array_equal(found.classes, [0, 0, 1, 1, 2, 2])


def test_lines_are_examples_of_any_shape(tmp_path):
  lines = [{"class": name, "input": [[i, 0.5]]} for i, name in enumerate("abab")]
  (tmp_path / "train.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
  found = ClassLines(str(tmp_path)).load("train")
  assert found.names == ("a", "b")
  np.testing.assert_array_equal(found.inputs[:, 0], [[0, 0.5], [1, 0.5], [2, 0.5], [3, 0.5]])
  np.testing.assert_array_equal(found.classes, [0, 1, 0, 1])


@pytest.mark.parametrize(
  ("line", "words"),
  [
    (b"{", r"train.jsonl:2 is not JSON"),
    (b'{"class": 3, "input": [1]}', r"train.jsonl:2 is not like"),
    (b'{"class": "b", "input": [1, 2]}', r"train.jsonl:2 has an input of the shape \(2,\)"),
    (b'{"class": "b", "input": [[1, 2], [3]]}', r"train.jsonl:2 has an input whose lists differ"),
    (b'{"class": "b", "input": ["x"]}', r"train.jsonl:2 has values of type"),
    (b'{"class": "b", "input": [NaN]}', r"train.jsonl:2 has values of type .* no finite numbers"),
    (b"\xff", r"train.jsonl is not UTF-8"),
  ],
)
def test_bad_lines_are_refused_by_number(tmp_path, line, words):
  (tmp_path / "train.jsonl").write_bytes(b'{"class": "a", "input": [1]}\n' + line)
  with pytest.raises(DataError, match=words):
    ClassLines(str(tmp_path)).load("train")


def test_bad_folders_are_refused_by_file(tmp_path):
  with pytest.raises(UserError, match=r"train is no folder; it needs a folder for each of train"):
    ClassFolder(str(tmp_path)).load("train")
  (tmp_path / "train" / "a").mkdir(parents=True)
  with pytest.raises(DataError, match="has no pictures"):
    ClassFolder(str(tmp_path)).load("train")
  (tmp_path / "train" / "a" / "x.png").write_bytes(b"no picture")
  with pytest.raises(DataError, match=r"x.png cannot be read as a picture"):
    ClassFolder(str(tmp_path)).load("train")
  (tmp_path / "train" / "a" / "x.png").unlink()
  np.save(tmp_path / "train" / "a" / "0.npy", np.zeros(3))
  np.save(tmp_path / "train" / "a" / "1.npy", np.zeros(4))
  with pytest.raises(DataError, match=r"1.npy has the shape \(4,\)"):
    ClassFolder(str(tmp_path)).load("train")


def test_digits_are_parted_by_digit(tmp_path):
  images = np.arange(20 * 4, dtype=np.uint8).reshape(20, 2, 2)
  np.savez(tmp_path / "train.npz", images=images, labels=np.arange(20) % 10)
  found = DigitsData(str(tmp_path)).load("test")
  assert found.names == ("digit 7", "digit 8", "digit 9")
  np.testing.assert_array_equal(found.inputs[..., 0], images[[7, 8, 9, 17, 18, 19]])
  with pytest.raises(UserError, match=r"task.data has the digit 3 in two splits"):
    DigitsData(test=(3, 8))
  with pytest.raises(UserError, match=r"there is no file .*train.npz. Set COMPMOD_DATA"):
    DigitsData(str(tmp_path / "nowhere")).load("train")


@pytest.mark.real_data
def test_the_digits_of_the_data_folder_have_episodes():
  config = ClassEpisodeConfig(ways=3, shots=1, queries=15)
  dataset = ClassEpisodes(Config(DigitsData(), config))
  dataset.check()
  assert next(dataset.episodes("test", count=16))["inputs"].shape == (16, 48, 28, 28, 1)


def test_omniglot_that_is_not_there_says_what_to_do(tmp_path):
  data = TfdsClasses("omniglot", data_dir=str(tmp_path), download=False)
  with pytest.raises(UserError, match=r"prepare it there, or set download=True on a machine with"):
    data.load("train")
  with pytest.raises(UserError, match=r"task.data.name is 'omniglo'.*Did you mean 'omniglot'"):
    TfdsClasses("omniglo")


def test_omniglot_is_parted_by_alphabet_and_its_ink_is_white(monkeypatch):
  records = [
    {
      "image": np.full((105, 105, 3), 255 * (label % 2), np.uint8),
      "label": label,
      "alphabet": label // 2,
    }
    for label in range(12)
  ]
  monkeypatch.setattr(
    "compmod_jax.data.sources.classes.open_split", lambda name, split, **_: records
  )
  data = TfdsClasses("omniglot", valid_alphabets=2)
  train, valid = data.load("train"), data.load("valid")
  assert (len(train.names), len(valid.names)) == (8, 4)
  assert not {*train.names} & {*valid.names}
  assert train.inputs.shape == (8, 28, 28, 1)
  np.testing.assert_array_equal(train.inputs[:2, 0, 0, 0], [255, 0])


def test_shrinking_keeps_means_and_constants():
  picture = np.random.default_rng(0).integers(0, 256, (105, 70, 2)).astype(np.uint8)
  found = shrunk(picture, 28)
  assert found.shape == (28, 28, 2)
  np.testing.assert_allclose(found.mean((0, 1)), picture.mean((0, 1)), atol=0.5)
  exact = picture[:56, :56, :1].reshape(28, 2, 28, 2, 1).mean((1, 3))
  np.testing.assert_allclose(shrunk(picture[:56, :56, :1], 28), exact, atol=0.51)
