"""The recurrent language model: recoding by closed forms, no leak, states, identity."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.layers import deferred_scan, lstm
from compmod_jax.layers.lstm import State
from compmod_jax.layers.recoding_signals import dropout_factors, word_factors
from compmod_jax.mechanisms.recoding.config import COPIED, AnchorConfig, RecodingConfig
from compmod_jax.models import lstm_lm
from compmod_jax.models.lstm_lm import Given, LstmConfig, LstmLM

BATCH, TIME, VOCAB, DIM = 3, 4, 11, 5
SIGNALS = (
  "surprisal", "argmax", "nll", "entropy", "mc_dropout", "locked_dropout", "variational_rnn",
  "ensemble", "weak_supervision",
)  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(1), (BATCH, TIME), 0, VOCAB)
TARGETS = jax.random.randint(jax.random.key(2), (BATCH, TIME), 0, VOCAB)
CLASSIFIER = {"weight": jnp.linspace(-1, 1, DIM), "bias": jnp.float32(0.3)}


def model_of(*, dropout=0.2, tied=False, layers=2, only_top=False, **recoding):
  width = DIM if tied else 6
  recoding |= {"layers": "top"} if only_top else {}
  config = LstmConfig(
    layers=layers,
    dim=DIM,
    embedding_dim=width,
    tied=tied,
    dropout=dropout,
    recoding=RecodingConfig(**{"samples": 3, "size": 0.7, **recoding}),
  )
  return LstmLM(config, VOCAB)


def given(targets=TARGETS, active=None):
  labels = (targets % 2).astype(jnp.float32)
  return Given(active, labels, CLASSIFIER, jax.random.key(9))


@functools.cache
def initial(model):
  # Initialisers alone, one by one: programs of the same shapes are shared by all models.
  variables = model.init(jax.random.key(0), method=lambda model: model.decoder_bias)
  return nn.unbox(variables)["params"]


@functools.cache
def fresh(model):
  return jax.tree.map(lambda leaf: 3 * leaf, initial(model))


def apply(model, params, tokens=TOKENS, targets=TARGETS, rng=None, active=None, **more):
  states = model.initial_states(len(tokens))
  more["given"] = given(targets, active)
  return model.apply({"params": params}, tokens, targets, states, rng=rng, **more)


@functools.cache
def compiled(model, **flags):
  return jax.jit(functools.partial(apply, model, **flags))


def run(model, params, tokens=TOKENS, targets=TARGETS, rng=None, active=None, **flags):
  return compiled(model, **flags)(params, tokens, targets, rng, active)


def losses_and_gradients(model, params):
  def loss(params):
    out = apply(model, params, rng=jax.random.key(5), measure=True)
    return jnp.mean(out.nll) + 0.1 * jnp.sum(out.states[0].c ** 2), out

  (value, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  return value, out.nll, out.states, out.steps["error"], out.steps["error_after"], grads


def assert_as_defined(model):
  """Closed forms give what `jax.grad` gives."""
  recoding = dataclasses.replace(model.config.recoding, implementation="definition")
  slow = LstmLM(dataclasses.replace(model.config, recoding=recoding), VOCAB)
  params = fresh(model)
  ours, theirs = losses_and_gradients(model, params), losses_and_gradients(slow, params)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()) + 1e-8)


# Every signal, every kind of step size with and without `through`. Signals whose closed forms ask
# for `through` have both; so has the entropy for those that read several distributions. A signal
# reads the top layer alone: two are for what is between them.
CASES = [
  ("surprisal", False, "constant", 2),
  ("surprisal", True, "learned", 2),
  ("argmax", False, "learned", 1),
  ("argmax", True, "predicted", 1),
  ("nll", False, "constant", 1),
  ("entropy", False, "constant", 1),
  ("entropy", True, "learned", 2),
  ("mc_dropout", True, "constant", 1),
  ("locked_dropout", False, "predicted", 2),
  ("variational_rnn", True, "learned", 2),
  ("ensemble", False, "learned", 1),
  ("weak_supervision", True, "constant", 1),
]


@pytest.mark.parametrize(("signal", "through", "step", "layers"), CASES)
def test_closed_forms_agree_with_the_definition_in_value_and_every_gradient(
  signal, through, step, layers
):
  assert_as_defined(model_of(signal=signal, step=step, through=through, layers=layers))


@pytest.mark.parametrize("step", ["constant", "predicted"])
def test_the_top_layer_can_be_recoded_alone(step):
  """By closed forms as by definition, and with the lower layer's states as without recoding."""
  model = model_of(signal="surprisal", step=step, layers=3, dropout=0.0, only_top=True)
  assert_as_defined(model)
  params = fresh(model)
  out, plain = (run(model, params, recode=recode) for recode in (True, False))
  for mine, other in zip(out.states[:-1], plain.states[:-1], strict=True):
    np.testing.assert_allclose(mine.h, other.h, rtol=1e-5, atol=1e-6)
  assert np.abs(out.states[-1].h - plain.states[-1].h).max() > 1e-3
  lower, top = out.steps["sizes"][:-1], out.steps["sizes"][-1]
  assert all(not leaf.any() for leaf in jax.tree.leaves(lower))
  assert np.all(np.asarray(top.h) > 0)
  names = {name for name in params if name.startswith("step_")}
  assert names == {name for name in names if name.startswith("step_0_")}


