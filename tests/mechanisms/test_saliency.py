"""Text saliency: scores of tokens on the attention logits of an encoder."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.mechanisms.saliency import SaliencyNetwork, key_bias
from compmod_jax.models.encoder import EncoderConfig

VOCAB, PAD = 13, 1
SIZES = {"encoder_layers": 2, "dim": 8, "heads": 2, "ffn_dim": 12, "max_length": 8}
CONFIG = EncoderConfig(saliency_dim=5, dropout=0.0, attention_dropout=0.0, **SIZES)
TOKENS = jnp.asarray([[2, 4, 5, 6, 3, PAD, PAD], [2, 7, 8, 9, 10, 11, 3]])
SITES = tuple(f"encoder/layer_{i}/self/attention" for i in range(2))
NETWORK = SaliencyNetwork(VOCAB, 5, PAD)


@functools.cache
def params():
  """Random parameters; those of the saliency network, too."""
  model = CONFIG.encoder(VOCAB, PAD)
  shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), TOKENS))["params"]
  random = np.random.default_rng(0)
  return jax.tree.map(lambda s: jnp.asarray(random.normal(0, 0.4, s.shape), s.dtype), shapes)


def rest():
  return {name: leaf for name, leaf in params().items() if name != "saliency_network"}


@functools.cache
def applied(config):
  return jax.jit(
    lambda p, scores=None, edit=None: run(
      config.encoder(VOCAB, PAD).apply,
      {"params": p},
      TOKENS,
      saliency=scores,
      capture=SITES,
      edits={} if edit is None else {"saliency": lambda _: edit},
    )
  )


def test_scores_of_zero_change_nothing():
  plain, _ = applied(CONFIG.plain())(rest())
  zeros = jnp.zeros(TOKENS.shape)
  given, _ = applied(CONFIG.plain())(rest(), zeros)
  np.testing.assert_allclose(given, plain, atol=1e-6)
  edited, _ = applied(CONFIG)(params(), None, zeros)
  np.testing.assert_allclose(edited, plain, atol=1e-6)


def test_before_training_the_network_s_scores_are_zero():
  fresh = nn.unbox(NETWORK.init(jax.random.key(0), TOKENS))
  np.testing.assert_array_equal(NETWORK.apply(fresh, TOKENS), 0)


def test_a_score_far_below_the_others_removes_a_key_from_all_layers():
  scores = jnp.zeros(TOKENS.shape).at[1, 3].set(-1e9)
  _, found = applied(CONFIG)(params(), scores)
  for site in SITES:
    np.testing.assert_array_equal(found[site][1, :, :, 3], 0)
    assert found[site][1, :, :, [2, 4]].min() > 0
    np.testing.assert_allclose(found[site].sum(axis=-1), 1, rtol=1e-5)


def test_a_score_multiplies_the_probabilities_before_they_are_normalised():
  """Of the first layer, whose queries and keys know no scores yet."""
  scores = jnp.asarray(np.random.default_rng(1).normal(size=TOKENS.shape), jnp.float32)
  _, plain = applied(CONFIG.plain())(rest())
  _, found = applied(CONFIG.plain())(rest(), scores)
  weighed = plain[SITES[0]] * np.exp(scores)[:, None, None, :]
  expected = weighed / weighed.sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(found[SITES[0]], expected, atol=1e-6)


def test_given_scores_are_added_to_those_of_the_network():
  given = jnp.asarray(np.random.default_rng(2).normal(size=TOKENS.shape), jnp.float32)
  own = NETWORK.apply({"params": params()["saliency_network"]}, TOKENS)
  assert np.abs(own).max() > 0.1
  both, _ = applied(CONFIG)(params(), given)
  sums, _ = applied(CONFIG.plain())(rest(), own + given)
  np.testing.assert_allclose(both, sums, atol=1e-5)


def test_gradients_reach_every_parameter_of_the_network():
  def loss(p):
    return jnp.sum(jnp.sin(CONFIG.encoder(VOCAB, PAD).apply({"params": p}, TOKENS)))

  gradient = jax.jit(jax.grad(loss))(params())["saliency_network"]
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    # A constant added to all logits changes no probability.
    expected = not (path[0].key == "score" and path[1].key == "bias")
    assert (np.abs(leaf).max() > 1e-4) == expected, path


def test_padding_changes_no_score():
  own = {"params": params()["saliency_network"]}
  padded = NETWORK.apply(own, TOKENS[:1])
  alone = NETWORK.apply(own, TOKENS[:1, :5])
  np.testing.assert_allclose(padded[:, :5], alone, atol=1e-6)


def test_a_score_is_of_a_token_and_its_neighbours():
  own = {"params": params()["saliency_network"]}
  whole = NETWORK.apply(own, TOKENS)
  other = NETWORK.apply(own, TOKENS.at[1, 3].set(12))
  np.testing.assert_array_equal(np.flatnonzero(whole[1] != other[1]), [2, 3, 4])
  assert key_bias(whole).shape == (2, 1, 1, 7)


def test_a_layout_without_a_place_for_the_network_is_refused(tmp_path):
  huggingface = pytest.importorskip("compmod_jax.checkpoints.huggingface")
  checkpoint = huggingface.Checkpoint(
    config=CONFIG, params=params(), vocab=VOCAB, pad=PAD, kind="roberta"
  )
  with pytest.raises(
    UserError, match=r"saliency_network/hidden/bias.*have no place in their layout"
  ):
    huggingface.write_checkpoint(tmp_path / "out", checkpoint)
  plain = checkpoint._replace(config=CONFIG.plain(), params=rest())
  huggingface.write_checkpoint(tmp_path / "out", plain)


def test_a_width_below_0_is_refused():
  with pytest.raises(UserError, match=r"model\.saliency_dim is -1"):
    EncoderConfig(saliency_dim=-1)
