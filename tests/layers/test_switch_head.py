"""Experts inside heads (SwitchHead), against loops over positions, heads and experts."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.layers.switch_head import SwitchHeadConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.encoder import EncoderConfig

BATCH, TIME, HEADS, WIDTH, EXPERTS, KEEP = 2, 4, 2, 3, 4, 2
DIM = HEADS * WIDTH
RANDOM = np.random.default_rng(0)
INPUTS, MEMORY = (
  jax.device_put(RANDOM.normal(size=(BATCH, time, DIM)).astype(np.float32)) for time in (TIME, 5)
)
SWITCH = SwitchHeadConfig(EXPERTS, KEEP)


def softmax(scores: np.ndarray) -> np.ndarray:
  powers = np.exp(scores - scores.max())
  return powers / powers.sum()


def chosen(x: np.ndarray, kernel: np.ndarray, head: int) -> dict[int, float]:
  """The experts of a head that a position chooses, and their weights."""
  scores = x @ kernel[:, head]
  best = sorted(range(EXPERTS), key=lambda e: -scores[e])[:KEEP]
  return {e: 1 / (1 + np.exp(-scores[e])) for e in best}


def expected(p: Any, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
  """Outputs of one sequence; self-attention reads no later position."""
  if memory is None:
    kernel, bias = p["query_key_value"]["kernel"], p["query_key_value"]["bias"]
    read, keys, k = x, [range(t + 1) for t in range(TIME)], 1
    query = key = kernel, bias
  else:
    query = p["query"]["kernel"], p["query"]["bias"]
    key = p["key_value"]["kernel"], p["key_value"]["bias"]
    read, keys, k = memory, [range(len(memory))] * TIME, 0
  made = np.zeros((TIME, DIM))
  for t, h in np.ndindex(TIME, HEADS):
    q = x[t] @ query[0][:, h, 0] + query[1][h, 0]
    logits = [q @ (read[s] @ key[0][:, h, k] + key[1][h, k]) / np.sqrt(WIDTH) for s in keys[t]]
    head = np.zeros(WIDTH)
    for s, share in zip(keys[t], softmax(np.array(logits)), strict=True):
      for e, weight in chosen(read[s], p["values"]["gate"]["kernel"], h).items():
        head += share * weight * (read[s] @ p["values"]["kernel"][:, h, e])
    for e, weight in chosen(x[t], p["switch_output"]["gate"]["kernel"], h).items():
      made[t] += weight * (head @ p["switch_output"]["kernel"][h, e])
  return made


@pytest.mark.parametrize("cross", [False, True])
def test_positions_choose_experts_for_their_values_and_for_what_they_read(cross):
  module = Attention(DIM, HEADS, cross=cross, switch=SWITCH)
  memory = MEMORY if cross else None
  params = jax.device_put(drawn(module.init, INPUTS, None, memory, spread=0.5))
  ctx = Context(mask=AttentionMask(causal=True))

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def call(params):
    made = module.apply(params, INPUTS, None, memory, ctx=ctx)[0]
    return (made**2).sum(), made

  gradients, made = call(params)
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
  for b in range(BATCH):
    other = np.asarray(MEMORY[b], np.float64) if cross else None
    mine = expected(p, np.asarray(INPUTS[b], np.float64), other)
    np.testing.assert_allclose(made[b], mine, rtol=1e-4, atol=1e-4)
  assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_heads_with_experts_can_compete():
  """What a head adds is scaled before its output experts, whose own weights stay."""
  rule = CompetitionConfig(key_dim=2, hidden_dim=3)
  module = Attention(DIM, HEADS, rule, switch=SWITCH)
  params = jax.device_put(drawn(module.init, INPUTS, spread=0.5))
  names = ("heads", "heads_scaled", "router/weights", "output_experts", "value_experts")
  call = jax.jit(lambda p: run(module.apply, p, INPUTS, ctx=Context(), capture=names))
  (_, found), plain = call(params), jax.jit(module.apply)(params, INPUTS)[0]
  np.testing.assert_allclose(
    found["heads_scaled"], found["heads"] * found["router/weights"][..., None], rtol=1e-5
  )
  for name in ("output_experts", "value_experts"):
    np.testing.assert_array_equal((np.asarray(found[name]) > 0).sum(axis=-1), KEEP)
  kernel = np.asarray(params["params"]["switch_output"]["kernel"])
  mine = np.einsum("bthe,bthd,hedm->btm", found["output_experts"], found["heads_scaled"], kernel)
  np.testing.assert_allclose(plain, mine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: SwitchHeadConfig(3, 4), ["keep is 4", "experts = 3", "between 1 and 3"]),
    (lambda: EncoderConfig(switch_heads=("cross",)), ["switch_heads", "cross", "encoder_self"]),
    (
      lambda: EncoderConfig(switch_heads=("encoder_self",), mechanism_layers=("encoder",)),
      ["switch_heads", "mechanism_layers", "Leave one"],
    ),
  ],
)
def test_options_that_do_not_fit_are_refused(make, words):
  with pytest.raises(UserError) as error:
    make()
  assert all(word in str(error.value) for word in words), error.value
