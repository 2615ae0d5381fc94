r"""Sequence-to-sequence LSTM with attention, whose decoder may recode its states.

.. math::
   c_i = \sum_j \alpha_{ij} h_j, \qquad s_i = \mathrm{LSTM}([E y_{i-1}; c_i], s_{i-1}), \qquad
   t_i = \tanh(W_o [s_i; E y_{i-1}; c_i] + b_o), \qquad
   p(y_i) = \mathrm{softmax}(E' t_i)

where :math:`h_j` are the states of a bidirectional encoder, side by side, the weights
:math:`\alpha_{ij}` are those of `layers.memory_attention` for :math:`s_{i-1}`, additive or
multiplicative, and :math:`s_0` is made of the backward encoder's state at the first token.

Source: Bahdanau, Cho and Bengio 2015, section 3 and appendix A, with LSTM cells in place of gated
units and one hidden layer before the output in place of maxout; multiplicative scores, Luong, Pham
and Manning 2015. Recoding: Ulmer 2019, equation 4.1.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.errors import check, check_choice
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import Dropout
from compmod_jax.layers.context import Context
from compmod_jax.layers.deferred_scan import Product
from compmod_jax.layers.embedding import Shared, encoder_decoder_embeddings
from compmod_jax.layers.lstm import LSTMCell, State
from compmod_jax.layers.memory_attention import AdditiveAttention, MultiplicativeAttention
from compmod_jax.layers.output import OutputLayer
from compmod_jax.layers.recoding_signals import size_of, step_size_parameters
from compmod_jax.mechanisms.recoding import signals
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.mechanisms.recoding.descent import recode
from compmod_jax.models.base import ModelConfig

States = tuple[State, ...]
Score = Literal["additive", "multiplicative"]
_SIGNALS = ("none", "surprisal", "argmax", "nll", "entropy", "predicted_error")
_STEPS = ("constant", "learned", "predicted")


@dataclasses.dataclass(frozen=True)
class Seq2SeqLstmConfig(ModelConfig):
  """Sizes and options of the sequence-to-sequence LSTM."""

  family = "LSTM"
  steps_through_time = True

  encoder_layers: int = 1
  """Layers of the encoder, each with a forward and a backward LSTM."""
  decoder_layers: int = 1
  """Layers of the decoder; attention asks with the state of the last."""
  dim: int = 512
  """Width of hidden and cell states, in the encoder of each direction."""
  embedding_dim: int = 512
  """Width of word vectors, and of what the output layer reads."""
  attention: Score = "additive"
  """How positions of the source are scored: by a hidden layer (Bahdanau) or a product (Luong)."""
  attention_dim: int = 512
  """Width of the hidden layer of additive attention."""
  share_embeddings: Shared = "decoder"
  """Which embeddings are one: decoder input and output, or those and the encoder's."""
  max_length: int = 1024
  """Most tokens of a sequence, for which programs are compiled; nothing in the model depends on
  it."""
  dropout: float = 0.2
  """Dropout on word vectors and between layers of the encoder; and with masks that stay for a
  sequence, between layers of the decoder and on what the output layer reads, under which the error
  signal reads it, too."""
  recoding: RecodingConfig = RecodingConfig()
  """Recoding of the decoder's states in training; also in use, unless an option says otherwise.
  By `entropy` and `predicted_error`, a token is predicted from the recoded state; the signals of a
  token (surprisal, argmax, nll) are lowered once it is predicted, for the steps that follow."""

  def __post_init__(self):
    check_numbers(self, "model.")
    check_least(
      self,
      "model.",
      encoder_layers=1,
      decoder_layers=1,
      dim=1,
      embedding_dim=1,
      attention_dim=1,
      max_length=1,
    )
    check(
      0 <= self.dropout < 1,
      f"model.dropout is {self.dropout}; it must be at least 0 and below 1.",
    )
    check_choice("model.share_embeddings", self.share_embeddings, get_args(Shared))
    check_choice("model.attention", self.attention, get_args(Score))
    # The others need copies of the state, several output layers, or labels.
    check_choice("model.recoding.signal", self.recoding.signal, _SIGNALS)
    check_choice("model.recoding.step", self.recoding.step, _STEPS)
    check(
      self.recoding.share == 1 and not self.recoding.only,
      f"model.recoding.share is {self.recoding.share} and model.recoding.only"
      f" {self.recoding.only}, but a {type(self).__name__} recodes at every step. Leave both out.",
    )

  def plain(self) -> "Seq2SeqLstmConfig":
    """The same model without recoding."""
    return dataclasses.replace(self, recoding=RecodingConfig())

  def describe(self) -> str:
    """Sizes and recoding, in a few words."""
    c = self.recoding
    how = f"recoding by {c.signal}, {c.step} step size from {c.size:g}"
    return (
      f"{self.encoder_layers} + {self.decoder_layers} layers of width {self.dim} (bidirectional"
      f" encoder, {self.attention} attention, {how if c.active else 'no recoding'})"
    )

  def marks(self) -> dict[str, str]:
    """Where states are recoded, and how."""
    c = self.recoding
    if not c.active:
      return {}
    does = f"h and c go down the gradient of the {c.signal}: {c.step} step size from {c.size:g}"
    recoded = range(c.lowest(self.decoder_layers), self.decoder_layers)
    names = [f"decoder/layer_{i}/output_recoded" for i in recoded]
    return dict.fromkeys(names, does)

  def decoding_stack(self, task: str) -> tuple[str, int]:
    """The decoder, unless it recodes itself."""
    check(
      not self.recoding.applies(train=False),
      f"recode_layer is given, but the model recodes its own states (model.recoding.signal ="
      f" {self.recoding.signal}). Leave one of the two out: recode_layer, or by --recoding"
      " signal=none that of the model.",
    )
    return "decoder", self.decoder_layers

  def error_prediction_site(self) -> str | None:
    """The losses that the predictor expects, if states are recoded by it."""
    return "decoder/predicted_error" if self.recoding.signal == "predicted_error" else None

  def seq2seq(self, source_vocab: int, target_vocab: int, pad: int) -> "Seq2SeqLstm":
    """The module."""
    return Seq2SeqLstm(self, source_vocab, target_vocab, pad)


