"""Multi-head attention whose heads may compete for every query position."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from compmod_jax.core import sharding
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import affine, group_product, over_rows
from compmod_jax.core.sharding import logical, platform_of
from compmod_jax.kernels.attention import (
  ProbabilityDropout,
  Projection,
  Rotation,
  Visibility,
  attention_of_chosen,
  flash_attention,
  kernel_for,
  packed_attention,
  paired_attention,
  routed_attention,
)
from compmod_jax.kernels.attention.blocks import attention_in_blocks
from compmod_jax.kernels.attention.blocks import pays as pays_in_blocks
from compmod_jax.kernels.attention.distances import Bias, DistanceBias, dense
from compmod_jax.kernels.attention.visibility import SHARED
from compmod_jax.kernels.routing import Choice, Readout
from compmod_jax.layers.attention_forms import FORMS, AttentionForm, Keys
from compmod_jax.layers.basic import Dropout
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.layers.kv_cache import (
  KVCache,
  add_to_cache,
  as_cache,
  attend_cached,
  empty_cache,
  from_cache,
)
from compmod_jax.layers.positions import (
  IN_ATTENTION,
  ModelPositions,
  RelativePositions,
  alibi_bias,
  distance_penalties,
  rotate,
)
from compmod_jax.layers.switch_head import SwitchHeadConfig, SwitchOutput, SwitchValues
from compmod_jax.mechanisms.competition.router import CompetitionConfig, Router, scale_heads
from compmod_jax.mechanisms.head_gate import HeadGate, gate_heads

# Projections into heads start as in fairseq: Xavier-uniform with gain 1 / sqrt(2).
_MANY = 4096  # tokens: with fewer, matrices are what products read
_INTO_HEADS = nn.initializers.variance_scaling(
  0.5, "fan_avg", "uniform", in_axis=0, out_axis=(1, 3), batch_axis=(2,)
)


def _small_queries(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32):
  """The same with queries 1 / sqrt(head_dim) as large, for logits that are not divided by that.

  Source: Raffel et al. 2020, section 3.1.2 and their code.
  """
  return _INTO_HEADS(key, shape, dtype).at[:, :, 0].multiply(shape[-1] ** -0.5)


_OUT_OF_HEADS = nn.initializers.variance_scaling(
  1.0, "fan_avg", "uniform", in_axis=(0, 1), out_axis=2
)


_WHOLE: Any = ((None, None), (None,))
"""Names of the dimensions of W_O and its bias, which every device has whole."""
_OF_DISTANCES = DistanceBias(("heads", None))  # pyright: ignore[reportArgumentType]  # names
"""Those of a bias by distance."""


def _within_slice(scale: float, width: int) -> Callable[..., jax.Array]:
  """The same initialisations for kernels from slices of this width to others."""
  bound = (3 * scale / width) ** 0.5

  def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

  return init


def attend(
  query: Float[Array, "batch time heads head_dim"],
  key: Float[Array, "batch keys heads head_dim"],
  value: Float[Array, "batch keys heads head_dim"],
  mask: AttentionMask = AttentionMask(),
  *,
  bias: Bias | None = None,
  weights: Float[Array, "batch time heads"] | None = None,
  dropout: Dropout | None = None,
  skip: bool = False,
  intermediates: Intermediates = OFF,
) -> Float[Array, "batch time heads head_dim"]:
  r"""Attention, :math:`C_i \,\mathrm{softmax}(Q K^T / \sqrt{D_h}) V`, in each head.

  The intermediate `attention` [batch, heads, time, keys] holds the probabilities; when it is asked
  for, or when some are dropped without a kernel or blocks, they are formed explicitly, else the
  fused operation runs.

  Args:
    query: one row a query position.
    key: one row a key position.
    value: one row a key position.
    mask: which keys a query may read.
    bias: added to the logits.
    weights: C, what each head is multiplied with, in the same pass where a kernel runs; none for 1.
    dropout: acts on the probabilities; none for no dropout.
    skip: leave out queries of heads whose weight is 0, where that can be done and pays.
    intermediates: activations to read or change.
  """
  plain = bias is None and dropout is None and not intermediates.wants("attention")
  if skip and plain and weights is not None:
    heads = _of_chosen(query, key, value, mask, weights)
    if heads is not None:
      return heads
  kernel = kernel_for(query, query.shape[-1], query.dtype)
  if kernel and not intermediates.wants("attention"):
    visibility = mask.visibility()
    if visibility is not None and (bias is None or isinstance(bias, DistanceBias)):
      dropped = _dropped(dropout, len(query), query.shape[2])
      return _in_kernel(query, (key, value), weights, bias, visibility, dropped)
  heads = _attend(query, key, value, mask, bias, dropout, intermediates)
  return heads if weights is None else gate_heads(heads, weights)


def _of_chosen(
  query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask, weights: jax.Array
) -> jax.Array | None:
  """Attention without work for heads and queries whose weight is 0, on every device.

  None where texts are packed, beside a prefix, in a sliding window, where times are split over
  devices, and on TPUs, for which the copies in between are too large.
  """
  seen, whole = mask.visibility(), sharding.parts_of(query, "time") == 1
  if seen is None or not _in_any_order(seen) or not whole:
    return None
  kernel = kernel_for(query, query.shape[-1], query.dtype)
  sizes = len(query), query.shape[2], query.shape[1], key.shape[1]
  in_blocks = kernel is None and platform_of(query) == "cpu" and pays_in_blocks(*sizes)
  if kernel != "gpu" and not in_blocks:
    return None
  read = None if seen.key_ids is None else seen.key_ids == SHARED
  names = "batch", None, "heads", None
  return sharding.on_parts(
    lambda read, weights, key, value, query: attention_of_chosen(
      query, key, value, weights, read, causal=seen.causal, in_blocks=in_blocks
    ),
    [read, weights, key, value, query],
    [
      None if read is None else ("batch" if len(read) == len(query) else None, None),
      names[:3],
      names,
      names,
      names,
    ],
  )


def _in_any_order(visibility: Visibility) -> bool:
  """Whether all keys that an example may read are read, or those up to a query's position."""
  return not visibility.prefix and visibility.window is None and visibility.query_ids is None


