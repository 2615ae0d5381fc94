"""The unified text format: its pieces, its tokens and what is truncated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.unified import SPECIAL_TOKENS, TooLong, encode, segments, task_token
from compmod_jax.layers.reading_strategies import PARTS_OF_SPEECH

SPECIAL = {name: number for number, name in enumerate(SPECIAL_TOKENS)}
NAMES = {number: name for name, number in SPECIAL.items()}

CHOICE = Question(
  "multiple_choice", "what barks", "dogs bark", options=("a cat", "a dog", "rain"), label=2
)
SPAN = Question("extractive", "who barks", "all dogs bark", answers=("dogs", "all dogs"))
NOTHING = Question("extractive", "who meows", "all dogs bark")
PLAIN = Question("yes_no", "do dogs bark", answers=("yes",))


def letters(text):
  return [ord(letter) + 100 for letter in text]


def written(ids):
  return "".join(f" {NAMES[i]} " if i in NAMES else chr(i - 100) for i in ids)


def encoded(question, length=1000, **options):
  return encode(question, letters, SPECIAL, length, **options)


@pytest.mark.parametrize(
  ("question", "text", "task"),
  [
    (CHOICE, "<p> dogs bark <q> what barks (1) a cat (2) a dog (3) rain <sep> (2) </s>", "<mqa>"),
    (SPAN, "<p> all dogs bark <q> who barks <sep> dogs </s>", "<gqa>"),
    (NOTHING, "<p> all dogs bark <q> who meows <sep> </s>", "<gqa>"),
    (PLAIN, "<q> do dogs bark <sep> yes </s>", "<gqa>"),
  ],
)
def test_every_format_is_written_in_one_way(question, text, task):
  assert " ".join(piece.text for piece in segments(question)) == text
  assert " ".join(written(encoded(question).ids).split()) == text
  assert encoded(question).ids.dtype == np.int32
  assert encoded(question).task == task_token(question) == task


def test_kinds_say_what_a_piece_is():
  assert [piece.kind for piece in segments(CHOICE)] == (
    ["special", "passage", "special", "question"] + ["special", "option"] * 3 + ["special"] * 3
  )
  assert [piece.kind for piece in segments(SPAN)][-3:] == ["special", "answer", "special"]
  assert [piece.kind for piece in segments(NOTHING)][-2:] == ["special", "special"]


def test_options_reach_from_the_first_label_to_before_the_separator():
  found = encoded(CHOICE)
  start, stop = found.options
  assert " ".join(written(found.ids[start:stop]).split()) == "(1) a cat (2) a dog (3) rain"
  assert stop == found.answer_start - 1
  assert NAMES[int(found.ids[stop])] == "<sep>"


def test_a_question_without_options_has_no_option_positions():
  start, stop = encoded(SPAN).options
  assert start == stop


def test_the_answer_starts_behind_the_separator():
  for question, answer in ((CHOICE, "(2) </s>"), (SPAN, "dogs </s>"), (NOTHING, "</s>")):
    found = encoded(question)
    assert " ".join(written(found.ids[found.answer_start :]).split()) == answer


def test_an_empty_option_keeps_its_label():
  question = Question("multiple_choice", "q", options=("", "b"), label=1)
  assert " ".join(piece.text for piece in segments(question)) == "<q> q (1) (2) b <sep> (1) </s>"
  start, stop = encoded(question).options
  assert stop - start == 3


@pytest.mark.parametrize(("truncate", "left"), [("start", "gs bark"), ("end", "dogs ba")])
def test_only_the_passage_is_truncated_from_the_chosen_end(truncate, left):
  whole = encoded(CHOICE)
  found = encoded(CHOICE, len(whole.ids) - 2, truncate=truncate)
  assert found.truncated
  assert not whole.truncated
  assert len(found.ids) == len(whole.ids) - 2
  assert written(found.ids) == written(whole.ids).replace("dogs bark", left)
  assert written(found.ids[found.answer_start :]) == written(whole.ids[whole.answer_start :])
  assert [place + 2 for place in found.options] == list(whole.options)


def test_a_passage_may_vanish_but_nothing_else():
  bare = len(encoded(CHOICE).ids) - len("dogs bark")
  found = encoded(CHOICE, bare)
  assert written(found.ids).startswith(" <p>  <q> what barks")
  with pytest.raises(TooLong, match=f"length is {bare - 1}, but .* takes {bare} tokens"):
    encoded(CHOICE, bare - 1)
  with pytest.raises(TooLong, match="leave the question out"):
    encoded(PLAIN, 5)


def test_room_for_generating_leaves_out_the_answer_and_does_not_depend_on_it():
  short, long = (Question("abstractive", "q", "p" * 50, answers=(a,)) for a in ("a", "a" * 20))
  found = [encoded(question, 40, room=10) for question in (short, long)]
  np.testing.assert_array_equal(found[0].ids, found[1].ids)
  assert len(found[0].ids) == found[0].answer_start == 30
  assert found[0].truncated
  prompt, whole = encoded(CHOICE, room=0), encoded(CHOICE)
  np.testing.assert_array_equal(prompt.ids, whole.ids[: whole.answer_start])
  assert prompt.options == whole.options


def places(text):
  """Letters with their places, modulo 5, for tags."""
  return letters(text), [place % 5 for place in range(len(text))]


def tags(question, length=1000, tag=places, **options):
  found = encoded(question, length, tag=tag, **options).tags
  assert found is not None
  return found


def test_every_part_of_a_question_is_tagged_by_itself():
  seen = []

  def tag(text):
    seen.append(text)
    return places(text)

  mark, dogs, what = PARTS_OF_SPEECH.index("special"), [0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4]
  found = tags(CHOICE, tag=tag)
  assert seen == ["dogs bark", "what barks", "a cat", "a dog", "rain"]
  options = [mark, *what, mark, *what, mark, *what[:4]]
  assert found.tolist() == [mark, *dogs, mark, *what, *what, *options, mark, -1, -1]
  assert found.dtype == np.int32


def test_tags_change_no_token():
  np.testing.assert_array_equal(encoded(CHOICE, tag=places).ids, encoded(CHOICE).ids)
  assert encoded(CHOICE).tags is None


@pytest.mark.parametrize("question", [SPAN, NOTHING, PLAIN])
def test_nothing_is_tagged_after_the_separator(question):
  whole, found = encoded(question), tags(question)
  assert (found[: whole.answer_start] >= 0).all()
  assert found[whole.answer_start :].tolist() == [-1] * (len(whole.ids) - whole.answer_start)
  np.testing.assert_array_equal(tags(question, room=0), found[: whole.answer_start])


@pytest.mark.parametrize(("truncate", "left"), [("start", slice(3, None)), ("end", slice(-3))])
def test_tags_are_truncated_with_their_tokens(truncate, left):
  whole = tags(SPAN)
  behind = 1 + len(SPAN.passage)
  np.testing.assert_array_equal(
    tags(SPAN, len(whole) - 3, truncate=truncate),
    np.concatenate([whole[:1], whole[1:behind][left], whole[behind:]]),
  )


plain = st.text(alphabet="ab <>()12/sepqm", max_size=30)


@settings(deadline=None, max_examples=60)
@given(
  question=plain.filter(lambda t: bool(t.strip())),
  passage=plain,
  answer=plain.filter(bool),
  length=st.integers(5, 90),
  truncate=st.sampled_from(["start", "end"]),
)
def test_whatever_the_text_says_it_is_no_special_token(question, passage, answer, length, truncate):
  asked = Question("abstractive", question, passage, answers=(answer,))
  try:
    found = encoded(asked, length, truncate=truncate)
  except TooLong:
    assert len(question) + len(answer) + 3 + bool(passage) > length
    return
  special = [NAMES[int(i)] for i in found.ids if int(i) in NAMES]
  assert special == (["<p>"] if passage else []) + ["<q>", "<sep>", "</s>"]
  assert len(found.ids) <= length
  assert found.truncated == (len(question) + len(answer) + len(passage) + len(special) > length)
  assert written(found.ids[found.answer_start :]) == f"{answer} </s> "


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"special_ids": {"<q>": 0}}, r"special_ids has no <p> <sep> </s> \(1\) .*; add them"),
    ({"tokenize": lambda text: [SPECIAL["(2)"]]}, r"the passage 'dogs bark' becomes .*\(2\)"),
    ({"truncate": "middle"}, "truncate is 'middle'"),
    ({"room": -1}, "room is -1"),
    (
      {"tag": lambda text: (letters(text)[1:], [0] * (len(text) - 1))},
      "tag gives the passage 'dogs bark' 8 tokens and 8 tags, not the 9 tokens of tokenize",
    ),
    ({"tag": lambda text: (letters(text), [0])}, "9 tokens and 1 tags"),
    ({"tag": lambda text: places(text.upper())}, "9 tokens and 9 tags"),
  ],
)
def test_mistakes_are_named(change, message):
  given = {"tokenize": letters, "special_ids": SPECIAL, "length": 99} | change
  with pytest.raises(UserError, match=message):
    encode(CHOICE, **given)


def test_more_options_than_labels_are_refused():
  question = Question("multiple_choice", "q", options=("a",) * 9, label=1)
  with pytest.raises(UserError, match="options has 9 entries; there are labels for 8"):
    segments(question)
