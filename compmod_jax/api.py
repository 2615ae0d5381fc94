"""A trained model to work with: use it, look inside, change what happens inside.

    model = compmod_jax.load("runs/nmt_cah")
    model.translate(["Der Hund schläft."], beams=8)

    site = "encoder/layer_0/self/router/weights"
    weights = model.capture(["Der Hund schläft."], [site])[site]     # [1, time, heads]

    without = model.edit({"encoder/layer_0/self/heads": compmod_jax.zero_units(2)})
    without.translate(["Der Hund schläft."])

A masked language model has `fill` in place of `translate`, a recurrent or causal one `generate`,
one that answers questions `answer`. All but the last have `score`: of pairs (source, target), or of
texts. The names of sites are in `TrainedModel.sites`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from compmod_jax.checkpoints.model_folder import MODEL, check_sizes, find_model, load_model_folder
from compmod_jax.core import errors
from compmod_jax.core.config import from_json
from compmod_jax.core.types import Params
from compmod_jax.data.tokenizers import BOS, EOS, PAD, Tokenizer
from compmod_jax.decoding import override
from compmod_jax.decoding.config import DecodeOptions
from compmod_jax.models.base import Seq2Seq
from compmod_jax.models.text import joined
from compmod_jax.models.transformer import TransformerConfig, shift_right
from compmod_jax.tasks.base import Status, Task, silent
from compmod_jax.tasks.causal_lm import CausalLM
from compmod_jax.tasks.configs import ModelConfig, TaskConfig
from compmod_jax.tasks.language_model import LanguageModel
from compmod_jax.tasks.masked_lm import MaskedLM
from compmod_jax.tasks.question_answering import Answering
from compmod_jax.tasks.scorer import Scored
from compmod_jax.tasks.translation import Translation, TranslationConfig
from compmod_jax.tasks.translator import Hypothesis
from compmod_jax.text_models import (
  AnsweringModel,
  CausalModel,
  MaskedModel,
  RecurrentModel,
  ScoringModel,
)
from compmod_jax.trained import Axis, BatchModel, Captured, TrainedModel

__all__ = [
  "AnsweringModel",
  "BatchModel",
  "CausalModel",
  "MaskedModel",
  "RecurrentModel",
  "ScoringModel",
  "TrainedModel",
  "TranslationModel",
  "load",
  "override",
  "with_fields",
]

Sentences = Sequence[str] | Sequence[tuple[str, str]]


def load(folder: str | Path, *, model: str | None = None) -> "TrainedModel":
  """Opens a trained model.

  Args:
    folder: the workdir of a training run, or a model folder such as `runs/x/models/best`.
    model: which of a workdir's models, a folder name in its `models`: `best` (the default),
      `average`, `step-00001500`.

  Returns:
    A `TranslationModel`, `MaskedModel`, `RecurrentModel`, `CausalModel` or `AnsweringModel`, by its
    task; of a task without texts a `BatchModel`.

  Raises:
    UserError: there is no model, it is damaged (a tokenizer that is not the one it was saved with
      counts as damage), or its parameters are not those of its configuration.
  """
  place = find_model(Path(folder), model)
  params, files, meta = load_model_folder(place)
  errors.check(
    isinstance(meta, Mapping) and {"task", "model"} <= set(meta),
    f"{place / MODEL} does not describe a trained model: it lacks `task` and `model`. Give the"
    " workdir of a training run, or one of the folders in its `models`.",
  )
  check_sizes(place, params, meta["model"])
  try:
    # Models that are older than the choice of tasks are translation models.
    config = from_json(TaskConfig, meta["task"], untagged=TranslationConfig)
    its_model = from_json(ModelConfig, meta["model"], untagged=TransformerConfig)
    task = config.build(its_model, files=files)
  except errors.UserError as error:
    raise errors.UserError(f"The model in {place} cannot be used: {error}") from error
  check_parameters(place, params, task)
  return model_of(task, jax.device_put(params), meta, place)


def model_of(
  task: Task, params: Params, meta: Mapping[str, Any] | None = None, folder: Path = Path()
) -> "TrainedModel":
  """The trained model of a task and its parameters; arguments as in `TrainedModel`."""
  kinds: dict[type, type[TrainedModel]] = {
    Translation: TranslationModel,
    MaskedLM: MaskedModel,
    LanguageModel: RecurrentModel,
    CausalLM: CausalModel,
    Answering: AnsweringModel,
  }
  kind = task.opened_as or kinds.get(type(task), BatchModel)
  return kind(task, params, meta or {}, folder)


M = TypeVar("M", bound="TrainedModel")


def with_fields(model: M, **fields: Any) -> M:
  """A trained model whose configuration differs from that of its training.

  The parameters stay: of a model whose layers are shared (`shared_layers`) the number of layers may
  change, of one whose positions have no parameters `max_length`.

      deeper = with_fields(load("runs/tables"), encoder_layers=16)

  Args:
    model: as `load` gives it; edits and decoding options are not kept.
    **fields: of its configuration.

  Raises:
    UserError: the configuration does not allow a value, or its parameters would be others.
  """
  config = dataclasses.replace(model.task.model.config, **fields)
  task = model.task.dataset.config.build(config, files=model.task.dataset.files())
  remedy = f"Leave {', '.join(fields)} as in training."
  check_parameters(model.folder, model.params, task, remedy)
  return dataclasses.replace(model, task=task)


@dataclasses.dataclass(frozen=True)
class TranslationModel(TrainedModel[str | tuple[str, str]]):
  """A trained translation model."""

  task: Translation

  @property
  def model(self) -> Seq2Seq:
    """The module; `model.apply({"params": params}, source, target)` gives logits."""
    return self.task.model.module

  @property
  def source_tokenizer(self) -> Tokenizer:
    """From text to source tokens."""
    return self.task.dataset.source_tokenizer

  @property
  def target_tokenizer(self) -> Tokenizer:
    """From target tokens to text."""
    return self.task.dataset.target_tokenizer

  def translate(
    self,
    sentences: Sequence[str],
    *,
    seed: int = 0,
    status: Status = silent,
    **decode: Unpack[DecodeOptions],
  ) -> list[str]:
    """The best translation of every sentence; a blank sentence gives an empty one.

    Args:
      sentences: raw text. What is over the length ceiling of the training data is cut off.
      seed: of the method `sample`.
      status: shows progress.
      **decode: fields of `DecodeConfig` that differ from the task's own, such as `beams=1`.

    Raises:
      UserError: a field that `DecodeConfig` does not have or that has no effect, or a bad value.
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
    **decode: Unpack[DecodeOptions],
  ) -> list[list[Hypothesis]]:
    """The `n_best` translations of every sentence, best first, with scores and tokens.

    Arguments and errors as in `translate`; `routing` also returns the router weights of every
    decoding step.
    """
    errors.check(
      not isinstance(sentences, str),
      f"sentences is one string, {str(sentences)[:40]!r}; give a list of sentences.",
    )
    return self.task.generator(
      self.task.model,
      self.params,
      sentences,
      override(self.task.generator.decode, decode),
      routing=routing,
      rng=jax.random.key(seed),
      status=status,
    )

  def score(self, pairs: Sequence[tuple[str, str]], *, status: Status = silent) -> list[Scored]:
    """How probable every token of given translations is.

    Args:
      pairs: (source, target), raw text; the target may be empty.
      status: shows progress.

    Returns:
      For every pair its target's tokens, the end token last: `log_probabilities` of each given the
      source and those before it, and `log_probability`, their sum; in nats.

    Raises:
      UserError: something else than pairs is given, or a side has more tokens than the model has
        positions.
    """
    errors.check(
      not isinstance(pairs, str)
      and all(not isinstance(pair, str) and len(pair) == 2 for pair in pairs),
      f"pairs is {str(pairs)[:60]!r}; a translation model scores a list of (source, target).",
    )
    return self.task.generator.scorer(self.task.model, self.params, pairs, status=status)

  def capture(self, sentences: Sentences, sites: Iterable[str] | None = None) -> Captured:
    """Activations of the model while it reads sentences and writes their translations.

    Args:
      sentences: source sentences, whose translations are then the model's own; or pairs (source,
        target), whose targets the model is made to write. All go through the model at once.
      sites: names from `sites()`; None for every one.

    Returns:
      A dictionary, site -> float32 [sentence, time, ...] (`.../attention`: [sentence, head, time,
      key]). Time
      counts source tokens at `encoder/...`, each target token to be written elsewhere, the end of
      the sentence included; all sentences are as long as the longest. `source` and `target`
      (absent if nothing but the encoder was asked for) hold token numbers, int32 [sentence, time];
      where they are 0, there is padding, and activations mean nothing. `words(site)` has the text
      of the token that is read at every position, with `predicted=True` that of the target token
      that is to be written; `valid(site)` says where there is one.

    Raises:
      UserError: no sentence, a name that the model does not have, or a sentence that is longer
        than the model's positions.
    """
    return super().capture(sentences, sites)

  def _axis(self, batch: Mapping[str, Any], site: str, keys: bool) -> Axis:
    """Source tokens in the encoder and as keys of cross-attention; elsewhere target tokens, or
    those of both."""
    source, config = batch["source"], self.task.model.config
    side = site if site in ("source", "target") else config.side_at(site)
    if side == "source" or (keys and "/cross/" in site):
      return Axis.of(self.source_tokenizer, source, source, source != PAD)
    target = batch["target"]
    given = target if site == "target" else shift_right(target, BOS)
    if side == "both":
      real, lengths, most = source != PAD, jnp.sum(source != PAD, axis=1), config.max_length
      pairs = ((source, given), (source, target), (real, target != PAD))
      both = (joined(*pair, lengths, most) for pair in pairs)
      return Axis.of(self.target_tokenizer, *both)
    return Axis.of(self.target_tokenizer, given, target, target != PAD)

  def _read(
    self, texts: Sentences, names: tuple[str, ...] | None
  ) -> tuple[dict[str, jax.Array], list[str]]:
    """Sentences or pairs as one padded batch."""
    encoder_only = names is not None and all(name.startswith("encoder/") for name in names)
    sources = [item if isinstance(item, str) else item[0] for item in texts]
    ids = [[*ids, EOS] for ids in self.source_tokenizer.encode_batch(sources)]
    if encoder_only:
      targets = [[EOS]] * len(ids)
    elif all(isinstance(item, str) for item in texts):
      # The tokens themselves: other tokens may spell the same text.
      targets = [list(found[0].tokens) or [EOS] for found in self.hypotheses(sources, n_best=1)]
    else:
      pairs = [item[1] for item in texts if not isinstance(item, str)]
      errors.check(
        len(pairs) == len(sources),
        "sentences mixes single sentences with pairs; give either a list of sentences or a list of"
        " (source, target).",
      )
      targets = [[*ids, EOS] for ids in self.target_tokenizer.encode_batch(pairs)]
    sides = (("source", ids), ("target", targets))
    batch = {name: self._padded(name, rows, PAD) for name, rows in sides}
    time, config = batch["source"].shape[1], self.task.model.config
    room = config.room_for_target(time)
    errors.check(
      batch["target"].shape[1] <= room,
      f"A target has {batch['target'].shape[1]} tokens with its end, but sources of {time} leave"
      f" {room} of the model's positions (model.max_length = {config.max_length}); shorten it.",
    )
    return batch, ["source"] if encoder_only else ["source", "target"]


def check_parameters(
  place: Path, params: Params, task: Task, remedy: str = "Restore the folder as it was saved."
) -> None:
  """Raises a `UserError` unless parameters have the names and shapes of the task's model."""
  expected = nn.unbox(task.shapes)
  given: dict[str, Any] = flatten_dict(dict(params), sep="/")
  wanted: dict[str, Any] = flatten_dict(dict(expected), sep="/")
  there = {name: leaf.shape for name, leaf in given.items()}
  here = {name: leaf.shape for name, leaf in wanted.items()}
  differing = [
    f"{name}: {there.get(name, 'none')} there, {here.get(name, 'none')} expected"
    for name in sorted({*there, *here})
    if there.get(name) != here.get(name)
  ]
  errors.check(
    not differing,
    f"The parameters in {place} are not those of its configuration and tokenizers"
    f" ({len(differing)} differ): {'; '.join(differing[:8])}. {remedy}",
  )
