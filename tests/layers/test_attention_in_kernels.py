"""The attention layer by kernels, in the interpreter, beside the same layer without them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core import sharding
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.kernels.attention import dispatch
from compmod_jax.kernels.attention.distances import DistanceBias
from compmod_jax.kernels.routing.dispatch import Plan
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.mechanisms.competition.router import CompetitionConfig

PLATFORMS = ("gpu", "tpu")
BATCH, TIME, KEYS, DIM, HEADS = 2, 20, 13, 128, 4
SOFT = CompetitionConfig(hidden_dim=16, key_dim=8)
PACKED = CompetitionConfig(
  hidden_dim=128, key_dim=8, dtype="model", rule="top_k", keep=1, rescale=True
)


@pytest.fixture
def in_kernels(monkeypatch):
  """From its name to programs that are made for an accelerator which the interpreter plays."""

  def begin(name: str) -> None:
    def plan(implementation, interpret, blocks, refusals, array):
      return None if refusals()[name] else Plan((name,), True, True, blocks)

    monkeypatch.setattr(dispatch, "make_plan", plan)

  return begin


def numbers(*shape: int, seed: int) -> jax.Array:
  return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def valid(time: int, lengths: tuple[int, ...]) -> jax.Array:
  return jax.device_put(np.arange(time) < np.array(lengths)[:, None])


MASKS = {
  "none": lambda: AttentionMask(),
  "causal, padding": lambda: AttentionMask(causal=True, valid=valid(TIME, (20, 14))),
  "sliding window": lambda: AttentionMask(causal=True, window=5),
  "segments behind a prefix": lambda: AttentionMask(
    causal=True,
    prefix=3,
    segments=jax.device_put(np.repeat([[1, 2, 3]], [6, 6, 5], axis=1).astype(np.int32)),
  ),
}
SHARED = CompetitionConfig(hidden_dim=16, key_dim=8, rule="top_k", keep=1, shared_heads=1)
COMPETITIONS = {"plain": None, "soft": SOFT, "inside": PACKED, "shared": SHARED}


def layer(name: str, cross: bool = False, dropout: float = 0.0) -> Attention:
  """Of a competition by name, behind `gated`, `unscaled`, or what positions are.

  These are ALiBi (`distant`) or rotary; `unscaled` are T5's logits and projections.
  """
  more, _, competition = name.removeprefix("biased ").rpartition(" ")
  positions = {"distant": "alibi", "rotary": "rotary"}.get(more, "learned")
  options = {"cross": cross, "dropout": dropout, "head_dim": 64, "positions": positions}
  if more == "unscaled":
    options |= {"scale_logits": False, "biases": False}
  return Attention(
    DIM, HEADS, competition=COMPETITIONS[competition], gated=more == "gated", **options
  )


def context(name: str, mask: str) -> Context:
  """Under a mask by name; a `biased` layer's logits have a number for every distance added."""
  bias = DistanceBias(numbers(HEADS, 2 * TIME - 1, seed=5)) if "biased" in name else None
  return Context(mask=MASKS[mask](), position_bias=bias)


@functools.cache
def params(name: str, cross: bool = False):
  inputs = numbers(BATCH, TIME, DIM, seed=0)
  memory = numbers(BATCH, KEYS, DIM, seed=0) if cross else None
  module = layer(name, cross)
  return drawn(module.init, inputs, None, memory, seed=1, spread=0.1)


def outcome(module, given, inputs, ctx, memory=None, capture=()):
  """Outputs, captured sites, and gradients of parameters, inputs and a bias."""

  def run(given, inputs, position_bias, memory, mask, memory_mask):
    intermediates = Intermediates(capture=frozenset(capture))
    context = Context(
      deterministic=ctx.deterministic,
      mask=mask,
      position_bias=position_bias,
      memory_mask=memory_mask,
      intermediates=intermediates,
    )
    rngs = {"dropout": jax.random.key(9)}
    outputs, _ = module.apply(given, inputs, None, memory, ctx=context, rngs=rngs)
    return outputs, dict(intermediates.captured)

  def total(*args):
    outputs, captured = run(*args)
    return jnp.sum(jnp.sin(outputs)), (outputs, captured)

  program = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))
  args = (given, inputs, ctx.position_bias, memory, ctx.mask, ctx.memory_mask)
  return jax.device_get(program(*args)), str(program.trace(*args).jaxpr)


