"""The sequence-to-sequence LSTM: its equations, who influences what, recoding, search, edits."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF, Intermediates, run
from compmod_jax.data.tokenizers import BOS, EOS
from compmod_jax.decoding import DecodeConfig, decode, recoding
from compmod_jax.layers.recoding_signals import step_size_parameters
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig
from compmod_jax.models.transformer import shift_right

SOURCE_TYPES, TARGET_TYPES = 23, 19
PLAIN = Seq2SeqLstmConfig(
  encoder_layers=2,
  decoder_layers=2,
  dim=6,
  embedding_dim=5,
  attention_dim=4,
  share_embeddings="none",
  max_length=16,
  dropout=0.2,
)
# No token stands twice, so that a token's embedding says where an influence comes from.
SOURCE = np.int32([[4, 5, 6, 7, 8, 9], [10, 11, 12, 0, 0, 0]])
TARGET = np.int32([[2, 4, 5, 6, 7], [8, 9, 10, 11, 0]])
PAIR = jnp.asarray(SOURCE), jnp.asarray(TARGET)
ATTENTION = "decoder/cross/attention"
LONGEST = 6  # tokens of what a search finds
LEARNED = RecodingConfig("entropy", "learned", 0.7)


def recoded(signal, **fields):
  return dataclasses.replace(PLAIN, recoding=RecodingConfig(signal, **{"size": 0.7, **fields}))


def module(config):
  return config.seq2seq(SOURCE_TYPES, TARGET_TYPES, 0)


@functools.cache
def params():
  """Random parameters, which all configurations without learned step sizes share."""
  predicting = module(recoded("predicted_error"))
  shapes = nn.unbox(jax.eval_shape(predicting.init, jax.random.key(0), SOURCE, TARGET))
  random = np.random.default_rng(0)
  with jax.ensure_compile_time_eval():  # also for a caller that is being traced
    return jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.6, x.shape), x.dtype), shapes)


@functools.cache
def everything(config):
  """Logits and all sites."""
  return jax.device_get(jax.jit(functools.partial(run, module(config).apply, capture=None))(
    params(), *PAIR
  ))  # fmt: skip


def with_luong(p):
  """The parameters, those of attention a matrix for the product of states and memory."""
  key = jnp.asarray(np.random.default_rng(1).normal(0, 0.6, (2 * PLAIN.dim, PLAIN.dim)))
  return {**p, "cross": {"key": key.astype(jnp.float32)}}


# Equations.


def test_logits_and_attention_are_those_of_bahdanau_et_al():
  """Written out with NumPy, one example, one position and one gate at a time."""
  p = jax.tree.map(np.asarray, params()["params"])
  logits, sites = everything(PLAIN)
  agree(p, logits, sites, lambda s, h: bahdanau(p["cross"], s, h))


def test_multiplicative_attention_scores_by_the_product_of_state_and_memory():
  """Luong's general score, the rest of the model as before."""
  p = with_luong(params()["params"])
  logits, sites = jax.jit(functools.partial(run, module(LUONG).apply, capture=None))(
    {"params": p}, *PAIR
  )
  p = jax.tree.map(np.asarray, p)
  agree(p, logits, sites, lambda s, h: s @ p["cross"]["key"].T @ h)


def agree(p, logits, sites, score):
  for row, (times, keys) in enumerate(((5, 6), (5, 3))):  # without the source's padding
    words, weights = reference(p, SOURCE[row, :keys], TARGET[row, :times], score)
    np.testing.assert_allclose(logits[row, :times], words, atol=2e-5)
    np.testing.assert_allclose(sites[ATTENTION][row, 0, :times, :keys], weights, atol=1e-6)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def cell(p, x, h, c):
  i, f, g, o = np.split(x @ p["input"] + h @ p["recurrent"] + p["bias"], 4)
  c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
  return sigmoid(o) * np.tanh(c), c


def embedded(p, name, token):
  return p[name]["table"][token] * PLAIN.embedding_dim**0.5


def direction(p, xs):
  h, c, found = np.zeros(PLAIN.dim), np.zeros(PLAIN.dim), []
  for x in xs:
    h, c = cell(p, x, h, c)
    found.append(h)
  return found


def bahdanau(p, s, h):
  return p["score"][:, 0] @ np.tanh(s @ p["query"] + h @ p["key"])


