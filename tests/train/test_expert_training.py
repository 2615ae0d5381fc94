"""Training a model with experts: losses of routers, micro-batches, devices, the log."""

import dataclasses
import functools
import types
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from compmod_jax.core.sharding import MeshConfig, make_mesh, parameter_shardings, place_batch
from compmod_jax.data.base import Splits
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.translation import Translation, TranslationConfig
from compmod_jax.training.log import Window
from compmod_jax.training.step import gradients

ROUTED = CompetitionConfig(key_dim=3, hidden_dim=5, balance=0.4, z=0.2)
MODEL = TransformerConfig(
  encoder_layers=1,
  decoder_layers=1,
  dim=16,
  heads=4,
  ffn_dim=8,
  dropout=0.0,
  max_length=8,
  share_embeddings="all",
  compete=("encoder_self",),
  competition=dataclasses.replace(ROUTED, balance=0.0),
  expert_layers=("encoder", "decoder"),
  experts=ExpertsConfig(
    4,
    competition=dataclasses.replace(ROUTED, rule="top_k", keep=2, bias_balance=0.3),
    implementation="blocked",
  ),
)
CONTEXT = StepContext(jax.random.key(0), jax.numpy.int32(0), True)


@functools.cache
def task(model: TransformerConfig = MODEL) -> Translation:
  config = TranslationConfig(data=TextData(), batch=BatchConfig(tokens=64, buckets=(6,)))
  words = TokenizerConfig(kind="words", vocab_size=40)
  tokenizer = train_tokenizer([" ".join(f"w{n}" for n in range(12))], words)
  return config.build_with(model, Splits(config.data), tokenizer, tokenizer)


def weights(model: TransformerConfig = MODEL) -> dict[str, float]:
  """The active terms of the objective."""
  return task(model).objective.weights(model)


def batch(seed: int = 0) -> dict[str, np.ndarray]:
  """Eight pairs of very different lengths, one of them a filler."""
  random = np.random.default_rng(seed)

  def side() -> np.ndarray:
    lengths = np.where(np.arange(8) == 5, 0, random.integers(1, 7, size=8))
    tokens = random.integers(4, 16, size=(8, 6)).astype(np.int32)
    return np.where(np.arange(6) < lengths[:, None], tokens, 0).astype(np.int32)

  return {"source": side(), "target": side(), "index": np.arange(8, dtype=np.int32)}


@functools.cache
def params() -> Any:
  shapes = nn.unbox(jax.eval_shape(task().model.init, jax.random.key(0)))
  random = np.random.default_rng(1)
  return jax.tree.map(lambda s: np.float32(0.4 * random.normal(size=s.shape)), shapes)


def compiled(micro_batches: int) -> Any:
  def run(params: Any, batch: Any) -> Any:
    grads, value, terms, _, found = gradients(
      task().loss, params, (), batch, CONTEXT, micro_batches
    )
    return grads, value, {name: term.logged() for name, term in terms.items()}, found

  return jax.jit(run)


@functools.cache
def whole() -> Any:
  return jax.device_get(compiled(1)(params(), batch()))


def assert_close(found: Any, expected: Any) -> None:
  for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=2e-6)


def test_the_objective_lists_exactly_the_active_terms():
  assert weights() == {
    "cross_entropy": 1.0,
    "head_z": 0.2,
    "expert_balance": 0.4,
    "expert_z": 0.2,
    "expert_bias": 0.3,
  }
  assert set(whole()[2]) == set(weights())
  off = dataclasses.replace(MODEL, compete=(), expert_layers=())
  assert weights(off) == {"cross_entropy": 1.0}


def test_the_objective_is_the_weighted_sum_of_what_the_log_shows():
  _, value, terms, _ = whole()
  shown = {name: total / count for name, (total, count) in terms.items()}
  expected = sum(weight * shown[name] for name, weight in weights().items())
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  assert shown["expert_balance"] >= 2 * 0.9  # of two layers; 1 each where the load is even
  assert all(total > 0 for name, (total, _) in terms.items() if name != "expert_bias")


def test_micro_batches_of_a_model_with_experts_equal_one_big_batch():
  found = jax.device_get(compiled(4)(params(), batch()))
  assert_close(found[:3], whole()[:3])


LAYOUTS = [MeshConfig(data=8), MeshConfig(data=2, fsdp=2, tensor=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["data8", "data2_fsdp2_tensor2"])
def test_eight_devices_give_the_gradients_of_one(layout):
  mesh = make_mesh(layout)
  places = parameter_shardings(jax.eval_shape(task().model.init, jax.random.key(0)), mesh)
  up, down = (places["encoder_0"]["ffn"][name]["kernel"].spec for name in ("up", "down"))
  experts = ("expert", "tensor")
  assert up == PartitionSpec("fsdp", experts, None)  # experts are split, and the model's width
  assert down == PartitionSpec(experts, None, "fsdp")
  placed = jax.device_put(params(), places), place_batch(batch(), mesh)
  assert_close(jax.device_get(compiled(1)(*placed))[:3], whole()[:3])


def test_the_log_averages_terms_over_steps_and_shows_every_experts_share():
  host = jax.device_get(
    {
      "objective": whole()[1],
      "gradient_norm": 1.0,
      "terms": whole()[2],
      "task": whole()[3],
    }
  )
  step: Any = types.SimpleNamespace(flops=0.0, waited=0.0)
  window = Window().plus(step, host).plus(step, host)
  window = Window.from_json(window.to_json())
  total, count = window.sums["loss/expert_balance"]
  np.testing.assert_allclose(total / count, whole()[2]["expert_balance"][0], rtol=1e-6)
  for side, tokens in (("encoder", "source"), ("decoder", "target")):
    total, count = window.sums[f"router/{side}/layer_0/ffn/weight"]
    assert count == 2 * np.count_nonzero(batch()[tokens])
    assert total.shape == (4,)
    np.testing.assert_allclose(total.sum() / count, 1, rtol=1e-5)
