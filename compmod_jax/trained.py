"""What all trained models have in common: their parts, and looking inside."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from compmod_jax.core import errors, extras
from compmod_jax.core.intermediates import Edit, Intermediates, run
from compmod_jax.core.types import Params
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.models.base import Module
from compmod_jax.tasks.base import Task

if TYPE_CHECKING:
  from matplotlib.figure import Figure

R = TypeVar("R")


class Axis(NamedTuple):
  """The positions of a time axis, and what stands there; the same for many sites.

  Attributes:
    read: text of the token that is read at every position, [text][time]; empty at padding.
    predicted: text of the token that is predicted there; the same one where a model predicts what
      it reads, and none at auxiliary tokens.
    valid: true where there is a token, bool [text, time].
  """

  read: list[list[str]]
  predicted: list[list[str]]
  valid: np.ndarray

  @classmethod
  def of(
    cls, tokenizer: Tokenizer, read: ArrayLike, predicted: ArrayLike, valid: ArrayLike
  ) -> "Axis":
    """From token numbers [text, time]."""
    there = np.asarray(valid, bool)

    def texts(numbers: ArrayLike) -> list[list[str]]:
      shown = there & (np.asarray(numbers) != tokenizer.pad)
      return [
        [tokenizer.text_of(number) if seen else "" for number, seen in zip(*row, strict=True)]
        for row in zip(np.asarray(numbers).tolist(), shown.tolist(), strict=True)
      ]

    return cls(texts(read), texts(predicted), there)

  def behind(self, names: Sequence[str]) -> "Axis":
    """The same positions with auxiliary ones in front of each text."""
    front = np.ones((len(self.valid), len(names)), bool)
    return Axis(
      [[*names, *row] for row in self.read],
      [["" for _ in names] + row for row in self.predicted],
      np.concatenate([front, self.valid], axis=1),
    )


class Captured(dict[str, np.ndarray]):
  """Activations by site, and the text of the tokens at their positions.

      found = model.capture(["Der Hund schläft."], [site])
      for word, weights in zip(found.words(site)[0], found[site][0]):
        print(word, weights)

  Of `.../attention`, whose axes are [text, head, time, key], `words` and `valid` are of the axis
  `time`; with `keys=True`, of the axis `key`.
  """

  def __init__(self, values: Mapping[str, np.ndarray], axes: Callable[[str, bool], Axis]):
    super().__init__(values)
    self._axes = axes

  def words(self, site: str, *, predicted: bool = False, keys: bool = False) -> list[list[str]]:
    """What is read at every position of a site, [text][time]; empty at padding.

    Args:
      site: name of the site.
      predicted: what is predicted there instead: by a decoder the next token.
      keys: of the positions that attention looks at.
    """
    axis = self._axes(site, keys)
    return axis.predicted if predicted else axis.read

  def valid(self, site: str, *, keys: bool = False) -> np.ndarray:
    """True at the positions that hold a token, bool [text, time]; elsewhere is padding."""
    return self._axes(site, keys).valid


@dataclasses.dataclass(frozen=True)
class TrainedModel(abc.ABC, Generic[R]):
  """A model with its parameters, tokenizers and task; made by `load`.

  `R` is what it reads: a text, a question, or a sentence with or without its translation.

  Attributes:
    task: the task; `task.evaluate(params, split)` scores a split of its data.
    params: the parameters, nested dictionaries of arrays.
    meta: what was saved with them: configurations, step, validation score.
    folder: where they were read from.
  """

  task: Task[Any, Any, Any]
  params: Params = dataclasses.field(repr=False)
  meta: Mapping[str, Any] = dataclasses.field(repr=False)
  folder: Path

  @property
  def model(self) -> Module:
    """The module; `model.apply({"params": params}, ...)` gives logits."""
    return self.task.model.module

  def sites(self) -> list[str]:
    """Names of all activations that `capture` reads and `edit` changes, in the model's order."""
    names: list[str] = []

    def trace(params: Params) -> None:
      intermediates = Intermediates(capture=None)
      self.task.model.forward(params, self.task.dataset.example(), intermediates=intermediates)
      names.extend(intermediates.captured)

    jax.eval_shape(trace, self.params)
    return names

  @abc.abstractmethod
  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    """What stands at the positions of a site when the model reads a batch; see `Captured`."""

  @abc.abstractmethod
  def _read(
    self, texts: Sequence[R], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Texts as one padded batch, and which of its columns `capture` returns."""

  def capture(self, sentences: Sequence[R], sites: Iterable[str] | None = None) -> Captured:
    """Activations of the model while it reads texts; all go through it at once.

    Args:
      sentences: texts that the model reads.
      sites: names from `sites()`; None for every one.

    Returns:
      A dictionary, site -> float32 [text, time, ...] (`.../attention`: [text, head, time, key]),
      and the token numbers, int32 [text, time]. All texts are as long as the longest: where a token
      number is that of padding, activations mean nothing. `words(site)` has the text of the token
      at every position, `valid(site)` says where there is one.

    Raises:
      UserError: no text, a name that the model does not have, or a text that is longer than the
        model's positions.
    """
    if isinstance(sentences, str) or not len(sentences):
      raise errors.UserError(
        f"sentences is {str(sentences)[:40]!r}; give a list with at least one sentence or pair."
      )
    names = None if sites is None else tuple(sites)
    batch, columns = self._read(sentences, names)
    found = self._forward(names)(self.params, batch)
    found = {name: as_numpy(found[name]) for name in names or found}
    found |= {name: np.asarray(batch[name]) for name in columns}
    return Captured(found, lambda site, keys: self._axis(batch, site, keys))

  def attention_pictures(
    self, text: R, modules: Sequence[str] | None = None
  ) -> "dict[str, Figure]":
    """Where the heads look while the model reads a text: module -> a matplotlib figure.

    As `compmod_jax.analysis.attention.attention_pictures`, which says more.
    """
    with extras.needed():  # pictures need matplotlib, which models do not
      from compmod_jax.analysis.attention.figures import attention_pictures

    return attention_pictures(self, text, modules)

  def edit(self, edits: Mapping[str, Edit]) -> Self:
    """A copy in which activations are changed, in use, capture and evaluation alike.

    Texts go through the model in padded batches: what an edit is given also has positions beyond
    the end of the shorter ones and rows that only fill up the batch, and how many depends on what
    else is in the batch. An edit that mixes positions, a mean over them for example, therefore
    needs the valid mask. One with a second argument gets it, bool [batch, time], true where the
    site holds a real token:

        def mean(value, valid):                                  # [batch, time, embed]
          sums = jnp.sum(jnp.where(valid[..., None], value, 0), axis=1, keepdims=True)
          return jnp.broadcast_to(sums / jnp.sum(valid, axis=1)[:, None, None], value.shape)

    While a model decodes step by step, decoder sites hold the newest position only, and the
    hypotheses of an example take the place of its time axis: an edit there must treat all positions
    alike. The mask has that shape then, and is true but for rows that fill up the batch. Recurrent
    models hand a site over step by step, [batch, 1, dim].

    Args:
      edits: site -> function from the activation, and the valid mask if it takes it, to the
        activation that takes its place, of the same shape; made of JAX operations. A site that this
        copy already edits gets the new edit.

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
        lambda params, batch: run(self.task.model.forward, params, batch, capture=names)[1]
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


@dataclasses.dataclass(frozen=True)
class BatchModel(TrainedModel[Mapping[str, ArrayLike]]):
  """A trained model of a task without texts: it reads rows of the task's batches.

  batch = next(iter(model.task.dataset.eval_batches("valid")))
  found = model.capture([{name: column[0] for name, column in batch.items()}])
  """

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    valid = np.asarray(self.task.model.valid_mask(site, batch))
    nothing = [[""] * valid.shape[1] for _ in valid]
    return Axis(nothing, nothing, valid)

  def _read(
    self, texts: Sequence[Mapping[str, ArrayLike]], names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    columns = {name: jnp.stack([jnp.asarray(row[name]) for row in texts]) for name in texts[0]}
    return columns, list(columns)


def as_numpy(value: jax.Array) -> np.ndarray:
  """The value on the host, float32 if it is a floating-point number."""
  return np.asarray(value, np.float32 if jnp.issubdtype(value.dtype, jnp.floating) else None)
