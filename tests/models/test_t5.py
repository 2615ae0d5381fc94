"""T5's options: buckets of distances, norms by the root mean square, no biases, gated layers."""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from random_parameters import drawn

from compmod_jax.core.config import from_json
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.kernels.attention.distances import dense
from compmod_jax.layers.basic import FeedForward, layer_norm
from compmod_jax.layers.context import PositionIds
from compmod_jax.layers.positions import RelativeBias, distance_buckets
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.t5 import t5, t5_v1_1
from compmod_jax.models.transformer import ATTENTION_KINDS, Transformer, TransformerConfig

SIZES = {"encoder_layers": 2, "decoder_layers": 2, "dim": 12, "heads": 2, "ffn_dim": 10}
SOURCE = np.array([[4, 5, 6, 7, 8, 9, 4], [10, 11, 12, 0, 0, 0, 0]])
TARGET = np.array([[2, 4, 5, 6, 7], [8, 9, 10, 11, 0]])


@functools.cache
def _buckets(buckets: int, most: int, bidirectional: bool) -> Any:
  how = {"buckets": buckets, "most": most, "bidirectional": bidirectional}
  return jax.jit(functools.partial(distance_buckets, **how))


def bucket_of(distances: Any, buckets: int, most: int, bidirectional: bool = True) -> np.ndarray:
  return np.asarray(_buckets(buckets, most, bidirectional)(distances))


def random_parameters(module: nn.Module, *args: Any) -> Any:
  return drawn(module.init, *args, seed=4, spread=0.4)["params"]


def edges(buckets: int, most: int) -> list[int]:
  """The least distance of every bucket of one direction, by exact search over integers.

  The k-th of the logarithmic buckets begins where (d / exact)^(buckets - exact) reaches
  (most / exact)^k, which integers decide without a logarithm.
  """
  exact = buckets // 2
  found = list(range(exact))
  for k in range(buckets - exact):
    steps = buckets - exact
    found.append(
      next(d for d in range(exact, most + 1) if (d**steps) * exact**k >= exact**steps * most**k)
    )
  return found


