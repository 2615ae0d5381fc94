"""Losses whose logits are never written, against NumPy in double precision and the definition.

The kernel runs in Pallas' interpreter with blocks so small that rows and vocabulary need several,
and fill the last one in part; what a block holds past the end of its array is NaN there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import DEVICES

from compmod_jax.core import sharding
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF
from compmod_jax.core.losses import LabelStatistics, cross_entropy_of
from compmod_jax.kernels.cross_entropy import Blocks, kernel_for, label_statistics
from compmod_jax.layers import embedding
from compmod_jax.layers.embedding import OutputLayer
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import PairModel
from compmod_jax.tools import matmul_flops

ROWS, WORDS, DIM = 20, 37, 16
KERNEL: dict[str, Any] = {"implementation": "tpu", "interpret": True, "blocks": Blocks(8, 16)}
WAYS: dict[str, dict[str, Any]] = {"reference": {"implementation": "reference"}, "tpu": KERNEL}
TINY = TransformerConfig(dim=DIM, heads=2, encoder_layers=1, decoder_layers=1, max_length=8)


def example(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Rows, a table in which two words have the same vector, labels, and which rows count."""
  rng = np.random.default_rng(0)
  hidden, table = rng.normal(size=(ROWS, DIM)), rng.normal(size=(WORDS, DIM))
  table[30] = table[3]
  hidden[:4] = 2 * table[3]  # its words have the largest logits there
  labels = rng.integers(WORDS, size=ROWS)
  labels[:4] = 3, 30, 5, 3
  counted = np.arange(ROWS) % 5 < 4
  hidden, table = (jnp.asarray(one, dtype) for one in (hidden, table))
  return hidden, table, jnp.asarray(labels), jnp.asarray(counted)


@functools.partial(jax.jit, static_argnames=("way", "smoothing"))
def computed(hidden, table, labels, counted, *, way: str, smoothing: float):
  """Losses, and gradients of the smoothed one."""

  def total(hidden, table):
    found = label_statistics(hidden, table, labels, **WAYS[way])
    losses = cross_entropy_of(found, WORDS, counted, label_smoothing=smoothing)
    return losses.smoothed, vars(losses)

  gradients, losses = jax.grad(total, (0, 1), has_aux=True)(hidden, table)
  return losses, gradients


def by_numpy(hidden, table, labels, counted, smoothing: float):
  hidden, table = (np.asarray(one, np.float64) for one in (hidden, table))
  labels, counted = np.asarray(labels), np.asarray(counted)
  logits = hidden @ table.T
  top = logits.max(axis=1, keepdims=True)
  log_p = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
  target = np.eye(WORDS)[labels]
  smooth = (1 - smoothing) * target + smoothing / WORDS
  errors = (np.exp(log_p) - smooth) * counted[:, None]
  losses = {
    "smoothed": -np.sum(smooth * log_p, axis=1)[counted].sum(),
    "nll": -np.sum(target * log_p, axis=1)[counted].sum(),
    "correct": (logits[np.arange(ROWS), labels] >= top[:, 0] - 1e-9)[counted].sum(),
    "count": counted.sum(),
  }
  return losses, (errors @ table, errors.T @ hidden)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_and_gradients_are_those_of_numpy(dtype, way, smoothing):
  hidden, table, labels, counted = example(dtype)
  losses, gradients = computed(hidden, table, labels, counted, way=way, smoothing=smoothing)
  expected, slopes = by_numpy(hidden, table, labels, counted, smoothing)
  for name, value in expected.items():
    np.testing.assert_allclose(losses[name], value, rtol=1e-5, err_msg=name)
  assert losses["correct"] >= 3  # both words of a tie are right
  rtol, atol = (1e-4, 1e-5) if dtype == "float32" else (2e-2, 4e-2)
  for found, value, given in zip(gradients, slopes, (hidden, table), strict=True):
    assert found.dtype == given.dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), value, rtol=rtol, atol=atol)
  assert not np.any(np.asarray(gradients[0], np.float64)[~np.asarray(counted)])


def test_gradients_of_more_rows_than_vector_memory_holds_are_summed_in_passes(monkeypatch):
  """Three blocks of rows, of which two are held at once: the second pass has one block too few."""
  given = example("float32")
  expected = computed(*given, way="reference", smoothing=0.1)[1]
  monkeypatch.setattr(Blocks, "held", lambda self, dim, dtype: 2)
  hidden, table, labels, counted = given

  def total(hidden, table):
    found = label_statistics(hidden, table, labels, **KERNEL)
    return cross_entropy_of(found, WORDS, counted, label_smoothing=0.1).smoothed

  found = jax.jit(jax.grad(total, (0, 1)))(hidden, table)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_cannot_run_is_refused_with_the_reason():
  hidden, table, labels, _ = example("float32")
  with pytest.raises(UserError, match="the program is for a cpu"):
    label_statistics(hidden, table, labels, implementation="tpu")
  with pytest.raises(UserError, match="neither float32 nor bfloat16"):
    label_statistics(hidden.astype(jnp.float16), table.astype(jnp.float16), labels, **KERNEL)
  with pytest.raises(UserError, match="they must be equal"):
    label_statistics(hidden[:, :8], table, labels)
  assert kernel_for(hidden, ROWS, DIM, "float32") is None  # here
  with sharding.tracing_for(DEVICES["tpu"]):
    assert kernel_for(hidden, ROWS, DIM, "float32") == "tpu"
    assert kernel_for(hidden, ROWS, 8192, "float32") is None  # no room


