"""Beam search gives the hypotheses and scores of Hugging Face's, on the same weights."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from compmod_jax.core.losses import cross_entropy
from compmod_jax.data.tokenizers import BOS, EOS, PAD, UNK
from compmod_jax.decoding import beam_search
from compmod_jax.models.transformer import Transformer, TransformerConfig, shift_right

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")
pytest.importorskip("transformers", reason="transformers is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

BEAMS, VOCAB, LIMIT, BATCH, TIME, STEPS = 5, 40, 30, 8, 9, 300
CONFIG = TransformerConfig(
  encoder_layers=2, decoder_layers=2, dim=32, heads=4, ffn_dim=48, max_length=64, dropout=0.0
)


def pairs(rng, *shape):
  """Random sources and, as targets, the same tokens plus one in reverse, every eighth at random."""
  lengths = rng.integers(2, TIME, shape)[..., None]
  place = np.broadcast_to(np.arange(TIME), (*shape, TIME))
  source = np.where(place < lengths, rng.integers(4, VOCAB - 1, (*shape, TIME)), PAD)
  target = np.take_along_axis(source, np.maximum(lengths - 1 - place, 0), axis=-1) + 1
  noise = rng.integers(4, VOCAB, target.shape)
  target = np.where(rng.random(target.shape) < 0.125, noise, target)
  target = np.where(place < lengths, target, np.where(place == lengths, EOS, PAD))
  return source.astype(np.int32), target.astype(np.int32)


def train(model, params, sources, targets):
  """A few hundred steps: enough for peaked distributions and an end, with doubt left."""
  optimizer = optax.adam(3e-3)

  def loss(params, source, target):
    logits = model.apply({"params": params}, source, shift_right(target, BOS))
    losses = cross_entropy(logits, target, target != PAD)
    return losses.smoothed / losses.count

  def step(carry, batch):
    params, state = carry
    updates, state = optimizer.update(jax.grad(loss)(params, *batch), state)
    return (optax.apply_updates(params, updates), state), None

  return jax.lax.scan(step, (params, optimizer.init(params)), (sources, targets))[0][0]


@functools.cache
def both(seed):
  """Our model after a little training, Marian with the same weights, and padded sources."""
  from benchmarks.marian import to_marian

  model, rng = Transformer(CONFIG, VOCAB, VOCAB), np.random.default_rng(seed)
  tokens = jnp.ones((1, 2), jnp.int32)
  params = nn.unbox(jax.jit(model.init)(jax.random.key(seed), tokens, tokens))["params"]
  params = jax.jit(functools.partial(train, model))(params, *pairs(rng, STEPS, 32))
  source, _ = pairs(rng, BATCH)
  return model, params, to_marian(params, CONFIG, VOCAB, VOCAB), source


def ours(model, params, source, **options):
  def search(params, source):
    variables = {"params": params}
    cache = model.apply(variables, source, beams=BEAMS, length=LIMIT, method="prefill")
    return beam_search(
      lambda cache, tokens: model.apply(variables, cache, tokens, method="step"),
      cache,
      batch=BATCH,
      beams=BEAMS,
      max_length=LIMIT,
      limit=jnp.full(BATCH, LIMIT),
      bos=BOS,
      eos=EOS,
      n_best=BEAMS,
      forbidden=(PAD, BOS, UNK),
      **options,
    )

  return jax.device_get(jax.jit(search)(params, source))


def theirs(marian, source, *, early_stopping, length_penalty):
  source = torch.tensor(source, dtype=torch.long)
  with torch.no_grad():
    found = marian.generate(
      source,
      attention_mask=(source != PAD).long(),
      num_beams=BEAMS,
      num_return_sequences=BEAMS,
      length_penalty=length_penalty,
      early_stopping=early_stopping,
      max_length=LIMIT + 1,  # counts the start token
      suppress_tokens=[PAD, BOS, UNK],
      output_scores=True,
      return_dict_in_generate=True,
    )
  tokens = found.sequences.numpy()[:, 1:]
  # Where the padding token is 0, generate fills with the end token.
  ended = np.cumsum(tokens == EOS, axis=1) - (tokens == EOS) > 0
  tokens = np.pad(np.where(ended, PAD, tokens), ((0, 0), (0, LIMIT - tokens.shape[1])))
  return tokens.reshape(BATCH, BEAMS, -1), found.sequences_scores.numpy().reshape(BATCH, BEAMS)


@pytest.mark.parametrize("seed", [0, 1])
def test_logits_equal_marians_with_padding(seed):
  model, params, marian, source = both(seed)
  random = np.random.default_rng(seed)
  target = random.integers(4, VOCAB, (BATCH, 11)).astype(np.int32)
  mine = jax.jit(model.apply)({"params": params}, source, target)
  with torch.no_grad():
    other = marian(
      input_ids=torch.tensor(source, dtype=torch.long),
      attention_mask=torch.tensor(source != PAD),
      decoder_input_ids=torch.tensor(target, dtype=torch.long),
    ).logits
  np.testing.assert_allclose(mine, other.numpy(), rtol=1e-5, atol=3e-5)


# "filled" is early_stopping=True: as many finished hypotheses as beams. "bound" is "never".
@pytest.mark.parametrize(("stop", "early_stopping"), [("filled", True), ("bound", "never")])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_hypotheses_and_scores_equal_hugging_faces(seed, length_penalty, stop, early_stopping):
  model, params, marian, source = both(seed)
  mine = ours(model, params, source, length_penalty=length_penalty, stop=stop)
  tokens, scores = theirs(
    marian, source, early_stopping=early_stopping, length_penalty=length_penalty
  )
  # At the limit the searches differ by design: ours ends every hypothesis, theirs cuts it off.
  assert mine.lengths.max() < LIMIT
  np.testing.assert_array_equal(mine.tokens, tokens)
  np.testing.assert_allclose(mine.scores, scores, rtol=1e-5, atol=1e-5)


def test_the_hypotheses_compared_differ_in_length_and_from_greedy_search():
  model, params, _, source = both(0)
  best = ours(model, params, source, stop="filled")
  assert len(set(best.lengths.ravel().tolist())) > 5
  assert len({tuple(row) for row in best.tokens.reshape(-1, LIMIT).tolist()}) == BATCH * BEAMS
