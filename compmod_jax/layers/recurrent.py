r"""Long short-term memory, step by step and over whole sequences.

.. math::
   i, f, g, o = \sigma(a_i), \sigma(a_f), \tanh(a_g), \sigma(a_o), \quad a = W x + U h + b, \qquad
   c' = f c + i g, \quad h' = o \tanh c'

Source: Hochreiter and Schmidhuber 1997; Gers et al. 2000. Gates stand in the order i, f, g, o.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compmod_jax.layers import deferred


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
) -> tuple[Float[Array, "batch hidden"], Float[Array, "batch gates"]]:
  """The derivative of one step, given that with respect to the hidden state it put out.

  Args:
    found: the step's gates.
    cell: the cell state before it.
    after: the state after it.
    hidden_gradient: the derivative of anything with respect to `after.h`.

  Returns:
    The derivatives with respect to `after.c`, which reaches that thing through `after.h` alone, and
    to W x + U h + b, [batch, 4 * hidden].
  """
  i, f, g, o = found
  squashed = jnp.tanh(after.c)
  dc = hidden_gradient * o * (1 - squashed * squashed)
  do = hidden_gradient * squashed * o * (1 - o)
  parts = (dc * g * i * (1 - i), dc * cell * f * (1 - f), dc * i * (1 - g * g), do)
  return dc, jnp.concatenate(parts, axis=-1)


def layer(
  inputs: Float[Array, "time batch gates"],
  recurrent: Float[Array, "hidden gates"],
  state: State,
) -> tuple[Float[Array, "time batch hidden"], State]:
  """A layer over a sequence.

  Args:
    inputs: W x + b at every step.
    recurrent: U.
    state: before the first step.

  Returns:
    The hidden states of all steps, and the state after the last.
  """

  def step(
    product: deferred.Product, _: None, state: State, given: jax.Array
  ) -> tuple[State, jax.Array]:
    state = advance(gates(given + product("recurrent", state.h)), state.c)
    return state, state.h

  weights: Mapping[str, jax.Array] = {"recurrent": recurrent}
  last, hidden = deferred.scan(step, weights, None, state, inputs)
  return hidden, last
