"""What a run is, in words: the log's first lines."""

import jax

from compmod_jax.tasks.base import Task
from train.run import Run


def opening_lines(run: Run) -> list[str]:
  """What the log says before the first step: model, data, batches, devices, and any warnings."""
  experiment, task = run.experiment, run.task
  shape = " x ".join(f"{size} {axis}" for axis, size in run.mesh.shape.items())
  lines = [
    f"{experiment.name}: {task.describe()} {count_parameters(task):,} parameters.",
    "objective: " + " + ".join(f"{weight:g} x {name}" for name, weight in task.objective().items()),
    f"{task.describe_batches()}; {run.batches_per_epoch[0]:,} an epoch,"
    f" {run.total_steps:,} steps in all",
    f"devices: {jax.device_count()} x {jax.devices()[0].device_kind} ({shape})",
  ]
  return [*lines, *task.data_notes(), *(f"warning: {w}" for w in experiment.model.warnings())]


def phase(run: Run, number: int) -> str:
  """What begins, where one phase follows another."""
  it = run.experiment.phases[number]
  part = "all training data" if it.part == "all" else f"the {it.part} part of the training data"
  trains = {"all": "everything trains", "routing": "the routers train"}
  return (
    f"phase {number + 1} of {len(run.experiment.phases)}, {it.name}:"
    f" {trains.get(it.trainable, 'everything but the routers trains')} on {part},"
    f" {run.batches_per_epoch[number]:,} batches an epoch, up to step {run.phase_ends[number]:,}"
  )


def count_parameters(task: Task) -> int:
  """Number of a model's parameters, from shapes alone."""
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))
