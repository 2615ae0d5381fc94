r"""Recurrent independent mechanisms: modules of a recurrent cell that compete for their input.

A cell of K modules with parameters and states of their own. At every step each module attends to
the rows of :math:`X = \{0, x_1, \dots, x_n\}`: what is read, and a row of zeros,

.. math::
   A_k = \mathrm{softmax}\Big(\frac{h_k W^q_k (X W^e)^\top}{\sqrt{D_{key}}}\Big) X W^v

the :math:`k_A` modules with the least weight on the row of zeros (mean over heads) are active,
:math:`S`; they step and then read from all modules, while the others keep their states, through
which gradients flow on:

.. math::
   \tilde h_k, c_k' &= D_k(h_k, c_k, A_k), & h_k' &= \tilde h_k
   + \mathrm{softmax}\Big(\frac{\tilde W^q_k \tilde h_k (\tilde W^e \tilde h)^\top}{\sqrt{D}}\Big)
   \tilde W^v \tilde h\, W^o_k & k \in S \\
   \tilde h_k &= h_k, \quad c_k' = c_k, & h_k' &= h_k & k \notin S

:math:`D_k` is an LSTM or a GRU. An inactive module offers its kept state as key and value.

Source: Kolios 2023, equations 4.27 to 4.31; Goyal et al. 2019, section 2. The heads of the second
attention stand side by side, and :math:`W^o_k` leads from them back to the state, as in the
original's program; (4.30) is that of one head whose values are as wide as the state.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.sharding import logical

Kind = Literal["lstm", "gru"]
_GATES = {"lstm": 4, "gru": 3}
_SHARED = ("input_key", "input_value")  # parameters that all modules have in common


@runtime_checkable
class StepContext(Protocol):
  """What a step is given besides input and state; `layers.context.Context` has it."""

  @property
  def deterministic(self) -> bool:
    """No dropout."""
    ...

  @property
  def intermediates(self) -> Intermediates:
    """Activations to read or change."""
    ...


@dataclasses.dataclass(frozen=True)
class Plain:
  """The context of a step without dropout, of which nothing is read or changed."""

  deterministic: bool = True
  intermediates: Intermediates = OFF


@dataclasses.dataclass(frozen=True)
class RimConfig:
  """Recurrent independent mechanisms (Goyal et al. 2019): modules that compete for the input."""

  modules: int = 6
  """Modules, k_T."""
  active: int = 4
  """Modules that step at a time, k_A: those that attend least to the row of zeros."""
  dim: int = 100
  """Units of a module."""
  kind: Kind = "lstm"
  """What a module is: an LSTM or a GRU."""
  input_heads: int = 1
  """Heads of the attention to the input."""
  input_key_dim: int = 64
  """Width of its keys."""
  input_value_dim: int = 0
  """Width of its values, of each head; 0 for four times `dim`."""
  heads: int = 4
  """Heads of the attention between modules."""
  head_dim: int = 16
  """Width of its keys and values."""
  sources: int = 0
  """Modules from which an active one reads, those that it attends to most; 0 for all."""
  dropout: float = 0.1
  """Dropout in training on what modules read from each other."""

  def __post_init__(self):
    check_least(
      self, "cell.", modules=1, active=1, dim=1, input_heads=1, input_key_dim=1, heads=1, head_dim=1
    )
    errors.check(
      self.active <= self.modules,
      f"cell.active is {self.active}, but cell.modules is {self.modules}; no more modules can be"
      " active than there are. Lower cell.active or raise cell.modules.",
    )
    errors.check(
      0 <= self.sources <= self.modules,
      f"cell.sources is {self.sources}; it must be between 1 and cell.modules = {self.modules}, or"
      " 0 to read from all.",
    )
    errors.check(
      self.input_value_dim >= 0,
      f"cell.input_value_dim is {self.input_value_dim}; it must be positive, or 0 for four times"
      " cell.dim.",
    )
    errors.check_choice("cell.kind", self.kind, get_args(Kind))
    errors.check(
      0 <= self.dropout < 1, f"cell.dropout is {self.dropout}; it must be at least 0 and below 1."
    )

  @property
  def units(self) -> int:
    """Width of the cell's output."""
    return self.modules * self.dim

  @property
  def value_dim(self) -> int:
    """Width of the values of the input, of each head."""
    return self.input_value_dim or 4 * self.dim

  @property
  def router(self) -> bool:
    """Whether modules compete: fewer are active than there are."""
    return self.active < self.modules

  def describe(self) -> str:
    """Sizes, in a few words."""
    return (
      f"{self.modules} recurrent independent mechanisms of {self.dim} units"
      f" ({self.kind.upper()}), {self.active} active"
    )

  def build(self, embed: int) -> "RIMCell":
    """The cell, for inputs of this width."""
    return RIMCell(self, embed)


