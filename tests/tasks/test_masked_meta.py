"""MAML over the masked language model: its gradient, its devices, its evaluation."""

import dataclasses
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_masked

from compmod_jax.core import sharding
from compmod_jax.core.config import from_json, to_json
from compmod_jax.core.errors import UserError
from compmod_jax.core.losses import objective
from compmod_jax.data.episodes import EpisodeConfig, EpisodeDataset
from compmod_jax.tasks.base import StepContext, lower_is_better
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.tasks.objectives import MetaConfig
from compmod_jax.tools.shapes import largest_batch
from compmod_jax.training.experiment import Experiment
from configs.mlm_maml import get_config

CONTEXT = StepContext(jax.random.key(0), jnp.int32(0), True)
META = MetaConfig(
  EpisodeConfig(support=1, query=1, batch=8), steps=1, rate=0.5, parameters=("encoder_0", "head")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  counts = {"train": 60, "valid": 12, "test": 12}
  return tiny_masked.write_text(tmp_path_factory.mktemp("meta") / "text", counts)


@pytest.fixture(scope="module")
def task(folder):
  model = tiny_masked.make_model(dropout=0.0, attention_dropout=0.0)
  return tiny_masked.make_task(folder, length=6, batch_tokens=48, meta=META).build(model)


@pytest.fixture(scope="module")
def params(task):
  shapes = jax.eval_shape(lambda: nn.unbox(task.model.init(jax.random.key(0))))
  random = np.random.default_rng(0)
  return jax.tree.map(lambda x: (0.3 * random.normal(size=x.shape)).astype(x.dtype), shapes)


@pytest.fixture(scope="module")
def batch(task):
  iterator, _ = task.dataset.train_batches(seed=0, multiple=1)
  found = next(iterator)
  iterator.close()
  return found


@pytest.fixture(scope="module")
def slope(task):
  """The objective and its gradient, compiled once."""
  return jax.jit(
    jax.value_and_grad(lambda params, batch: objective(task.loss(params, (), batch, CONTEXT)[0]))
  )


def test_rows_of_an_episode_begin_in_one_document(task, batch):
  assert isinstance(task.dataset, EpisodeDataset)
  blocks, documents = task.dataset.blocks("train"), task.dataset.documents("train")
  ends = np.cumsum(
    [np.sum(block == task.dataset.tokenizer.eos) for block in blocks.columns["tokens"]]
  )
  np.testing.assert_array_equal(documents[1:], ends[:-1])
  index = np.asarray(batch["index"])
  assert batch["tokens"].shape == (8, 2, 6)
  assert (documents[index[:, 0]] == documents[index[:, 1]]).all()


def test_the_shapes_of_a_batch_are_known_without_data(task, batch):
  found = largest_batch(task, 4)
  assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
    name: (x.shape, x.dtype) for name, x in batch.items()
  }


def test_the_gradient_of_a_model_whose_heads_compete_is_that_of_finite_differences(
  params, batch, slope
):
  """Through attention, routers and the head's own derivative rules, to the second order."""
  gradient = jax.device_get(slope(params, batch)[1])
  step, scale = 3e-3, float(np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient))))
  ends = [
    slope(
      jax.tree.map(lambda p, g, sign=sign: p + sign * step * g / scale, params, gradient), batch
    )
    for sign in (1, -1)
  ]
  difference = (float(ends[0][0]) - float(ends[1][0])) / (2 * step)
  assert difference == pytest.approx(scale, rel=2e-3)


def test_the_objective_is_the_same_on_eight_devices(task, params, batch, slope):
  mesh = sharding.make_mesh(sharding.MeshConfig(data=4, tensor=2))
  boxed = jax.eval_shape(task.model.init, jax.random.key(0))
  placed = jax.device_put(params, sharding.parameter_shardings(boxed, mesh))
  spread = sharding.place_batch(jax.tree.map(np.asarray, batch), mesh)
  expected, found = slope(params, batch), slope(placed, spread)
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found[1], expected[1]
  )


def test_evaluation_reports_the_queries_after_each_step_as_a_plain_loop_gives_them(task, params):
  config = dataclasses.replace(
    task.dataset.config, meta=dataclasses.replace(META, evaluate_steps=2)
  )
  other = config.build(task.model.config, files=task.dataset.files())
  found = other.evaluate(params, "valid", decode=0).values
  key, rate = jax.random.key(config.mask_seed), META.rate
  inside = other.objective.objective

  def loss(params, rows, number, inner):
    rng = jax.random.fold_in(jax.random.fold_in(key, 0x1A9E), number) if inner else key
    context = StepContext(rng, jnp.int32(0), train=False)
    terms, _, _ = inside(other.model, params, (), rows, context)
    return objective(terms), (terms["cross_entropy"].sum, terms["cross_entropy"].count)

  @jax.jit
  def query(params, rows):
    return jnp.stack(loss(params, rows, 0, False)[1])

  @jax.jit
  def descent(params, rows, number):
    grads, _ = jax.grad(loss, has_aux=True)(params, rows, number, True)
    return {
      name: jax.tree.map(lambda p, g: p - rate * g, part, grads[name])
      if name in META.parameters
      else part
      for name, part in params.items()
    }

  sums = np.zeros((3, 2))
  for batch in other.dataset.episodes("valid"):
    for tokens, index in zip(batch["tokens"], batch["index"], strict=True):
      now = params
      for number in range(3):
        rows = {"tokens": tokens[1:], "index": index[1:]}
        sums[number] += np.asarray(query(now, rows))
        now = descent(now, {"tokens": tokens[:1], "index": index[:1]}, number)
  expected = sums[:, 0] / sums[:, 1]
  for number, value in enumerate(expected):
    assert found[f"query/{number}_loss"] == pytest.approx(value, rel=1e-5)
  assert found["query/adapted_loss"] == found["query/2_loss"] != found["query/0_loss"]
  assert other.metric == "query/adapted_loss"
  assert lower_is_better("query/adapted_loss")


def test_three_files_know_of_the_meta_objective():
  root = Path(__file__).parents[2]
  files = (
    path for top in ("compmod_jax", "configs", "train") for path in (root / top).rglob("*.py")
  )
  words = re.compile(r"MetaConfig|AdaptationScores|mlm_maml")
  knowing = {str(path.relative_to(root)) for path in files if words.search(path.read_text())}
  assert knowing == {
    "compmod_jax/tasks/objectives.py",
    "compmod_jax/tasks/masked_lm.py",
    "configs/mlm_maml.py",
  }


def test_the_configuration_comes_back_through_json():
  given = get_config("first_order")
  assert from_json(Experiment, to_json(given)) == given
  saved = to_json(MaskedLMConfig())
  del saved["meta"]  # as it was saved before
  assert from_json(MaskedLMConfig, saved) == MaskedLMConfig()


def test_a_pattern_for_no_parameter_is_refused_before_training(folder):
  meta = dataclasses.replace(META, parameters=("encoder_1",))
  with pytest.raises(UserError, match=r"meta.parameters has 'encoder_1'.*mean 'encoder_0'"):
    tiny_masked.make_task(folder, meta=meta).build(tiny_masked.make_model())
