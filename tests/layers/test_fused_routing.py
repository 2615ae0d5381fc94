"""Competition fused with the projections around it: equal to the plain way, and where it yields."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES

from compmod_jax.core import sharding
from compmod_jax.core.intermediates import run, zero_units
from compmod_jax.core.sharding import MeshConfig
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import AttentionMask, Context, Newest
from compmod_jax.mechanisms.competition import drophead
from compmod_jax.mechanisms.competition.router import CompetitionConfig

DIM = 24
PLAIN = CompetitionConfig(key_dim=3, hidden_dim=6, routing="plain")
CONFIGS = {
  "soft": PLAIN,
  "rescaled": dataclasses.replace(PLAIN, rescale=True, temperature=0.7, scale=False),
  "best": dataclasses.replace(PLAIN, rule="top_k", keep=5),
  "threshold": dataclasses.replace(PLAIN, rule="threshold", threshold=0.1),
}
WAYS = ("plain", "fused")
SITES = ("heads", "router/signatures", "router/scores", "router/weights")


def numbers(*shape: int, seed: int) -> jax.Array:
  return jnp.asarray(np.float32(np.random.default_rng(seed).normal(size=shape)))


INPUTS, MEMORY = numbers(4, 6, DIM, seed=1), numbers(4, 7, DIM, seed=2)


def module(config: CompetitionConfig, routing: Any = "plain", **fields: Any) -> Attention:
  return Attention(DIM, 12, competition=dataclasses.replace(config, routing=routing), **fields)


@functools.cache
def params(cross: bool = False, tied: bool = False) -> Any:
  plain = module(PLAIN, cross=cross, tied_key_value=tied)
  shapes = jax.eval_shape(plain.init, jax.random.key(0), INPUTS, None, MEMORY if cross else None)
  leaves, tree = jax.tree.flatten(nn.unbox(shapes))
  made = [np.random.default_rng(n).normal(0, 0.3, leaf.shape) for n, leaf in enumerate(leaves)]
  return jax.tree.unflatten(tree, map(np.float32, made))


def output(
  one: Attention,
  params: Any,
  inputs: jax.Array = INPUTS,
  *,
  deterministic: bool = True,
  **asked: Any,
) -> Any:
  """Output and captured sites."""
  memory = MEMORY if one.cross else None
  ctx = Context(mask=AttentionMask(causal=True), deterministic=deterministic)
  (made, _), captured = run(one.apply, params, inputs, None, memory, ctx=ctx, **asked)
  return made, captured


def computed(one: Attention, **asked: Any) -> Any:
  """What `output` gives for this file's parameters and inputs."""
  return jax.jit(functools.partial(output, one, **asked))(params())


def differentiated(one: Attention, *sites: str) -> Any:
  """Value, with a term for each of these sites, and its gradients: of parameters and inputs."""
  weights = numbers(*INPUTS.shape, seed=3)

  def objective(params: Any, inputs: jax.Array) -> jax.Array:
    made, captured = output(one, params, inputs, capture=sites)
    return jnp.sum(weights * made) + sum(jnp.sum(jnp.sin(captured[site])) for site in sites)

  return jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))


def assert_close(expected: Any, found: Any) -> None:
  jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5), expected, found)


@pytest.mark.parametrize(
  ("config", "fields"),
  [
    *((name, {}) for name in CONFIGS),
    ("soft", {"cross": True}),
    ("soft", {"tied_key_value": True}),
  ],
)
def test_fused_routing_equals_the_plain_way_in_value_and_every_gradient(config, fields):
  held = params(fields.get("cross", False), fields.get("tied_key_value", False))
  plain, fused = (module(CONFIGS[config], how, **fields) for how in WAYS)
  assert_close(differentiated(plain)(held, INPUTS), differentiated(fused)(held, INPUTS))


def test_losses_of_scores_leave_it_fused_and_have_the_gradients_of_the_plain_way():
  site = "router/scores"
  assert is_fused(module(PLAIN, "fused"), capture=[site])
  plain, fused = (differentiated(module(PLAIN, how), site) for how in WAYS)
  assert_close(plain(params(), INPUTS), fused(params(), INPUTS))


@pytest.mark.parametrize(
  "layout", [MeshConfig(data=4, tensor=2), MeshConfig(data=1, fsdp=2, tensor=2, sequence=2)]
)
def test_on_a_mesh_every_device_fuses_its_own_tokens_and_heads(layout):
  fused, mesh = module(CONFIGS["best"], "fused"), sharding.make_mesh(layout)
  boxed = jax.eval_shape(fused.init, jax.random.key(0), INPUTS)
  held = jax.device_put(params(), sharding.parameter_shardings(boxed, mesh))
  placed = sharding.place_batch({"inputs": np.asarray(INPUTS)}, mesh)["inputs"]
  compiled = differentiated(fused).lower(held, placed)
  assert compiled.as_text().count("manual_computation") >= 2
  assert_close(differentiated(fused)(params(), INPUTS), compiled.compile()(held, placed))


def test_it_has_the_same_parameters_from_the_start():
  @jax.jit
  def made(key: jax.Array) -> Any:
    return [nn.unbox(module(PLAIN, how).init(key, INPUTS)) for how in WAYS]

  jax.tree.map(np.testing.assert_array_equal, *made(jax.random.key(4)))


