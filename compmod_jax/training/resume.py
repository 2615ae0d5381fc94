"""The checkpoints of a run: what they hold of the loop, and how the loop goes on from one."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from compmod_jax.core import errors
from compmod_jax.core.config import from_json, to_json
from compmod_jax.training import identity
from compmod_jax.training.checkpoint import Checkpointer
from compmod_jax.training.distributed.multihost import Group
from compmod_jax.training.experiment import Experiment
from compmod_jax.training.history import History
from compmod_jax.training.hooks import Hook
from compmod_jax.training.log import Held, Log
from compmod_jax.training.run import Run, encode_files
from compmod_jax.training.step import TrainState
from compmod_jax.training.writer import Writer


class Moment(NamedTuple):
  """The loop after a completed step; nothing in it changes later.

  Attributes:
    state: arrays.
    history: where the run stands.
    positions: part of the data -> position of its iterator.
    log: lines that are not written yet, and what they need.
  """

  state: TrainState
  history: History
  positions: dict[str, Any]
  log: Held


class RunCheckpoints:
  """Writes the checkpoints of a run and restores from them.

  Attributes:
    files: the tokenizers.
    checkpointer: the folder of the checkpoints; a context that has to be entered.
  """

  def __init__(self, run: Run, writer: Writer, group: Group = Group()):
    self.run, self.writer, self.group = run, writer, group
    self.checkpointer = Checkpointer(
      run.workdir / "checkpoints",
      keep_last=run.experiment.keep_last,
      asynchronous=True,
      report=writer.say,
      group=group,
    )
    self.files = run.task.dataset.files()
    hashes = json.dumps({k: hashlib.sha256(v).hexdigest() for k, v in self.files.items()})
    self.tokenizer_hash = hashlib.sha256(hashes.encode()).hexdigest()

  def save(self, moment: Moment, log: Log) -> None:
    """Starts writing a checkpoint."""
    experiment, history = self.run.experiment, moment.history
    meta = {
      "history": dataclasses.asdict(dataclasses.replace(history, log=log.saved(moment.log))),
      "iterators": [moment.positions[phase.part] for phase in experiment.phases],
      "experiment": to_json(experiment),
      "config": self.run.config,
      "tokenizers": encode_files(self.files),
      "tokenizer_hash": self.tokenizer_hash,
      "seed": experiment.seed,
    }
    self.checkpointer.save(history.step, moment.state, meta)

  def restore(self, log: Log, hooks: Iterable[Hook]) -> tuple[TrainState, History]:
    """The state and history of the newest checkpoint, or fresh ones.

    Iterators, log and hooks go to where they were, and lines of the log that will be written again
    are taken back.

    Raises:
      UserError: the checkpoint was made with another tokenizer, or as `Checkpointer.restore`.
    """
    found = self.checkpointer.read_meta()
    if found is None:
      self.writer.rewind(0, {"final": -1})
      return self.run.fresh_state(self.writer.say), History()
    step, meta = found
    errors.check(
      meta["tokenizer_hash"] == self.tokenizer_hash,
      f"The checkpoint of step {step} was made with another tokenizer"
      f" (hash {meta['tokenizer_hash'][:12]}, here {self.tokenizer_hash[:12]}); its token numbers"
      " would mean other words. Restore the tokenizers of this workdir or start in a new one.",
    )
    before = from_json(Experiment, meta["experiment"])
    state = self.run.restored(self.checkpointer, before)
    history = History(**meta["history"])
    self._restore_iterators(step, before, meta["iterators"])
    self._rewind_log(step, history, log)
    for hook in hooks:
      if hook.name in history.hooks:
        hook.restore(history.hooks[hook.name])
    if self.group.decide("best", lambda: self._leave_branch(history)):
      history.best, history.stale = None, 0
    now = self.run.experiment
    history.go_on(patience=now.patience, limit_minutes=now.time_limit_minutes)
    self.writer.say(f"continuing from the checkpoint of step {step}")
    if history.stopped:
      self.writer.say(
        f"training has ended there: {history.stopped}; a longer time_limit_minutes, or more"
        " patience, continues it"
      )
    return state, history

  def _restore_iterators(self, step: int, before: Experiment, positions: list[Any]) -> None:
    # Phases on one part share an iterator; old checkpoints hold a position of each of them.
    current = min(self.run.phase_at(step + 1)[0], len(before.phases) - 1)
    places = {phase.part: place for phase, place in zip(before.phases, positions, strict=True)}
    places[before.phases[current].part] = positions[current]
    for phase, iterator in zip(self.run.experiment.phases, self.run.iterators, strict=True):
      if phase.part in places:
        iterator.set_state(places[phase.part])

  def _rewind_log(self, step: int, history: History, log: Log) -> None:
    """Takes back the lines of the log that are going to be written again."""
    unwritten = [number for number, _ in history.log["lines"]]
    evaluated, last = history.evaluated, unwritten[0] - 1 if unwritten else step
    ends = {"eval": evaluated, "heads": evaluated, "final": -1, "train": last, "warning": last}
    self.writer.rewind(step, ends)
    log.restore(history.log)

  def _leave_branch(self, history: History) -> bool:
    return identity.leave_branch(self.run.workdir, self.run.config, history, self.writer.say)
