"""One suite for every way to compute the routing softmax and what is fused with it.

The truth is NumPy in double precision. Kernels run in Pallas' interpreters with blocks so small
that every size needs several and fills the last one in part; what a block holds past the end of its
array is NaN there.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from compmod_jax.core import sharding
from compmod_jax.core.errors import UserError
from compmod_jax.kernels.routing import (
  Blocks,
  Choice,
  Readout,
  fold_signatures,
  routing_softmax,
  routing_weights,
)

SMALL = Blocks(
  tpu_softmax=16,
  tpu_tokens=16,
  gpu_elements=64,
  gpu_route=16,
)
WAYS: dict[str, dict[str, Any]] = {
  "reference": {"implementation": "reference"},
  "default": {},
  "gpu": {"implementation": "gpu", "interpret": True, "blocks": SMALL},
  "tpu": {"implementation": "tpu", "interpret": True, "blocks": SMALL},
}
SIMULATED = {"implementation": "tpu", "interpret": pltpu.InterpretParams(), "blocks": SMALL}
each_way = pytest.mark.parametrize("way", WAYS)
few = settings(max_examples=2, deadline=None, derandomize=True)
choices = st.one_of(
  st.just(Choice()),
  st.builds(Choice, rule=st.just("top_k"), temperature=st.sampled_from([0.5, 1.0])),
  st.builds(Choice, rule=st.just("threshold"), threshold=st.sampled_from([0.0, 0.1, 0.4])),
)
dtypes = st.sampled_from(["float32", "bfloat16"])
tokens_of, units_of = st.integers(1, 40), st.integers(2, 64)


class Case(NamedTuple):
  """Arguments and the output's gradient."""

  args: tuple[np.ndarray, ...]
  cotangent: np.ndarray


def numbers(*shape: int, seed: int, scale: float = 1.0, dtype: str = "float32") -> np.ndarray:
  values = np.random.default_rng(seed).normal(size=shape) * scale
  return values.astype(np.float32).astype(jnp.dtype(dtype))


def double(arrays: Any) -> list[np.ndarray]:
  return [np.asarray(array, np.float64) for array in arrays]


def differentiate(function: Any, case: Case) -> list[np.ndarray]:
  """Value and gradients with respect to all arguments."""

  @jax.jit
  def both(case: Case) -> Any:
    value, pull = jax.vjp(function, *case.args)
    return value, *pull(case.cotangent)

  return double(both(case))


def agree(found: list[np.ndarray], truth: list[np.ndarray], dtype: str = "float32") -> None:
  tolerance = {"float32": 1e-5, "bfloat16": 0.03}[dtype]
  for one, two in zip(found, truth, strict=True):
    assert one.shape == two.shape
    np.testing.assert_allclose(one, two, atol=tolerance * max(1.0, np.abs(two).max()))


# The truth.


def true_weights(scores: np.ndarray, choice: Choice) -> np.ndarray:
  """One row at a time, with a sort."""
  weights = np.zeros(scores.shape)
  for row, mine in zip(weights, scores / choice.temperature, strict=True):
    allowed = np.flatnonzero(np.isfinite(mine))
    if not len(allowed):
      continue
    order = allowed[np.argsort(-mine[allowed], kind="stable")]
    powers = np.exp(mine[order] - mine[order[0]])
    if choice.rule == "top_k":
      order = order[: choice.kept(len(mine))]
    elif choice.rule == "threshold":
      stays = powers / powers.sum() >= choice.threshold
      stays[0] = True
      order = order[stays]
    powers = np.exp(mine[order] - mine[order[0]])
    row[order] = powers / powers.sum()
  return weights


def true_slopes(weights: np.ndarray, cotangent: np.ndarray, choice: Choice) -> np.ndarray:
  mean = (weights * cotangent).sum(axis=1, keepdims=True)
  return weights * (cotangent - mean) / choice.temperature


def true_softmax(case: Case, choice: Choice) -> list[np.ndarray]:
  (scores,) = double(case.args)
  weights = true_weights(scores, choice)
  return [weights, true_slopes(weights, double([case.cotangent])[0], choice)]


