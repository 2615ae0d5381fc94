"""A run's parts, assembled: task, mesh, optimizer, state and the folder they live in."""

import base64
import bisect
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import PyTree

from compmod_jax.core import errors, sharding
from compmod_jax.core.disk_cache import cache_folder
from compmod_jax.core.types import Params
from compmod_jax.data.pipeline import filler
from compmod_jax.data.qa.batches import BLOCK, blocks_of
from compmod_jax.tasks.base import Batch, Sharing, Task, TrainIterator, lower_is_better
from compmod_jax.training import compile_cache, identity
from compmod_jax.training.checkpoint import Checkpointer
from compmod_jax.training.experiment import Experiment
from compmod_jax.training.memory import check_fits
from compmod_jax.training.optimizer import (
  carried_over,
  carried_over_groups,
  check_groups,
  groups,
  learning_rate,
  like_parameters,
  make_optimizer,
  optimizers,
  parts,
)
from compmod_jax.training.step import TrainState, init_state, make_step, trainable_mask
from compmod_jax.training.warm_start import Start
from compmod_jax.training.workdir import make_folder


def use_compile_cache() -> None:
  """Turns on JAX's persistent compilation cache for programs of any size."""
  compile_cache.use(cache_folder() / "xla")


@dataclasses.dataclass
class Run:
  """What a training program works with.

  Attributes:
    experiment: the resolved configuration.
    workdir: where results go.
    task: the task, tokenizers trained.
    mesh: the devices.
    sharing: how batches are laid over the devices.
    part: which of how many parts of every training batch this process reads.
    iterators: training batches of each phase; phases on the same part of the data share one, so
      that a later phase goes on where an earlier one stopped.
    batches_per_epoch: of each phase.
    notes: what the user may want to know, a sentence each.
    past: step at which each phase ended that is over.
    config: what `config.json` of the workdir holds.
  """

  experiment: Experiment
  workdir: Path
  task: Task
  mesh: Mesh
  sharing: Sharing
  iterators: list[TrainIterator]
  batches_per_epoch: list[int]
  notes: list[str]
  part: tuple[int, int] = (0, 1)
  past: list[int] = dataclasses.field(default_factory=list)
  config: dict[str, Any] = dataclasses.field(default_factory=dict)

  def place(self, batch: Batch) -> Batch:
    """Puts a training batch on the devices, of which this process has read its part."""
    return _place(batch, self.mesh, self.experiment.micro_batches, self.part)

  @functools.cached_property
  def phase_ends(self) -> list[int]:
    """Step at which each phase ends."""
    return identity.ends_of(self.experiment.phases, self.batches_per_epoch, self.past)

  @property
  def total_steps(self) -> int:
    """Updates of all phases together."""
    return self.phase_ends[-1]

  def phase_at(self, step: int) -> tuple[int, int]:
    """Number of the phase to which a step (from 1) belongs, and its number within the phase."""
    number = min(bisect.bisect_left(self.phase_ends, step), len(self.phase_ends) - 1)
    return number, step - (self.phase_ends[number - 1] if number else 0)

  def epoch(self, step: int) -> float:
    """Epochs done after a step, those of all phases added up, each of its part of the data."""
    number, within = self.phase_at(step)
    ends = [0, *self.phase_ends]
    before = sum(
      (ends[i + 1] - ends[i]) / batches for i, batches in enumerate(self.batches_per_epoch[:number])
    )
    return before + within / self.batches_per_epoch[number]

  def ends_epoch(self, step: int) -> bool:
    """Whether an epoch or a phase ends with a step."""
    number, within = self.phase_at(step)
    return within % self.batches_per_epoch[number] == 0 or step == self.phase_ends[number]

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformation:
    """The optimizer, its schedule spanning all phases."""
    return self._optimizer_of(self.experiment)

  def _optimizer_of(self, given: Experiment) -> optax.GradientTransformation:
    """The optimizer of an experiment with the phases of this one."""
    grouped = any(phase.trainable != "all" for phase in self.experiment.phases)
    return make_optimizer(given.optimizer, self.total_steps, grouped=grouped, own=given.groups)

  @functools.cached_property
  def rate(self) -> Callable[[ArrayLike], jax.Array]:
    """Learning rate as a function of the number of updates."""
    return learning_rate(self.experiment.optimizer, self.total_steps)

  @functools.cached_property
  def group_rates(self) -> dict[str, Callable[[ArrayLike], jax.Array]]:
    """The same of every group that has parameters, where there are groups."""
    own = self.experiment.groups
    if not own:
      return {}
    there = {*jax.tree.leaves(groups(self._shapes.params, own))}
    each = optimizers(self.experiment.optimizer, own)
    return {name: learning_rate(c, self.total_steps) for name, c in each.items() if name in there}

  @functools.cached_property
  def key(self) -> jax.Array:
    """Random key of parameters and steps: an argument, so that all seeds share their programs."""
    replicated = sharding.replicated(self.mesh)
    return jax.jit(jax.random.wrap_key_data, out_shardings=replicated)(self._key_data())

  def _key_data(self) -> np.ndarray:
    return np.asarray(jax.random.key_data(jax.random.key(self.experiment.seed)))

  def _init(self, key_data: jax.Array) -> TrainState:
    # Of a key without a mesh, for which `shapes` has traced it.
    return self._start(nn.unbox(self.task.init(jax.random.wrap_key_data(key_data))))

  def _start(self, params: Params) -> TrainState:
    carry = self.task.model.init_carry()
    return init_state(params, carry, self.optimizer, self.experiment.ema)

  @functools.cached_property
  def _shapes(self) -> TrainState:
    return jax.eval_shape(self._start, nn.unbox(self.task.shapes))

  @functools.cached_property
  def state_shardings(self) -> TrainState:
    """Sharding of every array of the state: moments as updates, the average as parameters."""
    whole: Any = sharding.replicated(self.mesh)
    params = parameter_shardings(self.task, self.mesh)
    shapes, updates = self._shapes, self.update_shardings
    moments = like_parameters(self.optimizer, shapes.opt_state, updates, lambda _: whole)
    return TrainState(
      step=whole,
      params=params,
      opt_state=moments,
      ema=params if self.experiment.ema else (),
      carry=jax.tree.map(lambda _: sharding.batch_sharding(self.mesh), shapes.carry),
      skipped=whole,
      bad_run=whole,
    )

  @functools.cached_property
  def update_shardings(self) -> Params:
    """Sharding of the update of every parameter."""
    return update_shardings(self.task, self.mesh, self.experiment)

  def abstract_state(self) -> TrainState:
    """Shapes, types and shardings of the state."""
    return jax.tree.map(
      lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
      self._shapes,
      self.state_shardings,
    )

  def restored(self, checkpoints: Checkpointer, before: Experiment) -> TrainState:
    """The state of the newest checkpoint, which a run of the experiment `before` wrote."""
    wanted, now = self.abstract_state(), self.experiment
    if _parts(before) == _parts(now):
      return _newest(checkpoints, wanted)
    shapes = jax.eval_shape(self._optimizer_of(before).init, wanted.params)
    old = _carried(wanted.opt_state, now, before, shapes)
    state = _newest(checkpoints, wanted.replace(opt_state=old))
    opt_state = _carried(state.opt_state, before, now, wanted.opt_state)
    return jax.device_put(state.replace(opt_state=opt_state), self.state_shardings)

  def jitted_step(self, trainable: str) -> jax.stages.Wrapped:
    """The step in which these parameters train, jitted; it overwrites the state it is given."""
    step = make_step(
      self.task,
      self.optimizer,
      self.rate,
      micro_batches=self.experiment.micro_batches,
      ema=self.experiment.ema,
      mask=trainable_mask(self._shapes.params, trainable, self.experiment.groups),
      total_steps=self.total_steps,
      group_rates=self.group_rates,
      products=self.experiment.products,
      update_shardings=self.update_shardings if self.experiment.shard_optimizer else None,
    )
    # Every process reads the metrics, without having to ask the others.
    places = self.state_shardings, sharding.replicated(self.mesh)
    return jax.jit(
      step, donate_argnums=0, out_shardings=places, compiler_options=self._compiler_options
    )

  @property
  def _compiler_options(self) -> dict[str, Any]:
    """On TPUs, parts of gradients are summed products, not made in loops that pass operands on."""
    if not self.experiment.shard_optimizer or self.mesh.devices.flat[0].platform != "tpu":
      return {}
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1 << 30}

  def fresh_state(self, say: Callable[[str], None] = lambda _: None) -> TrainState:
    """The state before the first step, made on the devices.

    Args:
      say: is called with what started from a trained model, if anything did.
    """
    init = jax.jit(self._init, out_shardings=self.state_shardings)
    state: TrainState = init(self._key_data())
    if not self.experiment.start:
      return state
    start = Start(Path(self.experiment.start))
    fresh = sharding.fetch(state.params)
    params, note = start.merged(fresh, self.experiment.model)
    say(note)
    params = jax.device_put(params, self.state_shardings.params)
    average = jax.tree.map(jnp.array, params) if self.experiment.ema else ()
    return state.replace(params=params, ema=average)


