"""What happens in training besides steps: at every step, at a bad one, and at evaluations."""

import functools
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from compmod_jax.analysis.watch import HeadWatch
from compmod_jax.checkpoints.model_folder import save_model_folder
from compmod_jax.core import sharding
from compmod_jax.core.config import to_json
from compmod_jax.core.types import JSON
from compmod_jax.tasks.base import lower_is_better
from compmod_jax.tasks.configs import ModelConfig, TaskConfig
from compmod_jax.training.distributed.multihost import Group
from compmod_jax.training.history import NO_BETTER, TIME_UP, History
from compmod_jax.training.log import Read
from compmod_jax.training.optimizer import (
  OptimizerConfig,
  lower_rate,
  optimizers,
  stands_still,
)
from compmod_jax.training.run import Run
from compmod_jax.training.step import TrainState
from compmod_jax.training.writer import Writer


class Training(Protocol):
  """What hooks see of the loop.

  Attributes:
    run: the run.
    writer: log and display.
    group: the processes that train together.
    history: where the run stands; a hook that sets `stopped` ends training.
    state: parameters, optimizer and counters after the last step.
    files: the tokenizers.
    started: when training would have begun if it had not been interrupted, by `time.monotonic`.
  """

  run: Run
  writer: Writer
  group: Group
  history: History
  state: TrainState
  files: dict[str, bytes]
  started: float

  def save(self) -> None:
    """Starts writing a checkpoint."""
    ...

  def change(self, change: Callable[[TrainState], TrainState]) -> None:
    """Replaces the state by a function of it, while no preemption can save it."""
    ...


class Hook:
  """Is called by the loop; a hook overrides what it needs.

  Attributes:
    name: under which its state is kept in checkpoints; one of a kind in a loop.
  """

  name = ""

  def after_step(self, training: Training) -> None:
    """A step was dispatched; its metrics have not been read."""

  def after_read(self, training: Training, read: Read) -> None:
    """The metrics of a step have been read."""

  def after_evaluation(self, training: Training, values: Mapping[str, Any], score: float) -> None:
    """The validation split was scored.

    Args:
      training: the loop; `history.best` is still that of earlier evaluations until `KeepModels`.
      values: of all evaluators.
      score: the one by which checkpoints are compared.
    """

  def state(self) -> JSON:
    """What checkpoints keep of it, as JSON can hold it; None for nothing."""
    return None

  def restore(self, state: JSON) -> None:
    """Goes on from what `state` gave."""


class StopAtTimeLimit(Hook):
  """Ends training after `time_limit_minutes` of wall time, evaluations included."""

  def after_step(self, training: Training) -> None:
    """Looks at the clock."""
    limit = training.run.experiment.time_limit_minutes
    if limit and time.monotonic() - training.started > limit * 60:
      training.history.stopped = TIME_UP
      training.writer.say(f"stopping: {TIME_UP} ({limit:g} minutes)")


class WriteScores(Hook):
  """Writes the scores of an evaluation to the log."""

  def after_evaluation(self, training: Training, values: Mapping[str, Any], score: float) -> None:
    """Writes a line."""
    step = training.history.step
    epoch = round(training.run.epoch(step), 4)
    training.writer.write("eval", step, {"split": "valid", "epoch": epoch, **values})


class WatchHeads(Hook):
  """Measures weights and norms of heads on a few validation sentences at every evaluation."""

  def __init__(self, watch: HeadWatch):
    self.watch = watch

  def after_evaluation(self, training: Training, values: Mapping[str, Any], score: float) -> None:
    """Writes a line, where the model has heads or anything that competes."""
    if self.watch.empty:
      return
    step = training.history.step
    epoch = round(training.run.epoch(step), 4)
    found = self.watch(training.state.weights)
    training.writer.write("heads", step, {"epoch": epoch, **found})


class LowerRateOnPlateau(Hook):
  """Divides the learning rate after an evaluation that is hardly better than the best before it."""

  def after_evaluation(self, training: Training, values: Mapping[str, Any], score: float) -> None:
    """Compares with the best of earlier evaluations."""
    experiment, best, sign = training.run.experiment, training.history.best, _sign(training)
    configs: dict[str | None, OptimizerConfig] = {None: experiment.optimizer}
    if experiment.groups:
      configs = {**optimizers(experiment.optimizer, experiment.groups)}
    before = None if best is None else sign * best
    for group, config in configs.items():
      if stands_still(config, sign * score, before):
        training.change(functools.partial(_lower, group, config.plateau_divisor))


def _lower(group: str | None, divisor: float, state: TrainState) -> TrainState:
  return state.replace(opt_state=lower_rate(state.opt_state, divisor, group))


class KeepModels(Hook):
  """Writes the evaluated model, and where it is the best so far, or the last counts, as `best`."""

  def after_evaluation(self, training: Training, values: Mapping[str, Any], score: float) -> None:
    """Updates `history.best`, and the folders in `models`."""
    history, models = training.history, training.run.workdir / "models"
    sign, last = _sign(training), training.run.experiment.model_selection == "last"
    best = history.best
    better = best is None or sign * score > sign * best
    if best is not None and math.isnan(best):
      better = not math.isnan(score)  # though no number compares as better
    if last or better:
      history.best, history.best_step, history.stale = score, history.step, 0
      self._save(training, models / "best", score)
    else:
      history.stale += 1
    keep = training.run.experiment.keep_models
    if keep:
      self._save(training, models / f"step-{history.step:08d}", score)
      if training.group.primary:
        for folder in sorted(models.glob("step-*"))[:-keep]:
          shutil.rmtree(folder)

  def _save(self, training: Training, folder: Path, score: float) -> None:
    run = training.run
    meta = {
      "task": to_json(run.task.dataset.resolved_config(), TaskConfig),
      "model": to_json(run.experiment.model, ModelConfig),
      "name": run.experiment.name,
      "step": training.history.step,
      "metric": run.task.metric,
      "score": score,
    }
    params = jax.tree.map(np.asarray, sharding.fetch(training.state.weights))
    if training.group.primary:
      save_model_folder(folder, params=params, files=training.files, meta=meta)


class StopWithoutProgress(Hook):
  """Ends training after `patience` evaluations without a better score; after `KeepModels`."""

  def after_evaluation(self, training: Training, values: Mapping[str, Any], score: float) -> None:
    """Counts evaluations since the best."""
    history, patience = training.history, training.run.experiment.patience
    if patience and history.stale >= patience:
      history.stopped = f"{NO_BETTER} {training.run.task.metric} in {history.stale} evaluations"
      training.writer.say(f"stopping: {history.stopped}")


def _sign(training: Training) -> int:
  """-1 where a smaller score is the better one."""
  return -1 if lower_is_better(training.run.task.metric) else 1
