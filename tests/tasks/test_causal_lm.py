"""Language modelling by decoders: what is predicted from what, and what counts."""

import dataclasses
import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from compmod_jax.core.errors import UserError
from compmod_jax.data.sources.documents import TextDocuments
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.causal_lm import CausalLMConfig

SIZES = {"dim": 16, "heads": 2, "ffn_dim": 24, "max_length": 16, "dropout": 0.0}
NEMOT = NemotConfig(vanilla_layers=1, modulatory_layers=1, output_layers=1, **SIZES)
DECODER = DecoderConfig(decoder_layers=2, **SIZES)
MODELS = pytest.mark.parametrize("model", [NEMOT, DECODER], ids=["nemot", "decoder"])
WORDS = ["a", "b", "c", "d", "e", "f", "g"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path, random = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
  for split, count in (("train", 40), ("valid", 7)):
    lines = [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(count)]
    with gzip.open(path / f"{split}.txt.gz", "wt") as file:
      file.write("\n".join(lines) + "\n")
  return path


def config(folder, **fields):
  given = {
    "data": TextDocuments(folder=str(folder), train=("train*",), valid=("valid*",), unit="line"),
    "tokenizer": TokenizerConfig(kind="words", vocab_size=20),
    "length": 9,
    "batch_tokens": 36,
  }
  return CausalLMConfig(**given | fields)


def params_of(task):
  shapes = jax.eval_shape(lambda key: nn.unbox(task.model.init(key)), jax.random.key(0))
  random = np.random.default_rng(1)
  return jax.tree.map(lambda s: jnp.asarray(random.normal(0, 0.5, s.shape), s.dtype), shapes)


def one_by_one(task, params, document):
  """Negative log-likelihoods of a document, each token from a text of its own."""
  forward, found = jax.jit(lambda tokens: task.model.forward(params, {"tokens": tokens})), []
  past = [task.dataset.tokenizer.eos]
  for token in (*document, task.dataset.tokenizer.eos):
    text = np.full((1, 9), task.dataset.tokenizer.pad)
    text[0, : len(past)] = past
    log_probs = jax.nn.log_softmax(forward(jnp.asarray(text))[0, len(past) - 1])
    found.append(-float(log_probs[token]))
    past.append(token)
  return found


@MODELS
def test_documents_are_predicted_apart_from_one_another(folder, model):
  task = config(folder, length=16, batch_tokens=16).build(model)
  params, eos = params_of(task), task.dataset.tokenizer.eos
  documents = [task.dataset.tokenizer.encode(text) for text in ("a b c", "d", "e f a b")]
  stream = [token for document in documents for token in (*document, eos)]
  batch = {"tokens": jnp.asarray([[eos, *stream]]), "index": jnp.arange(1)}
  logits = jax.jit(task.model.forward)(params, batch)[0]
  found = -jax.nn.log_softmax(logits)[jnp.arange(len(stream)), jnp.asarray(stream)]
  expected = [value for document in documents for value in one_by_one(task, params, document)]
  np.testing.assert_allclose(found, expected, atol=1e-4)


def test_joined_documents_are_predicted_from_those_before(folder):
  apart, joined = config(folder).build(NEMOT), config(folder, joined=True).build(NEMOT)
  params = params_of(apart)
  batch = {"tokens": jnp.asarray([[3, 4, 5, 3, 6, 4]]), "index": jnp.arange(1)}
  one, other = (jax.jit(t.model.forward)(params, batch) for t in (apart, joined))
  np.testing.assert_allclose(one[:, :3], other[:, :3], atol=1e-5)
  assert np.abs(one[:, 3:] - other[:, 3:]).max() > 1e-3


@MODELS
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_every_token_of_a_split_counts_once_whatever_the_stride(folder, model, stride):
  task = config(folder, stride=stride).build(model)
  batches = list(task.dataset.eval_batches("valid"))
  counted = [batch["tokens"][:, 1:][batch["counted"]] for batch in batches]
  stream = np.concatenate([block[1:] for block in task.dataset.blocks("valid").columns["tokens"]])
  np.testing.assert_array_equal(np.concatenate(counted), stream)
  values = task.evaluate(params_of(task), "valid").values
  assert values["tokens"] == len(stream)
  words = sum(len(text.split()) + 1 for text in task.dataset.config.data.load("valid"))
  assert values["unknown"] == 0
  assert values["word_perplexity"] == pytest.approx(np.exp(values["loss"] * len(stream) / words))


def test_any_stride_gives_the_plain_perplexity_where_the_text_fits_the_window(folder):
  model = dataclasses.replace(DECODER, max_length=128)
  losses = []
  for stride in (0, 5):
    task = config(folder, length=100, batch_tokens=100, stride=stride).build(model)
    losses.append(task.evaluate(params_of(task), "valid").values["loss"])
  assert losses[0] == losses[1]


def test_a_sliding_window_sees_as_many_tokens_as_it_holds(folder):
  task = config(folder, length=5, batch_tokens=20, stride=2, joined=True).build(DECODER)
  params, eos = params_of(task), task.dataset.tokenizer.eos
  stream = np.concatenate([block[1:] for block in task.dataset.blocks("valid").columns["tokens"]])
  forward, expected = jax.jit(lambda tokens: task.model.forward(params, {"tokens": tokens})), []
  for place, token in enumerate(stream):
    # The first window holds four tokens; after it every second token starts one.
    start = 0 if place < 4 else 2 * ((place - 4) // 2 + 1)
    seen = np.full((1, 6), task.dataset.tokenizer.pad)
    seen[0, : 1 + place - start] = [eos, *stream[start:place]]
    logits = forward(jnp.asarray(seen))[0, place - start]
    expected.append(-float(jax.nn.log_softmax(logits)[token]))
  found = task.evaluate(params, "valid").values["loss"]
  assert found == pytest.approx(np.mean(expected), abs=1e-4)


@MODELS
def test_the_loss_is_the_mean_over_real_tokens(folder, model):
  task = config(folder).build(model)
  params = params_of(task)
  batch = next(iter(task.dataset.eval_batches("valid")))
  given = {name: jnp.asarray(batch[name]) for name in ("tokens", "index")}
  context = StepContext(jax.random.key(0), jnp.int32(0), train=False, progress=jnp.float32(0))
  terms, carry, found = jax.jit(lambda *both: task.loss(*both, context))(params, (), given)
  assert carry == ()
  log_probs = jax.nn.log_softmax(jax.jit(task.model.forward)(params, given))
  gold = jnp.take_along_axis(log_probs, given["tokens"][:, 1:, None], axis=-1)[..., 0]
  real = given["tokens"][:, 1:] != task.dataset.tokenizer.pad
  np.testing.assert_allclose(terms["cross_entropy"].sum, -jnp.sum(gold * real), rtol=1e-5)
  assert float(terms["cross_entropy"].count) == float(jnp.sum(real))
  gates = {name for name in found if name.startswith("gate/")}
  assert gates == (
    {f"gate/{name}" for name in ("mean", "square", "closed", "open")} if model is NEMOT else set()
  )
  for name in gates:
    total, count = found[name]
    assert 0 <= float(total / count) <= 1


def test_what_does_not_fit_is_told(folder):
  with pytest.raises(UserError, match="but the task needs a decoder"):
    config(folder).build(EncoderConfig())
  with pytest.raises(UserError, match="Raise model"):
    config(folder, length=18, batch_tokens=36).build(NEMOT)
  with pytest.raises(UserError, match="which language modelling"):
    config(folder).build(dataclasses.replace(NEMOT, tasks=("gqa",)))
  with pytest.raises(UserError, match="trains the output set of lm alone"):
    config(folder).build(dataclasses.replace(NEMOT, tasks=("lm", "gqa")))
  with pytest.raises(UserError, match="Switch them off"):
    config(folder).build(dataclasses.replace(NEMOT, highlighting="vanilla"))
  with pytest.raises(UserError, match="1 to 8 tokens"):
    config(folder, stride=9)
  with pytest.raises(UserError, match="does not search"):
    config(folder).build(NEMOT).decoding(None)
