"""Every sentence of a story has gold syntax, between words of the right parts of speech."""

import pytest

from compmod_jax.data.synthetic.worlds import SPLITS, WorldsData, tags
from compmod_jax.data.synthetic.worlds.english import SENTENCES
from compmod_jax.data.synthetic.worlds.lexicon import CLASSES
from compmod_jax.data.synthetic.worlds.syntax import SYNTAX, relations

DATA = WorldsData(train=40, valid=20, test=40, shifted=20, ways=4)


def test_every_form_of_a_sentence_has_its_relations_and_no_other_has():
  forms = [form for of_kind in SENTENCES.values() for form in of_kind]
  assert sorted(SYNTAX) == sorted(forms)
  for form, known in SYNTAX.items():
    assert all(max(one[1:]) < len(form.split()) for one in known)
    assert sum(name == "subject" for name, _, _ in known) == 1


def test_words_that_stand_in_a_relation_are_of_its_parts_of_speech():
  found = dict.fromkeys(("subject", "object", "adverb", "adjective"), 0)
  for split in SPLITS:
    questions = DATA.load(split)
    for number in range(0, len(questions), 3):
      words = questions.items[number].passage.split()
      known = questions.relations(number)
      assert sum(name == "subject" for name, _, _ in known) == sum(w.endswith(".") for w in words)
      for name, dependent, head in known:
        dependents, heads = (words[place].strip(".") for place in (dependent, head))
        (_, ours), (_, theirs) = (tags(word)[0] for word in (dependents, heads))
        found[name] += 1
        if name == "adjective":
          assert (ours, theirs) == ("adjective", "noun")
        elif name == "adverb":
          assert (ours, theirs) == ("adverb", "verb")
        elif name == "object":
          assert (CLASSES[dependents], theirs) == ("thing", "verb")
        else:
          assert ours == "noun" or dependents == "Someone"
          assert theirs == "verb" or CLASSES[heads] == "colour"
  assert min(found.values()) > 0


@pytest.mark.parametrize("text", ["", "Anna sleeps.", "Anna went to the"])
def test_what_no_story_has_has_no_relations(text):
  assert list(relations(text)) == []


def test_relations_count_words_of_the_whole_story():
  known = relations("Anna went to the park. Ben picked up the ball.")
  assert list(known) == [("subject", 0, 1), ("subject", 5, 6), ("adverb", 7, 6), ("object", 9, 6)]
