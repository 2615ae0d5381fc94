"""Recurrent independent mechanisms, against a loop over modules, written from the equations."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from compmod_jax.core.intermediates import run
from compmod_jax.layers.context import Context
from compmod_jax.mechanisms.rims import RimConfig

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
  cell = config.build(EMBED)
  x = jax.random.normal(jax.random.key(0), (BATCH, TIME, *rows, EMBED))
  state = jax.tree.map(
    lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape), cell.initial_state(BATCH)
  )
  params = nn.unbox(cell.init(jax.random.key(2), x[:, 0], state))
  return cell, jax.tree.map(lambda leaf: 2 * leaf, params), x, state


@pytest.mark.parametrize("rows", [(), (3,)])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_sequence_is_that_of_a_loop_over_modules(name, rows):
  config = VARIANTS[name]
  cell, params, x, state = make(config, rows)
  sites = ["active", "null"]
  (out, last), found = run(
    cell.apply, params, x, state, capture=sites, method="unroll", ctx=Context()
  )
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
