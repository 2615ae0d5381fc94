"""Meta-learning and mixtures of objectives: closed forms, finite differences, exact identities."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.losses import Term, objective
from compmod_jax.data.episodes import split_episode
from compmod_jax.tasks.base import Objective, StepContext
from compmod_jax.tasks.objectives import Meta, MetaConfig, Mixture, Share
from compmod_jax.training.step import gradients

EPISODES, SUPPORT, QUERY, WIDTH, RATE = 4, 5, 3, 3, 0.07
CONTEXT = StepContext(jax.random.key(3), np.int32(0), True)
QUIET = CONTEXT._replace(train=False)
SPLIT = functools.partial(split_episode, support=SUPPORT)


@dataclasses.dataclass(frozen=True)
class Squares:
  """Half the mean squared error of a linear model: quadratic in its parameters."""

  scale: float = 1.0

  def weights(self, config: Any) -> dict[str, float]:
    return {"squares": self.scale}

  def __call__(self, model, params, carry, batch, context):
    out = batch["x"] @ params["head"]["w"] + params["head"]["b"]
    error = 0.5 * jnp.sum((out - batch["y"]) ** 2)
    count = jnp.float32(len(out))
    return {"squares": Term(error, count, self.scale)}, carry, {"error": (error, count)}


@dataclasses.dataclass(frozen=True)
class Network:
  """A layer of tanh, a term that is no mean, and, in training, noise on the hidden layer."""

  def weights(self, config: Any) -> dict[str, float]:
    return {"squares": 1.0, "spread": 0.3}

  def __call__(self, model, params, carry, batch, context):
    intermediates = context.intermediates
    hidden = intermediates("hidden", jnp.tanh(batch["x"] @ params["body"]["kernel"]))
    out = hidden @ params["head"]["w"] + params["head"]["b"]
    if context.train:
      out = out * (1 + 0.1 * jax.random.normal(context.rng, out.shape))
    count = jnp.float32(len(out))
    error = jnp.sum((out - batch["y"]) ** 2)
    terms = {
      "squares": Term(error, count),
      "spread": Term(jnp.sum(hidden, axis=0), count, 0.3, finish=spread),
    }
    return terms, carry, {"error": (error, count)}


def spread(total: jax.Array, count: jax.Array) -> jax.Array:
  return jnp.sum((total / count) ** 2)


def numbers(*shape: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape)


def parameters() -> Any:
  """Arrays of the host, as all inputs are: float64, and float32 where a program takes no other."""
  return {
    "body": {"kernel": numbers(WIDTH, WIDTH, seed=0)},
    "head": {"w": numbers(WIDTH, seed=1), "b": numbers(1, seed=2)},
  }


def episodes(count: int = EPISODES) -> Any:
  rows = SUPPORT + QUERY
  return {"x": numbers(count, rows, WIDTH, seed=3), "y": numbers(count, rows, seed=4)}


def meta(inside: Objective, **fields: Any) -> Meta:
  return Meta(inside, SPLIT, **{"rate": RATE, **fields})


def value(one: Objective, params: Any, batch: Any, context: StepContext = CONTEXT) -> jax.Array:
  return objective(one(None, params, (), batch, context)[0])


def scored(one: Objective, params: Any, batch: Any, context: StepContext = CONTEXT) -> jax.Array:
  """`value`, compiled."""
  return jax.jit(functools.partial(value, one, context=context))(params, batch)


def slopes(one: Objective, params: Any, batch: Any, context: StepContext = CONTEXT) -> Any:
  """Its gradient, compiled."""
  return jax.jit(jax.grad(functools.partial(value, one, context=context)))(params, batch)


def called(one: Objective, params: Any, batch: Any, context: StepContext = CONTEXT) -> Any:
  """Terms, carry and metrics, compiled."""
  return jax.jit(lambda params, batch: one(None, params, (), batch, context))(params, batch)


def query(batch: Any) -> Any:
  return jax.tree.map(lambda x: x[:, SUPPORT:].reshape(-1, *x.shape[2:]), batch)


def assert_close(one: Any, two: Any, **tolerances: float) -> None:
  assert jax.tree.structure(one) == jax.tree.structure(two)
  jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerances), one, two)


def assert_same(one: Any, two: Any) -> None:
  jax.tree.map(np.testing.assert_array_equal, one, two)


# The gradient.


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_for_a_quadratic_loss_the_gradient_is_its_closed_form(steps, first_order):
  """Of phi = (w, b): A^k H_Q (phi_k - q), with A = 1 - alpha H_S; to the first order without A."""
  with jax.enable_x64(True):
    params, batch = parameters(), episodes()
    one = meta(Squares(), steps=steps, first_order=first_order)
    found = slopes(one, params, batch)["head"]
  x, y = np.asarray(batch["x"]), np.asarray(batch["y"])
  start = np.concatenate([params["head"]["w"], params["head"]["b"]])
  expected = np.zeros(WIDTH + 1)
  for inputs, targets in zip(x, y, strict=True):
    rows = np.concatenate([inputs, np.ones((SUPPORT + QUERY, 1))], axis=1)
    hessian = rows[:SUPPORT].T @ rows[:SUPPORT] / SUPPORT
    ahead = np.eye(WIDTH + 1) - RATE * hessian
    phi = start
    for _ in range(steps):
      phi = ahead @ phi + RATE * rows[:SUPPORT].T @ targets[:SUPPORT] / SUPPORT
    slope = rows[SUPPORT:].T @ (rows[SUPPORT:] @ phi - targets[SUPPORT:]) / QUERY
    expected += (slope if first_order else np.linalg.matrix_power(ahead, steps) @ slope) / EPISODES
  np.testing.assert_allclose(np.concatenate([found["w"], found["b"]]), expected, rtol=1e-10)


@pytest.mark.parametrize("names", [("*",), ("head",), ("*/w", "body")])
def test_the_gradient_is_that_of_finite_differences(names):
  with jax.enable_x64(True):
    params, batch = parameters(), episodes()
    one = meta(Network(), steps=2, parameters=names)
    function = jax.jit(jax.value_and_grad(lambda params: value(one, params, batch)))
    _, gradient = function(params)
    for seed in range(3):
      way = jax.tree.map(lambda x, seed=seed: numbers(*x.shape, seed=seed), params)
      step = 1e-5
      ends = [
        np.asarray(
          function(jax.tree.map(lambda p, d, sign=sign: p + sign * step * d, params, way))[0]
        )
        for sign in (1, -1)
      ]
      slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, gradient, way)))
      np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-7)


def test_to_the_first_order_it_is_the_gradient_of_the_query_at_the_adapted_parameters():
  params, batch = parameters(), episodes(1)
  one = meta(Network(), steps=2, first_order=True)
  found = slopes(one, params, batch)

  @jax.jit
  def by_hand(params, batch):
    inner = CONTEXT._replace(rng=jax.random.fold_in(CONTEXT.rng, 0))
    support, asked = SPLIT(jax.tree.map(lambda x: x[0], batch))
    *_, last = one.adapted(None, params, support, inner)
    return jax.grad(functools.partial(value, Network(), batch=asked, context=inner))(last.params)

  assert_close(found, by_hand(params, batch), rtol=1e-6)
  second = slopes(meta(Network(), steps=2), params, batch)
  gaps = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), found, second)
  assert max(jax.tree.leaves(gaps)) > 1e-2  # the order matters here


@pytest.mark.parametrize("off", [{"steps": 0}, {"rate": 0.0}])
def test_without_steps_or_of_no_size_it_is_the_plain_objective_on_the_query(off):
  params, batch = parameters(), episodes()
  run = jax.jit(
    lambda one, params, batch: gradients(
      functools.partial(one, None), params, (), batch, CONTEXT, 1
    )[:2],
    static_argnums=0,
  )
  assert_same(run(meta(Network(), **off), params, batch), run(Network(), params, query(batch)))


def test_a_step_of_hardly_any_size_changes_hardly_anything():
  """The way that does take steps agrees with the one that takes none."""
  params, batch = parameters(), episodes()
  one = scored(meta(Network(), rate=1e-7), params, batch, QUIET)
  np.testing.assert_allclose(one, scored(Network(), params, query(batch), QUIET), rtol=1e-6)


def test_what_the_patterns_leave_out_keeps_its_bits_in_the_inner_loop_and_learns_outside():
  params, batch = parameters(), episodes()
  one = meta(Network(), steps=2, parameters=("head/w",))
  support, _ = SPLIT(jax.tree.map(lambda x: x[0], batch))

  @jax.jit
  def heads(params, support):
    before, *after = one.adapted(None, params, support, CONTEXT)
    assert before.params is params
    for step in after:
      changed = flatten_dict(step.params, sep="/")
      for name, leaf in flatten_dict(params, sep="/").items():
        assert (changed[name] is leaf) == (name != "head/w")
    return [step.params["head"]["w"] for step in after]

  first, second = map(np.asarray, heads(params, support))
  assert np.abs(second - first).max() > 0
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slopes(one, params, batch)))


def test_micro_batches_of_episodes_give_the_gradient_of_the_whole_batch():
  """Also of a term that is no mean."""
  params, batch = parameters(), episodes()
  one = meta(Network(), steps=2)

  @functools.partial(jax.jit, static_argnums=0)
  def run(micro_batches: int, params: Any, batch: Any) -> Any:
    return gradients(functools.partial(one, None), params, (), batch, QUIET, micro_batches)

  (whole, total, _, _, sums), (parts, again, _, _, others) = (
    run(count, params, batch) for count in (1, 2)
  )
  assert_close(whole, parts, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(total, again, rtol=1e-6)
  assert_close(sums, others, rtol=1e-5)


def test_every_episode_adapts_by_itself():
  """What a batch adds up is what each of its episodes gives alone."""
  params, batch = parameters(), episodes()
  run = jax.jit(lambda batch: meta(Squares())(None, params, (), batch, CONTEXT)[0]["squares"].sum)
  alone = [
    np.asarray(run(jax.tree.map(lambda x, i=i: x[i : i + 1], batch))) for i in range(EPISODES)
  ]
  np.testing.assert_allclose(run(batch), sum(alone), rtol=1e-6)
  moved = {**batch, "x": batch["x"].copy()}
  moved["x"][0, :SUPPORT] += 1
  first = np.asarray(run(jax.tree.map(lambda x: x[:1], moved)))
  np.testing.assert_allclose(run(moved), first + sum(alone[1:]), rtol=1e-6)
  assert abs(first - alone[0]) > 1e-2


def test_the_loss_on_the_support_is_logged_before_each_step():
  params, batch = parameters(), episodes()
  _, _, found = called(meta(Squares(), steps=3), params, batch, QUIET)
  sums, counts = map(np.asarray, found["support/squares"])
  support = jax.tree.map(lambda x: x[:, :SUPPORT].reshape(-1, *x.shape[2:]), batch)
  assert counts.tolist() == [EPISODES * SUPPORT] * 3
  np.testing.assert_allclose(sums[0] / counts[0], scored(Squares(), params, support), rtol=1e-6)
  assert sums[0] > sums[1] > sums[2]


def test_intermediates_of_the_queries_are_read_and_edits_hold_in_the_inner_loop_too():
  params, batch = parameters(), episodes()
  one, params = meta(Network()), jax.tree.map(np.float32, params)

  @jax.jit
  def read(params, batch):
    intermediates = Intermediates(capture=frozenset(["hidden"]))
    one(None, params, (), batch, CONTEXT._replace(intermediates=intermediates))
    return intermediates.captured["hidden"]

  assert read(params, batch).shape == (EPISODES * QUERY, WIDTH)

  @jax.jit
  def edited(params, batch):
    off = Intermediates(edits={"hidden": jnp.zeros_like})
    support, _ = SPLIT(jax.tree.map(lambda x: x[0], batch))
    *_, last = one.adapted(None, params, support, CONTEXT._replace(intermediates=off))
    return last.params

  last = edited(params, batch)
  assert_same(last["body"], params["body"])  # nothing reaches it through zeros
  assert np.abs(last["head"]["b"] - params["head"]["b"]).max() > 0


# Mistakes.


def test_a_pattern_that_stands_for_nothing_is_a_mistake():
  with pytest.raises(UserError, match=r"meta.parameters has 'haed', which .* mean 'head'\? Give"):
    value(meta(Squares(), parameters=("haed",)), parameters(), episodes())


def test_recurrent_states_and_batches_of_rows_are_refused():
  one, params = meta(Squares()), parameters()
  with pytest.raises(UserError, match="keeps a recurrent state"):
    one(None, params, np.zeros(EPISODES), episodes(), CONTEXT)
  with pytest.raises(UserError, match=r"a batch of rows, not of episodes: 'y' has one axis"):
    value(one, params, query(episodes()))


@jax.custom_vjp
def once(x: jax.Array) -> jax.Array:
  """A function whose rule refuses to be differentiated again."""
  return x**2


@jax.custom_vjp
def final(x: jax.Array) -> jax.Array:
  return x


def refuse(*_: Any) -> Any:
  raise NotImplementedError("only once")


final.defvjp(lambda x: (x, None), refuse)
once.defvjp(lambda x: (x**2, x), lambda x, g: (final(2 * x) * g,))


@dataclasses.dataclass(frozen=True)
class Once(Squares):
  def __call__(self, model, params, carry, batch, context):
    terms, carry, found = super().__call__(model, params, carry, batch, context)
    extra = Term(jnp.sum(once(params["head"]["w"])), jnp.float32(1))
    return terms | {"extra": extra}, carry, found


def test_a_rule_without_a_second_derivative_is_refused_and_will_do_for_the_first_order():
  params, batch = parameters(), episodes()
  with pytest.raises(UserError, match=r"only once.*Set meta.first_order = True"):
    slopes(meta(Once()), params, batch)
  found = slopes(meta(Once(), first_order=True), params, batch)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"steps": -1}, r"meta.steps is -1; it must not be negative"),
    ({"rate": -0.1}, r"meta.rate is -0.1"),
    ({"parameters": ()}, r"meta.parameters is empty; name what is adapted"),
  ],
)
def test_bad_settings_name_their_field(fields, words):
  with pytest.raises(UserError, match=words):
    MetaConfig(**fields)


# Mixtures.


def test_a_mixture_is_the_weighted_sum_of_its_objectives():
  params, batch = parameters(), query(episodes())
  mixture = Mixture({"a": Share(Network()), "b": Share(Squares(0.5), weight=3.0)})
  mixed, first, second = (
    np.asarray(scored(one, params, batch, QUIET)) for one in (mixture, Network(), Squares(0.5))
  )
  np.testing.assert_allclose(mixed, first + 3 * second, rtol=1e-6)
  terms, _, metrics = called(mixture, params, batch, QUIET)
  weights = {name: term.weight for name, term in terms.items()}
  assert weights == mixture.weights(None) == {"a/squares": 1, "a/spread": 0.3, "b/squares": 1.5}
  assert metrics.keys() == {"error", "b/error"}


def test_a_mixture_of_one_is_that_objective_bit_for_bit():
  params, batch = parameters(), query(episodes())
  run = jax.jit(
    lambda one, params: jax.value_and_grad(lambda p: value(one, p, batch))(params), static_argnums=0
  )
  assert_same(run(Mixture({"a": Share(Network())}), params), run(Network(), params))


def test_shares_have_dropout_of_their_own_and_only_the_first_is_read():
  params, batch = parameters(), query(episodes())
  mixture = Mixture({"a": Share(Network()), "b": Share(Network())})

  @jax.jit
  def read(params, batch):
    edits = {"hidden": lambda x: x + 1}
    intermediates = Intermediates(capture=frozenset(["hidden"]), edits=edits)
    context = CONTEXT._replace(intermediates=intermediates)
    terms, _, _ = mixture(None, params, (), batch, context)
    return terms, jnp.sum(intermediates.captured["hidden"], axis=0)

  terms, hidden = read(params, batch)
  assert terms["a/squares"].sum != terms["b/squares"].sum
  np.testing.assert_array_equal(terms["a/spread"].sum, terms["b/spread"].sum)  # both are edited
  np.testing.assert_array_equal(hidden, terms["a/spread"].sum)


def test_a_mixture_can_be_learned_from_episodes():
  params, batch = parameters(), episodes()
  mixture = Mixture({"a": Share(Network()), "b": Share(Squares(), weight=2.0)})
  assert np.isfinite(scored(meta(mixture), params, batch))


def test_a_mixture_needs_shares_with_positive_weights():
  with pytest.raises(UserError, match="shares is empty"):
    Mixture({})
  with pytest.raises(UserError, match=r"shares.a.weight is 0; it must be positive"):
    Mixture({"a": Share(Squares(), weight=0)})
