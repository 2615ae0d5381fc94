r"""Long short-term memory, step by step and over whole sequences.

.. math::
   i, f, g, o = \sigma(a_i), \sigma(a_f), \tanh(a_g), \sigma(a_o), \quad a = W x + U h + b, \qquad
   c' = f c + i g, \quad h' = o \tanh c'

Source: Hochreiter and Schmidhuber 1997; Gers et al. 2000. Gates stand in the order i, f, g, o.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from compmod_jax.core import sharding
from compmod_jax.core.linear import over_rows, transposed_product
from compmod_jax.core.sharding import logical
from compmod_jax.layers.context import Context

_ROWS = 16  # of a batch, from which on W x is made step by step on CPUs


class State(NamedTuple):
  """Hidden and cell state of a layer, or their gradients, [batch, hidden] each."""

  h: jax.Array
  c: jax.Array


class Gates(NamedTuple):
  """A step's gates after their nonlinearities, [batch, hidden] each."""

  i: jax.Array
  f: jax.Array
  g: jax.Array
  o: jax.Array


def gates(activations: Float[Array, "batch gates"]) -> Gates:
  """The gates from W x + U h + b, [batch, 4 * hidden]."""
  i, f, g, o = jnp.split(activations, 4, axis=-1)
  return Gates(jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o))


def advance(found: Gates, cell: Float[Array, "batch hidden"], added: State | None = None) -> State:
  """The state after a step; what is `added` to a state passes on to all that depends on it."""
  c = found.f * cell + found.i * found.g
  c = c if added is None else c + added.c
  h = found.o * jnp.tanh(c)
  return State(h if added is None else h + added.h, c)


def reverse(
  found: Gates,
  cell: Float[Array, "batch hidden"],
  after: State,
  hidden_gradient: Float[Array, "batch hidden"],
  cell_gradient: Float[Array, "batch hidden"] | None = None,
  gates_gradient: Gates | None = None,
) -> tuple[Float[Array, "batch hidden"], Float[Array, "batch gates"]]:
  """The derivative of one step, given those with respect to its outputs.

  Args:
    found: the step's gates.
    cell: the cell state before it.
    after: the state after it.
    hidden_gradient: the derivative of anything with respect to `after.h`.
    cell_gradient: with respect to `after.c`, by ways that do not lead through `after.h`.
    gates_gradient: with respect to `found`, by ways that do not lead through `after`.

  Returns:
    The derivatives with respect to `after.c`, by all ways, and to W x + U h + b,
    [batch, 4 * hidden].
  """
  i, f, g, o = found
  squashed = jnp.tanh(after.c)
  dc = hidden_gradient * o * (1 - squashed * squashed)
  dc = dc if cell_gradient is None else dc + cell_gradient
  d = Gates(dc * g, dc * cell, dc * i, hidden_gradient * squashed)
  d = d if gates_gradient is None else jax.tree.map(jnp.add, d, gates_gradient)
  parts = (d.i * i * (1 - i), d.f * f * (1 - f), d.g * (1 - g * g), d.o * o * (1 - o))
  return dc, jnp.concatenate(parts, axis=-1)


@jax.custom_vjp
def cell(
  activations: Float[Array, "batch gates"], before: Float[Array, "batch hidden"]
) -> tuple[Gates, State]:
  """The gates of a step, and the state after it. Reverse mode, any order.

  Its reverse pass keeps the gates and the cell states, about half of what those of its single
  operations keep.

  Args:
    activations: W x + U h + b.
    before: the cell state before the step.
  """
  found = gates(activations)
  return found, advance(found, before)


class _CellKept(NamedTuple):
  """What the reverse pass of `cell` reads."""

  found: Gates
  before: jax.Array
  after: State


def _cell_forward(
  activations: jax.Array, before: jax.Array
) -> tuple[tuple[Gates, State], _CellKept]:
  found, after = cell(activations, before)
  return (found, after), _CellKept(found, before, after)


