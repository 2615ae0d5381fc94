"""Old names of modules that configurations of users import: they still work, with a warning."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

_NAMES = {
  "compmod_jax.data.documents": "compmod_jax.data.sources.documents",
  "compmod_jax.data.grammar": "compmod_jax.data.synthetic.grammar",
  "compmod_jax.data.qa.coded": "compmod_jax.data.qa.tokenized",
  "compmod_jax.data.qa.example": "compmod_jax.data.qa.question",
  "compmod_jax.data.qa.sets": "compmod_jax.data.qa.file_sets",
  "compmod_jax.data.scan": "compmod_jax.data.synthetic.scan",
  "compmod_jax.data.text": "compmod_jax.data.sources.text",
  "compmod_jax.data.tfds": "compmod_jax.data.sources.tfds",
  "compmod_jax.data.tokenizer": "compmod_jax.data.tokenizers",
  "compmod_jax.data.unseen": "compmod_jax.data.zero_shot",
  "compmod_jax.data.worlds": "compmod_jax.data.synthetic.worlds",
  "compmod_jax.errors": "compmod_jax.core.errors",
  "compmod_jax.layers.attention_mask": "compmod_jax.layers.context",
  "compmod_jax.layers.dropout": "compmod_jax.layers.basic",
  "compmod_jax.layers.feedforward": "compmod_jax.layers.basic",
  "compmod_jax.layers.head_projections": "compmod_jax.layers.attention",
  "compmod_jax.layers.stack_config": "compmod_jax.layers.stack",
  "compmod_jax.mechanisms.masking": "compmod_jax.data.corruption",
  "compmod_jax.mechanisms.recoding_config": "compmod_jax.mechanisms.recoding",
  "compmod_jax.models.encoder_config": "compmod_jax.models.encoder",
  "compmod_jax.models.lstm_lm_config": "compmod_jax.models.lstm_lm",
  "compmod_jax.models.nemot_config": "compmod_jax.models.nemot",
  "compmod_jax.models.stack_config": "compmod_jax.layers.stack",
  "compmod_jax.models.transformer_config": "compmod_jax.models.transformer",
  "compmod_jax.sharding": "compmod_jax.core.sharding",
  "compmod_jax.sites": "compmod_jax.core.intermediates",
  "compmod_jax.tasks.answering": "compmod_jax.tasks.question_answering",
  "compmod_jax.tasks.answering_config": "compmod_jax.tasks.question_answering",
  "compmod_jax.tasks.causal_lm_config": "compmod_jax.tasks.causal_lm",
  "compmod_jax.tasks.kinds": "compmod_jax.tasks.configs",
  "compmod_jax.tasks.language_model_config": "compmod_jax.tasks.language_model",
  "compmod_jax.tasks.masked_lm_config": "compmod_jax.tasks.masked_lm",
  "compmod_jax.tasks.modulated": "compmod_jax.models.matching_decoder",
  "compmod_jax.tasks.question_answering_config": "compmod_jax.tasks.question_answering",
  "compmod_jax.tasks.text_tokenizer": "compmod_jax.data.text_tokenizer",
  "compmod_jax.tasks.translation_config": "compmod_jax.tasks.translation",
  "train.experiment": "compmod_jax.training.experiment",
  "train.optimizer": "compmod_jax.training.optimizer",
  "train.ways": "compmod_jax.training.regimes",
}
# The package of old names that only a checkout still has, where it holds programs.
_GONE = "train"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    if fullname == _GONE:  # after all other finders: neither a checkout's nor a user's is there
      return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
    return importlib.machinery.ModuleSpec(fullname, self) if fullname in _NAMES else None

  def exec_module(self, module: ModuleType) -> None:
    if module.__name__ == _GONE:
      return
    new = _NAMES[module.__name__]
    warnings.warn(
      f"{module.__name__} is called {new} now; the old name goes with version 0.3.",
      DeprecationWarning,
      stacklevel=2,
    )
    sys.modules[module.__name__] = importlib.import_module(new)


def install() -> None:
  """Lets the import system know the old names."""
  if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
