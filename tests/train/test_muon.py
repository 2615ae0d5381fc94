"""Muon: which parameters take orthogonal steps, and how large these are."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import keystr, tree_leaves_with_path
from optax.contrib import MuonDimensionNumbers, muon

from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.text import Text
from compmod_jax.training.muon import matrices
from compmod_jax.training.optimizer import OptimizerConfig, make_optimizer

CONFIG = OptimizerConfig(
  name="muon", learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.0
)
SHAPES = {
  "into": {"kernel": (6, 2, 3, 4), "bias": (2, 3, 4)},
  "output": {"kernel": (2, 4, 6), "bias": (6,)},
  "plain": {"kernel": (5, 9)},
  "up": {"kernel": (6, 3, 8)},
  "down": {"kernel": (3, 8, 6)},
  "head": {"kernel": (6, 11)},
  "mix": {"kernel": (3, 6)},
  "tokens": {"table": (11, 6)},
}
AXES = {
  "into": ((0,), (1, 3)),
  "output": ((0, 1), (2,)),
  "plain": ((0,), (1,)),
  "up": ((0,), (2,)),
  "down": ((1,), (2,)),
}


def drawn(seed: int):
  draws = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: jnp.asarray(draws.normal(size=shape), jnp.float32),
    SHAPES,
    is_leaf=lambda leaf: isinstance(leaf, tuple),
  )


def steps(config: OptimizerConfig, count: int = 3, **how):
  """Updates of the last of some steps."""
  optimizer, params = make_optimizer(config, 10, **how), drawn(0)
  state = optimizer.init(params)
  for n in range(count):
    updates, state = jax.jit(optimizer.update)(drawn(n + 1), state, params)
  return updates


def test_hidden_matrices_are_found_with_their_axes():
  expected = {f"{name}/kernel": MuonDimensionNumbers(*axes) for name, axes in AXES.items()}
  assert matrices(drawn(0)) == expected


def test_their_steps_are_orthogonal_and_as_large_as_steps_of_adam():
  updates = steps(CONFIG)
  for name, (inputs, outputs) in AXES.items():
    step = np.asarray(updates[name]["kernel"], np.float64) / CONFIG.learning_rate
    batch = [axis for axis in range(step.ndim) if axis not in (*inputs, *outputs)]
    sides = [math.prod(step.shape[axis] for axis in axes) for axes in (inputs, outputs)]
    for one in step.transpose(*batch, *inputs, *outputs).reshape(-1, *sides):
      values = np.linalg.svd(one, compute_uv=False) / (0.2 * np.sqrt(max(sides)))
      assert 0.5 < values.min() <= values.max() < 1.3, name


def test_all_other_parameters_move_as_with_adam():
  found, expected = steps(CONFIG), steps(dataclasses.replace(CONFIG, name="adamw"))
  for name in ("head", "mix", "tokens"):
    jax.tree.map(np.testing.assert_array_equal, found[name], expected[name])
  np.testing.assert_array_equal(found["into"]["bias"], expected["into"]["bias"])
  assert not np.allclose(found["plain"]["kernel"], expected["plain"]["kernel"])


def test_the_first_step_of_a_matrix_is_that_of_optax():
  peer = muon(CONFIG.learning_rate, consistent_rms=0.2)
  gradient = {"plain": drawn(1)["plain"]}
  expected, _ = peer.update(gradient, peer.init(gradient), gradient)
  found = steps(CONFIG, count=1)["plain"]["kernel"]
  np.testing.assert_allclose(found, expected["plain"]["kernel"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grouped", [False, True])
def test_its_state_is_that_of_adam(grouped):
  params = drawn(0)
  mine, other = (
    make_optimizer(dataclasses.replace(CONFIG, name=name), 10, grouped=grouped)
    for name in ("muon", "adamw")
  )
  jax.tree.map(np.testing.assert_array_equal, mine.init(params), other.init(params))
  moves = jax.tree.map(lambda _: False, params)
  marked = optax.tree_map_params(mine, lambda _, m: m, mine.init(params), moves)
  assert not any(leaf for leaf in jax.tree.leaves(marked) if isinstance(leaf, bool))
  steps(CONFIG, grouped=grouped)


def test_every_kernel_of_a_model_but_onto_words_and_beside_positions_is_a_hidden_matrix():
  config = NemotConfig(
    **{"vanilla_layers": 1, "modulatory_layers": 1, "output_layers": 1, "convolution": 4},
    **{"dim": 16, "heads": 4, "ffn_dim": 32, "max_length": 8, "expert_layers": ("vanilla",)},
    compete=("vanilla_self",),
    experts=ExpertsConfig(2, competition=CompetitionConfig(rule="top_k", keep=1)),
  )
  model, tokens = config.decoder(12, 0), jnp.zeros((1, 8), jnp.int32)
  text = Text(tokens, jnp.zeros((1, 3), jnp.int32))
  made = jax.eval_shape(lambda key: model.init(key, text, [("lm", 1)]), jax.random.key(0))
  params = nn.unbox(made)["params"]
  names = {keystr(path, simple=True, separator="/") for path, _ in tree_leaves_with_path(params)}
  kernels, found = {name for name in names if name.endswith("/kernel")}, set(matrices(params))
  assert found < kernels
  others = {name.rsplit("/", 2)[-2] for name in kernels - found}
  assert others == {"mix", "head"}


@pytest.mark.parametrize("count", [1, 2])
def test_steps_are_nearer_to_orthogonal_where_rows_are_scaled_first(count):
  # Singular values from 1 to 1/100, in random directions.
  draws = np.random.default_rng(0)
  (left, _), (right, _) = (np.linalg.qr(draws.normal(size=(n, 16))) for n in (16, 40))
  gradient = {"one": {"kernel": jnp.float32(left * np.geomspace(1, 0.01, 16) @ right.T)}}

  def likeness(preconditioning):
    fields = {"newton_schulz_steps": count, "preconditioning": preconditioning}
    optimizer = make_optimizer(dataclasses.replace(CONFIG, **fields), 10)
    updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    found = np.asarray(updates["one"]["kernel"], np.float64)
    return -np.sum(found * (left @ right.T)) / np.linalg.norm(found) / 4

  assert likeness("frobenius") + 0.02 < likeness("aol") < 1
