"""Texts by class: hidden properties of sentences, files of one's own, episodes of one group."""

import dataclasses
import gzip
import json

import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.base import ClassExamples, DataError
from compmod_jax.data.class_episodes import ClassEpisodeConfig, ClassEpisodes
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.grammar.lexicon import CONJUNCTIONS
from compmod_jax.data.synthetic.grammar.properties import PROPERTIES
from compmod_jax.data.text_classes import SentenceData, TextEpisodes, TextLines
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer

GRAMMAR = GrammarData(train=3000, valid=5, test=5)
SMALL = SentenceData(
  sentences=2500,
  examples=20,
  words=12,
  train=("adjectives", "construction", "length", "nouns", "preposition"),
)
EPISODES = ClassEpisodeConfig(ways=2, shots=3, queries=2, batch=4)


@pytest.fixture(scope="module")
def sentences():
  return list(GRAMMAR.with_properties("train"))


@pytest.fixture(scope="module")
def loaded():
  return {split: SMALL.load(split) for split in SMALL.splits()}


def values_of(sentences, name):
  return {values[name] for _, values in sentences if name in values}


# Properties.


def test_sentences_with_properties_are_those_of_the_source(sentences):
  pairs = GRAMMAR.load("train")
  assert [text for text, _ in sentences] == list(pairs.target)
  for (_, values), info in zip(sentences, pairs.info, strict=True):
    assert values["number"] == {"sg": "singular", "pl": "plural"}[info["number"]]
    assert values["relative clauses"] == ("none", "one", "nested")[min(info["depth"], 2)]


def test_every_property_has_two_values_at_least(sentences):
  for name in PROPERTIES:
    assert len(values_of(sentences, name)) >= 2, name


def test_a_word_that_is_a_value_stands_in_the_sentence(sentences):
  for name in ("adverb", "conjunction", "coordination", "numeral", "name", "preposition", "time"):
    for text, values in sentences:
      if name in values:
        words = " ".join(text.lower().replace(",", "").rstrip(".?").split())
        assert f" {values[name].lower()} " in f" {words} ", (name, text)


@pytest.mark.parametrize("name", ["object", "subject", "verb", "adjective"])
def test_sets_of_words_are_disjoint_and_small(sentences, name):
  for number in range(1, 7):
    sets = {"first": set(), "second": set()}
    for _, values in sentences:
      if f"{name} set {number}" in values:
        sets[values[f"{name} set {number}"]].add(values[name])
    assert 2 <= len(sets["first"]) <= 6
    assert 2 <= len(sets["second"]) <= 6
    assert not sets["first"] & sets["second"]


def test_properties_agree_with_what_the_text_shows(sentences):
  conjunctions = {english for _, english in CONJUNCTIONS}
  for text, values in sentences:
    words = text.lower().replace(",", "").rstrip(".?").split()
    assert (values["question"] == "statement") == text.endswith("."), text
    if values["question"] == "open question":
      assert words[0] in {"why", "when", "where", "who", "whom"}
    if values.get("negation") == "negated":
      assert {"not", "cannot"} & {*words}
    if values.get("negation") == "affirmative":
      assert not {"not", "cannot", "no", "never"} & {*words}
    if values["relative clauses"] == "none":
      assert "which" not in words
    if values["relative clauses"] != "none":
      assert {"who", "which", "whom"} & {*words}
    if "conjunction" not in values:
      assert not conjunctions & {*words}, text
    if values["first word"] == "det" and values.get("construction") == "shared":
      assert values["subject form"] == "noun phrase", text
    if {"I", "he", "she", "we", "they", "him", "her", "them"} & {*text.rstrip(".?").split()[1:]}:
      assert values["pronouns"] == "some" or "her" in words, text
    if values["prepositions"] == "none":
      assert not {"in", "into", "behind", "with", "through"} & {*words}, text
    if values.get("length") == "short":
      assert len(words) <= 7
    if values["tense"] == "future" and values["question"] == "statement":
      assert "will" in words, text
    if values["tense"] == "pluperfect":
      assert {"had", "was", "were"} & {*words}, text


# Sentences by property.


