"""Attention layers: explicit references, competition of heads, steps of decoding, sites."""

import contextlib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES

from compmod_jax.core import sharding
from compmod_jax.core.intermediates import Intermediates, run, zero_units
from compmod_jax.layers import attention as attention_layers
from compmod_jax.layers.attention import Attention, IntoHeads, OutOfHeads, attend
from compmod_jax.layers.context import AttentionMask, Context, Newest
from compmod_jax.layers.kv_cache import ancestor_mask
from compmod_jax.mechanisms.competition.router import CompetitionConfig

BATCH, TIME, KEYS, HEADS, DIM, MEMORY = 2, 5, 7, 4, 8, 8
SMALL = CompetitionConfig(key_dim=3, hidden_dim=6)
TOP = CompetitionConfig(key_dim=3, hidden_dim=6, rule="top_k", keep=2, inactive="value")


def numbers(*shape: int, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


INPUTS = numbers(BATCH, TIME, DIM)
MEMORIES = numbers(BATCH, KEYS, MEMORY, seed=1)
VISIBLE = jnp.asarray([[True] * 7, [True] * 4 + [False] * 3])[:, None, None, :]


@functools.cache
def module(cross: bool = False, competition: CompetitionConfig | None = None) -> Attention:
  return Attention(DIM, HEADS, competition=competition, cross=cross)


@functools.cache
def params(cross: bool = False, competition: CompetitionConfig | None = None) -> Any:
  """Random parameters, biases too."""
  memory = MEMORIES if cross else None
  shapes = jax.eval_shape(module(cross, competition).init, jax.random.key(0), INPUTS, None, memory)
  leaves, tree = jax.tree.flatten(nn.unbox(shapes))
  made = [0.5 * numbers(*leaf.shape, seed=n) for n, leaf in enumerate(leaves)]
  return jax.tree.unflatten(tree, made)


def output(attention: Attention, params: Any, ctx: Context | None = None, **asked: Any) -> Any:
  """Output and captured sites; self-attention is causal, all of the memory is read."""
  memory = MEMORIES if attention.cross else None
  ctx = Context(mask=AttentionMask(causal=True)) if ctx is None else ctx
  (out, _), sites = run(attention.apply, params, INPUTS, None, memory, ctx=ctx, **asked)
  return out, sites


@functools.cache
def call(cross: bool = False, competition: CompetitionConfig | None = None) -> Any:
  """The module, compiled, with every site: (params, memory mask) -> (output, sites)."""
  one = module(cross, competition)

  def made(params: Any, mask: Any) -> Any:
    ctx = Context(mask=AttentionMask(causal=True), memory_mask=mask)
    return output(one, params, ctx, capture=None)

  return jax.jit(made)


def explicit(query: Any, key: Any, value: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
  """Head outputs and probabilities in float64, one query at a time."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  batch, time, heads, width = query.shape
  probabilities = np.zeros((batch, heads, time, key.shape[1]))
  output = np.zeros_like(query)
  for b, h, t in np.ndindex(batch, heads, time):
    scores = np.where(mask[b, t], key[b, :, h] @ query[b, t, h] / np.sqrt(width), -np.inf)
    powers = np.exp(scores - scores.max())
    probabilities[b, h, t] = powers / powers.sum()
    output[b, t, h] = probabilities[b, h, t] @ value[b, :, h]
  return output, probabilities


def visibility(cross: bool) -> np.ndarray:
  if cross:
    return np.broadcast_to(np.asarray(VISIBLE)[:, 0], (BATCH, TIME, KEYS))
  return np.broadcast_to(np.tril(np.ones((TIME, TIME), bool)), (BATCH, TIME, TIME))


def projected(p: Any, inputs: Any) -> np.ndarray:
  """What a projection into heads gives: [projections, batch, time, heads, head_dim]."""
  p = jax.tree.map(np.asarray, p)
  found = np.einsum("btd,dhpk->pbthk", np.asarray(inputs), p["kernel"])
  return found + np.moveaxis(p["bias"], 1, 0)[:, None, None]


def queries_keys_values(p: Any, cross: bool) -> np.ndarray | tuple:
  if cross:
    return (*projected(p["query"], INPUTS), *projected(p["key_value"], MEMORIES))
  return projected(p["query_key_value"], INPUTS)


both = pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])


@both
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
def test_attention_is_the_softmax_of_scaled_products(cross, fused):
  query, keys = numbers(BATCH, TIME, HEADS, 2), KEYS if cross else TIME
  key, value = numbers(2, BATCH, keys, HEADS, 2, seed=3)
  intermediates = Intermediates(capture=frozenset() if fused else None)
  mask = AttentionMask(explicit=VISIBLE) if cross else AttentionMask(causal=True)
  found = jax.jit(lambda q, k, v: attend(q, k, v, mask, intermediates=intermediates))(
    query, key, value
  )
  expected, probabilities = explicit(query, key, value, visibility(cross))
  np.testing.assert_allclose(found, expected, atol=1e-6)
  assert probabilities.shape == (BATCH, HEADS, TIME, keys)


@both
@pytest.mark.parametrize("competition", [None, SMALL], ids=["plain", "competing"])
def test_the_module_is_projection_attention_competition_projection(cross, competition):
  p = params(cross, competition)["params"]
  out, sites = jax.device_get(call(cross, competition)({"params": p}, VISIBLE if cross else None))
  heads, probabilities = explicit(*queries_keys_values(p, cross), visibility(cross))
  np.testing.assert_allclose(sites["attention"], probabilities, atol=1e-6)
  np.testing.assert_allclose(sites["heads"], heads, atol=1e-5)
  weights = sites["router/weights"] if competition else np.ones((BATCH, TIME, HEADS))
  np.testing.assert_allclose(sites["heads_scaled"], heads * weights[..., None], atol=1e-5)
  p = jax.tree.map(np.asarray, p)
  width = DIM // HEADS
  concatenated = (heads * weights[..., None]).reshape(BATCH, TIME, HEADS * width)
  expected = concatenated @ p["output"]["kernel"].reshape(HEADS * width, DIM) + p["output"]["bias"]
  np.testing.assert_allclose(out, expected, atol=1e-5)


def test_the_router_of_cross_attention_reads_the_query_position():
  p = params(True, SMALL)
  _, sites = call(True, SMALL)(p, VISIBLE)
  selection = module(True, SMALL).bind(p).router(INPUTS)
  np.testing.assert_allclose(sites["router/weights"], selection.weights, atol=1e-6)


def test_heads_that_lost_put_out_their_own_value_vector():
  p = params(False, TOP)
  _, sites = jax.device_get(call(False, TOP)(p, None))
  values = projected(p["params"]["query_key_value"], INPUTS)[2]
  lost = sites["router/weights"] == 0
  assert (lost.sum(axis=-1) == HEADS - 2).all()
  np.testing.assert_allclose(sites["heads_scaled"][lost], values[lost], atol=1e-6)
  expected = sites["heads"] * sites["router/weights"][..., None]
  np.testing.assert_allclose(sites["heads_scaled"][~lost], expected[~lost], atol=1e-6)


@both
def test_uniform_weights_with_rescale_are_plain_attention_in_values_and_gradients(cross):
  competition = CompetitionConfig(key_dim=3, hidden_dim=6, rescale=True)
  p = params(cross, competition)
  plain = {"params": {k: v for k, v in p["params"].items() if k != "router"}}
  uniform = {"router/weights": lambda weights: jnp.full_like(weights, 1 / HEADS)}
  weight = numbers(BATCH, TIME, DIM, seed=5)

  def total(params, attention, edits):
    out, _ = output(attention, params, edits=edits)
    return jnp.sum(weight * out), out

  def gradient(attention, edits):
    function = functools.partial(total, attention=attention, edits=edits)
    return jax.jit(jax.value_and_grad(function, has_aux=True))

  (_, one), gradients = gradient(module(cross, competition), uniform)(p)
  (_, two), expected = gradient(module(cross), {})(plain)
  np.testing.assert_allclose(one, two, atol=1e-6)
  for path, leaf in jax.tree.leaves_with_path(gradients["params"]):
    if path[0].key == "router":
      np.testing.assert_array_equal(leaf, 0)
    else:
      peer = functools.reduce(lambda tree, key: tree[key.key], path, expected["params"])
      np.testing.assert_allclose(leaf, peer, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("competition", [None, SMALL], ids=["plain", "competing"])
def test_zeroing_a_head_equals_removing_its_slice_of_the_output_matrix(competition):
  attention, p = module(False, competition), params(False, competition)
  edits = {"heads_scaled": zero_units(2, axis=2)}
  edited, _ = jax.jit(lambda p: output(attention, p, edits=edits))(p)
  last = p["params"]["output"]
  cut = {**last, "kernel": jnp.asarray(np.delete(last["kernel"], 2, axis=0))}
  _, sites = jax.jit(lambda p: output(attention, p, capture={"heads_scaled"}))(p)
  rest = jnp.asarray(np.delete(sites["heads_scaled"], 2, axis=2))
  expected = jax.jit(OutOfHeads(DIM).apply)({"params": cut}, rest)
  np.testing.assert_allclose(edited, expected, atol=1e-6)


@pytest.mark.parametrize("sites", [frozenset(), None], ids=["fused", "explicit"])
def test_a_query_that_sees_nothing_leaves_values_and_gradients_finite(sites):
  p = params(True, SMALL)
  mask = VISIBLE.at[1].set(False)

  def total(params):
    ctx = Context(memory_mask=mask, intermediates=Intermediates(capture=sites))
    out, _ = module(True, SMALL).apply(params, INPUTS, None, MEMORIES, ctx=ctx)
    return jnp.sum(out**2), out

  (_, out), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(p)
  for leaf in jax.tree.leaves((out, gradients)):
    assert np.isfinite(leaf).all()


def test_hidden_keys_have_no_influence_at_all():
  p = params(True, SMALL)

  @jax.jit
  def gradient(memory):
    ctx, attention = Context(memory_mask=VISIBLE), module(True, SMALL)
    return jax.grad(lambda m: jnp.sum(attention.apply(p, INPUTS, None, m, ctx=ctx)[0]))(memory)

  found = np.asarray(gradient(MEMORIES))
  np.testing.assert_array_equal(found[1, 4:], 0)
  assert (found[1, :4] != 0).all()


def test_dropout_acts_on_probabilities_in_training_only():
  attention = Attention(DIM, HEADS, dropout=0.5)
  p = params()

  @functools.partial(jax.jit, static_argnums=1)
  def out(seed, deterministic):
    rngs = {"dropout": jax.random.key(seed)}
    return attention.apply(p, INPUTS, ctx=Context(deterministic=deterministic), rngs=rngs)[0]

  assert not np.array_equal(out(0, False), out(1, False))
  np.testing.assert_array_equal(out(0, False), out(0, False))
  plain, _ = jax.jit(module().apply)(p, INPUTS)
  np.testing.assert_allclose(out(0, True), plain, rtol=1e-5, atol=1e-6)


# Decoding step by step.


@pytest.mark.parametrize("competition", [None, SMALL, TOP], ids=["plain", "soft", "top_k"])
def test_self_attention_step_by_step_equals_all_at_once(competition):
  attention, p = module(False, competition), params(False, competition)
  expected, _ = call(False, competition)(p, None)

  ancestry = jnp.broadcast_to(jnp.arange(2)[None, :, None], (BATCH, 2, TIME + 3))

  @jax.jit
  def step(inputs, cache, position):
    newest = Newest(start=2 * position, past=ancestor_mask(ancestry, position))
    return attention.apply(p, inputs, cache, ctx=Context(newest=newest))

  cache = attention.bind(p).initial_state(BATCH, 2 * (TIME + 3))
  other = np.asarray(numbers(TIME, BATCH, DIM, seed=9))
  for t in range(TIME):
    beams = jnp.asarray(np.stack([np.asarray(INPUTS)[:, t], other[t]], axis=1))
    out, cache = step(beams, cache, jnp.int32(t))
    np.testing.assert_allclose(out[:, 0], expected[:, t], atol=1e-5)


def test_a_beam_sees_what_its_ancestors_wrote_up_to_now_and_nothing_else():
  ancestry = jnp.asarray([[[0, 1, 0, 0], [1, 1, 1, 0]]])  # [batch, beams, length]
  found = ancestor_mask(ancestry, jnp.int32(2))[0, 0].reshape(2, 4, 2)
  np.testing.assert_array_equal(
    found[0], [[True, False], [False, True], [True, False], [False] * 2]
  )
  np.testing.assert_array_equal(found[1], [[False, True]] * 3 + [[False, False]])


@pytest.mark.parametrize("competition", [None, SMALL], ids=["plain", "soft"])
def test_cross_attention_of_beams_equals_that_of_positions(competition):
  attention, p = module(True, competition), params(True, competition)
  expected, _ = call(True, competition)(p, VISIBLE)

  @jax.jit
  def step(inputs):
    bound = attention.bind(p)
    return bound(inputs, bound.memory_state(MEMORIES), ctx=Context(memory_mask=VISIBLE))[0]

  np.testing.assert_allclose(step(INPUTS), expected, atol=1e-6)


# Initial values and types.


def test_projections_start_xavier_uniform_into_heads_with_gain_one_over_sqrt_two():
  rng, width = jax.random.key(0), 32
  into = nn.unbox(jax.jit(IntoHeads(3, 8, 4).init)(rng, jnp.ones((1, 1, width))))["params"]
  out = nn.unbox(jax.jit(OutOfHeads(width).init)(rng, jnp.ones((1, 1, 8, 4))))["params"]
  bound = np.sqrt(6 / (2 * width))
  for p, limit in ((into, bound / np.sqrt(2)), (out, bound)):
    assert 0.98 * limit < np.abs(np.asarray(p["kernel"])).max() <= limit
    np.testing.assert_array_equal(p["bias"], 0)


@pytest.mark.parametrize("beside", [False, True])
def test_on_tpus_each_projection_of_many_tokens_is_a_product_of_its_own(beside, monkeypatch):
  into, inputs = IntoHeads(3, HEADS, 2), numbers(2, 6, DIM)
  held = {"kernel": numbers(DIM, HEADS, 3, 2, seed=1), "bias": numbers(HEADS, 3, 2, seed=2)}
  extra = (numbers(DIM, 5, seed=3), numbers(5, seed=4)) if beside else None

  def program() -> Any:
    """Traced anew: projections, and gradients of parameters and inputs."""

    def made(held: Any, inputs: Any, extra: Any) -> Any:
      return into.apply({"params": held}, inputs, extra)

    def differentiated(*args: Any) -> Any:
      found, pull = jax.vjp(made, *args)
      return found, pull(jax.tree.map(jnp.sin, found))

    return jax.jit(differentiated)

  def products(platform: str | None = None) -> int:
    with sharding.tracing_for(DEVICES[platform]) if platform else contextlib.nullcontext():
      return str(program().trace(held, inputs, extra).jaxpr).count("dot_general[")

  monkeypatch.setattr(attention_layers, "_MANY", 13)
  assert products("tpu") == products() == 3
  monkeypatch.setattr(attention_layers, "_MANY", 12)
  assert products("tpu") == 3 * (4 if beside else 3)
  assert products("cuda") == products() == 3
  expected = program()(held, inputs, extra)
  monkeypatch.setattr(attention_layers, "platform_of", lambda array: "tpu")
  found = program()(held, inputs, extra)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=1e-5), expected, found)


def test_bfloat16_computes_in_bfloat16_but_scores_and_probabilities_in_float32():
  attention = Attention(DIM, HEADS, competition=SMALL, dtype=jnp.bfloat16)
  init = jax.eval_shape(attention.init, jax.random.key(0), INPUTS)
  assert {leaf.dtype for leaf in jax.tree.leaves(init)} == {jnp.dtype("float32")}
  out, sites = jax.eval_shape(lambda p: output(attention, p, capture=None), nn.unbox(init))
  assert out.dtype == sites["heads"].dtype == sites["heads_scaled"].dtype == jnp.bfloat16
  for name in ("attention", "router/scores", "router/weights"):
    assert sites[name].dtype == jnp.float32
