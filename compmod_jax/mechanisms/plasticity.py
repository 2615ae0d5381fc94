r"""Plastic recurrent cells: connections with a fixed part and a part that grows with activity.

.. math::
   o_i(t) = \tanh\Big(\sum_j (w_{ji} + \alpha_{ji}\, H_{ji}(t))\, o_j(t-1) + x_i(t)\Big)

H is the Hebbian trace, which starts at zero in every sequence and is part of the state. w, alpha
and what governs the trace are trained by gradients through all its changes. Three rules change it,
with E an eligibility trace and M(t), the modulation, computed from the cell's own output:

.. math::
   \text{hebbian}: \quad & H' = \mathrm{clip}(H + \eta\, o_j(t-1)\, o_i(t)) \\
   \text{simple}: \quad & H' = \mathrm{clip}(H + M(t)\, o_j(t-1)\, o_i(t)) \\
   \text{retroactive}: \quad & H' = \mathrm{clip}(H + M(t)\, E), \quad
     E' = (1 - \eta) E + \eta\, o_j(t-1)\, o_i(t)

where clip keeps values between -1 and 1.

Source: Miconi et al. 2018 and 2020 (Backpropamine); Knowles 2022, section 2.3.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_numbers
from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.context import Context

Rule = Literal["hebbian", "simple", "retroactive"]
RULES: tuple[Rule, ...] = get_args(Rule)
Kind = Literal["network", "lstm"]


class Traces(NamedTuple):
  """What plastic connections remember, [..., inputs, outputs] each.

  Attributes:
    hebbian: H, between -1 and 1.
    eligibility: E; of the other two rules always zero, [..., 1, 1].
  """

  hebbian: jax.Array
  eligibility: jax.Array


@dataclasses.dataclass(frozen=True)
class PlasticConfig:
  """A recurrent cell whose connections change while a sequence is read (Miconi et al. 2020)."""

  kind: Kind = "network"
  """A plain recurrent network, or an LSTM whose connections to the cell input are plastic."""
  dim: int = 100
  """Width of the state."""
  rule: Rule = "retroactive"
  """What changes the Hebbian trace: activity (hebbian), activity times a modulation that the cell
  computes (simple), or the modulation times an eligibility trace of past activity (retroactive)."""
  rate: float = 0.1
  """Initial eta: the trace's rate (hebbian), the eligibility trace's (retroactive); learned."""
  per_unit: bool = True
  """Whether the modulation, one number, is multiplied by a learned vector, one for each unit whose
  inputs it changes."""
  alpha: float = 0.1
  """Initial plasticity coefficients: uniform between plus and minus this, over the root of the
  width."""

  def __post_init__(self):
    check_numbers(self, "cell.")
    errors.check_choice("cell.rule", self.rule, RULES)
    errors.check_choice("cell.kind", self.kind, get_args(Kind))
    for field in ("dim", "rate", "alpha"):
      value = getattr(self, field)
      errors.check(value > 0, f"cell.{field} is {value}; it must be positive.")

  @property
  def units(self) -> int:
    """Width of the cell's output."""
    return self.dim

  def build(self, embed: int) -> "PlasticCell | PlasticLSTMCell":
    """The cell, for inputs of this width."""
    return (PlasticCell if self.kind == "network" else PlasticLSTMCell)(self, embed)

  def describe(self) -> str:
    """Sizes, in a few words."""
    what = "a recurrent network" if self.kind == "network" else "an LSTM"
    return f"{what} of {self.dim} units with plastic connections ({self.rule})"


def initial_traces(config: PlasticConfig, batch: int) -> Traces:
  """Traces of zero, as every sequence starts with."""
  shape = (batch, config.dim, config.dim)
  eligible = shape if config.rule == "retroactive" else (batch, 1, 1)
  return Traces(jnp.zeros(shape), jnp.zeros(eligible))