def reference(p, source, target, score):
  """Logits and attention weights of one sentence pair without padding."""
  memory = [embedded(p, "encoder_embedding", token) for token in source]
  for i in range(PLAIN.encoder_layers):
    ahead = direction(p[f"encoder_forward_{i}"], memory)
    back = direction(p[f"encoder_backward_{i}"], memory[::-1])[::-1]
    memory = [np.concatenate(pair) for pair in zip(ahead, back, strict=True)]
  memory = np.stack(memory)
  start = memory[0, PLAIN.dim :] @ p["first_state"]["kernel"] + p["first_state"]["bias"]
  states = [(h, np.zeros(PLAIN.dim)) for h in np.split(np.tanh(start), PLAIN.decoder_layers)]
  logits, weights = [], []
  for token in target:
    e = np.array([score(states[-1][0], h) for h in memory])
    alpha = np.exp(e - e.max()) / np.exp(e - e.max()).sum()
    read = x = np.concatenate([embedded(p, "decoder_embedding", token), alpha @ memory])
    for i in range(PLAIN.decoder_layers):
      states[i] = cell(p[f"decoder_{i}"], x, *states[i])
      x = states[i][0]
    t = np.tanh(np.concatenate([x, read]) @ p["readout"]["kernel"] + p["readout"]["bias"])
    logits.append(t @ p["output_embedding"]["table"].T)
    weights.append(alpha)
  return np.stack(logits), np.stack(weights)


# Who influences what.

KINDS = {name: recoded(name) for name in ("entropy", "nll")} | {"plain": PLAIN}
LUONG = dataclasses.replace(PLAIN, attention="multiplicative")
each = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


@each
def test_no_prediction_depends_on_a_later_token_on_padding_or_on_another_example(config):
  p = params()["params"]

  @jax.jit
  def influence(tables, example, position):
    def prediction(tables):
      changed = {name: {"table": table} for name, table in tables.items()}
      rngs = {"dropout": jax.random.key(0)}
      call = functools.partial(module(config).apply, deterministic=False, rngs=rngs)
      logits = call({"params": {**p, **changed}}, *PAIR)
      return jnp.sum(logits[example, position] * np.arange(float(TARGET_TYPES)))

    gradients = jax.grad(prediction)(tables)
    return {name: jnp.any(gradient != 0, axis=-1) for name, gradient in gradients.items()}

  tables = {name: p[name]["table"] for name in ("encoder_embedding", "decoder_embedding")}
  for example, position in ((0, 0), (0, 2), (0, 4), (1, 1), (1, 3)):
    reached = jax.device_get(influence(tables, example, position))
    assert set(np.flatnonzero(reached["encoder_embedding"])) == set(SOURCE[example]) - {0}
    past = set(TARGET[example, : position + 1])
    assert set(np.flatnonzero(reached["decoder_embedding"])) == past


@each
def test_predictions_are_the_same_in_a_wider_batch_with_other_examples(config):
  wide_source, wide_target = np.zeros((3, 9), np.int32), np.zeros((3, 8), np.int32)
  wide_source[2, :3], wide_target[2, :4] = SOURCE[1, :3], TARGET[1, :4]
  wide_source[0, :9], wide_target[0, :8] = 21, 3  # and row 1 is a filler, all padding
  wide = np.asarray(jax.jit(module(config).apply)(params(), wide_source, wide_target))
  np.testing.assert_allclose(wide[2, :4], everything(config)[0][1, :4], rtol=2e-5, atol=2e-5)
  assert np.isfinite(wide).all()


def test_a_batch_of_padding_alone_has_finite_gradients():
  config = recoded("entropy")

  @jax.jit
  def gradient(p):
    call = functools.partial(module(config).apply, source=0 * PAIR[0], target=0 * PAIR[1])
    return jax.grad(lambda p: jnp.mean(jax.nn.log_softmax(call(p)) ** 2))(p)

  for leaf in jax.tree.leaves(gradient(params())):
    assert np.isfinite(leaf).all()


def test_attention_looks_at_tokens_alone_and_its_weights_sum_to_1():
  weights = everything(PLAIN)[1][ATTENTION]
  assert weights.shape == (2, 1, 5, 6)
  np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)
  assert not weights[1, ..., 3:].any()
  assert (weights[1, ..., :3] > 0).all()


def test_the_memory_is_read_through_the_attention_weights():
  """With all weight on one position, the steps read that position's vector and no other."""

  @jax.jit
  def attending_to(position, change):
    edits = {
      ATTENTION: lambda weights: jnp.zeros_like(weights).at[..., position].set(1.0),
      "encoder/output": lambda memory: memory + change,
    }
    return run(module(PLAIN).apply, params(), *PAIR, edits=edits)[0]

  at = np.arange(6)[None, :, None]
  base = attending_to(1, 0.0 * at)
  np.testing.assert_allclose(attending_to(1, 1.0 * (at == 2)), base, atol=1e-6)
  assert np.abs(attending_to(1, 1.0 * (at == 1)) - base).max() > 0.01