class RIMState(NamedTuple):
  """Hidden and cell states of all modules, [batch, modules, dim] each; a GRU has no cell state."""

  h: jax.Array
  c: jax.Array | None


def least_null(null: Float[Array, "modules *batch"], active: int) -> Bool[Array, "modules *batch"]:
  """Which modules are active: those with the least weight on the row of zeros.

  Ties go to the lower number. No gradient passes.

  Args:
    null: weight on the row of zeros, mean over heads.
    active: how many are.
  """
  modules = len(null)
  if active == modules:
    return jnp.ones(null.shape, bool)
  null = lax.stop_gradient(null)
  before = jnp.arange(modules)[:, None] < jnp.arange(modules)[None]  # [other, module]
  before = before.reshape(modules, modules, *(1,) * (null.ndim - 1))
  less = (null[:, None] < null[None]) | ((null[:, None] == null[None]) & before)
  return jnp.sum(less, axis=0) < active


class _Weights(NamedTuple):
  """What every step multiplies with; matrices of modules are [modules, inner, outer]."""

  hidden: jax.Array  # recurrent matrices and, behind them, queries of the input
  bias: jax.Array
  candidate_bias: jax.Array | None
  exchange: jax.Array  # queries, keys and values of the attention between modules
  output: jax.Array


class _Input(NamedTuple):
  """What is made of the input of a step before anything is known of the state."""

  keys: jax.Array  # [batch, rows, heads, key]
  gates: jax.Array  # X W^v W: what each row adds to gates, [batch, rows, heads, modules, gates]
  rng: jax.Array | None  # of dropout


