r"""Fast weights: matrices that a layer writes while it reads, beside the weights that are trained.

Every head j has a matrix S of fast weights. At every position it writes what the position's key k
and value v have in common, as Hebbian connections do, and then reads with the query q:

.. math::
   S_t = \lambda_j\, S_{t-1} + k_t\, (m_t \odot v_t)^\top, \qquad y_t = S_t^\top q_t

Keys and queries have length 1. m is the plasticity of every unit, by which its connections change:

.. math::
   \text{hebbian}: \quad m_t = \eta_j, \qquad
   \text{modulated}: \quad m_t = \eta_j\, \sigma(G x_t + b)

and where a neuromodulatory set gives a gate of its own (`Gates.plasticity`), times that gate.
lambda, the rate eta and G are trained. There is no clipping as in `mechanisms.plasticity`: lambda
below 1 bounds S, and as S is linear in what is written, whole sequences are read in chunks. A text
of several segments is read as if each came next after segment 0 (`models.text.Text`); positions are
read in their order whatever the attention mask.

Source: Ba et al. 2016 (Using fast weights to attend to the recent past), with queries and keys of
their own as in Schlag et al. 2021; gates of learning rates in a Transformer: Knowles 2022, section
4.4.2.
"""

from typing import Literal, NamedTuple, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.attention import IntoHeads, OutOfHeads
from compmod_jax.layers.context import Context

Plasticity = Literal["off", "hebbian", "modulated"]
PLASTICITIES: tuple[Plasticity, ...] = get_args(Plasticity)

_CHUNK = 32
# lambda of the first and the last head is 1 - 1 / n at first, with n these powers of 2.
_POWERS = (3.0, 7.0)


