r"""Attention of the newest positions to a cache of keys and values.

A step of decoding has a few queries for thousands of keys, so that it takes as long as a device
needs to read these once:

.. math::
   o_j = \frac{\sum_k e^{s_{jk} - m_j}\, v_k}{\sum_k e^{s_{jk} - m_j}}, \qquad
   s_{jk} = q_j \cdot k_k / \sqrt{D} + b_{jk}, \qquad m_j = \max_k s_{jk}

over the keys that have been written. On NVIDIA GPUs a kernel (`cached_gpu`) reads no others; the
beams of an example are its queries, so that what they share is read once for all of them.
"""

import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from compmod_jax.kernels.attention.dispatch import standing_for


def attend_to_cache(
  query: Float[Array, "batch queries heads head_dim"],
  key: Float[Array, "batch heads head_dim keys"],
  value: Float[Array, "batch heads keys head_dim"],
  bias: Float[Array, "#batch #heads #queries keys"],
  filled: Int[Array, ""] | int,
) -> Float[Array, "batch queries heads head_dim"]:
  """The definition.

  Args:
    query: q.
    key: k, transposed as caches have them.
    value: v.
    bias: b, float32; far below all others for a key that a query does not read. A query that
      reads none reads all alike.
    filled: how many keys have been written, at least 1; what stands behind them is not read.
  """
  logits = jnp.einsum("bqhd,bhdk->bhqk", query, key, preferred_element_type=jnp.float32)
  logits = logits / jnp.sqrt(jnp.float32(query.shape[-1])) + bias
  written = (jnp.arange(key.shape[-1]) < filled)[None, None, None]
  logits = jnp.where(written, logits, -jnp.inf)
  probabilities = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
  value = jnp.where(jnp.swapaxes(written, -1, -2), value, 0)
  return jnp.einsum("bhqk,bhkd->bqhd", probabilities, value)


def attend_to_cache_on_gpu(
  query: Float[Array, "batch queries heads head_dim"],
  key: Float[Array, "batch heads head_dim keys"],
  value: Float[Array, "batch heads keys head_dim"],
  bias: Float[Array, "#batch #heads #queries keys"],
  filled: Int[Array, ""] | int,
  *,
  interpret: bool = False,
  block: int | None = None,
  parts: int | None = None,
) -> Float[Array, "batch queries heads head_dim"]:
  """The same in a kernel, where the program is for a GPU. Reverse mode, any order.

  Args:
    query: as in `attend_to_cache`, and so the others.
    key: k.
    value: v.
    bias: b.
    filled: how many keys have been written.
    interpret: run the kernel without its hardware.
    block: keys of a turn of the kernel's loop; none for what suits the cache.
    parts: into how many parts keys are cut; none for as many as keep a GPU busy.
  """
  gpu = importlib.import_module("compmod_jax.kernels.attention.cached_gpu")
  cut = {"block": block, "parts": parts}
  kernel: Callable[..., jax.Array] = functools.partial(gpu.attend, interpret=interpret, **cut)
  if interpret:
    run = kernel
  else:
    run = functools.partial(lax.platform_dependent, default=attend_to_cache, cuda=kernel)
  filled = jnp.asarray(filled, jnp.int32)
  return standing_for(run, attend_to_cache)(query, key, value, bias, filled)
