"""What the programs that use a trained model share: their options, and opening the model."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import tyro

from compmod_jax.core.types import Dataclass, Params

if TYPE_CHECKING:
  from compmod_jax.api import TrainedModel
  from compmod_jax.tasks.base import Sharing

C = TypeVar("C", bound=Dataclass)
Code = Annotated[tuple[Path, ...], tyro.conf.UseAppendAction]
"""Files that are run, each after an option of its own."""


@dataclasses.dataclass(frozen=True)
class ModelArgs:
  """Which model, and how it decodes; what is left out is as in training."""

  workdir: Path
  """Workdir of a training run, or a model folder."""
  model: str | None = None
  """Which of the workdir's models: best (the default), average or step-NUMBER."""
  method: Literal["beam", "greedy", "sample"] | None = None
  """Beam search, the most probable token at every step, or draws."""
  beams: int | None = None
  """Hypotheses that beam search follows."""
  length_penalty: float | None = None
  """Scores are log probability / length ** length_penalty."""
  max_ratio: float | None = None
  """An output has at most max_ratio * source length + max_extra tokens."""
  max_extra: int | None = None
  """See max_ratio."""
  temperature: float | None = None
  """Of sample: below 1 sharpens the distribution."""
  top_k: int | None = None
  """Of sample: only the k most probable tokens; 0 keeps all."""
  top_p: float | None = None
  """Of sample: only the most probable tokens that reach this probability together."""
  recode_layer: int | None = None
  """Decoder layer whose output is recoded at every step, by the next token's entropy; -1: last."""
  recode_size: float | None = None
  """Step along that entropy's gradient."""
  recode_steps: int | None = None
  """Gradient steps at every token."""
  recoding: tuple[str, ...] = ()
  """Fields of a recurrent model's recoding that differ from training, as NAME=VALUE, for example
  signal=nll size=0.5, or signal=none."""
  model_fields: tuple[str, ...] = ()
  """Fields of the model's configuration that differ from training, as NAME=VALUE, where its
  parameters fit them, for example encoder_layers=16 of a model with shared_layers."""
  code: Code = ()
  """Python file of your own whose classes the model's configuration names; it is run first. May be
  given several times."""

  def decoding(self) -> dict[str, Any]:
    """The decoding options that were given."""
    others = ("recoding", "model_fields", "code")
    names = [one.name for one in dataclasses.fields(ModelArgs)[2:] if one.name not in others]
    given = {name: getattr(self, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


class Opened(NamedTuple):
  """A model on the devices.

  Attributes:
    model: as `compmod_jax.load` gives it, its task decoding as the options say.
    params: its parameters, placed.
    sharing: how batches are laid over the devices.
  """

  model: "TrainedModel"
  params: Params
  sharing: "Sharing"


def open_model(args: ModelArgs) -> Opened:
  """Opens the model that the options name.

  Raises:
    UserError: there is none, it is damaged, a parameter is not finite, or an option is wrong.
  """
  # What follows takes seconds to import; mistakes on the command line are reported before.
  import jax

  from compmod_jax import api
  from compmod_jax.training import experiment, run

  run.use_compile_cache()
  for path in args.code:
    experiment.load_code(path)
  model = api.load(args.workdir, model=args.model)
  _check_finite(model)
  model = _with_fields(model, args.model_fields)
  model = _recoding(_decoding(model, args.decoding()), args.recoding)
  mesh, micro_batches = _layout(args.workdir)
  # Training laid batches out like this, so that sums come out the same to the last bit.
  sharing = run.sharing_of(mesh, micro_batches)
  params = jax.device_put(model.params, run.parameter_shardings(model.task, mesh))
  return Opened(model, params, sharing)


def _check_finite(model: "TrainedModel") -> None:
  """Raises a `UserError` that names what is not finite among the parameters."""
  import jax
  import jax.numpy as jnp

  from compmod_jax.core import errors

  leaves, _ = jax.tree_util.tree_flatten_with_path(model.params)
  # One program, in place of two for each shape.
  finite = jax.jit(lambda leaves: [jnp.isfinite(leaf).all() for leaf in leaves])
  broken = {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for (path, leaf), fine in zip(leaves, finite([leaf for _, leaf in leaves]), strict=True)
    if not fine
  }
  if not broken:
    return
  name, leaf = next(iter(broken.items()))
  raise errors.UserError(
    f"{len(broken)} of the {len(leaves)} parameter arrays of the model in {model.folder} are not"
    f" finite: the first, {name}, holds {int(jnp.isnan(leaf).sum())} NaN and"
    f" {int(jnp.isinf(leaf).sum())} infinite numbers of {leaf.size}. Whatever such a model gives"
    " means nothing: take another model of the workdir with --model, or train again from a"
    " checkpoint before the parameters became so, with a lower learning rate."
  )


def _decoding(model: "TrainedModel", options: dict[str, Any]) -> "TrainedModel":
  """The model whose task decodes as the options say."""
  from compmod_jax import api
  from compmod_jax.core import errors

  if not options:
    return model
  if model.task.generator.decode is None:
    raise errors.UserError(
      f"{', '.join(f'--{name}' for name in options)}: the model in {model.folder} does not search"
      " for its outputs, so that there is nothing to set. Leave these options out."
    )
  bounds = [f"--{name}" for name in ("max_ratio", "max_extra") if name in options]
  errors.check(
    not (bounds and isinstance(model, api.AnsweringModel)),
    f"{', '.join(bounds)}: the model in {model.folder} answers questions, and an answer has at most"
    " task.answer_length tokens. Leave it out.",
  )
  return dataclasses.replace(
    model, task=model.task.decoding(api.override(model.task.generator.decode, options))
  )


def _with_fields(model: "TrainedModel", fields: tuple[str, ...]) -> "TrainedModel":
  """The model whose configuration differs in these fields."""
  from compmod_jax import api

  if not fields:
    return model
  config = changed_fields(model.task.model.config, fields, "--model_fields")
  names = (field.partition("=")[0] for field in fields)
  return api.with_fields(model, **{name: getattr(config, name) for name in names})


def _recoding(model: "TrainedModel", fields: tuple[str, ...]) -> "TrainedModel":
  """The recurrent model whose recoding differs in these fields."""
  from compmod_jax import api
  from compmod_jax.core import errors

  if not fields:
    return model
  config = model.task.model.config
  errors.check(
    any(field.name == "recoding" for field in dataclasses.fields(config)),
    f"--recoding: the model in {model.folder} is no recurrent one, and recodes no states of its"
    " own. Leave it out; where a decoder searches there are --recode_layer and --recode_size.",
  )
  return api.with_fields(model, recoding=changed_fields(config.recoding, fields, "--recoding"))


def changed_fields(config: C, fields: tuple[str, ...], option: str) -> C:
  """The configuration with these fields, which an option has as NAME=VALUE.

  Raises:
    UserError: there is no such field, or it cannot have this value.
  """
  from compmod_jax.core import errors
  from compmod_jax.core.config import from_json, to_json

  changed = to_json(config)
  for field in fields:
    name, equals, value = field.partition("=")
    errors.check(bool(equals), f"{option} has {field!r}; give NAME=VALUE.")
    errors.check_choice(option, name, changed)
    try:
      changed[name] = json.loads(value)
    except ValueError:
      changed[name] = value
  return from_json(type(config), changed)


def _layout(workdir: Path) -> tuple[Any, int]:
  """Mesh and micro-batches of the run; the default mesh where they are not known or do not fit."""
  from compmod_jax.core import errors, sharding
  from compmod_jax.training.workdir import saved_experiment

  if not (workdir / "config.json").is_file():
    return sharding.make_mesh(sharding.MeshConfig()), 1
  try:
    experiment = saved_experiment(workdir)
    return sharding.make_mesh(experiment.mesh), experiment.micro_batches
  except errors.UserError as error:
    print(f"note: the devices are used in the default way ({error})", file=sys.stderr)
    return sharding.make_mesh(sharding.MeshConfig()), 1
