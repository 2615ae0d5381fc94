"""Translation sets of TensorFlow Datasets, with a small one that is built here, offline."""

import sys

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import DataError
from compmod_jax.data.sources.tfds import TfdsData

SENTENCES = {
  "train": [("Der Hund bellt.", "The dog barks."), ("Grüße!", "Greetings!"), ("Ja.", "Yes.")] * 500,
  "validation": [("Nein.", "No.")],
  "test": [("Gut.", "Good."), ("Schlecht. ", "Bad.")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  tfds = pytest.importorskip("tensorflow_datasets")

  class ToyTranslate(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      return tfds.core.DatasetInfo(
        builder=self, features=tfds.features.Translation(languages=("de", "en"))
      )

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples(pairs) for split, pairs in SENTENCES.items()}

    def _generate_examples(self, pairs):
      for number, (source, target) in enumerate(pairs):
        yield number, {"de": source, "en": target}

  path = tmp_path_factory.mktemp("tfds")
  builder = ToyTranslate(data_dir=path, file_format="array_record")
  builder.download_and_prepare()
  return str(path)


@pytest.fixture
def data(folder):
  return TfdsData(name="toy_translate", data_dir=folder, download=False)


def test_every_split_has_the_pairs_that_were_written(data):
  for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
    pairs = data.load(split)
    found = sorted(zip(pairs.source, pairs.target, strict=True))
    assert found == sorted((a.strip(), b) for a, b in SENTENCES[name])


def test_indexing_slicing_and_iterating_agree(data):
  pairs = data.load("train")
  assert len(pairs) == 1500
  texts = list(pairs.source)
  assert len(texts) == 1500
  assert pairs.source[7:12] == texts[7:12]
  assert pairs.source[-1] == texts[-1] == pairs.source[1499]
  assert pairs.source[::-500] == texts[::-500]
  with pytest.raises(IndexError):
    pairs.source[1500]


def test_both_sides_of_a_block_are_decoded_once(data):
  pairs = data.load("train")
  calls = []
  rows = pairs.source._rows
  whole = rows._records

  class Counting:
    def __len__(self):
      return len(whole)

    def __getitems__(self, numbers):
      calls.append(len(numbers))
      return whole.__getitems__(numbers)

  rows._records = Counting()
  pairs.source[0:1000], pairs.target[0:1000]
  assert calls == [1000]


def test_languages_can_be_swapped(folder):
  data = TfdsData(
    name="toy_translate",
    data_dir=folder,
    download=False,
    source_language="en",
    target_language="de",
  )
  pairs = data.load("valid")
  assert (pairs.source[0], pairs.target[0]) == ("No.", "Nein.")


def test_a_training_split_can_be_a_slice(folder):
  data = TfdsData(name="toy_translate", data_dir=folder, download=False, train="train[:10%]")
  pairs = data.load("train")
  assert len(pairs) == 150
  assert pairs.where(3) == "toy_translate:train[:10%][3]"


def test_reading_needs_no_tensorflow(data):
  data.load("test").source[0]
  assert "tensorflow" not in sys.modules


def test_a_set_defined_only_in_a_translation_module_is_found(tmp_path):
  data = TfdsData(name="wmt14_translate/de-en", data_dir=str(tmp_path), download=False)
  with pytest.raises(UserError, match="cannot be opened") as error:  # known, but not prepared
    data.load("train")
  assert "prepare it there" in str(error.value)


@pytest.mark.parametrize(
  ("changes", "split", "message"),
  [
    ({}, "dev", "split is 'dev'"),
    ({"source_language": "fr"}, "train", "'fr'; it must be one of: de, en"),
    ({"name": "no_such_translate"}, "train", "name is 'no_such_translate'"),
    ({"valid": "vlaidation"}, "valid", "'vlaidation'"),
  ],
)
def test_mistakes_are_named(folder, changes, split, message):
  data = TfdsData(**{"name": "toy_translate", "data_dir": folder, "download": False, **changes})
  with pytest.raises(UserError) as error:
    data.load(split)
  assert message in str(error.value)
  assert "\n" not in str(error.value)


def test_a_sentence_that_is_not_utf8_is_named(data):
  pairs = data.load("train")

  class Damaged:
    def __getitems__(self, numbers):
      return [{"de": b"\xff", "en": b"x"} for _ in numbers]

    def __len__(self):
      return 1500

  pairs.source._rows._records = Damaged()
  with pytest.raises(DataError, match=r"toy_translate:train\[4\] is not UTF-8"):
    pairs.source[4]


def test_bad_settings_are_refused():
  for changes in ({"name": ""}, {"source_language": "en"}, {"tests": ("train",)}):
    with pytest.raises(UserError):
      TfdsData(**changes)
