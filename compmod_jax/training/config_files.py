"""Configuration files: Python files with `get_config(variant)`, found by path or by name."""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compmod_jax
from compmod_jax.core import errors
from compmod_jax.training.experiment import Experiment


def folder() -> Path:
  """The folder of the package's own configurations: in an installation, or in a checkout."""
  package = Path(compmod_jax.__file__).parent
  installed = package / "configs"
  return installed if installed.is_dir() else package.parent / "configs"


def names() -> list[str]:
  """Names of the package's own configurations."""
  return sorted(path.stem for path in folder().glob("*.py"))


def find(path: str) -> Path:
  """The configuration file that a path or a name stands for.

  Args:
    path: of a file, or the name of one of the package's own configurations, such as nmt_cah.

  Raises:
    UserError: there is no such file.
  """
  file = Path(path)
  if file.is_file():
    return file
  if path in names():
    return folder() / f"{path}.py"
  raise errors.UserError(
    f"--config is {path!r}, which is neither a file nor the name of a configuration"
    f" ({', '.join(names())}). Give the path of a configuration, for example configs/nmt_cah.py, or"
    " such a name, with a variant after a colon if you like."
  )


def load_config(argument: str) -> Experiment:
  """The experiment of a configuration file: the result of its `get_config(variant)`.

  Args:
    argument: PATH.py[:VARIANT], or NAME[:VARIANT] of a configuration of the package (see `find`).

  Raises:
    UserError: no such file, it has no `get_config`, or it does not know the variant.
  """
  path, _, variant = argument.partition(":")
  module = _module(path)
  with _mistakes_in(find(path)):
    experiment = module.get_config(variant)
  errors.check(
    isinstance(experiment, Experiment),
    f"get_config of {path} returns {experiment!r}; it must return an Experiment.",
  )
  return experiment


def variants(path: str) -> list[str]:
  """The variants that a configuration file checks its own against; empty if it checks none.

  Raises:
    UserError: as `load_config`.
  """
  try:
    _module(path).get_config("?")
  except errors.ChoiceError as error:
    return [name for name in error.choices if name] if error.field == "variant" else []
  except Exception:
    return []  # `load_config` says what is wrong with it
  return []


def _module(path: str) -> Any:
  """The configuration file as a module with `get_config`."""
  file = find(path)
  spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
  if spec is None or spec.loader is None:
    raise errors.UserError(f"--config {path} is not a Python file; a configuration ends in .py.")
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  with _mistakes_in(file):
    spec.loader.exec_module(module)
  errors.check(
    hasattr(module, "get_config"),
    f"{path} has no function get_config(variant); a configuration file defines one.",
  )
  return module


@contextlib.contextmanager
def _mistakes_in(file: Path) -> Iterator[None]:
  """Turns what goes wrong in a configuration file into a `UserError` that names the line."""
  try:
    yield
  except errors.UserError:
    raise
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    raise errors.UserError(
      f"{file}{f':{line}' if line else ''} is not a valid configuration:"
      f" {type(error).__name__}: {' '.join(str(error).split())}. Mend the file; --debug shows where"
      " it comes from."
    ) from error
