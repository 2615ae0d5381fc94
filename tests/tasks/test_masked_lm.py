"""The masked language modelling task: losses, masks, evaluation, filling in."""

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_masked

import compmod_jax
from compmod_jax.api import MaskedModel
from compmod_jax.checkpoints.model_folder import save_model_folder
from compmod_jax.core import sharding
from compmod_jax.core.config import to_json
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import zero_units
from compmod_jax.data.corruption import MaskingConfig
from compmod_jax.data.text_tokenizer import FILE
from compmod_jax.data.tokenizers.huggingface import HuggingFaceTokenizer
from compmod_jax.models.nemot import Nemot, NemotConfig
from compmod_jax.models.text import Text
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.base import (
  Dataset,
  Evaluator,
  Generator,
  Objective,
  Sharing,
  StepContext,
  Task,
  TaskModel,
  lower_is_better,
)
from compmod_jax.tasks.configs import ModelConfig, TaskConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig

CONTEXT = StepContext(jax.random.key(0), jnp.int32(0), True)
HEADS = "encoder/layer_0/self/heads_scaled"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny_masked.write_text(
    tmp_path_factory.mktemp("masked") / "text", {"train": 60, "valid": 9, "test": 12}
  )


@pytest.fixture(scope="module")
def task(folder):
  return tiny_masked.make_task(folder).build(
    tiny_masked.make_model(dropout=0.0, attention_dropout=0.0)
  )


@functools.cache
def parameters(task, seed=0):
  shapes = jax.eval_shape(lambda: nn.unbox(task.model.init(jax.random.key(0))))
  random = np.random.default_rng(seed)
  drawn = jax.tree.map(lambda x: np.float32(0.5 * random.normal(size=x.shape)), shapes)
  return jax.device_put(drawn)


@pytest.fixture(scope="module")
def params(task):
  return parameters(task)


@pytest.fixture(scope="module")
def loss(task):
  """The loss of a batch at a step, compiled once."""

  @jax.jit
  def call(params, batch, step, seed=0):
    rng = jax.random.fold_in(jax.random.key(seed), step)
    terms, carry, found = task.loss(params, (), batch, StepContext(rng, step, True))
    assert carry == ()
    return terms, found

  return call


def batches(task, count=1):
  iterator, _ = task.dataset.train_batches(seed=0, multiple=1)
  made = [dict(next(iterator)) for _ in range(count)]
  iterator.close()
  return made


def test_the_loss_is_the_mean_over_predicted_tokens_of_their_negative_log_probability(
  task, params, loss
):
  (batch,) = batches(task)
  terms, found = loss(params, batch, 3)
  rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 3), 0x3A5C)
  masked = jax.jit(task.dataset.mask)(rng, batch["tokens"], batch["index"])
  logits = np.asarray(jax.jit(task.model.forward)(params, {"tokens": masked.tokens}), np.float64)
  probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  rows, places = np.nonzero(np.asarray(masked.predict))
  positions = np.asarray(masked.positions)[rows, places]
  targets = np.asarray(masked.targets)[rows, places]
  expected = -np.log(probabilities[rows, positions, targets])
  assert float(terms["cross_entropy"].value()) == pytest.approx(expected.mean(), rel=1e-5)
  assert float(found["nll"][1]) == len(rows)
  right = probabilities[rows, positions].argmax(-1) == targets
  assert float(found["accuracy"][0]) == right.sum()


def test_masks_are_new_at_every_step_and_the_same_for_the_same_seed_and_step(task, params, loss):
  (batch,) = batches(task)

  def value(step, seed=0):
    return float(loss(params, batch, step, seed)[0]["cross_entropy"].sum)

  assert value(1) == value(1)
  assert len({value(step) for step in range(4)}) == 4
  assert value(1, seed=1) != value(1)


