"""Options of systematic generalisation, in every kind of Transformer that has them."""

import dataclasses
import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.layers.embedding import encoder_decoder_embeddings, sinusoids
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.layers.shared_layers import repeated
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.text import Text
from compmod_jax.models.transformer import TransformerConfig

SIZES: dict[str, Any] = {
  "dim": 8, "heads": 2, "ffn_dim": 12, "max_length": 8, "dropout": 0.0, "attention_dropout": 0.0
}  # fmt: skip
TOKENS = jax.device_put(np.array([[4, 5, 6, 7, 8, 9], [10, 11, 4, 0, 0, 0]], np.int32))
KINDS = ("encoder-decoder", "encoder", "decoder")
VOCAB = 12


def config(kind: str, **fields: Any) -> Any:
  layers = fields.pop("layers", 1)
  if kind == "encoder-decoder":
    both: dict[str, Any] = {"encoder_layers": layers, "decoder_layers": layers}
    return TransformerConfig(**(SIZES | both | fields))
  if kind == "encoder":
    return EncoderConfig(encoder_layers=layers, **(SIZES | fields))
  return DecoderConfig(decoder_layers=layers, **(SIZES | fields))


def call(config: Any) -> tuple[Any, Any]:
  """The module, and its logits of tokens: (params, tokens, deterministic, rngs) -> logits."""
  if isinstance(config, TransformerConfig):
    model: Any = config.seq2seq(VOCAB, VOCAB, 0)
    return model, lambda p, tokens, **more: model.apply(p, tokens, tokens, **more)
  if isinstance(config, EncoderConfig):
    model = config.encoder(VOCAB, 0)
    return model, lambda p, tokens, **more: model.apply(p, tokens, **more)
  model = config.decoder(VOCAB, 0)
  return model, lambda p, tokens, **more: model.apply(p, Text(tokens), **more).logits


