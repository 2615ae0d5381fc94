"""A run's parts, assembled: task, mesh, optimizer, state and the folder they live in.

A workdir holds `config.json` (the resolved experiment and its provenance), `metrics.jsonl`,
`checkpoints/` (to continue), `models/` (to use: `best`, and the last evaluated ones), `report/`.
"""

import base64
import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import Mesh

from compmod_jax import errors, sharding
from compmod_jax.interop.model_folder import load_model_folder, save_model_folder
from compmod_jax.serialise import from_json, to_json
from compmod_jax.tasks.base import Sharing, Task
from train.experiment import Experiment
from train.optimizer import learning_rate, make_optimizer
from train.step import TrainState, init_state
from train.provenance import provenance


def cache_folder() -> Path:
  """Where compiled programs and trained tokenizers are kept: $COMPMOD_CACHE or ~/.cache."""
  return Path(os.environ.get("COMPMOD_CACHE") or Path.home() / ".cache" / "compmod_jax")


def use_compile_cache() -> None:
  """Turns on JAX's persistent compilation cache for programs of any size."""
  jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclasses.dataclass
class Run:
  """What a training program works with.

  Attributes:
    experiment: the resolved configuration.
    workdir: where results go.
    task: the task, tokenizers trained.
    mesh: the devices.
    sharing: how batches are laid over the devices.
    iterators: training batches of each phase.
    batches_per_epoch: of each phase.
  """

  experiment: Experiment
  workdir: Path
  task: Task
  mesh: Mesh
  sharing: Sharing
  iterators: list[Any]
  batches_per_epoch: list[int]

  @functools.cached_property
  def phase_ends(self) -> list[int]:
    """Step at which each phase ends."""
    lengths = [
      phase.steps or max(1, round(phase.epochs * batches))
      for phase, batches in zip(self.experiment.phases, self.batches_per_epoch, strict=True)
    ]
    return [int(end) for end in np.cumsum(lengths)]

  @property
  def total_steps(self) -> int:
    """Updates of all phases together."""
    return self.phase_ends[-1]

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformation:
    """The optimizer, its schedule spanning all phases."""
    return make_optimizer(self.experiment.optimizer, self.total_steps)

  @functools.cached_property
  def rate(self) -> Any:
    """Learning rate as a function of the number of updates."""
    return learning_rate(self.experiment.optimizer, self.total_steps)

  def _init(self) -> TrainState:
    params = nn.unbox(self.task.init(jax.random.key(self.experiment.seed)))
    carry = self.task.init_carry()
    return init_state(params, carry, self.optimizer, self.experiment.ema)

  @functools.cached_property
  def state_shardings(self) -> TrainState:
    """Sharding of every array of the state: optimizer and average like their parameters."""
    whole = sharding.replicated(self.mesh)
    params = parameter_shardings(self.task, self.mesh)
    shapes = jax.eval_shape(self._init)
    moments = optax.tree.map_params(
      self.optimizer,
      lambda _, place: place,
      shapes.opt_state,
      params,
      transform_non_params=lambda _: whole,
    )
    return TrainState(
      step=whole,
      params=params,
      opt_state=moments,
      ema=params if self.experiment.ema else (),
      carry=jax.tree.map(lambda _: sharding.batch_sharding(self.mesh), shapes.carry),
      skipped=whole,
      bad_run=whole,
    )

  def abstract_state(self) -> TrainState:
    """Shapes, types and shardings of the state."""
    return jax.tree.map(
      lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
      jax.eval_shape(self._init),
      self.state_shardings,
    )

  def fresh_state(self) -> TrainState:
    """The state before the first step, made on the devices."""
    return jax.jit(self._init, out_shardings=self.state_shardings)()


def parameter_shardings(task: Task, mesh: Mesh) -> Any:
  """Sharding of every parameter of a task's model."""
  return sharding.parameter_shardings(jax.eval_shape(task.init, jax.random.key(0)), mesh)


def sharing_of(mesh: Mesh, micro_batches: int = 1) -> Sharing:
  """How batches are laid over a mesh."""
  return Sharing(
    place=lambda batch: sharding.place_batch(batch, mesh),
    multiple=sharding.batch_multiple(mesh) * micro_batches,
  )


def set_up(experiment: Experiment, workdir: Path, *, command: str) -> Run:
  """Makes or reopens a workdir and assembles the run.

  Raises:
    UserError: the workdir belongs to another configuration, or any part is wrong.
  """
  claim(workdir, experiment, command)
  mesh = sharding.make_mesh(experiment.mesh)
  sharing = sharing_of(mesh, experiment.micro_batches)
  files = None
  if (workdir / "tokenizers").is_dir():
    files = load_model_folder(workdir / "tokenizers")[1]
  task = experiment.task.build(experiment.model, files=files, cache=cache_folder() / "tokenizers")
  if files is None:
    meta = {"holds": "tokenizers"}
    save_model_folder(workdir / "tokenizers", params={}, files=task.files(), meta=meta)
  made = [
    task.train_batches(
      part=phase.part,
      seed=experiment.seed,
      multiple=sharing.multiple,
      process=jax.process_index(),
      processes=jax.process_count(),
    )
    for phase in experiment.phases
  ]
  return Run(
    experiment=experiment,
    workdir=workdir,
    task=task,
    mesh=mesh,
    sharing=sharing,
    iterators=[iterator for iterator, _ in made],
    batches_per_epoch=[count for _, count in made],
  )


def claim(workdir: Path, experiment: Experiment, command: str) -> None:
  """Writes `config.json`, or checks that the one that is there says the same.

  Raises:
    UserError: the workdir belongs to another configuration; the message lists what differs.
  """
  path, mine = workdir / "config.json", to_json(experiment)
  if path.exists():
    theirs = read_config(workdir)["experiment"]
    lines = differences(theirs, mine)
    errors.check(
      not lines,
      f"{workdir} belongs to another configuration: {'; '.join(lines[:12])}. Continue it with its"
      " own configuration, or choose another --workdir.",
    )
    return
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    record = {"experiment": mine, "command": command, "provenance": provenance()}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)
  except OSError as error:
    raise errors.UserError(
      f"--workdir {workdir} cannot be written: {error.strerror}. Choose another folder."
    ) from error


def read_config(workdir: Path) -> dict[str, Any]:
  """What `config.json` of a workdir holds.

  Raises:
    UserError: it is missing or not readable.
  """
  path = workdir / "config.json"
  try:
    return json.loads(path.read_text())
  except OSError as error:
    raise errors.UserError(
      f"{path} cannot be read: {error.strerror}. Give the --workdir of a training run."
    ) from error
  except json.JSONDecodeError as error:
    raise errors.UserError(f"{path} is damaged: {error}.") from error


def saved_experiment(workdir: Path) -> Experiment:
  """The experiment of a workdir."""
  return from_json(Experiment, read_config(workdir)["experiment"])


def differences(old: Any, new: Any, path: str = "") -> list[str]:
  """Where two nested configurations differ, a line each: `model.heads: 4 there, 8 here`."""
  if isinstance(old, dict) and isinstance(new, dict):
    keys = [*old, *(key for key in new if key not in old)]
    return [
      line
      for key in keys
      for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    ]
  if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
    pairs = enumerate(zip(old, new, strict=True))
    return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}.{i}")]
  return [] if old == new else [f"{path}: {old!r} there, {new!r} here"]


def encode_files(files: dict[str, bytes]) -> dict[str, str]:
  """Tokenizers as text, for a checkpoint's record."""
  return {name: base64.b64encode(content).decode() for name, content in files.items()}