def test_no_loss_depends_on_filler_rows_or_on_the_order_of_rows(task, params, loss):
  (batch,) = batches(task)
  filler = {
    "tokens": np.pad(batch["tokens"], ((0, 3), (0, 0))),
    "index": np.pad(batch["index"], (0, 3), constant_values=-1),
  }
  turned = jax.tree.map(lambda leaf: leaf[::-1], batch)
  expected, health = loss(params, batch, 0)
  for other in (filler, turned):
    terms, found = loss(params, other, 0)
    for one, two in ((terms, expected), (found, health)):
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, two)


def test_the_loss_is_the_same_on_eight_devices(task, params, loss):
  (batch,) = batches(task)
  mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
  boxed = jax.eval_shape(task.model.init, jax.random.key(0))
  placed = jax.device_put(params, sharding.parameter_shardings(boxed, mesh))
  spread = sharding.place_batch(batch, mesh)
  expected, _ = loss(params, batch, 0)
  found, _ = loss(placed, spread, 0)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_evaluation_is_the_same_whatever_the_batches_and_counts_every_block_once(
  folder, task, params
):
  result = task.evaluate(params, "valid", decode=0)
  other = task.evaluate(params, "valid", sharing=Sharing(multiple=5), decode=0)
  wide = tiny_masked.make_task(folder, batch_tokens=32).build(task.model.config)
  again = wide.evaluate(params, "valid", decode=0)
  for name, value in result.values.items():
    assert other.values[name] == pytest.approx(value, rel=1e-6), name
    assert again.values[name] == pytest.approx(value, rel=1e-6), name
  assert result.values["perplexity"] == pytest.approx(np.exp(result.values["loss"]))
  moved = tiny_masked.make_task(folder, mask_seed=1).build(task.model.config)
  assert moved.evaluate(params, "valid", decode=0).values["loss"] != result.values["loss"]


def test_the_unigram_loss_is_that_of_the_best_constant_prediction(task, params):
  stream = np.concatenate(list(task.dataset.blocks("valid").columns["tokens"]))
  counts = np.bincount(stream[stream > 4])
  shares = counts[counts > 0] / counts.sum()
  expected = -(shares * np.log(shares)).sum()
  assert task.evaluate(params, "valid", decode=0).values["unigram"] == pytest.approx(expected)
  # The words agree, so numbers and words have equal shares of five each.
  assert expected == pytest.approx(np.log(10), abs=0.1)


def test_outputs_are_the_blocks_with_predictions_in_place_of_what_is_masked(task, params):
  result = task.evaluate(params, "valid", decode=3)
  assert len(result.outputs) == len(result.references) == len(result.sources) == 3
  for output, reference, source in zip(
    result.outputs, result.references, result.sources, strict=True
  ):
    assert "<mask>" not in reference
    words = [text.split() for text in (output, reference, source)]
    assert len(words[1]) == len(words[2])
    same = sum(a == b for a, b in zip(words[1], words[2], strict=True))
    assert same >= 0.6 * len(words[1])
  assert any("<mask>" in source for source in result.sources)
  assert task.evaluate(params, "valid", decode=0).outputs == []


def test_a_task_is_five_parts_each_of_which_keeps_its_contract(task):
  fields = [field.name for field in dataclasses.fields(Task)]
  assert fields == ["dataset", "model", "objective", "evaluators", "generator"]
  assert isinstance(task.dataset, Dataset)
  assert isinstance(task.model, TaskModel)
  assert isinstance(task.objective, Objective)
  assert isinstance(task.generator, Generator)
  assert all(isinstance(one, Evaluator) for one in task.evaluators)


def test_a_metric_that_is_listed_in_a_task_is_computed_from_its_outputs(task, params):
  class Longest:
    metric = units = ""

    def __call__(self, scoring):
      yield "longest", max(len(text.split()) for text in scoring.outputs)

  more = dataclasses.replace(task, evaluators=(*task.evaluators, Longest()))
  expected, found = (one.evaluate(params, "valid", decode=3) for one in (task, more))
  longest = max(len(text.split()) for text in expected.outputs)
  assert found.values == {**expected.values, "longest": longest}
  assert more.metric == task.metric


