"""How a model's outputs are decoded, as configuration."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar, get_args

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check, check_choice
from compmod_jax.core.rounding import Products, rounded
from compmod_jax.decoding.beam import beam_search
from compmod_jax.decoding.loops import Growth
from compmod_jax.decoding.sampling import greedy, sample
from compmod_jax.decoding.types import Cache, Decoded, Record, Step


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
  """Settings of decoding. A bad value is a `UserError` that names it."""

  method: Literal["beam", "greedy", "sample"] = "beam"
  """Beam search, the most probable token at every step, or draws from the distribution."""
  beams: int = 5
  """Living hypotheses of beam search; the other methods ignore it."""
  length_penalty: float = 1.0
  """Scores are log probability / length ** length_penalty; 0 or more."""
  max_ratio: float = 1.5
  """An output has at most max_ratio * source length + max_extra tokens."""
  max_extra: int = 10
  """See max_ratio."""
  n_best: int = 1
  """Hypotheses returned for each source: at most `beams`; one for greedy; the draws of sample."""
  stop: Literal["filled", "bound"] = "filled"
  """When beam search ends: once `beams` hypotheses are finished, or once none can improve."""
  temperature: float = 1.0
  """Of sample: above 0; below 1 sharpens the distribution."""
  top_k: int = 0
  """Of sample: only the k most probable tokens; 0 keeps all."""
  top_p: float = 1.0
  """Of sample: only the most probable tokens that reach this probability together; 1 keeps all."""
  products: Products = "model"
  """Products with weights: as the model makes them, or of operands rounded to bfloat16 with sums in
  float32, which is faster on CPUs that multiply bfloat16; results then differ in rounding."""

  recode_layer: int | None = None
  """The decoder layer whose output is recoded at every step (see `recode_size`); -1: the last one;
  none: nothing is recoded."""
  recode_size: float = 1.0
  """Step along the gradient of the next token's entropy in nats."""
  recode_steps: int = 1
  """Gradient steps at every token."""

  def __post_init__(self):
    check_choice("method", self.method, ("beam", "greedy", "sample"))
    check_choice("stop", self.stop, ("filled", "bound"))
    check_choice("products", self.products, get_args(Products))
    check_least(self, beams=1, n_best=1)
    for field in ("length_penalty", "max_ratio", "max_extra", "top_k"):
      value = getattr(self, field)
      check(value >= 0, f"{field} is {value}; it must be 0 or more.")
    check(
      math.isfinite(self.max_ratio),
      f"max_ratio is {self.max_ratio}; it must be finite. Outputs end at the model's positions"
      " whatever it is: give a large number.",
    )
    check(
      self.max_ratio > 0 or self.max_extra > 0,
      "max_ratio and max_extra are both 0; then no output could have a single token. "
      "Set one of them above 0.",
    )
    check(
      self.temperature > 0,
      f"temperature is {self.temperature}; it must be above 0. For the most probable tokens "
      "choose the method 'greedy'.",
    )
    check(self.recode_size >= 0, f"recode_size is {self.recode_size}; it must be 0 or more.")
    check_least(self, recode_steps=1)
    check(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must lie in (0, 1]; 1 keeps all tokens.")
    most = {"beam": self.beams, "greedy": 1, "sample": self.n_best}[self.method]
    check(
      self.n_best <= most,
      f"n_best is {self.n_best}, but the method {self.method!r} finds {most} (beams is "
      f"{self.beams}). Lower n_best, or raise beams with the method 'beam'.",
    )

  def describe(self) -> str:
    """In a few words, such as "beam search with 5 beams, length penalty 1"."""
    how = {
      "beam": f"beam search with {self.beams} beams, length penalty {self.length_penalty:g}",
      "greedy": "greedy search",
      "sample": f"one draw at temperature {self.temperature:g}",
    }[self.method]
    return how if self.recode_layer is None else f"{how}, recoded"

  @property
  def width(self) -> int:
    """Beams that the cache must have: hypotheses carried at once for each example."""
    return {"beam": self.beams, "greedy": 1, "sample": self.n_best}[self.method]

  def limits(self, source_lengths: ArrayLike, max_length: int) -> Int[Array, " batch"]:
    """Tokens each output may have: floor(max_ratio * length) + max_extra, at most `max_length`.

    Args:
      source_lengths: [batch], in tokens; 0 marks a filler row, whose limit is 0.
      max_length: the ceiling.

    Returns:
      int32 [batch], at least 1 but for filler rows.
    """
    lengths = jnp.asarray(source_lengths)
    ratio = jnp.minimum(jnp.floor(lengths * self.max_ratio), max_length)  # fits 32 bits
    limits = ratio.astype(jnp.int32) + self.max_extra
    return jnp.where(lengths > 0, jnp.clip(limits, 1, max_length), 0)


class GenerationOptions(TypedDict, total=False):
  """Keywords of a call that continues texts: fields of `DecodeConfig` that it changes."""

  method: Literal["beam", "greedy", "sample"]
  beams: int
  length_penalty: float
  n_best: int
  temperature: float
  top_k: int
  top_p: float
  products: Products
  recode_layer: int | None
  recode_size: float
  recode_steps: int


class DecodeOptions(GenerationOptions, total=False):
  """The same of a call that translates or answers; further fields."""

  max_ratio: float
  max_extra: int
  stop: Literal["filled", "bound"]


_OF = {"beams": "beam", "temperature": "sample", "top_k": "sample", "top_p": "sample"}


def override(config: DecodeConfig, fields: Mapping[str, Any]) -> DecodeConfig:
  """The configuration with some fields changed.

  Raises:
    UserError: a field that it does not have, one without effect (of another method, or of recoding
      where nothing is recoded), or a bad value.
  """
  for name in fields:
    choices = [field.name for field in dataclasses.fields(DecodeConfig)]
    check_choice("a decoding option", name, choices)
  config = dataclasses.replace(config, **fields)
  for name, method in _OF.items():
    check(
      name not in fields or method == config.method,
      f"{name} is given, which is of the method {method!r}, but the method is {config.method!r}."
      f" Choose the method {method!r} (--method {method}), or leave {name} out.",
    )
  for name in ("recode_size", "recode_steps"):
    check(
      name not in fields or config.recode_layer is not None,
      f"{name} is given, but no recode_layer: nothing is recoded. Give recode_layer, too (-1: the"
      f" last one), or leave {name} out.",
    )
  return config


def for_generation(fields: Mapping[str, Any]) -> DecodeConfig:
  """How a language model generates: greedily, unless some field is of another method.

  Args:
    fields: of `DecodeConfig`. Without `method`, `beams` means beam search, and `temperature`,
      `top_k` or `top_p` mean sampling.

  Raises:
    UserError: a field that `DecodeConfig` does not have, or that is of another method than the
      others or than `method`; `max_ratio` or `max_extra`, which are of translations; a bad value.
  """
  for name in ("max_ratio", "max_extra"):
    check(
      name not in fields,
      f"{name} is given, but it bounds a translation by its source; what a language model generates"
      " is bounded by length. Give that instead.",
    )
  methods = {method: name for name, method in _OF.items() if name in fields}
  method = fields.get("method") or next(iter(methods), "greedy")
  for other, name in methods.items():
    check(
      other == method,
      f"{name} is given, which is of the method {other!r}, but the method is {method!r}"
      f"{'' if fields.get('method') else f' by {methods.get(method)}'}. Choose one of the two.",
    )
  return override(DecodeConfig(method="greedy"), {**fields, "method": method})


R = TypeVar("R")


def with_products(search: Callable[..., R]) -> Callable[..., R]:
  """A search `(model, params, ...; config, ...)` whose products are as `config.products` says."""

  @functools.wraps(search)
  def run(model: Any, *arrays: Any, config: DecodeConfig, **static: Any) -> R:
    whole = functools.partial(search, model, config=config, **static)
    return (rounded(whole) if config.products == "bfloat16" else whole)(*arrays)

  return run


def decode(
  step: Step,
  cache: Cache,
  config: DecodeConfig,
  *,
  batch: int,
  max_length: int,
  limit: ArrayLike,
  bos: ArrayLike,
  eos: int,
  pad: int = 0,
  forbidden: tuple[int, ...] = (),
  cut: bool = False,
  rng: Array | None = None,
  record: Record | None = None,
  narrow: bool = False,
  growth: Growth | None = None,
) -> Decoded:
  """Decodes by `config.method`; the cache has `config.width` beams.

  Arguments, result and errors as in `beam_search`; `limit` usually comes from `config.limits`.
  `rng` is needed for the method 'sample' and ignored by the others, `narrow` by that one.
  """
  shared: dict[str, Any] = {
    "batch": batch,
    "max_length": max_length,
    "limit": limit,
    "bos": bos,
    "eos": eos,
    "pad": pad,
    "length_penalty": config.length_penalty,
    "forbidden": forbidden,
    "cut": cut,
    "record": record,
    "growth": growth,
  }
  if config.method == "greedy":
    return greedy(step, cache, narrow=narrow, **shared)
  if config.method == "beam":
    search = {"beams": config.beams, "n_best": config.n_best, "stop": config.stop}
    return beam_search(step, cache, narrow=narrow, **search, **shared)
  check(rng is not None, "rng is None; the method 'sample' needs a random key: pass rng.")
  return sample(
    step,
    cache,
    rng=rng,  # type: ignore[arg-type]
    n_best=config.n_best,
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    **shared,
  )
