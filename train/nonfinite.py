"""What happens when a loss or a gradient is not finite."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from compmod_jax import errors
from compmod_jax.sites import Taps
from compmod_jax.tasks.base import Context


def watch(loop: Any, last: Any) -> None:
  """Saves the batch of a bad step, and stops the run after too many of them in a row.

  Args:
    loop: the training loop.
    last: (step, metrics, batch) of the step read last, or None.

  Raises:
    UserError: `max_nonfinite` steps in a row were bad; it says where the first bad number stands.
  """
  if last is None or not last[1]["bad_run"] or last[0] == getattr(loop, "bad_step", None):
    return
  step, metrics, batch = last
  loop.bad_step = step
  path = save_batch(loop.run.workdir, step, batch)
  loop.writer.say(
    f"step {step}: loss {metrics['objective']:g}, gradient norm {metrics['gradient_norm']:g};"
    f" step skipped, batch saved as {path}"
  )
  limit = loop.experiment.max_nonfinite
  if metrics["bad_run"] < limit:
    return
  loop.save()
  where = locate(loop.run.task, loop.state, loop.run.sharing.place(batch), loop.experiment.seed)
  raise errors.UserError(
    f"Training stopped at step {step}: the loss or its gradient was not finite in {limit} steps in"
    f" a row (max_nonfinite). {where} The batches are in {path.parent}. Lower the learning rate,"
    " clip gradients (optimizer.clip), or look at the batch; the last checkpoint holds the"
    " parameters as they were before the first bad step."
  )


def save_batch(workdir: Path, step: int, batch: Any) -> Path:
  """Writes a batch as `nonfinite/step-N.npz` and returns the path."""
  folder = workdir / "nonfinite"
  folder.mkdir(exist_ok=True)
  path = folder / f"step-{step:08d}.npz"
  arrays: Any = {name: np.asarray(value) for name, value in batch.items()}
  np.savez(path, **arrays)
  return path


def locate(task: Any, state: Any, batch: Any, seed: int) -> str:
  """Where the first number that is not finite stands: a parameter, a site, or a gradient."""
  bad = _bad_leaves(state.params)
  if bad:
    return f"Parameter {bad[0]} is not finite."
  context = Context(jax.random.key(seed), state.step, train=False)

  def objective(params: Any) -> Any:
    terms, _, _ = task.loss(params, state.carry, batch, context)
    return sum(term.weight * term.value() for term in terms.values())

  taps = Taps(capture=None)
  task.forward(state.params, batch, taps=taps)
  for site, value in taps.captured.items():
    if not bool(jax.numpy.isfinite(value).all()):
      return f"The first activation that is not finite is the site {site}."
  bad = _bad_leaves(jax.grad(objective)(state.params))
  if bad:
    return f"The gradient of parameter {bad[0]} is not finite ({len(bad)} parameters in all)."
  return "With dropout off, everything is finite on this batch."


def _bad_leaves(tree: Any) -> list[str]:
  paths = jax.tree_util.tree_leaves_with_path(tree)
  return [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, leaf in paths
    if not bool(jax.numpy.isfinite(leaf).all())
  ]
