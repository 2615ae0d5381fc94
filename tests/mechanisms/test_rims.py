"""Recurrent independent mechanisms, against a loop over modules, written from the equations."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run, zero_units
from compmod_jax.layers.cell import Cell
from compmod_jax.layers.context import Context
from compmod_jax.mechanisms.rims import RimConfig, RIMState, least_null

BATCH, TIME, EMBED = 3, 5, 7
TINY = RimConfig(modules=4, active=2, dim=5, input_key_dim=6, heads=2, head_dim=3, dropout=0.0)
VARIANTS = {
  "lstm": TINY,
  "gru": dataclasses.replace(TINY, kind="gru"),
  "several heads, few sources": dataclasses.replace(
    TINY, input_heads=2, input_value_dim=4, sources=2
  ),
}


def softmax(scores):
  powers = np.exp(scores - scores.max())
  return powers / powers.sum()


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def reference(c, p, rows, h, c_state):
  """One step of one example, module by module; rows [n, embed], states [modules, dim]."""
  x = np.concatenate([np.zeros((1, rows.shape[1])), rows])
  inputs, null = [], []
  for k in range(c.modules):
    parts, nulls = [], []
    for head in range(c.input_heads):
      at = slice(head * c.input_key_dim, (head + 1) * c.input_key_dim)
      keys = x @ p["input_key"][:, at]
      query = h[k] @ p["input_query"][k][:, at]
      weights = softmax(keys @ query / np.sqrt(c.input_key_dim))
      values = x @ p["input_value"][:, head * c.value_dim : (head + 1) * c.value_dim]
      parts.append(weights @ values)
      nulls.append(weights[0])
    inputs.append(np.concatenate(parts))
    null.append(np.mean(nulls))
  active = sorted(np.argsort(null, kind="stable")[: c.active].tolist())
  h, c_state = h.copy(), None if c_state is None else c_state.copy()
  for k in active:
    a, u = inputs[k] @ p["input"][k] + p["bias"][k], h[k] @ p["recurrent"][k]
    if c.kind == "lstm":
      i, f, g, o = np.split(a + u, 4)
      c_state[k] = sigmoid(f) * c_state[k] + sigmoid(i) * np.tanh(g)
      h[k] = sigmoid(o) * np.tanh(c_state[k])
    else:
      (ar, az, an), (ur, uz, un) = np.split(a, 3), np.split(u, 3)
      n = np.tanh(an + sigmoid(ar + ur) * (un + p["candidate_bias"][k]))
      h[k] = (1 - sigmoid(az + uz)) * n + sigmoid(az + uz) * h[k]
  after = h.copy()
  for k in active:
    read = []
    for head in range(c.heads):
      at = slice(head * c.head_dim, (head + 1) * c.head_dim)
      scores = np.array([
        (h[k] @ p["query"][k][:, at]) @ (h[j] @ p["key"][j][:, at]) for j in range(c.modules)
      ]) / np.sqrt(c.head_dim)  # fmt: skip
      if c.sources:
        scores[np.argsort(-scores)[c.sources :]] = -np.inf
      weights = softmax(scores)
      read.append(sum(weights[j] * (h[j] @ p["value"][j][:, at]) for j in range(c.modules)))
    after[k] = h[k] + np.concatenate(read) @ p["output"][k]
  return after, c_state, active, np.array(null)


def make(config, rows=()):
  cell, rng = config.build(EMBED), np.random.default_rng(0)

  def drawn(shapes, spread=1.0):
    return jax.tree.map(
      lambda leaf: jnp.asarray(np.float32(rng.normal(0, spread, leaf.shape))), nn.unbox(shapes)
    )

  state = drawn(jax.eval_shape(lambda: cell.initial_state(BATCH)))
  x = drawn(jax.ShapeDtypeStruct((BATCH, TIME, *rows, EMBED), jnp.float32))
  shapes = jax.eval_shape(lambda x: cell.init(jax.random.key(2), x[:, 0], state), x)
  return cell, drawn(shapes, 0.5), x, state


def called(cell, **how):
  """What `run` gives of a cell, compiled; `ctx` is a plain context unless one is given."""
  return jax.jit(functools.partial(run, cell.apply, **{"ctx": Context()} | how))


@pytest.mark.parametrize("rows", [(), (3,)])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_sequence_is_that_of_a_loop_over_modules(name, rows):
  config = VARIANTS[name]
  cell, params, x, state = make(config, rows)
  unroll = called(cell, capture=["active", "null"], method="unroll")
  (out, last), found = jax.device_get(unroll(params, x, state))
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
  for row in range(BATCH):
    h = np.asarray(state.h[row], np.float64)
    c = None if state.c is None else np.asarray(state.c[row], np.float64)
    for time in range(TIME):
      read = np.asarray(x[row, time], np.float64).reshape(-1, EMBED)
      h, c, active, null = reference(config, p, read, h, c)
      np.testing.assert_allclose(out[row, time], h.reshape(-1), atol=2e-5)
      np.testing.assert_allclose(found["null"][row, time], null, atol=2e-5)
      assert np.flatnonzero(found["active"][row, time]).tolist() == active
    np.testing.assert_allclose(last.h[row], h, atol=2e-5)
    if c is not None:
      np.testing.assert_allclose(last.c[row], c, atol=2e-5)


CELL, PARAMS, X, STATE = make(TINY)
FIRST = np.asarray(X[:, 0])
STEP = functools.partial(called(CELL, capture=None), PARAMS, FIRST)


def test_it_meets_the_contract_of_cells():
  assert isinstance(CELL, Cell)
  state = jax.device_get(CELL.initial_state(BATCH))
  assert not any(leaf.any() for leaf in state)
  assert state.h.shape == state.c.shape == (BATCH, TINY.modules, TINY.dim)
  (y, after), _ = jax.device_get(STEP(state))
  assert y.shape == (BATCH, TINY.units)
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
  np.testing.assert_array_equal(y, after.h.reshape(BATCH, -1))


def test_inactive_modules_keep_their_states_bit_for_bit():
  (_, after), found = STEP(STATE)
  off = np.asarray(found["active"]) == 0
  assert off.sum() == BATCH * (TINY.modules - TINY.active)
  for new, old in zip(after, STATE, strict=True):
    np.testing.assert_array_equal(np.asarray(new)[off], np.asarray(old)[off])
    assert (np.asarray(new)[~off] != np.asarray(old)[~off]).all()


def test_gradients_pass_through_kept_states_unchanged_and_from_readers():
  """Of the states of inactive modules after a step: 1 by themselves, 0 by all others."""
  (_, _), found = STEP(STATE)
  off = (1 - np.asarray(found["active"]))[..., None]

  def kept(h, mine):
    _, after = CELL.apply(PARAMS, jnp.asarray(FIRST), RIMState(h, STATE.c))
    return jnp.sum(after.h * (off if mine else 1 - off))

  own, of_readers = jax.jit(lambda h: (jax.grad(kept)(h, True), jax.grad(kept)(h, False)))(STATE.h)
  np.testing.assert_array_equal(own, np.broadcast_to(off, own.shape))
  # Active modules read the kept states as keys and values.
  assert (np.asarray(of_readers)[off[..., 0] > 0] != 0).all()


def test_where_all_are_active_the_attention_to_zeros_decides_nothing():
  dense = dataclasses.replace(TINY, active=TINY.modules).build(EMBED)
  out, found = called(dense, capture=["active"])(PARAMS, FIRST, STATE)
  edits = {"null": lambda null: jnp.flip(null, axis=1) + 3}
  other, _ = called(dense, edits=edits)(PARAMS, FIRST, STATE)
  assert np.asarray(found["active"]).all()
  jax.tree.map(np.testing.assert_array_equal, out, other)
  # One that lets all be active by an edit is the same.
  edits = {"active": jnp.ones_like}
  other, _ = called(CELL, edits=edits)(PARAMS, FIRST, STATE)
  jax.tree.map(np.testing.assert_array_equal, out, other)


def test_steps_give_what_a_whole_sequence_gives_forward_and_backward():
  def steps(params, x, state):
    ys = []
    for t in range(x.shape[1]):
      y, state = CELL.apply(params, x[:, t], state)
      ys.append(y)
    return jnp.stack(ys, axis=1), state

  def whole(params, x, state):
    return CELL.apply(params, x, state, method="unroll")

  def loss(function):
    def value(*args):
      y, state = function(*args)
      return jnp.sum(jnp.cos(y)) + jnp.sum(state.c * state.h), (y, state)

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))

  one, other = (jax.tree.leaves(loss(f)(PARAMS, X[:, :3], STATE)) for f in (steps, whole))
  for mine, theirs in zip(one, other, strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


def test_the_intermediates_of_a_sequence_are_those_of_its_steps():
  _, found = jax.device_get(called(CELL, method="unroll", capture=None)(PARAMS, X, STATE))
  _, first = jax.device_get(STEP(STATE))
  names = {"attention", "null", "active", "router/weights", "router/signatures", "stepped", "cell"}
  assert found.keys() == first.keys() == names | {"communication", "output"}
  for name in names | {"communication", "output"}:
    one = found[name] if name == "router/signatures" else found[name][:, 0]
    np.testing.assert_allclose(one, first[name], atol=1e-6, err_msg=name)
  np.testing.assert_allclose(found["attention"].sum(-1), 1, atol=1e-6)
  np.testing.assert_allclose(found["communication"].sum(-1), 1, atol=1e-6)
  weights = found["router/weights"]
  np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
  np.testing.assert_array_equal(weights > 0, found["active"] > 0)


def test_a_module_that_an_edit_silences_keeps_its_state_through_a_sequence():
  silenced = called(CELL, method="unroll", edits={"active": zero_units(1)})
  (_, last), _ = silenced(PARAMS, X, STATE)
  for mine, before in zip(last, STATE, strict=True):
    np.testing.assert_array_equal(np.asarray(mine)[:, 1], np.asarray(before)[:, 1])


def test_ties_go_to_the_lower_module():
  null = jnp.asarray([[0.5, 0.2], [0.5, 0.2], [0.1, 0.2]])
  found = np.asarray(jax.jit(least_null, static_argnums=1)(null, 2))
  assert found.T.tolist() == [[True, False, True], [True, True, False]]


def test_dropout_is_of_training_alone_and_of_what_is_read_alone():
  cell = dataclasses.replace(TINY, dropout=0.5).build(EMBED)
  given = {"method": "unroll", "capture": ["stepped", "output", "active"]}
  random = given | {"ctx": Context(deterministic=False)}
  key = jax.random.key(5)

  @jax.jit
  def outputs(*args):
    (plain, _), _ = run(CELL.apply, *args, ctx=Context(), **given)
    (same, _), _ = run(cell.apply, *args, ctx=Context(), **given)
    (out, _), found = run(cell.apply, *args, rng=key, **random)
    (named, _), _ = run(cell.apply, *args, rngs={"dropout": key}, **random)
    return plain, same, out, found, named

  plain, same, out, found, named = jax.device_get(outputs(PARAMS, X, STATE))
  np.testing.assert_array_equal(plain, same)
  assert (out != plain).any()
  read = (found["output"] - found["stepped"])[found["active"] > 0]
  assert 0.3 < np.mean(read == 0) < 0.7
  assert (named != plain).any()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"active": 7}, "cell.active is 7, but cell.modules is 6"),
    ({"modules": 0}, "cell.modules is 0; it must be at least 1"),
    ({"sources": 7}, "cell.sources is 7; it must be between 1 and cell.modules = 6"),
    ({"dropout": 1.0}, "cell.dropout is 1.0"),
    ({"input_value_dim": -1}, "cell.input_value_dim is -1"),
  ],
)
def test_what_cannot_be_is_an_error_that_names_field_and_value(fields, message):
  with pytest.raises(UserError, match=message):
    RimConfig(**fields)
