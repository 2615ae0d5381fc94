"""The copy gate against its equation, alone and at the end of a layer."""

from typing import Any

import jax
import numpy as np
from random_parameters import drawn

from compmod_jax.core.intermediates import run
from compmod_jax.layers.copy_gate import CopyGate
from compmod_jax.models.encoder import EncoderConfig

BATCH, TIME, DIM = 2, 3, 4
TOKENS = jax.device_put(np.array([[4, 5, 6], [7, 4, 0]], np.int32))


def normal(x: np.ndarray) -> np.ndarray:
  centred = x - x.mean(axis=-1, keepdims=True)
  return centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + 1e-5)


def test_a_gate_chooses_between_input_and_update():
  x, read, update = (
    jax.device_put(np.random.default_rng(seed).normal(size=(BATCH, TIME, DIM)).astype(np.float32))
    for seed in range(3)
  )
  module = CopyGate(DIM, closed=0.5)
  params = jax.device_put(drawn(module.init, x, read, update))
  p = jax.tree.map(np.asarray, params["params"])
  found = np.asarray(module.apply(params, x, read, update))
  hidden = np.maximum(np.asarray(read) @ p["up"]["kernel"] + p["up"]["bias"], 0)
  gate = 1 / (1 + np.exp(-(hidden @ p["down"]["kernel"] + p["down"]["bias"])))
  new = normal(np.asarray(update)) * p["norm"]["scale"] + p["norm"]["bias"]
  np.testing.assert_allclose(found, (1 - gate) * x + gate * new, atol=1e-5)

  train = {"deterministic": False, "rngs": {"dropout": jax.random.key(0)}}
  some, sites = run(module.apply, params, x, read, update, capture=["copy_gate"], **train)
  closed = (np.asarray(sites["copy_gate"]) == 0).all(axis=-1)
  assert 0 < closed.sum() < closed.size
  np.testing.assert_array_equal(np.asarray(some)[closed], np.asarray(x)[closed])
  np.testing.assert_allclose(np.asarray(some)[~closed], found[~closed], atol=1e-6)


def test_a_layer_whose_gate_is_closed_copies_its_input():
  config = EncoderConfig(encoder_layers=2, dim=8, heads=2, ffn_dim=12, max_length=8, copy_gate=True)
  model = config.encoder(9, 0)
  params: Any = drawn(model.init, TOKENS, spread=0.4)
  wanted = ["encoder/layer_0/output", "encoder/layer_1/output", "encoder/layer_1/copy_gate"]

  def call(params, edits=None):
    return run(model.apply, params, TOKENS, capture=wanted, edits=edits)[1]

  found = jax.jit(call)(params)
  assert np.abs(found[wanted[0]] - found[wanted[1]]).max() > 0.1
  found = jax.jit(lambda p: call(p, {wanted[2]: lambda gate: 0 * gate}))(params)
  np.testing.assert_array_equal(found[wanted[0]], found[wanted[1]])


def test_gates_are_nearly_closed_at_first():
  x = jax.device_put(np.zeros((1, 1, DIM), np.float32))
  fresh = CopyGate(DIM).init(jax.random.key(0), x, x, x)
  _, sites = run(CopyGate(DIM).apply, fresh, x, x, x, capture=["copy_gate"])
  np.testing.assert_allclose(sites["copy_gate"], 1 / (1 + np.exp(3)), rtol=1e-5)