def test_an_edit_that_asks_for_the_mask_gets_that_of_its_position():
  site, valid = "decoder/layer_1/output", jnp.asarray(TARGET != 0)
  edits = {site: lambda h, mask: jnp.where(mask[..., None], h, 100.0)}

  @jax.jit
  def edited():
    intermediates = Intermediates(capture=frozenset([site]), edits=edits).knowing(lambda _: valid)
    module(PLAIN).apply(params(), *PAIR, intermediates=intermediates)
    return intermediates.captured[site]

  np.testing.assert_array_equal(np.asarray(edited() == 100.0).all(axis=-1), TARGET == 0)


# Recoding.


@pytest.mark.parametrize(
  ("signal", "fields"),
  [("entropy", {"size": 0.0}), ("nll", {"size": 0.0}), ("nll", {"when": "train"})],
)
def test_steps_of_size_zero_and_recoding_of_the_other_mode_change_nothing(signal, fields):
  found = everything(recoded(signal, **fields))[0]
  np.testing.assert_allclose(found, everything(PLAIN)[0], atol=1e-6)


@pytest.mark.parametrize("signal", ["surprisal", "argmax", "nll", "entropy", "predicted_error"])
def test_the_top_state_goes_down_the_gradient_in_closed_form_at_every_position(signal):
  r"""-size times W_s (1 - t^2) E'^T d, where d is the signal's derivative by the logits.

  Of the loss that the predictor expects, its derivative by t stands in place of E'^T d.
  """
  size, p = 0.7, jax.tree.map(np.asarray, params()["params"])
  sites = everything(recoded(signal))[1]
  before, after = sites["decoder/layer_1/output"], sites["decoder/layer_1/output_recoded"]
  context = np.einsum("btk,bke->bte", sites[ATTENTION][:, 0], sites["encoder/output"])
  kernel, table = p["readout"]["kernel"], p["output_embedding"]["table"]
  x = np.concatenate([before, embedded(p, "decoder_embedding", TARGET), context], axis=-1)
  t = np.tanh(x @ kernel + p["readout"]["bias"])
  o = np.array(jax.nn.softmax(t @ table.T))
  if signal == "predicted_error":
    first, last = (p["error_predictor"][f"Dense_{i}"] for i in (0, 1))
    hidden = np.tanh(t @ first["kernel"] + first["bias"])
    logit = hidden @ last["kernel"] + last["bias"]
    read = sites["decoder/recoding_error"]
    np.testing.assert_allclose(read, np.log1p(np.exp(logit))[..., 0], rtol=1e-5)
    derivative = sigmoid(logit) * ((1 - hidden**2) * last["kernel"][:, 0]) @ first["kernel"].T
    table = np.eye(PLAIN.embedding_dim)
  elif signal == "entropy":
    derivative = -o * (np.log(o) - np.sum(o * np.log(o), axis=-1, keepdims=True))
  else:  # lowered one position later, where the token that was to be predicted is read
    before, after, o, t = before[:, :-1], after[:, 1:], o[:, :-1], t[:, :-1]
    token = o.argmax(axis=-1) if signal == "argmax" else TARGET[:, 1:]
    hot = np.eye(TARGET_TYPES)[token]
    own = np.sum(o * hot, axis=-1, keepdims=True)
    slope = 1.0 if signal == "nll" else (1 + np.log(own)) * own ** (1 - own)
    derivative = slope * (o - hot)
  expected = -size * ((1 - t**2) * (derivative @ table)) @ kernel[: PLAIN.dim].T
  np.testing.assert_allclose(after - before, expected, atol=2e-5)
  assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize("signal", ["surprisal", "nll"])
def test_a_signal_of_the_token_moves_no_prediction_of_that_token(signal):
  """The first token is predicted before anything is known; what follows is not the same."""
  plain, found = everything(PLAIN)[0], everything(recoded(signal))[0]
  np.testing.assert_allclose(found[:, 0], plain[:, 0], atol=1e-6)
  assert np.abs(found[:, 1:] - plain[:, 1:]).max() > 1e-3


def entropies(logits):
  p = jax.nn.softmax(logits)
  return np.asarray(-jnp.sum(p * jnp.log(p), axis=-1))


