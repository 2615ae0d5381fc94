"""A decoder on vectors: beside a plain stack in NumPy, what it sees, options of decoders."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.encoder import EncoderConfig

TIME, WIDTH, OUTPUTS, HEADS = 5, 3, 2, ("decoder_self",)
CONFIG = DecoderConfig(
  decoder_layers=2, dim=8, heads=2, ffn_dim=12, positions="none", max_length=6, dropout=0.0
)
INPUTS = jax.device_put(np.random.default_rng(0).normal(size=(2, TIME, WIDTH)).astype(np.float32))
NEAR = 2 * TIME  # buckets of earlier keys, and of later ones, of which half have one distance each
MODELS = {
  "none": CONFIG,
  "relative bias, wide heads": dataclasses.replace(
    CONFIG, positions="relative_bias", relative_buckets=2 * NEAR, relative_distance=32, head_dim=7
  ),
}


@functools.cache
def parameters(name: str) -> Any:
  model: Any = MODELS[name].regressor(OUTPUTS)
  return drawn(model.init, INPUTS, spread=0.4)["params"]


@functools.partial(jax.jit, static_argnums=(2, 3))
def compiled(params: Any, inputs: jax.Array, causal: bool, name: str) -> Any:
  model: Any = MODELS[name].regressor(OUTPUTS)
  return run(model.apply, {"params": params}, inputs, causal=causal, capture=("decoder/output",))


def apply(inputs: jax.Array, causal: bool, name: str = "none") -> Any:
  return compiled(parameters(name), inputs, causal, name)


def normalised(x: np.ndarray, weights: Any) -> np.ndarray:
  centred = x - x.mean(axis=-1, keepdims=True)
  deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + CONFIG.norm_epsilon)
  return centred / deviation * weights["scale"] + weights["bias"]


def attended(x: np.ndarray, weights: Any, causal: bool, table: np.ndarray) -> np.ndarray:
  """Softmax attention of one sequence, position by position and head by head.

  `table` has what logits are more by for keys so many positions before, and behind `NEAR` of these
  for keys so many positions later.
  """
  projected = weights["query_key_value"]
  all_three = np.einsum("tm,mhpd->thpd", x, projected["kernel"]) + projected["bias"]
  made = np.zeros_like(x)
  for position in range(len(x)):
    last = position + 1 if causal else len(x)
    for head in range(CONFIG.heads):
      query = all_three[position, head, 0]
      logits = [query @ key / math.sqrt(len(query)) for key in all_three[:last, head, 1]]
      distances = position - np.arange(last)
      logits += table[np.where(distances < 0, NEAR - distances, distances), head]
      read = np.exp(logits) / np.exp(logits).sum()
      made[position] += read @ all_three[:last, head, 2] @ weights["output"]["kernel"][head]
  return made + weights["output"]["bias"]


def plain_stack(inputs: np.ndarray, causal: bool, name: str) -> np.ndarray:
  """A Transformer with norms in front of its sub-layers, on one sequence."""
  params = parameters(name)
  no_bias = np.zeros((2 * NEAR, CONFIG.heads))
  table = params["decoder"]["bias"]["table"] if name != "none" else no_bias
  x = inputs @ params["vectors"]["kernel"] + params["vectors"]["bias"]
  for number in range(CONFIG.decoder_layers):
    layer = params["decoder"][f"layer_{number}"]
    read = normalised(x, layer["self_residual"]["scale"])
    x = x + attended(read, layer["self_attention"], causal, table)
    up, down = layer["ffn"]["up"], layer["ffn"]["down"]
    hidden = normalised(x, layer["ffn_residual"]["scale"]) @ up["kernel"] + up["bias"]
    cubed = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
    hidden = 0.5 * hidden * (1 + np.tanh(cubed))
    x = x + hidden @ down["kernel"] + down["bias"]
  last = normalised(x[-1], params["output_norm"])
  return last @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_with_the_softmax_it_is_a_plain_stack_read_at_the_last_position(name, causal):
  found, _ = apply(INPUTS, causal, name)
  wanted = [plain_stack(one, causal, name) for one in np.asarray(INPUTS, np.float64)]
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_positions_read_later_ones_unless_it_is_causal():
  changed = INPUTS.at[:, 3].add(1)
  for causal in (False, True):
    before, after = (apply(inputs, causal)[1]["decoder/output"] for inputs in (INPUTS, changed))
    moved = np.abs(np.asarray(before) - np.asarray(after)).max(axis=(0, 2))
    assert np.all(moved[3:] > 1e-3)
    assert np.all(moved[:3] > 1e-3) if not causal else not np.any(moved[:3])


@pytest.mark.parametrize(
  "fields",
  [
    {"positions": "sinusoidal", "compete": HEADS, "dropout": 0.1, "attention_dropout": 0.1},
    {"positions": "learned", "random_positions": 9, "gated_heads": HEADS, "signal_dim": 2},
    {"positions": "rotary", "expert_layers": ("decoder_1",), "convolution": 2},
    {"positions": "relative", "attention_form": "hyla", "compete": HEADS},
    {"positions": "relative_bias", "attention_form": "hyla", "head_dim": 3},
    {"positions": "alibi", "attention_form": "differential", "shared_layers": 1},
    {"attention_form": "geometric", "copy_gate": True, "copy_gate_closed": 0.5},
    {"mechanism_layers": ("decoder_0",)},
    {"fast_weights": "hebbian", "shared_layers": 1, "fewest_repeats": 1},
  ],
  ids=lambda fields: "-".join(map(str, fields)),
)
def test_every_option_of_decoders_is_one_of_regressors(fields):
  """Traced alone, as in training; what competes is where a language model has it."""
  config = dataclasses.replace(CONFIG, **fields)
  model: Any = config.regressor(OUTPUTS)

  def training(key: jax.Array) -> Any:
    rngs, variables = {"dropout": key}, model.init(key, INPUTS)
    return run(model.apply, variables, INPUTS, deterministic=False, rngs=rngs, capture=None)

  found, sites = jax.eval_shape(training, jax.random.key(0))
  assert (found.shape, found.dtype) == ((2, OUTPUTS), jnp.float32)
  assert set(config.routing_sites()) <= set(sites)


def test_labels_of_positions_are_drawn_in_training_alone():
  config = dataclasses.replace(CONFIG, positions="learned", random_positions=12)
  model: Any = config.regressor(OUTPUTS)
  params = drawn(model.init, INPUTS, spread=0.4)

  @jax.jit
  def both(params: Any, key: jax.Array) -> list[jax.Array]:
    rngs = {"dropout": key}
    return [model.apply(params, INPUTS, deterministic=how, rngs=rngs) for how in (True, False)]

  first, second = (both(params, jax.random.key(seed)) for seed in (0, 1))
  np.testing.assert_array_equal(first[0], second[0])
  assert np.abs(first[1] - second[1]).max() > 1e-3


def test_what_does_not_fit_is_refused():
  model: Any = CONFIG.regressor(OUTPUTS)
  with pytest.raises(UserError, match=r"A sequence has 7 vectors, .* positions for 6"):
    jax.eval_shape(lambda: model.apply({"params": parameters("none")}, jnp.zeros((1, 7, WIDTH))))
  with pytest.raises(UserError, match=r"model is a EncoderConfig, but the task needs a regressor"):
    EncoderConfig().regressor(1)
