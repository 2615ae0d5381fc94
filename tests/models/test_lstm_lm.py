"""The recurrent language model: recoding by closed forms, no leak, states, identity."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.errors import UserError
from compmod_jax.layers import deferred, recurrent
from compmod_jax.layers.recurrent import State
from compmod_jax.mechanisms.recoding_config import RecodingConfig
from compmod_jax.models.lstm_lm import Given, LstmConfig, LstmLM
from compmod_jax.sites import Taps

BATCH, TIME, VOCAB, DIM = 3, 4, 11, 5
SIGNALS = (
  "surprisal", "argmax", "nll", "entropy", "mc_dropout", "variational", "ensemble",
  "weak_supervision",
)  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(1), (BATCH, TIME), 0, VOCAB)
TARGETS = jax.random.randint(jax.random.key(2), (BATCH, TIME), 0, VOCAB)
CLASSIFIER = {"weight": jnp.linspace(-1, 1, DIM), "bias": jnp.float32(0.3)}


def model_of(*, dropout=0.2, tied=False, **recoding):
  width = DIM if tied else 6
  config = LstmConfig(
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
def fresh(model):
  states = model.initial_states(BATCH)
  init = functools.partial(model.init, recode=False)
  variables = jax.jit(init)(jax.random.key(0), TOKENS, TARGETS, states)
  return jax.tree.map(lambda leaf: 3 * leaf, nn.unbox(variables)["params"])


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
    out = run(model, params, rng=jax.random.key(5), measure=True)
    return jnp.mean(out.nll) + 0.1 * jnp.sum(out.states[0].c ** 2), out

  (value, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  return value, out.nll, out.states, out.steps["error"], out.steps["error_after"], grads


STEPS = ("constant", "learned", "predicted")
CASES = [
  (signal, through, STEPS[(number + through) % 3])
  for number, signal in enumerate(SIGNALS)
  for through in (False, True)
]


@pytest.mark.parametrize(("signal", "through", "step"), CASES)
def test_closed_forms_agree_with_the_definition_in_value_and_every_gradient(signal, through, step):
  fast = model_of(signal=signal, step=step, through=through)
  recoding = dataclasses.replace(fast.config.recoding, implementation="definition")
  slow = LstmLM(dataclasses.replace(fast.config, recoding=recoding), VOCAB)
  params = fresh(fast)
  ours, theirs = losses_and_gradients(fast, params), losses_and_gradients(slow, params)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(b))) + 1e-8)


@pytest.mark.parametrize("signal", SIGNALS)
def test_no_prediction_depends_on_its_own_target_or_a_later_token(signal):
  model = model_of(signal=signal, dropout=0.0, size=3.0)
  params = fresh(model)
  # What stands at place t is read at t and predicted at t - 1, as in text.
  text = jax.random.randint(jax.random.key(7), (BATCH, TIME + 1), 0, VOCAB)
  first = run(model, params, text[:, :-1], text[:, 1:])
  logits = _distributions(model, params, text)
  for place in range(1, TIME + 1):
    changed = text.at[:, place].set((text[:, place] + 1) % VOCAB)
    after = _distributions(model, params, changed)
    np.testing.assert_array_equal(after[:, :place], logits[:, :place])
  assert np.all(np.isfinite(first.nll))


def _distributions(model, params, text):
  """Log-probabilities that the model is scored with at every place, [batch, time, vocab]."""
  return run(model, params, text[:, :-1], text[:, 1:], logits=True).logits


@pytest.mark.parametrize("signal", SIGNALS)
def test_the_gradient_of_a_prediction_with_respect_to_later_input_is_exactly_zero(signal):
  model = model_of(signal=signal, dropout=0.0, size=3.0, through=True)
  params = fresh(model)
  place = 1

  def prediction(shift):
    # A shift of the word vectors that are read at each time step.
    def embedded(next_function, args, kwargs, context):
      out = next_function(*args, **kwargs)
      return out + shift if context.method_name == "_embedded" else out

    with nn.intercept_methods(embedded):
      return jnp.sum(apply(model, params).hidden[:, place] ** 2)

  gradient = jax.jit(jax.grad(prediction))(jnp.zeros((TIME, BATCH, 6)))
  assert np.any(gradient[: place + 1] != 0)
  np.testing.assert_array_equal(gradient[place + 1 :], 0)


@pytest.mark.parametrize("signal", SIGNALS)
def test_recoding_with_steps_of_size_zero_is_the_plain_model(signal):
  model, plain = model_of(signal=signal, size=0.0), model_of()
  if signal in ("variational", "ensemble"):
    model = model_of(signal=signal, size=0.0, samples=1, rate=0.0)
  params = fresh(model)
  params = {name: value for name, value in params.items() if name != "anchor"}
  found, expected = _plain_and(model, params), _plain_and(plain, params)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


def _plain_and(model, params):
  anchor = {"anchor": jnp.zeros_like(params["decoder"])}
  more = anchor if model.config.recoding.signal == "ensemble" else {}

  def loss(params):
    out = run(model, {**params, **more})
    return jnp.mean(out.nll), out.states

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


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
  half = model.apply({"params": params}, TOKENS[:, :2], TARGETS[:, :2], model.initial_states(BATCH))
  rest = model.apply({"params": params}, TOKENS[:, 2:], TARGETS[:, 2:], half.states)
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


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy", "mc_dropout", "variational"])
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


@pytest.mark.parametrize("signal", SIGNALS)
def test_recoding_under_an_edit_takes_the_gradient_of_the_edited_computation(signal):
  fast = model_of(signal=signal, size=3.0, dropout=0.0)
  recoding = dataclasses.replace(fast.config.recoding, implementation="definition")
  slow = LstmLM(dataclasses.replace(fast.config, recoding=recoding), VOCAB)
  params = fresh(fast)
  ours, theirs = (
    apply(model, params, measure=True, taps=Taps(edits=EDITS)) for model in (fast, slow)
  )
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_recoding_under_an_edit_moves_a_state_by_the_slope_that_finite_differences_find():
  size, reach = 2.0, 1e-2
  model = model_of(signal="nll", size=size, dropout=0.0)
  params, unit, site = fresh(model), 3, "layer_0/hidden"

  def read(shift):
    edits = EDITS | {site: lambda h: EDITS[site](h + shift)}
    names = frozenset([site, f"{site}_recoded"])
    taps = Taps(capture=names, edits=edits)
    errors = apply(model, params, TOKENS[:, :1], TARGETS[:, :1], taps=taps).steps["error"]
    return errors[:, 0], taps.captured[f"{site}_recoded"] - taps.captured[site]

  way = jnp.zeros(DIM).at[unit].set(reach)[None, None]
  slope = (read(way)[0] - read(-way)[0]) / (2 * reach)
  moved = read(0 * way)[1][:, 0, unit]
  np.testing.assert_allclose(moved, -size * slope, rtol=1e-2, atol=1e-4)
  assert np.max(np.abs(slope)) > 1e-2


@pytest.mark.parametrize("signal", ["variational", "mc_dropout", "nll"])
def test_safe_steps_take_away_error_under_an_edit_too(signal):
  model = model_of(signal=signal, step="safe", size=100.0, dropout=0.0)
  steps = apply(model, fresh(model), measure=True, taps=Taps(edits=EDITS)).steps
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
    states = model.initial_states(BATCH)
    variables = model.init(jax.random.key(0), TOKENS, TARGETS, states)
    steps = run(model, nn.unbox(variables)["params"], measure=True).steps
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
        after = recurrent.advance(recurrent.gates(x + product("w", state.h) + bias[None]), state.c)
        return after, product("w", product("w", after.h), transposed=True) + after.h

      last, hidden = scan(step, {"w": weight}, jnp.ones(4 * DIM), state, inputs)
      return jnp.sum(hidden * wanted) + jnp.sum(last.c**2)

    return jax.jit(jax.value_and_grad(one, (0, 1, 2)))(inputs, recurrent_weight, state)

  found, expected = loss(deferred.scan), loss(deferred.plain)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("signal", "through"), [("surprisal", False), ("entropy", True)])
def test_second_derivatives_of_the_model_are_those_without_its_shortcuts(
  monkeypatch, signal, through
):
  """Of a step of gradient descent on the weights, as meta-learning takes them."""
  model = model_of(signal=signal, through=through)
  params = fresh(model)

  def after_a_step(params):
    def loss(params):
      return jnp.mean(apply(model, params, rng=jax.random.key(5)).nll)

    return loss(jax.tree.map(lambda x, g: x - 0.5 * g, params, jax.grad(loss)(params)))

  found = jax.jit(jax.grad(after_a_step))(params)
  monkeypatch.setattr(deferred, "scan", deferred.plain)
  monkeypatch.setattr(LstmLM, "_known", lambda *_: None)
  jax.clear_caches()
  expected = jax.jit(jax.grad(after_a_step))(params)
  for name, one, other in zip(
    params, jax.tree.leaves(found), jax.tree.leaves(expected), strict=False
  ):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)