class Written(NamedTuple):
  """What positions write and read with, float32 [batch, time, heads, head_dim] each.

  Attributes:
    query: q, of length 1.
    key: k, of length 1.
    value: v times its plasticity.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array


class _Carry(NamedTuple):
  """Fast weights [batch, heads, head_dim, head_dim] between chunks: those of the segment read last,
  those after segment 0, and the number of the segment read last, [batch]."""

  current: jax.Array
  shared: jax.Array
  segment: jax.Array


def read_in_chunks(
  given: Written,
  log_decay: Float[Array, " heads"],
  valid: Bool[Array, "batch time"],
  segments: Int[Array, "batch time"],
  *,
  chunk: int = _CHUNK,
) -> tuple[
  Float[Array, "batch time heads head_dim"], Float[Array, "batch heads head_dim head_dim"]
]:
  r"""What all positions read, and the fast weights after the last.

  .. math:: y_t = \sum_{s \le t} \lambda^{n_{ts}}\, (q_t \cdot k_s)\, v_s

  where n counts the writes between s and t. Inside a chunk the sum is formed; what was written
  before it has one matrix.

  Args:
    given: what is written, and what it is read with.
    log_decay: logarithm of lambda.
    valid: positions that write; the others change nothing.
    segments: number of the segment of every position, ascending. A position reads what its own
      segment and segment 0 have written.
    chunk: positions of a chunk.
  """
  batch, time, heads, width = given.query.shape
  chunk = min(chunk, time)
  more = -time % chunk
  segments = lax.cummax(jnp.where(valid, segments, 0), axis=1)

  def cut(x: jax.Array, fill: Literal["constant", "edge"] = "constant") -> jax.Array:
    padded = jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)), mode=fill)
    return padded.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

  parts = (*(cut(x) for x in given), cut(valid), cut(segments, "edge"))
  zeros = jnp.zeros((batch, heads, width, width), jnp.float32)
  first = _Carry(zeros, zeros, jnp.zeros(batch, segments.dtype))
  causal = jnp.tril(jnp.ones((chunk, chunk), bool))[None]

  def read(carry: _Carry, part: tuple[jax.Array, ...]) -> tuple[_Carry, jax.Array]:
    query, key, value, valid, segment = part
    first = (segment == 0)[:, None, :]
    seen = ((segment[:, :, None] == segment[:, None, :]) | first) & causal & valid[:, None, :]
    weights = _decayed(log_decay, seen)  # [batch, heads, time, keys]
    scores = jnp.einsum("bthd,bshd->bhts", query, key)
    inside = jnp.einsum("bhts,bshe->bthe", scores * weights, value)
    same = segment == carry.segment[:, None]
    both = (jnp.einsum("bthd,bhde->bthe", query, held) for held in (carry.current, carry.shared))
    before = jnp.where(same[..., None, None], *both)
    kept = jnp.exp(
      jnp.sum(seen, axis=-1)[..., None] * log_decay[None, None]
    )  # [batch, time, heads]
    out = inside + before * kept[..., None]

    def after(held: jax.Array, seen: jax.Array) -> jax.Array:
      """Fast weights after the writes [batch, 1, keys] that are seen from the end."""
      kept = jnp.exp(jnp.sum(seen, axis=-1) * log_decay[None])[..., None, None]
      weights = _decayed(log_decay, seen)[:, :, 0]
      return held * kept + jnp.einsum("bhs,bshd,bshe->bhde", weights, key, value)

    start = jnp.where(same[:, -1, None, None, None], carry.current, carry.shared)
    shared = after(carry.shared, first & valid[:, None, :])
    return _Carry(after(start, seen[:, -1:]), shared, segment[:, -1]), out

  last, out = lax.scan(read, first, parts)
  return out.swapaxes(0, 1).reshape(batch, -1, heads, width)[:, :time], last.current


def _decayed(
  log_decay: Float[Array, " heads"], seen: Bool[Array, "batch queries keys"]
) -> Float[Array, "batch heads queries keys"]:
  """By how much what every key has written has decayed when a query reads; 0 of keys not seen."""
  later = jnp.sum(seen, axis=-1, keepdims=True) - jnp.cumsum(seen, axis=-1)
  decayed = jnp.exp(later[:, None] * log_decay[None, :, None, None])
  return jnp.where(seen[:, None], decayed, 0)


def read_step(
  given: Written,
  log_decay: Float[Array, " heads"],
  state: Float[Array, "batch beams heads head_dim head_dim"],
) -> tuple[
  Float[Array, "batch beams heads head_dim"], Float[Array, "batch beams heads head_dim head_dim"]
]:
  """What the newest position of every beam reads, and its fast weights after that.

  Args:
    given: of the newest positions; the beams of an example stand where time does.
    log_decay: logarithm of lambda.
    state: fast weights of every beam.
  """
  new = given.key[..., None] * given.value[..., None, :]
  state = state * jnp.exp(log_decay)[None, None, :, None, None] + new
  return jnp.einsum("bnhd,bnhde->bnhe", given.query, state), state


class FastWeights(nn.Module):
  """Fast weights as a layer beside self-attention, `(x, state, gate, ctx) -> (update, state)`.

  Parameters: `into_heads` for queries, keys and values, `out_of_heads`, `decay` and `rate`
  [heads], of which lambda is the sigmoid and eta the softplus, and where the layer modulates itself
  `gate`.

  Intermediates: `plasticity`, m, `key`, `written`, m times v, and `read`
  [batch, time, heads, head_dim]. The layer does nothing where `written` is zero.

  Attributes:
    dim: model width.
    heads: matrices.
    plasticity: hebbian or modulated.
    dtype: compute type of the projections; fast weights are float32.
  """

  dim: int
  heads: int
  plasticity: Plasticity = "hebbian"
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes the projections, decays and rates."""
    width, zeros = self.dim // self.heads, nn.initializers.zeros
    self.into_heads = IntoHeads(3, self.heads, width, self.dtype)
    self.out_of_heads = OutOfHeads(self.dim, self.dtype)
    self.decay = self.param("decay", logical(_spread, "heads"), (self.heads,))
    self.rate = self.param("rate", logical(zeros, "heads"), (self.heads,))
    if self.plasticity == "modulated":
      init = logical(zeros, "embed", "norm")
      self.gate = nn.Dense(self.dim, dtype=self.dtype, kernel_init=init)

  def initial_state(
    self, batch: int, beams: int
  ) -> Float[Array, "batch beams heads head_dim head_dim"]:
    """Zeros for every beam."""
    width = self.dim // self.heads
    return jnp.zeros((batch, beams, self.heads, width, width))

  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    state: Float[Array, "batch beams heads head_dim head_dim"] | None = None,
    gate: Float[Array, "batch time embed"] | None = None,
    *,
    ctx: Context = Context(),
  ) -> tuple[
    Float[Array, "batch time embed"],
    Float[Array, "batch beams heads head_dim head_dim"] | None,
  ]:
    """Writes and reads at every position, or at the newest one of every beam.

    Args:
      x: what the layer reads.
      state: fast weights of every beam before the newest position, or room for those after a
        prompt; None: nothing is kept.
      gate: on the plasticity of every unit.
      ctx: which positions are tokens of which segment, whether newest positions are read,
        intermediates.

    Returns:
      What is added to the stream, and the next state; None if none was given.
    """
    note, log_decay = ctx.intermediates, nn.log_sigmoid(self.decay)
    query, key, value = (part.astype(jnp.float32) for part in self.into_heads(x))
    shape = value.shape
    plasticity = jnp.broadcast_to(nn.softplus(self.rate)[None, None, :, None], shape)
    if self.plasticity == "modulated":
      plasticity = plasticity * nn.sigmoid(over_rows(self.gate, x)).reshape(shape)
    if gate is not None:
      plasticity = plasticity * gate.reshape(shape)
    written = note("written", note("plasticity", plasticity) * value)
    given = Written(_unit(query), note("key", _unit(key)), written)
    if state is not None and ctx.newest is not None:
      read, state = read_step(given, log_decay, state)
    else:
      read, last = read_in_chunks(given, log_decay, *_texts(ctx, shape[0], shape[1]))
      if state is not None:
        state = jnp.broadcast_to(last[:, None], state.shape)
    return self.out_of_heads(note("read", read).astype(self.dtype)), state


def _texts(
  ctx: Context, batch: int, time: int
) -> tuple[Bool[Array, "batch time"], Int[Array, "batch time"]]:
  """Which positions are tokens, and their segments; those in front of a text are of segment 0."""
  mask = ctx.mask
  valid = jnp.ones((1, time), bool) if mask.valid is None else mask.valid
  segments = jnp.zeros((1, time), jnp.int32)
  if mask.segments is not None:
    segments = jnp.pad(mask.segments, ((0, 0), (mask.prefix, 0)))
  return jnp.broadcast_to(valid, (batch, time)), jnp.broadcast_to(segments, (batch, time))


def _unit(rows: Float[Array, "*batch head_dim"]) -> Float[Array, "*batch head_dim"]:
  """Vectors of length 1; of zeros, zeros."""
  return rows * lax.rsqrt(jnp.sum(rows**2, axis=-1, keepdims=True) + 1e-6)


def _spread(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Decays that differ from head to head: 1 - 1 / n, with n from the first to the last power."""
  return jnp.log(2.0 ** jnp.linspace(*_POWERS, shape[0]) - 1)
