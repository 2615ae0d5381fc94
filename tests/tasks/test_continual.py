"""The outer step, batches, protocols against loops in NumPy, and how settings are chosen."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.losses import objective
from compmod_jax.data.base import ClassExamples
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.models.neuromodulated import NeuromodulatedConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.continual import ContinualConfig, measured
from compmod_jax.tasks.protocols import (
  PROTOCOLS,
  ContinualModel,
  Protocol,
  Setting,
  Trial,
  UseConfig,
  level_of,
)

SIDE, EXAMPLES = 9, 8
COUNTS = {"train": 6, "valid": 5, "test": 7}


@dataclasses.dataclass(frozen=True)
class Blots:
  """Noisy pictures of random patterns."""

  seed: int = 0

  def splits(self):
    return tuple(COUNTS)

  def describe(self):
    return "blots"

  def load(self, split):
    draw = np.random.default_rng([self.seed, *split.encode()])
    patterns = draw.random((COUNTS[split], 1, SIDE, SIDE, 1)) < 0.4
    noise = draw.random((COUNTS[split], EXAMPLES, SIDE, SIDE, 1)) < 0.12
    images = (255 * (patterns ^ noise)).astype(np.uint8).reshape(-1, SIDE, SIDE, 1)
    names = tuple(f"{split}_{number}" for number in range(COUNTS[split]))
    return ClassExamples(images, np.repeat(np.arange(COUNTS[split]), EXAMPLES), names)


USE = UseConfig(
  classes=(2, 4, 6), shown=5, asked=3, choice=5, rates=(0.02, 0.1), row_gains=(0.0, 1.0),
  strengths=(0.5,), buffer=6, replay=2, protocols=tuple(PROTOCOLS),
)  # fmt: skip
CONFIG = ContinualConfig(data=Blots(), trajectory=4, remember=5, inner_rate=0.05, use=USE)


@functools.cache
def built(kind="anml", **fields):
  model = NeuromodulatedConfig(kind=kind, blocks=2, filters=4, modulator_filters=3)
  return dataclasses.replace(CONFIG, **fields).build(model)


@pytest.fixture(scope="module", params=["anml", "oml", "plain"])
def task(request):
  return built(request.param)


@pytest.fixture(scope="module")
def anml():
  return built("anml")


def parameters(task, seed=0):
  return fresh(task.model.config.kind, seed)


@functools.cache
def fresh(kind, seed):
  return nn.unbox(initialiser(kind)(jax.random.key(seed)))


@functools.cache
def initialiser(kind):
  return jax.jit(built(kind).model.init)


def batch_of(task, multiple=1):
  iterator, _ = task.dataset.train_batches(seed=3, multiple=multiple)
  return dict(next(iterator))


def slopes(task, params, batch, seed=0):
  found = program_of_slopes(task)(params, batch, jax.random.key(seed))
  (value, metrics), slope = jax.device_get(found)
  return value, metrics, slope


@functools.cache
def program_of_slopes(task):
  def value(params, batch, rng):
    context = StepContext(rng=rng, step=jnp.int32(0), train=True)
    terms, _, metrics = task.loss(params, (), batch, context)
    return objective(terms), metrics

  return jax.jit(jax.value_and_grad(value, has_aux=True))


# Training.


def test_a_batch_is_a_trajectory_of_one_class_and_others_to_remember(anml):
  iterator, epoch = anml.dataset.train_batches(seed=0, multiple=1)
  assert epoch == COUNTS["train"] * EXAMPLES // 9
  examples, classes = anml.dataset.classes("train"), set()
  for _ in range(80):
    batch = next(iterator)
    assert batch["inputs"].shape == (1, 9, SIDE, SIDE, 1)
    assert len({*batch["labels"][0, :4].tolist()}) == 1
    assert len({*batch["index"][0, :4].tolist()}) == 4
    classes |= {*batch["labels"][0, :4].tolist()}
    np.testing.assert_array_equal(batch["inputs"], examples.inputs[batch["index"]])
    np.testing.assert_array_equal(batch["labels"], examples.classes[batch["index"]])
  assert classes == set(range(COUNTS["train"]))


def test_processes_read_their_rows_of_the_same_batch(anml):
  whole = next(anml.dataset.train_batches(seed=0, multiple=2)[0])
  parts = [
    next(anml.dataset.train_batches(seed=0, multiple=2, process=i, processes=2)[0])
    for i in range(2)
  ]
  for name, column in whole.items():
    np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), column)


def test_the_loss_is_that_of_a_loop_over_the_trajectory(task):
  """With the whole network called in every step: what is computed ahead changes nothing."""
  params, batch = parameters(task), batch_of(task)
  images, labels = jnp.asarray(batch["inputs"][0] / np.float32(255)), batch["labels"][0]

  def loss(part, params, rows):
    logits = task.model.module.apply({"params": {**params, **part}}, images[rows])
    asked = jnp.asarray(labels)[rows]
    picked = jax.nn.log_softmax(logits)[jnp.arange(len(logits)), asked]
    return -jnp.mean(picked), jnp.argmax(logits, -1) == asked

  # The row of the class is drawn anew: its own seeds are not known here, but zeros are.
  zeros = built(task.model.config.kind, row_gain=0.0)
  value, metrics, _ = slopes(zeros, params, batch)
  head = np.array(params["prediction"]["head"]["kernel"])
  head[labels[0]] = 0
  moving = {"prediction": {**params["prediction"], "head": {"kernel": head}}}
  step = jax.jit(jax.grad(lambda part, rows: loss(part, params, rows)[0]))
  final = jax.jit(lambda part: loss(part, params, jnp.arange(9)))
  for row in range(4):
    slope = step(moving, np.array([row]))
    moving = jax.tree.map(lambda x, g: x - np.float32(0.05) * g, *jax.device_get((moving, slope)))
  expected, right = final(moving)
  np.testing.assert_allclose(value, expected, rtol=1e-4)
  assert metrics["newest"][0] == right[:4].sum()
  assert metrics["remembered"][0] == right[4:].sum()
  assert (metrics["newest"][1], metrics["remembered"][1]) == (4, 5)


def test_everything_is_meta_learned_but_the_row_that_is_drawn_anew(task):
  params, batch = parameters(task), batch_of(task)
  _, _, slope = slopes(task, params, batch)
  newest = int(batch["labels"][0, 0])
  head = slope["prediction"]["head"]["kernel"]
  assert not np.any(head[newest])
  assert np.all(np.any(np.delete(head, newest, axis=0), axis=1))
  for name, part in slope.items():
    assert all(np.any(leaf) for leaf in jax.tree.leaves(part)), name


def test_the_row_is_another_one_in_every_step(anml):
  params, batch = parameters(anml), batch_of(anml)
  values = [slopes(anml, params, batch, seed)[0] for seed in (0, 0, 1)]
  assert values[0] == values[1] != values[2]


def test_without_a_trajectory_training_is_plain_classification(task):
  plain = built(task.model.config.kind, trajectory=0, remember=9)
  params, batch = parameters(plain), batch_of(plain)
  value, metrics, _ = slopes(plain, params, batch)
  forward = jax.jit(plain.model.forward)
  logits = np.asarray(forward(params, {name: x[0] for name, x in batch.items()}))[:, 0]
  labels = batch["labels"][0]
  chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  np.testing.assert_allclose(value, -np.log(chances[np.arange(9), labels]).mean(), rtol=1e-5)
  assert "newest" not in metrics
  assert metrics["remembered"] == (np.sum(np.argmax(logits, -1) == labels), 9)


def test_several_trajectories_give_the_mean_and_filler_counts_for_nothing(anml):
  params, batch = parameters(anml), batch_of(anml, multiple=2)
  assert len(batch["index"]) == 2
  whole = slopes(anml, params, batch)
  parts = [slopes(anml, params, {k: x[i : i + 1] for k, x in batch.items()}) for i in range(2)]
  np.testing.assert_allclose(whole[0], (parts[0][0] + parts[1][0]) / 2, rtol=1e-5)
  jax.tree.map(
    lambda w, a, b: np.testing.assert_allclose(w, (a + b) / 2, rtol=1e-3, atol=1e-6),
    whole[2], parts[0][2], parts[1][2],
  )  # fmt: skip
  filled = {k: x.copy() for k, x in batch.items()}
  for name, column in filled.items():
    column[1] = -1 if name == "index" else 0
  found = slopes(anml, params, filled)
  np.testing.assert_allclose(found[0], parts[0][0], rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), found[2], parts[0][2]
  )


# Protocols.


def numpy_softmax_steps(features, labels, order, rate, classes):
  """Stochastic gradient descent of a last layer that begins with zeros."""
  rows = np.zeros((classes, features.shape[1]))
  for place in order:
    logits = rows @ features[place]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    rows -= rate * np.outer(p - np.eye(classes)[labels[place]], features[place])
  return rows


def trial(task, split, name_or_protocol, classes=6, params=None, use=USE):
  protocol = PROTOCOLS.get(name_or_protocol, name_or_protocol)
  params = parameters(task) if params is None else params
  return Trial(task.model, params, task.dataset.sequence(split, classes), protocol, use)


def test_the_last_layer_learns_class_after_class_as_a_loop_in_numpy(task):
  one = trial(task, "test", "last_layer")
  found = one.outcome(Setting(0.1, 0.0))
  features = one.shown["features"].reshape(30, -1).astype(np.float64)
  labels, asked = np.repeat(np.arange(6), 5), one.asked["features"].astype(np.float64)
  assert found.stages == (2, 4, 6)
  for place, stage in enumerate(found.stages):
    rows = numpy_softmax_steps(features, labels, range(5 * stage), 0.1, 6)
    right = (asked @ rows.T).argmax(-1) == np.arange(6)[:, None]
    assert found.asked[place] == pytest.approx(right[:stage].mean())
    blocks = [right[:2].mean(), right[2:4].mean(), right[4:].mean()]
    np.testing.assert_allclose(found.matrix[place], blocks)
    learned = (features[: 5 * stage] @ rows.T).argmax(-1) == labels[: 5 * stage]
    assert found.shown[place] == pytest.approx(learned.mean())
  np.testing.assert_allclose(found.before, [0.5, 0, 0])  # all logits are 0: the first class


def test_mixed_classes_are_all_learned_before_each_measurement(anml):
  one = trial(anml, "test", "interleaved")
  found = one.outcome(Setting(0.1, 0.0))
  assert found.matrix is None
  assert found.transfer() is None
  for place, stage in enumerate(found.stages):
    order = np.random.default_rng([0xC019, stage]).permutation(5 * stage)
    assert sorted(order) == list(range(5 * stage))
    features = one.shown["features"][:stage].reshape(5 * stage, -1).astype(np.float64)
    rows = numpy_softmax_steps(features, np.repeat(np.arange(stage), 5), order, 0.1, 6)
    right = (one.asked["features"][:stage] @ rows.T).argmax(-1) == np.arange(stage)[:, None]
    assert found.asked[place] == pytest.approx(right.mean())


def test_a_sequence_is_always_the_same_and_no_example_is_learned_and_asked(anml):
  whole, part = anml.dataset.sequence("test", 7), anml.dataset.sequence("test", 3)
  np.testing.assert_array_equal(whole.shown[:3], part.shown)
  numbers = np.concatenate([whole.shown, whole.asked], axis=1)
  assert len(np.unique(numbers)) == numbers.size
  classes = whole.examples.classes[numbers]
  assert np.all(classes == classes[:, :1])
  assert len(np.unique(classes[:, 0])) == 7


@pytest.mark.parametrize("name", ["last_layer", "prediction_layers", "all_layers"])
def test_a_protocol_changes_what_it_names_and_nothing_else(task, name):
  params = parameters(task)
  one = trial(task, "test", name, params=params)
  ((_, learner),) = one.learners(Setting(0.1, 0.0), (6,))
  before, after = jax.device_get((params, learner.params))

  def moved(old, new):
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return any(np.any(a != b) for a, b in pairs)

  for part in params:
    assert moved(before[part], after[part]) == (part == "prediction" or name == "all_layers")
  for part in params["prediction"]:
    changes = moved(before["prediction"][part], after["prediction"][part])
    assert changes == (part == "head" or name != "last_layer")


def test_levels_are_computed_as_far_as_nothing_learns(task):
  params = parameters(task)
  assert level_of(params, ("prediction/head",)) == "features"
  assert level_of(params, ("prediction",)) == "context"
  # A plain network is nothing but a prediction network.
  plain = task.model.config.kind == "plain"
  assert level_of(params, ("*",)) == ("context" if plain else "inputs")
  inputs = task.dataset.classes("test").inputs[:4]

  @jax.jit
  def logits_from(params, inputs):
    levels = ("features", "context", "inputs")
    rows = [task.model.rows(params, inputs, level) for level in levels]
    return [task.model.logits(params, one) for one in rows]

  logits = logits_from(params, inputs)
  np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(logits[0], logits[2], rtol=1e-4, atol=1e-5)


def test_a_fresh_network_knows_nothing_of_the_trained_one(anml):
  accuracies = [
    trial(anml, "test", "scratch", params=parameters(anml, seed)).outcome(Setting(0.1, 0.0)).asked
    for seed in (1, 2)
  ]
  np.testing.assert_array_equal(*accuracies)


def heads(task, protocol, strength=0.0, use=USE, classes=6):
  one = trial(task, "test", protocol, classes, use=use)
  return [
    np.asarray(learner.params["prediction"]["head"]["kernel"])
    for _, learner in one.learners(Setting(0.1, 0.0, strength), tuple(range(1, classes + 1)))
  ]


@pytest.mark.parametrize("keeps", ["ewc", "lwf", "rehearsal"])
def test_the_first_class_is_learned_as_without_anything_against_forgetting(anml, keeps):
  plain, other = heads(anml, "last_layer"), heads(anml, keeps, 0.5)
  np.testing.assert_allclose(other[0], plain[0], rtol=1e-4, atol=1e-6)
  assert not np.allclose(other[2], plain[2], atol=1e-4)  # of one known class nothing is distilled


def test_consolidated_rows_move_less_the_stronger_the_penalty(anml):
  moves = [
    np.abs(found[5][0] - found[0][0]).max()
    for found in (heads(anml, "ewc", strength) for strength in (1e-6, 1.0, 5.0))
  ]
  assert moves[0] > moves[1] > moves[2]
  plain = heads(anml, "last_layer")
  np.testing.assert_allclose(heads(anml, "ewc", 1e-8)[-1], plain[-1], rtol=1e-3, atol=1e-5)


def test_rehearsal_remembers_what_is_forgotten_without(anml):
  """Of features that all classes share, the first class is lost; with rehearsal it is not."""
  use = dataclasses.replace(USE, buffer=30, replay=8)
  accuracies = {
    name: trial(anml, "test", name, use=use).outcome(Setting(0.1, 0.0)).matrix[-1, 0]
    for name in ("last_layer", "rehearsal")
  }
  assert accuracies["rehearsal"] > accuracies["last_layer"]


# Choice.


def test_settings_are_the_best_on_validation_classes_and_used_once_on_others(anml):
  params = parameters(anml)
  found = measured(anml, params, "test", "last_layer")
  choice, settings = trial(anml, "valid", "last_layer", 5, params), []
  for rate in USE.rates:
    for gain in USE.row_gains:
      setting = Setting(rate, gain)
      settings.append((choice.outcome(setting).asked[-1], setting))
  assert found.setting == max(settings, key=lambda pair: pair[0])[1]
  expected = trial(anml, "test", "last_layer", 6, params).outcome(found.setting)
  np.testing.assert_array_equal(found.asked, expected.asked)


def test_every_protocol_has_the_same_grid_and_a_strength_where_it_needs_one():
  plain = USE.settings(Protocol("any"))
  assert len(plain) == 4
  for name, protocol in PROTOCOLS.items():
    settings = USE.settings(protocol)
    assert [one[:2] for one in settings] == [one[:2] for one in plain]
    assert all((one.strength > 0) == (name in ("ewc", "lwf")) for one in settings)


def test_scores_of_the_test_are_of_all_protocols_and_others_of_the_first(anml):
  task = built(use=dataclasses.replace(USE, protocols=("last_layer", "ewc", "interleaved")))
  params = parameters(task)
  test, valid = (task.evaluate(params, split).values for split in ("test", "valid"))
  assert test["accuracy"] == test["last_layer/accuracy_6"]
  assert valid["accuracy"] == valid["last_layer/accuracy_5"]
  assert {name.split("/")[0] for name in test} == {"accuracy", "last_layer", "ewc", "interleaved"}
  assert {name.split("/")[0] for name in valid} == {"accuracy", "last_layer"}
  assert test["ewc/strength"] == 0.5
  assert "interleaved/retention" not in test
  while_training = task.evaluate(params, "valid", decode=3).values
  assert "last_layer/accuracy_3" in while_training
  assert task.metric == "accuracy"


def test_too_few_validation_classes_are_noted(anml):
  assert anml.dataset.notes() == ["classes: train 6, valid 5, test 7"]
  few = built(use=dataclasses.replace(USE, choice=9))
  assert "5 validation classes, not on 9" in few.dataset.notes()[1]


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"trajectory": -1}, "task.trajectory is -1"),
    ({"inner_rate": 0.0}, "task.inner_rate is 0.0"),
    ({"inner_parameters": ()}, "task.inner_parameters is empty"),
    ({"inner_parameters": ("body",)}, "'body', which stands for no parameter"),
  ],
)
def test_bad_tasks_name_their_field(fields, words):
  with pytest.raises(UserError, match=words):
    built(**fields)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"protocols": ("other",)}, r"task\.use\.protocols is 'other'"),
    ({"classes": (4, 2)}, r"task\.use\.classes is \(4, 2\)"),
    ({"rates": ()}, r"task\.use\.rates is empty"),
    ({"rates": (-1.0,)}, r"task\.use\.rates is \(-1\.0,\)"),
    ({"buffer": 0}, r"task\.use\.buffer is 0"),
  ],
)
def test_bad_uses_name_their_field(fields, words):
  with pytest.raises(UserError, match=words):
    dataclasses.replace(USE, **fields)


def test_what_does_not_fit_is_refused(anml):
  with pytest.raises(UserError, match="model is a ConvNetConfig, but the task needs a network"):
    CONFIG.build(ConvNetConfig(blocks=2))
  with pytest.raises(UserError, match=r"phases\.part is 'small'"):
    anml.dataset.train_batches(part="small", seed=0, multiple=1)
  long = built(trajectory=EXAMPLES + 1)
  with pytest.raises(UserError, match=r"task\.trajectory is 9, but of the split 'train'"):
    long.dataset.check()
  assert isinstance(anml.model, ContinualModel)
