"""Plastic cells make the steps of the published equations, and gradients pass through traces."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core import intermediates
from compmod_jax.core.errors import UserError
from compmod_jax.layers.cell import Cell
from compmod_jax.layers.context import Context
from compmod_jax.mechanisms.plasticity import (
  RULES,
  PlasticCell,
  PlasticConfig,
  PlasticLSTMCell,
  Traces,
  changed_traces,
)

BATCH, TIME, EMBED, DIM = 3, 6, 4, 5
X = np.random.default_rng(0).normal(size=(BATCH, TIME, EMBED)).astype(np.float32)
CELLS = {"network": PlasticCell, "lstm": PlasticLSTMCell}


@functools.cache
def made(kind, rule, per_unit=True):
  """A cell, and parameters so large that traces reach the bounds of their values."""
  cell = PlasticConfig(kind, DIM, rule, per_unit=per_unit).build(EMBED)
  assert isinstance(cell, CELLS[kind])
  fresh = nn.unbox(jax.eval_shape(cell.init, jax.random.key(0), X[:, 0], start(cell)))
  rng = np.random.default_rng(1)
  params = jax.tree.map(lambda leaf: np.float32(rng.normal(0, 1.6, leaf.shape)), fresh)
  params["params"]["recurrent"]["rate"] = np.float32(0.9)
  return cell, params


@functools.cache
def start(cell, batch=BATCH):
  """The state before the first step."""
  return jax.device_get(jax.jit(lambda: cell.initial_state(batch))())


@functools.cache
def compiled(kind, rule, per_unit=True, **options):
  """The cell's step or, by its method, whole sequences."""
  return jax.jit(functools.partial(made(kind, rule, per_unit)[0].apply, **options))


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def by_hand(kind, rule, params, per_unit=True):
  """Outputs and Hebbian traces of all steps, [time, batch, ...], connection by connection."""
  p = jax.tree.map(np.asarray, params["params"])
  r = p["recurrent"]
  outputs, traces = np.zeros((TIME, BATCH, DIM)), np.zeros((TIME, BATCH, DIM, DIM))
  for n in range(BATCH):
    h, c, hebb, eligible = np.zeros(DIM), np.zeros(DIM), np.zeros((DIM, DIM)), np.zeros((DIM, DIM))
    for t in range(TIME):
      given = np.asarray(X[n, t]) @ p["input"] + p["bias"]
      linear = given[-DIM:].copy()
      for i in range(DIM):
        for j in range(DIM):
          linear[i] += (r["weights"][j, i] + r["alpha"][j, i] * hebb[j, i]) * h[j]
      post = np.tanh(linear)
      if kind == "lstm":
        i_gate, f_gate, o_gate = np.split(sigmoid(given[:-DIM] + h @ p["gates"]), 3)
        c = f_gate * c + i_gate * post
        new = o_gate * np.tanh(c)
      else:
        new = post
      modulation = np.full(DIM, np.nan)
      if rule != "hebbian":
        modulation = np.tanh(new @ r["modulator"][:, 0] + r["modulator_bias"])
        modulation = modulation * (r["per_unit"] if per_unit else np.ones(DIM))
      for i in range(DIM):
        for j in range(DIM):
          product, old = h[j] * post[i], eligible[j, i]
          eligible[j, i] = (1 - r["rate"]) * old + r["rate"] * product
          change = {
            "hebbian": r["rate"] * product,
            "simple": modulation[i] * product,
            "retroactive": modulation[i] * old,
          }[rule]
          hebb[j, i] = min(max(hebb[j, i] + change, -1), 1)
      h = new
      outputs[t, n], traces[t, n] = h, hebb
  return outputs, traces


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", CELLS)
def test_steps_are_those_of_the_equations(kind, rule):
  cell, params = made(kind, rule)
  outputs, traces = by_hand(kind, rule, params)
  assert np.max(np.abs(traces)) == 1, "no trace was ever clipped"
  step, state = compiled(kind, rule), start(cell)
  for t in range(TIME):
    y, state = step(params, X[:, t], state)
    np.testing.assert_allclose(y, outputs[t], atol=5e-5)
    np.testing.assert_allclose(state.traces.hebbian, traces[t], atol=5e-5)


