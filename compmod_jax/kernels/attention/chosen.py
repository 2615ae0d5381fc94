r"""Attention in which a head does no work for queries that did not choose it.

The queries of every head are brought into an order in which those whose weight is not 0 come first.
Behind them are blocks of queries that nothing has to be computed for, forward and in the reverse
pass: what that saves grows with the length of texts and with the share of heads that lose, and the
order costs a copy of queries and one of heads. Where every token chooses k of H heads, k / H of
the products of queries, keys and values are left; of causal attention on CPUs some more.

Kernels take a head of an example as an example of its own, in which queries that did not choose it
have a number that no key has (`Visibility`), and in causal attention positions of their own. On
CPUs, `blocks` is given the number of queries that count, and their positions.
"""

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.kernels.attention.blocks import Chosen, attention_in_blocks
from compmod_jax.kernels.attention.dispatch import Tiles, flash_attention
from compmod_jax.kernels.attention.visibility import HIDDEN, Visibility
from compmod_jax.kernels.routing.dispatch import Implementation

_READER, _IDLE = 1, 2  # numbers of queries; keys have the first


def chosen_first(
  weights: Float[Array, "batch queries heads"],
) -> tuple[Int[Array, "batch queries heads"], Int[Array, "batch heads"]]:
  """Queries of each head in an order, those with a weight first; and how many have one."""
  chosen = weights != 0
  order = jnp.argsort(~chosen, axis=1, stable=True)
  return order, jnp.sum(chosen, axis=1, dtype=jnp.int32)


def attention_of_chosen(
  query: Float[Array, "batch queries heads head_dim"],
  key: Float[Array, "batch keys heads head_dim"],
  value: Float[Array, "batch keys heads head_dim"],
  weights: Float[Array, "batch queries heads"],
  read: Bool[Array, "batch keys"] | None = None,
  *,
  causal: bool = False,
  in_blocks: bool = False,
  implementation: Implementation | None = None,
  interpret: Hashable = False,
  tiles: Tiles = Tiles(),
) -> Float[Array, "batch queries heads head_dim"]:
  r"""Attention in every head times the head's weight, without work for queries whose weight is 0.

  .. math::
     s_{ij} = C_{ij} \sum_k \mathrm{softmax}_{k \in V_i}(q_{ij} \cdot k_{ik} / \sqrt{D})\, v_{ik}

  The gradient with respect to a weight of 0 is given as 0, as by `flash_attention`.

  Args:
    query: Q.
    key: K.
    value: V.
    weights: C, float32.
    read: the keys that queries of an example may read; none for all.
    causal: of these, query i reads key i and those before; by which V_i differ.
    in_blocks: without a kernel, as `attention_in_blocks`, for CPUs.
    implementation: see `flash_attention`, and so the others.
    interpret: run a named kernel without its hardware.
    tiles: sizes of blocks.

  Raises:
    UserError: a named implementation cannot do it.
  """
  order, counts = chosen_first(weights)
  back = jnp.argsort(order, axis=1)
  query = _in_order(query, order, back)
  if in_blocks:
    allowed = None if read is None else read[:, None, None]
    positions = order.swapaxes(1, 2) if causal else None
    chosen = Chosen(counts, positions)
    heads = attention_in_blocks(query, key, value, allowed=allowed, chosen=chosen)
    weights = jnp.where(weights != 0, weights, 0.0)
    return _in_order(heads, back, order) * weights[..., None].astype(heads.dtype)
  apart = functools.partial(_apart, heads=query.shape[2])
  heads = flash_attention(
    *map(apart, (query, key, value)),
    weights=apart(_in_order(weights, order, back)),
    visibility=_seen(order, counts, key.shape[1], read, causal=causal),
    implementation=implementation,
    interpret=interpret,
    tiles=tiles,
  )
  heads = heads.reshape(len(query), query.shape[2], *heads.shape[1::2]).swapaxes(1, 2)
  return _in_order(heads, back, order)


def _seen(
  order: Int[Array, "batch queries heads"],
  counts: Int[Array, "batch heads"],
  keys: int,
  read: Bool[Array, "batch keys"] | None,
  *,
  causal: bool,
) -> Visibility:
  """Of every head of every example: the first `counts` queries read, the others read nothing."""
  batch, queries, heads = order.shape
  idle = jnp.arange(queries)[None] >= counts.reshape(-1, 1)
  read = jnp.broadcast_to(True if read is None else read, (batch, keys))
  return Visibility(
    causal,
    query_ids=jnp.where(idle, _IDLE, _READER),
    key_ids=jnp.repeat(jnp.where(read, _READER, HIDDEN), heads, axis=0),
    query_positions=order.swapaxes(1, 2).reshape(-1, queries) if causal else None,
  )


def _apart(rows: Float[Array, "batch time heads ..."], heads: int) -> jax.Array:
  """Every head as an example of one head, [batch * heads, time, 1, ...]."""
  return rows.swapaxes(1, 2).reshape(len(rows) * heads, rows.shape[1], 1, *rows.shape[3:])


@jax.custom_vjp
def _in_order(
  rows: Float[Array, "batch time heads ..."],
  order: Int[Array, "batch time heads"],
  back: Int[Array, "batch time heads"],
) -> Float[Array, "batch time heads ..."]:
  """Rows of each head in an order; `back` is the order that undoes it, for the gradient.

  Reverse mode, any order.
  """
  del back
  return jnp.take_along_axis(rows, order.reshape(*order.shape, *[1] * (rows.ndim - 3)), axis=1)


_in_order.defvjp(
  lambda rows, order, back: (_in_order(rows, order, back), (order, back)),
  lambda kept, slope: (_in_order(slope, kept[1], kept[0]), None, None),
)
