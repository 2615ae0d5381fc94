"""The grammar: one translation each, disjoint splits, annotations that fit, words that agree."""

import random
import time
from collections import Counter

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.synthetic.grammar import (
  GrammarData,
  clauses,
  dictionary,
  phrases,
  sentences,
  tables,
  translate_words,
)
from compmod_jax.data.synthetic.grammar.clauses import Composer
from compmod_jax.data.synthetic.grammar.inflect import CASES, NOUN, verb_group
from compmod_jax.data.synthetic.grammar.lexicon import ADJECTIVES, NAMES, NOUNS
from compmod_jax.data.synthetic.grammar.splits import held_out_pairs
from compmod_jax.data.synthetic.grammar.verbs import VERBS
from compmod_jax.metrics.text import bleu

# Nouns, verbs and determiners left: many verbs, or next to nothing so that long sentences repeat.
TINY = [
  "Frau Lehrer Katze Ball Haus",
  "seek pick sleep go help give begin say",
  "der ein",
]
TINIEST = ["Frau Katze Ball Haus", "seek sleep go", "der"]
TAGS = {"noun", "name", "verb", "aux", "adj", "adv", "det", "num", "pron", "prep", "conj", "neg"}
DATA = GrammarData(train=20_000, valid=300, test=400, shifted=200)


@pytest.fixture(scope="module")
def loaded():
  return {split: DATA.load(split) for split in DATA.splits()}


def words(text: str) -> set[str]:
  return set(text.lower().replace(",", "").rstrip(".?").split())


def conflicts(pairs) -> list[tuple[str, str, str]]:
  """Texts with two translations."""
  seen: dict[str, str] = {}
  return [(one, other, seen[one]) for one, other in pairs if seen.setdefault(one, other) != other]


def test_every_sentence_has_one_translation_in_both_directions(loaded):
  pairs = [pair for p in loaded.values() for pair in zip(p.source, p.target, strict=True)]
  assert conflicts(pairs) == []
  assert conflicts((english, german) for german, english in pairs) == []


@pytest.fixture
def few_words(request, monkeypatch):
  """Leaves so few words that short sentences come up again and again, in every way there is."""
  few_nouns, few_verbs, few_stems = (text.split() for text in request.param)
  kept_nouns = {i for i, noun in enumerate(NOUNS) if noun.singular in few_nouns}
  kept_verbs = {i for i, verb in enumerate(VERBS) if verb.english[0] in few_verbs}
  noun_lists = [*tables.NOUNS_OF.values(), *tables.MASCULINE_OF.values()]
  verb_lists = [t for d in (tables.FRAMES, tables.DOES, tables.SUFFERS) for t in d.values()]
  verb_lists += [sentences._TAKING_OBJECT, sentences._PLAIN_VERBS]
  verb_lists += [sentences._DONE_BY_PERSONS, sentences._DONE_TO_PERSONS]
  stems = [t for choice in tables.DETERMINERS.values() for t in choice]
  first_only = [*tables.ADJECTIVES_OF.values(), *tables.TIMES.values()]
  first_only += [tables.ADVERBS, tables.NUMERALS, sentences._CONJUNCTIONS, sentences._COORDINATIONS]
  keep = [(t, [i for i in t if i in kept_nouns] or t[:1]) for t in noun_lists]
  keep += [(t, [i for i in t if i in kept_verbs] or t[:1]) for t in verb_lists]
  keep += [(t, [stem for stem in t if stem in few_stems]) for t in stems]
  keep += [(t, t[:1]) for t in [*first_only, *tables.TENSES.values()]]
  monkeypatch.setattr(phrases, "NAMES", NAMES[:1])
  monkeypatch.setenv("COMPMOD_CACHE_GB", "0")  # texts of all words may be kept
  everything = [(table, list(table)) for table, _ in keep]
  for table, kept in keep:
    table[:] = kept
  yield
  for table, whole in everything:
    table[:] = whole


@pytest.mark.parametrize("few_words", [TINY, TINIEST], indirect=True)
def test_no_sentence_of_a_tiny_lexicon_has_two_translations(few_words):
  generator = random.Random(0)
  composer = Composer(generator.random, 2)
  pairs = []
  for i in range(60_000):
    composer.clear()
    draw = (sentences.ordinary, sentences.nested)[i % 3 > 0]
    sentence = sentences.attracted(composer, i % 4) if i % 20 == 0 else draw(composer)
    german, english = (sentences.render(side)[0] for side in (sentence.german, sentence.english))
    if len(german.split()) <= 9:
      pairs.append((german, english))
  assert len(pairs) - len(set(pairs)) > 2_000, "the lexicon is not small enough to tell anything"
  assert conflicts(pairs) == []
  assert conflicts((english, german) for german, english in pairs) == []