def params_of(config: Any) -> Any:
  model, _ = call(config)
  args = (TOKENS, TOKENS) if isinstance(config, TransformerConfig) else (TOKENS,)
  if isinstance(config, DecoderConfig):
    args = (Text(TOKENS),)
  return drawn(model.init, *args, spread=0.4)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_drawn_in_training_alone(kind):
  """Fixed labels are those of the same model whose positions lie further apart."""
  with_labels = config(kind, positions="learned", random_positions=16)
  _, logits = call(with_labels)
  params = params_of(with_labels)

  @functools.partial(jax.jit, static_argnums=2)
  def run(params: Any, key: Any, deterministic: bool) -> jax.Array:
    return logits(params, TOKENS, deterministic=deterministic, rngs={"dropout": key})

  keys = [jax.random.key(seed) for seed in (0, 1)]
  (first, second), fixed = (run(params, key, False) for key in keys), run(params, keys[0], True)
  assert np.abs(first - second).max() > 1e-2
  np.testing.assert_array_equal(fixed, run(params, keys[1], True))

  every_second = jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf[::2] if "positions" in str(path) else leaf, params
  )
  _, plain = call(config(kind, positions="learned"))
  np.testing.assert_allclose(fixed, jax.jit(plain)(every_second, TOKENS), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_positions_reads_a_bag_of_tokens(kind):
  """But for what a causal mask tells: the last position sees all others."""
  bag = config(kind, positions="none")
  _, logits = call(bag)
  params = params_of(bag)
  tokens = TOKENS[0][np.array([[0, 1, 2, 3, 4, 5], [2, 0, 4, 1, 3, 5]])]
  found = np.asarray(jax.jit(logits)(params, tokens))
  np.testing.assert_allclose(found[0, -1], found[1, -1], atol=1e-5)
  moved = config(kind, positions="sinusoidal")
  other = np.asarray(jax.jit(call(moved)[1])(params, tokens))
  assert np.abs(other[0, -1] - other[1, -1]).max() > 1e-4


def copied(params: Any, layers: int) -> Any:
  """Parameters of one shared layer as those of so many layers of their own."""
  found = {}
  for name, value in params.items():
    stem, _, number = name.rpartition("_")
    value = copied(value, layers) if isinstance(value, dict) else value
    found |= {f"{stem}_{i}": value for i in range(layers)} if number == "0" else {name: value}
  return found


def test_groups_of_layers_are_repeated_in_turn():
  assert repeated(["a", "b"], 4) == ["a", "b", "a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_layer_is_repeated_as_often_as_is_asked_for(kind):
  """As layers of their own with the same parameters, more often than it was made for."""
  shared = config(kind, shared_layers=1)
  params = params_of(shared)
  _, deeper = call(dataclasses.replace(shared, **layers_of(shared, 3)))
  _, apart = call(config(kind, layers=3))
  found, sites = jax.jit(lambda p: run(deeper, p, TOKENS, capture=None))(params)
  expected, others = jax.jit(lambda p: run(apart, p, TOKENS, capture=None))(copied(params, 3))
  np.testing.assert_allclose(found, expected, atol=1e-5)
  assert sites.keys() == others.keys()
  assert f"{shared.sides()[0]}/layer_2/self/attention" in sites


def layers_of(config: Any, count: int) -> dict[str, int]:
  return {f"{side}_layers": count for side in config.sides()}


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_go_through_as_many_repetitions_as_are_drawn(kind):
  """Every row of a training batch is that of a model of 1 or 2 layers, and both occur."""
  shared = config(kind, layers=2, shared_layers=1, fewest_repeats=1, remat=True)
  params, (_, logits) = params_of(shared), call(shared)
  train = jax.jit(lambda p, key: logits(p, TOKENS, deterministic=False, rngs={"dropout": key}))
  found = np.concatenate([train(params, jax.random.key(seed)) for seed in range(6)])
  depths = itertools.product((1, 2), repeat=len(shared.sides()))
  names = [f"{side}_layers" for side in shared.sides()]
  plain = dataclasses.replace(shared, fewest_repeats=0, remat=False)
  wanted = [dataclasses.replace(plain, **dict(zip(names, depth, strict=True))) for depth in depths]
  each = np.stack([np.tile(jax.jit(call(one)[1])(params, TOKENS), (6, 1, 1)) for one in wanted])
  away = np.abs(each - found).max(axis=(2, 3))
  np.testing.assert_allclose(away.min(axis=0), 0, atol=1e-5)
  assert set(away.argmin(axis=0).tolist()) == set(range(len(wanted)))


@pytest.mark.parametrize(
  ("scale", "stddev", "factor", "of_positions"),
  [("tus", 32**-0.5, 32**0.5, 1), ("noscale", 1, 1, 1), ("ped", 16**-0.5, 1, 32**-0.5)],
)
def test_vectors_of_tokens_and_positions_are_as_large_as_the_paper_s(
  scale, stddev, factor, of_positions
):
  own, _, output = encoder_decoder_embeddings("none", 300, 300, 32, scale=scale)
  params: Any = nn.unbox(own.init(jax.random.key(0), TOKENS))
  other: Any = nn.unbox(output.init(jax.random.key(0), TOKENS))
  table = np.asarray(params["params"]["table"])
  assert np.std(table) == pytest.approx(stddev, rel=0.03)
  assert np.std(other["params"]["table"]) == pytest.approx(32**-0.5, rel=0.03)
  vectors = np.asarray(own.apply(params, TOKENS))
  np.testing.assert_allclose(vectors, factor * table[np.asarray(TOKENS)], rtol=1e-6)

  config = TransformerConfig(dim=32, heads=2, max_length=6, embedding_scale=scale)
  model: Any = config.seq2seq(VOCAB, VOCAB, 0)
  nothing = jnp.zeros((2, 6, 32))
  for side in ("encoder", "decoder"):
    added = model.apply({}, method=lambda m: getattr(m, f"{side}_positions").add(nothing))
    expected = of_positions * sinusoids(6, 32)
    np.testing.assert_allclose(added, np.stack([expected] * 2), rtol=1e-6)


def test_a_shared_output_that_starts_too_large_is_warned_of():
  assert not TransformerConfig(embedding_scale="ped").warnings()
  assert not TransformerConfig(embedding_scale="noscale", share_embeddings="inputs").warnings()
  (warning,) = TransformerConfig(embedding_scale="noscale").warnings()
  assert "share_embeddings = decoder" in warning


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"random_positions": 7}, r"model\.random_positions is 7 and model\.max_length 8"),
    ({"random_positions": 9, "positions": "none"}, "nothing reads labels"),
    ({"layers": 3, "shared_layers": 2}, "has 3 layers; they are repeated as a whole"),
    ({"shared_layers": -1}, r"model\.shared_layers is -1; it must be at least 0"),
    ({"fewest_repeats": 1}, "no layer is repeated"),
    ({"attention_form": "geometric", "positions": "rotary"}, "it knows distances itself"),
    ({"attention_form": "hyla", "heads": 1}, "normalised over heads"),
    ({"attention_form": "differential", "positions": "rotary"}, "cut in halves"),
    ({"attention_form": "differential", "dim": 6}, "heads are 3 wide"),
    ({"copy_gate_closed": 1.0}, "must be at least 0 and below 1"),
    ({"layers": 2, "shared_layers": 1, "fewest_repeats": 3}, "has 2 repetitions of 1 layers"),
  ],
)
def test_options_that_do_not_fit_are_refused(fields, words):
  for kind in KINDS:
    with pytest.raises(UserError, match=words):
      config(kind, **fields)


