"""Packages that not every installation has, and the message where one is missing.

`pip install compmod_jax` opens and uses models; what more a program needs comes with an extra, such
as `pip install "compmod_jax[train]"`. Code that needs it imports it where it is used:

    with extras.needed():
      import sacrebleu

Imports the standard library alone, as the programs read it when an import has failed.
"""

import contextlib
from collections.abc import Iterator

from compmod_jax.core.errors import UserError

# Name that is imported -> the extra of pyproject.toml that installs it.
PACKAGES = {
  "chex": "train",
  "grain": "data",
  "importlib_resources": "data",
  "jinja2": "report",
  "matplotlib": "report",
  "optax": "train",
  "orbax": "train",
  "rich": "train",
  "rouge_score": "train",
  "sacrebleu": "train",
  "sentencepiece": "data",
  "tensorboardX": "train",
  "tensorflow_datasets": "data",
  "textblob": "data",
  "tokenizers": "hf",
}
_IN_TRAIN = ("data", "report")  # extras that [train] has within it


class MissingExtraError(ImportError, UserError):
  """A package of an extra is not installed; the message has the command that installs it."""


@contextlib.contextmanager
def needed() -> Iterator[None]:
  """Surrounds the import of a package of an extra.

  Raises:
    MissingExtraError: the package is not installed.
  """
  try:
    yield
  except ModuleNotFoundError as error:
    message = missing(error.name or "")
    if message is None:
      raise
    raise MissingExtraError(message, name=error.name) from error


def missing(module: str) -> str | None:
  """The message for a module that cannot be found; None if it belongs to no extra."""
  package = module.partition(".")[0]
  extra = PACKAGES.get(package)
  if extra is None:
    return None
  all_of = extra
  also = ""
  if extra in _IN_TRAIN:
    all_of, also = "train", " and with compmod_jax[train], which has all that training needs"
  return (
    f"The Python package {package!r} is not installed. It comes with compmod_jax[{extra}]{also}:"
    f' pip install "compmod_jax[{all_of}]", and run the same again.'
  )