@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (32, 100), (12, 50)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_grow_as_the_powers_of_the_equation(buckets, most, bidirectional):
  distances = np.arange(-2 * most, 2 * most)
  found = bucket_of(distances, buckets, most, bidirectional)
  one_way = buckets // 2 if bidirectional else buckets
  starts = np.asarray(edges(one_way, most))
  past = np.searchsorted(starts, np.abs(distances), side="right") - 1
  later = one_way + past if bidirectional else 0
  wanted = np.where(distances < 0, later, past)
  # Where a power is met exactly, float32 may fall to either side.
  tie = np.isin(
    np.abs(distances), [s for s in starts[one_way // 2 + 1 :] if _is_tie(s, one_way, most)]
  )
  np.testing.assert_array_equal(found[~tie], wanted[~tie])
  assert np.abs(found - wanted)[tie].max(initial=0) <= 1
  assert (found.min(), found.max()) == (0, buckets - 1)


def _is_tie(start: int, buckets: int, most: int) -> bool:
  exact, steps, start = buckets // 2, buckets - buckets // 2, int(start)
  return any((start**steps) * exact**k == exact**steps * most**k for k in range(1, steps))


def test_the_last_bucket_begins_at_the_greatest_distance_times_a_root():
  """Of 16 buckets one way and distance 128: 8 exact ones, then 8 * 16^(k / 8)."""
  far = bucket_of(np.arange(200), 32, 128)
  start = 8 * 16 ** (7 / 8)
  assert (far[math.floor(start)], far[math.ceil(start)]) == (14, 15)
  assert set(far[128:]) == {15}


def test_a_relative_bias_is_the_table_s_number_for_the_distance():
  module = RelativeBias(heads=3, buckets=8, most=20, bidirectional=True)
  queries, keys = np.array([0, 4, 9]), np.array([0, 1, 5, 30])
  table = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

  @jax.jit
  def call(params, queries, keys):
    return module.apply({"params": params}, 3, PositionIds(queries, keys, 31))

  found = np.asarray(call({"table": table}, queries[None], keys[None]))
  assert found.shape == (1, 3, 3, 4)
  buckets = bucket_of(queries[:, None] - keys[None], 8, 20)
  for t in range(3):
    for s in range(4):
      np.testing.assert_array_equal(found[0, :, t, s], table[buckets[t, s]])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_a_relative_bias_of_positions_that_count_from_0_has_the_numbers_of_given_ones(
  bidirectional,
):
  module, time = RelativeBias(heads=3, buckets=8, most=20, bidirectional=bidirectional), 33
  table = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
  slope = np.random.default_rng(1).normal(size=(1, 3, time, time)).astype(np.float32)
  ids = jnp.arange(time)[None]

  def found(given):
    def bias(table):
      return dense(module.apply({"params": {"table": table}}, time, given))

    made, back = jax.vjp(bias, table)
    return made, back(slope)[0]

  mine, theirs = jax.jit(found)(None), jax.jit(found)(PositionIds(ids, ids, time))
  np.testing.assert_array_equal(mine[0], theirs[0])
  np.testing.assert_allclose(mine[1], theirs[1], rtol=1e-5, atol=1e-4)


def test_the_norm_divides_by_the_root_mean_square_alone():
  x = np.random.default_rng(1).normal(3.0, 2.0, size=(2, 3, 7)).astype(np.float32)
  scale = np.linspace(0.5, 2, 7, dtype=np.float32)
  module = layer_norm(jnp.float32, 1e-3, kind="rms")
  found = jax.jit(module.apply)({"params": {"scale": scale}}, x)
  wide = x.astype(np.float64)
  expected = scale * wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-3)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_gated_layer_is_a_product_of_two():
  x = np.random.default_rng(2).normal(size=(2, 3, 4)).astype(np.float32)
  module = FeedForward(4, 5, "relu", gated=True, biases=False)
  params = random_parameters(module, x)
  assert set(flatten_dict(params, sep="/")) == {"up/kernel", "gate/kernel", "down/kernel"}
  up, gate, down = (params[name]["kernel"] for name in ("up", "gate", "down"))
  expected = (np.maximum(x @ gate, 0) * (x @ up)) @ down
  np.testing.assert_allclose(jax.jit(module.apply)({"params": params}, x), expected, atol=1e-5)


@functools.cache
def made(config: TransformerConfig) -> tuple[Transformer, Any]:
  module = Transformer(config, 15, 15)
  return module, random_parameters(module, SOURCE, TARGET)


@functools.cache
def applied(module: Transformer) -> Any:
  return jax.jit(module.apply)


def slopes(module: Transformer, params: Any) -> Any:
  """Of a loss on all logits."""

  @jax.jit
  @jax.grad
  def slope(params, source, target):
    return jnp.sum(jnp.sin(module.apply({"params": params}, source, target)))

  return slope(params, SOURCE, TARGET)


PLAIN = t5(**SIZES, dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0)
COMPETING = dataclasses.replace(
  t5_v1_1(**SIZES, head_dim=5, dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0),
  compete=ATTENTION_KINDS,
  competition=CompetitionConfig(key_dim=3, hidden_dim=4),
)


def test_there_is_no_bias_and_one_table_of_distances_for_all_layers_of_a_side():
  names = flatten_dict(made(PLAIN)[1], sep="/")
  assert [name for name in names if name.endswith("/bias")] == []
  assert {name for name in names if name.endswith("_bias/table")} == {
    "encoder_bias/table",
    "decoder_bias/table",
  }


def test_attention_is_the_softmax_of_products_that_are_not_divided():
  """The whole first sub-layer of the encoder, written out in NumPy."""
  module, params = made(PLAIN)
  x = params["decoder_embedding"]["table"][SOURCE[:1]] * math.sqrt(12)
  layer = params["encoder_0"]
  scale = layer["self_residual"]["scale"]["scale"]
  norm = scale * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)
  kernel = layer["self_attention"]["query_key_value"]["kernel"]
  query, key, value = (np.einsum("btm,mhd->bthd", norm, kernel[:, :, i]) for i in range(3))
  distance = np.arange(7)[:, None] - np.arange(7)[None]
  bias = params["encoder_bias"]["table"][bucket_of(distance, 32, 128)]
  logits = np.einsum("bthd,bshd->bhts", query, key) + np.moveaxis(bias, -1, 0)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  heads = np.einsum("bhts,bshd->bthd", weights, value)

  sites = ("encoder/layer_0/self/heads", "encoder/layer_0/self/attention")
  call = functools.partial(run, module.apply, method="encode", capture=sites)
  _, found = jax.jit(call)({"params": params}, SOURCE[:1])
  np.testing.assert_allclose(found["encoder/layer_0/self/attention"], weights, atol=1e-5)
  np.testing.assert_allclose(found["encoder/layer_0/self/heads"], heads, atol=1e-5)


