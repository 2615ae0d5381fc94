"""Few-shot methods: closed forms, finite differences, exact identities; the task, end to end."""

import functools
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compmod_jax
from compmod_jax.core import sharding
from compmod_jax.core.errors import UserError
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.data.episodes import split_episode
from compmod_jax.data.sources.classes import ClassLines
from compmod_jax.data.synthetic.glyphs import GlyphData, SineData
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.few_shot import (
  FewShotConfig,
  Maml,
  Matching,
  Prototypes,
  _sums,
  adapt,
  adapted_loss,
  matching_logits,
  over_episodes,
  prototype_logits,
  summed_over_tasks,
)
from compmod_jax.training.step import gradients

CONTEXT = StepContext(jax.random.key(0), jnp.int32(0), True)


def numbers(*shape, seed):
  return jax.device_put(np.random.default_rng(seed).normal(size=shape))


def rows(count, seed):
  return {"x": numbers(count, 3, seed=seed), "y": numbers(count, seed=seed + 1)}


def quadratic(params, rows):
  """Half the mean squared error of a linear model."""
  return 0.5 * jnp.mean((rows["x"] @ params["head"]["w"] - rows["y"]) ** 2)


def network(params, rows):
  hidden = jnp.tanh(rows["x"] @ params["body"]["kernel"])
  return jnp.mean((hidden @ params["head"]["w"] - rows["y"]) ** 2)


def parameters():
  return {"body": {"kernel": numbers(3, 3, seed=7)}, "head": {"w": numbers(3, seed=8)}}


# Features.


def test_prototypes_probabilities_are_their_closed_form():
  support, query = numbers(6, 4, seed=0), numbers(5, 4, seed=1)
  labels = np.array([2, 0, 1, 1, 2, 2])
  found = jax.nn.softmax(prototype_logits(support, jnp.asarray(labels), query, 3))
  expected = np.zeros((5, 3))
  for q in range(5):
    for k in range(3):
      mean = np.asarray(support)[labels == k].mean(axis=0)
      expected[q, k] = np.exp(-((np.asarray(query)[q] - mean) ** 2).sum())
  np.testing.assert_allclose(found, expected / expected.sum(1, keepdims=True), rtol=1e-5)


def test_matching_is_attention_over_the_labels_of_the_support():
  support, query = np.array(numbers(6, 4, seed=0)), np.array(numbers(5, 4, seed=1))
  labels = np.array([2, 0, 1, 1, 2, 2])
  found = jnp.exp(matching_logits(*map(jnp.asarray, (support, labels, query)), 3, 2.0))
  cosine = (query @ support.T) / np.linalg.norm(query, axis=1)[:, None]
  weights = np.exp(2 * cosine / np.linalg.norm(support, axis=1))
  weights /= weights.sum(1, keepdims=True)
  np.testing.assert_allclose(found, weights @ np.eye(3)[labels], rtol=1e-5)
  np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)


# Adaptation.


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("first_order", [False, True])
def test_for_a_quadratic_loss_the_gradient_is_its_closed_form(steps, first_order):
  """A^k H_Q (w_k - q) with A = 1 - alpha H_S; to the first order without A."""
  with jax.enable_x64(True):
    support, query, start = rows(5, 0), rows(4, 2), numbers(3, seed=8)
    how = {"steps": steps, "rate": 0.1, "first_order": first_order}
    found = jax.jit(jax.grad(functools.partial(adapted_loss, quadratic, **how)))(
      {"head": {"w": start}}, (support, query)
    )
  x, y, w = np.asarray(support["x"]), np.asarray(support["y"]), np.asarray(start)
  ahead = np.eye(3) - 0.1 * x.T @ x / 5
  for _ in range(steps):
    w = ahead @ w + 0.1 * x.T @ y / 5
  slope = np.asarray(query["x"]).T @ (np.asarray(query["x"]) @ w - np.asarray(query["y"])) / 4
  expected = slope if first_order else np.linalg.matrix_power(ahead, steps) @ slope
  np.testing.assert_allclose(found["head"]["w"], expected, rtol=1e-10)


