"""Recoding while a model decodes: the newest position of one layer is corrected at every step.

The signal is the entropy of the next token's distribution, in nats, so that no reference is needed.
What follows in the step reads the corrected activation, caches included; nothing of earlier steps
changes.

Source: Ulmer 2019, equation 4.1, with one distribution and no dropout; there for LSTMs.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from compmod_jax.core.errors import check
from compmod_jax.core.intermediates import Edit, Intermediates
from compmod_jax.decoding.config import DecodeConfig
from compmod_jax.decoding.types import Cache, Record, Step
from compmod_jax.mechanisms.recoding.descent import recode
from compmod_jax.mechanisms.recoding.signals import predictive_entropy

# From a cache, tokens and intermediates to logits and the next cache.
ReadableStep = Callable[[Cache, Array, Intermediates], tuple[Array, Cache]]

ENTROPY = "entropy"


class Searched(NamedTuple):
  """What decoding takes.

  Attributes:
    step: one step of the search.
    cache: before the first step.
    kept: names of what is recorded of every hypothesis.
  """

  step: Step
  cache: Cache
  kept: tuple[str, ...]

  def recorded(self, *more: str) -> Record | None:
    """What `decode` records of every hypothesis: `kept`, and further parts of the cache."""
    names = (*self.kept, *more)
    return (lambda cache: {name: cache[name] for name in names}) if names else None


def prepared(
  step: ReadableStep,
  cache: Cache,
  intermediates: Intermediates,
  config: DecodeConfig,
  *,
  batch: int,
  stack: Callable[[], tuple[str, int]],
) -> Searched:
  """A model's step as a search takes it, recoded if the configuration says so.

  Args:
    step: of the model.
    cache: before the first step.
    intermediates: the edits under which the model runs.
    config: how to search.
    batch: examples.
    stack: gives the name of the stack whose layer is recoded, and how many layers it has.

  Raises:
    UserError: there is no such layer.
  """
  if config.recode_layer is None:
    return Searched(lambda cache, tokens: step(cache, tokens, intermediates.apart()), cache, ())
  side, layers = stack()
  site = site_of(config.recode_layer, layers, side)
  cache = start(cache, batch, config.width)
  return Searched(recoding_step(step, intermediates, site, config), cache, (ENTROPY,))


def knowing_rows(
  intermediates: Intermediates, rows: Bool[Array, " batch"], config: DecodeConfig
) -> Intermediates:
  """Those of a step, whose time axis holds the hypotheses of an example: real, or filler."""
  return intermediates.knowing(
    lambda site: jnp.broadcast_to(rows[:, None], (len(rows), config.width))
  )


def site_of(layer: int, layers: int, side: str = "decoder") -> str:
  """The site that is recoded: the output of a stack's layer, counted from the end if negative.

  Raises:
    UserError: there is no such layer.
  """
  check(
    -layers <= layer < layers,
    f"recode_layer is {layer}, but {side} has {layers} layers; give {-layers} to {layers - 1}"
    " (negative numbers count from the last one).",
  )
  return f"{side}/layer_{layer % layers}/output"


def start(cache: Mapping[str, Any], batch: int, beams: int) -> dict[str, Any]:
  """The cache with a place for each hypothesis's entropy, before and after recoding, summed."""
  return {**cache, ENTROPY: jnp.zeros((batch, beams, 2))}


def recoding_step(
  step: ReadableStep, intermediates: Intermediates, site: str, config: DecodeConfig
) -> Step:
  """A step that recodes the activation at a site before it goes on.

  Args:
    step: of the model.
    intermediates: the edits under which the model runs.
    site: what is recoded, [batch, beams, embed].
    config: size and number of the gradient steps.
  """

  def run(cache: Cache, tokens: Array) -> tuple[Array, Cache]:
    own = {name: value for name, value in cache.items() if name != ENTROPY}

    def with_activation(edit: Edit) -> tuple[Array, Cache]:
      before = intermediates.edits.get(site)
      # The user's own edit of this site comes first.
      both = edit if before is None else (lambda value: edit(before(value)))
      return step(own, tokens, Intermediates(edits={**intermediates.edits, site: both}))

    captured = Intermediates(capture=frozenset([site]), edits=intermediates.edits)
    step(own, tokens, captured)
    activation = captured.captured[site]

    def error(activation: Array) -> Float[Array, "batch beams"]:
      logits, _ = with_activation(lambda _: activation)
      return entropy(logits)

    found = recode(error, activation, config.recode_size, steps=config.recode_steps)
    logits, after = with_activation(lambda _: found.activations)
    sums = cache[ENTROPY] + jnp.stack([found.error, entropy(logits)], axis=-1)
    return logits, {**after, ENTROPY: sums}

  return run


def entropy(logits: Float[Array, "batch beams vocab"]) -> Float[Array, "batch beams"]:
  """Entropy of every distribution, in nats."""
  rows = logits.astype(jnp.float32).reshape(1, -1, logits.shape[-1])
  return jax.lax.reshape(predictive_entropy(rows), logits.shape[:2])