def test_properties_and_sentences_of_splits_are_disjoint(loaded):
  groups = [{*one.groups} for one in loaded.values()]
  texts = [{*one.inputs.tolist()} for one in loaded.values()]
  for a, b in ((0, 1), (0, 2), (1, 2)):
    assert not groups[a] & groups[b]
    assert not texts[a] & texts[b]
  assert groups[2] == {*SMALL.test}


def test_a_class_is_the_first_sentences_that_have_its_value(loaded):
  found = loaded["test"]
  grammar = GrammarData(train=SMALL.sentences, valid=500, test=500)
  whole = dict.fromkeys(
    (text, values["tense"])
    for text, values in grammar.with_properties("test")
    if len(text.split()) <= SMALL.words
  )
  number = found.names.index("tense: past")
  assert found.groups[number] == "tense"
  expected = [text for text, value in whole if value == "past"][: SMALL.examples]
  assert found.inputs[found.classes == number].tolist() == expected
  np.testing.assert_array_equal(np.bincount(found.classes), SMALL.examples)


def test_another_seed_is_another_draw_and_the_same_seed_the_same(loaded):
  again = SentenceData(**dataclasses.asdict(SMALL)).load("valid")
  np.testing.assert_array_equal(again.inputs, loaded["valid"].inputs)
  other = dataclasses.replace(SMALL, seed=1).load("valid")
  assert len({*other.inputs.tolist()} & {*again.inputs.tolist()}) < 0.1 * len({*again.inputs})


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"words": 4}, r"task.data.words is 4; it must be at least 5"),
    ({"test": ("tense", "length")}, r"the property 'length' in 'train' and 'test'"),
    ({"valid": ("tens",)}, r"task.data.valid is 'tens'; .* Did you mean 'tense'"),
    ({"train": ()}, r"task.data.train is empty"),
  ],
)
def test_bad_fields_are_named(fields, words):
  with pytest.raises(UserError, match=words):
    SentenceData(**fields)


def test_a_property_with_too_few_sentences_is_named():
  data = SentenceData(sentences=50, examples=9, test=("tense", "number"))
  with pytest.raises(UserError, match=r"task.data.test has 'tense'.* fewer than two values"):
    data.load("test")


# Files.


def write(folder, **splits):
  for split, lines in splits.items():
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
  return TextLines(str(folder))


def line(name, text, **more):
  return {"class": name, "text": text, **more}


def test_lines_of_one_s_own_are_classes_by_name(tmp_path):
  data = write(tmp_path, train=[line("b", "one  two"), line("a", "three"), line("b", "four")])
  found = data.load("train")
  assert found.names == ("a", "b")
  assert found.groups == ()
  assert found.inputs.tolist() == ["one two", "three", "four"]
  assert found.classes.tolist() == [1, 0, 1]


def test_a_long_text_does_not_widen_the_others(tmp_path):
  texts = ["x" * 50_000, *("y" for _ in range(200))]
  found = write(tmp_path, train=[line("a", text) for text in texts]).load("train")
  assert found.inputs.tolist() == texts
  assert found.inputs.nbytes < 10_000


def test_lines_with_a_group_and_gzipped_files(tmp_path):
  rows = [line("yes", "a b", group="x"), line("yes", "c", group="y"), line("no", "d", group="x")]
  with gzip.open(tmp_path / "valid.jsonl.gz", "wt") as file:
    file.write("\n".join(map(json.dumps, rows)))
  found = TextLines(str(tmp_path)).load("valid")
  assert found.names == ("x: no", "x: yes", "y: yes")
  assert found.groups == ("x", "x", "y")


@pytest.mark.parametrize(
  ("lines", "words"),
  [
    (['{"class": "a"}'], r'train.jsonl:1 is not like {"class": "a name"'),
    (["[1]"], r'train.jsonl:1 is not like {"class"'),
    (['{"class": "a", "text": " "}'], r"train.jsonl:1 is not like"),
    (["{"], r"train.jsonl:1 is not JSON"),
    (
      [json.dumps(line("a", "b")), json.dumps(line("a", "b", group="c"))],
      r'has lines with a "group" and lines without',
    ),
    (["\n"], r"train.jsonl"),
  ],
)
def test_bad_lines_are_named(tmp_path, lines, words):
  (tmp_path / "train.jsonl").write_text("\n".join(lines))
  with pytest.raises(DataError, match=words):
    TextLines(str(tmp_path)).load("train")


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(UserError, match=r"task.data.folder is .* there is no file .*test.jsonl"):
    TextLines(str(tmp_path)).load("test")


