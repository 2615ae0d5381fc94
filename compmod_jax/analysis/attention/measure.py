"""Attention weights of a trained model on single texts, and the router's weight of each head."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)

_SITE, _ROUTER = "attention", "router/weights"


class CapturedTexts(Protocol):
  """Activations of texts, and the tokens that they are of."""

  def __getitem__(self, site: str, /) -> np.ndarray: ...

  def __contains__(self, site: object, /) -> bool: ...

  def words(self, site: str, *, keys: bool = False) -> list[list[str]]:
    """Text of the tokens along a site's time axis, or along that of its keys."""
    ...


class CapturingModel(Protocol[R_contra]):
  """What is read here of a trained model, such as `compmod_jax.load` returns, that reads `R`."""

  @property
  def folder(self) -> Path | None:
    """Where the model was loaded from."""
    ...

  def sites(self) -> Collection[str]:
    """Names of all activations."""
    ...

  def capture(self, sentences: Sequence[R_contra], sites: Sequence[str], /) -> CapturedTexts:
    """Activations while the model reads texts."""
    ...


def attention_modules(model: CapturingModel[R]) -> list[str]:
  """Names of a model's attention modules in its order, such as `decoder/layer_0/cross`."""
  ends = f"/{_SITE}"
  return [site.removesuffix(ends) for site in model.sites() if site.endswith(ends)]


@dataclasses.dataclass(frozen=True)
class Weights:
  """The attention of one module on one text.

  Attributes:
    module: its name.
    attention: float32 [head, query, key].
    router: weight of each head at every query, float32 [query, head]; None where heads do not
      compete.
    queries: text of the tokens that look.
    keys: text of the tokens that are looked at.
  """

  module: str
  attention: np.ndarray
  router: np.ndarray | None
  queries: list[str]
  keys: list[str]


def read_attention(model: CapturingModel[R], text: R, modules: Sequence[str]) -> dict[str, Weights]:
  """What attention modules do while a model reads a text; module -> its weights."""
  known = set(model.sites())
  sites = [f"{module}/{name}" for module in modules for name in (_SITE, _ROUTER)]
  found, read = model.capture([text], [site for site in sites if site in known]), {}
  for module in modules:
    site, router = f"{module}/{_SITE}", f"{module}/{_ROUTER}"
    read[module] = Weights(
      module,
      found[site][0],
      found[router][0] if router in found else None,
      found.words(site)[0],
      found.words(site, keys=True)[0],
    )
  return read
