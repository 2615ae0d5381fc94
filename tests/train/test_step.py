"""The training step: micro-batches, frozen parameters, bad batches, the moving average."""

import functools
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from compmod_jax.core.errors import UserError
from compmod_jax.core.losses import Term, cross_entropy
from compmod_jax.data.tokenizers import BOS
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.transformer import Transformer, TransformerConfig, shift_right
from compmod_jax.tasks.base import StepContext
from compmod_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from compmod_jax.training.step import TrainState, gradients, init_state, make_step, trainable_mask

ROWS, TIME, WIDTH = 8, 5, 3


class Toy:
  """A small model with a mean over tokens, a term that is none, a carry and random numbers."""

  @property
  def model(self) -> "Toy":
    return self

  def unused_parameters(self, batch: Any) -> tuple[str, ...]:
    return ()

  def loss(self, params: Any, carry: Any, batch: Any, context: StepContext) -> Any:
    mask, x = batch["mask"], batch["x"]
    hidden = jnp.tanh(jnp.einsum("btd,dh->bth", x, params["body"]["kernel"]))
    scores = jnp.einsum("bth,hu->btu", hidden, params["layer"]["router"]["signatures"])
    weights = jnp.where(mask[..., None], jax.nn.softmax(scores), 0)
    output = jnp.sum(hidden, axis=-1) + params["body"]["bias"][0]
    # Finite at edge = 0, where its gradient is not.
    edge = jnp.sum(jnp.sqrt(batch["edge"] * params["body"]["bias"][1] ** 2))
    error = jnp.sum(jnp.where(mask, (output - batch["y"]) ** 2, 0)) + edge
    count = jnp.sum(mask)
    terms = {
      "error": Term(error, count.astype(jnp.float32)),
      "spread": Term(jnp.sum(weights, axis=(0, 1)), count, 0.7, finish=spread),
    }
    noise = jax.random.normal(context.rng)
    metrics = {"error": (error, count), "noise": (noise, 1.0), "train": (context.train * 1.0, 1.0)}
    metrics["progress"] = (context.progress * 1.0, 1.0)
    return terms, carry + jnp.sum(x[:, :, 0], axis=1), metrics


def spread(total: jax.Array, count: jax.Array) -> jax.Array:
  return jnp.sum((total / count) ** 2)


def toy_params() -> Any:
  random = np.random.default_rng(0)
  shapes = {
    "body": {"kernel": (WIDTH, 4), "bias": (2,)},
    "layer": {"router": {"signatures": (4, 2)}},
  }
  is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
  return jax.tree.map(
    lambda s: jnp.asarray(random.normal(size=s), jnp.float32), shapes, is_leaf=is_shape
  )


def toy_batch(seed: int = 0) -> dict[str, np.ndarray]:
  """Rows of very different lengths, so that means over parts are not the mean over all."""
  random = np.random.default_rng(seed)
  lengths = np.array([5, 1, 5, 2, 5, 1, 4, 1])
  return {
    "x": random.normal(size=(ROWS, TIME, WIDTH)).astype(np.float32),
    "y": random.normal(size=(ROWS, TIME)).astype(np.float32),
    "mask": np.arange(TIME) < lengths[:, None],
    "edge": np.ones(ROWS, np.float32),
  }


CARRY = jnp.arange(float(ROWS))
CONTEXT = StepContext(jax.random.key(0), jnp.int32(0), True)


@functools.cache
def toy_gradients(micro_batches: int) -> Any:
  function = functools.partial(gradients, Toy().loss, context=CONTEXT, micro_batches=micro_batches)
  return jax.device_get(jax.jit(lambda *a: function(*a))(toy_params(), CARRY, toy_batch()))


# Micro-batches.


