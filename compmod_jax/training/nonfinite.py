"""What happens when a loss or a gradient is not finite."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from compmod_jax.core import errors, losses, sharding
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.types import Params
from compmod_jax.tasks.base import Batch, StepContext, Task
from compmod_jax.training.hooks import Hook, Training
from compmod_jax.training.log import Read
from compmod_jax.training.step import TrainState


class ReportNonFinite(Hook):
  """Keeps the batch of a bad step, and ends the program after `max_nonfinite` of them in a row."""

  def __init__(self):
    self._reported = -1

  def after_read(self, training: Training, read: Read) -> None:
    """Saves the batch where the loss or its gradient was not finite.

    Raises:
      UserError: too many steps in a row were bad; it says where the first bad number stands.
    """
    if read.metrics["bad_run"] and read.number != self._reported:
      self._reported = read.number
      _report(training, read)


def _report(training: Training, read: Read) -> None:
  step, metrics, batch = read
  run, experiment = training.run, training.run.experiment
  path = save_batch(run.workdir, step, batch, training.group.process)
  training.writer.say(
    f"step {step}: loss {metrics['objective']:g}, gradient norm {metrics['gradient_norm']:g};"
    f" step skipped, batch saved as {path}"
  )
  limit = experiment.max_nonfinite
  if metrics["bad_run"] < limit:
    return
  training.save()
  where = locate(run.task, training.state, run.place(batch), experiment.seed)
  raise errors.UserError(
    f"Training stopped at step {step}: the loss or its gradient was not finite in {limit} steps in"
    f" a row (max_nonfinite). {where} The batches are in {path.parent}; look at them. The last"
    " checkpoint holds the parameters as they were before the first bad step. To go on from there,"
    " run the same command with a lower learning rate"
    f" (--config.optimizer.learning_rate={experiment.optimizer.learning_rate / 10:g}) or with"
    " clipped gradients (--config.optimizer.clip=1); where these parameters are too large already,"
    f" remove the newest folders in {run.workdir / 'checkpoints'} first, to go on from an"
    " older one."
  )


def save_batch(workdir: Path, step: int, batch: Batch, process: int = 0) -> Path:
  """Writes a batch as `nonfinite/step-N.npz` and returns the path; other processes their parts."""
  folder = workdir / "nonfinite"
  folder.mkdir(exist_ok=True)
  path = folder / f"step-{step:08d}{f'-process-{process}' if process else ''}.npz"
  arrays: dict[str, Any] = {name: np.asarray(value) for name, value in batch.items()}
  np.savez(path, **arrays)
  return path


def locate(task: Task, state: TrainState, batch: Batch, seed: int) -> str:
  """Where the first number that is not finite stands: a parameter, a site, or a gradient."""
  if bad := _bad_leaves(state.params):
    return f"Parameter {bad[0]} is not finite."
  sites: list[str] = []

  def finite_sites(params: Params) -> list[jax.Array]:
    intermediates = Intermediates(capture=None)
    task.model.forward(params, task.dataset.flat(batch), intermediates=intermediates)
    sites[:] = intermediates.captured  # in the order in which they are computed
    return [jnp.isfinite(value).all() for value in intermediates.captured.values()]

  def objective(params: Params) -> jax.Array:
    context = StepContext(jax.random.key(seed), state.step, train=False)
    return losses.objective(task.loss(params, state.carry, batch, context)[0])

  finite = sharding.fetch(jax.jit(finite_sites)(state.params))
  if not all(finite):
    return f"The first activation that is not finite is the site {sites[finite.index(False)]}."
  if bad := _bad_leaves(jax.jit(jax.grad(objective))(state.params)):
    return f"The gradient of parameter {bad[0]} is not finite ({len(bad)} parameters in all)."
  return "With dropout off, everything is finite on this batch."


def _bad_leaves(tree: PyTree) -> list[str]:
  finite = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree))(tree)
  return [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, good in jax.tree_util.tree_leaves_with_path(sharding.fetch(finite))
    if not good
  ]
