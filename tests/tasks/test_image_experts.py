"""The two phases of the objective, batches, and scores against their definition."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.losses import objective
from compmod_jax.data.transformed_digits import TransformedDigits
from compmod_jax.models.competing_experts import CompetingExpertsConfig
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.image_experts import ImageExpertsConfig

MODEL = CompetingExpertsConfig(
  experts=3, layers=2, filters=4, discriminator_layers=2, discriminator_filters=4
)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
  folder, draw = tmp_path_factory.mktemp("digits"), np.random.default_rng(0)
  for name, count in (("train", 61), ("test", 22)):
    images = draw.integers(0, 255, size=(count, 12, 12)).astype(np.uint8)
    np.savez(folder / f"{name}.npz", images=images, labels=np.arange(count) % 10)
  data = TransformedDigits(str(folder), side=4, border=1, shift=1, valid=20)
  return ImageExpertsConfig(data, pretraining_steps=5, rows=6).build(MODEL)


@pytest.fixture(scope="module")
def params(task):
  return jax.jit(task.model.init)(jax.random.key(0))


def batch_of(task, rows=None):
  iterator, _ = task.dataset.train_batches(seed=3, multiple=1)
  return {name: column[:rows] for name, column in next(iterator).items()}


@pytest.fixture(scope="module")
def slopes(task):
  """Terms of the loss, metrics and slopes at a step, compiled."""

  def value(params, batch, step):
    context = StepContext(rng=jax.random.key(0), step=step, train=True)
    terms, _, metrics = task.loss(params, (), batch, context)
    return objective(terms), (terms, metrics)

  compiled = jax.jit(jax.value_and_grad(value, has_aux=True))

  def found(params, batch, step):
    (_, aux), slope = jax.device_get(compiled(params, batch, np.int32(step)))
    return *aux, slope

  return found


@pytest.fixture(scope="module")
def outputs_and_scores(task):
  return jax.jit(lambda params, images: task.model.module.apply({"params": params}, images))


def test_experts_learn_the_identity_first_and_the_discriminator_nothing(
  task, params, slopes, outputs_and_scores
):
  batch = batch_of(task)
  assert "untransformed" not in batch  # nobody could learn from it
  for step in (0, 4):
    terms, _, slope = slopes(params, batch, step)
    outputs, _ = outputs_and_scores(params, batch["transformed"])
    wrong = np.mean(np.square(outputs - batch["transformed"][None]), axis=(1, 2, 3)).sum()
    np.testing.assert_allclose(terms["identity"].value(), wrong, rtol=1e-5)
    assert terms["experts"].value() == terms["discriminator"].value() == 0
    assert all(np.any(leaf) for leaf in jax.tree.leaves(slope["experts"]))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(slope["discriminator"]))


def test_then_experts_compete_and_only_winners_learn(task, params, slopes):
  batch = batch_of(task)
  terms, metrics, slope = slopes(params, batch, 5)
  assert terms["identity"].value() == 0

  @jax.jit
  def logits(params, batch):
    real = task.model.discriminator(params["discriminator"], batch["originals"])
    return task.model.forward(params, batch)[:, 0], real

  scores, real = map(np.asarray, logits(params, batch))  # [rows, experts], [rows]
  best = scores.max(axis=1)
  np.testing.assert_allclose(terms["experts"].value(), np.log1p(np.exp(-best)).mean(), rtol=1e-5)
  against = np.log1p(np.exp(-real)).mean() + np.log1p(np.exp(scores)).mean()
  np.testing.assert_allclose(terms["discriminator"].value(), against, rtol=1e-5)
  won = [float(metrics[f"experts/won_{i}"][0]) for i in range(3)]
  np.testing.assert_array_equal(won, np.bincount(scores.argmax(axis=1), minlength=3))
  for leaf in jax.tree.leaves(slope["experts"]):
    moved = [bool(np.any(one)) for one in leaf]
    assert [not one for one in moved] == [one == 0 for one in won]
  assert all(np.any(leaf) for leaf in jax.tree.leaves(slope["discriminator"]))


def test_a_bias_learns_from_wins_alone(task, params):
  balanced = dataclasses.replace(task.dataset.config, balance=True).build(MODEL)
  fresh = jax.eval_shape(balanced.model.init, jax.random.key(0))
  assert fresh["bias"].shape == (3,)
  assert "balance" in balanced.objective.weights(MODEL)
  batch = batch_of(task)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def slopes(params, batch, bias):
    context = StepContext(rng=jax.random.key(0), step=np.int32(5), train=True)
    terms, _, metrics = balanced.loss({**params, "bias": bias}, (), batch, context)
    return terms["balance"].value(), metrics

  # Whoever has a large bias wins everything; the slope of the parameters is zero.
  bias = np.float32([0, 1e3, 0])
  (_, metrics), slope = slopes(params, batch, bias)
  assert [float(metrics[f"experts/won_{i}"][0]) for i in range(3)] == [0, 6, 0]
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(slope))
  of_bias = jax.jit(jax.grad(lambda bias: slopes(params, batch, bias)[0][0]))(bias)
  np.testing.assert_allclose(of_bias, np.array([0, 1, 0]) - 1 / 3, rtol=1e-5)


def test_rows_that_only_fill_up_a_batch_count_for_nothing(task, params, slopes):
  batch = batch_of(task, 4)
  filled = {
    name: np.pad(
      column,
      [(0, 2), *[(0, 0)] * (column.ndim - 1)],
      constant_values=-1 if name == "index" else 0.7,
    )
    for name, column in batch.items()
  }
  for step in (0, 9):
    terms, metrics, slope = slopes(params, batch, step)
    with_filler = slopes(params, filled, step)
    for one, other in zip(
      jax.tree.leaves((terms, metrics, slope)), jax.tree.leaves(with_filler), strict=True
    ):
      np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_batch_shows_one_half_transformed_and_the_other_as_it_is(task):
  halves = task.dataset.halves("train")
  iterator, epoch = task.dataset.train_batches(seed=0, multiple=1)
  assert epoch == 21 // 6
  originals = {image.astype(np.float32).tobytes() for image in halves.originals}
  hidden = {image.astype(np.float32).tobytes() for image in halves.hidden}
  batches = [next(iterator) for _ in range(5)]
  for batch in batches:
    assert {image.tobytes() for image in batch["originals"]} <= originals
    assert not {image.tobytes() for image in batch["transformed"]} & (originals | hidden)
  again, _ = task.dataset.train_batches(seed=0, multiple=1)
  again.set_state(iterator.get_state())
  np.testing.assert_array_equal(next(again)["transformed"], next(iterator)["transformed"])
  other, _ = task.dataset.train_batches(seed=1, multiple=1)
  assert not np.array_equal(next(other)["originals"], batches[0]["originals"])


def test_processes_read_their_rows_of_the_same_batch(task):
  whole = next(task.dataset.train_batches(seed=0, multiple=2)[0])
  parts = [
    next(task.dataset.train_batches(seed=0, multiple=2, process=i, processes=2)[0])
    for i in range(2)
  ]
  for name, column in whole.items():
    np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), column)


def test_scores_are_those_of_a_loop_over_every_image_and_transformation(
  task, params, outputs_and_scores
):
  found = task.evaluate(params, "valid").values
  hidden = task.dataset.halves("valid").hidden
  counts, wrong, before, seen = np.zeros((10, 3)), [], [], []
  for batch in task.dataset.eval_batches("valid"):
    outputs, scores = jax.device_get(outputs_and_scores(params, batch["transformed"]))
    for row, index in enumerate(batch["index"]):
      if index < 0:
        continue
      image = hidden[index // 10]
      winner = int(np.argmax(scores[:, row]))
      counts[index % 10, winner] += 1
      wrong.append(np.mean(np.square(outputs[winner, row] - image)))
      before.append(np.mean(np.square(batch["transformed"][row] - image)))
      seen.append(index)
  assert sorted(seen) == list(range(10 * len(hidden)))
  assert found["experts/restored_loss"] == pytest.approx(np.mean(wrong), rel=1e-5)
  assert found["experts/transformed_loss"] == pytest.approx(np.mean(before), rel=1e-5)
  assert found["experts/share"] == pytest.approx(counts.max(axis=1).sum() / len(seen))
  assert found["experts/idle"] == np.sum(counts.sum(axis=0) < 0.01 * len(seen))
  majority = counts > 0.5 * len(hidden)
  alone = [row.any() and majority[:, row.argmax()].sum() == 1 for row in majority]
  assert found["experts/specialised"] == sum(alone)
  assert task.metric == "experts/restored_loss"


def test_what_does_not_fit_is_refused(task):
  with pytest.raises(UserError, match="model is a ConvNetConfig, but the task needs experts"):
    task.dataset.config.build(ConvNetConfig())
  with pytest.raises(UserError, match=r"phases.part is 'small'"):
    task.dataset.train_batches(part="small", seed=0, multiple=1)
  with pytest.raises(UserError, match=r"task\.pretraining_steps is -1"):
    dataclasses.replace(task.dataset.config, pretraining_steps=-1)
