"""Optimizers and learning-rate schedules against closed forms and optax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.training.optimizer import (
  OptimizerConfig,
  decayed,
  groups,
  learning_rate,
  lower_rate,
  make_optimizer,
  plateau_factor,
  stands_still,
)

PEAK, WARMUP, TOTAL = 0.01, 10, 50


def rate(schedule: str, update: int, **fields) -> float:
  """Learning rate of the update with this number, the first being 1."""
  config = OptimizerConfig(
    learning_rate=PEAK, schedule=schedule, **{"warmup_steps": WARMUP, **fields}
  )
  return float(learning_rate(config, TOTAL)(update - 1))


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_the_rate_rises_linearly_to_its_peak_at_the_end_of_the_warm_up(schedule):
  rates = [rate(schedule, n) for n in (1, 5, 10)]
  np.testing.assert_allclose(rates, [PEAK / 10, PEAK / 2, PEAK], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_without_warm_up_the_first_update_is_near_the_peak(schedule):
  assert rate(schedule, 1, warmup_steps=0) == pytest.approx(PEAK, rel=0.05)


def test_inverse_square_root_falls_as_one_over_the_root_of_the_step():
  np.testing.assert_allclose(rate("inverse_sqrt", 40), PEAK / 2, rtol=1e-6)
  np.testing.assert_allclose(rate("inverse_sqrt", 1000), PEAK / 10, rtol=1e-6)
  np.testing.assert_allclose(rate("inverse_sqrt", 4, warmup_steps=0), PEAK / 2, rtol=1e-6)


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_and_linear_are_halfway_in_the_middle_and_end_at_the_final_fraction(final):
  for schedule in ("cosine", "linear"):
    middle, end, after = (rate(schedule, n, final_fraction=final) for n in (30, TOTAL, 99))
    np.testing.assert_allclose(middle, PEAK * (1 + final) / 2, rtol=1e-5)
    np.testing.assert_allclose([end, after], [PEAK * final] * 2, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_rate_that_falls_late_is_the_same_curve_over_fewer_steps(schedule):
  late = {"schedule": schedule, "falling_share": 0.25}
  np.testing.assert_allclose([rate(update=n, **late) for n in (10, 25, 40)], PEAK, rtol=1e-6)
  found = [rate(update=n, **late) for n in (41, 45, 50)]
  expected = [rate(schedule, n) for n in (14, 30, 50)]
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


def test_a_quarter_through_cosine_is_above_linear():
  np.testing.assert_allclose(rate("cosine", 20), PEAK * (1 + np.sqrt(0.5)) / 2, rtol=1e-5)
  np.testing.assert_allclose(rate("linear", 20), PEAK * 0.75, rtol=1e-5)


def test_a_plateau_divides_every_update_after_it_and_nothing_else_does():
  config = OptimizerConfig(
    name="sgd", learning_rate=2.0, schedule="plateau", warmup_steps=0, plateau_divisor=4.0
  )
  optimizer = make_optimizer(config, TOTAL)
  params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.5)}
  state = optimizer.init(params)
  for expected in (1.0, 0.25, 0.0625):
    updates, state = optimizer.update(grads, state, params)
    np.testing.assert_allclose(updates["w"], -expected, rtol=1e-6)
    np.testing.assert_allclose(2.0 * plateau_factor(state), 2 * expected, rtol=1e-6)
    state = lower_rate(state, config.plateau_divisor)
  other = make_optimizer(dataclasses.replace(config, schedule="constant"), TOTAL).init(params)
  assert lower_rate(other, 4.0) == other
  assert plateau_factor(other) == 1.0
  with pytest.raises(UserError, match="plateau_divisor is 1"):
    OptimizerConfig(plateau_divisor=1.0)


@pytest.mark.parametrize(
  ("fraction", "score", "best", "expected"),
  [
    (0.0, -101.0, -100.0, True),  # a perplexity that rose
    (0.0, -100.0, -100.0, True),
    (0.0, -99.9, -100.0, False),
    (0.03, -97.5, -100.0, True),  # a gain of 2.5 %
    (0.03, -96.5, -100.0, False),
    (0.03, 51.0, 50.0, True),  # accuracies rise
    (0.03, 52.0, 50.0, False),
    (0.03, -1.0, None, False),  # nothing to compare with
    (0.03, float("nan"), -100.0, True),
    (0.03, -100.0, float("nan"), False),
    (0.03, float("nan"), float("nan"), True),
  ],
)
def test_a_plateau_is_a_gain_too_small(fraction, score, best, expected):
  config = OptimizerConfig(name="sgd", schedule="plateau", plateau_improvement=fraction)
  assert stands_still(config, score, best) is expected
  assert not stands_still(OptimizerConfig(schedule="constant"), score, best)


def test_a_fraction_of_improvement_lies_below_1():
  with pytest.raises(UserError, match=r"plateau_improvement is 1\.0; it is a fraction"):
    OptimizerConfig(plateau_improvement=1.0)
  with pytest.raises(UserError, match="'cosine', which has no use"):
    OptimizerConfig(plateau_improvement=0.1, schedule="cosine")


def test_constant_stays_at_its_peak():
  assert rate("constant", TOTAL) == rate("constant", 10**6) == pytest.approx(PEAK)


# Updates.


def parameters() -> dict:
  rng = np.random.default_rng(0)
  shapes = {"kernel": (3, 4), "bias": (2, 3, 4), "scale": (4,)}
  leaves = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
  return {"layer": leaves}


def run(optimizer: optax.GradientTransformation, steps: int = 4, factor: float = 1.0) -> dict:
  """Parameters after a few steps with changing gradients."""

  @jax.jit
  def step(params, state, n):
    gradients = jax.tree.map(lambda p: factor * jnp.cos(3 * p + n), params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  params = parameters()
  state = optimizer.init(params)
  for n in range(steps):
    params, state = step(params, state, float(n))
  return params


def assert_same(one: dict, two: dict, rtol: float = 1e-6) -> None:
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7)


BASE = OptimizerConfig(learning_rate=PEAK, schedule="constant", warmup_steps=3)


def test_adamw_is_that_of_optax_with_decay_on_matrices_only():
  config = dataclasses.replace(BASE, weight_decay=0.3, b1=0.8, b2=0.95, eps=1e-6)
  peer = optax.adamw(
    learning_rate(config, TOTAL), b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3, mask=decayed
  )
  assert_same(run(make_optimizer(config, TOTAL)), run(peer))


def test_weight_decay_shrinks_kernels_but_no_bias_of_any_shape_and_no_scale():
  assert decayed(parameters()) == {"layer": {"kernel": True, "bias": False, "scale": False}}


def test_weight_decay_leaves_what_recoding_adds_alone_but_for_matrices():
  flat, table = jnp.zeros((2, 3)), jnp.zeros((2, 3, 4))
  params = {"decoder": table, "decoder_bias": flat, "anchor": table, "steps": flat}
  params |= {"step_0_h_0": flat, "step_0_h_0_bias": jnp.zeros(3)}
  assert [name for name, shrinks in decayed(params).items() if shrinks] == ["decoder", "step_0_h_0"]


def test_adam_without_decay_is_that_of_optax():
  peer = optax.adam(learning_rate(BASE, TOTAL), b1=BASE.b1, b2=BASE.b2, eps=BASE.eps)
  assert_same(run(make_optimizer(dataclasses.replace(BASE, name="adam"), TOTAL)), run(peer))
  assert_same(run(make_optimizer(BASE, TOTAL)), run(peer))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_that_of_optax(momentum):
  config = dataclasses.replace(BASE, name="sgd", momentum=momentum)
  peer = optax.sgd(learning_rate(config, TOTAL), momentum=momentum or None)
  assert_same(run(make_optimizer(config, TOTAL)), run(peer))


# Groups of parameters that stand still by turns.


def routed() -> dict:
  """Parameters of a router beside those of a layer."""
  return {"layer": {**parameters()["layer"], "router": {"signatures": jnp.full((2, 3), 0.3)}}}


def masks(params: dict) -> dict:
  """What moves, by phase."""
  names = groups(params)
  return {
    which: jax.tree.map(lambda name: which in ("all", name), names)
    for which in ("all", "rest", "routing")
  }


def in_turns(optimizer: optax.GradientTransformation, phases: list[str]) -> tuple[dict, list]:
  """Parameters and state after a step in each phase; what stands still keeps its moments too."""
  params, state, trace = routed(), optimizer.init(routed()), []

  @functools.partial(jax.jit, static_argnums=3)
  def step(params, state, n, phase):
    mask = masks(params)[phase]
    gradients = jax.tree.map(lambda p, m: m * jnp.cos(3 * p + n), params, mask)
    updates, new = optimizer.update(gradients, state, params, moving=mask)
    keep = optax.tree.map_params(
      optimizer, lambda _, m: m, new, mask, transform_non_params=lambda _: True
    )
    state = jax.tree.map(lambda m, a, b: a if m else b, keep, new, state)
    return jax.tree.map(lambda m, p, u: p + u if m else p, mask, params, updates), state

  for n, phase in enumerate(phases):
    params, state = step(params, state, n, phase)
    trace.append((params, state))
  return params, trace


def test_the_group_of_a_parameter_is_that_of_routing_parameters():
  names = groups(routed())["layer"]
  assert names.pop("router") == {"signatures": "routing"}
  assert set(names.values()) == {"rest"}


def test_adam_corrects_the_bias_of_a_group_by_the_updates_of_that_group_alone():
  """Steps in which a group stood still leave no trace but in the learning rate."""
  config = dataclasses.replace(BASE, weight_decay=0.1, warmup_steps=0)  # a constant rate
  optimizer = make_optimizer(config, TOTAL, grouped=True)
  moves = ["rest", "rest", "routing", "all", "rest", "routing"]
  found = in_turns(optimizer, moves)[0]["layer"]
  adam = optax.adamw(PEAK, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=0.1)
  for name, group in (("kernel", "rest"), ("router", "routing")):
    own = {name: routed()["layer"][name]}
    state = adam.init(own)
    for n, phase in enumerate(moves):
      if phase in ("all", group):
        gradients = jax.tree.map(lambda p, n=n: jnp.cos(3 * p + n), own)
        updates, state = adam.update(gradients, state, own)
        own = optax.apply_updates(own, updates)
    assert_same(own, {name: found[name]})


def test_a_shared_count_would_correct_the_bias_wrongly():
  moves = ["rest"] * 5 + ["routing"]
  right, wrong = (
    in_turns(optimizer, moves)[0]["layer"]["router"]["signatures"]
    for optimizer in (
      make_optimizer(BASE, TOTAL, grouped=True),
      optax.with_extra_args_support(make_optimizer(BASE, TOTAL)),
    )
  )
  start = routed()["layer"]["router"]["signatures"]
  np.testing.assert_allclose(jnp.abs(right - start), PEAK, rtol=1e-3)  # Adam's first update
  assert np.all(jnp.abs(wrong - start) < 0.8 * PEAK)


def test_the_learning_rate_runs_on_over_the_updates_of_all_groups():
  config = dataclasses.replace(BASE, warmup_steps=8)
  _, trace = in_turns(make_optimizer(config, TOTAL, grouped=True), ["rest"] * 3 + ["routing"])
  before, after = (params["layer"]["router"]["signatures"] for params, _ in trace[-2:])
  np.testing.assert_allclose(jnp.abs(after - before), PEAK * 4 / 8, rtol=1e-3)


def test_groups_that_always_move_together_are_ordinary_adam():
  for grouped, plain in zip(
    *(jax.tree.leaves(in_turns(
        optax.with_extra_args_support(make_optimizer(BASE, TOTAL, grouped=g)), ["all"] * 4)[0])
      for g in (True, False)), strict=True,
  ):  # fmt: skip
    np.testing.assert_array_equal(grouped, plain)


def test_a_run_without_frozen_parameters_has_the_state_of_plain_adam():
  state = make_optimizer(BASE, TOTAL).init(parameters())
  expected = (optax.scale_by_adam(), optax.scale_by_schedule(lambda n: n))
  assert jax.tree.structure(state) == jax.tree.structure(
    tuple(part.init(parameters()) for part in expected)
  )


def test_clipping_shortens_long_gradients_to_the_limit_and_leaves_short_ones():
  config = dataclasses.replace(BASE, name="sgd", clip=0.5, warmup_steps=0)
  params = parameters()
  optimizer = make_optimizer(config, TOTAL)

  def update(gradients):
    updates = optimizer.update(gradients, optimizer.init(params), params)[0]
    return jax.tree.map(lambda u: -u / PEAK, updates)

  ones = jax.tree.map(jnp.ones_like, params)
  size = float(optax.tree.norm(ones))
  assert float(optax.tree.norm(update(ones))) == pytest.approx(0.5, rel=1e-5)
  assert_same(update(ones), jax.tree.map(lambda g: 0.5 * g / size, ones))
  short = jax.tree.map(lambda g: 0.4 * g / size, ones)
  assert_same(update(short), short)


# Configuration.


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"name": "adagrad"}, ["name", "adagrad", "adamw"]),
    ({"schedule": "cosin"}, ["schedule", "cosin", "Did you mean 'cosine'"]),
    ({"learning_rate": 0.0}, ["learning_rate", "0.0", "positive"]),
    ({"warmup_steps": -1}, ["warmup_steps", "-1", "negative"]),
    ({"clip": -1.0}, ["clip", "-1.0", "negative"]),
    ({"b2": 1.0}, ["b2", "1.0", "below 1"]),
    ({"eps": 0.0}, ["eps", "0.0", "positive"]),
    ({"name": "adam", "weight_decay": 0.1}, ["weight_decay", "0.1", "adam", "adamw"]),
    ({"momentum": 0.9}, ["momentum", "0.9", "adamw", "sgd"]),
    ({"final_fraction": 0.1}, ["final_fraction", "0.1", "inverse_sqrt", "cosine"]),
    ({"final_fraction": 5.0, "schedule": "linear"}, ["final_fraction", "5.0", "at most 1"]),
    ({"falling_share": 0.5}, ["falling_share", "0.5", "inverse_sqrt", "cosine", "to 1"]),
    ({"falling_share": 0.0, "schedule": "linear"}, ["falling_share", "0.0", "at most 1"]),
  ],
)
def test_a_bad_configuration_names_field_value_and_remedy(fields, words):
  with pytest.raises(UserError) as error:
    OptimizerConfig(**fields)
  assert all(word in str(error.value) for word in words)
