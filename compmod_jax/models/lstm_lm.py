"""The recurrent language model, whose states can be recoded at every step."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import copies_of_rows, over_rows, rows_of_copies
from compmod_jax.core.sharding import logical
from compmod_jax.layers import lm_head, lstm, recoded_lstm
from compmod_jax.layers.lstm import State
from compmod_jax.layers.recoding_signals import (
  dropout_factors,
  signal_of,
  size_of,
  step_size_parameters,
  word_factors,
)
from compmod_jax.mechanisms.recoding.config import COPIED, RecodingConfig
from compmod_jax.models.base import ModelConfig

_UNIFORM = 0.1  # fresh embeddings and decoders lie within plus and minus this
# What recoding lowers, in words; {} is the number of samples.
_SIGNALS = {
  "surprisal": "surprisal of the right token",
  "argmax": "surprisal of the most probable token",
  "nll": "negative log-likelihood of the right token",
  "entropy": "entropy of the next token's distribution",
  "mc_dropout": "entropy of the mean of {} distributions, under dropout",
  "locked_dropout": "entropy of the mean of {} copies, under masks on layers' outputs",
  "variational_rnn": "entropy of the mean of {} copies, under masks on words, inputs and states",
  "ensemble": "entropy of the mean of {} decoders",
  "weak_supervision": "loss of a diagnostic classifier",
}


@dataclasses.dataclass(frozen=True)
class LstmConfig(ModelConfig):
  """Sizes and options; the defaults are the recipe of Gulordava et al. 2018."""

  family = "LSTM"
  steps_through_time = True

  layers: int = 2
  """LSTM layers."""
  dim: int = 650
  """Width of hidden and cell states."""
  embedding_dim: int = 650
  """Width of word vectors; that of hidden states if `tied`."""
  tied: bool = False
  """The decoder's weights are the word vectors."""
  dropout: float = 0.15
  """Dropout in training, with every error signal alike: on word vectors, between layers, and on
  what the decoder reads for the prediction that is scored. The error signal reads the decoder's
  input under the same mask. A signal with masks of its own puts them in the place of these:
  mc_dropout in that one's; locked_dropout between layers and before the decoder;
  variational_rnn everywhere."""
  recoding: RecodingConfig = RecodingConfig()
  """Recoding in training; also in use, unless an option says otherwise."""

  def __post_init__(self):
    check_numbers(self, "model.")
    check_least(self, "model.", layers=1, dim=1, embedding_dim=1)
    check(
      not self.tied or self.dim == self.embedding_dim,
      f"model.tied needs model.embedding_dim = model.dim, but they are {self.embedding_dim} and"
      f" {self.dim}; make them equal or set tied to False.",
    )
    check(
      0 <= self.dropout < 1,
      f"model.dropout is {self.dropout}; it must be at least 0 and below 1.",
    )
    check_choice("model.recoding.signal", self.recoding.signal, ("none", *_SIGNALS))
    check(
      not (self.tied and self.recoding.members > 1),
      "model.tied shares one table with the embeddings, but model.recoding.signal = ensemble has"
      " several decoders; set tied to False.",
    )

  def plain(self) -> "LstmConfig":
    """The same model without recoding."""
    return dataclasses.replace(self, recoding=RecodingConfig())

  def parts(self, vocab: int) -> list[tuple[str, str, str]]:
    """Every part from input to output: name, pattern of its parameters' names, what it is."""
    r, dim = self.recoding, self.dim
    found = [("embedding", "embedding", f"{vocab:,} tokens x {self.embedding_dim}")]
    for i in range(self.layers):
      below = dim if i else self.embedding_dim
      found.append((f"layer_{i}/lstm", rf"(input|recurrent|bias)_{i}", f"{below} -> {dim}"))
      if r.active and i >= r.lowest(self.layers):
        number = i - r.lowest(self.layers)  # among those that are recoded
        found.append((f"layer_{i}/recoding", rf"step_{number}_.*", self._moves()))
    many = f"{r.members} of {dim}" if r.members > 1 else str(dim)
    tied = ", the embedding once more" if self.tied else ""
    found.append(("decoder", r"decoder(_bias)?", f"{many} -> {vocab:,}{tied}"))
    if r.active:
      found.append(("recoding signal", "anchor|steps", _SIGNALS[r.signal].format(r.samples)))
    return found

  def _moves(self) -> str:
    r = self.recoding
    how = {
      "constant": f"a step of {r.size:g}",
      "learned": f"a learned step, at first {r.size:g}",
      "predicted": f"a step predicted from h, at first {r.size:g}",
      "safe": f"a safe step of at most {r.size:g}",
    }
    often = f", {r.steps} times" if r.steps > 1 else ""
    when = {"always": "", "train": "; in training alone", "test": "; in use alone"}[r.when]
    return f"h and c go down the signal's gradient by {how[r.step]}{often}{when}"

  def warnings(self) -> list[str]:
    """What is allowed here but hardly meant, a sentence each; empty if nothing is."""
    r = self.recoding
    if r.signal in ("surprisal", "argmax") and r.step == "constant" and r.size > 5:
      return [
        f"model.recoding.size is {r.size:g}; steps over 5 along surprisal made training unstable in"
        " Ulmer 2019, Table 5.1."
      ]
    return []

  def describe(self) -> str:
    """Sizes and recoding, in a few words."""
    c = self.recoding
    how = "no recoding"
    if c.active:
      where = " of the top layer" if c.layers == "top" else ""
      signal = c.signal.replace("_", " ")
      how = f"recoding{where} by {signal}, {c.step} step size from {c.size:g}"
    return f"{self.layers} layers of width {self.dim}, {how}"

  def recurrent(self, vocab: int) -> "LstmLM":
    """The module."""
    return LstmLM(self, vocab)