def packed(program: Any, projections: int = 3) -> int:
  """How many products with queries (keys and values) have a router's first layer in them."""
  columns = projections * DIM + PLAIN.hidden_dim
  products = [line for line in str(program).splitlines() if "dot_general[" in line]
  return sum(f",{columns}]" in line for line in products)


def is_fused(one: Attention, **asked: Any) -> bool:
  """Whether the product with queries, keys and values has the router's first layer in it."""
  return packed(jax.make_jaxpr(lambda p, x: output(one, p, x, **asked))(params(), INPUTS)) == 1


def test_decoding_is_fused_from_the_prompt_on():
  def decoded(params: Any, how: str) -> tuple[jax.Array, ...]:
    """A prompt of three positions, and a step of two beams, as another layer reads them."""
    one, other = (module(CONFIGS["best"], how, cross=cross) for cross in (False, True))
    one, other = one.bind(params[0]), other.bind(params[1])
    causal = Context(mask=AttentionMask(causal=True))
    first, cache = one(INPUTS[:, :3], one.initial_state(4, 5), ctx=causal)
    newest = Context(newest=Newest(jnp.int32(3), jnp.ones((4, 1, 2, 5), bool)))
    step, _ = one(INPUTS[:, 3:5], cache, ctx=newest)
    sees = Context(memory_mask=jnp.ones((4, 1, 1, 7), bool))
    read, _ = other(step, other.memory_state(MEMORY), ctx=sees)
    return first, step, read

  held = params(), params(cross=True)
  programs = [jax.make_jaxpr(functools.partial(decoded, how=how))(held) for how in WAYS]
  assert [packed(program) for program in programs] == [0, 2]
  assert [packed(program, 1) for program in programs] == [0, 1]
  assert_close(*(jax.jit(functools.partial(decoded, how=how))(held) for how in WAYS))


@pytest.mark.parametrize(
  "more", [{}, {"router/scores": lambda a: a - jnp.arange(12.0)[None, None]}]
)
def test_what_is_between_the_kernels_can_be_read_and_changed_while_fused(more):
  edits = {"router/weights": zero_units(2), "router/signatures": lambda a: 2 * a} | more
  asked = {"capture": SITES, "edits": edits}
  plain, fused = module(PLAIN), module(PLAIN, "fused")
  assert is_fused(fused, **asked)
  assert not is_fused(plain, **asked)
  expected, found = (computed(one, **asked) for one in (plain, fused))
  assert set(found[1]) == set(SITES)
  assert_close(expected, found)


@pytest.mark.parametrize("fields", [{}, {"rescale": True}])
def test_scaled_heads_can_be_read_and_changed_while_fused(fields):
  config = dataclasses.replace(PLAIN, **fields)
  asked = {"capture": ["heads_scaled"], "edits": {"heads_scaled": lambda a: jnp.sin(2 * a)}}
  fused = module(config, "fused")
  assert is_fused(fused, **asked)
  expected, found = (computed(one, **asked) for one in (module(config), fused))
  assert set(found[1]) == {"heads_scaled"}
  assert_close(expected, found)
  assert np.max(np.abs(np.subtract(found[0], computed(fused)[0]))) > 1e-3


def test_reading_what_the_layer_forms_changes_no_bit():
  fused = module(PLAIN, "fused")
  plain, _ = computed(fused)
  for site in ("heads", "heads_scaled", "router/weights"):
    np.testing.assert_array_equal(computed(fused, capture=[site])[0], plain)


def test_what_kernels_do_not_do_runs_the_plain_way():
  config = dataclasses.replace(PLAIN, inactive="value", rule="top_k")
  assert not is_fused(module(config, "fused"))
  expected, found = (computed(module(config, how))[0] for how in WAYS)
  np.testing.assert_array_equal(expected, found)


def test_heads_and_units_of_the_inference_network_are_dropped_while_fused():
  config = dataclasses.replace(PLAIN, dropout=0.5)
  edits = drophead.edits(
    drophead.DropHeadConfig("constant", start=0.5), ["heads"], rng=jax.random.key(1), progress=0.0
  )
  asked = {"edits": edits, "deterministic": False, "rngs": {"dropout": jax.random.key(0)}}
  assert is_fused(module(config, "fused"), **asked)
  expected, found = (computed(module(config, how), **asked) for how in WAYS)
  assert_close(expected, found)
  kept = computed(module(PLAIN, "fused"), edits=edits)[0]
  assert np.max(np.abs(np.subtract(found[0], kept))) > 1e-3


@pytest.mark.parametrize(("platform", "call"), [("tpu", "tpu_custom_call"), ("cuda", "gpu.triton")])
def test_accelerators_get_the_kernels_by_themselves_and_cpus_none(platform, call):
  one = Attention(512, 8, competition=CompetitionConfig())
  inputs = jax.ShapeDtypeStruct((2, 256, 512), jnp.float32)
  held = jax.eval_shape(one.init, jax.random.key(0), inputs)
  with sharding.tracing_for(DEVICES[platform]):
    traced = jax.jit(one.apply).trace(held, inputs)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count(call) >= 2
  assert "custom_call" not in jax.jit(one.apply).lower(held, inputs).as_text()