@pytest.mark.parametrize("positions", ["none", "relative", "relative_bias"])
@pytest.mark.parametrize("kind", ["encoder-decoder", "decoder"])
def test_a_window_hides_what_is_far_and_how_far_a_position_is(kind, positions):
  """Two layers of windows of 3: a position reads 4 further back, and not where it stands itself."""
  far = {"positions": positions, "max_length": 16, "layers": 2, "norm": "pre"}
  if kind == "decoder":
    far.pop("norm")
  one = config(kind, sliding_window=3, **far)
  whole = dataclasses.replace(one, sliding_window=0)
  params = params_of(one)
  text = np.random.default_rng(0).integers(4, VOCAB, (1, 12)).astype(np.int32)
  changed, shifted = text.copy(), np.roll(text, 2, axis=1)
  changed[:, 3:5] = 15 - changed[:, 3:5]

  def logits(config: Any, target: np.ndarray) -> np.ndarray:
    if kind == "decoder":
      return np.asarray(jax.jit(call(config)[1])(params, target))
    return np.asarray(jax.jit(call(config)[0].apply)(params, text, target))

  expected = logits(one, text)
  found = logits(one, changed)
  np.testing.assert_allclose(found[:, 9:], expected[:, 9:], atol=1e-5)
  assert (np.abs(found - expected).max(axis=-1)[:, 3:9] > 1e-4).all()
  np.testing.assert_allclose(logits(one, shifted)[:, 6:], expected[:, 4:-2], atol=1e-5)
  assert np.abs(logits(whole, changed) - logits(whole, text))[:, 9:].max() > 1e-3
  # A window over everything is none.
  wide = dataclasses.replace(one, sliding_window=12)
  np.testing.assert_allclose(logits(wide, text), logits(whole, text), atol=1e-6)


def test_a_window_of_fewer_positions_than_none_is_refused():
  for kind in ("encoder-decoder", "decoder"):
    with pytest.raises(UserError, match=r"model\.sliding_window is -1; it must be a number"):
      config(kind, sliding_window=-1)


def test_repetitions_of_a_layer_are_alike():
  fields = {"layers": 2, "experts": ExpertsConfig(2)}
  config("encoder", shared_layers=1, expert_layers=("encoder",), **fields)
  with pytest.raises(UserError, match="Name whole stacks"):
    config("encoder", shared_layers=1, expert_layers=("encoder_1",), **fields)


def test_mechanisms_of_a_layer_have_the_softmax_and_no_gate():
  config("encoder", mechanism_layers=("encoder",))
  for field in ({"attention_form": "geometric"}, {"copy_gate": True}):
    with pytest.raises(UserError, match=r"Leave one of them out"):
      config("encoder", mechanism_layers=("encoder",), **field)
