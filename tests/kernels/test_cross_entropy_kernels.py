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
from jax.sharding import NamedSharding, PartitionSpec

from compmod_jax.core import sharding
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import OFF
from compmod_jax.core.losses import LabelStatistics, cross_entropy_of
from compmod_jax.kernels.cross_entropy import Blocks, kernel_for, label_statistics
from compmod_jax.layers import output
from compmod_jax.layers.output import OutputLayer
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.causal_lm import CausalModel
from compmod_jax.tasks.translation import PairModel
from compmod_jax.tools import matmul_flops

ROWS, WORDS, DIM = 20, 37, 16
KERNEL: dict[str, Any] = {"implementation": "tpu", "interpret": True, "blocks": Blocks(8, 16)}
WAYS: dict[str, dict[str, Any]] = {"reference": {"implementation": "reference"}, "tpu": KERNEL}
SIZES: dict[str, Any] = {"dim": DIM, "heads": 2, "ffn_dim": 24, "max_length": 8}
TINY = TransformerConfig(dim=DIM, heads=2, encoder_layers=1, decoder_layers=1, max_length=8)

LANGUAGE_MODELS = {
  "tied": DecoderConfig(**SIZES, decoder_layers=1),
  "head": DecoderConfig(**SIZES, decoder_layers=1, tied=False),
  "nemot": NemotConfig(**SIZES, vanilla_layers=1, modulatory_layers=1, output_layers=1),
}


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


def some_bias() -> jax.Array:
  """The same for both words that have the same vector."""
  bias = np.random.default_rng(1).normal(size=WORDS)
  bias[30] = bias[3]
  return jnp.asarray(bias, jnp.float32)


@functools.partial(jax.jit, static_argnames=("way", "smoothing"))
def computed(hidden, table, labels, counted, bias=None, *, way: str, smoothing: float):
  """Losses, and gradients of the smoothed one."""

  def total(hidden, table, bias):
    found = label_statistics(hidden, table, labels, bias, **WAYS[way])
    losses = cross_entropy_of(found, WORDS, counted, label_smoothing=smoothing)
    return losses.smoothed, vars(losses)

  gradients, losses = jax.grad(total, (0, 1, 2), has_aux=True)(hidden, table, bias)
  return losses, gradients


def by_numpy(hidden, table, labels, counted, bias, smoothing: float):
  hidden, table = (np.asarray(one, np.float64) for one in (hidden, table))
  labels, counted = np.asarray(labels), np.asarray(counted)
  logits = hidden @ table.T + (0 if bias is None else np.asarray(bias, np.float64))
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
  return losses, (errors @ table, errors.T @ hidden, errors.sum(axis=0))