def assert_close(one: Any, two: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_k_micro_batches_equal_one_big_batch_whatever_the_terms(micro_batches):
  grads, value, terms, carry, metrics = toy_gradients(micro_batches)
  expected = toy_gradients(1)
  assert_close(grads, expected[0])
  assert_close(value, expected[1])
  assert_close(
    {k: (t.sum, t.count) for k, t in terms.items()},
    {k: (t.sum, t.count) for k, t in expected[2].items()},
  )
  np.testing.assert_array_equal(carry, expected[3])  # every row's own, in the rows' order
  assert_close(metrics["error"], expected[4]["error"])


def test_a_mean_of_means_over_micro_batches_would_be_another_gradient():
  def mean_of_means(params: Any) -> Any:
    batch, total = toy_batch(), 0.0
    for part in (slice(0, ROWS, 2), slice(1, ROWS, 2)):
      piece = {name: value[part] for name, value in batch.items()}
      terms, _, _ = Toy().loss(params, CARRY[part], piece, CONTEXT)
      total += sum(term.weight * term.value() for term in terms.values()) / 2
    return total

  wrong = jax.jit(jax.grad(mean_of_means))(toy_params())
  right = toy_gradients(2)[0]
  assert np.abs(wrong["body"]["kernel"] - right["body"]["kernel"]).max() > 0.01


def test_micro_batches_draw_different_random_numbers():
  noise = toy_gradients(2)[4]["noise"][0]
  keys = [jax.random.fold_in(CONTEXT.rng, n) for n in range(2)]
  np.testing.assert_allclose(noise, sum(jax.random.normal(key) for key in keys), rtol=1e-5)


class TinyTranslation:
  """A Transformer's cross-entropy, dropout off."""

  model = Transformer(
    TransformerConfig(
      encoder_layers=1,
      decoder_layers=1,
      dim=8,
      heads=2,
      ffn_dim=12,
      max_length=8,
      compete=("encoder_self",),
      competition=CompetitionConfig(key_dim=3, hidden_dim=4),
    ),
    11,
    9,
  )

  def loss(self, params: Any, carry: Any, batch: Any, context: StepContext) -> Any:
    source, target = batch["source"], batch["target"]
    logits = self.model.apply({"params": params}, source, shift_right(target, BOS))
    found = cross_entropy(logits, target, target != 0, label_smoothing=0.1)
    return {"cross_entropy": Term(found.smoothed, found.count)}, carry, {}


def test_micro_batches_of_a_transformer_equal_one_big_batch():
  task, random = TinyTranslation(), np.random.default_rng(0)

  def side(types: int, lengths: list[int]) -> jax.Array:
    tokens = random.integers(4, types, size=(4, 6))
    return jnp.asarray(np.where(np.arange(6) < np.array(lengths)[:, None], tokens, 0), jnp.int32)

  batch = {"source": side(11, [6, 2, 3, 0]), "target": side(9, [5, 1, 6, 0])}
  params = nn.unbox(jax.jit(task.model.init)(jax.random.key(0), *batch.values()))["params"]

  def found(micro_batches: int) -> Any:
    function = functools.partial(gradients, task.loss, context=CONTEXT, micro_batches=micro_batches)
    return jax.jit(lambda p, b: function(p, (), b)[:2])(params, batch)

  (one, one_value), (two, two_value) = found(1), found(2)
  np.testing.assert_allclose(one_value, two_value, rtol=1e-6)
  assert_close(one, two, atol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_products_in_bfloat16_change_gradients_by_their_rounding(micro_batches):
  task, random = TinyTranslation(), np.random.default_rng(0)
  tokens = [jnp.asarray(random.integers(4, n, size=(4, 6)), jnp.int32) for n in (11, 9)]
  batch = dict(zip(("source", "target"), tokens, strict=True))
  params = nn.unbox(jax.jit(task.model.init)(jax.random.key(0), *tokens))["params"]
  optimizer = make_optimizer(MOMENTUM, 100)
  model = SimpleNamespace(unused_parameters=lambda batch: ())
  trained: Any = SimpleNamespace(loss=task.loss, model=model)

  def moved(products: Any) -> Any:
    step = make_step(
      trained,
      optimizer,
      lambda _: jnp.float32(0.05),
      micro_batches=micro_batches,
      ema=0.0,
      mask=trainable_mask(params, "all"),
      products=products,
    )
    state, found = jax.jit(step)(init_state(params, (), optimizer, 0.0), batch, jax.random.key(0))
    return jax.tree.map(jnp.subtract, state.params, params), found["objective"]

  (exact, loss), (near, near_loss) = moved("model"), moved("bfloat16")
  np.testing.assert_allclose(near_loss, loss, rtol=0.01)
  difference = optax.tree.norm(jax.tree.map(jnp.subtract, exact, near)) / optax.tree.norm(exact)
  assert 1e-5 < difference < 0.1


# Steps.

ADAMW = OptimizerConfig(learning_rate=0.05, warmup_steps=3, weight_decay=0.1, clip=1.0)
MOMENTUM = OptimizerConfig(name="sgd", learning_rate=0.05, warmup_steps=3, momentum=0.9)


@functools.cache
def stepper(config: OptimizerConfig = ADAMW, which: str = "all", ema: float = 0.0) -> Any:
  """A compiled step that does not give up its state's memory."""
  step = make_step(
    Toy(),
    make_optimizer(config, 100, grouped=True),
    learning_rate(config, 100),
    micro_batches=1,
    ema=ema,
    mask=trainable_mask(toy_params(), which),
    total_steps=5,
  )
  return jax.jit(functools.partial(step, key=jax.random.key(0)))


def fresh(config: OptimizerConfig = ADAMW, ema: float = 0.0) -> TrainState:
  return init_state(toy_params(), CARRY, make_optimizer(config, 100, grouped=True), ema)


def trained(config: OptimizerConfig = ADAMW, ema: float = 0.0, steps: int = 3) -> TrainState:
  state = fresh(config, ema)
  for seed in range(steps):
    state, _ = stepper(config, ema=ema)(state, toy_batch(seed))
  return state


def assert_same_bits(one: Any, two: Any) -> None:
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_step_is_the_gradient_through_the_optimizer():
  state, metrics = stepper()(fresh(), toy_batch())
  grads = toy_gradients(1)[0]
  optimizer, params = make_optimizer(ADAMW, 100), toy_params()
  updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
  assert_close(state.params, optax.apply_updates(params, updates))
  np.testing.assert_allclose(metrics["objective"], toy_gradients(1)[1], rtol=1e-6)
  np.testing.assert_allclose(metrics["gradient_norm"], optax.tree.norm(grads), rtol=1e-5)
  np.testing.assert_allclose(metrics["learning_rate"], 0.05 / 3, rtol=1e-6)
  assert int(state.step) == 1
  assert metrics["task"]["train"][0] == 1


def test_every_step_has_its_own_random_numbers_which_depend_on_seed_and_step_alone():
  noise, state = [], fresh()
  for _ in range(2):
    state, metrics = stepper()(state, toy_batch())
    noise.append(float(metrics["task"]["noise"][0]))
  expected = [jax.random.normal(jax.random.fold_in(jax.random.key(0), n)) for n in range(2)]
  np.testing.assert_allclose(noise, expected, rtol=1e-6)


def test_progress_goes_from_zero_at_the_first_step_to_one_at_the_last():
  found, state = [], fresh()
  for _ in range(5):
    state, metrics = stepper()(state, toy_batch())
    found.append(float(metrics["task"]["progress"][0]))
  np.testing.assert_allclose(found, [0, 0.25, 0.5, 0.75, 1])


# Frozen parameters.


def test_routing_parameters_are_the_routers_alone():
  params = toy_params()
  routing = flatten_dict(trainable_mask(params, "routing"), sep="/")
  rest = flatten_dict(trainable_mask(params, "rest"), sep="/")
  assert routing == {"body/kernel": False, "body/bias": False, "layer/router/signatures": True}
  assert rest == {path: not moves for path, moves in routing.items()}
  assert all(flatten_dict(trainable_mask(params, "all")).values())


def test_training_routers_that_are_not_there_is_a_mistake():
  with pytest.raises(
    UserError, match=r"phases.trainable is 'routing', but .* Let heads or experts"
  ):
    trainable_mask({"body": toy_params()["body"]}, "routing")


def moments(opt_state: Any) -> list[dict[str, Any]]:
  """Every part of an optimizer's state that has the parameters' shape."""
  found: list[dict[str, Any]] = []
  for part in opt_state:
    for name in ("mu", "nu", "trace"):
      if hasattr(part, name):
        found.append(flatten_dict(getattr(part, name), sep="/"))
  return found


@pytest.mark.parametrize("config", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("which", ["routing", "rest"])
def test_frozen_parameters_and_their_moments_keep_their_bits_and_the_others_move(config, which):
  before = trained(config)  # momentum and moments are under way
  after = before
  for seed in range(3):
    after, metrics = stepper(config, which)(after, toy_batch(seed))
  trees = [(flatten_dict(before.params, sep="/"), flatten_dict(after.params, sep="/"))]
  trees += zip(moments(before.opt_state), moments(after.opt_state), strict=True)
  assert len(trees) == (3 if config is ADAMW else 2)
  for old, new in trees:
    for path in old:
      moves = ("router" in path) == (which == "routing")
      assert np.array_equal(old[path], new[path]) != moves, path
  assert metrics["gradient_norm"] > 0


@pytest.mark.parametrize("which", ["routing", "rest"])
def test_the_count_of_a_frozen_group_stands_still_and_the_schedule_runs_on(which):
  before = trained(steps=2)
  after, _ = stepper(which=which)(before, toy_batch())
  adam = next(part for part in after.opt_state if hasattr(part, "mu"))
  assert {group: int(n) for group, n in adam.count.items()} == {"routing": 2, "rest": 2, which: 3}
  assert int(after.opt_state[-1].count) == 3  # of the schedule


def test_the_gradient_norm_is_that_of_the_parameters_that_move():
  _, metrics = stepper(which="routing")(fresh(), toy_batch())
  grads = toy_gradients(1)[0]
  expected = optax.tree.norm(grads["layer"])
  np.testing.assert_allclose(metrics["gradient_norm"], expected, rtol=1e-5)
  assert metrics["gradient_norm"] < optax.tree.norm(grads)


def test_the_schedule_runs_on_over_phases():
  state, metrics = stepper(which="routing")(trained(), toy_batch())
  np.testing.assert_allclose(metrics["learning_rate"], learning_rate(ADAMW, 100)(3), rtol=1e-6)
  assert int(state.step) == 4


# Batches whose loss or gradient is not finite.


def bad_batch(kind: str) -> dict[str, np.ndarray]:
  batch = toy_batch()
  if kind == "loss":
    batch["y"] = np.where(np.arange(ROWS)[:, None] == 2, np.nan, batch["y"]).astype(np.float32)
  elif kind == "infinite loss":
    batch["y"] = np.full_like(batch["y"], 1e30)
  else:
    batch["edge"] = np.zeros_like(batch["edge"])
  return batch


@pytest.mark.parametrize("kind", ["loss", "infinite loss", "gradient"])
def test_a_bad_batch_leaves_all_but_the_counters_untouched(kind):
  before = trained(ema=0.9)
  after, metrics = stepper(ema=0.9)(before, bad_batch(kind))
  assert np.isfinite(metrics["objective"]) == (kind == "gradient")
  assert not np.isfinite(metrics["gradient_norm"])
  for part in ("params", "opt_state", "ema", "carry"):
    assert_same_bits(getattr(before, part), getattr(after, part))
  assert (int(after.step), int(after.skipped), int(after.bad_run)) == (4, 1, 1)
  assert (int(metrics["skipped"]), int(metrics["bad_run"])) == (1, 1)


def test_bad_steps_in_a_row_are_counted_until_a_good_one():
  state, runs = fresh(), []
  for kind in ("loss", "gradient", None, "loss", None):
    state, metrics = stepper()(state, bad_batch(kind) if kind else toy_batch())
    runs.append(int(metrics["bad_run"]))
  assert runs == [1, 2, 0, 1, 0]
  assert int(state.skipped) == 3
  # The schedule counts updates, not batches.
  np.testing.assert_allclose(metrics["learning_rate"], learning_rate(ADAMW, 100)(1), rtol=1e-6)


def test_training_goes_on_after_a_bad_batch_as_if_it_had_not_been():
  good, _ = stepper()(fresh(), toy_batch())
  bad, _ = stepper()(fresh(), bad_batch("loss"))
  after, _ = stepper()(bad, toy_batch())
  assert_same_bits(after.params, good.params)
  assert_same_bits(after.opt_state, good.opt_state)


# The moving average.


def test_the_average_follows_its_formula():
  decay, state = 0.6, fresh(ema=0.6)
  expected = jax.device_get(toy_params())
  assert_same_bits(state.ema, expected)
  for n in range(8):
    state, _ = stepper(ema=decay)(state, toy_batch(n))
    now = min(decay, (1 + n) / (10 + n))
    expected = jax.tree.map(
      lambda a, p, now=now: now * a + (1 - now) * np.asarray(p), expected, state.params
    )
  assert_close(state.ema, expected, atol=1e-5)
  assert state.weights is state.ema


def test_without_an_average_the_parameters_are_what_is_evaluated():
  state = trained()
  assert state.ema == ()
  assert state.weights is state.params


def test_a_state_can_be_donated_whole():
  state = fresh(ema=0.9)
  pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.params, state.ema))]
  assert len(set(pointers)) == len(pointers)
