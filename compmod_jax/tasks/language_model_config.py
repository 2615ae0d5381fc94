"""The configuration of recurrent language modelling."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compmod_jax.core import errors
from compmod_jax.core.untrusted import MIB, parse_json, read_bounded
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.tokenizers import Tokenizer, TokenizerConfig
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.lstm_lm_config import LstmConfig
from compmod_jax.tasks.text_tokenizer import DocumentData, text_tokenizer

if TYPE_CHECKING:
  from compmod_jax.tasks.language_model import LanguageModel

CLASSIFIER_FILE = "classifier.json"
_MOST = 64 * MIB  # most bytes of a classifier's file, which holds one number a unit


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
  """A language modelling task: text, tokenizer, and streams read side by side."""

  data: DocumentData = GrammarDocuments()
  """Where documents come from; each ends with an end token."""
  tokenizer: TokenizerConfig = TokenizerConfig(kind="words", vocab_size=50_000)
  """The tokenizer."""
  tokenizer_documents: int = 1_000_000
  """The tokenizer is trained on the first so many training documents, at most."""
  rows: int = 64
  """Streams that training reads side by side."""
  length: int = 35
  """Tokens after which gradients are cut (truncated backpropagation through time)."""
  eval_rows: int = 16
  """Streams that evaluation reads side by side, each from states of zeros."""
  noise_seed: int = 0
  """Of what is drawn in evaluation: dropout masks of recoding. Texts that are scored one by one, as
  minimal pairs are, all have the same masks at a step, wherever they stand."""

  def __post_init__(self):
    for field in ("rows", "length", "eval_rows", "tokenizer_documents"):
      value = getattr(self, field)
      errors.check(value >= 1, f"task.{field} is {value}; it must be at least 1.")

  def build(
    self,
    model: Any,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "LanguageModel":
    """The task with its tokenizer: the one in `files`, else trained on the training split.

    Args:
      model: the model's configuration.
      files: what `LanguageModel.files` returned.
      cache: folder in which the tokenizer and tokenised text are kept.

    Raises:
      UserError: the model is none for this task, data are missing, or `files` lacks the tokenizer.
    """
    if not isinstance(model, LstmConfig):
      raise errors.UserError(
        f"The task is language modelling but model is a {type(model).__name__}; it needs an"
        " LstmConfig."
      )
    # What uses this configuration imports it.
    from compmod_jax.tasks.language_model import LanguageModel

    classifier = read_classifier(model.recoding, files)
    return LanguageModel(self, model, self.make_tokenizer(files, cache), cache, classifier)

  def make_tokenizer(
    self, files: Mapping[str, bytes] | None = None, cache: Path | None = None
  ) -> Tokenizer:
    """The tokenizer in `files`, else one that is trained on the training split."""
    documents = self.tokenizer_documents
    return text_tokenizer(self.data, self.tokenizer, documents, files, cache)


def read_classifier(
  recoding: RecodingConfig, files: Mapping[str, bytes] | None
) -> dict[str, Any] | None:
  """The classifier of weak supervision: that of `files`, else of the file that is named.

  Returns:
    `weight` and `bias`, lists and numbers; None for other signals.

  Raises:
    UserError: there is none, or the file holds none.
  """
  if recoding.signal != "weak_supervision":
    return None
  if files is not None and CLASSIFIER_FILE in files:
    return _parsed(files[CLASSIFIER_FILE], CLASSIFIER_FILE, "restore the folder.")
  errors.check(
    bool(recoding.classifier),
    "model.recoding.signal is weak_supervision, which needs model.recoding.classifier: train one by"
    " `python -m train.analyse probe` on a model of the same size, and name its result.json.",
  )
  remedy = "name the result.json of `python -m train.analyse probe`."
  where = f"model.recoding.classifier is {recoding.classifier!r}, which"
  try:
    data = read_bounded(Path(recoding.classifier), _MOST)
  except (OSError, ValueError) as error:
    raise errors.UserError(f"{where} cannot be read ({error}); {remedy}") from error
  return _parsed(data, where, remedy, inside="classifier")


def _parsed(data: bytes, where: str, remedy: str, inside: str = "") -> dict[str, Any]:
  """Weight and bias of a classifier in JSON, or in one of its fields."""
  try:
    found = parse_json(data)
    found = found[inside] if inside else found
    return {"weight": [float(x) for x in found["weight"]], "bias": float(found["bias"])}
  except (ValueError, KeyError, TypeError, OverflowError) as error:
    raise errors.UserError(f"{where} holds no classifier ({error}); {remedy}") from error