@pytest.mark.parametrize(("smoothing", "biased"), [(0.0, False), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_and_gradients_are_those_of_numpy(dtype, way, smoothing, biased):
  hidden, table, labels, counted = example(dtype)
  given = (hidden, table, labels, counted, some_bias() if biased else None)
  losses, gradients = computed(*given, way=way, smoothing=smoothing)
  expected, slopes = by_numpy(*given, smoothing)
  for name, value in expected.items():
    np.testing.assert_allclose(losses[name], value, rtol=1e-5, err_msg=name)
  assert losses["correct"] >= 3  # both words of a tie are right
  rtol, atol = (1e-4, 1e-5) if dtype == "float32" else (2e-2, 4e-2)
  assert (gradients[2] is not None) == biased
  assert gradients[0].dtype == gradients[1].dtype == hidden.dtype
  for found, value in zip(gradients[: 3 if biased else 2], slopes, strict=False):
    np.testing.assert_allclose(np.asarray(found, np.float64), value, rtol=rtol, atol=atol)
  assert not np.any(np.asarray(gradients[0], np.float64)[~np.asarray(counted)])


def test_gradients_of_more_rows_than_vector_memory_holds_are_summed_in_passes(monkeypatch):
  """Three blocks of rows, of which two are held at once: the second pass has one block too few."""
  given = (*example("float32"), some_bias())
  expected = computed(*given, way="reference", smoothing=0.1)[1]
  monkeypatch.setattr(Blocks, "held", lambda self, dim, dtype: 2)
  hidden, table, labels, counted, bias = given

  def total(hidden, table, bias):
    found = label_statistics(hidden, table, labels, bias, **KERNEL)
    return cross_entropy_of(found, WORDS, counted, label_smoothing=0.1).smoothed

  found = jax.jit(jax.grad(total, (0, 1, 2)))(hidden, table, bias)
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


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_devices_with_their_own_rows_compute_what_one_does(monkeypatch, axis):
  """With all columns of the table, or with some that the others lack."""
  hidden, table, labels, counted = example("float32")
  bias = some_bias()
  expected = computed(hidden, table, labels, counted, bias, way="reference", smoothing=0.1)
  monkeypatch.setattr(output, "kernel_for", lambda *_: "tpu")
  kernel = functools.partial(label_statistics, **KERNEL)
  monkeypatch.setattr(output, "label_statistics", kernel)

  def total(hidden, table, bias, labels, counted):
    found = OutputLayer(hidden, table, bias).label_statistics(labels)
    losses = cross_entropy_of(found, WORDS, counted, label_smoothing=0.1)
    return losses.smoothed, vars(losses)

  sizes = {"data": 1} | {axis: 2}
  mesh = sharding.make_mesh(sharding.MeshConfig(**sizes), jax.devices()[:2])
  rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  columns = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
  args = [x.reshape(4, 5, *x.shape[1:]) for x in (hidden, labels, counted)]
  hidden, labels, counted = (jax.device_put(x, rows) for x in args)
  gradient = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))
  table, bias = jax.device_put((table, bias), (columns, whole))
  found, losses = gradient(hidden, table, bias, labels, counted)
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


@pytest.mark.parametrize("model", LANGUAGE_MODELS.values(), ids=LANGUAGE_MODELS)
def test_a_step_of_a_causal_language_model_for_a_tpu_has_the_kernels_and_no_logits(model):
  """On 3 blocks of 8 tokens, of which 7 are predicted."""
  module = model.decoder(WORDS, 0)
  params = jax.eval_shape(CausalModel(module, 1, 0, False).init, jax.random.key(0))
  batch = {"tokens": jax.ShapeDtypeStruct((3, 8), jnp.int32)}
  counted = jnp.ones((3, 7), bool)

  def lowered(kind):
    def total(params, batch):
      return CausalModel(module, 1, 0, False, output_kind=kind).losses(params, batch, counted).nll

    with sharding.tracing_for(DEVICES["tpu"]):
      traced = jax.jit(jax.grad(total)).trace(params, batch)
      return traced.lower(lowering_platforms=("tpu",)).as_text()

  text, plain = lowered("fused"), lowered("plain")
  for name in ("label_statistics", "label_statistics_backward"):
    assert text.count(f'kernel_name = "{name}"') == 1
    assert f'kernel_name = "{name}"' not in plain
  shapes = [f"tensor<{shape}x{WORDS}xf32>" for shape in ("21", "3x7")]
  assert not any(shape in text for shape in shapes)
  assert any(shape in plain for shape in shapes)


def test_for_a_cpu_the_logits_are_formed_as_they_are_read():
  hidden, table, labels, _ = example("bfloat16")
  hidden, labels = hidden.reshape(4, 5, DIM), labels.reshape(4, 5)

  def fused(hidden, table, labels):
    return OutputLayer(hidden, table).label_statistics(labels)

  def plain(hidden, table, labels):
    return LabelStatistics.of(OutputLayer(hidden, table).logits(), labels)

  one, other = (str(jax.make_jaxpr(f)(hidden, table, labels)) for f in (fused, plain))
  assert one == other


def test_logits_are_formed_where_they_are_read_or_where_words_are_divided(monkeypatch):
  model = PairModel(TINY.seq2seq(WORDS, WORDS, 0))
  tokens = jnp.ones((1, 3), jnp.int32)
  batch = {"source": tokens, "target": tokens}
  formed = []
  monkeypatch.setattr(output, "kernel_for", lambda *_: "tpu")
  monkeypatch.setattr(output, "label_statistics", lambda *_: formed.append("in a kernel") or made)
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