def test_the_task_tells_what_it_is(task):
  assert "Masked language model with 1 layers of width 16 and 2 heads" in task.describe()
  assert "heads compete in encoder self attention" in task.describe()
  assert task.dataset.describe_batches() == "batches of 8 blocks of 16 tokens"
  assert "nats per predicted token" in task.describe_scores()
  assert task.dataset.splits() == ("train", "valid", "test")
  assert task.dataset.final_splits() == ("valid", "test")
  assert lower_is_better(task.metric)
  assert [lower_is_better(name) for name in ("perplexity", "bleu", "exact_match")] == [
    True,
    False,
    False,
  ]
  assert task.model.routing_sites() == ("encoder/layer_0/self/router/weights",)
  assert task.generator.decode is None
  with pytest.raises(UserError, match="does not search"):
    task.decoding(None)


def test_parts_of_the_training_blocks_are_disjoint_and_together_all(task):
  found = {}
  for part in ("all", "large", "small"):
    iterator, count = task.dataset.train_batches(part=part, seed=0, multiple=1)
    index = np.concatenate([next(iterator)["index"] for _ in range(count)])
    iterator.close()
    found[part] = set(index[index >= 0].tolist())
  assert not found["large"] & found["small"]
  assert found["large"] | found["small"] == found["all"]
  assert found["small"]


def test_what_does_not_fit_together_is_refused(folder, task):
  config = tiny_masked.make_task(folder)
  with pytest.raises(UserError, match="is a TransformerConfig, but the task needs an encoder"):
    config.build(TransformerConfig())
  with pytest.raises(UserError, match=r"task\.length is 16 but model\.max_length is 8"):
    config.build(tiny_masked.make_model(max_length=8))
  with pytest.raises(UserError, match=r"text\.tokenizer is missing"):
    config.build(tiny_masked.make_model(), files={})
  with pytest.raises(UserError, match="split is 'dev'"):
    task.evaluate({}, "dev")
  (folder / "blank.txt").write_text("\n")
  data = dataclasses.replace(config.data, valid=("blank.txt",), train=("train.txt",))
  blank = dataclasses.replace(config, data=data).build(tiny_masked.make_model())
  with pytest.raises(UserError, match=r"blank\.txt is empty"):
    blank.dataset.check()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"batch_tokens": 100}, "must be a multiple of task.length"),
    ({"length": 1, "batch_tokens": 8}, "task.length is 1"),
    ({"small_share": 0.0}, "task.small_share is 0"),
    ({"mask_seed": -1}, "task.mask_seed is -1"),
    ({"tokenizer_documents": 0}, "task.tokenizer_documents is 0"),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(UserError, match=message):
    MaskedLMConfig(**fields)


# A trained model.


@pytest.fixture(scope="module")
def model(task, params, tmp_path_factory) -> MaskedModel:
  place = tmp_path_factory.mktemp("model") / "m"
  meta = {
    "task": to_json(task.dataset.config, TaskConfig),
    "model": to_json(task.model.config, ModelConfig),
    "step": 7,
  }
  save_model_folder(
    place, params=jax.tree.map(np.asarray, params), files=task.dataset.files(), meta=meta
  )
  assert json.loads((place / "model.json").read_text())["meta"]["task"]["kind"] == "MaskedLMConfig"
  return compmod_jax.load(place)


TEXTS = ["bat 0 <mask> 1 dog <mask>", "", "cow 1", "<mask>", "emu 3 fox 4 " * 3 + "<mask>"]


def test_a_loaded_model_fills_in_what_is_masked_with_its_probabilities(model, task, params):
  found = model.fill(TEXTS, top=3)
  assert [len(filled.candidates) for filled in found] == [2, 0, 0, 1, 1]
  assert [filled.text for filled in found[1:3]] == TEXTS[1:3]
  ids = [
    task.dataset.tokenizer.bos,
    *task.dataset.tokenizer.encode(TEXTS[0]),
    task.dataset.tokenizer.eos,
  ]
  forward = jax.jit(task.model.forward)
  logits = np.asarray(forward(params, {"tokens": jnp.asarray([ids])})[0], np.float64)
  chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  for place, candidates in zip((3, 6), found[0].candidates, strict=True):
    assert ids[place] == task.dataset.tokenizer.mask
    for candidate in candidates:
      (number,) = task.dataset.tokenizer.encode(candidate.token)
      assert candidate.probability == pytest.approx(chances[place, number], rel=1e-4)
    listed = [candidate.probability for candidate in candidates]
    assert listed == sorted(listed, reverse=True)
    ordinary = np.delete(chances[place], sorted(task.dataset.tokenizer.controls))
    assert listed[0] == pytest.approx(ordinary.max(), rel=1e-4)
  words = found[0].text.split()
  assert [words[2], words[5]] == [found[0].candidates[i][0].token for i in (0, 1)]
  assert [w for i, w in enumerate(words) if i not in (2, 5)] == ["bat", "0", "1", "dog"]