def true_route(case: Case, choice: Choice) -> list[np.ndarray]:
  rows, matrix, bias = double(case.args)
  hidden = np.maximum(rows, 0)
  weights = true_weights(hidden @ matrix + bias, choice)
  errors = true_slopes(weights, double([case.cotangent])[0], choice)
  return [weights, (errors @ matrix.T) * (rows > 0), hidden.T @ errors, errors.sum(axis=0)]


# Arguments.


def softmax_case(tokens: int, units: int) -> Case:
  scores = numbers(tokens, units, seed=0, scale=2)
  return Case((scores,), numbers(tokens, units, seed=1))


def route_case(tokens: int, units: int, hidden: int, dtype: str) -> Case:
  rows = numbers(tokens, hidden, seed=2, dtype=dtype)
  readout = numbers(hidden, units, seed=3, scale=hidden**-0.5, dtype=dtype)
  return Case((rows, readout, numbers(units, seed=6)), numbers(tokens, units, seed=7))


def softmax_by(choice: Choice, **how: Any) -> Any:
  return functools.partial(routing_softmax, choice=choice, **how)


def route_by(choice: Choice, **how: Any) -> Any:
  def function(rows: Any, matrix: Any, bias: Any) -> Any:
    return routing_weights(rows, Readout(matrix.astype(jnp.float32), bias), choice=choice, **how)

  return function


# Values and gradients.


@each_way
@few
@given(tokens=tokens_of, units=units_of, choice=choices)
@example(tokens=37, units=12, choice=Choice("top_k", 5))
@example(tokens=16, units=1, choice=Choice("threshold", threshold=0.5))
@example(tokens=3, units=64, choice=Choice("top_k", temperature=0.3))
def test_weights_and_their_gradients_are_those_of_double_precision(way, tokens, units, choice):
  case = softmax_case(tokens, units)
  agree(differentiate(softmax_by(choice, **WAYS[way]), case), true_softmax(case, choice))


@each_way
@few
@given(tokens=tokens_of, units=units_of, hidden=st.integers(3, 40), choice=choices)
@example(tokens=37, units=12, hidden=24, choice=Choice("top_k", 3))
@example(tokens=21, units=5, hidden=17, choice=Choice("threshold", threshold=0.2))
def test_weights_straight_from_hidden_activations_are_those_of_double_precision(
  way, tokens, units, hidden, choice
):
  case = route_case(tokens, units, hidden, "float32")
  agree(differentiate(route_by(choice, **WAYS[way]), case), true_route(case, choice))


@each_way
def test_bfloat16_is_as_exact_as_its_inputs(way):
  case = route_case(37, 8, 20, "bfloat16")
  found = differentiate(route_by(Choice(), **WAYS[way]), case)
  agree(found, true_route(case, Choice()), "bfloat16")


def test_the_tpu_simulator_agrees_with_double_precision():
  choice = Choice("top_k", 5)
  case = softmax_case(20, 12)
  agree(differentiate(softmax_by(choice, **SIMULATED), case), true_softmax(case, choice))
  case = route_case(20, 12, 8, "float32")
  agree(differentiate(route_by(choice, **SIMULATED), case), true_route(case, choice))


