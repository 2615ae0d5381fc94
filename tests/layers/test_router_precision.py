"""Routers of models that compute in bfloat16: who wins is decided by float32 products."""

import dataclasses
import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES
from jax.interpreters import partial_eval

from compmod_jax.core import sharding
from compmod_jax.core.intermediates import Intermediates, run
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import AttentionMask, Context, Newest
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig

DIM, UNITS, BATCH, TIME = 32, 8, 128, 16
TOP_2 = CompetitionConfig(key_dim=8, hidden_dim=16, rule="top_k", keep=2)
INPUTS = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, TIME, DIM)), jnp.bfloat16)
WEIGHTS = "router/weights"


def module(kind: str, config: CompetitionConfig = TOP_2, **fields: Any) -> nn.Module:
  """Competing feed-forward networks, or heads that are routed as the kind says."""
  if kind == "experts":
    fields = {"dtype": jnp.bfloat16} | fields
    return Experts(DIM, 8, ExpertsConfig(UNITS, competition=config), **fields)
  config = dataclasses.replace(config, routing="plain" if kind == "plain" else "fused")
  fields = {"cross": kind == "cross", "dtype": jnp.bfloat16} | fields
  return Attention(DIM, UNITS, competition=config, **fields)


def inputs_of(kind: str) -> tuple[jax.Array | None, ...]:
  return (INPUTS, None, INPUTS[:, :3]) if kind == "cross" else (INPUTS,)


@functools.cache
def params(kind: str) -> Any:
  shapes = nn.unbox(jax.eval_shape(module(kind).init, jax.random.key(0), *inputs_of(kind)))
  random = np.random.default_rng(0)
  return jax.tree.map(lambda x: jnp.float32(0.4 * random.normal(size=x.shape)), shapes)


def best_two(weights: Any) -> np.ndarray:
  return np.sort(np.argsort(-np.asarray(weights, np.float64), axis=-1)[..., :2], axis=-1)


def true_choice(kind: str) -> np.ndarray:
  """The two best units at every position by the equations, in float64."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params(kind)["params"]["router"])
  hidden = np.maximum(np.float64(INPUTS) @ p["hidden"]["kernel"] + p["hidden"]["bias"], 0)
  return best_two((hidden @ p["key"]["kernel"] + p["key"]["bias"]) @ p["signatures"].T)


def differ(kind: str, weights: Any) -> int:
  """Positions at which others were chosen than by exact products."""
  shape = (BATCH, TIME, UNITS)
  return int(np.any(best_two(weights.reshape(shape)) != true_choice(kind), axis=-1).sum())


def weights_of(kind: str, *capture: str, **fields: Any) -> jax.Array:
  one = module(kind, **fields)

  def apply(p: Any) -> jax.Array:
    ctx = {} if kind == "experts" else {"ctx": Context()}
    return run(one.apply, p, *inputs_of(kind), capture=(WEIGHTS, *capture), **ctx)[1][WEIGHTS]

  return jax.jit(apply)(params(kind))


KINDS = ("experts", "plain", "fused", "cross")


@pytest.mark.parametrize("capture", [(), ("router/scores",)], ids=["weights", "scores"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_model_chooses_the_units_that_exact_products_choose(kind, capture):
  assert differ(kind, weights_of(kind, *capture)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_routers_in_the_models_type_choose_others_here_and_there(kind):
  """What `dtype = model` costs; without it the test above could not fail."""
  config = dataclasses.replace(TOP_2, dtype="model")
  assert 0 < differ(kind, weights_of(kind, config=config)) < 0.05 * BATCH * TIME


@pytest.mark.parametrize("kind", ["plain", "fused", "cross"])
def test_cached_decoding_chooses_as_the_whole_pass_does(kind):
  """A prompt of all positions but the last two, and these step by step."""
  prompt = TIME - 2

  def chosen(one: Attention, inputs: jax.Array, state: Any, **given: Any) -> tuple[Any, jax.Array]:
    intermediates = Intermediates(frozenset({WEIGHTS}))
    _, state = one(inputs, state, ctx=Context(**given, intermediates=intermediates))
    return state, intermediates.captured[WEIGHTS]

  def decode(one: Attention) -> jax.Array:
    if kind == "cross":
      sees = jnp.ones((BATCH, 1, 1, 3), bool)
      return chosen(one, INPUTS, one.memory_state(INPUTS[:, :3]), memory_mask=sees)[1]
    state = one.initial_state(BATCH, TIME)
    causal = AttentionMask(causal=True)
    state, weights = chosen(one, INPUTS[:, :prompt], state, mask=causal)
    found = [weights]
    for t in range(prompt, TIME):
      sees = jnp.broadcast_to(jnp.arange(TIME) <= t, (BATCH, 1, 1, TIME))
      newest = Newest(jnp.int32(t), sees)
      state, weights = chosen(one, INPUTS[:, t : t + 1], state, newest=newest)
      found.append(weights)
    return jnp.concatenate(found, axis=1)

  assert differ(kind, jax.jit(nn.apply(decode, module(kind)))(params(kind))) == 0


@pytest.mark.parametrize("platform", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_accelerators_every_product_of_a_router_has_the_highest_precision(kind, dtype, platform):
  """Where float32 operands are else rounded to bfloat16 (TPU) or TF32 (GPU)."""
  one = module(kind, dtype=jnp.dtype(dtype))

  def weights(p: Any) -> jax.Array:
    ctx = {} if kind == "experts" else {"ctx": Context()}
    return run(one.apply, p, *inputs_of(kind), capture=(WEIGHTS,), **ctx)[1][WEIGHTS]

  with sharding.tracing_for(DEVICES[platform]):
    program = jax.make_jaxpr(weights)(params(kind)).jaxpr
  needed, _ = partial_eval.dce_jaxpr(program, [True])
  products = re.findall(r"dot_general\[(.*?)\n\s*\] (\w+) (\w+)", str(needed), re.DOTALL)
  assert len(products) >= 2
  types = dict(re.findall(r"(\w+):(\w+)\[", str(needed)))
  for options, *operands in products:
    # Of bfloat16, in which rows and the kernel's three parts are exact, only sums can be rounded.
    narrow = {types[one] for one in operands} == {"bf16"}
    wanted = "preferred_element_type=float32" if narrow else "Precision.HIGHEST"
    assert wanted in options