def _cell_backward(kept: _CellKept, cotangent: tuple[Gates, State]) -> tuple[jax.Array, jax.Array]:
  found, before, after = kept
  outer, (dh, dc) = cotangent
  dc, da = reverse(found, before, after, dh, dc, outer)
  return da, dc * found.f


cell.defvjp(_cell_forward, _cell_backward)


class Weights(NamedTuple):
  """Of a layer: W [embed, 4 * hidden], U [hidden, 4 * hidden] and b [4 * hidden]."""

  input: jax.Array
  recurrent: jax.Array
  bias: jax.Array


def in_steps(x: Float[Array, "time batch embed"]) -> bool:
  """Whether W x is made step by step, together with U h, and not of all steps before the first.

  On CPUs what one product gives for all steps goes through memory. There the product of a step,
  by `transposed_product`, takes 0.7 of the time (35 steps of 64 rows, 650 units, 2 cores).
  """
  return sharding.platform_of(x) == "cpu" and x.shape[1] >= _ROWS


def beside_each_other(
  left: Float[Array, "left gates"], right: Float[Array, "right gates"]
) -> Float[Array, "gates left_right"]:
  """Two weights as one, whose transpose rows are multiplied with; formed once for all steps."""
  return lax.optimization_barrier(jnp.concatenate([left, right]).T)


def _steps(
  x: Float[Array, "time batch embed"], weights: Weights
) -> tuple[jax.Array, Callable[[jax.Array, jax.Array], jax.Array]]:
  """What each step is given, and W x + U h + b as a function of it and of h."""
  if in_steps(x):
    both = beside_each_other(weights.input, weights.recurrent)

    def together(given: jax.Array, h: jax.Array) -> jax.Array:
      return transposed_product(jnp.concatenate([given, h], axis=-1), both) + weights.bias[None]

    return x, together
  first = over_rows(lambda rows: rows @ weights.input + weights.bias[None], x)
  return first, lambda given, h: given + h @ weights.recurrent


@jax.custom_vjp
def layer(
  x: Float[Array, "time batch embed"], weights: Weights, state: State
) -> tuple[Float[Array, "time batch hidden"], State]:
  """A layer over a sequence. Reverse mode, any order.

  Args:
    x: what is read at every step.
    weights: W, U and b.
    state: before the first step.

  Returns:
    The hidden states of all steps, and the state after the last.
  """
  given, activations = _steps(x, weights)

  def step(state: State, given: jax.Array) -> tuple[State, jax.Array]:
    _, state = cell(activations(given, state.h), state.c)
    return state, state.h

  last, hidden = lax.scan(step, state, given)
  return hidden, last


class _LayerKept(NamedTuple):
  """What the reverse pass of `layer` reads: its arguments, and of every step what it found."""

  x: jax.Array
  weights: Weights
  found: Gates
  before: State
  after: State


def _forward(
  x: jax.Array, weights: Weights, state: State
) -> tuple[tuple[jax.Array, State], _LayerKept]:
  given, activations = _steps(x, weights)

  def step(before: State, given: jax.Array) -> tuple[State, tuple[Gates, State, State]]:
    found, after = cell(activations(given, before.h), before.c)
    return after, (found, before, after)

  last, kept = lax.scan(step, state, given)
  return (kept[2].h, last), _LayerKept(x, weights, *kept)


def _backward(
  kept: _LayerKept, cotangent: tuple[jax.Array, State]
) -> tuple[jax.Array, Weights, State]:
  """The reverse pass; the gradients of W, U and x are one product each, after it."""
  x, weights, found, before, after = kept

  def step(later: State, given: tuple[Gates, State, State, jax.Array]) -> tuple[State, jax.Array]:
    found, before, after, outer = given
    dc, da = reverse(found, before.c, after, later.h + outer, later.c)
    return State(transposed_product(da, weights.recurrent), dc * found.f), da

  hidden, last = cotangent
  first, activations = lax.scan(step, last, (found, before, after, hidden), reverse=True)
  read, held, d_rows = (a.reshape(-1, a.shape[-1]) for a in (x, before.h, activations))
  gradients = Weights(read.T @ d_rows, held.T @ d_rows, jnp.sum(d_rows, axis=0))
  return (d_rows @ weights.input.T).reshape(x.shape), gradients, first