class RIMCell(nn.Module):
  """Recurrent independent mechanisms as a cell: `(x, state, ctx) -> (y, state)`, where y is the
  next h of all modules, side by side; see the module's docstring.

  Parameters, those of modules with a leading axis for them: `input_query`, `input_key` and
  `input_value` of the attention to the input; `input`, `recurrent` and `bias` of the LSTMs, whose
  columns are the gates i, f, g, o, or of the GRUs (r, z, n), which have `candidate_bias` besides,
  added to U h in n; `query`, `key`, `value` and `output` of the attention between modules.

  Intermediates, where `rows` are the row of zeros and what is read:

  - `attention` [batch, modules, heads, rows], weights of the input;
  - `null` [batch, modules], that of the row of zeros, mean over heads; the least are active;
  - `active` [batch, modules], 1 or 0;
  - `router/weights` [batch, modules]: 1 - `null` of active modules, 0 of others, in proportion so
    that they sum to 1; no edit of it has an effect;
  - `router/signatures` [modules, dim * key], the query matrices, which say what each looks for;
  - `stepped` [batch, modules, dim], h before communication, and `cell`, the new c;
  - `communication` [batch, modules, heads, modules], what each module reads of which, as if all
    were active;
  - `output` [batch, modules, dim], the new h.

  `unroll` records them with time as second axis, and hands edits single steps, [batch, 1, ...].

  Attributes:
    config: sizes and options.
    embed: width of what it reads.

  Source: Kolios 2023, section 4.11; Goyal et al. 2019.
  """

  config: RimConfig
  embed: int

  def setup(self):
    """Makes the parameters."""
    c = self.config
    gates, read = _GATES[c.kind] * c.dim, c.heads * c.head_dim
    query = c.input_heads * c.input_key_dim

    def matrix(name: str, fan: int, *shape: int) -> jax.Array:
      bound = float(fan) ** -0.5

      def within(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

      names = ("embed", "key") if name in _SHARED else ("units", "embed", "key")
      names = ("units", "key") if name.endswith("bias") else names
      return self.param(name, logical(within, *names), shape)

    self.input_query = matrix("input_query", c.dim, c.modules, c.dim, query)
    self.input_key = matrix("input_key", self.embed, self.embed, query)
    self.input_value = matrix("input_value", self.embed, self.embed, c.input_heads * c.value_dim)
    self.input = matrix("input", c.dim, c.modules, c.input_heads * c.value_dim, gates)
    self.recurrent = matrix("recurrent", c.dim, c.modules, c.dim, gates)
    self.bias = matrix("bias", c.dim, c.modules, gates)
    if c.kind == "gru":
      self.candidate_bias = matrix("candidate_bias", c.dim, c.modules, c.dim)
    self.query = matrix("query", c.dim, c.modules, c.dim, read)
    self.key = matrix("key", c.dim, c.modules, c.dim, read)
    self.value = matrix("value", c.dim, c.modules, c.dim, read)
    self.output = matrix("output", read, c.modules, read, c.dim)

  def describe(self) -> str:
    """Widths, in a few words."""
    return f"{self.embed} -> {self.config.units}, {self.config.describe()}"

  def initial_state(self, batch: int) -> RIMState:
    """Zeros, [batch, modules, dim] each."""
    zeros = jnp.zeros((batch, self.config.modules, self.config.dim))
    return RIMState(zeros, zeros if self.config.kind == "lstm" else None)

  def __call__(
    self,
    x: Float[Array, "batch *rows embed"],
    state: RIMState,
    ctx: StepContext = Plain(),
    *,
    rng: jax.Array | None = None,
  ) -> tuple[Float[Array, "batch dim"], RIMState]:
    """One step.

    Args:
      x: what is read, one row or several.
      state: before the step.
      ctx: dropout, and intermediates to read or change.
      rng: key of dropout; if none is given where there is dropout, that of the name `dropout`.

    Returns:
      The new h of all modules side by side, and the new state.
    """
    c, intermediates = self.config, ctx.intermediates
    keys, gates = self._inputs(x[:, None])
    rng = self._dropout_rng(ctx, rng)
    given = _Input(keys[0], gates[0], rng)
    site = _Sites(intermediates, timed=False)
    self._record_signatures(intermediates)
    state = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), state)
    state = jax.tree.map(
      lambda leaf: leaf.swapaxes(0, 1), _step(c, self._weights(), state, given, site)
    )
    return state.h.reshape(len(x), c.units), state

  def unroll(
    self,
    x: Float[Array, "batch time *rows embed"],
    state: RIMState,
    ctx: StepContext = Plain(),
    *,
    rng: jax.Array | None = None,
  ) -> tuple[Float[Array, "batch time dim"], RIMState]:
    """All steps of a sequence, with one product for what is read at all of them.

    Args:
      x: what is read at every step, one row or several.
      state: before the first.
      ctx: as in a single step.
      rng: as in a single step.

    Returns:
      The output of every step, and the state after the last.
    """
    c, weights = self.config, self._weights()
    batch, time = x.shape[:2]
    rng = self._dropout_rng(ctx, rng)
    rngs = None if rng is None else jax.random.split(rng, time)
    outside = ctx.intermediates
    seen: set[str] = set()

    def step(
      carry: tuple[RIMState, jax.Array], given: _Input
    ) -> tuple[tuple[RIMState, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]:
      state, position = carry
      inner = outside.apart()
      after = _step(c, weights, state, given, _Sites(inner.at(position), timed=True))
      seen.update(inner.seen)
      return (after, position + 1), (after.h, inner.captured)

    first = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), state)
    xs = _Input(*self._inputs(x), rngs)
    (last, _), (hidden, captured) = lax.scan(step, (first, jnp.int32(0)), xs)
    through = {name: value[:, :, 0].swapaxes(0, 1) for name, value in captured.items()}
    outside.merge(through, seen)
    self._record_signatures(outside)
    last = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), last)
    return hidden.transpose(2, 0, 1, 3).reshape(batch, time, c.units), last

  def _dropout_rng(self, ctx: StepContext, rng: jax.Array | None) -> jax.Array | None:
    if ctx.deterministic or not self.config.dropout:
      return None
    return self.make_rng("dropout") if rng is None else rng

  def _record_signatures(self, intermediates: Intermediates) -> None:
    if intermediates.wants("router/signatures"):
      intermediates("router/signatures", self.input_query.reshape(self.config.modules, -1))

  def _weights(self) -> _Weights:
    """What every step multiplies with, side by side where it reads the same."""
    exchange = jnp.concatenate([self.query, self.key, self.value], axis=-1)
    hidden = jnp.concatenate([self.recurrent, self.input_query], axis=-1)
    candidate = self.candidate_bias if self.config.kind == "gru" else None
    return _Weights(hidden, self.bias, candidate, exchange, self.output)

  def _inputs(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [time, batch, rows, heads, key], and gates [time, batch, rows, heads, modules, gates]
    of what is read at every step [batch, time, *rows, embed].

    A module's W acts on a weighted sum of values: it acts on the values themselves here, which are
    the same for all modules, so that no product depends on the attention.
    """
    c = self.config
    x = x.reshape(*x.shape[:2], -1, self.embed).swapaxes(0, 1)
    shape, rows = x.shape[:-1], x.reshape(-1, self.embed)
    keys = (rows @ self.input_key).reshape(*shape, c.input_heads, c.input_key_dim)
    values = self.input_value.reshape(self.embed, c.input_heads, c.value_dim)
    matrices = self.input.reshape(c.modules, c.input_heads, c.value_dim, -1)
    each = [
      # In the order that takes fewer operations.
      jnp.linalg.multi_dot(
        [rows, values[:, head], matrices[:, head].swapaxes(0, 1).reshape(c.value_dim, -1)]
      )
      for head in range(c.input_heads)
    ]
    gates = each[0][:, None] if len(each) == 1 else jnp.stack(each, axis=1)
    return keys, gates.reshape(*shape, c.input_heads, c.modules, -1)


@dataclasses.dataclass(frozen=True)
class _Sites:
  """Named activations of a step, which has modules first and the batch second: others see the batch
  first, and in a sequence a time of 1 behind it."""

  intermediates: Intermediates
  timed: bool

  def __call__(self, name: str, value: Callable[[], jax.Array] | jax.Array) -> jax.Array:
    """Passes a site; where it is made of others for readers alone, a function makes it."""
    if not self.intermediates.wants(name):
      return jnp.zeros(()) if callable(value) else value
    seen = (value() if callable(value) else value).swapaxes(0, 1)
    seen = self.intermediates(name, seen[:, None] if self.timed else seen)
    return (seen[:, 0] if self.timed else seen).swapaxes(0, 1)


def _step(
  c: RimConfig, weights: _Weights, state: RIMState, given: _Input, site: _Sites
) -> RIMState:
  """One step of all modules; states have modules first and the batch second."""
  both = _by_module(state.h, weights.hidden)
  gates = _GATES[c.kind] * c.dim
  recurrent, query = both[..., :gates], both[..., gates:]
  attention = site("attention", _input_attention(c, query, given.keys))
  null = site("null", jnp.mean(attention[..., 0], axis=-1))
  active = site("active", least_null(null, c.active).astype(jnp.float32)) > 0
  site("router/weights", lambda: _shares(null, active))
  added = _weighted(attention[..., 1:], given.gates) + weights.bias[:, None]
  stepped = _cell(c, recurrent, added, state, weights.candidate_bias)
  h, cell = jax.tree.map(lambda new, old: jnp.where(active[..., None], new, old), stepped, state)
  h = site("stepped", h)
  cell = None if cell is None else site("cell", cell)
  read = _communication(c, h, weights, site)
  if given.rng is not None:
    keep = jax.random.bernoulli(given.rng, 1 - c.dropout, read.shape)
    read = jnp.where(keep, read / (1 - c.dropout), 0)
  h = site("output", jnp.where(active[..., None], h + read, h))
  return RIMState(h, cell)


def _by_module(x: jax.Array, matrices: jax.Array) -> jax.Array:
  """x W of every module: [modules, batch, inner] and [modules, inner, outer]."""
  return lax.dot_general(x, matrices, (((2,), (1,)), ((0,), (0,))))


def _input_attention(c: RimConfig, query: jax.Array, keys: jax.Array) -> jax.Array:
  """Weights of the row of zeros and of what is read, [modules, batch, heads, 1 + rows]."""
  query = query.reshape(*query.shape[:2], c.input_heads, 1, c.input_key_dim)
  scores = jnp.sum(query * keys.swapaxes(1, 2)[None], axis=-1) * c.input_key_dim**-0.5
  # The key of the row of zeros is zero.
  scores = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0)))
  return jax.nn.softmax(scores, axis=-1)


def _weighted(attention: jax.Array, gates: jax.Array) -> jax.Array:
  """Attention [modules, batch, heads, rows] times gates [batch, rows, heads, modules, gates]."""
  each = [
    attention[:, :, head, row, None] * gates[:, row, head].swapaxes(0, 1)
    for row in range(gates.shape[1])
    for head in range(gates.shape[2])
  ]
  return sum(each[1:], start=each[0])


def _cell(
  c: RimConfig,
  recurrent: jax.Array,
  added: jax.Array,
  state: RIMState,
  candidate_bias: jax.Array | None,
) -> RIMState:
  """What an LSTM or a GRU makes of U h and W A + b."""
  if state.c is not None:
    i, f, g, o = jnp.split(recurrent + added, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * state.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return RIMState(jax.nn.sigmoid(o) * jnp.tanh(cell), cell)
  assert candidate_bias is not None
  gates = jax.nn.sigmoid(recurrent[..., : 2 * c.dim] + added[..., : 2 * c.dim])
  r, z = jnp.split(gates, 2, axis=-1)
  below = recurrent[..., 2 * c.dim :] + candidate_bias[:, None]
  n = jnp.tanh(added[..., 2 * c.dim :] + r * below)
  return RIMState((1 - z) * n + z * state.h, None)


def _communication(c: RimConfig, h: jax.Array, weights: _Weights, site: _Sites) -> jax.Array:
  """What every module reads from all, [modules, batch, dim].

  The batch stands last in between: sums over so few modules and units are vectors of examples.
  """
  modules, batch, _ = h.shape
  made = lax.dot_general(weights.exchange, h, (((1,), (2,)), ((0,), (0,))))
  made = made.reshape(modules, 3, c.heads, c.head_dim, batch)
  query, key, value = made[:, 0], made[:, 1], made[:, 2]
  scores = jnp.sum(query[:, None] * key[None], axis=3) * c.head_dim**-0.5
  if 0 < c.sources < modules:
    kept = least_null(-scores.swapaxes(0, 1), c.sources).swapaxes(0, 1)
    scores = jnp.where(kept, scores, -jnp.inf)
  attention = jax.nn.softmax(scores, axis=1)  # [modules, from, heads, batch]
  seen = site("communication", attention.transpose(0, 3, 2, 1))
  attention = seen.transpose(0, 3, 2, 1)
  read = jnp.sum(attention[:, :, :, None] * value[None], axis=1)
  read = read.reshape(modules, c.heads * c.head_dim, batch)
  return lax.dot_general(read, weights.output, (((1,), (1,)), ((0,), (0,))))


def _shares(null: jax.Array, active: jax.Array) -> jax.Array:
  """Attention to the input of active modules, in proportion, [modules, batch]."""
  found = jnp.where(active, 1 - null, 0)
  total = jnp.sum(found, axis=0, keepdims=True)
  even = active / jnp.maximum(jnp.sum(active, axis=0, keepdims=True), 1)
  return jnp.where(total > 0, found / jnp.where(total > 0, total, 1), even)
