"""Sharding: every layout of eight devices trains like one device."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from compmod_jax.core import sharding
from compmod_jax.core.errors import UserError
from compmod_jax.core.sharding import MeshConfig, make_mesh
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.transformer import ATTENTION_KINDS, TransformerConfig
from compmod_jax.tasks.translation import Splits, Translation, TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig
from compmod_jax.training.run import Run, sharing_of
from compmod_jax.training.step import TrainState, make_step, trainable_mask

LAYOUTS = [
  MeshConfig(data=8),
  MeshConfig(data=1, fsdp=8),
  MeshConfig(data=1, fsdp=2, tensor=4),
  MeshConfig(data=2, fsdp=2, tensor=2),  # data and tensor are here, too
  MeshConfig(data=2, expert=4),
  MeshConfig(data=1, expert=2, sequence=4),
  MeshConfig(data=1, fsdp=2, tensor=2, sequence=2),
]
SOURCE_TYPES, TARGET_TYPES = 16, 19  # 16 can be split, 19 cannot


def name(layout: MeshConfig) -> str:
  return "_".join(f"{axis}{size}" for axis, size in vars(layout).items() if size > 1)


HEADS = CompetitionConfig(key_dim=6, hidden_dim=8, balance=0.1, z=0.01)
CHOSEN = dataclasses.replace(HEADS, rule="top_k", keep=1)


@functools.cache
def task() -> Translation:
  words = TokenizerConfig(kind="words", vocab_size=40)
  config = TranslationConfig(data=TextData(), batch=BatchConfig(tokens=128, buckets=(8,)))
  model = TransformerConfig(
    encoder_layers=1,
    decoder_layers=1,
    dim=16,
    heads=4,
    ffn_dim=32,
    dropout=0.1,
    max_length=8,
    compete=ATTENTION_KINDS,
    competition=HEADS,
    expert_layers=("decoder",),
    experts=ExpertsConfig(4, competition=CHOSEN, implementation="blocked"),
  )
  tokenizers = [
    train_tokenizer([" ".join(f"w{n}" for n in range(types - 4))], words)
    for types in (SOURCE_TYPES, TARGET_TYPES)
  ]
  return config.build_with(model, Splits(config.data), *tokenizers)


@functools.cache
def batch() -> dict[str, np.ndarray]:
  """Sixteen pairs of ragged lengths, one of them a filler."""
  random = np.random.default_rng(0)

  def side(types: int) -> np.ndarray:
    lengths = np.where(np.arange(16) == 5, 0, random.integers(2, 9, size=16))
    tokens = random.integers(4, types, size=(16, 8)).astype(np.int32)
    return np.where(np.arange(8) < lengths[:, None], tokens, 0).astype(np.int32)

  index = np.arange(16, dtype=np.int32)
  return {"source": side(SOURCE_TYPES), "target": side(TARGET_TYPES), "index": index}


# Plain gradient descent: Adam divides rounding by rounding where a gradient is zero.
KEY = jax.random.key(0)
SGD = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=1, clip=1.0)


def make_run(
  layout: MeshConfig,
  devices: int = 8,
  optimizer: OptimizerConfig = SGD,
  ema: float = 0.0,
  shard_optimizer: bool = False,
) -> Run:
  experiment = Experiment(
    name="layouts",
    task=task().dataset.config,
    model=task().model.config,
    optimizer=optimizer,
    phases=(Phase(steps=10),),
    mesh=layout,
    ema=ema,
    shard_optimizer=shard_optimizer,
  )
  mesh = make_mesh(layout, jax.devices()[:devices])
  return Run(
    experiment=experiment,
    workdir=Path("unused"),
    task=task(),
    mesh=mesh,
    sharing=sharing_of(mesh),
    iterators=[],
    batches_per_epoch=[10],
    notes=[],
  )


@functools.cache
def start() -> TrainState:
  """The first state, on the host."""
  return jax.device_get(make_run(MeshConfig(data=1), 1).fresh_state())


def one_expert_for_all(state: TrainState) -> TrainState:
  """The state with experts that score alike: the first one gets every token."""
  flat: Any = flatten_dict(state.params, sep="/")
  name = "decoder_0/ffn/router/signatures"
  return state.replace(params=unflatten_dict({**flat, name: 0 * flat[name]}, sep="/"))


class Trained(NamedTuple):
  """Objectives of two steps, the share of tokens of each expert in the first, the state after."""

  losses: list[float]
  shares: np.ndarray
  state: TrainState


def train(run: Run, begin: TrainState | None = None) -> dict[str, Trained]:
  """Two steps from a fresh state, and from one in which a single expert gets all tokens."""
  begin = start() if begin is None else begin
  experiment = run.experiment
  step = make_step(
    run.task,
    run.optimizer,
    run.rate,
    micro_batches=1,
    ema=experiment.ema,
    mask=trainable_mask(start().params, "all"),
    update_shardings=run.update_shardings if experiment.shard_optimizer else None,
  )
  jitted = jax.jit(step, out_shardings=(run.state_shardings, sharding.replicated(run.mesh)))
  found = {}
  for name, first in (("fresh", begin), ("one expert", one_expert_for_all(begin))):
    state, losses, shares = jax.device_put(first, run.state_shardings), [], []
    for _ in range(2):
      state, metrics = jitted(state, run.sharing.place(batch()), KEY)
      losses.append(float(metrics["objective"]))
      wins, tokens = metrics["task"]["router/decoder/layer_0/ffn/wins"]
      shares.append(np.asarray(wins / tokens))
    found[name] = Trained(losses, shares[0], state)
  return found


@functools.cache
def single() -> dict[str, Trained]:
  return jax.device_get(train(make_run(MeshConfig(data=1), 1)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_every_layout_gives_the_losses_and_updates_of_one_device(layout):
  found = train(make_run(layout))
  for start, expected in single().items():
    np.testing.assert_allclose(found[start].losses, expected.losses, rtol=1e-5)
    np.testing.assert_array_equal(found[start].shares, expected.shares)
    pairs = [jax.tree.leaves(one.state.params) for one in (found[start], expected)]
    for one, two in zip(*pairs, strict=True):
      np.testing.assert_allclose(np.asarray(one), two, rtol=1e-5, atol=1e-6)


MOMENTUM = dataclasses.replace(SGD, momentum=0.9)


@functools.cache
def single_with_momentum() -> tuple[TrainState, dict[str, Trained]]:
  """The first state on the host, and two steps of one device with momentum and an average."""
  run = make_run(MeshConfig(data=1), 1, MOMENTUM, ema=0.9)
  begin = jax.device_get(run.fresh_state())
  return begin, jax.device_get(train(run, begin))


@pytest.mark.parametrize(
  "layout", [MeshConfig(data=8), MeshConfig(data=2, fsdp=2, tensor=2)], ids=name
)
def test_an_optimizer_that_is_divided_makes_the_updates_of_one_device(layout):
  begin, single = single_with_momentum()
  run = make_run(layout, 8, MOMENTUM, ema=0.9, shard_optimizer=True)
  found = train(run, begin)
  for start, expected in single.items():
    np.testing.assert_allclose(found[start].losses, expected.losses, rtol=1e-5)
    pairs = [jax.tree.leaves(one.state) for one in (found[start], expected)]
    for one, two in zip(*pairs, strict=True):
      np.testing.assert_allclose(np.asarray(one), two, rtol=1e-5, atol=1e-6)
  state = found["fresh"].state
  assert jax.tree.map(lambda leaf: leaf.sharding, state.params) == run.state_shardings.params
  up = state.params["encoder_0"]["ffn"]["up"]["kernel"]
  trace = next(part for part in state.opt_state if hasattr(part, "trace")).trace
  moment = trace["encoder_0"]["ffn"]["up"]["kernel"]
  parts = {one.data.shape for one in moment.addressable_shards}
  whole = up.addressable_shards[0].data.shape
  if layout.data == 8:
    assert (parts, whole) == ({(2, 32)}, (16, 32))
  else:  # both dimensions are divided already
    assert parts == {whole} == {(8, 16)}


def test_moments_are_divided_in_the_first_whole_dimension_that_the_copies_divide():
  layout = MeshConfig(data=2, tensor=4)
  run = make_run(layout, optimizer=OptimizerConfig(clip=1.0), ema=0.9, shard_optimizer=True)
  adam = next(part for part in run.state_shardings.opt_state if hasattr(part, "mu"))
  assert adam.mu == adam.nu == run.update_shardings
  found = {
    jax.tree_util.keystr(path, simple=True, separator="/"): trimmed(leaf.spec)
    for path, leaf in jax.tree.leaves_with_path(adam.mu)
  }
  assert found["encoder_0/ffn/up/kernel"] == ("data", "tensor")
  assert found["encoder_0/ffn/up/bias"] == ("data",)
  assert found["encoder_0/ffn/down/kernel"] == ("tensor", "data")
  assert found["decoder_embedding/table"] == (None, "data")  # of 19 words
  assert found["encoder_0/self_attention/query_key_value/kernel"] == ("data", "tensor", None, None)
  assert run.state_shardings.params == run.state_shardings.ema
  assert all("data" not in place.spec for place in jax.tree.leaves(run.state_shardings.params))


def test_the_first_step_lowers_the_loss_so_that_agreement_means_something():
  for losses, shares, state in single().values():
    assert losses[1] < losses[0]
    assert int(state.step) == 2
    assert int(state.skipped) == 0
    assert shares.shape == (4,)
  np.testing.assert_array_equal(single()["one expert"].shares, [1, 0, 0, 0])
  assert single()["fresh"].shares.max() < 1


def specs(layout: MeshConfig) -> dict[str, PartitionSpec]:
  found = jax.tree.leaves_with_path(make_run(layout).state_shardings.params)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.spec for path, leaf in found}


def trimmed(spec: PartitionSpec) -> tuple[Any, ...]:
  return tuple(axis or None for axis in spec)


def test_parameters_are_split_by_the_names_of_their_dimensions():
  found = specs(MeshConfig(data=1, fsdp=2, tensor=4))
  self_attention = "encoder_0/self_attention"
  expected = {
    f"{self_attention}/query_key_value/kernel": ("fsdp", "tensor", None, None),
    f"{self_attention}/query_key_value/bias": ("tensor", None, None),
    f"{self_attention}/output/kernel": ("tensor", None, "fsdp"),
    f"{self_attention}/router/hidden/kernel": ("fsdp", None),
    f"{self_attention}/router/signatures": (None, None),
    "encoder_0/ffn/up/kernel": ("fsdp", "tensor"),
    "encoder_0/ffn/down/kernel": ("tensor", "fsdp"),
    "decoder_0/ffn/up/kernel": ("fsdp", ("expert", "tensor"), None),
    "decoder_0/ffn/down/kernel": (("expert", "tensor"), None, "fsdp"),
    "encoder_embedding/table": ("tensor", "fsdp"),
  }
  assert {path: trimmed(found[path]) for path in expected} == expected


def test_a_dimension_that_its_axis_does_not_divide_stays_whole():
  found = specs(MeshConfig(data=1, fsdp=2, tensor=4))
  assert trimmed(found["decoder_embedding/table"]) == (None, "fsdp")  # 19 types over 4 devices
  eight = specs(MeshConfig(data=1, tensor=8))
  kernel = eight["encoder_0/self_attention/query_key_value/kernel"]
  assert trimmed(kernel) == ("fsdp", None, None, None)  # 4 heads over 8 devices; fsdp has one
  assert trimmed(eight["encoder_0/ffn/up/kernel"]) == ("fsdp", "tensor")
  assert trimmed(eight["decoder_0/ffn/up/kernel"]) == ("fsdp", None, None)  # 4 experts


def test_moments_and_average_lie_where_their_parameters_lie():
  places = make_run(
    MeshConfig(data=1, fsdp=2, tensor=4), optimizer=OptimizerConfig(clip=1.0), ema=0.9
  ).state_shardings
  wanted = jax.tree.leaves(places.params)
  assert jax.tree.leaves(places.ema) == wanted
  adam = next(part for part in places.opt_state if hasattr(part, "mu"))
  assert jax.tree.leaves(adam.mu) == jax.tree.leaves(adam.nu) == wanted
  assert adam.count.spec == PartitionSpec()


def test_rows_of_a_batch_are_split_over_data_and_fsdp():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  assert sharding.batch_multiple(mesh) == 4
  assert sharding.batch_multiple(make_mesh(MeshConfig(data=1, tensor=8))) == 1
  assert sharing_of(mesh, micro_batches=3).multiple == 12
  placed = sharding.place_batch(batch(), mesh)
  shard = placed["source"].addressable_shards[0]
  assert shard.data.shape == (4, 8)
  np.testing.assert_array_equal(placed["source"], batch()["source"])


def test_the_expert_axis_splits_rows_and_the_sequence_axis_times():
  mesh = make_mesh(MeshConfig(data=1, expert=2, sequence=4))
  assert sharding.batch_multiple(mesh) == 2
  placed = sharding.place_batch({**batch(), "tags": np.zeros((16, 9), np.int32)}, mesh)
  shapes = {name: array.addressable_shards[0].data.shape for name, array in placed.items()}
  assert shapes == {"source": (8, 2), "target": (8, 2), "index": (8,), "tags": (8, 9)}
  np.testing.assert_array_equal(placed["target"], batch()["target"])


def test_a_fresh_state_is_made_in_place_and_equal_on_every_layout():
  run = make_run(MeshConfig(data=1, fsdp=2, tensor=4))
  state = run.fresh_state()
  assert jax.tree.map(lambda leaf: leaf.sharding, state.params) == run.state_shardings.params
  for one, two in zip(jax.tree.leaves(state.params), jax.tree.leaves(start().params), strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-6)


def test_parameters_are_traced_once_for_their_shapes_and_values(monkeypatch):
  model, traced = type(task().model), []
  init = model.init
  monkeypatch.setattr(model, "init", lambda self, key: traced.append(key) or init(self, key))
  layout = MeshConfig(data=1, fsdp=2, tensor=4)
  run = dataclasses.replace(make_run(layout), task=task.__wrapped__())
  state = run.fresh_state()
  assert len(traced) == 1
  assert run.state_shardings.params == jax.tree.map(lambda leaf: leaf.sharding, state.params)


def test_a_parameter_without_names_is_kept_whole_on_every_device():
  mesh = make_mesh(MeshConfig())
  tree = {"plain": jnp.ones(8), "named": nn.LogicallyPartitioned(jnp.ones(8), ("mlp",))}
  found = sharding.parameter_shardings(tree, mesh)
  assert found["plain"].spec == PartitionSpec()
  assert found["named"].spec == PartitionSpec("tensor")


# Meshes.


def test_minus_one_takes_the_devices_that_are_left():
  ones = dict.fromkeys(("fsdp", "tensor", "expert", "sequence"), 1)
  assert dict(make_mesh(MeshConfig()).shape) == {"data": 8, **ones}
  found = make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2)).shape
  assert dict(found) == {"data": 2, **ones, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
  "layout",
  [MeshConfig(data=3), MeshConfig(fsdp=3), MeshConfig(tensor=16), MeshConfig(data=2, fsdp=2)],
)
def test_a_mesh_that_does_not_fit_the_devices_is_an_error(layout):
  with pytest.raises(UserError, match=r"there are 8; .* Change --config\.mesh\.\*"):
    make_mesh(layout)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"fsdp": 0}, r"mesh\.fsdp is 0"),
    ({"tensor": -2}, r"mesh\.tensor is -2"),
    ({"data": -1, "fsdp": -1}, "only one axis may be -1"),
  ],
)
def test_a_bad_mesh_configuration_names_the_axis(fields, words):
  with pytest.raises(UserError, match=words):
    MeshConfig(**fields)