# Episodes.


@dataclasses.dataclass(frozen=True)
class Config:
  data: object = SMALL
  episodes: ClassEpisodeConfig = EPISODES
  mixed_ways: tuple[int, ...] = ()
  length: int = 20
  train_ways: int = 0
  quarter_turns: bool = False
  small_share: float = 0.3
  also: tuple[ClassEpisodeConfig, ...] = ()

  def scored(self):
    return (self.episodes, *self.also)


@pytest.fixture(scope="module")
def tokenizer(loaded):
  config = TokenizerConfig(kind="words", vocab_size=2000, special_tokens=("<mask>",))
  return train_tokenizer(map(str, loaded["train"].inputs), config)


def test_an_episode_is_of_values_of_one_property(tokenizer):
  dataset = TextEpisodes(Config(), tokenizer)
  dataset.check()
  for split in ("valid", "test"):
    found, seen = dataset.classes(split), set()
    for batch in dataset.episodes(split, count=20):
      for index in batch["index"]:
        groups = {found.groups[found.classes[i]] for i in index}
        assert len(groups) == 1
        assert len({found.classes[i] for i in index}) == EPISODES.ways
        assert len({*index.tolist()}) == EPISODES.rows
        seen |= groups
    assert len(seen) > 2


def test_texts_are_padded_tokens_with_a_start_and_an_end(tokenizer):
  dataset = TextEpisodes(Config(length=6), tokenizer)
  found = dataset.tokens(["The dog sleeps.", "The old dog often sees the cat in the garden."])
  assert found.shape == (2, 6)
  assert found[0, 0] == found[1, 0] == tokenizer.bos
  assert found[0].tolist().count(tokenizer.pad) == 1
  assert found[0, 4] == found[1, 5] == tokenizer.eos


def test_batches_of_several_numbers_of_classes_come_in_turn_and_are_resumed(tokenizer):
  config = Config(mixed_ways=(2, 3), train_ways=3)
  dataset = TextEpisodes(config, tokenizer)
  batches, per_epoch = dataset.train_batches(seed=0, multiple=1)
  each = EPISODES.shots + EPISODES.queries
  found = [next(batches) for _ in range(5)]
  assert [batch["index"].shape[1] for batch in found] == [2 * each, 3 * each] * 2 + [2 * each]
  assert per_epoch > 2
  state = batches.get_state()
  after = next(batches)
  again, _ = dataset.train_batches(seed=0, multiple=1)
  again.set_state(state)
  np.testing.assert_array_equal(next(again)["index"], after["index"])
  assert "of 2, 3 classes in turn" in dataset.describe_batches()


def test_episodes_that_cannot_be_are_refused_by_name(tokenizer):
  many = dataclasses.replace(EPISODES, shots=30)
  with pytest.raises(
    UserError, match=r"episodes.shots \+ episodes.queries is 32, but of the split"
  ):
    TextEpisodes(Config(also=(many,)), tokenizer).check()
  wide = dataclasses.replace(EPISODES, ways=9)
  with pytest.raises(UserError, match=r"the largest group of classes of the split 'valid' has \d"):
    TextEpisodes(Config(also=(wide,)), tokenizer).check()


@dataclasses.dataclass(frozen=True)
class Grouped:
  """Numbers in groups, one of which is in two splits."""

  def splits(self):
    return ("train", "valid")

  def describe(self):
    return "numbers"

  def load(self, split):
    names = tuple(f"{split} {number}" for number in range(4))
    groups = ("a", "a", "b", "b") if split == "train" else ("b", "b", "c", "c")
    classes = np.repeat(np.arange(4), 6)
    return ClassExamples(np.arange(24.0).reshape(24, 1), classes, names, groups)


def test_a_group_in_two_splits_is_refused():
  with pytest.raises(UserError, match=r"The group 'b' has classes in the splits 'train' and 'va"):
    ClassEpisodes(Config(data=Grouped())).check()


def test_groups_have_to_be_those_of_all_classes():
  with pytest.raises(UserError, match=r"There are 2 classes but 1 groups"):
    ClassExamples(np.zeros((2, 1)), np.arange(2), ("a", "b"), ("c",))
