r"""A recurrent model around any cell: what is read, one cell, logits at every step.

.. math:: h_t, s_t = \mathrm{cell}(E x_t, s_{t-1}), \qquad p_t = \mathrm{softmax}(W h_t + b)

The cell is a field of the configuration: a plain network, an LSTM, a GRU, recurrent independent
mechanisms, or one of them with plastic connections. What
is read are tokens, which have vectors, or real numbers, of which an affine map makes vectors. It
stands where a recurrent language model does (`ModelConfig.recurrent`).
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, Shaped

from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.errors import check
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import over_rows
from compmod_jax.core.losses import token_nll
from compmod_jax.core.sharding import logical
from compmod_jax.layers.cell import Cell
from compmod_jax.layers.context import Context
from compmod_jax.layers.lstm import LSTMCell
from compmod_jax.layers.recoding_signals import dropout_factors
from compmod_jax.mechanisms.plasticity import PlasticCell, PlasticConfig, PlasticLSTMCell
from compmod_jax.mechanisms.rims import RIMCell, RimConfig
from compmod_jax.models.base import ModelConfig
from compmod_jax.models.lstm_lm import Output


@dataclasses.dataclass(frozen=True)
class SizedCellConfig:
  """A cell that a width describes."""

  name: ClassVar[str]

  dim: int = 600
  """Width of the state."""

  def __post_init__(self):
    check_least(self, "cell.", dim=1)

  @property
  def units(self) -> int:
    """Width of the cell's output."""
    return self.dim

  def describe(self) -> str:
    """Sizes, in a few words."""
    return f"{self.name} of {self.dim} units"


@dataclasses.dataclass(frozen=True)
class LstmCellConfig(SizedCellConfig):
  """An LSTM as the cell of a recurrent model."""

  name = "an LSTM"

  def build(self, embed: int) -> LSTMCell:
    """The cell, for inputs of this width."""
    return LSTMCell(embed, self.dim)


@dataclasses.dataclass(frozen=True)
class GruCellConfig(SizedCellConfig):
  """A gated recurrent unit as the cell of a recurrent model."""

  name = "a GRU"

  def build(self, embed: int) -> "FlaxCell":
    """The cell, for inputs of this width."""
    return FlaxCell(nn.GRUCell(self.dim))


@dataclasses.dataclass(frozen=True)
class NetworkCellConfig(SizedCellConfig):
  """A plain recurrent network, h' = tanh(W x + U h + b), as the cell of a recurrent model."""

  name = "a recurrent network"

  def build(self, embed: int) -> "FlaxCell":
    """The cell, for inputs of this width."""
    return FlaxCell(nn.SimpleCell(self.dim))


class FlaxCell(nn.Module):
  """A cell of Flax with one state: `(x, state, ctx) -> (y, state)`, where both are the next h.

  Intermediates: `output`, the new h.

  Attributes:
    inner: Flax's gated recurrent unit, or its plain network.

  Source: Elman 1990; Cho et al. 2014; Chung et al. 2014.
  """

  inner: nn.GRUCell | nn.SimpleCell

  def initial_state(self, batch: int) -> jax.Array:
    """Zeros, [batch, dim]."""
    return jnp.zeros((batch, self.inner.features))

  def __call__(
    self, x: jax.Array, state: jax.Array, ctx: Context = Context()
  ) -> tuple[jax.Array, jax.Array]:
    """One step; see `Cell`."""
    _, h = self.inner(state, x)
    h = ctx.intermediates("output", h)
    return h, h


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
  """A cell between an embedding and logits."""

  family = "Recurrent"
  steps_through_time = True
  reads_vectors = True

  cell: RimConfig | PlasticConfig | LstmCellConfig | GruCellConfig | NetworkCellConfig = RimConfig()
  """The cell."""
  embedding_dim: int = 100
  """Width of what the cell reads."""
  dropout: float = 0.0
  """Dropout in training on what the cell reads, and on what logits are made of."""

  def __post_init__(self):
    check_numbers(self, "model.")
    check_least(self, "model.", embedding_dim=1)
    check(
      0 <= self.dropout < 1,
      f"model.dropout is {self.dropout}; it must be at least 0 and below 1.",
    )

  @property
  def dim(self) -> int:
    """Width of the cell's output."""
    return self.cell.units

  def describe(self) -> str:
    """The cell, in a few words."""
    return self.cell.describe()

  def parts(self, vocab: int) -> list[tuple[str, str, str]]:
    """Every part from input to output: name, pattern of its parameters' names, what it is."""
    return [
      ("embedding", "(embedding|vectors)/.*", f"what is read -> {self.embedding_dim}"),
      ("cell", "cell/.*", self.cell.describe()),
      ("readout", "readout/.*", f"{self.cell.units} -> {vocab:,}"),
    ]

  def routing_sites(self) -> tuple[str, ...]:
    """The modules of recurrent independent mechanisms compete, if not all are active."""
    return ("cell/router/weights",) if isinstance(self.cell, RimConfig) and self.cell.router else ()

  def recurrent(self, vocab: int) -> "RecurrentModel":
    """The module."""
    return RecurrentModel(self, vocab)


