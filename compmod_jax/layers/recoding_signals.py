"""Error signals of a language model's output layer, and step sizes, as recoding takes them.

Weights: `decoder` [hidden, vocab], or [hidden, members * vocab] for an ensemble; the same turned
round, which no gradient reaches: `decoder_rows`; `step_<i>_<j>`, layer j of the predictor of step
size i. Others: `decoder_bias`, `step_<i>_<j>`, `steps`, `classifier`. Inputs of a step: `target`
[batch], `label` [batch], `out`, factors on the decoder's input (mc_dropout has masks of its
own in their place), and `key`, the step's key.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from compmod_jax.core.random_bits import random_bits, threefry
from compmod_jax.core.sharding import logical
from compmod_jax.core.types import Params
from compmod_jax.layers.deferred_scan import Product
from compmod_jax.layers.lstm import State
from compmod_jax.layers.recoded_lstm import Inputs, Signal, States, StepSize
from compmod_jax.mechanisms.recoding import signals
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.mechanisms.recoding.signals import Supervised

_UNITS = (300, 100, 1)  # of the layers that predict a step size


@dataclasses.dataclass(frozen=True)
class OfToken:
  """A function of the likelihood of the right token, or of the most probable one (`argmax`).

  Attributes:
    kind: which function.
  """

  kind: Supervised

  def error(self, product: Product, others: Params, top: jax.Array, x: Inputs) -> jax.Array:
    """The signal, [batch]."""
    logits = self._logits(product, others, top, x)
    found = signals.likelihood(logits, self._token(logits, x))
    return signals.value(self.kind, found.nll)

  def kept(
    self, product: Product, others: Params, top: jax.Array, x: Inputs
  ) -> dict[str, jax.Array]:
    """`nll` of the right token."""
    logits = self._logits(product, others, top, x)
    return {"nll": signals.likelihood(logits, x["target"]).nll}

  def closed(
    self, product: Product, others: Params, top: jax.Array, x: Inputs, through: bool
  ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """See `Signal`; keeps `nll`, and for its gradient the likelihood and `vector` W^T (o - e_y)."""
    times = product if through else product.fixed
    logits = self._logits(product, others, top, x, times)
    gold = signals.likelihood(logits, x["target"])
    token = self._token(logits, x)
    looked = gold if self.kind != "argmax" else signals.likelihood(logits, token)
    kept = {"nll": gold.nll}
    if through:
      vector = times("decoder", looked.error, transposed=True)
    else:
      # W^T (o - e_y) = W^T o - W_y: the product takes the powers as they are.
      rows = product.weights["decoder_rows"]
      mean = times("decoder", gold.powers, transposed=True) / gold.total
      # Where no gradient is taken, nothing reads these, and compilers drop them.
      kept |= {"powers": gold.powers, "total": gold.total, "vector": mean - rows[x["target"]]}
      vector = mean - rows[token]
    slope = signals.slope(self.kind, looked.nll)
    gradient = slope[:, None] * vector
    if "out" in x:
      gradient = gradient * x["out"]
    error = signals.value(self.kind, looked.nll)
    # Without the stop, the reverse pass would carry zeros as large as the logits to their bias.
    return (gradient, error, kept) if through else lax.stop_gradient((gradient, error, kept))

  def _token(self, logits: jax.Array, x: Inputs) -> jax.Array:
    return jnp.argmax(logits, axis=-1) if self.kind == "argmax" else x["target"]

  def _logits(self, product, others, top, x, times=None) -> jax.Array:
    top = top * x["out"] if "out" in x else top
    return (times or product)("decoder", top) + others["decoder_bias"][None]


@dataclasses.dataclass(frozen=True)
class OfEntropy:
  """Entropy of the output distribution, or of the mean of several.

  Attributes:
    samples: distributions.
    kind: `entropy` (one), `mc_dropout`, `locked_dropout` and `variational_rnn` (the copies of the
      state, each under its own masks), `ensemble` (decoders).
    rate: share that mc_dropout drops.
    on: what mc_dropout drops.
    alike: mc_dropout draws the same masks for all examples.
  """

  kind: str
  samples: int = 1
  rate: float = 0.0
  on: str = "hidden"
  alike: bool = False

  def error(self, product: Product, others: Params, top: jax.Array, x: Inputs) -> jax.Array:
    """The signal, [batch]."""
    rows, _ = self._rows(top, x)
    return signals.predictive_entropy(self._logits(product, others, rows, x))

  def kept(
    self, product: Product, others: Params, top: jax.Array, x: Inputs
  ) -> dict[str, jax.Array]:
    """Nothing: the prediction is made from the recoded state."""
    return {}

  def closed(
    self, product: Product, others: Params, top: jax.Array, x: Inputs, through: bool
  ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """See `Signal`."""
    times = product if through else product.fixed
    rows, factors = self._rows(top, x)
    error, logit_gradients = signals.predictive_entropy_error(
      self._logits(product, others, rows, x, times)
    )
    if self.kind == "ensemble":
      logit_gradients = jnp.moveaxis(logit_gradients, 0, 1).reshape(len(rows), -1)
    else:
      logit_gradients = logit_gradients.reshape(len(rows), -1)
    gradient = times("decoder", logit_gradients, transposed=True)
    if factors is not None:
      gradient = gradient * factors
    if self.kind == "mc_dropout":
      gradient = jnp.sum(gradient.reshape(self.samples, *top.shape), axis=0)
    return gradient, error, {}

  def _rows(self, top: jax.Array, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """What the decoder reads, and the factors in it."""
    if self.kind == "mc_dropout" and self.on == "hidden":
      shape = (self.samples, 1 if self.alike else len(top), top.shape[-1])
      keep = dropout_factors(x["key"], shape, self.rate)
      keep = jnp.broadcast_to(keep, (self.samples, *top.shape))
      rows = (top[None] * keep).reshape(-1, top.shape[-1])
      return rows, keep.reshape(rows.shape)
    if self.kind != "mc_dropout" and "out" in x:
      return top * x["out"], x["out"]
    return top, None

  def _logits(self, product, others, rows, x, times=None) -> jax.Array:
    """[samples, batch, vocab]."""
    bias = others["decoder_bias"]
    if self.kind == "mc_dropout" and self.on == "weights":
      table = product.weights["decoder"].T
      keep = dropout_factors(x["key"], (self.samples, *table.shape), self.rate)
      return jnp.einsum("bd,kvd->kbv", rows, keep * table[None]) + bias[None, None]
    logits = (times or product)("decoder", rows) + bias[None]
    if self.kind == "ensemble":
      return jnp.moveaxis(logits.reshape(len(rows), self.samples, -1), 1, 0)
    return logits.reshape(self.samples, -1, logits.shape[-1])


@dataclasses.dataclass(frozen=True)
class OfLabel:
  """Loss of a logistic classifier of the top layer's hidden state against a label of each step."""

  def error(self, product: Product, others: Params, top: jax.Array, x: Inputs) -> jax.Array:
    """The signal, [batch]."""
    return signals.label_loss(self._logit(others, top), x["label"])

  def kept(
    self, product: Product, others: Params, top: jax.Array, x: Inputs
  ) -> dict[str, jax.Array]:
    """Nothing."""
    return {}

  def closed(
    self, product: Product, others: Params, top: jax.Array, x: Inputs, through: bool
  ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """See `Signal`."""
    logit = self._logit(others, top)
    slope = jax.nn.sigmoid(logit) - x["label"]
    gradient = slope[:, None] * others["classifier"]["weight"][None]
    return gradient, signals.label_loss(logit, x["label"]), {}

  def _logit(self, others: Params, top: jax.Array) -> jax.Array:
    return top @ others["classifier"]["weight"] + others["classifier"]["bias"]


def dropout_factors(key: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
  """0 with probability `rate`, a multiple of 2**-16, else 1 / (1 - rate); float32."""
  dropped = round(rate * 2**16)
  keep = random_bits(key, shape) >= jnp.uint16(dropped)
  return keep * jnp.float32(1 / (1 - dropped / 2**16))


def word_factors(
  key: jax.Array, words: jax.Array, owners: jax.Array, vocab: int, rate: float
) -> jax.Array:
  """Factors as of `dropout_factors` on whole words: the same wherever an owner reads that word.

  Args:
    key: any JAX key.
    words: tokens, [time, rows].
    owners: whose masks a row has, [rows].
    vocab: number of tokens.
    rate: share of words dropped.

  Returns:
    [time, rows], float32.

  Source: Gal and Ghahramani 2016, section 4.2.
  """
  counter = owners.astype(jnp.uint32)[None] * np.uint32(vocab) + words.astype(jnp.uint32)
  bits, _ = threefry(jax.random.key_data(key).reshape(-1)[:2], counter)
  dropped = round(rate * 2**16)
  keep = (bits & np.uint32(0xFFFF)) >= np.uint32(dropped)
  return keep * jnp.float32(1 / (1 - dropped / 2**16))


@dataclasses.dataclass(frozen=True)
class Constant:
  """One step size for all."""

  size: float

  def __call__(self, product: Product, others: Params, after: States) -> tuple[State, ...]:
    """See `StepSize`."""
    return tuple(State(jnp.float32(self.size), jnp.float32(self.size)) for _ in after)


@dataclasses.dataclass(frozen=True)
class Learned:
  """One for each layer and kind of state, softplus of `steps` [layers, 2]."""

  def __call__(self, product: Product, others: Params, after: States) -> tuple[State, ...]:
    """See `StepSize`."""
    sizes = jax.nn.softplus(others["steps"])
    return tuple(State(sizes[i, 0], sizes[i, 1]) for i in range(len(after)))


@dataclasses.dataclass(frozen=True)
class Predicted:
  """One for each example, layer and kind of state, from that layer's hidden state.

  Two hidden layers with ReLU, then softplus (Ulmer 2019, section 4.3).
  """

  def __call__(self, product: Product, others: Params, after: States) -> tuple[State, ...]:
    """See `StepSize`."""
    found = []
    for number, state in enumerate(after):
      held = lax.stop_gradient(state.h)
      found.append(State(*(self._one(product, others, f"step_{number}_{k}", held) for k in "hc")))
    return tuple(found)

  def _one(self, product: Product, others: Params, name: str, held: jax.Array) -> jax.Array:
    for number in range(len(_UNITS)):
      held = product(f"{name}_{number}", held) + others[f"{name}_{number}"][None]
      held = jax.nn.relu(held) if number + 1 < len(_UNITS) else held
    return jax.nn.softplus(held[:, 0])


def signal_of(config: RecodingConfig, *, alike: bool = False) -> Signal | None:
  """The error signal of a configuration; None where nothing is recoded.

  Args:
    config: what is lowered.
    alike: masks that are drawn at every step are the same for all examples.
  """
  kind = config.signal
  if kind == "none":
    return None
  if kind in ("surprisal", "argmax", "nll"):
    return OfToken(kind)
  if kind == "weak_supervision":
    return OfLabel()
  samples = 1 if kind == "entropy" else config.samples
  return OfEntropy(kind, samples, config.rate, config.on, alike)


def size_of(config: RecodingConfig) -> StepSize:
  """The step sizes of a configuration."""
  if config.step == "learned":
    return Learned()
  return Predicted() if config.step == "predicted" else Constant(config.size)


def step_size_parameters(
  config: RecodingConfig, layers: int, dim: int
) -> dict[str, tuple[Callable[..., Any], tuple[int, ...]]]:
  """Parameters of step sizes that are learned or predicted: name -> initialiser and shape.

  All start so that steps have the size `config.size`.

  Args:
    config: what is learned.
    layers: how many have states that are recoded.
    dim: width of hidden and cell states.

  Source: Ulmer 2019, section 4.3.
  """
  if not config.active or config.step not in ("learned", "predicted"):
    return {}
  start = float(np.log(np.expm1(config.size)))
  if config.step == "learned":
    given = logical(nn.initializers.constant(start), "layers", "kinds")
    return {"steps": (given, (layers, 2))}
  found = {}
  for layer in range(layers):
    for kind in "hc":
      width = dim
      for number, units in enumerate(_UNITS):
        name = f"step_{layer}_{kind}_{number}"
        last = number == len(_UNITS) - 1
        kernel = nn.initializers.zeros if last else nn.initializers.he_uniform()
        bias = nn.initializers.constant(start if last else 0.0)
        found[name] = logical(kernel, "embed", "units"), (width, units)
        found[f"{name}_bias"] = logical(bias, "units"), (units,)
        width = units
  return found