def test_the_modulation_of_all_units_may_be_one_number():
  cell, params = made("network", "simple", per_unit=False)
  assert "per_unit" not in params["params"]["recurrent"]
  outputs, _ = by_hand("network", "simple", params, per_unit=False)
  unroll = compiled("network", "simple", per_unit=False, method="unroll")
  found, _ = unroll(params, X, start(cell))
  np.testing.assert_allclose(np.swapaxes(found, 0, 1), outputs, atol=5e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", CELLS)
def test_a_whole_sequence_is_its_steps(kind, rule):
  cell, params = made(kind, rule)
  step, state = compiled(kind, rule), start(cell)
  found, last = jax.device_get(compiled(kind, rule, method="unroll")(params, X, state))
  for t in range(TIME):
    y, state = step(params, X[:, t], state)
    np.testing.assert_allclose(y, found[:, t], atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, last)
  assert isinstance(cell, Cell)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", CELLS)
def test_gradients_pass_through_the_traces(kind, rule):
  """Finite differences in float64, in a direction of all parameters."""
  cell, params = made(kind, rule)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) / 3, params)
    rng = np.random.default_rng(2)
    way = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), wide)
    state = jax.tree.map(lambda leaf: leaf.astype(np.float64), start(cell))
    weights, x = rng.normal(size=(BATCH, TIME, DIM)), X.astype(np.float64)

    @jax.jit
    @jax.value_and_grad
    def loss(step, x, state):
      at = jax.tree.map(lambda leaf, one: leaf + step * one, wide, way)
      return jnp.sum(weights * cell.apply(at, x, state, method="unroll")[0])

    size = 1e-6
    slope = loss(0.0, x, state)[1]
    ahead, behind = (float(loss(step, x, state)[0]) for step in (size, -size))
    np.testing.assert_allclose((ahead - behind) / (2 * size), slope, rtol=1e-6)


@pytest.mark.parametrize("kind", CELLS)
def test_without_plasticity_coefficients_traces_change_nothing(kind):
  cell, params = made(kind, "retroactive")
  inner = dict(params["params"]["recurrent"], alpha=np.zeros((DIM, DIM), np.float32))
  still = {"params": dict(params["params"], recurrent=inner)}
  unroll, state = compiled(kind, "retroactive", method="unroll"), start(cell)
  full = state._replace(traces=jax.tree.map(np.ones_like, state.traces))
  one, _ = unroll(still, X, state)
  two, _ = unroll(still, X, full)
  np.testing.assert_array_equal(one, two)


def test_modulation_and_traces_are_read_and_edited_by_name():
  cell, params = made("network", "simple")
  names = ("output", "recurrent/hebbian", "recurrent/modulation")

  def called(x, state, **asked):
    step = functools.partial(intermediates.run, cell.apply, ctx=Context(), **asked)
    return jax.jit(step)(params, x, state)

  (y, after), found = called(X[:, 0], start(cell), capture=names)
  assert set(found) == set(names)
  np.testing.assert_array_equal(found["output"], y)
  np.testing.assert_array_equal(found["recurrent/hebbian"], after.traces.hebbian)
  after = after._replace(h=y)
  edits = {"recurrent/modulation": jnp.zeros_like}
  (_, off), _ = called(X[:, 1], after, edits=edits)
  np.testing.assert_array_equal(off.traces.hebbian, after.traces.hebbian)


def test_sequences_of_a_batch_have_traces_of_their_own():
  cell, params = made("lstm", "retroactive")
  unroll = compiled("lstm", "retroactive", method="unroll")
  whole, alone = (unroll(params, x, start(cell, len(x)))[0] for x in (X, X[1:2]))
  np.testing.assert_allclose(np.asarray(alone)[0], np.asarray(whole)[1], atol=1e-5)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"rate": 0.0}, "cell.rate is 0.0"),
    ({"alpha": -1.0}, "cell.alpha is -1.0"),
  ],
)
def test_what_cannot_be_is_refused(options, words):
  with pytest.raises(UserError, match=words):
    PlasticConfig(**options)


def test_a_rule_with_modulation_needs_one():
  zeros, ones = jnp.asarray(np.zeros((1, 2, 2), np.float32)), jnp.asarray([[1.0, 1.0]])
  traces, rate = Traces(zeros, zeros), jnp.asarray(np.float32(0.1))
  with pytest.raises(UserError, match="needs a modulation"):
    changed_traces(traces, ones, ones, rule="simple", rate=rate)
  with pytest.raises(UserError, match="takes no modulation"):
    changed_traces(traces, ones, ones, rule="hebbian", rate=rate, modulation=ones)