def assert_close(found, true):
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize(
  ("name", "mask"),
  [
    ("plain", "segments behind a prefix"),
    ("soft", "causal, padding"),
    ("soft", "sliding window"),
    ("inside", "none"),
    ("shared", "none"),
    ("gated plain", "causal, padding"),
    ("gated inside", "none"),
    ("distant soft", "causal, padding"),
    ("rotary soft", "causal, padding"),
    ("unscaled soft", "causal, padding"),
    ("unscaled inside", "none"),
    ("biased plain", "segments behind a prefix"),
    ("biased inside", "causal, padding"),
  ],
)
def test_self_attention_is_the_same(name, mask, in_kernels):
  module, given = layer(name), params(name)
  inputs, ctx = numbers(BATCH, TIME, DIM, seed=2), context(name, mask)
  sites = ("heads_scaled", *["head_gates"] * module.gated)
  sites += ("router/weights",) * (module.competition is not None)
  true, before = outcome(module, given, inputs, ctx, capture=sites)
  assert "pallas_call" not in before
  for platform in PLATFORMS:
    in_kernels(platform)
    found, text = outcome(module, given, inputs, ctx, capture=sites)
    # Forward and backward, what a GPU's forms before the latter and sums of diagonals, and those of
    # the competition where it is inside.
    count = 2 + (platform == "gpu") * (1 + name.startswith("biased")) + 2 * name.endswith("inside")
    assert text.count("pallas_call[") == count
    assert set(found[1][1]) == set(sites)
    assert_close(found, true)


def test_cross_attention_is_the_same(in_kernels):
  module, given = layer("soft", cross=True), params("soft", cross=True)
  inputs, memory = numbers(BATCH, TIME, DIM, seed=2), numbers(BATCH, KEYS, DIM, seed=3)
  ctx = Context(memory_mask=valid(KEYS, (13, 6))[:, None, None])
  sites = ("heads_scaled", "router/weights")
  true, _ = outcome(module, given, inputs, ctx, memory, capture=sites)
  for platform in PLATFORMS:
    in_kernels(platform)
    found, text = outcome(module, given, inputs, ctx, memory, capture=sites)
    assert text.count("pallas_call[") == 2 + (platform == "gpu")
    # Heads are multiplied inside.
    assert f"f32[{BATCH},{TIME},{HEADS},64] = mul" not in text
    assert_close(found, true)


@pytest.mark.parametrize(
  ("name", "tensor"),
  [("soft", 2), ("inside", 1), ("distant plain", 2), ("biased rotary plain", 2)],
)
def test_devices_have_their_examples_and_heads(name, tensor, in_kernels):
  module, given = layer(name), params(name)
  inputs, ctx = numbers(BATCH, TIME, DIM, seed=2), context(name, "causal, padding")
  true, _ = outcome(module, given, inputs, ctx)
  devices = jax.devices()[: 2 * tensor]
  mesh = sharding.make_mesh(sharding.MeshConfig(data=2, tensor=tensor), devices)
  for platform in PLATFORMS:
    in_kernels(platform)
    with jax.set_mesh(mesh):
      spread = jax.device_put(inputs, sharding.batch_sharding(mesh))
      found, text = outcome(module, given, spread, ctx)
    assert "shard_map" in text
    assert_close(found, true)


@pytest.mark.parametrize(
  ("name", "mask", "dropout"),
  [
    ("soft", "causal, padding", 0.0),
    ("plain", "segments behind a prefix", 0.0),
    ("inside", "causal, padding", 0.3),
    ("biased soft", "causal, padding", 0.0),
  ],
)
def test_devices_have_their_times(name, mask, dropout, in_kernels):
  module, given = layer(name, dropout=dropout), params(name)
  inputs, ctx = numbers(BATCH, TIME, DIM, seed=2), context(name, mask)
  ctx = dataclasses.replace(ctx, deterministic=dropout == 0)
  true, _ = outcome(module, given, inputs, ctx)
  mesh = sharding.make_mesh(sharding.MeshConfig(data=2, sequence=4), jax.devices())
  for platform in PLATFORMS:
    in_kernels(platform)
    with jax.set_mesh(mesh):
      spread = jax.device_put(inputs, sharding.batch_sharding(mesh))
      found, text = outcome(module, given, spread, ctx)
    assert "pallas_call" in text
    # A device's queries of all heads: a fourth of the times of one of two examples.
    assert f"f32[{TIME // 4},{HEADS * 64}]" in text
    assert_close(found, true)


def test_devices_have_their_times_of_the_sequence_that_asks(in_kernels):
  module, given = layer("soft", cross=True), params("soft", cross=True)
  inputs, memory = numbers(BATCH, TIME, DIM, seed=2), numbers(BATCH, KEYS, DIM, seed=3)
  ctx = Context(memory_mask=valid(KEYS, (13, 6))[:, None, None])
  true, _ = outcome(module, given, inputs, ctx, memory)
  mesh = sharding.make_mesh(sharding.MeshConfig(data=1, sequence=2, tensor=2), jax.devices()[:4])
  for platform in PLATFORMS:
    in_kernels(platform)
    with jax.set_mesh(mesh):
      spread = jax.device_put(inputs, sharding.batch_sharding(mesh))
      found, text = outcome(module, given, spread, ctx, memory)
    assert "pallas_call" in text
    assert_close(found, true)


