"""Heads watched on fixed sentences: against the activations themselves, sentence by sentence."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import make_experiment, random_parameters, write_data

from compmod_jax.analysis.watch import POSITIONS, HeadWatch, samples
from compmod_jax.core.intermediates import run
from compmod_jax.core.sharding import MeshConfig, make_mesh
from compmod_jax.training.run import sharing_of

COUNT = 5


@pytest.fixture(scope="module")
def task(tmp_path_factory):
  experiment = make_experiment(write_data(tmp_path_factory.mktemp("watch") / "data"))
  return experiment.task.build(experiment.model)


@pytest.fixture(scope="module")
def params(task):
  return random_parameters(task, 0)


@pytest.fixture(scope="module")
def found(task, params):
  return HeadWatch(task, COUNT)(params)


@functools.cache
def activations(task, number: int):
  """All sites for one validation sentence, alone."""
  params = random_parameters(task, 0)
  examples = task.dataset.examples("valid").select(np.array([number]))
  batch = {name: jnp.asarray(column[0])[None] for name, column in examples.columns.items()}
  _, sites = jax.jit(lambda p, b: run(task.model.forward, p, b, capture=None))(params, batch)
  return jax.device_get(sites)


def expected(task, site: str, first: int):
  """Mean over the sentences that are long enough, position by position."""
  rows: list[list[np.ndarray]] = [[] for _ in range(POSITIONS)]
  for number in range(COUNT):
    values = activations(task, number)[site][0]
    values = values if site.endswith("weights") else np.linalg.norm(values, axis=-1)
    for position, value in enumerate(values[first : first + POSITIONS]):
      rows[position].append(value)
  return [np.mean(row, axis=0) if row else None for row in rows]


@pytest.mark.parametrize(
  ("module", "name", "site", "first"),
  [
    ("encoder/layer_0/self", "weight", "router/weights", 0),
    ("encoder/layer_0/self", "norm", "heads", 0),
    ("encoder/layer_0/self", "norm_scaled", "heads_scaled", 0),
    ("decoder/layer_0/self", "norm", "heads", 1),
    ("decoder/layer_0/cross", "weight", "router/weights", 1),
  ],
)
def test_the_means_are_those_of_the_sentences_themselves(task, found, module, name, site, first):
  values = found["sites"][module]
  assert (found["sentences"], values["first"]) == (COUNT, first)
  means = expected(task, f"{module}/{site}", first)
  assert [row[0] is None for row in values[name]] == [mean is None for mean in means]
  for row, mean in zip(values[name], means, strict=True):
    if mean is not None:
      np.testing.assert_allclose(row, mean, rtol=1e-3)  # four digits are kept


def test_what_is_measured_is_the_weights_of_routers_and_the_norms_of_all_heads(found):
  names = {module: set(values) - {"first"} for module, values in found["sites"].items()}
  routed = {"weight", "norm", "norm_scaled"}
  assert names == {
    "encoder/layer_0/self": routed,
    "decoder/layer_0/cross": routed,
    "decoder/layer_0/self": {"norm"},
  }


def test_norms_after_the_competition_are_weighted(task):
  sites = activations(task, 0)
  module = "encoder/layer_0/self"
  before, after = (sites[f"{module}/{name}"] for name in ("heads", "heads_scaled"))
  weights = sites[f"{module}/router/weights"]
  np.testing.assert_allclose(
    np.linalg.norm(after, axis=-1), weights * np.linalg.norm(before, axis=-1), rtol=1e-5
  )


def test_a_plain_model_shows_the_norms_of_its_heads(task):
  plain = dataclasses.replace(task.model.config, compete=())
  other = task.dataset.config.build(plain, files=task.dataset.files())
  params = nn.unbox(jax.jit(other.model.init)(jax.random.key(0)))
  sites = HeadWatch(other, 3)(params)["sites"]
  assert {tuple(values) for values in sites.values()} == {("first", "norm")}


def test_the_devices_change_nothing(task, params, found):
  sharing = sharing_of(make_mesh(MeshConfig()))  # 8 devices for 5 sentences
  again = HeadWatch(task, COUNT, sharing=sharing)(params)
  for one, two in zip(
    jax.tree.leaves(again["sites"]), jax.tree.leaves(found["sites"]), strict=True
  ):
    np.testing.assert_allclose(one, two, rtol=2e-3)


def test_a_sample_is_the_first_examples_in_order_however_they_were_batched():
  column = {number: np.arange(1, number + 2) for number in range(6)}

  def batch(numbers, width):
    rows = np.zeros((len(numbers), width), np.int32)
    for row, number in zip(rows, numbers, strict=True):
      row[: number + 1] = column.get(number, ())
    return {"source": rows, "index": np.array(numbers, np.int32)}

  (found,) = samples([batch([5, 2, -1], 8), batch([1, 3], 4)], 3)
  assert found["index"].tolist() == [1, 2, 3]
  assert found["source"].tolist() == [
    [1, 2, 0, 0, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0],
  ]  # fmt: skip


def test_examples_of_different_columns_are_apart():
  plain = {"source": np.ones((2, 3), np.int32), "index": np.array([0, 3], np.int32)}
  more = {**plain, "index": np.array([1, 2], np.int32), "rows/x": np.zeros(2, np.int32)}
  one, two = samples([plain, more], 3)
  assert (one["index"].tolist(), two["index"].tolist()) == ([0], [1, 2])
  assert set(two) - set(one) == {"rows/x"}