def test_recoding_by_entropy_lowers_that_of_the_first_prediction_and_more_steps_lower_it_more():
  plain = entropies(everything(PLAIN)[0])[:, 0]
  once, more = (everything(recoded("entropy", size=0.05, steps=steps)) for steps in (1, 3))
  np.testing.assert_allclose(once[1]["decoder/recoding_error"][:, 0], plain, rtol=1e-5)
  assert (entropies(once[0])[:, 0] < plain).all()
  assert (entropies(more[0])[:, 0] < entropies(once[0])[:, 0]).all()


def test_the_top_layer_can_be_recoded_alone():
  """At the first step, which starts from the same states, its states move as with all others."""
  config = recoded("entropy", layers="top")
  every, top = everything(recoded("entropy"))[1], everything(config)[1]
  for kind in ("output", "cell"):
    moved = [
      sites[f"decoder/layer_1/{kind}_recoded"][:, 0] - sites[f"decoder/layer_1/{kind}"][:, 0]
      for sites in (every, top)
    ]
    np.testing.assert_allclose(*moved, rtol=1e-5, atol=1e-6)
    assert np.abs(moved[0]).max() > 1e-3
    before, after = (top[f"decoder/layer_0/{kind}{name}"] for name in ("", "_recoded"))
    np.testing.assert_array_equal(before, after)
  assert list(config.marks()) == ["decoder/layer_1/output_recoded"]


@pytest.mark.parametrize("layer", [0, 1])
def test_cell_states_go_down_the_derivative_by_finite_differences(layer):
  """Of the first prediction's entropy with respect to the cell state of a layer, through h."""
  site, epsilon = f"decoder/layer_{layer}", 1e-2
  sites = everything(recoded("entropy"))[1]
  moved = sites[f"{site}/cell_recoded"][:, 0] - sites[f"{site}/cell"][:, 0]
  hidden, before = sites[f"{site}/output"][:, 0], sites[f"{site}/cell"][:, 0]

  @jax.jit
  @jax.vmap
  def entropy(change):
    # h as the cell makes it of a changed c: o tanh(c).
    new = hidden / jnp.tanh(before) * jnp.tanh(before + change[None])
    edit = {f"{site}/output": lambda h: h + (new - hidden)[:, None]}
    logits = run(module(PLAIN).apply, params(), PAIR[0], PAIR[1][:, :1], edits=edit)[0]
    p = jax.nn.softmax(logits[:, 0])
    return -jnp.sum(p * jnp.log(p), axis=-1)

  units = epsilon * np.eye(PLAIN.dim, dtype=np.float32)
  slope = (entropy(units) - entropy(-units)).T / (2 * epsilon)
  np.testing.assert_allclose(moved, -0.7 * slope, atol=2e-4)
  assert np.abs(slope).max() > 1e-2


def test_gradients_are_those_of_the_loss_where_they_pass_through_the_recoding_gradient():
  """By finite differences along a direction, learned step sizes included; else they are not."""
  sizes = {
    name: init(jax.random.key(0), shape).unbox()
    for name, (init, shape) in step_size_parameters(LEARNED, 2, PLAIN.dim).items()
  }
  p = {"params": {**params()["params"], "step_sizes": sizes}}
  random = np.random.default_rng(1)
  along = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), p)

  def loss(config, p):
    return jnp.mean(jax.nn.log_softmax(module(config).apply(p, *PAIR))[..., 3])

  def slope(through):
    recoding = dataclasses.replace(LEARNED, through=through)
    config = dataclasses.replace(PLAIN, recoding=recoding)
    value = jax.jit(jax.value_and_grad(functools.partial(loss, config)))
    _, gradient = value(p)
    assert np.asarray(gradient["params"]["step_sizes"]["steps"]).all()
    return value, sum(jax.tree.leaves(jax.tree.map(np.vdot, gradient, along)))

  (value, second), (_, first) = slope(True), slope(False)
  ahead, back = (
    value(jax.tree.map(lambda x, d: np.asarray(x) + np.float32(sign * 2e-3) * d, p, along))[0]
    for sign in (1, -1)
  )
  measured = (ahead - back) / 4e-3
  np.testing.assert_allclose(second, measured, rtol=0.02)
  assert abs(first - measured) > 0.05 * abs(measured)


# Search.


