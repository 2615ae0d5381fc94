"""Named activations: captured, edited, and continued from."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF, Intermediates, after, run, zero_units
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.transformer import ATTENTION_KINDS, Transformer, TransformerConfig

CONFIG = TransformerConfig(
  encoder_layers=1,
  decoder_layers=1,
  dim=8,
  heads=2,
  ffn_dim=12,
  activation="gelu",
  max_length=8,
  compete=ATTENTION_KINDS,
  # Fused, some sites are there only where they are asked for.
  competition=CompetitionConfig(key_dim=3, hidden_dim=4, routing="plain"),
)
SOURCE, TARGET = jnp.asarray([[4, 5, 6, 0]]), jnp.asarray([[2, 4, 5]])
ATTENTION = ("attention", "heads", "heads_scaled")
ATTENTION += ("router/signatures", "router/scores", "router/weights")
# The public names: analyses and saved edits rely on them.
NAMES = {
  *(f"encoder/layer_0/self/{name}" for name in ATTENTION),
  *(f"decoder/layer_0/self/{name}" for name in ATTENTION),
  *(f"decoder/layer_0/cross/{name}" for name in ATTENTION),
  "encoder/layer_0/ffn/hidden",
  "encoder/layer_0/output",
  "encoder/output",
  "decoder/layer_0/ffn/hidden",
  "decoder/layer_0/output",
  "logits",
}
HIDDEN = "encoder/layer_0/ffn/hidden"


def model(config: TransformerConfig = CONFIG) -> Transformer:
  return Transformer(config, 9, 7)


@functools.cache
def variables() -> Any:
  shapes = nn.unbox(jax.eval_shape(model().init, jax.random.key(0), SOURCE, TARGET))
  leaves, tree = jax.tree.flatten(shapes)
  random = np.random.default_rng(0)
  made = [jnp.asarray(0.4 * random.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
  return jax.tree.unflatten(tree, made)


@functools.cache
def everything() -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Logits and all sites."""
  found = jax.jit(lambda v: run(model().apply, v, SOURCE, TARGET, capture=None))(variables())
  return jax.device_get(found)


def shapes(capture: Any, config: TransformerConfig = CONFIG, edits: Any = None) -> dict[str, tuple]:
  traced = jax.eval_shape(
    lambda v: run(model(config).apply, v, SOURCE, TARGET, capture=capture, edits=edits)[1],
    variables(),
  )
  return {name: value.shape for name, value in traced.items()}


# Names and shapes.


def test_the_names_of_all_sites_are_stable():
  assert shapes(None).keys() == NAMES


def test_a_plain_model_has_the_same_sites_but_those_of_routers():
  plain = {name for name in NAMES if "router" not in name}
  assert shapes(None, CONFIG.plain()).keys() == plain


def test_exactly_what_was_asked_for_is_captured_with_its_documented_shape():
  wanted = {
    "encoder/layer_0/self/router/weights": (1, 4, 2),
    "decoder/layer_0/cross/attention": (1, 2, 3, 4),
    "decoder/layer_0/self/heads": (1, 3, 2, 4),
    "decoder/layer_0/ffn/hidden": (1, 3, 12),
    "encoder/output": (1, 4, 8),
    "logits": (1, 3, 7),
  }
  assert shapes(wanted) == wanted
  assert shapes(()) == {}


def test_the_attention_site_is_what_each_query_gives_to_each_key():
  _, sites = everything()
  probabilities = sites["encoder/layer_0/self/attention"]
  np.testing.assert_allclose(probabilities.sum(axis=-1), 1, rtol=1e-6)
  np.testing.assert_array_equal(probabilities[..., 3], 0)  # padding
  causal = sites["decoder/layer_0/self/attention"]
  np.testing.assert_array_equal(causal * np.triu(np.ones((3, 3)), 1), 0)


# Off costs nothing.


def test_taps_that_ask_for_nothing_add_no_operation():
  def program(intermediates: Intermediates, config: TransformerConfig = CONFIG) -> str:
    return str(
      jax.make_jaxpr(lambda v: model(config).apply(v, SOURCE, TARGET, intermediates=intermediates))(
        variables()
      )
    )

  assert program(OFF) == program(Intermediates())
  remat = dataclasses.replace(CONFIG, remat=True)
  assert program(OFF, remat) == program(Intermediates(), remat)