@pytest.mark.parametrize("signal", ["none", "surprisal", "weak_supervision"])
def test_a_large_batch_is_its_parts_in_value_and_every_gradient(signal):
  """On CPUs its steps have one product with words and states, those of its parts two."""
  model, rows = model_of(signal=signal, dropout=0.0), 18
  words = jax.random.randint(jax.random.key(6), (rows, TIME + 1), 0, VOCAB)
  assert lstm.in_steps(jnp.zeros((TIME, rows, 1)))
  assert not lstm.in_steps(jnp.zeros((TIME, rows // 2, 1)))

  def loss(params, words):
    out = apply(model, params, words[:, :-1], words[:, 1:])
    return jnp.mean(out.nll), (out.nll, out.states)

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, whole), gradients = run(fresh(model), words)
  found = [run(fresh(model), part) for part in jnp.split(words, 2)]
  parts = jax.tree.map(lambda *ones: jnp.concatenate(ones), *(one[0][1] for one in found))
  means = jax.tree.map(lambda *ones: sum(ones) / 2, *(one[1] for one in found))
  for a, b in zip(*map(jax.tree.leaves, ((whole, gradients), (parts, means))), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@functools.cache
def _scored(signal):
  """Among others the log-probabilities that the model is scored with at every place.

  And the slope of a prediction at place 1 by a shift of the word vectors read at each time step.
  """
  layers = 2 if signal in ("surprisal", "variational_rnn") else 1
  model = model_of(signal=signal, dropout=0.0, size=3.0, through=True, layers=layers)

  def prediction(shift, text):
    def embedded(next_function, args, kwargs, context):
      out = next_function(*args, **kwargs)
      if context.method_name != "_embedded":
        return out
      return out + jnp.tile(shift, (1, out.shape[1] // BATCH, 1))

    with nn.intercept_methods(embedded):
      out = apply(model, fresh(model), text[:, :-1], text[:, 1:], logits=True)
    return jnp.sum(out.hidden[:, 1] ** 2), out

  run = jax.jit(jax.grad(prediction, has_aux=True))
  return functools.partial(run, np.zeros((TIME, BATCH, 6), np.float32))


# What stands at place t is read at t and predicted at t - 1, as in text.
TEXT = np.random.default_rng(7).integers(0, VOCAB, (BATCH, TIME + 1))


@pytest.mark.parametrize("signal", SIGNALS)
def test_no_prediction_depends_on_its_own_target_or_a_later_token(signal):
  _, first = _scored(signal)(TEXT)
  for place in range(1, TIME + 1):
    changed = TEXT.copy()
    changed[:, place] = (TEXT[:, place] + 1) % VOCAB
    _, after = _scored(signal)(changed)
    np.testing.assert_array_equal(after.logits[:, :place], first.logits[:, :place])
  assert np.all(np.isfinite(first.nll))


@pytest.mark.parametrize("signal", SIGNALS)
def test_the_gradient_of_a_prediction_with_respect_to_later_input_is_exactly_zero(signal):
  gradient, _ = _scored(signal)(TEXT)
  assert np.any(gradient[:2] != 0)
  np.testing.assert_array_equal(gradient[2:], 0)


@pytest.mark.parametrize("signal", SIGNALS)
def test_recoding_with_steps_of_size_zero_is_the_plain_model(signal):
  """Under the same dropout, unless masks of copies take its place."""
  rng = None if signal in COPIED else jax.random.key(5)
  once = {"samples": 1, "rate": 0.0} if signal in (*COPIED, "ensemble") else {}
  model, plain = model_of(signal=signal, size=0.0, **once), model_of()
  params = fresh(model)
  params = {name: value for name, value in params.items() if name != "anchor"}
  anchor = {"anchor": jnp.zeros_like(params["decoder"])} if signal == "ensemble" else {}
  found, expected = _slopes(model)(params, anchor, rng), _slopes(plain)(params, {}, rng)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


@functools.cache
def _slopes(model):
  def loss(params, more, rng):
    out = apply(model, {**params, **more}, rng=rng)
    return jnp.mean(out.nll), (out.nll, out.states)

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_dropout_changes_the_plain_model():
  """Else agreement under the same dropout would mean nothing."""
  plain = model_of()
  with_it, without = (
    _slopes(plain)(fresh(plain), {}, rng)[0][1][0] for rng in (jax.random.key(5), None)
  )
  assert np.max(np.abs(with_it - without)) > 0.01


@pytest.mark.parametrize("signal", COPIED)
def test_masks_of_copies_take_the_place_of_dropout(signal):
  """Locked masks leave dropout on words alone, those of a variational RNN nothing."""
  model = model_of(signal=signal, size=0.0, dropout=0.9)
  params = fresh(model)
  one, other = (run(model, params, rng=jax.random.key(seed)).nll for seed in (5, 6))
  same = np.allclose(one, other, rtol=1e-6)
  assert same == (signal == "variational_rnn")


def test_a_variational_rnn_masks_words_inputs_and_recurrent_states(monkeypatch):
  """Of Gal and Ghahramani: four kinds of masks, each the same at all steps."""
  copies, rows = 2, 2 * BATCH
  model = model_of(signal="variational_rnn", samples=copies, size=0.0, dropout=0.0)
  params = fresh(model)
  drawn, words = [], np.random.default_rng(0).integers(0, 2, (rows, VOCAB)) / 0.5

  def factors(key, shape, rate):
    drawn.append(dropout_factors(key, shape, 0.5))
    return drawn[-1]

  def word_factors(key, tokens, owners, vocab, rate):
    return jnp.asarray(words, jnp.float32)[owners[None], tokens]

  monkeypatch.setattr(lstm_lm, "dropout_factors", factors)
  monkeypatch.setattr(lstm_lm, "word_factors", word_factors)

  @jax.jit
  def logits_and_masks(params):
    # Masks that a loop over steps drew could not leave it.
    return apply(model, params, logits=True).logits, drawn

  found, masks = jax.device_get(logits_and_masks(params))
  params = jax.device_get(params)
  read, between, first, decoded, second = masks
  assert read.shape == (rows, 6)
  tokens, owner = np.tile(TOKENS, (copies, 1)), np.arange(rows)
  h, c = np.zeros((2, 2, rows, DIM))
  expected = []
  for time in range(TIME):
    x = params["embedding"][tokens[:, time]] * words[owner, tokens[:, time]][:, None] * read
    for number, held in enumerate((first, second)):
      a = x @ params[f"input_{number}"] + (h[number] * held) @ params[f"recurrent_{number}"]
      i, f, g, o = np.split(np.asarray(a + params[f"bias_{number}"][None]), 4, axis=1)
      i, f, o = (1 / (1 + np.exp(-gate)) for gate in (i, f, o))
      c[number] = f * c[number] + i * np.tanh(g)
      h[number] = o * np.tanh(c[number])
      x = h[number] * (between, decoded)[number]
    logits = jax.nn.log_softmax(x @ params["decoder"][0].T + params["decoder_bias"][0][None])
    expected.append(np.log(np.mean(np.exp(logits).reshape(copies, BATCH, VOCAB), axis=0)))
  np.testing.assert_allclose(found, np.stack(expected, axis=1), rtol=1e-4, atol=1e-5)


def test_masks_on_words_are_the_same_wherever_a_word_is_read_again():
  words = jax.random.randint(jax.random.key(0), (40, 6), 0, VOCAB)
  owners = jnp.array([0, 1, 2, 3, 0, 1])
  keep = np.asarray(word_factors(jax.random.key(1), words, owners, VOCAB, 0.4))
  seen = {}
  for row, owner in enumerate(owners.tolist()):
    for word, factor in zip(np.asarray(words)[:, row].tolist(), keep[:, row].tolist(), strict=True):
      assert seen.setdefault((owner, word), factor) == factor
  values = np.array(list(seen.values()))
  assert set(np.round(values, 3)) == {0.0, 1.667}
  assert len({tuple(seen[o, w] for w in range(VOCAB)) for o in range(4)}) == 4
  many = word_factors(jax.random.key(1), jnp.arange(5000)[:, None], jnp.arange(4), 5000, 0.4)
  assert np.mean(many == 0) == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize("signal", SIGNALS)
def test_recoding_switched_off_is_the_plain_model_bit_for_bit(signal):
  model, plain = model_of(signal=signal, samples=1), model_of()
  params = fresh(model)
  off, expected = run(model, params, recode=False), run(plain, params)
  for a, b in zip(jax.tree.leaves(off.nll), jax.tree.leaves(expected.nll), strict=True):
    np.testing.assert_array_equal(a, b)


def test_reading_in_two_stretches_gives_what_reading_at_once_gives():
  model = model_of(signal="surprisal", dropout=0.0)
  params = fresh(model)
  whole = run(model, params)
  read, variables = jax.jit(model.apply), {"params": params}
  half = read(variables, TOKENS[:, :2], TARGETS[:, :2], model.initial_states(BATCH))
  rest = read(variables, TOKENS[:, 2:], TARGETS[:, 2:], half.states)
  np.testing.assert_allclose(jnp.concatenate([half.nll, rest.nll], axis=1), whole.nll, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(rest.states), jax.tree.leaves(whole.states), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_factors_on_the_step_sizes_limit_recoding_to_some_steps_and_examples():
  model = model_of(signal="nll", dropout=0.0)
  params = fresh(model)
  active = jnp.zeros((BATCH, TIME)).at[0, 1].set(1.0)
  some, none = run(model, params, active=active), run(model, params, recode=False)
  # Example 0 is as the plain model up to the step whose state was recoded; the others throughout.
  np.testing.assert_allclose(some.nll[1:], none.nll[1:], rtol=1e-6)
  np.testing.assert_allclose(some.nll[0, :2], none.nll[0, :2], rtol=1e-6)
  assert np.all(some.nll[0, 2:] != none.nll[0, 2:])


def test_a_small_step_against_the_likelihood_lowers_it_and_the_error_is_measured():
  model = model_of(signal="nll", dropout=0.0, size=0.01)
  steps = run(model, fresh(model), measure=True).steps
  assert np.all(steps["error_after"] < steps["error"])
  assert steps["sizes"][0].h.shape == (BATCH, TIME)
  np.testing.assert_allclose(steps["sizes"][1].c, 0.01, rtol=1e-6)


# Copies share a safe step whatever their masks.
@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy", "mc_dropout", "variational_rnn"])
def test_safe_steps_never_raise_the_error(signal):
  model = model_of(signal=signal, step="safe", size=100.0, dropout=0.0)
  steps = run(model, fresh(model), measure=True).steps
  assert np.all(steps["error_after"] <= steps["error"] + 1e-6)
  assert np.any(steps["error_after"] < steps["error"])


# Edits of what a step computes before it is recoded.
EDITS = {
  "layer_0/hidden": lambda h: jnp.tanh(1.5 * h),
  "layer_0/cell": lambda c: 0.5 * c,
  "layer_1/hidden": lambda h: h.at[..., :2].set(0.0) + 0.1,
}


def edited(model):
  edits = Intermediates(edits=EDITS)
  return jax.jit(lambda params: apply(model, params, measure=True, intermediates=edits))


# Of a token, of a label, and of a mean of samples, of decoders and of copies.
@pytest.mark.parametrize(
  "signal", ["surprisal", "weak_supervision", "mc_dropout", "ensemble", "variational_rnn"]
)
def test_recoding_under_an_edit_takes_the_gradient_of_the_edited_computation(signal):
  fast = model_of(signal=signal, size=3.0, dropout=0.0)
  recoding = dataclasses.replace(fast.config.recoding, implementation="definition")
  slow = LstmLM(dataclasses.replace(fast.config, recoding=recoding), VOCAB)
  params = fresh(fast)
  ours, theirs = (edited(model)(params) for model in (fast, slow))
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_recoding_under_an_edit_moves_a_state_by_the_slope_that_finite_differences_find():
  size, reach = 2.0, 1e-2
  model = model_of(signal="nll", size=size, dropout=0.0)
  params, unit, site = fresh(model), 3, "layer_0/hidden"

  @jax.jit
  def read(shift):
    edits = EDITS | {site: lambda h: EDITS[site](h + shift)}
    names = frozenset([site, f"{site}_recoded"])
    intermediates = Intermediates(capture=names, edits=edits)
    errors = apply(model, params, TOKENS[:, :1], TARGETS[:, :1], intermediates=intermediates).steps[
      "error"
    ]
    return errors[:, 0], intermediates.captured[f"{site}_recoded"] - intermediates.captured[site]

  way = jnp.zeros(DIM).at[unit].set(reach)[None, None]
  slope = (read(way)[0] - read(-way)[0]) / (2 * reach)
  moved = read(0 * way)[1][:, 0, unit]
  np.testing.assert_allclose(moved, -size * slope, rtol=1e-2, atol=1e-4)
  assert np.max(np.abs(slope)) > 1e-2


@pytest.mark.parametrize("signal", ["variational_rnn", "mc_dropout", "nll"])
def test_safe_steps_take_away_error_under_an_edit_too(signal):
  model = model_of(signal=signal, step="safe", size=100.0, dropout=0.0)
  steps = edited(model)(fresh(model)).steps
  assert np.all(steps["error_after"] <= steps["error"] + 1e-6)
  gained = np.mean(steps["error"] - steps["error_after"])
  free = run(model, fresh(model), measure=True).steps
  assert gained > 0.1 * np.mean(free["error"] - free["error_after"])


def test_several_inner_steps_lower_the_error_further():
  def after(steps):
    model = model_of(signal="nll", dropout=0.0, size=0.02, steps=steps)
    return run(model, fresh(model), measure=True).steps["error_after"][:, 0]

  assert np.all(after(3) < after(1))


def test_learned_and_predicted_sizes_start_where_they_are_told():
  for step in ("learned", "predicted"):
    model = model_of(signal="surprisal", step=step, size=5.0)
    steps = run(model, initial(model), measure=True).steps
    for size in jax.tree.leaves(steps["sizes"]):
      np.testing.assert_allclose(size, 5.0, rtol=1e-5)


def test_tied_embeddings_have_one_table():
  model = model_of(tied=True, signal="surprisal")
  params = fresh(model)
  assert "decoder" not in params
  assert np.all(np.isfinite(run(model, params).nll))
  with pytest.raises(UserError, match="embedding_dim"):
    LstmConfig(tied=True, dim=4, embedding_dim=5)
  with pytest.raises(UserError, match="ensemble"):
    LstmConfig(tied=True, recoding=RecodingConfig(signal="ensemble"))


def test_deferred_weight_gradients_are_those_of_the_plain_scan():
  keys = jax.random.split(jax.random.key(3), 5)
  inputs = jax.random.normal(keys[0], (TIME, BATCH, 4 * DIM))
  recurrent_weight = jax.random.normal(keys[1], (DIM, 4 * DIM)) / 2
  state = State(jax.random.normal(keys[2], (BATCH, DIM)), jax.random.normal(keys[3], (BATCH, DIM)))
  wanted = jax.random.normal(keys[4], (TIME, BATCH, DIM))

  def loss(scan):
    def one(inputs, weight, state):
      def step(product, bias, state, x):
        after = lstm.advance(lstm.gates(x + product("w", state.h) + bias[None]), state.c)
        return after, product("w", product("w", after.h), transposed=True) + after.h

      last, hidden = scan(step, {"w": weight}, jnp.ones(4 * DIM), state, inputs)
      return jnp.sum(hidden * wanted) + jnp.sum(last.c**2)

    return jax.jit(jax.value_and_grad(one, (0, 1, 2)))(inputs, recurrent_weight, state)

  found, expected = loss(deferred_scan.scan), loss(deferred_scan.plain)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("signal", "through", "layers"), [("surprisal", False, 2), ("entropy", True, 1)]
)
def test_second_derivatives_of_the_model_are_those_without_its_shortcuts(
  monkeypatch, signal, through, layers
):
  """Of a step of gradient descent on the weights, as meta-learning takes them."""
  model, traced = model_of(signal=signal, through=through, layers=layers), []
  params = fresh(model)

  def slopes(params):
    def loss(params):
      return jnp.mean(apply(model, params, rng=jax.random.key(5)).nll)

    def after_a_step(params):
      return loss(jax.tree.map(lambda x, g: x - 0.5 * g, params, jax.grad(loss)(params)))

    return jax.grad(after_a_step)(params)

  def plain(*given):
    traced.append(given)
    return deferred_scan.plain(*given)

  found = jax.jit(slopes)(params)
  monkeypatch.setattr(deferred_scan, "scan", plain)
  monkeypatch.setattr(LstmLM, "_known", lambda *_: None)
  expected = jax.jit(lambda params: slopes(params))(params)
  assert traced  # another program indeed
  for name, one in found.items():
    np.testing.assert_allclose(one, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_independent_decoders_have_the_gradients_of_decoders_that_are_trained_alone():
  """What is below them has the mean of all; losses are the same to the last bit."""
  signal = {"signal": "ensemble", "when": "test"}
  mean, own = (
    model_of(dropout=0.0, **signal, anchor=AnchorConfig(independent=on)) for on in (False, True)
  )
  single, params = model_of(dropout=0.0), fresh(mean)

  def gradients(model):
    def loss(params):
      return jnp.mean(apply(model, params, rng=jax.random.key(5), recode=False).nll)

    return jax.jit(jax.value_and_grad(loss))

  (first, shared), (second, found) = (gradients(model)(params) for model in (mean, own))
  of_one = gradients(single)
  assert first == second
  for member in range(3):
    one = {"decoder": params["decoder"][member, None]}
    one["decoder_bias"] = params["decoder_bias"][member, None]
    rest = {k: v for k, v in params.items() if k != "anchor"}
    _, alone = of_one(rest | one)
    for name in one:
      np.testing.assert_allclose(found[name][member], alone[name][0], rtol=1e-4, atol=1e-7)
      np.testing.assert_allclose(shared[name][member], alone[name][0] / 3, rtol=1e-4, atol=1e-7)
  for name in ("embedding", "recurrent_0", "input_1"):
    np.testing.assert_array_equal(found[name], shared[name])
