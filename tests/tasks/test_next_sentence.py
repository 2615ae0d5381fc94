"""BERT's second task: pairs whose second part follows the first, or is from another document."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.sources.documents import GrammarTopics, TextDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.encoder import Encoder, EncoderConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.masked_lm import (
  MaskedLM,
  MaskedLMConfig,
  MaskedModel,
  PairedBlocks,
  stretches,
)

LENGTH = 32
CONFIG = MaskedLMConfig(
  data=GrammarTopics(GrammarData(train=300, valid=200, test=60), sentences=3),
  tokenizer=TokenizerConfig(kind="words", vocab_size=3000),
  length=LENGTH,
  batch_tokens=4 * LENGTH,
  next_sentence=True,
)
MODEL = EncoderConfig(
  encoder_layers=1, dim=8, heads=2, ffn_dim=8, max_length=LENGTH, segments=2, next_sentence=True
)


@pytest.fixture(scope="module")
def task() -> MaskedLM:
  return CONFIG.build(MODEL)


def halves(task: MaskedLM, block: np.ndarray) -> tuple[list[int], list[int]]:
  """A and B of a block, whose marks are checked."""
  tokenizer = task.dataset.tokenizer
  ends = np.flatnonzero(block == tokenizer.eos)
  assert block[0] == tokenizer.bos
  assert len(ends) == 2
  assert ends[1] == len(block) - 1
  return block[1 : ends[0]].tolist(), block[ends[0] + 1 : ends[1]].tolist()


def test_half_of_the_pairs_follow_in_a_document_and_half_are_of_two(task):
  examples = task.dataset.examples("train")
  tokenizer = task.dataset.tokenizer
  texts = [tokenizer.encode(text) for text in CONFIG.data.load("train")]
  topics = [" ".join(map(str, text)) for text in texts]

  def documents(part: list[int]) -> set[int]:
    wanted = f" {' '.join(map(str, part))} "
    return {i for i, text in enumerate(topics) if wanted in f" {text} "}

  follow = 0
  for block in examples.columns["tokens"]:
    assert len(block) <= LENGTH
  pairs = [halves(task, block) for block in examples.columns["tokens"]]
  assert len(pairs) > 40
  assert len(pairs) % 2 == 0
  for number, (first, second) in zip(examples.index, pairs, strict=True):
    shared = documents(first) & documents(second)
    if number % 2 == 0:
      assert documents([*first, *second])  # one after the other in a document
      follow += 1
    else:
      assert not shared
  assert follow == len(pairs) / 2


def test_every_first_and_every_second_part_is_in_a_pair_of_each_kind(task):
  """So that neither by itself says whether they belong together."""
  pairs = [halves(task, block) for block in task.dataset.examples("train").columns["tokens"]]
  following, others = pairs[::2], pairs[1::2]

  def begins(sides: list[list[int]]) -> list[tuple[int, ...]]:
    return sorted(tuple(side[:3]) for side in sides)  # the longer of two is cut

  def ends(sides: list[list[int]]) -> list[tuple[int, ...]]:
    return sorted(tuple(side[-3:]) for side in sides)

  assert ends([first for first, _ in following]) == ends([first for first, _ in others])
  assert begins([second for _, second in following]) == begins([second for _, second in others])


def test_stretches_are_whole_sentences_that_fit_and_all_of_the_document():
  class Letters:
    def encode_batch(self, texts):
      return [[ord(letter) for letter in text] for text in texts]

  text = "Aa. Bbb! Cccc? Dd. Ee. F. Gg."
  cuts = set()
  for seed in range(30):
    found = list(stretches([text, "Alone."], Letters(), 13, np.random.default_rng(seed)))
    assert {document for document, _, _ in found} == {0}
    parts = ["".join(map(chr, part)) for _, *pair in found for part in pair]
    assert "".join(parts) == "Aa.Bbb!Cccc?Dd.Ee.F.Gg."
    assert all(part[-1] in ".!?" for part in parts)
    cuts.add(tuple(parts))
  assert len(cuts) > 2


def test_the_objective_is_the_sum_of_both_losses_and_fillers_do_not_count(task):
  batch = next(iter(task.dataset.train_batches(seed=0, multiple=1)[0]))
  batch = {name: np.concatenate([value, value[:1]]) for name, value in batch.items()}
  batch["index"][-1] = -1
  params = nn.unbox(jax.jit(task.model.init)(jax.random.key(0)))

  @jax.jit
  def loss(params, batch):
    context = StepContext(jax.random.key(1), jnp.int32(0), train=False)
    return task.loss(params, (), batch, context)

  terms, _, metrics = loss(params, batch)
  assert task.objective.weights(MODEL) == {"cross_entropy": 1.0, "next_sentence": 1.0}
  assert set(terms) == {"cross_entropy", "next_sentence"}
  assert terms["next_sentence"].count == np.sum(batch["index"] >= 0) == 4
  assert metrics["next_sentence_accuracy"][1] == 4
  assert abs(float(terms["next_sentence"].sum) / 4 - np.log(2)) < 0.7


def test_labels_are_the_numbers_of_pairs(task):
  """A head that is sure of the first class has the loss of the odd pairs alone."""
  params = nn.unbox(jax.jit(task.model.init)(jax.random.key(0)))
  head = jax.tree.map(jnp.zeros_like, params["next_head"]) | {"bias": jnp.asarray([10.0, -10.0])}
  params = {**params, "next_head": head}
  result = task.evaluate(params, "valid", decode=False).values
  assert result["next_sentence_accuracy"] == 0.5
  np.testing.assert_allclose(result["next_sentence_loss"], 10.0, atol=1e-4)


def test_segments_change_behind_the_first_end(task):
  tokens = jnp.asarray([[2, 9, 3, 8, 3, 0], [2, 9, 9, 9, 3, 0]])
  segments = task.model._segments(tokens)["segments"]
  np.testing.assert_array_equal(segments, [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
  plain = dataclasses.replace(MODEL, segments=0, next_sentence=False)
  assert MaskedModel(Encoder(plain, 9), 0, 3)._segments(tokens) == {}


def test_a_segment_s_vector_is_added_to_the_embeddings():
  """Vectors of segments that are equal change nothing but what one vector in all positions does."""
  module, tokens = Encoder(MODEL, 20), jnp.asarray([[2, 9, 3, 8, 3]])
  params, apply = nn.unbox(module.init(jax.random.key(0), tokens))["params"], jax.jit(module.apply)
  segments = jnp.asarray([[0, 0, 0, 1, 1]])
  one = apply({"params": params}, tokens, segments=segments)
  assert np.abs(one - apply({"params": params}, tokens)).max() > 1e-4
  table = params["positions"]["table"]
  moved = table.at[:5].add(params["segment_table"][segments[0]])
  folded = {**params, "positions": {"table": moved}, "segment_table": jnp.zeros((2, 8))}
  np.testing.assert_allclose(apply({"params": folded}, tokens), one, atol=1e-5)


def test_documents_that_cannot_be_paired_are_refused(tmp_path):
  (tmp_path / "a.txt").write_text("One. Two. Three. Four.\n")
  (tmp_path / "b.txt").write_text("One. Two.\n")
  data = TextDocuments(str(tmp_path), train=("a.txt",), valid=("b.txt",), test=("b.txt",))
  config = dataclasses.replace(CONFIG, data=data, length=8, batch_tokens=8)
  dataset = PairedBlocks(config, config.make_tokenizer())
  with pytest.raises(UserError, match="no document may have more than half"):
    dataset.examples("train")


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: EncoderConfig(segments=1), "model.segments is 1"),
    (lambda: EncoderConfig(next_sentence=True), "Set model.segments to 2"),
    (lambda: dataclasses.replace(CONFIG, length=4, batch_tokens=4), "at least 8"),
    (lambda: CONFIG.build(EncoderConfig(max_length=LENGTH)), "no output for it"),
  ],
)
def test_a_bad_configuration_is_refused(make, words):
  with pytest.raises(UserError, match=words):
    make()


def test_pairs_are_the_same_in_every_process(task):
  again = CONFIG.build(MODEL, files=task.dataset.files())
  for one, other in itertools.zip_longest(
    task.dataset.examples("valid").columns["tokens"],
    again.dataset.examples("valid").columns["tokens"],
  ):
    np.testing.assert_array_equal(one, other)