def test_interpreters_fill_what_lies_past_the_end_with_nan():
  def add_up(values, total):
    total[...] = jnp.sum(values[...], axis=0, keepdims=True)

  made = pl.pallas_call(
    add_up,
    grid=(2,),
    in_specs=[pl.BlockSpec((16, 4), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((1, 4), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((2, 4), jnp.float32),
    interpret=True,
  )
  made = jax.jit(made)(np.ones((20, 4), np.float32))
  np.testing.assert_array_equal(np.isnan(made).all(axis=1), [False, True])


# The corners of the definition.


@each_way
@pytest.mark.parametrize("rule", ["soft", "top_k", "threshold"])
def test_a_row_with_nothing_left_gives_zeros_and_masked_units_get_no_gradient(way, rule):
  mask = np.ones((20, 6), bool)
  mask[3], mask[7, 1:], mask[19, ::2] = False, False, False
  choice = Choice(rule, 2 if rule == "top_k" else None, 0.2 if rule == "threshold" else 0.0)
  scores, cotangent = softmax_case(20, 6)
  function = functools.partial(routing_softmax, mask=jnp.asarray(mask), choice=choice, **WAYS[way])
  weights, slopes = differentiate(function, Case(scores, cotangent))
  masked = Case((np.where(mask, *scores, -np.inf),), cotangent)
  agree([weights, slopes], true_softmax(masked, choice))
  np.testing.assert_array_equal(weights[~mask], 0)
  np.testing.assert_array_equal(slopes[~mask], 0)
  np.testing.assert_array_equal(weights[7], [1, 0, 0, 0, 0, 0])


@each_way
def test_units_that_are_masked_everywhere_take_no_part(way):
  rows, matrix, bias = route_case(20, 6, 8, "float32").args
  route = jax.jit(route_by(Choice(), **WAYS[way]))
  keep = np.array([True, False, True, True, False, False])
  found = np.asarray(route(rows, matrix, np.where(keep, bias, -np.inf)))
  alone = route(rows, matrix[:, keep], bias[keep])
  np.testing.assert_array_equal(found[:, ~keep], 0)
  np.testing.assert_allclose(found[:, keep], alone, atol=1e-6)
  nothing = route(rows, matrix, np.full(6, -np.inf, np.float32))
  np.testing.assert_array_equal(nothing, np.zeros((20, 6)))


@each_way
def test_ties_go_to_the_lower_index(way):
  scores = jnp.asarray([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-0.0, 0.0, -0.0, 3.0]])

  @jax.jit
  def both(scores: Any) -> Any:
    rules = Choice("top_k", 2), Choice("threshold", threshold=0.9)
    return [softmax_by(choice, **WAYS[way])(scores) for choice in rules]

  found, best = both(scores)
  np.testing.assert_array_equal(np.asarray(found) > 0, [[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 1]])
  np.testing.assert_array_equal(best, [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]])


@each_way
@pytest.mark.parametrize("rule", ["soft", "threshold"])
def test_extreme_scores_give_finite_weights_and_gradients(way, rule):
  scores = np.asarray(
    [[1e29, -1e29, 0.0], [3e4, 3e4, -3e4], [-1e20, -1e20, -2e20], [88.0, -104.0, 0.0]], np.float32
  )
  choice = Choice(rule, temperature=0.5)
  case = Case((scores,), numbers(4, 3, seed=1))
  agree(differentiate(softmax_by(choice, **WAYS[way]), case), true_softmax(case, choice))


@pytest.mark.parametrize("way", ["default", "tpu"])
def test_second_derivatives_are_those_of_the_reference(way):
  case = route_case(5, 3, 6, "float32")

  def slope(how: dict[str, Any], args: Any) -> Any:
    def total(args: Any) -> Any:
      weights = route_by(Choice(), **how)(*args)
      weights = weights + routing_softmax(weights, **how)
      return jnp.sum(case.cotangent * jnp.sin(weights))

    return sum(jnp.sum(jnp.cos(g)) for g in jax.tree.leaves(jax.grad(total)(args)))

  @jax.jit
  def second(args: Any) -> Any:
    every = (WAYS[way], WAYS["reference"])
    return [jax.grad(functools.partial(slope, how))(args) for how in every]

  found, truth = second(case.args)
  for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
    np.testing.assert_allclose(one, two, atol=1e-4)


def test_folding_signatures_in_beforehand_changes_no_score():
  kernel, bias, signatures = (numbers(*s, seed=len(s)) for s in ((16, 6), (6,), (5, 6)))
  hidden = numbers(9, 16, seed=4)

  @jax.jit
  def both(kernel: Any, bias: Any, signatures: Any) -> Any:
    folded = fold_signatures(kernel, bias, signatures)
    mask = jnp.arange(5) != 2
    return folded, fold_signatures(kernel, bias, signatures, scale=False, mask=mask)

  folded, masked = jax.device_get(both(kernel, bias, signatures))
  keys = hidden @ kernel + bias[None]
  np.testing.assert_allclose(
    hidden @ folded.kernel + folded.bias[None], keys @ signatures.T / 6**0.5, atol=1e-5
  )
  np.testing.assert_allclose(masked.kernel, folded.kernel * 6**0.5, atol=1e-5)
  np.testing.assert_array_equal(np.isinf(masked.bias), np.arange(5) == 2)


# The choice of an implementation.


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"implementation": "tpu"}, "the program is for a cpu, and interpret is off"),
    ({"implementation": "gpu"}, "the program is for a cpu, and interpret is off"),
    ({"choice": Choice("top_k", 9)}, "choice.keep is 9; with 5 units it must lie between 1 and 5"),
  ],
)
def test_what_cannot_be_is_refused_by_name(arguments, message):
  with pytest.raises(UserError, match=message):
    routing_softmax(jnp.asarray(numbers(3, 5, seed=0)), **arguments)