def searched(config, decode_config):
  """What a search finds for the sources, of at most LONGEST tokens."""
  apply = functools.partial(module(config).apply, params())

  @jax.jit
  def search(source):
    cache = apply(source, beams=decode_config.width, length=LONGEST, method="prefill")
    return decode(
      functools.partial(apply, method="step"), cache, decode_config,
      batch=len(source), max_length=LONGEST, limit=jnp.full(len(source), LONGEST), bos=BOS, eos=EOS,
      pad=0,
    )  # fmt: skip

  return jax.device_get(search(PAIR[0]))


@functools.cache
def whole_pass(config):
  return jax.jit(functools.partial(module(config).apply, params()))


def log_probabilities(config, tokens):
  """By the whole pass without a cache: of every token [batch, hypotheses, time], and the best."""
  batch, count, time = tokens.shape
  source = np.repeat(SOURCE, count, axis=0)
  logits = whole_pass(config)(source, shift_right(jnp.asarray(tokens.reshape(-1, time)), BOS))
  rows = np.asarray(jax.nn.log_softmax(logits)).reshape(batch, count, time, -1)
  return np.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0], rows.argmax(axis=-1)


@each
def test_the_score_of_every_hypothesis_is_that_of_the_whole_pass(config):
  found = searched(config, DecodeConfig(beams=3, n_best=3))
  each_token, _ = log_probabilities(config, found.tokens)
  here = np.arange(LONGEST) < found.lengths[..., None]
  expected = np.sum(np.where(here, each_token, 0), axis=-1) / found.lengths
  np.testing.assert_allclose(found.scores, expected, atol=1e-5)
  assert len({tuple(row) for row in found.tokens.reshape(-1, LONGEST)}) > 3


@each
def test_greedy_search_takes_the_most_probable_token_of_the_whole_pass(config):
  found = searched(config, DecodeConfig(method="greedy"))
  tokens = np.repeat(found.tokens, 3, axis=1)
  _, best = log_probabilities(config, tokens)
  # A hypothesis of the greatest length ends whatever is most probable there.
  here = np.arange(LONGEST) < np.minimum(found.lengths, LONGEST - 1)[..., None]
  np.testing.assert_array_equal(found.tokens[here], best[:, :1][here])


@pytest.mark.parametrize("layer", [0, -1])
def test_decoding_recodes_the_state_of_a_layer(layer):
  """As it does an activation of any model: the entropy of what is predicted falls."""
  apply = functools.partial(module(PLAIN).apply, params())
  cache = jax.jit(functools.partial(apply, beams=1, length=3, method="prefill"))(PAIR[0])

  def step(cache, tokens, intermediates):
    return apply(cache, tokens, intermediates=intermediates, method="step")

  config = DecodeConfig(recode_layer=layer, recode_size=0.05)
  one = jax.jit(recoding.recoding_step(step, OFF, recoding.site_of(layer, 2), config))
  _, state = one(recoding.start(cache, 2, 1), PAIR[1][:, 0, None])
  before, after = np.asarray(state["entropy"][:, 0]).T
  np.testing.assert_allclose(before, entropies(everything(PLAIN)[0])[:, 0], rtol=1e-5)
  assert (after < before).all()


def test_a_model_that_recodes_itself_is_not_recoded_once_more():
  assert PLAIN.decoding_stack("") == ("decoder", 2)
  assert recoded("entropy", when="train").decoding_stack("") == ("decoder", 2)
  with pytest.raises(UserError, match=r"recode_layer is given.*--recoding signal=none"):
    recoded("entropy").decoding_stack("")


# Configuration.


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"dim": 0}, r"model\.dim is 0"),
    ({"dropout": 1.0}, r"model\.dropout is 1\.0"),
    ({"recoding": RecodingConfig("mc_dropout")}, r"model\.recoding\.signal"),
    ({"recoding": RecodingConfig("nll", "safe")}, r"model\.recoding\.step"),
    ({"recoding": RecodingConfig("nll", share=0.5)}, r"recoding\.share is 0\.5"),
  ],
)
def test_a_bad_configuration_names_field_and_value(fields, words):
  with pytest.raises(UserError, match=words):
    dataclasses.replace(PLAIN, **fields)


def test_one_table_needs_one_vocabulary():
  config = dataclasses.replace(PLAIN, share_embeddings="all")
  with pytest.raises(UserError, match="23 and 19 tokens"):
    module(config).init(jax.random.key(0), SOURCE, TARGET)
  shapes = jax.eval_shape(config.seq2seq(9, 9, 0).init, jax.random.key(0), SOURCE, TARGET)
  assert [name for name in shapes["params"] if name.endswith("embedding")] == ["decoder_embedding"]
