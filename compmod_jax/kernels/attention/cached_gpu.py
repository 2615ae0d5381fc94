"""Attention of the newest positions to a cache, for NVIDIA GPUs.

One program has all queries of a head and a part of the written keys: a few queries alone would be
too few programs. Parts leave sums that are joined by their largest logits.

Source: Dao et al. 2023 (Flash-Decoding).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from compmod_jax.kernels.routing.blocks import dot
from compmod_jax.kernels.routing.triton import call, load, padded, store, store_line

_PROGRAMS = 1024  # that keep an H100's 132 processors busy
_BYTES = 2**14  # of a block of keys


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: jax.Array,
  filled: jax.Array,
  *,
  interpret: bool = False,
  block: int | None = None,
  parts: int | None = None,
) -> jax.Array:
  """See `cached.attend_to_cache`.

  Args:
    query: [batch, queries, heads, head_dim].
    key: [batch, heads, head_dim, keys].
    value: [batch, heads, keys, head_dim].
    bias: [1 or batch, 1 or heads, 1 or queries, keys], float32.
    filled: how many keys have been written.
    interpret: run without the hardware.
    block: keys of a turn, a power of two and at least 16; none for 16 KB of them.
    parts: into how many parts the keys of a head are cut; none for as many as keep a GPU busy.
  """
  batch, queries, heads, width = query.shape
  keys = key.shape[-1]
  block = block or min(padded(keys), max(32, _BYTES // (padded(width) * key.dtype.itemsize)))
  parts = parts or min(pl.cdiv(_PROGRAMS, batch * heads), pl.cdiv(keys, 2 * block))
  lines = batch * heads
  rows = jnp.swapaxes(query, 1, 2).reshape(lines * queries, width)
  matrices = (rows, key.reshape(lines * width, keys), value.reshape(lines * keys, width))
  flat = bias.reshape(-1, keys)
  kernel = functools.partial(
    _attend, queries=queries, width=width, block=block, outer=bias.shape[:3], heads=heads
  )
  numbers = jax.ShapeDtypeStruct((parts * lines, queries), jnp.float32)
  made = jax.ShapeDtypeStruct((parts * lines * queries, width), jnp.float32)
  total, largest, mass = call(
    kernel,
    (parts, heads, batch),
    [*matrices, flat, filled.reshape(1)],
    [made, numbers, numbers],
    interpret,
    flops=4 * lines * queries * keys * width,
  )
  total = total.reshape(parts, batch, heads, queries, width)
  largest, mass = (one.reshape(parts, batch, heads, queries) for one in (largest, mass))
  shares = jnp.exp2(largest - jnp.max(largest, axis=0, keepdims=True))
  found = jnp.sum(total * shares[..., None], axis=0) / jnp.sum(mass * shares, axis=0)[..., None]
  return jnp.swapaxes(found, 1, 2).astype(value.dtype)


def _attend(
  query: jax.Ref,
  key: jax.Ref,
  value: jax.Ref,
  bias: jax.Ref,
  filled: jax.Ref,
  total: jax.Ref,
  largest: jax.Ref,
  mass: jax.Ref,
  *,
  queries: int,
  width: int,
  block: int,
  outer: tuple[int, ...],
  heads: int,
) -> None:
  """Of one part: the sum of values, each times 2 to its logit less the largest; it; the powers."""
  part, head, number = (pl.program_id(axis) for axis in range(3))
  line, keys, written = number * heads + head, key.shape[1], filled[0]
  turns = pl.cdiv(pl.cdiv(written, block), pl.num_programs(0))
  first = part * turns
  last = jnp.minimum(first + turns, pl.cdiv(written, block))
  shape, columns = (padded(queries), padded(width)), None if padded(width) == width else width
  own = load(query, (line * queries, 0), shape, rows=queries, columns=columns)
  # Of a bias that examples, heads or queries share, there is one.
  base = (number if outer[0] > 1 else 0) * outer[1] + (head if outer[1] > 1 else 0)
  scale = math.log2(math.e) / math.sqrt(width)

  def turn(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    so_far, highest, powers = carry
    start = i * block
    there = load(key, (line * width, start), (shape[1], block), rows=columns)
    logits = dot(own, there) * scale
    height = shape[0] if outer[2] > 1 else 1
    more = load(bias, (base * outer[2], start), (height, block), rows=min(outer[2], queries))
    logits += more * math.log2(math.e)
    inside = start + jnp.arange(block) < written
    logits = jnp.where(inside[None], logits, -jnp.inf)
    now = jnp.maximum(highest, jnp.max(logits, axis=1))
    weights, before = jnp.exp2(logits - now[:, None]), jnp.exp2(highest - now)
    read = load(
      value, (line * keys + start, 0), (block, shape[1]), rows=written - start, columns=columns
    )
    so_far = so_far * before[:, None] + dot(weights.astype(read.dtype), read)
    return so_far, now, powers * before + jnp.sum(weights, axis=1)

  # The least finite number, so that no difference of two infinities is formed.
  low = jnp.full(shape[:1], jnp.finfo(jnp.float32).min)
  zeros = jnp.zeros(shape, jnp.float32), low, jnp.zeros(shape[:1], jnp.float32)
  made, highest, powers = lax.fori_loop(first, last, turn, zeros)
  place = part * pl.num_programs(1) * pl.num_programs(2) + line
  store(total, (place * queries, 0), made, rows=queries, columns=width)
  store_line(largest, place, 0, highest)
  store_line(mass, place, 0, powers)