@pytest.mark.parametrize("names", [("*",), ("head",)])
def test_the_gradient_also_of_the_rates_is_that_of_finite_differences(names):
  with jax.enable_x64(True):
    params, episode = parameters(), (rows(5, 0), rows(4, 2))
    both = {"params": params, "rate": jax.tree.map(lambda x: jnp.full(x.shape, 0.2), params)}

    def value(both):
      how = {"steps": 3, "rate": both["rate"], "parameters": names}
      return adapted_loss(network, both["params"], episode, **how)

    value = jax.jit(value)
    slopes = jax.jit(jax.grad(value))(both)
    for seed in range(3):
      way = jax.tree.map(lambda x, seed=seed: numbers(*x.shape, seed=seed), both)
      ends = [
        value(jax.tree.map(lambda p, d, sign=sign: p + sign * 1e-5 * d, both, way))
        for sign in (1, -1)
      ]
      slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: jnp.sum(g * d), slopes, way)))
      np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-7)


def test_to_the_first_order_it_is_the_query_s_gradient_at_the_adapted_parameters():
  params, (support, query) = parameters(), (rows(5, 0), rows(4, 2))
  how = {"steps": 2, "rate": 0.3}

  @jax.jit
  def slopes(params):
    first, second = (
      jax.grad(functools.partial(adapted_loss, network, first_order=first_order, **how))(
        params, (support, query)
      )
      for first_order in (True, False)
    )
    return first, second, jax.grad(network)(adapt(network, params, support, **how), query)

  found, second, expected = slopes(params)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)
  assert np.abs(second["head"]["w"] - found["head"]["w"]).max() > 1e-3


def test_with_the_head_alone_nothing_else_moves_and_all_else_learns_outside():
  params, support, query = parameters(), rows(5, 0), rows(4, 2)
  how = {"steps": 2, "rate": 0.3, "parameters": ("head",)}
  after = jax.jit(functools.partial(adapt, network, **how))(params, support)
  np.testing.assert_array_equal(after["body"]["kernel"], params["body"]["kernel"])
  assert np.abs(after["head"]["w"] - params["head"]["w"]).max() > 1e-3
  slope = jax.jit(jax.grad(functools.partial(adapted_loss, network, **how)))
  slopes = slope(params, (support, query))
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slopes))


def test_a_rate_for_every_parameter_of_one_size_is_that_one_rate():
  params, support = parameters(), rows(5, 0)
  one = adapt(network, params, support, steps=2, rate=0.3)
  each = jax.tree.map(lambda _: jnp.float32(0.3), params)
  jax.tree.map(
    np.testing.assert_array_equal, one, adapt(network, params, support, steps=2, rate=each)
  )
  with pytest.raises(UserError, match=r"rate has no entry for 'head/w', which adapt"):
    adapt(network, params, support, rate={"body": each["body"]})
  with pytest.raises(UserError, match=r"parameters has 'haed', which .* mean 'head'"):
    adapt(network, params, support, parameters=("haed",))


def test_waves_are_learned_in_a_few_steps_where_that_was_learned():
  """Regression on a user's own model: after training, a step lowers the error of new waves."""

  def loss(params, rows):
    hidden = jnp.tanh(rows["inputs"] @ params["a"] + params["b"][None])
    return jnp.mean((hidden @ params["c"] - rows["targets"]) ** 2)

  random = np.random.default_rng(0)
  shapes = {"a": (1, 40), "b": (40,), "c": (40, 1)}
  params = {k: jnp.asarray(random.normal(size=s), jnp.float32) for k, s in shapes.items()}
  params["c"] /= 40**0.5

  @jax.jit
  def errors(params, batch):
    def one(episode):
      support, query = split_episode(episode, 10)
      how = {"steps": 3, "rate": 0.05}
      return jnp.stack([loss(params, query), adapted_loss(loss, params, (support, query), **how)])

    return jnp.mean(jax.vmap(one)(batch), axis=0)

  waves, optimizer = SineData(), optax.adam(1e-2)
  state = optimizer.init(params)

  @jax.jit
  def trained(params, state, batch):
    slopes = jax.grad(lambda params: errors(params, batch)[1])(params)
    updates, state = optimizer.update(slopes, state)
    return optax.apply_updates(params, updates), state

  for step in range(300):
    batch = waves.episodes(np.arange(25 * step, 25 * step + 25), 20)
    params, state = trained(params, state, batch)
  before, after = errors(params, waves.episodes(np.arange(10**6, 10**6 + 100), 20))
  assert after < 0.8 * before


