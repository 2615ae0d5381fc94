"""The recurrent model around any cell: sites, edits, and the same as its cell step by step."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import Intermediates, run
from compmod_jax.layers.cell import Cell
from compmod_jax.mechanisms.rims import RimConfig
from compmod_jax.models.recurrent import GruCellConfig, LstmCellConfig, RecurrentConfig

BATCH, TIME, VOCAB = 2, 4, 6
CELLS = {
  "modules": RimConfig(modules=3, active=2, dim=4, head_dim=2, input_key_dim=3),
  "lstm": LstmCellConfig(5),
  "gru": GruCellConfig(5),
}
TOKENS = np.array([[1, 2, 3, 4], [5, 0, 1, 1]], np.int32)
VECTORS = np.float32(TOKENS / 5)


@functools.cache
def model(name, real=False):
  module = RecurrentConfig(cell=CELLS[name], embedding_dim=3).recurrent(VOCAB)
  tokens = VECTORS if real else TOKENS
  call = functools.partial(run, module.apply, logits=True)
  states = module.initial_states(BATCH)
  shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), tokens, TOKENS, states))
  random = np.random.default_rng(0)
  params = jax.tree.map(lambda s: random.normal(size=s.shape).astype(s.dtype) / 2, shapes)
  return module, params, call, states


@functools.cache
def captured(name):
  """The model's output and all of its intermediates."""
  _, params, call, states = model(name)
  return jax.tree.map(
    np.asarray, jax.jit(functools.partial(call, capture=None))(params, TOKENS, TOKENS, states)
  )


@functools.cache
def plain(name):
  """The model's output where nothing is read."""
  _, params, call, states = model(name)
  return jax.tree.map(np.asarray, jax.jit(call)(params, TOKENS, TOKENS, states)[0])


@pytest.mark.parametrize("name", CELLS)
def test_it_is_its_cell_between_an_embedding_and_logits(name):
  _module, params, _call, state = model(name)
  out = plain(name)
  cell = CELLS[name].build(3)
  assert isinstance(cell, Cell)
  ours = params["params"]

  @jax.jit
  def step(ours, x, state):
    y, state = cell.apply({"params": ours["cell"]}, x, state)
    logits = y @ ours["readout"]["kernel"] + ours["readout"]["bias"][None]
    return jax.nn.log_softmax(logits), state

  for t in range(TIME):
    probabilities, state = step(ours, ours["embedding"]["embedding"][TOKENS[:, t]], state)
    np.testing.assert_allclose(out.logits[:, t], probabilities, atol=1e-5)
    np.testing.assert_allclose(
      -out.nll[:, t], np.asarray(probabilities)[np.arange(BATCH), TOKENS[:, t]], atol=1e-5
    )
  for mine, theirs in zip(jax.tree.leaves(out.states), jax.tree.leaves(state), strict=True):
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("name", CELLS)
def test_intermediates_have_a_time_axis_and_edits_act_step_by_step(name):
  module, params, _call, states = model(name)
  out, found = captured(name)
  np.testing.assert_allclose(out.logits, plain(name).logits, atol=1e-6)
  assert found["cell/output"].shape[:2] == (BATCH, TIME)
  np.testing.assert_allclose(found["cell/output"].reshape(BATCH, TIME, -1), out.hidden, atol=1e-6)

  def silent(value, valid):
    assert value.shape[1] == 1
    return jnp.zeros_like(value)

  edits = Intermediates(edits={"cell/output": silent}).knowing(
    lambda site: jnp.ones((BATCH, TIME), bool)
  )
  edited = jax.jit(functools.partial(module.apply, intermediates=edits))
  assert not np.any(edited(params, TOKENS, TOKENS, states).hidden)


def test_the_names_of_the_sites_of_modules_are_stable():
  _, found = captured("modules")
  names = ["attention", "null", "active", "router/weights", "router/signatures", "stepped"]
  names += ["cell", "communication", "output"]
  assert found.keys() == {*(f"cell/{name}" for name in names), "logits"}
  (site,) = RecurrentConfig(cell=CELLS["modules"]).routing_sites()
  assert found[site].shape == (BATCH, TIME, 3)
  dense = RimConfig(modules=3, active=3)
  assert not RecurrentConfig(cell=dense).routing_sites()


def test_no_prediction_depends_on_a_later_number():
  module, params, _, states = model("modules", real=True)

  @jax.jit
  @jax.grad
  def slope(x, params, tokens, t):
    return module.apply(params, x, tokens, states).nll[0, t]

  for t in range(TIME):
    gradient = np.asarray(slope(VECTORS, params, TOKENS, t))
    assert not gradient[:, t + 1 :].any()
    assert gradient[0, t] != 0
    assert not gradient[1].any()


def test_dropout_is_drawn_from_the_key_alone():
  config = RecurrentConfig(cell=CELLS["modules"], embedding_dim=3, dropout=0.5)
  module = config.recurrent(VOCAB)
  _, params, _, states = model("modules")

  @jax.jit
  def call(params, tokens, seed):
    return module.apply(params, tokens, tokens, states, rng=jax.random.key(seed)).nll

  one, same, other = (np.asarray(call(params, TOKENS, seed)) for seed in (0, 0, 1))
  np.testing.assert_array_equal(one, same)
  assert (one != other).any()


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: LstmCellConfig(0), "cell.dim is 0"),
    (lambda: GruCellConfig(-1), "cell.dim is -1"),
    (lambda: RecurrentConfig(embedding_dim=0), "model.embedding_dim is 0"),
    (lambda: RecurrentConfig(dropout=1.0), "model.dropout is 1.0"),
  ],
)
def test_bad_sizes_are_errors(make, message):
  with pytest.raises(UserError, match=message):
    make()