def plastic_product(
  rows: Float[Array, "*batch inputs"],
  weights: Float[Array, "inputs outputs"],
  alpha: Float[Array, "inputs outputs"],
  hebbian: Float[Array, "*batch inputs outputs"],
) -> Float[Array, "*batch outputs"]:
  r"""What plastic connections make of their inputs x.

  .. math:: y_i = \sum_j (w_{ji} + \alpha_{ji} H_{ji}) x_j

  Args:
    rows: x.
    weights: w.
    alpha: plasticity coefficients.
    hebbian: H, of every sequence its own.
  """
  plastic = _along(alpha, hebbian) * hebbian
  return rows @ weights + jnp.einsum("...j,...ji->...i", rows, plastic)


def changed_traces(
  traces: Traces,
  before: Float[Array, "*batch inputs"],
  after: Float[Array, "*batch outputs"],
  *,
  rule: Rule,
  rate: Float[Array, ""],
  modulation: Float[Array, "*batch #outputs"] | None = None,
) -> Traces:
  """The traces after a step.

  Args:
    traces: before the step.
    before: o_j(t - 1), what the connections read.
    after: o_i(t), what came of it.
    rule: see the module.
    rate: eta.
    modulation: M(t), of every unit or of all; the hebbian rule has none.

  Raises:
    UserError: a rule with modulation is given none, or the hebbian one is.
  """
  errors.check(
    (modulation is None) == (rule == "hebbian"),
    f"rule is {rule!r}, which {'takes no' if rule == 'hebbian' else 'needs a'} modulation.",
  )
  product = before[..., :, None] * after[..., None, :]
  hebbian, eligibility = traces
  if modulation is None:
    change = rate * product
  elif rule == "simple":
    change = modulation[..., None, :] * product
  else:
    change = modulation[..., None, :] * eligibility
    eligibility = (1 - rate) * eligibility + rate * product
  return Traces(jnp.clip(hebbian + change, -1, 1), eligibility)


class Connections(NamedTuple):
  """Plastic connections, and what governs their traces.

  Attributes:
    weights: w, [inputs, outputs].
    alpha: plasticity coefficients, [inputs, outputs].
    rate: eta.
    modulator: from the cell's output to the modulation, [outputs, 1], and its bias; the hebbian
      rule has none.
    per_unit: what the modulation is multiplied with for each unit, [outputs].
  """

  weights: jax.Array
  alpha: jax.Array
  rate: jax.Array
  modulator: tuple[jax.Array, jax.Array] | None = None
  per_unit: jax.Array | None = None

  def product(self, rows: Float[Array, "*batch inputs"], traces: Traces) -> jax.Array:
    """What they make of their inputs, [*batch, outputs]; see `plastic_product`."""
    return plastic_product(rows, self.weights, self.alpha, traces.hebbian)

  def changed(
    self,
    rule: Rule,
    traces: Traces,
    before: Float[Array, "*batch inputs"],
    after: Float[Array, "*batch outputs"],
    output: Float[Array, "*batch outputs"],
    ctx: Context = Context(),
  ) -> Traces:
    """The traces after a step; see `changed_traces`.

    Args:
      rule: what changes them.
      traces: before the step.
      before: what was read.
      after: what came of it.
      output: of the cell, from which the modulation is computed.
      ctx: intermediates to read or change.
    """
    modulation = None
    if self.modulator is not None:
      weights, bias = self.modulator
      modulation = ctx.intermediates("modulation", jnp.tanh(output @ weights + bias))
      if self.per_unit is not None:
        modulation = modulation * _along(self.per_unit, output)
    new = changed_traces(traces, before, after, rule=rule, rate=self.rate, modulation=modulation)
    return new._replace(hebbian=ctx.intermediates("hebbian", new.hebbian))