def _attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: AttentionMask,
  bias: Bias | None,
  dropout: Dropout | None,
  intermediates: Intermediates,
) -> jax.Array:
  """Attention without a kernel."""
  explicit = intermediates.wants("attention")
  sizes = len(query), query.shape[2], query.shape[1], key.shape[1]
  if not explicit and platform_of(query) == "cpu" and pays_in_blocks(*sizes):
    return _in_blocks(query, key, value, mask, bias, _dropped(dropout, len(query), query.shape[2]))
  bias = dense(bias)
  explicit = explicit or dropout is not None
  if not explicit and mask.only_causal:
    return jax.nn.dot_product_attention(query, key, value, bias, is_causal=True)
  allowed = mask.dense(query.shape[1], key.shape[1])
  if not explicit:
    return jax.nn.dot_product_attention(query, key, value, bias, allowed)
  scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
  scores = scores / jnp.sqrt(jnp.float32(query.shape[-1]))
  scores = scores if bias is None else scores + bias
  if allowed is not None:
    scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
  probabilities = intermediates("attention", jax.nn.softmax(scores, axis=-1)).astype(value.dtype)
  if dropout is not None:
    probabilities = dropout(probabilities, deterministic=False)
  return jnp.einsum("bhts,bshd->bthd", probabilities, value)


def _in_kernel(
  query: jax.Array,
  keys_and_values: tuple[jax.Array, ...],
  weights: jax.Array | None,
  by_distance: DistanceBias | None,
  visibility: Visibility,
  dropout: ProbabilityDropout | None,
  output: Projection | None = None,
) -> jax.Array:
  """Attention by a kernel, on every device for the examples, heads and queries that it has.

  Keys and values are two arrays, or one as of `paired_attention`. Of two, with all heads on one
  device, what the output projection makes of them.
  Where times are split over devices, each is given the keys and values of all.
  """
  time = query.shape[1]

  def read(
    seen: Visibility,
    dropout: ProbabilityDropout | None,
    by_distance: DistanceBias | None,
    output: Projection | None,
    weights: jax.Array | None,
    keys_and_values: tuple[jax.Array, ...],
    query: jax.Array,
  ) -> jax.Array:
    if query.shape[1] < time:
      first = _first_query(query)
      seen = dataclasses.replace(seen, first_query=first)
      dropout = _dropped_of_part(dropout, query, time)
      if by_distance is not None:
        by_distance = by_distance.of_queries(first[0], query.shape[1])
    masks = {"distance_bias": by_distance, "visibility": seen, "dropout": dropout}
    if len(keys_and_values) == 1:
      return paired_attention(query, keys_and_values[0], weights=weights, **masks)
    key, value = keys_and_values
    return flash_attention(query, key, value, weights=weights, output=output, **masks)

  names: Any = _names_of(visibility, len(query))
  if names.query_ids is not None:
    names = dataclasses.replace(names, query_ids=(names.query_ids[0], "time"))
  mine = "batch", "time", "heads", None
  others = tuple(("batch", None, "heads", *[None] * (one.ndim - 3)) for one in keys_and_values)
  return sharding.on_parts(
    read,
    [visibility, dropout, by_distance, output, weights, keys_and_values, query],
    [
      names,
      _names_of_dropout(dropout),
      None if by_distance is None else _OF_DISTANCES,
      None if output is None else _WHOLE,
      None if weights is None else mine[:3],
      others,
      mine,
    ],
    result=mine if output is None else ("batch", "time", None),
  )


def _in_blocks(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: AttentionMask,
  bias: Bias | None,
  dropout: ProbabilityDropout | None,
) -> jax.Array:
  """Attention in blocks, on every device for the examples, heads and queries that it has."""
  batch, time, heads, _ = query.shape
  allowed, names_of_allowed, names_of_bias = mask.dense(time, key.shape[1]), None, None
  causal = mask.causal and not mask.prefix and time == key.shape[1]
  if allowed is not None:
    whole = zip(("batch", "heads", "time"), allowed.shape, (batch, heads, time), strict=False)
    names_of_allowed = (*(name if size == all_ else None for name, size, all_ in whole), None)
  if sharding.parts_of(query, "time") > 1:
    bias = dense(bias)  # a device has some of the queries
  if isinstance(bias, DistanceBias):
    names_of_bias = _OF_DISTANCES
  elif bias is not None:
    bias = jnp.broadcast_to(bias, (len(bias), heads, time, key.shape[1]))
    names_of_bias = ("batch" if len(bias) == batch else None, "heads", "time", None)

  def read(
    allowed: jax.Array | None,
    bias: Bias | None,
    dropout: ProbabilityDropout | None,
    key: jax.Array,
    value: jax.Array,
    query: jax.Array,
  ) -> jax.Array:
    ordered = causal and query.shape[1] == time
    dropout = _dropped_of_part(dropout, query, time)
    return attention_in_blocks(query, key, value, bias, allowed, dropout, causal=ordered)

  others, mine = ("batch", None, "heads", None), ("batch", "time", "heads", None)
  return sharding.on_parts(
    read,
    [allowed, bias, dropout, key, value, query],
    [names_of_allowed, names_of_bias, _names_of_dropout(dropout), others, others, mine],
  )