# The task.

MODEL = ConvNetConfig(blocks=2, filters=4)
EPISODES = ClassEpisodeConfig(ways=3, shots=2, queries=2, batch=4)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
  """Classes of random 4 x 4 pictures around a mean of their own."""
  folder, random = tmp_path_factory.mktemp("classes"), np.random.default_rng(0)
  for split, count in (("train", 8), ("valid", 4), ("test", 4)):
    found = []
    for number in range(count):
      mean = random.normal(size=(4, 4, 1))
      for _ in range(5):
        one = (mean + 0.1 * random.normal(size=mean.shape)).round(3).tolist()
        found.append(json.dumps({"class": f"{split}{number}", "input": one}))
    (folder / f"{split}.jsonl").write_text("\n".join(found))
  return ClassLines(str(folder))


@functools.cache
def built(lines, **fields):
  config = FewShotConfig(data=lines, episodes=EPISODES, evaluate_episodes=10, **fields)
  task = config.build(MODEL)
  batch = next(task.dataset.train_batches(seed=0, multiple=1)[0])
  batch = {name: jnp.asarray(column) for name, column in batch.items()}
  method = fields["method"]
  if isinstance(method, Maml):  # however many steps it takes
    method = Maml(learned=method.learned, parameters=method.parameters)
  return task, fresh(lines, method), batch


@functools.cache
def fresh(lines, method):
  """Parameters, which depend on the method alone."""
  init = FewShotConfig(data=lines, episodes=EPISODES, method=method).build(MODEL).model.init
  return nn.unbox(jax.jit(init)(jax.random.key(1)))


@functools.cache
def slopes_of(task, micro_batches=1):
  """The program of gradients, loss and metrics."""
  return jax.jit(
    lambda params, batch: gradients(task.loss, params, (), batch, CONTEXT, micro_batches)
  )


METHODS = {
  "maml": Maml(),
  "meta_sgd": Maml(learned="element"),
  "by parameter": Maml(steps=2, learned="parameter", parameters=("head", "block_1")),
  "prototypes": Prototypes(),
  "matching": Matching(),
}


@pytest.mark.parametrize("method", METHODS)
def test_groups_of_tasks_and_micro_batches_give_the_gradient_of_all_together(lines, method):
  found, ways = [], [(0, 1), (2, 2)]
  # A task by itself, of a method that adapts parameters and of one of features.
  ways += [(1, 1)] if method in ("maml", "matching") else []
  for at_once, micro_batches in ways:
    task, params, batch = built(lines, method=METHODS[method], tasks_at_once=at_once)
    slopes, value, _, _, metrics = slopes_of(task, micro_batches)(params, batch)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slopes))
    found.append((slopes, value, metrics["nll"], metrics["accuracy"]))
  for other in found[1:]:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), found[0], other
    )


@pytest.mark.parametrize("at_once", [0, 1, 2])
def test_devices_that_share_the_episodes_find_what_one_finds(lines, at_once):
  task, params, batch = built(lines, method=METHODS["maml"], tasks_at_once=at_once)
  mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
  placed = jax.device_put(params, sharding.replicated(mesh))
  spread = sharding.place_batch(jax.tree.map(np.asarray, batch), mesh)

  def score(params, batch):
    one = functools.partial(_sums, task.model, EPISODES, False, params)
    return over_episodes(one, batch, at_once)

  train, evaluate = slopes_of(task), jax.jit(score)
  for run in (train, evaluate):
    program = run.lower(placed, spread).compile()
    for one, two in zip(
      jax.tree.leaves(run(params, batch)), jax.tree.leaves(program(placed, spread)), strict=True
    ):
      np.testing.assert_allclose(one, two, rtol=2e-3, atol=2e-5)
    if at_once == 1 and run is train:  # nor is an episode sent to another device
      assert "all-gather" not in program.as_text()


