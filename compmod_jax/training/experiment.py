"""An experiment: everything that decides a training run, as one frozen dataclass."""

import contextlib
import dataclasses
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from compmod_jax.core import errors, extras
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.config import from_json, once, to_json
from compmod_jax.core.rounding import Products
from compmod_jax.core.sharding import MeshConfig
from compmod_jax.data.subsets import SUBSETS, Subset
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.configs import ModelConfig, TaskConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.optimizer import GROUPS, OptimizerConfig, ParamGroup

ModelSelection = Literal["best", "last"]


@dataclasses.dataclass(frozen=True)
class Phase:
  """A stretch of training: on which data, which parameters, how long."""

  name: str = "train"
  """What logs call it."""
  part: Subset = "all"
  """Part of the training data: all, or the large or the small one of two without a common example
  (task.small_share)."""
  trainable: str = "all"
  """Parameters that move: all, or groups with + between them: routing (the routers'), rest (what is
  in no other group), or names of `groups`."""
  epochs: float = 0
  """Length in epochs; 0 if it is given in steps."""
  steps: int = 0
  """Length in steps; 0 if it is given in epochs."""

  def __post_init__(self):
    errors.check(
      (self.epochs > 0) != (self.steps > 0),
      f"phases.{self.name} has epochs = {self.epochs} and steps = {self.steps}; give exactly one of"
      " them a positive value.",
    )
    for field in ("epochs", "steps"):
      value = getattr(self, field)
      errors.check(value >= 0, f"phases.{field} is {value}; it must not be negative.")
    errors.check_choice("phases.part", self.part, SUBSETS)


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Task, model, optimizer and schedule of a run."""

  name: str
  """Short name, used in reports."""
  task: TaskConfig = dataclasses.field(metadata=once(TranslationConfig))
  """Data, tokenizers, batches, loss and decoding."""
  model: ModelConfig = dataclasses.field(metadata=once(TransformerConfig))
  """The model."""
  optimizer: OptimizerConfig = OptimizerConfig()
  """How parameters move."""
  groups: tuple[ParamGroup, ...] = ()
  """Groups of parameters that phases train apart, or that move in a way of their own."""
  phases: tuple[Phase, ...] = (Phase(epochs=15),)
  """Stretches of training, one after the other; the learning-rate schedule spans them all."""
  mesh: MeshConfig = MeshConfig()
  """How devices share the work."""
  shard_optimizer: bool = False
  """Divide the update and the optimizer's moments over copies of the model (`mesh.data`): each
  moves its part of the parameters and gathers the others. Fewer bytes are kept, read and written,
  more may be sent (Xu et al. 2020; stage 1 of Rajbhandari et al. 2020)."""
  start: str = ""
  """Folder of a trained model to start from, tokenizer included (a workdir, a model's folder, or a
  GPT-2 checkpoint of Hugging Face's); empty: fresh parameters."""
  seed: int = 0
  """Seed of parameters, data order and dropout."""
  micro_batches: int = 1
  """Parts of a batch whose gradients are added up, to save memory."""
  products: Products = "model"
  """Products with weights in training: as the model makes them, or of operands rounded to bfloat16
  with sums in float32, but for gradients of weights; faster on CPUs that multiply bfloat16."""
  ema: float = 0.0
  """Decay of the moving average of the parameters that is evaluated and kept; 0 for none."""
  log_every: int = 20
  """Steps between lines of the log."""
  evaluate_every: int = 0
  """Steps between evaluations on the validation split; 0 for once an epoch."""
  evaluate_sentences: int = 500
  """Validation sentences that are translated, or questions that are answered, at each evaluation.
  Few-shot learning is scored on so many episodes (0: on all), continual learning on so many classes
  (0: on task.use.choice)."""
  watch_sentences: int = 64
  """Validation sentences on which weights and norms of heads are measured at each evaluation; 0 for
  none."""
  score_train: bool = False
  """Score the whole training split at the end, too: its loss and perplexity."""
  checkpoint_every: int = 0
  """Steps between checkpoints besides those at evaluations; 0 for none."""
  keep_last: int = 2
  """Checkpoints that are kept for resuming."""
  keep_models: int = 1
  """Evaluated models that are kept besides the best, newest first, for averaging."""
  model_selection: ModelSelection = "best"
  """Which of the evaluated parameters are scored at the end and kept for use: those with the best
  validation score, or the last ones. Where tests are of another distribution than validation, its
  score says little of them (Csordas et al. 2021)."""
  patience: int = 0
  """Stop after this many evaluations without a better score; 0 for never."""
  max_nonfinite: int = 5
  """Stop after this many steps in a row with a non-finite loss or gradient."""
  time_limit_minutes: float = 0.0
  """Stop training after this much wall time; 0 for no limit."""
  accept_data: str = ""
  """Go on in a workdir with other training data than before: their name, which the message that
  refuses them gives."""

  def __post_init__(self):
    check_numbers(self)
    errors.check(bool(self.phases), "phases is empty; an experiment needs at least one phase.")
    known = [group.name for group in self.groups]
    errors.check(
      len(set(known)) == len(known),
      f"groups are called {', '.join(known)}; give each a name of its own.",
    )
    for phase in self.phases:
      for name in phase.trainable.split("+"):
        errors.check_choice("phases.trainable", name, {"all", *GROUPS, *known})
    check_least(self, micro_batches=1, log_every=1, keep_last=1, max_nonfinite=1)
    for field in (
      "seed",
      "evaluate_every",
      "evaluate_sentences",
      "time_limit_minutes",
      "watch_sentences",
      "checkpoint_every",
      "patience",
      "keep_models",
    ):
      value = getattr(self, field)
      errors.check(value >= 0, f"{field} is {value}; it must not be negative.")
    errors.check_choice("products", self.products, get_args(Products))
    errors.check_choice("model_selection", self.model_selection, get_args(ModelSelection))
    schedules = {"optimizer.schedule": self.optimizer.schedule}
    for group in self.groups:
      if group.optimizer:
        schedules[f"groups.{group.name}.optimizer.schedule"] = group.optimizer.schedule
    shown = ", ".join(f"{name} {value!r}" for name, value in schedules.items())
    errors.check(
      self.model_selection == "best" or not (self.patience or "plateau" in schedules.values()),
      f"model_selection is {self.model_selection!r}, patience {self.patience}, {shown}; patience"
      " and plateau go by the best score so far. Set patience = 0 and another schedule, or"
      " model_selection = best.",
    )
    errors.check(0 <= self.ema < 1, f"ema is {self.ema}; it must be at least 0 and below 1.")


def translation_task(experiment: Experiment) -> TranslationConfig:
  """The task of an experiment, for programs that can use no other than translation.

  Raises:
    UserError: it is another one.
  """
  task = experiment.task
  if isinstance(task, TranslationConfig):
    return task
  raise errors.UserError(
    f"The task of {experiment.name!r} is a {type(task).__name__}, but this program compares source"
    " sentences with translations. Give the --config of a translation experiment."
  )


def configs_folder() -> Path:
  """The folder of the package's own configurations: in an installation, or in a checkout."""
  package = Path(__file__).parents[1]
  installed = package / "configs"
  return installed if installed.is_dir() else package.parent / "configs"


def config_names() -> list[str]:
  """Names of the package's own configurations."""
  return sorted(path.stem for path in configs_folder().glob("*.py"))


def find_config(path: str) -> Path:
  """The configuration file that a path or a name stands for.

  Args:
    path: of a file, or the name of one of the package's own configurations, such as nmt_cah. Where
      there is no folder `configs`, its path in a checkout, configs/nmt_cah.py, is a name, too.

  Raises:
    UserError: there is no such file.
  """
  file = Path(path)
  if file.is_file():
    return file
  name = path
  if not Path("configs").is_dir():
    name = path.removeprefix("configs/").removesuffix(".py")
  if name in config_names():
    return configs_folder() / f"{name}.py"
  raise errors.UserError(
    f"--config is {path!r}, which is not a file, nor the name of one of the package's"
    f" configurations ({', '.join(config_names())}).{errors.near(name, config_names())} Give the"
    " path of a configuration, for example configs/nmt_cah.py, or such a name, with a variant after"
    " a colon if you like."
  )


def load_config(argument: str) -> Experiment:
  """The experiment of a configuration file: the result of its `get_config(variant)`.

  Args:
    argument: PATH.py[:VARIANT], or NAME[:VARIANT] of a configuration of the package.

  Raises:
    UserError: no such file, it has no `get_config`, it does not know the variant, or a field has a
      value of another type than its own.
  """
  path, _, variant = argument.partition(":")
  module = _module(path)
  file = find_config(path)
  with _mistakes_in(file), _importing_from(file.parent):
    experiment = module.get_config(variant)
  errors.check(
    isinstance(experiment, Experiment),
    f"get_config of {path} returns {experiment!r}; it must return an Experiment.",
  )
  try:  # what could not be opened again must not be trained
    return from_json(Experiment, to_json(experiment))
  except errors.UserError as error:
    raise errors.UserError(
      f"{file} is not a valid configuration: {error} Mend the file."
    ) from error


def load_code(path: Path) -> None:
  """Runs a Python file, so that saved configurations can name its classes.

  Raises:
    UserError: there is no such file, or it has a mistake.
  """
  errors.check(path.is_file(), f"--code is {str(path)!r}, which is not a file.")
  _run(str(path))


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
  module = _run(path)
  errors.check(
    hasattr(module, "get_config"),
    f"{path} has no function get_config(variant); a configuration file defines one.",
  )
  return module


def _run(path: str) -> ModuleType:
  """The module that a Python file makes."""
  file = find_config(path)
  spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
  if spec is None or spec.loader is None:
    raise errors.UserError(f"--config {path} is not a Python file; a configuration ends in .py.")
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  with _mistakes_in(file), extras.needed(), _importing_from(file.parent):
    spec.loader.exec_module(module)
  return module


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
  """Modules of a folder can be imported by their names, where no other has theirs."""
  entry = str(folder.resolve())
  sys.path.append(entry)
  try:
    yield
  finally:
    sys.path.remove(entry)


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