def _first_query(query: jax.Array) -> Int[Array, " 1"]:
  """Inside `sharding.on_parts`, the number of a device's first query."""
  return (sharding.part_number("time") * query.shape[1]).astype(jnp.int32)[None]


def _dropped_of_part(
  dropout: ProbabilityDropout | None, query: jax.Array, time: int
) -> ProbabilityDropout | None:
  """The same of the queries that a device has, of `time` in all."""
  if dropout is None or query.shape[1] == time:
    return dropout
  return dataclasses.replace(dropout, first_query=_first_query(query), all_queries=time)


def _dropped(dropout: Dropout | None, batch: int, heads: int) -> ProbabilityDropout | None:
  """What is dropped of the probabilities of all heads."""
  if dropout is None:
    return None
  return ProbabilityDropout.of(dropout.key(), dropout.rate, batch, heads)


def _names_of_dropout(dropout: ProbabilityDropout | None) -> ProbabilityDropout | None:
  """The logical names of its arrays' dimensions."""
  if dropout is None:
    return None
  names: Any = {"words": (None,), "examples": ("batch",), "heads": ("heads",)}
  return dataclasses.replace(dropout, **names)


def _names_of_rotation(rotation: Rotation, batch: int) -> Rotation:
  """The same."""
  names: Any = ("batch" if len(rotation.cos) == batch else None, None, None)
  return Rotation(names, names)


def _names_of(visibility: Visibility, batch: int) -> Visibility:
  """The logical names of its arrays' dimensions."""
  ids = dataclasses.replace(visibility, penalties=None)
  names = jax.tree.map(lambda ids: ("batch" if len(ids) == batch else None, None), ids)
  if visibility.penalties is None:
    return names
  return dataclasses.replace(names, penalties=("heads",))


def _sum(bias: Bias | None, more: Bias | None) -> Bias | None:
  """What is added to the logits for two reasons, each of which may be none."""
  if bias is None or more is None:
    return more if bias is None else bias
  return dense(bias) + dense(more)


def _one_product(kernel: jax.Array) -> jax.Array:
  """A matrix whose gradient is formed as one, before it takes the shape of its parameter.

  XLA for TPUs would form it in that shape, from a transposed copy of activations or their gradient.
  """
  return lax.optimization_barrier(kernel)


class IntoHeads(nn.Module):
  """One matrix product that makes several projections, each split into heads.

  Attributes:
    projections: how many (3 for query, key and value).
    heads: number of heads.
    head_dim: width of a head.
    dtype: compute type.
    mechanisms: into how many slices inputs and heads are cut; the heads of one read its slice.
    biases: whether there are some.
    kernel_init: of the matrix, [embed, heads, projections, head_dim].
    query_factor: what the first projection is multiplied by where the parts are one matrix, in
      which nobody can do it later.
  """

  projections: int
  heads: int
  head_dim: int
  dtype: DTypeLike = jnp.float32
  mechanisms: int = 1
  biases: bool = True
  kernel_init: nn.initializers.Initializer = _INTO_HEADS
  query_factor: float = 1.0

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    beside: tuple[Float[Array, "embed other"], Float[Array, " other"]] | None = None,
    *,
    parts: int | None = None,
    together: bool = False,
  ) -> tuple[Float[Array, "..."], ...]:
    """The projections, in order; last what another kernel and bias, of the same inputs, make.

    `together` they are one array [batch, time, heads, projections, head_dim].
    In `parts` they are one matrix, to which a bias [columns] is still to be added: that and the
    bias. Each part holds as many heads as the others: the first projection of its heads, the
    second, and so on.
    """
    # Heads come first, so that they can be split over devices after the axes are merged.
    shape = (self.heads, self.projections, self.head_dim)
    names = ("heads", "projections", "head_dim")
    embed, groups = inputs.shape[-1] // self.mechanisms, self.mechanisms
    init = self.kernel_init if groups == 1 else _within_slice(0.5, embed)
    kernel = self.param("kernel", logical(init, "embed", *names), (embed, *shape))
    bias = _bias(self, names, shape)
    many = inputs.shape[0] * inputs.shape[1] >= _MANY
    apart = parts is None and not together
    if parts is not None and self.query_factor != 1:
      kernel, bias = (one.at[..., 0, :].multiply(self.query_factor) for one in (kernel, bias))
    if apart and groups == 1 and many and platform_of(inputs) == "tpu":
      return self._each(inputs, kernel, bias, beside)
    if parts is not None and parts < self.heads:
      kernel, bias = (self._by_kind(one, parts) for one in (kernel, bias))
    kernel = kernel.astype(self.dtype).reshape(embed, -1)
    if parts is not None and parts < self.heads:
      kernel = _one_product(kernel)
    bias, width = bias.reshape(-1), kernel.shape[1]
    if beside is not None:
      kernel = jnp.concatenate([kernel, beside[0]], axis=1)
      bias = jnp.concatenate([bias, beside[1]])
    if parts is not None:
      return over_rows(lambda rows: rows.astype(self.dtype) @ kernel, inputs), bias

    def project(rows: jax.Array) -> jax.Array:
      if groups == 1:
        return affine(rows.astype(self.dtype), kernel, bias)
      slices = kernel.reshape(embed, groups, -1).swapaxes(0, 1)
      return group_product(rows.astype(self.dtype), slices) + bias.astype(self.dtype)[None]

    outputs = over_rows(project, inputs)
    # The gradient of a split is one concatenation; of slices it is a sum of padded arrays.
    own, *rest = jnp.split(outputs, [width], axis=-1) if beside is not None else (outputs,)
    made = own.reshape(*inputs.shape[:2], *shape)
    if together:
      return made, *rest
    return (*(jnp.squeeze(one, 3) for one in jnp.split(made, self.projections, axis=3)), *rest)

  def _each(
    self,
    inputs: Float[Array, "batch time embed"],
    kernel: Float[Array, "embed heads projections head_dim"],
    bias: Float[Array, "heads projections head_dim"],
    beside: tuple[jax.Array, jax.Array] | None,
  ) -> tuple[jax.Array, ...]:
    """The same by a product for each projection, where it costs less than to take one apart.

    That copies, on a TPU several times, as a tile is wider than a head; each product reads the
    inputs once more.
    """

    def product(kernel: jax.Array, bias: jax.Array) -> jax.Array:
      kernel, bias = (one.astype(self.dtype) for one in (kernel, bias))
      return over_rows(lambda rows: rows.astype(self.dtype) @ kernel + bias[None], inputs)

    kernels = jnp.moveaxis(kernel, 2, 0).reshape(self.projections, len(kernel), -1)
    biases = jnp.moveaxis(bias, 1, 0).reshape(self.projections, -1)
    heads = (*inputs.shape[:2], self.heads, self.head_dim)
    made = [
      product(_one_product(one), bias).reshape(heads)
      for one, bias in zip(kernels, biases, strict=True)
    ]
    return (*made, product(*beside)) if beside is not None else tuple(made)

  def _by_kind(self, array: jax.Array, parts: int) -> jax.Array:
    """Columns [..., heads, projections, head_dim] in the order of parts."""
    split = array.reshape(*array.shape[:-3], parts, -1, *array.shape[-2:])
    return split.swapaxes(-3, -2)