class Output(NamedTuple):
  """What the model makes of a stretch of text.

  Attributes:
    nll: negative log-likelihood of every target in nats, [batch, time]; in training with an
      ensemble the mean of its members'.
    states: of every layer after the last step, to go on from.
    steps: of every step [batch, time, ...], where states are recoded: `error` before recoding,
      `sizes`, the step sizes, a (h, c) for each layer; and if measured `error_after` and
      `nll_after`, losses of the same targets from the recoded top state.
    hidden: what the decoder reads, [batch, time, dim]; copies side by side along the batch.
    logits: log-probabilities [batch, time, vocab], if they were asked for.
  """

  nll: jax.Array
  states: tuple[State, ...]
  steps: dict[str, Any]
  hidden: jax.Array
  logits: jax.Array | None = None


class Given(NamedTuple):
  """What recoding is given besides the text.

  Attributes:
    active: factors on the step sizes, [batch, time].
    labels: of every position, for weak supervision, [batch, time].
    classifier: `weight` [dim] and `bias` [] of the classifier for weak supervision.
    noise: key of the masks that the error signal draws.
    keys: data of the keys of every position [time, ...], in place of those split from `noise`.
    valid: true where there is a real token, [batch, time], for edits that ask; none: everywhere.
    alike: these masks are the same for all examples, so that what is made of an example does not
      depend on its place in the batch.
  """

  active: jax.Array | None = None
  labels: jax.Array | None = None
  classifier: Mapping[str, jax.Array] | None = None
  noise: jax.Array | None = None
  keys: jax.Array | None = None
  valid: jax.Array | None = None
  alike: bool = False


