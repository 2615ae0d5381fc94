"""What a run is, in words: for the log's first lines and for the report."""

import jax

from compmod_jax.tasks.base import Task
from train.run import Run


def sentence(run: Run) -> str:
  """One sentence on model and data."""
  model, data = run.experiment.model, run.experiment.task.data
  places = " and ".join(place.replace("_", " ") for place in model.compete)
  heads = f"heads compete in {places} attention" if places else "plain attention"
  return (
    f"Transformer with {model.encoder_layers} + {model.decoder_layers} layers of width {model.dim}"
    f" and {model.heads} heads ({heads}), {data.source_language} to {data.target_language}."
  )


def opening_lines(run: Run) -> list[str]:
  """What the log says before the first step: model, data, batches, devices, and any warnings."""
  experiment, task = run.experiment, run.task
  batch = task.resolved_config().batch
  shape = " x ".join(f"{size} {axis}" for axis, size in run.mesh.shape.items())
  lines = [
    f"{experiment.name}: {sentence(run)} {count_parameters(task):,} parameters.",
    "objective: " + " + ".join(f"{weight:g} x {name}" for name, weight in task.objective().items()),
    f"batches of {batch.tokens} tokens padded to {', '.join(map(str, batch.buckets))};"
    f" {run.batches_per_epoch[0]:,} an epoch, {run.total_steps:,} steps in all",
    f"devices: {jax.device_count()} x {jax.devices()[0].device_kind} ({shape})",
  ]
  return [*lines, *task.data_notes(), *(f"warning: {w}" for w in experiment.model.warnings())]


def count_parameters(task: Task) -> int:
  """Number of a model's parameters, from shapes alone."""
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))