class Memory(NamedTuple):
  """What the decoder attends to, the same for all hypotheses.

  Attributes:
    values: the encoder's output, [batch, keys, 2 * dim].
    keys: what attention makes of it, [batch, keys, attention_dim]; multiplicative, [.., dim].
    mask: true where it is a token, [batch, keys].
  """

  values: jax.Array
  keys: jax.Array
  mask: jax.Array


class Given(NamedTuple):
  """What all steps of a pass have in common.

  Attributes:
    memory: what is attended to.
    recoding: how states are recoded; without a signal they are not.
    factors: dropout on what each decoder layer reads and on what the output layer reads,
      [batch, 1, dim]; None: none there.
  """

  memory: Memory
  recoding: RecodingConfig
  factors: tuple[jax.Array | None, ...]

  @property
  def waits(self) -> bool:
    """Whether recoding waits for the token that is predicted: the next step reads it."""
    return self.recoding.supervised


class Seq2SeqLstm(nn.Module):
  """See the module's docstring.

  Sites: `encoder/layer_<i>/output` and `encoder/output` [batch, time, 2 * dim];
  `decoder/cross/attention` [batch, 1, time, keys]; `decoder/layer_<i>/output` and `.../cell`
  [batch, time, dim], hidden and cell state as a step computes them; `logits`. Where states are
  recoded, `decoder/layer_<i>/output_recoded` and `.../cell_recoded`, from which the next step
  starts, and `decoder/recoding_error` [batch, time], the signal before; of signals that wait for
  the token, these stand at the position that reads it, one later. By `predicted_error` also
  `decoder/predicted_error` [batch, time], the loss that is expected of the prediction, of which
  gradients reach the predictor alone. Edits of the decoder act step by
  step, on [batch, 1, dim].

  Attributes:
    config: sizes and options.
    source_vocab: number of source tokens.
    target_vocab: number of target tokens.
    pad: the token that marks padding, which follows the tokens.
  """

  config: Seq2SeqLstmConfig
  source_vocab: int
  target_vocab: int
  pad: int = 0

  def setup(self):
    """Makes embeddings, cells, attention and output layer."""
    c = self.config
    self.decoder_embedding, self.encoder_embedding, self.output_embedding = (
      encoder_decoder_embeddings(
        c.share_embeddings, self.source_vocab, self.target_vocab, c.embedding_dim
      )
    )
    below = [c.embedding_dim, *[2 * c.dim] * (c.encoder_layers - 1)]
    self.encoder_forward = [LSTMCell(width, c.dim) for width in below]
    self.encoder_backward = [LSTMCell(width, c.dim) for width in below]
    self.first_state = _dense(c.decoder_layers * c.dim)
    self.cross = (
      AdditiveAttention(c.dim, 2 * c.dim, c.attention_dim)
      if c.attention == "additive"
      else MultiplicativeAttention(c.dim, 2 * c.dim)
    )
    read = c.embedding_dim + 2 * c.dim
    below = [read, *[c.dim] * (c.decoder_layers - 1)]
    self.decoder = [LSTMCell(width, c.dim) for width in below]
    self.readout = _dense(c.embedding_dim)
    recoded = c.decoder_layers - c.recoding.lowest(c.decoder_layers)
    self.step_sizes = StepSizes(c.recoding, recoded, c.dim)
    if self.config.error_prediction_site():
      self.error_predictor = ErrorPredictor(c.embedding_dim)
    self.drop = Dropout(c.dropout)

  def __call__(
    self,
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch target_time vocab"]:
    """Logits of the token that follows each target position.

    Args:
      source: source tokens, padded.
      target: target tokens shifted right (the first is the start token), padded.
      deterministic: no dropout.
      intermediates: sites to read or change.
    """
    options = {"deterministic": deterministic, "intermediates": intermediates}
    return intermediates("logits", self.output_layer(source, target, **options).logits())

  def output_layer(
    self,
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> OutputLayer:
    """What `__call__` makes the logits of, given the same."""
    memory = self.encode(source, deterministic=deterministic, intermediates=intermediates)
    given = self._given(memory, deterministic)
    embedded = self.drop(self.decoder_embedding(target), deterministic=deterministic)
    state = self._initial_state(memory, given, 1)

    def step(module: "Seq2SeqLstm", state: Any, x: Any) -> tuple[Any, tuple[jax.Array, Any]]:
      inner = intermediates.apart()
      here = inner.at(state["position"])
      embedded, tokens = (leaf[:, None] for leaf in x)
      read, state = module._step(state, embedded, tokens, given, here)
      seen.update(inner.seen)
      return state, (read[:, 0], inner.captured)

    seen: set[str] = set()
    scan = nn.scan(
      step, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
    )
    _, (read, captured) = scan(self, state, (embedded, target))
    intermediates.merge(
      {name: _through_time(name, value) for name, value in captured.items()}, seen
    )
    return self.output_embedding.output(read)

  def encode(
    self,
    source: Int[Array, "batch source_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Memory:
    """The source as the decoder reads it."""
    intermediates, valid = intermediates.scope("encoder"), source != self.pad
    x, turned = self.encoder_embedding(source), _turned(valid)
    for i, (ahead, back) in enumerate(
      zip(self.encoder_forward, self.encoder_backward, strict=True)
    ):
      x, zeros = self.drop(x, deterministic=deterministic), ahead.initial_state(len(source))
      one, _ = ahead.unroll(x, zeros)
      other, _ = back.unroll(_take(x, turned), zeros)
      x = jnp.concatenate([one, _take(other, turned)], axis=-1)
      x = intermediates.scope(f"layer_{i}")("output", x)
    x = intermediates("output", x)
    return Memory(x, self.cross.keys(x), valid)

  def prefill(
    self,
    source: Int[Array, "batch source_time"],
    *,
    beams: int,
    length: int,
    routing: bool = False,
    intermediates: Intermediates = OFF,
  ) -> dict[str, Any]:
    """The cache with which decoding starts: leaves [batch, beams or 1, ...] and a position.

    Args:
      source: source tokens, padded.
      beams: hypotheses an example.
      length: most steps.
      routing: nothing is routed here.
      intermediates: sites of the encoder to read or change.
    """
    check(
      length <= self.config.max_length,
      f"length is {length} but model.max_length is {self.config.max_length}. Decode fewer steps or"
      " raise model.max_length.",
    )
    memory = self.encode(source, intermediates=intermediates)
    state = self._initial_state(memory, self._given(memory, True), beams)
    shared = jax.tree.map(lambda leaf: leaf[:, None], memory)
    return {"decoder": state, "memory": shared, "routing": {}}

  def step(
    self,
    cache: dict[str, Any],
    tokens: Int[Array, "batch beams"],
    *,
    intermediates: Intermediates = OFF,
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""
    memory = jax.tree.map(lambda leaf: leaf[:, 0], cache["memory"])
    embedded = self.decoder_embedding(tokens)
    read, state = self._step(
      cache["decoder"], embedded, tokens, self._given(memory, True), intermediates
    )
    return intermediates("logits", self.output_embedding.logits(read)), {**cache, "decoder": state}

  def _given(self, memory: Memory, deterministic: bool) -> Given:
    """What all steps of a pass have in common."""
    c, recoding = self.config, self.config.recoding
    applies = recoding.applies(train=not deterministic)
    factors: list[jax.Array | None] = [None] * (c.decoder_layers + 1)
    if not deterministic and c.dropout:
      widths = [*[c.dim] * (c.decoder_layers - 1), c.embedding_dim]
      for number, width in enumerate(widths, 1):
        ones = jnp.ones((len(memory.mask), 1, width))
        factors[number] = self.drop(ones, deterministic=False)
    return Given(memory, recoding if applies else RecodingConfig(), tuple(factors))

  def _initial_state(self, memory: Memory, given: Given, beams: int) -> dict[str, Any]:
    """The decoder's state before the start token, for so many hypotheses."""
    c, batch = self.config, len(memory.mask)
    # The backward state at the first token has read all of the source.
    first = jnp.tanh(self.first_state(memory.values[:, 0, c.dim :]))
    first = jnp.broadcast_to(first[:, None], (batch, beams, first.shape[-1]))
    layers = tuple(State(h, jnp.zeros_like(h)) for h in jnp.split(first, c.decoder_layers, axis=-1))
    state = {"position": jnp.int32(0), "layers": layers}
    if given.waits:
      read = jnp.zeros((batch, beams, c.embedding_dim + 2 * c.dim))
      state |= {"before": layers, "read": read}
    return state

  def _step(
    self,
    state: dict[str, Any],
    embedded: Float[Array, "batch beams embed"],
    tokens: Int[Array, "batch beams"],
    given: Given,
    intermediates: Intermediates,
  ) -> tuple[Float[Array, "batch beams read"], dict[str, Any]]:
    """One more token of every hypothesis: what the output layer reads, and the next state."""
    before, memory = state["layers"], given.memory
    ctx = Context(intermediates=intermediates.scope("decoder"))
    if given.waits:
      started = state["position"] > 0  # nothing was predicted before the start token
      before = self._recoded(state["before"], state["read"], before, tokens, started, given, ctx)
    context = self.cross(before[-1].h, memory.keys, memory.values, memory.mask, ctx.scope("cross"))
    read = jnp.concatenate([embedded, context], axis=-1)
    after = self._advance(before, read, given, ctx)
    if given.recoding.active and not given.waits:
      after = self._recoded(before, read, after, tokens, jnp.bool_(True), given, ctx)
    found = self._read(after[-1].h, read, given)
    predicts = self.config.error_prediction_site() is not None
    if predicts and (self.is_initializing() or ctx.intermediates.wants("predicted_error")):
      expected = self.error_predictor(jax.lax.stop_gradient(found))
      ctx.intermediates("predicted_error", expected)
    state = {"position": state["position"] + 1, "layers": after}
    if given.waits:
      state |= {"before": before, "read": read}
    return found, state

  def _advance(
    self,
    before: States,
    read: jax.Array,
    given: Given,
    ctx: Context,
    added: tuple[State | None, ...] | None = None,
  ) -> States:
    """The states after a step of all layers; `added` to each, if any, before it is read."""
    after, x = list[State](), read
    for number, (cell, state) in enumerate(zip(self.decoder, before, strict=True)):
      factor = given.factors[number]
      x = x if factor is None else x * factor
      more = None if added is None else added[number]
      x, state = cell(x, state, ctx.scope(f"layer_{number}"), added=more)
      after.append(state)
    return tuple(after)

  def _read(self, hidden: jax.Array, read: jax.Array, given: Given) -> jax.Array:
    """What the output layer reads."""
    found = jnp.tanh(over_rows(self.readout, jnp.concatenate([hidden, read], axis=-1)))
    factor = given.factors[-1]
    return found if factor is None else found * factor

  def _recoded(
    self,
    before: States,
    read: jax.Array,
    after: States,
    tokens: jax.Array,
    active: Bool[Array, ""],
    given: Given,
    ctx: Context,
  ) -> States:
    """The states after a step, recoded.

    Args:
      before: states before the step.
      read: what the step read.
      after: states after it.
      tokens: what was to be predicted there, for signals that look at it, [batch, beams].
      active: whether anything is recoded here.
      given: of the pass.
      ctx: intermediates.
    """
    recoding, shape = given.recoding, after[0].h.shape
    lowest = recoding.lowest(len(after))
    edits = dataclasses.replace(ctx, intermediates=ctx.intermediates.apart())

    def error(added: States) -> Float[Array, " rows"]:
      added = jax.tree.map(lambda leaf: leaf.reshape(shape), added)
      hidden = self._advance(before, read, given, edits, (*[None] * lowest, *added))[-1].h
      found = self._read(hidden, read, given)
      if recoding.signal == "predicted_error":
        return self.error_predictor(found).reshape(-1)
      logits = self.output_embedding.logits(found)
      rows = logits.reshape(-1, logits.shape[-1])
      if recoding.signal == "entropy":
        return signals.predictive_entropy(rows[None])
      token = jnp.argmax(rows, -1) if recoding.signal == "argmax" else tokens.reshape(-1)
      kind: Any = recoding.signal
      return signals.value(kind, signals.likelihood(rows, token).nll)

    states = jax.tree.map(lambda leaf: leaf.reshape(-1, shape[-1]), after[lowest:])
    sizes = jax.tree.map(lambda size: size * active, self.step_sizes(states))
    nothing = jax.tree.map(jnp.zeros_like, states)
    found = recode(error, nothing, sizes, steps=recoding.steps, through=recoding.through)
    ctx.intermediates("recoding_error", jnp.where(active, found.error, 0).reshape(shape[:2]))
    moved = jax.tree.map(
      lambda leaf, move: leaf + move.reshape(shape), after[lowest:], found.activations
    )
    passed = list[State]()
    for number, state in enumerate((*after[:lowest], *moved)):
      inner = ctx.scope(f"layer_{number}").intermediates
      hidden = inner("output_recoded", state.h)
      passed.append(State(hidden, inner("cell_recoded", state.c)))
    return tuple(passed)


class StepSizes(nn.Module):
  """Step sizes of recoding, with the parameters of those that are learned or predicted.

  Attributes:
    config: which.
    layers: how many have states that are recoded.
    dim: width of these states.
  """

  config: RecodingConfig
  layers: int
  dim: int

  def setup(self):
    """Makes the parameters, if there are any."""
    made = step_size_parameters(self.config, self.layers, self.dim)
    self.sizes = {name: self.param(name, *given) for name, given in made.items()}

  def __call__(self, after: States) -> States:
    """For every layer and kind of state a number, or one for each row of the states."""
    biases = {name for name in self.sizes if name == "steps" or name.endswith("_bias")}
    weights = {name: value for name, value in self.sizes.items() if name not in biases}
    others = {name.removesuffix("_bias"): self.sizes[name] for name in biases}
    return size_of(self.config)(Product(weights), others, after)


class ErrorPredictor(nn.Module):
  """The loss in nats that is expected of a prediction, from what the output layer reads.

  A hidden layer with tanh, then softplus: it is smooth, since states go down its gradient.

  Attributes:
    units: of the hidden layer.
  """

  units: int

  @nn.compact
  def __call__(self, read: Float[Array, "*rows read"]) -> Float[Array, "*rows"]:
    """A number of at least 0 for every row."""
    hidden = jnp.tanh(over_rows(_dense(self.units), read))
    return jax.nn.softplus(over_rows(_dense(1), hidden))[..., 0]


def _dense(units: int) -> nn.Dense:
  """An affine map of the last axis."""
  return nn.Dense(units, kernel_init=logical(nn.initializers.glorot_uniform(), "embed", "mlp"))


def _turned(valid: Bool[Array, "batch time"]) -> Int[Array, "batch time"]:
  """Where the tokens of every row stand in reverse order; padding stays behind them."""
  count, positions = jnp.sum(valid, axis=1, keepdims=True), jnp.arange(valid.shape[1])[None]
  return jnp.where(positions < count, count - 1 - positions, positions)


def _take(x: Float[Array, "batch time dim"], positions: Int[Array, "batch time"]) -> jax.Array:
  """The vectors at these positions of every row."""
  return jnp.take_along_axis(x, positions[..., None], axis=1)


def _through_time(name: str, value: jax.Array) -> jax.Array:
  """A site of single positions [batch, time, 1, ...] as one of the whole sequence."""
  if name.endswith("/attention"):  # [batch, time, heads, 1, keys]
    return value[:, :, :, 0].swapaxes(1, 2)
  return value[:, :, 0]