def test_fresh_logits_of_attention_are_as_large_as_those_that_are_divided():
  """T5 leaves the division out and starts queries smaller by as much."""

  @functools.partial(jax.jit, static_argnums=0)
  def fresh(config, source, target):
    module = Transformer(config, 15, 15)
    return module.init_with_output(jax.random.key(0), source, target)[0]

  small = dataclasses.replace(PLAIN, encoder_layers=1, decoder_layers=1)
  np.testing.assert_allclose(
    fresh(small, SOURCE, TARGET),
    fresh(dataclasses.replace(small, scale_logits=True), SOURCE, TARGET),
    atol=1e-5,
  )


@pytest.mark.parametrize("config", [PLAIN, COMPETING], ids=["plain", "competing"])
def test_decoding_with_a_cache_equals_the_whole_pass(config):
  module, params = made(config)
  whole = np.asarray(applied(module)({"params": params}, SOURCE, TARGET))
  fill = jax.jit(functools.partial(module.apply, beams=2, length=5, method="prefill"))
  cache = fill({"params": params}, SOURCE)
  step = jax.jit(functools.partial(module.apply, method="step"))
  for t in range(TARGET.shape[1]):
    tokens = np.broadcast_to(TARGET[:, t : t + 1], (2, 2))
    logits, cache = step({"params": params}, cache, tokens)
    logits = np.asarray(logits)
    np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=1e-5)
    np.testing.assert_allclose(logits[:, 1], whole[:, t], atol=1e-5)


def test_rematerialisation_changes_neither_loss_nor_gradients_nor_those_of_the_bias():
  module, params = made(PLAIN)
  plain, again = (
    slopes(module.clone(config=dataclasses.replace(PLAIN, remat=remat)), params)
    for remat in (False, True)
  )
  assert np.abs(plain["encoder_bias"]["table"]).max() > 1e-4
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, again)


def test_every_parameter_of_a_competing_t5_has_a_gradient():
  for path, slope in flatten_dict(slopes(*made(COMPETING)), sep="/").items():
    assert np.abs(slope).max() > 0, path


def test_no_prediction_depends_on_a_later_token():
  module, params = made(COMPETING)
  changed = TARGET.copy()
  changed[:, 3] = 14
  first, second = (
    np.asarray(applied(module)({"params": params}, SOURCE, target)) for target in (TARGET, changed)
  )
  np.testing.assert_array_equal(first[:, :3], second[:, :3])
  assert np.abs(first[:, 3:] - second[:, 3:]).max() > 1e-4


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"relative_buckets": 7}, "model.relative_buckets is 7"),
    ({"relative_distance": 16}, "model.relative_distance is 16"),
    ({"head_dim": 0}, "model.head_dim is 0"),
    ({"head_dim": 5, "positions": "rotary"}, "Leave head_dim out"),
    ({"expert_layers": ("encoder",)}, "Use biases = True"),
  ],
)
def test_a_bad_configuration_names_field_value_and_rule(fields, words):
  with pytest.raises(UserError, match=words):
    t5(**{**SIZES, **fields})


def test_models_without_a_bias_of_distances_refuse_it():
  with pytest.raises(UserError, match="positions is"):
    from_json(NemotConfig, {"positions": "relative_bias"})


def test_inputs_that_share_a_table_need_one_vocabulary():
  with pytest.raises(UserError, match="'inputs'"):
    jax.eval_shape(Transformer(COMPETING, 15, 16).init, jax.random.key(0), SOURCE, TARGET)
