"""A trained model to work with: translate, look inside, change what happens inside.

    model = compmod_jax.load("runs/nmt_cah")
    model.translate(["Der Hund schläft."], beams=8)

    site = "encoder/layer_0/self/router/weights"
    weights = model.capture(["Der Hund schläft."], [site])[site]     # [1, time, heads]

    without = model.edit({"encoder/layer_0/self/heads": compmod_jax.zero_units(2)})
    without.translate(["Der Hund schläft."])

The names of sites are in `TrainedModel.sites`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from compmod_jax import errors
from compmod_jax.data.tokenizer import EOS, PAD, Tokenizer
from compmod_jax.decoding import DecodeConfig
from compmod_jax.interop.model_folder import MODEL, find_model, load_model_folder
from compmod_jax.models.transformer import Transformer, TransformerConfig
from compmod_jax.serialise import from_json
from compmod_jax.sites import Edit, Taps, run
from compmod_jax.tasks.base import Status, silent
from compmod_jax.tasks.translation import Translation, TranslationConfig
from compmod_jax.tasks.translator import Hypothesis

Sentences = Sequence[str] | Sequence[tuple[str, str]]


def load(folder: str | Path, *, model: str | None = None) -> "TrainedModel":
  """Opens a trained model.

  Args:
    folder: the workdir of a training run, or a model folder such as `runs/x/models/best`.
    model: which of a workdir's models, a folder name in its `models`: `best` (the default),
      `average`, `step-00001500`.

  Raises:
    UserError: there is no model, it is damaged (a tokenizer that is not the one it was saved with
      counts as damage), or its parameters are not those of its configuration.
  """
  place = find_model(Path(folder), model)
  params, files, meta = load_model_folder(place)
  errors.check(
    isinstance(meta, Mapping) and {"task", "model"} <= set(meta),
    f"{place / MODEL} does not describe a translation model: it lacks `task` and `model`. Give the"
    " workdir of a training run, or one of the folders in its `models`.",
  )
  try:
    config = from_json(TranslationConfig, meta["task"])
    task = config.build(from_json(TransformerConfig, meta["model"]), files=files)
  except errors.UserError as error:
    raise errors.UserError(f"The model in {place} cannot be used: {error}") from error
  _check_parameters(place, params, task)
  return TrainedModel(task, jax.tree.map(jnp.asarray, params), meta, place)


@dataclasses.dataclass(frozen=True)
class TrainedModel:
  """A model with its parameters, tokenizers and task; made by `load`.

  Attributes:
    task: the translation task; `task.evaluate(params, split)` scores a split of its data.
    params: the parameters, nested dictionaries of arrays.
    meta: what was saved with them: configurations, step, validation score.
    folder: where they were read from.
  """

  task: Translation
  params: Any = dataclasses.field(repr=False)
  meta: Mapping[str, Any] = dataclasses.field(repr=False)
  folder: Path

  @property
  def model(self) -> Transformer:
    """The module; `model.apply({"params": params}, source, target)` gives logits."""
    return self.task.model

  @property
  def source_tokenizer(self) -> Tokenizer:
    """From text to source tokens."""
    return self.task.source_tokenizer

  @property
  def target_tokenizer(self) -> Tokenizer:
    """From target tokens to text."""
    return self.task.target_tokenizer

  def translate(
    self, sentences: Sequence[str], *, seed: int = 0, status: Status = silent, **decode: Any
  ) -> list[str]:
    """The best translation of every sentence; a blank sentence gives an empty one.

    Args:
      sentences: raw text. What is over the length ceiling of the training data is cut off.
      seed: of the method `sample`.
      status: shows progress.
      **decode: fields of `DecodeConfig` that differ from the task's own, such as `beams=1`.

    Raises:
      UserError: a field that `DecodeConfig` does not have, or a bad value.
    """
    found = self.hypotheses(sentences, seed=seed, status=status, **decode)
    return [hypotheses[0].text for hypotheses in found]

  def hypotheses(
    self,
    sentences: Sequence[str],
    *,
    routing: bool = False,
    seed: int = 0,
    status: Status = silent,
    **decode: Any,
  ) -> list[list[Hypothesis]]:
    """The `n_best` translations of every sentence, best first, with scores and tokens.

    Arguments and errors as in `translate`; `routing` also returns the router weights of every
    decoding step.
    """
    errors.check(
      not isinstance(sentences, str),
      f"sentences is one string, {str(sentences)[:40]!r}; give a list of sentences.",
    )
    return self.task.translator(
      self.params,
      sentences,
      override(self.task.config.decode, decode),
      routing=routing,
      rng=jax.random.key(seed),
      status=status,
    )

  def sites(self) -> list[str]:
    """Names of all activations that `capture` reads and `edit` changes, in the model's order."""
    batch = {"source": jnp.ones((1, 2), jnp.int32), "target": jnp.ones((1, 2), jnp.int32)}
    names: list[str] = []

    def trace(params: Any) -> None:
      taps = Taps(capture=None)
      self.task.forward(params, batch, taps=taps)
      names.extend(taps.captured)

    jax.eval_shape(trace, self.params)
    return names

  def capture(
    self, sentences: Sentences, sites: Iterable[str] | None = None
  ) -> dict[str, np.ndarray]:
    """Activations of the model while it reads sentences and writes their translations.

    Args:
      sentences: source sentences, whose translations are then the model's own; or pairs (source,
        target), whose targets the model is made to write. All go through the model at once.
      sites: names from `sites()`; None for every one.

    Returns:
      Site -> float32 [sentence, time, ...] (`.../attention`: [sentence, head, time, key]). Time
      counts source tokens at `encoder/...`, each target token to be written elsewhere, the end of
      the sentence included; all sentences are as long as the longest. `source` and `target`
      (absent if nothing but the encoder was asked for) hold token numbers, int32 [sentence, time];
      where they are 0, there is padding, and activations mean nothing.

    Raises:
      UserError: no sentence, a name that the model does not have, or a sentence that is longer
        than the model's positions.
    """
    errors.check(
      not isinstance(sentences, str) and len(sentences) > 0,
      f"sentences is {str(sentences)[:40]!r}; give a list with at least one sentence or pair.",
    )
    names = None if sites is None else tuple(sites)
    encoder_only = names is not None and all(name.startswith("encoder/") for name in names)
    batch = self._batch(sentences, encoder_only)
    found = self._forward(names)(self.params, batch)
    found = {name: _numpy(found[name]) for name in names or found}
    kept = ("source",) if encoder_only else ("source", "target")
    return {**found, **{name: np.asarray(batch[name]) for name in kept}}

  def edit(self, edits: Mapping[str, Edit]) -> "TrainedModel":
    """A copy in which activations are changed, in translation, capture and evaluation alike.

    While the model translates step by step, decoder sites hold the newest position only, and the
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

  def _batch(self, sentences: Sentences, encoder_only: bool) -> dict[str, jax.Array]:
    """Sentences or pairs as one padded batch."""
    sources = [item if isinstance(item, str) else item[0] for item in sentences]
    ids = [[*ids, EOS] for ids in self.source_tokenizer.encode_batch(sources)]
    if encoder_only:
      targets = [[EOS]] * len(ids)
    elif all(isinstance(item, str) for item in sentences):
      # The tokens themselves: other tokens may spell the same text.
      targets = [list(found[0].tokens) or [EOS] for found in self.hypotheses(sources, n_best=1)]
    else:
      texts = [item[1] for item in sentences if not isinstance(item, str)]
      errors.check(
        len(texts) == len(sources),
        "sentences mixes single sentences with pairs; give either a list of sentences or a list of"
        " (source, target).",
      )
      targets = [[*ids, EOS] for ids in self.target_tokenizer.encode_batch(texts)]
    return {name: self._padded(name, rows) for name, rows in (("source", ids), ("target", targets))}

  def _padded(self, name: str, rows: Sequence[Sequence[int]]) -> jax.Array:
    longest, most = max(map(len, rows)), self.model.config.max_length
    errors.check(
      longest <= most,
      f"A {name} sentence has {longest} tokens with its end, but the model has positions for {most}"
      " (model.max_length); shorten it.",
    )
    padded = np.full((len(rows), longest), PAD, np.int32)
    for row, ids in zip(padded, rows, strict=True):
      row[: len(ids)] = ids
    return jnp.asarray(padded)


def override(config: DecodeConfig, fields: Mapping[str, Any]) -> DecodeConfig:
  """The configuration with some fields changed.

  Raises:
    UserError: a field that it does not have, or a bad value.
  """
  for name in fields:
    choices = [field.name for field in dataclasses.fields(DecodeConfig)]
    errors.check_choice("a decoding option", name, choices)
  return dataclasses.replace(config, **fields)


def _check_parameters(place: Path, params: Any, task: Translation) -> None:
  """Raises a `UserError` unless parameters have the names and shapes of the task's model."""
  flat: Any = functools.partial(flatten_dict, sep="/")
  expected = jax.eval_shape(lambda: nn.unbox(task.init(jax.random.key(0))))
  there = {name: leaf.shape for name, leaf in flat(params).items()}
  here = {name: leaf.shape for name, leaf in flat(expected).items()}
  differing = [
    f"{name}: {there.get(name, 'none')} there, {here.get(name, 'none')} expected"
    for name in sorted({*there, *here})
    if there.get(name) != here.get(name)
  ]
  errors.check(
    not differing,
    f"The parameters in {place} are not those of its configuration and tokenizers"
    f" ({len(differing)} differ): {'; '.join(differing[:8])}. Restore the folder as it was saved.",
  )


def _numpy(value: jax.Array) -> np.ndarray:
  return np.asarray(value, np.float32 if jnp.issubdtype(value.dtype, jnp.floating) else None)