def test_what_a_sum_over_tasks_needs_besides_can_be_traced_too():
  batch = {"x": numbers(4, 3, 2, seed=1), "index": jnp.zeros((4, 3), jnp.int32)}
  mesh = sharding.make_mesh(sharding.MeshConfig(data=4, tensor=2))
  spread = sharding.place_batch(jax.tree.map(np.asarray, batch), mesh)

  @jax.jit
  def run(params, batch, rng):
    def one(params, rows):
      noise = jax.random.normal(rng, (3, 2))
      return {"nll": jnp.sum(jnp.sin((rows["x"] + noise) @ params["w"]))}

    return jax.value_and_grad(lambda p: summed_over_tasks(one, p, batch, 1)["nll"])(params)

  params, rng = {"w": numbers(2, seed=2)}, jax.random.key(3)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
    run(params, batch, rng),
    run(params, spread, rng),
  )


def test_filler_episodes_change_nothing(lines):
  task, params, batch = built(lines, method=METHODS["maml"], tasks_at_once=2)
  more = {
    name: jnp.concatenate([x, jnp.full_like(x[:2], -1 if name == "index" else 0)])
    for name, x in batch.items()
  }
  run = slopes_of(task)
  for one, two in zip(
    jax.tree.leaves(run(params, batch)[:2]), jax.tree.leaves(run(params, more)[:2]), strict=True
  ):
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_the_interval_is_that_of_the_episodes_accuracies_and_scores_are_always_the_same(lines):
  task, params, _ = built(lines, method=Prototypes(), also_ways=(2,))
  found, again = (task.evaluate(params, "test").values for _ in range(2))
  assert found == again
  assert found["episodes"] == found["2_way/episodes"] == 10
  accuracies = []
  one = jax.jit(lambda *given: task.model.method.logits(task.model.embed, *given, 3, False))
  for batch in task.dataset.episodes("test", count=10):
    for i in range(len(batch["index"])):
      if batch["index"][i, 0] >= 0:
        episode = {name: jnp.asarray(column[i]) for name, column in batch.items()}
        support, query = split_episode(episode, EPISODES.support)
        logits = one(params, support, query)
        accuracies.append(float(np.mean(np.argmax(logits, -1) == query["labels"])))
  assert found["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-6)
  half = 1.96 * np.std(accuracies, ddof=1) / np.sqrt(10)
  assert found["accuracy_high"] - found["accuracy"] == pytest.approx(half, abs=1e-6)
  assert task.metric == "accuracy"
  assert task.evaluate(params, "valid", decode=4).values["episodes"] == 4


def test_more_steps_in_evaluation_are_more_steps(lines):
  scores = []
  for method in (Maml(steps=1), Maml(steps=1, evaluate_steps=4), Maml(steps=4)):
    task, params, _ = built(lines, method=method)
    scores.append(task.evaluate(params, "test").values["loss"])
  assert scores[1] == pytest.approx(scores[2], rel=1e-5)
  assert abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"method": Maml(), "train_ways": 7}, r"asks for \[7\] classes, but the head of MAML, 1 step"),
    ({"method": Maml(), "also_ways": (20,)}, r"asks for \[20\] classes"),
    ({"method": Prototypes(), "also_ways": (1,)}, r"an episode has 2 classes at least"),
    ({"evaluate_episodes": 1}, r"task.evaluate_episodes is 1; it must be at least 2"),
  ],
)
def test_bad_tasks_name_their_field(fields, words):
  with pytest.raises(UserError, match=words):
    FewShotConfig(**fields)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"steps": 0}, r"method.steps is 0; it must be at least 1"),
    ({"rate": 0.0}, r"method.rate is 0.0; it must be positive"),
    ({"parameters": ()}, r"method.parameters is empty"),
    ({"learned": "yes"}, r"method.learned is 'yes'; it must be one of: element, no, parameter"),
  ],
)
def test_bad_methods_name_their_field(fields, words):
  with pytest.raises(UserError, match=words):
    Maml(**fields)