def _bias(
  module: "IntoHeads | OutOfHeads", names: tuple[str, ...], shape: tuple[int, ...]
) -> jax.Array:
  """The bias of a projection; zeros where it has none."""
  if not module.biases:
    return jnp.zeros(shape)
  return module.param("bias", logical(nn.initializers.zeros, *names), shape)


class OutOfHeads(nn.Module):
  """The output projection: concatenates heads and multiplies by W_O.

  Attributes:
    dim: model width.
    dtype: compute type.
    mechanisms: into how many slices heads and outputs are cut; the heads of one make its slice.
    biases: whether there are some.
  """

  dim: int
  dtype: DTypeLike = jnp.float32
  mechanisms: int = 1
  biases: bool = True

  @nn.compact
  def __call__(
    self,
    heads: Float[Array, "batch time heads head_dim"] | jax.ShapeDtypeStruct,
    *,
    within: Callable[[Projection], jax.Array] | None = None,
  ) -> Float[Array, "batch time embed"]:
    """What the attention module adds to the residual stream.

    Args:
      heads: outputs of all heads.
      within: from W_O and its bias to the result, where heads are nothing but their shape.
    """
    groups = self.mechanisms
    shape = (*heads.shape[2:], self.dim // groups)
    names = ("heads", "head_dim", "embed")
    init = _OUT_OF_HEADS if groups == 1 else _within_slice(1.0, shape[-1])
    kernel = self.param("kernel", logical(init, *names), shape).astype(self.dtype)
    bias = _bias(self, ("norm",), (self.dim,))
    if isinstance(heads, jax.ShapeDtypeStruct):
      assert within is not None, "heads that are not there are made within"
      return within((_one_product(kernel.reshape(-1, self.dim)), bias))
    features = heads.reshape(*heads.shape[:2], -1)
    if groups == 1:
      flat = kernel.reshape(-1, self.dim)
      flat = _one_product(flat) if platform_of(heads) == "tpu" else flat
      return over_rows(lambda rows: affine(rows, flat, bias), features)
    bias, slices = bias.astype(self.dtype)[None], kernel.reshape(groups, -1, kernel.shape[-1])
    return over_rows(lambda rows: group_product(rows, slices) + bias, features)


class Attention(nn.Module):
  """Multi-head attention; with `competition`, its heads compete for every query position.

  Intermediates: `attention` [batch, heads, time, keys]; `heads` and `heads_scaled`
  [batch, time, heads, head_dim] before and after the competition (equal without one); with a
  competition also `router/scores` and `router/weights` [batch, time, heads]; with gates
  `head_gates` [batch, time, heads], which `heads` includes; with experts inside heads
  `output_experts` and, in self-attention, `value_experts` [batch, time, heads, experts].

  Attributes:
    dim: model width, a multiple of `heads`.
    heads: number of heads.
    competition: how heads compete; `None` for plain attention.
    cross: queries come from one sequence, keys and values from another.
    tied_key_value: keys are values, too, in self-attention.
    positions: `rotary`, `relative` and `alibi` act in self-attention.
    gated: every head's output has a sigmoid gate.
    mechanisms: into how many slices width and heads are cut; the heads of one read its slice and
      add to it.
    dropout: rate on attention probabilities.
    dtype: compute type.
    head_dim: width of a head; none for dim / heads.
    biases: whether projections have some.
    scale_logits: whether logits are divided by sqrt(head_dim).
    form: how self-attention reads values; see `attention_forms`.
    switch: experts inside heads; `None` for one value and output projection in each.
  """

  dim: int
  heads: int
  competition: CompetitionConfig | None = None
  cross: bool = False
  tied_key_value: bool = False
  positions: ModelPositions = "learned"
  gated: bool = False
  mechanisms: int = 1
  dropout: float = 0.0
  dtype: DTypeLike = jnp.float32
  head_dim: int | None = None
  biases: bool = True
  scale_logits: bool = True
  form: AttentionForm = "softmax"
  switch: SwitchHeadConfig | None = None

  def setup(self):
    """Makes the projections and the router."""
    dense = 1 if self.switch is None else 0  # whether values are one projection beside the others
    sizes = {"heads": self.heads, "head_dim": self.width, "dtype": self.dtype}
    sizes |= {"biases": self.biases, "mechanisms": self.mechanisms}
    init = _INTO_HEADS if self.scale_logits else _small_queries
    if self.cross:
      self.query = IntoHeads(1, **sizes, kernel_init=init)
      self.key_value = IntoHeads(1 + dense, **sizes)
    else:
      assert dense or not self.tied_key_value, "values that experts make are not keys"
      count = 2 if self.tied_key_value else 2 + dense
      factor = 1.0 if self.scale_logits else math.sqrt(self.width)
      self.query_key_value = IntoHeads(count, **sizes, kernel_init=init, query_factor=factor)
      if self.positions == "relative":
        self.relative = RelativePositions(self.dim, self.heads, dtype=self.dtype)
    self.drop = Dropout(self.dropout)
    if self.form != "softmax":
      self.read = FORMS[self.form](self.heads, self.dtype)
    if self.gated:
      self.head_gate = HeadGate(self.heads, dtype=self.dtype)
    if self.competition is not None:
      self.router = Router(self.heads, self.competition, dtype=self.dtype)
    if self.switch is None:
      self.output = OutOfHeads(self.dim, self.dtype, self.mechanisms, self.biases)
    else:
      self.values = SwitchValues(self.heads, self.width, self.switch, self.dtype)
      self.switch_output = SwitchOutput(self.dim, self.switch, self.dtype)

  @property
  def width(self) -> int:
    """Of a head."""
    return self.head_dim or self.dim // self.heads

  def _unscaled(self, query: jax.Array) -> jax.Array:
    """Queries times sqrt(head_dim), by which attention will divide, if logits are not scaled."""
    return query if self.scale_logits else query * math.sqrt(self.width)

  def initial_state(self, batch: int, keys: int) -> KVCache:
    """An empty key/value cache of self-attention: a prompt's keys, and `beams` for every step.

    What a beam wrote stays where it is when beams change places; `ancestor_mask` says which of it
    belongs to whom.
    """
    return empty_cache(batch, keys, self.heads, self.width, self.dtype)

  def memory_state(self, memory: Float[Array, "batch keys embed"]) -> KVCache:
    """Keys and values of a memory for cross attention, computed once for all steps."""
    return as_cache(*self._keys_and_values(memory))

  def _keys_and_values(
    self, memory: Float[Array, "batch keys embed"]
  ) -> tuple[jax.Array, jax.Array]:
    """Those of a memory."""
    key, *value = self.key_value(memory)
    return key, value[0] if value else self.values(memory)

  def _project(
    self,
    heads: Float[Array, "batch time heads head_dim"],
    inputs: Float[Array, "batch time embed"],
    intermediates: Intermediates,
  ) -> Float[Array, "batch time embed"]:
    """What attention adds to the stream, from the heads' scaled outputs."""
    heads = intermediates("heads_scaled", heads)
    if self.switch is None:
      return self.output(heads)
    return self.switch_output(heads, inputs, intermediates)

  def _active_dropout(self, ctx: Context) -> Dropout | None:
    """What drops probabilities; None where nothing does."""
    return self.drop if self.dropout > 0 and not ctx.deterministic else None

  def _gates(
    self, inputs: Float[Array, "batch time embed"], intermediates: Intermediates
  ) -> Float[Array, "batch time heads"] | None:
    """How much of each head passes; none for all."""
    return intermediates("head_gates", self.head_gate(inputs)) if self.gated else None

  def _visibility(self, inputs: jax.Array, ctx: Context) -> Visibility | None:
    """Which keys are read, where self-attention of whole texts runs in one kernel; else None."""
    config, intermediates = self.competition, ctx.intermediates
    kernel = kernel_for(inputs, self.width, self.dtype)
    if self.cross or kernel is None:
      return None
    # A device that has some of the times needs keys and values of others.
    if sharding.parts_of(inputs, "time") > 1:
      return None
    # Nothing happens between the product and the heads, which are multiplied by one factor at most.
    alike = ctx.position_ids is None  # in all examples
    penalised = self.positions == "alibi" and alike
    rotary = self.positions == "rotary" and (alike or kernel == "gpu")
    plain = self.positions not in IN_ATTENTION or penalised or rotary
    plain = plain and (ctx.position_bias is None or isinstance(ctx.position_bias, DistanceBias))
    plain = plain and not self.tied_key_value and self.mechanisms == 1
    plain = plain and self.form == "softmax" and self.switch is None
    factors = config is None or (config.routing == "fused" and config.inactive == "null")
    visibility = ctx.mask.visibility()
    if visibility is None or not (plain and factors) or intermediates.wants("attention", "heads"):
      return None
    if kernel == "gpu" and config is not None and config.skip and _in_any_order(visibility):
      return None
    if not penalised:
      return visibility
    return dataclasses.replace(visibility, penalties=distance_penalties(self.heads))

  def _visibility_of_memory(
    self, query: jax.Array, mask: AttentionMask, bias: Bias | None, ctx: Context
  ) -> tuple[str | None, Visibility]:
    """The kernel that reads a memory as its products leave it, and which keys; None for none.

    A TPU's does so where nothing comes between heads and their projection, which is inside.
    """
    competition, intermediates = self.competition, ctx.intermediates
    kernel, seen = kernel_for(query, self.width, self.dtype), mask.visibility()
    if kernel == "tpu":
      plain = competition is None or (competition.fused and self.heads > 1)
      plain = plain and not self.gated and not intermediates.wants("heads", "heads_scaled")
      possible = plain and self.mechanisms == 1 and sharding.parts_of(query, "heads") == 1
    else:
      possible = kernel is not None and not (competition is not None and competition.skip)
    possible = possible and bias is None and self.switch is None
    if not possible or seen is None or intermediates.wants("attention"):
      return None, Visibility()
    return kernel, seen

  def _in_one_kernel(
    self,
    inputs: Float[Array, "batch time embed"],
    visibility: Visibility,
    ctx: Context,
    output: Projection | None = None,
  ) -> Float[Array, "batch time ..."]:
    """Scaled heads of self-attention whose queries, keys and values are never taken apart.

    Or what the output projection makes of them.
    """
    config, seen = self.competition, _names_of(visibility, len(inputs))
    by_distance = ctx.position_bias
    assert by_distance is None or isinstance(by_distance, DistanceBias)
    options: dict[str, Any] = {
      "deterministic": ctx.deterministic,
      "intermediates": ctx.intermediates.scope("router"),
    }
    dropout = _dropped(self._active_dropout(ctx), len(inputs), self.heads)
    weights = gates = self._gates(inputs, ctx.intermediates)
    if config is not None:
      # The router's first layer may be made beside the rest in the model's type alone, and where
      # all heads are on one device.
      beside = config.fused and config.dtype == "model" and self.positions != "rotary"
      beside = beside and sharding.parts_of(inputs, "heads") == 1
      readout = self.router.readout(**options) if beside else None
      if readout is not None:
        inside = options["intermediates"]
        beside_masks = by_distance, visibility, dropout
        return self._routed(inputs, *beside_masks, *readout, gates, inside, output)
      if config.fused:
        weights = self.router.weights_of(self.router.hidden_of(inputs), **options)
      else:
        weights = self.router(inputs, **options).weights
      weights = weights * self.heads if config.rescale else weights
      weights = weights if gates is None else weights * gates
    parts = self._parts(inputs)
    packed, bias = self.query_key_value(inputs, parts=parts)
    packed = packed.reshape(*inputs.shape[:2], parts, -1)
    bias = bias.reshape(parts, -1)
    rotation, ids = None, ctx.position_ids
    if self.positions == "rotary":
      at = jnp.arange(inputs.shape[1])[None] if ids is None else ids.queries
      rotation = Rotation.of(at, self.width)
    names, heads = ("batch", None, "heads", None), self.heads // parts
    return sharding.on_parts(
      lambda by_distance, rotation, visibility, dropout, output, weights, bias, packed: (
        packed_attention(
          packed,
          bias,
          heads=heads * packed.shape[2],
          weights=weights,
          output=output,
          rotation=rotation,
          distance_bias=by_distance,
          visibility=visibility,
          dropout=dropout,
        )
      ),
      [by_distance, rotation, visibility, dropout, output, weights, bias, packed],
      [
        None if by_distance is None else _OF_DISTANCES,
        None if rotation is None else _names_of_rotation(rotation, len(inputs)),
        seen,
        _names_of_dropout(dropout),
        _WHOLE if output is not None else None,
        None if weights is None else names[:3],
        names[2:],
        names,
      ],
      result=names if output is None else ("batch", None, None),
    )

  def _parts(self, inputs: jax.Array) -> int:
    """Into how many parts heads are cut whose columns lie by kind: one on each of a TPU's devices.

    Elsewhere kernels read every head by itself.
    """
    devices = sharding.parts_of(inputs, "heads")
    by_kind = kernel_for(inputs, self.width, self.dtype) == "tpu"
    return devices if by_kind and self.heads % devices == 0 else self.heads

  def _routed(
    self,
    inputs: Float[Array, "batch time embed"],
    by_distance: DistanceBias | None,
    visibility: Visibility,
    dropout: ProbabilityDropout | None,
    readout: Readout,
    choice: Choice,
    gates: Float[Array, "batch time heads"] | None,
    intermediates: Intermediates,
    output: Projection | None,
  ) -> Float[Array, "batch time ..."]:
    """The same, with the competition inside."""
    assert self.competition is not None
    attention = functools.partial(
      routed_attention, heads=self.heads, head_dim=self.width, choice=choice
    )
    rescaled = self.heads if self.competition.rescale else 1.0
    beside = self.router.hidden(inputs.shape[-1])
    parts = self._parts(inputs)
    packed, bias = self.query_key_value(inputs, beside, parts=parts)
    heads, weights = sharding.on_parts(
      lambda by_distance, visibility, dropout, output, bias, readout, gates, packed: attention(
        packed,
        bias,
        readout,
        by_kind=parts == 1,
        factor=rescaled if gates is None else rescaled * gates,
        output=output,
        distance_bias=by_distance,
        visibility=visibility,
        dropout=dropout,
      ),
      [by_distance, visibility, dropout, output, bias, readout, gates, packed],
      [
        None if by_distance is None else _OF_DISTANCES,
        _names_of(visibility, len(inputs)),
        _names_of_dropout(dropout),
        _WHOLE if output is not None else None,
        (None,),
        Readout((None, None), (None,)),  # pyright: ignore[reportArgumentType]  # names, not arrays
        None if gates is None else ("batch", None, None),
        ("batch", None, None),
      ],
    )
    intermediates("weights", weights)
    return heads if output else heads.reshape(*inputs.shape[:2], self.heads, self.width)

  def _read(
    self,
    inputs: Float[Array, "batch time embed"],
    query: Float[Array, "batch time heads head_dim"],
    new: tuple[jax.Array, jax.Array],
    state: KVCache | None,
    bias: jax.Array | None,
    ctx: Context,
  ) -> Float[Array, "batch time heads head_dim"]:
    """Outputs of heads of self-attention that is no softmax over keys.

    Args:
      inputs: what attention reads.
      query: queries.
      new: keys and values of the same positions.
      state: those of earlier positions and these.
      bias: added to the logits.
      ctx: as of `__call__`.
    """
    newest, time = ctx.newest, query.shape[1]
    if state is None or newest is None:
      (key, value), later = new, not ctx.mask.causal or ctx.mask.prefix > 0
      keys = Keys(ctx.mask.dense(time, time), jnp.arange(time), later)
    else:
      key, value = from_cache(state)
      keys = Keys(newest.past, newest.start + jnp.arange(time), later=False)
    dropout = self._active_dropout(ctx)
    return self.read(inputs, query, key, value, keys, bias=bias, dropout=dropout, ctx=ctx)

  def _projected(
    self,
    inputs: Float[Array, "batch time embed"],
    beside: tuple[jax.Array, jax.Array] | None,
    bias: Bias | None,
    ctx: Context,
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None, jax.Array | None, Bias | None]:
    """What one product of the inputs gives.

    Args:
      inputs: what attention reads.
      beside: matrix and bias of the router's first layer, if it is made with the rest.
      bias: added to the logits.
      ctx: as of `__call__`.

    Returns:
      Queries; keys and values, in self-attention; the first layer, before its relu; the bias, with
      that of positions.
    """
    if self.cross:
      query, *hidden = self.query(inputs, beside)
      return self._unscaled(query), None, hidden[0] if hidden else None, bias
    query, key, *others = self.query_key_value(inputs, beside)
    if self.switch is not None:
      others = (self.values(inputs, ctx.intermediates), *others)
    value, *hidden = (key, *others) if self.tied_key_value else others
    query = self._unscaled(query)
    if self.positions == "rotary":
      ids = ctx.position_ids
      at = jnp.arange(query.shape[1])[None] if ids is None else ids.queries
      query, key = rotate(query, at), rotate(key, at)
    elif self.positions == "relative":
      causal = ctx.mask.causal and not ctx.mask.prefix
      query, relative = self.relative(query, ctx.position_ids, causal=causal)
      bias = _sum(bias, relative)
    elif self.positions in IN_ATTENTION:
      bias = _sum(bias, alibi_bias(self.heads, query.shape[1], ctx.position_ids))
    bias = _sum(bias, ctx.position_bias)
    return query, (key, value), hidden[0] if hidden else None, bias

  def _projected_in_one_kernel(
    self, inputs: Float[Array, "batch time embed"], visibility: Visibility, ctx: Context
  ) -> Float[Array, "batch time embed"]:
    """The outputs of self-attention in one kernel, the projection inside where it may be."""
    intermediates = ctx.intermediates
    if self._parts(inputs) == 1 < self.heads and not intermediates.wants("heads_scaled"):
      like = jax.ShapeDtypeStruct((*inputs.shape[:2], self.heads, self.width), self.dtype)
      within = functools.partial(self._in_one_kernel, inputs, visibility, ctx)
      return self.output(like, within=within)
    heads = self._in_one_kernel(inputs, visibility, ctx)
    return self.output(intermediates("heads_scaled", heads))

  def _of_memory_in_kernel(
    self,
    query: Float[Array, "batch time heads head_dim"],
    memory: Float[Array, "batch keys embed"],
    kernel: str,
    seen: Visibility,
    weights: Float[Array, "batch time heads"] | None,
    ctx: Context,
  ) -> Callable[..., jax.Array]:
    """What reads a memory in a kernel as its products leave it, with an output projection or not.

    Args:
      query: queries.
      memory: what keys and values are made of.
      kernel: of which device.
      seen: which keys are read.
      weights: of heads; none for 1.
      ctx: as of `__call__`.
    """
    on_tpu = kernel == "tpu"
    read = self._keys_and_values(memory) if on_tpu else self.key_value(memory, together=True)
    dropped = _dropped(self._active_dropout(ctx), len(query), self.heads)
    return functools.partial(_in_kernel, query, read, weights, None, seen, dropped)

  @property
  def _fused(self) -> bool:
    """Whether the router's first layer may be made beside queries, and weights by one kernel."""
    config = self.competition
    fused = config is not None and config.fused and self.heads > 1 and self.mechanisms == 1
    return fused and self.switch is None

  def _beside(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """The router's first layer, where it is made together with queries, keys and values.

    In one type, and in float32 with the model's precision, which is that of float32 on a CPU alone.
    """
    config = self.competition
    if config is None or not self._fused:
      return None
    exact = jnp.dtype(self.dtype) == jnp.float32 and platform_of(inputs) == "cpu"
    return self.router.hidden(inputs.shape[-1]) if exact or config.dtype == "model" else None

  def _fused_weights(
    self, inputs: Float[Array, "batch time embed"], hidden: jax.Array | None, ctx: Context
  ) -> Float[Array, "batch time heads"] | None:
    """Weights of heads by a fused router; none where there is no such.

    Args:
      inputs: what the router reads.
      hidden: its first layer, before its relu, if that was made already.
      ctx: as of `__call__`.
    """
    config = self.competition
    if config is None or not self._fused:
      return None
    weights = self.router.weights_of(
      self.router.hidden_of(inputs) if hidden is None else hidden,
      deterministic=ctx.deterministic,
      intermediates=ctx.intermediates.scope("router"),
    )
    return weights * self.heads if config.rescale else weights

  def _weighted(
    self,
    heads: Float[Array, "batch time heads head_dim"],
    inputs: Float[Array, "batch time embed"],
    own: tuple[jax.Array, jax.Array] | None,
    weights: Float[Array, "batch time heads"] | None,
    ctx: Context,
  ) -> Float[Array, "batch time heads head_dim"]:
    """Heads times their weights, if they compete.

    Args:
      heads: outputs of heads.
      inputs: what the router reads.
      own: keys and values of the same positions, in self-attention.
      weights: what a fused router gave; none for another, which runs here.
      ctx: as of `__call__`.
    """
    config = self.competition
    if weights is not None:
      return gate_heads(heads, weights)
    if config is None:
      return heads
    selection = self.router(
      inputs, deterministic=ctx.deterministic, intermediates=ctx.intermediates.scope("router")
    )
    fill = own[1] if own is not None and config.inactive == "value" else None
    return scale_heads(heads, selection, rescale=config.rescale, values=fill)

  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    state: KVCache | None = None,
    memory: Float[Array, "batch keys embed"] | None = None,
    *,
    bias: Bias | None = None,
    ctx: Context = Context(),
  ) -> tuple[Float[Array, "batch time embed"], KVCache | None]:
    """Attends from `inputs` to themselves and what the state holds, or to a memory (cross).

    Args:
      inputs: queries' activations; also keys' and values' in self-attention. Where the newest
        position is decoded, the beams of an example are its positions.
      state: keys and values: of self-attention those of earlier positions, to which these are
        added; of cross attention those of the memory.
      memory: keys' and values' activations in cross attention, where there is no state.
      bias: added to the logits.
      ctx: masks, where decoding stands, dropout, intermediates.

    Returns:
      The outputs, and the next state; None if none was given.
    """
    visibility = None if state is not None or bias is not None else self._visibility(inputs, ctx)
    if visibility is not None:
      return self._projected_in_one_kernel(inputs, visibility, ctx), None
    query, own, hidden, bias = self._projected(inputs, self._beside(inputs), bias, ctx)
    weights = self._fused_weights(inputs, hidden, ctx)
    newest, intermediates = ctx.newest, ctx.intermediates
    # Of whole texts, or of prompts, before which nothing stands.
    whole = state is None or (own is not None and newest is None)
    # Attention itself multiplies heads with their weights unless something comes in between.
    multiplies = weights is not None and whole and self.form == "softmax"
    multiplies = multiplies and not self.gated and not intermediates.wants("heads")
    inside = weights if multiplies else None
    attention = functools.partial(
      attend,
      bias=bias,
      weights=inside,
      dropout=self._active_dropout(ctx),
      skip=self.competition is not None and self.competition.skip,
      intermediates=intermediates,
    )
    if own is None:
      if state is not None:
        heads = attend_cached(query, state, ctx.memory_mask, intermediates=intermediates)
      else:
        assert memory is not None, "cross attention reads a memory, or a state that holds it"
        mask = AttentionMask(explicit=ctx.memory_mask)
        kernel, seen = self._visibility_of_memory(query, mask, bias, ctx)
        if kernel is None:
          heads = attention(query, *self._keys_and_values(memory), mask)
        else:
          within = self._of_memory_in_kernel(query, memory, kernel, seen, inside, ctx)
          if kernel == "tpu":
            like = jax.ShapeDtypeStruct(query.shape, self.dtype)
            return self.output(like, within=within), None
          heads = within()
    else:
      if state is not None:
        state = add_to_cache(state, as_cache(*own), jnp.asarray(ctx.start, jnp.int32))
      if self.form != "softmax":
        heads = self._read(inputs, query, own, state, dense(bias), ctx)
      elif state is None or newest is None:
        heads = attention(query, *own, ctx.mask)
      else:
        filled, past = newest.start + query.shape[1], newest.past
        heads = attend_cached(
          query, state, past, bias=dense(bias), filled=filled, intermediates=intermediates
        )
    gates = self._gates(inputs, intermediates)
    heads = heads if gates is None else gate_heads(heads, gates)
    heads = intermediates("heads", heads)
    if not multiplies:
      heads = self._weighted(heads, inputs, own, weights, ctx)
    return self._project(heads, inputs, intermediates), state