def _newest(checkpoints: Checkpointer, wanted: TrainState) -> TrainState:
  """The newest checkpoint's state; there is one."""
  found = checkpoints.restore(wanted)
  assert found is not None
  return found[0]


def _parts(experiment: Experiment) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
  """What the state of an experiment's optimizer consists of."""
  config = experiment.optimizer
  return parts(config), [parts(one) for one in optimizers(config, experiment.groups).values()]


def _carried(state: PyTree, old: Experiment, new: Experiment, fresh: PyTree) -> PyTree:
  """The state of an experiment's optimizer as that of another's; see `carried_over`."""
  if not new.groups:
    return carried_over(state, old.optimizer, new.optimizer, fresh)
  both = (old.optimizer, old.groups), (new.optimizer, new.groups)
  return carried_over_groups(state, *both, fresh)


def moment_count(experiment: Experiment) -> int:
  """Arrays of every parameter's size that the optimizer keeps at least."""
  return min(
    int(one.momentum > 0) if one.name == "sgd" else 2
    for one in optimizers(experiment.optimizer, experiment.groups).values()
  )


def parameter_shardings(task: Task, mesh: Mesh) -> Params:
  """Sharding of every parameter of a task's model."""
  return sharding.parameter_shardings(task.shapes, mesh)


def update_shardings(task: Task, mesh: Mesh, experiment: Experiment) -> Params:
  """Sharding of the update of every parameter of a task's model, and of the moments it needs."""
  places = parameter_shardings(task, mesh)
  if not experiment.shard_optimizer:
    return places
  return sharding.divided_over("data", places, nn.unbox(task.shapes))


