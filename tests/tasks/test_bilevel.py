"""Learning at two levels: closed forms, finite differences, and which loss moves what."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from flax.traverse_util import flatten_dict

from compmod_jax.core import sharding
from compmod_jax.core.config import from_json, to_json
from compmod_jax.core.errors import UserError
from compmod_jax.core.losses import Term, objective
from compmod_jax.data.paired import QUERY, PairedDataset
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.bilevel import Bilevel, BilevelConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.tools.shapes import largest_batch
from compmod_jax.training.experiment import Experiment, load_config
from compmod_jax.training.step import gradients

EPISODES, SUPPORT, ASKED, WIDTH, UNITS, RATE = 4, 6, 3, 3, 2, 0.07
CONTEXT = StepContext(jax.random.key(3), jnp.int32(0), True)
STILL = CONTEXT._replace(train=False)


@dataclasses.dataclass(frozen=True)
class Linear:
  """Half the mean squared error of x theta + z phi, quadratic in both."""

  def weights(self, config: Any) -> dict[str, float]:
    return {"squares": 1.0}

  def __call__(self, model, params, carry, batch, context):
    out = batch["x"] @ params["body"]["w"] + batch["z"] @ params["heads"]["router"]["w"]
    error = 0.5 * jnp.sum((out - batch["y"]) ** 2)
    count = jnp.float32(len(out))
    return {"squares": Term(error, count)}, carry, {"error": (error, count)}


@dataclasses.dataclass(frozen=True)
class Routed:
  """A layer whose units a router weighs, a term that is no mean, and noise in training."""

  def weights(self, config: Any) -> dict[str, float]:
    return {"squares": 1.0, "spread": 0.3}

  def __call__(self, model, params, carry, batch, context):
    weights = jax.nn.softmax(batch["z"] @ params["heads"]["router"]["w"], axis=-1)
    out = jnp.sum(weights * jnp.tanh(batch["x"] @ params["body"]["w"]), axis=-1)
    if context.train:
      out = out * (1 + 0.1 * jax.random.normal(context.rng, out.shape))
    count = jnp.float32(len(out))
    error = jnp.sum((out - batch["y"]) ** 2)
    spread = Term(jnp.sum(weights, axis=0), count, 0.3, finish=evenness)
    metrics = {"error": (error, count), "router/heads/wins": (jnp.sum(weights, axis=0), count)}
    return {"squares": Term(error, count), "spread": spread}, carry, metrics


def evenness(total: jax.Array, count: jax.Array) -> jax.Array:
  return jnp.sum((total / count) ** 2)


def numbers(*shape: int, seed: int) -> jax.Array:
  return jax.device_put(np.random.default_rng(seed).normal(size=shape))


def parameters(units: tuple[int, ...] = (UNITS,)) -> Any:
  router = {"w": numbers(UNITS, *units[1:], seed=1)}
  return {"body": {"w": numbers(WIDTH, *units[1:], seed=0)}, "heads": {"router": router}}


def routed() -> Any:
  return parameters((UNITS, UNITS))


def batch_of(episodes: int = EPISODES) -> Any:
  def part(rows: int, seed: int) -> dict[str, jax.Array]:
    shapes = {"x": (WIDTH,), "z": (UNITS,), "y": ()}
    return {
      name: numbers(episodes, rows, *shape, seed=seed + number)
      for number, (name, shape) in enumerate(shapes.items())
    }

  asked = part(ASKED, 20)
  return part(SUPPORT, 10) | {f"{QUERY}{name}": column for name, column in asked.items()}


def rows_of(batch: Any, asked: bool) -> Any:
  """The rows of one part, below each other."""
  return {
    name.removeprefix(QUERY): column.reshape(-1, *column.shape[2:])
    for name, column in batch.items()
    if name.startswith(QUERY) == asked
  }


def bilevel(inside: Any, **fields: Any) -> Bilevel:
  return BilevelConfig(**{"rate": RATE, **fields}).objective(inside)


def value(one: Any, params: Any, batch: Any, context: StepContext = CONTEXT) -> jax.Array:
  return objective(one(None, params, (), batch, context)[0])


def asked_value(one: Any, params: Any, batch: Any, context: StepContext = CONTEXT) -> jax.Array:
  """The loss on the small part after the steps."""
  terms = one(None, params, (), batch, context)[0]
  return objective({name: term for name, term in terms.items() if name.startswith(QUERY)})


def slope(one: Any, params: Any, batch: Any, context: StepContext = CONTEXT) -> Any:
  return _slopes(one, context.train)(params, batch)


@functools.cache
def _slopes(one: Any, train: bool) -> Any:
  context = CONTEXT if train else STILL
  return jax.jit(jax.grad(lambda params, batch: value(one, params, batch, context)))


def assert_close(one: Any, two: Any, **tolerances: float) -> None:
  assert jax.tree.structure(one) == jax.tree.structure(two)
  jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerances), one, two)


def assert_same(one: Any, two: Any) -> None:
  jax.tree.map(np.testing.assert_array_equal, one, two)


# The gradient.


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_for_a_linear_model_the_gradient_is_its_closed_form(steps, first_order):
  """d theta_k / d phi = -alpha sum_{i<k} (1 - alpha H)^i C, with H = x'x / n and C = x'z / n."""
  with jax.enable_x64(True):
    params, batch = parameters(), batch_of()
    found = slope(bilevel(Linear(), steps=steps, first_order=first_order), params, batch)
  columns = {name: np.asarray(column) for name, column in batch.items()}
  theta, phi = np.asarray(params["body"]["w"]), np.asarray(params["heads"]["router"]["w"])
  rest, meta = np.zeros(WIDTH), np.zeros(UNITS)
  for i in range(EPISODES):
    x, z, y, *asked = (
      columns[name][i] for name in ("x", "z", "y", "query/x", "query/z", "query/y")
    )
    rest += x.T @ (x @ theta + z @ phi - y) / SUPPORT / EPISODES
    ahead, after, by_phi = np.eye(WIDTH) - RATE * x.T @ x / SUPPORT, theta, np.zeros((WIDTH, UNITS))
    for _ in range(steps):
      after = ahead @ after - RATE * x.T @ (z @ phi - y) / SUPPORT
      by_phi = ahead @ by_phi - RATE * x.T @ z / SUPPORT
    error = (asked[0] @ after + asked[1] @ phi - asked[2]) / ASKED / EPISODES
    meta += asked[1].T @ error
    if not first_order:
      meta += by_phi.T @ asked[0].T @ error
  np.testing.assert_allclose(found["body"]["w"], rest, rtol=1e-10)
  np.testing.assert_allclose(found["heads"]["router"]["w"], meta, rtol=1e-10)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_gradient_of_the_meta_parameters_is_that_of_finite_differences(steps):
  with jax.enable_x64(True):
    params, batch = routed(), batch_of()
    one = bilevel(Routed(), steps=steps)
    found = slope(one, params, batch)["heads"]["router"]["w"]

    def moved(change: jax.Array) -> jax.Array:
      router = {"w": params["heads"]["router"]["w"] + change}
      return asked_value(one, params | {"heads": {"router": router}}, batch)

    function, step = jax.jit(moved), 1e-5
    for seed in range(3):
      way = numbers(UNITS, UNITS, seed=seed)
      difference = (function(step * way) - function(-step * way)) / (2 * step)
      np.testing.assert_allclose(jnp.sum(found * way), difference, rtol=1e-6)


def test_to_the_first_order_the_steps_are_constants():
  """The gradient of the loss on the small part, where the rest is put to where its steps end."""
  params, batch = routed(), batch_of(1)
  one = bilevel(Routed(), steps=2, first_order=True)
  support = {n: c[0] for n, c in batch.items() if not n.startswith(QUERY)}

  @jax.jit
  def of_the_last_step(params: Any) -> Any:
    last = one.last(None, params, support, STILL._replace(rng=_episode_rng()))

    def asked(router: Any) -> jax.Array:
      return value(Routed(), last.params | {"heads": router}, rows_of(batch, True), STILL)

    return jax.grad(asked)(params["heads"])

  expected = of_the_last_step(params)
  found = slope(one, params, batch, STILL)["heads"]
  assert_close(found, expected, rtol=1e-5)
  second = slope(bilevel(Routed(), steps=2), params, batch, STILL)["heads"]
  gap = jnp.max(jnp.abs(found["router"]["w"] - second["router"]["w"]))
  assert gap > 1e-3  # the order matters here


def _episode_rng() -> jax.Array:
  return jax.random.fold_in(jax.random.fold_in(STILL.rng, 1), 0)


@pytest.mark.parametrize("off", [{"steps": 0}, {"rate": 0.0}])
def test_without_steps_both_have_the_plain_gradients_on_their_parts(off):
  params, batch = routed(), batch_of()
  found = slope(bilevel(Routed(), **off), params, batch, STILL)
  large, small = (slope(Routed(), params, rows_of(batch, asked), STILL) for asked in (False, True))
  assert_close(found["body"], large["body"], rtol=1e-5)
  assert_close(found["heads"], small["heads"], rtol=1e-5)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_rest_moves_by_the_large_part_alone_and_meta_parameters_by_the_small_one(steps):
  params, batch = routed(), batch_of()
  one = bilevel(Routed(), steps=steps)
  found = slope(one, params, batch)
  plain = slope(Routed(), params, rows_of(batch, False))
  assert_close(found["body"], plain["body"], rtol=1e-5)  # with the same noise
  other = batch | {f"{QUERY}y": batch[f"{QUERY}y"] + 1}
  changed = slope(one, params, other)
  assert_same(changed["body"], found["body"])
  assert jnp.max(jnp.abs(changed["heads"]["router"]["w"] - found["heads"]["router"]["w"])) > 1e-3
  # Through the steps the large part has a say in how meta-parameters move, and without it none.
  moved = slope(one, params, batch | {"y": batch["y"] + 1})["heads"]["router"]["w"]
  assert np.array_equal(moved, found["heads"]["router"]["w"]) == (steps == 0)


def test_several_steps_in_a_loop_end_where_single_ones_do():
  params, batch = routed(), batch_of(1)
  support = {n: c[0] for n, c in batch.items() if not n.startswith(QUERY)}
  one = bilevel(Routed(), steps=3)

  @jax.jit
  def ends(params: Any) -> Any:
    *_, expected = one.adapted(None, params, support, CONTEXT)
    found = one.last(None, params, support, CONTEXT)
    assert found.params["heads"]["router"]["w"] is params["heads"]["router"]["w"]
    return (found.params, found.support), (expected.params, expected.support)

  assert_close(*ends(params), rtol=1e-6)


def test_micro_batches_of_episodes_give_the_gradient_of_the_whole_batch():
  """Also of a term that is no mean."""
  params, batch = routed(), batch_of()
  one = bilevel(Routed(), steps=2)

  def found(micro_batches: int) -> Any:
    loss = functools.partial(one, None)
    return jax.jit(lambda params: gradients(loss, params, (), batch, STILL, micro_batches))(params)

  (whole, total, _, _, sums), (parts, again, _, _, others) = found(1), found(2)
  assert_close(whole, parts, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(total, again, rtol=1e-6)
  assert_close(sums, others, rtol=1e-5)


def test_terms_and_metrics_of_both_parts_have_names_of_their_own():
  params, batch = routed(), batch_of()
  one = bilevel(Routed(), steps=2)
  run = jax.jit(lambda params, batch: one(None, params, (), batch, STILL))
  terms, _, metrics = run(params, batch)
  weights = {name: term.weight for name, term in terms.items()}
  expected = {"squares": 1.0, "spread": 0.3, "query/squares": 1.0, "query/spread": 0.3}
  assert weights == one.weights(None) == expected
  assert metrics.keys() == {
    "error", "router/heads/wins", "query/error", "support/squares", "support/spread"
  }  # fmt: skip
  assert metrics["support/squares"][0].shape == (2,)
  assert (metrics["error"][1], metrics["query/error"][1]) == (EPISODES * SUPPORT, EPISODES * ASKED)
  assert metrics["error"][0] == terms["squares"].sum


# Models.


def translation(folder: Any, **fields: Any) -> TranslationConfig:
  given = tiny_model.make_experiment(tiny_model.write_data(folder))
  assert isinstance(given.task, TranslationConfig)
  return dataclasses.replace(given.task, small_share=0.3, bilevel=BilevelConfig(**fields))


def first_batch(task: Any, multiple: int = 1) -> Any:
  iterator, _ = task.dataset.train_batches(seed=0, multiple=multiple)
  found = next(iterator)
  iterator.close()
  return dict(found)


def random_parameters(task: Any) -> Any:
  return jax.tree.map(lambda leaf: 0.3 * leaf, tiny_model.random_parameters(task, 0))


def check_on_devices(task: Any, batch: Any) -> None:
  """Objective and gradient are the same on eight devices, and finite."""
  params = random_parameters(task)
  run = jax.jit(
    jax.value_and_grad(lambda params, batch: objective(task.loss(params, (), batch, STILL)[0]))
  )
  mesh = sharding.make_mesh(sharding.MeshConfig(data=4, tensor=2))
  boxed = jax.eval_shape(task.model.init, jax.random.key(0))
  placed = jax.device_put(params, sharding.parameter_shardings(boxed, mesh))
  expected, found = run(params, batch), run(placed, sharding.place_batch(batch, mesh))
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  assert_close(found[1], expected[1], rtol=1e-3, atol=1e-5)


def test_routers_of_heads_and_of_experts_are_meta_learned_on_eight_devices(tmp_path):
  model = dataclasses.replace(
    tiny_model.make_experiment(tiny_model.write_data(tmp_path / "other")).model,
    expert_layers=("encoder",),
    experts=ExpertsConfig(count=2, matched=True),
  )
  task = translation(tmp_path / "data", rate=0.5).build(model)
  meta = flatten_dict(jax.tree.map(lambda r: not r, task.objective.adapts(random_parameters(task))))
  routers = {"/".join(name) for name, chosen in meta.items() if chosen}
  assert {name.split("/")[1] for name in routers} == {"self_attention", "cross_attention", "ffn"}
  assert routers == {"/".join(name) for name in meta if "router" in name}
  check_on_devices(task, first_batch(task, 4))


def test_the_shapes_of_a_batch_are_known_without_data(tmp_path):
  task = translation(tmp_path / "data").build(
    tiny_model.make_experiment(tiny_model.write_data(tmp_path / "other")).model
  )
  batch = first_batch(task, 4)
  found = largest_batch(task, 4)
  assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
    name: (x.shape, x.dtype) for name, x in batch.items() if "index" not in name
  }


@pytest.fixture(scope="module")
def nemot():
  task = CausalLMConfig(
    data=GrammarDocuments(GrammarData(train=60, valid=2, test=2, shifted=2)),
    tokenizer=TokenizerConfig(kind="words", vocab_size=100),
    length=9,
    batch_tokens=72,
    bilevel=BilevelConfig(parameters=("modulatory", "auxiliary_embedding")),
  )
  sizes = dict.fromkeys(("vanilla_layers", "modulatory_layers", "output_layers"), 1)
  return task.build(NemotConfig(**sizes, dim=8, heads=2, ffn_dim=8, max_length=8, dropout=0.0))


def test_the_neuromodulatory_set_is_meta_learned(nemot):
  """It has the gradient of the loss on the small part after a step, and of no other loss."""
  params = random_parameters(nemot)
  batch = first_batch(nemot)
  run = jax.jit(jax.grad(lambda p, batch: objective(nemot.loss(p, (), batch, STILL)[0])))
  found = run(params, batch)
  assert isinstance(nemot.dataset, PairedDataset)
  nothing = batch | {f"{QUERY}index": np.full_like(batch[f"{QUERY}index"], -1)}
  without = run(params, nothing)
  for name, part in found.items():
    sizes = [float(np.abs(leaf).max()) for leaf in jax.tree.leaves(part)]
    if name in ("modulatory", "auxiliary_embedding"):
      assert max(sizes) > 0
      assert all(not np.any(leaf) for leaf in jax.tree.leaves(without[name]))
    else:
      assert_close(part, without[name], rtol=1e-5, atol=1e-8)


def test_evaluation_and_tokenizers_are_those_of_the_data_set_inside(nemot):
  plain = dataclasses.replace(nemot.dataset.config, bilevel=None)
  other = plain.build(nemot.model.config, files=nemot.dataset.files())
  params = random_parameters(nemot)
  assert nemot.evaluate(params, "valid").values == other.evaluate(params, "valid").values


# Configurations and mistakes.


@pytest.mark.parametrize(
  "name", ["nmt_cah.py:grammar-meta", "nmt_cah.py:grammar-meta-experts", "nmt_cah.py:iwslt14-meta",
           "nemot_pretrain.py:grammar-meta"]
)  # fmt: skip
def test_the_configurations_come_back_through_json(name):
  given = load_config(f"configs/{name}")
  assert given.task.bilevel is not None
  assert [phase.part for phase in given.phases] == ["all"]
  assert from_json(Experiment, to_json(given)) == given


@pytest.mark.parametrize("kind", [TranslationConfig, CausalLMConfig])
def test_what_was_saved_before_is_learned_on_one_level(kind):
  saved = to_json(kind())
  del saved["bilevel"]
  assert from_json(kind, saved) == kind()


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"steps": -1}, r"bilevel.steps is -1; it must not be negative"),
    ({"rate": -0.1}, r"bilevel.rate is -0.1"),
    ({"query": 0.0}, r"bilevel.query is 0.0; it is a share of the rows"),
    ({"query": 1.5}, r"bilevel.query is 1.5"),
    ({"parameters": ()}, r"bilevel.parameters is empty; name the meta-parameters"),
  ],
)
def test_bad_settings_name_their_field(fields, words):
  with pytest.raises(UserError, match=words):
    BilevelConfig(**fields)


def test_patterns_have_to_stand_for_some_parameters_and_not_for_all(tmp_path):
  given = tiny_model.make_experiment(tiny_model.write_data(tmp_path / "other"))
  task = translation(tmp_path / "data", parameters=("*/ruoter",))
  with pytest.raises(UserError, match=r"bilevel.parameters has '\*/ruoter', which stands for no"):
    task.build(given.model)
  everything = dataclasses.replace(task, bilevel=BilevelConfig(parameters=("*",)))
  with pytest.raises(UserError, match="stand for all parameters; there is no rest"):
    everything.build(given.model)


def test_the_plain_model_to_compare_with_can_be_built(tmp_path):
  given = tiny_model.make_experiment(tiny_model.write_data(tmp_path / "other"))
  plain = translation(tmp_path / "data").build(given.model.plain())
  shapes = jax.eval_shape(lambda: nn.unbox(plain.model.init(jax.random.key(0))))
  with pytest.raises(UserError, match=r"bilevel.parameters has '\*/router', which stands for no"):
    plain.objective.check(shapes)


def test_batches_of_rows_and_recurrent_states_are_refused():
  params, one = routed(), bilevel(Routed())
  with pytest.raises(UserError, match=r"The bilevel objective has got a batch of rows.*'y' has"):
    value(one, params, rows_of(batch_of(), False))
  with pytest.raises(UserError, match="keeps a recurrent state"):
    one(None, params, jnp.zeros(2), batch_of(), CONTEXT)
