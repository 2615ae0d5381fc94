"""Question answering: batches, losses, generation and scores."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF
from compmod_jax.core.losses import objective
from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.tokenized import QuestionTokenizer, texts_of, without_special
from compmod_jax.data.qa.unified import SPECIAL_TOKENS
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.answer_scores import by_facts, scores
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training.run import fill_up
from compmod_jax.training.step import init_state, make_step

WORLDS = WorldsData(train=120, valid=24, test=24, shifted=12)
CONFIG = AnsweringConfig(data=Mixed((WORLDS,)), batch_questions=8, length=128, answer_length=6)
MODEL = NemotConfig(
  tasks=("lm", "mqa", "gqa"),
  **{"vanilla_layers": 1, "modulatory_layers": 1, "output_layers": 1, "dropout": 0.0},
  **{"dim": 16, "heads": 2, "ffn_dim": 16, "max_length": 128},
)
STILL = StepContext(jax.random.key(0), jnp.int32(0), train=False)
DECODER = DecoderConfig(
  decoder_layers=1, tied=False, dim=16, heads=2, ffn_dim=16, max_length=128, dropout=0.0
)
TINY = dataclasses.replace(CONFIG, tokenizer=dataclasses.replace(CONFIG.tokenizer, vocab_size=160))


@pytest.fixture(scope="module")
def tokenizer():
  return TINY.make_tokenizer()


def with_edges(task, count):
  """The task with so many padded lengths of prompts, each of which is a search to compile."""
  edges = task.generator.edges
  kept = edges[len(edges) // count - 1 :: len(edges) // count]
  return dataclasses.replace(task, generator=dataclasses.replace(task.generator, edges=kept))


@pytest.fixture(scope="module")
def made(tokenizer):
  """A task, whose prompts have two padded lengths, and parameters."""
  task = with_edges(TINY.build_with(MODEL, tokenizer), 2)
  return task, nn.unbox(jax.jit(task.model.init)(jax.random.key(1)))


@pytest.fixture(scope="module")
def build(tokenizer):
  """From a model to a task, whose prompts have one padded length, and random parameters."""

  @functools.cache
  def make(model):
    task, random = with_edges(TINY.build_with(model, tokenizer), 1), np.random.default_rng(2)
    shapes = nn.unbox(jax.eval_shape(task.model.init, jax.random.key(0)))

    def draw(leaf):
      return jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype)

    return task, jax.tree.map(draw, shapes)

  return make


def first_batch(task):
  iterator, _ = task.dataset.train_batches(seed=0, multiple=1)
  return {name: jnp.asarray(value) for name, value in next(iterator).items()}


def losses(task, params, batch):
  """The sums and counts of its losses."""
  return program_of_losses(task)(params, batch)


@functools.cache
def program_of_losses(task):
  return jax.jit(lambda params, batch: task.loss(params, (), batch, STILL)[0])


def labels_shape(batch):
  rows, time = batch["tokens"].shape
  return rows, time - 1


def part(batch, task):
  """The block of one task as a batch."""
  start, found = 0, {}
  for name, count in blocks_of(batch):
    if name == task:
      rows = slice(start, start + count)
      found = {key: batch[key][rows] for key in ("tokens", "index", "answer", "options")}
      found[f"rows/{task}"] = batch[f"rows/{task}"]
    start += count
  return found


# Text.


def test_special_tokens_in_text_are_words(tokenizer):
  question_tokenizer = QuestionTokenizer(tokenizer, 64, "start")
  assert without_special("see (1) and <sep>, not ( 1)") == "see ( 1) and < sep>, not ( 1)"
  question = Question("abstractive", "What is (2)?", "A <p> (1).", answers=("(3)",))
  ids = question_tokenizer(question).ids.tolist()
  specials = [name for name in SPECIAL_TOKENS if question_tokenizer.special_ids[name] in ids]
  assert specials == ["<p>", "<q>", "<sep>", "</s>"]
  assert not any(name in text for text in texts_of([question]) for name in SPECIAL_TOKENS)


def test_a_tokenizer_without_special_tokens_is_told():
  plain = dataclasses.replace(
    TINY, tokenizer=dataclasses.replace(TINY.tokenizer, special_tokens=())
  )
  with pytest.raises(UserError, match="special_tokens"):
    plain.build(MODEL)


# Batches.


def test_batches_are_laid_out_by_task(made):
  task, _ = made
  batch = first_batch(task)
  assert blocks_of(batch) == (("mqa", 2), ("gqa", 6))
  questions = task.dataset.questions("train")[0]
  for row, number in enumerate(batch["index"].tolist()):
    question = questions[number]
    assert (question.format == "multiple_choice") == (row < 2)
    ids = [token for token in batch["tokens"][row].tolist() if token != task.dataset.tokenizer.pad]
    answer = ids[int(batch["answer"][row, 0]) : -1]
    assert task.dataset.tokenizer.decode(answer).strip() == question.answer
    assert ids[-1] == task.dataset.tokenizer.eos


def test_the_order_goes_on_where_it_was_saved_and_is_shared_by_processes(made):
  task, _ = made
  iterator, per_epoch = task.dataset.train_batches(seed=3, multiple=2)
  assert per_epoch == 15
  next(iterator)
  state, expected = iterator.get_state(), next(iterator)
  other, _ = task.dataset.train_batches(seed=3, multiple=2)
  other.set_state(state)
  halves = [
    task.dataset.train_batches(seed=3, multiple=2, process=p, processes=2)[0] for p in (0, 1)
  ]
  for half in halves:
    next(half)
  both = [next(half) for half in halves]
  for name, value in next(other).items():
    np.testing.assert_array_equal(value, expected[name])
    np.testing.assert_array_equal(np.concatenate([b[name] for b in both]), expected[name])


def test_filler_stays_in_the_block_of_its_task():
  """Where a batch has to be shared by more devices or micro-batches than it was planned for."""
  batch = {"rows/mqa": np.zeros(2), "rows/gqa": np.zeros(5), "index": np.arange(7)}
  batch["tokens"] = np.arange(1, 15).reshape(7, 2)
  filled = fill_up(batch, 4)
  assert blocks_of(filled) == (("mqa", 4), ("gqa", 8))
  assert filled["index"].tolist() == [0, 1, -1, -1, 2, 3, 4, 5, 6, -1, -1, -1]
  real = filled["index"] >= 0
  np.testing.assert_array_equal(filled["tokens"][real], batch["tokens"])
  assert not filled["tokens"][~real].any()
  plain = fill_up({"index": np.arange(7)}, 4)
  assert plain["index"].tolist() == [0, 1, 2, 3, 4, 5, 6, -1]


def test_every_question_is_evaluated_once(made):
  task, _ = made
  batches = list(task.dataset.eval_batches("valid", multiple=3))
  index = np.concatenate([batch["index"] for batch in batches])
  assert sorted(index[index >= 0].tolist()) == list(range(24))
  assert all(len(batch["index"]) % 3 == 0 and len(blocks_of(batch)) == 1 for batch in batches)


# Losses.


def test_losses_are_means_over_the_right_tokens(made):
  task, params = made
  batch = first_batch(task)
  terms = losses(task, params, batch)
  places = jnp.arange(batch["tokens"].shape[1] - 1)[None]
  everywhere = jnp.broadcast_to(places, labels_shape(batch))

  @jax.jit
  def logits(params, batch):
    _, layers = task.model.label_statistics(params, batch, vanilla_positions=everywhere)
    return layers.formed(OFF)

  run = logits(params, batch)
  heads = {"answer": run.logits, "sequence": run.logits, "vanilla": run.vanilla}
  nats = {name: -np.asarray(jax.nn.log_softmax(logits)) for name, logits in heads.items()}
  sums = {name: [0.0, 0] for name in heads}
  for row, ids in enumerate(np.asarray(batch["tokens"]).tolist()):
    length, start = (
      sum(token != task.dataset.tokenizer.pad for token in ids),
      int(batch["answer"][row, 0]),
    )
    for place in range(1, length):
      for name in heads:
        if name == "sequence" or place == start or (place > start and row >= 2):
          nll = float(nats[name][row, place - 1, ids[place]])
          sums[name] = [sums[name][0] + nll, sums[name][1] + 1]
  for name, (nll, count) in sums.items():
    assert float(terms[name].value()) == pytest.approx(nll / count, rel=1e-5)
  expected = sum(
    w * sums[n][0] / sums[n][1] for n, w in task.objective.weights(task.model.config).items()
  )
  assert float(objective(terms)) == pytest.approx(expected, rel=1e-5)
  assert task.objective.weights(task.model.config) == {
    "answer": 1.0,
    "sequence": 0.2,
    "vanilla": 0.5,
  }


def test_options_that_see_each_other_are_left_out_of_the_sequence(made, build):
  task, params = build(dataclasses.replace(MODEL, option_interaction=True))
  batch = first_batch(task)
  terms = losses(task, params, batch)
  plain = losses(*made, batch)
  options = np.asarray(batch["options"])
  assert (
    float(plain["sequence"].count - terms["sequence"].count)
    == (options[:, 1] - options[:, 0]).sum()
  )
  assert float(plain["answer"].count) == float(terms["answer"].count)


def test_rows_of_a_mixed_batch_are_those_of_their_own_task(made):
  task, params = made
  batch = first_batch(task)
  forward = jax.jit(task.model.forward)
  whole = forward(params, batch)
  parts = [forward(params, part(batch, name)) for name in ("mqa", "gqa")]
  np.testing.assert_allclose(whole, jnp.concatenate(parts), atol=1e-5)


def test_a_set_without_a_task_in_the_batch_does_not_move(made):
  task, params = made
  batch = first_batch(task)
  optimizer = optax.adam(1e-2)
  mask = jax.tree.map(lambda _: True, params)
  step = make_step(
    task, optimizer, lambda _: jnp.float32(0.01), micro_batches=1, ema=0.0, mask=mask
  )
  run, key = jax.jit(step), jax.random.key(0)
  state, _ = run(init_state(params, (), optimizer, 0.0), batch, key)  # both move
  after, _ = run(state, part(batch, "gqa"), key)

  def changed(get):
    pairs = zip(jax.tree.leaves_with_path(get(state)), jax.tree.leaves(get(after)), strict=True)
    return {path[0].key for (path, old), new in pairs if not np.array_equal(old, new)}

  still = {"output_lm", "output_norm_lm", "output_mqa", "output_norm_mqa"}
  assert set(task.model.unused_parameters(part(batch, "gqa"))) == still
  for get in (lambda s: s.params, lambda s: s.opt_state[0].mu, lambda s: s.opt_state[0].nu):
    assert changed(get) == set(params) - still
  assert "output_mqa" in {
    path[0].key for path, leaf in jax.tree.leaves_with_path(state.opt_state[0].mu) if leaf.any()
  }


# Answers.


@pytest.mark.parametrize(
  "model",
  [
    MODEL,
    dataclasses.replace(MODEL, convolution=4),
    DECODER,
  ],
  ids=["nemot", "convolved", "decoder"],
)
def test_generated_answers_are_the_most_probable_tokens(build, model, tokenizer):
  task, params = build(model)
  questions = list(task.dataset.questions("test")[0][:6])
  answers = task.generator(task.model, params, questions, task.generator.decode)
  forward = jax.jit(task.model.forward)
  for question, (answer,) in zip(questions, answers, strict=True):
    tokenized = task.dataset.question_tokenizer(question, room=6)
    ids = tokenized.ids.tolist()
    for token in answer.tokens[:5].tolist():
      kind = tokenized.task.strip("<>")
      padded = np.full((1, 128), tokenizer.pad, np.int32)
      padded[0, : len(ids)] = ids
      options = jnp.asarray([tokenized.options], jnp.int32)
      batch = {"tokens": jnp.asarray(padded), "index": jnp.zeros(1, jnp.int32), "options": options}
      logits = forward(params, {**batch, "answer": options[:, :1], f"rows/{kind}": options[:, 0]})
      best = np.array(logits)[0, len(ids) - 1]
      best[list(tokenizer.never_produced)] = -np.inf
      assert token == np.argmax(best)
      ids.append(token)


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_answers_hold_no_token_that_stands_for_no_text(build, tokenizer, method):
  task, params = build(DECODER)
  never = jnp.array(sorted(tokenizer.controls - {tokenizer.eos}))
  assert len(never) >= 3
  head = {**params["head"], "bias": params["head"]["bias"].at[never].set(1e4)}
  params = {**params, "head": head}
  decode = DecodeConfig(method=method, beams=2)
  answers = task.generator(task.model, params, list(task.dataset.questions("test")[0][:4]), decode)
  found = {int(token) for (answer,) in answers for token in answer.tokens}
  assert found
  assert not found & set(never.tolist())


def test_evaluation_answers_and_scores(made):
  task, params = made
  found = task.evaluate(params, "valid", decode=10)
  assert (found.values["sentences"], len(found.outputs)) == (24, 10)
  assert found.values["loss"] == pytest.approx(np.log(160), rel=0.3)  # nothing is learnt yet
  assert 0 <= found.values["score"] <= 100
  assert found.values["malformed"] > 50
  loss_only = task.evaluate(params, "valid", decode=False)
  assert loss_only.outputs == []
  assert loss_only.values["loss"] == found.values["loss"]
  beams = task.decoding(DecodeConfig(beams=3)).evaluate(params, "valid", decode=4)
  assert len(beams.outputs) == 4


CHOICE = Question("multiple_choice", "Which?", options=("a", "b"), label=2, info={"facts": 1})
YES = Question("yes_no", "Is it?", answers=("yes",), info={"facts": 2})
SPAN = Question(
  "extractive", "Where?", "in the old house", answers=("the old house",), info={"facts": 2}
)


def test_scores_are_means_over_sets_of_means_over_questions():
  questions, sets = [CHOICE, CHOICE, YES, SPAN], ["one", "one", "one", "two"]
  found = scores(questions, sets, ["(2)", "(1)", "maybe", "old barn"])
  assert found["one/score"] == pytest.approx(100 / 3)
  assert found["two/score"] == pytest.approx(50.0)  # F1 of {old, barn} and {old, house}
  assert found["score"] == pytest.approx((100 / 3 + 50) / 2)
  assert found["malformed"] == pytest.approx(100 / 3)
  assert found["multiple_choice_accuracy"] == 50
  assert by_facts(questions, ["(2)", "(2)", "yes", "Old house"]) == {
    "exact_match/extractive/2": 100,
    "exact_match/multiple_choice/1": 100,
    "exact_match/yes_no/2": 100,
  }


def test_names_of_sets_differ():
  with pytest.raises(UserError, match="different names"):
    Mixed((WORLDS,), (WORLDS,))