def sharing_of(mesh: Mesh, micro_batches: int = 1) -> Sharing:
  """How batches are laid over a mesh; rows that it cannot share evenly get filler rows."""
  return Sharing(
    place=lambda batch: _place(batch, mesh, micro_batches),
    multiple=sharding.batch_multiple(mesh) * micro_batches,
  )


def _place(batch: Batch, mesh: Mesh, micro_batches: int, part: tuple[int, int] = (0, 1)) -> Batch:
  multiple = sharding.batch_multiple(mesh) * micro_batches
  return sharding.place_batch(fill_up(batch, multiple // part[1]), mesh, part)


def fill_up(batch: Mapping[str, np.ndarray], multiple: int) -> dict[str, np.ndarray]:
  """A batch with a multiple of so many rows, of each block where its rows lie in blocks.

  The rows added are filler (zeros, index -1).
  """
  # Filler at the end of the batch alone would move rows into the blocks of other tasks.
  edges = np.cumsum([rows for _, rows in blocks_of(batch)])[:-1]
  filled = {}
  for name, value in batch.items():
    parts = []
    for part in [value] if name.startswith(BLOCK) else np.split(value, edges):
      parts.append(part)
      if more := -len(part) % multiple:
        filling = filler(name)
        parts.append(np.full((more, *part.shape[1:]), filling, part.dtype))
    filled[name] = np.concatenate(parts) if len(parts) > 1 else parts[0]
  return filled


def set_up(experiment: Experiment, workdir: Path, *, command: str) -> Run:
  """Makes or reopens a workdir and assembles the run.

  A workdir gets its configuration only once everything fits, so that a mistake can be mended.

  Raises:
    UserError: the workdir belongs to another configuration, or any part is wrong.
  """
  make_folder(workdir)
  held = identity.open_workdir(workdir)
  changed = identity.compare(held, experiment)
  mesh = sharding.make_mesh(experiment.mesh)
  sharing = sharing_of(mesh, experiment.micro_batches)
  # Batches stay what they were, whatever the devices: the same sentences, in the same order.
  multiple = held.config.get("batch_multiple", sharing.multiple)
  files = None
  if held.config:
    files = held.tokenizers()
  elif experiment.start:
    files = Start(Path(experiment.start)).files()
  read = sharding.part_of(mesh)
  if multiple % sharing.multiple:
    read = 0, 1  # filler rows go below all others, so that a process has to know how many there are
  task = experiment.task.build(experiment.model, files=files, cache=cache_folder() / "tokenizers")
  errors.check(
    experiment.evaluate_sentences > 0
    or task.generator.decode is None
    or lower_is_better(task.metric),
    f"evaluate_sentences is {experiment.evaluate_sentences}, but checkpoints are compared by"
    f" {task.metric}, a score of outputs. Give at least 1.",
  )
  shapes = nn.unbox(task.shapes)
  check_fits(
    shapes,
    (parameter_shardings(task, mesh), 2 + (experiment.ema > 0)),
    (update_shardings(task, mesh, experiment), moment_count(experiment)),
  )
  check_groups(shapes, experiment.groups)
  for phase in experiment.phases:
    trainable_mask(shapes, phase.trainable, experiment.groups)  # raises where nothing would train
  made = {
    part: task.dataset.train_batches(
      part=part,
      seed=experiment.seed,
      multiple=multiple,
      process=read[0],
      processes=read[1],
    )
    for part in dict.fromkeys(phase.part for phase in experiment.phases)
  }
  for leaf in jax.tree.leaves(jax.eval_shape(task.model.init_carry)):
    errors.check(
      leaf.shape[0] % sharing.multiple == 0,
      f"The model keeps states for {leaf.shape[0]} rows of text, but devices and micro-batches need"
      f" a multiple of {sharing.multiple}. Choose other micro_batches or another mesh.",
    )
  task.dataset.check()
  data, batches = task.dataset.fingerprints(), [made[phase.part][1] for phase in experiment.phases]
  changed += identity.compare_data(held, data, experiment.accept_data)
  lines, past = identity.compare_phases(held, experiment.phases, batches)
  changed += lines
  ends = identity.ends_of(experiment.phases, batches, past)
  identity.check_selection(held, experiment, ends[-1])
  config = identity.settle(
    held, experiment, changed, data=data, ends=ends, multiple=multiple, command=command
  )
  identity.keep_tokenizers(workdir, task.dataset.files())
  return Run(
    experiment=experiment,
    workdir=workdir,
    task=task,
    mesh=mesh,
    sharing=sharing,
    part=read,
    iterators=[made[phase.part][0] for phase in experiment.phases],
    batches_per_epoch=batches,
    notes=identity.notes_on(held, experiment, changed, ends),
    past=past,
    config=config,
  )


def encode_files(files: dict[str, bytes]) -> dict[str, str]:
  """Tokenizers as text, for a checkpoint's record."""
  return {name: base64.b64encode(content).decode() for name, content in files.items()}