@pytest.mark.parametrize("way", ["gpu", "tpu"])
@pytest.mark.parametrize(
  ("tokens", "units", "dtype", "message"),
  [
    (3, 65, "float32", "65 units are more than 64"),
    (0, 4, "float32", "there are no tokens"),
    (3, 4, "float16", "float16 is neither float32 nor bfloat16"),
  ],
)
def test_a_named_kernel_refuses_what_it_cannot_and_the_default_falls_back(
  way, tokens, units, dtype, message
):
  args = route_case(tokens, units, 8, dtype).args

  def route(way: str) -> jax.Array:
    return jax.jit(route_by(Choice(), **WAYS[way]))(*args)

  with pytest.raises(UserError, match=message):
    route(way)
  np.testing.assert_array_equal(route("default"), route("reference"))
  if dtype == "float32":
    with pytest.raises(UserError, match=message):
      routing_softmax(jnp.asarray(numbers(tokens, units, seed=0)), **WAYS[way])


def test_a_tpu_kernel_refuses_what_its_vector_memory_cannot_hold():
  shapes = (8, 16384), (16384, 8), (8,)
  types = jnp.bfloat16, jnp.bfloat16, jnp.float32
  args = [jax.ShapeDtypeStruct(*one) for one in zip(shapes, types, strict=True)]
  with pytest.raises(UserError, match="MiB of vector memory, more than 40"):
    jax.eval_shape(route_by(Choice(), implementation="tpu", interpret=True), *args)


CALLS = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}


def lowered(platform: str, units: int, dtype: str, **how: Any) -> str:
  """Text of a program for a platform that runs everything forward and backward."""
  route = route_case(300, units, 64, dtype)

  def everything(route: Any) -> Any:
    choice = Choice("top_k", units - 1)
    weights = route_by(choice, **how)(*route)
    return jnp.sum(jnp.sin(routing_softmax(weights, choice=choice, **how)))

  traced = jax.jit(jax.value_and_grad(everything))
  if platform == "cpu":
    return traced.lower(route.args).as_text()
  with sharding.tracing_for(DEVICES[platform]):
    return traced.trace(route.args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "name"), [("tpu", "tpu"), ("cuda", "gpu")])
@pytest.mark.parametrize(("units", "dtype"), [(12, "float32"), (8, "bfloat16")])
def test_every_kernel_lowers_for_its_platform_without_the_hardware(platform, name, units, dtype):
  named = lowered(platform, units, dtype, implementation=name)
  # Both functions, forward and backward.
  assert named.count(CALLS[platform]) >= 4
  chosen = lowered(platform, units, dtype)
  assert chosen.count(CALLS[platform]) == named.count(CALLS[platform])


def test_a_program_for_a_cpu_holds_no_kernel():
  text = lowered("cpu", 8, "float32")
  assert not any(call in text for call in CALLS.values())


def test_a_kernel_named_for_another_platform_is_refused_when_lowering():
  with pytest.raises(UserError, match="the program is for a tpu"):
    lowered("tpu", 8, "float32", implementation="gpu")
