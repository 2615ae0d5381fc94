"""Starting from a trained model: its tokenizer, and every parameter that fits.

A folder is the workdir of a run, a model's folder, or one of Hugging Face's with a GPT-2 checkpoint
(`config.json`, `model.safetensors`), which becomes the vanilla set of a modulated model or a whole
decoder. Output sets of tasks that the trained model did not have start as its `lm` set.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from compmod_jax.checkpoints.gpt2 import as_vanilla_set, check_decoder, read_gpt2
from compmod_jax.checkpoints.huggingface_folder import CONFIG, WEIGHTS
from compmod_jax.checkpoints.model_folder import check_sizes, find_model, load_model_folder
from compmod_jax.core import errors
from compmod_jax.core.config import from_json
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import OUTPUT, NemotConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.configs import ModelConfig

_SOURCE = "lm"  # the task whose output set others start from
_TABLE, _AUXILIARY = ("embedding", "table"), "auxiliary_embedding"


@dataclasses.dataclass(frozen=True)
class Start:
  """What a run starts from.

  Attributes:
    folder: of the trained model.
  """

  folder: Path

  @property
  def foreign(self) -> bool:
    """Whether it is a checkpoint of Hugging Face's."""
    return (self.folder / CONFIG).is_file() and (self.folder / WEIGHTS).is_file()

  @functools.cached_property
  def _ours(self) -> tuple[dict[str, Any], dict[str, bytes], dict[str, Any]]:
    place = find_model(self.folder)
    params, files, meta = load_model_folder(place)
    check_sizes(place, params, meta.get("model"))
    return params, files, meta

  def files(self) -> dict[str, bytes] | None:
    """The trained model's tokenizer; none where it is for the configuration to name."""
    return None if self.foreign else self._ours[1]

  def merged(self, fresh: Mapping[str, Any], config: ModelConfig) -> tuple[dict[str, Any], str]:
    """Fresh parameters with all that the trained model has in their places, and a note on it.

    Args:
      fresh: of the new model, NumPy or JAX arrays.
      config: the new model's configuration.

    Raises:
      UserError: the folder holds no model, nothing of it fits, or the new model would compute
        something else with it.
    """
    if self.foreign and isinstance(config, NemotConfig):
      made = as_vanilla_set(read_gpt2(self.folder), config, fresh)
      return made, f"the vanilla set starts as the GPT-2 in {self.folder}"
    if self.foreign:
      model = read_gpt2(self.folder)
      if isinstance(config, DecoderConfig):
        check_decoder(config, model)
      return merge(fresh, model.params, where=str(self.folder))
    params, _, meta = self._ours
    old = from_json(ModelConfig, meta["model"], untagged=TransformerConfig)
    if isinstance(config, NemotConfig) and isinstance(old, NemotConfig) and _AUXILIARY in params:
      params = {**params, _AUXILIARY: _auxiliary(fresh, params, config, old)}
    return merge(fresh, params, where=str(self.folder))


def _auxiliary(
  fresh: Mapping[str, Any], given: Mapping[str, Any], new: NemotConfig, old: NemotConfig
) -> dict[str, Any]:
  """Vectors of auxiliary tokens: those that the trained model has by the same name, else fresh."""
  table, known = np.array(fresh[_AUXILIARY]["table"]), np.asarray(given[_AUXILIARY]["table"])
  for number, name in enumerate(new.auxiliary):
    if name in old.auxiliary and known.shape[1:] == table.shape[1:]:
      table[number] = known[old.auxiliary.index(name)]
  return {"table": table}


def merge(
  fresh: Mapping[str, Any], given: Mapping[str, Any], *, where: str
) -> tuple[dict[str, Any], str]:
  """Fresh parameters with those of a trained model in place of all that have their name and shape.

  Vectors of tokens that the trained model did not have stay fresh.

  Args:
    fresh: of the new model.
    given: of the trained model.
    where: what the note calls it.

  Returns:
    The parameters, and a sentence on what started from where.

  Raises:
    UserError: nothing fits.
  """
  new: dict[tuple[str, ...], Any] = flatten_dict(dict(fresh))
  old: dict[tuple[str, ...], Any] = flatten_dict(dict(given))
  made, left = {}, []
  for path, leaf in new.items():
    value = old.get(path, old.get(_as_source(path)))
    if value is not None and path == _TABLE and value.shape[1:] == leaf.shape[1:]:
      value = np.concatenate([value, np.asarray(leaf)[len(value) :]])
    if value is None or value.shape != leaf.shape:
      left.append(path)
      value = leaf
    made[path] = value
  errors.check(
    len(left) < len(new),
    f"start is {where}, but none of its parameters has the name and shape of one of this model's."
    " Give the folder of a model of the same kind and size.",
  )
  sets = sorted({path[0] for path in left})
  note = f"{len(new) - len(left)} of {len(new)} parameter arrays start from {where}"
  return unflatten_dict(made), note + (f"; fresh: {' '.join(sets)}" if left else "")


def _as_source(path: tuple[str, ...]) -> tuple[str, ...]:
  """The place that an output set's parameter has in the set that others start from."""
  for kind in (f"{OUTPUT}_norm_", f"{OUTPUT}_"):
    if path[0].startswith(kind):
      return (kind + _SOURCE, *path[1:])
  return path