def test_what_a_text_is_filled_with_does_not_depend_on_the_texts_beside_it(model):
  together = model.fill(TEXTS)
  for text, expected in zip(TEXTS, together, strict=True):
    (alone,) = model.fill([text])
    assert alone.text == expected.text
    for one, two in zip(alone.candidates, expected.candidates, strict=True):
      assert [c.probability for c in one] == pytest.approx([c.probability for c in two], rel=1e-4)


def test_texts_that_are_too_long_are_cut_for_filling_and_refused_for_looking_inside(model):
  long = "cow 1 " * 9 + "<mask>"
  (filled,) = model.fill([long])
  assert filled == (long, [])
  with pytest.raises(UserError, match="has 21 tokens"):
    model.capture([long])
  with pytest.raises(UserError, match="texts is one string"):
    model.fill("cow <mask>")


def test_activations_are_captured_and_edits_change_predictions(model):
  site = "encoder/layer_0/self/router/weights"
  found = model.capture(["bat 0", "cow 1 dog <mask>"], [site])
  assert found[site].shape == (2, 6, 2)
  np.testing.assert_allclose(found[site].sum(-1), 1, atol=1e-6)
  assert found["tokens"].shape == (2, 6)
  assert found["tokens"][0, 4:].tolist() == [0, 0]
  assert {*model.sites(), "tokens"} == set(model.capture(["bat"]))
  edited = model.edit({HEADS: zero_units(0, 1, axis=-2)})
  assert (edited.capture(["bat 0"], [HEADS])[HEADS] == 0).all()
  assert edited.fill(TEXTS[:1]) != model.fill(TEXTS[:1])
  one, two = (m.task.evaluate(m.params, "valid", decode=0).values["loss"] for m in (model, edited))
  assert one != two
  with pytest.raises(UserError, match=r"Did you mean .*heads_scaled"):
    model.edit({"encoder/layer_0/self/heads_scale": zero_units(0)})


def test_rows_that_pad_a_vocabulary_are_never_offered_or_put_into_text(folder):
  package = pytest.importorskip("tokenizers")
  words = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "bat", "cow", "dog", "emu", "fox", *"01234"]
  model = package.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
  whole = package.Tokenizer(model)
  whole.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
  names = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>", "mask": "<mask>"}
  tokenizer = HuggingFaceTokenizer(whole.to_str(), names, vocab=64)
  padded = frozenset(range(len(words), 64))
  assert tokenizer.unused == padded
  model = tiny_masked.make_model(dropout=0.0, attention_dropout=0.0)
  task = tiny_masked.make_task(folder).build(model, files={FILE: tokenizer.to_bytes()})
  params = parameters(task)
  params["head"]["bias"] = params["head"]["bias"].at[len(words) :].set(50.0)
  (filled,) = task.generator(task.model, params, ["bat 0 <mask> 1"], top=64)
  offered = [candidate.token for candidate in filled.candidates[0]]
  assert sorted(offered) == sorted(words[5:])
  assert not task.dataset.ordinary[sorted(padded)].any()  # nor drawn in place of a masked token