class RecurrentModel(nn.Module):
  """See the module's docstring.

  Sites: those of the cell below `cell/`, [batch, time, ...], where edits act step by step, on
  [batch, 1, ...]; `logits`.

  Attributes:
    config: sizes and options.
    vocab: number of tokens, or of classes.
  """

  config: RecurrentConfig
  vocab: int

  def setup(self):
    """Makes embedding, cell and readout."""
    c = self.config
    scale = logical(nn.initializers.normal(1.0), "vocab", "embed")
    self.embedding = nn.Embed(self.vocab, c.embedding_dim, embedding_init=scale)
    self.vectors = nn.Dense(c.embedding_dim)
    self.cell: Cell = c.cell.build(c.embedding_dim)
    init = logical(nn.initializers.glorot_uniform(), "embed", "vocab")
    self.readout = nn.Dense(self.vocab, kernel_init=init)

  @nn.nowrap
  def initial_states(self, batch: int) -> PyTree:
    """The cell's state before the first step."""
    c = self.config
    return c.cell.build(c.embedding_dim).initial_state(batch)

  def __call__(
    self,
    tokens: Shaped[Array, "batch time"],
    targets: Int[Array, "batch time"],
    states: PyTree,
    *,
    rng: jax.Array | None = None,
    recode: bool = False,
    given: Any = None,
    measure: bool = False,
    logits: bool = False,
    intermediates: Intermediates = OFF,
  ) -> Output:
    """Reads a stretch and predicts the target of every step; see `LstmLM`.

    Args:
      tokens: what is read: tokens, or real numbers.
      targets: what is predicted.
      states: from before the first step.
      rng: key of dropout; none to have none.
      recode: nothing is recoded here.
      given: what recoding needs.
      measure: what recoding does.
      logits: also return log-probabilities.
      intermediates: sites to read or change.
    """
    real = jnp.issubdtype(tokens.dtype, jnp.floating)
    x = over_rows(self.vectors, tokens[..., None]) if real else self.embedding(tokens)
    keys = [None] * 3 if rng is None else list(jax.random.split(rng, 3))
    x = self._dropped(x, keys[0])
    ctx = Context(deterministic=rng is None, intermediates=intermediates.scope("cell"))
    hidden, last = self._unroll(x, states, ctx, keys[1])
    found = over_rows(self.readout, self._dropped(hidden, keys[2]))
    found = intermediates("logits", found)
    nll = token_nll(found, targets)
    probabilities = jax.nn.log_softmax(found) if logits else None
    return Output(nll, last, {}, hidden, probabilities)

  def _unroll(
    self, x: jax.Array, state: PyTree, ctx: Context, rng: jax.Array | None
  ) -> tuple[jax.Array, PyTree]:
    """All steps: as the cell does it for whole sequences, or one by one."""
    cell = self.cell
    if isinstance(cell, RIMCell):
      return cell.unroll(x, state, ctx, rng=rng)
    whole = isinstance(cell, LSTMCell | PlasticCell | PlasticLSTMCell)
    if whole and ctx.intermediates.off:
      return cell.unroll(x, state)
    return step_by_step(cell, x, state, ctx)

  def _dropped(self, x: jax.Array, rng: jax.Array | None) -> jax.Array:
    rate = self.config.dropout
    if rng is None or not rate:
      return x
    return x * dropout_factors(rng, x.shape, rate)


def step_by_step(cell: Cell, x: jax.Array, state: PyTree, ctx: Context) -> tuple[jax.Array, PyTree]:
  """What any cell makes of a sequence [batch, time, embed], with its intermediates through time.

  Edits act on [batch, 1, ...].
  """
  outside, seen = ctx.intermediates, set[str]()

  def step(cell: Any, carry: tuple[PyTree, jax.Array], x: jax.Array) -> Any:
    state, position = carry
    inner = _Timed.of(outside.apart().at(position))
    y, state = cell(x, state, dataclasses.replace(ctx, intermediates=inner))
    seen.update(inner.seen)
    return (state, position + 1), (y, inner.captured)

  scan = nn.scan(
    step, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
  )
  (state, _), (y, captured) = scan(cell, (state, jnp.int32(0)), x)
  outside.merge({name: value[:, :, 0] for name, value in captured.items()}, seen)
  return y, state


@dataclasses.dataclass(eq=False)
class _Timed(Intermediates):
  """Intermediates of single steps that see a time axis of length 1."""

  @classmethod
  def of(cls, given: Intermediates) -> "_Timed":
    """The same requests and record."""
    return cls(**{f.name: getattr(given, f.name) for f in dataclasses.fields(given)})

  def __call__(self, name: str, value: jax.Array) -> jax.Array:
    """Passes a site [batch, ...] as [batch, 1, ...]."""
    return super().__call__(name, value[:, None])[:, 0]