class Plastic(nn.Module):
  """The parameters of plastic connections [inputs, outputs].

  Parameters: `weights` w, `alpha`, `rate` eta, and with a modulation `modulator` [outputs, 1], its
  `modulator_bias`, and `per_unit` [outputs].

  Attributes:
    inputs: width of what they read.
    outputs: width of what they make.
    config: the rule.
  """

  inputs: int
  outputs: int
  config: PlasticConfig = PlasticConfig()

  @nn.compact
  def __call__(self) -> Connections:
    """The connections; they are made before a scan over steps, not in it."""
    c, bound = self.config, float(self.inputs) ** -0.5
    matrix = (self.inputs, self.outputs)
    weights = self.param("weights", logical(_within(bound), "embed", "mlp"), matrix)
    alpha = self.param("alpha", logical(_within(c.alpha * bound), "embed", "mlp"), matrix)
    made = Connections(weights, alpha, self.param("rate", nn.initializers.constant(c.rate), ()))
    if c.rule == "hebbian":
      return made
    column = logical(_within(bound), "mlp", "units")
    modulator = self.param("modulator", column, (self.outputs, 1))
    bias = self.param("modulator_bias", nn.initializers.zeros, ())
    made = made._replace(modulator=(modulator, bias))
    if not c.per_unit:
      return made
    ones = logical(nn.initializers.ones, "mlp")
    return made._replace(per_unit=self.param("per_unit", ones, (self.outputs,)))


class PlasticState(NamedTuple):
  """State of a plastic recurrent network: its output [..., dim], and the traces."""

  h: jax.Array
  traces: Traces


class PlasticLSTMState(NamedTuple):
  """State of a plastic LSTM: hidden and cell state [..., dim], and the traces."""

  h: jax.Array
  c: jax.Array
  traces: Traces


S = TypeVar("S", PlasticState, PlasticLSTMState)


class PlasticCell(nn.Module):
  r"""A recurrent network with plastic connections as a cell, `(x, state, ctx) -> (y, state)`.

  .. math:: y = h' = \tanh(W x + b + (w + \alpha \odot H)^\top h)

  Parameters: `input` W, `bias` b, and those of `Plastic` under `recurrent`.

  Intermediates: `output`, `recurrent/modulation`, M(t), and `recurrent/hebbian`, the
  trace after the step.

  Attributes:
    config: sizes and rule.
    embed: width of what it reads.
  """

  config: PlasticConfig
  embed: int

  def setup(self):
    """Makes the parameters."""
    dim = self.config.dim
    within = _within(float(dim) ** -0.5)
    self.input = self.param("input", logical(within, "embed", "mlp"), (self.embed, dim))
    self.bias = self.param("bias", logical(nn.initializers.zeros, "mlp"), (dim,))
    self.recurrent = Plastic(dim, dim, self.config)

  def describe(self) -> str:
    """Widths and rule, in a few words."""
    return f"{self.embed} -> {self.config.units}, {self.config.describe()}"

  def initial_state(self, batch: int) -> PlasticState:
    """Zeros."""
    return PlasticState(jnp.zeros((batch, self.config.dim)), initial_traces(self.config, batch))

  def __call__(
    self, x: Float[Array, "*batch embed"], state: PlasticState, ctx: Context = Context()
  ) -> tuple[Float[Array, "*batch dim"], PlasticState]:
    """One step."""
    return self.step(self.recurrent(), self._given(x), state, ctx)

  def step(
    self,
    connections: Connections,
    given: Float[Array, "*batch width"],
    state: PlasticState,
    ctx: Context = Context(),
  ) -> tuple[Float[Array, "*batch dim"], PlasticState]:
    """One step from W x + b."""
    rule, inner = self.config.rule, ctx.scope("recurrent")
    plastic = connections.product(state.h, state.traces)
    h = ctx.intermediates("output", jnp.tanh(given + plastic))
    return h, PlasticState(h, connections.changed(rule, state.traces, state.h, h, h, inner))

  def unroll(
    self,
    x: Float[Array, "batch time embed"],
    state: PlasticState,
  ) -> tuple[Float[Array, "batch time dim"], PlasticState]:
    """All steps of a sequence, with one product for what is read at all of them."""
    step = functools.partial(self.step, self.recurrent())
    return _unroll(step, over_rows(self._given, x), state)

  def _given(self, x: jax.Array) -> jax.Array:
    """W x + b."""
    made = x @ self.input
    return made + _along(self.bias, made)