def test_a_subword_mask_stands_for_a_word_with_its_space(folder):
  config = tiny_masked.make_task(folder)
  data = dataclasses.replace(config.tokenizer, kind="bpe", vocab_size=40)
  task = dataclasses.replace(config, tokenizer=data).build(tiny_masked.make_model(max_length=32))
  pieces = [task.dataset.tokenizer.piece(i) for i in task.generator.encode("cow <mask> dog <mask>")]
  inside = "".join(pieces[1:-1])
  assert inside == "▁cow<mask>▁dog<mask>"
  assert task.dataset.config.masking == MaskingConfig(share=0.25)


# Modulated models in encoder mode.


@pytest.fixture(scope="module")
def modulated_task(folder):
  model = NemotConfig(
    **{"vanilla_layers": 1, "modulatory_layers": 1, "output_layers": 1, "dropout": 0.0},
    **{"dim": 16, "heads": 2, "ffn_dim": 16, "max_length": 16},
  )
  return tiny_masked.make_task(folder).build(model)


def test_a_modulated_model_reads_the_whole_text(modulated_task):
  task, params = modulated_task, parameters(modulated_task)
  batch = next(iter(task.dataset.eval_batches("valid")))
  tokens = np.array(batch["tokens"][:2])
  apply, config = jax.jit(task.model.module.apply), task.model.config
  logits = apply({"params": params}, tokens)
  plain = Nemot(config, task.dataset.tokenizer.vocab_size, task.dataset.tokenizer.pad)
  ids = jnp.asarray([config.auxiliary_ids("enc", "lm")] * 2)
  whole = jax.jit(lambda *given: plain.apply(*given, [("lm", 2)], causal=False).logits)
  expected = whole({"params": params}, Text(tokens, ids))
  np.testing.assert_allclose(logits, expected, atol=1e-5)
  other = tokens.copy()
  other[:, 5] = 7
  later = apply({"params": params}, other)
  assert np.abs(np.subtract(later, logits)[:, 0]).max() > 1e-3
  places = jnp.asarray([[3, 1], [0, 4]])
  some = apply({"params": params}, tokens, positions=places)
  chosen = np.take_along_axis(np.asarray(logits), np.asarray(places)[..., None], axis=1)
  np.testing.assert_allclose(some, chosen, atol=1e-5)


def test_a_modulated_model_fills_masks_in_and_logs_its_gate(modulated_task):
  task, params = modulated_task, parameters(modulated_task)
  (filled,) = task.generator(task.model, params, ["bat <mask> cow 1"], top=2)
  assert len(filled.candidates[0]) == 2
  batches, _ = task.dataset.train_batches(seed=0, multiple=1)
  batch = dict(next(batches))
  terms, _, found = jax.jit(lambda *given: task.loss(*given, CONTEXT))(params, (), batch)
  assert np.isfinite(terms["cross_entropy"].value())
  assert 0 < float(found["gate/mean"][0] / found["gate/mean"][1]) < 1
  assert task.model.valid_mask("modulatory/layer_0/self/heads", batch).shape[1] == 16 + 3


def test_a_text_is_scored_by_masking_each_token_in_turn(model):
  texts = ["bat 0 cow 1", "", "dog"]
  found = model.score(texts)
  assert [one.words for one in found] == [["bat", "0", "cow", "1"], [], ["dog"]]
  assert found[1].log_probability == 0
  for place in range(4):
    words = texts[0].split()
    word, words[place] = words[place], "<mask>"
    logits = model.capture([" ".join(words)], ["logits"])["logits"][0, 1 + place]
    expected = logits[model.tokenizer.encode(word)[0]] - np.log(np.exp(logits).sum())
    assert found[0].log_probabilities[place] == pytest.approx(float(expected), abs=1e-4)
  # Alone as among others, and under an edit that asks which positions are real.
  assert model.score(["dog"])[0].total == pytest.approx(found[2].total, abs=1e-5)
  kept = {"logits": lambda x, valid: jnp.where(valid[..., None], x, jnp.nan)}
  edited = model.edit(kept | {"encoder/output": kept["logits"]})
  np.testing.assert_allclose(edited.score(texts)[0].nll, found[0].nll, atol=1e-5)
  with pytest.raises(UserError, match=r"texts\[0\], 'cow 1.*has 22 tokens with its ends"):
    model.score(["cow 1 " * 10])