def test_capturing_adds_results_but_no_operation():
  def operations(capture: tuple[str, ...]) -> list[str]:
    program = jax.make_jaxpr(lambda v: run(model().apply, v, SOURCE, TARGET, capture=capture))
    return [str(equation.primitive) for equation in program(variables()).eqns]

  sites = tuple(name for name in NAMES if not name.endswith("/attention"))
  assert operations(()) == operations(sites)


# Edits.


@functools.cache
def edited(*names: str) -> Any:
  """Compiled logits of a model whose sites are multiplied: factors -> logits."""

  def logits(v: Any, factors: Any) -> jax.Array:
    edits = {name: lambda x, f=f: x * f for name, f in zip(names, factors, strict=True)}
    return run(model().apply, v, SOURCE, TARGET, edits=edits)[0]

  return jax.jit(logits)


def test_the_identity_edit_changes_nothing_bit_for_bit():
  sites = [name for name in sorted(NAMES) if not name.endswith("/attention")]
  same = edited(*sites)(variables(), [1.0] * len(sites))
  plain = edited()(variables(), [])
  np.testing.assert_array_equal(same, plain)


def test_an_edit_of_any_site_changes_the_logits():
  sites = sorted(NAMES)
  function, base = edited(*sites), np.ones(len(sites), np.float32)
  plain = np.asarray(function(variables(), list(base)))
  for number, site in enumerate(sites):
    factors = base.copy()
    factors[number] = 0.5
    assert not np.allclose(function(variables(), list(factors)), plain, atol=1e-5), site


def test_what_is_captured_is_the_edited_activation():
  def both(v: Any) -> Any:
    edits = {HIDDEN: lambda x: x + 1}
    return run(model().apply, v, SOURCE, TARGET, capture=[HIDDEN], edits=edits)[1]

  found = jax.jit(both)(variables())
  np.testing.assert_allclose(found[HIDDEN], everything()[1][HIDDEN] + 1, atol=1e-6)


def test_an_edit_keeps_the_type_of_the_activation():
  config = dataclasses.replace(CONFIG, dtype="bfloat16")
  traced = jax.eval_shape(
    lambda v: run(
      model(config).apply,
      v,
      SOURCE,
      TARGET,
      capture=[HIDDEN],
      edits={HIDDEN: lambda x: jnp.float32(x)},
    )[1],
    variables(),
  )
  assert traced[HIDDEN].dtype == jnp.bfloat16


def test_zero_units_zeroes_the_units_it_is_given():
  value = jnp.ones((2, 3, 4))
  np.testing.assert_array_equal(zero_units(1, 3)(value)[0, 0], [1, 0, 1, 0])
  np.testing.assert_array_equal(zero_units(0, axis=1)(value)[0, :, 0], [0, 1, 1])


def test_silencing_a_head_by_its_weight_or_by_its_output_is_the_same():
  def logits(name: str, axis: int) -> Any:
    site = f"decoder/layer_0/cross/{name}"
    edits = {site: zero_units(1, axis=axis)}
    return jax.jit(lambda v: run(model().apply, v, SOURCE, TARGET, edits=edits)[0])(variables())

  expected = logits("heads_scaled", 2)
  np.testing.assert_allclose(logits("router/weights", 2), expected, atol=1e-6)


# Under gradients and rematerialisation.


@pytest.mark.parametrize("remat", [False, True])
def test_sites_work_under_jit_gradients_and_rematerialisation(remat):
  config = dataclasses.replace(CONFIG, remat=remat)

  def loss(v: Any, factor: Any) -> Any:
    edits = {HIDDEN: lambda x: x * factor}
    logits, sites = run(model(config).apply, v, SOURCE, TARGET, capture=[HIDDEN], edits=edits)
    return jnp.sum(logits**2) + jnp.sum(sites[HIDDEN] ** 2), sites

  value = jax.jit(jax.value_and_grad(loss, argnums=1, has_aux=True))
  (_, sites), gradient = value(variables(), 0.9)
  np.testing.assert_allclose(sites[HIDDEN], 0.9 * everything()[1][HIDDEN], atol=1e-6)
  (up, _), _ = value(variables(), 0.9 + 0.01)
  (down, _), _ = value(variables(), 0.9 - 0.01)
  np.testing.assert_allclose(gradient, (up - down) / 0.02, rtol=1e-3)


