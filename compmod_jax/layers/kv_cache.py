"""Attention over cached keys and values: one newest position, the beams of an example as queries.

Keys are kept transposed, [..., head_dim, keys], values as [..., keys, head_dim]: then both products
sum over an axis that is not the last one. XLA:CPU turns such sums into vector loops over all rows,
while it hands a batch of small matrix products to its library one by one. At 32 examples, 5 beams,
4 heads of 128 and 160 keys a step takes 1.3 ms this way and 7 ms by
`jax.nn.dot_product_attention` (2 cores); on TPUs the products stay products, and on NVIDIA GPUs
`kernels.attention.cached` reads what is filled. With a single beam the sum needs an axis less to
become a vector loop, and few products are best left to the library: 64 tokens of 6 layers, 6 heads
of 64 and 192 keys take 1.7 s so for 16 examples and 0.41 s for one (one core; as the other sum,
several times as long for 16).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core import sharding
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.kernels.attention import kernel_for
from compmod_jax.kernels.attention.cached import attend_to_cache_on_gpu
from compmod_jax.kernels.attention.definition import FAR

KVCache = dict[str, Any]

_PARTS = 4
_MANY = 32  # products of one row that are too many for the library to make one by one


def ancestor_mask(
  ancestry: Int[Array, "batch beams length"], position: Array, window: int = 0
) -> Bool[Array, "batch 1 beams keys"]:
  """Which cached keys each beam may see: those of its own past, up to the newest position.

  Args:
    ancestry: number of the beam that wrote each position of each hypothesis.
    position: index of the newest position.
    window: how many of the newest positions are seen; 0: all.
  """
  batch, beams, length = ancestry.shape
  numbers = jnp.arange(length)
  past = numbers <= position
  past = (past & (numbers > position - window) if window else past)[None, None, :, None]
  mine = ancestry[..., None] == jnp.arange(beams)[None, None, None, :]
  return (mine & past).reshape(batch, 1, beams, length * beams)


def empty_cache(
  batch: int, keys: int, heads: int, head_dim: int, dtype: DTypeLike = jnp.float32
) -> KVCache:
  """Room for `keys` positions of every example; see `as_cache` for the shapes."""
  nothing = jnp.zeros((batch, keys, heads, head_dim), dtype)
  return as_cache(nothing, nothing)


def as_cache(
  key: Float[Array, "batch keys heads head_dim"], value: Float[Array, "batch keys heads head_dim"]
) -> KVCache:
  """`key` [batch, 1, heads, head_dim, keys] and `value` [batch, 1, heads, keys, head_dim].

  The axis of length 1 says that the beams of an example share them.
  """
  return {
    "key": jnp.transpose(key, (0, 2, 3, 1))[:, None],
    "value": jnp.transpose(value, (0, 2, 1, 3))[:, None],
  }


def from_cache(
  cache: KVCache,
) -> tuple[Float[Array, "batch keys heads head_dim"], Float[Array, "batch keys heads head_dim"]]:
  """Keys and values as `as_cache` was given them, those of the room that is not filled, too."""
  return (
    jnp.transpose(cache["key"][:, 0], (0, 3, 1, 2)),
    jnp.transpose(cache["value"][:, 0], (0, 2, 1, 3)),
  )


def add_to_cache(cache: KVCache, new: KVCache, start: Array) -> KVCache:
  """The cache with positions `new` written from position `start` on."""
  zero = jnp.zeros((), start.dtype)
  return {
    "key": lax.dynamic_update_slice(cache["key"], new["key"], (zero, zero, zero, zero, start)),
    "value": lax.dynamic_update_slice(
      cache["value"], new["value"], (zero, zero, zero, start, zero)
    ),
  }


def attend_cached(
  query: Float[Array, "batch beams heads head_dim"],
  cache: KVCache,
  mask: Bool[Array, "batch 1 #beams keys"] | None,
  *,
  bias: Float[Array, "#batch heads #beams keys"] | None = None,
  filled: Array | None = None,
  intermediates: Intermediates = OFF,
) -> Float[Array, "batch beams heads head_dim"]:
  r"""Attention, :math:`\mathrm{softmax}(q K^T / \sqrt{D_h}) V`, each head by itself.

  Args:
    query: one row a beam.
    cache: keys and values; see `as_cache`.
    mask: true where a beam may look; None: everywhere.
    bias: added to the logits.
    filled: how many keys have been written, where not all have: what lies behind them is not read
      (a quarter of the room at a time, but for the kernel on GPUs).
    intermediates: activations to read or change; `attention` [batch, heads, beams, keys] are the
      probabilities.
  """
  key, value = cache["key"][:, 0], cache["value"][:, 0]
  if mask is None:
    mask = jnp.ones((len(key), 1, 1, key.shape[-1]), bool)
  in_kernel = kernel_for(query, query.shape[-1], query.dtype) == "gpu"
  if in_kernel and not intermediates.wants("attention"):
    return _in_kernel(query, key, value, mask, bias, filled)
  # To read only what is filled would copy it, which pays for several beams alone.
  if filled is None or intermediates.wants("attention") or query.shape[1] == 1:
    return _attend(query, key, value, mask, bias, intermediates)
  return _attend_first(query, key, value, mask, bias, filled)


def _in_kernel(
  query: Array, key: Array, value: Array, mask: Array, bias: Array | None, filled: Array | None
) -> Array:
  """Attention in a kernel, on every device for the examples and heads that it has."""
  bias = jnp.where(mask, 0.0 if bias is None else bias, FAR)
  filled = jnp.int32(key.shape[-1]) if filled is None else filled

  def read(filled: Array, bias: Array, key: Array, value: Array, query: Array) -> Array:
    return attend_to_cache_on_gpu(query, key, value, bias, filled)

  of_bias = "batch" if len(bias) == len(query) else None, "heads" if bias.shape[1] > 1 else None
  heads = "batch", "heads", None, None
  names = [(), (*of_bias, None, None), heads, heads, ("batch", None, "heads", None)]
  return sharding.on_parts(read, [filled, bias, key, value, query], names)


@jax.jit
def _attend_first(
  query: Array, key: Array, value: Array, mask: Array, bias: Array | None, filled: Array
) -> Array:
  """Attention to the first `filled` keys, rounded up to a quarter of them all."""

  def to_first(keys: int) -> Callable[..., Array]:
    def attend(
      query: Array, key: Array, value: Array, mask: Array, bias: Array | None = None
    ) -> Array:
      first = None if bias is None else bias[..., :keys]
      return _attend(query, key[..., :keys], value[..., :keys, :], mask[..., :keys], first, OFF)

    return attend

  sizes = sorted({-(-mask.shape[-1] * part // _PARTS) for part in range(1, _PARTS + 1)})
  index = sum(((filled > size).astype(jnp.int32) for size in sizes[:-1]), jnp.int32(0))
  given = (query, key, value, mask, *(() if bias is None else (bias,)))
  return lax.switch(index, [to_first(size) for size in sizes], *given)


def _attend(
  query: Array,
  key: Array,
  value: Array,
  mask: Array,
  bias: Array | None,
  intermediates: Intermediates,
) -> Array:
  scores = _product(jnp.swapaxes(query, 1, 2), key) / jnp.sqrt(jnp.float32(query.shape[-1]))
  scores = scores if bias is None else scores + bias
  scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
  probabilities = intermediates("attention", jax.nn.softmax(scores, axis=-1)).astype(value.dtype)
  return jnp.swapaxes(_product(probabilities, value), 1, 2).astype(query.dtype)


@jax.jit
def _product(
  left: Float[Array, "batch heads rows inner"], right: Float[Array, "batch heads inner columns"]
) -> Float[Array, "batch heads rows columns"]:
  """Matrix products in float32 of the few rows of `left`, in the way that suits the device."""
  batch, heads, rows, _ = left.shape
  if rows > 1:
    way = as_sum
  else:
    way = as_row_sum if batch * heads >= _MANY else as_product
  return lax.platform_dependent(left, right, cpu=way, default=as_product)


def as_sum(left: Array, right: Array) -> Array:
  """The products as sums over an axis that is not the last one."""
  left, right = left.astype(jnp.float32), right.astype(jnp.float32)
  return jnp.sum(left[..., None] * right[:, :, None], axis=3)


def as_row_sum(left: Array, right: Array) -> Array:
  """The same where `left` has one row."""
  left, right = left.astype(jnp.float32), right.astype(jnp.float32)
  return jnp.sum(left[:, :, 0, :, None] * right, axis=2)[:, :, None]


def as_product(left: Array, right: Array) -> Array:
  """The same as matrix products."""
  return jnp.einsum("bhri,bhic->bhrc", left, right, preferred_element_type=jnp.float32)
