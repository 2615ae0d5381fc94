"""The LSTM cell: one step, many, edits, and what recoding adds to its state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.intermediates import run
from compmod_jax.layers import lstm
from compmod_jax.layers.cell import Cell
from compmod_jax.layers.context import Context
from compmod_jax.layers.lstm import LSTMCell, State

BATCH, TIME, EMBED, DIM = 3, 5, 4, 6
CELL = LSTMCell(EMBED, DIM)
X = jax.random.normal(jax.random.key(0), (BATCH, TIME, EMBED))
PARAMS = nn.unbox(CELL.init(jax.random.key(1), X[:, 0], CELL.initial_state(BATCH)))
STATE = State(*jax.random.normal(jax.random.key(2), (2, BATCH, DIM)))


def test_a_step_is_the_equation_of_gers_et_al():
  """Written out with NumPy, gate by gate."""
  w, u, b = (np.asarray(PARAMS["params"][name]) for name in ("input", "recurrent", "bias"))
  a = np.asarray(X[:, 0]) @ w + np.asarray(STATE.h) @ u + b
  i, f, g, o = (a[:, n * DIM : (n + 1) * DIM] for n in range(4))
  c = np.asarray(STATE.c) / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
  y, state = CELL.apply(PARAMS, X[:, 0], STATE)
  np.testing.assert_allclose(state.c, c, atol=1e-6)
  np.testing.assert_allclose(y, np.tanh(c) / (1 + np.exp(-o)), atol=1e-6)
  np.testing.assert_array_equal(y, state.h)


def test_it_meets_the_contract_of_cells():
  assert isinstance(CELL, Cell)
  state = CELL.initial_state(BATCH)
  assert all(leaf.shape == (BATCH, DIM) and not leaf.any() for leaf in state)
  _, after = CELL.apply(PARAMS, X[:, 0], state)
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("rows", [BATCH, 20])
def test_steps_give_what_a_whole_sequence_gives_forward_and_backward(rows):
  """Few rows have one product for what is read at all steps; many, on a CPU, one at each step."""
  x = jax.random.normal(jax.random.key(3), (rows, TIME, EMBED))
  before = State(*jax.random.normal(jax.random.key(4), (2, rows, DIM)))
  assert lstm.in_steps(x.swapaxes(0, 1)) == (rows > BATCH)

  def steps(params, x, state):
    ys = []
    for t in range(TIME):
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

  one, other = (jax.tree.leaves(loss(f)(PARAMS, x, before)) for f in (steps, whole))
  for mine, theirs in zip(one, other, strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_leading_axes_are_examples():
  y, state = CELL.apply(
    PARAMS, X, State(*jnp.broadcast_to(STATE.h[:, None], (2, BATCH, TIME, DIM)))
  )
  one, _ = CELL.apply(PARAMS, X[:, 2], State(STATE.h, STATE.h))
  assert y.shape == state.c.shape == (BATCH, TIME, DIM)
  np.testing.assert_allclose(y[:, 2], one, atol=1e-6)


def test_an_edit_of_its_output_is_what_the_next_step_reads():
  (y, state), found = run(
    CELL.apply,
    PARAMS,
    X[:, 0],
    STATE,
    ctx=Context(),
    capture={"cell", "output"},
    edits={"output": jnp.zeros_like},
  )
  assert not y.any()
  np.testing.assert_array_equal(state.h, found["output"])
  np.testing.assert_array_equal(state.c, found["cell"])
  np.testing.assert_array_equal(state.c, CELL.apply(PARAMS, X[:, 0], STATE)[1].c)


def test_what_is_added_to_the_cell_state_passes_through_the_output():
  added = State(0.1 * STATE.c, 0.2 * STATE.h)
  _, plain = CELL.apply(PARAMS, X[:, 0], STATE)
  _, moved = CELL.apply(PARAMS, X[:, 0], STATE, added=added)
  np.testing.assert_allclose(moved.c, plain.c + added.c, atol=1e-6)
  opened = plain.h / jnp.tanh(plain.c)
  np.testing.assert_allclose(moved.h, opened * jnp.tanh(moved.c) + added.h, atol=1e-5)