layer.defvjp(_forward, _backward)


class LSTMCell(nn.Module):
  r"""Long short-term memory as a cell: `(x, state, ctx) -> (y, state)`, where y is the next h.

  .. math:: a = W x + U h + b, \qquad c' = f c + i g, \qquad y = h' = o \tanh c'

  Parameters: `input` W [embed, 4 * dim], `recurrent` U [dim, 4 * dim] and `bias` b, whose columns
  are the gates i, f, g, o. They start uniform within 1 / sqrt(dim), as PyTorch's do.

  Intermediates: `cell` and `output`, the new c and h. An edit acts before anything reads them; h is
  made from c as the cell computes it.

  Attributes:
    embed: width of what it reads.
    dim: width of hidden and cell state.

  Source: Hochreiter and Schmidhuber 1997; Gers et al. 2000.
  """

  embed: int
  dim: int

  def setup(self):
    """Makes the parameters."""
    bound = float(self.dim) ** -0.5

    def within(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
      return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    gates, matrix = 4 * self.dim, logical(within, "embed", "mlp")
    self.input = self.param("input", matrix, (self.embed, gates))
    self.recurrent = self.param("recurrent", matrix, (self.dim, gates))
    self.bias = self.param("bias", logical(within, "mlp"), (gates,))

  def describe(self) -> str:
    """Widths, in a few words."""
    return f"{self.embed} -> {self.dim}, long short-term memory"

  def initial_state(self, batch: int) -> State:
    """Zeros, [batch, dim] each."""
    zeros = jnp.zeros((batch, self.dim))
    return State(zeros, zeros)

  def __call__(
    self,
    x: Float[Array, "*batch embed"],
    state: State,
    ctx: Context = Context(),
    *,
    added: State | None = None,
  ) -> tuple[Float[Array, "*batch dim"], State]:
    """One step.

    Args:
      x: what is read, of any number of leading axes.
      state: h and c before the step, with the same leading axes.
      ctx: intermediates to read or change.
      added: to the new c before h is made of it, and to the new h; recoding differentiates by it.

    Returns:
      The new h, and the new state.
    """
    rows = self._first(x) + self._recurrent(state.h)
    before = state.c.reshape(-1, self.dim)
    if added is None:
      _, after = cell(rows, before)
    else:
      more = State(*(leaf.reshape(-1, self.dim) for leaf in added))
      after = advance(gates(rows), before, more)
    h, c = (leaf.reshape(state.h.shape) for leaf in after)
    c = ctx.intermediates("cell", c)
    h = ctx.intermediates("output", h)
    return h, State(h, c)

  def unroll(
    self, x: Float[Array, "batch time embed"], state: State
  ) -> tuple[Float[Array, "batch time dim"], State]:
    """All steps of a sequence, with one product for what is read at all of them.

    Args:
      x: what is read at every step.
      state: before the first.

    Returns:
      The hidden state of every step, and the state after the last.
    """
    weights = Weights(self.input, self.recurrent, self.bias)
    hidden, last = layer(x.swapaxes(0, 1), weights, state)
    return hidden.swapaxes(0, 1), last

  def _first(self, x: jax.Array) -> jax.Array:
    """W x + b, as rows."""
    return x.reshape(-1, self.embed) @ self.input + self.bias[None]

  def _recurrent(self, h: jax.Array) -> jax.Array:
    """U h, as rows."""
    return h.reshape(-1, self.dim) @ self.recurrent
