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
X = jax.random.normal(jax.random.key(0), (BATCH, TIME, EMBED))
CELLS = {"network": PlasticCell, "lstm": PlasticLSTMCell}


@functools.cache
def made(kind, rule, per_unit=True):
  """A cell, and parameters so large that traces reach the bounds of their values."""
  cell = PlasticConfig(kind, DIM, rule, per_unit=per_unit).build(EMBED)
  assert isinstance(cell, CELLS[kind])
  fresh = nn.unbox(cell.init(jax.random.key(0), X[:, 0], cell.initial_state(BATCH)))
  rng = np.random.default_rng(1)
  params = jax.tree.map(lambda leaf: jnp.float32(rng.normal(0, 1.6, jnp.shape(leaf))), fresh)
  params["params"]["recurrent"]["rate"] = jnp.float32(0.9)
  return cell, params


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
  state = cell.initial_state(BATCH)
  for t in range(TIME):
    y, state = cell.apply(params, X[:, t], state)
    np.testing.assert_allclose(y, outputs[t], atol=5e-5)
    np.testing.assert_allclose(state.traces.hebbian, traces[t], atol=5e-5)


def test_the_modulation_of_all_units_may_be_one_number():
  cell, params = made("network", "simple", per_unit=False)
  assert "per_unit" not in params["params"]["recurrent"]
  outputs, _ = by_hand("network", "simple", params, per_unit=False)
  found, _ = cell.apply(params, X, cell.initial_state(BATCH), method="unroll")
  np.testing.assert_allclose(found.swapaxes(0, 1), outputs, atol=5e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", CELLS)
def test_a_whole_sequence_is_its_steps(kind, rule):
  cell, params = made(kind, rule)
  state = cell.initial_state(BATCH)
  unroll = jax.jit(functools.partial(cell.apply, method="unroll"))
  found, last = unroll(params, X, state)
  for t in range(TIME):
    y, state = cell.apply(params, X[:, t], state)
    np.testing.assert_allclose(y, found[:, t], atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, last)
  assert isinstance(cell, Cell)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", CELLS)
def test_gradients_pass_through_the_traces(kind, rule):
  """Finite differences in float64, in a direction of all parameters."""
  cell, params = made(kind, rule)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64) / 3, params)
    rng = np.random.default_rng(2)
    way = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), wide)
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), cell.initial_state(BATCH))
    weights, x = jnp.asarray(rng.normal(size=(BATCH, TIME, DIM))), jnp.asarray(X, jnp.float64)

    @jax.jit
    def loss(step):
      at = jax.tree.map(lambda leaf, one: leaf + step * one, wide, way)
      return jnp.sum(weights * cell.apply(at, x, state, method="unroll")[0])

    slope = jax.grad(loss)(0.0)
    size = 1e-6
    np.testing.assert_allclose((loss(size) - loss(-size)) / (2 * size), slope, rtol=1e-6)


@pytest.mark.parametrize("kind", CELLS)
def test_without_plasticity_coefficients_traces_change_nothing(kind):
  cell, params = made(kind, "retroactive")
  inner = dict(params["params"]["recurrent"], alpha=jnp.zeros((DIM, DIM)))
  still = {"params": dict(params["params"], recurrent=inner)}
  state = cell.initial_state(BATCH)
  full = state._replace(traces=jax.tree.map(jnp.ones_like, state.traces))
  one, _ = cell.apply(still, X, state, method="unroll")
  two, _ = cell.apply(still, X, full, method="unroll")
  np.testing.assert_array_equal(one, two)


def test_modulation_and_traces_are_read_and_edited_by_name():
  cell, params = made("network", "simple")
  state = cell.initial_state(BATCH)
  names = ("output", "recurrent/hebbian", "recurrent/modulation")
  (y, after), found = intermediates.run(
    cell.apply, params, X[:, 0], state, ctx=Context(), capture=names
  )
  assert set(found) == set(names)
  np.testing.assert_array_equal(found["output"], y)
  np.testing.assert_array_equal(found["recurrent/hebbian"], after.traces.hebbian)
  after = after._replace(h=y)
  edits = {"recurrent/modulation": jnp.zeros_like}
  (_, off), _ = intermediates.run(cell.apply, params, X[:, 1], after, ctx=Context(), edits=edits)
  np.testing.assert_array_equal(off.traces.hebbian, after.traces.hebbian)


def test_sequences_of_a_batch_have_traces_of_their_own():
  cell, params = made("lstm", "retroactive")
  whole, _ = cell.apply(params, X, cell.initial_state(BATCH), method="unroll")
  alone, _ = cell.apply(params, X[1:2], cell.initial_state(1), method="unroll")
  np.testing.assert_allclose(alone[0], whole[1], atol=1e-5)


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
  traces = Traces(jnp.zeros((1, 2, 2)), jnp.zeros((1, 2, 2)))
  ones, rate = jnp.ones((1, 2)), jnp.float32(0.1)
  with pytest.raises(UserError, match="needs a modulation"):
    changed_traces(traces, ones, ones, rule="simple", rate=rate)
  with pytest.raises(UserError, match="takes no modulation"):
    changed_traces(traces, ones, ones, rule="hebbian", rate=rate, modulation=ones)