@pytest.mark.parametrize(
  ("cross", "causal", "tensor"),
  [(False, False, 1), (True, False, 1), (False, False, 2), (False, True, 2)],
)
def test_heads_leave_out_tokens_that_did_not_choose_them(cross, causal, tensor, in_kernels):
  """With the same results: on a CPU, and by a GPU's kernels on several devices; not on TPUs."""
  competition = CompetitionConfig(hidden_dim=16, key_dim=8, rule="top_k", keep=1, rescale=True)
  every, some = (
    Attention(
      DIM, HEADS, cross=cross, head_dim=64, competition=dataclasses.replace(competition, skip=skip)
    )
    for skip in (False, True)
  )
  given, time = params("soft", cross), 256
  inputs, read = numbers(BATCH, time, DIM, seed=2), valid(time, (time, 200))
  memory = numbers(BATCH, time, DIM, seed=3) if cross else None
  ctx = Context(AttentionMask(causal=causal, valid=read))
  ctx = Context(memory_mask=read[:, None, None]) if cross else ctx
  true, before = outcome(every, given, inputs, ctx, memory)
  found, text = outcome(some, given, inputs, ctx, memory)
  assert (" cond[" in before, " cond[" in text) == (False, True)
  assert_close(found, true)
  mesh = sharding.make_mesh(sharding.MeshConfig(data=2, tensor=tensor), jax.devices()[: 2 * tensor])
  for platform in PLATFORMS:
    in_kernels(platform)
    with jax.set_mesh(mesh):
      spread = jax.device_put(inputs, sharding.batch_sharding(mesh))
      found, text = outcome(some, given, spread, ctx, memory)
    assert text.count("pallas_call[") == 2 + (platform == "gpu")
    assert (" sort[" in text) == (platform == "gpu")
    assert_close(found, true)


def test_in_packed_texts_no_token_is_left_out(in_kernels):
  skip = CompetitionConfig(hidden_dim=16, key_dim=8, rule="top_k", keep=1, skip=True)
  module = Attention(DIM, HEADS, head_dim=64, competition=skip)
  mask = AttentionMask(causal=True, segments=jnp.broadcast_to(jnp.arange(256) // 100, (BATCH, 256)))
  inputs, ctx = numbers(BATCH, 256, DIM, seed=2), Context(mask)
  for platform in (None, *PLATFORMS):
    if platform is not None:
      in_kernels(platform)
    _, text = outcome(module, params("soft"), inputs, ctx)
    assert " sort[" not in text


@pytest.mark.parametrize(("name", "cross"), [("inside", False), ("soft", True)])
def test_the_same_probabilities_are_dropped(name, cross, in_kernels):
  module, given = layer(name, cross, dropout=0.3), params(name, cross)
  inputs, memory = numbers(BATCH, TIME, DIM, seed=2), numbers(BATCH, KEYS, DIM, seed=3)
  ctx, memory = Context(deterministic=False), memory if cross else None
  true, before = outcome(module, given, inputs, ctx, memory)
  assert "pallas_call" not in before
  for platform in PLATFORMS:
    in_kernels(platform)
    found, text = outcome(module, given, inputs, ctx, memory)
    assert "pallas_call" in text
    assert_close(found, true)


@pytest.mark.parametrize(
  ("site", "platforms"),
  [("attention", ("gpu",)), ("heads", PLATFORMS), ("router/scores", ("gpu",))],
)
def test_what_kernels_do_not_form_is_formed_where_it_is_asked_for(site, platforms, in_kernels):
  module, given = layer("soft"), params("soft")
  inputs, ctx = numbers(BATCH, TIME, DIM, seed=2), Context(mask=AttentionMask(causal=True))
  true, _ = outcome(module, given, inputs, ctx, capture=(site,))
  for platform in platforms:
    in_kernels(platform)
    found, _ = outcome(module, given, inputs, ctx, capture=(site,))
    assert site in found[1][1]
    assert_close(found, true)


@pytest.mark.parametrize(
  ("fields", "kernel"),
  [
    ({"positions": "none"}, True),
    ({"positions": "relative", "head_dim": None}, False),
    ({"form": "geometric"}, False),
  ],
)
def test_what_kernels_do_not_know_goes_without_them(fields, kernel, in_kernels):
  module = Attention(DIM, HEADS, **({"head_dim": 64} | fields))
  inputs = numbers(BATCH, TIME, DIM, seed=2)
  ctx = Context(mask=AttentionMask(causal=True))
  given = drawn(module.init, inputs)
  for platform in PLATFORMS:
    in_kernels(platform)
    made = jax.make_jaxpr(lambda given: module.apply(given, inputs, ctx=ctx)[0])(given)
    assert ("pallas_call" in str(made)) == kernel


def test_masks_that_kernels_do_not_know_are_told():
  known = AttentionMask(causal=True)
  assert known.visibility() is not None
  pairs = jax.device_put(np.ones((1, 1, TIME, TIME), bool))
  for other in (AttentionMask(explicit=pairs), known & known, known | known):
    assert other.visibility() is None
