"""Questions that are typed on a line."""

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.typed_lines import typed_question


def test_text_has_passage_question_and_options():
  given = typed_question("A | B. Anna left. | Who left? (1) Ben (2) Anna")
  assert (given.passage, given.question) == ("A | B. Anna left.", "Who left?")
  assert (given.format, given.options) == ("multiple_choice", ("Ben", "Anna"))
  plain = typed_question("Who left?")
  assert (plain.format, plain.passage, plain.options) == ("abstractive", "", ())


def test_json_needs_no_answer():
  given = typed_question('{"format": "yes_no", "passage": "P.", "question": "Is it?"}')
  assert (given.format, given.passage, given.question) == ("yes_no", "P.", "Is it?")
  chosen = typed_question('{"question": "Which?", "options": ["a", "b"], "label": 2}')
  assert (chosen.format, chosen.options) == ("multiple_choice", ("a", "b"))


@pytest.mark.parametrize(
  ("line", "words"),
  [
    ("Which? (1) a (3) b", "numbered '1, 3'"),
    ("Which? (1) a", "at least 2"),
    ("", "question is empty"),
    ('{"question": "Is', "JSON"),
    ('{"question": 3}', "must be text"),
    ('{"question": "Is it?", "format": "riddle"}', "riddle"),
    ('{"question": "Is it?", "options": 5}', "must be text"),
    ('{"question": "Is it?", "options": "ab"}', "must be text"),
    ('{"question": ' + "9" * 5000 + "}", "over 4,300 digits"),
    ('{"question": ' + "[" * 100_000 + "]" * 100_000 + "}", "deeper than 100 levels"),
    ("Which? (" + "9" * 5000 + ") a", r"numbered '9{56}\.\.\.;"),
  ],
)
def test_mistakes_are_told(line, words):
  with pytest.raises(UserError, match=words):
    typed_question(line)