def test_a_pattern_of_no_parameter_is_refused_before_training(lines):
  with pytest.raises(UserError, match=r"method.parameters has 'haed'"):
    FewShotConfig(data=lines, episodes=EPISODES, method=Maml(parameters=("haed",))).build(MODEL)


OWN = """
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.data.sources.classes import ClassLines
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.tasks.few_shot import FewShotConfig, Maml
from compmod_jax.training.experiment import Experiment, Phase

def get_config(variant):
  return Experiment(
    name="own classes",
    task=FewShotConfig(
      data=ClassLines({folder!r}),
      episodes=ClassEpisodeConfig(ways=3, shots=2, queries=2, batch=4),
      method=Maml(learned="element"),
      evaluate_episodes=6,
    ),
    model=ConvNetConfig(blocks=2, filters=4),
    phases=(Phase(steps=4),),
    evaluate_every=2,
    checkpoint_every=1,
    watch_sentences=0,
  )
"""


@pytest.mark.usefixtures("one_device")
def test_a_run_is_resumed_to_the_same_bits_and_its_model_tells_classes_of_one_s_own(
  lines, tmp_path
):
  from compmod_jax.commands.train import main

  file = tmp_path / "own.py"
  file.write_text(OWN.format(folder=lines.folder))
  main(["--config", str(file), "--workdir", str(tmp_path / "whole")])
  whole = compmod_jax.load(tmp_path / "whole", model="step-00000004")
  assert "step_sizes" in whole.params
  again = shutil.copytree(tmp_path / "whole", tmp_path / "again")
  for step in (3, 4):
    shutil.rmtree(next((again / "checkpoints").glob(f"step_{step:08}*")))
  shutil.rmtree(again / "models")
  main(["--config", str(file), "--workdir", str(again)])
  other = compmod_jax.load(again, model="step-00000004")
  jax.tree.map(np.testing.assert_array_equal, whole.params, other.params)
  found = json.loads((again / "results.json").read_text())
  assert {"accuracy", "accuracy_low", "accuracy_high", "episodes"} <= {*found["splits"][0]}
  # Its use from Python.
  pictures = lines.load("test")
  order = np.argsort(pictures.classes, kind="stable").reshape(4, 5)
  support, query = order[:3, :2].ravel(), order[:3, 2:].ravel()
  probabilities = whole.classify(
    pictures.inputs[support], np.repeat(np.arange(3), 2), pictures.inputs[query]
  )
  assert probabilities.shape == (9, 3)
  np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
  assert "features" in whole.sites()
  captured = whole.capture(pictures.inputs[:2], ["features"])["features"]
  assert captured.shape == (2, 4)
  with pytest.raises(UserError, match=r"support has the shape \(2, 3\); it must be \[examples, 4"):
    whole.classify(np.zeros((2, 3)), np.zeros(2, int), pictures.inputs[:1])
  with pytest.raises(UserError, match=r"labels goes up to 3, but the model has outputs for 3"):
    whole.classify(pictures.inputs[:4], np.arange(4), pictures.inputs[:1])


def test_generated_characters_are_told_apart_better_after_a_few_steps_of_training():
  task = FewShotConfig(
    data=GlyphData(examples=4),
    episodes=ClassEpisodeConfig(ways=5, shots=1, queries=3, batch=4),
    method=Prototypes(),
    evaluate_episodes=20,
  ).build(ConvNetConfig(blocks=3, filters=8, halve="stride"))
  params = nn.unbox(jax.jit(task.model.init)(jax.random.key(0)))
  batches, _ = task.dataset.train_batches(seed=0, multiple=1)
  run = jax.jit(lambda params, batch: gradients(task.loss, params, (), batch, CONTEXT, 1)[:2])
  values = []
  for _ in range(25):
    slopes, value = run(params, next(batches))
    params = jax.tree.map(lambda p, g: p - 0.3 * g, params, slopes)
    values.append(float(value))
  assert np.mean(values[-5:]) < 0.9 * np.mean(values[:3])