def test_no_word_form_belongs_to_two_words():
  english, german = Counter(), Counter()
  for i, noun in enumerate(NOUNS):
    english.update(set(noun.english))
    german.update({NOUN[i, plural, case][0] for plural in (False, True) for case in CASES})
  for adjective in ADJECTIVES:
    english[adjective.english] += 1
    german[adjective.german] += 1
  for verb in VERBS:
    groups = [verb_group(verb, tense, person) for tense in ("present", "past") for person in (0, 1)]
    english.update({*verb.english, *(group.plain[1][0][0] for group in groups)})
    german.update(
      {group.final_end[0][0] for group in groups}
      | {verb.participle, verb.particle + verb.infinitive}
    )
  assert [word for word, times in english.items() if times > 1] == []
  assert [word for word, times in german.items() if times > 1] == []


def test_nouns_tell_their_number_in_every_case():
  for i, noun in enumerate(NOUNS):
    for case in CASES:
      same = NOUN[i, False, case] == NOUN[i, True, case]
      # Then an article tells, which no feminine noun's does.
      assert not (same and noun.gender == "f"), noun.singular


def test_no_sentence_of_another_split_is_in_training(loaded):
  train = loaded["train"]
  for split, pairs in loaded.items():
    if split != "train":
      assert not set(pairs.source) & set(train.source), split
      assert not set(pairs.target) & set(train.target), split
  assert not set(loaded["valid"].source) & set(loaded["test"].source)


def test_other_seeds_share_no_test_sentence_with_training(loaded):
  other = GrammarData(seed=1, train=2_000)
  train = set(other.load("train").source)
  assert not train & set(loaded["test"].source)
  assert len(train & set(loaded["train"].source)) < 10


def test_sentence_i_is_the_same_drawn_alone_or_with_others(loaded):
  for split, pairs in loaded.items():
    for i in (0, 7, len(pairs) - 1):
      assert DATA.pair(split, i) == (pairs.source[i], pairs.target[i], pairs.info[i])
  larger = GrammarData(train=5, test=600).load("test")
  assert list(larger.source[:400]) == list(loaded["test"].source)


def test_the_other_direction_swaps_the_sides(loaded):
  swapped = GrammarData(direction="en-de", test=50)
  pairs, straight = swapped.load("test"), loaded["test"]
  assert list(pairs.source) == list(straight.target[:50])
  assert list(pairs.target) == list(straight.source[:50])
  assert pairs.info[3]["pos_source"] == straight.info[3]["pos_target"]
  assert (swapped.source_language, swapped.target_language) == ("en", "de")


def test_a_hundred_thousand_pairs_take_less_than_twenty_seconds():
  def seconds(seed: int) -> float:
    start = time.process_time()
    GrammarData(seed=seed, train=2_000).load("train")
    return time.process_time() - start

  assert min(map(seconds, range(3))) * 50 < 20


def test_sentences_are_long_enough_and_few_come_twice(loaded):
  train = loaded["train"]
  for side in (train.source, train.target):
    lengths = [len(text.split()) for text in side]
    assert sum(lengths) / len(lengths) >= 9
    assert 5 <= min(lengths) <= max(lengths) <= DATA.words
  for pairs in loaded.values():
    assert len(set(pairs.source)) >= 0.999 * len(pairs)


def test_every_word_has_a_tag_and_every_form_one_part_of_speech(loaded):
  tags = set()
  for pairs in loaded.values():
    for i, info in enumerate(pairs.info):
      assert len(info["pos_source"]) == len(pairs.source[i].split())
      assert len(info["pos_target"]) == len(pairs.target[i].split())
      tags |= {*info["pos_source"], *info["pos_target"]}
  assert tags == TAGS | {"part"}
  nouns = {form[0] for form in NOUN.values()}
  tagged = zip(loaded["test"].source, loaded["test"].info, strict=True)
  found = {
    tag
    for source, info in tagged
    for word, tag in list(zip(source.split(), info["pos_source"], strict=True))[1:]
    if word.strip(",.?") in nouns
  }
  assert found == {"noun"}