# Continuing from a site.


@functools.cache
def rest() -> Any:
  """Compiled value and gradient of a loss as a function of the activation at a site."""
  continue_ = after(model().apply, HIDDEN)

  def loss(activation: jax.Array) -> Any:
    logits = continue_(activation, variables(), SOURCE, TARGET)
    return jnp.sum(jnp.sin(logits)), logits

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_after_a_site_the_models_own_activation_gives_the_models_output():
  logits, sites = everything()
  (_, found), _ = rest()(sites[HIDDEN])
  np.testing.assert_allclose(found, logits, atol=1e-6)


def test_after_a_site_another_activation_gives_what_an_edit_would():
  other = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, 12)), jnp.float32)
  (_, found), _ = rest()(other)
  edit = jax.jit(
    lambda v: run(model().apply, v, SOURCE, TARGET, edits={HIDDEN: lambda x: 0 * x + other})[0]
  )
  np.testing.assert_allclose(found, edit(variables()), atol=1e-6)


def test_the_gradient_after_a_site_is_that_of_finite_differences():
  random, start = np.random.default_rng(2), everything()[1][HIDDEN]
  _, gradient = rest()(start)
  for _ in range(4):
    direction = random.normal(size=start.shape).astype(np.float32)
    step = 0.02 * direction
    slope = (rest()(start + step)[0][0] - rest()(start - step)[0][0]) / 0.04
    np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-2, atol=1e-3)
  np.testing.assert_array_equal(gradient[0, 3], 0)  # padding leads nowhere


# Mistakes.


def test_an_unknown_site_is_an_error_that_names_the_nearest():
  with pytest.raises(UserError, match="Did you mean 'encoder/layer_0/self/router/weights'"):
    shapes(["encoder/layer_0/self/router/weigths"])
  with pytest.raises(UserError, match="Did you mean 'decoder/layer_0/cross/attention'"):
    shapes(["decoder/layer_0/cross/atention"])
  with pytest.raises(UserError, match="site is 'encoder/layer_7/output'"):
    shapes((), edits={"encoder/layer_7/output": lambda x: x})
  with pytest.raises(UserError, match="site is 'encoder/nothing'"):
    jax.eval_shape(after(model().apply, "encoder/nothing"), SOURCE, variables(), SOURCE, TARGET)


def test_of_many_sites_an_error_lists_the_nearest_only():
  many = dataclasses.replace(CONFIG, encoder_layers=3, decoder_layers=3)
  with pytest.raises(UserError, match="such as decoder/layer_2/self/heads, ") as error:
    jax.eval_shape(
      lambda k: run(model(many).init, k, SOURCE, TARGET, capture=["decoder/layer_2/self/head"]),
      jax.random.key(0),
    )
  assert len(str(error.value)) < 500


def test_a_plain_model_has_no_router_to_capture():
  with pytest.raises(UserError, match="router/weights"):
    shapes(["encoder/layer_0/self/router/weights"], CONFIG.plain())


def test_an_edit_that_changes_the_shape_is_an_error():
  with pytest.raises(UserError, match=r"edit of site .*ffn/hidden.* \(1, 4, 3\) for \(1, 4, 12\)"):
    shapes((), edits={HIDDEN: lambda x: x[..., :3]})
  with pytest.raises(UserError, match="keep the shape"):
    jax.eval_shape(after(model().apply, HIDDEN), SOURCE, variables(), SOURCE, TARGET)


# Valid masks.


def test_an_edit_of_one_position_gets_that_column_of_the_mask():
  valid = jnp.asarray([[True, True, False], [True, False, False]])
  edits = {"x": lambda value, mask: jnp.where(mask[..., None], value, -1.0), "y": jnp.zeros_like}
  intermediates = Intermediates(edits=edits).knowing(lambda site: valid)
  value = jnp.ones((2, 1, 4))
  found = jax.jit(lambda t: intermediates.at(t)("x", value))(1)
  np.testing.assert_array_equal(found[:, 0, 0], [1.0, -1.0])
  np.testing.assert_array_equal(intermediates.at(0)("x", value), value)
  assert not intermediates.at(2)("y", value).any()
  assert OFF.at(1) is OFF