class LstmLM(nn.Module):
  """LSTM language model (Gulordava et al. 2018; Ulmer 2019, chapters 3.2 and 4).

  Attributes:
    config: sizes and options.
    vocab: number of tokens.
  """

  config: LstmConfig
  vocab: int

  def setup(self):
    """Makes the parameters."""
    c, r = self.config, self.config.recoding

    def within(bound: float) -> Any:
      return lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    def matrix(name: str, shape: tuple[int, ...], bound: float, *axes: str) -> jax.Array:
      return self.param(name, logical(within(bound), *axes), shape)

    bound = float(c.dim) ** -0.5
    self.embedding = matrix("embedding", (self.vocab, c.embedding_dim), _UNIFORM, "vocab", "embed")
    numbers, gates = range(c.layers), 4 * c.dim
    below = [c.embedding_dim, *[c.dim] * (c.layers - 1)]
    axes = ("embed", "mlp")
    self.inputs = [matrix(f"input_{i}", (below[i], gates), bound, *axes) for i in numbers]
    self.recurrent = [matrix(f"recurrent_{i}", (c.dim, gates), bound, *axes) for i in numbers]
    self.biases = [matrix(f"bias_{i}", (gates,), bound, "mlp") for i in numbers]
    spread = r.anchor.variance**0.5
    normal = nn.initializers.normal(spread)
    table = normal if r.members > 1 and r.anchor.initial else within(_UNIFORM)
    shape = (r.members, self.vocab, c.dim)
    if not c.tied:
      self.decoder = self.param("decoder", logical(table, "members", "vocab", "embed"), shape)
    self.decoder_bias = self.param(
      "decoder_bias", logical(nn.initializers.zeros, "members", "vocab"), shape[:2]
    )
    if r.signal == "ensemble":
      anchors = (1 if r.anchor.shared else r.members, *shape[1:])
      self.anchor = self.param("anchor", logical(normal, "members", "vocab", "embed"), anchors)
    made = step_size_parameters(r, c.layers - r.lowest(c.layers), c.dim)
    self.sizes = {name: self.param(name, *given) for name, given in made.items()}

  def initial_states(self, batch: int) -> tuple[State, ...]:
    """States of zeros, [batch, dim], or with several copies [batch, copies, dim]."""
    copies = self.config.recoding.copies
    zeros = jnp.zeros((batch, *((copies,) if copies > 1 else ()), self.config.dim))
    return tuple(State(zeros, zeros) for _ in range(self.config.layers))

  def __call__(
    self,
    tokens: Int[Array, "batch time"],
    targets: Int[Array, "batch time"],
    states: tuple[State, ...],
    *,
    rng: jax.Array | None = None,
    recode: bool = True,
    given: Given = Given(),
    measure: bool = False,
    logits: bool = False,
    intermediates: Intermediates = OFF,
  ) -> Output:
    """Reads a stretch of text and predicts the target of every position.

    Args:
      tokens: what is read.
      targets: what is predicted, commonly the next token.
      states: from before the first token.
      rng: key of dropout; none to have none.
      recode: whether states are recoded, where the configuration says how.
      given: what recoding needs besides the text.
      measure: also measure the error and the losses after recoding.
      logits: also return log-probabilities.
      intermediates: sites to read or change.
    """
    recoding = self.config.recoding if recode else RecodingConfig()
    x, train = self._embedded(recoding, tokens, rng, given), rng is not None
    factors = self._factors(recoding, rng, given, (tokens.shape[1], len(tokens)))
    targets = targets.T
    if not recoding.active and intermediates is OFF:
      last, hidden = self._by_layer(x, states, factors)
      out, nll = {}, None
    else:
      last, out = self._by_step(
        recoding, x, targets, states, factors, given, measure, intermediates
      )
      hidden = out["top"] if recoding.supervised or not recoding.active else out["recoded"]
      hidden = hidden * factors["out"] if "out" in factors else hidden
      nll = self._known(out, hidden, targets)
    tables, biases = self._tables(), self.decoder_bias
    if nll is None:
      read = tables, biases
      if train and self.config.recoding.anchor.independent:
        read = lm_head.with_own_gradients(tables, biases)
      nll = lm_head.losses(hidden, *read, targets, separately=train)
    steps = {name: out[name] for name in ("error", "error_after", "sizes") if name in out}
    if measure and steps:
      after = out["recoded"]
      after = after * factors["out"] if "out" in factors else after
      steps["nll_after"] = lm_head.losses(after, tables, biases, targets)
    found = None
    if logits:
      found = lm_head.log_probabilities(hidden, tables, biases, len(tokens)).swapaxes(0, 1)
    steps = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), steps)
    return Output(nll.T, last, steps, hidden.swapaxes(0, 1), found)

  def _by_layer(
    self, x: jax.Array, states: tuple[State, ...], factors: Mapping[str, jax.Array]
  ) -> tuple[tuple[State, ...], jax.Array]:
    """Layer by layer, every product over the whole stretch where there is one."""
    last, batch = [], x.shape[1]
    x = jnp.tile(x, (1, self.config.recoding.copies, 1))
    for number, state in enumerate(jax.tree.map(rows_of_copies, states)):
      weights = (self.inputs[number], self.recurrent[number], self.biases[number])
      x, state = lstm.layer(x, lstm.Weights(*weights), state)
      last.append(jax.tree.map(lambda leaf: copies_of_rows(leaf, batch), state))
      name = "out" if number + 1 == len(states) else f"between_{number + 1}"
      x = x * factors[name] if name in factors else x
    return tuple(last), x

  def _by_step(
    self, recoding, x, targets, states, factors, given, measure, intermediates
  ) -> tuple[tuple[State, ...], dict[str, Any]]:
    """Step by step, all layers together."""
    copies, batch = self.config.recoding.copies, targets.shape[1]
    xs = {"target": targets, **factors}
    if copies == 1 and lstm.in_steps(x):
      xs["read"] = x
    else:
      # Copies that read the same have one product.
      first = over_rows(lambda rows: rows @ self.inputs[0] + self.biases[0][None], x)
      xs["first"] = jnp.tile(first, (1, copies, 1)) if first.shape[1] == batch else first
    if given.active is not None:
      xs["active"] = jnp.tile(given.active.T, (1, copies))
    if intermediates is not OFF:
      valid = jnp.ones(targets.T.shape) if given.valid is None else given.valid
      xs["valid"] = jnp.tile(valid.T, (1, copies)).astype(jnp.float32)
    if given.labels is not None:
      xs["label"] = given.labels.T
    if recoding.signal == "mc_dropout":
      keys = given.keys
      if keys is None:
        keys = jax.random.key_data(jax.random.split(_needed(given.noise), len(x)))
      xs["key"] = keys
    weights, others = self._weights()
    if given.classifier is not None:
      others["classifier"] = jax.lax.stop_gradient(dict(given.classifier))
    last, out = recoded_lstm.scan(
      signal_of(recoding, alike=given.alike),
      size_of(recoding),
      recoding,
      weights,
      others,
      jax.tree.map(rows_of_copies, states),
      xs,
      measure=measure,
      intermediates=intermediates,
    )
    return jax.tree.map(lambda leaf: copies_of_rows(leaf, batch), last), out

  def _known(
    self, out: Mapping[str, Any], hidden: jax.Array, targets: jax.Array
  ) -> jax.Array | None:
    """Losses that the signal has computed already; None where it has not."""
    if "vector" in out:
      known = (targets, out["nll"], out["powers"], out["total"], out["vector"])
      return lm_head.known_losses(hidden, self._tables()[0], self.decoder_bias[0], *known)
    return out.get("nll")

  def _factors(
    self, recoding: RecodingConfig, rng: Any, given: Given, shape: tuple[int, int]
  ) -> dict[str, jax.Array]:
    """Dropout on what layers and decoder read: `between_<l>` and `out`, [time, rows, dim].

    A variational RNN has `recurrent_<l>` besides.
    """
    c, (time, batch) = self.config, shape
    found = {}
    for number in range(1, c.layers + 1):
      name = "out" if number == c.layers else f"between_{number}"
      if recoding.signal in COPIED:
        keep = self._locked(recoding, given, number, (batch, c.dim))
        found[name] = jnp.broadcast_to(keep[None], (time, *keep.shape))
      else:
        factors = self._dropped(rng, number, (time, batch * c.recoding.copies, c.dim))
        found |= {} if factors is None else {name: factors}
      if recoding.signal == "variational_rnn":
        keep = self._locked(recoding, given, c.layers + number, (batch, c.dim))
        found[f"recurrent_{number - 1}"] = jnp.broadcast_to(keep[None], (time, *keep.shape))
    return found

  def _locked(
    self, recoding: RecodingConfig, given: Given, place: int, shape: tuple[int, int]
  ) -> jax.Array:
    """Factors for a whole stretch at a place, others for each copy, [rows, dim]."""
    batch, dim = shape
    key = jax.random.fold_in(_needed(given.noise), place)
    rows = recoding.copies * (1 if given.alike else batch)
    keep = dropout_factors(key, (rows, dim), recoding.rate)
    return jnp.repeat(keep, batch, axis=0) if given.alike else keep

  def _weights(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """What steps multiply with, and what else they use."""
    rows = self._tables().reshape(-1, self.config.dim)
    # Turned round once: products of few rows with the table as it is take twice as long on a CPU.
    weights = {
      "decoder": jax.lax.optimization_barrier(rows.T),
      "decoder_rows": jax.lax.stop_gradient(rows),
    }
    others: dict[str, Any] = {"decoder_bias": self.decoder_bias.reshape(-1)}
    for number in range(self.config.layers):
      both = self.inputs[number], self.recurrent[number]
      weights[f"cell_{number}"] = lstm.beside_each_other(*both)
      others[f"bias_{number}"] = self.biases[number]
      if number:
        weights[f"input_{number}"] = self.inputs[number]
    weights["recurrent_0"] = self.recurrent[0]
    for name, value in self.sizes.items():
      if name == "steps":
        others[name] = value
      elif name.endswith("_bias"):
        others[name.removesuffix("_bias")] = value
      else:
        weights[name] = value
    return weights, others

  def _tables(self) -> jax.Array:
    """The decoders' weights, [members, vocab, dim]."""
    return self.embedding[None] if self.config.tied else self.decoder

  def _embedded(
    self, recoding: RecodingConfig, tokens: jax.Array, rng: jax.Array | None, given: Given
  ) -> jax.Array:
    """Word vectors, [time, batch, embed]; in a variational RNN those of all copies."""
    x = self.embedding[tokens.T]
    if recoding.signal == "variational_rnn":
      batch, copies = len(tokens), recoding.copies
      rows = jnp.arange(copies * batch)
      owners = rows // batch if given.alike else rows
      key = jax.random.fold_in(_needed(given.noise), 2 * self.config.layers + 1)
      words = jnp.tile(tokens.T, (1, copies))
      keep = word_factors(key, words, owners, self.vocab, recoding.rate)
      read = self._locked(recoding, given, 0, (batch, self.config.embedding_dim))
      return jnp.tile(x, (1, copies, 1)) * keep[..., None] * read[None]
    factors = self._dropped(rng, 0, x.shape)
    return x if factors is None else x * factors

  def _dropped(self, rng, place: int, shape: tuple[int, ...]) -> jax.Array | None:
    """Factors of dropout at a place, None where there is none."""
    if rng is None or self.config.dropout == 0:
      return None
    return dropout_factors(jax.random.fold_in(rng, place), shape, self.config.dropout)


def _needed(key: jax.Array | None) -> jax.Array:
  if key is None:
    raise UserError("This recoding draws random masks; give a key as `given.noise`.")
  return key