def test_longer_and_deeper_splits_lie_outside_training(loaded):
  for info in loaded["train"].info:
    assert info["depth"] <= DATA.depth
  assert {info["depth"] for info in loaded["train"].info} == {0, 1, 2}
  assert {info["depth"] for info in loaded["depth"].info} == {3}
  for side in (loaded["length"].source, loaded["length"].target):
    assert all(DATA.words < len(text.split()) <= 2 * DATA.words for text in side)
  assert all(len(text.split()) <= DATA.words for text in loaded["depth"].source)
  assert {info["depth"] for info in loaded["length"].info} <= {0, 1, 2}


def test_held_out_words_never_meet_in_training_though_each_is_trained(loaded):
  forms = {}
  for i, noun in enumerate(NOUNS):
    forms["noun", i] = set(noun.english)
  for i, adjective in enumerate(ADJECTIVES):
    forms["adj", i] = {adjective.english}
  for i, verb in enumerate(VERBS):
    third = verb_group(verb, "present", 0).plain[1][0][0]
    forms["verb", i] = {*verb.english, third}
  adjectives, verbs = held_out_pairs()
  pairs = [("adj", i, j) for i, nouns in adjectives.items() for j in nouns]
  pairs += [("verb", i, j) for i, nouns in verbs.items() for j in nouns]
  assert len(pairs) > 80

  def meetings(texts):
    having: dict[str, set[int]] = {}
    for number, text in enumerate(texts):
      for word in words(text):
        having.setdefault(word, set()).add(number)
    found = set()
    for kind, i, j in pairs:
      first = set().union(*(having.get(form, set()) for form in forms[kind, i]))
      second = set().union(*(having.get(form, set()) for form in forms["noun", j]))
      found |= first & second
    return found, having

  for split in ("train", "valid", "test", "length", "depth", "attractor"):
    assert meetings(loaded[split].target)[0] == set(), split
  combined, _ = meetings(loaded["combination"].target)
  assert combined == set(range(len(loaded["combination"])))
  trained = meetings(loaded["train"].target)[1]
  for some in forms.values():
    assert sum(len(trained.get(form, ())) for form in some) > 50, some


def test_attractor_items_differ_from_their_twin_in_one_verb(loaded):
  pairs = loaded["attractor"]
  assert [info["attractors"] for info in pairs.info] == [i % 4 for i in range(len(pairs))]
  numbers = Counter()
  for text, german, info in zip(pairs.target, pairs.source, pairs.info, strict=True):
    right, wrong = text.split(), info["ungrammatical"].split()
    changed = [(a, b) for a, b in zip(right, wrong, strict=True) if a != b]
    assert len(changed) == 1, text
    singular, plural = changed[0] if info["number"] == "sg" else changed[0][::-1]
    small = {"is": "are", "was": "were", "has": "have", "does": "do"}
    stripped = singular.strip(".")
    assert plural.strip(".") == small.get(stripped) or stripped.startswith(plural.strip(".y")), text
    assert german != info["ungrammatical_german"]
    numbers[info["number"], info["attractors"]] += 1
  assert len(numbers) == 8


def test_attractors_are_counted_as_nouns_of_the_other_number_before_the_verb(loaded):
  plural = {form: number for noun in NOUNS for number, form in enumerate(noun.english)}
  for text, info in zip(loaded["attractor"].target, loaded["attractor"].info, strict=True):
    wrong = info["ungrammatical"].split()
    verb = next(i for i, word in enumerate(text.split()) if word != wrong[i])
    numbers = [plural[word] for word in text.split()[:verb] if word in plural]
    assert ("sg", "pl")[numbers[0]] == info["number"], text
    assert sum(number != numbers[0] for number in numbers[1:]) == info["attractors"], text


def test_german_verbs_stand_where_clauses_want_them():
  """Known sentences, one for each rule of word order, are what the parts make of each other."""
  see, pick = (next(v for v in VERBS if v.english[0] == base) for base in ("see", "pick"))
  man = phrases.Phrase((("der", "det"), ("Mann", "noun")), (("the", "det"), ("man", "noun")))
  ball = ((("den", "det"), ("Ball", "noun")), (("the", "det"), ("ball", "noun")))

  def text(tokens, stop="."):
    return sentences.render((*tokens, (stop, "punct")))[0]

  def clause(verb, tense, **parts):
    return clauses.Clause(man, tense, VERBS.index(verb), objects=ball, **parts)

  picks, seen = clause(pick, "present"), clause(see, "perfect", negated=True)
  today = (("heute", "adv"),)
  assert text(clauses.german_main(picks)) == "Der Mann sucht den Ball aus."
  assert text(clauses.german_main(picks, today)) == "Heute sucht der Mann den Ball aus."
  assert text(clauses.german_main(picks, ()), "?") == "Sucht der Mann den Ball aus?"
  assert text(clauses.german_final(picks)) == "Der Mann den Ball aussucht."
  assert text(clauses.german_final(seen)) == "Der Mann den Ball nicht gesehen hat."
  assert text(clauses.english_statement(seen)) == "The man has not seen the ball."
  assert text(clauses.english_question(picks), "?") == "Does the man pick the ball?"
  must = clause(pick, "must", negated=True)
  assert text(clauses.german_main(must)) == "Der Mann muss den Ball nicht aussuchen."
  assert text(clauses.english_statement(must)) == "The man does not have to pick the ball."
  cannot = clause(see, "can", negated=True)
  assert text(clauses.english_statement(cannot)) == "The man cannot see the ball."