def test_only_the_products_that_a_model_needs_are_counted():
  rows, words, dim = 3000, 1111, 64
  given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, dim), (words, dim))]
  labels = jax.ShapeDtypeStruct((rows,), jnp.int32)

  def total(hidden, table, labels):
    return jnp.sum(label_statistics(hidden, table, labels).nll)

  with sharding.tracing_for(DEVICES["tpu"]):
    traced = jax.jit(jax.grad(total, (0, 1))).trace(*given, labels)
  assert matmul_flops.count(traced.jaxpr) == 6 * rows * words * dim


def test_devices_with_their_own_rows_compute_what_one_does(monkeypatch):
  hidden, table, labels, counted = example("float32")
  expected = computed(hidden, table, labels, counted, way="reference", smoothing=0.1)
  monkeypatch.setattr(embedding, "kernel_for", lambda *_: "tpu")
  kernel = functools.partial(label_statistics, **KERNEL)
  monkeypatch.setattr(embedding, "label_statistics", kernel)

  def total(hidden, table, labels, counted):
    found = OutputLayer(hidden, table).label_statistics(labels)
    losses = cross_entropy_of(found, WORDS, counted, label_smoothing=0.1)
    return losses.smoothed, vars(losses)

  mesh = sharding.make_mesh(sharding.MeshConfig(data=2), jax.devices()[:2])
  rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  args = [x.reshape(4, 5, *x.shape[1:]) for x in (hidden, labels, counted)]
  hidden, labels, counted = (jax.device_put(x, rows) for x in args)
  gradient = jax.jit(jax.grad(total, (0, 1), has_aux=True))
  found, losses = gradient(hidden, jax.device_put(table, whole), labels, counted)
  for name, value in expected[0].items():
    np.testing.assert_allclose(losses[name], value, rtol=1e-5)
  for one, other in zip(found, expected[1], strict=True):
    np.testing.assert_allclose(np.reshape(one, other.shape), other, rtol=1e-4, atol=1e-5)


def test_a_step_for_a_tpu_has_the_kernels_and_no_logits():
  """Of a Transformer, on 3 sentences of 7 tokens."""
  model = PairModel(TINY.seq2seq(WORDS, WORDS, 0))
  params = jax.eval_shape(model.init, jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((3, 7), jnp.int32)

  def total(params, batch):
    return model.losses(params, batch, label_smoothing=0.1).smoothed

  with sharding.tracing_for(DEVICES["tpu"]):
    traced = jax.jit(jax.grad(total)).trace(params, {"source": tokens, "target": tokens})
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
  for name in ("label_statistics", "label_statistics_backward"):
    assert text.count(f'kernel_name = "{name}"') == 1
  assert f"tensor<21x{DIM}xf32>" in text  # as arrays of floats are written
  assert not any(f"tensor<{shape}x{WORDS}xf32>" in text for shape in ("21", "3x7"))


def test_for_a_cpu_the_logits_are_formed_as_they_are_read():
  hidden, table, labels, _ = example("bfloat16")
  hidden, labels = hidden.reshape(4, 5, DIM), labels.reshape(4, 5)

  def fused(hidden, table, labels):
    return OutputLayer(hidden, table).label_statistics(labels)

  def plain(hidden, table, labels):
    return LabelStatistics.of(OutputLayer(hidden, table).logits(), labels)

  one, other = (str(jax.make_jaxpr(f)(hidden, table, labels)) for f in (fused, plain))
  assert one == other


def test_logits_are_formed_where_they_are_read_or_where_the_table_is_divided(monkeypatch):
  model = PairModel(TINY.seq2seq(WORDS, WORDS, 0))
  tokens = jnp.ones((1, 3), jnp.int32)
  batch = {"source": tokens, "target": tokens}
  formed = []
  monkeypatch.setattr(embedding, "kernel_for", lambda *_: "tpu")
  monkeypatch.setattr(
    embedding, "label_statistics", lambda *_: formed.append("in a kernel") or made
  )
  made = LabelStatistics(*[jnp.zeros(3)] * 4)

  def losses(intermediates, batch=batch):
    params = jax.eval_shape(model.init, jax.random.key(0))
    jax.eval_shape(lambda p: vars(model.losses(p, batch, intermediates=intermediates)), params)
    return len(formed)

  assert losses(OFF.also(["encoder/output"])) == 1
  assert losses(record := OFF.also(["logits"])) == 1
  assert record.captured["logits"].shape == (1, 3, WORDS)
  mesh = sharding.make_mesh(sharding.MeshConfig(data=1, tensor=2), jax.devices()[:2])
  divided = jax.device_put(batch, sharding.replicated(mesh))
  assert losses(OFF, divided) == 1
