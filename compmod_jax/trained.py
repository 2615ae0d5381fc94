"""What all trained models have in common: their parts, and looking inside."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax import errors
from compmod_jax.sites import Edit, Taps, run


@dataclasses.dataclass(frozen=True)
class TrainedModel(abc.ABC):
  """A model with its parameters, tokenizers and task; made by `load`.

  Attributes:
    task: the task; `task.evaluate(params, split)` scores a split of its data.
    params: the parameters, nested dictionaries of arrays.
    meta: what was saved with them: configurations, step, validation score.
    folder: where they were read from.
  """

  task: Any
  params: Any = dataclasses.field(repr=False)
  meta: Mapping[str, Any] = dataclasses.field(repr=False)
  folder: Path

  @property
  def model(self) -> Any:
    """The module; `model.apply({"params": params}, ...)` gives logits."""
    return self.task.model

  def sites(self) -> list[str]:
    """Names of all activations that `capture` reads and `edit` changes, in the model's order."""
    names: list[str] = []

    def trace(params: Any) -> None:
      taps = Taps(capture=None)
      self.task.forward(params, self.task.example(), taps=taps)
      names.extend(taps.captured)

    jax.eval_shape(trace, self.params)
    return names

  @abc.abstractmethod
  def _read(self, texts: Any, names: tuple[str, ...] | None) -> tuple[dict[str, Any], list[str]]:
    """Texts as one padded batch, and which of its columns `capture` returns."""

  def capture(self, sentences: Any, sites: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Activations of the model while it reads texts; all go through it at once.

    Args:
      sentences: texts that the model reads.
      sites: names from `sites()`; None for every one.

    Returns:
      Site -> float32 [text, time, ...] (`.../attention`: [text, head, time, key]), and the token
      numbers, int32 [text, time]. All texts are as long as the longest: where a token number is
      that of padding, activations mean nothing.

    Raises:
      UserError: no text, a name that the model does not have, or a text that is longer than the
        model's positions.
    """
    errors.check(
      not isinstance(sentences, str) and len(sentences) > 0,
      f"sentences is {str(sentences)[:40]!r}; give a list with at least one sentence or pair.",
    )
    names = None if sites is None else tuple(sites)
    batch, columns = self._read(sentences, names)
    found = self._forward(names)(self.params, batch)
    found = {name: as_numpy(found[name]) for name in names or found}
    return {**found, **{name: np.asarray(batch[name]) for name in columns}}

  def edit(self, edits: Mapping[str, Edit]) -> Self:
    """A copy in which activations are changed, in use, capture and evaluation alike.

    While a model translates step by step, decoder sites hold the newest position only, and the
    hypotheses of a sentence take the place of its time axis: an edit there must treat all positions
    alike.

    Args:
      edits: site -> function from the activation to the one that takes its place, of the same
        shape; made of JAX operations. A site that this copy already edits gets the new edit.

    Raises:
      UserError: a name that the model does not have.
    """
    known = self.sites()
    for name in edits:
      errors.check_choice("site", name, known)
    return dataclasses.replace(self, task=self.task.edited(edits))

  @functools.cached_property
  def _forwards(self) -> dict[tuple[str, ...] | None, Callable[..., dict[str, jax.Array]]]:
    return {}

  def _forward(self, names: tuple[str, ...] | None) -> Callable[..., dict[str, jax.Array]]:
    """The compiled forward pass that returns these sites."""
    if names not in self._forwards:
      self._forwards[names] = jax.jit(
        lambda params, batch: run(self.task.forward, params, batch, capture=names)[1]
      )
    return self._forwards[names]

  def _padded(self, name: str, rows: Sequence[Sequence[int]], pad: int) -> jax.Array:
    longest, most = max(map(len, rows)), self.model.config.max_length
    errors.check(
      longest <= most,
      f"A {name} sentence has {longest} tokens with its end, but the model has positions for {most}"
      " (model.max_length); shorten it.",
    )
    padded = np.full((len(rows), longest), pad, np.int32)
    for row, ids in zip(padded, rows, strict=True):
      row[: len(ids)] = ids
    return jnp.asarray(padded)


def as_numpy(value: jax.Array) -> np.ndarray:
  """The value on the host, float32 if it is a floating-point number."""
  return np.asarray(value, np.float32 if jnp.issubdtype(value.dtype, jnp.floating) else None)
