"""Several questions on one passage in a row of a training batch."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.tokenized import tokenize_questions
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.question_answering import AnsweringConfig, positions_of

WORLDS = WorldsData(train=96, valid=12, test=12, shifted=12, asked=4)
CONFIG = AnsweringConfig(
  data=Mixed((WORLDS,)), batch_questions=8, length=160, answer_length=6, turns=3
)
MODEL = NemotConfig(
  tasks=("mqa", "gqa"),
  **{"vanilla_layers": 1, "modulatory_layers": 1, "output_layers": 1, "dropout": 0.0},
  **{"dim": 16, "heads": 2, "ffn_dim": 16, "max_length": 160},
)
STILL = StepContext(jax.random.key(0), jnp.int32(0), train=False)


@pytest.fixture(scope="module")
def task():
  tokenizer = dataclasses.replace(CONFIG.tokenizer, vocab_size=200)
  return dataclasses.replace(CONFIG, tokenizer=tokenizer).build(MODEL)


@pytest.fixture(scope="module")
def params(task):
  return nn.unbox(jax.jit(task.model.init)(jax.random.key(1)))


@pytest.fixture(scope="module")
def batch(task):
  """A batch with as many questions in a row as there may be; which ones have them is drawn."""
  iterator, _ = task.dataset.train_batches(seed=0, multiple=1)
  full = next(each for each in iterator if (each["answer"] > 0).sum(axis=1).max() == 3)
  return {name: jnp.asarray(value) for name, value in full.items()}


def asked_in(task, batch):
  """The questions of every row, in order: those after the first stand behind it in the data."""
  questions = task.dataset.questions("train")[0]
  turns = (np.asarray(batch["answer"]) > 0).sum(axis=1).tolist()
  return [
    questions[number : number + count]
    for number, count in zip(batch["index"].tolist(), turns, strict=True)
  ]


def test_training_questions_are_made_once_for_batches(task, monkeypatch):
  again = CONFIG.build(MODEL, files=task.dataset.files()).dataset
  made, drawn = [], WorldsData.drawn
  monkeypatch.setattr(
    WorldsData,
    "drawn",
    lambda data, split, number: made.append((split, number)) or drawn(data, split, number),
  )
  again.train_batches(seed=0, multiple=1)
  again.fingerprints()
  assert sorted(made) == [("train", number) for number in range(WORLDS.train)]


def test_a_row_has_its_passage_once_and_every_question_after_it(task, batch):
  rows = asked_in(task, batch)
  assert max(map(len, rows)) == 3
  mark = task.dataset.question_tokenizer.special_ids["<q>"]
  for ids, questions in zip(batch["tokens"].tolist(), rows, strict=True):
    assert len({question.passage for question in questions}) == 1
    alone = [task.dataset.question_tokenizer(question).ids.tolist() for question in questions]
    expected = alone[0] + [t for ids in alone[1:] for t in ids[ids.index(mark) :]]
    assert [token for token in ids if token != task.dataset.tokenizer.pad] == expected


def test_answers_of_all_questions_count_and_nothing_else_does(task, batch):
  counted, _ = task.model.counted(batch)
  labels = np.asarray(batch["tokens"])[:, 1:]
  tasks = [name for name, count in blocks_of(batch) for _ in range(count)]
  for row, (name, questions) in enumerate(zip(tasks, asked_in(task, batch), strict=True)):
    expected = []
    for question in questions:
      tokenized = task.dataset.question_tokenizer(question)
      end = tokenized.answer_start + 1 if name == "mqa" else None
      expected += tokenized.ids[tokenized.answer_start : end].tolist()
    assert labels[row][np.asarray(counted[row])].tolist() == expected


def test_the_vanilla_head_is_read_wherever_an_answer_is_predicted(task, batch):
  counted, _ = task.model.counted(batch)
  places = np.asarray(positions_of(counted, task.dataset.longest_answer))
  assert all(len(set(row)) == len(row) for row in places.tolist())
  assert np.take_along_axis(np.asarray(counted), places, axis=1).sum() == counted.sum()


@pytest.mark.parametrize("kind", ["nemot", "convolved", "decoder"])
def test_every_question_of_a_row_is_read_as_if_it_stood_alone(task, batch, kind):
  model = dataclasses.replace(MODEL, convolution=4 if kind == "convolved" else 1)
  if kind == "decoder":
    sizes = {"dim": 16, "heads": 2, "ffn_dim": 16, "max_length": 160}
    model = DecoderConfig(decoder_layers=1, convolution=4, dropout=0.0, **sizes)
  task = task.dataset.config.build_with(model, task.dataset.tokenizer)
  params, forward = (
    nn.unbox(jax.jit(task.model.init)(jax.random.key(2))),
    jax.jit(task.model.forward),
  )
  logits = forward(params, batch)
  rows = asked_in(task, batch)
  for row in (0, len(rows) - 1):  # one of each task
    questions, starts = rows[row], batch["answer"][row].tolist()
    alone = task.dataset.batch(questions)
    apart = forward(params, alone)
    for number, (first, start) in enumerate(zip(alone["answer"][:, 0], starts, strict=False)):
      length = int((np.asarray(alone["tokens"][number]) != task.dataset.tokenizer.pad).sum()) - int(
        first
      )
      np.testing.assert_array_equal(
        batch["tokens"][row, start : start + length], alone["tokens"][number, first:][:length]
      )
      np.testing.assert_allclose(
        logits[row, start - 1 : start - 1 + length],
        apart[number, first - 1 : first - 1 + length],
        atol=1e-5,
      )


def test_the_losses_are_means_over_the_answers_of_all_questions(task, params, batch):
  terms, _, _ = jax.jit(lambda *given: task.loss(*given, STILL))(params, (), batch)
  counted, _ = task.model.counted(batch)
  log = jax.nn.log_softmax(jax.jit(task.model.forward)(params, batch))
  labels = np.asarray(batch["tokens"])[:, 1:]
  nll = -np.take_along_axis(np.asarray(log), labels[..., None], axis=-1)[..., 0]
  expected = nll[np.asarray(counted)].sum()
  np.testing.assert_allclose(terms["answer"].sum, expected, rtol=1e-5)
  assert terms["answer"].count == terms["vanilla"].count == counted.sum()


def test_a_mean_over_questions_weighs_answers_alike_whatever_their_length(task, params, batch):
  each = dataclasses.replace(task.dataset.config, answer_mean="question").build_with(
    MODEL, task.dataset.tokenizer
  )
  terms, _, _ = jax.jit(lambda *given: each.loss(*given, STILL))(params, (), batch)
  log = np.asarray(jax.nn.log_softmax(jax.jit(task.model.forward)(params, batch)))
  labels, means = np.asarray(batch["tokens"])[:, 1:], []
  tasks = [name for name, count in blocks_of(batch) for _ in range(count)]
  for row, (name, starts) in enumerate(zip(tasks, np.asarray(batch["answer"]), strict=True)):
    for start in starts[starts > 0] - 1:
      length = 1 + labels[row, start:].tolist().index(task.dataset.tokenizer.eos)
      places = range(start, start + (1 if name == "mqa" else length))
      means.append(-np.mean([log[row, place, labels[row, place]] for place in places]))
  assert len(means) > len(tasks)
  np.testing.assert_allclose(terms["answer"].value(), np.mean(means), rtol=1e-5)
  for term in (terms["answer"], terms["vanilla"]):
    np.testing.assert_allclose(term.count, len(means), rtol=1e-5)


def test_questions_share_a_row_only_if_task_and_passage_are_the_same_and_they_fit(task):
  def ask(text: str, passage: str, choice: bool = False) -> Question:
    if choice:
      return Question("multiple_choice", text, passage, options=("a", "b"), label=1)
    return Question("extractive", text, passage, answers=("a",))

  first, other = "Anna took the ball.", "Anna took the cup."
  questions = [
    ask("Who?", first),
    ask("What?", first),
    ask("Who?", other),
    ask("Who?", other, True),
  ]
  questions += [ask("Who?", ""), ask("What?", "")]
  tokenized = tokenize_questions(
    [questions, [ask("Where?", "")]], task.dataset.question_tokenizer, turns=9
  )
  assert [(row > 0).sum() for row in tokenized.answer] == [2, 1, 1, 1, 1, 1]
  assert tokenized.index.tolist() == [0, 2, 3, 4, 5, 6]
  assert tokenized.source.tolist() == [0] * 5 + [1]
  many = tokenize_questions([[ask("Who?", first)] * 99], task.dataset.question_tokenizer, turns=99)
  assert max(many.tokens.lengths) <= task.dataset.config.length
  assert sum((row > 0).sum() for row in many.answer) == 99


def test_what_follows_an_answer_in_its_row_does_not_count(task, batch):
  _, whole = task.model.counted(batch)
  after_end = np.asarray(batch["tokens"])[:, :-1] == task.dataset.tokenizer.eos
  assert after_end.sum() > len(after_end)
  assert not np.asarray(whole)[after_end].any()


def test_other_splits_have_a_question_a_row(task):
  rows = list(itertools.chain(*(batch["answer"] for batch in task.dataset.eval_batches("valid"))))
  assert all(row.shape == (1,) for row in rows)


def test_models_that_cannot_read_several_questions_need_a_question_a_row(task):
  with pytest.raises(UserError, match=r"task\.turns is 3 but model\.option_interaction is on"):
    task.dataset.config.build_with(
      dataclasses.replace(MODEL, option_interaction=True), task.dataset.tokenizer
    )
  with pytest.raises(UserError, match=r"task\.turns is 3 but model\.sliding_window is 4"):
    task.dataset.config.build_with(DecoderConfig(sliding_window=4), task.dataset.tokenizer)
  with pytest.raises(UserError, match="turns is 0"):
    AnsweringConfig(turns=0)