class PlasticLSTMCell(nn.Module):
  r"""Long short-term memory whose connections to the cell input are plastic.

  .. math::
     i, f, o = \sigma(W x + U h + b), \quad g = \tanh(W_g x + b_g + (w + \alpha \odot H)^\top h),
     \quad c' = f c + i g, \quad y = h' = o \tanh c'

  The trace follows h before the step and g.

  Parameters: `input` W [embed, 4 * dim] with the gates in the order i, f, o, g, `bias`, `gates` U
  [dim, 3 * dim], and those of `Plastic` under `recurrent`.

  Intermediates: `cell`, `output`, `recurrent/modulation`, M(t), and `recurrent/hebbian`, the
  trace after the step.

  Attributes:
    config: sizes and rule.
    embed: width of what it reads.

  Source: Miconi et al. 2020, section 4.3.
  """

  config: PlasticConfig
  embed: int

  def setup(self):
    """Makes the parameters."""
    dim = self.config.dim
    within = _within(float(dim) ** -0.5)
    self.input = self.param("input", logical(within, "embed", "mlp"), (self.embed, 4 * dim))
    self.bias = self.param("bias", logical(within, "mlp"), (4 * dim,))
    self.gates = self.param("gates", logical(within, "embed", "mlp"), (dim, 3 * dim))
    self.recurrent = Plastic(dim, dim, self.config)

  def describe(self) -> str:
    """Widths and rule, in a few words."""
    return f"{self.embed} -> {self.config.units}, {self.config.describe()}"

  def initial_state(self, batch: int) -> PlasticLSTMState:
    """Zeros."""
    zeros = jnp.zeros((batch, self.config.dim))
    return PlasticLSTMState(zeros, zeros, initial_traces(self.config, batch))

  def __call__(
    self, x: Float[Array, "*batch embed"], state: PlasticLSTMState, ctx: Context = Context()
  ) -> tuple[Float[Array, "*batch dim"], PlasticLSTMState]:
    """One step."""
    return self.step(self.recurrent(), self._given(x), state, ctx)

  def step(
    self,
    connections: Connections,
    given: Float[Array, "*batch width"],
    state: PlasticLSTMState,
    ctx: Context = Context(),
  ) -> tuple[Float[Array, "*batch dim"], PlasticLSTMState]:
    """One step from W x + b."""
    sigmoid, linear = jnp.split(given, [3 * self.config.dim], axis=-1)
    i, f, o = jnp.split(jax.nn.sigmoid(sigmoid + state.h @ self.gates), 3, axis=-1)
    rule, inner = self.config.rule, ctx.scope("recurrent")
    plastic = connections.product(state.h, state.traces)
    g = jnp.tanh(linear + plastic)
    c = ctx.intermediates("cell", f * state.c + i * g)
    h = ctx.intermediates("output", o * jnp.tanh(c))
    return h, PlasticLSTMState(h, c, connections.changed(rule, state.traces, state.h, g, h, inner))

  def unroll(
    self, x: Float[Array, "batch time embed"], state: PlasticLSTMState
  ) -> tuple[Float[Array, "batch time dim"], PlasticLSTMState]:
    """All steps of a sequence, with one product for what is read at all of them."""
    step = functools.partial(self.step, self.recurrent())
    return _unroll(step, over_rows(self._given, x), state)

  def _given(self, x: jax.Array) -> jax.Array:
    """W x + b."""
    made = x @ self.input
    return made + _along(self.bias, made)


def _along(leaf: jax.Array, other: jax.Array) -> jax.Array:
  """The leaf with axes of size one in front, as many as another array has more."""
  return jnp.expand_dims(leaf, range(other.ndim - leaf.ndim))


def _within(bound: float) -> Callable[..., jax.Array]:
  def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

  return init


def _unroll(
  step: Callable[[jax.Array, S], tuple[jax.Array, S]],
  given: Float[Array, "batch time width"],
  state: S,
) -> tuple[Float[Array, "batch time dim"], S]:
  def one(state: S, given: jax.Array) -> tuple[S, jax.Array]:
    y, state = step(given, state)
    return state, y

  last, outputs = lax.scan(one, state, given.swapaxes(0, 1))
  return outputs.swapaxes(0, 1), last