@pytest.mark.parametrize("direction", ["de-en", "en-de"])
def test_word_by_word_translation_stays_below_bleu_50(direction):
  pairs = GrammarData(direction=direction).load("test")
  known = {form.lower() for form in dictionary(direction)}
  unknown = {word for text in pairs.source for word in words(text)} - known
  assert unknown <= {name.lower() for name in NAMES}
  output = [translate_words(text, direction) for text in pairs.source]
  assert 10 < bleu(output, list(pairs.target)).value < 50


@pytest.mark.parametrize(
  ("make", "says"),
  [
    (lambda: GrammarData(direction="de-fr"), "direction is 'de-fr'"),  # type: ignore[arg-type]
    (lambda: GrammarData(train=0), "train is 0"),
    (lambda: GrammarData(depth=4), "depth is 4"),
    (lambda: GrammarData(depth=3), "words is 20"),
    (lambda: GrammarData(words=50), "words is 50"),
    (lambda: GrammarData().load("dev"), "split is 'dev'"),
    (lambda: GrammarData().pair("test", 1_000), "index is 1000"),
  ],
)
def test_mistakes_are_told(make, says):
  with pytest.raises(UserError, match=says):
    make()


def test_deeper_training_leaves_the_splits_apart():
  data = GrammarData(depth=1, words=16, train=500, shifted=40)
  assert {info["depth"] for info in data.load("train").info} == {0, 1}
  assert {info["depth"] for info in data.load("depth").info} == {2}


def test_relations_are_the_same_in_both_languages_and_join_words_of_the_right_kinds(loaded):
  seen = Counter()
  for split in ("test", "depth", "attractor"):
    pairs = loaded[split]
    for number in range(0, len(pairs), 2):
      sides = pairs.relations(number)
      counts = [Counter(name for name, _, _ in sides[side]) for side in ("source", "target")]
      assert counts[0] == counts[1], (pairs.source[number], sides)
      for side, texts in (("source", pairs.source), ("target", pairs.target)):
        tags = pairs.info[number][f"pos_{side}"]
        assert len(tags) == len(texts[number].split())
        for name, dependent, head in sides[side]:
          kinds = tags[dependent], tags[head]
          if name in ("subject", "object"):
            assert kinds[0] in ("noun", "name", "pron")
            assert kinds[1] in ("verb", "adj")
          elif name == "adjective":
            assert kinds == ("adj", "noun")
            assert set(tags[dependent:head]) == {"adj"}
          elif name == "adverb":
            assert kinds in (("adv", "verb"), ("adv", "adj"))
          else:
            assert name == "relative clause"
            assert kinds in (("verb", "noun"), ("adj", "noun"))
            assert tags[head + 1] == "pron"
      seen += counts[0]
  assert set(seen) == {"subject", "object", "adjective", "adverb", "relative clause"}


def test_the_main_subject_has_the_annotated_number_where_its_english_verb_shows_it(loaded):
  """The annotation of the number was made without the relations."""
  pairs, checked = loaded["attractor"], 0
  for number, info in enumerate(pairs.info):
    words = pairs.target[number].split()
    subjects = [d for name, d, _ in pairs.relations(number)["target"] if name == "subject"]
    determiner = words[min(subjects) - 1].lower()
    if determiner in ("this", "every", "a", "an", "these", "many", "some"):
      checked += 1
      assert (info["number"] == "pl") == (determiner in ("these", "many", "some"))
  assert checked > 20


def test_pairs_that_are_selected_keep_their_relations(loaded):
  pairs = loaded["test"]
  chosen = pairs.select([7, 3])
  assert chosen.relations(1) == pairs.relations(3)
